"""Run one arm of an open study: the user's own function, driven by the life of the arm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.executor import Executor
from privtune.execution.gpus import gpu_slots
from privtune.names import check_name
from privtune.numbers import is_number, show_left
from privtune.study._standing import Stage
from privtune.study.imported import ImportedObjective
from privtune.study.lifecycle import Life, carry_on
from privtune.study.objective import (
    OBJECTIVE,
    Objective,
    ObjectiveFiles,
    ObjectiveRound,
    deadline_of,
    in_threads,
    plan_objective,
    rehearse,
)
from privtune.study.seal import open_stream
from privtune.study.workers import give_out, telling

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from privtune.ledger import Rounds
    from privtune.strategies import Outcome, Plan, Release, Strategy
    from privtune.strategies._base import Round
    from privtune.study.observer import Observer
    from privtune.study.user_training import DPSGD, Validation
    from privtune.training.mechanism.scoring import Measured

__all__ = ["optimize"]

_log = logging.getLogger(__name__)
_RELEASED = (
    "Arm %r of study %r has been released: its release is returned, nothing was run or spent."
)


def optimize(
    life: Life,
    objective: Objective | str,
    *,
    strategy: Strategy,
    arm: str | None,
    training: DPSGD,
    validation: Validation | None,
    epsilon: float | None,
    sampler: Any,
    pruner: Any,
    executor: str | Mapping[str, Any] | None,
    n_jobs: int,
    timeout: float | None,
    tell: Callable[[Release], None],
    observer: Observer,
    show_progress_bar: bool,
    noise: Any = None,
) -> Release:
    """Run one arm of an open study: see :meth:`privtune.Study.optimize`."""
    if life.spec.task is not None:
        raise PrivTuneError(
            f"Study {life.name!r} has a task and declared arms; study.run() runs them. Make an open "
            "study for a function of your own: privtune.create_study(name, budget=...)."
        )
    _check_kinds(
        objective=objective,
        strategy=strategy,
        training=training,
        validation=validation,
        epsilon=epsilon,
    )
    strategy = replace(strategy, arm=arm or strategy.arm)  # type: ignore[type-var]
    chosen = Executor.of(executor or life.spec.executor, n_jobs)
    if isinstance(objective, str):
        objective = ImportedObjective.at(objective).load()
    imported = ImportedObjective.of(objective)
    if sampler is not None or timeout is not None:
        imported = None  # what only this process has, or keeps
    if chosen.name in {"external", "ray", "slurm"} and imported is None:
        raise InvalidInputError(
            "executor",
            executor,
            "needs a function that workers can import, no sampler of your own and no timeout",
            "Put it into a module and give it as 'package.module:function'.",
        )
    if chosen.name == "processes" and imported is not None:
        gpu_slots(chosen.jobs, gpus=chosen.gpus, device=life.spec.compute.device)
    if strategy.arm not in life.rows():
        check_name(strategy.arm, "arm")
    plan = plan_objective(
        strategy,
        training,
        validation,
        budget=life.ledger.budget(life.budget),
        epsilon=_target(life, strategy.arm) if epsilon is None else epsilon,
        sampler=sampler,
        pruner=pruner,
        noise=noise,
        unit=life.ledger.unit(life.budget),
    )
    _check_used(plan, sampler=sampler, pruner=pruner)
    _check_alone(plan, sampler or pruner, chosen, executor=executor, n_jobs=n_jobs)

    def told(plan: Plan, release: Release) -> None:
        observer.released(plan, release)
        tell(release)

    spinner = _spinner(plan) if show_progress_bar else nullcontext()
    with life.alone(plan.arm), telling() as say, spinner:
        deadline = deadline_of(timeout)
        trainer = _ObjectiveTrainer(
            life, objective, imported, strategy, sampler, pruner, chosen, deadline, say
        )
        plan = life.planned(plan)
        if life.stage(plan) is Stage.ANNOUNCED and (there := life.release(plan)) is not None:
            _log.warning(_RELEASED, plan.arm, life.name)
            return there
        (release,) = carry_on(life, [plan], trainer, observer, told)
    return release


def _check_kinds(**given: Any) -> None:
    """Refuse arguments of another kind than :func:`optimize` takes."""
    from privtune.study.user_training import DPSGD, Validation

    kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        "objective": (
            lambda value: callable(value) or isinstance(value, str),
            "a function of a trial, or its path, 'package.module:function'",
        ),
        "strategy": (
            lambda value: hasattr(value, "plan") and not isinstance(value, type),
            "one of privtune.strategies, like PapernotSteinke(mean_runs=10)",
        ),
        "training": (lambda value: isinstance(value, DPSGD), "a privtune.DPSGD"),
        "validation": (
            lambda value: isinstance(value, Validation | None),
            "a privtune.Validation, or None",
        ),
        "epsilon": (lambda value: value is None or is_number(value), "a finite number above 0"),
    }
    for name, value in given.items():
        fits, what = kinds[name]
        if not fits(value):
            raise InvalidInputError(name, value, f"must be {what}")


def _check_used(plan: Plan, **given: Any) -> None:
    """Refuse a sampler or a pruner for an arm that runs one training.

    A validation split passes: strategies that are compared are called with the same one.
    """
    for name, value in given.items():
        if value is not None and plan.search is None:
            raise InvalidInputError(
                name,
                type(value).__name__,
                f"is for a strategy that searches, and arm {plan.arm!r} has one training",
                "Leave it out.",
            )


def _check_alone(plan: Plan, of_optuna: Any, chosen: Executor, **given: Any) -> None:
    """Refuse other processes where Optuna's objects must see one trial after the other."""
    if of_optuna is None or plan.is_sealed or chosen.name == "inline":
        return
    name = "n_jobs" if given["executor"] is None else "executor"
    raise InvalidInputError(
        name,
        given[name],
        "does not go with a sampler or pruner of Optuna, which see one trial after the other, in this "
        "process",
        "Leave one of them out.",
    )


