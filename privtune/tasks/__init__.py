"""Tasks: what a study works on. Importing this package does not import torch."""

from privtune.tasks._registry import TASKS, get_task
from privtune.tasks._task import Task, TaskData, TaskDataError

__all__ = ["TASKS", "Task", "TaskData", "TaskDataError", "get_task"]
