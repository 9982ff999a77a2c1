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
from privtune.imports import distrust_names
from privtune.ledger import engines, identity, places, reading
from privtune.ledger.errors import (
    HoldLostError,
    LedgerBusyError,
    LedgerConnectionError,
    LedgerCorruptedError,
    LedgerError,
    LedgerSchemaError,
    StoreCopyError,
)
from privtune.ledger.identity import Home, Identity
from privtune.ledger.schema import HEAD, TRIGGERS, VERSION_TABLE, metadata, version
from privtune.ledger.urls import masked_url
from privtune.locks import FileLock

_log = logging.getLogger(__name__)

_AWAY = 0.5  # seconds between two looks for a server that is away

# The one row that all to whom PostgreSQL's database is lent lock.
_VERSION = sa.select(sa.table(VERSION_TABLE, sa.column("version_num")))
# Changes when a row's lock goes to another transaction: who wrote the row, who locked it last.
_HOLDER: sa.ColumnElement[str] = sa.literal_column("xmin::text || ' ' || xmax::text")


# Who holds a name, by its process and when that began: a number alone may be given out again.
_HOLDS = """
    SELECT sessions.pid, sessions.backend_start FROM pg_stat_activity AS sessions
    JOIN pg_locks AS locks ON locks.pid = sessions.pid,
        hashtextextended(concat(current_schema(), CAST(:name AS text)), 0) AS asked(key)
    WHERE locks.locktype = 'advisory' AND locks.granted AND locks.objsubid = 1
        AND locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND locks.classid::bigint = ((key >> 32) & 4294967295)
        AND locks.objid::bigint = (key & 4294967295)
"""


_THIS_SESSION = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"


class _Hold:
    """A name that a session of PostgreSQL has locked, until the session ends.

    Args:
        name: The name, as of a study that one process runs.
        connection: The session; while the name is held, transactions of its thread use it, too.
    """

    def __init__(self, name: str, connection: Connection) -> None:
        self._name = name
        self._sessions: set[object] = set()
        self.connection = connection

    @property
    def is_alive(self) -> bool:
        """Whether the session that holds the name is still connected."""
        # One that was lost would open another at the next statement, which holds nothing.
        return not self._is_lost and _alive(self.connection)

    @property
    def _is_lost(self) -> bool:
        return self.connection.closed or self.connection.invalidated

    @property
    def _key(self) -> sa.ColumnElement[Any]:
        """The number of the advisory lock for the name, different in each schema."""
        name = sa.func.concat(sa.func.current_schema(), self._name)
        return sa.func.hashtextextended(name, 0)

    def take(self) -> bool:
        """Try to lock the name for the session, and return whether it holds the name."""
        # Noted before the name is taken: if the connection fails then, the answer alone may be lost.
        session = self.connection.execute(sa.text(_THIS_SESSION)).one()
        self._sessions.add(tuple(session))
        query = sa.select(sa.func.pg_try_advisory_lock(self._key))
        is_ours = self.connection.execute(query).scalar_one()
        self.connection.commit()
        return bool(is_ours)

    def is_left_behind(self) -> bool:
        """Return whether the name is free, or still held by an earlier session of this object."""
        holder = self._holder()
        self.connection.commit()
        return holder is None or holder in self._sessions

    def let_go(self) -> None:
        """Release the name, unless the session was lost."""
        unlock = sa.select(sa.func.pg_advisory_unlock(self._key))
        with suppress(sa.exc.DBAPIError):  # lost, and the lock with it
            if not self._is_lost:
                self.connection.execute(unlock)
                self.connection.commit()

    def _holder(self) -> object:
        """Return the process number and start of the session that holds the name, or None."""
        values = {"name": self._name}
        row = self.connection.execute(sa.text(_HOLDS), values).one_or_none()
        return None if row is None else tuple(row)


class _Held(threading.local):
    """The name that a thread holds, different in each thread."""

    hold: _Hold | None = None


