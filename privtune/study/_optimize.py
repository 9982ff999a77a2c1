"""The little loop under ``study.optimize``: plan, charge, run, release."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.study._study import StudyFinishedError
from privtune.study.failures import stopping
from privtune.study.objective import (
    Objective,
    ObjectiveFiles,
    ObjectiveRound,
    deadline_of,
    plan_objective,
    rehearse,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from privtune.strategies import Plan, Release, Strategy
    from privtune.study._study import Study
    from privtune.study.observer import Observer
    from privtune.study.user_training import DPSGD, Validation

__all__ = ["optimize"]


def optimize(
    study: Study,
    objective: Objective,
    *,
    strategy: Strategy,
    training: DPSGD,
    validation: Validation | None,
    epsilon: float | None,
    sampler: Any,
    pruner: Any,
    n_jobs: int,
    timeout: float | None,
    callbacks: Sequence[Callable[[Study, Release], None]],
    observer: Observer,
    show_progress_bar: bool,
    noise: Any = None,
) -> Release:
    """Run one arm of an open study: see :meth:`privtune.Study.optimize`."""
    if study.spec.task is not None:
        raise PrivTuneError(
            f"Study {study.name!r} has a task and declared arms; study.run() runs them. Make an open "
            "study for a function of your own: privtune.create_study(name, budget=...)."
        )
    if n_jobs < 1:
        raise InvalidInputError("n_jobs", n_jobs, "must be a whole number of at least 1")
    budget = study._ledger.budget(study.spec.budget.name)
    plan = plan_objective(
        strategy,
        training,
        validation,
        budget=budget,
        epsilon=_target(study, strategy.arm) if epsilon is None else epsilon,
        sampler=sampler,
        pruner=pruner,
        noise=noise,
    )
    known = plan.arm in study.arms
    if not known or study._store.get(study.name, plan.arm, "release") is None:
        rehearse(objective, plan, sampler=_independent(sampler))
    study._add_arm(plan)
    if study._store.get(study.name, plan.arm, "announced"):
        raise StudyFinishedError(
            f"Arm {plan.arm!r} of study {study.name!r} has been released; nothing was run and nothing "
            f"was spent. It is study.release({plan.arm!r})."
        )
    charge = study._reserve()[plan.arm]
    release = study._stored_release(plan)
    if release is None:
        study._start(plan, charge)
        trials = _round(
            study,
            plan,
            charge.id,
            objective=objective,
            sampler=sampler,
            pruner=pruner,
            n_jobs=n_jobs,
            timeout=timeout,
        )
        observer.arm_started(plan)
        started = time.perf_counter()
        try:
            shown = _spinner(plan) if show_progress_bar else nullcontext()
            with observer.guard(plan), shown, stopping(study._store, study.name, plan.arm):
                outcome = strategy.run(plan, trials)
        except BaseException:
            observer.arm_failed(plan)
            raise
        seconds = None if plan.is_sealed else time.perf_counter() - started
        release = study._save(plan, outcome, seconds, {})
    study._settle(plan, charge)
    observer.released(plan, release)
    for callback in callbacks:
        callback(study, release)
    study._store.set(study.name, plan.arm, "announced", True)
    return release


def _target(study: Study, arm: str) -> float:
    """Return the whole budget, if this arm is the first to be charged to it."""
    budget = study.spec.budget
    others = [
        charge
        for charge in study._ledger.charges(budget.name)
        if (charge.study, charge.arm) != (study.name, arm) and charge.state != "voided"
    ]
    if others:
        raise PrivTuneError(
            f"Budget {budget.name!r} has been charged before: say what arm {arm!r} may cost, "
            f"epsilon=..., of the {study.remaining():.4g} that are left."
        )
    return study.spec.target_epsilon


def _round(
    study: Study,
    plan: Plan,
    charge_id: str,
    *,
    objective: Objective,
    sampler: Any,
    pruner: Any,
    n_jobs: int,
    timeout: float | None,
) -> ObjectiveRound:
    import optuna

    from privtune.spaces import SearchSpace

    own = ObjectiveFiles(
        plan=plan,
        secret=study._secret_of(plan),
        folder=study.folder / "sealed" / plan.arm,
        space=SearchSpace({}),
        objective=objective,
        sampler=_independent(sampler),
        deadline=deadline_of(timeout),
        live={},
    )
    return ObjectiveRound(
        study=study.name,
        store=study._store,
        ledger=study._ledger,
        charge_id=charge_id,
        files=own,
        own=own,
        n_jobs=n_jobs,
        sampler=sampler if isinstance(sampler, optuna.samplers.BaseSampler) else None,
        pruner=pruner,
    )


def _independent(sampler: Any) -> Any:
    """Return a sampler of the user's own, which is not Optuna's."""
    import optuna

    return None if isinstance(sampler, optuna.samplers.BaseSampler) else sampler


def _spinner(plan: Plan) -> AbstractContextManager[Any]:
    """Show that an arm runs. How far a sealed one is would tell its number of runs."""
    from rich.console import Console

    label = f"{plan.arm} (sealed)" if plan.is_sealed else plan.arm
    return Console(stderr=True).status(label)
