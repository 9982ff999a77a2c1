"""What tasks that are described in a spec have in common: sizes of splits, classes, flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.imports import find_function
from privtune.tasks._columns import values_of
from privtune.tasks._facts import SPLITS
from privtune.tasks._partition import Sizes

if TYPE_CHECKING:
    from torch import nn

SPLIT_FIELDS = (*SPLITS, "public_test", "key")
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
    for field in (*needed, *SPLITS):
        if field not in spec:
            raise InvalidInputError(f"task.{field}", None, f"is required for {what}")


def read_sizes(spec: Mapping[str, Any]) -> Sizes:
    """Return the declared sizes of the splits.

    Raises:
        InvalidInputError: If one is no number of records.
    """
    for field in SPLITS:
        value = spec[field]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**12:
            allowed = "must be a whole number of at least 1, and of records that exist"
            raise InvalidInputError(f"task.{field}", value, allowed)
    return Sizes(*(spec[field] for field in SPLITS))


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


def own_model(
    path: str, features: Any, outputs: int, *, built_in: Sequence[str], of: str
) -> Callable[[], nn.Module]:
    """Return what makes a model of the user's own, of ``package.module:factory``.

    Raises:
        InvalidInputError: If it names no function of features (or the shape of a record) and outputs.
    """
    factory = find_function(
        "task.model",
        path,
        allowed=f"must be {', '.join(built_in)}, or package.module:factory",
        must=f"must name a function of {of}",
    )
    return partial(_made, factory, path, features, outputs)


def _made(factory: Callable[..., object], path: str, features: Any, outputs: int) -> nn.Module:
    from privtune.tasks._models import own_model

    return own_model(factory, path, features, outputs)
