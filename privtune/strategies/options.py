"""Options of strategies in a spec: checks of their names and types, and descriptions."""

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
from privtune.names import refuse_fields
from privtune.numbers import is_number

_WORDS: Mapping[Any, str] = {
    float: "a number",
    int: "a whole number",
    str: "text",
    bool: "true or false",
    type(None): "left out",
}
_HYPERPARAMETERS = frozenset({"learning_rate", "max_grad_norm", "schedule", "warmup"})


def reject_unknown_options(
    strategy: str,
    options: Mapping[str, object],
    allowed: Sequence[str],
) -> None:
    """Refuse options that a strategy does not take, with a list of the ones that it takes.

    A hyperparameter among them is told where it belongs: it stands a level deeper in a spec, and a list of
    similar names would not say so.
    """
    unknown = set(options) - set(allowed)
    if not unknown:
        return
    remedy = ""
    misplaced = unknown & _HYPERPARAMETERS
    if misplaced and "parameters" in allowed:
        entries = [f"{name}: {options[name]}" for name in sorted(misplaced)]
        words = ", ".join(entries)
        remedy = f"Hyperparameters stand together: parameters: {{{words}}}."
    where = f"options of strategy {strategy!r}"
    refuse_fields(where, unknown, sorted(allowed), "it", remedy=remedy)


def check_types(cls: type[Any], options: Mapping[str, object], *, where: str) -> None:
    """Refuse options whose types differ from the annotated types of a dataclass's fields.

    A dataclass takes any value, so text in the place of a number would fail only where it is computed with:
    after the charge.

    Args:
        cls: The dataclass whose fields the options are.
        options: Values by name; names that the class does not have are left to others.
        where: What the options belong to, for the message.

    Raises:
        InvalidInputError: If a value is not of its field's type.
    """
    hints = typing.get_type_hints(cls)
    for name, value in options.items():
        if name not in hints:
            continue
        hint = hints[name]
        if not _fits(value, hint):
            allowed = f"must be {words_of(hint)}"
            raise InvalidInputError(f"{name} of {where}", value, allowed)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value from YAML is of an annotated type."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return _fits_tuple(value, parts)
    if hint in (float, int):
        return _fits_number(value, hint)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            return False
        return all(_fits(name, parts[0]) for name in value)
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]
        return callable(value)
    if hint is Any:
        return True
    if origin is not None:
        return isinstance(value, origin)
    return isinstance(value, hint)


def _fits_tuple(value: object, parts: tuple[Any, ...]) -> bool:
    """Return whether a value is a list with one fitting element for each annotated part."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    if parts[-1] is Ellipsis:  # tuple[X, ...]: any number of one type
        return all(_fits(element, parts[0]) for element in value)
    if len(value) != len(parts):
        return False
    return all(map(_fits, value, parts))


def _fits_number(value: object, hint: type[float]) -> bool:
    """Return whether a value is a number of this type, infinity included.

    Ranges are the field's own affair; NaN, and a whole number that no float holds, are in none.
    """
    kind = int | float if hint is float else int
    if not isinstance(value, kind):
        return False
    return is_number(value) or value in (math.inf, -math.inf)


def words_of(hint: object) -> str:
    """Return a type in the words of a spec, such as ``a whole number`` for ``int``."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words_of(part) for part in parts)
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is tuple:
        element = words_of(parts[0])
        if parts[-1] is Ellipsis:
            return f"a list, each {element}"
        return f"a list of {len(parts)}, each {element}"
    if origin is None:
        return _WORDS.get(hint, "a value")
    if issubclass(origin, Mapping):
        return "a mapping of names to values"
    if issubclass(origin, Sequence):
        return "a list"
    return "a function"


_ARGUMENT = re.compile(r"^    (\w+): (.*)$")


def argument_texts(owner: object) -> dict[str, str]:
    """Return the text on each argument in a docstring, by the argument's name.

    Of a class the docstrings of the classes above count, too; the nearest one to the class has the last word.
    So an option is described once, where its field is.
    """
    texts: dict[str, str] = {}
    sources = [owner]
    if inspect.isclass(owner):
        sources = [*reversed(owner.__mro__)]
    for source in sources:
        name = ""
        for line in _argument_lines(source.__doc__ or ""):
            match = _ARGUMENT.match(line)
            if match:
                name = match[1]
                texts[name] = match[2]
            elif name:
                texts[name] += " " + line.strip()
    return texts


def _argument_lines(docstring: str) -> list[str]:
    """Return the lines of a docstring's section ``Args``, up to its first empty line."""
    text = inspect.cleandoc(docstring)
    _, _, rest = text.partition("\nArgs:\n")
    section, _, _ = rest.partition("\n\n")
    return section.splitlines()


def options_of(cls: type[Any], *, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the options of a dataclass: ``name``, ``type``, ``default``, ``required``, ``what``.

    Args:
        cls: The dataclass of a strategy or of a method.
        without: Fields that a spec says elsewhere, as the arm's name, or that a plan finds.
    """
    texts = argument_texts(cls)
    hints = typing.get_type_hints(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if not field.init or field.name.startswith("_") or field.name in without:
            continue
        default = _default_of(field)
        required = default is dataclasses.MISSING
        rows.append(
            {
                "name": field.name,
                "type": words_of(hints[field.name]),
                "default": None if required else default,
                "required": required,
                "what": texts.get(field.name, ""),
            }
        )
    return rows


def _default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, from its factory if it has one, or ``MISSING``."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()
