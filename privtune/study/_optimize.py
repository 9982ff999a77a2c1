"""Run one arm of an open study: what a ``build`` declares, trained by the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.executor import Executor
from privtune.ledger import RECORD, refuse_other_unit
from privtune.names import check_name
from privtune.numbers import is_number, show_left
from privtune.spaces import SearchSpace
from privtune.strategies import (
    STRATEGIES,
    InRun,
    Plan,
    PlanningContext,
    Reporting,
    Scoring,
    Strategy,
)
from privtune.strategies.arms import check_objective, needs_of
from privtune.study.build import named_method
from privtune.study.lifecycle import Life, Stage, carry_on
from privtune.study.planning import plan_arms
from privtune.study.rounds import deadline_of
from privtune.study.run import TaskTrainer
from privtune.study.seal import open_stream, sealed
from privtune.study.workers import telling
from privtune.training.engine.compute import check_device
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.methods import METHODS

if TYPE_CHECKING:
    from privtune.strategies import Release
    from privtune.study.observer import Observer
    from privtune.tasks import Task
    from privtune.tasks._usable import RecordCheck

_log = logging.getLogger(__name__)
_RELEASED = (
    "Arm %r of study %r has been released: its release is returned, nothing was run or spent."
)


def optimize(
    life: Life,
    task: Task,
    *,
    strategy: Strategy,
    arm: str | None,
    epochs: float | None,
    expected_batch_size: int | None,
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
    anyway: bool = False,
    told: Callable[[RecordCheck], None] | None = None,
) -> Release:
    """Run one arm of an open study: see :meth:`privtune.Study.optimize`."""
    check_open(life)
    check_strategy(strategy, epsilon)
    strategy = replace(strategy, arm=arm or strategy.arm)  # type: ignore[type-var]
    check_name(strategy.arm, "arm")
    compute = life.spec.compute
    check_device(compute.device)
    chosen = Executor.of(executor or life.spec.executor, n_jobs)
    _check_executor(chosen, task, sampler=sampler, timeout=timeout, device=compute.device)
    context = _context(life, task, epochs, expected_batch_size, noise)
    quiet: AbstractContextManager[Any] = nullcontext()
    if needs_of(strategy).independent:
        quiet = sealed(life.place(f"sealed/{strategy.arm}.log"), rehearsal=True)
    with quiet:
        strategy = _with_method(strategy, task, context.schedule)
    target = target_of(life, strategy.arm) if epsilon is None else epsilon
    plan = _plan(strategy, context, epsilon=target, sampler=sampler, pruner=pruner)
    _check_alone(plan, sampler or pruner, chosen, executor=executor, n_jobs=n_jobs)

    def announce(plan: Plan, release: Release) -> None:
        observer.released(plan, release)
        tell(release)

    spinner = _spinner(plan) if show_progress_bar else nullcontext()
    with life.alone(plan.arm), telling() as say, spinner:
        trainer = TaskTrainer(
            life,
            task,
            observer,
            compute,
            chosen,
            say,
            strategy=strategy,
            sampler=sampler,
            pruner=pruner,
            deadline=deadline_of(timeout),
        )
        plan = life.planned(plan)
        stage = life.stage(plan)
        if stage is Stage.ANNOUNCED and (there := life.release(plan)) is not None:
            _log.warning(_RELEASED, plan.arm, life.name)
            return there
        look = partial(trainer.look, [plan], anyway=anyway, told=told)
        if stage is not Stage.PLANNED or (anyway and told is None):
            look = None  # type: ignore[assignment]
        (release,) = carry_on(life, [plan], trainer, observer, announce, look=look, anyway=anyway)
    return release


def check_open(life: Life) -> None:
    """Refuse a study that has a task: its arms are declared.

    Raises:
        PrivTuneError: If it has.
    """
    if life.spec.task is not None:
        raise PrivTuneError(
            f"Study {life.name!r} has a task and declared arms; study.run() runs them. Make an open "
            "study for a function of your own: privtune.create_study(name, budget=...)."
        )


def check_strategy(strategy: object, epsilon: object) -> None:
    """Refuse a strategy that is none, and an ε that is no number.

    Raises:
        InvalidInputError: If one of them is.
    """
    if not hasattr(strategy, "plan") or isinstance(strategy, type):
        allowed = "must be one of privtune.strategies, like PapernotSteinke(mean_runs=10)"
        raise InvalidInputError("strategy", strategy, allowed)
    if epsilon is not None and not is_number(epsilon):
        raise InvalidInputError("epsilon", epsilon, "must be a finite number above 0")


def _check_executor(
    chosen: Executor, task: Task, *, sampler: Any, timeout: float | None, device: str
) -> None:
    """Refuse other machines for what only this process has."""
    here = task.code is None or sampler is not None or timeout is not None
    if chosen.name in {"external", "ray", "slurm"} and here:
        raise InvalidInputError(
            "executor",
            chosen.name,
            "needs functions and data that workers can import, no sampler of your own and no timeout",
            "Put them into a module and give them as 'package.module:function', the data as a function that "
            "returns it.",
        )
    if chosen.name == "processes" and not here:
        chosen.slots(device)


def _context(
    life: Life, task: Task, epochs: Any, expected_batch_size: Any, noise: Any
) -> PlanningContext:
    """Return what the arm is planned with: public facts."""
    for name, value in (("epochs", epochs), ("expected_batch_size", expected_batch_size)):
        if value is None:
            raise InvalidInputError(
                name,
                None,
                "must be given: it says how often, and in samples of which expected size, a training sees "
                "the records",
                "study.optimize(..., epochs=10, expected_batch_size=64) is one way.",
            )
    budget, spec = life.ledger.budget(life.budget), life.spec
    refuse_other_unit(
        task.unit or RECORD, life.ledger.budget(life.budget).unit, "The data", life.budget
    )
    return PlanningContext(
        task=task,
        schedule=Schedule.from_epochs(
            records=task.train_records, epochs=epochs, expected_batch_size=expected_batch_size
        ),
        space=SearchSpace({}),
        delta=budget.delta,
        adjacency=budget.adjacency,
        scoring=Scoring.of(task.score),
        report=None if spec.report is None else Reporting.from_dict(spec.report),
        define_by_run=True,
        noise=NoiseOptions.of(noise),
    )


def _with_method(strategy: Strategy, task: Task, schedule: Schedule) -> Strategy:
    """Return the strategy with the method that ``build`` names, which every trial is charged for."""
    if "method" not in {field.name for field in fields(strategy)}:  # type: ignore[arg-type]
        return strategy
    of_arm: str = strategy.method  # type: ignore[attr-defined]
    found = named_method(task, schedule, getattr(strategy, "parameters", {}))
    if found in (None, of_arm):
        return strategy
    if of_arm != "dpsgd":
        raise InvalidInputError(
            "Candidate.method",
            found,
            f"differs from the arm's, {of_arm!r}",
            "Name the method once: in the candidate, or in the strategy.",
        )
    if found not in METHODS:
        raise InvalidInputError(
            "Candidate.method", found, f"must be one of {', '.join(sorted(METHODS))}"
        )
    return replace(strategy, method=found)  # type: ignore[type-var]


def _plan(
    strategy: Strategy,
    context: PlanningContext,
    *,
    epsilon: float,
    sampler: Any,
    pruner: Any,
) -> Plan:
    """Plan the arm. Touches no data.

    Raises:
        StrategyError: If the strategy needs a search space, or a validation split that there is not, or does
            not cover the pruner.
        DependentSamplerError: If it does not cover the sampler.
    """
    check_objective(
        strategy,
        scored=context.task.validation_records > 0,
        sampler=sampler,
        pruner=pruner,
        others=[InRun.name, *(s.name for s in STRATEGIES.values() if not s.needs.task)],
    )
    (plan,) = plan_arms([strategy], context, epsilon=epsilon).plans
    for name, value in (("sampler", sampler), ("pruner", pruner)):
        if value is not None and plan.search is None:
            raise InvalidInputError(
                name,
                type(value).__name__,
                f"is for a strategy that searches, and arm {plan.arm!r} has one training",
                "Leave it out.",
            )
    return plan


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


def target_of(life: Life, arm: str) -> float:
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


def _spinner(plan: Plan) -> AbstractContextManager[Any]:
    """Show that an arm runs. How far a sealed one is would tell its number of runs."""
    import sys

    from rich.console import Console

    label = f"{plan.arm} (sealed)" if plan.is_sealed else plan.arm
    return Console(file=open_stream(sys.stderr)).status(label)
