"""Run the arms that a spec declares, or an arm of an open study, by the engine or by another library."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from privtune.accounting._checks import check_number
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.execution.executor import Executor
from privtune.imports import users_code
from privtune.ledger import RECORD
from privtune.ledger.values import refuse_other_unit
from privtune.names import check_name
from privtune.numbers import show_left
from privtune.spaces import SearchSpace, without_numpy
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
from privtune.strategies.plan import StagePlan, release_stage
from privtune.study.build import model_for, named_method
from privtune.study.declared import DeclaredTrainer, Mechanism, plan_declared
from privtune.study.delta import check_delta, check_delta_of
from privtune.study.failures import UnreadableRecordsError, UnusableRecordsError
from privtune.study.lifecycle import Life, Stage, Trainer, carry_on
from privtune.study.planning import plan_arms
from privtune.study.rehearsal import rehearse
from privtune.study.release import utility_of
from privtune.study.rounds import StudyRound, TrialFiles, deadline_of, in_threads, own_sampler
from privtune.study.seal import aloud, open_stream, sealed
from privtune.study.spec import SPACE, space_of
from privtune.study.workers import TASK, give_out, make_files, telling
from privtune.study.worth import check_worth
from privtune.tasks import Score, Task, TaskDataError
from privtune.training.engine.compute import Compute, check_device
from privtune.training.mechanism.metrics import is_of_loss
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import METHODS

if TYPE_CHECKING:
    from privtune.ledger.rounds import Rounds
    from privtune.study.observer import Observer
    from privtune.tasks import TaskData
    from privtune.tasks._usable import RecordCheck
    from privtune.tasks.own import Records
    from privtune.training.mechanism.estimates import ScoreEstimate
    from privtune.training.mechanism.kernel import LossOf

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskTrainer:
    """Trains the arms of a study with the engine."""

    life: Life
    task: Task
    observer: Observer
    compute: Compute
    executor: Executor
    tell: Callable[[str], None]  # says what is waited for
    strategy: Strategy | None = None  # of study.optimize; those of a spec stand in the spec
    sampler: Any = None
    pruner: Any = None
    deadline: float = math.inf  # on the monotonic clock; no trial begins after it
    timed: dict[object, float] = field(default_factory=dict)

    @cached_property
    def staged(self) -> Task:
        """The task with what its stages released; known when the first arm starts."""
        return self.task if self.life.spec.task is None else self.life.task()

    @cached_property
    def data(self) -> TaskData:
        """The task's data, loaded with the first arm that has started."""
        return self.staged.load_checked()

    @property
    def shows_output(self) -> bool:
        """Whether the task declares its records public."""
        return self.task.benchmark

    def measure(self, plan: StagePlan) -> Mapping[str, Any]:
        """Read the data, and return what a stage releases of it."""
        before = self.life.stage_releases()
        task: Any = self.life.spec.task
        for stage in self.life.spec.make_stages():
            if stage.name == plan.arm:
                break
            task = stage.applied(task, before[stage.name])
        return release_stage(plan, task, Streams(self.life.secret(plan)))

    def rehearse(self, plan: Plan) -> float:
        """Train a few steps on made-up records; an unknown strategy is found before the charge."""
        return rehearse(
            plan,
            self.task,
            self._strategy(plan),
            space=space_of(self.life.spec, plan),
            compute=self.compute,
            sampler=own_sampler(self.sampler),
            known=self.timed,
        )

    def prepare(self, plan: Plan) -> tuple[Strategy, StudyRound]:
        """Return the arm's strategy as the spec has it, and its round."""
        own, public = own_sampler(self.sampler), plan.score is not None and plan.score.event is None
        files = make_files(
            self.life,
            plan,
            task=self.staged,
            data=self.data,
            compute=self.compute,
            sampler=own,
            deadline=self.deadline,
            # Of a sealed arm nobody hears how far it is, and no pruner sees a score.
            on_step=None if plan.is_sealed else partial(self._tell_step, plan),
            prunes=self.pruner is not None and public and not plan.is_sealed,
        )
        return self._strategy(plan), StudyRound(
            self.life,
            files,
            give_out=self._give_out(plan, files),
            sampler=self.sampler if own is None else None,
            pruner=self.pruner,
        )

    def _tell_step(self, plan: Plan, done: int, steps: int) -> None:
        """Tell the observer how far a training is; what it prints is shown."""
        with aloud():
            self.observer.step(plan, done, steps)

    def _give_out(self, plan: Plan, files: TrialFiles) -> Callable[[Rounds, str], None] | None:
        """Return who else trains the rows; functions that cannot be imported run in threads."""
        if self.executor.name == "inline" or not plan.is_private:
            return None
        if not plan.is_sealed and (self.sampler is not None or self.pruner is not None):
            return None  # Optuna's objects see one trial after the other, in this process
        if self.life.spec.task is None:
            if self.task.code is None or self.sampler is not None or math.isfinite(self.deadline):
                return in_threads(files, self.executor.jobs)
            files.results.put(TASK, self.task.packed_code, replace=True)
        return give_out(self.executor, self.life, plan, compute=self.compute, tell=self.tell)

    def _strategy(self, plan: Plan) -> Strategy:
        if self.strategy is not None:
            return self.strategy
        (arm,) = (arm for arm in self.life.spec.arms if arm.name == plan.arm)
        return arm.to_strategy()

    def finish(self, plan: Plan, outcome: Outcome, repetition: int) -> Mapping[str, ScoreEstimate]:
        """Measure a repetition's released model on the test split, as was planned."""
        from privtune.training.mechanism.kernel import load_params

        result = outcome.result
        measured = plan.report is not None or self.staged.public_test or self.staged.benchmark
        if result is None or result.weights.numel() == 0 or not measured:
            return {}
        model = model_for(self.staged, plan.training_of(result.params), result.params)
        load_params(model, result.weights)
        # Asked again, the noise is the same.
        rng = Streams(self.life.secret(plan)).numpy("report", repetition)
        return utility_of(plan, self.staged, model, self.data.test, rng)

    @property
    def device(self) -> str:
        """The class of hardware, if it is this machine's."""
        from privtune.training.engine.compute import hardware

        here = self.executor.name in {"inline", "processes"}
        return hardware(self.compute.device) if here else "its workers'"

    def look(
        self, plans: Sequence[Plan], *, anyway: bool, told: Callable[[RecordCheck], None] | None
    ) -> None:
        """Stop a study whose records are not what is declared, before anything is charged.

        What is found is the curator's alone: ``told`` hears it, and only then does the error say why.
        """
        stages = self.life.spec.make_stages()
        if any(stage.type == "usable" for stage in stages):
            return  # which counts them, and is charged for it
        plan = next((plan for plan in plans if plan.is_sealed), plans[0])
        found: RecordCheck | None = None
        try:
            with self.life.seal(plan, rehearsal=True, private=not self.shows_output):
                # The arms train on the same records.
                keep = not stages and self.task.examine is None
                model = None
                if self.task.build is not None:
                    example = plan.example(space_of(self.life.spec, plan))
                    model = model_for(self.task, plan.first_training, example)
                found = self.task.check_records(self.data if keep else None, model=model)
        except TaskDataError:  # of public facts
            raise
        except Exception as error:
            if _names_code_alone(error):
                raise
            # What it says may come from a record.
            self.life.record_failure(plans[0].arm, error)
        if found is None:
            raise UnreadableRecordsError(self.life.name)
        if told is not None:
            told(found)
        if found.reason and not anyway:
            raise UnusableRecordsError(self.life.name, "" if told is None else found.reason)


