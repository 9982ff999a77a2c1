"""Explicit instances: no valid bound may fall below what they cost.

An instance is a mechanism that fits its event, with finitely many outcomes whose masses with the
record (P) and without it (Q) are known. Whatever merges or forgets outcomes only weakens it. So
releases are cut into cells, and a composition keeps a sum of rounded losses alone: its masses under
P and under Q are two convolutions of positive numbers, without transforms and without a loss that is
rounded up. `δ(ε) = Σ (P - e^ε Q)₊` is then at most that of the event.

For a selection outcomes of the base are scored in decreasing order of privacy loss, so that the
outcomes up to a level u under Q have probability F(u) under P, the worst that Neyman and Pearson
allow. The rare outcomes that pay at the ε of the question are scored where they pay most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.pmf import LossPmf, normal_masses
from privtune.accounting.runs import RunLaw
from privtune.accounting.selection import Tuner

Floats = NDArray[np.float64]
Kinds = NDArray[np.bool_]
ROUNDING = 1e-6  # of tuned masses, relative
_LARGE = 4e-10  # mass, for each run, from which a difference of φ is right to that
_SCORES = 512  # that an outcome which always happens would have
_SPREAD = 0.4  # by how much ε lies nearer to an outcome's loss
_CUTS = 128  # of what pays and of what does not, twice
_STARTS = (0.5, 0.2, 0.05)  # P-mass of what is to pay
_TURNS = 5
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_HALVINGS, _NARROW = 60, 1e-12
_SUMMED = 200  # runs of a capped law whose φ, a sum over all of them, is asked for at every cut


class Instance:
    """Attainable δ of a private selection over one direction of a base pair."""

    def __init__(
        self, base: LossPmf, runs: RunLaw, q: Floats | None = None, *, cut: bool = True
    ) -> None:
        self.runs = runs
        keep = base.masses > 0.0
        self.losses = base.losses[keep][::-1]
        self.p = base.masses[keep][::-1]
        with np.errstate(over="ignore"):
            self.q = np.exp(np.log(self.p) - self.losses) if q is None else q[keep][::-1]
        if cut:
            # What has no mass without the record pays wherever it stands; its loss is no lattice point.
            self.losses = np.where(self.q > 0.0, self.losses, np.inf)
            often = np.maximum(np.maximum(self.p, self.q) * _SCORES, 1.0)
            pieces = np.ceil(often).astype(np.int64)
            self.losses = np.repeat(self.losses, pieces)
            self.p, self.q = (np.repeat(m / pieces, pieces) for m in (self.p, self.q))
        self.infinite = base.infinite
        self.tuner = Tuner(base, runs)
        # What rounding took away or added is given to an atom at the end: a legal pair again.
        self.levels = np.cumsum(self.q) - 0.5 * self.q

    def order(self, epsilon: float, threshold: float) -> NDArray[np.int64]:
        """Return the atoms from worst to best score; losses above `threshold` are moved."""
        key = np.minimum(self.levels, 1.0)
        moved = self.losses > threshold
        z = np.exp(np.minimum(epsilon - self.losses[moved], 700.0))
        key[moved] = self.tuner.best_level(z)
        return np.argsort(key, kind="stable")

    def spread(self, epsilon: float) -> NDArray[np.int64]:
        """Return the atoms from worst to best score, those of larger loss for a larger ε."""
        z = np.exp(np.minimum(_SPREAD * (epsilon - self.losses), 700.0))
        pays = self.tuner.support(z) > 0.0
        key = np.where(pays, self.tuner.best_level(z), np.minimum(self.levels, 1.0))
        return np.argsort(key, kind="stable")

    def shuffled(self, epsilon: float, pays: Kinds) -> NDArray[np.int64]:
        """Return the best order, from worst to best score, if these atoms are to pay."""
        # What pays is ranked by rising loss, the rest by falling loss (README, 5).
        up, down = np.flatnonzero(pays)[::-1], np.flatnonzero(~pays)
        (up_ends, up_p, up_q), (down_ends, down_p, down_q) = self._pieces(up), self._pieces(down)
        # What has been paid depends on how much of either kind is below, not on its order.
        below_p = np.minimum(down_p[:, None] + up_p, 1.0)
        below_q = np.minimum(down_q[:, None] + up_q, 1.0)
        paid = self.runs.pgf(below_p) - math.exp(min(epsilon, 700.0)) * self.runs.pgf(below_q)
        value, before = np.zeros(down_p.size), []
        for gain in np.diff(paid, axis=1).T:
            best = np.maximum.accumulate(value)
            places = np.where(value >= best, np.arange(value.size), 0)
            before.append(np.maximum.accumulate(places))
            value = best + gain
        place, key = int(np.argmax(value)), np.empty(self.p.size)
        key[down] = np.arange(down.size)
        for piece in reversed(range(len(before))):
            key[up[up_ends[piece] : up_ends[piece + 1]]] = down_ends[place] - 0.5
            place = int(before[piece][place])
        return np.lexsort((self.losses, key))

    def _pieces(self, atoms: NDArray[np.int64]) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return where atoms are cut into pieces, and the masses up to each cut."""
        p = np.append(0.0, np.cumsum(self.p[atoms])) / (self.p.sum() + self.infinite)
        q = np.append(0.0, np.cumsum(self.q[atoms])) / self.q.sum()
        # Fine near the end, too: the best scores are those that φ' tells apart.
        whole = p + q
        marks = whole[-1] * np.append(
            np.linspace(0.0, 1.0, _CUTS), 1.0 - np.geomspace(1e-9, 1.0, _CUTS)
        )
        ends = np.unique(np.clip(np.searchsorted(whole, marks), 0, atoms.size))
        ends = np.unique(np.append(ends, [0, atoms.size]))
        return ends, p[ends], q[ends]

    def tuned(self, order: NDArray[np.int64], *, rough: bool = False) -> tuple[Floats, Floats]:
        """Return the masses of the tuned pair for one order of the atoms, on the safe side."""
        # Differences of φ are exact for atoms of some size. Else φ' is convex: its mean over an atom is
        # at least its value at the middle, and at most the mean of those at both ends.
        p = self.p[order] / (self.p.sum() + self.infinite)
        q = self.q[order] / self.q.sum()
        below_p = np.minimum(np.concatenate([[0.0], np.cumsum(p)]), 1.0)
        below_q = np.minimum(np.concatenate([[0.0], np.cumsum(q)]), 1.0)
        slope = self.runs.pgf_derivative(below_q)
        gain_p = p * self.runs.pgf_derivative(0.5 * (below_p[1:] + below_p[:-1]))
        gain_q = q * 0.5 * (slope[1:] + slope[:-1])
        if self.runs.cap is None or not rough:
            enough = _LARGE * (1.0 + self.runs.expected_runs)
            exact_p, exact_q = self._gains(below_p), self._gains(below_q)
            gain_p = np.where(exact_p > enough, exact_p, gain_p)
            gain_q = np.where(exact_q > enough, exact_q, gain_q)
        return gain_p * (1.0 - ROUNDING), gain_q * (1.0 + ROUNDING)

    def _gains(self, ends: Floats) -> Floats:
        """Return how much φ rises from each end to the next."""
        if self.runs.cap is None:
            return np.diff(self.runs.pgf(ends))
        # By Gauss's rule on pieces across which φ'' moves by a factor of e at most: φ itself is a sum over
        # all numbers of runs.
        points, kept = ends, np.arange(ends.size)
        for _ in range(_HALVINGS):
            bend = np.log(np.maximum(self.runs.pgf_second_derivative(points), 1e-300))
            wide = (np.diff(bend) > 1.0) & (np.diff(points) > _NARROW * points[1:])
            if not wide.any():
                break
            middle = 0.5 * (points[:-1] + points[1:])[wide]
            kept = kept + np.append(0, np.cumsum(wide))[kept]
            points = np.insert(points, np.flatnonzero(wide) + 1, middle)
        half = 0.5 * np.diff(points)
        inside = (points[:-1] + half)[:, None] + half[:, None] * _NODES
        pieces = half * (self.runs.pgf_derivative(inside) @ _WEIGHTS)
        return np.asarray(np.add.reduceat(pieces, kept[:-1]))

    def best_order(
        self, epsilon: float, count: int = 12, *, shuffle: bool = True
    ) -> NDArray[np.int64]:
        """Return the order of the atoms, from worst to best score, with the largest δ of those."""
        z = np.exp(np.minimum(epsilon - self.losses, 700.0))
        pays = self.losses[self.tuner.support(z) > 0.0]
        lowest = float(pays[-1]) if pays.size else epsilon
        thresholds = (math.inf, *np.linspace(lowest, epsilon, count))
        tried = [self._tried(self.order(epsilon, float(t)), epsilon) for t in thresholds]
        best = max(tried, key=lambda found: found[0])
        starts: list[Kinds] = []
        if shuffle and (self.runs.cap is None or self.runs.cap <= _SUMMED):
            starts = [best[2], *(np.cumsum(self.p) <= share for share in _STARTS)]
        for start in starts:
            value, paying = 0.0, start
            for _ in range(_TURNS):
                if not paying.any() or paying.all():
                    break
                found = self._tried(self.shuffled(epsilon, paying), epsilon)
                best = max(best, found, key=lambda one: one[0])
                if found[0] <= value * (1.0 + 1e-3):
                    break
                value, paying = found[0], found[2]
        return best[1]

    def _tried(
        self, order: NDArray[np.int64], epsilon: float
    ) -> tuple[float, NDArray[np.int64], Kinds]:
        """Return δ of an order, the order, and which atoms pay."""
        p, q = self.tuned(order, rough=True)
        gain = p - math.exp(min(epsilon, 700.0)) * q
        pays = np.zeros(p.size, dtype=np.bool_)
        pays[order] = gain > 0.0
        return float(np.maximum(gain, 0.0).sum()), order, pays