def _target(life: Life, arm: str) -> float:
    """Return the whole budget, if this arm is the first to be charged to it."""
    others = [
        charge
        for charge in life.ledger.charges(life.budget)
        if (charge.study, charge.arm) != (life.name, arm) and charge.state != "voided"
    ]
    if others:
        raise PrivTuneError(
            f"Budget {life.budget!r} has been charged before: say what arm {arm!r} may cost, "
            f"epsilon=..., of the {show_left(life.ledger.remaining(life.budget))} that are left."
        )
    return life.spec.target_epsilon


@dataclass
class _ObjectiveTrainer:
    """Trains an arm by calling the user's function."""

    life: Life
    objective: Objective
    imported: ImportedObjective | None
    strategy: Strategy
    sampler: Any
    pruner: Any
    executor: Executor
    deadline: float
    tell: Callable[[str], None]
    rehearsed: Any = None

    @property
    def independent(self) -> Any:
        """A sampler of the user's own, which is not Optuna's."""
        import optuna

        return None if isinstance(self.sampler, optuna.samplers.BaseSampler) else self.sampler

    def rehearse(self, plan: Plan) -> None:
        """Call the function once on made-up records."""
        self.rehearsed = rehearse(
            self.objective,
            plan,
            self.strategy,
            sampler=self.independent,
            stack=self.life.spec.compute.stack,
        )

    def prepare(self, plan: Plan) -> tuple[Strategy, Round]:
        """Return the strategy as it was given, and its round."""
        life, charge = self.life, self.life.charge_of(plan)
        files = ObjectiveFiles.make(
            life,
            plan,
            self.objective,
            sampler=self.independent,
            deadline=self.deadline,
            facts=self.rehearsed.facts,
            stack=self.rehearsed.stack,
        )
        return self.strategy, ObjectiveRound(
            kept=life.trials,
            ledger=life.ledger,
            charge_id=None if charge is None else charge.id,
            files=files,
            own=files,
            give_out=self._give_out(plan, files),
            sampler=self.sampler if self.independent is None else None,
            pruner=self.pruner,
        )

    def _give_out(self, plan: Plan, files: ObjectiveFiles) -> Callable[[Rounds], None] | None:
        """Return who else trains the rows; a function that cannot be imported runs in threads."""
        charge = self.life.charge_of(plan)
        if charge is None or self.executor.name == "inline":
            return None
        if not plan.is_sealed and (self.sampler is not None or self.pruner is not None):
            return None  # Optuna's objects see one trial after the other, in this process
        if self.imported is None:
            return in_threads(files, charge.id, self.executor.jobs)
        files.results.put(OBJECTIVE, self.imported.to_json(), replace=True)
        compute = self.life.spec.compute
        return give_out(self.executor, self.life, plan, compute=compute, tell=self.tell)

    def finish(self, plan: Plan, outcome: Outcome) -> tuple[Outcome, Mapping[str, Measured]]:
        """Add nothing: only the user's function knows the model."""
        return outcome, {}

    def machine(self) -> Mapping[str, str]:
        """Return the versions here; the device is the function's affair."""
        from privtune.training.engine.machine import versions

        return {**versions(), "device": "the function's own"}


def _spinner(plan: Plan) -> AbstractContextManager[Any]:
    """Show that an arm runs. How far a sealed one is would tell its number of runs."""
    import sys

    from rich.console import Console

    label = f"{plan.arm} (sealed)" if plan.is_sealed else plan.arm
    return Console(file=open_stream(sys.stderr)).status(label)
