"""Run one arm of an open study: trained by the engine (a ``build``) or by another library (a mechanism)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from privtune.accounting._checks import check_number
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.executor import Executor
from privtune.ledger import RECORD
from privtune.ledger.values import refuse_other_unit
from privtune.names import check_name
from privtune.numbers import show_left
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
from privtune.study.declared import DeclaredTrainer, DeclaredTrial, Mechanism, plan_declared
from privtune.study.lifecycle import Life, Stage, Trainer, carry_on
from privtune.study.planning import plan_arms
from privtune.study.rounds import deadline_of
from privtune.study.run import TaskTrainer
from privtune.study.seal import open_stream, sealed
from privtune.study.workers import telling
from privtune.tasks import Score, Task
from privtune.training.engine.compute import check_device
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.methods import METHODS

if TYPE_CHECKING:
    from privtune.strategies import Release
    from privtune.study.observer import Observer
    from privtune.tasks._usable import RecordCheck
    from privtune.training.mechanism.data import TensorData

_log = logging.getLogger(__name__)


def optimize(
    life: Life,
    task: Task,
    *,
    strategy: Strategy,
    epochs: float | None,
    expected_batch_size: int | None,
    epsilon: float | None,
    sampler: Any,
    pruner: Any,
    executor: str | Mapping[str, Any] | None,
    n_jobs: int,
    timeout: float | None,
    noise: Any,
    anyway: bool,
    told: Callable[[RecordCheck], None] | None,
    **how: Any,
) -> Release:
    """Run an arm that the engine trains: see :meth:`privtune.Study.optimize`."""
    compute = life.spec.compute
    check_device(compute.device)
    chosen = Executor.of(executor or life.spec.executor, n_jobs)
    # Other machines and processes have nothing that only this process holds.
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
        chosen.slots(compute.device)
    context = _context(life, task, epochs, expected_batch_size, noise)
    quiet: AbstractContextManager[Any] = nullcontext()
    if needs_of(strategy).independent:
        quiet = sealed(life.place(f"sealed/{strategy.arm}.log"), rehearsal=True)
    with quiet:
        strategy = _with_method(strategy, task, context.schedule)
    scored = task.validation_records > 0
    _check_covered(strategy, scored=scored, sampler=sampler, pruner=pruner, others=[InRun.name])
    plan = _plan(life, strategy, context, epsilon)
    _check_searches(plan, sampler=sampler, pruner=pruner)
    if (sampler or pruner) is not None and not plan.is_sealed and chosen.name != "inline":
        name, given = ("n_jobs", n_jobs) if executor is None else ("executor", executor)
        raise InvalidInputError(
            name,
            given,
            "does not go with a sampler or pruner of Optuna, which see one trial after the other, in this "
            "process",
            "Leave one of them out.",
        )

    def trainer(say: Callable[[str], None]) -> TaskTrainer:
        return TaskTrainer(
            life,
            task,
            how["observer"],
            compute,
            chosen,
            say,
            strategy=strategy,
            sampler=sampler,
            pruner=pruner,
            deadline=deadline_of(timeout),
        )

    return _run(life, plan, trainer, anyway=anyway, told=told, **how)


def optimize_declared(
    life: Life,
    objective: Callable[[DeclaredTrial], Any],
    mechanism: Mechanism,
    *,
    strategy: Strategy,
    score: Score | str | None,
    split: Mapping[str, int] | None,
    validation: Any,
    public: Mapping[str, Any] | None,
    epsilon: float | None,
    sampler: Any,
    timeout: float | None,
    how: Mapping[str, Any],
    **others: Any,
) -> Release:
    """Run an arm of a declared mechanism, whose objective closes over its training records.

    **Guarantee**: what is released is covered by the arm's event if every training is of the event of its
    ``trial.plan``, and the validation records are met through ``trial.score`` alone.
    """
    for name, value in others.items():
        if value is not None and value is not False and (name, value) != ("n_jobs", 1):
            raise InvalidInputError(
                name, "given", "goes with a build, and a mechanism is declared", "Leave it out."
            )
    if not callable(objective):
        raise InvalidInputError("objective", objective, "must be a function of a trial")
    if not isinstance(mechanism, Mechanism):
        raise InvalidInputError(
            "mechanism", type(mechanism).__name__, "must be a privtune.Mechanism"
        )
    if epsilon is not None and not mechanism.calibrate:
        raise InvalidInputError(
            "epsilon",
            epsilon,
            "does not go with calibrate=False: the arm costs what the declared event costs",
            "Leave one of them out.",
        )
    score = score if isinstance(score, Score) else Score(score or "accuracy")
    if score.metric == "loss":
        raise InvalidInputError(
            "score",
            "loss",
            "is that which is trained on, which a declared mechanism does not tell",
            "Use privtune.Score(function of a model and one record, bound=...).",
        )
    data, is_public = _validation(validation, public)
    _check_covered(strategy, scored=data is not None, sampler=sampler, pruner=None)
    budget = life.ledger.budget(life.budget)
    if data is not None and not is_public:
        refuse_other_unit(data.unit or RECORD, budget.unit, "The validation split", budget.name)
    records = (split or {}).get("validation") or (1 if data is None else len(data))
    context = PlanningContext(
        task=_declared_task(mechanism, records, public=is_public),
        schedule=mechanism.schedule,
        space=SearchSpace({}),
        delta=budget.delta,
        adjacency=budget.adjacency,
        scoring=Scoring.of(score),
        define_by_run=True,
        declared=mechanism.method,
    )
    if epsilon is None and mechanism.calibrate:
        epsilon = _target_of(life, strategy.arm)
    plan = plan_declared(
        strategy, mechanism, context, epsilon=epsilon, unit=budget.unit, scored=data is not None
    )
    _check_searches(plan, sampler=sampler)
    function = None if isinstance(score.metric, str) else score.metric

    def trainer(_: object) -> DeclaredTrainer:
        return DeclaredTrainer(
            life, objective, strategy, sampler, deadline_of(timeout), data, function
        )

    return _run(life, plan, trainer, **how)


def named(life: Life, strategy: Strategy, arm: str | None, epsilon: object) -> Strategy:
    """Return the strategy with the arm's name, in an open study."""
    if life.spec.task is not None:
        raise PrivTuneError(
            f"Study {life.name!r} has a task and declared arms; study.run() runs them. Make an open "
            "study for a function of your own: privtune.create_study(name, budget=...)."
        )
    if not hasattr(strategy, "plan") or isinstance(strategy, type):
        allowed = "must be one of privtune.strategies, like PapernotSteinke(mean_runs=10)"
        raise InvalidInputError("strategy", strategy, allowed)
    if epsilon is not None:
        check_number("epsilon", epsilon, above=0.0)
    check_name(arm or strategy.arm, "arm")
    return replace(strategy, arm=arm or strategy.arm)  # type: ignore[type-var]


