"""Outcomes of explicit mechanisms, from which lower bounds on ε are computed.

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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.best_of_k import Tuner
from privtune.accounting.pmf import LossPmf, exp_capped, normal_masses, scale_of
from privtune.accounting.runs import RunLaw

Floats = NDArray[np.float64]
Kinds = NDArray[np.bool_]
Indices = NDArray[np.int64]
ROUNDING = 1e-6  # of tuned masses, relative
_LARGE = 4e-10  # mass, for each run, from which a difference of φ is right to that
_SCORES = 512  # that an outcome which always happens would have
_SPREAD = 0.4  # by how much ε lies nearer to an outcome's loss
_CUTS = 128  # of what pays and of what does not, twice
_STARTS = (0.5, 0.2, 0.05)  # P-mass of what is to pay
_TURNS = 5
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_HALVINGS = 60
_NARROW = 1e-12  # relative width below which a piece is not halved
_SUMMED = 200  # runs of a capped law whose φ, a sum over all of them, is asked for at every cut


class _OutcomeOrder(NamedTuple):
    """An order of one run's outcomes from worst to best score, its δ, and which outcomes add to that δ."""

    delta: float
    order: Indices
    pays: Kinds


class Instance:
    """The δ that a selection attains if one run's outcomes are scored in some order, in one direction.

    Args:
        base: P-masses of the base's outcomes by their loss.
        runs: The law of the number of runs.
        q: Their Q-masses, where these do not follow from the losses.
        cut: Whether outcomes that happen often are cut into several, with scores of their own.

    Attributes:
        losses: Losses of the atoms, falling.
        p: Their P-masses.
        q: Their Q-masses.
        levels: The Q-mass of what ranks higher by loss, to the middle of each atom.
    """

    def __init__(
        self,
        base: LossPmf,
        runs: RunLaw,
        q: Floats | None = None,
        *,
        cut: bool = True,
    ) -> None:
        self.runs = runs
        happens = base.masses > 0.0
        self.losses = base.losses[happens][::-1]
        self.p = base.masses[happens][::-1]
        if q is None:
            with np.errstate(over="ignore"):
                self.q = np.exp(np.log(self.p) - self.losses)
        else:
            self.q = q[happens][::-1]
        if cut:
            self._cut_atoms()
        self.infinite = base.infinite
        self.tuner = Tuner(base, runs)
        # What rounding took away or added is given to an atom at the end: a legal pair again.
        self.levels = np.cumsum(self.q) - 0.5 * self.q

    def _cut_atoms(self) -> None:
        """Cut outcomes of large mass into equal pieces, so that their scores may be random."""
        # What has no mass without the record pays wherever it stands; its loss is no lattice point.
        self.losses = np.where(self.q > 0.0, self.losses, np.inf)
        larger = np.maximum(self.p, self.q)
        often = np.maximum(larger * _SCORES, 1.0)
        pieces = np.ceil(often).astype(np.int64)
        self.losses = np.repeat(self.losses, pieces)
        self.p = np.repeat(self.p / pieces, pieces)
        self.q = np.repeat(self.q / pieces, pieces)

    def order(self, epsilon: float, threshold: float) -> Indices:
        """Return outcomes from worst to best score: by loss, or above `threshold` by the level best at ε."""
        key = np.minimum(self.levels, 1.0)
        moved = self.losses > threshold
        z = exp_capped(epsilon - self.losses[moved])
        key[moved] = self.tuner.best_level(z)
        return np.argsort(key, kind="stable")

    def spread_order(self, epsilon: float) -> Indices:
        """Return the outcomes from worst to best score if larger losses are scored for larger ε."""
        z = exp_capped(_SPREAD * (epsilon - self.losses))
        pays = self.tuner.support(z) > 0.0
        by_loss = np.minimum(self.levels, 1.0)
        key = np.where(pays, self.tuner.best_level(z), by_loss)
        return np.argsort(key, kind="stable")

    def shuffled(self, epsilon: float, pays: Kinds) -> Indices:
        """Return the best order of outcomes, from worst to best score, if those in `pays` add to δ.

        Args:
            epsilon: ε at which δ is to be large.
            pays: Which atoms are to pay.
        """
        # What pays is ranked by rising loss, the rest by falling loss (README, 5).
        up = np.flatnonzero(pays)[::-1]
        down = np.flatnonzero(~pays)
        up_ends, up_p, up_q = self._pieces(up)
        down_ends, down_p, down_q = self._pieces(down)
        # What has been paid depends on how much of either kind is below, not on its order.
        below_p = np.minimum(down_p[:, None] + up_p, 1.0)
        below_q = np.minimum(down_q[:, None] + up_q, 1.0)
        scale = scale_of(epsilon)
        of_p = self.runs.pgf(below_p)
        of_q = self.runs.pgf(below_q)
        paid = of_p - scale * of_q
        choices, place = _best_path(np.diff(paid, axis=1))
        key = np.empty(self.p.size)
        key[down] = np.arange(down.size)
        for piece in reversed(range(len(choices))):
            start = up_ends[piece]
            end = up_ends[piece + 1]
            atoms = up[start:end]
            key[atoms] = down_ends[place] - 0.5
            place = int(choices[piece][place])
        return np.lexsort((self.losses, key))

    def _pieces(self, atoms: Indices) -> tuple[Indices, Floats, Floats]:
        """Cut a list of outcomes into pieces; return the cuts, and the P- and Q-mass up to each."""
        total_p = self.p.sum() + self.infinite
        total_q = self.q.sum()
        p = np.append(0.0, np.cumsum(self.p[atoms])) / total_p
        q = np.append(0.0, np.cumsum(self.q[atoms])) / total_q
        # Fine near the end, too: the best scores are those that φ' tells apart.
        even = np.linspace(0.0, 1.0, _CUTS)
        near_end = 1.0 - np.geomspace(1e-9, 1.0, _CUTS)
        both = p + q
        marks = both[-1] * np.append(even, near_end)
        places = np.searchsorted(both, marks)
        places = np.clip(places, 0, atoms.size)
        ends = np.unique(np.append(places, [0, atoms.size]))
        return ends, p[ends], q[ends]

    def tuned(self, order: Indices, *, rough: bool = False) -> tuple[Floats, Floats]:
        """Return P- and Q-masses of a selection's outcomes, for one order of a run's, safely rounded.

        Args:
            order: The atoms from worst to best score.
            rough: Of a capped law take no differences of φ, each of which is a long sum.

        Returns:
            P-masses, rounded down, and Q-masses, rounded up, in this order.
        """
        # Differences of φ are exact for atoms of some size. Else φ' is convex: its mean over an atom is
        # at least its value at the middle, and at most the mean of those at both ends.
        total_p = self.p.sum() + self.infinite
        total_q = self.q.sum()
        p = self.p[order] / total_p
        q = self.q[order] / total_q
        below_p = np.concatenate([[0.0], np.cumsum(p)])
        below_q = np.concatenate([[0.0], np.cumsum(q)])
        below_p = np.minimum(below_p, 1.0)
        below_q = np.minimum(below_q, 1.0)
        slope = self.runs.pgf_derivative(below_q)
        middle = 0.5 * (below_p[1:] + below_p[:-1])
        gain_p = p * self.runs.pgf_derivative(middle)
        gain_q = q * 0.5 * (slope[1:] + slope[:-1])
        if self.runs.cap is None or not rough:
            enough = _LARGE * (1.0 + self.runs.expected_runs)
            exact_p = self._gains(below_p)
            exact_q = self._gains(below_q)
            gain_p = np.where(exact_p > enough, exact_p, gain_p)
            gain_q = np.where(exact_q > enough, exact_q, gain_q)
        return gain_p * (1.0 - ROUNDING), gain_q * (1.0 + ROUNDING)

    def _gains(self, ends: Floats) -> Floats:
        """Return the rise of φ, the generating function of K, from each point of `ends` to the next."""
        if self.runs.cap is None:
            return np.diff(self.runs.pgf(ends))
        # By Gauss's rule on pieces across which φ'' moves by a factor of e at most: φ itself is a sum over
        # all numbers of runs.
        points = ends
        places = np.arange(ends.size)  # of the ends among the points
        for _ in range(_HALVINGS):
            bend = self.runs.pgf_second_derivative(points)
            log_bend = np.log(np.maximum(bend, 1e-300))
            is_bent = np.diff(log_bend) > 1.0
            is_wide = np.diff(points) > _NARROW * points[1:]
            halved = is_bent & is_wide
            if not halved.any():
                break
            middles = 0.5 * (points[:-1] + points[1:])
            # Each end moves by the points that are put in before it.
            before = np.append(0, np.cumsum(halved))
            places = places + before[places]
            behind = np.flatnonzero(halved) + 1
            points = np.insert(points, behind, middles[halved])
        half = 0.5 * np.diff(points)
        centre = points[:-1] + half
        inside = centre[:, None] + half[:, None] * _NODES
        pieces = half * (self.runs.pgf_derivative(inside) @ _WEIGHTS)
        return np.asarray(np.add.reduceat(pieces, places[:-1]))

    def best_order(
        self,
        epsilon: float,
        count: int = 12,
        *,
        shuffle: bool = True,
    ) -> Indices:
        """Return the order of outcomes, from worst to best score, with the largest δ of those tried.

        Args:
            epsilon: ε at which δ is to be large.
            count: How many thresholds are tried, above which losses are moved.
            shuffle: Whether shuffled orders are tried, too.
        """
        z = exp_capped(epsilon - self.losses)
        paying = self.losses[self.tuner.support(z) > 0.0]
        lowest = float(paying[-1]) if paying.size else epsilon
        scorings = []
        for threshold in (math.inf, *np.linspace(lowest, epsilon, count)):
            order = self.order(epsilon, float(threshold))
            scorings.append(self._score(order, epsilon))
        best = max(scorings, key=lambda scoring: scoring.delta)
        if shuffle and (self.runs.cap is None or self.runs.cap <= _SUMMED):
            starts = [best.pays]
            starts += [np.cumsum(self.p) <= share for share in _STARTS]
            for start in starts:
                best = self._shuffle_from(start, epsilon, best)
        return best.order

    def _shuffle_from(
        self,
        pays: Kinds,
        epsilon: float,
        best: _OutcomeOrder,
    ) -> _OutcomeOrder:
        """Return the best order found by shuffling outcomes, of which at first those in `pays` add to δ.

        Args:
            pays: Which atoms are to pay at first.
            epsilon: ε at which δ is to be large.
            best: The best scoring so far.
        """
        value = 0.0
        for _ in range(_TURNS):
            if not pays.any() or pays.all():
                break
            scoring = self._score(self.shuffled(epsilon, pays), epsilon)
            if scoring.delta > best.delta:
                best = scoring
            if scoring.delta <= value * (1.0 + 1e-3):
                break
            value = scoring.delta
            pays = scoring.pays
        return best

    def _score(self, order: Indices, epsilon: float) -> _OutcomeOrder:
        """Return an order with its δ at ε, and which atoms add to that δ."""
        p, q = self.tuned(order, rough=True)
        gain = p - scale_of(epsilon) * q
        pays = np.zeros(p.size, dtype=np.bool_)
        pays[order] = gain > 0.0
        delta = float(np.maximum(gain, 0.0).sum())
        return _OutcomeOrder(delta, order, pays)


