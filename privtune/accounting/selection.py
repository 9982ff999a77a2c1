"""Best of K: bounds on the privacy profile of a private selection over any law of K.

`Tuner` carries the envelope bound of `accounting/README.md` for one direction of the base pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.pmf import LossPmf, inner, lattice_cells
from privtune.accounting.runs import Geometric, NegativeBinomial, RunLaw

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]
_SWEEPS = 4
_MAX_PIECES = 4096
_MAX_EDGES = 100_000
_MOVED = 1e-3  # relative, of what an edge of the bound on a threshold may move
_FINER = 16  # atoms of a base for each point of a profile, at most
_FAR = 1000.0  # loss beyond all others, at which a bound does not fall any more
ROUNDING = 1e-12  # of levels u and F, which are sums of masses


class Tuner:
    """The envelope bound for one direction of the base's dominating pair."""

    def __init__(self, base: LossPmf, runs: RunLaw) -> None:
        self.base = base
        self.runs = runs

    @cached_property
    def vertices(self) -> tuple[Floats, Floats, Floats]:
        """Vertices (u, F) of the ROC curve, u from 0 to 1, and the slope after each."""
        base = self.base
        p, losses = base.masses[::-1], base.losses[::-1]
        with np.errstate(over="ignore", divide="ignore"):
            q = np.exp(np.log(p) - losses)
        roc = base.infinite + np.concatenate([[0.0], np.cumsum(p)])
        level = np.concatenate([[0.0], np.cumsum(q)])
        inside = int(np.searchsorted(level, 1.0))
        roc, level = np.minimum(roc[: inside + 1], 1.0), np.minimum(level[: inside + 1], 1.0)
        # The likelihood ratio of the atom right after each vertex; 0 after the last one.
        slope = np.append(np.exp(np.minimum(losses[: level.size - 1], 700.0)), 0.0)
        # Q-mass that the pair gives up (at loss -∞): F reaches 1 no later than u = 1.
        return np.append(level, 1.0), np.append(roc, 1.0), np.append(slope, 0.0)

    @cached_property
    def levels(self) -> tuple[Floats, Floats]:
        """Vertices (u, F) of a polygon above the ROC curve, as many as φ' needs."""
        return self.polygon(self._resolution)

    def polygon(self, resolution: float, least: float = 1e-30) -> tuple[Floats, Floats]:
        """Return vertices (u, F) of a polygon above the ROC curve."""
        level, roc = _thin(self.vertices, self.runs, resolution, least)
        return _charged(*_refine(self.runs, level, roc, resolution, least))

    @cached_property
    def all_levels(self) -> tuple[Floats, Floats]:
        """Vertices (u, F) of the whole ROC curve, none dropped: small F is precise, too."""
        level, roc, _ = self.vertices
        return _charged(*_refine(self.runs, level, roc, self._resolution))

    @property
    def _resolution(self) -> float:
        return min(max(math.sqrt(8e-5 * self.base.deviation), 1e-3), 2e-2)

    @cached_property
    def _hull(self) -> tuple[Floats, Floats, Floats]:
        """Vertices (a, b) of the upper hull of the lines `a - b z`, and where they change."""
        # On an edge F is linear: φ'(F) lies below its chord, φ'(u) above its tangent, so x φ'(F) - z φ'(u)
        # is at most the larger of two lines in z, those at the ends of the edge.
        level, roc = self.levels
        ends = self.runs.pgf_derivative(roc)
        slopes = np.column_stack([ends[:-1], ends[1:]]).ravel()
        offsets = np.column_stack(
            tangents(self.runs.pgf_derivative, self.runs.pgf_second_derivative, level)
        ).ravel()
        kept = _upper_hull(slopes, offsets)
        self._line_levels = np.column_stack([level[:-1], level[1:]]).ravel()[kept]
        a, b = slopes[kept], offsets[kept]
        # Line i+1 beats line i where z < (a[i+1]-a[i])/(b[i+1]-b[i]).
        with np.errstate(over="ignore"):
            change = np.diff(a) / np.diff(b)
        return a, b, change

    @cached_property
    def _slack(self) -> float:
        """How far below ε the loss of an outcome that pays can be."""
        a, b, _ = self._hull
        with np.errstate(divide="ignore"):
            return float(np.max(np.log(a) - np.log(b))) if (b > 0.0).all() else math.inf

    def best_level(self, z: Floats) -> Floats:
        """Return the level u at which the support is reached, for each z = e^(ε - loss)."""
        change = self._hull[2]
        return self._line_levels[np.searchsorted(-change, -z, side="left")]

    def support(self, z: Floats) -> Floats:
        """Return max over lines of a - b z, at least 0."""
        a, b, change = self._hull
        index = np.searchsorted(-change, -z, side="left")
        return np.maximum(a[index] - b[index] * z, 0.0)

    def delta(self, epsilon: float) -> float:
        """Return the bound on δ(ε) of the tuner in this direction, for any real ε."""
        base, runs = self.base, self.runs
        first = int(np.searchsorted(base.losses, epsilon - self._slack - base.step))
        z = np.exp(np.minimum(epsilon - base.losses[first:], 700.0))
        value = inner(base.masses[first:], self.support(z))
        value += float(runs.pgf_derivative(1.0)) * base.infinite
        value += -math.expm1(min(epsilon, 0.0)) * runs.zero_probability
        return min(value, 1.0)

    def epsilon(self, delta: float, tolerance: float = 1e-6) -> float:
        """Return an ε >= 0 at which the bound is at most delta, within `tolerance`, or inf."""
        return invert(self.delta, delta, tolerance)

    def profile(self, size: int) -> Table:
        """Return the bound on δ(ε) at about `size` lattice points, ε >= 0."""
        base = self.base
        factor = max(1, math.ceil(base.masses.size / size))
        coarse = Tuner(base.coarsen(factor), self.runs) if factor > 1 else self
        pmf = coarse.base
        step = pmf.step
        # What the mass at infinity costs stays however large ε is, and what it lets others pay
        # where φ'(0) is 0: at level 0, for nothing under Q.
        lost = min(float(self.runs.pgf_derivative(1.0)) * pmf.infinite, 1.0)
        least = self.delta(float(base.losses[-1]) + _FAR)
        top = max(self.epsilon(1e-16 + least * (1.0 + 1e-9)), step)
        count = lattice_cells(top, step) + 1
        # S(ε - ℓ) depends on the difference only: one table, one convolution of positive numbers.
        last = pmf.lowest + pmf.masses.size - 1
        offsets = np.arange(-last, count - pmf.lowest) * step
        support = coarse.support(np.exp(np.clip(offsets, -700.0, 700.0)))
        values = np.convolve(support, pmf.masses, mode="valid")
        values += lost
        return Table(step, np.minimum.accumulate(np.clip(values, 0.0, 1.0)))


