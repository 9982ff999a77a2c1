"""Directions to project on, by a noised second moment (DP-PCA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from privtune.accounting import Adjacency
from privtune.stages.stage import Document, TaskStage
from privtune.tasks.described import TaskSpec
from privtune.tasks.tabular import read_table, tabular
from privtune.training.mechanism.metrics import (
    Floats,
    moment_sensitivity,
    moments,
    symmetric,
)

_MOST_FEATURES = 2000  # of a covariance


@dataclass(frozen=True, kw_only=True)
class DpPca(TaskStage):
    """Stage that releases directions of the largest noised second moments, to project features on.

    Attributes:
        components: How many.
    """

    type: ClassVar[str] = "dp-pca"
    components: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.components
        is_whole = isinstance(count, int) and not isinstance(count, bool)
        if not is_whole or count < 1:
            self._refuse("components", count, "must be a whole number of at least 1")

    def check(self, task: TaskSpec) -> None:
        (width,) = read_table(task).shape
        if not self.components < width <= _MOST_FEATURES:
            self._refuse(
                "components",
                self.components,
                f"must be below the number of features, {width}, of which there may be {_MOST_FEATURES}",
            )

    def planned(self, task: TaskSpec) -> TaskSpec:
        return {**task, "projection": self.components}

    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        return moment_sensitivity(adjacency)

    def sums(self, task: TaskSpec) -> Floats:
        """Return the second moments of the training records, each clipped to length 1."""
        train = tabular(task).load().train
        return moments(train.x.numpy())

    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        values, vectors = np.linalg.eigh(symmetric(noised))
        descending = np.argsort(values)[::-1]
        largest = descending[: self.components]
        directions = vectors[:, largest].T
        return {
            "moments": values[largest].tolist(),
            "projection": directions.tolist(),
        }

    def applied(self, task: TaskSpec, document: Document) -> TaskSpec:
        return {**task, "projection": document["projection"]}

    def words(self, document: Document) -> str:
        values = document["moments"]
        words = [f"{value:.4g}" for value in values[:5]]
        if len(values) > 5:
            words.append("...")
        return f"{len(values)} directions; noised moments {', '.join(words)}"
