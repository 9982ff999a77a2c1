"""The privacy filter and its odometer: how a budget may be spent adaptively.

A budget's declared block is fixed before its first release; what comes later may be chosen by
whoever has seen what came before. For the later part the sum of Rényi divergences at one order α,
fixed when the budget is created, is a filter (Feldman & Zrnic, arXiv 2008.11193, Theorem 4.3): if
the sum never exceeds B on any path, everything adaptive together is (α, B)-RDP.

**Theorem** (block and filter). Let δ_D be the privacy profile of the declared block, the worse of
both directions, and let the adaptive charges sum up to at most B at order α on every path. Then
everything together, in any interleaving, has the profile

    δ(ε) ≤ E[ δ_D( ε − B + log(α/(α−1)) − T/(α−1) ) ],   T exponential with mean 1.

*Proof.* Let z be the likelihood ratio of the block. Given it, what the filter admits adds at most
f(z) = sup { sup_S z·P(S) − e^ε·Q(S) : D_α(P‖Q) ≤ B }. As a supremum of such terms f is convex, it
grows with a slope of at most 1, and f(z) ≤ κ·z^α with κ = (1−1/α)^(α−1)/α · e^((α−1)(B−ε)), because
z − e^ε/r ≤ κ·z^α·r^(α−1) for every likelihood ratio r. So f lies under κ·z^α up to the point z₁
where that has slope 1, and under its tangent beyond; z₁ = α/(α−1)·e^(ε−B). That bound is the
mixture of the hockey sticks (z − s)₊ in which s = z₁·U^(1/(α−1)), U uniform, and the mean of
(z − s)₊ over the block is at most δ_D(log s). For the interleaving: with any part of the block and
any part of the capacity still to come, the mean of f over the rest of the block is convex in the
likelihood ratio so far, so a declared charge may be replaced by its dominating pair (also one that
was configured adaptively); and a step of the filter followed by the rest of the capacity is one
pair of divergence at most B, so it never raises the value. ∎

With an empty block this is the conversion of Canonne, Kamath and Steinke (arXiv 2004.00010,
Proposition 12); it is never above the plain sum of Rényi divergences, and the block may contain
releases without a finite one.

A charge may fail with a probability δ' and else have its divergence: (ε', δ')-DP is ε'-DP that fails
with probability δ' (Kairouz, Oh & Viswanath, arXiv 1311.0776), and the infinite mass of a dominating
pair (P, Q) is such a failure (the pair is the worst case, and the mass may be shown). Let the failures
admitted sum up to at most D on every path. The outcomes on which something failed have a probability
of at most D; on the others the likelihood ratio is the product of ratios of finite loss, whose moments
are those that were summed up. So D is added to δ, and a fixed share of δ pays for it (compare the
approximate filters of Whitehouse et al., arXiv 2203.05481, Theorem 1).

Rényi divergence at one order costs about 9% of ε where all noise is Gaussian. So the filter may go over
to another measure once, for good. A charge is (v, d)-Gaussian if δ_M(ε) ≤ δ_G(v)(ε) + d for every real ε
and both directions, where G(v) is the pair of normal laws whose loss has variance v.

**Theorem** (going over). Let c = (1−1/α)^(α−1)/α and d_α(V) = sup_y {(α−1)·y + log δ_G(V)(y) − log c}/(α−1).
On every path let charges of divergences with the sum R be over before the first (v, d)-Gaussian one, let
only such follow, let V be the sum of their v, D that of all failures and all d, and R + d_α(V) ≤ B. Then
everything together has the profile above, plus D.

*Proof.* Write f_b for the bound on f with b left: κ_b·z^α with κ_b = c·e^((α−1)(b−ε)) up to
z₁ = α/(α−1)·e^(ε−b), and its tangent, of slope 1, beyond. Write g_V(z) = z·δ_G(V)(ε − log z), the mean
of (z·ℓ − e^ε)₊ over G(V)'s likelihood ratio ℓ.
(1) A release of divergence D has E f_b(z·ℓ) ≤ f_{b+D}(z): f_b ≤ κ_b·z^α everywhere, which settles z up to
the z₁ of b + D; the left side has a slope of at most 1, the right side beyond it has slope 1.
(2) g_V ≤ f_b if d_α(V) ≤ b: for z ≤ z₁ this is what d_α says at y = ε − log z; beyond, as in (1).
(3) A (v, d)-Gaussian release has E g_V(z·ℓ) ≤ g_{V+v}(z) + z·d: exchange the means. Given G(V)'s ratio ℓ′
the release pays z·ℓ′·δ_M(ε − log(z·ℓ′)) ≤ z·ℓ′·(δ_G(v)(ε − log(z·ℓ′)) + d), and E ℓ′ = 1.
Charges that run at once are released where they start: their steps hang on nothing else, so who sees them
one by one, among others, sees no more.
So what the charges still to come may add is at most f_b(z) or, later, g_V(z), plus z times the failures
and d that are left: backwards by (3), through (2) once, then by (1). All of that holds at every z,
hence in the mean over the rest of the block. ∎

The order matters: a release of divergence D after a Gaussian one would have to pay α·v/2, not d_α(v).
Gaussian charges filter by the sum of v, as in Gaussian DP (Smith & Thakurta, arXiv 2210.17520; Koskela,
Tobaben & Honkela, arXiv 2209.15596); what is added here is d, and the way from one filter to the other.

The odometer says what was spent so far. It may be read at any time, and when it is read may depend on
what was seen. What it promises: if somebody stops at will and the reading is then r, every set S of
transcripts has P(S) ≤ E_Q[e^r; S] + δ, both ways round, with one δ for all readings that were possible.

**Theorem** (odometer). For an order α and a number m, let the line read m + R, where R is the sum of the
divergences at α of what was charged after the block. Who stops at will at the readings of that line has
at most

    δ = E[ δ_D( m + log(α/(α−1)) − T/(α−1) ) ],   T exponential with mean 1.

*Proof.* Write w_r for f_b with r = ε − b, which depends on r alone: κz^α up to z₁ = α/(α−1)·e^r, with κ =
c·e^(−(α−1)r), and its tangent beyond. That tangent is z − z₁ + κ·z₁^α = z − e^r, since κ·α·z₁^(α−1) = 1;
and w_r ≥ 0 is convex: so (z − e^r)₊ ≤ w_r(z), which is what stopping at the reading r pays, z being the
likelihood ratio so far. By (1) above, E w_{r+D}(z·ℓ) ≤ w_r(z): going on pays at most as much. So w of the
reading is a supermartingale under Q, for any number of charges, however they are chosen, and what
stopping pays is at most its mean at the start, E w_m(z) over the block, as in the first theorem; w is
convex, so that who stops before all of the block has run gets at most its mean over the rest. ∎

**Corollary.** Let the odometer read, while nothing was added to the block, the smallest and, later, the
smaller of several lines: who stops at will has at most the sum of their δ, since the largest of several
payments is at most their sum. Three kinds of readings share the budget's δ:
(a) the filter's own line, m = ε − B at its order, ε less what the filter has left. It costs nothing
beyond the filter's share: up to there both have the same w. Once the filter went over, it reads ε, by its
own theorem, and that line is given up;
(b) lines at seven more orders, fixed with the budget, with a part of δ each;
(c) what the block costs alone, at a part of δ of its own: it pays nothing unless somebody stops there.
Where nothing can be added to the block (a declared budget, or no room in the filter), there is but one
reading of one list, at the whole δ. A release that is recorded there in spite of that has no part of δ:
it is read by (b) and the parts of δ are added to the whole one.

Compare the odometers of Rogers, Roth, Ullman and Vadhan (arXiv 1605.08294), of Feldman and Zrnic, and of
Whitehouse et al. (arXiv 2203.05481); a line is their martingale, with the block's profile in its
conversion.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy as sp
from numpy.typing import NDArray

FILTER_SHARE = 0.8
"""The part of δ behind the filter itself."""

APPROXIMATE_SHARE = 0.1
"""The part of δ that pays for adaptive charges of approximate DP."""

ODOMETER_SHARE = 0.1
"""The part of δ that lets the odometer be read at any time."""

BLOCK_SHARE = ODOMETER_SHARE / 2
"""The part of that behind what the block alone costs, as long as something may be added to it."""

FAILING_SHARE = ODOMETER_SHARE * 2.0**-8
"""The part of that which no line uses: for failures at the lines of charges that weigh as Gaussian."""

ORDERS: tuple[float, ...] = (
    *(k / 10 for k in range(12, 111)),
    *(float(k) for k in range(12, 65)),
    *(128.0, 256.0, 512.0, 1024.0),
)
"""The orders that a filter may have. Budgets store theirs: orders may be added, never removed."""

FloatArray = NDArray[np.float64]
_ROOT = math.sqrt(2.0)
_LEVELS = tuple(2.0**k for k in range(-4, 3))
_SAFETY = 1e-9
_HALVINGS = (1, 9, 2, 5, 3, 4, 6, 7, 8, 0)  # of the mean of which a node is the upper end, in turn
_LARGEST = 700.0  # ε of which e^ε is a number; beyond, a profile stays what it is there


@dataclass(frozen=True)
class Profile:
    """A privacy profile, tabulated on e^ε: upper bounds at the nodes, chords between them.

    A profile is convex in e^ε, so a chord between two upper bounds is an upper bound, too.

    Attributes:
        nodes: Values of e^ε, ascending, from 0.
        deltas: An upper bound on δ at each node.
    """

    nodes: tuple[float, ...]
    deltas: tuple[float, ...]


empty_profile = Profile((0.0, 1.0), (1.0, 0.0))
"""The profile of nothing: δ = 1 − e^ε below ε = 0, and 0 above."""


def tabulate(delta_at: Callable[[float], float], highest: float, points: int = 256) -> Profile:
    """Tabulate a profile from its values at ε ≥ 0.

    Args:
        delta_at: An upper bound on δ at an ε ≥ 0, the worse of both directions.
        highest: The largest ε that is tabulated; from there on the profile is constant.
        points: The number of values of ε.

    Returns:
        The profile at negative ε, too: symmetry says what it is there.
    """
    grid = _grid(highest, points)
    nodes_above = [math.exp(e) for e in grid]
    deltas_above = [min(1.0, delta_at(e)) for e in grid]
    nodes_below = []
    deltas_below = []
    # From the lowest −ε up. ε = 0 is on both sides: it is taken from the upper one.
    for e, d in zip(grid[:0:-1], deltas_above[:0:-1], strict=True):
        # The profile of the reversed pair at −ε is 1 − e^−ε + e^−ε·δ(ε).
        d_reversed = -math.expm1(-e) + math.exp(-e) * d
        nodes_below.append(math.exp(-e))
        deltas_below.append(min(1.0, d_reversed))
    return Profile(
        nodes=(0.0, *nodes_below, *nodes_above),
        deltas=(1.0, *deltas_below, *deltas_above),
    )


def floors(
    delta_at: Callable[[float], float],
    highest: float,
    order: float,
    epsilon: float,
) -> Iterator[float]:
    """Yield lower bounds on :func:`total_delta` of the tabulated profile, each with one more of its nodes.

    Two to four nodes show of most blocks that fill their budget that they do: what a floor exceeds, the whole
    table exceeds. A profile falls at ε ≥ 0, and what symmetry makes of it below is nowhere below its value at
    0. So between two nodes it is nowhere below its value at the upper one, and the mean over s/z₁, whose
    distribution function is x^(α−1), is at least the sum of these values, each times what lies below its node
    and above the next lower one.

    Args:
        delta_at: As for :func:`tabulate`.
        highest: As for :func:`tabulate`.
        order: The Rényi order α, above 1.
        epsilon: The ε at which δ is asked.

    Yields:
        A lower bound on the total δ with nothing spent, at each node asked so far.
    """
    log_top = math.log(order / (order - 1)) + epsilon
    grid = _grid(highest, 256)
    deltas: dict[float, float] = {}
    for halvings in _HALVINGS:
        # Below it lies a share of 2^−halvings of the mean.
        quantile = log_top - halvings * math.log(2.0) / (order - 1)
        place = bisect_left(grid, quantile)
        if quantile < 0.0 or place == len(grid):
            continue
        node = grid[place]
        deltas[node] = min(1.0, delta_at(node))
        total = 0.0
        share_below = 0.0
        for upper in sorted(deltas):
            share = math.exp(min(upper - log_top, 0.0) * (order - 1))
            total += deltas[upper] * (share - share_below)
            share_below = share
        yield total


def _grid(highest: float, points: int) -> list[float]:
    """Return evenly spaced values of ε from 0 to the highest one, at most 700."""
    top = min(highest, _LARGEST)
    return [top * k / (points - 1) for k in range(points)]


def total_delta(profile: Profile, order: float, spent: float, epsilon: float) -> float:
    """Return δ of a block of declared charges with (order, spent)-RDP on top, by the theorem above.

    The mean over T is one over s/z₁ in [0, 1], which has the distribution function x^(α−1). On each cell
    between two nodes the profile is a chord, so the mean over a cell is exact.

    Args:
        profile: The block's profile.
        order: The Rényi order α, above 1.
        spent: The divergence at that order.
        epsilon: The ε at which δ is asked.

    Returns:
        An upper bound on δ, at most 1; 1 for an infinite divergence.
    """
    if not math.isfinite(spent):
        return 1.0
    # log z₁, with z₁ = α/(α−1)·e^(ε−B): where the bound f goes over to its tangent.
    log_top = math.log(order / (order - 1)) + epsilon - spent
    top = math.exp(min(log_top, _LARGEST))
    nodes = np.asarray(profile.nodes)
    deltas = np.asarray(profile.deltas)
    is_below_top = nodes < top
    ends = np.append(nodes[is_below_top], top)
    delta_at_top = np.interp(top, nodes, deltas)
    values = np.append(deltas[is_below_top], delta_at_top)
    # The partial mean of s/z₁ up to x is (α−1)/α·x^α.
    x = ends / top
    mass = np.diff(x ** (order - 1))
    mean = (order - 1) / order * np.diff(x**order)
    width = np.diff(x)
    from_left_end = mean - x[:-1] * mass
    position = np.divide(
        from_left_end,
        width,
        out=np.zeros_like(mass),
        where=width > 0,
    )
    # Where powers underflow the cell is negligible; the position in the cell stays within it.
    right_mass = np.clip(position, 0.0, mass)
    left_mass = mass - right_mass
    contributions = values[:-1] * left_mass + values[1:] * right_mass
    total = float(np.sum(contributions))
    return min(1.0, total * (1 + _SAFETY))


def capacity(profile: Profile, order: float, epsilon: float, delta: float) -> float:
    """Return how much Rényi divergence a filter may admit on top of a block of declared charges.

    Args:
        profile: The block's profile.
        order: The Rényi order.
        epsilon: The budget's ε.
        delta: The part of the budget's δ behind the filter.

    Returns:
        A divergence that the theorem admits, from below; −∞ if the block alone is too much.
    """
    if total_delta(profile, order, 0.0, epsilon) > delta:
        return -math.inf
    low = 0.0
    high = epsilon
    for _ in range(50):
        middle = (low + high) / 2
        if total_delta(profile, order, middle, epsilon) <= delta:
            low = middle
        else:
            high = middle
    return low


def gaussian_delta(variance: float, epsilon: FloatArray) -> FloatArray:
    """Return δ of the Gaussian pair G(v) at real values of ε, exact to about 9 digits even far out.

    Args:
        variance: The variance v of the loss, above 0.
        epsilon: Values of ε, of any shape.

    Returns:
        δ at each, of the same shape.
    """
    mu = math.sqrt(variance)
    epsilons = np.asarray(epsilon, dtype=np.float64)
    # δ(ε) = Φ(−a) − e^ε·Φ(−a − μ) at a = ε/μ − μ/2.
    a = epsilons / mu - mu / 2
    # φ(a)·(r(a) − r(a + μ)) with Mills' ratio r loses no digits where both terms are small.
    ahead = np.maximum(a, 0.0)
    near_ratio = sp.special.erfcx(ahead / _ROOT)
    far_ratio = sp.special.erfcx((ahead + mu) / _ROOT)
    density = np.exp(-(ahead**2) / 2)
    far = 0.5 * density * (near_ratio - far_ratio)
    # Nearer both terms are of the size of 1: the textbook's formula does.
    back = np.minimum(a, 0.0)
    tail = sp.special.ndtr(-back)
    log_far_tail = sp.special.log_ndtr(-back - mu)
    near = tail - np.exp(mu * (back + mu / 2) + log_far_tail)
    deltas = np.where(a > 0.0, far, near)
    return np.asarray(deltas, dtype=np.float64)


@lru_cache(maxsize=4096)
def gaussian_divergence(order: float, variance: float) -> float:
    """Return the Rényi divergence that Gaussian charges of total variance V use up in a filter.

    Args:
        order: The filter's Rényi order α.
        variance: The sum V of the variances of the charges' losses.

    Returns:
        An upper bound, at most the Rényi divergence α·V/2.
    """
    plain = order * variance / 2
    if not 1e-8 < variance < 1e3:  # nothing to be won there
        return plain * (1 + _SAFETY)
    # log c, with c = (1−1/α)^(α−1)/α.
    log_c = (order - 1) * math.log1p(-1 / order) - math.log(order)

    def height(y: float) -> tuple[float, float]:
        """Return the log of the function of y that d_α maximises, and its slope."""
        log_delta, fall = _log_gaussian_delta(variance, y)
        log_value = (order - 1) * y + log_delta - log_c
        slope = order - 1 - fall
        return log_value, slope

    # The logarithm of a Gaussian profile is concave (Prékopa), so the slope falls; y below log(1−1/α)
    # belong to z beyond z₁.
    low = math.log1p(-1 / order)
    high = low + plain + 1.0
    _, slope = height(high)
    while slope > 0.0:
        high += plain + 1.0
        _, slope = height(high)
    for _ in range(60):
        middle = (low + high) / 2
        _, slope = height(middle)
        if slope > 0.0:
            low = middle
        else:
            high = middle
    # The tangent at the left end is above the top between both ends.
    value, slope = height(low)
    top = value + max(slope, 0.0) * (high - low)
    divergence = max(0.0, top) / (order - 1)
    return min(plain, divergence) * (1 + _SAFETY) + 1e-10


def _log_gaussian_delta(variance: float, y: float) -> tuple[float, float]:
    """Return the log of a Gaussian pair's δ at ε = y, and minus its slope, without underflow."""
    mu = math.sqrt(variance)
    a = y / mu - mu / 2
    if a > 0.0:
        near_ratio = float(sp.special.erfcx(a / _ROOT))
        far_ratio = float(sp.special.erfcx((a + mu) / _ROOT))
        difference = near_ratio - far_ratio
        log_delta = math.log(0.5 * difference) - a**2 / 2
        return log_delta, far_ratio / difference
    delta = float(gaussian_delta(variance, np.asarray(y)))
    log_tail = float(sp.special.log_ndtr(-a - mu))
    fall = math.exp(y + log_tail) / delta
    return math.log(delta), fall


