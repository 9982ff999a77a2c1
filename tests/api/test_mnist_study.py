"""The MNIST study's script runs small, goes on where it was, and prints what ran."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from tests.api.test_examples import EXAMPLES, load_file

SCRIPT = EXAMPLES.parents[1] / "studies" / "mnist-strategies" / "run.py"
EXPECTED = json.loads(SCRIPT.with_name("expected.json").read_text(encoding="utf-8"))


def test_the_study_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.csv"
    script = load_file(SCRIPT)
    arms = ["defaults", "subsampled-2"]
    arguments = ["run.py", "--smoke", "--check", "--out", str(out), "--arms", *arms]
    monkeypatch.setattr(sys, "argv", arguments)
    assert script.main() == 0
    first = out.read_text()
    assert first.count("\n") == 3
    assert "| 3 | subsampled-2 | 1 |" in capsys.readouterr().out
    assert script.main() == 0
    assert out.read_text() == first, "nothing runs twice"


def test_recorded_results_pass_their_own_check() -> None:
    assert load_file(SCRIPT).compare(SCRIPT.with_name("results.csv"), EXPECTED) == []


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("accuracy", "0.5", "papernot-steinke at epsilon 1: 50.0 %"),
        ("accuracy", "nan", "papernot-steinke at epsilon 1: nan %"),
        ("spent", "3.1", "papernot-steinke spent more than epsilon 3"),
        ("gradient_evaluations", "1000000", "subsampled-1 at epsilon 3: only 1.00 times fewer"),
    ],
)
def test_a_wrong_result_is_noticed(column: str, value: str, message: str, tmp_path: Path) -> None:
    with SCRIPT.with_name("results.csv").open(encoding="utf-8") as file:
        rows = [{**row, column: value} for row in csv.DictReader(file)]
    wrong = tmp_path / "results.csv"
    with wrong.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    problems = load_file(SCRIPT).compare(wrong, EXPECTED)
    assert any(message in problem for problem in problems)
