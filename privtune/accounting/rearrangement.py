"""Best of K once more: the envelope bound, minus what paying outcomes take from each other.

The envelope lets every outcome sit at the level that suits it best, as if it were alone. But an
outcome that is ranked high is not among the low ones, and no level holds more outcomes than its
width. In the worst case what pays is ranked by loss, so each pays at its own depth; and what would
pay at low levels, where there is no depth, pays the price of its level. The theorem and its proof
stand in `accounting/README.md`. It matters where E[K] times the total variation of the base is
large, and for a fixed number of runs; elsewhere it equals the envelope.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.pmf import inner
from privtune.accounting.selection import ROUNDING, Tuner, tangents

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_LEAST_LEVEL = 1e-9  # what φ' is at levels that are not told apart


class Cells:
    """Cells of levels u on which F is linear, and lines below φ'(u) on each."""

    def __init__(self, tuner: Tuner, width: float) -> None:
        self.runs = tuner.runs
        level, roc = tuner.polygon(width, _LEAST_LEVEL)
        wide = np.append(np.diff(level) > 0.0, True)
        self.level, self.roc = level[wide], roc[wide]
        self.slope = np.diff(self.roc) / np.diff(self.level)
        self.floor = tangents(self.runs.pgf_derivative, self.runs.pgf_second_derivative, self.level)
        self.top = self.runs.pgf_derivative(self.roc)
        self.least = float(self.runs.pgf_derivative(0.0))

    def below(self, taken: Floats, depth: Floats) -> tuple[Floats, Floats]:
        """Return lines above G, the P-mass of lower scores, at both ends of each cell."""
        # A tangent of the concave F, at the right end of the cell.
        right = np.minimum(self.level[1:] + taken[:, None], 1.0)
        edge = np.searchsorted(self.level, right) - 1
        height = self.roc[edge] + self.slope[edge] * (right - self.level[edge]) - depth[:, None]
        left = height - self.slope[edge] * np.diff(self.level)
        own = left + height > self.roc[:-1] + self.roc[1:]
        left, height = np.where(own, self.roc[:-1], left), np.where(own, self.roc[1:], height)
        return np.clip(left, 0.0, 1.0), np.clip(height, 0.0, 1.0)

    def charged(self, z: float) -> float:
        """Return the integral of the price π over all levels, with z = z(ℓ*) (README, 5)."""
        ends = zip((self.top[:-1], self.top[1:]), self.floor, strict=True)
        left, right = (np.maximum(top - z * floor, 0.0) for top, floor in ends)
        first = max(float(self.top[0]) - z * self.least, 0.0) * float(self.roc[0])
        return first + 0.5 * inner(left + right, np.diff(self.roc))


class Items:
    """Groups of losses, each at the depth of its block: φ'(G) at both ends of every cell of levels."""

    def __init__(self, cells: Cells, taken: Floats, depth: Floats, *, priced: bool) -> None:
        self.cells, self.size = cells, taken.size
        ends, slope = cells.below(taken, depth), cells.runs.pgf_derivative
        self.top = [slope(end) for end in ends]
        # φ' at the least level at which F is what it is here.
        self.least = [slope(np.interp(end, cells.roc, cells.level)) for end in ends if priced]

    @classmethod
    def chosen(cls, parts: Sequence[Items], numbers: Indices) -> Items:
        """Return some items of several parts: those of these numbers, which ascend through all parts."""
        ends = np.cumsum([part.size for part in parts])
        cuts = np.split(numbers, np.searchsorted(numbers, ends[:-1]))
        places = [cut - (end - part.size) for cut, end, part in zip(cuts, ends, parts, strict=True)]
        found = copy.copy(parts[0])
        found.size = numbers.size
        for name in ("top", "least"):
            sides = zip(*(getattr(part, name) for part in parts), strict=True)
            rows = [[a[i] for a, i in zip(side, places, strict=True)] for side in sides]
            setattr(found, name, [np.concatenate(each) for each in rows])
        return found

    def pay(self, z: Floats, price: float | None) -> Floats:
        """Return what an outcome of each item pays at most, per unit of its P-mass; z is e^(ε - loss)."""
        left, right = self.top
        if price is not None:
            # Less the price, φ' is the smaller of two convex functions of F: chords lie above both.
            low, high = (price * end for end in self.least)
            cheaper = low + high < left + right
            left, right = np.where(cheaper, low, left), np.where(cheaper, high, right)
        floors = self.cells.floor
        columns = [
            np.maximum(
                (left - part[:, None] * floors[0]).max(axis=1),
                (right - part[:, None] * floors[1]).max(axis=1),
            )
            for part in z.T
        ]
        return np.asarray(np.maximum(np.column_stack(columns), 0.0))


