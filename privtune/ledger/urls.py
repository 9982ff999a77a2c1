"""Masks passwords and tokens in URLs, so that messages may show them."""

from __future__ import annotations

import re
from itertools import pairwise

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
    """Return a URL with its password replaced by ``***``.

    Args:
        url: A URL, or a text that was meant as one: messages also show what could not be parsed.

    Example:
        >>> masked_url("postgresql://ann:secret@host/clinic?sslmode=require&token=abc")
        'postgresql://ann:***@host/clinic?sslmode=require&token=***'
    """
    credentials, at, rest = url.rpartition("@")
    # Without a scheme that ends in "://" the user begins after whatever slashes there are.
    scheme = _SCHEME.match(credentials) or re.match(r"[^:@]*//", credentials)
    begin = scheme.end() if scheme else 0
    prefix = credentials[:begin]
    user, colon, _ = credentials[begin:].partition(":")
    has_password = bool(at and colon)
    names_user = url.lower().startswith(_WITH_USERS)
    is_token = at and scheme and "/" not in user and not names_user
    if has_password:
        url = f"{prefix}{user}:***@{rest}"
    elif is_token:
        url = f"{prefix}***@{rest}"
    return _mask_query(url)


def _mask_query(url: str) -> str:
    """Mask the value of every option of a URL, except of options known to hold no secret."""
    address, question, query = url.partition("?")
    address = _mask_fragment(address)
    if not question:
        return address
    options, number, _ = query.partition("#")
    masked_options = map(_mask_option, re.split("[&;]", options))
    fragment = "#***" if number else ""
    return f"{address}?{'&'.join(masked_options)}{fragment}"


def _mask_fragment(address: str) -> str:
    """Return a URL's address with the part behind its ``#`` masked, if it has a scheme."""
    place, number, fragment = address.partition("#")
    if number and fragment and "://" in place:
        return f"{place}#***"
    return address


def _mask_option(option: str) -> str:
    """Return an option of a URL with its value masked, unless such values are known to be public."""
    name, equals, _ = option.partition("=")
    if name.lower() in _SHOWN:
        return option
    if equals:
        return f"{name}=***"
    # A text without a name may be the rest of a password with an "&" in it.
    return "***" if option else ""


def masked(message: str) -> str:
    """Return a message with the passwords of the URLs in it replaced by ``***``.

    Args:
        message: The words of an error, such as of a database's driver, which may quote a URL.

    Example:
        >>> masked("cannot reach postgresql://ann:secret@host/clinic now")
        'cannot reach postgresql://ann:***@host/clinic now'
    """
    begins = [match.start() for match in _SCHEME.finditer(message)]
    cuts = [0, *begins, len(message)]
    words, *urls = [message[begin:end] for begin, end in pairwise(cuts)]
    # Before the first URL there are words; one of them may be a URL without its scheme.
    masked_words = re.sub(
        r"(^|[\s'\"])([^\s'\"]+@)",
        lambda match: match[1] + masked_url(match[2]),
        words,
    )
    masked_urls = "".join(map(_mask_part, urls))
    # Drivers also write connection strings: words of the form "password=...".
    return re.sub(
        rf"\b(\w*({_SECRET}))=[^&\s'\"]+",
        r"\1=***",
        masked_words + masked_urls,
        flags=re.IGNORECASE,
    )


def _mask_part(part: str) -> str:
    """Return a URL, and the words of a message that follow it, with the URL masked."""
    url, at, rest = part.rpartition("@")
    # The URL ends at a space or a quotation mark, unless a password holds one.
    end = re.search(r"[\s'\"]", rest)
    cut = len(rest) if end is None else end.start()
    host = rest[:cut]
    words = rest[cut:]
    return masked_url(f"{url}{at}{host}") + words
