"""Best of K: bounds on the privacy profile of a private selection over any law of K.

`Tuner` carries the envelope bound of `accounting/README.md` for one direction of the base pair.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.pmf import LossPmf
from privtune.accounting.runs import RunLaw

__all__ = ["Tuner"]

Floats = NDArray[np.float64]
_MAX_PIECES = 4096
_MAX_EDGES = 100_000


class Tuner:
    """The envelope bound for one direction of the base's dominating pair.

    Args:
        base: One direction of the pair of a single run.
        runs: The law of the number of runs.
    """

    def __init__(self, base: LossPmf, runs: RunLaw) -> None:
        self.base = base
        self.runs = runs

    @cached_property
    def _levels(self) -> tuple[Floats, Floats]:
        """Vertices (u, F) of a polygon above the ROC curve, from u = 0 to u = 1."""
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
        roc, level, slope = np.append(roc, 1.0), np.append(level, 1.0), np.append(slope, 0.0)
        resolution = min(max(math.sqrt(8e-5 * base.deviation), 1e-3), 2e-2)
        return _resolve(self.runs, level, roc, slope, resolution)

    @cached_property
    def _hull(self) -> tuple[Floats, Floats, Floats]:
        """Vertices (a, b) of the upper hull of the lines `a - b z`, and where they change.

        On an edge of the polygon F is linear in u. There the convex function φ'(F) lies below its
        chord and the convex function φ'(u) above its tangent, so `x φ'(F) - z φ'(u)` is at most
        the larger of two lines in z: the ones at the ends of the edge.
        """
        level, roc = self._levels
        runs = self.runs
        middle, half = 0.5 * (level[1:] + level[:-1]), 0.5 * np.diff(level)
        at_middle, bend = runs.pgf_derivative(middle), runs.pgf_second_derivative(middle) * half
        floor = runs.pgf_derivative(level[:-1])
        ends = runs.pgf_derivative(roc)
        slopes = np.column_stack([ends[:-1], ends[1:]]).ravel()
        offsets = np.column_stack(
            [np.maximum(at_middle - bend, 0.0), np.maximum(at_middle + bend, floor)]
        ).ravel()
        return _upper_hull(slopes, offsets)

    def _support(self, z: Floats) -> Floats:
        """Return max over lines of a - b z, at least 0."""
        a, b, change = self._hull
        index = np.searchsorted(-change, -z, side="left")
        return np.maximum(a[index] - b[index] * z, 0.0)

    def delta(self, epsilon: float) -> float:
        """Return the bound on δ(ε) of the tuner in this direction, for any real ε."""
        base, runs = self.base, self.runs
        a, b, _ = self._hull
        with np.errstate(divide="ignore"):
            slack = float(np.max(np.log(a) - np.log(b))) if (b > 0.0).all() else math.inf
        first = 0
        if math.isfinite(slack):
            first = int(np.searchsorted(base.losses, epsilon - slack - base.step))
        z = np.exp(np.minimum(epsilon - base.losses[first:], 700.0))
        value = float(base.masses[first:] @ self._support(z))
        value += float(runs.pgf_derivative(1.0)) * base.infinite
        value += max(-math.expm1(epsilon), 0.0) * runs.zero_probability
        return min(value, 1.0)

    def epsilon(self, delta: float, tolerance: float = 1e-6) -> float:
        """Return an ε >= 0 at which the bound is at most delta, within `tolerance`, or inf."""
        if self.delta(0.0) <= delta:
            return 0.0
        high = 1.0
        while self.delta(high) > delta:
            high *= 2.0
            if high > 1e9:
                return math.inf
        low = high / 2.0 if high > 1.0 else 0.0
        log_low, log_high = math.log(self.delta(low) / delta), _log_ratio(self.delta(high), delta)
        turn = 0
        while high - low > tolerance * max(high, 1e-3):
            middle = 0.5 * (low + high)
            if turn % 3 < 2 and math.isfinite(log_high):
                share = log_low / (log_low - log_high)
                middle = low + min(max(share, 0.02), 0.98) * (high - low)
            value = _log_ratio(self.delta(middle), delta)
            if value > 0.0:
                low, log_low = middle, value
            else:
                high, log_high = middle, value
            turn += 1
        return high

    def profile(self, size: int) -> Table:
        """Return the bound on δ(ε) at about `size` lattice points, ε >= 0."""
        base = self.base
        factor = max(1, math.ceil(base.masses.size / size))
        coarse = Tuner(base.coarsen(factor), self.runs) if factor > 1 else self
        pmf = coarse.base
        step = pmf.step
        top = max(self.epsilon(1e-16), step)
        count = math.ceil(top / step) + 1
        # S(ε - ℓ) depends on the difference only: one table, one convolution of positive numbers.
        last = pmf.lowest + pmf.masses.size - 1
        offsets = np.arange(-last, count - pmf.lowest) * step
        support = coarse._support(np.exp(np.clip(offsets, -700.0, 700.0)))
        values = np.convolve(support, pmf.masses, mode="valid")
        values += float(self.runs.pgf_derivative(1.0)) * pmf.infinite
        return Table(step, np.minimum.accumulate(np.clip(values, 0.0, 1.0)))


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


def _log_ratio(value: float, delta: float) -> float:
    return math.log(value / delta) if value > 0.0 else -math.inf


def _upper_hull(slopes: Floats, offsets: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the lines `a - b z` that are largest somewhere on z > 0, and where they change."""
    order = np.lexsort((offsets, -slopes))[::-1]  # slope ascending; for equal ones offset falls
    kept_a: list[float] = []
    kept_b: list[float] = []
    for a, b in zip(slopes[order].tolist(), offsets[order].tolist(), strict=True):
        while kept_a and b <= kept_b[-1]:  # larger slope, no larger offset: the old line is below
            kept_a.pop()
            kept_b.pop()
        if kept_a and a <= kept_a[-1]:
            continue
        while len(kept_a) >= 2 and (kept_b[-1] - kept_b[-2]) * (a - kept_a[-1]) >= (
            b - kept_b[-1]
        ) * (kept_a[-1] - kept_a[-2]):
            kept_a.pop()
            kept_b.pop()
        kept_a.append(a)
        kept_b.append(b)
    top, bottom = np.asarray(kept_a), np.asarray(kept_b)
    # Line i+1 beats line i where z < (a[i+1]-a[i])/(b[i+1]-b[i]).
    return top, bottom, np.diff(top) / np.diff(bottom)


