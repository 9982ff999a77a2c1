"""Turns what databases raise into one clear error each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from privtune.ledger.errors import (
    LedgerBusyError,
    LedgerConnectionError,
    LedgerCorruptedError,
    LedgerError,
    LedgerFullError,
    LedgerReadOnlyError,
)
from privtune.ledger.urls import masked

LOCK_TIMEOUT = "55P03"
"""How PostgreSQL calls a lock that was waited for too long."""

_NOTHING = "nothing was written"

# What the driver says (lower case), or PostgreSQL's code, which is the same in all of its languages -> the
# error, and what to do about it. The first match counts.
_KNOWN: tuple[tuple[tuple[str, ...], type[LedgerError], str], ...] = (
    (
        ("append-only",),
        LedgerCorruptedError,
        "somebody tried to change an entry: the log is append-only",
    ),
    (
        ("disk is full", "disk full", "no space left", "disk i/o error", "53100"),
        LedgerFullError,
        f"the disk is full or failing: {_NOTHING}; make room and try again",
    ),
    (
        ("readonly", "read-only", "25006"),
        LedgerReadOnlyError,
        f"the storage is read-only: {_NOTHING}; give this user the right to write, or copy it",
    ),
    (
        ("locked", LOCK_TIMEOUT, "40P01", "40001"),
        LedgerBusyError,
        f"another process holds the lock: {_NOTHING}; try again",
    ),
    (
        ("not a database", "malformed"),
        LedgerCorruptedError,
        "the file is damaged, or no SQLite database; restore it from a copy and verify it",
    ),
    (
        ("unable to open",),
        LedgerConnectionError,
        "the file cannot be opened; check that its folder exists and is yours",
    ),
)


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Raise a LedgerError for every error of the database underneath."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        text, state = str(error.orig).lower(), sqlstate(error)
        for words, kind, remedy in _KNOWN:
            said = (word for word in words if word.islower())  # a number in a key is no code
            if state in words or any(word in text for word in said):
                raise kind(f"{url}: {remedy}.") from error
        if error.connection_invalidated or isinstance(error, sa.exc.OperationalError):
            raise LedgerConnectionError(
                f"{url}: the connection failed ({_first_line(error)}); an unfinished transaction "
                "is rolled back by the database, so look at the charges before trying again."
            ) from error
        raise LedgerError(f"{url}: the database refused ({_first_line(error)}).") from error


def sqlstate(error: sa.exc.DBAPIError) -> str:
    """Return PostgreSQL's code of an error, empty where there is none."""
    return getattr(error.orig, "sqlstate", None) or ""


def _first_line(error: sa.exc.DBAPIError) -> str:
    lines = str(error.orig).strip().splitlines() or [type(error.orig).__name__]
    return masked(lines[0].rstrip("."))
