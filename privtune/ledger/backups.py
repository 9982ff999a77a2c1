"""Copies a ledger's database whole: what a plain copy of the file lacks is its write-ahead log."""

from __future__ import annotations

import os
import re
import sqlite3
import uuid
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

from privtune.errors import InvalidInputError
from privtune.files import open_private
from privtune.ledger.errors import LedgerCorruptedError, LedgerError
from privtune.ledger.places import STORE, Witness, forget_heads
from privtune.ledger.storage import Storage

_DRAFT = ".privtune-backup-"
_DRAFT_NAME = re.compile(rf"{re.escape(_DRAFT)}[0-9a-f]{{32}}")


def backup(storage: Storage, path: Path) -> Path:
    """Copy a SQLite database with everything committed to it, while others work on it.

    Args:
        storage: What to copy: budgets, studies, sealed rounds. The copy is the curator's, too.
        path: The new file, made for its owner alone; the heads of its logs are noted beside it.

    Returns:
        The file.

    Raises:
        InvalidInputError: The storage is PostgreSQL's, the file is there, or its folder is not.
        LedgerError: The copy could not be written, or is not sound.

    Example:
        >>> from privtune.ledger import Ledger
        >>> with Ledger() as ledger:
        ...     backup(ledger.log.storage, Path("copy.db")).name
        'copy.db'
    """
    if storage.dialect != "sqlite":
        allowed = "is no SQLite file: PostgreSQL's own tool copies it whole"
        raise InvalidInputError("storage", storage.safe_url, allowed, "Run: pg_dump URL > FILE.")
    path = path.absolute()
    if path.exists() or not path.parent.is_dir():
        raise InvalidInputError("file", str(path), "must be a new file in a folder that exists")
    if path.name.lower().endswith(STORE[1:]):
        allowed = f"must not end in {', '.join(STORE[1:])}, as files that belong to a database do"
        raise InvalidInputError("file", str(path), allowed)
    try:
        forget_heads(path)
        _remove_drafts(path.parent)
        draft = path.with_name(f"{_DRAFT}{uuid.uuid4().hex}")
        with open_private(draft, "wb", None) as held:  # until the block ends, or the process
            _hold(held)
            try:
                heads = _copy(storage, draft)
                _put(draft, path)
            finally:
                _remove_draft(draft)
    except FileExistsError:
        raise InvalidInputError("file", str(path), "must be a new file") from None
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"{path} could not be written: {error}.") from error
    witness = Witness(path)
    for budget, entries, head in heads:
        witness.note(budget, entries, head)
    return path


def _put(draft: Path, path: Path) -> None:
    """Rename a draft to its final path, unless a file is there by now."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if path.exists():
            raise FileExistsError from error
        draft.replace(path)


def drafts_in(folder: Path) -> list[Path]:
    """Return the drafts of killed and of running backups in a folder."""
    found = [path for path in folder.glob(f"{_DRAFT}*") if _DRAFT_NAME.fullmatch(path.name)]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _hold(file: IO[Any]) -> bool:
    """Lock a draft; return False if a living process holds the lock."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # no such locks here: it may be another's, and is left
        return False
    return True


def _remove_drafts(folder: Path) -> None:
    """Delete the drafts of killed backups in a folder."""
    for draft in drafts_in(folder):
        with suppress(OSError), draft.open("rb") as file:
            if _hold(file):
                _remove_draft(draft)


def _remove_draft(draft: Path) -> None:
    for path in (draft, Path(f"{draft}-journal")):
        path.unlink(missing_ok=True)


def _copy(storage: Storage, path: Path) -> list[tuple[str, int, str]]:
    """Copy the database by SQLite's own backup; return the heads of the logs in the copy."""
    with closing(sqlite3.connect(path)) as copy:
        with storage.read() as connection:
            source = connection.connection.driver_connection
            if not isinstance(source, sqlite3.Connection):
                raise LedgerError(f"{storage.safe_url} is not opened by Python's own SQLite.")
            source.backup(copy)
        # One file and nothing beside it: whoever opens the copy turns the log on again.
        copy.execute("PRAGMA journal_mode = DELETE").close()
        sound = copy.execute("PRAGMA integrity_check").fetchone()[0]
        if sound != "ok":
            raise LedgerCorruptedError(f"{storage.safe_url} is damaged: {sound}.")
        query = "SELECT name, entries, head FROM privtune_budgets WHERE entries > 0"
        heads = copy.execute(query).fetchall()
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return heads
