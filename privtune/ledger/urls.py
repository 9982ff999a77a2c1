"""URLs as messages may show them: without what opens the door."""

from __future__ import annotations

import re

_SECRET = "password|passwd|pwd|secret|token|key|options"  # noqa: S105  what secrets are called
_SHOWN = frozenset({
    "application_name", "cache", "charset", "check_same_thread", "connect_timeout", "dbname", "driver",
    "host", "hostaddr", "immutable", "isolation_level", "mode", "nolock", "port", "sslmode",
    "target_session_attrs", "timeout", "uri", "user", "vfs",
})  # fmt: skip
"""Options of URLs that are shown; the values of all others are not, whatever they are called."""
_WITH_USERS = ("postgres", "sqlite", "mysql", "mariadb", "mssql", "oracle")
"""Schemes whose part before an ``@`` names a user: of others it may be a token."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def masked_url(url: str) -> str:
    """Return a URL with its password replaced by ``***``."""
    credentials, at, rest = url.rpartition("@")
    # Without a scheme that ends in "://" the user begins after whatever slashes there are.
    scheme = _SCHEME.match(credentials) or re.match(r"[^:@]*//", credentials)
    begin = scheme.end() if scheme else 0
    user, colon, _ = credentials[begin:].partition(":")
    if at and colon:
        url = f"{credentials[:begin]}{user}:***@{rest}"
    elif at and scheme and "/" not in user and not url.lower().startswith(_WITH_USERS):
        url = f"{credentials[:begin]}***@{rest}"
    return _query_masked(url)


def _query_masked(url: str) -> str:
    """Return a URL of whose options those alone are shown that are known to be no secrets."""
    place, question, query = url.partition("?")
    place, number, fragment = place.partition("#")
    if number and fragment and "://" in place:
        place = f"{place}#***"
    elif number:
        place = f"{place}#{fragment}"
    if not question:
        return place
    shown = []
    for option in re.split("[&;]", query.partition("#")[0]):
        name, equals, _ = option.partition("=")
        known = name.lower() in _SHOWN
        shown.append(option if known else f"{name}=***" if equals else "***" if option else "")
    return f"{place}?{'&'.join(shown)}{'#***' if '#' in query else ''}"


def masked(message: str) -> str:
    """Return a message with the passwords of the URLs in it replaced by ``***``."""
    begins = [match.start() for match in _SCHEME.finditer(message)]
    parts = [message[a:b] for a, b in zip([0, *begins], [*begins, len(message)], strict=True)]
    # Before the first URL there are words; one of them may be a URL without its scheme.
    words = re.sub(r"(^|[\s'\"])([^\s'\"]+@)", lambda m: m[1] + masked_url(m[2]), parts[0])
    whole = words + "".join(map(_masked_part, parts[1:]))
    return re.sub(rf"\b(\w*({_SECRET}))=[^&\s'\"]+", r"\1=***", whole, flags=re.IGNORECASE)


def _masked_part(part: str) -> str:
    url, at, rest = part.rpartition("@")
    # The URL ends at a space or a quotation mark, unless a password holds one.
    end = re.search(r"[\s'\"]", rest)
    cut = len(rest) if end is None else end.start()
    return masked_url(f"{url}{at}{rest[:cut]}") + rest[cut:]
