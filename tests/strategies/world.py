"""Public facts to plan with, and a round that needs no data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from privtune.accounting import Adjacency
from privtune.spaces import SearchSpace
from privtune.strategies import (
    Ending,
    NamedTraining,
    Outcome,
    Plan,
    PlanningContext,
    Request,
    Scoring,
    SealedRound,
    TrainingPlan,
    TrialResult,
    advance,
)
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from tests.toy import blobs

BOTH = {
    "learning_rate": {"low": 0.05, "high": 5.0, "log": True},
    "max_grad_norm": {"low": 0.1, "high": 10.0, "log": True},
}
RATE = {"learning_rate": BOTH["learning_rate"]}


def context(space: Mapping[str, Any] | None = None, **changes: Any) -> PlanningContext:
    fields: dict[str, Any] = {
        "task": blobs(),
        "schedule": Schedule.from_epochs(records=240, expected_batch_size=24, epochs=2),
        "space": SearchSpace.from_dict(BOTH if space is None else space),
        "delta": 1e-5,
        "adjacency": Adjacency.ADD_REMOVE,
        "scoring": Scoring(),
    }
    return PlanningContext(**{**fields, **changes})


class FakeRound:
    """Trains nothing: a candidate's score is given, or a function of its hyperparameters."""

    def __init__(
        self,
        space: SearchSpace,
        *,
        count: int = 4,
        score: Any = lambda p: -abs(math.log(p["learning_rate"])),
    ) -> None:
        self.space = space
        self.streams = Streams(bytes(32))
        self.count = count
        self.score = score
        self.trained: list[tuple[str, TrainingPlan, dict[str, Any]]] = []
        self.told: dict[int, float | None] = {}

    def _result(self, index: int, params: Mapping[str, Any]) -> TrialResult:
        score = self.score(params)
        return TrialResult(
            index=index,
            params=dict(params),
            weights=torch.zeros(3),
            score=score,
            ended=Ending.DIVERGED if score == -math.inf else Ending.TRAINED,
        )

    def run(self, strategy: Any, plan: Plan) -> Outcome:
        """Return what a strategy releases, each request answered at once."""
        run = strategy.run(plan, self)
        request = advance(run)
        while not isinstance(request, Outcome):
            request = advance(run, self.answer(plan, request))
        return request

    def answer(self, plan: Plan, request: Request) -> Sequence[TrialResult]:
        if isinstance(request, SealedRound):
            return self.select(plan)
        if isinstance(request, NamedTraining):
            return [self.train(request)]
        assert plan.search is not None
        results = []
        for number, params in request.candidates.items():
            training = plan.search.training_of(params)
            results.append(self.train(NamedTraining(f"trial-{number}", training, params, True)))
        return results

    def select(self, plan: Plan) -> Sequence[TrialResult]:
        return [
            self._result(n, {**plan.params, **self.space.draw(self.streams, n)})
            for n in range(self.count)
        ]

    def train(self, request: NamedTraining) -> TrialResult:
        self.trained.append((request.name, request.training, dict(request.params)))
        return self._result(len(self.trained) - 1, request.params)

    at_once = 1

    def ask(self, number: int, make: Any) -> Mapping[str, Any]:
        make(self.space)
        return self.space.draw(self.streams, number)

    def tell(self, number: int, result: TrialResult) -> None:
        self.told[number] = result.score
