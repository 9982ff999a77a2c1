"""Tasks: what a study works on. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.imports import lazily

if TYPE_CHECKING:
    from privtune.tasks._draft import draft
    from privtune.tasks._facts import (
        A_RECORD,
        MECHANISM,
        PRECISION,
        PRETRAINED,
        TRAINED,
        PublicFacts,
        TaskDataError,
    )
    from privtune.tasks._fine_tuning import fine_tuned
    from privtune.tasks._partition import Sizes, by_unit, split, unit_records
    from privtune.tasks._task import Candidate, Score, Task, TaskData
    from privtune.tasks.built_in import TASKS, get_task
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
