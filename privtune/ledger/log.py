"""Reads, replays and appends to the logs of budgets in a database."""

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

from privtune.ledger.chain import Document, Entry, Kind, new_entry, sealed_digest
from privtune.ledger.errors import LedgerCorruptedError, Place, UnknownBudgetError
from privtune.ledger.history import History
from privtune.ledger.reading import show_key
from privtune.ledger.schema import budgets, entries, rounds, studies, tasks
from privtune.ledger.storage import Storage
from privtune.names import check_text, did_you_mean

# Statements that every charge runs, built once.
_IS_BUDGET = budgets.c.name == sa.bindparam("budget")
_HEAD = sa.select(budgets).where(_IS_BUDGET)
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
    .where(
        _IS_BUDGET,
        budgets.c.entries == sa.bindparam("seen"),
    )
    .values(
        entries=sa.bindparam("seq"),
        head=sa.bindparam("hash"),
        charges=sa.bindparam("count"),
    )
)
_STUDIES_NAMED = (
    sa.select(sa.func.count()).select_from(studies).where(studies.c.name == sa.bindparam("name"))
)


def unknown_budget(connection: Connection, name: str, url: str) -> UnknownBudgetError:
    """Return the error for a name that no budget has, with the most similar name as a suggestion.

    Args:
        connection: One that is reading the database.
        name: The name that was asked for.
        url: The database's URL, without its password.
    """
    query = sa.select(budgets.c.name).order_by(budgets.c.name)
    names = connection.execute(query).scalars()
    question = did_you_mean(name, names)
    if not question and connection.scalar(_STUDIES_NAMED, {"name": name}):
        question = f"A study has that name: privtune study show {name}."
    return UnknownBudgetError(
        f"no budget is called {name!r} in {url}: privtune budget list shows them all. {question}".rstrip()
    )


@dataclass(frozen=True)
class Line:
    """An entry that is about to be appended.

    Attributes:
        kind: What happened.
        charge: The number of the charge that it happened to; 0 for what concerns the budget.
        body: The public part, ready for JSON.
        sealed: The part that stays inside the trust boundary, ready for JSON.
    """

    kind: Kind
    charge: int = 0
    body: Document | None = None
    sealed: Document | None = None


SealedEntry = tuple[Entry, str]
"""An entry and the text of its sealed part, of which the entry itself has the digest alone."""

Conditions = tuple[sa.ColumnElement[bool], ...]
"""What rows of a table meet, all of it."""

Decision = Callable[[Connection, History], Sequence[Line]]
"""Returns what to append to a log, from what it says; may write more in the same transaction."""


