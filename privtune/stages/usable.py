"""Noised count of usable records, which stops a study that has too few, in public."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from privtune.accounting import Adjacency
from privtune.facts import SPLITS
from privtune.stages.stage import Document, TaskStage, as_number
from privtune.tasks.built_in import get_task
from privtune.tasks.described import TaskSpec
from privtune.training.mechanism.metrics import (
    Floats,
)


@dataclass(frozen=True, kw_only=True)
class Usable(TaskStage):
    """Stage that counts the usable records of all splits with noise, and stops a study with too few.

    Whether a record can be used hangs on it alone, so one record moves the count by 1 at most.

    Attributes:
        at_least: The share of the declared records below which the study stops.
    """

    type: ClassVar[str] = "usable"
    at_least: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        share = as_number(self.at_least)
        if not 0.0 < share <= 1.0:
            self._refuse("at_least", self.at_least, "must be a share, above 0 and at most 1")

    def check(self, task: TaskSpec) -> None:
        """Accept every task, since each has records to count."""

    def sensitivity(self, task: TaskSpec, adjacency: Adjacency) -> float:
        return 1.0

    def sums(self, task: TaskSpec) -> Floats:
        """Return the number of usable records over all splits, ``[1]``."""
        staged = get_task(task)
        staged.check()
        # No model is tried on the records: one of them could decide how all are counted.
        check = staged.check_records(tried=False)
        return np.array([check.usable], dtype=np.float64)

    def document(self, task: TaskSpec, noised: Floats, scale: float) -> dict[str, Any]:
        declared = get_task(task)
        sizes = [getattr(declared, f"{name}_records") for name in SPLITS]
        return {
            "usable": float(noised[0]),
            "noise": scale,
            "declared": sum(sizes),
            "at_least": self.at_least,
        }

    def refusal(self, document: Document) -> str:
        declared = document["declared"]
        fewest = document["at_least"] * declared
        if document["usable"] >= fewest:
            return ""
        usable = max(document["usable"], 0.0)  # noise can take it below 0
        deviation = document["noise"]
        return (
            f"Stage {self.name!r} released that about {usable:,.0f} records can be used (with noise of "
            f"deviation {deviation:,.1f}), which is below {self.at_least:.0%} of the "
            f"{declared:,} that are declared"
        )

    def words(self, document: Document) -> str:
        usable = max(document["usable"], 0.0)
        declared = document["declared"]
        deviation = document["noise"]
        return (
            f"about {usable:,.0f} usable records of {declared:,} declared "
            f"(standard deviation of the noise: {deviation:,.1f})"
        )
