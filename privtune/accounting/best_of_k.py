"""Bounds on the privacy profile of a private selection, the best of K runs, over any law of K.

`Tuner` carries the envelope bound of `accounting/README.md` for one direction of the base pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.pmf import LossPmf, exp_capped, inner, lattice_cells, scale_of
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
    """The envelope bound (README, 5) on δ of a best of K, in one direction: record removed or added.

    Args:
        base: The pair of one run.
        runs: The law of the number of runs; φ is its generating function.
    """

    def __init__(self, base: LossPmf, runs: RunLaw) -> None:
        self.base = base
        self.runs = runs

    @cached_property
    def vertices(self) -> tuple[Floats, Floats, Floats]:
        """The vertices (u, F) of one run's ROC curve, u from 0 to 1, and the slope after each."""
        base = self.base
        p = base.masses[::-1]
        losses = base.losses[::-1]
        with np.errstate(over="ignore", divide="ignore"):
            q = np.exp(np.log(p) - losses)
        roc = base.infinite + np.concatenate([[0.0], np.cumsum(p)])
        level = np.concatenate([[0.0], np.cumsum(q)])
        inside = int(np.searchsorted(level, 1.0)) + 1
        roc = np.minimum(roc[:inside], 1.0)
        level = np.minimum(level[:inside], 1.0)
        # The likelihood ratio of the atom right after each vertex; 0 after the last one.
        ratios = exp_capped(losses[: level.size - 1])
        # Q-mass that the pair gives up (at loss -∞): F reaches 1 no later than u = 1.
        return (
            np.append(level, 1.0),
            np.append(roc, 1.0),
            np.append(ratios, [0.0, 0.0]),
        )

    @cached_property
    def levels(self) -> tuple[Floats, Floats]:
        """The vertices (u, F) of a polygon above one run's ROC curve, as fine as the bound needs."""
        return self.polygon(self._resolution)

    def polygon(self, resolution: float, least: float = 1e-30) -> tuple[Floats, Floats]:
        """Return the vertices (u, F) of a polygon above one run's ROC curve, with few enough vertices.

        Args:
            resolution: By how much log φ' may move along an edge, about.
            least: What φ' is taken for where it is less.
        """
        level, roc = _thin(self.vertices, self.runs, resolution, least)
        level, roc = _refine(
            self.runs,
            level,
            roc,
            resolution,
            least,
        )
        return _moved_apart(level, roc)

    @cached_property
    def all_levels(self) -> tuple[Floats, Floats]:
        """The vertices (u, F) of one run's ROC curve, with wide edges split and none dropped."""
        level, roc, _ = self.vertices
        level, roc = _refine(self.runs, level, roc, self._resolution)
        return _moved_apart(level, roc)

    @property
    def _resolution(self) -> float:
        """The most that log φ' may change along an edge of the polygon: less if a run has small losses."""
        resolution = math.sqrt(8e-5 * self.base.deviation)
        return min(max(resolution, 1e-3), 2e-2)

    def _edge_lines(self) -> tuple[Floats, Floats, Floats]:
        """Return a, b and u of lines `a - b z` above what an outcome adds to δ, with z = e^(ε - loss)."""
        # On an edge F is linear: φ'(F) lies below its chord, φ'(u) above its tangent, so x φ'(F) - z φ'(u)
        # is at most the larger of two lines in z, those at the ends of the edge.
        level, roc = self.levels
        slope = self.runs.pgf_derivative
        chord_ends = slope(roc)
        tangent_ends = tangents(slope, self.runs.pgf_second_derivative, level)
        return (
            np.column_stack([chord_ends[:-1], chord_ends[1:]]).ravel(),
            np.column_stack(tangent_ends).ravel(),
            np.column_stack([level[:-1], level[1:]]).ravel(),
        )

    @cached_property
    def _hull(self) -> tuple[Floats, Floats, Floats, Floats]:
        """The lines `a - b z` that are largest at some z: a, b, the z where they change, and levels u."""
        slopes, offsets, levels = self._edge_lines()
        lines = _upper_hull(slopes, offsets)
        a = slopes[lines]
        b = offsets[lines]
        # Line i+1 beats line i where z < (a[i+1]-a[i])/(b[i+1]-b[i]).
        with np.errstate(over="ignore"):
            change = np.diff(a) / np.diff(b)
        return a, b, change, levels[lines]

    @cached_property
    def _slack(self) -> float:
        """The largest log(a/b) of the lines `a - b z`: losses further below ε add nothing to δ(ε)."""
        a, b, _, _ = self._hull
        if not (b > 0.0).all():
            return math.inf
        with np.errstate(divide="ignore"):
            slack = np.log(a) - np.log(b)
        return float(np.max(slack))

    def _best_line(self, z: Floats) -> NDArray[np.int64]:
        """Return the index of the line `a - b z` that is largest at each z."""
        _, _, change, _ = self._hull
        return np.searchsorted(-change, -z, side="left")

    def best_level(self, z: Floats) -> Floats:
        """Return the level u at which an outcome adds most to δ, for each z = e^(ε - loss)."""
        _, _, _, levels = self._hull
        return levels[self._best_line(z)]

    def support(self, z: Floats) -> Floats:
        """Return the most that an outcome adds to δ, per unit of its P-mass, for each z = e^(ε - loss)."""
        a, b, _, _ = self._hull
        line = self._best_line(z)
        height = a[line] - b[line] * z
        return np.maximum(height, 0.0)

    def delta(self, epsilon: float) -> float:
        """Return the envelope bound on δ(ε) of the selection in this direction, for any real ε."""
        base = self.base
        runs = self.runs
        lowest = epsilon - self._slack - base.step
        first = int(np.searchsorted(base.losses, lowest))
        z = exp_capped(epsilon - base.losses[first:])
        masses = base.masses[first:]
        value = inner(masses, self.support(z))
        value += float(runs.pgf_derivative(1.0)) * base.infinite
        value += -math.expm1(min(epsilon, 0.0)) * runs.zero_probability
        return min(value, 1.0)

    def epsilon(self, delta: float, tolerance: float = 1e-6) -> float:
        """Return an ε >= 0 at which the bound is at most `delta`, or infinity."""
        return invert(self.delta, delta, tolerance)

    def profile(self, size: int) -> Table:
        """Return a table of the envelope bound on δ(ε) at about `size` points, ε >= 0.

        Args:
            size: Lattice points, about; the base is coarsened to as many atoms.
        """
        base = self.base
        factor = max(1, math.ceil(base.masses.size / size))
        coarse = self
        if factor > 1:
            coarse = Tuner(base.coarsen(factor), self.runs)
        pmf = coarse.base
        step = pmf.step
        # What the mass at infinity costs stays however large ε is, and what it lets others pay
        # where φ'(0) is 0: at level 0, for nothing under Q.
        slope = float(self.runs.pgf_derivative(1.0))
        at_infinity = min(slope * pmf.infinite, 1.0)
        far = float(base.losses[-1]) + _FAR
        least = self.delta(far)
        top = self.epsilon(1e-16 + least * (1.0 + 1e-9))
        top = max(top, step)
        count = lattice_cells(top, step) + 1
        # S(ε - ℓ) depends on the difference only: one table, one convolution of positive numbers.
        last = pmf.lowest + pmf.masses.size - 1
        differences = np.arange(-last, count - pmf.lowest) * step
        z = np.exp(np.clip(differences, -700.0, 700.0))
        support = coarse.support(z)
        values = np.convolve(support, pmf.masses, mode="valid")
        values += at_infinity
        values = np.clip(values, 0.0, 1.0)
        return Table(step, np.minimum.accumulate(values))


