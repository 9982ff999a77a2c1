"""Runs of the arms that a spec declares, or of one arm of an open study."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from privtune.accounting.checks import check_number
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.executor import Executor
from privtune.imports import users_code
from privtune.ledger import RECORD, LedgerConnectionError
from privtune.ledger.values import refuse_other_unit
from privtune.names import check_name, refuse_name
from privtune.numbers import show_left
from privtune.spaces import SearchSpace, without_numpy
from privtune.stages.stage_plan import StagePlan, release_stage
from privtune.strategies import (
    STRATEGIES,
    InRun,
    NonPrivateError,
    Outcome,
    Plan,
    PlanningContext,
    Release,
    Scoring,
    Strategy,
)
from privtune.strategies.arms import check_objective, needs_of
from privtune.study.arm_rounds import (
    StudyRound,
    TrialFiles,
    deadline_of,
    in_threads,
    optuna_sampler,
    own_sampler,
)
from privtune.study.build import model_for, named_method, weights_of_build
from privtune.study.declared_arms import DeclaredTrainer, DeclaredTrial, Mechanism, plan_declared
from privtune.study.delta import check_delta, check_delta_of
from privtune.study.failures import UnreadableRecordsError, UnusableRecordsError
from privtune.study.lifecycle import Life, Stage, Trainer, carry_on
from privtune.study.planning import plan_arms
from privtune.study.program import (
    Program,
    check_programs,
    describe_program,
    programs_of_spec,
)
from privtune.study.rehearsal import rehearse
from privtune.study.reports import AUTO, read_report
from privtune.study.schedules import DETAIL, asked, is_auto, with_numbers
from privtune.study.seal import aloud, open_stream, sealed
from privtune.study.spec import SPACE, StudySpec, space_of
from privtune.study.stored_results import Measurement, measure_release
from privtune.study.workers import TASK, give_out, make_files, notifier
from privtune.study.worth import NO_REPORT, check_worth, words_of
from privtune.tasks import Score, Task, TaskDataError
from privtune.training.engine.compute import Compute, check_device
from privtune.training.mechanism.metrics import is_of_loss
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import METHODS

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from privtune.ledger.rounds import Rounds
    from privtune.spaces import IndependentSampler
    from privtune.study.observer import Observer
    from privtune.tables.unusable import RecordCheck
    from privtune.tasks import TaskData
    from privtune.tasks.records import Records
    from privtune.training.mechanism.kernel import LossOf

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class ArmOptions:
    """The arguments of an arm of an open study that do not depend on who trains it.

    See :meth:`privtune.Study.optimize` for each; the signatures there alone have their defaults.
    """

    strategy: Strategy
    arm: str | None
    epsilon: float | None
    sampler: Any
    timeout: float | None
    force: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineOptions(ArmOptions):
    """The arguments of :meth:`privtune.Study.optimize`, for an arm that the engine trains."""

    epochs: float | Literal["auto"] | None
    expected_batch_size: int | Literal["auto"] | None
    report: Mapping[str, Any] | str | None
    space: Mapping[str, Mapping[str, Any]] | None
    pruner: Any
    n_jobs: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DeclaredOptions(ArmOptions):
    """The arguments of :meth:`privtune.Study.optimize_declared`, for an arm that another library trains."""

    mechanism: Mechanism
    score: str | Score | None
    split: Mapping[str, int] | None
    validation: Any
    public: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Audience:
    """The observer, callbacks and progress bar that follow an arm of an open study.

    Attributes:
        observer: Hears when the arm begins, fails and is released.
        announce: Called with a release that is new, after the observer.
        show_progress_bar: Whether to show that the arm runs.
        show_check: Hears what is found in the records; None outside of the trust boundary.
    """

    observer: Observer
    announce: Callable[[Release], None]
    show_progress_bar: bool
    show_check: Callable[[RecordCheck], None] | None


@dataclass(frozen=True)
class TaskTrainer(Trainer):
    """A trainer of a study's arms with the engine.

    Attributes:
        life: The study.
        task: Its task, as it was planned for.
        observer: Hears how far a training is that is not sealed.
        compute: How trainings are computed; it changes no result.
        executor: Who trains the rounds of selections.
        notify: Says to whoever runs the study what is waited for, also from inside a seal.
        strategy: That of ``study.optimize``; None for a spec, whose arms name theirs.
        sampler: Optuna's, or one of the user's own with independent draws.
        pruner: Optuna's, for scores that are public.
        deadline: On the monotonic clock, in seconds; no trial begins after it.
        timed: What rehearsals have measured of candidates, so that arms that are alike are timed once.
    """

    life: Life
    task: Task
    observer: Observer
    compute: Compute
    executor: Executor
    notify: Callable[[str], None]
    strategy: Strategy | None = None
    sampler: BaseSampler | IndependentSampler | None = None
    pruner: BasePruner | None = None
    deadline: float = math.inf
    timed: dict[object, float] = field(default_factory=dict)

    @cached_property
    def staged(self) -> Task:
        """The task after all of its stages have released, which is known when the first arm starts."""
        if self.life.spec.task is None:
            return self.task
        return self.life.task()

    @cached_property
    def data(self) -> TaskData:
        """The task's data, loaded with the first arm that has started."""
        return self.staged.load_checked()

    @property
    def shows_output(self) -> bool:
        """Whether the task declares its records public."""
        return self.task.benchmark

    def measure(self, plan: StagePlan) -> Mapping[str, object]:
        """Read the table and return what a stage releases of it."""
        spec = self.life.spec
        releases = self.life.stage_releases()
        task: Any = spec.task
        for stage in spec.make_stages():
            if stage.name == plan.arm:
                break
            task = stage.applied(task, releases[stage.name])
        streams = Streams(self.life.secret(plan))
        return release_stage(plan, task, streams)

    def rehearse(self, plan: Plan) -> float:
        """Train an arm for a few steps on made-up records; return its expected seconds."""
        return rehearse(
            plan,
            self.task,
            self._strategy(plan),
            space=space_of(self.life.spec, plan),
            compute=self.compute,
            sampler=own_sampler(self.sampler),
            timings=self.timed,
        )

    def prepare(self, plan: Plan) -> tuple[Strategy, StudyRound]:
        """Return the arm's strategy, and a round that trains its candidates on the records."""
        users_sampler = own_sampler(self.sampler)
        has_public_score = plan.score is not None and plan.score.event is None
        files = make_files(
            self.life,
            plan,
            task=self.staged,
            data=self.data,
            compute=self.compute,
        )
        files = replace(
            files,
            sampler=users_sampler,
            deadline=self.deadline,
            # Of a sealed arm nobody hears how far it is, and no pruner sees a score.
            on_step=None if plan.is_sealed else partial(self._tell_step, plan),
            prunes=self.pruner is not None and has_public_score and not plan.is_sealed,
        )
        trials = StudyRound(
            self.life,
            files,
            give_out=self._give_out(plan, files),
            sampler=optuna_sampler(self.sampler),
            pruner=self.pruner,
        )
        return self._strategy(plan), trials

    def _tell_step(self, plan: Plan, step: int, steps: int) -> None:
        """Report a training step to the observer, whose output goes to the terminal."""
        with aloud():
            self.observer.step(plan, step, steps)

    def _give_out(self, plan: Plan, files: TrialFiles) -> Callable[[Rounds, str], None] | None:
        """Return the function that has other workers train the arm's rows; None to train them here."""
        if self.executor.name == "inline" or not plan.is_private:
            return None
        has_sampler = self.sampler is not None
        has_pruner = self.pruner is not None
        if not plan.is_sealed and (has_sampler or has_pruner):
            return None  # Optuna's objects see one trial after the other, in this process
        if self.life.spec.task is None:
            code = self.task.code
            has_deadline = math.isfinite(self.deadline)
            if code is None or has_sampler or has_deadline:
                return in_threads(files, self.executor.jobs)
            files.results.put(TASK, self.task.packed_code, replace=True)
        return give_out(self.executor, self.life, plan, compute=self.compute, notify=self.notify)

    def _strategy(self, plan: Plan) -> Strategy:
        """Return the strategy of an arm: that of ``optimize``, else the spec's."""
        if self.strategy is not None:
            return self.strategy
        arm = next(arm for arm in self.life.spec.arms if arm.name == plan.arm)
        return arm.to_strategy()

    def finish(self, plan: Plan, outcome: Outcome, repetition: int) -> Measurement:
        """Measure a repetition's released model on the test split, as was planned."""
        from privtune.training.mechanism.kernel import load_params

        task = self.staged
        result = outcome.result
        is_measured = plan.report is not None or task.public_test or task.benchmark
        if result is None or not is_measured or result.weights.numel() == 0:
            return Measurement()
        training = plan.training_of(result.params)
        model = model_for(task, training, result.params)
        load_params(model, result.weights)
        # Asked again, the noise is the same.
        streams = Streams(self.life.secret(plan))
        rng = streams.numpy("report", repetition)
        return measure_release(plan, task, model, self.data.test, rng)

    def describe(self, plan: Plan) -> Program:
        """Return the digests of the code that decides the release of an arm of ``optimize``."""
        return describe_program(
            self.life,
            plan,
            self.task,
            self._strategy(plan),
            sampler=self.sampler,
            pruner=self.pruner,
        )

    @property
    def device(self) -> str:
        """The kind of this machine's hardware; ``its workers'`` if an executor's workers train."""
        from privtune.training.engine.compute import hardware

        if self.executor.name in {"inline", "processes"}:
            return hardware(self.compute.device)
        return "its workers'"

    def check_data(
        self,
        plans: Sequence[Plan],
        *,
        force: bool,
        show_check: Callable[[RecordCheck], None] | None,
    ) -> None:
        """Stop a study whose records are not what is declared, before anything is charged.

        What is found is the curator's alone: ``show_check`` hears it, and only then does the error say why.

        Args:
            plans: The arms that are about to be charged.
            force: Whether to go on although most records cannot be used.
            show_check: Hears what was found; None outside of the trust boundary.

        Raises:
            TaskDataError: If the data is not what public facts say of it.
            UnreadableRecordsError: If reading ended in an error, which may hold a part of a record.
            UnusableRecordsError: If most records cannot be used, and ``force`` does not allow that.
        """
        stages = self.life.spec.make_stages()
        if any(stage.type == "usable" for stage in stages):
            return  # which counts them, and is charged for it
        plan = next((plan for plan in plans if plan.is_sealed), plans[0])
        check: RecordCheck | None = None
        try:
            with self.life.seal(plan, rehearsal=True, private=not self.shows_output):
                check = self._check_records(plan)
        except (TaskDataError, LedgerConnectionError):  # of public facts, or of no record
            raise
        except Exception as error:
            if _names_code_alone(error):
                raise
            # What it says may come from a record.
            self.life.record_failure(plans[0].arm, error)
        if check is None:
            raise UnreadableRecordsError(self.life.name)
        if show_check is not None:
            show_check(check)
        if check.reason and not force:
            reason = "" if show_check is None else check.reason
            raise UnusableRecordsError(self.life.name, reason)

    def _check_records(self, plan: Plan) -> RecordCheck:
        """Return the check of the records, with a model of the plan if the task has a ``build``."""
        task = self.task
        model = None
        if task.build is not None:
            space = space_of(self.life.spec, plan)
            example = plan.example(space)
            model = model_for(task, plan.first_training, example)
        if self.life.spec.stages or task.examine is not None:
            return task.check_records(None, model=model)
        # The arms train on the same records: they are loaded once.
        return task.check_records(self.data, model=model)


