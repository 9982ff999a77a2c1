"""Connections and transactions on SQLite and PostgreSQL, and the names of what can go wrong there.

A writing transaction holds the ledger's lock from its first statement: ``BEGIN IMMEDIATE`` on
SQLite, and on PostgreSQL the budget's row, which the caller locks first. Both isolation levels are
set here and not left to defaults: on Python 3.11 SQLAlchemy's SQLite reads before it begins, and
PostgreSQL's REPEATABLE READ takes its snapshot before it waits for the lock.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url

from privtune.errors import InvalidInputError
from privtune.files import create_private, private_folder
from privtune.ledger.errors import LedgerBusyError, LedgerError
from privtune.ledger.failures import translated
from privtune.ledger.schema import VERSION_TABLE
from privtune.ledger.turn import Turn, pause
from privtune.ledger.urls import masked_url
from privtune.ledger.witness import Witness
from privtune.names import check_text

__all__ = [
    "Storage",
    "artifact_root",
    "checked_url",
    "create_database",
    "database_path",
]

_WRITE, _QUICK = "privtune_write", "privtune_quick"
# The one row that all to whom PostgreSQL's database is lent lock.
_VERSION = sa.select(sa.table(VERSION_TABLE, sa.column("version_num")))
# Changes when a row's lock goes to another transaction: who wrote the row, who locked it last.
_HOLDER: sa.ColumnElement[str] = sa.literal_column("xmin::text || ' ' || xmax::text")


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
        writable = "mode" not in self.url.query
        self._turn = Turn(
            database_path(self.url) if writable else None, patience, _busy(self.safe_url, patience)
        )
        self._held: tuple[int, Connection] | None = None
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
        """Give a connection that only reads; it waits for nobody who writes."""
        self._same_process()
        with (
            translated(self.safe_url),
            self._connected() as connection,
            self._begin(connection),
        ):
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Give a connection in a writing transaction; commit at the end, or write nothing."""
        self._same_process()
        with (
            self._turn.taken(),
            translated(self.safe_url),
            self._connected() as plain,
        ):
            connection = plain.execution_options(**{_WRITE: True, _QUICK: False})
            with self._begin(connection):
                yield connection

    @contextmanager
    def quick(self) -> Iterator[Connection]:
        """Give a connection for one statement whose loss in a crash costs nothing but work.

        On SQLite it does not wait for the disk; what is written after it by :meth:`write` does, and
        with that all before: it is one log, written in order. On PostgreSQL it is a transaction by
        itself, which says itself whether it waits, and is sent in one message.
        """
        self._same_process()
        with self._turn.taken(), translated(self.safe_url), self._connected() as plain:
            if self.dialect == "postgresql" and self._held is None:
                yield plain.execution_options(isolation_level="AUTOCOMMIT")
                return
            connection = plain.execution_options(**{_WRITE: True, _QUICK: True})
            with self._begin(connection):
                yield connection

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Let another library write to the database: nobody else who writes here does meanwhile.

        On PostgreSQL, where all may write at once, nobody else to whom it is lent does.
        """
        if self.dialect == "sqlite":
            with self._turn.taken():
                yield
            return
        with self.write() as connection:
            self.lock(connection, _VERSION, {})
            yield

    @property
    def options_for_others(self) -> dict[str, Any]:
        """SQLAlchemy's options for a library that opens the database itself."""
        if self.dialect == "sqlite":
            return {"connect_args": {"timeout": self.patience, "factory": SecureConnection}}
        args, options = self.engine.dialect.create_connect_args(self.url)
        # A server's connections are few: none stays open.
        return {
            "poolclass": sa.NullPool,
            "creator": lambda: _connect(self.engine.dialect, self.patience, *args, **options),
        }

    def lock(
        self, connection: Connection, row: sa.Select[Any], values: Mapping[str, Any]
    ) -> sa.Row[Any] | None:
        """Read a row and lock it until the transaction ends; SQLite's transaction holds all of them.

        PostgreSQL's waiting is in order, and ends when one holder has had the lock for too long: as
        long as it goes from hand to hand, it is waited on.
        """
        if self.dialect == "sqlite":
            return connection.execute(row, values).one_or_none()
        holder = None
        while True:
            try:
                with connection.begin_nested():  # a wait that fails ends a transaction
                    return connection.execute(row.with_for_update(), values).one_or_none()
            except sa.exc.OperationalError as error:
                if "lock timeout" not in str(error.orig):
                    raise
                now = connection.execute(row.with_only_columns(_HOLDER), values).scalar()
                if now == holder:
                    raise LedgerBusyError(_busy(self.safe_url, self.patience)) from error
                holder = now

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
            with translated(self.safe_url), self.engine.connect() as connection:
                key = sa.func.hashtextextended(sa.func.concat(sa.func.current_schema(), name), 0)
                held = connection.execute(sa.select(sa.func.pg_try_advisory_lock(key))).scalar_one()
                connection.commit()
                if not held:
                    yield False
                    return
                # The lock is the session's, so transactions may use it: many processes that each
                # held one connection and waited for another could wait for each other.
                before, self._held = self._held, (threading.get_ident(), connection)
                try:
                    yield True
                finally:
                    self._held = before
                    with suppress(sa.exc.DBAPIError):  # lost, and the lock with it
                        connection.execute(sa.select(sa.func.pg_advisory_unlock(key)))
                        connection.commit()
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

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """Give the connection that this thread holds a name by, if it is idle; else one more."""
        thread, held = self._held or (None, None)
        mine = held is not None and thread == threading.get_ident() and not held.in_transaction()
        if held is not None and mine and _alive(held):
            yield held
            return
        with self.engine.connect() as connection:
            yield connection

    def _begin(self, connection: Connection) -> sa.RootTransaction:
        """Begin, waiting with random pauses for a writer that takes no turns.

        Who reads on SQLite waits, too, while the write-ahead log is recovered after a crash.
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
            pause()

    def _same_process(self) -> None:
        if os.getpid() != self._pid:
            raise LedgerError(
                "this ledger was opened by another process: "
                "connections do not survive a fork, so open the ledger again in each process."
            )


def _alive(connection: Connection) -> bool:
    """Return whether an idle connection is still one: hours of training may lie between two uses."""
    try:
        connection.execute(sa.select(1))
    except sa.exc.DBAPIError:
        return False
    finally:
        connection.rollback()
    return True


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
    try:
        Path(f"{path}-journal").exists()  # the longest name of SQLite's and ours beside it
        folder = path.parent.is_dir()
    except OSError as error:
        allowed = f"names no file that can be had here ({error.strerror})"
        raise InvalidInputError("storage", shown, allowed, _EXAMPLES) from None
    if not folder:
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


_NO_DRIVER = "PostgreSQL needs psycopg: install it with pip install 'privtune[postgres]'."
_ENCODE = "Percent-encode what is special in a password: @ is %40, / is %2F."
_EXAMPLES = "Examples: sqlite:///privtune.db, postgresql://user@host/database."


def _engine(url: URL, patience: float) -> Engine:
    if url.get_backend_name() == "sqlite":
        # How long to wait where SQLite alone can: while another recovers the log, at the first look.
        connect_args = {"timeout": patience, "factory": SecureConnection}
        engine = sa.create_engine(url, connect_args=connect_args)
        sa.event.listen(engine, "connect", _on_sqlite_connect)
        sa.event.listen(engine, "begin", _on_sqlite_begin)
        return engine
    try:
        engine = sa.create_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_size=1,  # a server's connections are few: one stays open
            max_overflow=100,
            connect_args={"connect_timeout": 10},
        )
    except ModuleNotFoundError as error:
        raise LedgerError(_NO_DRIVER) from error

    def on_connect(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            # Half: Storage.lock waits twice before it gives up.
            cursor.execute(f"SET lock_timeout = {int(patience * 500)}")
            # As on SQLite: a commit is on the disk when it returns, whatever the server's default.
            cursor.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
        connection.commit()

    def connect(dialect: Any, _record: object, args: Any, options: Any) -> Any:
        return _connect(dialect, patience, *args, **options)

    sa.event.listen(engine, "do_connect", connect)
    sa.event.listen(engine, "connect", on_connect)
    return engine


_FULL = ("too many clients", "too many connections", "connection slots are reserved")
"""What PostgreSQL says when all of its connections are taken."""


def _connect(dialect: Any, patience: float, *args: Any, **options: Any) -> Any:
    """Connect, waiting for one of the server's connections to become free."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return dialect.connect(*args, **options)
        except dialect.loaded_dbapi.OperationalError as error:
            if not any(words in str(error) for words in _FULL) or time.monotonic() > deadline:
                raise
        pause()


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
        pause()


def _on_sqlite_begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get(_WRITE, False):
        mode = "NORMAL" if options.get(_QUICK, False) else "FULL"
        if connection.info.get("synchronous", "FULL") != mode:
            connection.exec_driver_sql(f"PRAGMA synchronous = {mode}")
            connection.info["synchronous"] = mode
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        return
    connection.exec_driver_sql("BEGIN")
    # The first look takes the snapshot, and may have to wait; what comes later never does.
    connection.exec_driver_sql("SELECT 1 FROM sqlite_master LIMIT 1")
