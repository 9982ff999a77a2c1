"""Run a study whose arms are declared, and the trainer of all arms that the engine trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.execution.executor import Executor
from privtune.imports import users_code
from privtune.strategies import NonPrivateError, Outcome, Plan, Release
from privtune.strategies.plan import StagePlan, release_stage
from privtune.study._files import TrialFiles
from privtune.study.build import build_candidate, model_for
from privtune.study.failures import UnreadableRecordsError, UnusableRecordsError
from privtune.study.lifecycle import Life, carry_on
from privtune.study.rehearsal import rehearse
from privtune.study.release import utility_of
from privtune.study.rounds import StudyRound, in_threads, own_sampler
from privtune.study.workers import TASK, give_out, make_files, telling
from privtune.tasks import TaskDataError
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from privtune.ledger.rounds import Rounds
    from privtune.strategies import Strategy
    from privtune.strategies._base import Round
    from privtune.study.observer import Observer
    from privtune.tasks import Task, TaskData
    from privtune.tasks._usable import RecordCheck
    from privtune.training.engine.compute import Compute
    from privtune.training.mechanism.scoring import Measured


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

    def prepare(self, plan: Plan) -> tuple[Strategy, Round]:
        """Return the arm's strategy as the spec has it, and its round."""
        life, charge = self.life, self.life.charge_of(plan)
        own = own_sampler(self.sampler)
        files = make_files(life, plan, task=self.staged, data=self.data, compute=self.compute)
        files = replace(files, sampler=own, deadline=self.deadline)
        if not plan.is_sealed:
            public = plan.score is not None and plan.score.event is None
            files = replace(
                files,
                on_step=lambda done, of: self.observer.step(plan, done, of),
                prunes=self.pruner is not None and public,
            )
        return self._strategy(plan), StudyRound(
            kept=life.trials,
            ledger=life.ledger,
            charge_id=None if charge is None else charge.id,
            files=files,
            give_out=None if charge is None else self._give_out(plan, files, charge.id),
            sampler=self.sampler if own is None else None,
            pruner=self.pruner,
        )

    def _give_out(
        self, plan: Plan, files: TrialFiles, charge_id: str
    ) -> Callable[[Rounds], None] | None:
        """Return who else trains the rows; functions that cannot be imported run in threads."""
        if self.executor.name == "inline":
            return None
        if not plan.is_sealed and (self.sampler is not None or self.pruner is not None):
            return None  # Optuna's objects see one trial after the other, in this process
        if self.life.spec.task is None:
            if self.task.code is None or self.sampler is not None or math.isfinite(self.deadline):
                return in_threads(files, charge_id, self.executor.jobs)
            files.results.put(TASK, self.task.packed_code, replace=True)
        how: dict[str, Any] = {"compute": self.compute, "tell": self.tell}
        return give_out(self.executor, self.life, plan, charge_id=charge_id, **how)

    def _strategy(self, plan: Plan) -> Strategy:
        if self.strategy is not None:
            return self.strategy
        (arm,) = (arm for arm in self.life.spec.arms if arm.name == plan.arm)
        return arm.to_strategy()

    def finish(self, plan: Plan, outcome: Outcome) -> Mapping[str, Measured]:
        """Measure the released model on the test split, as was planned."""
        from privtune.training.mechanism.kernel import load_params

        result = outcome.result
        measured = plan.report is not None or self.staged.public_test
        if result is None or result.weights.numel() == 0 or not measured:
            return {}
        model = model_for(self.staged, plan.training_of(result.params), result.params)
        load_params(model, result.weights)
        rng = Streams(self.life.secret(plan)).numpy(
            "report", 0
        )  # asked again, the noise is the same
        return utility_of(plan, self.staged, model, self.data.test, rng)

    def machine(self) -> Mapping[str, str]:
        """Return the versions here, and the hardware if it is this machine's."""
        from privtune.training.engine.compute import hardware, versions

        here = self.executor.name in {"inline", "processes"}
        return {**versions(), "device": hardware(self.compute.device) if here else "its workers'"}

    def look(
        self, plans: Sequence[Plan], *, anyway: bool, told: Callable[[RecordCheck], None] | None
    ) -> None:
        """Stop a study whose records are not what is declared, before anything is charged.

        What is found is the curator's alone: ``told`` hears it, and only then does the error say why.
        """
        stages = self.life.spec.make_stages()
        if any(stage.type == "usable" for stage in stages):
            return  # which counts them, and is charged for it
        sealed = next((plan for plan in plans if plan.is_sealed), plans[0])
        found: RecordCheck | None = None
        try:
            with self.life.seal(sealed, rehearsal=True):
                keep = (
                    not stages and self.task.examine is None
                )  # the arms train on the same records
                model = None
                if self.task.build is not None:
                    training = sealed.first_training
                    model = build_candidate(
                        self.task, training, secret=bytes(32), fixed=sealed.fixed
                    ).model
                found = self.task.check_records(self.data if keep else None, model=model)
        except TaskDataError:  # of public facts
            raise
        except Exception as error:  # what it says may come from a record
            self.life.record_failure(plans[0].arm, error)
        if found is None:
            raise UnreadableRecordsError(self.life.name)
        if told is not None:
            told(found)
        if found.reason and not anyway:
            raise UnusableRecordsError(self.life.name, "" if told is None else found.reason)


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
