"""Every reproduction still runs: its smoke mode, on a public stand-in, in seconds; its study plans."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import yaml

from privtune.cli import main as command_line

STUDIES = ("adadp", "hyfreedp", "pur")
PLANNED = (*STUDIES, "adaclip")
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


@pytest.mark.quick
@pytest.mark.parametrize("name", STUDIES)
def test_recorded_results_pass_their_own_check(name):
    """``results.json`` is the run that the README reports; ``expected.json`` must agree with it."""
    module = importlib.import_module(f"studies.{name}.run")
    results = json.loads((FOLDER / name / "results.json").read_text())
    expected = json.loads((FOLDER / name / "expected.json").read_text())
    assert module.compare(results, expected) == []


@pytest.mark.quick
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


@pytest.mark.parametrize("name", PLANNED)
def test_its_study_can_be_planned(name, capsys, monkeypatch):
    """The product trains the method of the paper: every arm plans and all fit the budget."""
    path = FOLDER / name / "study.yaml"
    monkeypatch.setattr(sys, "argv", ["privtune", "study", "plan", str(path), "--json"])
    with pytest.raises(SystemExit) as done:
        command_line()
    assert not done.value.code
    plan = json.loads(capsys.readouterr().out)
    spec = yaml.safe_load(path.read_text())
    assert [arm["arm"] for arm in plan["arms"]] == [arm["name"] for arm in spec["arms"]]
    strategies = [arm["strategy"] for arm in spec["arms"]]
    assert strategies[0] == name
    assert plan["total"]["epsilon"] <= spec["budget"]["epsilon"]
    for arm, strategy in zip(plan["arms"], strategies, strict=True):
        if strategy.startswith("pur"):  # full batches: all 4,000 records in each update
            assert arm["expected_gradient_evaluations"] % 4000 == 0
