"""One rule for the names of studies, arms and budgets, and for any text that is stored.

Names become folders, parts of ids and arguments of commands, so each is a single harmless component
of a path.
"""

from __future__ import annotations

import re

from privtune.errors import InvalidInputError

NAME_RULE = "must be 1 to 100 letters, digits, '.', '_' or '-', a letter or digit first"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Folders beside those of studies and arms, and what some file systems keep for devices.
_RESERVED = frozenset({"mlflow", "mlflow.db", "mlflow.lock", "sealed", "trials"}) | frozenset(
    {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}
)


def is_name(name: object) -> bool:
    """Return whether a text has the form of a name: one harmless component of a path."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    """Return whether a name is taken by what lies beside studies and arms, in any case."""
    return name.lower() in _RESERVED


def check_name(name: object, what: str = "name") -> str:
    """Return the name of something new.

    Args:
        name: The name.
        what: What it is the name of, for the message: ``"study"``, ``"arm"``, ``"budget"``.

    Raises:
        InvalidInputError: It breaks the rule, or is reserved.
    """
    if not isinstance(name, str) or not is_name(name):
        raise InvalidInputError(what, name, NAME_RULE)
    if is_reserved(name):
        raise InvalidInputError(what, name, "is reserved", "Choose another name.")
    return name


def check_text(value: object, what: str) -> str:
    """Return a text that can be stored, looked up and printed anywhere.

    Raises:
        InvalidInputError: It is no text, or holds a NUL or half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise InvalidInputError(what, value, "must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        allowed = "holds half of a surrogate pair, which is no character"
        raise InvalidInputError(what, value, allowed) from None
    if "\0" in value:
        raise InvalidInputError(what, value, "holds a NUL, which databases do not store")
    return value
