"""Functions of the user's own, found by their path: tasks, objectives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from privtune.errors import InvalidInputError

__all__ = ["find_function"]


def find_function(field: str, path: str, *, allowed: str, must: str) -> Callable[..., Any]:
    """Return the function that a path ``package.module:function`` names.

    Args:
        field: What the path was given as.
        path: The path.
        allowed: What it must be, for the message.
        must: What the function must be, likewise.

    Raises:
        InvalidInputError: If the path is none, or no function can be imported from there.
    """
    module, separator, name = path.partition(":")
    if not separator or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise InvalidInputError(field, path, allowed)
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            field, path, f"cannot be imported ({error})", "Check the module path and the name."
        ) from error
    if not callable(found):
        raise InvalidInputError(field, path, must)
    return found
