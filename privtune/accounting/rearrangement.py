"""Best of K once more: the envelope bound, minus what paying outcomes take from each other.

The envelope lets every outcome sit at the level that suits it best, as if it were alone. But an
outcome that is ranked high is not among the low ones, and no level holds more outcomes than its
width. In the worst case what pays is ranked by loss, so each pays at its own depth; and what would
pay at low levels, where there is no depth, pays the price of its level. The theorem and its proof
stand in `accounting/README.md`. It matters where E[K] times the total variation of the base is
large, and for a fixed number of runs; elsewhere it equals the envelope.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.selection import ROUNDING, Tuner

__all__ = ["Rearranged"]

Floats = NDArray[np.float64]
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.08)  # P-mass of what may pay more than a level
_PAID = (0.97, 0.999, 0.92, 0.85, 0.75, 0.6)  # of the envelope, by what has a depth beside the rest
_LATER = 5  # groups of lower losses
_SIZE, _FINE = (24, _LATER), 0.03  # of the answer
_FEW, _COARSE = (8, _LATER), 4.0  # of the choice of a price, which any number of blocks may make
_GAIN = 0.15  # of what an outcome keeps of φ', what a cell of levels may change
_POWER = 1.5  # groups of nearly the block's own losses are the smaller ones
_LEAST_LEVEL = 1e-9  # what φ' is at levels that are not told apart
_WORTH = 0.01  # of δ; below it the depth does not matter
_MIDDLE = 3
_RIVAL = 1.3  # with few blocks; with more the order may be another
_TOLERANCE = 5e-4
_NEAR = 0.93  # of the envelope's ε; there the price is chosen
_ROUNDS = 12
_PART = math.log(1.1)  # of the ε axis, for which one price and one set of blocks are chosen
_LEAST_PART = 0.02  # below it parts are of one width


class _Cells:
    """Cells of levels: right end, F there, φ' at the left end, as many as φ' needs."""

    def __init__(self, tuner: Tuner, resolution: float) -> None:
        self.runs = tuner.runs
        level, roc = tuner.levels
        slope = self.runs.pgf_derivative(level)
        height = np.log(np.maximum(self.runs.pgf_derivative(roc), _LEAST_LEVEL))
        height += np.log(np.maximum(slope, _LEAST_LEVEL))
        last = np.flatnonzero(np.diff(np.floor(height[1:] / resolution), append=np.inf))
        self.right, self.roc = level[1:][last], roc[1:][last]
        self.floor = slope[:-1][np.append(0, last[:-1] + 1)]
        self.top = self.runs.pgf_derivative(self.roc)
        # All of it: a chord between the ends of cells would be below the concave curve.
        self.polygon = level, roc

    def price(self, z: float) -> tuple[Floats, float]:
        """Return a price of levels G from which no outcome of `e^(ε - loss) >= z` can pay more.

        It rises and then falls, so that on an interval it is least at one of the ends.

        Returns:
            The price in each cell of F, and its integral.
        """
        price = np.maximum(self.top - z * self.floor, 0.0)
        fall = np.maximum.accumulate(price[::-1])[::-1]
        price = np.minimum(np.maximum.accumulate(price), fall)
        return price, float(price @ np.diff(self.roc, prepend=0.0))


class _Block:
    """What is left of the ROC curve at the depth of a block of outcomes.

    Args:
        cells: The cells of levels.
        depth: The P-mass above the block.
        ends: The end of the block, in descending order of loss, and of groups of lower losses.
        rearranged: The outcomes.
    """

    def __init__(
        self, cells: _Cells, depth: float, ends: NDArray[np.int64], rearranged: Rearranged
    ) -> None:
        self.cells = cells
        self.groups = ends[:-1]
        last = rearranged.depth[ends]
        # The most Q-mass that what is above may have: it lies right above the group's last loss.
        taken = rearranged.level[ends] - np.interp(last - depth, rearranged.depth, rearranged.level)
        curve = np.interp(cells.right + taken[:, None], *cells.polygon)
        curve = np.minimum(cells.roc, curve - (depth - rearranged.excess))
        curve = np.clip(curve, 0.0, 1.0, out=curve)
        self.top = cells.runs.pgf_derivative(curve)
        self.place = np.minimum(np.searchsorted(cells.roc, curve), cells.roc.size - 1)

    def paid(self, z: Floats, own: slice, price: Floats | None) -> Floats:
        """Return what each outcome of the block pays at most, per unit of its P-mass."""
        top, floor = self.top, self.cells.floor
        if price is not None:
            # On a cell the price is least at one of its ends.
            charged = price[self.place]
            least = np.minimum(charged, price[0])
            np.minimum(charged[:, 1:], charged[:, :-1], out=least[:, 1:])
            top = top - least
        lower = float(np.max(top[1:] - z[self.groups, None] * floor, initial=0.0))
        return np.maximum(_support(top[0], floor, z[own]), lower)


class Rearranged:
    """The bound for one direction of the base's dominating pair, for ε >= 0.

    Args:
        tuner: The envelope bound in the same direction.
    """

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        base = tuner.base
        self.losses, self.masses = base.losses[::-1], base.masses[::-1]
        with np.errstate(over="ignore", divide="ignore"):
            without = np.exp(np.log(self.masses) - self.losses)
        # The P-mass and the Q-mass of the outcomes of larger loss.
        self.depth = np.concatenate([[0.0], np.cumsum(self.masses)])
        self.level = np.concatenate([[0.0], np.cumsum(without)])
        # Masses that rounding raised count in a depth as in F, except where F stops at 1.
        self.excess = max(float(self.depth[-1]) + base.infinite - 1.0, 0.0) + ROUNDING
        self.at_infinity = float(tuner.runs.pgf_derivative(1.0)) * base.infinite
        self._cut: dict[float, _Cells] = {}
        self._rough: dict[int, _Bound] = {}
        self._exact: dict[int, _Bound] = {}

    def _cells(self, epsilon: float, coarser: float = 1.0) -> _Cells:
        """Return cells of levels which what is gained near this ε can be told in."""
        paying, paid, height = self._best(epsilon)
        gained = float(paid.sum()) / max(float(self.masses[paying] @ height), 1e-300)
        power = math.floor(math.log2(max(min(_GAIN * gained / _FINE, 1.0), 1e-6)))
        resolution = _FINE * 2.0**power * coarser
        if resolution not in self._cut:
            self._cut[resolution] = _Cells(self.tuner, resolution)
        return self._cut[resolution]

    def _best(self, epsilon: float) -> tuple[NDArray[np.bool_], Floats, Floats]:
        """Return what pays under the envelope, what it pays, and φ' of F where it pays most."""
        paid = self.masses * self.envelope(epsilon)
        paying = paid > 0.0
        z = np.exp(np.minimum(epsilon - self.losses[paying], 700.0))
        level, roc = self.tuner.levels
        best = np.interp(self.tuner.best_level(z), level, roc)
        return paying, paid[paying], self.tuner.runs.pgf_derivative(best)

    def matters(self, epsilon: float) -> bool:
        """Whether the bound can be below the envelope by more than a percent of δ at this ε."""
        paid = self.masses * self.envelope(epsilon)
        whole = float(paid.sum())
        if whole <= 0.0:
            return False
        # To first order an outcome at depth m pays m φ''(F) less, at the level that it likes best.
        paying = paid > 0.0
        z = np.exp(np.minimum(epsilon - self.losses[paying], 700.0))
        level, roc = self.tuner.levels
        height = np.interp(self.tuner.best_level(z), level, roc)
        slope = self.tuner.runs.pgf_second_derivative(height)
        lost = (self.masses[paying] * self.depth[:-1][paying]) @ slope
        return float(lost) > _WORTH * whole

    def delta(self, epsilon: float, least: float = 0.0) -> float:
        """Return the bound on δ(ε).

        Args:
            epsilon: At least 0.
            least: What is charged in any case: where the answer is below, it is this.
        """
        place = _place(epsilon)
        value = min(self._coarse(place).delta(epsilon), self.tuner.delta(epsilon))
        if value > least:
            value = min(value, self._fine(place).delta(epsilon))
        return max(value, least)

    def epsilon(self, delta: float, start: float, least: float = 0.0) -> float:
        """Return an ε at which the bound is at most delta.

        Args:
            delta: The target, above 0.
            start: An ε at which the envelope is at most delta.
            least: What is charged in any case: where the answer is below, it is this.
        """
        near = least or _NEAR * start
        coarse = self._coarse(_place(near))
        if least and coarse.delta(least) <= delta:
            return least
        near = coarse.epsilon(delta, start, near)
        found: dict[int, float] = {}
        # The answer lies where the bound that gave it is the one that `delta` takes.
        while (place := _place(near)) not in found:
            near = found[place] = self._fine(place).epsilon(delta, start, near)
        if len(found) > 1 and near != found[place]:
            # Two parts, each of whose bounds leads to the other: at their border both hold.
            near = min(max(near, found[place]), _middle(max(place, _place(found[place])) - 0.5))
        return near

    def _coarse(self, place: int) -> _Bound:
        """Return the bound with the best of some prices near an ε, with few cells of levels."""
        if place not in self._rough:
            self._rough[place] = self._choose(_middle(place))
        return self._rough[place]

    def _fine(self, place: int) -> _Bound:
        """Return the bound with the same price and blocks, and many cells."""
        if place not in self._exact:
            coarse = self._coarse(place)
            self._exact[place] = coarse.like(self._cells(_middle(place)), coarse.pay)
        return self._exact[place]

    def _choose(self, epsilon: float) -> _Bound:
        cells = self._cells(epsilon, _COARSE)
        paid = self.masses * self.envelope(epsilon)
        paid = self.masses * self._bound(cells, paid, _MIDDLE, _FEW).paid(epsilon)[0]

        def cost(share: int) -> float:
            return self._bound(cells, paid, share, _FEW).delta(epsilon)

        # Away from the middle as long as it pays.
        best, value = _MIDDLE, cost(_MIDDLE)
        for side in (range(_MIDDLE + 1, len(_SHARES)), range(_MIDDLE - 1, -1, -1)):
            for share in side:
                more = cost(share)
                if more >= value:
                    break
                best, value = share, more
            if best != _MIDDLE:
                break
        # Few blocks charge too much where there are few prices.
        found = [self._bound(cells, paid, share, _SIZE) for share in {best, max(best - 1, 0)}]
        found += self._beside_envelope(cells, epsilon, value)
        best_found = min(found, key=lambda bound: bound.delta(epsilon))
        again = self.masses * best_found.paid(epsilon)[0]
        found = [best_found, best_found.like(cells, again)]
        return min(found, key=lambda bound: bound.delta(epsilon))

    def _beside_envelope(self, cells: _Cells, epsilon: float, other: float) -> list[_Bound]:
        """Return the best bound that charges low losses by the envelope, if it rivals another."""
        paid = self.masses * self.envelope(epsilon)
        sums = np.cumsum(paid)

        def bound(share: float, size: tuple[int, int]) -> _Bound:
            count = min(int(np.searchsorted(sums, share * sums[-1])) + 1, paid.size)
            return _Bound(self, cells, paid, count, size, priced=False)

        best, value = _PAID[0], math.inf
        for share in _PAID:
            found = bound(share, _FEW).delta(epsilon)
            if found < value:
                best, value = share, found
            elif share < best:
                break
        return [bound(best, _SIZE)] if value < _RIVAL * other else []

    def _bound(self, cells: _Cells, paid: Floats, share: int, size: tuple[int, int]) -> _Bound:
        count = paid.size
        if _SHARES[share] < 1.0:
            count = int(np.searchsorted(self.depth, _SHARES[share] * self.depth[-1], "right")) - 1
            count = min(max(count, 1), paid.size - 1)
        return _Bound(self, cells, paid, count, size)

    def envelope(self, epsilon: float) -> Floats:
        """Return what each outcome pays under the envelope, per unit of its P-mass."""
        return self.tuner.support(np.exp(np.minimum(epsilon - self.losses, 700.0)))


