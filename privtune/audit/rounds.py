"""Whole rounds of a selection with a canary: K from its law, every run by the engine, one release."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from privtune.accounting import Adjacency
from privtune.audit.canaries import canaries, hyperparameters, secrets_of, train_canaries
from privtune.audit.scores import WorstScore
from privtune.errors import InvalidInputError
from privtune.execution.training import part_of
from privtune.ledger import OpenRound
from privtune.spaces import SearchSpace
from privtune.strategies import Plan, Strategy, TrainingPlan, TrialResult
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.streams import Streams

__all__ = ["rounds_of"]

Floats = npt.NDArray[np.float64]
_FINAL = -1


@dataclass(frozen=True, eq=False)
class Made:
    """A round with its trainings done, as the strategy of a sealed selection sees it."""

    space: SearchSpace
    streams: Streams
    results: tuple[TrialResult, ...]
    final: float

    def select(self, plan: Plan) -> Sequence[TrialResult]:
        return self.results

    def train(
        self,
        plan: Plan,
        training: TrainingPlan,
        params: Mapping[str, Any],
        *,
        name: str,
        scored: bool = False,
    ) -> TrialResult:
        weights = torch.tensor([self.final], dtype=torch.float64)
        return TrialResult(index=0, params=params, weights=weights, score=None)

    at_once = 1

    def train_numbered(self, plan: Plan, trials: Any) -> Sequence[TrialResult]:
        raise _OPEN

    def ask(self, number: int, make: Any) -> Mapping[str, Any]:
        raise _OPEN

    def tell(self, number: int, result: TrialResult) -> None:
        raise _OPEN


_OPEN = InvalidInputError("strategy", "adaptive", "cannot be audited as a sealed round")


def rounds_of(
    plan: Plan,
    strategy: Strategy,
    score: WorstScore,
    *,
    rounds: int,
    seed: int,
    inside: bool,
    adjacency: Adjacency,
    progress: Callable[[int], None] = lambda _: None,
) -> Floats:
    """Run rounds with or without a canary; return what each release says of it.

    Numbers of runs, seeds of rows, the subset, ties and the choice are the package's own; scores are
    the audit's.

    Args:
        plan: The arm's plan: a sealed selection.
        strategy: What made it.
        score: What the audit prefers.
        rounds: How many.
        seed: The audit's seed.
        inside: Whether the canary is among the records.
        adjacency: The relation of neighbours.
        progress: Told of every so many rounds that are done.
    """
    search, runs = plan.search, plan.runs
    if search is None or runs is None:
        raise InvalidInputError("plan", plan.strategy, "is no sealed selection")
    secrets = secrets_of(seed, f"rounds/{inside}", rounds)
    jobs: dict[tuple[int, int], tuple[bytes, bool]] = {}
    for number, secret in enumerate(secrets):
        streams = Streams(secret)
        opened = OpenRound("audit-1", runs.sample(streams.numpy("runs", 0)), secret)
        tuned = _present(search.trainings[0].part, plan, streams, inside)
        for row in range(opened.tasks):
            jobs[number, row] = (opened.seed(row), tuned)
        if plan.final or plan.rate is not None:
            last = _present(plan.training.part, plan, streams, inside)
            jobs[number, _FINAL] = (streams.key("final"), last)
    done = 0

    def told(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        progress(rounds * done // max(1, len(jobs)) - rounds * before // max(1, len(jobs)))

    finals = _ratios(plan.training, plan, jobs, adjacency, told, final=True)
    ratios = _ratios(search.trainings[0], plan, jobs, adjacency, told, final=False)
    of_round: list[list[float]] = [[] for _ in secrets]
    for (number, _), ratio in sorted(ratios.items()):
        of_round[number].append(ratio)
    space = SearchSpace({})
    found = []
    for number, secret in enumerate(secrets):
        values = np.array(of_round[number])
        scores = score.score(values) if len(values) else values
        if plan.threshold is not None:
            scores = np.where(scores > 0.5, plan.threshold + 1.0, plan.threshold - 1.0)
        results = tuple(
            TrialResult(
                index=row,
                params=hyperparameters(search.trainings[0].method, plan.params),
                weights=torch.tensor([value], dtype=torch.float64),
                score=float(points),
            )
            for row, (value, points) in enumerate(zip(values, scores, strict=True))
        )
        final = finals.get((number, _FINAL), 0.0)
        made = Made(space, Streams(secret), results, final)
        found.append(_told(plan, strategy, made, score))
    return np.array(found)


def _told(plan: Plan, strategy: Strategy, made: Made, score: WorstScore) -> float:
    """Return the log-likelihood ratio of all that one round releases."""
    outcome = strategy.run(plan, made)
    if outcome.result is None:
        return score.nothing
    if plan.rate is None:
        won = float(outcome.result.weights[0])
        others = [float(trial.weights[0]) for trial in outcome.trials]
        return float(score.evidence(np.array([won]))[0]) + sum(others)
    # Of subsampled tuning the final model is shown, and the winner's score.
    won = next(
        (float(r.weights[0]) for r in made.results if r.score == outcome.result.score), math.nan
    )
    tuned, final = float(score.evidence(np.array([won]))[0]), float(outcome.result.weights[0])
    both = tuned + (final if plan.training.part == "all" else 0.0)
    return float(np.logaddexp(math.log(plan.rate) + both, math.log1p(-plan.rate) + final))


def _present(part: str, plan: Plan, streams: Streams, inside: bool) -> bool:
    """Say whether a training on this part of the records meets the canary."""
    records = TensorData(torch.ones(1, 1), torch.zeros(1), sealed_size=True)
    # A part without any record holds one that is marked as unusable.
    return inside and part_of(records, part, plan.rate, streams).unusable is None


def _ratios(
    training: TrainingPlan,
    plan: Plan,
    jobs: Mapping[tuple[int, int], tuple[bytes, bool]],
    adjacency: Adjacency,
    progress: Callable[[int], None],
    *,
    final: bool,
) -> dict[tuple[int, int], float]:
    """Train all jobs of a kind in two passes, with the canary and without it."""
    replaced = adjacency is Adjacency.REPLACE_ONE
    found: dict[tuple[int, int], float] = {}
    for present in (False, True):
        own = [
            (name, seed)
            for name, (seed, there) in jobs.items()
            if there is present and (name[1] == _FINAL) is final
        ]
        if not own:
            continue
        sign = 1.0 if present else (-1.0 if replaced else 0.0)
        seen = train_canaries(
            training.method,
            training.schedule,
            hyperparameters(training.method, plan.params),
            [seed for _, seed in own],
            data=canaries([sign]),
            replaced=replaced,
            noise=dataclasses.replace(training.noise),
            progress=progress,
        )
        found.update(zip((name for name, _ in own), seen.ratio.tolist(), strict=True))
    return found
