"""Requests that a strategy's ``run`` yields, each of which is answered with results."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from privtune.strategies.release import Outcome

if TYPE_CHECKING:
    from privtune.strategies.plan import TrainingPlan
    from privtune.strategies.release import TrialResult


@dataclass(frozen=True)
class SealedRound:
    """Request for all trials of the plan's sealed round: K i.i.d. candidates, with K drawn once.

    It is for a plan with a law of runs. The results come by index; with a threshold, at least those up
    to the first that reaches it.

    Example:
        >>> from privtune.strategies.strategy import best_of  # a score may be None or NaN
        >>> def run(plan, trials):
        ...     results = yield SealedRound()
        ...     return Outcome(best_of(results, trials.streams))
    """


@dataclass(frozen=True)
class NumberedTrials:
    """Request for some trials of the plan's search, trained together and answered in order.

    It is for a plan with a search and no law of runs.

    Args:
        candidates: Hyperparameters by the trial's number, from 0; no more than the plan pays for.

    Example:
        >>> def run(plan, trials):
        ...     rates = {0: {"learning_rate": 0.1}, 1: {"learning_rate": 1.0}}
        ...     results = yield NumberedTrials(rates)
        ...     return Outcome(results[0], trials=tuple(results))
    """

    candidates: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class NamedTraining:
    """Request for one training under a name of its own, with the same result whenever it is repeated.

    Random streams derive from all fields, so no two trainings share noise.

    Args:
        name: Any text.
        training: What to run of the plan.
        params: The candidate.
        scored: Whether to score it as the plan says.

    Example:
        >>> def run(plan, trials):
        ...     (result,) = yield NamedTraining("final", plan.training, plan.params)
        ...     return Outcome(result)
    """

    name: str
    training: TrainingPlan
    params: Mapping[str, Any]
    scored: bool = False


Request: TypeAlias = SealedRound | NumberedTrials | NamedTraining
"""Any request that a strategy may yield."""

StrategyRun: TypeAlias = "Generator[Request, Sequence[TrialResult], Outcome]"
"""A run of a strategy: a generator of requests that receives their results and returns an outcome."""

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


def advance(
    run: Generator[RequestT, AnswerT, Outcome],
    results: AnswerT | None = None,
) -> RequestT | Outcome:
    """Send the results of the last request to a run, and return its next request or its outcome.

    Args:
        run: What a strategy's ``run`` returns.
        results: Of the request before; None where the run begins.

    Returns:
        The request, or at the end of the run its outcome.

    Example:
        >>> from privtune.strategies import Fixed, TrialResult
        >>> strategy = Fixed(parameters={"learning_rate": 0.5, "max_grad_norm": 1.0})
        >>> run = strategy.run(strategy.plan(study.spec.planning_context(), epsilon=2.0), trials=None)
        >>> request = advance(run)
        >>> request.name
        'final'
        >>> result = TrialResult(index=0, params=request.params, weights=None, score=None)
        >>> advance(run, [result]).result is result
        True
    """
    try:
        if results is None:
            return next(run)
        return run.send(results)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome
