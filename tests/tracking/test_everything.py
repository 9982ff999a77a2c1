"""Where every trial is paid for, MLflow shows every trial: child runs under the arm's."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from privtune.accounting import epsilon
from privtune.study import Study
from privtune.tracking.mlflow import MlflowObserver, sync_study
from privtune.tracking.store import local_uri
from tests.study.conftest import toy_spec

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ARM = {"name": "all", "strategy": "everything", "trials": 3, "sampler": "random"}


def test_trials_are_child_runs_under_the_arm(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    study = Study.create(toy_spec(arms=[ARM], seed=1), storage)
    observer = MlflowObserver(study)
    (release,) = study.run(observer)
    assert observer.unavailable is None

    client = MlflowClient(tracking_uri=local_uri(storage))
    experiment = client.get_experiment_by_name("toy")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    parent = runs.pop("all")
    assert "mlflow.parentRunId" not in parent.data.tags
    assert parent.data.tags["privtune.visibility"] == "everything"
    assert set(runs) == {"all/0", "all/1", "all/2"}
    assert len(release.trials) == 3
    for trial in release.trials:
        run = runs[f"all/{trial.index}"]
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.params == {name: str(value) for name, value in trial.params.items()}
        assert trial.score is not None
        assert run.data.metrics["acc/val"] == round(trial.score, 4)
        assert "eps/total" not in run.data.metrics, "a trial has no price of its own"

    # The arm costs what its trials cost together: more than one, at most their sum.
    (plan,) = study.plans
    together = epsilon(plan.event, 1e-5).epsilon
    alone = epsilon(plan.training.event, 1e-5).epsilon
    assert 0 <= parent.data.metrics["eps/total"] - together < 1e-4
    assert together > alone
    assert 0 <= parent.data.metrics["eps/one_run"] - alone < 1e-4
    best = max(release.trials, key=lambda trial: trial.score or 0.0)
    assert parent.data.metrics["acc/val"] == round(best.score or 0.0, 4)
    assert sync_study(study) == (), "neither the arm nor a trial is logged twice"