def _resolve(
    runs: RunLaw, level: Floats, roc: Floats, slope: Floats, resolution: float
) -> tuple[Floats, Floats]:
    """Return a polygon above the ROC curve whose edges change log φ' by about `resolution`.

    Vertices across which little changes are dropped, and the two tangents at the remaining
    neighbours are prolonged to where they meet, which keeps the polygon above the concave curve.
    Then long edges are split; F is linear on an edge, so splitting is exact.
    """
    height = _height(runs, level, roc)
    kept = np.flatnonzero(np.diff(np.floor(height / resolution), prepend=-np.inf) > 0.0)
    if kept[-1] != level.size - 1:
        kept = np.append(kept, level.size - 1)
    skipped = np.diff(kept) > 1
    start, end = kept[:-1][skipped], kept[1:][skipped]
    rise, run = roc[end] - roc[start], level[end] - level[start]
    steep, flat = slope[start], slope[end - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shift = (rise - flat * run) / (steep - flat)
        shift = np.where(np.isfinite(shift), np.clip(shift, 0.0, run), 0.0)
        lift = np.where(steep > flat, np.clip(steep * shift, 0.0, rise), 0.0)
    # Where rounding hides the tangents, the corner of the cell (u at its left, F at its right) is
    # above the curve in any case.
    hidden = ~(steep > flat) | ~np.isfinite(steep)
    lift = np.where(hidden, rise, lift)
    shift = np.where(hidden, 0.0, shift)
    place = np.searchsorted(kept, start, side="right")
    level = np.insert(level[kept], place, level[start] + shift)
    roc = np.insert(roc[kept], place, roc[start] + lift)
    for _ in range(3):
        pieces = np.ceil(np.diff(_height(runs, level, roc)) / (2.0 * resolution))
        pieces = np.clip(pieces, 1, _MAX_PIECES).astype(np.int64)
        if (pieces == 1).all() or pieces.sum() > _MAX_EDGES:
            break
        level, roc = _split(level, pieces), _split(roc, pieces)
    return level, roc


def _height(runs: RunLaw, level: Floats, roc: Floats) -> Floats:
    return _log_floor(runs.pgf_derivative(roc)) + _log_floor(runs.pgf_derivative(level))


def _log_floor(values: Floats) -> Floats:
    return np.log(np.maximum(values, 1e-30))


def _split(values: Floats, pieces: NDArray[np.int64]) -> Floats:
    """Return the break points with each cell cut into equal pieces."""
    start = np.repeat(values[:-1], pieces)
    width = np.repeat(np.diff(values) / pieces, pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(start + width * (np.arange(start.size) - first), values[-1])
