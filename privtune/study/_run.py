"""Run a study whose arms are declared: the task's own trainings, driven by the life of each arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from privtune.errors import InvalidInputError
from privtune.execution.executor import Executor
from privtune.execution.gpus import gpu_slots
from privtune.imports import users_code
from privtune.strategies import NonPrivateError, Plan, Release
from privtune.study._trainer import TaskTrainer
from privtune.study.failures import UnreadableRecordsError, UnusableRecordsError
from privtune.study.lifecycle import Life, carry_on
from privtune.study.workers import telling
from privtune.tasks import TaskDataError
from privtune.training.engine.compute import check_device, check_stack

if TYPE_CHECKING:
    from privtune.study.observer import Observer
    from privtune.tasks import Task
    from privtune.tasks._usable import RecordCheck


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
