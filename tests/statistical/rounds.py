"""A round whose trainings are one Gaussian release of one canary, and whose scores prefer the worst."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from privtune.audit.bounds import LowerBound
from privtune.execution.trial_training import part_of
from privtune.spaces import SearchSpace
from privtune.strategies import (
    NamedTraining,
    Plan,
    PlanningContext,
    Scoring,
    TrainingPlan,
    TrialResult,
)
from privtune.tasks import Task
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from tests.strategies.world import FakeRound
from tests.strategies.world import context as usual_context
from tests.toy import public_blobs

DELTA = 1e-3
RATE = {"learning_rate": {"low": 0.1, "high": 10.0, "log": True}}
WITH, WITHOUT = (TensorData(torch.full((1, 1), v), torch.zeros(1), True) for v in (1.0, math.nan))

Score = Callable[[float, Mapping[str, Any]], float]


def context(
    space: Mapping[str, Any], *, task: Task | None = None, scoring: Scoring | None = None
) -> PlanningContext:
    """Return what to plan with: one step over all records, which is one Gaussian release."""
    facts = {"schedule": Schedule(240, 1.0, 1), "delta": DELTA, "scoring": scoring or Scoring()}
    return usual_context(space, task=task or public_blobs(), **facts)


def deviation(training: TrainingPlan) -> float:
    """Return the noise of a training over what the canary adds to it."""
    assert training.schedule.steps == training.schedule.sample_rate == 1
    return float(training.method.noise_multiplier)


def evidence(x: float, sigma: float) -> float:
    """Return the log-likelihood ratio of "the canary is there"."""
    return (x - 0.5) / sigma**2


def three_tiers(low: float, high: float, sigma: float) -> Score:
    """Prefer what speaks against the canary, then for it: the factor of 3 of arXiv:2110.03620."""

    def score(x: float, _: Mapping[str, Any]) -> float:
        # The score of the best is released: it may as well tell the whole value.
        return 1000.0 * (2.0 if x < low * sigma else 1.0 if x > high * sigma else 0.0) + x

    return score


class ToyRound(FakeRound):
    """The round of one arm, as strategies see it."""

    def __init__(
        self, plan: Plan, secret: bytes, *, canary: bool, score: Score, runs: int | None = None
    ) -> None:
        super().__init__(SearchSpace.from_dict(RATE))
        self.streams = Streams(secret)
        self.plan, self.canary, self.score, self.runs = plan, canary, score, runs
        self.named = 0

    def present(self, part: str) -> bool:
        """Say whether a training on this part of the records sees the canary."""
        records = WITH if self.canary else WITHOUT
        seen = part_of(records, part, self.plan.rate, self.streams)
        # A part without any record holds one that is marked as unusable.
        return seen.unusable is None and bool((seen.x == 1.0).any())

    def trial(
        self, number: int, training: TrainingPlan, params: Mapping[str, Any], noise: float
    ) -> TrialResult:
        x = float(self.present(training.part)) + deviation(training) * noise
        weights = torch.tensor([x], dtype=torch.float64)
        score = self.score(x, params)
        return TrialResult(index=number, params=dict(params), weights=weights, score=score)

    def select(self, plan: Plan) -> Sequence[TrialResult]:
        count = self.runs
        if count is None:
            assert plan.runs is not None
            count = plan.runs.sample(self.streams.numpy("runs", 0))
        noise = self.streams.numpy("noise", 0).normal(size=count)
        assert plan.search is not None
        training = plan.search.trainings[0]
        return [
            self.trial(n, training, {**plan.params, **self.space.draw(self.streams, n)}, value)
            for n, value in enumerate(noise.tolist())
        ]

    def train(self, request: NamedTraining) -> TrialResult:
        self.named += 1
        noise = float(self.streams.numpy("noise", self.named).normal())
        return self.trial(self.named, request.training, request.params, noise)


def sides(run: Callable[[bytes, bool], float], runs: int) -> list[Any]:
    """Run a round as often as asked for, on both neighbours, each with a secret of its own."""
    return [
        np.array([run(bytes([tag]) * 28 + n.to_bytes(4, "big"), tag == 2) for n in range(runs)])
        for tag in (1, 2)
    ]


def note(mechanism: str, audit: Callable[[], LowerBound], reported: float) -> LowerBound:
    """Run an audit and write its line: mechanism, audited, reported, ratio, runs, CPU seconds."""
    started = time.process_time()
    found = audit()
    seconds = time.process_time() - started
    sys.stdout.write(
        f"{mechanism:40} {found.epsilon:6.2f} {reported:6.2f} {found.epsilon / reported:5.2f} "
        f"{found.runs:7d} {seconds:6.1f}\n"
    )
    return found
