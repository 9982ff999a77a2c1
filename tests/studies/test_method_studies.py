"""The study of every reproduced method plans."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from privtune.cli import main as command_line

STUDIES = ("adadp", "hyfreedp", "pur", "adaclip")
FOLDER = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("name", STUDIES)
def test_its_study_can_be_planned(name, capsys, monkeypatch):
    """The product trains the method of the paper: every arm plans and all fit the budget."""
    path = FOLDER / name / "study.yaml"
    monkeypatch.setattr(sys, "argv", ["privtune", "study", "plan", str(path), "--json"])
    command_line()
    plan = json.loads(capsys.readouterr().out)
    spec = yaml.safe_load(path.read_text())
    assert [arm["arm"] for arm in plan["arms"]] == [arm["name"] for arm in spec["arms"]]
    strategies = [arm["strategy"] for arm in spec["arms"]]
    assert strategies[0] == name
    assert plan["total"]["epsilon"] <= spec["budget"]["epsilon"]
    for arm, strategy in zip(plan["arms"], strategies, strict=True):
        if strategy.startswith("pur"):  # full batches: all 4,000 records in each update
            assert arm["expected_gradient_evaluations"] % 4000 == 0
