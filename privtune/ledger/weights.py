"""What one charge weighs in the filter: a Rényi divergence, and a δ for approximate DP."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from privtune.accounting import Adjacency, Event, Repeated
from privtune.accounting.algebra import flatten
from privtune.accounting.curves import ORDERS
from privtune.accounting.pld import fine_pair
from privtune.accounting.pmf import LossPmf
from privtune.accounting.rdp import rdp_curve
from privtune.accounting.registry import entry, under
from privtune.accounting.releases import Direction
from privtune.errors import PrivTuneError

__all__ = ["Weight", "slack_of", "weigh"]


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
def weigh(event: Event, order: float, adjacency: Adjacency, slack: float = 0.0) -> Weight:
    """Return an event's weight at a Rényi order.

    The Rényi bound of a private selection or of a sampled training at a high order is loose, or
    infinite, because of outcomes that hardly ever happen. Their dominating pair says more: its
    moment without the outcomes of infinite loss, which count as failures. So a part weighs the
    smaller divergence of the two, if the failures are rare enough.

    Args:
        event: What is charged.
        order: The Rényi order.
        adjacency: The budget's.
        slack: Up to which probability of failure a part's dominating pair may be used.

    **Guarantee**: never NaN; an event without a finite bound at the order weighs infinitely much.
    Whoever runs the event, chosen however, is simulated by a release that fails with probability at
    most the weight's δ, and else has at most its divergence, in either direction.
    """
    divergence, delta = 0.0, 0.0
    for part, count in flatten(under(event, adjacency)).items():
        known = entry(part)
        pure = known.pure(part) if known.fails(part) else None
        if pure is not None:
            divergence += count * _pure(pure[0], order)
            delta += count * pure[1]
            continue
        plain = count * _divergence(part, order)
        paired = _paired(part, count, order) if slack > 0 else None
        if paired is not None and paired.delta <= slack and not paired.divergence >= plain:
            divergence += paired.divergence
            delta += paired.delta
        else:
            divergence += plain
    if not divergence >= 0 or not delta >= 0:
        return Weight(math.inf, delta)
    return Weight(divergence * (1 + 1e-12), delta * (1 + 1e-12))


def slack_of(delta: float) -> float:
    """Return the failure probability that one part of a charge may have, given a budget's δ."""
    return 1e-5 * delta


def _paired(part: Event, count: int, order: float) -> Weight | None:
    """Return the weight by the dominating pair, where there is one and it says more."""
    if not entry(part).paired_weight:
        return None
    try:
        with np.errstate(all="ignore"):
            pair = _pair(part if count == 1 else Repeated(count, part))
    except (PrivTuneError, ArithmeticError):
        return None
    moments = [
        float(logsumexp(pmf.log_masses + (order - 1) * pmf.losses)) / (order - 1) for pmf in pair
    ]
    # A billionth for the rounding of the sum, on the divergence and on what it may cancel to.
    worst = max(0.0, *moments) * (1 + 1e-9) + 1e-12
    return Weight(worst, max(pmf.infinite for pmf in pair))


@lru_cache(maxsize=256)
def _pair(event: Event) -> tuple[LossPmf, ...]:
    pair = fine_pair(event)
    return tuple(pair.get(direction) for direction in Direction)


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
