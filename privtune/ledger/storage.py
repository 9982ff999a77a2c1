"""Connections and transactions on SQLite and PostgreSQL.

A writing transaction holds the ledger's lock from its first statement: ``BEGIN IMMEDIATE`` on SQLite,
and on PostgreSQL the budget's row, which the caller locks first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.files import made_private
from privtune.ledger import engines, places
from privtune.ledger.errors import LedgerBusyError, LedgerError, LedgerSchemaError
from privtune.ledger.schema import HEAD, VERSION_TABLE, metadata, version
from privtune.ledger.urls import masked_url

_log = logging.getLogger(__name__)

# The one row that all to whom PostgreSQL's database is lent lock.
_VERSION = sa.select(sa.table(VERSION_TABLE, sa.column("version_num")))
# Changes when a row's lock goes to another transaction: who wrote the row, who locked it last.
_HOLDER: sa.ColumnElement[str] = sa.literal_column("xmin::text || ' ' || xmax::text")


class _Held(threading.local):
    """The connection by which a thread holds a name; threads let go in any order."""

    connection: Connection | None = None


class Storage:
    """One database, opened by one process, whose threads may share it."""

    def __init__(self, url: str | Path, *, patience: float = 60.0) -> None:
        self.url = places.checked_url(url)
        self.patience = patience
        self.dialect = self.url.get_backend_name()
        self.witness = places.Witness(places.database_path(self.url))
        self._pid = os.getpid()
        places.create_database(self.url)
        opened, path = places.read_only_url(self.url), places.database_path(self.url)
        writable = "mode" not in opened.query
        self._turn = engines.Turn(
            path if writable else None, patience, _busy(self.safe_url, patience)
        )
        self._unchanging = path if "immutable" in opened.query else None
        self._seen = self._state()
        self._held = _Held()
        if path is not None:
            _make_private(path)
        with engines.translated(self.safe_url):
            self.engine = engines.open_engine(opened, patience)

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
            engines.translated(self.safe_url),
            self._connected() as connection,
            self._begin(connection),
        ):
            try:
                yield connection
            finally:
                if self._state() != self._seen:
                    raise LedgerBusyError(
                        f"{self.safe_url} was written to while it was read as a file that does not "
                        "change: what was read may be of two states and is not shown; try again."
                    )

    def _state(self) -> object:
        """Return what changes when somebody writes to a file that is read as one that does not."""
        if self._unchanging is None:
            return None
        found, log = self._unchanging.stat(), Path(f"{self._unchanging}-wal")
        return found.st_ino, found.st_mtime_ns, found.st_size, log.exists()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Give a connection in a writing transaction; commit at the end, or write nothing."""
        self._same_process()
        with self._turn.taken(), engines.translated(self.safe_url), self._connected() as plain:
            connection = plain.execution_options(**{engines.WRITE: True, engines.QUICK: False})
            with self._begin(connection):
                yield connection

    @contextmanager
    def quick(self) -> Iterator[Connection]:
        """Give a connection for one statement whose loss in a crash costs nothing but work."""
        self._same_process()
        # SQLite's log is written in order: what waits for the disk later takes this with it.
        with self._turn.taken(), engines.translated(self.safe_url), self._connected() as plain:
            if self.dialect == "postgresql" and self._held.connection is None:
                yield plain.execution_options(isolation_level="AUTOCOMMIT")
                return
            connection = plain.execution_options(**{engines.WRITE: True, engines.QUICK: True})
            with self._begin(connection):
                yield connection

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Let another library write to the database: nobody else who writes here does meanwhile."""
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
            return {"connect_args": {"timeout": self.patience, "factory": engines.SecureConnection}}
        args, options = self.engine.dialect.create_connect_args(self.url)
        # A server's connections are few: none stays open.
        return {
            "poolclass": sa.NullPool,
            "creator": lambda: engines.open_session(
                self.engine.dialect, self.patience, *args, **options
            ),
        }

    def lock(
        self, connection: Connection, row: sa.Select[Any], values: Mapping[str, Any]
    ) -> sa.Row[Any] | None:
        """Read a row and lock it until the transaction ends; SQLite's holds all of them."""
        if self.dialect == "sqlite":
            return connection.execute(row, values).one_or_none()
        holder = None
        while True:
            try:
                with connection.begin_nested():  # a wait that fails ends a transaction
                    return connection.execute(row.with_for_update(), values).one_or_none()
            except sa.exc.OperationalError as error:
                if engines.sqlstate(error) != engines.LOCK_TIMEOUT:
                    raise
                # A lock that goes from hand to hand is waited for; one holder is not.
                now = connection.execute(row.with_only_columns(_HOLDER), values).scalar()
                if now == holder:
                    raise LedgerBusyError(_busy(self.safe_url, self.patience)) from error
                holder = now

    @contextmanager
    def hold(self, name: str, file: Callable[[str], Path]) -> Iterator[bool]:
        """Hold a name until the block or the process ends; False if another holds it already."""
        self._same_process()
        if self.dialect == "postgresql":
            with engines.translated(self.safe_url), self.engine.connect() as connection:
                key = sa.func.hashtextextended(sa.func.concat(sa.func.current_schema(), name), 0)
                held = connection.execute(sa.select(sa.func.pg_try_advisory_lock(key))).scalar_one()
                connection.commit()
                if not held:
                    yield False
                    return
                # Transactions use its connection, too: processes that each held one and waited for
                # another could wait for each other.
                before, self._held.connection = self._held.connection, connection
                try:
                    yield True
                finally:
                    self._held.connection = before
                    with suppress(sa.exc.DBAPIError):  # lost, and the lock with it
                        connection.execute(sa.select(sa.func.pg_advisory_unlock(key)))
                        connection.commit()
            return
        try:
            import fcntl
        except ImportError:  # no such locks on Windows: two processes may do the same work there
            yield True
            return
        path = file(f"sealed/.{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock")
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """Give the connection that this thread holds a name by, if it is idle; else one more."""
        held = self._held.connection
        if held is not None and not held.in_transaction() and _alive(held):
            yield held
            return
        with self.engine.connect() as connection:
            yield connection

    def _begin(self, connection: Connection) -> sa.RootTransaction:
        """Begin, waiting with random pauses for a writer that takes no turns."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return connection.begin()
            except sa.exc.OperationalError as error:
                if "locked" not in str(error.orig) or self.dialect != "sqlite":
                    raise
                if time.monotonic() > deadline:
                    raise LedgerBusyError(_busy(self.safe_url, self.patience)) from error
            engines.pause()

    def _same_process(self) -> None:
        if os.getpid() != self._pid:
            raise LedgerError(
                "this ledger was opened by another process: "
                "connections do not survive a fork, so open the ledger again in each process."
            )


@cache
def _make_private(database: Path) -> None:
    """Set owner-only permissions on a store's files; warn of those of another owner."""
    open_ones = [path for end in places.STORE if made_private(path := Path(f"{database}{end}"))]
    if open_ones:
        _log.warning(
            "Others may read secrets and losing scores in %s, and only its owner can change that: "
            "chmod go= %s",
            open_ones[0],
            " ".join(map(str, open_ones)),
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


# One advisory lock for all who create the schema of a PostgreSQL database.
_LOCK = 0x707269767475


def schema_version(connection: Connection) -> str | None:
    """Return the version of the ledger's schema, None where there is none yet."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608


def prepare(storage: Storage) -> None:
    """Create the schema in an empty storage; refuse another version of it."""
    with storage.read() as connection:
        found = schema_version(connection)
    if found is None:
        found = _create(storage)
    if found != HEAD:
        raise LedgerSchemaError(
            f"{storage.safe_url} holds schema {found}, and this program works on schema {HEAD} alone: "
            "use the version of privtune that made it, or another storage."
        )


def _create(storage: Storage) -> str:
    """Create the schema in one transaction, unless another process has; return its version."""
    with storage.write() as connection:
        if storage.dialect == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        found = schema_version(connection)  # again, now that nobody else can create it
        if found is not None:
            return found
        metadata.create_all(connection, checkfirst=False)
        version.create(connection, checkfirst=False)
        connection.execute(sa.insert(version).values(version_num=HEAD))
        return HEAD
