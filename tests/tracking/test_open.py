"""What is released is logged: by open studies, and every trial where every trial is paid for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import privtune
from privtune.accounting import epsilon
from privtune.strategies import Fixed, PapernotSteinke
from privtune.study import Study
from privtune.tracking.mlflow import MlflowObserver, sync_study
from privtune.tracking.view import VIEW_TAG
from tests.study.conftest import toy_spec
from tests.study.elsewhere import OWN, TERMS
from tests.tracked import Tracked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def build(trial: privtune.Trial) -> privtune.Candidate:
    model = nn.Linear(6, 3)
    rate = trial.suggest_float("rate", 0.1, 2.0, log=True)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate))


def test_releases_of_an_open_study_are_logged(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    budget = privtune.Budget(6.0, 1e-5, name="open")
    study = privtune.create_study("open", budget=budget, storage=storage, seed=1)
    observer = MlflowObserver(study)
    told: list[set[str]] = []
    common = {"observer": observer}
    task = privtune.make_task(build, **OWN)
    selection = study.optimize(
        task,
        strategy=PapernotSteinke(mean_runs=3),
        epsilon=3.0,
        callbacks=[lambda s, _: told.append(set(Tracked(s).runs))],
        **common,
        **TERMS,
    )
    fixed = study.optimize(
        task, strategy=Fixed(parameters={"rate": 0.5}), epsilon=1.0, **common, **TERMS
    )
    assert observer.unavailable is None
    assert told == [{"papernot-steinke"}]
    runs = Tracked(study).runs
    assert set(runs) == {"papernot-steinke", "fixed"}
    for release in (selection, fixed):
        run = runs[release.arm]
        assert 0 <= run.data.metrics["eps/arm"] - release.guarantee.epsilon < 1e-4
        assert run.data.params["rate"] == str(release.params["rate"])
        assert run.info.status == "FINISHED"
    sealed = runs["papernot-steinke"]
    assert sealed.info.start_time == sealed.info.end_time
    assert not any(name.startswith("system/") for name in sealed.data.metrics)


ARM = {"name": "all", "strategy": "everything", "trials": 3, "sampler": "random"}


def test_trials_are_child_runs_under_the_arm(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    study = Study.create(toy_spec(arms=[ARM], seed=1), storage)
    observer = MlflowObserver(study)
    (release,) = study.run(observer)
    assert observer.unavailable is None

    runs = Tracked(study).runs
    parent = runs.pop("all")
    assert "mlflow.parentRunId" not in parent.data.tags
    assert parent.data.tags["privtune.visibility"] == "everything"
    assert set(runs) == {"all/0", "all/1", "all/2"}
    assert len(release.trials) == 3
    for trial in release.trials:
        run = runs[f"all/{trial.index}"]
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["mlflow.runColor"] == parent.data.tags["mlflow.runColor"]
        assert run.data.params == {name: str(value) for name, value in trial.params.items()}
        assert trial.score is not None
        assert run.data.metrics["acc/val"] == round(trial.score, 4)
        assert "eps/arm" not in run.data.metrics, "a trial has no price of its own"

    experiment = Tracked(study).experiment
    state = json.loads(json.loads(experiment.tags[VIEW_TAG])["state"])
    place, only = [experiment.experiment_id], state["searchFilter"]
    assert len(Tracked(study).client.search_runs(place, filter_string=only)) == 1, "arms alone"

    # The arm costs what its trials cost together: more than one, at most their sum.
    (plan,) = study.plans
    together = epsilon(plan.event, 1e-5).epsilon
    alone = epsilon(plan.training.event, 1e-5).epsilon
    assert 0 <= parent.data.metrics["eps/arm"] - together < 1e-4
    assert together > alone
    assert 0 <= parent.data.metrics["eps/one_run"] - alone < 1e-4
    best = max(release.trials, key=lambda trial: trial.score or 0.0)
    assert parent.data.metrics["acc/val"] == round(best.score or 0.0, 4)
    assert sync_study(study) == (), "neither the arm nor a trial is logged twice"


def test_trials_on_a_part_are_logged_with_their_own_price(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    arm = {"name": "part", "strategy": "subset-search", "trials": 2, "rate": 0.5}
    study = Study.create(toy_spec(arms=[arm], seed=1), storage)
    observer = MlflowObserver(study)
    study.run(observer)
    assert observer.unavailable is None
    runs = Tracked(study).runs
    assert set(runs) == {"part", "part/0", "part/1"}
    (plan,) = study.plans
    assert plan.search is not None
    alone = epsilon(plan.search.trainings[0].event, 1e-5).epsilon
    for name in ("part/0", "part/1"):
        assert 0 <= runs[name].data.metrics["eps/trial"] - alone < 2e-4
    parent = runs["part"].data
    assert float(parent.params["plan.final_noise_ratio"]) <= 1.1
    assert parent.params["tuning_rate"] == "0.5"
    assert "eps/trial" not in parent.metrics
