"""Run a study whose arms are declared, and the trainer of all arms that the engine trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from privtune.errors import InvalidInputError
from privtune.execution.executor import Executor, gpu_slots
from privtune.imports import users_code
from privtune.strategies import NonPrivateError, Outcome, Plan, Release
from privtune.strategies.stage_plan import StagePlan, release_stage
from privtune.study._files import TrialFiles
from privtune.study.build import build_candidate, model_for
from privtune.study.failures import UnreadableRecordsError, UnusableRecordsError
from privtune.study.lifecycle import Life, carry_on
from privtune.study.rehearsal import rehearse
from privtune.study.release import shaped, utility_of
from privtune.study.rounds import LiveRound, in_threads, own_sampler
from privtune.study.workers import TASK, give_out, make_files, telling
from privtune.tasks import TaskDataError
from privtune.training.engine.compute import check_device, check_stack
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from torch import nn

    from privtune.ledger import Rounds
    from privtune.strategies import Strategy
    from privtune.strategies._base import Round
    from privtune.study.observer import Observer
    from privtune.tasks import Task, TaskData
    from privtune.tasks._usable import RecordCheck
    from privtune.training.engine.compute import Compute
    from privtune.training.mechanism.scoring import Measured


@dataclass(frozen=True)
class TaskTrainer:
    """Trains the arms of a study with the engine.

    Args:
        life: The study.
        task: The task that its arms are planned for.
        observer: Hears of steps.
        compute: Where to train, how many at once.
        executor: Who trains the rows of rounds.
        tell: Says what is waited for.
        strategy: The strategy of an arm of ``study.optimize``; those of a spec stand in the spec.
        sampler: A sampler of Optuna's, or one of the user's own that declares independence.
        pruner: Optuna's pruner.
        deadline: When to stop beginning trials, on the monotonic clock.
    """

    life: Life
    task: Task
    observer: Observer
    compute: Compute
    executor: Executor
    tell: Callable[[str], None]
    strategy: Strategy | None = None
    sampler: Any = None
    pruner: Any = None
    deadline: float = math.inf
    timed: dict[object, float] = field(default_factory=dict)

    @cached_property
    def staged(self) -> Task:
        """The task with what its stages released; known when the first arm starts."""
        return self.task if self.life.spec.task is None else self.life.task()

    @cached_property
    def data(self) -> TaskData:
        """The task's data, loaded with the first arm that has started."""
        return self.staged.load_checked()

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
            space=self.life.spec.search_space(),
            compute=self.compute,
            sampler=own_sampler(self.sampler),
            known=self.timed,
        )

    def example(self, plan: Plan) -> nn.Module | None:
        """Return a model that a ``build`` makes, for records to be tried on; None without one."""
        if self.task.build is None:
            return None
        return build_candidate(
            self.task, plan.first_training, secret=bytes(32), fixed=plan.fixed
        ).model

    def prepare(self, plan: Plan) -> tuple[Strategy, Round]:
        """Return the arm's strategy as the spec has it, and its round."""
        life, charge = self.life, self.life.charge_of(plan)
        files = make_files(life, plan, task=self.staged, data=self.data, compute=self.compute)
        files = replace(files, sampler=own_sampler(self.sampler), deadline=self.deadline)
        if not plan.is_sealed:
            public = plan.score is not None and plan.score.event is None
            files = replace(
                files,
                on_step=lambda done, of: self.observer.step(plan, done, of),
                prunes=self.pruner is not None and public,
            )
        return self._strategy(plan), LiveRound(
            kept=life.trials,
            ledger=life.ledger,
            charge_id=None if charge is None else charge.id,
            files=files,
            give_out=self._give_out(plan, files),
            sampler=self.sampler if files.sampler is None else None,
            pruner=self.pruner,
        )

    def _give_out(self, plan: Plan, files: TrialFiles) -> Callable[[Rounds], None] | None:
        """Return who else trains the rows; functions that cannot be imported run in threads."""
        charge = self.life.charge_of(plan)
        if charge is None or self.executor.name == "inline":
            return None
        if not plan.is_sealed and (self.sampler is not None or self.pruner is not None):
            return None  # Optuna's objects see one trial after the other, in this process
        if self.life.spec.task is None:
            if self.task.code is None or self.sampler is not None or math.isfinite(self.deadline):
                return in_threads(files, charge.id, self.executor.jobs)
            files.results.put(TASK, self.task.packed_code, replace=True)
        return give_out(self.executor, self.life, plan, compute=self.compute, tell=self.tell)

    def _strategy(self, plan: Plan) -> Strategy:
        if self.strategy is not None:
            return self.strategy
        (arm,) = (arm for arm in self.life.spec.arms if arm.name == plan.arm)
        return arm.to_strategy()

    def finish(self, plan: Plan, outcome: Outcome) -> tuple[Outcome, Mapping[str, Measured]]:
        """Note the parameters' names, and measure the model as was planned."""
        result = outcome.result
        measured = plan.report is not None or self.staged.public_test
        if result is None or result.weights.numel() == 0 or (result.shapes and not measured):
            return outcome, {}
        model = model_for(self.staged, plan.training_of(result.params), result.params)
        result = shaped(model, result)
        streams = Streams(self.life.secret(plan))
        utility = utility_of(
            plan, self.staged, model, result.weights, data=self.data, streams=streams
        )
        return replace(outcome, result=result), utility

    def machine(self) -> Mapping[str, str]:
        """Return the versions here, and the hardware if it is this machine's."""
        from privtune.training.engine.compute import hardware, versions

        here = self.executor.name in {"inline", "processes"}
        return {**versions(), "device": hardware(self.compute.device) if here else "its workers'"}


