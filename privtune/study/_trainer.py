"""Who trains the arms of a study: one trainer for the arms of a spec and for those of ``study.optimize``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from privtune.execution.executor import Executor
from privtune.strategies import Outcome, Plan
from privtune.strategies.plan import StagePlan, release_stage
from privtune.study._files import TrialFiles
from privtune.study._live import LiveRound, in_threads, own_sampler
from privtune.study._release import shaped, utility_of
from privtune.study.build import build_candidate, model_for
from privtune.study.lifecycle import Life
from privtune.study.rehearsal import rehearse
from privtune.study.workers import TASK, give_out, make_files
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from torch import nn

    from privtune.ledger import Rounds
    from privtune.strategies import Strategy
    from privtune.strategies._base import Round
    from privtune.study.observer import Observer
    from privtune.tasks import Task, TaskData
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
