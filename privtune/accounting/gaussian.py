"""Exact accounting of Gaussian releases without sampling: composition is μ-GDP.

References:
    Dong, Roth, Su, arXiv:1905.02383, Corollary 2.13 and Corollary 3.3; Balle and Wang,
    arXiv:1805.06530, Theorem 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import scipy as sp

from privtune.accounting.algebra import Event
from privtune.accounting.registry import entry

_MARGIN = 1e-12  # relative; covers the rounding of the distribution function and of the root


def gaussian_mu(parts: Mapping[Event, int]) -> float | None:
    """Return μ = sqrt(Σ count/σ²) if every part is an unsampled Gaussian, else None."""
    total = 0.0
    for event, count in parts.items():
        precision = entry(event).precision(event)
        if precision is None:
            return None
        total += count * precision
    return math.sqrt(total)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), rounded up."""
    if mu == 0.0:
        return 0.0
    first = float(sp.special.log_ndtr(mu / 2.0 - epsilon / mu))
    second = epsilon + float(sp.special.log_ndtr(-mu / 2.0 - epsilon / mu))
    if second >= first:
        # Both terms agree to rounding: the first alone is an upper bound on their difference.
        return min(math.exp(first), 1.0)
    value = -math.exp(first) * math.expm1(second - first)
    # Cancellation in the exponents, each known to a relative 1e-15, is charged.
    slack = math.exp(first) * 4e-15 * (1.0 + abs(first) + abs(second))
    return min(value * (1.0 + _MARGIN) + slack, 1.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε >= 0 with δ(ε) <= delta, rounded up."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = mu * mu / 2.0 + mu * math.sqrt(2.0 * math.log(1.0 / delta)) + 1e-9
    while gaussian_delta(mu, high) > delta:
        high *= 1.01
    low = 0.0
    while high - low > 1e-14 + 4e-16 * high:
        middle = 0.5 * (low + high)
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high
