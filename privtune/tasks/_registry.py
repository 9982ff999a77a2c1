"""Find a task by its built-in name, or import it as ``package.module:factory``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from privtune.errors import InvalidInputError
from privtune.imports import ByName, find_function, users_code
from privtune.tasks._fine_tuning import from_spec
from privtune.tasks._task import Task

TASKS: Mapping[str, Callable[[], Task]] = ByName(
    {
        "digits-mlp": "privtune.tasks.digits:digits_mlp",
        "digits-cnn": "privtune.tasks.digits:digits_cnn",
        "breast-cancer-logistic": "privtune.tasks.tables:breast_cancer_logistic",
        "iris-logistic": "privtune.tasks.tables:iris_logistic",
        "synthetic-logistic": "privtune.tasks.tables:synthetic_logistic",
        "mnist-mlp": "privtune.tasks.mnist:mnist_mlp",
        "mnist-cnn": "privtune.tasks.mnist:mnist_cnn",
        "mnist-logistic": "privtune.tasks.mnist:mnist_logistic",
    }
)
"""The built-in tasks, by name."""


_DESCRIBED: Mapping[str, Callable[[Mapping[str, Any]], Task]] = ByName(
    {
        "tabular": "privtune.tasks.tabular:tabular",
        "images": "privtune.tasks.images:images",
        "text": "privtune.tasks.text:text",
        "own": "privtune.tasks.own:from_spec",
    }
)
"""Tasks that are described in a spec, by type."""


def get_task(name: str | Mapping[str, Any]) -> Task:
    """Return the task of this name.

    Args:
        name: A built-in name; ``package.module:factory`` where the factory takes no arguments and
            returns a :class:`Task`; a table, pictures or texts: ``{type: tabular | images | text,
            path: ..., ...}``; ``{type: own, build: ..., loss: ..., data: ..., ...}``, as in
            :func:`privtune.tasks.own.own_task`; or one of these with public weights: ``{type: fine-tuning,
            task: ..., trainable: head, ...}``.

    Returns:
        The task; its data has not been touched.

    Raises:
        InvalidInputError: If there is no such task, or the factory returns something else.

    Example:
        >>> get_task("digits-mlp").description
        "MLP 64-64-10 on scikit-learn's 1,797 handwritten digits (bundled)"
        >>> get_task("digits")
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: task = 'digits': must be one of ...
    """
    if isinstance(name, Mapping):
        if name.get("type") == "fine-tuning":
            return from_spec(name, get_task)
        kind = name.get("type")
        if not isinstance(kind, str) or kind not in _DESCRIBED:
            known = ", ".join(_DESCRIBED)
            raise InvalidInputError("task.type", kind, f"must be one of {known}, fine-tuning")
        return _DESCRIBED[kind](name)
    if name in TASKS:
        return TASKS[name]()
    factory = find_function(
        "task",
        name,
        allowed=f"must be one of {', '.join(sorted(TASKS))}, or package.module:factory",
        must="must name a function that returns a task",
    )
    with users_code("task", name, "its function failed, called without arguments"):
        task = factory()
    if not isinstance(task, Task):
        raise InvalidInputError(
            "task", name, f"must return a privtune.tasks.Task, not {type(task).__name__}"
        )
    return task