class _Bound:
    """The bound with one price on levels and one division into blocks; any are valid.

    Args:
        rearranged: The outcomes.
        cells: The cells of levels.
        paid: What each outcome pays, nearly: blocks pay alike.
        count: The number of the outcomes of largest loss that have a depth.
        size: The number of blocks, and of groups of lower losses.
        priced: Whether levels have a price that the others cannot exceed; else those pay what the
            envelope charges.
    """

    def __init__(
        self,
        rearranged: Rearranged,
        cells: _Cells,
        paid: Floats,
        count: int,
        size: tuple[int, int],
        *,
        priced: bool = True,
    ) -> None:
        self.rearranged, self.cells, self.pay = rearranged, cells, paid
        self.count, self.size, self.priced = count, size, priced
        depth = rearranged.depth
        # Blocks of equal pay, and what hardly pays by equal mass: a wide block takes much Q-mass.
        shares = np.arange(size[0]) / size[0]
        marks = [
            np.searchsorted(sums, sums[-1] * shares, side="right")
            for sums in (np.cumsum(paid[: self.count]), depth[1 : self.count + 1])
        ]
        edges = np.unique(np.concatenate(marks))
        edges = np.append(np.append(0, edges[(edges > 0) & (edges < self.count)]), self.count)
        self.blocks = []
        for i, (first, last) in enumerate(itertools.pairwise(edges)):
            # A block pays for its own losses or for lower ones.
            rest = edges.size - 2 - i
            ends = (i + 1 + rest * np.linspace(0.0, 1.0, size[1] + 1) ** _POWER).astype(np.int64)
            block = _Block(cells, float(depth[first]), edges[np.unique(ends)], rearranged)
            self.blocks.append((slice(first, last), block))

    def like(self, cells: _Cells, paid: Floats) -> _Bound:
        """Return the same with other cells, and blocks that pay alike by other payments."""
        return _Bound(self.rearranged, cells, paid, self.count, self.size, priced=self.priced)

    def paid(self, epsilon: float) -> tuple[Floats, float]:
        """Return what each outcome pays at most, per unit of its P-mass, and what levels do."""
        z = np.exp(np.minimum(epsilon - self.rearranged.losses, 700.0))
        paid, price, charged = np.zeros(z.size), None, 0.0
        if self.count < z.size and self.priced:
            price, charged = self.cells.price(float(z[self.count]))
        elif self.count < z.size:
            paid[self.count :] = self.rearranged.envelope(epsilon)[self.count :]
        for own, block in self.blocks:
            paid[own] = block.paid(z, own, price)
        return paid, charged

    def delta(self, epsilon: float) -> float:
        """Return the bound on δ(ε)."""
        paid, charged = self.paid(epsilon)
        total = float(self.rearranged.masses @ paid) + charged + self.rearranged.at_infinity
        return min(total, 1.0)

    def epsilon(self, delta: float, start: float, near: float) -> float:
        """Return an ε of at most `start` at which the bound is at most delta, or `start`."""

        def excess(point: float) -> float:
            return math.log(max(self.delta(point), 1e-300) / delta)

        high, low, place, last = start, 0.0, near, excess(near)
        high, low = (place, low) if last <= 0.0 else (high, place)
        slope = -max(2.0, math.log(1.0 / delta)) / max(start, 1e-3)
        for _ in range(_ROUNDS):
            # log δ is nearly a line in ε; aim a little to the safe side of its root.
            point = place - last / slope + 0.3 * _TOLERANCE * high
            if not low < point < high:
                point = 0.5 * (low + high)
            value = excess(point)
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


def _place(epsilon: float) -> int:
    """Return the number of the part of the ε axis in which one bound is used."""
    return round(math.asinh(epsilon / _LEAST_PART) / _PART)


def _middle(place: float) -> float:
    return _LEAST_PART * math.sinh(place * _PART)


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
