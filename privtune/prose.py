"""Prose on a terminal: broken at words to its width, whole where it is piped."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

_NARROWEST = 30  # columns below which nothing is broken
_LABEL = re.compile(r"(?:[^\s:.]+ ){0,3}[^\s:.]+:(?= )")  # four words at most
_GLUE = "\x00"

# A command ends with its sentence, which a file's name does not: a point in it stands within a word.
_COMMAND = re.compile(
    r"(?<![^\s(\"'`])(?:\S*/)?(?:privtune|pip|chmod|openssl|python) \S"
    r"[^\n]*?(?=[.;,)]?$|[.;,)]+\s|: )",
    re.MULTILINE,
)
_AMOUNT = re.compile(r"(?<=[εδσK]) (=) (?=\S)")


def broken(text: str, width: int, *, hang: int | None = None) -> str:
    """Return a text with its lines broken at words to a width, and continued with a hanging indent.

    A word that is wider stays whole, so that a URL or a digest can be copied; so does a command that is
    introduced by a colon, which then may be wider than the line.

    Args:
        text: Lines of prose.
        width: How wide a line may be.
        hang: The indent of what does not fit the first line. Unless given, it is that of the line, and two
            columns more where the line begins with a label (``Use it: ...``).

    Example:
        >>> print(broken("Use it: one model that tells these rows apart", 32))
        Use it: one model that tells
          these rows apart
    """
    lines = [_break_line(line, width, hang) for line in text.split("\n")]
    return "\n".join(lines)


def _break_line(line: str, width: int, hang: int | None) -> str:
    """Return one line broken at words into lines of a width; see :func:`broken`."""
    if len(line) <= width or width < _NARROWEST:
        return line
    words = _glue(line).split(" ")
    if hang is None:
        hang = _hang_of(line)
    indent = " " * min(hang, width // 2)
    lines: list[str] = []
    current = words[0]
    for word in words[1:]:
        is_full = len(current) + 1 + len(word) > width
        # Blanks at the beginning of a line are its indent.
        if is_full and current.strip(" "):
            lines.append(current.rstrip(" "))
            current = indent + word
        else:
            current += f" {word}"
    lines.append(current)
    return "\n".join(lines).replace(_GLUE, " ")


def _hang_of(line: str) -> int:
    """Return the indent of a line's continuation, in columns: the line's own, and two more after a label."""
    bare = line.lstrip(" ")
    indent = len(line) - len(bare)
    return indent + 2 if _LABEL.match(bare) else indent


def _glue(line: str) -> str:
    """Return a line with unbreakable blanks in commands and amounts (ε = 2)."""
    line = _COMMAND.sub(_glue_command, line)
    return _AMOUNT.sub(rf"{_GLUE}\1{_GLUE}", line)


def _glue_command(match: re.Match[str]) -> str:
    """Return a command with unbreakable blanks if a colon or bracket introduces it, else as it is."""
    command = match[0]
    before = match.string[: match.start()].rstrip(" ")
    # Within a sentence it would take the sentence with it.
    is_introduced = not before or before.endswith((":", "(", ": `"))
    if not is_introduced:
        return command
    return command.replace(" ", _GLUE)


def capitalise(sentence: str) -> str:
    """Return a sentence with a capital first letter, and all others as they are.

    Example:
        >>> capitalise("the ε of DP-SGD")
        'The ε of DP-SGD'
    """
    first_letter = sentence[:1].upper()
    return f"{first_letter}{sentence[1:]}"


def width_of(stream: TextIO) -> int | None:
    """Return a terminal's width in columns, or None if the stream is no terminal.

    What is piped is read by programs, which a broken line would mislead.
    """
    try:
        if not stream.isatty():
            return None
        variable = os.environ.get("COLUMNS", "")
        if variable.isdecimal():
            columns = int(variable)
        else:
            terminal = stream.fileno()
            columns = os.get_terminal_size(terminal).columns
        return columns or 80
    except (OSError, ValueError):
        return None


def fitted(
    text: str,
    stream: TextIO | None = None,
    *,
    hang: int | None = None,
) -> str:
    """Return a text broken at words to the width of a terminal, or unchanged for any other stream."""
    width = width_of(stream or sys.stdout)
    if width is None:
        return text
    return broken(text, width, hang=hang)


def complain(text: str) -> None:
    """Write lines to standard error, as standard output may hold a JSON document."""
    lines = fitted(text, sys.stderr)
    sys.stderr.write(f"{lines}\n")