@lru_cache(maxsize=256)
def gaussian_room(order: float, room: float) -> float:
    """Return the largest total variance V of Gaussian charges that a filter has room for.

    Args:
        order: The filter's Rényi order α.
        room: The divergence that the filter has left.

    Returns:
        The largest V that a bisection meets with d_α(V) at most the room; 0 without room.
    """
    if room <= 0.0:
        return 0.0
    low = 0.0
    high = 4.0 * room / order + 1.0
    while high - low > max(1e-6 * high, 1e-12):
        middle = (low + high) / 2
        if gaussian_divergence(order, middle) <= room:
            low = middle
        else:
            high = middle
    return low


@lru_cache(maxsize=1024)
def best_order(epsilon: float, delta: float) -> float:
    """Return the order at which a filter without declared charges admits the most Gaussian noise.

    Args:
        epsilon: The budget's ε.
        delta: The part of its δ behind the filter.

    Returns:
        One of :data:`ORDERS`. Every order is safe; another one only leaves less room.
    """

    def room(order: float) -> float:
        """Return the filter's capacity without declared charges, in closed form, divided by the order."""
        # log(δ/c), with c = (1−1/α)^(α−1)/α.
        log_share = math.log(delta * order) - (order - 1) * math.log1p(-1 / order)
        divergence = epsilon + log_share / (order - 1)
        return divergence / order

    return max(ORDERS, key=room)


