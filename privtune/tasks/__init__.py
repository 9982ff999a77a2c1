"""Tasks that studies work on, in a package that imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.facts import (
        A_RECORD,
        MECHANISM,
        PRECISION,
        PRETRAINED,
        TRAINED,
        PublicFacts,
        TaskDataError,
    )
    from privtune.tables.draft import draft
    from privtune.tasks.built_in import TASKS, get_task
    from privtune.tasks.partition import Sizes, by_unit, split, unit_records
    from privtune.tasks.pretrained import fine_tuned
    from privtune.tasks.task import Candidate, Score, Task, TaskData
    from privtune.training.mechanism.data import Packing, TensorData

__all__ = [
    "A_RECORD",
    "MECHANISM",
    "PRECISION",
    "PRETRAINED",
    "TASKS",
    "TRAINED",
    "Candidate",
    "Packing",
    "PublicFacts",
    "Score",
    "Sizes",
    "Task",
    "TaskData",
    "TaskDataError",
    "TensorData",
    "by_unit",
    "draft",
    "fine_tuned",
    "get_task",
    "split",
    "unit_records",
]

__getattr__ = lazily(__name__, __file__)
