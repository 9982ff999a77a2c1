"""Privacy loss distributions on a lattice, pessimistic, and their composition by FFT.

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
_ROW, _SPAN = 1024, 100.0  # of losses that are summed at once: how many, and how far apart
_LEAST = 1e-300  # mass by which one may divide


class GridError(PrivTuneError):
    """A loss distribution does not fit on any grid of reasonable size."""


def lattice_cells(loss: float, step: float) -> int:
    """Return how many steps reach up to a loss, rounded up; GridError beyond 2^23."""
    if not 0.0 < step <= _WIDEST or not abs(loss) / step <= MAX_SIZE:
        raise GridError(f"losses of {abs(loss):.3g} do not fit on a lattice of step {step:.3g}.")
    return math.ceil(loss / step)


@dataclass(frozen=True, eq=False)
class LossPmf:
    """One direction of a dominating pair: P-masses of consecutive lattice points, and at infinity."""

    step: float
    lowest: int
    masses: Floats
    infinite: float

    def __post_init__(self) -> None:
        total = float(self.masses.sum()) + self.infinite
        if not 0.0 < self.step <= _WIDEST or not 0.0 < total < math.inf:
            raise GridError("the numbers of a loss distribution leave their range.")

    @cached_property
    def losses(self) -> Floats:
        """The lattice points."""
        return np.asarray((self.lowest + np.arange(self.masses.size)) * self.step, dtype=np.float64)

    @cached_property
    def log_masses(self) -> Floats:
        """Logarithms of the masses; -inf where there is none."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.masses))

    @cached_property
    def _tail_p(self) -> Floats:
        """P-mass at and above each atom, infinity not included."""
        return np.cumsum(self.masses[::-1])[::-1]

    @cached_property
    def _tail_q(self) -> Floats:
        """Q-mass at and above each atom, times exp(loss of that atom)."""
        return _discounted(self.masses[::-1], self.step)[::-1]

    @cached_property
    def _profile(self) -> Floats:
        """δ at each atom; nonincreasing by construction, rounding aside."""
        return np.minimum.accumulate(np.maximum(self.infinite + self._tail_p - self._tail_q, 0.0))

    def delta(self, epsilon: Floats | float) -> Floats:
        """Return the profile δ(ε) at each ε, any real number."""
        points = np.asarray(epsilon, dtype=np.float64)
        place = np.ceil(points / self.step - 1e-12) - self.lowest
        index = np.clip(place, 0, self.masses.size - 1).astype(np.int64)
        gap = np.minimum(points - self.losses[index], 0.0)
        value = self.infinite + self._tail_p[index] - np.exp(gap) * self._tail_q[index]
        above = points > self.losses[-1]
        return np.clip(np.where(above, self.infinite, value), 0.0, 1.0)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε >= 0 with δ(ε) <= delta, or inf."""
        if delta < self.infinite:
            return math.inf
        if float(self.delta(0.0)) <= delta:
            return 0.0
        profile = self._profile
        index = int(np.searchsorted(-profile, -delta, side="left"))
        if index >= profile.size:
            index = profile.size - 1
        # On (loss[index-1], loss[index]] the profile is a line in e^ε: solve it.
        upper = float(self.losses[index])
        excess = self.infinite + float(self._tail_p[index]) - delta
        weight = float(self._tail_q[index])
        if excess <= 0.0 or weight <= 0.0:
            return max(upper, 0.0)
        value = upper + min(math.log(excess / weight), 0.0)
        return max(value, 0.0)

    def coarsen(self, factor: int) -> LossPmf:
        """Return a pair on a lattice `factor` times as wide; P- and Q-mass of each atom are kept."""
        if factor <= 1:
            return self
        index = self.lowest + np.arange(self.masses.size)
        lower = np.floor_divide(index, factor)
        rest = (index - lower * factor) * self.step
        raised = self.masses * (-np.expm1(-rest) / -math.expm1(-factor * self.step))
        first = int(lower[0])
        size = int(lower[-1]) - first + 2
        masses = np.asarray(np.bincount(lower - first, self.masses - raised, size), np.float64)
        masses += np.bincount(lower - first + 1, raised, size)
        return LossPmf(self.step * factor, first, masses, self.infinite)

    @cached_property
    def mean(self) -> float:
        """Mean of the finite part of the loss under P."""
        return inner(self.masses, self.losses) / max(float(self.masses.sum()), _LEAST)

    @cached_property
    def deviation(self) -> float:
        """Standard deviation of the finite part of the loss under P."""
        square = inner(self.masses, (self.losses - self.mean) ** 2)
        return math.sqrt(square / max(float(self.masses.sum()), _LEAST))


def _discounted(values: Floats, step: float) -> Floats:
    """Return all sums `Σ_{j <= i} values[j] exp(-(i - j) step)`, of values that are 0 or more."""
    # `scipy.signal.lfilter` does it, too, and takes longer to import than the sums of a study. Within a row
    # weights are at most exp(100) apart; from row to row the sum is carried over.
    width = max(min(_ROW, int(_SPAN / step)), 1)
    rows = -(-values.size // width)
    padded = np.zeros(rows * width)
    padded[: values.size] = values
    grown = np.exp(np.arange(width) * step)
    sums = np.cumsum(padded.reshape(rows, width) * grown, axis=1)
    carried, shrink = 0.0, math.exp(-step)
    before = np.empty(rows)
    for row, last in enumerate((sums[:, -1] / grown[-1]).tolist()):
        before[row] = carried * shrink
        carried = last + before[row] / float(grown[-1])
    sums += before[:, np.newaxis]
    sums /= grown
    return np.asarray(sums.reshape(-1)[: values.size])


def inner(left: Floats, right: Floats) -> float:
    """Return the sum of products of two vectors, in one thread."""
    # `@` wakes BLAS' threads for each product: on a busy machine that takes a hundred times as long.
    return float((left * right).sum())


def normal_masses(z: Floats) -> Floats:
    """Return the normal mass between consecutive points, precise in both tails."""
    tail = sp.special.ndtr(-np.abs(z))
    crossing = (z[:-1] < 0.0) & (z[1:] > 0.0)
    same = np.abs(tail[1:] - tail[:-1])
    return np.asarray(np.where(crossing, 1.0 - tail[1:] - tail[:-1], same))


def nothing(step: float) -> LossPmf:
    """Return the pair of a release about nothing: no loss at all."""
    return LossPmf(step, 0, np.ones(1), 0.0)


def from_cells(
    step: float, lowest: int, *, mass_p: Floats, mass_q: Floats, below: float, above: float
) -> LossPmf:
    """Spread the mass of lattice cells on the two ends of each, keeping P- and Q-mass."""
    # Doroshenko et al., arXiv:2207.04380, Algorithm 1: chords in e^ε lie above the profile.
    lower = (lowest + np.arange(mass_p.size)) * step
    with np.errstate(over="ignore", invalid="ignore"):
        tilted = np.exp(lower) * mass_q
    raised = (mass_p - tilted) / -math.expm1(-step)
    raised = np.where(np.isfinite(raised), np.clip(raised, 0.0, mass_p), mass_p)
    masses = np.zeros(mass_p.size + 1)
    masses[:-1] += mass_p - raised
    masses[1:] += raised
    masses[0] += below
    return LossPmf(step, lowest, masses, above)


def mixture(pmfs: Sequence[LossPmf], weights: Sequence[float]) -> LossPmf:
    """Return the pair of the mixture in which the component's name is part of the output."""
    step = pmfs[0].step
    lowest = min(pmf.lowest for pmf in pmfs)
    highest = max(pmf.lowest + pmf.masses.size for pmf in pmfs)
    masses = np.zeros(highest - lowest)
    infinite = 0.0
    for pmf, weight in zip(pmfs, weights, strict=True):
        start = pmf.lowest - lowest
        masses[start : start + pmf.masses.size] += weight * pmf.masses
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
    """Return a pair that dominates a mechanism of which upper bounds on both profiles are known."""
    # For ε < 0 the bound is 1 - e^ε + e^ε reverse(-ε). Made convex in x = e^ε; slope jumps are Q-masses.
    if highest - lowest > _MAX_PROFILE:
        raise GridError(f"a profile needs {highest - lowest} lattice points.")
    up = np.arange(0.0, highest + 1) * step
    down = np.arange(0.0, -lowest + 1) * step
    high = np.clip(profile(up), 0.0, 1.0)
    # For ε < 0 keep only what lies above the line 1 - e^ε: adding a line changes no slope jump.
    low = np.exp(-down) * np.clip(reverse(down), 0.0, 1.0)
    at_zero = min(float(high[0]), float(low[0]))
    high[0] = low[0] = at_zero
    values = np.concatenate([_convex(low[::-1], step)[:-1], _convex(high, step)])
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
    bends = np.diff(values[1:]) - math.exp(min(step, 700.0)) * np.diff(values[:-1])
    if not (bends < -1e-13 * np.abs(values[1:-1])).any():
        return values
    size = values.size
    hull: list[int] = []
    heights = values.tolist()
    for i in range(size):
        while len(hull) >= 2:
            j, k = hull[-1], hull[-2]
            # Slopes on both sides of j, with x in units of x_j to stay in range.
            left = (heights[j] - heights[k]) / -math.expm1((k - j) * step)
            right = (heights[i] - heights[j]) / math.expm1(min((i - j) * step, 700.0))
            if left < right:
                break
            hull.pop()
        hull.append(i)
    vertices = np.asarray(hull)
    place = np.arange(size)
    edge = np.minimum(np.searchsorted(vertices, place, side="right") - 1, vertices.size - 2)
    start, end = vertices[edge], vertices[edge + 1]
    width = np.expm1((start - end) * step)
    # (x - x_start)/(x_end - x_start) in x = e^ε, without a number that is large.
    share = np.exp((place - end) * step) * np.expm1((start - place) * step) / width
    return np.asarray(values[start] + share * (values[end] - values[start]))


