"""Weights of charges in the privacy filter: a Rényi divergence or a variance, and a δ."""

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
_ROUNDING = 1 + 1e-12  # sums are larger by no more than this for the rounding of floats
_LEAST = 1e-12  # of a variance: what d alone covers weighs this, and not nothing


class Weight(NamedTuple):
    """A charge's weight in the filter: a divergence or a variance, and a δ, summed separately.

    Attributes:
        divergence: The Rényi divergence at the filter's order, or the variance of a Gaussian charge;
            infinite where there is no bound.
        delta: The probability with which the charge may fail, or by which it is not quite Gaussian.
    """

    divergence: float
    delta: float

    def exact(self) -> tuple[Fraction, Fraction]:
        """Return divergence and δ as fractions, whose sums are exact in any order."""
        return Fraction(self.divergence), Fraction(self.delta)


@lru_cache(maxsize=4096)
def weigh(event: Event, order: float, adjacency: Adjacency, slack: float = 0.0) -> Weight:
    """Return an event's weight in the privacy filter, at a Rényi order.

    Args:
        event: What touched the data.
        order: The Rényi order, above 1.
        adjacency: Which pairs of datasets are neighbours.
        slack: The failure probability that each part of the event may have; at 0 none is moved into it.

    Returns:
        A bound from above; an infinite divergence where there is none.
    """
    divergence = 0.0
    delta = 0.0
    parts = flatten(under(event, adjacency))
    for part, count in parts.items():
        weight = _weigh_part(part, count, order, slack)
        divergence += weight.divergence
        delta += weight.delta
    if not divergence >= 0 or not delta >= 0:  # also NaN, which must not pass for little
        return Weight(math.inf, delta)
    return Weight(divergence * _ROUNDING, delta * _ROUNDING)


def _weigh_part(part: Event, count: int, order: float, slack: float) -> Weight:
    """Return the weight in the filter, at a Rényi order, of a repeated part of an event."""
    kind = entry(part)
    # (ε, δ)-DP is ε-DP that fails with probability δ (Kairouz, Oh & Viswanath, arXiv 1311.0776).
    pure = kind.pure(part) if kind.fails(part) else None
    if pure is not None:
        epsilon, delta = pure
        curve = pure_curve(epsilon, np.array([order]))
        divergence = float(curve[0])
        return Weight(count * divergence, count * delta)
    plain = Weight(_plain_divergence(part, count, order), 0.0)
    # Outcomes that hardly ever happen make a Rényi bound loose or infinite: they may fail instead.
    by_pair = _weigh_by_pair(part, count, order) if slack > 0 else None
    if by_pair is None or not by_pair.delta <= slack:
        return plain
    return plain if by_pair.divergence >= plain.divergence else by_pair


def _plain_divergence(part: Event, count: int, order: float) -> float:
    """Return the Rényi divergence of a repeated part, without a failure probability."""
    # Between tabulated orders the next one above: its divergence is never less.
    index = int(np.searchsorted(ORDERS, order))
    if index == len(ORDERS):
        return math.inf
    curve = rdp_curve(part)
    return count * float(curve[index])


@lru_cache(maxsize=4096)
def weigh_as_gaussian(event: Event, adjacency: Adjacency, slack: float) -> Weight:
    """Return the variance v and the δ d with which an event is (v, d)-Gaussian for the filter.

    Args:
        event: What touched the data.
        adjacency: Which pairs of datasets are neighbours.
        slack: The d that the event may have.

    Returns:
        The variance v, from above, and d: 0 where all of the event is Gaussian, else the slack. An infinite
        variance where the account of the event gives no profile, or one that needs a v above 10⁴.
    """
    variance = 0.0
    rest: dict[Event, int] = {}
    parts = flatten(under(event, adjacency))
    for part, count in parts.items():
        precision = entry(part).precision(part)
        if precision is None:
            rest[part] = count
        else:
            variance += count * precision
    variance *= _ROUNDING
    if not rest:
        return Weight(variance, 0.0)
    if no_pair(rest):
        return Weight(math.inf, slack)
    try:
        with np.errstate(all="ignore"):
            profiles = _profiles(tuple(rest.items()))
    except (PrivTuneError, ArithmeticError):
        return Weight(math.inf, slack)
    least = _least_variance(profiles, slack)
    if math.isinf(least):
        return Weight(math.inf, slack)
    return Weight(variance + least * (1 + 1e-9), slack)


class OneSidedProfile(NamedTuple):
    """The privacy profile of one direction of a dominating pair, at ε ≥ 0.

    Attributes:
        points: Values of ε, ascending, from 0.
        deltas: Upper bounds on δ there.
        beyond: An upper bound on δ beyond the last point.
    """

    points: FloatArray
    deltas: FloatArray
    beyond: float


