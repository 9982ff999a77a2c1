"""URLs as messages may show them: without what opens the door."""

from __future__ import annotations

import re

__all__ = ["masked"]

# Up to the last "@": a password that was not percent-encoded may hold any character. The user is
# known by "://", "//", or the start of the text, since a malformed URL must be masked, too.
_PASSWORD = re.compile(r"((?:^|\s|['\"]|//)[^\s:/@]*):(?!//)\S*@")
_PARAMETER = re.compile(r"(password|passwd|pwd|secret|token)=[^&\s'\"]+", re.IGNORECASE)


def masked(text: str) -> str:
    """Return a URL, or a message that holds some, with every password replaced by ``***``.

    Args:
        text: Well-formed or not: what a user mistyped may hold a password, too.
    """
    return _PARAMETER.sub(r"\1=***", _PASSWORD.sub(r"\1:***@", text))
