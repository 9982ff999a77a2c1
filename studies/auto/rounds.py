"""Arms run seed beside seed: the strategies' own plans and choices, on trials that are trained together.

A study charges, stores and certifies; of that nothing changes a result. Here the same planner, trainer and
scores run an arm with several secrets, and trainings on all records are one stack.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from privtune.accounting import epsilon as account
from privtune.execution.training import accuracy, model_of, part_of, train_trials
from privtune.spaces import SearchSpace
from privtune.strategies import (
    Plan,
    PlanningContext,
    TrainingPlan,
    TrialResult,
    make_strategy,
    plan_arm,
)
from privtune.study.spec import StudySpec
from privtune.tasks import Task, TaskData, get_task
from privtune.training.mechanism.streams import Streams

DELTA = 1e-5


def context_of(terms: Mapping[str, Any], epsilon: float) -> PlanningContext:
    """Return the public facts of a spec with these terms. Touches no data."""
    budget = {"name": "data", "epsilon": epsilon, "delta": DELTA}
    arms = [{"name": "arm", "strategy": "auto"}]
    return StudySpec.parse(
        {"name": "study", "budget": budget, "arms": arms, **terms}
    ).planning_context()


@functools.cache
def _loaded(task: str) -> TaskData:
    return get_task(task).load_checked()


@dataclass
class _Round:
    """The trials of one arm with one seed: a ``Round`` in memory."""

    task: Task
    data: TaskData
    space: SearchSpace
    seed: int
    found: Sequence[TrialResult] | None = (
        None  # of a search that was trained with those of other seeds
    )
    streams: Streams = field(init=False)
    at_once = 1

    def __post_init__(self) -> None:
        self.streams = Streams(self._secret("round"))

    def _secret(self, name: str) -> bytes:
        return hashlib.sha256(f"studies/auto/{self.task.name}/{self.seed}/{name}".encode()).digest()

    def drawn(self, plan: Plan) -> tuple[dict[int, dict[str, Any]], dict[int, bytes]]:
        """Return the candidates of a search, or the one of a plan without, and their secrets."""
        runs = 1 if plan.runs is None else int(plan.runs.sample(self.streams.numpy("runs", 0)))
        return (
            {n: plan.candidate(self.space, self.streams, n) for n in range(runs)}
            if plan.runs is not None
            else {0: dict(plan.params)},
            {n: self._secret(f"trial {n}") for n in range(runs)},
        )

    def _trained(self, plan: Plan, training: TrainingPlan, *, scored: bool, **of: Any) -> Any:
        records = part_of(self.data.train, training.part, plan.rate, self.streams)
        score = plan.score if scored else None
        return train_trials(
            training, task=self.task, data=self.data, records=records, score=score, **of
        )

    def select(self, plan: Plan) -> Sequence[TrialResult]:
        """Train the candidates of a search, unless they have been."""
        if self.found is None and plan.search is not None:
            trials, secrets = self.drawn(plan)
            (training,) = plan.search.trainings
            self.found = self._trained(plan, training, scored=True, trials=trials, secrets=secrets)
        return self.found or ()

    def train(
        self,
        plan: Plan,
        training: TrainingPlan,
        params: Mapping[str, Any],
        *,
        name: str,
        scored: bool = False,
    ) -> TrialResult:
        """Train one candidate, unless it has been."""
        if self.found is not None and plan.search is None:
            return self.found[0]
        of = {"trials": {0: params}, "secrets": {0: self._secret(name)}}
        result: TrialResult = self._trained(plan, training, scored=scored, **of)[0]
        return result

    def train_numbered(self, plan: Plan, trials: Mapping[int, Any]) -> NoReturn:
        """Refuse: no arm of the study shows its trials."""
        raise NotImplementedError

    ask = tell = train_numbered


def releases_of(
    arm: Mapping[str, Any], *, epsilon: float, seeds: int, **terms: Any
) -> list[dict[str, Any]]:
    """Run one arm with every seed below ``seeds``; a line each, as ``studies.sheet.release_of`` has it."""
    context = context_of(terms, epsilon)
    options = {name: value for name, value in arm.items() if name != "strategy"}
    strategy = make_strategy(arm["strategy"], arm="arm", options=options)
    plan = plan_arm(strategy, context, epsilon=epsilon)
    data = _loaded(terms["task"])
    rounds = [_Round(context.task, data, context.space, seed) for seed in range(seeds)]
    first = plan.first_training
    if first.part == "all":
        drawn = [each.drawn(plan) for each in rounds]
        names = [(seed, n) for seed, (trials, _) in enumerate(drawn) for n in trials]
        results = train_trials(
            first,
            task=context.task,
            data=data,
            records=data.train,
            score=plan.score,
            trials={at: drawn[seed][0][n] for at, (seed, n) in enumerate(names)},
            secrets={at: drawn[seed][1][n] for at, (seed, n) in enumerate(names)},
        )
        for seed, each in enumerate(rounds):
            each.found = [
                result for result, (own, _) in zip(results, names, strict=True) if own == seed
            ]
    lines = []
    for each in rounds:
        model = strategy.run(plan, each).result
        right = 0.0 if model is None else accuracy(model_of(context.task, model.weights), data.test)
        lines.append({"seed": each.seed, "accuracy": round(right, 4)})
    cost = {
        "spent": round(account(plan.event, DELTA).epsilon, 4),
        "claimed": round(account(plan.training.event, DELTA).epsilon, 4),
        "gradient_evaluations": round(plan.expected_gradient_evaluations),
    }
    return [{**line, **cost} for line in lines]