class Threshold:
    """The bound on δ of runs until a known score is reached, in one direction: record removed or added.

    Args:
        base: The pair of one run.
        stop: γ, the probability to give up after a run that did not pass.

    References:
        Liu and Talwar, arXiv:1811.07971, Algorithm 1; the bound is that of the README, 5.
    """

    # On an edge of the polygon above F chords (under P) and tangents (under Q) bound all four densities: then
    # δ is convex along the edge and largest at one of its ends (README, 5).

    def __init__(self, base: LossPmf, stop: float) -> None:
        self.base = base
        self.stop = stop
        self.levels = self._split_levels()
        level, roc = self.levels

        # Both are convex in u: tangents lie below.
        pass_q = tangents(self._passing, self._passing_slope, level)
        fail_q = tangents(self._failing, self._failing_slope, level)
        self._pass_q = np.concatenate(pass_q)
        self._fail_q = np.concatenate(fail_q)
        ends = np.concatenate([roc[:-1], roc[1:]])
        self._pass_p = self._passing(ends)
        self._fail_p = stop * ends * self._pass_p

    def _split_levels(self) -> tuple[Floats, Floats]:
        """Return the vertices (u, F) of the polygon above the ROC curve, with wide edges split."""
        geometric = Geometric(1.0 / self.stop)
        level, roc = Tuner(self.base, geometric).all_levels
        # Chords and tangents are off by about (moved)²/4 across an edge.
        widths = np.maximum(np.diff(roc), np.diff(level))
        go_on = 1.0 - self.stop
        moved = go_on * self._passing(roc[1:]) * widths
        pieces = np.ceil(moved / _MOVED)
        pieces = np.clip(pieces, 1, _MAX_PIECES).astype(np.int64)
        if pieces.sum() > _MAX_EDGES:
            return level, roc
        return _split(level, pieces), _split(roc, pieces)

    def _passing(self, u: Floats) -> Floats:
        """Return 1/(1 - (1-γ) u), the factor on the density of a run that passes; u is the chance to fail."""
        go_on = 1.0 - self.stop
        return np.asarray(1.0 / (1.0 - go_on * u))

    def _passing_slope(self, u: Floats) -> Floats:
        """Return the derivative in u of 1/(1 - (1-γ) u), the factor on the density of a run that passes."""
        go_on = 1.0 - self.stop
        slope = go_on * self._passing(u) ** 2
        return np.asarray(slope)

    def _failing(self, u: Floats) -> Floats:
        """Return γ u ψ(u), the probability to give up where a run fails with probability u."""
        return self.stop * u * self._passing(u)

    def _failing_slope(self, u: Floats) -> Floats:
        """Return the derivative in u of γ u ψ(u), the probability to give up."""
        slope = self.stop * self._passing(u) ** 2
        return np.asarray(slope)

    def delta(self, epsilon: float) -> float:
        """Return the bound on δ(ε) of runs until the threshold is reached, in this direction."""
        ratio = self._pass_q / self._pass_p
        shifted = epsilon + np.log(ratio)
        passed = self._pass_p * self.base.delta(shifted)
        gave_up = self._fail_p - scale_of(epsilon) * self._fail_q
        total = passed + np.maximum(gave_up, 0.0)
        return float(min(np.max(total), 1.0))

    def epsilon(self, delta: float) -> float:
        """Return an ε >= 0 at which the threshold's bound is at most `delta`, or infinity."""
        return invert(self.delta, delta)

    def profile(self, size: int) -> Table:
        """Return a table of the threshold's bound on δ(ε) at about `size` points, ε >= 0."""
        atoms = self.base.masses.size
        factor = math.ceil(atoms / (_FINER * size))
        if factor > 1:
            coarse = Threshold(self.base.coarsen(factor), self.stop)
            return coarse.profile(size)
        top = self.epsilon(1e-16)
        if not math.isfinite(top):
            largest_loss = float(self.base.losses[-1])
            top = largest_loss - 2.0 * math.log(self.stop)
        step = max(top / size, 1e-12)
        deltas = [self.delta(i * step) for i in range(size + 2)]
        values = np.asarray(deltas)
        return Table(step, np.minimum.accumulate(values))