def _convex_across(values: Floats, zero: int, step: float) -> Floats:
    """Make the profile less (1 - e^ε)₊ convex across ε = 0, where its two halves were joined."""
    before = (values[zero] - values[zero - 1]) / -math.expm1(-step) - 1.0
    after = (values[zero + 1] - values[zero]) / math.expm1(step)
    if before <= after:
        return values
    # Only where δ is not tiny: adding the kink costs the digits below 1e-16 of what it reaches.
    large = np.flatnonzero(values > 1e-10 * -math.expm1(-zero * step))
    if not large.size:
        return values  # where a mass would be negative it is raised to 0
    first, last = int(large[0]), int(large[-1])
    kink = -np.expm1(np.minimum(np.arange(first, last + 1) - zero, 0) * step)
    values = values.copy()
    values[first : last + 1] = _convex(values[first : last + 1] + kink, step) - kink
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
_BESIDE, _RAREST = 1e-6, 1e-16


def log_moment(parts: Sequence[tuple[LossPmf, int]], tilt: float) -> float:
    """Return log Σ masses·exp(tilt·loss) of the whole composition."""
    total = 0.0
    for pmf, count in parts:
        exponent = pmf.log_masses + tilt * pmf.losses
        top = float(exponent.max())
        total += count * (math.log(float(np.exp(exponent - top).sum())) + top)
    return total


