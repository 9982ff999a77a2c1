"""The bound of `rearrangement` with one division of losses into blocks, each at its own depth."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.depths import Cells, Items, divided
from privtune.accounting.selection import ROUNDING, Tuner

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_TOLERANCE = 5e-4  # of an ε that is searched for
_ROUNDS = 12


class Ranked:
    """Outcomes of a run, the largest loss first, in one direction of the pair.

    Args:
        tuner: The envelope bound in the same direction.
    """

    def __init__(self, tuner: Tuner) -> None:
        self.tuner, base = tuner, tuner.base
        self.losses, self.masses = base.losses[::-1], base.masses[::-1]
        with np.errstate(over="ignore", divide="ignore"):
            without = np.exp(np.log(self.masses) - self.losses)
        # The P-mass and the Q-mass of the outcomes of larger loss.
        self.depth = np.concatenate([[0.0], np.cumsum(self.masses)])
        self.level = np.concatenate([[0.0], np.cumsum(without)])
        # Masses that rounding raised count in a depth as in F, except where F stops at 1.
        self.excess = max(float(self.depth[-1]) + base.infinite - 1.0, 0.0) + ROUNDING
        self.at_infinity = float(tuner.runs.pgf_derivative(1.0)) * base.infinite

    def charged(self, epsilon: float) -> Floats:
        """Return what each outcome pays under the envelope."""
        z = np.exp(np.minimum(epsilon - self.losses, 700.0))
        return np.asarray(self.masses * self.tuner.support(z))


class Blocks:
    """The bound with one division into blocks, and one price or none; any are valid.

    Args:
        ranked: The outcomes.
        cells: The cells of levels.
        marks: Ends of blocks of outcomes, the first of them 0; what comes after has no depth.
        priced: Whether levels have a price that the others cannot exceed; else those pay what the
            envelope charges.
    """

    def __init__(self, ranked: Ranked, cells: Cells, marks: Indices, *, priced: bool) -> None:
        self.ranked, self.cells, self.marks, self.priced = ranked, cells, marks, priced
        count = marks.size - 1
        blocks = np.arange(count)
        self.own = self._items(blocks, blocks + 1)
        # The losses below those of a block that may be at its depth are one group as yet.
        self.block, self.first, self.last = blocks[:-1], blocks[1:], np.full(count - 1, count)
        self.lower = self._items(self.block, self.last)
        # What a block's own losses pay is convex in z: chords between three of them lie above it.
        self.points = np.column_stack(
            [marks[:-1], (marks[:-1] + marks[1:] - 1) // 2, marks[1:] - 1]
        )
        self.weights = self._weights()

    def _items(self, block: Indices, last: Indices) -> Items:
        depth, level = self.ranked.depth, self.ranked.level
        above, end = depth[self.marks[block]], self.marks[last]
        # The most Q-mass that what is above may have lies right above the group's last loss.
        taken = level[end] - np.interp(depth[end] - above, depth, level)
        own = above - self.ranked.excess
        return Items(self.cells, taken, own, priced=self._has_price)

    def _weights(self) -> Floats:
        """Return the P-mass that each point of a block stands for."""
        weights = np.zeros(self.points.shape)
        losses, count = self.ranked.losses, self.end
        block = np.repeat(np.arange(self.points.shape[0]), np.diff(self.marks))
        half = (np.arange(count) > self.points[block, 1]).astype(np.int64)
        start, end = losses[self.points[block, half]], losses[self.points[block, half + 1]]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            share = np.expm1(start - losses[:count]) / np.expm1(start - end)
        share = np.where(start > end, np.minimum(share, 1.0), 0.0)
        masses = self.ranked.masses[:count]
        np.add.at(weights, (block, half), masses * (1.0 - share))
        np.add.at(weights, (block, half + 1), masses * share)
        return weights

    def _z(self, epsilon: float, atoms: Indices) -> Floats:
        return np.exp(np.minimum(epsilon - self.ranked.losses[atoms], 700.0))

    @property
    def end(self) -> int:
        """The end of the last block."""
        return int(self.marks[-1])

    def _price(self, epsilon: float) -> float | None:
        """Return z of the largest loss that pays the price of its level, if any does."""
        return float(self._z(epsilon, self.marks[-1])) if self._has_price else None

    @property
    def _has_price(self) -> bool:
        return self.priced and self.end < self.ranked.losses.size

    def _pays(self, epsilon: float) -> tuple[Floats, Floats]:
        """Return what points of blocks, and groups, pay at most, per unit of P-mass."""
        price = self._price(epsilon)
        own = self.own.pay(self._z(epsilon, self.points), price)
        return own, self._pay(epsilon, self.lower, self.first)

    def _pay(self, epsilon: float, items: Items, first: Indices) -> Floats:
        """Return what groups that begin with these blocks pay at most, per unit of P-mass."""
        z = self._z(epsilon, self.marks[first])
        return items.pay(z[:, None], self._price(epsilon))[:, 0]

    def _paid(self, own: Floats, lower: Floats) -> Floats:
        """Return what points of blocks pay at most, whatever loss is at their depth."""
        most = np.zeros(own.shape[0])
        np.maximum.at(most, self.block, lower)
        return np.maximum(own, most[:, None])

    def delta(self, epsilon: float) -> float:
        """Return the bound on δ(ε), for ε >= 0."""
        total = float((self.weights * self._paid(*self._pays(epsilon))).sum())
        price = self._price(epsilon)
        if price is not None:
            total += self.cells.charged(price)
        elif not self.priced:
            total += float(self.ranked.charged(epsilon)[self.end :].sum())
        return min(total + self.ranked.at_infinity, 1.0)

    def sharpened(self, epsilon: float, turns: int) -> Blocks:
        """Halve the groups that pay most at their depth, a few times; return the bound."""
        own, pay = self._pays(epsilon)
        parts, number = [self.lower], np.arange(self.lower.size)
        for _ in range(turns):
            most = self._paid(own, pay)[:, 0]
            halved = (pay >= most[self.block]) & (self.last - self.first > 1)
            if not halved.any():
                break
            middle = (self.first[halved] + self.last[halved]) // 2
            block = np.tile(self.block[halved], 2)
            first = np.append(self.first[halved], middle)
            last = np.append(middle, self.last[halved])
            more = self._items(block, last)
            new = sum(part.size for part in parts) + np.arange(more.size)
            parts.append(more)
            pay = np.append(pay[~halved], self._pay(epsilon, more, first))
            number = np.append(number[~halved], new)
            self.block = np.append(self.block[~halved], block)
            self.first = np.append(self.first[~halved], first)
            self.last = np.append(self.last[~halved], last)
        self.lower = Items.chosen(parts, number)
        return self

    def refined(self, epsilon: float, number: int) -> Indices:
        """Return ends of about so many blocks, small where what is paid falls with the depth.

        What a depth taken at the beginning of each block adds is least with blocks in proportion to
        the root of mass times fall.
        """
        depth = self.ranked.depth
        paid = self._paid(*self._pays(epsilon))[:, 0]
        fall = np.maximum(-np.diff(paid, append=0.0), 0.0)
        error = np.sqrt(fall * np.diff(depth[self.marks]))
        pieces = np.ceil(number * error / max(float(error.sum()), 1e-300)).astype(np.int64)
        return divided(self.marks, np.maximum(pieces, 1), depth)

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