class Threshold:
    """The bound on "run until a known threshold is passed", for one direction of the base's pair."""

    # On an edge of the polygon above F chords (under P) and tangents (under Q) bound all four densities: then
    # δ is convex along the edge and largest at one of its ends (README, 5).

    def __init__(self, base: LossPmf, stop: float) -> None:
        self.base = base
        self.stop = stop
        level, roc = Tuner(base, Geometric(1.0 / stop)).all_levels
        go_on = 1.0 - stop

        def passing(u: Floats) -> Floats:
            return np.asarray(1.0 / (1.0 - go_on * u))

        # Chords and tangents are off by about (moved)²/4 across an edge: wide edges are split.
        moved = go_on * passing(roc[1:]) * np.maximum(np.diff(roc), np.diff(level))
        pieces = np.clip(np.ceil(moved / _MOVED), 1, _MAX_PIECES).astype(np.int64)
        if pieces.sum() <= _MAX_EDGES:
            level, roc = _split(level, pieces), _split(roc, pieces)
        self.levels = level, roc

        # Both are convex in u: tangents lie below.
        self._pass_q = np.concatenate(tangents(passing, lambda u: go_on * passing(u) ** 2, level))
        self._fail_q = np.concatenate(
            tangents(lambda u: stop * u * passing(u), lambda u: stop * passing(u) ** 2, level)
        )
        ends = np.concatenate([roc[:-1], roc[1:]])
        self._pass_p, self._fail_p = passing(ends), stop * ends * passing(ends)

    def delta(self, epsilon: float) -> float:
        """Return the bound on δ(ε) in this direction."""
        shifted = epsilon + np.log(self._pass_q / self._pass_p)
        passed = self._pass_p * self.base.delta(shifted)
        gave_up = self._fail_p - math.exp(min(epsilon, 700.0)) * self._fail_q
        return float(min(np.max(passed + np.maximum(gave_up, 0.0)), 1.0))

    def epsilon(self, delta: float) -> float:
        """Return an ε >= 0 at which the bound is at most delta, or inf."""
        return invert(self.delta, delta)

    def profile(self, size: int) -> Table:
        """Return the bound on δ(ε) at about `size` lattice points, ε >= 0."""
        factor = math.ceil(self.base.masses.size / (_FINER * size))
        if factor > 1:
            return Threshold(self.base.coarsen(factor), self.stop).profile(size)
        top = self.epsilon(1e-16)
        if not math.isfinite(top):
            top = float(self.base.losses[-1]) - 2.0 * math.log(self.stop)
        step = max(top / size, 1e-12)
        values = [self.delta(i * step) for i in range(size + 2)]
        return Table(step, np.minimum.accumulate(np.asarray(values)))


