"""Every reproduction still runs: its smoke mode, on a public stand-in, in seconds."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

STUDIES = ("adadp", "adaclip", "hyfreedp", "pur")
FOLDER = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_smoke(name, tmp_path, capsys):
    out = tmp_path / "results.json"
    module = importlib.import_module(f"studies.{name}.run")
    assert module.main(["--smoke", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["seconds"] > 0
    assert json.loads(capsys.readouterr().out) == results


@pytest.mark.parametrize("name", STUDIES)
def test_recorded_results_pass_their_own_check(name):
    """``results.json`` is the run that the README reports; ``expected.json`` must agree with it."""
    module = importlib.import_module(f"studies.{name}.run")
    results = json.loads((FOLDER / name / "results.json").read_text())
    expected = json.loads((FOLDER / name / "expected.json").read_text())
    assert module.compare(results, expected) == []


@pytest.mark.parametrize("name", STUDIES)
def test_a_wrong_result_is_noticed(name):
    module = importlib.import_module(f"studies.{name}.run")
    results = json.loads((FOLDER / name / "results.json").read_text())
    expected = json.loads((FOLDER / name / "expected.json").read_text())

    def shifted(value):
        if isinstance(value, dict):
            return {key: shifted(inner) for key, inner in value.items()}
        return value + 30.0 if isinstance(value, float) else value

    assert module.compare(shifted(results), expected)
