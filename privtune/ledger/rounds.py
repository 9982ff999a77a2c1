"""Rounds of a private selection: one charge, K task rows, and at most one result for each.

The contract, for whoever runs trials (inline, in processes, on a cluster):

- A round is opened in one transaction: the charge is started and its K rows are inserted. K was
  drawn in secret before. Opening it again returns what is there: K is never drawn twice.
- A task's seed derives from the round's secret and the task's number, and everything random in its
  trial from the seed: whoever takes a task over trains the same output. The secret is forgotten when
  the charge is settled.
- A worker leases a row for a while and renews the lease while it works. A lease that ran out is given
  to the next who asks. Leases spare work that another does already: nothing that is charged or
  released rests on them, nor on any clock.
- The first result of a row is accepted, every later one is dropped: one output per trial is ever seen.
- A result may end its round: rows after it that have none are closed unrun, in the same transaction.
  Rows before it stay open, so which row is the first to end the round hangs on the seeds alone.
- A worker's death is a retry, and charges nothing. A trial that diverged has a result, with score −∞.
  A trial that failed has none: its round stops for the curator, and goes on with the same seeds when
  it is opened again. So does a round in which a task has killed ``max_attempts`` workers: a score for
  the task would tell that it did, which may depend on the data.
- Results can be read once all K are there.

Everything here is sealed: K, seeds, times, scores and results stay inside the trust boundary.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from privtune.errors import InvalidInputError
from privtune.ledger.chain import Kind, canonical
from privtune.ledger.errors import ChargeStateError, LedgerError, UnknownChargeError
from privtune.ledger.ledger import Ledger
from privtune.ledger.schema import rounds, tasks
from privtune.ledger.values import ChargeState
from privtune.training.mechanism.streams import Streams

SKIPPED = "skipped"
"""Key of the result of a task that was not run: an earlier one had ended the round."""

_IDLE = 120  # seconds for a model to become a file, in the transaction that accepts its result
_WINDOW = 256  # open tasks that are counted to share them: where there are as many, all have enough


class RoundNotFinishedError(LedgerError):
    """Not every task of the round has a result yet, so none may be looked at."""


class RoundStuckError(LedgerError):
    """A task has killed too many workers: the curator must see why before it goes on."""


@dataclass(frozen=True)
class OpenRound:
    """An opened round: its charge, K, and what the seeds derive from. Sealed."""

    charge_id: str
    tasks: int = field(repr=False)  # K: a secret, as are the seeds
    secret: bytes = field(repr=False)

    def seed(self, number: int) -> bytes:
        """Return the 32 bytes that a task's random streams derive from; the same at every attempt."""
        self.check_open()
        return Streams(self.secret).key("trial", number)

    def check_open(self) -> None:
        """Refuse a round whose charge is settled."""
        # Seeds of a forgotten, empty secret would be known to everybody.
        if not self.secret:
            raise ChargeStateError(f"charge {self.charge_id} is settled: its round is over.")


@dataclass(frozen=True)
class Lease:
    """The right of a worker to one attempt at a task, until ``expires`` by the storage's clock. Sealed."""

    charge_id: str
    number: int
    worker: str
    attempt: int
    expires: float
    seed: bytes = field(repr=False)


@dataclass(frozen=True)
class Finished:
    """What a worker hands in of a task. Sealed."""

    lease: Lease
    score: float
    result: Mapping[str, Any]
    last: bool = False  # closes later tasks unrun; must be a function of the result alone
    keep: Callable[[Connection], None] | None = None  # stores a first result that is too large


@dataclass(frozen=True)
class TaskResult:
    """The one result of a task, JSON-ready; its score is −∞ if the trial diverged. Sealed."""

    number: int
    score: float
    result: Mapping[str, Any]