def _run(
    life: Life,
    plan: Plan,
    trainer_of: Callable[[Callable[[str], None]], Trainer],
    *,
    tell: Callable[[Release], None],
    observer: Observer,
    show_progress_bar: bool,
    anyway: bool = False,
    told: Callable[[RecordCheck], None] | None = None,
) -> Release:
    """Lead one arm to its release, which is returned if it is there."""
    spinner: AbstractContextManager[Any] = nullcontext()
    if show_progress_bar:
        from rich.console import Console

        # How far a sealed arm is would tell its number of runs.
        label = f"{plan.arm} (sealed)" if plan.is_sealed else plan.arm
        spinner = Console(file=open_stream(sys.stderr)).status(label)

    def announce(plan: Plan, release: Release) -> None:
        observer.released(plan, release)
        tell(release)

    with life.alone(plan.arm), telling() as say, spinner:
        trainer = trainer_of(say)
        plan = life.planned(plan)
        stage = life.stage(plan)
        if stage is Stage.ANNOUNCED and (there := life.release(plan)) is not None:
            _log.warning(
                "Arm %r of study %r has been released: its release is returned, nothing was run or spent.",
                plan.arm,
                life.name,
            )
            return there
        look = None
        if stage is Stage.PLANNED and isinstance(trainer, TaskTrainer) and (told or not anyway):
            look = partial(trainer.look, [plan], anyway=anyway, told=told)
        (release,) = carry_on(life, [plan], trainer, observer, announce, look=look, anyway=anyway)
    return release


