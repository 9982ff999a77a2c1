"""Messy files: the draft of each, filled in by its TODOs alone, ends in a measured comparison."""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from privtune.tasks import draft
from tests.cli.conftest import Cli, cli  # noqa: F401  (a fixture)

EPSILON = 2.0


@dataclass(frozen=True, kw_only=True)
class Known:
    """What somebody knows of a table without its records.

    Args:
        records: How many there are about; persons, where a person has several rows.
        columns: Of each feature what it can be, as YAML; None of names and numbers of people.
        classes: All labels; None of a number.
        rarest: The published share of the rarest label.
        target_range: The least and the most that a number can be.
        person: The column that says whose a row is, where a person has several; else empty.
        most: At most how many rows of a person count.
        notation: Lines of the draft whose # is taken off, by field, as they are then written.
    """

    records: int
    columns: Mapping[str, str | None]
    classes: str | None = None
    rarest: float | None = None
    target_range: str = ""
    person: str = ""
    most: int = 1
    notation: Mapping[str, str] = field(default_factory=dict)


def fill(text: str, known: Known) -> str:
    """Return a draft with everything written, by what its comments say: their numbers are read from them."""
    shares = re.search(
        r"about\s+# (\d+)% for training, (\d+)% for validation .*, and (\d+)%", text, re.DOTALL
    )
    assert shares, "the draft says how the records are split"
    sizes = {
        name: round(known.records * int(share) / 100)
        for name, share in zip(("train", "validation", "test"), shares.groups(), strict=True)
    }
    assert "delta, at most\n# 0.1 / (number of records)" in text
    assert "epochs: auto\nexpected_batch_size: auto\n" in text
    lines = [fill_line(line, known, sizes) for line in text.splitlines()]
    kept = [line for line in lines if line is not None]
    return "\n".join([*kept, "seed: 1"]) + "\n"  # without a seed the test could fail by chance


def fill_line(line: str, known: Known, sizes: Mapping[str, int]) -> str | None:
    """Return a line of a draft with what is known in it; None where the draft says to delete it."""
    for column, declared in known.columns.items():
        for name in (column, json.dumps(column, ensure_ascii=False)):
            if line.startswith(f"    {name}: "):
                return None if declared is None else f"    {name}: {declared}"
    name = line.removeprefix("  # ").strip().partition(":")[0]
    of_person = {"group": known.person, "max_per_group": known.most, "unit": "person"}
    if line.startswith("  # ") and name in of_person:
        return f"  {name}: {json.dumps(of_person[name])}" if known.person else None
    if line.startswith("  # ") and name in known.notation:
        return f"  {name}: {known.notation[name]}"
    if line.lstrip().startswith("#"):
        return line
    if name in ("classes", "target_range"):
        if known.classes is None:
            return f"  target_range: {known.target_range}"
        return f"  classes: {known.classes}"
    if name == "rarest_share":
        return None if known.rarest is None else f"  rarest_share: {known.rarest}"
    if name in sizes:
        return f"  {name}: {sizes[name]}"
    if name == "expected_batch_size":
        return f"expected_batch_size: {sizes['train'] // 16}"
    if name == "budget":
        delta = 10.0 ** math.floor(math.log10(0.1 / known.records))
        unit = "person" if known.person else "record"
        values = {"epsilon": EPSILON, "delta": delta, "unit": unit}
        for field_name, value in values.items():
            line = line.replace(f"{field_name}: TODO", f"{field_name}: {value}")
    return line