class Rounds:
    """The rounds in a ledger's storage; a clock of tests takes the place of the storage's."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        lease_seconds: float = 300.0,
        max_attempts: int = 5,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._ledger = ledger
        self._storage = ledger.log.storage
        self._seconds = lease_seconds
        self._max_attempts = max_attempts
        self._clock = clock
        self._rounds: dict[str, OpenRound] = {}

    def open(self, charge_id: str, *, count: int, secret: bytes | None = None) -> OpenRound:
        """Start a reserved charge and insert its K task rows, in one transaction, unless it is open."""
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 1_000_000:
            raise InvalidInputError("count", "sealed", "must be a whole number from 0 to 1000000")
        done: list[OpenRound] = []

        def insert(connection: Connection) -> bool:
            there = find_round(connection, charge_id)
            if there is not None:
                # Who opens a round again has seen what happened: free tasks count no deaths any more.
                free = self._is_free(self._now(connection))
                statement = sa.update(tasks).where(*_open(charge_id), free)
                connection.execute(statement.values(attempts=0))
            done.append(there or insert_round(connection, charge_id, count, secret))
            return there is None

        self._ledger.move(charge_id, Kind.STARTED, work=insert)
        return done[-1]

    def propose(self, charge_id: str, numbers: Sequence[int], *, secret: bytes) -> None:
        """Open tasks of a charge whose trials are all shown; those whose result was lost are open again."""
        if (state := self._ledger.charge(charge_id).state) is not ChargeState.STARTED:
            raise ChargeStateError(f"charge {charge_id} is {state}: only a started one has tasks.")
        with self._storage.write() as connection:
            if find_round(connection, charge_id) is None:
                insert_round(connection, charge_id, 0, secret)
            self._lock(connection, charge_id)
            open_tasks(connection, charge_id, numbers)

    def find(self, charge_id: str) -> OpenRound | None:
        """Return the round of a charge, None if it was not opened."""
        with self._storage.read() as connection:
            return find_round(connection, charge_id)

    def lease_some(
        self, charge_id: str, worker: str, *, most: int, workers: int = 1, again: bool = False
    ) -> tuple[Lease, ...]:
        """Lease a worker its share of the first free tasks; ``again`` if a call had no answer."""
        opened = self._opened(charge_id)
        rows: list[Row[Any]] = []
        if again:
            with self._storage.quick() as connection:
                until = self._now(connection) + self._seconds
                mine = *_open(charge_id), tasks.c.worker == worker
                rows = leased(connection, sa.update(tasks).where(*mine).values(leased_until=until))
        if not rows:
            with self._storage.quick() as connection:
                rows = self._take(connection, charge_id, worker, most=most, workers=workers)
            rows = self._harmless(charge_id, worker, rows)
        return tuple(
            Lease(
                charge_id,
                row.number,
                worker,
                row.attempts,
                row.leased_until,
                opened.seed(row.number),
            )
            for row in rows
        )

    def renew_some(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Return a worker's leases of one round with a new end, but for tasks that others have."""
        by_number = {lease.number: lease for lease in leases}
        charge_id, worker = leases[0].charge_id, leases[0].worker
        with self._storage.quick() as connection:
            mine = (
                sa.select(tasks.c.number)
                .where(*_open(charge_id), tasks.c.number.in_(sorted(by_number)))
                .where(tasks.c.worker == worker)
                .order_by(tasks.c.number)  # as others lock them, or two could wait for each other
                .with_for_update()
                .cte("mine")
            )
            statement = (
                sa.update(tasks)
                .where(*of_round(charge_id), among_found(connection, mine))
                .values(leased_until=self._now(connection) + self._seconds)
            )
            rows = leased(connection, statement)
        return tuple(
            replace(by_number[row.number], expires=row.leased_until)
            for row in rows
            if row.attempts == by_number[row.number].attempt
        )

    def complete_some(self, results: Sequence[Finished]) -> frozenset[int]:
        """Store results of a round in one transaction; return the tasks whose result was the first."""
        accepted: set[int] = set()
        with self._storage.write() as connection:
            # Rows are locked in the order in which others take them; other results need not wait.
            for done in sorted(results, key=lambda done: done.lease.number):
                charge_id, number = done.lease.charge_id, done.lease.number
                if not finish_task(connection, charge_id, number, done.score, done.result):
                    continue
                accepted.add(number)
                if done.keep is not None:
                    done.keep(connection)
                if done.last:
                    close_after(connection, charge_id, number, canonical({SKIPPED: True}))
        return frozenset(accepted)

    def open_charges(self) -> frozenset[str]:
        """Return the charges whose rounds have tasks without a result: one question for all."""
        query = sa.select(tasks.c.budget, tasks.c.charge).where(tasks.c.done == 0).distinct()
        with self._storage.read() as connection:
            return frozenset(f"{row.budget}-{row.charge}" for row in connection.execute(query))

    def reopen(self, charge_id: str, number: int, lose: Callable[[Connection], None]) -> None:
        """Open a task again whose stored result was lost; ``lose`` forgets what is left of it."""
        # What stores lose does not hang on what came out, so training it anew is no second look.
        with self._storage.write() as connection:
            self._lock(connection, charge_id)
            lose(connection)
            open_tasks(connection, charge_id, [number])

    def open_count(self, charge_id: str) -> int:
        """Return how many tasks have no result yet. Sealed, like everything here."""
        with self._storage.read() as connection:
            return _count_open(connection, charge_id)

    def at_work(self, charge_id: str) -> bool:
        """Return whether a worker holds a task of a round at this moment."""
        with self._storage.read() as connection:
            held = sa.not_(self._is_free(self._now(connection)))
            query = sa.select(tasks.c.number).where(*_open(charge_id), held).limit(1)
            return connection.execute(query).first() is not None

    def results(self, charge_id: str) -> tuple[TaskResult, ...]:
        """Return every task's result once all are there; before that none may be looked at."""
        with self._storage.read() as connection:
            if find_round(connection, charge_id) is None:
                raise _no_round(charge_id)
            if _count_open(connection, charge_id):
                raise RoundNotFinishedError(
                    f"the round of charge {charge_id} is not finished: "
                    "its results can be read when every task has one."
                )
            # No early look: which results are there tells how long each trial took.
            query = sa.select(tasks).where(*of_round(charge_id)).order_by(tasks.c.number)
            rows = connection.execute(query).all()
        return tuple(
            TaskResult(
                row.number, -math.inf if row.score is None else row.score, json.loads(row.result)
            )
            for row in rows
        )

    def _lock(self, connection: Connection, charge_id: str) -> None:
        """Lock a round's row, and refuse a round that is over."""
        row = self._storage.lock(connection, sa.select(rounds).where(*_key(charge_id)), {})
        if row is None:
            raise _no_round(charge_id)
        _opened(charge_id, row).check_open()

    def _opened(self, charge_id: str) -> OpenRound:
        """Return a round; its secret never changes, so it is read once."""
        if charge_id not in self._rounds:
            if (opened := self.find(charge_id)) is None:
                raise _no_round(charge_id)
            self._rounds[charge_id] = opened
        return self._rounds[charge_id]

    def _take(
        self, connection: Connection, charge_id: str, worker: str, *, most: int, workers: int
    ) -> list[Row[Any]]:
        """Lease the first free tasks of a round in one statement."""
        now = self._now(connection)
        free = self._is_free(now)
        limit = _share(charge_id, worker, free, most=most, workers=workers) if most > 1 else most
        first = (
            sa.select(tasks.c.number)
            .where(*_open(charge_id), free)
            .order_by(tasks.c.number)
            .limit(limit)
            .with_for_update(skip_locked=True)  # another is about to lease those: wait for nobody
            .cte("first_free")
        )
        until = now + self._seconds
        statement = sa.update(tasks).where(*of_round(charge_id), among_found(connection, first))
        return leased(
            connection,
            statement.values(attempts=tasks.c.attempts + 1, worker=worker, leased_until=until),
        )

    def _harmless(self, charge_id: str, worker: str, rows: list[Row[Any]]) -> list[Row[Any]]:
        """Return leased tasks but for those that have killed too many: nobody shall train beside them."""
        killers = [row.number for row in rows if row.attempts > self._max_attempts]
        if not killers:
            return rows
        stuck = rows[0].number in killers
        back = tasks.c.number.in_([row.number for row in rows] if stuck else killers)
        with self._storage.quick() as connection:
            statement = sa.update(tasks).where(*of_round(charge_id), back, tasks.c.worker == worker)
            leased(connection, statement.values(attempts=tasks.c.attempts - 1, leased_until=0.0))
        if stuck:
            raise RoundStuckError(
                f"workers of charge {charge_id} died again and again at one task. Nothing was "
                "released and the charge stays; see what kills them (memory?), then run the "
                "study again: it goes on where it was."
            )
        return [row for row in rows if row.number not in killers]

    def _is_free(self, now: Any) -> sa.ColumnElement[bool]:
        """The condition that nobody holds a lease of a task."""
        # A lease that ends later than any could is of before the clock was set back.
        beyond = now + 2.0 * self._seconds
        return sa.or_(tasks.c.leased_until <= now, tasks.c.leased_until > beyond)

    def _now(self, connection: Connection) -> Any:
        """The time by the storage's clock, to compute with in a statement."""
        if self._clock is not None:
            return sa.literal(self._clock(), sa.Double)
        if connection.dialect.name == "postgresql":
            epoch = sa.func.extract("epoch", sa.func.statement_timestamp())
            return sa.cast(epoch, sa.Double)
        return sa.literal(time.time(), sa.Double)


