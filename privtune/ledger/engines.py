"""Engines of SQLAlchemy for SQLite and PostgreSQL, with durable commits and bounded waits for locks."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine

from privtune.errors import errors_behind
from privtune.files import owner_of
from privtune.ledger import errors
from privtune.ledger.urls import masked
from privtune.locks import FileLock

WRITE, QUICK = "privtune_write", "privtune_quick"


class SecureConnection(sqlite3.Connection):
    """A SQLite connection that overwrites what it deletes, such as secrets and losing scores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.execute("PRAGMA secure_delete = ON").close()


# Who is cut off is noticed within a minute, by both sides, and not after the two hours of the system's
# own: a machine that is gone holds locks, and the right to run a study, for as long as its sessions stay.
_ALIVE = {
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 6,
    "tcp_user_timeout": 45_000,
}
_THEIRS = "; ".join(
    f"SET {name if name.startswith('tcp') else f'tcp_{name}'} = {value}"
    for name, value in _ALIVE.items()
)
# What a server or a role may set otherwise, and what is read hangs on: texts, times, numbers to their last
# digit. How long to wait is ours to say, and a session that is idle while an arm trains holds its name.
_OURS = (
    "SET client_encoding = 'UTF8'; SET datestyle = 'ISO'; SET extra_float_digits = 3; "
    "SELECT set_config(name, '0', false) "
    "FROM (VALUES ('statement_timeout'), ('idle_session_timeout')) AS known(name) "
    "WHERE current_setting(name, true) <> '0'"
)


