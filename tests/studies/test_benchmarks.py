"""Benchmarks that no other test runs, on the smallest size: what they read of studies is still there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "studies" / "benchmarks"


def printed(script: str, *arguments: str) -> str:
    """Return what a benchmark prints."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_table_is_trained_on_and_scored() -> None:
    figures = json.loads(printed("tables/run.py", "--rows", "20000", "--columns", "5"))
    value, low, high = figures["estimates"]["test_accuracy"]
    assert 0.0 <= low <= value <= high <= 1.0
    assert figures["heard_while_reading"] > 0


def test_what_a_row_costs_a_worker_is_told_for_sealed_and_for_shown_trials() -> None:
    lines = printed("scale/overhead.py").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["selection", "everything"]
