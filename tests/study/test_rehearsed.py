"""Rehearsals of studies: the arms of the study, on no record of the user's, and nothing is charged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import privtune
from privtune.errors import PrivTuneError
from privtune.rehearsal.study_rehearsal import _rehearsal_spec
from privtune.study import Study, StudySpec, plan_study
from privtune.training.mechanism.constant import constant_answer
from privtune.training.mechanism.metric_name import MetricName
from tests.cli.conftest import Cli, cli  # noqa: F401  (a fixture)
from tests.study.conftest import FIXED, toy_spec
from tests.study.test_stages import spec as staged  # noqa: F401  (a fixture)
from tests.toy import LOADS

WRONG = {
    "name": "never",
    "strategy": "fixed",
    "parameters": {"learning_rate": 1e-4, "max_grad_norm": 1.0},
}
WILD = {
    "name": "wild",
    "strategy": "fixed",
    "parameters": {"learning_rate": 1e38, "max_grad_norm": 1.0},
}


def _noises(spec: StudySpec, **how: Any) -> list[float]:
    """Return the noise of every arm's training, which says all of what it may cost."""
    planned = plan_study(spec, **how)
    return [float(plan.training.method.noise_multiplier) for plan in planned.plans]


def test_the_arms_are_the_study_s_and_nothing_of_the_user_is_touched(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    study = Study.create(toy_spec(arms=[FIXED, WRONG, WILD], seed=1), storage)
    before, loads = sorted(tmp_path.iterdir()), len(LOADS)
    told: list[str] = []
    found = privtune.rehearse_study(study, repeats=2, notify=told.append)
    assert len(LOADS) == loads
    assert study.spent().epsilon == 0.0
    assert {status.state for status in study.status()} == {"planned"}
    assert sorted(tmp_path.iterdir()) == before  # the temporary storage is gone
    assert told[0].startswith("Rehearsing 3 arms, 2 times each, on a stand-in for blobs: ")
    by_name = {arm.arm: arm for arm in found.arms}
    assert found.arms[0].arm == "defaults"
    assert by_name["defaults"].share_failed == 0.0
    assert by_name["never"].failed == {"released nothing": 0, "diverged": 0, "at chance": 2}
    assert by_name["wild"].share_failed == 1.0
    assert found.above(by_name["defaults"], by_name["never"]) > 0.9
    assert found.metric == MetricName("test", "accuracy")
    assert 0.33 < found.chance < 0.5


def test_what_is_rehearsed_is_planned_as_the_study_is(staged: StudySpec) -> None:  # noqa: F811
    many = toy_spec(repeats=3, arms=[FIXED, {**FIXED, "name": "more", "weight": 2.0}])
    for spec in (toy_spec(arms=[FIXED]), many, staged):
        changed, task, _ = _rehearsal_spec(spec, None, 5)
        assert task.benchmark
        assert _noises(changed) == pytest.approx(_noises(spec), rel=2e-3)


def test_a_private_task_is_refused_and_other_sizes_are_said() -> None:
    with pytest.raises(PrivTuneError, match=r"'blobs': must be a task whose records are public"):
        _rehearsal_spec(toy_spec(), "tests.toy:blobs", 2)
    _, _, differs = _rehearsal_spec(toy_spec(), "iris-logistic", 2)
    assert differs == [
        "The rehearsal has 90, 30, 30 records (train, validation, test), but your task declares "
        "240, 60, 60. So "
        "its sampling rates, steps and noise differ from your study's."
    ]


def test_chance_varies_by_as_much_as_is_said() -> None:
    rng = np.random.default_rng(0)
    y = (rng.random(400) < 0.3).astype(float)
    ones, zeros = int(y.sum()), int((1 - y).sum())
    aucs = []
    for _ in range(2000):
        ranks = rng.permutation(400) + 1  # of scores that say nothing
        aucs.append((ranks[y == 1].sum() - ones * (ones + 1) / 2) / (ones * zeros))
    answer = constant_answer("auc", y, of_classes=True)
    assert answer is not None
    assert (answer.value, answer.error) == (0.5, pytest.approx(np.std(aucs), rel=0.05))
    y = rng.integers(3, size=400).astype(float)
    guesses = rng.integers(3, size=(2000, 400))
    balanced = np.mean([(guesses[:, y == c] == c).mean(axis=1) for c in range(3)], axis=0)
    answer = constant_answer("balanced_accuracy", y, of_classes=True)
    assert answer is not None
    assert answer.value == pytest.approx(1 / 3)
    assert answer.error == pytest.approx(balanced.std(), rel=0.05)


def test_the_command_says_on_what_it_ran(
    cli: Cli,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(yaml.safe_dump(toy_spec(arms=[FIXED]).model_dump(mode="json")))
    said = cli("study", "rehearse", "toy.yaml", "--repeats", "2")
    assert said.code == 0, said.err
    assert "on a stand-in for blobs, not on your records" in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["toy.yaml"]
    shown = cli(
        "study", "rehearse", "toy.yaml", "--on", "iris-logistic", "--repeats", "2", "--json"
    )
    document = json.loads(shown.out)
    assert document["rehearsed"] == "on iris-logistic, not on your records"
    assert len(document["arms"][0]["values"]) == 2
    assert "privtune study rehearse toy.yaml" in cli("study", "plan", "toy.yaml").out