class Table:
    """A table of δ at equally spaced ε >= 0; chords in e^ε between the points bound δ from above."""

    def __init__(self, step: float, values: Floats) -> None:
        self.step = step
        self.values = values
        self.size = values.size - 1

    def place_of(self, delta: float) -> int:
        """Return the index of the first point of the table whose δ is at most `delta`."""
        return int(np.searchsorted(-self.values, -delta))

    def delta(self, epsilon: Floats) -> Floats:
        """Return the upper bound on δ at each ε >= 0, by the chord between neighbouring points."""
        place = np.asarray(epsilon, dtype=np.float64) / self.step
        # 1e-9: a lattice point that rounding puts below itself is read as itself.
        index = np.floor(place + 1e-9).astype(np.int64)
        index = np.minimum(index, self.size)
        after = np.minimum(index + 1, self.size)
        rest = np.clip(place - index, 0.0, 1.0) * self.step
        share = np.expm1(rest) / math.expm1(self.step)
        rise = self.values[after] - self.values[index]
        return np.asarray(self.values[index] + share * rise)


def tangents(
    value: Curve,
    slope: Curve,
    points: Floats,
) -> tuple[Floats, Floats]:
    """Return the heights of tangents below a convex curve, at the start and end of each interval.

    Args:
        value: The curve.
        slope: Its derivative.
        points: Where the lines begin and end, ascending.
    """
    # The tangent at the middle is best, unless it falls below half the value at the beginning.
    start = points[:-1]
    end = points[1:]
    middle = 0.5 * (end + start)
    fall = slope(middle) * (middle - start)
    from_middle = value(middle) - fall
    too_low = from_middle < 0.5 * value(start)
    at = np.where(too_low, start, middle)
    height = value(at)
    rise = slope(at)
    at_start = height - rise * (at - start)
    at_end = height + rise * (end - at)
    return at_start, at_end