def _names_code_alone(error: Exception) -> bool:
    """Return whether an error names only a function that remembers records, and no record's content."""
    from privtune.training.mechanism.memory import RecordMemoryError

    return isinstance(error, RecordMemoryError)


def run_study(
    life: Life,
    observer: Observer,
    *,
    executor: Executor,
    compute: Compute,
    non_private: bool,
    force: bool = False,
    show_check: Callable[[RecordCheck], None] | None = None,
) -> tuple[Release, ...]:
    """Run the arms of a study that are not released yet, as :meth:`privtune.Study.run` does.

    Args:
        life: The study.
        observer: Hears of the progress.
        executor: Who trains the rounds of selections.
        compute: How trainings are computed; it changes no result.
        non_private: Whether arms without any guarantee may run.
        force: Whether to charge although records or scores are not worth it.
        show_check: Hears what is found in the records; None outside of the trust boundary.
    """
    if life.spec.task is None:
        life.spec.load_task()  # says that the study is open, and what runs its arms
    task = _task(life)
    plans = list(life.outlast(life.plans).values())
    without_guarantee = [plan.arm for plan in plans if not plan.is_private]
    if without_guarantee and not non_private:
        raise NonPrivateError(
            f"Study {life.name!r} holds {', '.join(without_guarantee)} without any guarantee (epsilon is "
            "infinite): it trains on the data as it is. Run it with --non-private if the data "
            "may be shown to everybody, or take it out of the study. Nothing was run."
        )
    executor.slots(compute.device)  # too few GPUs are said before the charge
    with life.alone(), notifier() as notify:
        trainer = TaskTrainer(life, task, observer, compute, executor, notify)
        programs = life.outlast(partial(programs_of_spec, life, task))
        life.outlast(partial(check_programs, life, programs))
        check_data = None
        charges = life.outlast(life.charges)
        if not charges:
            if not force:
                check_worth(plans, task)
            if show_check is not None or not force:
                check_data = partial(trainer.check_data, plans, force=force, show_check=show_check)
        return carry_on(
            life,
            plans,
            trainer,
            observer,
            measure=trainer.measure,
            check_data=check_data,
            force=force,
        )


