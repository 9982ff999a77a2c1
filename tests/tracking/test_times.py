"""Nothing that a study publishes tells how many runs a sealed round took.

Everything public of twenty studies is read as numbers, and each number, and its distance from the study
before, is held against K by Spearman's rank correlation: an error rate of 0.001 over all (Bonferroni).
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from privtune.ledger import Ledger, render_certificate
from privtune.ledger import certificate as certificate_module
from privtune.ledger import log as log_module
from privtune.ledger.rounds import Rounds
from privtune.strategies import TrialResult
from privtune.study import Study, arm_rounds
from privtune.study import run as running
from privtune.tracking.mlflow import MlflowObserver
from privtune.views import record
from privtune.views.report import render_study
from tests.study.conftest import toy_spec
from tests.tiers import FULL

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

STUDIES, ERROR = 60 if FULL else 20, 1e-3
FIXED: dict[str, Any] = {
    "strategy": "fixed",
    "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
}
ARMS = [
    {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 10},
    {"name": "after", **FIXED},
]

Numbers = dict[str, list[float]]


class Clocks:
    """The clocks of this program, begun five minutes after midnight: a training takes 37 seconds.

    What else the program does takes its own time. Files are stamped by the machine's clock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = time.time
        self.ahead = 300.0 - real() % 86_400

        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime.fromtimestamp(time.time(), tz)

        monkeypatch.setattr(time, "time", lambda: real() + self.ahead)
        for module in (certificate_module, log_module):
            monkeypatch.setattr(module, "datetime", Clock)

    def train(self, work: Any, *, trials: Mapping[int, Any], **_: Any) -> list[TrialResult]:
        """Train nothing; every candidate is as good as the others."""
        self.ahead += 37.0 * len(trials)
        return [
            TrialResult(index=n, params=dict(params), weights=torch.full((83,), 0.5), score=0.5)
            for n, params in trials.items()
        ]


def times_in(text: str) -> list[float]:
    """Everything in a text that can be read as a point in time."""
    found = re.findall(r"20\d\d-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?", text)
    return [datetime.fromisoformat(one).replace(tzinfo=UTC).timestamp() for one in found]


