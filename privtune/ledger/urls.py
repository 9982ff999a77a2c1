"""URLs as messages may show them: without what opens the door."""

from __future__ import annotations

import re

__all__ = ["masked", "masked_url"]

_SECRET = "password|passwd|pwd|secret|token"  # noqa: S105  what secrets are called
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def masked_url(url: str) -> str:
    """Return a URL with its password replaced by ``***``.

    Args:
        url: Well-formed or not: what a user mistyped may hold a password, too. One that was not
            percent-encoded may hold anything, ``@``, ``/`` and spaces included, so it goes from the
            first ``:`` behind the scheme to the last ``@``: rather too much than too little.
    """
    credentials, at, rest = url.rpartition("@")
    # Without a scheme that ends in "://" the user begins after whatever slashes there are.
    scheme = _SCHEME.match(credentials) or re.match(r"[^:@]*//", credentials)
    begin = scheme.end() if scheme else 0
    user, colon, _ = credentials[begin:].partition(":")
    shown = f"{credentials[:begin]}{user}:***@{rest}" if at and colon else url
    return re.sub(rf"({_SECRET})=[^&]+", r"\1=***", shown, flags=re.IGNORECASE)


def masked(message: str) -> str:
    """Return a message with the passwords of the URLs in it replaced by ``***``.

    A URL's password ends at the last ``@`` before the next URL, whatever is in between.
    """
    begins = [match.start() for match in _SCHEME.finditer(message)]
    parts = [message[a:b] for a, b in zip([0, *begins], [*begins, len(message)], strict=True)]
    # Before the first URL there are words; one of them may be a URL without its scheme.
    words = re.sub(r"(^|[\s'\"])([^\s'\"]+@)", lambda m: m[1] + masked_url(m[2]), parts[0])
    whole = words + "".join(map(_masked_part, parts[1:]))
    return re.sub(rf"({_SECRET})=[^&\s'\"]+", r"\1=***", whole, flags=re.IGNORECASE)


def _masked_part(part: str) -> str:
    url, at, rest = part.rpartition("@")
    return masked_url(url + at) + rest