def open_engine(url: URL, patience: float) -> Engine:
    """Return SQLAlchemy's engine for a SQLite file or a PostgreSQL database.

    Args:
        url: Where it is; with ``mode`` a SQLite file is only read.
        patience: How long its lock is waited for, in seconds.

    Raises:
        LedgerError: The driver of PostgreSQL is not installed.
    """
    if url.get_backend_name() == "sqlite":
        # How long to wait where SQLite alone can: while another recovers the log, at the first look.
        connect_args = {"timeout": patience, "factory": SecureConnection}
        engine = sa.create_engine(url, connect_args=connect_args)
        log = "mode" not in url.query  # who only reads makes no write-ahead log
        sa.event.listen(engine, "connect", lambda *made: _on_sqlite_connect(*made, log=log))
        sa.event.listen(engine, "begin", _on_sqlite_begin)
        return engine
    ours = {name: value for name, value in _ALIVE.items() if name not in url.query}
    try:
        engine = sa.create_engine(
            url,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_size=1,  # a server's connections are few: one stays open
            max_overflow=100,
            connect_args={"connect_timeout": 10, **ours},
        )
    except ModuleNotFoundError as error:
        needs = "PostgreSQL needs psycopg: install it with pip install 'privtune[postgres]'."
        raise errors.LedgerError(needs) from error

    def on_connect(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            # Half: Storage.lock waits twice before it gives up.
            cursor.execute(f"SET lock_timeout = {int(patience * 500)}; {_THEIRS}")
            # As on SQLite: a commit is on the disk when it returns, whatever the server's default.
            cursor.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
        connection.commit()

    def connect(dialect: Any, _record: object, args: Any, options: Any) -> Any:
        return open_session(dialect, patience, *args, **options)

    sa.event.listen(engine, "do_connect", connect)
    sa.event.listen(engine, "connect", on_connect)
    return engine


# What PostgreSQL says when all of its connections are taken.
_FULL = ("too many clients", "too many connections", "connection slots are reserved")


def open_session(dialect: Any, patience: float, *args: Any, **options: Any) -> Any:
    """Connect to PostgreSQL, waiting for a free connection, and fix the session's settings.

    Args:
        dialect: SQLAlchemy's dialect of the engine.
        patience: How long to wait while all connections are taken, in seconds.
        *args: What the driver's ``connect`` takes.
        **options: What it takes by name.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = dialect.connect(*args, **options)
            break
        except dialect.loaded_dbapi.OperationalError as error:
            text = str(error)
            is_full = any(words in text for words in _FULL)
            if not is_full or time.monotonic() > deadline:
                raise
        pause()
    with connection.cursor() as cursor:
        cursor.execute(_OURS)
    connection.commit()
    return connection


def _on_sqlite_connect(connection: Any, _record: object, *, log: bool) -> None:
    """Set up a new connection of SQLite's driver, with a write-ahead log if ``log``."""
    # None: the driver sends no BEGIN of its own; the begin event below sends the right one.
    connection.isolation_level = None
    with closing(connection.cursor()) as cursor:
        cursor.execute("PRAGMA foreign_keys = ON")
        # FULL: a commit is on the disk when it returns. NORMAL may forget it in a power failure,
        # and a forgotten start is a release that nobody paid for.
        cursor.execute("PRAGMA synchronous = FULL")
        if log and cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            _to_wal(cursor)
        # From here on the waiting is done by Storage._begin.
        cursor.execute("PRAGMA busy_timeout = 20")


def _to_wal(cursor: Any) -> None:
    """Turn on SQLite's write-ahead log, trying again while another connection locks the file."""
    for _ in range(500):
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "readonly" in str(error):
                return  # reading works in any mode; the first write says what is wrong
            if "locked" not in str(error):
                raise
        pause()


def _on_sqlite_begin(connection: Connection) -> None:
    """Begin SQLite's transaction, and take the write lock at once if the transaction writes."""
    options = connection.get_execution_options()
    if options.get(WRITE, False):
        mode = "NORMAL" if options.get(QUICK, False) else "FULL"
        if connection.info.get("synchronous", "FULL") != mode:
            connection.exec_driver_sql(f"PRAGMA synchronous = {mode}")
            connection.info["synchronous"] = mode
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        return
    connection.exec_driver_sql("BEGIN")
    # The first look takes the snapshot, and may have to wait; what comes later never does.
    connection.exec_driver_sql("SELECT 1 FROM sqlite_master LIMIT 1")


def pause() -> None:
    """Sleep for a few random milliseconds, before asking for a lock again."""
    time.sleep(random.uniform(0.0005, 0.01))  # noqa: S311  a pause, not a secret


class Turn:
    """A lock that lets threads and processes write to a SQLite file in turns.

    SQLite's own waiting is a lottery in which somebody starves; its lock still decides.

    Args:
        database: The file; None where nobody takes turns.
        patience: How long to wait while the turn goes to nobody, in seconds.
        busy: What is said when that is over.
    """

    def __init__(self, database: Path | None, patience: float, busy: str) -> None:
        self._path: Path | None = None
        self._owner: int | None = None
        if database is not None:
            self._path = database.with_name(f"{database.name}-turn")
            self._owner = owner_of(database)
        self._patience = patience
        self._busy = busy
        self._threads = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn to write, and keep the turn until the ``with`` block or the process ends."""
        self._wait(lambda: self._threads.acquire(timeout=0.05))
        try:
            with ExitStack() as stack:
                if self._path is not None:
                    with suppress(OSError):  # SQLite says that this user may not write here
                        file_lock = FileLock(self._path, owner=self._owner)
                        lock = stack.enter_context(file_lock)
                        self._wait(lambda: _is_taken(lock))
                yield
        finally:
            self._threads.release()

    def _wait(self, take: Callable[[], bool]) -> None:
        """Call ``take`` until it returns True, or raise once nobody has had a turn for too long."""
        last = self._passed()
        since = time.monotonic()
        while not take():
            now = self._passed()
            if now != last:
                last = now
                since = time.monotonic()
            elif time.monotonic() - since > self._patience:
                raise errors.LedgerBusyError(self._busy)
            pause()

    def _passed(self) -> int:
        """Return the time of the turn's file in nanoseconds, which changes with every turn."""
        try:
            return 0 if self._path is None else self._path.stat().st_mtime_ns
        except OSError:
            return 0


def _is_taken(lock: FileLock) -> bool:
    """Return whether a file lock was taken, or cannot exist here, and stamp the time of its file."""
    try:
        if not lock.take():
            return False
        lock.stamp()
    except OSError:  # no such locks here: SQLite's own is all that is waited for
        return True
    return True


LOCK_TIMEOUT = "55P03"
"""How PostgreSQL calls a lock that was waited for too long."""

_DAMAGED = "the file is damaged, or no SQLite database; restore it from a copy and verify it"

# What the driver says (lower case), or PostgreSQL's code, which is the same in all of its languages -> the
# error, and what to do about it. The first match counts.
_KNOWN: tuple[tuple[str, type[errors.LedgerError], str], ...] = (
    (
        "append-only",
        errors.LedgerCorruptedError,
        "somebody tried to change an entry: the log is append-only",
    ),
    (
        "disk is full|disk full|no space left|disk i/o error|53100",
        errors.LedgerFullError,
        "the disk is full or failing: nothing was written; make room and try again",
    ),
    (
        "readonly|read-only|25006",
        errors.LedgerReadOnlyError,
        "the storage is read-only: nothing was written; give this user the right to write, or copy it",
    ),
    (
        f"locked|{LOCK_TIMEOUT}|40P01|40001",
        errors.LedgerBusyError,
        "another process holds the lock: nothing was written; try again",
    ),
    (
        "not a database|malformed|could not decode",
        errors.LedgerCorruptedError,
        _DAMAGED,
    ),
    (
        "unable to open",
        errors.LedgerConnectionError,
        "the file cannot be opened; check that its folder exists and is yours",
    ),
)


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn every error of the database in the ``with`` block into a LedgerError."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        text = str(error.orig).lower()
        state = sqlstate(error)
        for pattern, kind, remedy in _KNOWN:
            words = pattern.split("|")
            # A number in a message is no code: it may be a key.
            if state in words or any(word in text for word in words if word.islower()):
                raise kind(f"{url}: {remedy}.") from error
        if error.connection_invalidated or isinstance(error, sa.exc.OperationalError):
            refused = "refused" in text or "could not translate host" in text
            more = "start the server, or correct the address; " if refused else ""
            raise errors.LedgerConnectionError(
                f"{url}: the connection failed ({_first_line(error)}); {more}an unfinished transaction "
                "is rolled back by the database, so look at the charges before trying again."
            ) from error
        raise errors.LedgerError(f"{url}: the database refused ({_first_line(error)}).") from error
    except UnicodeDecodeError as error:
        # SQLite quotes what it cannot read of a table's definition, and the driver what that says.
        raise errors.LedgerCorruptedError(f"{url}: {_DAMAGED}.") from error


DatabaseError = sa.exc.SQLAlchemyError
"""What another library raises that opens the database itself."""


def database_cause(error: BaseException) -> sa.exc.DBAPIError | None:
    """Return the error of the database's driver behind another library's error, None without one."""
    # A library that cleans up after a lost connection fails again, in the context of the first error.
    for cause in errors_behind(error):
        if isinstance(cause, sa.exc.DBAPIError):
            return cause
    return None


def sqlstate(error: sa.exc.DBAPIError) -> str:
    """Return PostgreSQL's code of an error, or an empty text if it has none."""
    return getattr(error.orig, "sqlstate", None) or ""


def _first_line(error: sa.exc.DBAPIError) -> str:
    """Return the first line of a driver's message without passwords, or the name of its error."""
    lines = str(error.orig).strip().splitlines()
    line = lines[0] if lines else type(error.orig).__name__
    return masked(line.rstrip("."))