def run_study(
    life: Life,
    observer: Observer,
    *,
    executor: Executor,
    device: str | None,
    stack: int | Literal["auto"] | None,
    non_private: bool,
    anyway: bool = False,
    told: Callable[[RecordCheck], None] | None = None,
) -> tuple[Release, ...]:
    """Run what has not been released: see :meth:`privtune.Study.run`."""
    if life.spec.task is None:
        life.spec.load_task()  # says that the study is open, and what runs its arms
    if life.finished():
        return tuple(found for arm in life.plans().values() if (found := life.release(arm)))
    plans = list(life.plans().values())
    compute = life.spec.compute
    if stack is not None:
        compute = replace(compute, stack=check_stack(stack))
    if device is not None:
        compute = replace(compute, device=device)
    check_device(compute.device)
    if executor.name == "processes":
        gpu_slots(executor.jobs, gpus=executor.gpus, device=compute.device)  # before the charge
    with life.alone(), telling() as tell:
        if not non_private:
            _check_private(life.name, plans)
        trainer = TaskTrainer(life, _task(life), observer, compute, executor, tell)
        look = None
        if not life.charges() and not (anyway and told is None):
            look = partial(check_records, life, plans, trainer, anyway=anyway, told=told)
        return carry_on(
            life, plans, trainer, observer, measure=trainer.measure, look=look, anyway=anyway
        )


def check_records(
    life: Life,
    plans: Sequence[Plan],
    trainer: TaskTrainer,
    *,
    anyway: bool,
    told: Callable[[RecordCheck], None] | None,
) -> None:
    """Stop a study whose records are not what is declared, before anything is charged.

    What is found is the curator's alone. A study whose own stage counts usable records is not looked at.

    Raises:
        UnusableRecordsError: With the reason for the curator, without it for everybody else.
    """
    stages = life.spec.make_stages()
    if any(stage.type == "usable" for stage in stages):
        return
    sealed = next((plan for plan in plans if plan.is_sealed), plans[0])
    found: RecordCheck | None = None
    try:
        with life.seal(sealed, rehearsal=True):
            keep = not stages and trainer.task.examine is None  # the arms train on the same records
            found = trainer.task.check_records(
                trainer.data if keep else None, model=trainer.example(sealed)
            )
    except TaskDataError:  # of public facts
        raise
    except Exception as error:  # what it says may come from a record
        life.record_failure(plans[0].arm, error)
    if found is None:
        raise UnreadableRecordsError(life.name)
    if told is not None:
        told(found)
    if found.reason and not anyway:
        raise UnusableRecordsError(life.name, "" if told is None else found.reason)


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


def _check_private(study: str, plans: list[Plan]) -> None:
    without = [plan.arm for plan in plans if not plan.is_private]
    if without:
        raise NonPrivateError(
            f"Study {study!r} holds {', '.join(without)} without any guarantee (epsilon is "
            "infinite): it trains on the data as it is. Run it with --non-private if the data "
            "may be shown to everybody, or take it out of the study. Nothing was run."
        )
