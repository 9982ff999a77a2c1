"""What one charge weighs in the filter: a Rényi divergence or a variance, and a δ beside it."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy as sp

from privtune.accounting import Adjacency, Composed, Event, Repeated
from privtune.accounting.curves import ORDERS, pure_curve
from privtune.accounting.events import flatten
from privtune.accounting.pairs import Direction
from privtune.accounting.pld import fine_pair, no_pair
from privtune.accounting.pmf import LossPmf
from privtune.accounting.rdp import rdp_curve
from privtune.accounting.registry import entry, under
from privtune.errors import PrivTuneError
from privtune.ledger.privacy_filter import FloatArray, gaussian_delta

_NODES = 2000
_LEAST = 1e-12  # of a variance: what d alone covers weighs this, and not nothing


class Weight(NamedTuple):
    """A charge's weight; the two components add up separately."""

    divergence: float
    delta: float

    def exact(self) -> tuple[Fraction, Fraction]:
        """Return both as exact fractions, so that sums neither drift nor depend on the order."""
        return Fraction(self.divergence), Fraction(self.delta)


@lru_cache(maxsize=4096)
def weigh(event: Event, order: float, adjacency: Adjacency, slack: float = 0.0) -> Weight:
    """Return an event's weight at a Rényi order."""
    divergence, delta = 0.0, 0.0
    for part, count in flatten(under(event, adjacency)).items():
        known = entry(part)
        # (ε, δ)-DP is ε-DP that fails with probability δ (Kairouz, Oh & Viswanath, arXiv 1311.0776).
        pure = known.pure(part) if known.fails(part) else None
        if pure is not None:
            divergence += count * float(pure_curve(pure[0], np.array([order]))[0])
            delta += count * pure[1]
            continue
        # Between tabulated orders the next one above: its divergence is never less.
        index = int(np.searchsorted(ORDERS, order))
        plain = count * float(rdp_curve(part)[index]) if index < len(ORDERS) else math.inf
        # Outcomes that hardly ever happen make a Rényi bound loose or infinite: they may fail instead.
        paired = _paired(part, count, order) if slack > 0 else None
        if paired is not None and paired.delta <= slack and not paired.divergence >= plain:
            divergence += paired.divergence
            delta += paired.delta
        else:
            divergence += plain
    if not divergence >= 0 or not delta >= 0:  # also NaN, which must not pass for little
        return Weight(math.inf, delta)
    return Weight(divergence * (1 + 1e-12), delta * (1 + 1e-12))


@lru_cache(maxsize=4096)
def weigh_as_gaussian(event: Event, adjacency: Adjacency, slack: float) -> Weight:
    """Return the (v, d) with which an event is Gaussian, as the filter's second theorem says it."""
    variance, rest = 0.0, {}
    for part, count in flatten(under(event, adjacency)).items():
        precision = entry(part).precision(part)
        if precision is None:
            rest[part] = count
        else:
            variance += count * precision
    variance *= 1 + 1e-12
    if not rest:
        return Weight(variance, 0.0)
    if no_pair(rest):
        return Weight(math.inf, slack)
    try:
        with np.errstate(all="ignore"):
            sides = _sides(tuple(rest.items()))
    except (PrivTuneError, ArithmeticError):
        return Weight(math.inf, slack)
    low, high = 0.0, 1e-4
    while not all(_holds(*side, high, slack) for side in sides):
        low, high = high, 4 * high
        if high > 1e4:
            return Weight(math.inf, slack)
    while high - low > max(1e-5 * high, _LEAST):
        middle = (low + high) / 2
        inside = all(_holds(*side, middle, slack) for side in sides)
        low, high = (low, middle) if inside else (middle, high)
    return Weight(variance + high * (1 + 1e-9), slack)


@lru_cache(maxsize=64)
def _sides(parts: tuple[tuple[Event, int], ...]) -> list[tuple[FloatArray, FloatArray, float]]:
    """Return ε ≥ 0, upper bounds on the profile there, and the mass at infinity, by direction."""
    events = [part if count == 1 else Repeated(count, part) for part, count in parts]
    pair = _pair(events[0] if len(events) == 1 else Composed(tuple(events)))
    sides = []
    for pmf in pair:
        step = max(1, -(-pmf.losses.size // _NODES))
        points = np.append(pmf.losses[pmf.losses > 0.0][::step], max(float(pmf.losses[-1]), 0.0))
        points = np.unique(np.append(0.0, points[points <= 700.0]))
        deltas = np.asarray(pmf.delta(points))
        whole = float(points[-1]) >= float(pmf.losses[-1])  # a profile falls up to its last loss
        sides.append((points, deltas, pmf.infinite if whole else float(deltas[-1])))
    return sides


def _holds(
    points: FloatArray, deltas: FloatArray, beyond: float, variance: float, slack: float
) -> bool:
    """Return whether a profile stays below that of G(v) plus a slack everywhere."""
    mu = math.sqrt(variance)
    lower = 1 - 1e-10  # for the rounding of the Gaussian profile
    gap = deltas - lower * gaussian_delta(variance, points)
    if max(float(gap.max()), beyond) > slack:
        return False
    # Between points, in x = e^ε, the profile lies below its chord and G(v)'s above both tangents.
    x, falls = np.exp(points), lower * sp.special.ndtr(-points / mu - mu / 2)  # its slope, negated
    width, chord = np.diff(x), np.diff(deltas)
    left = chord + falls[:-1] * width  # what the gap gains on a cell along the left tangent
    right = chord + falls[1:] * width  # and along the right one
    bend = left - right
    cross = np.divide(gap[1:] - gap[:-1] - right, bend, out=np.zeros_like(bend), where=bend > 0)
    top = gap[:-1] + np.clip(cross, 0.0, 1.0) * left
    return float(top.max(initial=-1.0)) <= slack


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
        float(sp.special.logsumexp(pmf.log_masses + (order - 1) * pmf.losses)) / (order - 1)
        for pmf in pair
    ]
    # A billionth for the rounding of the sum, on the divergence and on what it may cancel to.
    worst = max(0.0, *moments) * (1 + 1e-9) + 1e-12
    return Weight(worst, max(pmf.infinite for pmf in pair))


@lru_cache(maxsize=256)
def _pair(event: Event) -> tuple[LossPmf, ...]:
    pair = fine_pair(event)
    return tuple(pair.get(direction) for direction in Direction)
