"""The errors of PrivTune: one root; a message says what was wrong, what is allowed, and what to do.

It never depends on private data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["InvalidInputError", "PrivTuneError", "UnreachableFileError", "interruptible"]

_LONGEST = 200  # characters of a value
_RUN = 300  # characters of a quotation or a word
_LONGEST_MESSAGE = 4000  # characters
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
        texts = [shorten(arg) if isinstance(arg, str) else arg for arg in args]
        super().__init__(*texts)


class UnreachableFileError(PrivTuneError):
    """A file or object that was stored cannot be reached from this machine, now or at all.

    Args:
        args: The message.

    Example:
        >>> issubclass(UnreachableFileError, PrivTuneError)
        True
    """


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` for errors of a ``with`` block that Ctrl-C or SIGTERM caused.

    It may come while a library is between two states, whose way out then fails with an error of its own.
    Taken for the program's error, it would stop an arm that was only to be stopped.

    Raises:
        KeyboardInterrupt: If an interruption is behind the error that leaves the block. The error itself
            may show records, so it is not its cause.

    Example:
        >>> try:
        ...     with interruptible():
        ...         try:
        ...             raise KeyboardInterrupt
        ...         finally:
        ...             raise RuntimeError("between two states")
        ... except KeyboardInterrupt:
        ...     "an interruption, and no error of the program"
        'an interruption, and no error of the program'
    """
    is_interrupted = False
    try:
        yield
    except Exception as error:
        is_interrupted = was_interrupted(error)
        if not is_interrupted:
            raise
    if is_interrupted:
        raise KeyboardInterrupt


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether an interruption is behind an error, or behind the exit that Typer makes of it."""
    return any(isinstance(cause, KeyboardInterrupt) for cause in errors_behind(error))


def errors_behind(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all errors behind it, each once: its causes and contexts, recursively.

    An error that is raised again from another may stand behind itself: a walk that follows its causes
    alone would never end.

    Args:
        error: The error to begin with, which comes first; nothing is yielded of None.

    Example:
        >>> first = ValueError("first")
        >>> second = RuntimeError("second")
        >>> second.__cause__ = first
        >>> first.__context__ = second
        >>> [str(error) for error in errors_behind(second)]
        ['second', 'first']
    """
    visits: set[int] = set()
    errors = [error]
    while errors:
        current = errors.pop()
        if current is None or id(current) in visits:
            continue
        visits.add(id(current))
        yield current
        errors.append(current.__context__)
        errors.append(current.__cause__)


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
        message = f"{name} = {show_value(value)}: {allowed}."
        if remedy:
            message = f"{message} {remedy}"
        super().__init__(message)


def shorten(text: str) -> str:
    """Return a message with its long quotations and words cut."""
    text = _LONG.sub(_cut, text)
    if len(text) <= _LONGEST_MESSAGE:
        return text
    # The end is kept, too: there is the remedy.
    beginning = text[: _LONGEST_MESSAGE // 2]
    end = text[-_LONGEST_MESSAGE // 4 :]
    return f"{beginning} ... {end}"


def _cut(match: re.Match[str]) -> str:
    beginning = match[0][: _RUN - 1]
    return f"{beginning}..."


def show_value(value: object) -> str:
    """Return a value for a message, in one line of bounded length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a list of itself
        return "a value too large to show"
    if "://" in text and "***" not in text:  # a database URL may hold a password
        text = re.sub(r"://[^\s'\"]*@", "://***@", text)
        text = re.sub(r"\?[^\s'\"]+", "?***", text)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}..."
