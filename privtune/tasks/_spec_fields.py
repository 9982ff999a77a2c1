"""What tasks that are described in a spec have in common: sizes of splits, classes, flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from privtune.errors import InvalidInputError
from privtune.tasks._columns import values_of
from privtune.tasks._partition import Sizes

__all__ = ["SPLITS", "check_fields", "read_classes", "read_flag", "read_sizes"]

SPLITS = ("train", "validation", "test", "public_test", "key")
"""Fields that say how records come into splits."""


def check_fields(
    what: str, spec: Mapping[str, Any], known: Sequence[str], *, needed: Sequence[str]
) -> None:
    """Refuse fields that are unknown, and a spec that lacks one.

    Raises:
        InvalidInputError: Naming them.
    """
    if unknown := sorted(map(str, set(spec) - set(known))):
        raise InvalidInputError("task", unknown, f"{what} takes {', '.join(known)}")
    for field in (*needed, "train", "validation", "test"):
        if field not in spec:
            raise InvalidInputError(f"task.{field}", None, f"is required for {what}")


def read_sizes(spec: Mapping[str, Any]) -> Sizes:
    """Return the declared sizes of the splits.

    Raises:
        InvalidInputError: If one is no number of records.
    """
    for field in SPLITS[:3]:
        value = spec[field]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**12:
            allowed = "must be a whole number of at least 1, and of records that exist"
            raise InvalidInputError(f"task.{field}", value, allowed)
    return Sizes(*(spec[field] for field in SPLITS[:3]))


def read_classes(given: Any) -> tuple[Any, ...]:
    """Return the declared classes.

    Raises:
        InvalidInputError: If they are fewer than two, or not different words and numbers.
    """
    return values_of("task.classes", given, least=2)


def read_flag(spec: Mapping[str, Any], field: str) -> bool:
    """Return a field that is true or false; false unless given.

    Raises:
        InvalidInputError: If it is neither.
    """
    value = spec.get(field, False)
    if not isinstance(value, bool):
        raise InvalidInputError(f"task.{field}", value, "must be true or false")
    return value