def chernoff(
    moment: Callable[[float], float], start: float, tail: float, most: float
) -> tuple[float, float]:
    """Return (min over θ <= most of (moment(θ) + tail)/θ, the θ), by golden section on log θ."""
    # Chernoff: the mass above t is at most exp(moment(θ) - θ t), so it is below exp(-tail) at this t.
    # Of bounded losses the best θ is infinite; it would take all digits of what it is multiplied with.
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
                best, value, moved = candidate, new, True
                break
        if not moved:
            ratio = math.sqrt(ratio)
    return value, best


def _fitting_tilt(moment: Callable[[float], float], theta: float, top: float) -> float:
    """Return the largest tilt up to theta under which the mass above `top` is below rounding."""
    # Mass beyond the window wraps around into it.
    while theta > 1e-3:
        fixed = moment(theta)
        for more in (theta, 0.3 * theta, 3.0 * theta, 0.1 * theta):
            if moment(theta + more) - fixed - more * top <= -_WRAP:
                return theta
        theta *= 0.6
    return 0.0


def compose(parts: Sequence[tuple[LossPmf, int]], *, plain: int = _PLAIN) -> LossPmf:
    """Compose independent releases of one direction, each so many times, by FFT."""
    # Done under three tilts: 0 (where P lives), -1 (where Q lives), the saddle point of the far tail. Each
    # atom is taken from the tilt with the least rounding noise, and an allowance for it is added.
    # Of more than `plain` releases all is done in extended precision, unless the noise is negligible.
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    step = parts[0][0].step
    if not all(pmf.masses.any() and pmf.infinite < 1.0 for pmf, _ in parts):
        return LossPmf(step, 0, np.zeros(1), 1.0)
    log_finite = sum(count * math.log1p(-pmf.infinite) for pmf, count in parts)
    origin = sum(count * pmf.lowest for pmf, count in parts)
    reach = sum(count * (pmf.masses.size - 1) for pmf, count in parts)

    def upper(theta: float) -> float:
        return log_moment(parts, theta)

    if upper(0.0) <= -_TAIL:
        return LossPmf(step, 0, np.zeros(1), 1.0)
    start = math.sqrt(2.0 * _TAIL / max(variance(parts), 1e-12))
    most = _NEGLIGIBLE / step  # a larger tilt leaves nothing of an atom beside the next one
    top, theta = chernoff(upper, start, _TAIL, most)
    bottom, rest = _bottom(parts, start, most)
    _, theta = chernoff(upper, theta, _TILT, most)
    # A measure tilted to the far tail reaches further up than P itself.
    top += _STRETCH * (top - sum(count * pmf.mean for pmf, count in parts))
    theta = _fitting_tilt(upper, theta, top)
    high = min(lattice_cells(top, step) + 1, origin + reach)
    low = max(-lattice_cells(bottom, step) - 1, origin)
    high = max(high, low)
    size = max(high - low + 1, *(pmf.masses.size for pmf, _ in parts))
    if size > MAX_SIZE:
        raise GridError(f"the loss distribution needs {size} lattice points")
    size = int(sp.fft.next_fast_len(min(size, reach + 1) if reach + 1 > high - low else size, True))
    window = np.arange(low, high + 1)
    tilts = (0.0, -1.0, theta)
    masses, noise = _atoms(parts, tilts, window, origin, size, extended=False)
    if sum(count for _, count in parts) > plain and not _is_negligible(noise, masses):
        masses, _ = _atoms(parts, tilts, window, origin, size, extended=True)
    infinite = -math.expm1(log_finite)
    if high < origin + reach:
        infinite += math.exp(-_TAIL)
    if low > origin:
        masses[0] += rest
    return LossPmf(step, low, np.minimum(masses, 1.0), min(infinite, 1.0))


