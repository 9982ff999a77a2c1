"""One small study, run and logged once for all tests that only read it: the fixture `tracked`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from privtune.study import Study, seal
from privtune.tracking.mlflow import MlflowObserver
from privtune.tracking.store import local_uri
from tests.study.conftest import toy_spec

ARMS = [
    {
        "name": "defaults",
        "strategy": "fixed",
        "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
    },
    {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 8},
    {"name": "hyfree", "strategy": "hyfreedp"},
]


@dataclass(frozen=True)
class Tracked:
    """A study, and what its MLflow store has of it."""

    study: Study

    @property
    def folder(self) -> Path:
        return Path(self.study.storage.removeprefix("sqlite:///")).parent

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=local_uri(self.study.storage))

    @property
    def experiment(self) -> Any:
        return self.client.get_experiment_by_name(self.study.name)

    @property
    def runs(self) -> dict[str, Any]:
        if self.experiment is None:
            return {}
        found = self.client.search_runs([self.experiment.experiment_id])
        return {run.info.run_name: run for run in found}


def run_tracked(folder: Path) -> Tracked:
    storage = f"sqlite:///{folder / 'privtune.db'}"
    # The seed gives a round of several trials.
    study = Study.create(toy_spec(arms=ARMS, seed=1), storage)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setattr(seal, "_ran", False)  # as in a process of its own
        study.run(MlflowObserver(study, sampling_seconds=0.2))
    return Tracked(study)