_SUMS = 1e-9  # of sums of masses, relative
_CELL = 1e-12  # of the masses of the cells of one release, relative
_GRID = 2000  # cells of a Gaussian release
_REACH = 11.0  # standard deviations of it
_PIECES = 200  # cells between the two half lines of a Laplace release
_SIZE = 4096  # lattice points of a composition
_SHARE = 16.0  # of which one loss takes so many for each deviation
_RARE = 1e-25  # mass of outcomes whose losses need no place of their own
_NEVER = 1e-5  # of δ: mass of what all releases of a kind together may not show
_TINY = 1e-40  # mass of ends that are put into one cell
_NEARER, _NEAR = 4, 0.98
_SIDE = 1024  # outcomes on each side of a product


class Scores(Enum):
    """How the runs of a selection are scored.

    Attributes:
        RANKED: By loss, but for what pays at the ε in question.
        SHUFFLED: As well as is found for that ε alone; at others it may cost less.
        SPREAD: For many ε at once.
    """

    RANKED = "ranked"
    SHUFFLED = "shuffled"
    SPREAD = "spread"


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The masses of finitely many outcomes with the record (p) and without it (q); relative error of each."""

    p: Floats
    q: Floats
    error: float = _CELL

    @cached_property
    def losses(self) -> Floats:
        """`log(p/q)`, infinite where a mass is missing; of what hardly happens, cut off."""
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = np.nan_to_num(
                np.log(self.p) - np.log(self.q), nan=0.0, posinf=np.inf, neginf=-np.inf
            )
        counts = np.isfinite(losses) & (np.maximum(self.p, self.q) > _RARE)
        ends = losses[counts] if counts.any() else np.zeros(1)
        inside = np.clip(losses, ends.min(), ends.max())
        return np.asarray(np.where(np.isfinite(losses), inside, losses))

    def flipped(self) -> Outcomes:
        """Return the same, asked about without the record."""
        return Outcomes(self.q, self.p, self.error)

    def delta(self, epsilon: float) -> float:
        """Return δ at this ε, rounded down, for P over Q."""
        margin = _SUMS + self.error
        scale = math.exp(min(epsilon, 700.0)) * (1.0 + margin)
        return float(np.maximum(self.p * (1.0 - margin) - scale * self.q, 0.0).sum())

    def epsilon(self, delta: float) -> float:
        """Return an ε of at most 700 at which δ is above the target, nearly the largest; or 0."""
        low, high = 0.0, 700.0
        if self.delta(low) <= delta:
            return 0.0
        while high - low > 1e-5 * max(low, 1e-3):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return low

    def merged(self, size: int) -> Outcomes:
        """Return at most so many outcomes: what is nearly of one loss counts as one."""
        return self if self.p.size <= size else _Sum.of(self, size).outcomes


class _Sum:
    """Outcomes whose name is a whole multiple of a step, a power of two; names can be added."""

    def __init__(self, power: int, lowest: int, p: Floats, q: Floats, error: float) -> None:
        keep = np.flatnonzero((np.cumsum(p) > _TINY) | (np.cumsum(q) > _TINY))
        rest = np.flatnonzero((np.cumsum(p[::-1]) > _TINY) | (np.cumsum(q[::-1]) > _TINY))
        if not keep.size or not rest.size:  # the two sums may round apart
            raise ArithmeticError("nothing is left of a law that was multiplied too often")
        first, last = int(keep[0]), p.size - int(rest[0])
        both = []
        for masses in (p, q):
            inner = masses[first:last].copy()
            inner[0] += masses[:first].sum()
            inner[-1] += masses[last:].sum()
            both.append(inner)
        self.power, self.lowest, (self.p, self.q) = power, lowest + first, both
        self.error = error

    @classmethod
    def of(cls, outcomes: Outcomes, size: int = _SIZE, rare: float = _RARE) -> _Sum:
        """Name outcomes by their loss, rounded to a multiple of a step; rare ones by the largest left."""
        finite = np.isfinite(outcomes.losses)
        losses, weights = outcomes.losses[finite], outcomes.p[finite] + 1e-300
        often = losses[np.maximum(outcomes.p, outcomes.q)[finite] > rare]
        if often.size:
            losses = np.clip(losses, often.min(), often.max())
        deviation = math.sqrt(
            np.average((losses - np.average(losses, weights=weights)) ** 2, weights=weights)
        )
        span = float(np.ptp(losses))
        power = math.frexp(max(deviation / _SHARE, span / size, 1e-12))[1]
        known = np.round(losses * 2.0**-power).astype(np.int64)
        # What shows the record, or shows that it is not there, has a name beyond all others.
        names = np.where(outcomes.losses > 0.0, known.max() + 1, known.min() - 1)
        names[finite] = known
        lowest = int(names.min())
        places = names - lowest
        p, q = (
            np.bincount(places, masses).astype(np.float64) for masses in (outcomes.p, outcomes.q)
        )
        return cls(power, lowest, p, q, outcomes.error)

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes(self.p, self.q, self.error)

    def coarser(self) -> _Sum:
        """Merge every two neighbours."""
        odd = self.lowest % 2
        tail = (self.p.size + odd) % 2
        p, q = (np.pad(m, (odd, tail)).reshape(-1, 2).sum(axis=1) for m in (self.p, self.q))
        return _Sum(self.power + 1, (self.lowest - odd) // 2, p, q, self.error)

    def __add__(self, other: _Sum) -> _Sum:
        first, second = self, other
        while first.power < second.power:
            first = first.coarser()
        while second.power < first.power:
            second = second.coarser()
        p, q = np.convolve(first.p, second.p), np.convolve(first.q, second.q)
        error = first.error + second.error
        total = _Sum(first.power, first.lowest + second.lowest, p, q, error)
        while total.p.size > _SIZE:
            total = total.coarser()
        return total

    def times(self, count: int) -> _Sum:
        """Return the sum of so many."""
        power, total = self, None
        while count:
            if count % 2:
                total = power if total is None else total + power
            count //= 2
            if count:
                power = power + power
        return self if total is None else total


def composition(parts: Sequence[tuple[Outcomes, int]], delta: float) -> Outcomes:
    """Return the outcomes of independent releases together, as finely as bounds at this δ need."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    # What is far rarer than δ in all of them together needs no place, and the steps are finer without.
    sums = [
        _Sum.of(outcomes, rare=max(_NEVER * delta / count, _RARE)).times(count)
        for outcomes, count in parts
    ]
    if not sums:
        return Outcomes(np.ones(1), np.ones(1))
    total = sums[0]
    for more in sums[1:]:
        total = total + more
    return total.outcomes


