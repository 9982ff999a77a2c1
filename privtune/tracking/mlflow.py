"""Log releases to MLflow: one experiment a study, one run an arm, nothing sealed.

The run of a sealed arm is created when its release is, so that even its times say nothing about the
number of trials. The truth about the budget is the ledger's: MLflow is a mirror that anybody with
access to it can edit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.study._store import artifact_root
from privtune.tracking.curves import epsilon_spent

if TYPE_CHECKING:
    from privtune.strategies import Plan, Release
    from privtune.study import Study

__all__ = ["MlflowObserver", "tracking_uri"]

_BATCH = 1_000  # MLflow's limit on metrics a call


def tracking_uri(storage: str) -> str:
    """Return the URI of the MLflow store that goes with a study's storage.

    Args:
        storage: The study's storage URL.

    Returns:
        An SQLite URL beside the study's database.
    """
    return f"sqlite:///{artifact_root(storage) / 'mlflow.db'}"


class MlflowObserver:
    """An observer that logs every release of a study.

    Args:
        study: The study.
        uri: Tracking URI; the store beside the study's database unless given.
        sampling_seconds: Interval of system metrics.
    """

    def __init__(
        self, study: Study, *, uri: str | None = None, sampling_seconds: float = 1.0
    ) -> None:
        # Imported here: MLflow takes more than a second to import, and planning needs none of it.
        from mlflow import MlflowClient

        for name in ("alembic", "mlflow.store.db.utils", "mlflow.system_metrics"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._study = study
        self.uri = tracking_uri(study.storage) if uri is None else uri
        self._sampling_seconds = sampling_seconds
        folder = artifact_root(study.storage)
        folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=self.uri)
        self.experiment_id = self._experiment(folder / "mlflow")
        self._runs: dict[str, str] = {}
        self._monitors: dict[str, Any] = {}

    def arm_started(self, plan: Plan) -> None:
        """Create the run of an arm that is not sealed and watch the machine; else do nothing."""
        if plan.is_sealed:
            return
        self._runs[plan.arm] = self._create_run(plan)
        self._monitors[plan.arm] = self._start_monitor(self._runs[plan.arm])

    def step(self, plan: Plan, done: int, steps: int) -> None:
        """Do nothing: curves are logged in one batch at the release."""

    def arm_failed(self, plan: Plan) -> None:
        """Mark the run of an interrupted arm as failed."""
        self._stop_monitor(plan)
        if (run := self._runs.pop(plan.arm, None)) is not None:
            self._client.set_terminated(run, status="FAILED")

    def released(self, plan: Plan, release: Release) -> None:
        """Log the release."""
        self._stop_monitor(plan)
        run = self._runs.pop(plan.arm, None) or self._create_run(plan)
        self._log(run, plan, release)
        self._client.set_terminated(run, status="FINISHED")
        self._describe_budget()

    def _experiment(self, artifacts: Path) -> str:
        found = self._client.get_experiment_by_name(self._study.name)
        if found is not None:
            return str(found.experiment_id)
        return str(
            self._client.create_experiment(
                self._study.name,
                artifact_location=artifacts.as_uri(),
                tags={"privtune.task": self._study.spec.task_name},
            )
        )

    def _create_run(self, plan: Plan) -> str:
        budget = self._study.spec.budget
        tags = {
            "mlflow.runName": plan.arm,
            "privtune.strategy": plan.strategy,
            "privtune.adjacency": str(budget.adjacency),
            "privtune.budget": budget.name,
            "privtune.visibility": "sealed trials, winner only" if plan.is_sealed else "everything",
            "privtune.system_metrics": _system_metrics_state(sealed=plan.is_sealed),
        }
        if self._study.spec.seed is not None:
            tags["privtune.weakened"] = "fixed seed: no guarantee against whoever knows it"
        run = self._client.create_run(self.experiment_id, tags=tags)
        return str(run.info.run_id)

    def _log(self, run: str, plan: Plan, release: Release) -> None:
        from mlflow.entities import Metric, Param, RunTag

        now = int(time.time() * 1000)
        guarantee = release.guarantee
        values: dict[str, float] = {
            **{f"utility/{name}": value for name, value in release.utility.items()},
            "privacy/epsilon": guarantee.epsilon,
            "privacy/delta": guarantee.delta,
            "cost/gradient_evaluations": release.cost.gradient_evaluations,
        }
        if release.score is not None:
            values["utility/validation_score"] = release.score
        if release.cost.wall_seconds is not None:
            values["cost/wall_seconds"] = release.cost.wall_seconds
        metrics = [Metric(name, value, now, 0) for name, value in values.items()]
        for name, curve in release.curves.items():
            metrics += [Metric(f"curve/{name}", v, now, step) for step, v in enumerate(curve)]
        if release.curves:
            budget = self._study.spec.budget
            spent = epsilon_spent(plan.training, delta=budget.delta, adjacency=budget.adjacency)
            metrics += [Metric("privacy/epsilon_spent", eps, now, step) for step, eps in spent]
        params = {
            **{name: str(value) for name, value in release.params.items()},
            "delta": str(guarantee.delta),
            "noise_multiplier": str(getattr(plan.training.method, "noise_multiplier", "")),
        }
        tags = {
            "privtune.bound": guarantee.method,
            "privtune.cost": "expected" if release.cost.expected else "measured",
        }
        self._log_batches(
            run,
            metrics,
            [Param(name, value) for name, value in params.items() if value],
            [RunTag(name, value) for name, value in tags.items()],
        )
        self._client.log_dict(run, plan.event.to_dict(), "privacy/event.json")
        self._client.log_dict(run, guarantee.to_dict(), "privacy/guarantee.json")
        self._client.log_artifact(run, str(self._study.model_path(plan.arm)), "model")

    def _log_batches(
        self, run: str, metrics: Sequence[Any], params: Sequence[Any], tags: Sequence[Any]
    ) -> None:
        self._client.log_batch(run, metrics[:_BATCH], params, tags)
        for start in range(_BATCH, len(metrics), _BATCH):
            self._client.log_batch(run, metrics[start : start + _BATCH])

    def _describe_budget(self) -> None:
        budget = self._study.spec.budget
        spent = self._study.spent()
        self._client.set_experiment_tag(
            self.experiment_id,
            "mlflow.note.content",
            f"Privacy budget {budget.name}: {spent.epsilon:.3f} of {budget.epsilon:g} charged "
            f"(delta {budget.delta:g}, {budget.adjacency}, {spent.method}).\n\n"
            "Only releases are logged here; the ledger is the record.",
        )

    def _start_monitor(self, run: str) -> Any:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        make: Any = SystemMetricsMonitor  # MLflow does not type it
        monitor = make(run, sampling_interval=self._sampling_seconds, tracking_uri=self.uri)
        monitor.start()
        return monitor

    def _stop_monitor(self, plan: Plan) -> None:
        if (monitor := self._monitors.pop(plan.arm, None)) is not None:
            monitor.finish()
            # An arm shorter than the interval would leave no sample behind.
            monitor.collect_metrics()
            monitor.publish_metrics(monitor.aggregate_metrics())
            monitor.mlflow_logger.flush()


def _system_metrics_state(*, sealed: bool) -> str:
    if sealed:
        return "off: they would show how long a sealed round took"
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # NVML raises its own types, and none at all without a driver
        return f"CPU and memory; GPU off: {error}"
    return "CPU, memory and GPU"


def experiment_url(base: str, experiment_id: str) -> str:
    """Return the address of a study's experiment in MLflow's UI, in model-training mode."""
    return f"{base}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
