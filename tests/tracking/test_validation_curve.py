"""Accuracy by step on a public validation split, at the steps of the ε spent."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from privtune.errors import PrivTuneError
from privtune.execution.trial_training import TrialWork, accuracy, model_of, train_trials
from privtune.study import Study
from privtune.tracking.mlflow import MlflowObserver
from privtune.training.engine.compute import Compute
from tests.study.conftest import toy_spec
from tests.toy import blobs, public_blobs
from tests.tracked import ARMS, Tracked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

EVERYTHING = {"name": "all", "strategy": "everything", "trials": 2, "sampler": "random"}


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Study:
    storage = f"sqlite:///{tmp_path_factory.mktemp('public') / 'privtune.db'}"
    arms = [*ARMS, EVERYTHING]
    spec = toy_spec(task="tests.toy:public_blobs", arms=arms, seed=1, epochs=3)
    study = Study.create(spec, storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        study.run(MlflowObserver(study))
    return study


def history(study: Study, name: str, metric: str) -> dict[int, float]:
    logged = Tracked(study)
    points = logged.client.get_metric_history(logged.runs[name].info.run_id, metric)
    steps = [point.step for point in points]
    assert len(steps) == len(set(steps)), "one value a step"
    return {point.step: point.value for point in points}


@pytest.mark.parametrize("arm", ["defaults", "hyfree"])
def test_accuracy_stands_at_the_steps_of_the_epsilon_spent(public: Study, arm: str) -> None:
    spent, reached = history(public, arm, "eps/arm_steps"), history(public, arm, "acc/val")
    assert sorted(reached) == sorted(spent)
    assert len(reached) == 12
    steps = public.plans[0].training.schedule.steps
    assert max(reached) == steps - 1 > 12
    # The last one is that of the released model.
    task = public_blobs()
    release = public.release(arm)
    assert reached[steps - 1] == accuracy(model_of(task, release.weights), task.load().validation)
    curve = release.curves["val_accuracy"]
    assert len(curve) == steps
    assert {step for step, value in enumerate(curve) if math.isfinite(value)} == set(reached)
    if arm == "defaults":  # the other begins with steps too small to be seen in an accuracy
        assert len(set(reached.values())) > 1


def test_trials_that_are_paid_for_have_a_curve_each(public: Study) -> None:
    for trial in public.release("all").trials:
        reached = history(public, f"all/{trial.index}", "acc/val")
        assert len(reached) == 12
        assert reached[max(reached)] == pytest.approx(trial.score, abs=1e-12)


def test_a_sealed_arm_has_none(public: Study) -> None:
    assert public.release("selection").curves == {}
    reached = history(public, "selection", "acc/val")
    assert list(reached) == [0], "the winner's score alone"


def test_a_private_split_has_none(tracked: Tracked) -> None:
    for arm in ("defaults", "hyfree"):
        assert "val_accuracy" not in tracked.study.release(arm).curves
        assert history(tracked.study, arm, "acc/val") == {}


def test_the_accuracy_on_a_private_split_is_refused(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    plan = Study.create(toy_spec(arms=ARMS[:1]), storage).plans[0]
    task = blobs()
    data = task.load()
    with pytest.raises(PrivTuneError, match="validation split of task 'blobs' is private"):
        train_trials(
            TrialWork(
                training=plan.training,
                task=task,
                data=data,
                records=data.train,
                score=None,
                compute=Compute("cpu"),
                validated=True,
            ),
            trials={0: plan.params},
            secrets={0: bytes(32)},
        )
