"""Open studies and MLflow: a sealed loss cannot log, and what is released is logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import optuna
import pytest
import torch
from mlflow import MlflowClient
from torch import nn

import privtune
from privtune.strategies import Everything, Fixed, PapernotSteinke
from privtune.study import SealedError, Study
from privtune.tracking.mlflow import MlflowObserver
from privtune.tracking.store import local_uri
from privtune.tracking.view import VIEW_TAG
from tests.study.elsewhere import OWN, loss

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

FIXED = {name: value for name, value in OWN.items() if name != "validation"}


def build(trial: privtune.Trial) -> privtune.Candidate:
    model = nn.Linear(6, 3)
    rate = trial.suggest_float("rate", 0.1, 2.0, log=True)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate))


def make(folder: Path, **options: Any) -> Study:
    storage = f"sqlite:///{folder / 'privtune.db'}"
    budget = privtune.Budget(6.0, 1e-5, name="open")
    return privtune.create_study("open", budget=budget, storage=storage, seed=1, **options)


def experiment(study: Study) -> Any:
    client = MlflowClient(tracking_uri=local_uri(study.storage))
    return client.get_experiment_by_name(study.name)


def logged(study: Study) -> dict[str, Any]:
    client = MlflowClient(tracking_uri=local_uri(study.storage))
    found = experiment(study)
    if found is None:
        return {}
    return {run.info.run_name: run for run in client.search_runs([found.experiment_id])}


def test_releases_of_an_open_study_are_logged(tmp_path: Path) -> None:
    study = make(tmp_path)
    observer = MlflowObserver(study)
    told: list[set[str]] = []
    common = {"observer": observer}
    selection = study.optimize(
        build,
        strategy=PapernotSteinke(mean_runs=3),
        epsilon=3.0,
        callbacks=[lambda s, _: told.append(set(logged(s)))],
        **common,
        **OWN,
    )
    fixed = study.optimize(
        build, strategy=Fixed(parameters={"rate": 0.5}), epsilon=1.0, **common, **FIXED
    )
    assert observer.unavailable is None
    assert told == [{"papernot-steinke"}]
    runs = logged(study)
    assert set(runs) == {"papernot-steinke", "fixed"}
    for release in (selection, fixed):
        run = runs[release.arm]
        assert 0 <= run.data.metrics["eps/total"] - release.guarantee.epsilon < 1e-4
        assert run.data.params["rate"] == str(release.params["rate"])
        assert run.info.status == "FINISHED"
    sealed = runs["papernot-steinke"]
    assert sealed.info.start_time == sealed.info.end_time
    assert not any(name.startswith("system/") for name in sealed.data.metrics)


def test_a_sealed_loss_cannot_log_and_goes_on_once_corrected(tmp_path: Path) -> None:
    theirs = f"sqlite:///{tmp_path / 'theirs.db'}"
    client = MlflowClient(tracking_uri=theirs)
    run = client.create_run(client.create_experiment("theirs", tmp_path.as_uri())).info.run_id
    attempts: list[str] = []

    def talks(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for log in (
            lambda: client.log_metric(run, "score", 0.5),
            lambda: mlflow.log_metric("score", 0.5, run_id=run),
        ):
            try:
                log()
            except SealedError:
                attempts.append("refused")
        client.log_metric(run, "score", 0.5)
        return loss(model, x, y)

    study = make(tmp_path)
    arm: dict[str, Any] = {"strategy": PapernotSteinke(mean_runs=3), **OWN}
    mlflow.set_tracking_uri(theirs)
    try:
        with pytest.raises(SealedError, match="A sealed round is running"):
            study.optimize(build, **{**arm, "loss": talks})
    finally:
        mlflow.set_tracking_uri(None)
    assert attempts[:2] == ["refused", "refused"]
    assert client.get_run(run).data.metrics == {}, "the store is open again, and empty"
    assert logged(study) == {}

    # The mistake is corrected: the arm goes on under the same charge.
    loaded = privtune.load_study("open", storage=study.storage)
    release = loaded.optimize(build, observer=MlflowObserver(loaded), epsilon=6.0, **arm)
    assert 0 < release.guarantee.epsilon <= 6.0
    assert set(logged(loaded)) == {"papernot-steinke"}


def test_paid_for_trials_of_an_open_study_are_child_runs(tmp_path: Path) -> None:
    study = make(tmp_path)
    observer = MlflowObserver(study)
    release = study.optimize(
        build,
        strategy=Everything(trials=3),
        sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=1),
        observer=observer,
        **OWN,
    )
    assert observer.unavailable is None
    assert set(logged(study)) == {"everything", *(f"everything/{t.index}" for t in release.trials)}
    # There is no test split to compare by: the view takes the score, and all that was suggested.
    state = json.loads(json.loads(experiment(study).tags[VIEW_TAG])["state"])
    assert state["orderByKey"] == "metrics.`acc/val`"
    chosen = [c["selectedParams"] for c in state["compareRunCharts"] if c["type"] == "PARALLEL"]
    assert chosen == [["rate"]]
