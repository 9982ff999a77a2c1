"""Options as they come from a spec: known by name, of their declared type, described in words."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
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
    """Refuse options of another type than the fields of a dataclass have."""
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


_ARGUMENT = re.compile(r"^    (\w+): (.*)$")


def arguments(of: Any) -> dict[str, str]:
    """Return what a docstring says of each argument, those of the classes above included."""
    found: dict[str, str] = {}
    for owner in reversed(of.__mro__ if inspect.isclass(of) else (of,)):
        text = inspect.cleandoc(owner.__doc__ or "")
        section, _, _ = text.partition("\nArgs:\n")[2].partition("\n\n")
        name = ""
        for line in section.splitlines():
            if match := _ARGUMENT.match(line):
                name, found[match[1]] = match[1], match[2]
            elif name:
                found[name] += " " + line.strip()
    return found


def options_of(cls: type[Any], *, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the options of a dataclass: ``name``, ``type``, ``default``, ``required``, ``what``."""
    said, hints = arguments(cls), typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if not field.init or field.name.startswith("_") or field.name in without:
            continue
        made = field.default_factory
        required = field.default is made is dataclasses.MISSING
        default = field.default if made is dataclasses.MISSING else made()
        rows.append(
            {
                "name": field.name,
                "type": words_of(hints[field.name]),
                "default": None if required else default,
                "required": required,
                "what": said.get(field.name, ""),
            }
        )
    return rows