def _task(life: Life) -> Task:
    """Return a study's task, checked against what it declares."""
    try:
        task = life.spec.load_task()
        with users_code("task", task.name, "it cannot be checked"):
            task.check()
    except (TaskDataError, InvalidInputError) as error:
        raise TaskDataError(
            f"{error} Study {life.name!r} was planned for it: put it back and run the study again; or "
            "correct its spec and run that file, which plans anew as long as nothing is charged; or free "
            f"the name: privtune study delete {life.name} (what was charged stays charged)."
        ) from error
    return task


def optimize(life: Life, task: Task, options: EngineOptions, audience: Audience) -> Release:
    """Run one arm that the engine trains, unless it is released already; return its release.

    See :meth:`privtune.Study.optimize`.

    Args:
        life: The study, an open one.
        task: The task, with the ``build`` that makes candidates.
        options: How the task is trained, and at which cost.
        audience: Who hears of it.
    """
    force = options.force
    options = replace(options, strategy=_named_strategy(life, options))
    with notifier() as notify:
        plan, trainer = _engine_arm(life, task, options, observer=audience.observer, notify=notify)
        check_data = None
        if audience.show_check is not None or not force:
            check_data = partial(
                trainer.check_data, [plan], force=force, show_check=audience.show_check
            )
        return _lead(life, plan, trainer, audience, task=task, check_data=check_data, force=force)


