"""Privacy loss distributions on a lattice, pessimistic.

A `LossPmf` is one direction of a dominating pair (P, Q): the law of the loss `log dP/dQ` under P on
the lattice `step·Z`, plus a mass at +∞. The Q-mass of an atom is its P-mass times `exp(-loss)`.
Every operation keeps or raises the privacy profile `δ(ε) = P(loss > ε) - e^ε Q(loss > ε)` at every
real ε, which is what "pessimistic" means here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
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
    """Return how many steps reach up to a loss, rounded up.

    Raises:
        GridError: More than 2^23, no number, or steps of which e^step is none.
    """
    if not 0.0 < step <= _WIDEST or not abs(loss) / step <= MAX_SIZE:
        raise GridError(f"losses of {abs(loss):.3g} do not fit on a lattice of step {step:.3g}.")
    return math.ceil(loss / step)


@dataclass(frozen=True, eq=False)
class LossPmf:
    """One direction of a dominating pair.

    Args:
        step: Distance of two lattice points.
        lowest: Lattice index of the first atom.
        masses: P-masses of consecutive lattice points, 0 or more.
        infinite: P-mass at infinite loss.
    """

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
        """Return a pessimistic pair on a lattice `factor` times as wide.

        Each atom is spread on its two neighbours so that its P- and its Q-mass are kept.
        """
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
    """Return all sums `Σ_{j <= i} values[j] exp(-(i - j) step)`, of values that are 0 or more.

    `scipy.signal.lfilter` does the same, and takes longer to import than the sums of a study. Within
    a row the weights are at most exp(100) apart; from row to row the sum is carried over.
    """
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
    """Return the sum of products of two vectors, in one thread.

    `@` of long vectors is BLAS', which wakes threads up for each: on a busy machine that takes a
    hundred times as long as the sum.
    """
    return float((left * right).sum())


def nothing(step: float) -> LossPmf:
    """Return the pair of a release about nothing: no loss at all."""
    return LossPmf(step, 0, np.ones(1), 0.0)


def from_cells(
    step: float, lowest: int, *, mass_p: Floats, mass_q: Floats, below: float, above: float
) -> LossPmf:
    """Spread the mass of lattice cells on the two ends of each, keeping P- and Q-mass.

    That is the pessimistic "connect the dots" discretisation: the profile is interpolated by chords
    in e^ε, which lie above it.

    Args:
        step: Distance of two lattice points.
        lowest: Lattice index of the lower end of the first cell.
        mass_p: P-mass of each cell `(step·i, step·(i+1)]`.
        mass_q: Q-mass of each cell.
        below: P-mass below the first lattice point; raised to it.
        above: P-mass above the last lattice point; raised to infinity.

    References:
        Doroshenko, Ghazi, Kamath, Kumar, Manurangsi, arXiv:2207.04380, Algorithm 1.
    """
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
