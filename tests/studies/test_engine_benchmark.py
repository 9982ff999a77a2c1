"""The engine's benchmark runs; what it measures stands in its README: other programs run beside tests."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from studies.benchmarks.engine import run

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "work", "candidates"),
    [
        ("engine", "adaclip", 2),
        ("DP-SGD", "adaclip", 2),
        ("non-private", "logistic", 1),
        ("Opacus ghost", "logistic", 1),
        ("Opacus hooks", "gru", 1),  # takes Opacus' own recurrent layer
    ],
)
def test_a_competitor_takes_as_many_steps_as_it_is_told(
    name: str,
    work: str,
    candidates: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("2\n1\n"))
    with pytest.raises(SystemExit):
        run.serve(name, run.WORKS[work], candidates, torch.device("cpu"))
    answers = [[float(n) for n in line.split()] for line in capsys.readouterr().out.splitlines()]
    assert [steps for _, steps, _ in answers] == [2 * candidates, candidates]
    assert all(seconds > 0 for seconds, _, _ in answers)


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_competitor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "found.json"
    short = ["--rounds", "1", "--seconds", "0.01", "--warm", "0", "--json", str(output)]
    monkeypatch.setattr(sys, "argv", ["run.py", "logistic", *short])
    run.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    assert [row[2] for row in rows] == ["Opacus ghost", "non-private"]
    found = json.loads(output.read_text())["logistic, K = 64"]["seconds"]
    assert {len(seconds) for seconds in found.values()} == {1}
    assert float(rows[0][4]) == pytest.approx(
        found["engine"][0] / found["Opacus ghost"][0], abs=0.01
    )