def optimize_declared(
    life: Life,
    objective: Callable[[DeclaredTrial], object],
    options: DeclaredOptions,
    audience: Audience,
) -> Release:
    """Run one arm that another library trains, unless it is released already; return its release.

    See :meth:`privtune.Study.optimize_declared`.

    Args:
        life: The study, an open one.
        objective: The user's function of a trial.
        options: What its training is declared to release, how it is scored, and at which cost.
        audience: Who hears of it.
    """
    options = replace(options, strategy=_named_strategy(life, options))
    plan, trainer = _declared_arm(life, objective, options)
    return _lead(life, plan, trainer, audience, task=None, check_data=None, force=options.force)


def _lead(
    life: Life,
    plan: Plan,
    trainer: TaskTrainer | DeclaredTrainer,
    audience: Audience,
    *,
    task: Task | None,
    check_data: Callable[[], None] | None,
    force: bool,
) -> Release:
    """Take an arm of an open study from any state to its release, and return the release.

    Args:
        life: The study.
        plan: The arm's.
        trainer: Trains it.
        audience: Who hears of it.
        task: What the engine trains; None for a declared mechanism.
        check_data: Stops an arm before its charge where the records are not what is declared of them.
        force: Whether to charge although records or scores are not worth it.
    """
    observer = audience.observer

    def announce_release(plan: Plan, release: Release) -> None:
        observer.released(plan, release)
        audience.announce(release)

    spinner = _progress_bar(plan) if audience.show_progress_bar else nullcontext()
    with life.alone(plan.arm), spinner:
        plan = life.outlast(partial(life.planned, plan))
        stage = life.outlast(partial(life.stage, plan))
        program = trainer.describe(plan)
        life.outlast(partial(check_programs, life, {plan.arm: program}))
        if stage is Stage.ANNOUNCED:
            earlier_release = life.outlast(partial(life.release, plan))
            if earlier_release is not None:
                _log.warning(
                    "Arm %r of study %r has been released: its release is returned, nothing was run "
                    "or spent.",
                    plan.arm,
                    life.name,
                )
                return earlier_release
        if stage is Stage.PLANNED:
            _check_before_charge(life, plan, task, force=force)
        (release,) = carry_on(
            life,
            [plan],
            trainer,
            observer,
            announce_release,
            check_data=check_data if stage is Stage.PLANNED else None,
            force=force,
        )
    return release


def _progress_bar(plan: Plan) -> AbstractContextManager[object]:
    """Return a spinner with the arm's name, and no count that would tell a sealed number of runs."""
    from rich.console import Console

    label = f"{plan.arm} (sealed)" if plan.is_sealed else plan.arm
    return Console(file=open_stream(sys.stderr)).status(label)


def _check_before_charge(life: Life, plan: Plan, task: Task | None, *, force: bool) -> None:
    """Warn of other budgets for the dataset, log what scores will be worth, refuse worthless ones."""
    # Of several budgets for one dataset the second is said, where the first charge is near.
    dataset = life.spec.dataset_of(plan.dataset)
    warning = life.ledger.check_dataset(life.budget, dataset)
    is_public = task is not None and task.benchmark
    if warning and not is_public:
        _log.warning(warning)
    if task is None:
        return
    _say_worth(plan, task)
    if not force:
        check_worth([plan], task)


def _say_worth(plan: Plan, task: Task) -> None:
    """Log what an arm's scores will be worth, with a warning if no report is planned."""
    why_no_report = plan.details.get(NO_REPORT)
    if why_no_report:
        _log.warning("Arm %r: %s", plan.arm, why_no_report)
    if _log.isEnabledFor(logging.INFO):
        words = " ".join(words_of([plan], task))
        _log.info("Arm %r: %s", plan.arm, words)