def _names_code_alone(error: Exception) -> bool:
    """Say whether an error is that a function keeps records: it names the function and what it changes."""
    from privtune.training.mechanism.memory import RecordMemoryError

    return isinstance(error, RecordMemoryError)


def run_study(
    life: Life,
    observer: Observer,
    *,
    executor: Executor,
    compute: Compute,
    non_private: bool,
    anyway: bool = False,
    told: Callable[[RecordCheck], None] | None = None,
) -> tuple[Release, ...]:
    """Run what has not been released: see :meth:`privtune.Study.run`."""
    if life.spec.task is None:
        life.spec.load_task()  # says that the study is open, and what runs its arms
    task, plans = _task(life), list(life.plans().values())
    without = [plan.arm for plan in plans if not plan.is_private]
    if without and not non_private:
        raise NonPrivateError(
            f"Study {life.name!r} holds {', '.join(without)} without any guarantee (epsilon is "
            "infinite): it trains on the data as it is. Run it with --non-private if the data "
            "may be shown to everybody, or take it out of the study. Nothing was run."
        )
    executor.slots(compute.device)  # too few GPUs are said before the charge
    with life.alone(), telling() as tell:
        trainer = TaskTrainer(life, task, observer, compute, executor, tell)
        look = None
        if not life.charges() and not anyway:
            check_worth(plans, task)
        if not life.charges() and not (anyway and told is None):
            look = partial(trainer.look, plans, anyway=anyway, told=told)
        return carry_on(
            life, plans, trainer, observer, measure=trainer.measure, look=look, anyway=anyway
        )