def _best_path(gains: Floats) -> tuple[list[Indices], int]:
    """Return the best place of each piece that adds to δ among the other outcomes, by dynamic programming.

    Args:
        gains: What each piece (column) pays below each place (row).

    Returns:
        For each piece the place of the one before, given its own, and the place of the last.
    """
    value = np.zeros(gains.shape[0])
    choices = []
    for gain in gains.T:
        best = np.maximum.accumulate(value)
        places = np.where(value >= best, np.arange(value.size), 0)
        choices.append(np.maximum.accumulate(places))
        value = best + gain
    return choices, int(np.argmax(value))


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
_NEARER = 4  # turns in which an order is scored for its own ε
_NEAR = 0.98  # of that ε: near enough
_SIDE = 1024  # outcomes on each side of a product


class Scores(Enum):
    """The ways in which the runs of a selection are scored.

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
    """The masses of finitely many outcomes with the record (p) and without it (q)."""

    p: Floats
    q: Floats
    error: float = _CELL

    @cached_property
    def losses(self) -> Floats:
        """The loss `log(p/q)` of each outcome, infinite where a mass is 0; rare extremes are clipped."""
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = np.nan_to_num(
                np.log(self.p) - np.log(self.q),
                nan=0.0,
                posinf=np.inf,
                neginf=-np.inf,
            )
        finite = np.isfinite(losses)
        is_often = np.maximum(self.p, self.q) > _RARE
        ends = losses[finite & is_often]
        if not ends.size:
            ends = np.zeros(1)
        inside = np.clip(losses, ends.min(), ends.max())
        return np.asarray(np.where(finite, inside, losses))

    def flipped(self) -> Outcomes:
        """Return the outcomes with P and Q exchanged, for the direction in which the record is added."""
        return Outcomes(self.q, self.p, self.error)

    def delta(self, epsilon: float) -> float:
        """Return δ at this ε for P over Q, rounded down."""
        margin = _SUMS + self.error
        scale = scale_of(epsilon) * (1.0 + margin)
        gains = self.p * (1.0 - margin) - scale * self.q
        return float(np.maximum(gains, 0.0).sum())

    def epsilon(self, delta: float) -> float:
        """Return nearly the largest ε, at most 700, at which δ exceeds the target; 0 if none does."""
        low = 0.0
        high = 700.0
        if self.delta(low) <= delta:
            return 0.0
        while high - low > 1e-5 * max(low, 1e-3):
            middle = 0.5 * (low + high)
            if self.delta(middle) > delta:
                low = middle
            else:
                high = middle
        return low

    def merged(self, size: int) -> Outcomes:
        """Return at most about `size` outcomes, in which outcomes of nearly equal loss are merged."""
        if self.p.size <= size:
            return self
        return _Sum.of(self, size).outcomes


class _Sum:
    """The masses of outcomes by their loss, rounded to multiples of a power of two, for composition.

    Attributes:
        power: The step is 2 to this power.
        lowest: Name of the first outcome, in steps.
        p: P-masses of consecutive names.
        q: Their Q-masses.
        error: Relative error of each mass.
    """

    def __init__(
        self,
        power: int,
        lowest: int,
        p: Floats,
        q: Floats,
        error: float,
    ) -> None:
        first = _first_above(p, q)
        behind = _first_above(p[::-1], q[::-1])
        if first is None or behind is None:  # the two sums may round apart
            raise ArithmeticError("nothing is left of a law that was multiplied too often")
        inside = slice(first, p.size - behind)
        self.power = power
        self.lowest = lowest + first
        self.p = _with_ends(p, inside)
        self.q = _with_ends(q, inside)
        self.error = error

    @classmethod
    def of(
        cls,
        outcomes: Outcomes,
        size: int = _SIZE,
        rare: float = _RARE,
    ) -> _Sum:
        """Round the losses of outcomes to multiples of a step; clip those of rare outcomes.

        Args:
            outcomes: The outcomes.
            size: Names, at most, about.
            rare: Mass of outcomes that need no name of their own.
        """
        finite = np.isfinite(outcomes.losses)
        losses = outcomes.losses[finite]
        weights = outcomes.p[finite] + 1e-300
        larger = np.maximum(outcomes.p, outcomes.q)
        is_often = larger[finite] > rare
        often = losses[is_often]
        if often.size:
            losses = np.clip(losses, often.min(), often.max())
        mean = np.average(losses, weights=weights)
        variance = np.average((losses - mean) ** 2, weights=weights)
        by_deviation = math.sqrt(variance) / _SHARE
        by_span = float(np.ptp(losses)) / size
        step = max(by_deviation, by_span, 1e-12)
        _, power = math.frexp(step)
        multiples = np.round(losses * 2.0**-power)
        finite_names = multiples.astype(np.int64)
        # What shows the record, or shows that it is not there, has a name beyond all others.
        names = np.where(
            outcomes.losses > 0.0,
            finite_names.max() + 1,
            finite_names.min() - 1,
        )
        names[finite] = finite_names
        lowest = int(names.min())
        places = names - lowest
        return cls(
            power,
            lowest,
            np.bincount(places, outcomes.p).astype(np.float64),
            np.bincount(places, outcomes.q).astype(np.float64),
            outcomes.error,
        )

    @property
    def outcomes(self) -> Outcomes:
        """The P- and Q-masses as outcomes."""
        return Outcomes(self.p, self.q, self.error)

    def coarser(self) -> _Sum:
        """Return the distribution with every two neighbours merged and the step doubled."""
        odd = self.lowest % 2
        tail = (self.p.size + odd) % 2
        ends = (odd, tail)
        return _Sum(
            self.power + 1,
            (self.lowest - odd) // 2,
            np.pad(self.p, ends).reshape(-1, 2).sum(axis=1),
            np.pad(self.q, ends).reshape(-1, 2).sum(axis=1),
            self.error,
        )

    def __add__(self, other: _Sum) -> _Sum:
        """Return the distribution of the sum of two independent losses, its step at least the wider one."""
        first = self
        second = other
        while first.power < second.power:
            first = first.coarser()
        while second.power < first.power:
            second = second.coarser()
        total = _Sum(
            first.power,
            first.lowest + second.lowest,
            np.convolve(first.p, second.p),
            np.convolve(first.q, second.q),
            first.error + second.error,
        )
        while total.p.size > _SIZE:
            total = total.coarser()
        return total

    def times(self, count: int) -> _Sum:
        """Return the distribution of the sum of `count` independent copies, by doubling."""
        power = self
        total = None
        while count:
            if count % 2:
                total = power if total is None else total + power
            count //= 2
            if count:
                power = power + power
        return self if total is None else total


def _first_above(p: Floats, q: Floats) -> int | None:
    """Return the first index at which the summed P- or Q-mass exceeds 1e-40; None if there is none."""
    noticeable = (np.cumsum(p) > _TINY) | (np.cumsum(q) > _TINY)
    places = np.flatnonzero(noticeable)
    return int(places[0]) if places.size else None


def _with_ends(masses: Floats, inside: slice) -> Floats:
    """Cut masses to a slice, and add what is cut off before and behind it to its ends."""
    inner = masses[inside].copy()
    inner[0] += masses[: inside.start].sum()
    inner[-1] += masses[inside.stop :].sum()
    return inner


def composition(parts: Sequence[tuple[Outcomes, int]], delta: float) -> Outcomes:
    """Return the outcomes of independent releases together, as fine as a bound at this δ needs."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    if not parts:
        return Outcomes(np.ones(1), np.ones(1))
    sums = []
    for outcomes, count in parts:
        # What is far rarer than δ in all of them together needs no place, and the steps are finer without.
        rare = max(_NEVER * delta / count, _RARE)
        sums.append(_Sum.of(outcomes, rare=rare).times(count))
    total = sums[0]
    for summand in sums[1:]:
        total = total + summand
    return total.outcomes


