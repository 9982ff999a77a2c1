"""Find a task by its built-in name, or import it as ``package.module:factory``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from privtune.errors import InvalidInputError
from privtune.tasks._task import Task
from privtune.tasks.digits import digits_mlp

__all__ = ["TASKS", "get_task"]

TASKS: Mapping[str, Callable[[], Task]] = {"digits-mlp": digits_mlp}
"""The built-in tasks, by name."""


def get_task(name: str) -> Task:
    """Return the task of this name.

    Args:
        name: A built-in name, or ``package.module:factory`` where the factory takes no arguments
            and returns a :class:`Task`.

    Returns:
        The task; its data has not been touched.

    Raises:
        InvalidInputError: If there is no such task, or the factory returns something else.
    """
    if name in TASKS:
        return TASKS[name]()
    module_name, separator, factory_name = name.partition(":")
    if not separator:
        raise InvalidInputError(
            "task", name, f"must be one of {', '.join(sorted(TASKS))}, or package.module:factory"
        )
    try:
        task = getattr(importlib.import_module(module_name), factory_name)()
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            "task", name, f"cannot be imported ({error})", "Check the module path and the name."
        ) from error
    if not isinstance(task, Task):
        raise InvalidInputError(
            "task", name, f"must return a privtune.tasks.Task, not {type(task).__name__}"
        )
    return task