def _task(life: Life) -> Task:
    try:
        task = life.spec.load_task()
        with users_code("task", task.name, "it cannot be checked"):
            task.check()
    except (TaskDataError, InvalidInputError) as error:
        raise TaskDataError(
            f"{error} Study {life.name!r} was planned for it: put it back and run the study again, "
            f"or free the name with: privtune study delete {life.name} (what was charged stays "
            "charged)."
        ) from error
    return task


def optimize(
    life: Life,
    build: Any,
    *,
    strategy: Strategy,
    mechanism: Mechanism | None,
    arm: str | None,
    observer: Observer,
    tell: Callable[[Release], None],
    told: Callable[[RecordCheck], None] | None,
    show_progress_bar: bool,
    anyway: bool,
    **given: Any,
) -> tuple[Release, Task | None]:
    """Lead one arm to its release, which is returned if it is there: see :meth:`privtune.Study.optimize`."""
    strategy = _named(life, strategy, arm, given["epsilon"])

    def announce(plan: Plan, release: Release) -> None:
        observer.released(plan, release)
        tell(release)

    with telling() as say:
        trainer: Trainer
        task, look = None, None
        if mechanism is not None:
            plan, trainer = _declared(life, build, mechanism, strategy, anyway=anyway, **given)
        else:
            plan, trainer = _engine(
                life, build, strategy, observer=observer, say=say, anyway=anyway, **given
            )
            task = trainer.task
            if told or not anyway:
                look = partial(trainer.look, [plan], anyway=anyway, told=told)
        spinner: AbstractContextManager[Any] = nullcontext()
        if show_progress_bar:
            from rich.console import Console

            # How far a sealed arm is would tell its number of runs.
            label = f"{plan.arm} (sealed)" if plan.is_sealed else plan.arm
            spinner = Console(file=open_stream(sys.stderr)).status(label)
        with life.alone(plan.arm), spinner:
            plan = life.planned(plan)
            stage = life.stage(plan)
            if stage is Stage.ANNOUNCED and (there := life.release(plan)) is not None:
                _log.warning(
                    "Arm %r of study %r has been released: its release is returned, nothing was run "
                    "or spent.",
                    plan.arm,
                    life.name,
                )
                return there, task
            if task is not None and stage is Stage.PLANNED and not anyway:
                check_worth([plan], task)
            (release,) = carry_on(
                life,
                [plan],
                trainer,
                observer,
                announce,
                look=look if stage is Stage.PLANNED else None,
                anyway=anyway,
            )
    return release, task