def gaussian_outcomes(sigma: float) -> Outcomes:
    """Return the outcomes of a Gaussian release with noise σ, cut into cells."""
    reach = _REACH * sigma
    edges = np.linspace(-reach, 1.0 + reach, _GRID)
    return Outcomes(
        _normal_cells((edges - 1.0) / sigma),
        _normal_cells(edges / sigma),
    )


def _normal_cells(z: Floats) -> Floats:
    """Return the normal mass between neighbouring points, and of the half lines on both sides."""
    edges = np.concatenate([[-np.inf], z, [np.inf]])
    return normal_masses(edges)


def laplace_outcomes(scale: float) -> Outcomes:
    """Return the outcomes of a Laplace release with this noise scale, cut into cells."""
    edges = np.linspace(0.0, 1.0, _PIECES + 1)
    with np.errstate(over="ignore", under="ignore"):
        at_start = 0.5 * np.exp(-edges[:-1] / scale)
        share = -np.expm1(-1.0 / (_PIECES * scale))
        inside = at_start * share
        beyond = 0.5 * np.exp(-1.0 / scale)
        q = np.concatenate([[0.5], inside, [beyond]])
    return Outcomes(q[::-1], q)


def two_sided(epsilon: float, delta: float) -> Outcomes:
    """Return the outcomes of the worst (ε, δ)-DP release (Kairouz, Oh, Viswanath, arXiv:1311.0776)."""
    small = (1.0 - delta) / (1.0 + scale_of(epsilon))
    large = 1.0 - delta - small
    p = np.array([delta, large, small, 0.0])
    return Outcomes(p, p[::-1])