def divided(marks: Indices, pieces: Indices, depth: Floats) -> Indices:
    """Return the ends of blocks after each is cut into so many pieces of equal P-mass."""
    block = np.repeat(np.arange(pieces.size), pieces)
    part = np.arange(block.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start, mass = depth[marks[:-1]], np.diff(depth[marks])
    cuts = np.searchsorted(depth, start[block] + mass[block] * part / pieces[block])
    return np.unique(np.append(np.clip(cuts, marks[0], marks[-1]), marks))


_TOLERANCE = 5e-4  # of an ε that is searched for
_ROUNDS = 12


class Ranked:
    """Outcomes of a run, the largest loss first, in one direction of the pair."""

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
        """Return each outcome's part of δ(ε) under the envelope bound."""
        z = np.exp(np.minimum(epsilon - self.losses, 700.0))
        return np.asarray(self.masses * self.tuner.support(z))


class Blocks:
    """The rearrangement bound with one division into blocks, and one price or none; any are valid."""

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
        """Return z(ℓ*) of the price, where there is one."""
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
        """Return ends of about so many blocks, small where what is paid falls with the depth."""
        # A depth taken at the beginning of a block adds least with blocks like the root of mass times fall.
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


# P-mass of what may pay more than a level.
_SHARES = (0.07, 0.1, 0.15, 0.2, 0.25, 0.32, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
# Of the envelope, by what has a depth beside the rest.
_PAID = (0.4, 0.6, 0.75, 0.85, 0.92, 0.97, 0.99, 0.999)
_USUAL = 5  # of either
_FIRST = 8  # blocks of equal pay, and of equal mass
_BLOCKS, _REST, _LAST = (
    (24, 40),
    12,
    192,
)  # blocks of what may have a depth, of the rest, at the end
_TURNS = 2, 7  # of halving groups of lower losses, for the choice of a price and at the end
_WIDTH = 0.2  # of cells of levels: what log φ' moves by
_WIDE = 2.0  # cells for the choice of a price
_GAIN = 0.15  # of what an outcome keeps of φ', what a cell of levels may change
_WORTH = 0.01  # of δ; below it the depth does not matter
_RIVAL = 1.3  # with few blocks; with more the order may be another
_NEAR = 0.93  # of the envelope's ε; there the price is chosen
_PART = math.log(1.1)  # for one ε
_LEAST_PART = 0.02  # below it parts are of one width
_CHOICES = 3
_POINTS, _FEW = 20, 4  # at how many ε it is worth its time
_CELLS = 512  # with more cells of levels than so many the first of these numbers falls


class Rearranged:
    """The bound for one direction of the base's dominating pair, for ε >= 0."""

    def __init__(self, tuner: Tuner, part: float = _PART, choices: int = _CHOICES) -> None:
        self.tuner, self.ranked = tuner, Ranked(tuner)
        self._part, self._choices = part, choices
        self._cut: dict[float, Cells] = {}
        self._guess: dict[int, tuple[Blocks, Indices]] = {}
        self._rough: dict[int, Blocks] = {}
        self._exact: dict[int, Blocks] = {}

    def _best(self, epsilon: float, paying: NDArray[np.bool_]) -> Floats:
        """Return F at the levels at which outcomes pay most under the envelope."""
        z = np.exp(np.minimum(epsilon - self.ranked.losses[paying], 700.0))
        return np.interp(self.tuner.best_level(z), *self.tuner.levels)

    def matters(self, epsilon: float) -> bool:
        """Whether the bound can be below the envelope by more than a percent of δ at this ε."""
        paid = self.ranked.charged(epsilon)
        paying = paid > 0.0
        # To first order an outcome at depth m pays m φ''(F) less, at the level that it likes best.
        slope = self.tuner.runs.pgf_second_derivative(self._best(epsilon, paying))
        lost = inner(self.ranked.masses[paying] * self.ranked.depth[:-1][paying], slope)
        return lost > _WORTH * float(paid.sum())

    def worth(self, epsilon: float) -> int:
        """Return how many answers up to this ε are worth their time, which grows with the cells."""
        return int(_POINTS * min(_CELLS / self._cells(epsilon).level.size, 1.0)) + _FEW

    def delta(self, epsilon: float, least: float = 0.0) -> float:
        """Return the rearrangement bound on δ(ε).

        Args:
            epsilon: At least 0.
            least: What is charged in any case: where the answer is below, it is this.
        """
        place = self._place(epsilon)
        value = min(self._begun(place).delta(epsilon), self.tuner.delta(epsilon))
        if value > least:
            value = min(value, self._ended(place).delta(epsilon))
        return max(value, least)

    def deltas(self, epsilons: Floats) -> Floats:
        """Return a bound on δ(ε) at many ascending ε, with few choices of prices; the envelope is no part."""
        chosen = [
            self._place(float(e)) for e in np.linspace(epsilons[0], epsilons[-1], self._choices)
        ]
        for place in {self._place(float(e)) for e in epsilons} - self._rough.keys() - set(chosen):
            after, epsilon = bisect_left(chosen, place), self._middle(place)
            around = [self._begun(one) for one in chosen[max(after - 1, 0) : after + 1]]
            # Blocks for another ε would be compared badly: first each gets its own.
            anew = [
                self._few(epsilon, one.refined(epsilon, _BLOCKS[0]), one.end, priced=one.priced)
                for one in around
            ]
            self._rough[place] = min(anew, key=lambda bound: bound.delta(epsilon))
        return np.array([self._ended(self._place(float(e))).delta(float(e)) for e in epsilons])

    def epsilon(self, delta: float, start: float, least: float = 0.0) -> float:
        """Return an ε at which the rearrangement bound is at most delta.

        Args:
            delta: The target, above 0.
            start: An ε at which the envelope is at most delta.
            least: What is charged in any case: where the answer is below, it is this.
        """
        near = least or _NEAR * start
        guess = self._guessed(self._place(near))[0]
        if least and guess.delta(least) <= delta:
            return least
        near = guess.epsilon(delta, start, near)
        if least and self._begun(self._place(near)).delta(least) <= delta:
            return least
        found: dict[int, float] = {}
        # The answer lies where the bound that gave it is the one that `delta` takes.
        while (place := self._place(near)) not in found:
            near = found[place] = self._ended(place).epsilon(delta, start, near)
        if len(found) > 1 and near != found[place]:
            # Two parts, each of whose bounds leads to the other: at their border both hold.
            near = min(
                max(near, found[place]), self._middle(max(place, self._place(found[place])) - 0.5)
            )
        return near

    def _cells(self, epsilon: float, wider: float = 1.0) -> Cells:
        """Return cells of levels that are narrow enough for what outcomes gain near this ε."""
        paid = self.ranked.charged(epsilon)
        paying = paid > 0.0
        slope = self.tuner.runs.pgf_derivative(self._best(epsilon, paying))
        gained = float(paid.sum()) / max(inner(self.ranked.masses[paying], slope), 1e-300)
        # What a cell changes is of second order in its width, and of more where little is gained.
        power = math.floor(math.log2(max(min(gained / _GAIN, 1.0), 1e-6)))
        width = wider * _WIDTH * 2.0 ** (0.75 * power)
        if width not in self._cut:
            self._cut[width] = Cells(self.tuner, width)
        return self._cut[width]

    def _place(self, epsilon: float) -> int:
        """Return the number of the part of the ε axis in which one bound is used."""
        return round(math.asinh(epsilon / _LEAST_PART) / self._part)

    def _middle(self, place: float) -> float:
        return _LEAST_PART * math.sinh(place * self._part)

    def _begun(self, place: int) -> Blocks:
        """Return the best of some rearrangement bounds near an ε, with few blocks and wide cells."""
        if place not in self._rough:
            self._rough[place] = self._choose(place)
        return self._rough[place]

    def _ended(self, place: int) -> Blocks:
        """Return that bound, of the same price, with many blocks and narrow cells."""
        if place not in self._exact:
            begun, epsilon = self._begun(place), self._middle(place)
            marks = begun.refined(epsilon, _LAST)
            bound = Blocks(self.ranked, self._cells(epsilon), marks, priced=begun.priced)
            self._exact[place] = bound.sharpened(epsilon, _TURNS[1])
        return self._exact[place]

    def _guessed(self, place: int) -> tuple[Blocks, Indices]:
        """Return the bound with the usual price near an ε, and blocks to choose another one with."""
        if place not in self._guess:
            epsilon = self._middle(place)
            paid = self.ranked.charged(epsilon)
            last = int(np.flatnonzero(paid > 0.0)[-1]) + 1 if paid.any() else 1
            end = int(np.searchsorted(self.ranked.depth, _SHARES[_USUAL] * self.ranked.depth[-1]))
            end = min(max(end, 1), last)
            parts = np.arange(_FIRST) / _FIRST
            sums = (np.cumsum(paid[:last]), self.ranked.depth[1 : last + 1])
            starts = np.concatenate(
                [np.searchsorted(one, one[-1] * parts, "right") for one in sums]
            )
            marks = np.unique(np.concatenate([[0, last], np.minimum(starts, last)]))
            rest = divided(np.array([end, last]), np.array([_REST]), self.ranked.depth)
            bound = self._few(epsilon, marks, end, priced=True)
            for number in _BLOCKS:
                marks = bound.refined(epsilon, number)
                bound = self._few(epsilon, marks, end, priced=True)
            self._guess[place] = bound, np.union1d(marks, rest)
        return self._guess[place]

    def _few(self, epsilon: float, marks: Indices, end: int, *, priced: bool) -> Blocks:
        """Return the bound with blocks of these marks up to an end, and wide cells."""
        kept = np.append(marks[marks < end], end)
        bound = Blocks(self.ranked, self._cells(epsilon, _WIDE), kept, priced=priced)
        return bound.sharpened(epsilon, _TURNS[0])

    def _choose(self, place: int) -> Blocks:
        epsilon, marks = self._middle(place), self._guessed(place)[1]
        by_pay = np.append(0.0, np.cumsum(self.ranked.charged(epsilon)))

        def bound(sums: Floats, share: float, *, priced: bool) -> Blocks:
            end = int(np.searchsorted(sums, share * sums[-1]))
            return self._few(epsilon, marks, min(max(end, 1), int(marks[-1])), priced=priced)

        value, best = _least(partial(bound, self.ranked.depth, priced=True), _SHARES, epsilon)
        other = bound(by_pay, _PAID[_USUAL], priced=False)
        if other.delta(epsilon) < _RIVAL * value:
            found = _least(partial(bound, by_pay, priced=False), _PAID, epsilon)
            best = found[1] if found[0] < value else best
        return best


def _least(
    bound: Callable[[float], Blocks], shares: tuple[float, ...], epsilon: float
) -> tuple[float, Blocks]:
    """Return the least δ among bounds of several shares, found by descent, and the bound that has it."""

    def tried(share: float) -> tuple[float, Blocks]:
        found = bound(share)
        return found.delta(epsilon), found

    best, place = tried(shares[_USUAL]), _USUAL
    for step in (2, 1):
        for move in (step, -step):
            while 0 <= place + move < len(shares):
                found = tried(shares[place + move])
                if found[0] >= best[0]:
                    break
                best, place = found, place + move
    return best