def _bottom(parts: Sequence[tuple[LossPmf, int]], start: float, most: float) -> tuple[float, float]:
    """Return minus the loss where the window begins, and a bound on the P-mass below it."""
    # Q(loss < x) <= exp(-60), hence P(loss < x) <= exp(x - 60).
    if log_moment(parts, -1.0) > -_TAIL:
        bottom, _ = chernoff(lambda theta: log_moment(parts, -1.0 - theta), start, _TAIL, most)
        if bottom >= 0.0:
            return bottom, math.exp(-_TAIL - bottom)
    # Of Q hardly anything has a loss: P itself tells where it begins.
    bottom, _ = chernoff(lambda theta: log_moment(parts, -theta), start, _TAIL, most)
    return bottom, math.exp(-_TAIL)


def _is_negligible(noise: Floats, masses: Floats) -> bool:
    """Whether an allowance for rounding is below a millionth of every tail that is not rarer than 1e-16."""
    tail = np.cumsum(masses[::-1])
    allowed = np.cumsum(noise[::-1])
    return bool((allowed <= np.maximum(_BESIDE * tail, _BESIDE * _RAREST)).all())


def _atoms(
    parts: Sequence[tuple[LossPmf, int]],
    tilts: Sequence[float],
    window: NDArray[np.int64],
    origin: int,
    size: int,
    *,
    extended: bool,
) -> tuple[Floats, Floats]:
    """Return the window's masses, with an allowance for FFT rounding added to each, and the allowance."""
    step = parts[0][0].step
    places = (window - origin) % size
    losses = window * step
    best_noise = np.full(window.size, np.inf)
    masses = np.zeros(window.size)
    for tilt in tilts:
        values, noise, log_scale = _tilted(parts, tilt, size, extended=extended)
        exponent = log_scale - tilt * losses + _exponent_rounding(parts, tilt)
        log_noise = exponent + math.log(noise)
        better = log_noise < best_noise
        best_noise[better] = log_noise[better]
        cleaned = np.maximum(values[places[better]], 0.0) + noise
        masses[better] = cleaned * np.exp(np.minimum(exponent[better], 700.0))
    return masses, np.exp(np.minimum(best_noise, 700.0))