def mixed(parts: Sequence[Outcomes], weights: Sequence[float]) -> Outcomes:
    """Return the outcomes of a mixture whose drawn component is part of the outcome."""
    p = []
    q = []
    for part, weight in zip(parts, weights, strict=True):
        p.append(weight * part.p)
        q.append(weight * part.q)
    error = max(part.error for part in parts)
    return Outcomes(np.concatenate(p), np.concatenate(q), error)


def sampled(outcomes: Outcomes, rate: float) -> Outcomes:
    """Return the outcomes of a release on a Poisson sample of this rate."""
    p = (1.0 - rate) * outcomes.q + rate * outcomes.p
    return Outcomes(p, outcomes.q, outcomes.error)


def split(
    tuning: Outcomes,
    training: Outcomes,
    rate: float,
) -> Outcomes:
    """Return the outcomes of tuning and training if each record is in exactly one of them.

    Args:
        tuning: Outcomes of what happens to the subset.
        training: Outcomes of what happens to the rest.
        rate: Probability that a record is in the subset.
    """
    first = tuning.merged(_SIDE)
    second = training.merged(_SIDE)
    tuned_on = np.outer(first.p, second.q)
    trained_on = np.outer(first.q, second.p)
    p = rate * tuned_on + (1.0 - rate) * trained_on
    q = np.outer(first.q, second.q)
    return Outcomes(p.ravel(), q.ravel(), first.error + second.error)