class Storage:
    """One database, opened by one process, whose threads may share it.

    Args:
        url: Where it is: a file, or the URL of SQLite or PostgreSQL.
        patience: How long to wait for other writers, in seconds.

    Raises:
        InvalidInputError: The URL names no store.
        LedgerConnectionError: The database cannot be opened, or a stranger may have put it there.
    """

    def __init__(self, url: str | Path, *, patience: float = 60.0) -> None:
        self.url = places.checked_url(url)
        self.patience = patience
        self.dialect = self.url.get_backend_name()
        self.witness = places.Witness(places.database_path(self.url))
        self._pid = os.getpid()
        places.check_store(self.url)
        self._problem = places.write_problem(self.url)
        if places.is_of_stranger(self.url):
            distrust_names(self.safe_url)
        places.create_database(self.url)
        url_to_open = places.read_only_url(self.url)
        path = places.database_path(self.url)
        is_writable = "mode" not in url_to_open.query
        self._turn = engines.Turn(
            path if is_writable else None,
            patience,
            _busy(self.safe_url, patience),
        )
        self._unchanging = path if "immutable" in url_to_open.query else None
        self._first_state = self._state()
        self._held = _Held()
        self._path = path
        self._at_home = False
        self._moved_to: Home | None = None
        self._outlasts = 0.0
        if path is not None:
            _make_private(path)
        with engines.translated(self.safe_url):
            self.engine = engines.open_engine(url_to_open, patience)
        reading.watch(self.engine)

    @property
    def safe_url(self) -> str:
        """The URL without its password, for messages."""
        return masked_url(self.url.render_as_string(hide_password=False))

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection in a transaction that only reads and never waits for writers."""
        self._same_process()
        with (
            engines.translated(self.safe_url),
            self._connected() as connection,
            self._begin(connection),
            reading.naming(connection),
        ):
            try:
                yield connection
            finally:
                if self._state() != self._first_state:
                    raise LedgerBusyError(
                        f"{self.safe_url} was written to while it was read as a file that does not "
                        "change: what was read may be of two states and is not shown; try again."
                    )

    def _state(self) -> object:
        """Return inode, time, size and log of a file that was opened as immutable; None for other files."""
        if self._unchanging is None:
            return None
        status = self._unchanging.stat()
        has_log = Path(f"{self._unchanging}-wal").exists()
        return status.st_ino, status.st_mtime_ns, status.st_size, has_log

    def has_table(self, name: str) -> bool:
        """Return whether the database has a table of a name, such as one of another library."""
        with self.read() as connection:
            return sa.inspect(connection).has_table(name)

    def identity(self) -> Identity:
        """Return the store's id, the id of the store it was restored from, and its home."""
        with self.read() as connection:
            return identity.read_identity(connection)

    def home(self, connection: Connection, home_in_store: Home | None = None) -> Home:
        """Return the place of the database behind a connection, to compare with the home that it notes.

        Args:
            connection: One that is reading the database.
            home_in_store: The home that the store notes; what it says nothing of is left out, too.
        """
        if self._path is None:
            return identity.home_of_database(connection)
        return identity.home_of_file(self._path, home_in_store)

    def original(self) -> Home | None:
        """Return the home of the store that this is a copy of; None where it is no copy."""
        with self.read() as connection:
            if schema_version(connection) != HEAD:
                return None  # a new database, which whoever opens it makes a store of
            return self.original_of(connection)

    def original_of(self, connection: Connection) -> Home | None:
        """Return the home of the store that the database behind a connection is a copy of, if any."""
        home_in_store = identity.read_identity(connection).home
        home = self.home(connection, home_in_store)
        self._moved_to = home if home != home_in_store else None
        return None if home.is_home_of(home_in_store) else home_in_store

    def check_original(self) -> None:
        """Refuse to write to a copy of a store, or to a database that a stranger may replace.

        Raises:
            StoreCopyError: The database was copied, or moved to another file system or machine.
            LedgerConnectionError: It is another user's, or others may write to its folder.
        """
        if self._at_home:
            return
        if self._problem is not None:
            raise LedgerConnectionError(self._problem)
        original = self.original()
        if original is not None:
            raise StoreCopyError(
                f"{self.safe_url} is a copy of the store that is, or was, {original.place}: it can be read, "
                "verified and exported. What is charged to one is not known to the other, so this one is "
                "not written to. If the original is gone, or was moved here: privtune budget restore "
                f"--storage {self.safe_url}"
            )
        self._at_home = True
        if self._moved_to is not None:
            with self.write() as connection:
                identity.note_home(connection, self._moved_to)

    @contextmanager
    def write(self, *, restoring: bool = False) -> Iterator[Connection]:
        """Yield a connection in a transaction that commits at the end, or is rolled back on an error."""
        self._same_process()
        if not restoring:
            self.check_original()
        with self._turn.taken(), engines.translated(self.safe_url), self._connected() as plain:
            connection = plain.execution_options(**{engines.WRITE: True, engines.QUICK: False})
            with self._begin(connection), reading.naming(connection):
                yield connection

    @contextmanager
    def quick(self) -> Iterator[Connection]:
        """Yield a connection for one statement whose loss in a crash costs only work."""
        self._same_process()
        self.check_original()
        # SQLite's log is written in order: what waits for the disk later takes this with it.
        with self._turn.taken(), engines.translated(self.safe_url), self._connected() as plain:
            if self.dialect == "postgresql" and self._held.hold is None:
                yield plain.execution_options(isolation_level="AUTOCOMMIT")
                return
            connection = plain.execution_options(**{engines.WRITE: True, engines.QUICK: True})
            with self._begin(connection):
                yield connection

    @contextmanager
    def lend(self) -> Iterator[None]:
        """Keep other writers out while another library writes to the database in the ``with`` block."""
        self.check_original()
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
                self.engine.dialect,
                self.patience,
                *args,
                **options,
            ),
        }

    def lock(
        self,
        connection: Connection,
        row: sa.Select[Any],
        values: Mapping[str, object],
    ) -> sa.Row[Any] | None:
        """Read a row and lock it until the transaction ends.

        Args:
            connection: One in a writing transaction.
            row: The query for the row.
            values: What the query's parameters are.

        Returns:
            The row, None where there is none.

        Raises:
            LedgerBusyError: One other transaction has held the row for longer than :attr:`patience`.
        """
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
        """Yield whether a name could be locked, and hold it until the ``with`` block or the process ends."""
        self._same_process()
        self._read_patiently(self.check_original)
        if self.dialect == "postgresql":
            with engines.translated(self.safe_url):
                hold = _Hold(name, self._connect())
                try:
                    if not self._take(hold):
                        yield False
                        return
                    # Transactions use its connection, too: processes that each held one and waited for
                    # another could wait for each other.
                    before = self._held.hold
                    self._held.hold = hold
                    try:
                        yield True
                    finally:
                        self._held.hold = before
                        hold.let_go()
                finally:
                    with suppress(sa.exc.DBAPIError):
                        hold.connection.close()
            return
        digest = hashlib.sha256(name.encode()).hexdigest()
        path = file(f"sealed/.{digest[:16]}.lock")
        with FileLock(path) as lock:
            try:
                is_held = lock.take()
            except OSError:  # nobody knows whether another has it
                is_held = False
            yield is_held

    @contextmanager
    def outlasting(self, seconds: float) -> Iterator[None]:
        """Have all threads wait up to some seconds, inside the ``with`` block, for an absent server."""
        before = self._outlasts
        if self.dialect == "postgresql":  # a file that cannot be opened does not come back
            self._outlasts = seconds
        try:
            yield
        finally:
            self._outlasts = before

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """Yield the connection by which this thread holds a name, if it is idle, else a new one."""
        hold = self._held.hold
        if hold is not None and not hold.connection.in_transaction():
            if not hold.is_alive:
                self._hold_again(hold)
            yield hold.connection
            return
        with self._connect() as connection:
            yield connection

    def _connect(self) -> Connection:
        """Connect to the database, and wait for an absent server as :meth:`outlasting` allows."""
        deadline = time.monotonic() + self._outlasts
        while True:
            try:
                return self.engine.connect()
            except sa.exc.DBAPIError:  # nothing was sent yet, so nothing can be done twice
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_AWAY)

    def _read_patiently(self, read: Callable[[], None]) -> None:
        """Call a function that reads, again while :meth:`outlasting` waits for an absent server."""
        deadline = time.monotonic() + self._outlasts
        while True:
            try:
                return read()
            except LedgerConnectionError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_AWAY)

    def _hold_again(self, hold: _Hold) -> None:
        """Take a name again whose session was lost, and refuse if another process has it."""
        self._reconnect(hold)
        if not self._take(hold, patience=max(self._outlasts, self.patience)):
            raise HoldLostError(
                f"{self.safe_url}: another process went on with the work while this one could not "
                "reach the database."
            )

    def _take(self, hold: _Hold, patience: float | None = None) -> bool:
        """Try to lock a name, again after a lost connection, and return whether that worked."""
        seconds = self._outlasts if patience is None else patience
        deadline = time.monotonic() + seconds
        while True:
            try:
                if hold.take():
                    return True
                # A session that was lost keeps its name until the server notices.
                if not hold.is_left_behind() or time.monotonic() > deadline:
                    return False
            except sa.exc.DBAPIError as error:
                if not error.connection_invalidated or time.monotonic() > deadline:
                    raise
            time.sleep(_AWAY)
            self._reconnect(hold)

    def _reconnect(self, hold: _Hold) -> None:
        with suppress(sa.exc.DBAPIError):
            hold.connection.close()
        hold.connection = self._connect()

    def _begin(self, connection: Connection) -> sa.RootTransaction:
        """Begin a transaction, and try again while another writer locks the SQLite file."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return connection.begin()
            except sa.exc.OperationalError as error:
                is_locked = "locked" in str(error.orig)
                if not is_locked or self.dialect != "sqlite":
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
    """Set owner-only permissions on a store's files, and warn of files that another user owns."""
    files = [Path(f"{database}{end}") for end in places.STORE]
    open_ones = [file for file in files if made_private(file)]
    if open_ones:
        _log.warning(
            "Others may read secrets and losing scores in %s, and only its owner can change that: "
            "chmod go= %s",
            open_ones[0],
            " ".join(map(str, open_ones)),
        )