def gaussian_outcomes(sigma: float) -> Outcomes:
    """Return a Gaussian release, cut into cells."""
    edges = np.linspace(-_REACH * sigma, 1.0 + _REACH * sigma, _GRID)
    p, q = (
        normal_masses(np.concatenate([[-np.inf], z, [np.inf]]))
        for z in ((edges - 1.0) / sigma, edges / sigma)
    )
    return Outcomes(p, q)


def laplace_outcomes(scale: float) -> Outcomes:
    """Return a Laplace release, cut into cells."""
    edges = np.linspace(0.0, 1.0, _PIECES + 1)
    with np.errstate(over="ignore", under="ignore"):
        inside = 0.5 * np.exp(-edges[:-1] / scale) * -np.expm1(-1.0 / (_PIECES * scale))
        q = np.concatenate([[0.5], inside, [0.5 * np.exp(-1.0 / scale)]])
    return Outcomes(q[::-1], q)


def two_sided(epsilon: float, delta: float) -> Outcomes:
    """Return the worst release that is (ε, δ)-DP (Kairouz, Oh, Viswanath, arXiv:1311.0776)."""
    small = (1.0 - delta) / (1.0 + math.exp(min(epsilon, 700.0)))
    p = np.array([delta, 1.0 - delta - small, small, 0.0])
    return Outcomes(p, p[::-1])