def _engine(
    life: Life,
    build: Any,
    strategy: Strategy,
    *,
    observer: Observer,
    say: Callable[[str], None],
    anyway: bool,
    epsilon: float | None,
    epochs: float | None,
    expected_batch_size: int | None,
    space: Mapping[str, Any] | None,
    sampler: Any,
    pruner: Any,
    executor: str | Mapping[str, Any] | None,
    n_jobs: int,
    timeout: float | None,
    noise: Any,
    **records: Any,
) -> tuple[Plan, TaskTrainer]:
    """Return the plan and the trainer of an arm that the engine trains."""
    from privtune.tasks.own import task_of

    task, compute = task_of(build, **records), life.spec.compute
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
    _check_space(space, strategy, sampler)
    context = _context(
        life,
        task,
        epochs=epochs,
        expected_batch_size=expected_batch_size,
        space=space,
        noise=noise,
    )
    check_delta_of(task, context.delta, anyway=anyway)
    quiet: AbstractContextManager[Any] = nullcontext()
    if needs_of(strategy).independent:
        quiet = sealed(life.place(f"sealed/{strategy.arm}.log"), rehearsal=True)
    with quiet:
        strategy = _with_method(strategy, task, context)
    scored = task.validation_records > 0
    _check_covered(strategy, scored=scored, sampler=sampler, pruner=pruner, others=[InRun.name])
    _check_kinds(strategy, sampler, pruner)
    target = _target_of(life, strategy.arm) if epsilon is None else epsilon
    (plan,) = plan_arms([strategy], context, epsilon=target).plans
    _check_searches(plan, sampler=sampler, pruner=pruner)
    if space is not None:
        plan = replace(plan, details={**plan.details, SPACE: without_numpy(space)})
    if (sampler or pruner) is not None:
        workers = {"n_jobs": n_jobs} if executor is None else {"executor": executor}
        _check_seen(plan, {} if chosen.name == "inline" else workers)
        _check_pruner(plan, pruner)
    return plan, TaskTrainer(
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


def _declared(
    life: Life,
    objective: Any,
    mechanism: Mechanism,
    strategy: Strategy,
    *,
    epsilon: float | None,
    score: Score | str | None,
    split: Mapping[str, int] | None,
    validation: Any,
    public: Mapping[str, Any] | None,
    sampler: Any,
    timeout: float | None,
    anyway: bool,
    **others: Any,
) -> tuple[Plan, DeclaredTrainer]:
    """Return the plan and the trainer of an arm of a declared mechanism."""
    _check_declared(objective, mechanism, epsilon, others)
    score = score if isinstance(score, Score) else Score(score or "accuracy")
    if is_of_loss(score.metric):
        raise InvalidInputError(
            "score",
            score.metric,
            "is that which is trained on, which a declared mechanism does not tell",
            "Use privtune.Score(function of a model and one record, bound=...).",
        )
    known, is_public = _validation(validation, public)
    data = None if known is None else known.data
    _check_covered(strategy, scored=data is not None, sampler=sampler, pruner=None)
    _check_kinds(strategy, sampler, None)
    budget = life.ledger.budget(life.budget)
    if life.spec.repeats > 1:
        raise InvalidInputError(
            "repeats",
            life.spec.repeats,
            "is for arms that the engine trains, and a mechanism is declared",
            "Declare an arm for each repetition.",
        )
    if data is not None and not is_public:
        refuse_other_unit(data.unit or RECORD, budget.unit, "The validation split", budget.name)
    records = (split or {}).get("validation") or (1 if data is None else len(data))
    scored = data is not None and not is_public
    check_delta(
        budget.delta,
        mechanism.records + (records if scored else 0),
        unit=budget.unit,
        anyway=anyway,
    )
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
    function = None
    if plan.score is not None and known is not None:
        function = _score_function(score, known)
    return plan, DeclaredTrainer(
        life, objective, mechanism, strategy, sampler, deadline_of(timeout), data, function
    )


_USUAL = {"n_jobs": 1, "precision": "float32", "benchmark": False}


def _check_declared(
    objective: object, mechanism: object, epsilon: float | None, others: Mapping[str, Any]
) -> None:
    """Refuse what is no objective and no mechanism, and arguments that it would ignore."""
    for name, value in others.items():
        if not _asks_for_nothing(name, value):
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


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether an argument of ``optimize`` says what would be so without it."""
    if value is None or value == _USUAL.get(name):
        return True
    if name == "executor":
        return Executor.of(value, 1).name == "inline"
    if name == "noise":
        return NoiseOptions.of(value) == NoiseOptions()
    return False


def _named(life: Life, strategy: Strategy, arm: str | None, epsilon: object) -> Strategy:
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


def _check_space(space: object, strategy: Strategy, sampler: Any) -> None:
    """Refuse a space that is none, and one that nothing would be drawn from."""
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
    if own_sampler(sampler) is not None:
        raise InvalidInputError(
            "space",
            sorted(space),
            "does not go with a sampler of your own, which draws whole candidates",
            "Leave one of them out.",
        )


def _context(
    life: Life,
    task: Task,
    *,
    epochs: Any,
    expected_batch_size: Any,
    space: Mapping[str, Any] | None,
    noise: Any,
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
    budget, spec = life.ledger.budget(life.budget), life.spec
    refuse_other_unit(task.unit or RECORD, budget.unit, "The data", budget.name)
    given = {
        "epochs": epochs,
        "expected_batch_size": expected_batch_size,
        "space": space or {},
        "noise": spec.noise if noise is None else noise,
    }
    return spec.model_copy(update=given).planning_context(task)


def _with_method(strategy: Strategy, task: Task, context: PlanningContext) -> Strategy:
    """Return the strategy with the method that ``build`` names, which every trial is charged for."""
    if "method" not in {field.name for field in fields(strategy)}:  # type: ignore[arg-type]
        return strategy
    of_arm: str = strategy.method  # type: ignore[attr-defined]
    drawn = context.space.draw(Streams(bytes(32)), 0)
    candidate = {**drawn, **getattr(strategy, "parameters", {})}
    found = named_method(task, context.schedule, candidate)
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


def _check_seen(plan: Plan, workers: Mapping[str, object]) -> None:
    """Refuse a sampler or pruner where trials run side by side, for it sees one after the other."""
    if plan.repeats > 1:
        raise InvalidInputError(
            "repeats",
            plan.repeats,
            "does not go with a sampler or pruner of your own, which would see the trials of all repetitions",
            "Leave one of them out.",
        )
    for name, value in workers.items():
        if plan.is_sealed:
            continue
        raise InvalidInputError(
            name,
            value,
            "does not go with a sampler or pruner of Optuna, which see one trial after the other, in this "
            "process",
            "Leave one of them out.",
        )


def _check_kinds(strategy: Strategy, sampler: object, pruner: object) -> None:
    """Refuse what is no sampler and no pruner, such as a name, and a sampler beside the strategy's."""
    import optuna

    own = callable(getattr(sampler, "draw", None)) and not isinstance(sampler, type)
    if not (sampler is None or own or isinstance(sampler, optuna.samplers.BaseSampler)):
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
    defaults = {each.name: each.default for each in fields(strategy)}  # type: ignore[arg-type]
    of_strategy = getattr(strategy, "sampler", None)
    if sampler is None or of_strategy == defaults.get("sampler"):
        return
    raise InvalidInputError(
        "sampler",
        type(sampler).__name__,
        f"does not go with sampler {of_strategy!r} of strategy {strategy.name!r}: one of them draws",
        "Leave one of them out.",
    )


def _check_pruner(plan: Plan, pruner: object) -> None:
    """Refuse a pruner that nobody would ask, since scores of a private split are no scores on the way."""
    if pruner is None or (plan.score is not None and plan.score.event is None):
        return
    raise InvalidInputError(
        "pruner",
        type(pruner).__name__,
        "compares exact scores while trials are trained, and the validation split is private: a trial is "
        "charged for one noised score at its end",
        'Leave it out, or pass records that everybody may see: public={"validation": (x, y)}.',
    )


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


def _score_function(score: Score, records: Records) -> LossOf | None:
    """Return the user's score function of packed records; None for a metric, which takes one input."""
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


def _validation(private: Any, public: Mapping[str, Any] | None) -> tuple[Records | None, bool]:
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
    return None if data is None else read_records(data, field="validation"), shown is not None