def leaves(document: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON document, by its place."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield from leaves(value, f"{path}/{number}")
    elif isinstance(document, int | float):
        yield path, float(document)


class Reader:
    """Reads what a study has added to what can be seen, as numbers by where they stand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: dict[str, int] = {}
        self._files: set[Path] = set()

    def added(self) -> Numbers:
        """Return what is new since the last call."""
        found: Numbers = defaultdict(list)
        with closing(sqlite3.connect(self.folder / "mlflow.db")) as database:
            database.row_factory = sqlite3.Row
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            for table in [row[0] for row in database.execute(query)]:
                self._read(database, table, found)
        seen = [self.folder / "mlflow.db", *(self.folder / "mlflow").rglob("*")]
        for path in sorted(
            seen, key=lambda p: [q for q in p.parts if not re.fullmatch("[0-9a-f]{32}", q)]
        ):
            if path in self._files and path.name != "mlflow.db":
                continue
            self._files.add(path)
            found[f"time of {path.name}"].append(path.stat().st_mtime)
            found[f"size of {path.name}"].append(path.stat().st_size)
            if path.is_file() and path.name != "mlflow.db":
                found[f"times in {path.name}"] += times_in(path.read_text("utf-8", "replace"))
        return found

    def _read(self, database: sqlite3.Connection, table: str, found: Numbers) -> None:
        query = f"SELECT rowid AS number_of_row, * FROM {table} WHERE rowid > ? ORDER BY rowid"
        rows = database.execute(query, (self._rows.get(table, 0),)).fetchall()
        found[f"rows of {table}"].append(len(rows))
        for row in map(dict, rows):
            self._rows[table] = row.pop("number_of_row")
            of = f" of {row.get('key')}" if table.endswith("metrics") else ""
            for column, value in row.items():
                place = f"{table}.{column}{of}"
                if isinstance(value, int | float):
                    found[place].append(float(value))
                elif isinstance(value, str):
                    stamps = [float(n) for n in re.findall(r"\b1[5-9]\d{11}\b", value)]
                    found[f"times in {place}"] += times_in(value) + stamps


def published(study: Study) -> Numbers:
    """What is exported and reported of a study, as numbers."""
    found: Numbers = defaultdict(list)
    certificate = study.certificate()
    texts = {
        "export": json.dumps(study.export()),
        "certificate": json.dumps(certificate),
        "page of the certificate": render_certificate(certificate),
        "report": render_study(study),
        "comparison": study.compare().to_csv(),
    }
    for name, text in texts.items():
        found[f"size of {name}"].append(len(text))
        found[f"times in {name}"] += times_in(text)
    for place, value in leaves(study.export()):
        found[f"export{place}"].append(value)
    for path in sorted(study.folder.rglob("*")):
        if path.is_file() and "sealed" not in path.parts:
            found[f"size of {path.name}"].append(path.stat().st_size)
            found[f"time of {path.name}"].append(path.stat().st_mtime)
    return found


def pipeline(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[list[int], list[Numbers]]:
    """Run the studies; return K of each, and what each has added to what can be seen."""
    monkeypatch.setattr(arm_rounds, "train_trials", Clocks(monkeypatch).train)
    monkeypatch.setattr(running, "rehearse", lambda *_args, **_options: 1.0)
    # Pages of single arms are parts of the report that is read, and half of the time.
    monkeypatch.setattr(record, "render", lambda *_, **_values: "")
    storage = f"sqlite:///{folder / 'privtune.db'}"
    reader = Reader(folder / "privtune-artifacts")
    runs, seen = [], []
    for number in range(STUDIES):
        name = f"study{number:02d}"
        budget = {"name": name, "epsilon": 6.0, "delta": 1e-5}
        spec = toy_spec(name=name, budget=budget, arms=ARMS, seed=100 + number)
        capfd.readouterr()
        study = Study.create(spec, storage)
        study.run(MlflowObserver(study))
        printed = "".join(capfd.readouterr())
        with Ledger(storage) as ledger:
            (count,) = [
                len(Rounds(ledger).results(charge.id))
                for charge in ledger.charges(name)
                if charge.arm == "selection"
            ]
        runs.append(count)
        size: Numbers = {"lines printed": [float(printed.count("\n"))]}
        seen.append({**reader.added(), **published(study), **size})
        study.close()
    return runs, seen


def series(seen: Sequence[Numbers]) -> dict[str, list[float]]:
    """Every number that each study has, study by study; those that some lack, by how many."""
    out = {}
    for place in {place for numbers in seen for place in numbers}:
        rows = [numbers.get(place, []) for numbers in seen]
        counts = {len(row) for row in rows}
        if len(counts) > 1:
            out[f"{place}: how many"] = [float(len(row)) for row in rows]
            rows = [[min(row, default=0.0), max(row, default=0.0)] for row in rows]
        for position, column in enumerate(zip(*rows, strict=True)):
            out[f"{place} #{position}"] = list(column)
    return out


def telling(runs: Sequence[int], seen: Sequence[Numbers]) -> tuple[dict[str, float], int]:
    """Return the numbers that can be told from chance, and how many tests were made."""
    found, tests = {}, 0
    for place, values in series(seen[1:]).items():  # the first study makes the store
        for kind, x, y in (
            ("itself", values, runs[1:]),
            ("its distance", list(np.diff(values)), runs[2:]),
        ):
            if len(set(x)) > 1:
                tests += 1
                found[f"{place}, {kind}"] = float(stats.spearmanr(x, y).pvalue)
    return {place: p for place, p in found.items() if p < ERROR / max(tests, 1)}, tests


@pytest.mark.statistical
@pytest.mark.timeout(1_800)
def test_nothing_published_follows_k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs, seen = pipeline(tmp_path, monkeypatch, capfd)
    assert len(set(runs)) > STUDIES / 3
    found, tests = telling(runs, seen)
    assert tests > 300
    assert found == {}, f"{len(found)} of {tests}"
    for numbers in seen:
        for place, values in numbers.items():
            if place.startswith("time of "):
                assert all(value % 86_400 == 0 for value in values), place
