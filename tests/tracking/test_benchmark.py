"""The benchmark of logging runs; what it measures stands in its README, not in a test."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "studies" / "benchmarks" / "tracking" / "run.py"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.slow
def test_the_smoke_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["run.py", "--smoke", "--output", str(output)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = json.loads(output.read_text())
    assert rows["at once"]["steps"] == 20
    assert rows["call by call"]["arm_cpu_ms"] > 0