def _context(
    life: Life, task: Task, epochs: Any, expected_batch_size: Any, noise: Any
) -> PlanningContext:
    """Return what an arm of a ``build`` is planned with: public facts."""
    for name, value in (("epochs", epochs), ("expected_batch_size", expected_batch_size)):
        if value is None:
            raise InvalidInputError(
                name,
                None,
                "must be given: it says how often, and in samples of which expected size, a training sees "
                "the records",
                "study.optimize(..., epochs=10, expected_batch_size=64) is one way.",
            )
    budget, report = life.ledger.budget(life.budget), life.spec.report
    refuse_other_unit(task.unit or RECORD, budget.unit, "The data", budget.name)
    return PlanningContext(
        task=task,
        schedule=Schedule.from_epochs(
            records=task.train_records, epochs=epochs, expected_batch_size=expected_batch_size
        ),
        space=SearchSpace({}),
        delta=budget.delta,
        adjacency=budget.adjacency,
        scoring=Scoring.of(task.score),
        report=None if report is None else Reporting.from_dict(report),
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
        allowed = f"must be one of {', '.join(METHODS)}"
        raise InvalidInputError("Candidate.method", found, allowed)
    return replace(strategy, method=found)  # type: ignore[type-var]


def _plan(life: Life, strategy: Strategy, context: PlanningContext, epsilon: float | None) -> Plan:
    """Plan an arm of a ``build``. Touches no data."""
    target = _target_of(life, strategy.arm) if epsilon is None else epsilon
    (plan,) = plan_arms([strategy], context, epsilon=target).plans
    return plan


def _target_of(life: Life, arm: str) -> float:
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


def _check_covered(
    strategy: Strategy, *, scored: bool, sampler: Any, pruner: Any, others: Sequence[str] = ()
) -> None:
    """Refuse a strategy that needs a search space or a score, or does not cover sampler or pruner."""
    names = [*others, *(s.name for s in STRATEGIES.values() if not s.needs.task)]
    check_objective(strategy, scored=scored, sampler=sampler, pruner=pruner, others=names)


def _check_searches(plan: Plan, **given: Any) -> None:
    """Refuse a sampler or a pruner for an arm that has one training."""
    for name, value in given.items():
        if value is not None and plan.search is None:
            raise InvalidInputError(
                name,
                type(value).__name__,
                f"is for a strategy that searches, and arm {plan.arm!r} has one training",
                "Leave it out.",
            )


def _declared_task(mechanism: Mechanism, validation_records: int, *, public: bool) -> Task:
    """Return the public facts of a declared mechanism as a task without data, for planning."""

    def nothing(*_: object) -> Any:
        raise InvalidInputError("task", "declared", "is trained by the user's own function")

    return Task(
        name="declared",
        description="a declared mechanism",
        train_records=mechanism.records,
        validation_records=validation_records,
        test_records=1,
        input_shape=(),
        classes=None,
        load=nothing,
        model=nothing,
        loss=nothing,
        public_validation=public,
    )


def _validation(private: Any, public: Mapping[str, Any] | None) -> tuple[TensorData | None, bool]:
    """Return the validation records of a declared mechanism, and whether they are public."""
    from privtune.tasks.own import read_records

    of_public = dict(public or {})
    shown = of_public.pop("validation", None)
    if of_public or (private is not None and shown is not None):
        raise InvalidInputError(
            "public",
            sorted(public or {}),
            'is {"validation": (x, y)}, in the place of a private validation split',
        )
    data = private if shown is None else shown
    return None if data is None else read_records(data, field="validation").data, shown is not None
