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
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.orders import ROUNDING, Instance
from privtune.accounting.pmf import LossPmf
from privtune.accounting.runs import RunLaw

Floats = NDArray[np.float64]
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
_TURNS, _NEAR = 4, 0.98
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
    """The masses of finitely many outcomes with the record (p) and without it (q).

    Args:
        p: With the record.
        q: Without it.
        error: Relative error of each mass, that of one release by default.
    """

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
        """Name outcomes by their loss, rounded to the nearest multiple of a step.

        What is rarer than `rare` counts as the largest or smallest loss of the others.
        """
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
    """Return what independent releases tell together, each so many times; as fine as this δ asks."""
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
    return Outcomes(_between((edges - 1.0) / sigma), _between(edges / sigma))


def _between(z: Floats) -> Floats:
    """Return the normal mass of the cells between and beyond edges, precise in both tails."""
    z = np.concatenate([[-np.inf], z, [np.inf]])
    tail = sp.special.ndtr(-np.abs(z))
    crossing = (z[:-1] < 0.0) & (z[1:] > 0.0)
    same = np.abs(tail[1:] - tail[:-1])
    return np.asarray(np.where(crossing, 1.0 - tail[1:] - tail[:-1], same))


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
    """Return the mixture whose component is shown."""
    pairs = list(zip(parts, weights, strict=True))
    return Outcomes(
        np.concatenate([w * part.p for part, w in pairs]),
        np.concatenate([w * part.q for part, w in pairs]),
        max(part.error for part in parts),
    )


def sampled(outcomes: Outcomes, rate: float) -> Outcomes:
    """Return the same on a Poisson sample."""
    p = (1.0 - rate) * outcomes.q + rate * outcomes.p
    return Outcomes(p, outcomes.q, outcomes.error)


def split(tuning: Outcomes, training: Outcomes, rate: float) -> Outcomes:
    """Return tuning and training of which the record is in exactly one."""
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
    """Return the instance of a selection, and its atoms from worst to best score at this δ.

    Args:
        base: One run.
        runs: The law of the number of runs.
        delta: The δ at which runs are scored.
        scores: How.
        cut: Whether scores may be random; else they hang on the loss alone.
    """
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
        for _ in range(_TURNS):
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
