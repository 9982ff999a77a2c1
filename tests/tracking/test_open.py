"""Open studies and MLflow: a sealed loss cannot log, and what is released is logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from torch import nn

import privtune
from privtune.strategies import Fixed, PapernotSteinke
from privtune.study import Study
from privtune.tracking.mlflow import MlflowObserver
from privtune.tracking.store import local_uri
from tests.study.elsewhere import OWN

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
