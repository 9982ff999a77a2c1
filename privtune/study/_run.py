"""Run a study whose arms are declared: the task's own trainings, driven by the life of each arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from privtune.errors import InvalidInputError
from privtune.execution.executor import Executor
from privtune.execution.gpus import gpu_slots
from privtune.execution.training import dry_run
from privtune.imports import users_code
from privtune.strategies import NonPrivateError, Outcome, Plan, Release
from privtune.strategies.searching import parts_of
from privtune.strategies.stage_plan import StagePlan, release_stage
from privtune.study._release import rehearse_end, shaped, utility_of
from privtune.study._round import StudyRound
from privtune.study.failures import UnreadableRecordsError, UnusableRecordsError
from privtune.study.lifecycle import Life, carry_on
from privtune.study.workers import give_out, make_files, telling
from privtune.tasks import TaskDataError
from privtune.tasks._fine_tuning import PART, for_candidate
from privtune.training.engine.compute import check_device, check_stack
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from privtune.strategies import Strategy
    from privtune.strategies._base import Round
    from privtune.study.observer import Observer
    from privtune.tasks import Task, TaskData
    from privtune.tasks._usable import RecordCheck
    from privtune.training.engine.compute import Compute
    from privtune.training.mechanism.scoring import Measured

__all__ = ["run_study"]


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
        trainer = _TaskTrainer(life, _task(life), observer, compute, executor, tell)
        look = None
        if not life.charges() and not (anyway and told is None):
            look = partial(_check_records, life, plans, trainer, anyway=anyway, told=told)
        return carry_on(
            life, plans, trainer, observer, measure=trainer.measure, look=look, anyway=anyway
        )


def _check_records(
    life: Life,
    plans: list[Plan],
    trainer: _TaskTrainer,
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
            found = trainer.task.check_records(trainer.data if keep else None)
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


@dataclass(frozen=True)
class _TaskTrainer:
    """Trains the arms of a declared study with the engine."""

    life: Life
    task: Task
    observer: Observer
    compute: Compute
    executor: Executor
    tell: Callable[[str], None]
    timed: dict[object, float] = field(default_factory=dict)

    @cached_property
    def staged(self) -> Task:
        """The task with what its stages released; known when the first arm starts."""
        return self.life.task()

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
        space = self.life.spec.search_space()
        parts = parts_of(self._strategy(plan), space, plan)
        params = plan.candidate(space, Streams(bytes(32)), 0)
        for part in parts or (None,):
            own = params if part is None else {**params, PART: part}
            rehearse_end(plan, self.task, own)
        return dry_run(plan, self.task, compute=self.compute, parts=parts, known=self.timed)

    def prepare(self, plan: Plan) -> tuple[Strategy, Round]:
        """Return the arm's strategy as the spec has it, and its round."""
        life, charge = self.life, self.life.charge_of(plan)
        files = make_files(life, plan, task=self.staged, data=self.data, compute=self.compute)
        if not plan.is_sealed:
            files = replace(files, on_step=lambda done, of: self.observer.step(plan, done, of))
        return self._strategy(plan), StudyRound(
            kept=life.trials,
            ledger=life.ledger,
            charge_id=None if charge is None else charge.id,
            files=files,
            give_out=give_out(self.executor, life, plan, compute=self.compute, tell=self.tell),
        )

    def _strategy(self, plan: Plan) -> Strategy:
        (arm,) = (arm for arm in self.life.spec.arms if arm.name == plan.arm)
        return arm.to_strategy()

    def finish(self, plan: Plan, outcome: Outcome) -> tuple[Outcome, Mapping[str, Measured]]:
        """Note the parameters' names, and measure the model as was planned."""
        streams = Streams(self.life.secret(plan))
        utility = utility_of(plan, self.staged, outcome.result, self.data, streams)
        if outcome.result is None:
            return outcome, utility
        task = for_candidate(self.staged, outcome.result.params)
        return replace(outcome, result=shaped(task, outcome.result)), utility

    def machine(self) -> Mapping[str, str]:
        """Return the versions here, and the hardware if it is this machine's."""
        from privtune.training.engine.machine import hardware, versions

        here = self.executor.name in {"inline", "processes"}
        return {**versions(), "device": hardware(self.compute.device) if here else "its workers'"}