def _engine_arm(
    life: Life,
    task: Task,
    options: EngineOptions,
    *,
    observer: Observer,
    notify: Callable[[str], None],
) -> tuple[Plan, TaskTrainer]:
    """Return the plan and the trainer of an arm that the engine trains.

    Args:
        life: The study, an open one.
        task: What is trained.
        options: The arguments of the arm.
        observer: Hears of the progress.
        notify: Says what is waited for.

    Raises:
        InvalidInputError: If an argument is wrong, or would have no effect.
        StrategyError: If the strategy does not cover what comes with it.
    """
    _check_task(task)
    compute = life.spec.placement
    check_device(compute.device)
    executor = Executor.of(life.spec.executor, options.n_jobs)
    _check_executor(executor, compute, task, options)
    _check_space(options)
    context = _context(life, task, options)
    check_delta_of(task, context.delta, force=options.force)
    strategy = _with_method_in_seal(life, options.strategy, task, context)
    sampler = options.sampler
    pruner = options.pruner
    _check_covered(
        strategy,
        scored=task.validation_records > 0,
        sampler=sampler,
        pruner=pruner,
        others=[InRun.name],
    )
    _check_kinds(strategy, sampler, pruner)
    plan = _plan_of(life, strategy, context, options)
    if sampler is not None or pruner is not None:
        _check_one_repetition(plan)
        if executor.name != "inline":
            if options.n_jobs == 1:
                _check_one_worker(plan, "executor", life.spec.executor)
            else:
                _check_one_worker(plan, "n_jobs", options.n_jobs)
        _check_pruner(plan, pruner)
    trainer = TaskTrainer(
        life,
        task,
        observer,
        compute,
        executor,
        notify,
        strategy=strategy,
        sampler=sampler,
        pruner=pruner,
        deadline=deadline_of(options.timeout),
    )
    return plan, trainer


def _check_task(task: object) -> None:
    """Refuse any object but a task, and a task without a ``build``."""
    if not isinstance(task, Task):
        raise InvalidInputError(
            "task",
            type(task).__name__,
            "must be a privtune.Task",
            "Make one of your function: privtune.make_task(build, loss=..., data=...).",
        )
    if task.build is None:
        raise InvalidInputError(
            "task",
            task.name,
            "has no build, so nothing says what to train",
            "Run it as a study of declared arms: privtune.create_study(name, task=..., arms=...).",
        )


def _plan_of(
    life: Life, strategy: Strategy, context: PlanningContext, options: EngineOptions
) -> Plan:
    """Return the plan of an arm of a ``build``, with the arm's own search space if it has one."""
    target = options.epsilon
    if target is None:
        target = _target_of(life, strategy.arm)
    (plan,) = plan_arms([strategy], context, epsilon=target).plans
    _check_searches(plan, sampler=options.sampler, pruner=options.pruner)
    if options.space is None:
        return plan
    details = {**plan.details, SPACE: without_numpy(options.space)}
    return replace(plan, details=details)


def _check_executor(
    executor: Executor, compute: Compute, task: Task, options: EngineOptions
) -> None:
    """Refuse remote workers for functions that only this process has, and more workers than GPUs allow."""
    is_local = task.code is None or options.sampler is not None or options.timeout is not None
    if is_local and executor.name in {"external", "ray", "slurm"}:
        raise InvalidInputError(
            "executor",
            executor.name,
            "needs functions and data that workers can import, no sampler of your own and no timeout",
            "Put them into a module and give them as 'package.module:function', the data as a function that "
            "returns it.",
        )
    if not is_local and executor.name == "processes":
        executor.slots(compute.device)


