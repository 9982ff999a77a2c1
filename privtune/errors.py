"""The errors of PrivTune: one root; a message says what was wrong, what is allowed, and what to do.

It never depends on private data.
"""

from __future__ import annotations

import re

__all__ = ["InvalidInputError", "PrivTuneError"]

_LONGEST = 200  # characters of a value
_RUN, _WHOLE = 300, 4000  # characters of a quotation or a word, and of a message
_LONG = re.compile(rf"'[^']{{{_RUN},}}'|\"[^\"]{{{_RUN},}}\"|\S{{{_RUN},}}")


class PrivTuneError(Exception):
    """Root of every error that PrivTune raises on purpose.

    The command line prints it as one sentence and exits with 1; anything else is a bug.

    Args:
        args: The message; a quotation or a word of 300 characters or more is shortened in it.

    Example:
        >>> issubclass(InvalidInputError, PrivTuneError)
        True
        >>> len(str(PrivTuneError(f"There is no study named {'x' * 5000!r}.")))
        327
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(_shortened(arg) if isinstance(arg, str) else arg for arg in args))


class InvalidInputError(PrivTuneError, ValueError):
    """A value that the caller passed is outside its domain.

    Args:
        name: What was passed, as the caller knows it (``"noise_multiplier"``).
        value: The value that was refused.
        allowed: The domain, in words (``"must be a finite number above 0"``).
        remedy: What to do instead, if the domain alone does not say it.

    Example:
        >>> raise InvalidInputError("rate", 1.5, "must lie in (0, 1]", "Divide by the records.")
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: rate = 1.5: must lie in (0, 1]. Divide by the ...
    """

    def __init__(self, name: str, value: object, allowed: str, remedy: str = "") -> None:
        self.name = name
        self.value = value
        self.allowed = allowed
        self.remedy = remedy
        super().__init__(f"{name} = {_shown(value)}: {allowed}." + (f" {remedy}" if remedy else ""))


def _shortened(text: str) -> str:
    """Return a message with its long quotations and words cut."""
    text = _LONG.sub(lambda found: f"{found[0][: _RUN - 1]}...", text)
    return text if len(text) <= _WHOLE else f"{text[: _WHOLE // 2]} ... {text[-_WHOLE // 4 :]}"


def _shown(value: object) -> str:
    """Return a value for a message, in one line of bounded length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a list of itself
        return "a value too large to show"
    if "://" in text and "***" not in text:  # a database URL may hold a password
        text = re.sub(r"://[^\s'\"]*@", "://***@", text)
        text = re.sub(r"\?[^\s'\"]+", "?***", text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
