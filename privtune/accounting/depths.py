"""What is left of φ' at a depth: lines above it, on cells of levels, for `rearrangement`.

Every line is above a convex function of a concave one, or below a convex one: `accounting/README.md`
says why the bound that is read from them is valid.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.pmf import inner
from privtune.accounting.selection import Tuner, tangents

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
        """Return lines above G, the P-mass of lower scores, at both ends of each cell.

        Args:
            taken: The most Q-mass that may be above, of each item.
            depth: The P-mass that is above, of each item.
        """
        # A tangent of the concave F, at the right end of the cell.
        right = np.minimum(self.level[1:] + taken[:, None], 1.0)
        edge = np.searchsorted(self.level, right) - 1
        height = self.roc[edge] + self.slope[edge] * (right - self.level[edge]) - depth[:, None]
        left = height - self.slope[edge] * np.diff(self.level)
        own = left + height > self.roc[:-1] + self.roc[1:]
        left, height = np.where(own, self.roc[:-1], left), np.where(own, self.roc[1:], height)
        return np.clip(left, 0.0, 1.0), np.clip(height, 0.0, 1.0)

    def charged(self, z: float) -> float:
        """Return the integral of the price of levels from which what has this z cannot pay more."""
        ends = zip((self.top[:-1], self.top[1:]), self.floor, strict=True)
        left, right = (np.maximum(top - z * floor, 0.0) for top, floor in ends)
        first = max(float(self.top[0]) - z * self.least, 0.0) * float(self.roc[0])
        return first + 0.5 * inner(left + right, np.diff(self.roc))


class Items:
    """Groups of losses at the depth of a block: how much φ' each keeps in each cell.

    Args:
        cells: The cells of levels.
        taken: The most Q-mass that may be above, of each item.
        depth: The P-mass that is above, of each item.
        priced: Whether levels may have a price.
    """

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
        """Return what an outcome of each item pays at most, per unit of its P-mass.

        Args:
            z: e^(ε - loss), a row for each item.
            price: z of the largest loss that pays the price; None where there is no price.
        """
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
    """Return ends of blocks, each of which is cut into so many pieces of one mass."""
    block = np.repeat(np.arange(pieces.size), pieces)
    part = np.arange(block.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start, mass = depth[marks[:-1]], np.diff(depth[marks])
    cuts = np.searchsorted(depth, start[block] + mass[block] * part / pieces[block])
    return np.unique(np.append(np.clip(cuts, marks[0], marks[-1]), marks))
