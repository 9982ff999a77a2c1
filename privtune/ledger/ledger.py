"""The durable budget: what was admitted, what has started, what was settled."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.accounting import Guarantee
from privtune.errors import InvalidInputError
from privtune.ledger import schema
from privtune.ledger.admission import admit, odometer
from privtune.ledger.chain import Entry, Kind, new_entry, sealed_digest
from privtune.ledger.errors import (
    BudgetExistsError,
    ChargeStateError,
    ClockError,
    LedgerCorruptedError,
    UnknownBudgetError,
    UnknownChargeError,
)
from privtune.ledger.history import History
from privtune.ledger.migrate import prepare
from privtune.ledger.storage import Storage
from privtune.ledger.values import Budget, Charge, ChargeRequest, ChargeState

__all__ = ["Ledger"]


@dataclass(frozen=True)
class _Line:
    """An entry that is about to be appended."""

    kind: Kind
    charge: int = 0
    body: Mapping[str, Any] | None = None
    sealed: Mapping[str, Any] | None = None


class Ledger:
    """Opens, or creates, the ledger in a database.

    Args:
        url: ``sqlite:///file.db`` or ``postgresql://user@host/database``.
        patience: How long to wait for other processes, in seconds.
        clock_tolerance: How far this machine's clock may lie behind the last entry of a log, in
            seconds, before reservations are refused.
        clock: The time, for tests. PostgreSQL's own clock is used there.

    **Guarantee**: a charge is in the log, durably, before :meth:`reserve` returns it; all charges
    of one call are admitted in one transaction, or none; whatever crashes, what was started stays
    spent. Threads may share a ledger; every process opens its own.

    Raises:
        LedgerSchemaError: The database holds another version of the ledger.
        LedgerConnectionError: The database cannot be opened.
    """

    def __init__(
        self,
        url: str = "sqlite:///privtune.db",
        *,
        patience: float = 60.0,
        clock_tolerance: float = 300.0,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._storage = Storage(url, patience=patience)
        self._clock = clock
        self._tolerance = timedelta(seconds=clock_tolerance)
        self._histories: dict[str, History] = {}
        self._guard = threading.RLock()
        prepare(self._storage)

    @property
    def url(self) -> str:
        """The storage's URL, without a password."""
        return self._storage.safe_url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._storage.close()

    # Budgets.

    def create_budget(self, budget: Budget) -> Budget:
        """Create a budget; with the same terms a second time, return the one that is there.

        Raises:
            BudgetExistsError: A budget of that name has other terms.
        """
        with self._guard:
            with self._storage.write() as connection:
                if self._exists(connection, budget.name):
                    return self._same_terms(self._sync(connection, budget.name), budget)
                history = History(budget.name)
                connection.execute(
                    sa.insert(schema.budgets).values(
                        name=budget.name, entries=0, charges=0, head=history.head
                    )
                )
                at = self._now(connection)
                body = {"terms": budget.to_dict(), "created_at": at.isoformat()}
                written = self._append(connection, history, at, [_Line(Kind.CREATED, body=body)])
            return self._take_in(history, written).terms()

    def budget(self, name: str) -> Budget:
        """Return the terms of a budget."""
        return self._current(name).terms()

    def budgets(self) -> tuple[Budget, ...]:
        """Return the terms of every budget, by name."""
        with self._storage.read() as connection:
            names = connection.scalars(
                sa.select(schema.budgets.c.name).order_by(schema.budgets.c.name)
            ).all()
        return tuple(self.budget(name) for name in names)

    def close_budget(self, name: str) -> None:
        """Close a budget for good: it admits nothing more; what it admitted may still run."""

        def lines(history: History) -> list[_Line]:
            return [] if history.closed else [_Line(Kind.CLOSED)]

        self._write(name, lines)

    def is_closed(self, name: str) -> bool:
        """Return whether a budget was closed for good."""
        return self._current(name).closed

    # Charges.

    def reserve(self, budget: str, requests: Sequence[ChargeRequest]) -> tuple[Charge, ...]:
        """Admit all of the requests in one transaction, or none.

        Args:
            budget: The budget's name.
            requests: What is asked, at least one. Arms that are declared together belong together.

        Returns:
            The charges, in the order of the requests, in state ``reserved``.

        Raises:
            BudgetExceededError: They do not fit.
            BudgetClosedError: The budget was closed.
            DeclarationClosedError: The budget is a declared one and has started.

        **Guarantee**: the composition of everything ever admitted is at most the budget.
        """
        if not requests or not all(isinstance(request, ChargeRequest) for request in requests):
            raise InvalidInputError("requests", requests, "must be at least one ChargeRequest")
        # The composition may take seconds. It is computed here, outside of the lock, and found in
        # the cache inside, unless somebody else was faster.
        admit(self._current(budget), requests)

        def lines(history: History) -> list[_Line]:
            basis = admit(history, requests)
            first = len(history.charges) + 1
            return [
                _Line(Kind.RESERVED, number, body=_body(request, basis))
                for number, request in enumerate(requests, first)
            ]

        history, written = self._write(budget, lines, strict_clock=True)
        return tuple(history.charges[entry.charge] for entry in written)

    def start(self, charge_id: str) -> Charge:
        """Mark a reserved charge as started. Call it before the first access to the data.

        Raises:
            ChargeStateError: It is not reserved: somebody else has started it, or it was voided.
        """
        return self._move(charge_id, Kind.STARTED, ChargeState.RESERVED)

    def settle(self, charge_id: str, transcript_digest: str = "") -> Charge:
        """Mark a started charge as settled: its releases are out, as the transcript has them.

        Raises:
            ChargeStateError: It is not started.
        """
        sealed = {"transcript_digest": transcript_digest}
        return self._move(charge_id, Kind.SETTLED, ChargeState.STARTED, sealed)

    def void(self, charge_id: str) -> Charge:
        """Give back a charge that never started.

        Raises:
            ChargeStateError: It has started, so it is spent.
        """
        return self._move(charge_id, Kind.VOIDED, ChargeState.RESERVED)

    def charge(self, charge_id: str) -> Charge:
        """Return one charge."""
        budget, number = _parse(charge_id)
        return _charge(self._current(budget), number)

    def charges(
        self, budget: str, *, study: str | None = None, arm: str | None = None
    ) -> tuple[Charge, ...]:
        """Return the charges of a budget, oldest first; of one study or arm, if named."""
        return tuple(
            charge
            for charge in self._current(budget).charges.values()
            if (study is None or charge.study == study) and (arm is None or charge.arm == arm)
        )

    def spent(self, budget: str) -> Guarantee:
        """Return what everything charged costs together, at the budget's δ (the odometer)."""
        return odometer(self._current(budget))

    def remaining(self, budget: str) -> float:
        """Return the ε that the odometer leaves, never below 0."""
        history = self._current(budget)
        return max(0.0, history.terms().epsilon - odometer(history).epsilon)

    # The log.

    def _move(
        self,
        charge_id: str,
        kind: Kind,
        before: ChargeState,
        sealed: Mapping[str, Any] | None = None,
    ) -> Charge:
        budget, number = _parse(charge_id)

        def lines(history: History) -> list[_Line]:
            state = _charge(history, number).state
            if state is not before:
                raise ChargeStateError(
                    f"charge {charge_id} is {state}: only a {before} charge can be {kind}."
                )
            return [_Line(kind, number, sealed=sealed)]

        history, _ = self._write(budget, lines)
        return history.charges[number]

    def _write(
        self,
        name: str,
        lines: Callable[[History], list[_Line]],
        *,
        strict_clock: bool = False,
    ) -> tuple[History, list[Entry]]:
        """Lock a budget, decide on what its log says then, and append."""
        with self._guard:
            with self._storage.write() as connection:
                history = self._sync(connection, name)
                planned = lines(history)
                at = self._now(connection)
                if strict_clock and history.last_at - at > self._tolerance:
                    raise ClockError(
                        f"this machine's clock says {at:%Y-%m-%d %H:%M:%S} UTC, but the last entry "
                        f"of budget {name!r} is of {history.last_at:%Y-%m-%d %H:%M:%S}: "
                        "set the clock, or open the ledger with a larger clock_tolerance."
                    )
                written = self._append(connection, history, at, planned)
            return self._take_in(history, written), [entry for entry, _ in written]

    def _append(
        self, connection: Connection, history: History, at: datetime, lines: list[_Line]
    ) -> list[tuple[Entry, str]]:
        written: list[tuple[Entry, str]] = []
        previous, seq = history.head, history.seq
        # The log's times never run backwards; its order is that of the numbers in any case.
        when = {"at": max(at, history.last_at).isoformat(), "worker": _worker()}
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
        if written:
            connection.execute(sa.insert(schema.entries), [_row(*pair) for pair in written])
            reserved = sum(line.kind is Kind.RESERVED for line in lines)
            moved = connection.execute(
                sa.update(schema.budgets)
                .where(
                    schema.budgets.c.name == history.name, schema.budgets.c.entries == history.seq
                )
                .values(entries=seq, head=previous, charges=len(history.charges) + reserved)
            )
            if moved.rowcount != 1:
                raise LedgerCorruptedError(f"budget {history.name!r} changed under the lock.")
        return written

    def _take_in(self, history: History, written: list[tuple[Entry, str]]) -> History:
        """Replay what is now committed."""
        for entry, sealed in written:
            history.apply(entry, sealed)
        self._histories[history.name] = history
        return history

    def _current(self, name: str) -> History:
        with self._guard, self._storage.read() as connection:
            return self._sync(connection, name)

    def _sync(self, connection: Connection, name: str) -> History:
        """Bring the history in memory up to the log; in a write, this takes the budget's lock."""
        head = connection.execute(
            sa.select(schema.budgets).where(schema.budgets.c.name == name).with_for_update()
            if connection.get_execution_options().get("privtune_write")
            else sa.select(schema.budgets).where(schema.budgets.c.name == name)
        ).one_or_none()
        if head is None:
            raise UnknownBudgetError(
                f"no budget is called {name!r} in {self.url}: privtune budget list shows them all."
            )
        history = self._histories.setdefault(name, History(name))
        if head.entries > history.seq:
            rows = connection.execute(
                sa.select(schema.entries)
                .where(
                    schema.entries.c.budget == name,
                    schema.entries.c.seq > history.seq,
                    # What others append after the head was read is for the next time.
                    schema.entries.c.seq <= head.entries,
                )
                .order_by(schema.entries.c.seq)
            )
            for row in rows:
                history.apply(_entry(row), row.sealed)
        if (head.entries, head.head) != (history.seq, history.head):
            raise LedgerCorruptedError(
                f"budget {name!r} says that its log ends with entry {head.entries}, "
                f"but it ends with entry {history.seq}: privtune budget verify {name} tells more."
            )
        return history

    def _now(self, connection: Connection) -> datetime:
        if self._clock is not None:
            return self._clock()
        if self._storage.dialect == "postgresql":
            at = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
            return at.astimezone(UTC) if isinstance(at, datetime) else datetime.now(UTC)
        return datetime.now(UTC)

    def _exists(self, connection: Connection, name: str) -> bool:
        if self._storage.dialect == "postgresql":
            # Two who create one name at once: the second waits here for the first.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(name))))
        query = sa.select(schema.budgets.c.name).where(schema.budgets.c.name == name)
        return connection.execute(query).first() is not None

    @staticmethod
    def _same_terms(history: History, asked: Budget) -> Budget:
        there = history.terms()
        if there != asked:
            ours, theirs = asked.to_dict(), there.to_dict()
            what = ", ".join(
                f"{key} is {theirs[key]!r}, not {ours[key]!r}"
                for key in ours
                if ours[key] != theirs[key]
            )
            raise BudgetExistsError(
                f"a budget called {asked.name!r} exists with other terms ({what}): "
                "a budget never changes, so choose another name."
            )
        return there