def profile_shift(backward: LossPmf, runs: NegativeBinomial) -> float:
    """Return by how much ε is shifted in the bound `δ_A(ε) <= E[K] δ_PQ(ε - shift)` on a best of K.

    References:
        Koskela, Redberg, Wang, arXiv:2402.06701: δ_A(ε) <= E[K] δ_PQ(ε - shift).
    """
    top = max(backward.epsilon(1e-15), backward.step)
    if not math.isfinite(top):
        top = float(backward.losses[-1])
    points = np.linspace(0.0, top, 4001)
    odds = (1.0 - runs.gamma) / runs.gamma
    log_odds = math.log(max(odds, 1e-300))
    log_delta = _log_floor(backward.delta(points))
    terms = np.logaddexp(points, log_odds + log_delta)
    least = float(terms.min())
    return (runs.shape_parameter + 1.0) * least


def invert(
    function: Callable[[float], float],
    delta: float,
    tolerance: float = 1e-6,
) -> float:
    """Return x >= 0 near the least at which a falling function is at most `delta`, or infinity.

    Args:
        function: Falls in x.
        delta: The target, above 0.
        tolerance: Relative accuracy of x.

    Returns:
        An x at which the function was evaluated and found at most the target; infinity beyond 10^9.
    """
    if function(0.0) <= delta:
        return 0.0
    high = 1.0
    value = function(high)
    while value > delta:
        high *= 2.0
        if high > 1e9:
            return math.inf
        value = function(high)
    low = high / 2.0 if high > 1.0 else 0.0
    log_low = math.log(function(low) / delta)
    log_high = _log_ratio(value, delta)
    turn = 0
    while high - low > tolerance * max(high, 1e-3):
        middle = 0.5 * (low + high)
        # Two secants of log δ, then one bisection, which bounds the number of turns.
        if turn % 3 < 2 and math.isfinite(log_high):
            share = log_low / (log_low - log_high)
            share = min(max(share, 0.02), 0.98)
            middle = low + share * (high - low)
        log_middle = _log_ratio(function(middle), delta)
        if log_middle > 0.0:
            low = middle
            log_low = log_middle
        else:
            high = middle
            log_high = log_middle
        turn += 1
    return high


