"""Trials written at once are what MLflow's own client would have written, field by field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from privtune.tracking import bulk, store
from privtune.tracking.bulk import FinishedRun, write_finished
from privtune.tracking.layout import ArmRecord

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NOW = 1_700_000_000_000
POINTS = (("acc/val", 0.5, 0), ("acc/val", 0.25, 2), ("acc/val", 0.75, 1), ("worst", -math.inf, 0))
RUN = FinishedRun(
    "arm/0", {"kind": "trial", "mlflow.runName": "arm/0"}, {"lr": "0.1", "deep": "True"}, POINTS
)


@pytest.fixture
def client(tmp_path: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")


def through_the_client(client: MlflowClient, experiment: str, run: FinishedRun) -> None:
    created = client.create_run(experiment, start_time=NOW, tags=dict(run.tags)).info.run_id
    metrics = [Metric(name, value, NOW, step) for name, value, step in run.points]
    client.log_batch(created, metrics, [Param(k, v) for k, v in run.params.items()])
    client.set_terminated(created, status="FINISHED", end_time=NOW)


def fields(client: MlflowClient, experiment: str) -> dict[str, Any]:
    (found,) = client.search_runs([experiment])
    run = client.get_run(found.info.run_id)
    seen = run.to_dictionary()
    for part in ("run_id", "run_uuid"):
        assert seen["info"].pop(part, run.info.run_id) == run.info.run_id
    for part in ("artifact_uri", "experiment_id"):
        seen["info"][part] = seen["info"][part].replace(run.info.run_id, "RUN")
    seen["info"]["artifact_uri"] = seen["info"]["artifact_uri"].rpartition("/RUN/")[2]
    seen["info"].pop("experiment_id")
    history = {
        name: [
            (m.value, m.step, m.timestamp)
            for m in client.get_metric_history(found.info.run_id, name)
        ]
        for name in run.data.metrics
    }
    return {"run": seen, "history": {name: sorted(points) for name, points in history.items()}}


def test_every_field_is_what_the_client_writes(client: MlflowClient) -> None:
    ours, theirs = client.create_experiment("ours"), client.create_experiment("theirs")
    assert write_finished(client, ours, [RUN], now=NOW), "this version of MLflow is known"
    through_the_client(client, theirs, RUN)
    assert fields(client, ours) == fields(client, theirs)
    assert fields(client, ours)["run"]["data"]["metrics"]["acc/val"] == 0.25, "of the last step"


def test_all_or_nothing(client: MlflowClient) -> None:
    experiment = client.create_experiment("ours")
    wrong = FinishedRun("arm/1", {}, {"": "a parameter without a name"}, ())
    with pytest.raises(MlflowException):
        write_finished(client, experiment, [RUN, wrong], now=NOW)
    assert client.search_runs([experiment]) == []


def record(*children: ArmRecord) -> ArmRecord:
    name = "arm" if children else "arm/0"
    tags = {"privtune.dataset": "toy"}
    return ArmRecord(name, f"digest-{name}", False, 0.0, tags, {}, (), "", children=children)


def test_an_unknown_version_of_mlflow_is_written_through_its_client(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BULK_VERSIONS", ())
    experiment = client.create_experiment("ours")
    assert not write_finished(client, experiment, [RUN], now=NOW)
    parent = store.write_record(client, experiment, record(record()))
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert runs["arm/0"].data.tags["mlflow.parentRunId"] == parent


def test_trials_below_a_run_that_broke_off_go_with_it(client: MlflowClient) -> None:
    experiment = client.create_experiment("ours")
    store.write_record(client, experiment, record(record()))
    assert set(store.published(client, experiment)) == {"digest-arm", "digest-arm/0"}
    (parent,) = client.search_runs([experiment], "attributes.run_name = 'arm'")
    client.update_run(parent.info.run_id, status="RUNNING")
    assert store.published(client, experiment) == {}
    assert client.search_runs([experiment]) == []
