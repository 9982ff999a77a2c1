"""Reads and appends the budgets' logs: one lock, one transaction, one replay."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from privtune.ledger.chain import Entry, Kind, new_entry, sealed_digest
from privtune.ledger.errors import LedgerCorruptedError, UnknownBudgetError
from privtune.ledger.history import History
from privtune.ledger.schema import budgets, entries, rounds, tasks
from privtune.ledger.storage import Storage
from privtune.names import check_text

# Statements that every charge runs, built once.
_HEAD = sa.select(budgets).where(budgets.c.name == sa.bindparam("budget"))
_TAIL = (
    sa.select(entries)
    .where(
        entries.c.budget == sa.bindparam("name"),
        entries.c.seq > sa.bindparam("after"),
        # What others append after the head was read is for the next time.
        entries.c.seq <= sa.bindparam("until"),
    )
    .order_by(entries.c.seq)
)
_MOVE = (
    sa.update(budgets)
    .where(budgets.c.name == sa.bindparam("budget"), budgets.c.entries == sa.bindparam("seen"))
    .values(entries=sa.bindparam("seq"), head=sa.bindparam("hash"), charges=sa.bindparam("count"))
)


@dataclass(frozen=True)
class Line:
    """An entry that is about to be appended."""

    kind: Kind
    charge: int = 0
    body: Mapping[str, Any] | None = None
    sealed: Mapping[str, Any] | None = None


class Log:
    """The logs of all budgets in one storage, with what was read of them kept in memory."""

    def __init__(self, storage: Storage, *, clock: Callable[[], datetime] | None) -> None:
        self.storage = storage
        self._clock = clock or (lambda: datetime.now(UTC))
        self._histories: dict[str, History] = {}
        self._guard = threading.RLock()

    def names(self) -> tuple[str, ...]:
        """Return the names of all budgets."""
        with self.storage.read() as connection:
            query = sa.select(budgets.c.name).order_by(budgets.c.name)
            return tuple(connection.scalars(query))

    def current(self, name: str) -> History:
        """Return what a budget's log says now."""
        check_text(name, "budget")
        with self._guard:
            # Read first: others may note and append in between, and the log is never behind then.
            seen = self._seen(name)
            with self.storage.read() as connection:
                head = connection.execute(_HEAD, {"budget": name}).one_or_none()
                return self._sync(connection, name, head, seen)

    def create(self, name: str, first: Callable[[datetime], Line]) -> History:
        """Create a budget's log with its first entry, or return the one that is there."""
        with self._guard:
            with self.storage.write() as connection:
                if self.storage.dialect == "postgresql":
                    # Two who create one name at once: the second waits here for the first.
                    key = sa.func.hashtext(f"privtune budget {name}")
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
                head = self._head(connection, name)
                if head is not None:
                    return self._sync(connection, name, head, self._seen(name))
                self.storage.witness.check(name, self._seen(name), {})
                history = History(name)
                row = {"name": name, "entries": 0, "charges": 0, "head": history.head}
                connection.execute(sa.insert(budgets).values(row))
                at = self._clock()
                written = self._append(connection, history, at, [first(at)])
            return self._take_in(history, written)

    def write(
        self, name: str, decide: Callable[[Connection, History], Sequence[Line]]
    ) -> tuple[History, tuple[Entry, ...]]:
        """Lock a budget, decide on what its log says then, and append."""
        with self._guard:
            with self.storage.write() as connection:
                head = self._head(connection, name)
                history = self._sync(connection, name, head, self._seen(name))
                lines = decide(connection, history)  # under the lock: nobody else admits meanwhile
                written = self._append(connection, history, self._clock(), lines)
            return self._take_in(history, written), tuple(entry for entry, _ in written)

    def _head(self, connection: Connection, name: str) -> Row[Any] | None:
        """Read a budget's head and lock it."""
        return self.storage.lock(connection, _HEAD, {"budget": name})

    def _append(
        self, connection: Connection, history: History, at: datetime, lines: Sequence[Line]
    ) -> list[tuple[Entry, str]]:
        if not lines:
            return []
        written: list[tuple[Entry, str]] = []
        previous, seq = history.head, history.seq
        # What the clock says, right or wrong: the log's order is that of the numbers.
        when = {"at": at.isoformat(), "worker": f"{platform.node()}:{os.getpid()}"}
        for line in lines:
            seq += 1
            entry, sealed = new_entry(
                history.name,
                seq,
                kind=line.kind,
                charge=line.charge,
                body=line.body or {},
                sealed={**(line.sealed or {}), **when},
                previous=previous,
            )
            previous = entry.hash
            written.append((entry, sealed))
        rows = [{**asdict(entry), "sealed": sealed} for entry, sealed in written]
        connection.execute(sa.insert(entries), rows)
        reserved = sum(line.kind is Kind.RESERVED for line in lines)
        place = {"budget": history.name, "seen": history.seq, "seq": seq, "hash": previous}
        moved = connection.execute(_MOVE, {**place, "count": len(history.charges) + reserved})
        if moved.rowcount != 1:
            raise LedgerCorruptedError(f"budget {history.name!r} changed under the lock.")
        return written

    def _take_in(self, history: History, written: Sequence[tuple[Entry, str]]) -> History:
        """Replay the entries that are committed now; those of a commit that failed are not there."""
        for entry, sealed in written:
            history.apply(entry, sealed)
        if written:  # after the commit: a noted head never says more than the log once held
            self.storage.witness.note(history.name, history.seq, history.head)
        self._histories[history.name] = history
        return history

    def _seen(self, name: str) -> Mapping[int, str]:
        """Return the heads noted beside the database, until the log was once held against them."""
        return {} if name in self._histories else self.storage.witness.seen(name)

    def _sync(
        self, connection: Connection, name: str, head: Row[Any] | None, seen: Mapping[int, str]
    ) -> History:
        """Bring the history in memory up to the log; hold it against the heads noted before."""
        if head is None:
            self.storage.witness.check(name, seen, {})
            raise UnknownBudgetError(
                f"no budget is called {name!r} in {self.storage.safe_url}: "
                "privtune budget list shows them all."
            )
        history = self._histories.get(name) or History(name)
        hashes = {}
        if head.entries > history.seq:
            span = {"name": name, "after": history.seq, "until": head.entries}
            for row in connection.execute(_TAIL, span):
                history.apply(stored_entry(row), row.sealed)
                hashes[history.seq] = history.head
        if (head.entries, head.head) != (history.seq, history.head):
            raise LedgerCorruptedError(
                f"the log of budget {name!r} ends with entry {history.seq}, its head says entry "
                f"{head.entries}: privtune budget verify {name} tells more."
            )
        self.storage.witness.check(name, seen, hashes)
        self._histories[name] = history
        return history


def stored_entry(row: Row[Any]) -> Entry:
    """Return the entry that a row holds; the digest of the sealed part is computed, not read."""
    return Entry(**{**row._mapping, "sealed": sealed_digest(row.sealed)})


def forget_secret(connection: Connection, budget: str, charge: int) -> None:
    """Forget what a round's seeds derive from: with it, noise could be drawn again and subtracted."""
    own = sa.update(rounds).where(rounds.c.budget == budget, rounds.c.charge == charge)
    connection.execute(own.values(secret=""))


def round_digest(connection: Connection, budget: str, charge: int) -> str | None:
    """Return the digest of a finished round's results; None where none is, or some are missing."""
    rows = connection.execute(
        sa.select(tasks.c.number, tasks.c.score, tasks.c.result, tasks.c.done)
        .where(tasks.c.budget == budget, tasks.c.charge == charge)
        .order_by(tasks.c.number)
    ).all()
    if not rows or not all(row.done for row in rows):
        return None
    text = json.dumps([[row.number, repr(row.score), row.result] for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()
