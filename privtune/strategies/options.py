"""Options as they come from a spec: known by name, of their declared type, described in words."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from privtune.errors import InvalidInputError
from privtune.numbers import is_number

_WORDS: Mapping[Any, str] = {
    float: "a number",
    int: "a whole number",
    str: "text",
    type(None): "left out",
}


def reject_unknown_options(
    strategy: str, options: Mapping[str, Any], allowed: Sequence[str]
) -> None:
    """Refuse options that a strategy does not take, naming those that it takes."""
    if unknown := sorted(set(options) - set(allowed)):
        raise InvalidInputError(
            f"options of strategy {strategy!r}",
            unknown,
            f"are not known; it takes {', '.join(sorted(allowed)) or 'none'}",
        )


def check_types(cls: type[Any], options: Mapping[str, Any], *, where: str) -> None:
    """Refuse options of another type than the fields of a dataclass have.

    YAML reads ``ten`` as text and ``yes`` as true: found here, nothing is planned or charged with it.

    Args:
        cls: The dataclass.
        options: Values by the name of the field; other names are left to whoever knows them.
        where: Whose options they are, for the message.

    Raises:
        InvalidInputError: Naming the option and what it must be.
    """
    hints = typing.get_type_hints(cls)
    for name, value in options.items():
        if name in hints and not _fits(value, hints[name]):
            raise InvalidInputError(f"{name} of {where}", value, f"must be {words_of(hints[name])}")


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return (
            isinstance(value, Sequence)
            and len(value) == len(parts)
            and all(map(_fits, value, parts))
        )
    if hint in (float, int):
        # Ranges are the field's own affair; NaN, and a whole number that no float holds, are in none.
        kind = isinstance(value, int | float if hint is float else int)
        return kind and (is_number(value) or value in (math.inf, -math.inf))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(name, parts[0]) for name in value)
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]
        return callable(value)
    return hint is Any or isinstance(value, hint if origin is None else origin)


def words_of(hint: Any) -> str:
    """Return a type in the words of a spec."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words_of(part) for part in parts)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is tuple:
        return f"a list of {len(parts)}, each {words_of(parts[0])}"
    if origin is not None:
        kinds = {Mapping: "a mapping of names to values", Sequence: "a list"}
        return next(
            (word for kind, word in kinds.items() if issubclass(origin, kind)), "a function"
        )
    return "true or false" if hint is bool else _WORDS.get(hint, "a value")