def written(rows: Mapping[str, Any], path: Path, *, encoding: str = "utf-8", **form: Any) -> None:
    """Write columns as a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, **form)
    writer.writerow(rows)
    writer.writerows(zip(*rows.values(), strict=True))
    path.write_text(text.getvalue(), encoding=encoding)


def with_gaps(values: list[str], rng: np.random.Generator, gap: str) -> list[str]:
    return [gap if rng.random() < 0.05 else value for value in values]


def claims(folder: Path) -> tuple[Path, str, dict[str, str], Known]:
    """One in twenty is positive; quoted headers, a target with a blank, cp1252, gaps, mixed types."""
    rng = np.random.default_rng(1)
    n = 6000
    label = rng.random(n) < 0.05
    age = np.clip(rng.normal(45 + 20 * label, 12), 18, 99).round()
    cost = np.clip(rng.exponential(2000 + 9000 * label), 0, 30000)
    town = [["Zürich", "Genève"][i] for i in rng.integers(0, 2, n)]
    rows = {
        "Age, years": with_gaps([f"{a:.0f}" for a in age], rng, "unknown"),
        "cost (CHF)": with_gaps([f"{c:.2f}" for c in cost], rng, ""),
        "town": town,
        "full name": [f"No {i}" for i in range(n)],
        "fraud found": ["yes" if each else "no" for each in label],
    }
    path = folder / "claims 2024.csv"
    written(rows, path, encoding="cp1252", quoting=csv.QUOTE_ALL)
    columns = {
        "Age, years": "[18, 100]",
        "cost (CHF)": "[0, 30000]",
        "town": '{categories: ["Zürich", "Genève"]}',
        "full name": None,
    }
    known = Known(
        records=n,
        columns=columns,
        classes='["no", "yes"]',
        rarest=0.05,
        notation={"na_values": '["unknown"]'},
    )
    return path, "fraud found", {"encoding": "cp1252"}, known


def visits(folder: Path) -> tuple[Path, str, dict[str, str], Known]:
    """Several rows of a person; German dates; words in a column of numbers; semicolons."""
    rng = np.random.default_rng(2)
    persons = 3000
    who = np.repeat(np.arange(persons), rng.integers(1, 4, persons))
    frail = rng.random(persons)[who]
    first = datetime.date(2015, 1, 1)
    days = [first + datetime.timedelta(days=int(d)) for d in rng.integers(0, 3000, len(who))]
    stays = rng.random(len(who)) < 0.15 + 0.7 * frail
    score = [f"{f:.2f}".replace(".", ",") for f in frail]
    rows = {
        "patient": [f"P{w}" for w in who],
        "seen": [day.strftime("%d.%m.%Y") for day in days],
        "frailty": [s if rng.random() > 0.03 else "n/a?" for s in score],
        "ward": rng.choice(["A", "B", "C"], len(who)).tolist(),
        "stays": ["ja" if each else "nein" for each in stays],
    }
    path = folder / "visits.csv"
    written(rows, path, delimiter=";")
    columns = {
        "patient": None,
        "seen": '{date: [2015-01-01, 2024-01-01], format: "%d.%m.%Y"}',
        "frailty": "[0, 1]",
        "ward": "{categories: [A, B, C]}",
    }
    known = Known(
        records=persons,
        columns=columns,
        classes='["nein", "ja"]',
        person="patient",
        most=3,
        notation={"decimal": '","'},
    )
    return path, "stays", {}, known


def rents(folder: Path) -> tuple[Path, str, dict[str, str], Known]:
    """A number is predicted, from a file of text that says no types."""
    rng = np.random.default_rng(3)
    n = 4000
    size = rng.uniform(20, 150, n)
    rent = np.clip(8 * size + rng.normal(200, 100, n), 0, 2500)
    rows = {
        "size": [f"{s:.1f}" for s in size],
        "on": rng.choice(["north", "south"], n).tolist(),
        "rent": [f"{r:.0f}" for r in rent],
    }
    path = folder / "rents.csv"
    written(rows, path)
    columns = {"size": "[10, 200]", "on": "{categories: [north, south]}"}
    return path, "rent", {}, Known(records=n, columns=columns, target_range="[0, 3000]")


def loans(folder: Path) -> tuple[Path, str, dict[str, str], Known]:
    """Parquet with types: a target that is true or false, rare and in few records; dates; gaps."""
    rng = np.random.default_rng(4)
    n = 2500
    bad = rng.random(n) < 0.08
    first = datetime.date(2010, 1, 1)
    income = rng.normal(50 - 25 * bad, 15)
    table = pa.table(
        {
            "income": pa.array([None if rng.random() < 0.1 else float(i) for i in income]),
            "since": [first + datetime.timedelta(days=int(d)) for d in rng.integers(0, 3000, n)],
            "purpose": rng.choice(["car", "house"], n),
            "defaulted": bad,
        }
    )
    path = folder / "loans.parquet"
    parquet.write_table(table, path)
    columns = {
        "income": "[0, 120]",
        "since": "{date: [2010-01-01, 2020-01-01]}",
        "purpose": "{categories: [car, house]}",
    }
    known = Known(records=n, columns=columns, classes="[false, true]", rarest=0.08)
    return path, "defaulted", {}, known


def prices(folder: Path) -> tuple[Path, str, dict[str, str], Known]:
    """Parquet with types: a number is predicted, from one of many names that YAML would misread."""
    rng = np.random.default_rng(5)
    n = 3000
    no = rng.uniform(0, 10, n)
    table = pa.table(
        {"no": no, "y: z": rng.integers(0, 5, n), "price €": 3 * no + rng.normal(0, 1, n)}
    )
    path = folder / "prices.parquet"
    parquet.write_table(table, path)
    known = Known(records=n, columns={"no": "[0, 10]", "y: z": "[0, 4]"}, target_range="[0, 40]")
    return path, "price €", {}, known


@pytest.mark.slow
@pytest.mark.parametrize("make", [claims, visits, rents, loans, prices])
def test_a_filled_draft_ends_in_a_measured_comparison(
    make: Callable[[Path], tuple[Path, str, dict[str, str], Known]],
    tmp_path: Path,
    cli: Cli,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path, target, form, known = make(tmp_path)
    options = [f"--{name}={value}" for name, value in form.items()]
    first = cli("study", "draft", path.name, "--target", target, "--to", "s.yaml", *options)
    assert first.code == 0, first.err
    text = Path("s.yaml").read_text("utf-8")
    assert text == draft(path.name, target=target, spec="s.yaml", **form)
    Path("s.yaml").write_text(fill(text, known), "utf-8")
    name = re.search(r"^name: (.*)$", text, re.MULTILINE).group(1)  # type: ignore[union-attr]
    for words in (("create", "s.yaml"), ("run", name, "--no-mlflow")):
        done = cli("study", *words)
        assert done.code == 0, done.err
    compared = json.loads(cli("study", "compare", name, "--json").out)
    assert len(compared["arms"]) == 3
    for arm in compared["arms"]:
        (score,) = (v for name, v in arm["estimates"].items() if name.startswith("test_"))
        most = (
            1.0 if known.target_range == "" else float(known.target_range.strip("[]").split(",")[1])
        )
        assert 0.0 <= score["low"] < score["high"] <= most
        assert score["high"] - score["low"] < 0.5 * most, arm["arm"]
    assert compared["budget"]["charged"] <= EPSILON
