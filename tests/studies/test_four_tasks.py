"""The study of every strategy on four tasks: its smoke mode, and its recorded results."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "studies" / "four-tasks"
_spec = importlib.util.spec_from_file_location("four_tasks", FOLDER / "run.py")
assert _spec is not None
assert _spec.loader is not None
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_smoke(tmp_path, capsys):
    out, chart = tmp_path / "results.csv", tmp_path / "chart.html"
    arms = ["methods", "everything, TPE"]
    options = [
        "--smoke",
        "--tasks",
        "table",
        "--arms",
        *arms,
        "--out",
        str(out),
        "--chart",
        str(chart),
    ]
    assert run.main(options) == 0
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == arms
    for row in rows:
        assert float(row["claimed"]) < float(row["spent"]) <= 4.0
    said = capsys.readouterr().out
    assert "| table | 4 | methods | 1 |" in said
    assert "| mnist | 1 | defaults | 5 |" in said
    assert chart.stat().st_size > 10_000


@pytest.mark.quick
def test_recorded_results_pass_their_own_check_and_others_do_not():
    expected = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
    rows = run.rows_of(FOLDER / "results.csv")
    assert run.compare(rows, expected) == []
    assert run.table(rows) in (FOLDER / "README.md").read_text(encoding="utf-8")
    own = next(row for row in rows if row["task"] == "digits")
    assert run.compare([{**own, "accuracy": "0.2"}], expected)
    assert run.compare([{**own, "spent": "9.9"}], expected)