def _declared_arm(
    life: Life, objective: Callable[[DeclaredTrial], object], options: DeclaredOptions
) -> tuple[Plan, DeclaredTrainer]:
    """Return the plan and the trainer of an arm of a declared mechanism.

    Args:
        life: The study, an open one.
        objective: The user's function, which trains by another library.
        options: The arguments of the arm.

    Raises:
        InvalidInputError: If an argument is wrong.
        UnitMismatchError: If the validation split counts another unit than the budget protects.
    """
    _check_declared(objective, options)
    strategy = options.strategy
    mechanism = options.mechanism
    score = options.score
    if not isinstance(score, Score):
        score = Score(score or "accuracy")
    if is_of_loss(score.metric):
        raise InvalidInputError(
            "score",
            score.metric,
            "is that which is trained on, which a declared mechanism does not tell",
            "Use privtune.Score(function of a model and one record, bound=...).",
        )
    validation, is_public = _validation(options.validation, options.public)
    data = None if validation is None else validation.data
    has_score = data is not None
    is_private = has_score and not is_public
    _check_covered(strategy, scored=has_score, sampler=options.sampler, pruner=None)
    _check_kinds(strategy, options.sampler, None)
    budget = life.ledger.budget(life.budget)
    if life.spec.repeats > 1:
        raise InvalidInputError(
            "repeats",
            life.spec.repeats,
            "is for arms that the engine trains, and a mechanism is declared",
            "Declare an arm for each repetition.",
        )
    if data is not None and is_private:
        refuse_other_unit(data.unit or RECORD, budget.unit, "The validation split", budget.name)
    expected_size = (options.split or {}).get("validation")
    size = expected_size or (1 if data is None else len(data))
    protected_records = mechanism.records
    if is_private:
        protected_records += size
    check_delta(budget.delta, protected_records, unit=budget.unit, force=options.force)
    context = PlanningContext(
        task=_declared_task(mechanism, size, public=is_public),
        schedule=mechanism.schedule,
        space=SearchSpace({}),
        delta=budget.delta,
        adjacency=budget.adjacency,
        scoring=Scoring.of(score),
        define_by_run=True,
        declared=mechanism.method,
    )
    epsilon = options.epsilon
    if epsilon is None and mechanism.calibrate:
        epsilon = _target_of(life, strategy.arm)
    plan = plan_declared(
        strategy, mechanism, context, epsilon=epsilon, unit=budget.unit, scored=has_score
    )
    _check_searches(plan, sampler=options.sampler)
    function = None
    if plan.score is not None and validation is not None:
        function = _score_function(score, validation)
    trainer = DeclaredTrainer(
        life,
        objective,
        mechanism,
        strategy,
        options.sampler,
        deadline_of(options.timeout),
        data,
        function,
    )
    return plan, trainer


def _check_declared(objective: object, options: DeclaredOptions) -> None:
    """Refuse a wrong objective or mechanism, and an ε beside a mechanism of fixed cost."""
    mechanism = options.mechanism
    if not callable(objective):
        raise InvalidInputError("objective", objective, "must be a function of a trial")
    if not isinstance(mechanism, Mechanism):
        raise InvalidInputError(
            "mechanism", type(mechanism).__name__, "must be a privtune.Mechanism"
        )
    if options.epsilon is not None and not mechanism.calibrate:
        raise InvalidInputError(
            "epsilon",
            options.epsilon,
            "does not go with calibrate=False: the arm costs what the declared event costs",
            "Leave one of them out.",
        )


def _named_strategy(life: Life, options: ArmOptions) -> Strategy:
    """Return the strategy with the arm's name, in an open study."""
    if life.spec.task is not None:
        raise PrivTuneError(
            f"Study {life.name!r} has a task and declared arms; study.run() runs them. Make an open "
            "study for a function of your own: privtune.create_study(name, budget=...)."
        )
    strategy = options.strategy
    if not hasattr(strategy, "plan") or isinstance(strategy, type):
        allowed = "must be one of privtune.strategies, like PapernotSteinke(mean_runs=10)"
        raise InvalidInputError("strategy", strategy, allowed)
    if options.epsilon is not None:
        check_number("epsilon", options.epsilon, above=0.0)
    name = options.arm or strategy.arm
    check_name(name, "arm")
    return replace(strategy, arm=name)  # type: ignore[type-var]


def _check_space(options: EngineOptions) -> None:
    """Refuse a space of another form, and one that strategy or sampler would not draw from."""
    space = options.space
    strategy = options.strategy
    if space is None:
        return
    if not isinstance(space, Mapping) or not space:
        raise InvalidInputError(
            "space",
            space,
            "must be a mapping of names to laws",
            "{'expected_batch_size': {'type': 'categorical', 'choices': [64, 256]}} is one.",
        )
    if not needs_of(strategy).draws:
        raise InvalidInputError(
            "space",
            sorted(space),
            f"is for a strategy that searches, and arm {strategy.arm!r} has one training",
            "Leave it out.",
        )
    if own_sampler(options.sampler) is not None:
        raise InvalidInputError(
            "space",
            sorted(space),
            "does not go with a sampler of your own, which draws whole candidates",
            "Leave one of them out.",
        )


def _context(life: Life, task: Task, options: EngineOptions) -> PlanningContext:
    """Return the planning context of an arm of a ``build``, made of public facts."""
    for name in ("epochs", "expected_batch_size"):
        if getattr(options, name) is None:
            raise InvalidInputError(
                name,
                None,
                "must be given: it says how often, and in samples of which expected size, a training sees "
                "the records",
                "study.optimize(..., epochs=10, expected_batch_size=64) is one way.",
            )
    budget = life.ledger.budget(life.budget)
    spec = life.spec
    refuse_other_unit(task.unit or RECORD, budget.unit, "The data", budget.name)
    arm_fields = {
        "epochs": options.epochs,
        "expected_batch_size": options.expected_batch_size,
        "report": spec.report if options.report == AUTO else read_report(options.report),
        "space": options.space or {},
    }
    arm_spec = spec.model_copy(update=arm_fields)
    if not is_auto(arm_spec):
        return arm_spec.planning_context(task)
    strategy = options.strategy
    epsilon = options.epsilon
    if epsilon is None:
        epsilon = _target_of(life, strategy.arm)
    arm_spec = arm_spec.model_copy(update={"epsilon": epsilon})
    return _with_chosen_schedule(life, strategy, arm_spec, task)