def best_of_runs(
    base: Outcomes,
    runs: RunLaw,
    delta: float,
    *,
    scores: Scores,
) -> Outcomes:
    """Return the outcomes of a best of K, with runs scored to make δ large for P over Q.

    Args:
        base: Outcomes of one run.
        runs: The law of the number of runs.
        delta: The δ at which it is to cost much.
        scores: How runs are scored.
    """
    instance, order = worst_order(base, runs, delta, scores=scores)
    p, q = instance.tuned(order)
    none = runs.zero_probability
    # A mass moves where it is scored: φ' answers to the error of the sums below it.
    # What was taken off P and added to Q is on the safe side of a cost, not of a further choice.
    error = base.error * (1.0 + runs.expected_runs) + ROUNDING
    return Outcomes(np.append(p, none), np.append(q, none), error)


def worst_order(
    base: Outcomes,
    runs: RunLaw,
    delta: float,
    *,
    scores: Scores,
    cut: bool = True,
) -> tuple[Instance, Indices]:
    """Return a selection's :class:`Instance`, and one run's outcomes from worst to best score at this δ.

    Args:
        base: The outcomes of one run.
        runs: The law of the number of runs.
        delta: The δ for which runs are scored.
        scores: How they are scored.
        cut: Without it scores hang on the loss alone; with it they may be random.
    """
    by_loss = _Sum.of(base)
    # Its losses say where to score; what it costs comes from the masses alone.
    guide = LossPmf(2.0**by_loss.power, by_loss.lowest, by_loss.p, 0.0)
    instance = Instance(guide, runs, by_loss.q, cut=cut)
    target = instance.tuner.epsilon(delta)
    point = target if math.isfinite(target) else 1.0
    if scores is Scores.SPREAD:
        return instance, instance.spread_order(point)
    order = instance.best_order(point, shuffle=scores is Scores.SHUFFLED)
    if scores is Scores.SHUFFLED:
        # Where the envelope is loose, its ε is too large to score for: the order's own comes nearer.
        for _ in range(_NEARER):
            p, q = instance.tuned(order)
            cost = Outcomes(p, q).epsilon(delta)
            # An order found for too small an ε costs more than that: it is improved for its own, too.
            if _NEAR * point < cost < point / _NEAR:
                break
            point = cost
            order = instance.best_order(cost)
    return instance, order


