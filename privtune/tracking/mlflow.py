"""Log releases to MLflow: one experiment a study, one run an arm, nothing sealed.

Nothing is written while a sealed arm is still to be released: the gap between two runs would tell
how long the round took, and so how many trials it ran. The truth about the budget is the ledger's;
MLflow is a mirror that anybody with access to it can edit. What could not be logged waits in the
study's own database, and :func:`sync_study` logs it.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from privtune.errors import PrivTuneError
from privtune.strategies import Plan
from privtune.study import Observer
from privtune.study.observer import releases_of
from privtune.study.seal import round_ran
from privtune.tracking.machine import MachineSampler
from privtune.tracking.process import TrackingProcess, TrackingTimeoutError
from privtune.tracking.store import OWNER_TAG, TrackingUnavailableError, tracking_uri
from privtune.tracking.view import saved_view
from privtune.tracking.writer import PackedModel, TrackingPlace
from privtune.views import record
from privtune.views.text import budget_line, first_metric

if TYPE_CHECKING:
    from privtune.strategies import Release
    from privtune.study import Study
    from privtune.study.observer import Arms

__all__ = ["MlflowObserver", "log_model", "sync_study"]

_log = logging.getLogger(__name__)
_PART = 8  # of what is logged, as one of so many parts, what waits is logged together


class MlflowObserver(Observer):
    """An observer that logs every release of a study to MLflow, within a time limit.

    All that one release logs has one budget of time, ``PRIVTUNE_TRACKING_SECONDS`` (60 unless it is set),
    more for a large model. Once it is used up, nothing more is logged by this observer.

    What is logged describes all arms each time. So after the first nine releases they are logged several at
    once: as soon as an eighth as many wait as are logged, with the last one, and when an arm fails.

    Args:
        study: The study.
        uri: Tracking URI; ``MLFLOW_TRACKING_URI``, or the store beside the study's database.
        sampling_seconds: Interval of system metrics, of arms that are not sealed. Unless given there
            are none, or one a second with ``MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=true``: load and
            memory tell how many records there are, and no ε covers that.

    Attributes:
        unavailable: Why MLflow could not be reached the last time, or ``None``.

    Raises:
        InvalidInputError: If ``PRIVTUNE_TRACKING_SECONDS`` is no number above 0.
    """

    def __init__(
        self,
        study: Study,
        *,
        uri: str | None = None,
        sampling_seconds: float | None = None,
    ) -> None:
        self._study = study
        self.uri = tracking_uri(study.storage, uri)
        self.unavailable: TrackingUnavailableError | None = None
        switch = os.environ.get(record.SWITCH, "")
        is_switched_on = switch.lower() in {"true", "1"}
        if sampling_seconds is None and is_switched_on:
            sampling_seconds = 1.0
        self._sampling_seconds = sampling_seconds
        self._samplers: dict[str, MachineSampler] = {}
        self._process = TrackingProcess()
        self._has_given_up = False
        self._logged = 0  # releases, by this observer
        self._waiting = 0

    def rehearsed(self, plan: Plan, seconds: float | None) -> None:
        """Start the tracking process early: it imports MLflow while the arm is trained."""
        if not self._has_given_up:
            self._process.start()

    def arm_started(self, plan: Plan) -> None:
        """Start to sample the machine if asked to; a sealed arm, this one or one before it, prevents it."""
        if self._sampling_seconds is None or plan.is_sealed or round_ran():
            return
        device = self._study.spec.placement.device
        self._samplers[plan.arm] = MachineSampler(self._sampling_seconds, device)

    def arm_failed(self, plan: Plan) -> None:
        """End the sampling and the tracking process after an interrupted arm, which released nothing."""
        self._end(plan)
        if self._waiting and not self._has_given_up:
            self._log()
        self._process.close()

    def released(self, plan: Plan, release: Release) -> None:
        """Log every release that MLflow lacks, once the last sealed arm is released."""
        self._end(plan)
        if self._has_given_up:
            return  # a tracker that hangs would hold up each release as long as the first
        self._waiting += 1
        is_complete = self._is_complete()
        if is_complete or _PART * self._waiting >= self._logged:
            self._log()
        if self._has_given_up or is_complete:
            self._process.close()

    def _log(self) -> None:
        """Log every release that MLflow lacks; warn once where it cannot be reached."""
        try:
            arms = _sync(self._study, self._process, self.uri)
        except TrackingUnavailableError as error:
            self._has_given_up = isinstance(error, TrackingTimeoutError)
            if self.unavailable is None or self._has_given_up:  # once, and not with each release
                _log.warning(
                    "%s The study goes on; log its releases later with: privtune study sync %s",
                    error,
                    self._study.name,
                )
            self.unavailable = error
        else:
            self.unavailable = None
            self._logged += len(arms)
            self._waiting = 0

    def _is_complete(self) -> bool:
        """Return whether every arm is released, so that nothing is left to log."""
        arms = self._study._life.arms().values()  # without the models of all releases
        return all(arm.release is not None for arm in arms if isinstance(arm.plan, Plan))

    def _end(self, plan: Plan) -> None:
        """End the sampling of an arm, if there is any, and write its samples beside the release."""
        sampler = self._samplers.pop(plan.arm, None)
        if sampler is not None:
            life = self._study._life
            path = life.place(f"{plan.arm}/{record.MACHINE}")
            sampler.keep(path)


def sync_study(study: Study, *, uri: str | None = None) -> tuple[str, ...]:
    """Log every release of a study that its MLflow store does not hold yet.

    Args:
        study: The study.
        uri: Tracking URI; ``MLFLOW_TRACKING_URI``, or the store beside the study's database.

    Returns:
        The arms that were logged now; none while a sealed arm has not been released.

    Raises:
        TrackingUnavailableError: If the store cannot be reached, or one release takes longer than
            ``PRIVTUNE_TRACKING_SECONDS``. Run it again later: what was logged completely is not logged
            twice.
    """
    with TrackingProcess() as process:
        return _sync(study, process, tracking_uri(study.storage, uri))


def _sync(study: Study, process: TrackingProcess, uri: str) -> tuple[str, ...]:
    """Log every release that the store does not hold; return the names of the logged arms.

    While a sealed arm is to come, nothing is written: see the module.
    """
    status = study.status()
    if any(arm.plan.is_sealed and arm.release is None for arm in status):
        return ()
    if not releases_of(status):
        return ()
    process.start()
    with process.opened(_place(study, uri)) as store:
        published = store.published()
        missing = []
        for arm in status:
            if arm.release is not None and arm.plan.digest() not in published:
                missing.append((arm.plan, arm.release))
        if not missing:
            return ()
        view = record.budget_view(study)
        for number, (plan, release) in enumerate(missing):
            if number > 0:
                store.begin_anew()
            arm_record = record.arm_record(study, plan, release, view)
            store.write(arm_record)
        note = record.study_note(study, view, status)
        store.describe(note, _view(study, status))
    return tuple(plan.arm for plan, _ in missing)


def _place(study: Study, uri: str) -> TrackingPlace:
    """Return the tracking place of a study: its storage, store and experiment, with the owner as a tag."""
    tags = {
        "privtune.kind": "study",
        "privtune.task": study.spec.task_name,
        OWNER_TAG: study._life.row.owner.id,
    }
    return TrackingPlace(study.storage, uri, study.name, tags)


def _view(study: Study, status: Arms) -> str:
    """Return the saved view of a study's experiment: its columns and charts."""
    releases = releases_of(status)
    utility = first_metric(status)
    short = record.short_name(utility)
    metric = short
    sureness = [f"{short}_low", f"{short}_high"]
    if any(release.repetitions for release in releases):
        metric = f"{short}_mean"
        sureness = [f"{short}_se"]
    return saved_view(
        params=_shared_params(study, status, releases),
        curves=_moving_curves(releases),
        utility=metric,
        sureness=sureness,
        ascending=utility.lower_is_better,
        arms=len(status),
    )


