"""Tasks: what a study works on. Importing this package does not import torch."""

from privtune.tasks._facts import PublicFacts
from privtune.tasks._partition import Sizes, split
from privtune.tasks._registry import TASKS, get_task
from privtune.tasks._task import Task, TaskData, TaskDataError

__all__ = [
    "TASKS",
    "PublicFacts",
    "Sizes",
    "Task",
    "TaskData",
    "TaskDataError",
    "get_task",
    "split",
]