class Table:
    """A privacy profile for ε >= 0, tabulated; chords in e^ε between the points lie above it."""

    def __init__(self, step: float, values: Floats) -> None:
        self.step = step
        self.values = values
        self.size = values.size - 1

    def delta(self, epsilon: Floats) -> Floats:
        """Return the upper bound at each ε >= 0."""
        place = np.asarray(epsilon, dtype=np.float64) / self.step
        index = np.minimum(np.floor(place + 1e-9).astype(np.int64), self.size)
        after = np.minimum(index + 1, self.size)
        rest = np.clip(place - index, 0.0, 1.0) * self.step
        share = np.expm1(rest) / math.expm1(self.step)
        return np.asarray(self.values[index] + share * (self.values[after] - self.values[index]))


def tangents(value: Curve, slope: Curve, points: Floats) -> tuple[Floats, Floats]:
    """Return lines below a convex curve between neighbouring points, at their left and right ends."""
    # The tangent at the middle is best, unless it falls below half the value at the left end.
    left, right, middle = points[:-1], points[1:], 0.5 * (points[1:] + points[:-1])
    low = value(middle) - slope(middle) * (middle - left) < 0.5 * value(left)
    at = np.where(low, left, middle)
    height, rise = value(at), slope(at)
    return height - rise * (at - left), height + rise * (right - at)


def profile_shift(backward: LossPmf, runs: NegativeBinomial) -> float:
    """Return `min over ε₁ of (η+1) log(e^ε₁ + ((1-γ)/γ) δ_QP(ε₁))`."""
    # Koskela, Redberg, Wang, arXiv:2402.06701: δ_A(ε) <= E[K] δ_PQ(ε - shift).
    top = max(backward.epsilon(1e-15), backward.step)
    if not math.isfinite(top):
        top = float(backward.losses[-1])
    points = np.linspace(0.0, top, 4001)
    gamma = runs.gamma
    terms = np.logaddexp(
        points, math.log(max((1.0 - gamma) / gamma, 1e-300)) + _log_floor(backward.delta(points))
    )
    return (runs.shape_parameter + 1.0) * float(terms.min())


def invert(function: Callable[[float], float], delta: float, tolerance: float = 1e-6) -> float:
    """Return x >= 0 with `function(x) <= delta`, for a falling function, on the safe side."""
    if function(0.0) <= delta:
        return 0.0
    high = 1.0
    while (value := function(high)) > delta:
        high *= 2.0
        if high > 1e9:
            return math.inf
    low = high / 2.0 if high > 1.0 else 0.0
    log_low, log_high = math.log(function(low) / delta), _log_ratio(value, delta)
    turn = 0
    while high - low > tolerance * max(high, 1e-3):
        middle = 0.5 * (low + high)
        if turn % 3 < 2 and math.isfinite(log_high):
            share = log_low / (log_low - log_high)
            middle = low + min(max(share, 0.02), 0.98) * (high - low)
        moved = _log_ratio(function(middle), delta)
        if moved > 0.0:
            low, log_low = middle, moved
        else:
            high, log_high = middle, moved
        turn += 1
    return high


def _log_ratio(value: float, delta: float) -> float:
    return math.log(value / delta) if value > 0.0 else -math.inf