def _log_ratio(value: float, delta: float) -> float:
    """Return log(value/δ); minus infinity for a value of 0 or less."""
    if value <= 0.0:
        return -math.inf
    return math.log(value / delta)


def _upper_hull(slopes: Floats, offsets: Floats) -> NDArray[np.int64]:
    """Return the indices of the lines `a - b z` that are largest at some z > 0, by ascending a.

    Args:
        slopes: a of each line.
        offsets: b of each line.
    """
    order = np.lexsort((-offsets, slopes))  # for equal slopes the offset falls
    # A line of no smaller slope and no larger offset is above.
    by_slope = offsets[order]
    least = np.minimum.accumulate(by_slope[::-1])[::-1]
    is_candidate = by_slope[:-1] < least[1:]
    order = order[np.append(is_candidate, True)]
    # Most go here: what is nowhere above both of its neighbours, of two neighbours one at a time.
    for turn in range(_SWEEPS):
        rise = np.diff(slopes[order])
        run = np.diff(offsets[order])
        below = run[:-1] * rise[1:] >= run[1:] * rise[:-1]
        below[turn % 2 :: 2] = False
        order = np.delete(order, np.flatnonzero(below) + 1)
    return _hull_of_sorted(slopes, offsets, order)


def _hull_of_sorted(
    slopes: Floats,
    offsets: Floats,
    order: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the indices of the upper hull of lines in ascending order of a, by one scan.

    Where three neighbours turn the right way the scan keeps the third, so such stretches are kept at once.
    """
    a = slopes[order]
    b = offsets[order]
    rise = np.diff(a)
    run = np.diff(b)
    turns = run[:-1] * rise[1:] < run[1:] * rise[:-1]
    follows = (rise[1:] > 0.0) & (run[1:] > 0.0) & turns  # line i + 2 the lines i and i + 1
    breaks = np.flatnonzero(~follows) + 2
    hull: list[int] = []
    a_list = a.tolist()
    b_list = b.tolist()
    line = 0
    while line < order.size:
        if hull[-2:] == [line - 2, line - 1]:
            after = int(np.searchsorted(breaks, line))
            end = int(breaks[after]) if after < breaks.size else order.size
            hull.extend(range(line, end))
            line = end
            if line == order.size:
                break
        _scan_line(hull, line, a_list, b_list)
        line += 1
    return order[hull]


def _scan_line(hull: list[int], line: int, a: list[float], b: list[float]) -> None:
    """Add a line to the hull of those before it, and take away what is then below.

    Args:
        hull: Numbers of the lines of the hull so far.
        line: Number of the new line.
        a: Slopes of all lines, ascending.
        b: Their offsets.
    """
    while hull and b[line] <= b[hull[-1]]:  # larger slope, no larger offset: the old line is below
        hull.pop()
    if hull and a[line] <= a[hull[-1]]:
        return
    while len(hull) >= 2:
        last = hull[-1]
        before = hull[-2]
        of_last = (b[last] - b[before]) * (a[line] - a[last])
        if of_last < (b[line] - b[last]) * (a[last] - a[before]):
            break
        hull.pop()
    hull.append(line)


def _moved_apart(level: Floats, roc: Floats) -> tuple[Floats, Floats]:
    """Lower each u and raise each F by its rounding error, so that the polygon stays above the ROC curve."""
    lower = np.maximum(level - ROUNDING, 0.0)
    upper = np.minimum(roc + ROUNDING, 1.0)
    return np.append(lower, 1.0), np.append(upper, 1.0)


def _thin(
    vertices: tuple[Floats, Floats, Floats],
    runs: RunLaw,
    resolution: float,
    least: float,
) -> tuple[Floats, Floats]:
    """Return a polygon above the ROC curve with fewer vertices: one where log φ' has moved by `resolution`.

    Args:
        vertices: (u, F) and the slope after each, of the whole curve.
        runs: The law of the number of runs.
        resolution: By how much log φ' may move along an edge.
        least: What φ' is taken for where it is less.
    """
    # The two tangents at the neighbours of what is dropped, prolonged to where they meet, stay above F.
    level, roc, slope = vertices
    height = _height(runs, level, roc, least)
    stair = np.floor(height / resolution)
    rises = np.diff(stair, prepend=-np.inf) > 0.0
    vertex = np.flatnonzero(rises)
    if vertex[-1] != level.size - 1:
        vertex = np.append(vertex, level.size - 1)
    skips = np.diff(vertex) > 1
    start = vertex[:-1][skips]
    end = vertex[1:][skips]
    rise = roc[end] - roc[start]
    run = level[end] - level[start]
    steep = slope[start]
    flat = slope[end - 1]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        meeting = (rise - flat * run) / (steep - flat)
        meets = np.isfinite(meeting)
        shift = np.where(meets, np.clip(meeting, 0.0, run), 0.0)
        bends = steep > flat
        lift = np.where(bends, np.clip(steep * shift, 0.0, rise), 0.0)
    # Where rounding hides the tangents, the corner of the cell (u at its left, F at its right) is
    # above the curve in any case.
    visible = bends & np.isfinite(steep) & meets
    hidden = ~visible
    lift = np.where(hidden, rise, lift)
    shift = np.where(hidden, 0.0, shift)
    place = np.searchsorted(vertex, start, side="right")
    return (
        np.insert(level[vertex], place, level[start] + shift),
        np.insert(roc[vertex], place, roc[start] + lift),
    )


def _refine(
    runs: RunLaw,
    level: Floats,
    roc: Floats,
    resolution: float,
    least: float = 1e-30,
) -> tuple[Floats, Floats]:
    """Split long edges of a polygon: those along which log φ' changes by more than about two resolutions.

    Args:
        runs: The law of the number of runs.
        level: u of the vertices.
        roc: F of the vertices.
        resolution: By how much log φ' may move along an edge.
        least: What φ' is taken for where it is less.
    """
    for _ in range(3):
        moved = np.diff(_height(runs, level, roc, least))
        pieces = np.ceil(moved / (2.0 * resolution))
        pieces = np.clip(pieces, 1, _MAX_PIECES).astype(np.int64)
        if (pieces == 1).all() or pieces.sum() > _MAX_EDGES:
            break
        level = _split(level, pieces)
        roc = _split(roc, pieces)
    return level, roc


def _height(
    runs: RunLaw,
    level: Floats,
    roc: Floats,
    least: float,
) -> Floats:
    """Return log φ'(F) + log φ'(u) at each vertex (u, F); φ is the generating function of K."""
    above = _log_floor(runs.pgf_derivative(roc), least)
    below = _log_floor(runs.pgf_derivative(level), least)
    return above + below


def _log_floor(values: Floats, least: float = 1e-30) -> Floats:
    """Return the logarithm of each value, or of `least` where a value is smaller."""
    return np.log(np.maximum(values, least))


def _split(values: Floats, pieces: NDArray[np.int64]) -> Floats:
    """Cut interval i between break points into `pieces[i]` equal pieces, and return all break points."""
    start = np.repeat(values[:-1], pieces)
    width_of_piece = np.diff(values) / pieces
    width = np.repeat(width_of_piece, pieces)
    first_of_cell = np.cumsum(pieces) - pieces
    first = np.repeat(first_of_cell, pieces)
    number = np.arange(start.size) - first
    points = start + width * number
    return np.append(points, values[-1])
