"""Audits of searches whose trials are shown: all of them on a part of the records, and the last training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from privtune.accounting import Adjacency
from privtune.audit.bounds import Floats
from privtune.audit.canaries import hyperparameters, secrets_of
from privtune.audit.selections import (
    RoundTraining,
    holds_records,
    ratios_of,
    rounds_progress,
)
from privtune.errors import InvalidInputError
from privtune.spaces import SearchSpace
from privtune.strategies import (
    NamedTraining,
    NumberedTrials,
    Outcome,
    Plan,
    Round,
    SealedRound,
    Strategy,
    TrainingPlan,
    TrialResult,
    advance,
)
from privtune.study.arm_rounds import TrainingRequest
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from privtune.strategies import Request


@dataclass(eq=False)
class _Search(Round):
    """One run of a search's strategy, and the log-likelihood ratios of its trainings so far.

    Attributes:
        plan: The arm's.
        secret: Which all random numbers of the run derive from.
        trials: The sum of the ratios of all trials.
        final: The ratio of the final training.
    """

    plan: Plan
    secret: bytes
    trials: float = 0.0
    final: float = 0.0

    @cached_property
    def streams(self) -> Streams:
        """The random streams of the run."""
        return Streams(self.secret)

    @property
    def space(self) -> SearchSpace:
        """The search space, which nothing is drawn from."""
        return SearchSpace({})

    @property
    def at_once(self) -> int:
        """How many trials a strategy had best ask for together."""
        return 1

    def ask(self, number: int, make: Callable[[SearchSpace], BaseSampler]) -> Mapping[str, float]:
        """Return the hyperparameters that every trial of the audit has."""
        return hyperparameters(self.plan.first_training.method, self.plan.params)

    def tell(self, number: int, result: TrialResult) -> None:
        """Hear of a trial's score, which changes nothing here."""

    def requests(self, request: Request) -> Iterator[TrainingRequest]:
        """Yield the trainings that a request of the strategy stands for, as a study would run them."""
        if isinstance(request, NamedTraining):
            yield TrainingRequest(request.name, request.training, request.params, request.scored)
            return
        if isinstance(request, SealedRound):
            raise InvalidInputError("request", request, "is none of a search that is shown")
        assert self.plan.search is not None  # noqa: S101 (it is a search)
        for number, params in request.candidates.items():
            yield TrainingRequest(number, self.plan.search.training_of(params), params)

    def answer(self, request: Request, ratios: Sequence[float]) -> list[TrialResult]:
        """Return the results of a request's trainings, and add up what they say.

        Args:
            request: What the strategy asked for: trials by number, or the final training.
            ratios: Log-likelihood ratios of the trainings, which are their scores here, too.
        """
        results = []
        for each, ratio in zip(self.requests(request), ratios, strict=True):
            if isinstance(request, NumberedTrials):
                self.trials += ratio
            else:
                self.final += ratio
            number = each.key if isinstance(each.key, int) else 0
            weights = torch.tensor([ratio], dtype=torch.float64)
            result = TrialResult(index=number, params=each.params, weights=weights, score=ratio)
            results.append(result)
        return results

    def evidence(self) -> float:
        """Return the log-likelihood ratio of all that was shown, of a record in the part by its rate."""
        assert self.plan.rate is not None  # noqa: S101 (its trials are on a part)
        inside = self.trials
        if self.plan.training.part == "all":
            inside += self.final
        log_in = math.log(self.plan.rate) + inside
        log_out = math.log1p(-self.plan.rate) + self.final
        return float(np.logaddexp(log_in, log_out))


def searches_of(
    plan: Plan,
    strategy: Strategy,
    *,
    searches: int,
    seed: int,
    inside: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> Floats:
    """Run whole searches with or without a canary, and return the log-likelihood ratio of each.

    What is trained, on which part of the records and with which random numbers is the package's own:
    the strategy asks for it. Only the sampler is left out, as candidates change no privacy.

    Args:
        plan: Of a search whose trials are shown, on a part of the records.
        strategy: What made the plan.
        searches: How many.
        seed: Everything drawn derives from it.
        inside: Whether the canary is among the records.
        progress: Called with the number of searches that were worked through since the last call.

    Raises:
        InvalidInputError: If the plan is of no such search.
    """
    if plan.search is None or plan.search.trials is None or plan.rate is None:
        raise InvalidInputError("plan", plan.strategy, "shows no trials on a part of the records")
    secrets = secrets_of(seed, f"searches/{inside}", searches)
    states = [_Search(plan, secret) for secret in secrets]
    runs = [strategy.run(plan, state) for state in states]
    requests: dict[int, Request] = {}
    for number, run in enumerate(runs):
        _keep_open(requests, number, advance(run))
    trainings = searches * (plan.search.trials + 1)
    count_jobs = rounds_progress(progress, searches, trainings)
    # All searches go on together, so that their trainings are a stack.
    while requests:
        ratios = _train(plan, states, requests, count_jobs, inside=inside)
        for number, request in list(requests.items()):
            results = states[number].answer(request, ratios[number])
            _keep_open(requests, number, advance(runs[number], results))
    return np.array([state.evidence() for state in states])


def _keep_open(
    requests: dict[int, Request],
    number: int,
    step: Request | Outcome,
) -> None:
    """Note what a search asks for next, or that it has ended.

    Args:
        requests: What searches ask for, by number; changed.
        number: The search.
        step: Its next request, or its outcome.
    """
    if isinstance(step, Outcome):
        requests.pop(number, None)
    else:
        requests[number] = step


def _train(
    plan: Plan,
    states: Sequence[_Search],
    requests: Mapping[int, Request],
    progress: Callable[[int], None],
    *,
    inside: bool,
) -> dict[int, list[float]]:
    """Return, for each search, the log-likelihood ratios of the trainings that it asks for.

    Args:
        plan: The arm's.
        states: All searches by number.
        requests: What those that go on ask for, by their numbers.
        progress: Called with the number of trainings done since the last call.
        inside: Whether the canary is among the records; a training meets it if its part holds it.

    Returns:
        By the search's number, one ratio for each training in the order of its request.
    """
    jobs: list[tuple[TrainingPlan, list[RoundTraining]]] = []
    counts: dict[int, int] = {}
    for number, request in requests.items():
        streams = states[number].streams
        for row, each in enumerate(states[number].requests(request)):
            is_present = inside and holds_records(each.training.part, plan, streams)
            job = RoundTraining(number, row, each.secret(streams), is_present)
            _jobs_for(jobs, each.training).append(job)
            counts[number] = row + 1
    ratios: dict[tuple[int, int], float] = {}
    for training, batch in jobs:  # a part of the records has an account under add-remove alone
        ratios |= ratios_of(training, plan, batch, Adjacency.ADD_REMOVE, progress)
    return {
        number: [ratios[number, row] for row in range(count)] for number, count in counts.items()
    }


def _jobs_for(
    jobs: list[tuple[TrainingPlan, list[RoundTraining]]],
    training: TrainingPlan,
) -> list[RoundTraining]:
    """Return the list of the trainings that are planned alike."""
    for known, batch in jobs:
        if known == training:
            return batch
    batch = []
    jobs.append((training, batch))
    return batch
