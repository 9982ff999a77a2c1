"""The rearrangement bound on a best of K: the outcomes of a run cannot all have the best rank.

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

from privtune.accounting.best_of_k import ROUNDING, Tuner, tangents
from privtune.accounting.pmf import exp_capped, inner

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_LEAST_LEVEL = 1e-9  # what φ' is at levels that are not told apart


class Cells:
    """Intervals of levels u on which the ROC curve F(u) is linear, with lines below φ'(u) on each.

    Attributes:
        level: Ends of the cells, ascending in [0, 1], one more than there are cells.
        roc: F at these ends.
        slope: Slope of F in each cell.
        floor: Lines below φ'(u): their values at the beginning and at the end of each cell.
        top: φ'(F) at the ends of the cells.
        least: φ'(0).
    """

    def __init__(self, tuner: Tuner, width: float) -> None:
        self.runs = tuner.runs
        level, roc = tuner.polygon(width, _LEAST_LEVEL)
        wide = np.append(np.diff(level) > 0.0, True)
        self.level = level[wide]
        self.roc = roc[wide]
        self.slope = np.diff(self.roc) / np.diff(self.level)
        self.floor = tangents(
            self.runs.pgf_derivative,
            self.runs.pgf_second_derivative,
            self.level,
        )
        self.top = self.runs.pgf_derivative(self.roc)
        self.least = float(self.runs.pgf_derivative(0.0))

    def below(self, above: Floats, depth: Floats) -> tuple[Floats, Floats]:
        """Return lines above the P-mass of lower scores, at both ends of each interval of levels.

        Args:
            above: The most Q-mass that what is ranked higher may have, shape ``[n]``.
            depth: The P-mass of what is ranked higher, shape ``[n]``.

        Returns:
            Values at the beginning and at the end of each cell, shape ``[n, cells]`` each.
        """
        # A tangent of the concave F, at the end of the cell.
        end = self.level[1:] + above[:, None]
        np.minimum(end, 1.0, out=end)
        edge = np.searchsorted(self.level, end)
        edge -= 1
        slope = self.slope[edge]
        at_end = end
        at_end -= self.level[edge]
        at_end *= slope
        at_end += self.roc[edge]
        at_end -= depth[:, None]
        slope *= np.diff(self.level)
        at_start = np.subtract(at_end, slope, out=slope)
        # G is at most F, too: of the two lines the one that is lower in the middle.
        roc_start = self.roc[:-1]
        roc_end = self.roc[1:]
        is_higher = at_start + at_end > roc_start + roc_end
        np.copyto(at_start, roc_start, where=is_higher)
        np.copyto(at_end, roc_end, where=is_higher)
        return at_start.clip(0.0, 1.0, out=at_start), at_end.clip(0.0, 1.0, out=at_end)

    def charged(self, z: float) -> float:
        """Return what the prices of all levels (README, 5) add to the bound on δ, set by this z."""
        floor_at_start, floor_at_end = self.floor
        at_start = self.top[:-1] - z * floor_at_start
        at_end = self.top[1:] - z * floor_at_end
        at_start = np.maximum(at_start, 0.0)
        at_end = np.maximum(at_end, 0.0)
        # What F has at level 0 pays the price of the lowest level.
        lowest_price = max(float(self.top[0]) - z * self.least, 0.0)
        lowest = lowest_price * float(self.roc[0])
        widths = np.diff(self.roc)
        return lowest + 0.5 * inner(at_start + at_end, widths)


class Items:
    """Groups of outcomes by loss, with bounds on what they add to δ at the ends of each interval of levels.

    Attributes:
        top: φ'(G) at the beginning and at the end of each cell, one row for each item.
        least: φ' at the least level at which F is what it is there; nothing where there is no price.
    """

    def __init__(
        self,
        cells: Cells,
        above: Floats,
        depth: Floats,
        *,
        priced: bool,
    ) -> None:
        self.cells = cells
        self.size = above.size
        self.top: list[Floats] = []
        self.least: list[Floats] = []
        derivative = cells.runs.pgf_derivative
        for line in cells.below(above, depth):
            self.top.append(derivative(line))
            if priced:
                level = np.interp(line, cells.roc, cells.level)
                self.least.append(derivative(level))

    @classmethod
    def gather(cls, parts: Sequence[Items], numbers: Indices) -> Items:
        """Return the groups with these ascending numbers, counted through all parts."""
        ends = np.cumsum([part.size for part in parts])
        places = np.searchsorted(numbers, ends[:-1])
        cuts = np.split(numbers, places)
        rows = []
        for cut, end, part in zip(cuts, ends, parts, strict=True):
            rows.append(cut - (end - part.size))
        items = copy.copy(parts[0])
        items.size = numbers.size
        items.top = _gather_rows([part.top for part in parts], rows)
        items.least = _gather_rows([part.least for part in parts], rows)
        return items

    def pay(self, z: Floats, price: float | None) -> Floats:
        """Return the most that the outcomes of each group add to δ, per unit of P-mass.

        Args:
            z: e^(ε - loss), one row for each item.
            price: z(ℓ*) of the price, or None.
        """
        at_start, at_end = self.top
        if price is not None:
            # Less the price, φ' is the smaller of two convex functions of F: chords lie above both.
            priced_start, priced_end = self.least
            priced_start = price * priced_start
            priced_end = price * priced_end
            cheaper = priced_start + priced_end < at_start + at_end
            at_start = np.where(cheaper, priced_start, at_start)
            at_end = np.where(cheaper, priced_end, at_end)
        floor_at_start, floor_at_end = self.cells.floor
        paid = np.empty(z.shape)
        # One table for all: they are large, and there are many.
        remainder = np.empty(at_start.shape)
        for number, column in enumerate(z.T):
            factor = column[:, None]
            np.multiply(factor, floor_at_start, out=remainder)
            np.subtract(at_start, remainder, out=remainder)
            from_start = remainder.max(axis=1)
            np.multiply(factor, floor_at_end, out=remainder)
            np.subtract(at_end, remainder, out=remainder)
            from_end = remainder.max(axis=1)
            paid[:, number] = np.maximum(from_start, from_end)
        return np.maximum(paid, 0.0)


def _gather_rows(tables: list[list[Floats]], rows: list[Indices]) -> list[Floats]:
    """Return the selected rows of several tables, stacked, for each end of the cells."""
    gathered = []
    for sides in zip(*tables, strict=True):
        pieces = [side[numbers] for side, numbers in zip(sides, rows, strict=True)]
        gathered.append(np.concatenate(pieces))
    return gathered


def divide_blocks(
    marks: Indices,
    pieces: Indices,
    depth: Floats,
) -> Indices:
    """Return the ends of blocks after block i is cut into `pieces[i]` pieces of equal P-mass.

    Args:
        marks: Ends of the blocks, places among the ranked outcomes, ascending.
        pieces: How many pieces each block is cut into.
        depth: P-mass of the outcomes before each place.
    """
    block = np.repeat(np.arange(pieces.size), pieces)
    first_of_block = np.cumsum(pieces) - pieces
    first = np.repeat(first_of_block, pieces)
    piece = np.arange(block.size) - first
    start = depth[marks[:-1]]
    mass = np.diff(depth[marks])
    share = mass[block] * piece / pieces[block]
    target = start[block] + share
    cuts = np.searchsorted(depth, target)
    inside = np.clip(cuts, marks[0], marks[-1])
    return np.unique(np.append(inside, marks))


_TOLERANCE = 5e-4  # of an ε that is searched for
_ROUNDS = 12


class Ranked:
    """The outcomes of a run in one direction of its pair, ranked by falling loss.

    Attributes:
        losses: Their losses, falling.
        masses: Their P-masses.
        depth: P-mass of what is ranked higher than each, and of all at the end.
        level: The same Q-mass.
        excess: P-mass that rounding may have added to a depth.
        at_infinity: What outcomes of infinite loss add to δ at any ε.
    """

    def __init__(self, tuner: Tuner) -> None:
        base = tuner.base
        self.tuner = tuner
        self.losses = base.losses[::-1]
        self.masses = base.masses[::-1]
        with np.errstate(over="ignore", divide="ignore"):
            q_masses = np.exp(np.log(self.masses) - self.losses)
        self.depth = np.concatenate([[0.0], np.cumsum(self.masses)])
        self.level = np.concatenate([[0.0], np.cumsum(q_masses)])
        # Masses that rounding raised count in a depth as in F, except where F stops at 1.
        surplus = float(self.depth[-1]) + base.infinite - 1.0
        self.excess = max(surplus, 0.0) + ROUNDING
        slope = float(tuner.runs.pgf_derivative(1.0))
        self.at_infinity = slope * base.infinite

    def charged(self, epsilon: float) -> Floats:
        """Return what each outcome adds to δ(ε) under the envelope bound."""
        z = exp_capped(epsilon - self.losses)
        return self.masses * self.tuner.support(z)


class Blocks:
    """A rearrangement bound, computed for one division of a run's ranked outcomes into blocks.

    Attributes:
        marks: Ends of the blocks, places among the ranked outcomes.
        priced: Whether what has no depth pays the price of its level.
        block: For each group of lower losses, the block at whose depth it may stand.
        first: The block with which the group begins.
        last: The block before which it ends.
        points: Three places of each block, between whose losses chords are drawn.
        weights: The P-mass that each of these points stands for.
    """

    def __init__(
        self,
        ranked: Ranked,
        cells: Cells,
        marks: Indices,
        *,
        priced: bool,
    ) -> None:
        self.ranked = ranked
        self.cells = cells
        self.marks = marks
        self.priced = priced
        count = marks.size - 1
        blocks = np.arange(count)
        self.block_items = self._items(blocks, blocks + 1)
        # The losses below those of a block that may be at its depth are one group as yet.
        self.block = blocks[:-1]
        self.first = blocks[1:]
        self.last = np.full(count - 1, count)
        self.group_items = self._items(self.block, self.last)
        # What a block's own losses pay is convex in z: chords between three of them lie above it.
        middles = (marks[:-1] + marks[1:] - 1) // 2
        lasts = marks[1:] - 1
        self.points = np.column_stack([marks[:-1], middles, lasts])
        self.weights = self._weights()

    def _items(self, block: Indices, last: Indices) -> Items:
        """Return groups of outcomes that end before the blocks `last`, placed at the depth of `block`."""
        depth = self.ranked.depth
        level = self.ranked.level
        block_depth = depth[self.marks[block]]
        end = self.marks[last]
        # The most Q-mass that what is above may have lies right above the group's last loss.
        group_depth = depth[end] - block_depth
        above = level[end] - np.interp(group_depth, depth, level)
        return Items(
            self.cells,
            above,
            block_depth - self.ranked.excess,
            priced=self._has_price,
        )

    def _weights(self) -> Floats:
        """Return the P-mass that each of a block's three points stands for, one row for each block."""
        weights = np.zeros(self.points.shape)
        count = self.end
        losses = self.ranked.losses
        masses = self.ranked.masses[:count]
        blocks = np.arange(self.points.shape[0])
        block = np.repeat(blocks, np.diff(self.marks))
        is_late = np.arange(count) > self.points[block, 1]
        half = is_late.astype(np.int64)
        start = losses[self.points[block, half]]
        end = losses[self.points[block, half + 1]]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            width = np.expm1(start - end)
            share = np.expm1(start - losses[:count]) / width
        share = np.where(start > end, np.minimum(share, 1.0), 0.0)
        to_start = masses * (1.0 - share)
        to_end = masses * share
        np.add.at(weights, (block, half), to_start)
        np.add.at(weights, (block, half + 1), to_end)
        return weights

    def _z(self, epsilon: float, places: Indices) -> Floats:
        """Return e^(ε - loss) of the ranked outcomes at these indices."""
        return exp_capped(epsilon - self.ranked.losses[places])

    @property
    def end(self) -> int:
        """The end of the last block, as an index of the ranked outcomes."""
        return int(self.marks[-1])

    def _price(self, epsilon: float) -> float | None:
        """Return the z = e^(ε - loss) that sets the prices of levels (README, 5); None without prices."""
        if not self._has_price:
            return None
        return float(self._z(epsilon, self.marks[-1]))

    @property
    def _has_price(self) -> bool:
        """Whether levels have prices, and outcomes beyond the last block pay them."""
        return self.priced and self.end < self.ranked.losses.size

    def _pay_blocks(self, epsilon: float) -> Floats:
        """Return the most that the points of each block add to δ, per unit of P-mass."""
        z = self._z(epsilon, self.points)
        return self.block_items.pay(z, self._price(epsilon))

    def _pay_groups(self, epsilon: float) -> Floats:
        """Return the most that each group of lower losses adds to δ, per unit of P-mass."""
        return self._pay(epsilon, self.group_items, self.first)

    def _pay(
        self,
        epsilon: float,
        items: Items,
        first: Indices,
    ) -> Floats:
        """Return the most that groups beginning with the blocks `first` add to δ, per unit of P-mass."""
        z = self._z(epsilon, self.marks[first])
        price = self._price(epsilon)
        paid = items.pay(z[:, None], price)
        return paid[:, 0]

    def _most_paid(self, by_points: Floats, by_groups: Floats) -> Floats:
        """Return the larger of what a point adds to δ itself, and what the best group at its block adds."""
        most = np.zeros(by_points.shape[0])
        np.maximum.at(most, self.block, by_groups)
        return np.maximum(by_points, most[:, None])

    def _pay_all(self, epsilon: float) -> Floats:
        """Return the most that each point of a block adds to δ(ε), by itself or in a group placed there."""
        by_points = self._pay_blocks(epsilon)
        by_groups = self._pay_groups(epsilon)
        return self._most_paid(by_points, by_groups)

    def delta(self, epsilon: float) -> float:
        """Return the rearrangement bound on δ(ε) by these blocks, for ε >= 0."""
        paid = self._pay_all(epsilon)
        total = float((self.weights * paid).sum())
        price = self._price(epsilon)
        if price is not None:
            total += self.cells.charged(price)
        elif not self.priced:
            total += float(self.ranked.charged(epsilon)[self.end :].sum())
        return min(total + self.ranked.at_infinity, 1.0)

    def sharpened(self, epsilon: float, turns: int) -> Blocks:
        """Halve the groups that add most to δ, up to `turns` times, and return the smaller bound.

        A group pays at the depth of its block as if all of it stood at its first loss; halves pay no more.
        """
        by_points = self._pay_blocks(epsilon)
        by_groups = self._pay_groups(epsilon)
        parts = [self.group_items]
        number = np.arange(self.group_items.size)
        for _ in range(turns):
            most = self._most_paid(by_points, by_groups)[:, 0]
            is_wide = self.last - self.first > 1
            halved = (by_groups >= most[self.block]) & is_wide
            if not halved.any():
                break
            middle = (self.first[halved] + self.last[halved]) // 2
            block = np.tile(self.block[halved], 2)
            first = np.append(self.first[halved], middle)
            last = np.append(middle, self.last[halved])
            halves = self._items(block, last)
            total = sum(part.size for part in parts)
            new = total + np.arange(halves.size)
            parts.append(halves)
            by_halves = self._pay(epsilon, halves, first)
            by_groups = np.append(by_groups[~halved], by_halves)
            stays = ~halved
            number = np.append(number[stays], new)
            self.block = np.append(self.block[stays], block)
            self.first = np.append(self.first[stays], first)
            self.last = np.append(self.last[stays], last)
        self.group_items = Items.gather(parts, number)
        return self

    def refine_marks(self, epsilon: float, number: int) -> Indices:
        """Divide the outcomes into about `number` blocks, small where their depth matters; return their ends.

        Args:
            epsilon: ε near which the bound is to be small.
            number: How many blocks, about.
        """
        # A depth taken at the beginning of a block adds least with blocks like the root of mass times fall.
        depth = self.ranked.depth
        paid = self._pay_all(epsilon)[:, 0]
        fall = np.maximum(-np.diff(paid, append=0.0), 0.0)
        mass = np.diff(depth[self.marks])
        error = np.sqrt(fall * mass)
        total = max(float(error.sum()), 1e-300)
        pieces = np.ceil(number * error / total)
        pieces = np.maximum(pieces.astype(np.int64), 1)
        return divide_blocks(self.marks, pieces, depth)

    def epsilon(
        self,
        delta: float,
        start: float,
        near: float,
    ) -> float:
        """Return an ε, at most `start`, at which the bound is at most `delta`; else `start`.

        Args:
            delta: The target, above 0.
            start: An ε at which some bound is known to be at most delta.
            near: An ε at which the search begins.
        """

        def excess(point: float) -> float:
            """Return the log of the ratio of the bound on δ to the target."""
            bound = max(self.delta(point), 1e-300)
            return math.log(bound / delta)

        place = near
        last = excess(near)
        high = start
        low = 0.0
        if last <= 0.0:
            high = place
        else:
            low = place
        fall = max(2.0, math.log(1.0 / delta))
        slope = -fall / max(start, 1e-3)
        for _ in range(_ROUNDS):
            # log δ is nearly a line in ε; aim a little to the safe side of its root.
            point = place - last / slope + 0.3 * _TOLERANCE * high
            if not low < point < high:
                point = 0.5 * (low + high)
            value = excess(point)
            is_apart = abs(point - place) > 1e-9 * high
            if is_apart and (value - last) * (point - place) < 0.0:
                slope = (value - last) / (point - place)
            place = point
            last = value
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
_BLOCKS = (24, 40)  # blocks of what may have a depth, in two turns
_REST = 12  # blocks of the rest
_LAST = 192  # blocks at the end
_TURNS_ROUGH = 2  # of halving groups of lower losses, for the choice of a price
_TURNS_EXACT = 7  # the same at the end
_WIDTH = 0.2  # of cells of levels: what log φ' moves by
_WIDE = 2.0  # cells for the choice of a price
_GAIN = 0.15  # of what an outcome keeps of φ', what a cell of levels may change
_WORTH = 0.01  # of δ; below it the depth does not matter
_RIVAL = 1.3  # with few blocks; with more the order may be another
_NEAR = 0.93  # of the envelope's ε; there the price is chosen
_PART = math.log(1.1)  # for one ε
_LEAST_PART = 0.02  # below it parts are of one width
_CHOICES = 3
_POINTS = 20  # at how many ε it is worth its time, at most, beside a few
_FEW = 4  # at how many in any case
_CELLS = 512  # with more cells of levels than so many `_POINTS` falls


