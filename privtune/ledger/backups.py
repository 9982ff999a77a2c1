"""Copies a ledger's whole SQLite database, with what is still in its write-ahead log."""

from __future__ import annotations

import os
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

from privtune.errors import InvalidInputError
from privtune.files import create_private, name_file, write_through
from privtune.ledger.errors import LedgerCorruptedError, LedgerError
from privtune.ledger.places import STORE, Witness
from privtune.ledger.storage import Storage

DRAFT = ".privtune-backup-"


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
    if os.path.lexists(path) or not path.parent.is_dir():
        raise InvalidInputError("file", str(path), "must be a new file in a folder that exists")
    if path.name.lower().endswith(STORE[1:]):
        allowed = f"must not end in {', '.join(STORE[1:])}, as files that belong to a database do"
        raise InvalidInputError("file", str(path), allowed)
    draft = path.with_name(f"{DRAFT}{uuid.uuid4().hex}")
    witness = Witness(path)
    witness.forget()  # what was noted beside a copy that is gone is not about this one
    try:
        create_private(draft)
        try:
            heads = _copy(storage, draft)
            try:
                name_file(draft, path, replace=False)
            except FileExistsError as error:
                raise InvalidInputError("file", str(path), "must be a new file") from error
        finally:
            for remainder in (draft, Path(f"{draft}-journal")):
                remainder.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(
            f"{path} could not be written, and nothing of it is left: {error}. Make room there, or choose "
            "another folder, and run the command again."
        ) from error
    for budget, entries, head in heads:
        witness.note(budget, entries, head)
    return path


def _copy(storage: Storage, path: Path) -> list[tuple[str, int, str]]:
    """Copy the database by SQLite's own backup, and return the hash of each log's last entry in the copy."""
    with closing(sqlite3.connect(path)) as copy:
        with storage.read() as connection:
            source: Any = connection.connection.driver_connection
            source.backup(copy)
        # One file and nothing beside it: whoever opens the copy turns the log on again.
        copy.execute("PRAGMA journal_mode = DELETE").close()
        # Wherever it is put, also where the original was: it says of itself that it is a copy.
        copy.execute("UPDATE privtune_store SET home = json_set(home, '$.copied', json('true'))")
        copy.commit()
        verdict = copy.execute("PRAGMA integrity_check").fetchone()[0]
        if verdict != "ok":
            raise LedgerCorruptedError(f"{storage.safe_url} is damaged: {verdict}.")
        query = "SELECT name, entries, head FROM privtune_budgets WHERE entries > 0"
        heads = copy.execute(query).fetchall()
    write_through(path)
    return heads
