"""The engine's benchmark runs; what it measures stands in its README: other programs run beside tests."""

from __future__ import annotations

import io
import sys

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
