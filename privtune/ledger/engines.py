"""Engines of SQLite and PostgreSQL, on which a commit is on the disk and a wait has an end."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine

from privtune.ledger.errors import LedgerError
from privtune.ledger.turn import pause

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
_NO_DRIVER = "PostgreSQL needs psycopg: install it with pip install 'privtune[postgres]'."


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
        raise LedgerError(_NO_DRIVER) from error

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


_FULL = ("too many clients", "too many connections", "connection slots are reserved")
"""What PostgreSQL says when all of its connections are taken."""


def connect_patiently(dialect: Any, patience: float, *args: Any, **options: Any) -> Any:
    """Connect, waiting for one of the server's connections to become free."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return dialect.connect(*args, **options)
        except dialect.loaded_dbapi.OperationalError as error:
            if not any(words in str(error) for words in _FULL) or time.monotonic() > deadline:
                raise
        pause()


def open_session(dialect: Any, patience: float, *args: Any, **options: Any) -> Any:
    """Connect to PostgreSQL as :func:`connect_patiently` does, whatever the server's settings are."""
    connection = connect_patiently(dialect, patience, *args, **options)
    with connection.cursor() as cursor:
        cursor.execute(_OURS)
    connection.commit()
    return connection


def _on_sqlite_connect(connection: Any, _record: object, *, log: bool) -> None:
    # None: the driver sends no BEGIN of its own; the begin event below sends the right one.
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA foreign_keys = ON")
        # FULL: a commit is on the disk when it returns. NORMAL may forget it in a power failure,
        # and a forgotten start is a release that nobody paid for.
        cursor.execute("PRAGMA synchronous = FULL")
        if log and cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
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
