"""What one charge weighs in the filter: a Rényi divergence, and a δ for approximate DP."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from privtune.accounting import Adjacency, ApproximateDP, Event
from privtune.accounting.accountant import check_adjacency
from privtune.accounting.events import flatten
from privtune.accounting.rdp import ORDERS, rdp_curve

__all__ = ["Weight", "weigh"]


class Weight(NamedTuple):
    """A charge's weight; the two components add up separately.

    Attributes:
        divergence: Upper bound on the Rényi divergence, the worse direction; may be infinite.
        delta: The probability with which that bound fails.
    """

    divergence: float
    delta: float

    def exact(self) -> tuple[Fraction, Fraction]:
        """Return both as exact fractions, so that sums neither drift nor depend on the order."""
        return Fraction(self.divergence), Fraction(self.delta)


@lru_cache(maxsize=4096)
def weigh(event: Event, order: float, adjacency: Adjacency) -> Weight:
    """Return an event's weight at a Rényi order.

    **Guarantee**: never NaN; an event without a finite bound at the order weighs infinitely much.
    """
    check_adjacency(event, adjacency)
    divergence, delta = 0.0, 0.0
    for part, count in flatten(event).items():
        if isinstance(part, ApproximateDP):
            divergence += count * _pure(part.epsilon, order)
            delta += count * part.delta
        else:
            divergence += count * _divergence(part, order)
    if not divergence >= 0 or not delta >= 0:
        return Weight(math.inf, delta)
    return Weight(divergence * (1 + 1e-12), delta * (1 + 1e-12))


def _divergence(event: Event, order: float) -> float:
    """Return the divergence at the order, or at the next tabulated one above: it is never less."""
    index = int(np.searchsorted(ORDERS, order))
    return float(rdp_curve(event)[index]) if index < len(ORDERS) else math.inf


def _pure(epsilon: float, order: float) -> float:
    """Return the divergence of randomised response, the worst among all ε-DP releases.

    With p = e^ε/(1 + e^ε): log(p^α (1−p)^(1−α) + (1−p)^α p^(1−α)) / (α − 1).
    """
    log_p = -math.log1p(math.exp(-epsilon))
    log_q = log_p - epsilon
    first = order * log_p + (1 - order) * log_q
    second = order * log_q + (1 - order) * log_p
    total = max(first, second) + math.log1p(math.exp(-abs(first - second)))
    return min(epsilon, max(0.0, total) / (order - 1))