def _body(request: ChargeRequest, basis: str) -> dict[str, Any]:
    return {
        "event": request.event.to_dict(),
        "study": request.study,
        "arm": request.arm,
        "note": request.note,
        "plan_digest": request.plan_digest,
        "basis": basis,
    }


def _row(entry: Entry, sealed: str) -> dict[str, Any]:
    return {
        "budget": entry.budget,
        "seq": entry.seq,
        "kind": entry.kind,
        "charge": entry.charge,
        "body": entry.body,
        "sealed": sealed,
        "previous": entry.previous,
        "hash": entry.hash,
    }


def _entry(row: Any) -> Entry:
    return Entry(
        row.budget,
        row.seq,
        row.kind,
        row.charge,
        row.body,
        sealed_digest(row.sealed),
        row.previous,
        row.hash,
    )


def _charge(history: History, number: int) -> Charge:
    try:
        return history.charges[number]
    except KeyError:
        raise UnknownChargeError(f"budget {history.name!r} has no charge {number}.") from None


def _parse(charge_id: str) -> tuple[str, int]:
    budget, _, number = str(charge_id).rpartition("-")
    if not budget or not number.isdecimal():
        allowed = "must be a charge's id, like 'digits-3'"
        raise InvalidInputError("charge_id", charge_id, allowed)
    return budget, int(number)


def _worker() -> str:
    return f"{platform.node()}:{os.getpid()}"
