"""Two sides of one target: training records meet one event, validation records another."""

from __future__ import annotations

from collections.abc import Callable

from privtune.accounting import Event, Parallel, calibrate
from privtune.strategies.context import PlanningContext
from privtune.strategies.score_plan import ScorePlan

__all__ = ["both", "factor_for", "score_for"]


def factor_for(event: Event, context: PlanningContext, epsilon: float) -> float:
    """Return the factor on all noise with which the event meets (epsilon, the context's δ)."""
    return calibrate(event, epsilon=epsilon, delta=context.delta, adjacency=context.adjacency).scale


def score_for(
    context: PlanningContext, epsilon: float, cost: Callable[[Event], Event]
) -> ScorePlan:
    """Plan scores of which the arm as a whole costs the validation records at most ``epsilon``.

    Args:
        context: Public facts.
        epsilon: Target.
        cost: What the arm makes of the event of one score: repeats it, or selects by it.
    """
    score = context.plan_score(epsilon)
    if score.event is None:
        return score
    return score.scaled(factor_for(cost(score.event), context, epsilon))


def both(training: Event, score: ScorePlan, cost: Callable[[Event], Event]) -> Event:
    """Return the event of an arm: a person is in one of the two splits."""
    if score.event is None:
        return training
    return Parallel((training, cost(score.event)))
