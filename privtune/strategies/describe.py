"""What a strategy or a method can be told: its options, with types, defaults and words."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Any

from privtune.errors import InvalidInputError
from privtune.strategies._options import words_of
from privtune.strategies.registry import STRATEGIES, registered
from privtune.training.methods import METHODS

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
    """Return the options of a dataclass: ``name``, ``type``, ``default``, ``required``, ``what``.

    Args:
        cls: The dataclass.
        without: Fields that are none of its options.
    """
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


def describe(name: str) -> dict[str, Any]:
    """Return what a strategy, or an in-run method, does and can be told.

    Args:
        name: Its name in specs.

    Returns:
        ``name``, ``what``, ``parameters`` (hyperparameters that are left to the user) and
        ``options``, JSON-ready.

    Raises:
        InvalidInputError: If there is none of the name.
    """
    installed = {found.name: found.strategy for found in registered() if found.strategy is not None}
    cls: Any = STRATEGIES.get(name) or installed.get(name)
    if cls is not None:
        return {
            "name": name,
            "what": cls.summary,
            "parameters": [],
            "options": options_of(cls, without=("arm",)),
        }
    if name not in METHODS:
        known = ", ".join(sorted({*STRATEGIES, *METHODS, *installed}))
        raise InvalidInputError("strategy", name, f"must be one of {known}")
    method: Any = METHODS[name]
    return {
        "name": name,
        "what": method.summary,
        "parameters": list(method.parameters),
        # A plan finds the noise for the arm's target.
        "options": options_of(method, without=("noise_multiplier",)),
    }
