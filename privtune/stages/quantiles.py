"""Bounds of columns by noised quantiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.stages.stage import Document, TaskStage, as_number, checked_table
from privtune.tasks.described import TaskSpec
from privtune.tasks.tabular import read_table
from privtune.training.mechanism.metrics import (
    Floats,
    count_sensitivity,
    counts,
)


@dataclass(frozen=True, kw_only=True)
class Quantiles(TaskStage):
    """Stage that releases bounds of all columns with ``bounds: paid``, by noised counts on a public grid.

    Attributes:
        low: The share of values below the lower bound, about.
        high: The share of values below the upper bound, about.
    """

    type: ClassVar[str] = "quantiles"
    low: float = 0.01
    high: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        low = as_number(self.low)
        high = as_number(self.high)
        if not 0.0 <= low < high <= 1.0:
            shares = [self.low, self.high]
            self._refuse("low", shares, "must be shares, 0 <= low < high <= 1")

    def check(self, task: TaskSpec) -> None:
        if not read_table(task).paid():
            raise InvalidInputError(
                "stages",
                self.name,
                "has no column to find bounds for",
                "Say bounds: paid of one.",
            )

    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        table = read_table(task)
        count = len(table.paid())
        return count_sensitivity(count, adjacency)

    def sums(self, task: TaskSpec) -> Floats:
        """Return the count of each grid cell over all records of the file, whatever their split."""
        table = checked_table(task)
        cells = [len(column.edges) - 1 for column in table.paid()]
        places = table.places()
        return counts(places, cells)

    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        """Return the bounds of each column, where cells that do not rise above the noise count as empty."""
        bounds = {}
        start = 0
        table = read_table(task)
        for column in table.paid():
            edges = column.edges
            end = start + len(edges) - 1
            first, last = self._cells_between(noised[start:end], scale)
            low = float(edges[first])
            high = float(edges[last + 1])
            bounds[column.name] = [low, high]
            start = end
        return {"bounds": bounds}

    def _cells_between(self, histogram: Floats, scale: float) -> tuple[int, int]:
        """Return the first and the last cell between the two quantiles of a noised histogram ``[k]``.

        All cells, where none rises above the noise: then nothing says which hold values.

        Args:
            histogram: Noised counts of the cells of one column's grid.
            scale: The standard deviation of the noise.
        """
        k = len(histogram)
        last = k - 1
        # The largest of k Gaussian draws is rarely above this.
        threshold = scale * math.sqrt(2.0 * math.log(k))
        is_above = histogram > threshold
        counts_above = np.where(is_above, histogram, 0.0)
        if not counts_above.any():
            return 0, last
        totals = np.cumsum(counts_above)
        total = totals[-1]
        below_low = np.searchsorted(totals, self.low * total, side="right")
        below_high = np.searchsorted(totals, self.high * total, side="left")
        first = min(int(below_low), last)
        end = max(first, int(below_high))
        return first, min(end, last)

    def applied(self, task: TaskSpec, document: Document) -> TaskSpec:
        """Return the task with the released bounds, to which fills for missing values are clipped."""
        table = read_table(task)
        fills = {column.name: column.missing for column in table.paid()}
        released = dict(task)
        for part in ("bounds", "columns"):
            if not task.get(part):
                continue
            columns = dict(task[part])
            for key in task[part]:
                name = str(key)
                if name not in document["bounds"]:
                    continue
                low, high = document["bounds"][name]
                column: dict[str, Any] = {"bounds": [low, high]}
                fill = fills[name]
                if fill is not None:
                    fill_or_low = max(fill, low)
                    column["missing"] = min(fill_or_low, high)
                columns[key] = column
            released[part] = columns
        return released

    def words(self, document: Document) -> str:
        words = []
        for name, (low, high) in document["bounds"].items():
            words.append(f"{name} [{low:g}, {high:g}]")
        return ", ".join(words)
