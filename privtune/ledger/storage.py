"""Connections and transactions on SQLite and PostgreSQL, and the names of what can go wrong there.

A writing transaction holds the ledger's lock from its first statement: ``BEGIN IMMEDIATE`` on
SQLite, and on PostgreSQL the budget's row, which the caller locks first. Both isolation levels are
set here and not left to defaults: on Python 3.11 SQLAlchemy's SQLite reads before it begins, and
PostgreSQL's REPEATABLE READ takes its snapshot before it waits for the lock.
"""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url

from privtune.errors import InvalidInputError
from privtune.files import create_private, private_folder
from privtune.ledger.errors import LedgerBusyError, LedgerError
from privtune.ledger.failures import translated
from privtune.ledger.urls import masked_url
from privtune.ledger.witness import Witness
from privtune.names import check_text

__all__ = [
    "NO_DRIVER",
    "SecureConnection",
    "Storage",
    "artifact_root",
    "checked_url",
    "create_database",
    "database_path",
]

_WRITE = "privtune_write"


class Storage:
    """One database, for one process.

    Args:
        url: A SQLAlchemy URL: ``sqlite:///file.db`` or ``postgresql://user@host/database``.
        patience: How long to wait for the lock, in seconds, before giving up.

    Threads may share a storage; a forked child may not, and is told so.
    """

    def __init__(self, url: str, *, patience: float = 60.0) -> None:
        self.url = checked_url(url)
        self.patience = patience
        self.dialect = self.url.get_backend_name()
        self.witness = Witness(database_path(self.url))
        self._pid = os.getpid()
        # SQLite lets one connection write at a time. Threads of one process queue here, fairly,
        # instead of polling the file.
        self._turn = threading.Lock()
        create_database(self.url)
        with translated(self.safe_url):
            self.engine = _engine(self.url, patience)

    @property
    def safe_url(self) -> str:
        """The URL without its password, for messages."""
        return masked_url(self.url.render_as_string(hide_password=False))

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Give a connection that only reads; it waits for nobody."""
        self._same_process()
        with (
            translated(self.safe_url),
            self.engine.connect() as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Give a connection in a writing transaction; commit at the end, or write nothing."""
        self._same_process()
        if not self._turn.acquire(timeout=self.patience):
            raise LedgerBusyError(_busy(self.safe_url, self.patience))
        try:
            with translated(self.safe_url), self.engine.connect() as plain:
                connection = plain.execution_options(**{_WRITE: True})
                with self._begin(connection):
                    yield connection
        finally:
            self._turn.release()

    @contextmanager
    def hold(self, name: str, folder: Path) -> Iterator[bool]:
        """Hold a name until the block or the process ends; False if another holds it already.

        No clock takes part. PostgreSQL lets go when the connection ends, a file system when the
        file's last holder does; so nobody waits for a process that was killed. It spares work that
        another does already: that nothing is charged or released twice hangs on transactions.

        Args:
            name: What is held.
            folder: Where SQLite's storages keep the lock's file.
        """
        self._same_process()
        if self.dialect == "postgresql":
            with translated(self.safe_url), self.engine.connect() as plain:
                connection = plain.execution_options(isolation_level="AUTOCOMMIT")
                key = sa.func.hashtextextended(sa.func.concat(sa.func.current_schema(), name), 0)
                held = connection.execute(sa.select(sa.func.pg_try_advisory_lock(key))).scalar_one()
                try:
                    yield bool(held)
                finally:
                    if held:
                        connection.execute(sa.select(sa.func.pg_advisory_unlock(key)))
            return
        try:
            import fcntl
        except ImportError:  # no such locks on Windows: two processes may do the same work there
            yield True
            return
        private_folder(folder)
        path = folder / f".{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    def _begin(self, connection: Connection) -> sa.RootTransaction:
        """Begin, waiting for SQLite's lock with random pauses.

        SQLite's own busy handler lets newcomers overtake: whoever has waited long asks every 100
        ms, whoever is new asks every millisecond. Under many writers somebody starves.
        """
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return connection.begin()
            except sa.exc.OperationalError as error:
                if "locked" not in str(error.orig) or self.dialect != "sqlite":
                    raise
                if time.monotonic() > deadline:
                    raise LedgerBusyError(_busy(self.safe_url, self.patience)) from error
            time.sleep(random.uniform(0.0005, 0.01))  # noqa: S311  a pause, not a secret

    def _same_process(self) -> None:
        if os.getpid() != self._pid:
            raise LedgerError(
                "this ledger was opened by another process: "
                "connections do not survive a fork, so open the ledger again in each process."
            )


def _busy(url: str, patience: float) -> str:
    return (
        f"{url} stayed locked by another process for {patience:g} s: nothing was written; "
        "try again, or find out who holds it."
    )


