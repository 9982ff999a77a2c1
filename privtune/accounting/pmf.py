"""Pessimistic privacy loss distributions on a lattice, and their composition by FFT.

A `LossPmf` is one direction of a dominating pair (P, Q): the law of the loss `log dP/dQ` under P on
the lattice `step·Z`, plus a mass at +∞. The Q-mass of an atom is its P-mass times `exp(-loss)`.
Every operation keeps or raises the privacy profile `δ(ε) = P(loss > ε) - e^ε Q(loss > ε)` at every
real ε, which is what "pessimistic" means here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.errors import PrivTuneError

Floats = NDArray[np.float64]
MAX_SIZE = 2**23
_WIDEST = 300.0  # lattice step; wider ones hold e^loss of two points only
_ROW = 1024  # losses that are summed at once, at most
_SPAN = 100.0  # how far apart they are, at most
_LEAST = 1e-300  # mass by which one may divide


class GridError(PrivTuneError):
    """The error that a loss distribution does not fit on any lattice of reasonable size."""


_LARGEST_EXPONENT = 700.0  # floats hold little more


def exp_capped(exponent: Floats) -> Floats:
    """Return e^min(x, 700) of each number x, which does not overflow."""
    return np.exp(np.minimum(exponent, _LARGEST_EXPONENT))


def scale_of(epsilon: float) -> float:
    """Return e^min(ε, 700), which does not overflow."""
    return math.exp(min(epsilon, _LARGEST_EXPONENT))


def lattice_cells(loss: float, step: float) -> int:
    """Return the loss in lattice steps, rounded up, or refuse one beyond 2^23 steps."""
    size = abs(loss)
    if not 0.0 < step <= _WIDEST or not size / step <= MAX_SIZE:
        raise GridError(f"losses of {size:.3g} do not fit on a lattice of step {step:.3g}.")
    return math.ceil(loss / step)


@dataclass(frozen=True, eq=False)
class LossPmf:
    """One direction of a dominating pair: P-masses of consecutive lattice points, and at infinity."""

    step: float
    lowest: int
    masses: Floats
    infinite: float

    def __post_init__(self) -> None:
        """Refuse a step or a total mass that is out of range or no number."""
        total = float(self.masses.sum()) + self.infinite
        if not 0.0 < self.step <= _WIDEST or not 0.0 < total < math.inf:
            raise GridError("the numbers of a loss distribution leave their range.")

    @cached_property
    def losses(self) -> Floats:
        """The loss of each atom, which is its lattice point."""
        numbers = self.lowest + np.arange(self.masses.size)
        return np.asarray(numbers * self.step, dtype=np.float64)

    @cached_property
    def log_masses(self) -> Floats:
        """The logarithm of each atom's P-mass; -inf where there is none."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.masses))

    @cached_property
    def _tail_p(self) -> Floats:
        """The P-mass at and above each atom, without the mass at infinity."""
        from_largest = np.cumsum(self.masses[::-1])
        return from_largest[::-1]

    @cached_property
    def _tail_q(self) -> Floats:
        """The Q-mass at and above each atom, times exp(loss of that atom)."""
        from_largest = _discounted(self.masses[::-1], self.step)
        return from_largest[::-1]

    @cached_property
    def _profile(self) -> Floats:
        """The value δ(ε) at the loss of each atom, nonincreasing."""
        values = self.infinite + self._tail_p - self._tail_q
        values = np.maximum(values, 0.0)
        return np.minimum.accumulate(values)

    def delta(self, epsilon: Floats | float) -> Floats:
        """Return the profile δ(ε) at each ε, which may be any real number."""
        points = np.asarray(epsilon, dtype=np.float64)
        # 1e-12: a lattice point that rounding puts above itself is read as itself.
        number = np.ceil(points / self.step - 1e-12)
        last = self.masses.size - 1
        place = np.clip(number - self.lowest, 0, last)
        index = place.astype(np.int64)
        gap = np.minimum(points - self.losses[index], 0.0)
        tail_q = np.exp(gap) * self._tail_q[index]
        inside = self.infinite + self._tail_p[index] - tail_q
        is_above = points > self.losses[-1]
        value = np.where(is_above, self.infinite, inside)
        return np.clip(value, 0.0, 1.0)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε >= 0 with δ(ε) <= delta, or infinity."""
        if delta < self.infinite:
            return math.inf
        if float(self.delta(0.0)) <= delta:
            return 0.0
        profile = self._profile
        index = int(np.searchsorted(-profile, -delta, side="left"))
        index = min(index, profile.size - 1)
        # On (loss[index-1], loss[index]] the profile is a line in e^ε: solve it.
        upper = float(self.losses[index])
        excess = self.infinite + float(self._tail_p[index]) - delta
        weight = float(self._tail_q[index])
        if excess <= 0.0 or weight <= 0.0:
            return max(upper, 0.0)
        below = min(math.log(excess / weight), 0.0)
        return max(upper + below, 0.0)

    def coarsen(self, factor: int) -> LossPmf:
        """Return the distribution on a lattice `factor` times as wide, with P- and Q-masses kept.

        Each atom is spread on the two new points around it, as a cell is (`from_cells`).
        """
        if factor <= 1:
            return self
        index = self.lowest + np.arange(self.masses.size)
        lower = np.floor_divide(index, factor)
        rest = (index - lower * factor) * self.step
        width = -math.expm1(-factor * self.step)
        share = -np.expm1(-rest) / width
        raised = self.masses * share
        first = int(lower[0])
        place = lower - first
        size = int(place[-1]) + 2
        masses = np.zeros(size)
        masses += np.bincount(place, self.masses - raised, size)
        masses += np.bincount(place + 1, raised, size)
        return LossPmf(self.step * factor, first, masses, self.infinite)

    @cached_property
    def mean(self) -> float:
        """The mean of the loss under P, over its finite values."""
        total = max(float(self.masses.sum()), _LEAST)
        return inner(self.masses, self.losses) / total

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of the loss under P, over its finite values."""
        squares = (self.losses - self.mean) ** 2
        square = inner(self.masses, squares)
        total = max(float(self.masses.sum()), _LEAST)
        return math.sqrt(square / total)


