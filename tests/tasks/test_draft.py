"""Drafts: a spec from a header, refused until what must be declared is written, and right once it is."""

from __future__ import annotations

import datetime
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from privtune.errors import PrivTuneError
from privtune.study import SpecError, Study, StudySpec
from privtune.tasks import TaskDataError, draft
from tests.cli.conftest import Cli, cli  # noqa: F401  (a fixture)

SECRETS = ["4711.5", "Atlantis", "1987-12-31", "maybe"]


def people(count: int) -> pa.Table:
    rng = np.random.default_rng(0)
    days = [datetime.date(2015, 1, 1) + datetime.timedelta(days=int(d)) for d in range(count)]
    return pa.table(
        {
            "age": rng.uniform(20, 90, count),
            "no": rng.choice(["Bern", "Genf"], count),
            "seen": days,
            "smokes": rng.integers(0, 2, count) == 1,
            "left": rng.choice(["no", "yes"], count),
        }
    )


def filled(text: str) -> dict[str, Any]:
    """Return a draft of people with everything written that it leaves open."""
    spec: dict[str, Any] = yaml.safe_load(text)
    del spec["task"]["rarest_share"]  # which nobody knows
    spec["task"] |= {"train": 320, "validation": 40, "test": 40, "classes": ["no", "yes"]}
    spec["task"]["columns"] |= {
        "age": [18, 100],
        "no": {"categories": ["Bern", "Genf"]},
        "seen": {"date": ["2010-01-01", "2030-01-01"]},
    }
    if spec["task"]["columns"]["smokes"] == "TODO":
        spec["task"]["columns"]["smokes"] = {"categories": [False, True]}
    spec["budget"] |= {"epsilon": 4.0, "delta": 1e-5, "unit": "record"}
    return {**spec, "epochs": 1, "arms": spec["arms"][:1], "space": {}, "expected_batch_size": 32}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_draft_is_refused_until_it_is_filled_and_then_runs(tmp_path: Path, kind: str) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    frame, path = people(400), tmp_path / f"my people.{kind}"
    if kind == "csv":
        frame.to_pandas().to_csv(path, index=False)
    else:
        parquet.write_table(frame, path)
    text = draft(path, target="left")
    (tmp_path / "draft.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        StudySpec.from_file(tmp_path / "draft.yaml")
    said = str(caught.value)
    names = [*("classes", "train", "validation", "test", "columns.age", "columns.no")]
    assert all(f"task.{name}" in said for name in names)
    assert "budget.epsilon, budget.delta, budget.unit open" in said
    question = (
        "can one person (or household, or firm: whoever is to be protected) have several rows?"
    )
    assert question in text
    arms = [arm["strategy"] for arm in yaml.safe_load(text)["arms"]]
    assert arms == ["auto", "hyfreedp", "papernot-steinke"]
    assert ("columns.smokes" in said) == (kind == "csv")  # the type says all
    assert "\n" not in said
    with closing(Study.create(StudySpec.parse(filled(text)), storage)) as study:
        assert [release.arm for release in study.run()] == ["auto"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_draft_says_nothing_of_a_record(tmp_path: Path, kind: str) -> None:
    """The same for a file without records, and for any."""
    path = tmp_path / f"p.{kind}"
    texts = set()
    for count in (0, 1, 3):
        days = [datetime.date(1987, 12, 31)] * count
        columns = {
            "age": pa.array([4711.5] * count, pa.float64()),
            "seen": pa.array(days, pa.date32()),
        }
        for name, value in (("town", "Atlantis"), ("left", "maybe")):
            columns[name] = pa.array([value] * count, pa.string())
        frame = pa.table(columns)
        if kind == "parquet":
            parquet.write_table(frame, path)
        elif kind == "csv":
            frame.to_pandas().to_csv(path, index=False)
        else:
            frame.to_pandas().to_json(path, orient="records", lines=True)
        texts.add(draft(path, target="left"))
    (text,) = texts
    assert not any(secret in text for secret in SECRETS)
    columns = yaml.safe_load(text)["task"]["columns"]
    typed = {
        "age": ["TODO", "TODO"],
        "seen": {"date": ["TODO", "TODO"]},
        "town": {"categories": ["TODO"]},
    }
    known = {"csv": dict.fromkeys(typed, "TODO"), "jsonl": {"COLUMN": "TODO"}, "parquet": typed}
    assert columns == known[kind]


def test_a_draft_keeps_how_a_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "größe.csv"
    path.write_bytes("größe:y:left\n1:2:no\n".encode("latin-1"))
    text = draft(path, target="left", delimiter=":", encoding="latin-1")
    spec = yaml.safe_load(text)
    assert spec["task"]["columns"] == {"größe": "TODO", "y": "TODO"}
    assert (spec["task"]["delimiter"], spec["task"]["encoding"]) == (":", "latin-1")
    assert spec["name"] == spec["budget"]["name"] == "gr-e"
    with pytest.raises(TaskDataError, match="lacks the declared columns gone"):
        draft(path, target="gone", delimiter=":")


def test_the_command_writes_no_file_over_another(
    tmp_path: Path,
    cli: Cli,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text("age,left\n34,no\n")
    first = cli("study", "draft", "people.csv", "--target", "left")
    assert (first.code, first.out.split(".")[0]) == (0, "Wrote people")
    assert Path("people.yaml").read_text() == draft("people.csv", target="left")
    again = cli("study", "draft", "people.csv", "--target", "left")
    assert again.code == 1
    assert "must be a file that is not there yet" in again.err
    refused = cli("study", "plan", "people.yaml")
    assert refused.code == 1
    assert "leaves task.classes, task.rarest_share, task.columns.age" in " ".join(
        refused.err.split()
    )
    assert issubclass(SpecError, PrivTuneError)