@cache
def _warn_of_copy(url: str, place: str) -> None:
    _log.warning(
        "%s is a copy of the store that is, or was, %s: it lacks what was charged there since",
        url,
        place,
    )


def _alive(connection: Connection) -> bool:
    """Return whether an idle connection still answers."""
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


_PROGRAMS = sa.text(
    "SELECT name FROM sqlite_master WHERE type IN ('view', 'trigger') ORDER BY name"
)

# One advisory lock for all who create the schema of a PostgreSQL database.
_LOCK = 0x707269767475


def schema_version(connection: Connection) -> str | None:
    """Return the version of the ledger's schema, None where there is none yet."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    query = sa.select(version.c.version_num)
    number: str | None = connection.execute(query).scalar()
    return number


def _refuse_programs(connection: Connection, url: str) -> None:
    """Refuse a SQLite file with views or triggers of others, which reading a table may run.

    A view that stands for a table of ours may never end, and no signal stops it.
    """
    names = connection.execute(_PROGRAMS).scalars().all()
    unknown = [name for name in names if name not in TRIGGERS]
    if unknown:
        raise LedgerCorruptedError(
            f"{url} holds a view or a trigger, {unknown[0]!r}, that PrivTune never makes: it was changed "
            "outside of PrivTune. Restore the database from a copy."
        )


def prepare(storage: Storage) -> None:
    """Create the schema in an empty storage, and refuse a storage with another version of it."""
    original = None
    with storage.read() as connection:
        if storage.dialect == "sqlite":
            _refuse_programs(connection, storage.safe_url)
        number = schema_version(connection)
        if number == HEAD:
            original = storage.original_of(connection)
    if original is not None:
        _warn_of_copy(storage.safe_url, original.place)
    if number is None:
        number = _create(storage)
    if number != HEAD:
        raise LedgerSchemaError(
            f"{storage.safe_url} holds schema {number}, and this program works on schema {HEAD} alone: "
            "use the version of privtune that made it, or another storage."
        )


def _create(storage: Storage) -> str:
    """Create the schema in one transaction unless another process has, and return its version."""
    with storage.write() as connection:
        if storage.dialect == "postgresql":
            lock = sa.func.pg_advisory_xact_lock(_LOCK)
            connection.execute(sa.select(lock))
        number = schema_version(connection)  # again, now that nobody else can create it
        if number is not None:
            return number
        metadata.create_all(connection, checkfirst=False)
        version.create(connection, checkfirst=False)
        connection.execute(sa.insert(version).values(version_num=HEAD))
        home = storage.home(connection)
        identity.write_identity(connection, identity.new_identity(home))
        return HEAD