def _shared_params(study: Study, status: Arms, releases: Sequence[Release]) -> list[str]:
    """Return the hyperparameters that several arms have, first those of the space in its order.

    What one arm alone has is nothing to compare. What a build suggests is searched as well, and stands in no
    space; what arms fix is not.
    """
    counts: Counter[str] = Counter()
    for release in releases:
        counts.update(release.params.keys())
    shared = [name for name, count in counts.items() if count > 1]
    fixed: set[str] = set()
    for arm in status:
        fixed.update(arm.plan.params)
    space = study.spec.space
    params = [name for name in space if name in shared]
    for name in shared:
        is_searched = not space or name not in fixed
        if name not in space and is_searched:
            params.append(name)
    return params


def _moving_curves(releases: Sequence[Release]) -> list[str]:
    """Return the names, as MLflow shows them, of curves with more than one value in some release."""
    names = set()
    for release in releases:
        for name, values in release.curves.items():
            if _moves(values):
                names.add(record.CURVE_NAMES.get(name, name))
    return sorted(names)


def _moves(curve: Sequence[float]) -> bool:
    """Return whether a curve has at least two different finite values."""
    values = set(filter(math.isfinite, curve))
    return len(values) > 1


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
        TrackingUnavailableError: If the store cannot be reached, or that takes longer than
            ``PRIVTUNE_TRACKING_SECONDS``.
    """
    # It imports pyarrow, which whoever logs a run does without.
    from privtune.serving.exported import pyfunc_of

    release = study.release(arm)
    (plan,) = (plan for plan in study.plans if plan.arm == arm)
    if release.is_nothing:
        raise PrivTuneError(f"Arm {arm!r} of study {study.name!r} has released no model.")
    place = _place(study, tracking_uri(study.storage, uri))
    with TrackingProcess() as process:
        _sync(study, process, place.uri)
        with pyfunc_of(study, arm) as flavour, process.opened(place) as store:
            run = store.published().get(plan.digest())
            if run is None:
                raise PrivTuneError(
                    f"Arm {arm!r} cannot be logged before every sealed arm of study {study.name!r} has "
                    "been released."
                )
            view = record.budget_view(study)
            charge_id = ""
            for charge in view.charges:
                if (charge.study, charge.arm) == (study.name, arm):
                    charge_id = charge.id
            tags = flavour["metadata"] | {
                "privtune.method": release.guarantee.method,
                "privtune.charge": charge_id,
                "privtune.event": plan.charged.to_json()[:5_000],
            }
            lines = (
                f"{budget_line(study.spec.budget, view.spent, view.left)}.",
                tags["privtune.quote"],
                f"It takes {tags['privtune.inputs']}.",
            )
            model = PackedModel(run, flavour, register, tags, description="\n\n".join(lines))
            return store.log_model(model)