class Rearranged:
    """The rearrangement bound for one direction of the base's dominating pair, for ε >= 0.

    The ε axis is cut into parts, each of which has its own division into blocks and its own price. Blocks
    that were made for one part are kept: a search asks about few parts, many times.
    """

    def __init__(
        self,
        tuner: Tuner,
        part: float = _PART,
        choices: int = _CHOICES,
    ) -> None:
        self.tuner = tuner
        self.ranked = Ranked(tuner)
        self._part = part
        self._choices = choices
        self._cells_by_width: dict[float, Cells] = {}
        self._usual: dict[int, tuple[Blocks, Indices]] = {}
        self._rough: dict[int, Blocks] = {}
        self._exact: dict[int, Blocks] = {}

    def _best_roc(self, epsilon: float, paying: NDArray[np.bool_]) -> Floats:
        """Return F at the level where each outcome adds most to δ under the envelope bound."""
        z = exp_capped(epsilon - self.ranked.losses[paying])
        return np.interp(self.tuner.best_level(z), *self.tuner.levels)

    def matters(self, epsilon: float) -> bool:
        """Return whether rearrangement may lower the bound on δ(ε) by more than a percent."""
        paid = self.ranked.charged(epsilon)
        paying = paid > 0.0
        # To first order an outcome at depth m pays m φ''(F) less, at the level that it likes best.
        best = self._best_roc(epsilon, paying)
        slope = self.tuner.runs.pgf_second_derivative(best)
        depth = self.ranked.depth[:-1]
        mass_times_depth = self.ranked.masses[paying] * depth[paying]
        gain = inner(mass_times_depth, slope)
        return gain > _WORTH * float(paid.sum())

    def worth(self, epsilon: float) -> int:
        """Return at how many ε the bound is worth computing: fewer if each takes long."""
        cells = self._cells(epsilon).level.size
        return int(_POINTS * min(_CELLS / cells, 1.0)) + _FEW

    def delta(self, epsilon: float, least: float = 0.0) -> float:
        """Return the smaller of rearrangement and envelope bound on δ(ε), but at least `least`.

        Args:
            epsilon: At least 0.
            least: What is charged in any case: where the answer is below, it is this.
        """
        place = self._place(epsilon)
        rough = self._rough_blocks(place).delta(epsilon)
        value = min(rough, self.tuner.delta(epsilon))
        if value > least:
            value = min(value, self._exact_blocks(place).delta(epsilon))
        return max(value, least)

    def deltas(self, epsilons: Floats) -> Floats:
        """Return the rearrangement bound on δ(ε) at many ascending ε, with prices chosen at a few of them."""
        places = [self._place(float(e)) for e in epsilons]
        with_choice = []
        for point in np.linspace(epsilons[0], epsilons[-1], self._choices):
            with_choice.append(self._place(float(point)))
        for place in set(places) - self._rough.keys() - set(with_choice):
            self._rough[place] = self._best_around(place, with_choice)
        values = []
        for place, point in zip(places, epsilons, strict=True):
            values.append(self._exact_blocks(place).delta(float(point)))
        return np.array(values)

    def deltas_between(self, epsilons: Floats) -> Floats:
        """Return the rearrangement bound on δ(ε) at further ε, by the blocks that `deltas` made nearest.

        Blocks bound δ at every ε: those of another part of the axis are looser, and quickly asked.
        """
        values = []
        for point in epsilons:
            wanted = self._place(float(point))
            nearest = min(self._exact, key=lambda place: abs(place - wanted))
            values.append(self._exact[nearest].delta(float(point)))
        return np.array(values)

    def _best_around(self, place: int, with_choice: list[int]) -> Blocks:
        """Return a rough bound for a part of the ε axis, with the better of the prices chosen nearby.

        Args:
            place: Number of the part.
            with_choice: Numbers of the parts for which a price is chosen, ascending.
        """
        epsilon = self._middle(place)
        after = bisect_left(with_choice, place)
        bounds = []
        for neighbour in with_choice[max(after - 1, 0) : after + 1]:
            # Blocks for another ε would be compared badly: first each gets its own.
            blocks = self._rough_blocks(neighbour)
            marks = blocks.refine_marks(epsilon, _BLOCKS[0])
            bounds.append(self._few_blocks(epsilon, marks, blocks.end, priced=blocks.priced))
        return min(bounds, key=lambda bound: bound.delta(epsilon))

    def epsilon(
        self,
        delta: float,
        start: float,
        least: float = 0.0,
    ) -> float:
        """Return an ε at which the rearrangement bound is at most `delta`, but at least `least`.

        Args:
            delta: The target, above 0.
            start: An ε at which the envelope is at most delta.
            least: What is charged in any case: where the answer is below, it is this.
        """
        near = least or _NEAR * start
        usual, _ = self._usual_blocks(self._place(near))
        if least and usual.delta(least) <= delta:
            return least
        near = usual.epsilon(delta, start, near)
        if least and self._rough_blocks(self._place(near)).delta(least) <= delta:
            return least
        answers: dict[int, float] = {}
        # The answer lies where the bound that gave it is the one that `delta` takes.
        place = self._place(near)
        while place not in answers:
            near = self._exact_blocks(place).epsilon(delta, start, near)
            answers[place] = near
            place = self._place(near)
        other = answers[place]
        if len(answers) > 1 and near != other:
            # Two parts, each of whose bounds leads to the other: at their border both hold.
            border = self._middle(max(place, self._place(other)) - 0.5)
            near = min(max(near, other), border)
        return near

    def _cells(self, epsilon: float, wider: float = 1.0) -> Cells:
        """Return intervals of levels, narrow enough for how much outcomes add to δ near this ε."""
        paid = self.ranked.charged(epsilon)
        paying = paid > 0.0
        best = self._best_roc(epsilon, paying)
        slope = self.tuner.runs.pgf_derivative(best)
        gross = inner(self.ranked.masses[paying], slope)
        gross = max(gross, 1e-300)
        gain = float(paid.sum()) / gross
        # What a cell changes is of second order in its width, and of more where little is gained.
        share = max(min(gain / _GAIN, 1.0), 1e-6)
        power = math.floor(math.log2(share))
        width = wider * _WIDTH * 2.0 ** (0.75 * power)
        if width not in self._cells_by_width:
            self._cells_by_width[width] = Cells(self.tuner, width)
        return self._cells_by_width[width]

    def _place(self, epsilon: float) -> int:
        """Return the number of the part of the ε axis to which an ε belongs."""
        return round(math.asinh(epsilon / _LEAST_PART) / self._part)

    def _middle(self, place: float) -> float:
        """Return the ε in the middle of a part of the ε axis; for a half number, the border of two parts."""
        return _LEAST_PART * math.sinh(place * self._part)

    def _rough_blocks(self, place: int) -> Blocks:
        """Return the bound of best price for a part of the ε axis, on few blocks, from a cache."""
        if place not in self._rough:
            self._rough[place] = self._choose_price(place)
        return self._rough[place]

    def _exact_blocks(self, place: int) -> Blocks:
        """Return a bound on many blocks for a part of the ε axis, with the price that a rough bound chose."""
        if place not in self._exact:
            rough = self._rough_blocks(place)
            epsilon = self._middle(place)
            marks = rough.refine_marks(epsilon, _LAST)
            cells = self._cells(epsilon)
            bound = Blocks(self.ranked, cells, marks, priced=rough.priced)
            self._exact[place] = bound.sharpened(epsilon, _TURNS_EXACT)
        return self._exact[place]

    def _usual_blocks(self, place: int) -> tuple[Blocks, Indices]:
        """Return the default bound for a part of the ε axis, and block ends from which others are made."""
        if place not in self._usual:
            epsilon = self._middle(place)
            depth = self.ranked.depth
            paid = self.ranked.charged(epsilon)
            last = 1
            if paid.any():
                paying = np.flatnonzero(paid > 0.0)
                last = int(paying[-1]) + 1
            mass = _SHARES[_USUAL] * depth[-1]
            end = int(np.searchsorted(depth, mass))
            end = min(max(end, 1), last)
            marks = self._first_marks(paid, last)
            bound = self._few_blocks(epsilon, marks, end, priced=True)
            for number in _BLOCKS:
                marks = bound.refine_marks(epsilon, number)
                bound = self._few_blocks(epsilon, marks, end, priced=True)
            ends = np.array([end, last])
            rest = divide_blocks(ends, np.array([_REST]), depth)
            self._usual[place] = (bound, np.union1d(marks, rest))
        return self._usual[place]

    def _first_marks(self, paid: Floats, last: int) -> Indices:
        """Return the ends of the first blocks, up to `last`: some add equally to δ, some have equal mass."""
        shares = np.arange(_FIRST) / _FIRST
        starts = []
        sums_of_pay = np.cumsum(paid[:last])
        sums_of_mass = self.ranked.depth[1 : last + 1]
        for sums in (sums_of_pay, sums_of_mass):
            starts.append(np.searchsorted(sums, sums[-1] * shares, "right"))
        inside = np.minimum(np.concatenate(starts), last)
        return np.unique(np.concatenate([[0, last], inside]))

    def _few_blocks(
        self,
        epsilon: float,
        marks: Indices,
        end: int,
        *,
        priced: bool,
    ) -> Blocks:
        """Return a bound on few blocks, which end at the marks below `end`.

        Args:
            epsilon: ε near which the bound is to be small.
            marks: Ends of blocks, of which those up to `end` count.
            end: Where what has a depth ends.
            priced: Whether the rest pays the price of its level.
        """
        marks = np.append(marks[marks < end], end)
        cells = self._cells(epsilon, _WIDE)
        bound = Blocks(self.ranked, cells, marks, priced=priced)
        return bound.sharpened(epsilon, _TURNS_ROUGH)

    def _choose_price(self, place: int) -> Blocks:
        """Return the bound of least δ among those with several prices and the one without."""
        epsilon = self._middle(place)
        _, marks = self._usual_blocks(place)
        paid = self.ranked.charged(epsilon)
        pay_above = np.append(0.0, np.cumsum(paid))

        def bound(
            sums: Floats,
            share: float,
            *,
            priced: bool,
        ) -> Blocks:
            """Return the bound whose blocks end where the sums reach this share of their total."""
            end = int(np.searchsorted(sums, share * sums[-1]))
            end = min(max(end, 1), int(marks[-1]))
            return self._few_blocks(epsilon, marks, end, priced=priced)

        with_price = partial(bound, self.ranked.depth, priced=True)
        without_price = partial(bound, pay_above, priced=False)
        value, best = _least(with_price, _SHARES, epsilon)
        rival = without_price(_PAID[_USUAL])
        if rival.delta(epsilon) < _RIVAL * value:
            other_value, other = _least(without_price, _PAID, epsilon)
            if other_value < value:
                return other
        return best


def _least(
    bound: Callable[[float], Blocks],
    shares: tuple[float, ...],
    epsilon: float,
) -> tuple[float, Blocks]:
    """Return the least δ found by descent over shares, and the bound that has it.

    Args:
        bound: Makes the bound of one share.
        shares: Shares, ascending; the search begins with the usual one.
        epsilon: ε at which bounds are compared.
    """
    place = _USUAL
    best = bound(shares[place])
    least = best.delta(epsilon)
    for step in (2, 1):
        for move in (step, -step):
            while 0 <= place + move < len(shares):
                candidate = bound(shares[place + move])
                value = candidate.delta(epsilon)
                if value >= least:
                    break
                best = candidate
                least = value
                place += move
    return least, best
