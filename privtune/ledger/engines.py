"""Engines of SQLite and PostgreSQL, on which a commit is on the disk and a wait has an end."""

from __future__ import annotations

import os
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

from privtune.ledger import errors
from privtune.ledger.urls import masked

WRITE, QUICK = "privtune_write", "privtune_quick"


class SecureConnection(sqlite3.Connection):
    """A connection that overwrites what it deletes (secrets, losing scores), not only unlinks it."""

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
    """Open the engine of a database whose lock is waited for so long, in seconds."""
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
    """Connect to PostgreSQL, whatever its settings are, waiting for a connection to become free."""
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = dialect.connect(*args, **options)
            break
        except dialect.loaded_dbapi.OperationalError as error:
            if not any(words in str(error) for words in _FULL) or time.monotonic() > deadline:
                raise
        pause()
    with connection.cursor() as cursor:
        cursor.execute(_OURS)
    connection.commit()
    return connection


def _on_sqlite_connect(connection: Any, _record: object, *, log: bool) -> None:
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
    """Whose turn it is to write to a SQLite file, among threads and processes."""

    def __init__(self, database: Path | None, patience: float, busy: str) -> None:
        # SQLite's own waiting is a lottery in which somebody starves; its lock still decides.
        self._path = None if database is None else database.with_name(f"{database.name}-turn")
        self._patience, self._busy = patience, busy
        self._threads = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn, and have it until the block, or the process, ends."""
        self._wait(lambda: self._threads.acquire(timeout=0.05))
        try:
            with ExitStack() as stack:
                if self._path is not None:
                    with suppress(OSError):  # SQLite says that this user may not write here
                        # Not to be inherited: a child that was forked would hold the turn, too.
                        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                        file = os.open(self._path, flags, 0o600)
                        stack.callback(os.close, file)
                        self._wait(lambda: _locked(file))
                yield
        finally:
            self._threads.release()

    def _wait(self, taken: Callable[[], bool]) -> None:
        last, since = self._passed(), time.monotonic()
        while not taken():
            if (now := self._passed()) != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience:
                raise errors.LedgerBusyError(self._busy)
            pause()

    def _passed(self) -> int:
        """Return the time of the file, which changes when the turn goes to another."""
        try:
            return 0 if self._path is None else self._path.stat().st_mtime_ns
        except OSError:
            return 0


def _locked(file: int) -> bool:
    """Lock a file if nobody has."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(file)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # no such locks here: SQLite's own is all that is waited for
        return True
    return True


LOCK_TIMEOUT = "55P03"
"""How PostgreSQL calls a lock that was waited for too long."""

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
        "not a database|malformed",
        errors.LedgerCorruptedError,
        "the file is damaged, or no SQLite database; restore it from a copy and verify it",
    ),
    (
        "unable to open",
        errors.LedgerConnectionError,
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
        for said, kind, remedy in _KNOWN:
            words = said.split("|")
            # A number in a message is no code: it may be a key.
            if state in words or any(word in text for word in words if word.islower()):
                raise kind(f"{url}: {remedy}.") from error
        if error.connection_invalidated or isinstance(error, sa.exc.OperationalError):
            raise errors.LedgerConnectionError(
                f"{url}: the connection failed ({_first_line(error)}); an unfinished transaction "
                "is rolled back by the database, so look at the charges before trying again."
            ) from error
        raise errors.LedgerError(f"{url}: the database refused ({_first_line(error)}).") from error


def sqlstate(error: sa.exc.DBAPIError) -> str:
    """Return PostgreSQL's code of an error, empty where there is none."""
    return getattr(error.orig, "sqlstate", None) or ""


def _first_line(error: sa.exc.DBAPIError) -> str:
    lines = str(error.orig).strip().splitlines() or [type(error.orig).__name__]
    return masked(lines[0].rstrip("."))