@lru_cache(maxsize=64)
def lines(epsilon: float, delta: float) -> tuple[tuple[float, float], ...]:
    """Return the Rényi orders that the odometer of a budget reads, each with its part of δ.

    The orders are the best ones for readings from a sixteenth of ε to four times ε.
    """
    share_of_lines = ODOMETER_SHARE - BLOCK_SHARE - FAILING_SHARE
    share = share_of_lines * delta / len(_LEVELS)
    odometer_lines = []
    for level in _LEVELS:
        order = best_order(epsilon * level, share)
        odometer_lines.append((order, share))
    return tuple(odometer_lines)


@lru_cache(maxsize=256)
def start(profile: Profile, order: float, delta: float) -> float:
    """Return the smallest ε at which the odometer may start at one order, by its theorem, for this δ.

    Args:
        profile: The block's profile.
        order: The line's Rényi order.
        delta: The line's part of δ.

    Returns:
        An ε, from above; infinity where none is small enough.
    """
    low = 0.0
    high = _LARGEST
    if total_delta(profile, order, 0.0, high) > delta:
        return math.inf
    for _ in range(50):
        middle = (low + high) / 2
        if total_delta(profile, order, 0.0, middle) <= delta:
            high = middle
        else:
            low = middle
    return high


def odometer_epsilon(
    profile: Profile,
    spent: Callable[[float], float],
    *,
    epsilon: float,
    delta: float,
) -> float:
    """Return an ε for everything spent so far, valid at any time of reading, by the theorem above.

    Args:
        profile: The block's profile.
        spent: The sum of the divergences of what was charged after the block, by order.
        epsilon: The budget's ε.
        delta: The budget's δ, whole.
    """
    readings = []
    for order, part in lines(epsilon, delta):
        reading = start(profile, order, part) + spent(order)
        readings.append(reading)
    return min(readings)
