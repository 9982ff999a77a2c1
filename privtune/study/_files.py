"""Training of an arm's candidates: those of a task's model, and those that its ``build`` makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from optuna.exceptions import TrialPruned

from privtune.execution.training import OnStep, part_of, pruned, train_built, train_trials
from privtune.strategies import StrategyError, TrainingPlan, TrialResult
from privtune.study.build import Built, build_candidate
from privtune.study.rehearsal import DependentTrialsError, described
from privtune.study.rounds import STACK, Files
from privtune.training.engine.compute import Compute

if TYPE_CHECKING:
    from privtune.study.trials import ShownTrial
    from privtune.tasks import Task, TaskData
    from privtune.training.engine.checkpoint import Keeper
    from privtune.training.engine.train import Made


@dataclass(frozen=True, kw_only=True)
class TrialFiles(Files):
    """Trains candidates of a task with the engine, whole stacks at once.

    Args:
        task: The task.
        data: Its data; the arm's charge has been started.
        compute: Where, and how many at once.
        on_step: Progress.
        prunes: Whether trials that are shown report their public scores to a pruner as they go.
    """

    task: Task
    data: TaskData
    compute: Compute = field(default_factory=Compute)
    on_step: OnStep | None = None
    prunes: bool = False

    @property
    def at_once(self) -> int:
        """How many rows to take at once: those of a stack."""
        if self.task.build is not None and not self.plan.is_sealed:
            return 1  # a trial that is shown may be suggested by the scores of those before it
        return STACK if self.compute.stack == "auto" else self.compute.stack

    @property
    def hardware(self) -> str:
        """The class of hardware that trains."""
        from privtune.training.engine.compute import hardware

        return hardware(self.compute.device)

    def candidate(self, number: int) -> dict[str, Any]:
        """Return the hyperparameters of a row; where a ``build`` suggests them, those that are fixed."""
        return super().candidate(number) if self.task.build is None else dict(self.plan.params)

    def train(
        self,
        training: TrainingPlan,
        trials: Mapping[int, Mapping[str, Any]],
        *,
        secrets: Mapping[int, bytes],
        scored: bool,
        alone: bool = True,
        named: bool = False,
    ) -> list[TrialResult]:
        """Train some candidates together; one that nobody else is at goes on from its checkpoint."""
        from privtune.training.engine.checkpoint import Keeper

        self.check_deadline()
        name, results = "checkpoint", self.results
        kept = Keeper(partial(results.find, name), partial(results.put, name, replace=True))
        # Rows are trained again whole: another worker may be at the same one.
        keeper = kept if alone else None
        if self.task.build is not None:
            live = {} if named else self.live
            return self._train_built(training, trials, secrets, live, scored=scored, keeper=keeper)
        return train_trials(
            training,
            task=self.task,
            data=self.data,
            records=part_of(self.data.train, training.part, self.plan.rate, self.streams),
            score=self.plan.score if scored else None,
            trials=trials,
            secrets=secrets,
            compute=self.compute,
            on_step=self.on_step,
            # Sealed trials and private splits have no curves: nothing would have paid for them.
            validated=self.task.public_validation and not self.plan.is_sealed,
            keeper=keeper,
        )

    def _train_built(
        self,
        training: TrainingPlan,
        trials: Mapping[int, Mapping[str, Any]],
        secrets: Mapping[int, bytes],
        live: Mapping[int, ShownTrial],
        *,
        scored: bool,
        keeper: Keeper | None,
    ) -> list[TrialResult]:
        """Build candidates one after the other, train those that are alike together."""
        built: dict[int, Built] = {}
        told: list[object] = []

        def build(number: int) -> Built:
            return build_candidate(
                self.task,
                training,
                secret=secrets[number],
                fixed=trials[number],
                sealed=self.plan.is_sealed,
                number=number,
                sampler=self.sampler,
                live=live.get(number),
            )

        def made() -> Iterator[tuple[int, Made]]:
            for number in trials:
                built[number] = build(number)
                if self.plan.is_sealed and not told:
                    told.append(described(built[number]))
                yield number, built[number].made

        reporting = live.get(next(iter(trials))) if self.prunes and len(trials) == 1 else None

        def look(done: int, score: float) -> None:
            if reporting is not None:
                reporting.report(score, done)
                if reporting.should_prune():
                    raise TrialPruned

        try:
            results = [
                replace(result, params=built[result.index].params)
                for result in train_built(
                    training,
                    task=self.task,
                    data=self.data,
                    records=part_of(self.data.train, training.part, self.plan.rate, self.streams),
                    score=self.plan.score if scored else None,
                    made=made(),
                    compute=self.compute,
                    on_step=self.on_step,
                    keeper=keeper,
                    look=None if reporting is None else look,
                )
            ]
        except TrialPruned as error:
            if reporting is None:
                raise StrategyError(
                    "A trial raised TrialPruned, and nothing that was paid for asked it to end. The engine "
                    "reports and prunes: study.optimize(..., strategy=Everything(), pruner=...)."
                ) from error
            ((number, each),) = built.items()
            return [pruned(number, each.params)]
        # State that changes late passes a rehearsal: a counter, a list that a score function fills.
        if told and described(build(next(iter(trials)))) != told[0]:
            raise DependentTrialsError(
                "build gives another trial from the same random numbers once trials have been trained and "
                "scored, so later trials depend on earlier ones. Let build read nothing but its trial."
            )
        return sorted(results, key=lambda result: list(trials).index(result.index))