def _with_chosen_schedule(
    life: Life, strategy: Strategy, spec: StudySpec, task: Task
) -> PlanningContext:
    """Return the planning context of a schedule that the rule chooses, or chose when the arm was planned.

    An arm that is there keeps its numbers: with others it would be another plan.
    """
    stored = life.plans().get(strategy.arm)
    detail = None if stored is None else stored.details.get(DETAIL)
    if detail is None or detail["asked"] != asked(spec):
        weights = _weights_in_seal(life, strategy, task, spec)
        return spec.planning_context(task, weights=weights)
    context = with_numbers(spec, detail).planning_context(task)
    return replace(context, chosen_schedule=detail)


def _weights_in_seal(life: Life, strategy: Strategy, task: Task, spec: StudySpec) -> int:
    """Return how many weights ``build`` has trained, calling it in the seal of a sealed arm."""
    candidate = spec.search_space().draw(Streams(bytes(32)), 0)
    fixed = {**candidate, **getattr(strategy, "parameters", {})}
    if not needs_of(strategy).independent:
        return weights_of_build(task, fixed)
    log = life.place(f"sealed/{strategy.arm}.log")
    with sealed(log, rehearsal=True):
        return weights_of_build(task, fixed)


def _with_method_in_seal(
    life: Life, strategy: Strategy, task: Task, context: PlanningContext
) -> Strategy:
    """Return the strategy with ``build``'s method, calling ``build`` in the seal of a sealed arm."""
    if not needs_of(strategy).independent:
        return _with_method(strategy, task, context)
    log = life.place(f"sealed/{strategy.arm}.log")
    with sealed(log, rehearsal=True):
        return _with_method(strategy, task, context)


def _with_method(strategy: Strategy, task: Task, context: PlanningContext) -> Strategy:
    """Return the strategy with the method that ``build`` names, which every trial is charged for."""
    if "method" not in {field.name for field in fields(strategy)}:  # type: ignore[arg-type]
        return strategy
    method_of_arm: str = strategy.method  # type: ignore[attr-defined]
    candidate = context.space.draw(Streams(bytes(32)), 0)
    parameters = getattr(strategy, "parameters", {})
    method = named_method(task, context.schedule, {**candidate, **parameters})
    if method in (None, method_of_arm):
        return strategy
    if method_of_arm != _default_method(strategy):
        raise InvalidInputError(
            "Candidate.method",
            method,
            f"differs from the arm's, {method_of_arm!r}",
            "Name the method once: in the candidate, or in the strategy.",
        )
    if method not in METHODS:
        refuse_name("Candidate.method", method, METHODS)
    return replace(strategy, method=method)  # type: ignore[type-var]


_USUAL_METHOD = "dpsgd"


def _default_method(strategy: Strategy) -> str:
    """Return the training method that a strategy uses if user and ``build`` leave it open."""
    defaults = {field.name: field.default for field in fields(strategy)}  # type: ignore[arg-type]
    default = defaults["method"]
    return default if isinstance(default, str) else _USUAL_METHOD


def _target_of(life: Life, arm: str) -> float:
    """Return the study's whole target ε for an arm that is the first to be charged to the budget.

    Raises:
        PrivTuneError: If there are other charges: a part of what is left is the user's to choose.
    """
    for charge in life.ledger.charges(life.budget):
        is_another = charge.study != life.name or charge.arm != arm
        if is_another and charge.state != "voided":
            remaining = life.ledger.remaining(life.budget)
            raise PrivTuneError(
                f"Budget {life.budget!r} has been charged before: say what arm {arm!r} may cost, "
                f"epsilon=..., of the {show_left(remaining)} that are left."
            )
    return life.spec.target_epsilon


def _check_covered(
    strategy: Strategy, *, scored: bool, sampler: object, pruner: object, others: Sequence[str] = ()
) -> None:
    """Refuse a strategy that needs a search space or a score, or does not cover sampler or pruner."""
    without_task = [kind.name for kind in STRATEGIES.values() if not kind.needs.task]
    names = [*others, *without_task]
    check_objective(strategy, scored=scored, sampler=sampler, pruner=pruner, others=names)