def _upper_hull(slopes: Floats, offsets: Floats) -> NDArray[np.int64]:
    """Return the lines `a - b z` that are largest somewhere on z > 0, slope ascending."""
    order = np.lexsort((-offsets, slopes))  # for equal slopes the offset falls
    # A line of no smaller slope and no larger offset is above.
    least = np.minimum.accumulate(offsets[order][::-1])[::-1]
    order = order[np.append(offsets[order][:-1] < least[1:], True)]
    # Most go here: what is nowhere above both of its neighbours, of two neighbours one at a time.
    for turn in range(_SWEEPS):
        rise, run = np.diff(slopes[order]), np.diff(offsets[order])
        below = run[:-1] * rise[1:] >= run[1:] * rise[:-1]
        below[turn % 2 :: 2] = False
        order = np.delete(order, np.flatnonzero(below) + 1)
    kept: list[tuple[float, float, int]] = []
    lines = zip(slopes[order].tolist(), offsets[order].tolist(), order.tolist(), strict=True)
    for a, b, index in lines:
        while kept and b <= kept[-1][1]:  # larger slope, no larger offset: the old line is below
            kept.pop()
        if kept and a <= kept[-1][0]:
            continue
        while len(kept) >= 2:
            (a1, b1, _), (a0, b0, _) = kept[-1], kept[-2]
            if (b1 - b0) * (a - a1) < (b - b1) * (a1 - a0):
                break
            kept.pop()
        kept.append((a, b, index))
    return np.asarray([index for _, _, index in kept], dtype=np.int64)


def _charged(level: Floats, roc: Floats) -> tuple[Floats, Floats]:
    """Move (u, F) apart by the rounding of their sums: u down, F up, as the bound is safe."""
    return (
        np.append(np.maximum(level - ROUNDING, 0.0), 1.0),
        np.append(np.minimum(roc + ROUNDING, 1.0), 1.0),
    )


def _thin(
    vertices: tuple[Floats, Floats, Floats], runs: RunLaw, resolution: float, least: float
) -> tuple[Floats, Floats]:
    """Return a polygon above the ROC curve with a vertex where log φ' moves by `resolution`."""
    # The two tangents at the neighbours of what is dropped, prolonged to where they meet, stay above F.
    level, roc, slope = vertices
    height = _height(runs, level, roc, least)
    kept = np.flatnonzero(np.diff(np.floor(height / resolution), prepend=-np.inf) > 0.0)
    if kept[-1] != level.size - 1:
        kept = np.append(kept, level.size - 1)
    skipped = np.diff(kept) > 1
    start, end = kept[:-1][skipped], kept[1:][skipped]
    rise, run = roc[end] - roc[start], level[end] - level[start]
    steep, flat = slope[start], slope[end - 1]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        meeting = (rise - flat * run) / (steep - flat)
        shift = np.where(np.isfinite(meeting), np.clip(meeting, 0.0, run), 0.0)
        lift = np.where(steep > flat, np.clip(steep * shift, 0.0, rise), 0.0)
    # Where rounding hides the tangents, the corner of the cell (u at its left, F at its right) is
    # above the curve in any case.
    hidden = ~(steep > flat) | ~np.isfinite(steep) | ~np.isfinite(meeting)
    lift = np.where(hidden, rise, lift)
    shift = np.where(hidden, 0.0, shift)
    place = np.searchsorted(kept, start, side="right")
    level = np.insert(level[kept], place, level[start] + shift)
    return level, np.insert(roc[kept], place, roc[start] + lift)


def _refine(
    runs: RunLaw, level: Floats, roc: Floats, resolution: float, least: float = 1e-30
) -> tuple[Floats, Floats]:
    """Split edges across which log φ' moves by more; F is linear on an edge: this is exact."""
    for _ in range(3):
        pieces = np.ceil(np.diff(_height(runs, level, roc, least)) / (2.0 * resolution))
        pieces = np.clip(pieces, 1, _MAX_PIECES).astype(np.int64)
        if (pieces == 1).all() or pieces.sum() > _MAX_EDGES:
            break
        level, roc = _split(level, pieces), _split(roc, pieces)
    return level, roc


def _height(runs: RunLaw, level: Floats, roc: Floats, least: float) -> Floats:
    heights = [_log_floor(runs.pgf_derivative(ends), least) for ends in (roc, level)]
    return heights[0] + heights[1]


def _log_floor(values: Floats, least: float = 1e-30) -> Floats:
    return np.log(np.maximum(values, least))


def _split(values: Floats, pieces: NDArray[np.int64]) -> Floats:
    """Return the break points with each cell cut into equal pieces."""
    start = np.repeat(values[:-1], pieces)
    width = np.repeat(np.diff(values) / pieces, pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(start + width * (np.arange(start.size) - first), values[-1])