def _exponent_rounding(parts: Sequence[tuple[LossPmf, int]], tilt: float) -> float:
    """Return a bound on the rounding of the exponents that a tilt adds and takes away again."""
    reach = sum(
        count * max(abs(float(pmf.losses[0])), abs(float(pmf.losses[-1]))) for pmf, count in parts
    )
    return 4.0 * _EPS * abs(tilt) * reach


def variance(parts: Sequence[tuple[LossPmf, int]]) -> float:
    """Return the variance of the loss of the whole composition."""
    return sum(count * pmf.deviation**2 for pmf, count in parts)


def transform(
    pmf: LossPmf, tilt: float, size: int, real: type[np.floating[Any]] = np.float64
) -> tuple[NDArray[np.complexfloating], float]:
    """Return the spectrum of one tilted part, as from its first loss, and the log of its scale."""
    exponent = pmf.log_masses + tilt * pmf.losses
    shift = float(exponent.max())
    tilted = np.exp(exponent - shift)
    total = float(tilted.sum())
    return sp.fft.rfft((tilted / total).astype(real), size), math.log(total) + shift


def _tilted(
    parts: Sequence[tuple[LossPmf, int]], tilt: float, size: int, *, extended: bool
) -> tuple[Floats, float, float]:
    """Return the circular convolution of the tilted parts, its noise, and the log of its scale."""
    # Raising to the power `count` multiplies the rounding of the transform by `count`, and is done
    # only where the result is not negligible.
    real, accuracy = (np.longdouble, _EXTENDED) if extended else (np.float64, _EPS)
    if not parts:
        raise GridError("nothing to compose")
    # Frequencies left out are below exp(-50) each: nothing beside the rounding of the others. No part
    # raises what another one has left of them.
    alive = np.arange(size // 2 + 1)
    logs = np.zeros(alive.size, dtype=np.result_type(real, np.complex64))
    log_scale, forward = 0.0, 0.0
    for pmf, count in parts:
        found, log_total = transform(pmf, tilt, size, real)
        log_scale += count * log_total
        forward += count * (2.0 + math.log2(size)) * accuracy
        kept = np.abs(found[alive]) > math.exp(-_NEGLIGIBLE / count)
        alive, logs = alive[kept], logs[kept]
        logs = logs + count * np.log(found[alive])
        kept = logs.real > -_NEGLIGIBLE
        alive, logs = alive[kept], logs[kept]
    spectrum = np.zeros(size // 2 + 1, dtype=np.complex128)
    spectrum[alive] = np.exp(logs)
    values = np.asarray(sp.fft.irfft(spectrum, size))
    # Higham 2002, Theorem 24.2, bounds the 2-norm of the error. That each point has an even share of it
    # is assumed (README, FFT rounding).
    rounding = forward + (4.0 + 2.0 * math.log2(size)) * _EPS
    noise = rounding * math.sqrt(inner(values, values) / size)
    return values, noise, log_scale