def mixed(parts: Sequence[Outcomes], weights: Sequence[float]) -> Outcomes:
    """Return the outcomes of a mixture whose component is part of the outcome."""
    pairs = list(zip(parts, weights, strict=True))
    return Outcomes(
        np.concatenate([w * part.p for part, w in pairs]),
        np.concatenate([w * part.q for part, w in pairs]),
        max(part.error for part in parts),
    )


def sampled(outcomes: Outcomes, rate: float) -> Outcomes:
    """Return the outcomes of a release on a Poisson sample of this rate."""
    p = (1.0 - rate) * outcomes.q + rate * outcomes.p
    return Outcomes(p, outcomes.q, outcomes.error)


def split(tuning: Outcomes, training: Outcomes, rate: float) -> Outcomes:
    """Return the outcomes of tuning and training where each record is in exactly one of them."""
    first, second = tuning.merged(_SIDE), training.merged(_SIDE)
    p = rate * np.outer(first.p, second.q) + (1.0 - rate) * np.outer(first.q, second.p)
    q = np.outer(first.q, second.q)
    return Outcomes(p.ravel(), q.ravel(), first.error + second.error)


def best_of_runs(base: Outcomes, runs: RunLaw, delta: float, *, scores: Scores) -> Outcomes:
    """Return the best of K with outcomes scored for P over Q at this δ."""
    instance, order = worst_order(base, runs, delta, scores=scores)
    p, q = instance.tuned(order)
    none = runs.zero_probability
    # A mass moves where it is scored: φ' answers to the error of the sums below it.
    # What was taken off P and added to Q is on the safe side of a cost, not of a further choice.
    error = base.error * (1.0 + runs.expected_runs) + ROUNDING
    return Outcomes(np.append(p, none), np.append(q, none), error)


