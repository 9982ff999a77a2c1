"""Noised counts of classes, from which class weights for the loss are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.stages.stage import Document, TaskStage, as_number, checked_table
from privtune.tables.column_spec import PAID
from privtune.tables.columns import Category
from privtune.tasks.described import TaskSpec
from privtune.tasks.tabular import Table, read_table
from privtune.training.mechanism.metrics import (
    Floats,
    count_sensitivity,
    counts,
)

_MOST_WEIGHT = 1e5


@dataclass(frozen=True, kw_only=True)
class Histogram(TaskStage):
    """Stage that releases how many records have each class, or each category of a column.

    Attributes:
        column: Of declared categories; the target unless given.
        most: The largest weight of a class over the smallest.
    """

    type: ClassVar[str] = "histogram"
    column: str | None = None
    most: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        most = as_number(self.most)
        if not 1.0 <= most < _MOST_WEIGHT:
            self._refuse("most", self.most, "must be a number of at least 1")

    def check(self, task: TaskSpec) -> None:
        self._category(read_table(task))

    def _category(self, table: Table) -> Category:
        """Return the column of declared categories that is counted, or refuse another column."""
        target = table.target
        is_of_target = self.column in (None, target.name)
        if is_of_target and isinstance(target, Category):
            return target
        for column in table.features:
            if isinstance(column, Category) and column.name == self.column:
                return column
        raise InvalidInputError(
            f"stages.{self.name}.column",
            self.column,
            "must be a column with declared categories, or the target of a classification",
        )

    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        return count_sensitivity(1, adjacency)

    def sums(self, task: TaskSpec) -> Floats:
        """Return the count of each category over all records of the file."""
        table = checked_table(task)
        column = self._category(table)
        places = table.values(column)
        cells = [len(column.values)]
        return counts(places[:, None], cells)

    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        """Return the noised counts, and class weights in which no count is below the noise's deviation."""
        column = self._category(read_table(task))
        values = [str(value) for value in column.values]
        frequencies = dict(zip(values, noised.tolist(), strict=True))
        released: dict[str, Any] = {"counts": frequencies}
        if self.pays_weights(task):
            weights = self._weights(noised, scale)
            released["class_weights"] = weights.tolist()
        return released

    def _weights(self, noised: Floats, scale: float) -> Floats:
        """Return class weights of mean 1, larger for rarer classes, with a ratio of at most ``most``.

        Args:
            noised: Noised counts ``[C]``; one below the noise counts as much as the noise.
            scale: The standard deviation of the noise.
        """
        fewest = max(scale, 1.0)
        frequencies = np.maximum(noised, fewest)
        weights = 1.0 / frequencies
        ratios = weights / weights.min()
        capped = np.minimum(ratios, self.most)
        averaging_one: Floats = capped / capped.mean()
        return averaging_one

    def pays_weights(self, task: TaskSpec) -> bool:
        """Return whether the stage counts the target and must release its class weights."""
        is_of_target = self.column in (None, str(task.get("target")))
        return is_of_target and task.get("class_weights") == PAID

    def applied(self, task: TaskSpec, document: Document) -> TaskSpec:
        weights = document.get("class_weights")
        if weights is None:
            return task
        return {**task, "class_weights": weights}

    def words(self, document: Document) -> str:
        frequencies = document["counts"]
        parts = [f"{name} {count:.0f}" for name, count in frequencies.items()]
        words = ", ".join(parts)
        if "class_weights" not in document:
            return words
        weights = [f"{weight:.3g}" for weight in document["class_weights"]]
        listing = ", ".join(weights)
        return f"{words}; class weights {listing}"