def _discounted(values: Floats, step: float) -> Floats:
    """Return the sums `Σ_{j <= i} values[j] exp(-(i - j) step)` for all i, for values of at least 0."""
    # `scipy.signal.lfilter` does it, too, and takes longer to import than the sums of a study. Within a row
    # weights are at most exp(100) apart; from row to row the sum is carried over.
    width = max(min(_ROW, int(_SPAN / step)), 1)
    rows = -(-values.size // width)
    padded = np.zeros(rows * width)
    padded[: values.size] = values
    grown = np.exp(np.arange(width) * step)
    table = padded.reshape(rows, width)
    sums = np.cumsum(table * grown, axis=1)
    carried = 0.0
    shrink = math.exp(-step)
    largest = float(grown[-1])
    before = np.empty(rows)
    last_sums = (sums[:, -1] / largest).tolist()
    for row, last_sum in enumerate(last_sums):
        before[row] = carried * shrink
        carried = last_sum + before[row] / largest
    sums += before[:, np.newaxis]
    sums /= grown
    flat = sums.reshape(-1)
    return np.asarray(flat[: values.size])


def inner(first: Floats, second: Floats) -> float:
    """Return the inner product of two vectors, computed in one thread."""
    # `@` wakes BLAS' threads for each product: on a busy machine that takes a hundred times as long.
    products = first * second
    return float(products.sum())


def normal_masses(z: Floats) -> Floats:
    """Return the normal mass between consecutive points, precise in both tails."""
    tail = sp.special.ndtr(-np.abs(z))
    crossing = (z[:-1] < 0.0) & (z[1:] > 0.0)
    one_side = np.abs(tail[1:] - tail[:-1])
    both_sides = 1.0 - tail[1:] - tail[:-1]
    return np.asarray(np.where(crossing, both_sides, one_side))


def nothing(step: float) -> LossPmf:
    """Return the loss distribution of a release without any privacy loss, on a lattice of this step."""
    return LossPmf(step, 0, np.ones(1), 0.0)


def from_cells(
    step: float,
    lowest: int,
    *,
    mass_p: Floats,
    mass_q: Floats,
    below: float,
    above: float,
) -> LossPmf:
    """Spread the mass of lattice cells on the two ends of each, keeping P- and Q-mass.

    Args:
        step: The lattice step.
        lowest: Number of the lattice point at which the first cell begins.
        mass_p: P-masses of the cells.
        mass_q: Q-masses of the cells.
        below: P-mass of lower losses; it goes to the first point.
        above: P-mass of higher losses; it goes to infinity.

    References:
        Doroshenko et al., arXiv:2207.04380, Algorithm 1: chords in e^ε lie above the profile.
    """
    lower = (lowest + np.arange(mass_p.size)) * step
    with np.errstate(over="ignore", invalid="ignore"):
        tilted = np.exp(lower) * mass_q
    raised = (mass_p - tilted) / -math.expm1(-step)
    # Where e^loss overflows all of the mass is raised.
    inside = np.clip(raised, 0.0, mass_p)
    raised = np.where(np.isfinite(raised), inside, mass_p)
    masses = np.zeros(mass_p.size + 1)
    masses[:-1] += mass_p - raised
    masses[1:] += raised
    masses[0] += below
    return LossPmf(step, lowest, masses, above)


def mixture(pmfs: Sequence[LossPmf], weights: Sequence[float]) -> LossPmf:
    """Return one direction of a mixture's pair, with the drawn component part of the output."""
    step = pmfs[0].step
    lowest = min(pmf.lowest for pmf in pmfs)
    highest = max(pmf.lowest + pmf.masses.size for pmf in pmfs)
    masses = np.zeros(highest - lowest)
    infinite = 0.0
    for pmf, weight in zip(pmfs, weights, strict=True):
        start = pmf.lowest - lowest
        end = start + pmf.masses.size
        masses[start:end] += weight * pmf.masses
        infinite += weight * pmf.infinite
    return LossPmf(step, lowest, masses, infinite)


_MAX_PROFILE = 2**19


def from_profile(
    profile: Callable[[Floats], Floats],
    reverse: Callable[[Floats], Floats],
    step: float,
    lowest: int,
    highest: int,
) -> LossPmf:
    """Return one direction of a pair that dominates a mechanism with these bounds on its profiles.

    Args:
        profile: Bound on δ(ε) for ε >= 0 in this direction.
        reverse: The same in the other direction.
        step: The lattice step.
        lowest: Number of the first lattice point, below 0.
        highest: Number of the last, above 0.

    References:
        For ε < 0 the bound is 1 - e^ε + e^ε reverse(-ε). It is made convex in x = e^ε; slope jumps are
        Q-masses (README, 1, *Profiles*).
    """
    if highest - lowest > _MAX_PROFILE:
        raise GridError(f"a profile needs {highest - lowest} lattice points.")
    up = np.arange(0.0, highest + 1) * step
    down = np.arange(0.0, -lowest + 1) * step
    high = np.clip(profile(up), 0.0, 1.0)
    # For ε < 0 keep only what lies above the line 1 - e^ε: adding a line changes no slope jump.
    reversed_profile = np.clip(reverse(down), 0.0, 1.0)
    low = np.exp(-down) * reversed_profile
    at_zero = min(float(high[0]), float(low[0]))
    high[0] = at_zero
    low[0] = at_zero
    below_zero = _convex(low[::-1], step)
    from_zero = _convex(high, step)
    values = np.concatenate([below_zero[:-1], from_zero])
    values = _convex_across(values, -lowest, step)
    drop = np.diff(values)
    # δ in terms of x = e^ε: mass_p(i) = x_i (slope_i - slope_(i-1)); the line -x on the left side
    # contributes slope -1 there and 0 on the right: a jump of 1 in Q-mass at ε = 0.
    masses = np.zeros(values.size)
    masses[:-1] += drop / math.expm1(step)
    masses[1:] += drop / math.expm1(-step)
    masses[-lowest] += 1.0
    # Left of the grid the profile is bounded by the chord to (x, δ) = (0, 1), which has slope
    # (low[0])/x_0 in the shifted picture: that much Q-mass is given up at loss -∞.
    masses[0] -= values[0]
    np.maximum(masses, 0.0, out=masses)
    return LossPmf(step, lowest, masses, float(values[-1]))


def _convex(values: Floats, step: float) -> Floats:
    """Return the lower convex hull, in x = e^ε, of values on consecutive lattice points."""
    growth = scale_of(step)
    rises = np.diff(values)
    bends = rises[1:] - growth * rises[:-1]
    allowance = 1e-13 * np.abs(values[1:-1])
    if not (bends < -allowance).any():
        return values
    vertices = _hull_vertices(values, step)
    place = np.arange(values.size)
    edge = np.searchsorted(vertices, place, side="right") - 1
    edge = np.minimum(edge, vertices.size - 2)
    start = vertices[edge]
    end = vertices[edge + 1]
    width = np.expm1((start - end) * step)
    # (x - x_start)/(x_end - x_start) in x = e^ε, without a number that is large.
    scale = np.exp((place - end) * step)
    from_start = np.expm1((start - place) * step)
    share = scale * from_start / width
    rise = values[end] - values[start]
    return np.asarray(values[start] + share * rise)


def _hull_vertices(values: Floats, step: float) -> NDArray[np.int64]:
    """Return the indices of the vertices of the lower convex hull, in x = e^ε, of values on a lattice."""
    hull: list[int] = []
    heights = values.tolist()
    for i in range(values.size):
        while len(hull) >= 2:
            j = hull[-1]
            k = hull[-2]
            # Slopes on both sides of j, with x in units of x_j to stay in range.
            width_before = -math.expm1((k - j) * step)
            exponent = min((i - j) * step, _LARGEST_EXPONENT)
            width_after = math.expm1(exponent)
            before = (heights[j] - heights[k]) / width_before
            after = (heights[i] - heights[j]) / width_after
            if before < after:
                break
            hull.pop()
        hull.append(i)
    return np.asarray(hull)


def _convex_across(
    values: Floats,
    zero: int,
    step: float,
) -> Floats:
    """Remove the kink at ε = 0 of a privacy profile less (1 - e^ε)₊, so that it is convex there."""
    fall = values[zero] - values[zero - 1]
    rise = values[zero + 1] - values[zero]
    before = fall / -math.expm1(-step) - 1.0
    after = rise / math.expm1(step)
    if before <= after:
        return values
    # Only where δ is not tiny: adding the kink costs the digits below 1e-16 of what it reaches.
    least = 1e-10 * -math.expm1(-zero * step)
    large = np.flatnonzero(values > least)
    if not large.size:
        return values  # where a mass would be negative it is raised to 0
    first = int(large[0])
    last = int(large[-1])
    inside = slice(first, last + 1)
    distance = np.arange(first, last + 1) - zero
    below_zero = np.minimum(distance, 0)
    kink = -np.expm1(below_zero * step)
    values = values.copy()
    convex = _convex(values[inside] + kink, step)
    values[inside] = convex - kink
    return np.maximum(values, 0.0)


_TAIL = 60.0  # windows leave out a probability below exp(-60); it is charged, not forgotten
_TILT = 30.0  # the saddle point of the third tilt sits where the tail is about exp(-30)
_STRETCH = 0.55
_WRAP = 37.0  # mass that wraps around must stay below exp(-37), one rounding error
_EPS = 2.0**-53
_EXTENDED = float(np.finfo(np.longdouble).eps) / 2.0
_NEGLIGIBLE = 50.0
_PLAIN = 256  # up to so many releases double precision suffices
# An allowance for noise is negligible below this share of a tail, if that is no rarer than this.
_BESIDE = 1e-6
_RAREST = 1e-16
Parts = Sequence[tuple[LossPmf, int]]
"""Independent releases of one direction on one lattice, each so many times."""


def log_moment(parts: Parts, tilt: float) -> float:
    """Return log Σ masses·exp(tilt·loss), summed over the losses of the whole composition."""
    total = 0.0
    for pmf, count in parts:
        exponent = pmf.log_masses + tilt * pmf.losses
        top = float(exponent.max())
        scaled = float(np.exp(exponent - top).sum())
        total += count * (math.log(scaled) + top)
    return total


def chernoff(
    moment: Callable[[float], float],
    start: float,
    tail: float,
    most: float,
) -> tuple[float, float]:
    """Return the least of Chernoff's bounds (moment(θ) + tail)/θ over θ <= `most`, and its θ.

    By Chernoff the mass above t is at most exp(moment(θ) - θ t), so it is below exp(-tail) at this t.

    Args:
        moment: Log of the moment generating function of the loss.
        start: A θ to begin with.
        tail: Minus the log of the mass that may be above.
        most: The largest θ. Of bounded losses the best one is infinite; it would take all digits of
            what it is multiplied with.
    """
    ratio = 2.0
    best = min(start, most)
    value = (moment(best) + tail) / best
    while ratio > 1.3:
        moved = False
        for candidate in (best * ratio, best / ratio):
            if candidate > most:
                continue
            new = (moment(candidate) + tail) / candidate
            if new < value:
                best = candidate
                value = new
                moved = True
                break
        if not moved:
            ratio = math.sqrt(ratio)
    return value, best


def _fitting_tilt(
    moment: Callable[[float], float],
    theta: float,
    top: float,
) -> float:
    """Return an exponential tilt, at most `theta`, that leaves negligible mass above the loss `top`.

    Args:
        moment: Log of the moment generating function of the loss.
        theta: The tilt to begin with.
        top: The largest loss of the window.
    """
    # Mass beyond the window wraps around into it.
    while theta > 1e-3:
        at_tilt = moment(theta)
        for more in (theta, 0.3 * theta, 3.0 * theta, 0.1 * theta):
            at_more = moment(theta + more)
            log_mass = at_more - at_tilt - more * top
            if log_mass <= -_WRAP:
                return theta
        theta *= 0.6
    return 0.0


@dataclass(frozen=True)
class _Window:
    """The lattice points on which a composition is computed, with a bound on the mass below them.

    Attributes:
        low: Number of the first point.
        high: Number of the last.
        size: Points of the transforms.
        theta: The tilt to the far tail.
        below: A bound on the P-mass of lower losses.
    """

    low: int
    high: int
    size: int
    theta: float
    below: float


def compose(parts: Parts, *, plain: int = _PLAIN) -> LossPmf:
    """Compose independent releases of one direction, each so many times, by FFT.

    Args:
        parts: Releases on one lattice, and how often each is made.
        plain: Of more releases all is done in extended precision, unless the noise is negligible.

    Raises:
        GridError: The sum of the losses does not fit on a lattice.
    """
    # Done under three tilts: 0 (where P lives), -1 (where Q lives), the saddle point of the far tail. Each
    # atom is taken from the tilt with the least rounding noise, and an allowance for it is added.
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    step = parts[0][0].step
    lost = LossPmf(step, 0, np.zeros(1), 1.0)
    log_finite = 0.0
    origin = 0
    reach = 0
    for pmf, count in parts:
        if not pmf.masses.any() or pmf.infinite >= 1.0:
            return lost
        log_finite += count * math.log1p(-pmf.infinite)
        origin += count * pmf.lowest
        reach += count * (pmf.masses.size - 1)
    if log_moment(parts, 0.0) <= -_TAIL:
        return lost
    window = _fitting_window(parts, origin, reach)
    places = np.arange(window.low, window.high + 1)
    tilts = (0.0, -1.0, window.theta)
    masses, noise = _atoms(
        parts,
        tilts,
        places,
        origin,
        window.size,
        extended=False,
    )
    releases = sum(count for _, count in parts)
    if releases > plain and not _is_negligible(noise, masses):
        masses, _ = _atoms(
            parts,
            tilts,
            places,
            origin,
            window.size,
            extended=True,
        )
    infinite = -math.expm1(log_finite)
    if window.high < origin + reach:
        infinite += math.exp(-_TAIL)
    if window.low > origin:
        masses[0] += window.below
    return LossPmf(step, window.low, np.minimum(masses, 1.0), min(infinite, 1.0))


def _fitting_window(
    parts: Parts,
    origin: int,
    reach: int,
) -> _Window:
    """Return a window that leaves out at most exp(-60) of the mass, and the tilt that fits it.

    Args:
        parts: What is composed.
        origin: Number of the lattice point of the least sum.
        reach: Lattice points from there to the largest sum.
    """
    step = parts[0][0].step

    def upper(theta: float) -> float:
        return log_moment(parts, theta)

    start = math.sqrt(2.0 * _TAIL / max(variance(parts), 1e-12))
    most = _NEGLIGIBLE / step  # a larger tilt leaves nothing of an atom beside the next one
    top, theta = chernoff(upper, start, _TAIL, most)
    bottom, below = _bottom(parts, start, most)
    _, theta = chernoff(upper, theta, _TILT, most)
    # A measure tilted to the far tail reaches further up than P itself.
    mean = sum(count * pmf.mean for pmf, count in parts)
    top += _STRETCH * (top - mean)
    theta = _fitting_tilt(upper, theta, top)
    high = min(lattice_cells(top, step) + 1, origin + reach)
    low = max(-lattice_cells(bottom, step) - 1, origin)
    high = max(high, low)
    points = high - low + 1
    size = max(points, *(pmf.masses.size for pmf, _ in parts))
    if size > MAX_SIZE:
        raise GridError(f"the loss distribution needs {size} lattice points")
    # No more points than there are sums, if these hold the window.
    if reach + 1 >= points:
        size = min(size, reach + 1)
    fast = int(sp.fft.next_fast_len(size, True))
    return _Window(
        low,
        high,
        fast,
        theta,
        below,
    )


def _bottom(
    parts: Parts,
    start: float,
    most: float,
) -> tuple[float, float]:
    """Return minus the loss at which a composition's window begins, and a bound on the P-mass below it."""

    def q_moment(theta: float) -> float:
        return log_moment(parts, -1.0 - theta)

    def p_moment(theta: float) -> float:
        return log_moment(parts, -theta)

    # Q(loss < x) <= exp(-60), hence P(loss < x) <= exp(x - 60).
    if log_moment(parts, -1.0) > -_TAIL:
        bottom, _ = chernoff(q_moment, start, _TAIL, most)
        if bottom >= 0.0:
            return bottom, math.exp(-_TAIL - bottom)
    # Of Q hardly anything has a loss: P itself tells where it begins.
    bottom, _ = chernoff(p_moment, start, _TAIL, most)
    return bottom, math.exp(-_TAIL)


def _is_negligible(noise: Floats, masses: Floats) -> bool:
    """Return whether the allowance for rounding is below a millionth of each tail, or of 1e-16."""
    tail = np.cumsum(masses[::-1])
    allowance = np.cumsum(noise[::-1])
    limit = np.maximum(_BESIDE * tail, _BESIDE * _RAREST)
    return bool((allowance <= limit).all())


def _atoms(
    parts: Parts,
    tilts: Sequence[float],
    window: NDArray[np.int64],
    origin: int,
    size: int,
    *,
    extended: bool,
) -> tuple[Floats, Floats]:
    """Return the masses in a window with an allowance for FFT rounding added, and the allowance.

    Args:
        parts: What is composed.
        tilts: Exponential tilts; each atom is taken from the one with the least noise there.
        window: Numbers of the lattice points.
        origin: Number of the lattice point of the least sum.
        size: Points of the transforms.
        extended: Whether to transform in extended precision.
    """
    step = parts[0][0].step
    places = (window - origin) % size
    losses = np.asarray(window * step, dtype=np.float64)
    best_noise = np.full(window.size, np.inf)
    masses = np.zeros(window.size)
    for tilt in tilts:
        values, noise, log_scale = _tilted(parts, tilt, size, extended=extended)
        exponent = log_scale - tilt * losses + _exponent_rounding(parts, tilt)
        log_noise = exponent + math.log(noise)
        better = log_noise < best_noise
        best_noise[better] = log_noise[better]
        cleaned = np.maximum(values[places[better]], 0.0) + noise
        masses[better] = cleaned * exp_capped(exponent[better])
    return masses, exp_capped(best_noise)


def _exponent_rounding(parts: Parts, tilt: float) -> float:
    """Return a bound on the rounding of the exponents by which a tilt is applied and undone."""
    reach = 0.0
    for pmf, count in parts:
        lowest = abs(float(pmf.losses[0]))
        highest = abs(float(pmf.losses[-1]))
        reach += count * max(lowest, highest)
    return 4.0 * _EPS * abs(tilt) * reach


def variance(parts: Parts) -> float:
    """Return the variance of the summed loss of the whole composition."""
    return sum(count * pmf.deviation**2 for pmf, count in parts)


def transform(
    pmf: LossPmf,
    tilt: float,
    size: int,
    real: type[np.floating[Any]] = np.float64,
) -> tuple[NDArray[np.complexfloating], float]:
    """Return the FFT of one tilted part's masses, scaled to sum 1, and the log of the scale.

    Args:
        pmf: The part.
        tilt: The exponent by which its masses are tilted.
        size: Points of the transform.
        real: Precision of the transform.
    """
    exponent = pmf.log_masses + tilt * pmf.losses
    shift = float(exponent.max())
    tilted = np.exp(exponent - shift)
    total = float(tilted.sum())
    normalised = (tilted / total).astype(real)
    return sp.fft.rfft(normalised, size), math.log(total) + shift


def _tilted(
    parts: Parts,
    tilt: float,
    size: int,
    *,
    extended: bool,
) -> tuple[Floats, float, float]:
    """Return the circular convolution of the tilted parts, its rounding noise, and its log scale.

    Args:
        parts: What is composed, each so many times.
        tilt: The exponent by which masses are tilted.
        size: Points of the transforms.
        extended: Whether to transform in extended precision.
    """
    if not parts:
        raise GridError("nothing to compose")
    real: type[np.floating[Any]] = np.longdouble if extended else np.float64
    accuracy = _EXTENDED if extended else _EPS
    # Frequencies left out are below exp(-50) each: nothing beside the rounding of the others. No part
    # raises what another one has left of them.
    alive = np.arange(size // 2 + 1)
    logs = np.zeros(alive.size, dtype=np.result_type(real, np.complex64))
    log_scale = 0.0
    forward = 0.0
    for pmf, count in parts:
        part_spectrum, log_total = transform(pmf, tilt, size, real)
        log_scale += count * log_total
        # Raising to the power `count` multiplies the rounding of the transform by `count`, and is done
        # only where the result is not negligible.
        forward += count * (2.0 + math.log2(size)) * accuracy
        negligible = math.exp(-_NEGLIGIBLE / count)
        large = np.abs(part_spectrum[alive]) > negligible
        alive = alive[large]
        logs = logs[large]
        logs = logs + count * np.log(part_spectrum[alive])
        large = logs.real > -_NEGLIGIBLE
        alive = alive[large]
        logs = logs[large]
    spectrum = np.zeros(size // 2 + 1, dtype=np.complex128)
    spectrum[alive] = np.exp(logs)
    values = np.asarray(sp.fft.irfft(spectrum, size))
    # Higham 2002, Theorem 24.2, bounds the 2-norm of the error. That each point has an even share of it
    # is assumed (README, FFT rounding).
    backward = (4.0 + 2.0 * math.log2(size)) * _EPS
    rounding = forward + backward
    noise = rounding * math.sqrt(inner(values, values) / size)
    return values, noise, log_scale