def _check_one_repetition(plan: Plan) -> None:
    """Refuse a sampler or pruner of an arm that is repeated: repetitions must not learn of each other."""
    if plan.repeats > 1:
        raise InvalidInputError(
            "repeats",
            plan.repeats,
            "does not go with a sampler or pruner of your own, which would see the trials of all repetitions",
            "Leave one of them out.",
        )


def _check_one_worker(plan: Plan, name: str, value: object) -> None:
    """Refuse a sampler or pruner of Optuna's where several workers would train shown trials."""
    if plan.is_sealed:
        return  # whose trials learn nothing of each other
    raise InvalidInputError(
        name,
        value,
        "does not go with a sampler or pruner of Optuna, which see one trial after the other, in this "
        "process",
        "Leave one of them out.",
    )


def _check_kinds(strategy: Strategy, sampler: object, pruner: object) -> None:
    """Refuse objects that are no sampler or pruner, and a sampler beside the strategy's own."""
    import optuna

    draws = callable(getattr(sampler, "draw", None)) and not isinstance(sampler, type)
    if not (sampler is None or draws or isinstance(sampler, optuna.samplers.BaseSampler)):
        raise InvalidInputError(
            "sampler",
            sampler,
            "must be a sampler of Optuna's, or one of your own with a method draw",
            "A name is the strategy's: strategy=privtune.strategies.Everything(sampler='tpe').",
        )
    if not (pruner is None or isinstance(pruner, optuna.pruners.BasePruner)):
        raise InvalidInputError(
            "pruner",
            pruner,
            "must be a pruner of Optuna's",
            "optuna.pruners.MedianPruner() is one.",
        )
    if sampler is None:
        return
    defaults = {each.name: each.default for each in fields(strategy)}  # type: ignore[arg-type]
    of_strategy = getattr(strategy, "sampler", None)
    if of_strategy == defaults.get("sampler"):
        return
    raise InvalidInputError(
        "sampler",
        type(sampler).__name__,
        f"does not go with sampler {of_strategy!r} of strategy {strategy.name!r}: one of them draws",
        "Leave one of them out.",
    )


def _check_pruner(plan: Plan, pruner: object) -> None:
    """Refuse a pruner where trials have no exact scores on a public validation split."""
    if pruner is None or (plan.score is not None and plan.score.event is None):
        return
    raise InvalidInputError(
        "pruner",
        type(pruner).__name__,
        "compares exact scores while trials are trained, and the validation split is private: a trial is "
        "charged for one noised score at its end",
        'Leave it out, or pass records that everybody may see: public={"validation": (x, y)}.',
    )


def _check_searches(plan: Plan, **choosers: object) -> None:
    """Refuse a sampler or a pruner for an arm that has one training."""
    if plan.search is not None:
        return
    for name, value in choosers.items():
        if value is not None:
            raise InvalidInputError(
                name,
                type(value).__name__,
                f"is for a strategy that searches, and arm {plan.arm!r} has one training",
                "Leave it out.",
            )


def _declared_task(mechanism: Mechanism, validation_records: int, *, public: bool) -> Task:
    """Return the public facts of a declared mechanism as a task without data, for planning."""

    def refuse(*_: object) -> NoReturn:
        raise InvalidInputError("task", "declared", "is trained by the user's own function")

    return Task(
        name="declared",
        description="a declared mechanism",
        train_records=mechanism.records,
        validation_records=validation_records,
        test_records=1,
        input_shape=(),
        classes=None,
        load=refuse,
        model=refuse,
        loss=refuse,
        public_validation=public,
    )


def _score_function(score: Score, records: Records) -> LossOf | None:
    """Return the user's score function for packed records; None for a metric by its name."""
    from privtune.tasks.own import read_score

    function = None
    if callable(score.metric) or ":" not in score.metric:  # a path names a function of outputs
        _, function = read_score(score, records)
    if function is None and records.data.tree is not None:
        raise InvalidInputError(
            "score",
            score.metric,
            f"needs records of one input and a target, and validation is {records.parts}",
            "Pass a pair (x, y), or privtune.Score(function of a model and these parts, bound=...).",
        )
    return function


def _validation(
    private: object, public: Mapping[str, object] | None
) -> tuple[Records | None, bool]:
    """Return the validation records of a declared mechanism, and whether they are public."""
    from privtune.tasks.records import read_records

    other_splits = dict(public or {})
    public_records = other_splits.pop("validation", None)
    is_public = public_records is not None
    if other_splits or (private is not None and is_public):
        raise InvalidInputError(
            "public",
            sorted(public or {}),
            'is {"validation": (x, y)}, in the place of a private validation split',
        )
    data = public_records if is_public else private
    if data is None:
        return None, is_public
    return read_records(data, field="validation"), is_public