def _least_variance(profiles: list[OneSidedProfile], slack: float) -> float:
    """Return the least variance of a Gaussian whose profile plus `slack` is above all given ones."""

    def is_enough(variance: float) -> bool:
        return all(_is_below_gaussian(profile, variance, slack) for profile in profiles)

    low = 0.0
    high = 1e-4
    while not is_enough(high):
        low = high
        high = 4 * high
        if high > 1e4:
            return math.inf
    while high - low > max(1e-5 * high, _LEAST):
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=64)
def _profiles(parts: tuple[tuple[Event, int], ...]) -> list[OneSidedProfile]:
    """Return the privacy profile, for each direction, of the composition of repeated parts."""
    events = tuple(_repeat(part, count) for part, count in parts)
    event = events[0] if len(events) == 1 else Composed(events)
    return [_one_sided_profile(pmf) for pmf in _pair(event)]


def _one_sided_profile(pmf: LossPmf) -> OneSidedProfile:
    """Return the profile of one direction, at ε = 0 and at some two thousand positive losses."""
    losses = pmf.losses
    last_loss = float(losses[-1])
    step = max(1, -(-losses.size // _NODES))
    positive_losses = losses[losses > 0.0]
    points = np.append(positive_losses[::step], max(last_loss, 0.0))
    # Beyond 700, e^ε is no number.
    finite_points = points[points <= 700.0]
    points = np.unique(np.append(0.0, finite_points))
    deltas = np.asarray(pmf.delta(points))
    # A profile falls up to its last loss; from there on it is the mass at infinity.
    reaches_last_loss = float(points[-1]) >= last_loss
    beyond = pmf.infinite if reaches_last_loss else float(deltas[-1])
    return OneSidedProfile(points, deltas, beyond)


def _is_below_gaussian(profile: OneSidedProfile, variance: float, slack: float) -> bool:
    """Return whether a profile stays below that of a Gaussian of this variance plus `slack` everywhere."""
    points = profile.points
    mu = math.sqrt(variance)
    lower = 1 - 1e-10  # for the rounding of the Gaussian profile
    gaussian_deltas = lower * gaussian_delta(variance, points)
    gap = profile.deltas - gaussian_deltas
    if max(float(gap.max()), profile.beyond) > slack:
        return False
    # Between points, in x = e^ε, the profile lies below its chord and G(v)'s above both tangents.
    width = np.diff(np.exp(points))
    chord = np.diff(profile.deltas)
    slope = lower * sp.special.ndtr(-points / mu - mu / 2)  # of G(v)'s profile, negated
    left_slope = slope[:-1]
    right_slope = slope[1:]
    left_gain = chord + left_slope * width  # what the gap gains on a cell along the left tangent
    right_gain = chord + right_slope * width  # and along the right one
    bend = left_gain - right_gain
    # The tangents meet at this part of the cell: there the gap is largest.
    left_gap = gap[:-1]
    from_right = gap[1:] - left_gap - right_gain
    cross = np.divide(
        from_right,
        bend,
        out=np.zeros_like(bend),
        where=bend > 0,
    )
    meeting = np.clip(cross, 0.0, 1.0)
    top = left_gap + meeting * left_gain
    return float(top.max(initial=-1.0)) <= slack


def slack_of(delta: float) -> float:
    """Return the failure probability that one part of a charge may have, given a budget's δ.

    Ten thousand such parts fill the tenth of δ that the filter has for failures.
    """
    return 1e-5 * delta


def _weigh_by_pair(part: Event, count: int, order: float) -> Weight | None:
    """Return the weight of a repeated part by its dominating pair, None without a usable pair."""
    if not entry(part).paired_weight:
        return None
    try:
        with np.errstate(all="ignore"):
            pair = _pair(_repeat(part, count))
    except (PrivTuneError, ArithmeticError):
        return None
    divergences = []
    for pmf in pair:
        with np.errstate(invalid="ignore"):  # a mass below zero has no logarithm
            log_terms = pmf.log_masses + (order - 1) * pmf.losses
        log_moment = float(sp.special.logsumexp(log_terms))
        if math.isnan(log_moment):  # max would pass over it, and the weight would be 0
            return None
        divergences.append(log_moment / (order - 1))
    # A billionth for the rounding of the sum, on the divergence and on what it may cancel to.
    largest = max(0.0, *divergences) * (1 + 1e-9) + 1e-12
    failure = max(pmf.infinite for pmf in pair)
    return Weight(largest, failure)


def _repeat(part: Event, count: int) -> Event:
    """Return the event of a part that is repeated a number of times."""
    return part if count == 1 else Repeated(count, part)


@lru_cache(maxsize=256)
def _pair(event: Event) -> tuple[LossPmf, ...]:
    """Return the distributions of an event's privacy loss, one for each direction."""
    pair = fine_pair(event)
    return tuple(pair.get(direction) for direction in Direction)
