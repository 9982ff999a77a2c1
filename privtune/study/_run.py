"""Run a study: charge all arms, then run each arm and release it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from privtune.execution.training import dry_run
from privtune.strategies import NonPrivateError, Plan, Release, TrialResult
from privtune.study._release import utility_of
from privtune.study._round import StudyRound
from privtune.study._study import StudyFinishedError
from privtune.study._worker import make_files, work
from privtune.study.failures import stopping
from privtune.study.spec import StudySpec
from privtune.training.compute import check_stack

if TYPE_CHECKING:
    from privtune.ledger import Charge
    from privtune.study._study import Study
    from privtune.study.observer import Observer
    from privtune.tasks import Task, TaskData
    from privtune.training.compute import Compute

__all__ = ["run_study"]


def run_study(
    study: Study,
    observer: Observer,
    *,
    n_jobs: int,
    stack: int | Literal["auto"] | None,
    non_private: bool,
) -> tuple[Release, ...]:
    """Run what has not been released: see :meth:`privtune.Study.run`."""
    task = study.spec.load_task()
    if all(study._store.get(study.name, plan.arm, "announced") for plan in study.plans):
        raise StudyFinishedError(
            f"Study {study.name!r} is finished: every arm has been released, nothing was run and "
            f"nothing was spent. See it with: privtune study compare {study.name}."
        )
    if not non_private:
        _check_private(study)
    task.check()
    compute = study.spec.compute
    if stack is not None:
        compute = replace(compute, stack=check_stack(stack))
    seconds = {}
    for plan in study.plans:
        if study._store.get(study.name, plan.arm, "release") is None:
            with observer.guard(plan):
                seconds[plan.arm] = dry_run(plan, task, compute=compute)
    charges = study._reserve()
    loaded: TaskData | None = None
    releases = []
    for plan in study.plans:
        charge = charges.get(plan.arm)
        release = study._stored_release(plan)
        if release is None:
            study._start(plan, charge)
            with stopping(study._store, study.name, plan.arm):
                loaded = task.load_checked() if loaded is None else loaded
            release = _run_arm(
                study,
                plan,
                charge=charge,
                task=task,
                data=loaded,
                observer=observer,
                seconds=seconds[plan.arm],
                n_jobs=n_jobs,
                compute=compute,
            )
        study._settle(plan, charge)
        if not study._store.get(study.name, plan.arm, "announced"):
            observer.released(plan, release)
            study._store.set(study.name, plan.arm, "announced", True)
        releases.append(release)
    return tuple(releases)


def _check_private(study: Study) -> None:
    without = [plan.arm for plan in study.plans if not plan.is_private]
    if without:
        raise NonPrivateError(
            f"Study {study.name!r} holds {', '.join(without)} without any guarantee (epsilon is "
            "infinite): it trains on the data as it is. Run it with --non-private if the data "
            "may be shown to everybody, or take it out of the study. Nothing was run."
        )


def _run_arm(
    study: Study,
    plan: Plan,
    *,
    charge: Charge | None,
    task: Task,
    data: TaskData,
    observer: Observer,
    seconds: float,
    n_jobs: int,
    compute: Compute,
) -> Release:
    observer.arm_started(plan)
    files = replace(
        make_files(study._store, study.spec, plan, task=task, data=data), compute=compute
    )
    if not plan.is_sealed:
        files = replace(files, on_step=lambda done, steps: observer.step(plan, done, steps))
    charge_id = None if charge is None else charge.id
    trials = StudyRound(
        study=study.name,
        store=study._store,
        ledger=study._ledger,
        charge_id=charge_id,
        files=files,
        n_jobs=n_jobs,
        worker=(work, (study.storage, study.name, plan.arm, charge_id, n_jobs, compute.stack)),
    )
    started = time.perf_counter()
    try:
        with observer.guard(plan):
            outcome = _strategy(study.spec, plan).run(plan, trials)
    except BaseException:
        observer.arm_failed(plan)
        raise
    if not plan.is_sealed:
        seconds = time.perf_counter() - started
    if outcome.result is not None:
        outcome = replace(outcome, result=_shaped(task, outcome.result))
    return study._save(plan, outcome, seconds, utility_of(task, outcome.result, data))


def _strategy(spec: StudySpec, plan: Plan) -> Any:
    (arm,) = (arm for arm in spec.arms if arm.name == plan.arm)
    return arm.to_strategy()


def _shaped(task: Task, result: TrialResult) -> TrialResult:
    """Note the names and shapes of the parameters, so that anybody can load them."""
    if result.shapes or result.weights.numel() == 0:
        return result
    named = task.model().named_parameters()
    return replace(result, shapes={n: tuple(p.shape) for n, p in named if p.requires_grad})