def checked_url(url: str) -> URL:
    """Return a storage's URL with its driver.

    Raises:
        InvalidInputError: If it is no URL, neither SQLite nor PostgreSQL, or its folder is missing.
            The message shows no password.
    """
    shown = masked_url(str(url))
    try:
        check_text(url, "storage")
        parsed = make_url(url)
        backend = parsed.get_backend_name()
        if backend == "sqlite":
            parsed.get_dialect()().create_connect_args(parsed)  # reads the parameters, as a number
    except InvalidInputError as error:
        raise InvalidInputError("storage", shown, error.allowed, _EXAMPLES) from None
    except (sa.exc.ArgumentError, AttributeError, ValueError):
        raise InvalidInputError("storage", shown, "is no database URL", _EXAMPLES) from None
    if backend == "postgresql":
        if "@" in (parsed.host or ""):
            raise InvalidInputError("storage", shown, "has an '@' in its host", _ENCODE)
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise InvalidInputError("storage", shown, "must be SQLite or PostgreSQL", _EXAMPLES)
    path = database_path(parsed)
    if path is None or parsed.query.get("mode") == "memory":
        allowed = "must name a file: a budget that is kept in memory is forgotten"
        raise InvalidInputError("storage", shown, allowed, _EXAMPLES)
    if not path.parent.is_dir():
        raise InvalidInputError("storage", shown, f"the folder {path.parent} does not exist")
    return parsed


def artifact_root(url: str) -> Path:
    """Return the folder for models and trackers' files.

    Args:
        url: The storage's URL.

    Returns:
        What ``PRIVTUNE_ARTIFACTS`` says; else ``<stem>-artifacts`` beside an SQLite file, or
        ``<database>-artifacts`` in the working directory. The folder need not exist.
    """
    if given := os.environ.get("PRIVTUNE_ARTIFACTS"):
        return Path(given).absolute()
    checked = checked_url(url)
    if checked.get_backend_name() == "sqlite":
        path = Path(str(checked.database)).absolute()
        return path.with_name(f"{path.stem}-artifacts")
    return Path(f"{checked.database or 'postgres'}-artifacts").absolute()


class SecureConnection(sqlite3.Connection):
    """A connection that overwrites what it deletes (secrets, losing scores), not only unlinks it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA secure_delete = ON").close()


def database_path(url: URL) -> Path | None:
    """Return the file of a SQLite database, also of one named by a ``file:`` URI; else None."""
    name = url.database or ""
    if url.get_backend_name() != "sqlite" or name in ("", ":memory:"):
        return None
    if name.startswith("file:"):
        name = unquote(urlsplit(name).path)
        return Path(name).absolute() if name not in ("", ":memory:") else None
    return Path(name).absolute()


def create_database(url: URL) -> None:
    """Create a SQLite database's file, for its owner alone; SQLite's own files take its mode.

    What cannot be created here is left to SQLite, which says why.
    """
    path = database_path(url)
    if path is None or "mode" in url.query or path.exists():
        return
    try:
        # What was noted beside a database that is gone is not about the new one.
        Path(f"{path}-heads").unlink(missing_ok=True)
        create_private(path)
    except OSError:
        return


NO_DRIVER = "PostgreSQL needs psycopg: install it with pip install 'privtune[postgres]'."
_ENCODE = "Percent-encode what is special in a password: @ is %40, / is %2F."
_EXAMPLES = "Examples: sqlite:///privtune.db, postgresql://user@host/database."


def _engine(url: URL, patience: float) -> Engine:
    if url.get_backend_name() == "sqlite":
        connect_args = {"timeout": 5, "factory": SecureConnection}
        engine = sa.create_engine(url, connect_args=connect_args)
        sa.event.listen(engine, "connect", _on_sqlite_connect)
        sa.event.listen(engine, "begin", _on_sqlite_begin)
        return engine
    try:
        engine = sa.create_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            connect_args={"connect_timeout": 10},
        )
    except ModuleNotFoundError as error:
        raise LedgerError(NO_DRIVER) from error

    def on_connect(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET lock_timeout = {int(patience * 1000)}")
            # As on SQLite: a commit is on the disk when it returns, whatever the server's default.
            cursor.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
        connection.commit()

    sa.event.listen(engine, "connect", on_connect)
    return engine


def _on_sqlite_connect(connection: Any, _record: object) -> None:
    # None: the driver sends no BEGIN of its own; the begin event below sends the right one.
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA foreign_keys = ON")
        # FULL: a commit is on the disk when it returns. NORMAL may forget it in a power failure,
        # and a forgotten start is a release that nobody paid for.
        cursor.execute("PRAGMA synchronous = FULL")
        if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            _to_wal(cursor)
        # From here on the waiting is done by Storage._begin.
        cursor.execute("PRAGMA busy_timeout = 20")
    finally:
        cursor.close()


def _to_wal(cursor: Any) -> None:
    for _ in range(500):
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except Exception as error:  # sqlite3.OperationalError, without importing the driver
            if "locked" not in str(error):
                if "readonly" in str(error):
                    return  # reading works in any mode; the first write says what is wrong
                raise
        time.sleep(random.uniform(0.005, 0.02))  # noqa: S311


def _on_sqlite_begin(connection: Connection) -> None:
    write = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