class Log:
    """The logs of all budgets in one storage, with their replayed histories kept in memory.

    A history in memory is never ahead of the database: entries are replayed once they are committed.
    Threads may share a log.

    Args:
        storage: Where the logs are.
        clock: The time that entries carry; None for this machine's.
    """

    def __init__(self, storage: Storage, *, clock: Callable[[], datetime] | None) -> None:
        self.storage = storage
        self._clock = clock or (lambda: datetime.now(UTC))
        self._histories: dict[str, History] = {}
        self._guard = threading.RLock()

    def names(self) -> tuple[str, ...]:
        """Return the names of all budgets.

        Raises:
            LedgerCorruptedError: There are entries of a budget whose row is gone.
        """
        with self.storage.read() as connection:
            with_row = sa.select(budgets.c.name)
            ordered = with_row.order_by(budgets.c.name)
            names = tuple(connection.scalars(ordered))
            has_no_row = entries.c.budget.not_in(with_row)
            without_row = sa.select(entries.c.budget).where(has_no_row).limit(1)
            name = connection.scalars(without_row).first()
        if name is None:
            return names
        place = Place("privtune_budgets", "name", show_key({"name": name}))
        raise place.error("is missing, though there are entries of that budget")

    def current(self, name: str) -> History:
        """Return the history of the budget ``name``, up to the last entry in the database."""
        check_text(name, "budget")
        with self._guard:
            # Read first: others may note and append in between, and the log is never behind then.
            noted_heads = self._noted_heads(name)
            with self.storage.read() as connection:
                head = connection.execute(_HEAD, {"budget": name}).one_or_none()
                return self._sync(connection, name, head, noted_heads)

    def create(self, name: str, first: Callable[[datetime], Line]) -> History:
        """Create a budget's log with its first entry, or return the one that is there.

        Args:
            name: The budget's name.
            first: Makes the first entry, from the time that it will carry.
        """
        with self._guard:
            with self.storage.write() as connection:
                if self.storage.dialect == "postgresql":
                    # Two who create one name at once: the second waits here for the first.
                    key = sa.func.hashtext(f"privtune budget {name}")
                    lock = sa.func.pg_advisory_xact_lock(key)
                    connection.execute(sa.select(lock))
                head = self._lock_head(connection, name)
                noted_heads = self._noted_heads(name)
                if head is not None:
                    return self._sync(connection, name, head, noted_heads)
                self.storage.witness.check(name, noted_heads, {})
                history = History(name)
                row = {"name": name, "entries": 0, "charges": 0, "head": history.head}
                connection.execute(sa.insert(budgets).values(row))
                at = self._clock()
                appended = self._append(connection, history, at, [first(at)])
            return self._take_in(history, appended)

    def write(self, name: str, decide: Decision) -> tuple[History, tuple[Entry, ...]]:
        """Lock a budget, and append to its log the lines that ``decide`` returns for its history.

        Args:
            name: The budget's name.
            decide: Returns what to append, perhaps nothing; may write more in the same transaction. What it
                raises undoes the transaction.

        Returns:
            The history with the new entries, and these.
        """
        with self._guard:
            with self.storage.write() as connection:
                history = self._lock_and_sync(connection, name)
                lines = decide(connection, history)  # under the lock: nobody else admits meanwhile
                appended = self._append(connection, history, self._clock(), lines)
            history = self._take_in(history, appended)
            new_entries = tuple(entry for entry, _ in appended)
            return history, new_entries

    def restore(self, work: Callable[[Connection], Document]) -> tuple[str, ...]:
        """Append to every budget's log that a copy was restored, in the transaction that does ``work``.

        Args:
            work: Does what else must be done in the transaction; returns the body of the entries.

        Returns:
            The budgets' names.
        """
        names = self.names()
        appended: dict[str, list[SealedEntry]] = {}
        with self._guard:
            with self.storage.write(restoring=True) as connection:
                line = Line(Kind.RESTORED, body=work(connection))
                for name in names:
                    history = self._lock_and_sync(connection, name)
                    at = self._clock()
                    appended[name] = self._append(connection, history, at, [line])
            for name, sealed_entries in appended.items():
                self._take_in(self._histories[name], sealed_entries)
        return names

    def _lock_head(self, connection: Connection, name: str) -> Row[Any] | None:
        """Lock a budget's row, and return it with the number and hash of its last entry."""
        return self.storage.lock(connection, _HEAD, {"budget": name})

    def _lock_and_sync(self, connection: Connection, name: str) -> History:
        """Lock a budget, and return its history up to the last entry in the database."""
        head = self._lock_head(connection, name)
        noted_heads = self._noted_heads(name)
        return self._sync(connection, name, head, noted_heads)

    def _append(
        self,
        connection: Connection,
        history: History,
        at: datetime,
        lines: Sequence[Line],
    ) -> list[SealedEntry]:
        """Insert new entries after a history's last one, and set the hash of the budget's last entry.

        The history itself does not change: the transaction may yet fail.
        """
        if not lines:
            return []
        appended = _chain(history, at, lines)
        rows = []
        for entry, sealed in appended:
            row = asdict(entry)
            row["sealed"] = sealed
            rows.append(row)
        connection.execute(sa.insert(entries), rows)
        last, _ = appended[-1]
        reservations = sum(line.kind is Kind.RESERVED for line in lines)
        values = {
            "budget": history.name,
            "seen": history.seq,
            "seq": last.seq,
            "hash": last.hash,
            "count": len(history.charges) + reservations,
        }
        # The head as it was read is part of the condition: whoever wrote without the lock is noticed.
        result = connection.execute(_MOVE, values)
        if result.rowcount != 1:
            raise LedgerCorruptedError(f"budget {history.name!r} changed under the lock.")
        return appended

    def _take_in(self, history: History, appended: Sequence[SealedEntry]) -> History:
        """Apply entries that were just committed to a history, and note the last one's hash."""
        for entry, sealed in appended:
            history.apply(entry, sealed)
        if appended:  # after the commit: a noted head never says more than the log once held
            self.storage.witness.note(history.name, history.seq, history.head)
        self._histories[history.name] = history
        return history

    def _noted_heads(self, name: str) -> Mapping[int, str]:
        """Return the entries' hashes noted beside the database, or nothing if they were checked already."""
        if name in self._histories:
            return {}
        return self.storage.witness.read_heads(name)

    def _sync(
        self,
        connection: Connection,
        name: str,
        head: Row[Any] | None,
        noted_heads: Mapping[int, str],
    ) -> History:
        """Bring a history in memory up to its log, and check the log against the noted hashes of entries."""
        witness = self.storage.witness
        if head is None:
            witness.check(name, noted_heads, {})
            raise unknown_budget(connection, name, self.storage.safe_url)
        history = self._histories.get(name) or History(name)
        hashes = {}
        if head.entries > history.seq:
            span = {
                "name": name,
                "after": history.seq,
                "until": head.entries,
            }
            for row in connection.execute(_TAIL, span):
                entry = stored_entry(row)
                history.apply(entry, row.sealed)
                hashes[history.seq] = history.head
        if head.entries != history.seq or head.head != history.head:
            raise LedgerCorruptedError(
                f"the log of budget {name!r} ends with entry {history.seq}, its head says entry "
                f"{head.entries}: privtune budget verify {name} tells more."
            )
        witness.check(name, noted_heads, hashes)
        self._histories[name] = history
        return history


