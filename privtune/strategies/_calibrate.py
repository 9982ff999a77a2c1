"""Two sides of one target: training records meet one event, validation records another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from privtune.accounting import Event, Parallel, calibrate, scale_noise
from privtune.accounting.calibration import searches_learn, sketch
from privtune.strategies.context import PlanningContext
from privtune.strategies.score_plan import ScorePlan
from privtune.strategies.trainings import SearchPlan, TrainingPlan


@dataclass(frozen=True)
class SearchThenFinal:
    """A search, and one training with what it found."""

    search: SearchPlan
    final: TrainingPlan

    def scaled(self, factor: float) -> SearchThenFinal:
        """Return both with all noise times ``factor``."""
        return SearchThenFinal(self.search.scaled(factor), self.final.scaled(factor))


_TOGETHER = 5e-4  # what stands in a maximum is known on its lattice, which moves with the noise

T = TypeVar("T", SearchPlan, SearchThenFinal)


def factor_for(
    event: Event,
    context: PlanningContext,
    epsilon: float,
    tolerance: float = 1e-4,
    *,
    about: bool = False,
) -> float:
    """Return the factor on all noise with which the event meets (epsilon, the context's δ).

    Args:
        event: The event.
        context: Public facts. In a plan that is a sketch the factor is an estimate.
        epsilon: The target.
        tolerance: Relative accuracy of the factor.
        about: Whether an estimate is enough, since the accountant is asked later.
    """
    if context.declared is not None and scale_noise(event, 2.0) == event:
        return 1.0  # a declared event that stays as it is, and scores that are free
    terms: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": context.delta,
        "adjacency": context.adjacency,
        "tolerance": tolerance,
    }
    return sketch(event, **terms) if about or context.sketch else calibrate(event, **terms).scale


def meet(
    trained: T,
    event: Callable[[T], Event],
    cost: Callable[[Event], Event],
    *,
    context: PlanningContext,
    epsilon: float,
) -> tuple[T, ScorePlan, Event]:
    """Scale what is trained and how it is scored until the arm as a whole meets ``epsilon``.

    A person is in one of the two splits, so each side may cost what both together may. Factors are
    taken one after the other: the last digit of their product may lie past the target.

    Args:
        trained: What meets the training records, its noise in the right proportions.
        event: What that costs them.
        cost: What the arm makes of the event of one score: repeats it, or selects by it.
        context: Public facts.
        epsilon: Target of the arm.

    Returns:
        What is trained and how it is scored, both scaled, and the event of the arm.
    """
    with searches_learn():
        # The accountant is asked about both sides together, so each alone may cost a little more.
        trained = trained.scaled(factor_for(event(trained), context, epsilon, about=True))
        score = context.plan_score(epsilon)
        if score.event is not None:
            score = score.scaled(factor_for(cost(score.event), context, epsilon, about=True))
        rest = factor_for(_both(event(trained), score, cost), context, epsilon, _TOGETHER)
    trained, score = trained.scaled(rest), score.scaled(rest)
    return trained, score, _both(event(trained), score, cost)


def _both(training: Event, score: ScorePlan, cost: Callable[[Event], Event]) -> Event:
    return training if score.event is None else Parallel((training, cost(score.event)))
