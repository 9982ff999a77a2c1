"""Best of K once more: the envelope bound, minus what paying outcomes take from each other.

The envelope lets every outcome sit at the level that suits it best, as if it were alone. But an
outcome that is ranked high is not among the low ones, and no level holds more outcomes than its
width. In the worst case what pays is ranked by loss, so each pays at its own depth; and what would
pay at low levels, where there is no depth, pays the price of its level. The theorem and its proof
stand in `accounting/README.md`. It matters where E[K] times the total variation of the base is
large, and for a fixed number of runs; elsewhere it equals the envelope.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.blocks import Blocks, Ranked
from privtune.accounting.depths import Cells, divided
from privtune.accounting.pmf import inner
from privtune.accounting.selection import Tuner

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
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
    """The bound for one direction of the base's dominating pair, for ε >= 0.

    Args:
        tuner: The envelope bound in the same direction.
        part: Logarithm of a factor of ε within which one price and one set of blocks are used.
        choices: Of a price, for answers at many ε.
    """

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
        """Return the bound on δ(ε).

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
        """Return a bound on δ(ε) at many ε, which ascend; prices are chosen at few of them.

        It may lie above the envelope, which is no part of it.
        """
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
        """Return an ε at which the bound is at most delta.

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
        """Return cells of levels which what is gained near this ε can be told in."""
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
        """Return the best of some bounds near an ε, with few blocks and wide cells."""
        if place not in self._rough:
            self._rough[place] = self._choose(place)
        return self._rough[place]

    def _ended(self, place: int) -> Blocks:
        """Return the bound with the same price, many blocks and narrow cells."""
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
    """Return the least δ of bounds by share, by going down from the usual one, and its bound."""

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