def worst_order(
    base: Outcomes, runs: RunLaw, delta: float, *, scores: Scores, cut: bool = True
) -> tuple[Instance, NDArray[np.int64]]:
    """Return the instance of a selection, and its atoms from worst to best score at this δ."""
    # Without `cut` scores hang on the loss alone; with it they may be random.
    named = _Sum.of(base)
    # Its losses say where to score; what it costs comes from the masses alone.
    guide = LossPmf(2.0**named.power, named.lowest, named.p, 0.0)
    instance = Instance(guide, runs, named.q, cut=cut)
    target = instance.tuner.epsilon(delta)
    point = target if math.isfinite(target) else 1.0
    if scores is Scores.SPREAD:
        return instance, instance.spread(point)
    order = instance.best_order(point, shuffle=scores is Scores.SHUFFLED)
    if scores is Scores.SHUFFLED:
        # Where the envelope is loose, its ε is too large to score for: the order's own comes nearer.
        for _ in range(_NEARER):
            cost = Outcomes(*instance.tuned(order)).epsilon(delta)
            # An order found for too small an ε costs more than that: it is improved for its own, too.
            if _NEAR * point < cost < point / _NEAR:
                break
            point, order = cost, instance.best_order(cost)
    return instance, order


def first_to_pass(base: Outcomes, stop: float, delta: float) -> Outcomes:
    """Return the first run that passes: small losses do, and those that pay; the others fail."""
    base = base.merged(_SIZE)
    order = np.argsort(base.losses)
    p, q = base.p[order], base.q[order]
    sums = np.append(0.0, np.cumsum(q))
    low = np.unique(np.searchsorted(sums, np.linspace(0.0, 1.0, 12)))
    high = np.unique(np.searchsorted(-np.cumsum(p[::-1])[::-1], -delta * 10.0 ** np.arange(-1, 6)))
    best, cost = base, -1.0
    for first in low:
        for last in (*high, p.size):
            failed = slice(min(first, last), last)
            keep = np.ones(p.size)
            keep[failed] = 0.0
            # The sum of what passes is no difference, and never below 0.
            out = [
                np.append(keep * masses, stop * masses[failed].sum())
                / (stop + (1.0 - stop) * (keep * masses).sum())
                for masses in (p, q)
            ]
            found = Outcomes(out[0], out[1], _SUMS + base.error / stop)
            if cost < 0.0 or found.delta(cost) > delta:
                best, cost = found, found.epsilon(delta)
    return best
