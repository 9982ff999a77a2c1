"""Write many finished runs into an MLflow database in one transaction.

Through MLflow's client a finished run is three calls and four commits. Where the client works on a
database itself, its tables are filled at once. They are not documented: a test compares every field
of a run written here with one written through the client, and `BULK_VERSIONS` lists the versions it
was held against. With other versions, and through a server, the client is used.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["BULK_VERSIONS", "FinishedRun", "write_finished"]

BULK_VERSIONS = ("3.17",)
"""Minor versions of MLflow whose tables are known."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that is over.

    Args:
        name: Its name.
        tags: All of its tags.
        params: Its parameters.
        points: Metrics as (name, value, step).
    """

    name: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    points: Sequence[tuple[str, float, int]]


def write_finished(
    client: MlflowClient, experiment: str, runs: Sequence[FinishedRun], *, now: int
) -> bool:
    """Write runs that began and ended now: all of them or none.

    Args:
        client: An open client.
        experiment: Experiment id.
        runs: The runs.
        now: Milliseconds of Unix time.

    Returns:
        Whether they were written; else they have to be written through the client.

    Raises:
        MlflowException: If a name, a tag or a value is none that MLflow takes.
    """
    import mlflow
    from mlflow.store.tracking.dbmodels import models
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = client._tracking_client.store
    minor = ".".join(mlflow.__version__.split(".")[:2])
    # Of this very type: a store that derives from it may keep runs in another way.
    if type(store) is not SqlAlchemyStore or minor not in BULK_VERSIONS:
        return False
    location = client.get_experiment(experiment).artifact_location
    tables: tuple[Any, ...] = (
        models.SqlRun,
        models.SqlTag,
        models.SqlParam,
        models.SqlMetric,
        models.SqlLatestMetric,
    )
    rows: list[list[dict[str, Any]]] = [[] for _ in tables]
    for run in runs:
        written = _rows(store, run, location=location, now=now)
        written[0][0]["experiment_id"] = int(experiment)
        for there, own in zip(rows, written, strict=True):
            there.extend(own)
    with store.ManagedSessionMaker(read_only=False) as session:
        for table, own in zip(tables, rows, strict=True):
            if own:
                session.execute(table.__table__.insert(), own)
    return True


def _rows(
    store: Any, run: FinishedRun, *, location: str, now: int
) -> tuple[list[dict[str, Any]], ...]:
    """Return a run's rows in the tables of runs, tags, parameters, metrics and latest metrics."""
    from mlflow.entities import Metric, Param
    from mlflow.utils.uri import append_to_uri_path
    from mlflow.utils.validation import _validate_batch_log_data

    metrics, params, _ = _validate_batch_log_data(  # type: ignore[no-untyped-call]
        [Metric(name, value, now, step) for name, value, step in run.points],
        [Param(name, value) for name, value in run.params.items()],
        [],
    )
    key = uuid.uuid4().hex
    row = {
        "run_uuid": key,
        "name": run.name,
        "source_type": "UNKNOWN",
        "source_name": "",
        "entry_point_name": "",
        "user_id": "unknown",
        "status": "FINISHED",
        "start_time": now,
        "end_time": now,
        "source_version": "",
        "lifecycle_stage": "active",
        "artifact_uri": append_to_uri_path(location, key, "artifacts"),  # type: ignore[no-untyped-call]
    }
    values = list(_values(store, key, metrics))
    latest: dict[str, dict[str, Any]] = {}
    for value in values:
        there = latest.setdefault(value["key"], value)
        if (value["step"], value["value"]) > (there["step"], there["value"]):
            latest[value["key"]] = value
    return (
        [row],
        [{"run_uuid": key, "key": name, "value": value} for name, value in run.tags.items()],
        [{"run_uuid": key, "key": param.key, "value": param.value} for param in params],
        values,
        list(latest.values()),
    )


def _values(store: Any, key: str, metrics: Sequence[Any]) -> Iterator[dict[str, Any]]:
    seen = set()
    for metric in metrics:
        if (metric.key, metric.step, metric.value) in seen:
            continue  # the table takes a point once
        seen.add((metric.key, metric.step, metric.value))
        is_nan, value = store.sanitize_metric_value(metric.value)
        yield {
            "run_uuid": key,
            "key": metric.key,
            "value": value,
            "timestamp": metric.timestamp,
            "step": metric.step,
            "is_nan": is_nan,
        }
