"""What is wrong with a spec, in its own words rather than in Pydantic's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails

from privtune.errors import InvalidInputError
from privtune.priors import with_public_priors

T = TypeVar("T")


def _no_switch(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {str(value).lower()}")
    return value


NUMBER = BeforeValidator(_no_switch)
"""Pydantic takes true for 1."""


def checked(check: Callable[[T], T], value: T) -> T:
    """Ask a check of the package; what it refuses is told with the name of the spec's field.

    Raises:
        ValueError: If the check refuses the value.
    """
    try:
        return check(value)
    except InvalidInputError as error:
        remedy = f". {error.remedy[:-1]}" if error.remedy else ""
        raise ValueError(f"{error.allowed}, not {error.value!r}{remedy}") from None


Space = Annotated[
    Mapping[str, Mapping[str, Any]], AfterValidator(partial(checked, with_public_priors))
]
"""What a spec says of its space: a public prior is the law that it stands for from then on."""


_IN_WORDS: Mapping[str, str] = {
    "missing": "is missing",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "mapping_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "string_type": "must be text",
    "invalid_key": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "value_error": "{error}",
}
"""Pydantic's kinds of errors, in the words of a spec."""


def sentence(
    error: ValidationError, data: object, fields: Callable[[ErrorDetails], Collection[str]]
) -> str:
    """Return what is wrong with the first field that is wrong; of a choice, all that is allowed.

    Args:
        error: What Pydantic found.
        data: What was checked.
        fields: The fields that there are, where one that is not one was given.
    """
    first, *others = error.errors()
    path = _path(first, data)
    where = ".".join(map(str, path)) or "the spec"
    allowed, but, given = _in_words(first, fields).partition(", not ")
    for other in others:
        words = _in_words(other, fields).partition(", not ")[0].removeprefix("must be ")
        # Of a choice, each part has its say, below the same path.
        part = path == _path(other, data) and path not in (first["loc"], other["loc"])
        if part and words not in allowed:
            allowed += f" or {words}"
    return f"{where}: {allowed}{but}{given}".rstrip(".")


def _path(error: ErrorDetails, data: object) -> tuple[int | str, ...]:
    """Return where an error is, without Pydantic's names for the parts of a choice or of a key."""
    path: list[int | str] = []
    for part in error["loc"]:
        if isinstance(data, Mapping) and (part in data or error["type"] == "missing"):
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int):
            data = data[part]
        else:
            break
        path.append(part)
    return tuple(path)


def _in_words(error: ErrorDetails, fields: Callable[[ErrorDetails], Collection[str]]) -> str:
    """Return what is wrong with a field, what is allowed, and what was given."""
    if error["type"] == "extra_forbidden":
        known = fields(error)
        if close := difflib.get_close_matches(str(error["loc"][-1]), known, n=1):
            return f"is not a field of it; {close[0]} is"
        return f"is not a field of it; these are: {', '.join(known)}"
    words = _IN_WORDS.get(error["type"])
    if words is None:
        return error["msg"]
    said = words.format(**error.get("ctx", {}))
    given = error["input"]
    shown = isinstance(given, str | int | float) and error["type"] != "value_error"
    return f"{said}, not {given!r}" if shown else said
