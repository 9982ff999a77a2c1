"""Probabilities that one repeated arm is better than another."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from privtune.plots.study_charts import ranked
from privtune.strategies.spread import probability_above, values_of
from privtune.views.text import first_metric

if TYPE_CHECKING:
    from privtune.study.observer import Arms

Order = dict[str, dict[str, float | None]]
"""How probable it is that the mean of an arm is better than that of another; the best arm first."""


def order_of(arms: Arms) -> Order:
    """Return the probability that each arm's mean is better than each other arm's, the best arm first.

    Arms of one draw are left out: nothing is known of their spread. A probability is None where both
    arms have too few repetitions in common.
    """
    metric = first_metric(arms)
    rows: dict[str, list[float | None]] = {}
    for status, value in ranked(arms, metric):
        release = status.release
        if value is None or release is None or not release.repetitions:
            continue
        values = list(values_of(release)[str(metric)])
        if metric.lower_is_better:
            values = [None if each is None else -each for each in values]
        rows[status.plan.arm] = values
    order: Order = {}
    for arm, row in rows.items():
        probabilities = {}
        for other, other_row in rows.items():
            if other != arm:
                probabilities[other] = probability_above(row, other_row)
        order[arm] = probabilities
    return order


def better_than_next(arms: Arms) -> dict[str, str]:
    """Return by arm the probability that its mean is better than the next arm's, as text, best first."""
    order = order_of(arms)
    texts = dict.fromkeys(order, "")  # nothing is below the last arm
    for arm, next_arm in pairwise(order):
        probability = order[arm][next_arm]
        texts[arm] = show_probability(probability)
    return texts


def show_probability(value: float | None) -> str:
    """Return a probability as text in percent, rounded down, between ``<1%`` and ``>99%``.

    What is short of 95%, and so not called shown, is thereby never written as 95%.

    Example:
        >>> show_probability(0.873), show_probability(0.9999), show_probability(None)
        ('87%', '>99%', 'not known')
    """
    if value is None:
        return "not known"
    if value > 0.99:
        return ">99%"
    if value < 0.01:
        return "<1%"
    return f"{math.floor(100 * value)}%"
