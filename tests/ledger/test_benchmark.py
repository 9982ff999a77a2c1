"""The benchmark runs, and one charge costs about the same however long the log is."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "studies" / "benchmarks" / "ledger" / "benchmark.py"


def test_the_smoke_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--smoke", "--output", str(output)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = json.loads(output.read_text())
    assert [row["charges"] for row in rows] == [10, 100]
    # A loose bound: continuous integration shares its disk. The README has the measured figures.
    assert all(row["charge"] < 200 for row in rows)
