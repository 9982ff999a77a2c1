"""The errors of PrivTune: one root, one clear sentence each.

A message says what was wrong, what is allowed, and what to do. It never depends on private data.
"""

from __future__ import annotations

__all__ = ["InvalidInputError", "PrivTuneError"]


class PrivTuneError(Exception):
    """Root of every error that PrivTune raises on purpose.

    The command line prints it as one sentence and exits with 1; anything else is a bug.

    Example:
        >>> issubclass(InvalidInputError, PrivTuneError)
        True
    """


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


_LONGEST = 200


def _shown(value: object) -> str:
    """Return a value for a message, in one line of bounded length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or an endless nest
        return "a value too large to show"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
