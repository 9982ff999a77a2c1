"""Log releases to MLflow: one experiment a study, one run an arm, nothing sealed.

Nothing is written while a sealed arm is still to be released: the gap between two runs would tell
how long the round took, and so how many trials it ran. The truth about the budget is the ledger's;
MLflow is a mirror that anybody with access to it can edit. What could not be logged waits in the
study's own database, and :func:`sync_study` logs it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from privtune.plots._style import colours
from privtune.study.seal import round_ran
from privtune.tracking.machine import (
    SWITCH,
    MachineSampler,
    machine_state,
    read_samples,
    write_samples,
)
from privtune.tracking.store import (
    TrackingUnavailableError,
    experiment_id,
    open_client,
    published,
    tracking_uri,
    write_record,
)
from privtune.tracking.view import VIEW_TAG, saved_view
from privtune.training.mechanism.metrics import lower_is_better
from privtune.views.record import CURVE_NAMES, arm_record, budget_view, short_name, study_note
from privtune.views.report import render_arm
from privtune.views.text import metric_of, utility_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from privtune.strategies import Plan, Release
    from privtune.study import ArmStatus, Study
    from privtune.views.record import ArmRecord, BudgetView

__all__ = ["MlflowObserver", "sync_study"]

_log = logging.getLogger(__name__)
_SAMPLES = "machine.json"


class MlflowObserver:
    """An observer that logs every release of a study, and never holds the study up.

    Args:
        study: The study.
        uri: Tracking URI; ``MLFLOW_TRACKING_URI``, or the store beside the study's database.
        sampling_seconds: Interval of system metrics, of arms that are not sealed. Unless given there
            are none, or one a second with ``MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=true``: load and
            memory tell how many records there are, and no ε covers that.

    Attributes:
        unavailable: Why MLflow could not be reached the last time, or ``None``.
    """

    def __init__(
        self, study: Study, *, uri: str | None = None, sampling_seconds: float | None = None
    ) -> None:
        self._study = study
        self.uri = tracking_uri(study.storage, uri)
        self.unavailable: TrackingUnavailableError | None = None
        if sampling_seconds is None and os.environ.get(SWITCH, "").lower() in {"true", "1"}:
            sampling_seconds = 1.0
        self._sampling_seconds = sampling_seconds
        self._samplers: dict[str, MachineSampler] = {}

    def arm_started(self, plan: Plan) -> None:
        """Watch the machine if asked to, unless the arm is sealed or a sealed one ran in this process."""
        if self._sampling_seconds is not None and not plan.is_sealed and not round_ran():
            device = self._study.spec.compute.device
            self._samplers[plan.arm] = MachineSampler(self._sampling_seconds, device)

    def step(self, plan: Plan, done: int, steps: int) -> None:
        """Do nothing: curves are logged in one batch with the release."""

    def arm_failed(self, plan: Plan) -> None:
        """Log nothing: an arm that was interrupted has released nothing yet."""
        self._end(plan)

    def released(self, plan: Plan, release: Release) -> None:
        """Log every release that is not logged yet, unless a sealed arm is still to come."""
        self._end(plan)
        try:
            sync_study(self._study, uri=self.uri)
            self.unavailable = None
        except TrackingUnavailableError as error:
            self.unavailable = error
            _log.warning(
                "%s The study goes on; log its releases later with: privtune study sync %s",
                error,
                self._study.name,
            )

    def _end(self, plan: Plan) -> None:
        if (sampler := self._samplers.pop(plan.arm, None)) is not None:
            path = self._study._life.place(f"{plan.arm}/{_SAMPLES}")
            write_samples(sampler.stop(), path)


def sync_study(study: Study, *, uri: str | None = None) -> tuple[str, ...]:
    """Log every release of a study that its MLflow store does not hold yet.

    Args:
        study: The study.
        uri: Tracking URI; ``MLFLOW_TRACKING_URI``, or the store beside the study's database.

    Returns:
        The arms that were logged now; none while a sealed arm has not been released.

    Raises:
        TrackingUnavailableError: If the store cannot be reached. Run it again later: what was
            logged completely is not logged twice.
    """
    status = study.status()
    if any(arm.plan.is_sealed and arm.release is None for arm in status):
        return ()
    released = {arm.plan.arm: (arm.plan, arm.release) for arm in status if arm.release is not None}
    if not released:
        return ()
    logged = []
    with open_client(study.storage, tracking_uri(study.storage, uri)) as client:
        experiment = experiment_id(
            client,
            study.name,
            storage=study.storage,
            tags={"privtune.kind": "study", "privtune.task": study.spec.task_name},
        )
        there = published(client, experiment)
        missing = {arm: pair for arm, pair in released.items() if pair[0].digest() not in there}
        if not missing:
            return ()
        view = budget_view(study)
        records = {
            arm: _tagged(arm_record(study, plan, release, view), study)
            for arm, (plan, release) in missing.items()
        }
        for arm, record in records.items():
            _write(client, experiment, study, record, view)
            logged.append(arm)
        client.set_experiment_tag(experiment, "mlflow.note.content", study_note(study, view))
        client.set_experiment_tag(experiment, VIEW_TAG, _view(study, status))
    return tuple(logged)


def _tagged(record: ArmRecord, study: Study) -> ArmRecord:
    """Add what only this tracker asks for: the arm's colour, and what its machine metrics say."""
    tags = {
        "mlflow.runColor": colours([plan.arm for plan in study.plans])[record.arm],
        "privtune.system_metrics": machine_state(
            sealed=record.sealed, watched=_samples_path(study, record.arm).exists()
        ),
    }
    return replace(record, tags={**record.tags, **tags})


def _write(
    client: MlflowClient, experiment: str, study: Study, record: ArmRecord, view: BudgetView
) -> None:
    plans = [plan.arm for plan in study.plans]
    write_record(
        client,
        experiment,
        record,
        model=study.model_path(record.arm),
        report=lambda: render_arm(record, view),
        samples=() if record.sealed else read_samples(_samples_path(study, record.arm)),
        number=plans.index(record.arm),
    )


def _view(study: Study, status: Sequence[ArmStatus]) -> str:
    releases = [arm.release for arm in status if arm.release is not None]
    curves = {CURVE_NAMES.get(name, name) for release in releases for name in release.curves}
    released = dict.fromkeys(name for release in releases for name in release.params)
    # An open study's space is what its function suggests: all that is released belongs to it.
    params = [name for name in study.spec.space or released if name in released]
    utility = utility_name(status).split(" or ")[0]
    return saved_view(
        params=params,
        curves=sorted(curves),
        utility=short_name(utility),
        ascending=lower_is_better(metric_of(utility)),
    )


def _samples_path(study: Study, arm: str) -> Path:
    return study.folder / arm / _SAMPLES
