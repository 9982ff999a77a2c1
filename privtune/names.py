"""The rule for names of studies, arms and budgets, which become folders and arguments; texts to store."""

from __future__ import annotations

import re

from privtune.errors import InvalidInputError

NAME_RULE = "must be 1 to 100 letters, digits, '.', '_' or '-', a letter or digit first"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Folders beside those of studies and arms, and names that Windows keeps for devices.
_RESERVED = {"mlflow", "mlflow.db", "mlflow.lock", "sealed", "trials", "con", "prn", "aux", "nul"}
_RESERVED |= {f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10)}


def is_name(name: object) -> bool:
    """Return whether a text has the form of a name: one harmless component of a path."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(name: object, what: str = "name") -> str:
    """Return a name for a new study, arm or budget; ``what`` says which in the message."""
    if not isinstance(name, str) or not is_name(name):
        raise InvalidInputError(what, name, NAME_RULE)
    if name.lower() in _RESERVED:
        raise InvalidInputError(what, name, "is reserved", "Choose another name.")
    return name


def check_text(value: object, what: str) -> str:
    """Return a text that every database stores and every terminal prints."""
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
