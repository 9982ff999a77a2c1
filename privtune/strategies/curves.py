"""How ε grows over the steps of one training."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from privtune.accounting import Adjacency, Event, epsilon
from privtune.strategies import TrainingPlan


def epsilon_spent(
    training: TrainingPlan, *, delta: float, adjacency: Adjacency, points: int = 12
) -> list[tuple[int, float]]:
    """Return what a training has spent after some of its steps.

    Args:
        training: The plan of one training.
        delta: δ, in (0, 1).
        adjacency: Neighbouring relation.
        points: How many steps to look at, evenly spread, the last included.

    Returns:
        Pairs of a step, counted from 0, and the ε of all releases up to and including it.
    """
    return [
        (
            step,
            _epsilon(
                training.method.event(replace(training.schedule, steps=step + 1)), delta, adjacency
            ),
        )
        for step in training.schedule.checkpoints(points)
    ]


@lru_cache(maxsize=256)
def _epsilon(event: Event, delta: float, adjacency: Adjacency) -> float:
    """Return ε; arms that differ in anything but their noise ask the same."""
    return epsilon(event, delta, adjacency=adjacency).epsilon