def _chain(history: History, at: datetime, lines: Sequence[Line]) -> list[SealedEntry]:
    """Return lines as chained entries, of which the first follows a history's last one."""
    # What the clock says, right or wrong: the log's order is that of the numbers.
    origin = {
        "at": at.isoformat(),
        "worker": f"{platform.node()}:{os.getpid()}",
    }
    chain: list[SealedEntry] = []
    previous = history.head
    for seq, line in enumerate(lines, history.seq + 1):
        sealed_part = line.sealed or {}
        entry, sealed = new_entry(
            history.name,
            seq,
            kind=line.kind,
            charge=line.charge,
            body=line.body or {},
            sealed={**sealed_part, **origin},
            previous=previous,
        )
        previous = entry.hash
        chain.append((entry, sealed))
    return chain


def stored_entry(row: Row[Any]) -> Entry:
    """Return the entry that a row holds, with a newly computed digest of its sealed part."""
    values = dict(row._mapping)
    values["sealed"] = sealed_digest(row.sealed)
    return Entry(**values)


def forget_secret(connection: Connection, budget: str, charge: int) -> None:
    """Erase the secret of a round's seeds, by which noise could be drawn again and subtracted.

    Args:
        connection: One in a writing transaction.
        budget: The budget's name.
        charge: The number of the round's charge.
    """
    is_round = is_of_round(rounds, budget, charge)
    update = sa.update(rounds).where(*is_round).values(secret="")
    connection.execute(update)


def forget_round(connection: Connection, budget: str, charge: int) -> None:
    """Delete the secret and the trials of a round, and keep a digest of the results.

    Args:
        connection: One in a writing transaction.
        budget: The budget's name.
        charge: The number of the round's charge.
    """
    digest = round_digest(connection, budget, charge) or ""
    is_trial = is_of_round(tasks, budget, charge)
    connection.execute(sa.delete(tasks).where(*is_trial))
    is_round = is_of_round(rounds, budget, charge)
    update = sa.update(rounds).where(*is_round).values(secret="", tasks=0, digest=digest)
    connection.execute(update)


def round_digest(connection: Connection, budget: str, charge: int) -> str | None:
    """Return the digest of a finished round's results, None if a result is missing.

    The log notes it when the charge settles, so that a result that is changed later is noticed.

    Args:
        connection: One that is reading, or in a writing transaction.
        budget: The budget's name.
        charge: The number of the round's charge.
    """
    is_round = is_of_round(rounds, budget, charge)
    query = sa.select(rounds.c.digest).where(*is_round)
    digest: str | None = connection.execute(query).scalar()
    if digest:
        return digest
    is_trial = is_of_round(tasks, budget, charge)
    trials = (
        sa.select(
            tasks.c.number,
            tasks.c.score,
            tasks.c.result,
            tasks.c.done,
        )
        .where(*is_trial)
        .order_by(tasks.c.number)
    )
    rows = connection.execute(trials).all()
    if not rows:
        return None
    results = []
    for row in rows:
        if not row.done:
            return None
        results.append([row.number, repr(row.score), row.result])
    text = json.dumps(results)
    return hashlib.sha256(text.encode()).hexdigest()


def is_of_round(table: sa.Table, budget: str, charge: int) -> Conditions:
    """Return the SQL conditions for a round's rows in the table of rounds or in that of trials.

    Args:
        table: One of the two.
        budget: The budget's name.
        charge: The number of the round's charge.
    """
    is_budget: sa.ColumnElement[bool] = table.c.budget == budget
    is_charge: sa.ColumnElement[bool] = table.c.charge == charge
    return is_budget, is_charge