def _no_round(charge_id: str) -> UnknownChargeError:
    return UnknownChargeError(f"charge {charge_id} has no round.")


def _key(charge_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    budget, charge = Ledger.parse(charge_id)
    return rounds.c.budget == budget, rounds.c.charge == charge


def _opened(charge_id: str, row: Row[Any]) -> OpenRound:
    return OpenRound(charge_id, row.tasks, bytes.fromhex(row.secret))


def find_round(connection: Connection, charge_id: str) -> OpenRound | None:
    """Return the round of a charge, if it was opened."""
    row = connection.execute(sa.select(rounds).where(*_key(charge_id))).one_or_none()
    return None if row is None else _opened(charge_id, row)


def of_round(charge_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    """The conditions of being a task of a round."""
    budget, charge = Ledger.parse(charge_id)
    return tasks.c.budget == budget, tasks.c.charge == charge


def _open(charge_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    """The conditions of being a task of a round without a result."""
    return *of_round(charge_id), tasks.c.done == 0


def insert_round(
    connection: Connection, charge_id: str, count: int, secret: bytes | None
) -> OpenRound:
    """Insert a round and its tasks."""
    budget, charge = Ledger.parse(charge_id)
    opened = OpenRound(charge_id, count, secrets.token_bytes(32) if secret is None else secret)
    row = {"budget": budget, "charge": charge, "tasks": count, "secret": opened.secret.hex()}
    connection.execute(sa.insert(rounds).values(row))
    open_tasks(connection, charge_id, range(count))
    return opened


def open_tasks(connection: Connection, charge_id: str, numbers: Sequence[int]) -> None:
    """Open tasks, anew if their results were lost; those that have none stay with who works on them."""
    budget, charge = Ledger.parse(charge_id)
    known = set(connection.scalars(sa.select(tasks.c.number).where(*of_round(charge_id))))
    fresh = {"attempts": 0, "leased_until": 0.0, "done": 0}
    own = {"budget": budget, "charge": charge, "worker": ""}
    if rows := [{**own, **fresh, "number": n} for n in numbers if n not in known]:
        connection.execute(sa.insert(tasks), rows)
    if lost := known.intersection(numbers):
        done = *of_round(charge_id), tasks.c.number.in_(lost), tasks.c.done == 1
        connection.execute(sa.update(tasks).where(*done).values(**fresh, score=None, result=None))
    count = len(known.union(numbers))
    connection.execute(sa.update(rounds).where(*_key(charge_id)).values(tasks=count))


# Run for every task, built once.
_FINISH = (
    sa.update(tasks)
    .where(
        tasks.c.budget == sa.bindparam("of_budget"),
        tasks.c.charge == sa.bindparam("of_charge"),
        tasks.c.number == sa.bindparam("of_number"),
        tasks.c.done == 0,
    )
    .values(done=1, score=sa.bindparam("score"), result=sa.bindparam("result"))
)


def finish_task(
    connection: Connection, charge_id: str, number: int, score: float, result: Mapping[str, Any]
) -> bool:
    """Store a task's result; return whether it was the first."""
    # −∞ has no portable literal in a column: it is stored as NULL.
    stored = None if math.isnan(score) or score == -math.inf else score
    budget, charge = Ledger.parse(charge_id)
    key = {"of_budget": budget, "of_charge": charge, "of_number": number}
    values = {**key, "score": stored, "result": canonical(result)}
    if connection.dialect.name != "postgresql":
        return connection.execute(_FINISH, values).rowcount == 1
    # The row is locked from here on: a worker that is cut off now loses its session, not the round.
    limit = sa.func.set_config("idle_in_transaction_session_timeout", f"{_IDLE}s", True)
    statement = _FINISH.returning(tasks.c.number, limit)
    return connection.execute(statement, values).first() is not None


def close_after(connection: Connection, charge_id: str, number: int, result: str) -> None:
    """Give every open task after one a result."""
    after = (
        sa.select(tasks.c.number)
        .where(*of_round(charge_id), tasks.c.number > number, tasks.c.done == 0)
        .order_by(tasks.c.number)  # as others lock them, or two could wait for each other
        .with_for_update()
        .cte("after")
    )
    connection.execute(
        sa.update(tasks)
        .where(*of_round(charge_id), among_found(connection, after))
        .values(done=1, score=None, result=result)
    )


def _count_open(connection: Connection, charge_id: str) -> int:
    query = sa.select(sa.func.count()).select_from(tasks).where(*_open(charge_id))
    return int(connection.execute(query).scalar_one())


def among_found(connection: Connection, found: sa.CTE) -> sa.ColumnElement[bool]:
    """The condition of being among tasks that were found, looked up by their key."""
    numbers = sa.select(found.c.number)
    if connection.dialect.name != "postgresql":
        return tasks.c.number.in_(numbers)
    # PostgreSQL takes a round that was just opened for a short one, and would read all of it.
    first, last = (f(found.c.number) for f in (sa.func.min, sa.func.max))
    return sa.and_(
        tasks.c.number == sa.any_(sa.func.array(numbers.scalar_subquery())),
        tasks.c.number >= sa.select(first).scalar_subquery(),
        tasks.c.number <= sa.select(last).scalar_subquery(),
    )


def _share(
    charge_id: str, worker: str, free: sa.ColumnElement[bool], *, most: int, workers: int
) -> sa.ScalarSelect[Any]:
    """How many tasks a worker gets of those that are free; where many are open, all that it asks."""
    seen = (
        sa.select(free.label("free"), tasks.c.worker)
        .where(*_open(charge_id))
        .order_by(tasks.c.number)
        .limit(_WINDOW)
        .subquery()
    )
    held = sa.case((sa.and_(sa.not_(seen.c.free), seen.c.worker != worker), seen.c.worker))
    others = sa.func.count(sa.distinct(held)) + 1
    sharing = sa.case((others > workers, others), else_=workers)
    part = (sa.func.count().filter(seen.c.free) + sharing - 1) // sharing
    many = sa.or_(sa.func.count() >= _WINDOW, part > most)
    return sa.select(sa.case((many, most), (part < 1, 1), else_=part)).scalar_subquery()


def leased(connection: Connection, statement: sa.Update) -> list[Row[Any]]:
    """Run a statement that leases tasks, and return these; a crash may undo it."""
    found: list[Any] = [tasks.c.number, tasks.c.attempts, tasks.c.leased_until]
    if connection.dialect.name == "postgresql":
        # A lease that a crash undoes leaves its task free: the next trains on the same seed. What
        # counts (charges, results) waits for the disk, and with it all that was written before.
        found.append(sa.func.set_config("synchronous_commit", "off", True).label("unwaited"))
    rows = connection.execute(statement.returning(*found)).all()
    return sorted(rows, key=lambda row: row.number)
