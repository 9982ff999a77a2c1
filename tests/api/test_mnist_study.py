"""The MNIST study's script runs small, goes on where it was, and prints what ran."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.api.test_examples import EXAMPLES, load_file

SCRIPT = EXAMPLES.parents[1] / "studies" / "mnist-strategies" / "run.py"


def test_the_study_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.csv"
    script = load_file(SCRIPT)
    arguments = ["run.py", "--smoke", "--out", str(out), "--arms", "defaults", "subsampled-2"]
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()
    first = out.read_text()
    assert first.count("\n") == 3
    assert "| 3 | subsampled-2 | 1 |" in capsys.readouterr().out
    script.main()
    assert out.read_text() == first, "nothing runs twice"
