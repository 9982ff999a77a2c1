"""Log releases to MLflow: one experiment a study, one run an arm, nothing sealed.

Nothing is written while a sealed arm is still to be released: the gap between two runs would tell
how long the round took, and so how many trials it ran. The truth about the budget is the ledger's;
MLflow is a mirror that anybody with access to it can edit. What could not be logged waits in the
study's own database, and :func:`sync_study` logs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from privtune.errors import PrivTuneError
from privtune.files import forget_times
from privtune.ledger.places import artifact_root
from privtune.study import Observer
from privtune.study.seal import round_ran
from privtune.tracking import store
from privtune.tracking.machine import MachineSampler
from privtune.tracking.model import dated, pyfunc_of
from privtune.tracking.store import TrackingUnavailableError, tracking_uri
from privtune.tracking.view import VIEW_TAG, saved_view
from privtune.training.mechanism.metrics import lower_is_better
from privtune.views import record
from privtune.views.text import budget_line, first_metric, metric_of

if TYPE_CHECKING:
    from privtune.strategies import Plan, Release
    from privtune.study import ArmStatus, Study

__all__ = ["MlflowObserver", "log_model", "sync_study"]

_log = logging.getLogger(__name__)


class MlflowObserver(Observer):
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
        if sampling_seconds is None and os.environ.get(record.SWITCH, "").lower() in {"true", "1"}:
            sampling_seconds = 1.0
        self._sampling_seconds = sampling_seconds
        self._samplers: dict[str, MachineSampler] = {}

    def arm_started(self, plan: Plan) -> None:
        """Watch the machine if asked to, unless the arm is sealed or a sealed one ran in this process."""
        if self._sampling_seconds is not None and not plan.is_sealed and not round_ran():
            device = self._study.spec.compute.device
            self._samplers[plan.arm] = MachineSampler(self._sampling_seconds, device)

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
            sampler.keep(self._study._life.place(f"{plan.arm}/{record.MACHINE}"))


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
    released = [(arm.plan, arm.release) for arm in status if arm.release is not None]
    if not released:
        return ()
    with store.open_client(study.storage, tracking_uri(study.storage, uri)) as client:
        tags = {"privtune.kind": "study", "privtune.task": study.spec.task_name}
        experiment = store.experiment_id(client, study.name, storage=study.storage, tags=tags)
        there = store.published(client, experiment)
        missing = [pair for pair in released if pair[0].digest() not in there]
        if not missing:
            return ()
        view = record.budget_view(study)
        for plan, release in missing:
            arm = record.arm_record(study, plan, release, view)
            store.write_record(client, experiment, arm)
        client.set_experiment_tag(experiment, "mlflow.note.content", record.study_note(study, view))
        client.set_experiment_tag(experiment, VIEW_TAG, _view(study, status))
    return tuple(plan.arm for plan, _ in missing)


def _view(study: Study, status: Sequence[ArmStatus]) -> str:
    releases = [arm.release for arm in status if arm.release is not None]
    curves = {record.CURVE_NAMES.get(name, name) for release in releases for name in release.curves}
    released = dict.fromkeys(name for release in releases for name in release.params)
    # What a build suggests is searched as well, and stands in no space; what arms fix is not.
    fixed = {name for arm in status for name in arm.plan.params}
    space = study.spec.space
    params = [name for name in space if name in released]
    params += [name for name in released if name not in space and (not space or name not in fixed)]
    utility = first_metric(status)
    mean = "_mean" if any(release.repetitions for release in releases) else ""
    return saved_view(
        params=params,
        curves=sorted(curves),
        utility=f"{record.short_name(utility)}{mean}",
        ascending=lower_is_better(metric_of(utility)),
        arms=len(status),
    )


def log_model(
    study: Study, arm: str, *, register: str | None = None, uri: str | None = None
) -> str:
    """Log a released model as an MLflow model of its arm's run, and register it if asked.

    It takes raw rows, and can be loaded where this package is not installed: see ``export_model``.

    Args:
        study: The study.
        arm: A released arm.
        register: Name in the model registry; a new version is made, with tags from the ledger.
        uri: Tracking URI; ``MLFLOW_TRACKING_URI``, or the store beside the study's database.

    Returns:
        The model's URI.

    Raises:
        PrivTuneError: If the arm has released no model.
        TrackingUnavailableError: If the store cannot be reached.
    """
    release = study.release(arm)
    (plan,) = (plan for plan in study.plans if plan.arm == arm)
    if release.is_nothing:
        raise PrivTuneError(f"Arm {arm!r} of study {study.name!r} has released no model.")
    sync_study(study, uri=uri)
    place = tracking_uri(study.storage, uri)
    with store.open_client(study.storage, place) as client, _fluent(place):
        experiment = store.experiment_id(client, study.name, storage=study.storage, tags={})
        run = store.published(client, experiment).get(plan.digest())
        if run is None:
            raise PrivTuneError(
                f"Arm {arm!r} cannot be logged before every sealed arm of study {study.name!r} has "
                "been released."
            )
        with pyfunc_of(study, arm) as given:
            import mlflow

            info = dated().log(
                artifact_path=None,
                name="model",
                flavor=mlflow.pyfunc,
                run_id=run,
                registered_model_name=register,
                tags=given["metadata"],
                **given,
            )
        forget_times(artifact_root(study.storage) / "mlflow", within=True)
        if register is not None:
            view = record.budget_view(study)
            ours = [c.id for c in view.charges if (c.study, c.arm) == (study.name, arm)]
            tags = given["metadata"] | {
                "privtune.method": release.guarantee.method,
                "privtune.charge": ours[-1] if ours else "",
                "privtune.event": plan.charged.to_json()[:5_000],
            }
            number = str(info.registered_model_version)
            for name, value in tags.items():
                client.set_model_version_tag(register, number, name, value)
            note = budget_line(study.spec.budget, view.spent, view.left)
            client.update_model_version(register, number, description=note)
    return str(info.model_uri)


@contextlib.contextmanager
def _fluent(uri: str) -> Iterator[None]:
    """Point MLflow's global functions, which its model flavours use, at a store for a while."""
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)