def first_to_pass(
    base: Outcomes,
    stop: float,
    delta: float,
) -> Outcomes:
    """Return the outcomes of a threshold selection whose passing rule has the largest ε of those tried.

    Args:
        base: The outcomes of one run.
        stop: γ, the probability to give up after a run that did not pass.
        delta: The δ at which it is to cost much.
    """
    base = base.merged(_SIZE)
    order = np.argsort(base.losses)
    p = base.p[order]
    q = base.q[order]
    up_to = np.append(0.0, np.cumsum(q))
    from_last = np.cumsum(p[::-1])
    from_end = from_last[::-1]
    q_below = np.linspace(0.0, 1.0, 12)
    p_above = delta * 10.0 ** np.arange(-1, 6)
    low = np.unique(np.searchsorted(up_to, q_below))
    high = np.unique(np.searchsorted(-from_end, -p_above))
    error = _SUMS + base.error / stop
    best = base
    cost = -1.0
    for first in low:
        for last in (*high, p.size):
            failing = slice(min(first, last), last)
            candidate = Outcomes(
                _until_passed(p, failing, stop),
                _until_passed(q, failing, stop),
                error,
            )
            if cost < 0.0 or candidate.delta(cost) > delta:
                best = candidate
                cost = candidate.epsilon(delta)
    return best


def _until_passed(
    masses: Floats,
    failing: slice,
    stop: float,
) -> Floats:
    """Return the masses of the first run that passes, and last the mass of giving up (README, 5)."""
    # The sum of what passes is no difference, and never below 0.
    passes = np.ones(masses.size)
    passes[failing] = 0.0
    passing = passes * masses
    give_up = stop * masses[failing].sum()
    ends = stop + (1.0 - stop) * float(passing.sum())
    return np.append(passing, give_up) / ends
