"""Best of K once more: the envelope bound, minus what paying outcomes take from each other.

The envelope lets every outcome sit at the level that suits it best, as if it were alone. But an
outcome that is ranked high is not among the low ones: where outcomes of P-mass m and loss at least
τ are ranked above a level u, what is below has `G(u) <= F(u + e^-τ m) - m`. Outcomes of large loss
want the top, so in the worst case they are ranked by loss and each pays at its own depth. The
theorem and its proof stand in `accounting/README.md`. It matters where E[K] times the total
variation of the base is large, and for a fixed number of runs; elsewhere it equals the envelope.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.selection import Tuner

__all__ = ["Rearranged"]

Floats = NDArray[np.float64]
_SHARES = (0.6, 0.75, 0.85, 0.92, 0.97, 0.999)  # of what is paid, by outcomes that have a depth
_BLOCKS, _FEW = 32, 8  # few to choose a share, which any number of blocks may do
_WORTH = 0.01  # of δ; below it the depth does not matter
_USUAL_DELTA = 1e-5
_TOLERANCE = 5e-4
_ROUNDS = 12


class Rearranged:
    """The bound for one direction of the base's dominating pair, for ε >= 0.

    Args:
        tuner: The envelope bound in the same direction.
    """

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        base = tuner.base
        self._losses, self._masses = base.losses[::-1], base.masses[::-1]
        self._depth = np.concatenate([[0.0], np.cumsum(self._masses)])
        # Masses that rounding raised count in a depth as in F, except where F stops at 1.
        self._excess = max(float(self._depth[-1]) + base.infinite - 1.0, 0.0)
        self._at_infinity = float(tuner.runs.pgf_derivative(1.0)) * base.infinite

    @cached_property
    def _cells(self) -> tuple[Floats, Floats, Floats]:
        """Of each cell of levels: its right end, F there, and φ' at its left end."""
        level, roc = self.tuner.levels
        return level[1:], roc[1:], self.tuner.runs.pgf_derivative(level[:-1])

    def matters(self, epsilon: float) -> bool:
        """Whether the bound can be below the envelope by more than a percent of δ at this ε."""
        paid = self._paid(epsilon)
        whole = float(paid.sum())
        if whole <= 0.0:
            return False
        # To first order an outcome at depth m pays m φ''(F) less, at the level that it likes best.
        paying = paid > 0.0
        z = np.exp(np.minimum(epsilon - self._losses[paying], 700.0))
        level, roc = self.tuner.levels
        height = np.interp(self.tuner.best_level(z), level, roc)
        slope = self.tuner.runs.pgf_second_derivative(height)
        lost = (self._masses[paying] * self._depth[:-1][paying]) @ slope
        return float(lost) > _WORTH * whole

    def delta(self, epsilon: float) -> float:
        """Return the bound on δ(ε)."""
        return min(self._at(epsilon, 0.0), self._at(epsilon, self._usual_share))

    def epsilon(self, delta: float, start: float) -> float:
        """Return an ε at which the bound is at most delta.

        Args:
            delta: The target, above 0.
            start: An ε at which the envelope is at most delta.
        """
        share = self._best_share(start)
        high, low = start, 0.0
        excess = math.log(max(self._at(start, share), 1e-300) / delta)
        if excess >= 0.0:
            return start
        slope = -max(2.0, math.log(1.0 / delta)) / max(start, 1e-3)
        place, last = start, excess
        for _ in range(_ROUNDS):
            # log δ is nearly a line in ε; aim a little to the safe side of its root.
            point = place - last / slope + 0.3 * _TOLERANCE * high
            if not low < point < high:
                point = 0.5 * (low + high)
            value = math.log(max(self._at(point, share), 1e-300) / delta)
            if abs(point - place) > 1e-9 * high and (value - last) * (point - place) < 0.0:
                slope = (value - last) / (point - place)
            place, last = point, value
            if value <= 0.0:
                high = point
                if -value < -slope * _TOLERANCE * high:
                    break
            else:
                low = point
            if high - low < _TOLERANCE * high:
                break
        return high

    @cached_property
    def _usual_share(self) -> float:
        """The best share at a usual δ: good enough elsewhere, and any share is valid."""
        usual = self.tuner.epsilon(_USUAL_DELTA)
        return self._best_share(usual) if math.isfinite(usual) else _SHARES[-1]

    def _best_share(self, epsilon: float) -> float:
        return min(_SHARES, key=lambda share: self._at(epsilon, share, _FEW))

    def _paid(self, epsilon: float) -> Floats:
        """Return what each outcome pays under the envelope, in descending order of loss."""
        z = np.exp(np.minimum(epsilon - self._losses, 700.0))
        return self._masses * self.tuner.support(z)

    def _at(self, epsilon: float, share: float, blocks: int = _BLOCKS) -> float:
        """Return the bound where the outcomes with a depth pay this share of the envelope.

        Every share gives a valid bound; 0 is the envelope.
        """
        paid = np.cumsum(self._paid(epsilon))
        whole = float(paid[-1])
        count = min(int(np.searchsorted(paid, share * whole)) + 1, paid.size) if share else 0
        total = self._at_infinity + whole
        if count == 0 or whole <= 0.0:
            return min(total, 1.0)
        total -= float(paid[count - 1])
        shrink = math.exp(-self._losses[count - 1])  # e^-τ
        # Blocks of equal pay; within one the depth of its first outcome stands for all.
        edges = np.searchsorted(paid[:count], paid[count - 1] * np.arange(blocks) / blocks)
        edges = np.append(np.unique(edges), count)
        right, roc, floor = self._cells
        for first, last in itertools.pairwise(edges):
            depth = float(self._depth[first])
            below = np.interp(right + shrink * depth, right, roc) - depth + self._excess
            below = np.clip(np.minimum(roc, below), 0.0, 1.0)
            top = self.tuner.runs.pgf_derivative(below)
            price = np.exp(np.minimum(epsilon - self._losses[first:last], 700.0))
            total += float(self._masses[first:last] @ _support(top, floor, price))
        return min(total, 1.0)


def _support(top: Floats, floor: Floats, price: Floats) -> Floats:
    """Return max over cells of `top - price·floor`, at least 0, for ascending prices.

    As `floor` ascends, the best cell moves left as the price grows: only the cells between the best
    ones of the two end prices are looked at.
    """
    right = int(np.argmax(top - price[0] * floor))
    left = int(np.argmax(top - price[-1] * floor))
    cells = slice(min(left, right), max(left, right) + 1)
    # At most some ten million numbers at a time.
    rows = max(1, 10_000_000 // (cells.stop - cells.start))
    best = [
        np.max(top[cells] - price[i : i + rows, None] * floor[cells], axis=1)
        for i in range(0, price.size, rows)
    ]
    return np.asarray(np.maximum(np.concatenate(best), 0.0))
