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

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from privtune.errors import InvalidInputError
from privtune.ledger.chain import Document, Kind, canonical
from privtune.ledger.errors import ChargeStateError, LedgerError, Place, UnknownChargeError
from privtune.ledger.ledger import Ledger
from privtune.ledger.log import Conditions, is_of_round
from privtune.ledger.reading import read_object, show_key
from privtune.ledger.schema import rounds, tasks
from privtune.ledger.values import ChargeState
from privtune.training.mechanism.streams import Streams

SKIPPED = "skipped"
"""Key of the result of a task that was not run: an earlier one had ended the round."""

_IDLE = 120  # seconds for a model to become a file, in the transaction that accepts its result
_WINDOW = 256  # open tasks that are counted to share them: where there are as many, all have enough


class RoundNotFinishedError(LedgerError):
    """Results of a round were asked for while some of its tasks are still to be finished."""


class RoundStuckError(LedgerError):
    """A task has killed too many workers, and the curator must find out why before the round goes on."""


@dataclass(frozen=True)
class OpenRound:
    """A round of a selection as it was opened: its charge, its number K of tasks, and its seeds' secret.

    Attributes:
        charge_id: The id of the charge that pays for it.
        tasks: K, the number of its trials: a secret, as are the seeds.
        secret: 32 bytes; empty once the charge is settled.
    """

    charge_id: str
    tasks: int = field(repr=False)
    secret: bytes = field(repr=False)

    def seed(self, number: int) -> bytes:
        """Return the 32-byte seed of a task's random streams, the same at every attempt."""
        self.check_open()
        return Streams(self.secret).key("trial", number)

    def check_open(self) -> None:
        """Refuse a round whose charge is settled."""
        # Seeds of a forgotten, empty secret would be known to everybody.
        if not self.secret:
            raise ChargeStateError(f"charge {self.charge_id} is settled: its round is over.")


@dataclass(frozen=True)
class Lease:
    """A worker's sealed right to one attempt at a task, until ``expires`` by the storage's clock."""

    charge_id: str
    number: int
    worker: str
    attempt: int
    expires: float
    seed: bytes = field(repr=False)


@dataclass(frozen=True)
class Submission:
    """The result of one attempt at a task, sealed, as a worker hands it in.

    Attributes:
        lease: The attempt.
        score: −∞ if the trial diverged.
        result: What else came out, ready for JSON.
        last: Whether later tasks are closed unrun; must be a function of the result alone.
        keep: Stores a first result that is too large, in the same transaction.
    """

    lease: Lease
    score: float
    result: Document
    last: bool = False
    keep: Callable[[Connection], None] | None = None


@dataclass(frozen=True)
class TaskResult:
    """The stored result of a task, sealed, with a score of −∞ if the trial diverged."""

    number: int
    score: float
    result: Document


class Rounds:
    """The rounds in a ledger's storage, with their tasks, leases and results."""

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
        """Start a reserved charge and insert its K tasks, in one transaction, unless its round is open.

        Args:
            charge_id: The charge's id, as ``"clinic-1"``.
            count: K, as it was drawn in secret. A round that is open keeps its own.
            secret: What the seeds derive from; None to draw it.

        Returns:
            The round, as it is stored.

        Raises:
            InvalidInputError: The count is none.
            ChargeStateError: The charge has no round, and is not reserved.
            LedgerCorruptedError: The round was opened with another secret.
        """
        is_whole = isinstance(count, int) and not isinstance(count, bool)
        if not is_whole or not 0 <= count <= 1_000_000:
            raise InvalidInputError("count", "sealed", "must be a whole number from 0 to 1000000")
        opened: list[OpenRound] = []

        def insert(connection: Connection) -> bool:
            open_round = find_round(connection, charge_id)
            if open_round is None:
                opened.append(insert_round(connection, charge_id, count, secret))
                return True
            if secret is not None and open_round.secret not in (b"", secret):
                raise _place(charge_id, "secret", "privtune_rounds").error(
                    "is not the arm's secret, which its round was opened with"
                )
            # Who opens a round again has seen what happened: free tasks count no deaths any more.
            now = self._now(connection)
            statement = (
                sa.update(tasks)
                .where(*_open(charge_id), self._is_free(now))  # who is at work keeps its count
                .values(attempts=0)
            )
            connection.execute(statement)
            opened.append(open_round)
            return False

        self._ledger.move(charge_id, Kind.STARTED, work=insert)
        return opened[-1]

    def propose(self, charge_id: str, numbers: Sequence[int], *, secret: bytes) -> None:
        """Open tasks of a charge whose trials are all shown, or open them again if results were lost.

        Args:
            charge_id: The charge's id; it must be started.
            numbers: The tasks.
            secret: What the seeds derive from, if the charge has no round yet.

        Raises:
            ChargeStateError: The charge is not started.
        """
        state = self._ledger.charge(charge_id).state
        if state is not ChargeState.STARTED:
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
        self,
        charge_id: str,
        worker: str,
        *,
        most: int,
        workers: int = 1,
        again: bool = False,
    ) -> tuple[Lease, ...]:
        """Lease a worker its share of the first free tasks of a round.

        Args:
            charge_id: The charge's id.
            worker: The worker's name, of its own.
            most: How many tasks it can train at once.
            workers: How many workers share the round, at least.
            again: Whether tasks that were leased to it already are to be returned, with a new end.

        Returns:
            The leases, perhaps none; by the task's number.

        Raises:
            UnknownChargeError: The charge has no round.
            RoundStuckError: The first free task has killed too many workers.
        """
        open_round = self._round(charge_id)
        rows: list[Row[Any]] = []
        if again:
            rows = self._take_again(charge_id, worker)
        if not rows:
            with self._storage.quick() as connection:
                rows = self._take(connection, charge_id, worker, most=most, workers=workers)
            rows = self._harmless(charge_id, worker, rows)
        leases = []
        for row in rows:
            lease = Lease(
                charge_id=charge_id,
                number=row.number,
                worker=worker,
                attempt=row.attempts,
                expires=row.leased_until,
                seed=open_round.seed(row.number),
            )
            leases.append(lease)
        return tuple(leases)

    def _take_again(self, charge_id: str, worker: str) -> list[Row[Any]]:
        """Extend all leases that a worker holds in a round, and return their tasks' rows."""
        is_mine = tasks.c.worker == worker
        with self._storage.quick() as connection:
            end = self._now(connection) + self._seconds
            statement = sa.update(tasks).where(*_open(charge_id), is_mine).values(leased_until=end)
            return leased(connection, statement)

    def renew_some(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Extend a worker's leases of one round, and return those whose tasks no other worker has."""
        by_number = {lease.number: lease for lease in leases}
        charge_id = leases[0].charge_id
        worker = leases[0].worker
        is_leased = tasks.c.number.in_(sorted(by_number))
        is_mine = tasks.c.worker == worker
        mine = _lock_in_order("mine", *_open(charge_id), is_leased, is_mine)
        with self._storage.quick() as connection:
            end = self._now(connection) + self._seconds
            statement = (
                sa.update(tasks)
                .where(*of_round(charge_id), is_in_selection(connection, mine))
                .values(leased_until=end)
            )
            rows = leased(connection, statement)
        renewed = []
        for row in rows:
            lease = by_number[row.number]
            # A later attempt is another lease, also where it is the same worker's.
            if row.attempts == lease.attempt:
                renewed.append(replace(lease, expires=row.leased_until))
        return tuple(renewed)

    def complete_some(self, results: Sequence[Submission]) -> frozenset[int]:
        """Store tasks' results in one transaction, and return the tasks that had no result before."""
        accepted: set[int] = set()
        with self._storage.write() as connection:
            # Rows are locked in the order in which others take them; other results need not wait.
            for result in sorted(results, key=lambda result: result.lease.number):
                charge_id = result.lease.charge_id
                number = result.lease.number
                is_first = finish_task(
                    connection,
                    charge_id,
                    number,
                    result.score,
                    result.result,
                )
                if not is_first:
                    continue
                accepted.add(number)
                if result.keep is not None:
                    result.keep(connection)
                if result.last:
                    close_after(connection, charge_id, number, canonical({SKIPPED: True}))
        return frozenset(accepted)

    def open_charges(self) -> frozenset[str]:
        """Return the ids of all charges whose rounds have tasks without a result."""
        is_open = tasks.c.done == 0
        query = sa.select(tasks.c.budget, tasks.c.charge).where(is_open).distinct()
        with self._storage.read() as connection:
            rows = connection.execute(query)
            return frozenset(f"{row.budget}-{row.charge}" for row in rows)

    def reopen(self, charge_id: str, number: int, lose: Callable[[Connection], None]) -> None:
        """Open a task again whose stored result was lost, once ``lose`` has deleted what is left of it."""
        # What stores lose does not hang on what came out, so training it anew is no second look.
        with self._storage.write() as connection:
            self._lock(connection, charge_id)
            lose(connection)
            open_tasks(connection, charge_id, [number])

    def open_count(self, charge_id: str) -> int:
        """Return the number of a round's tasks without a result, which is sealed."""
        with self._storage.read() as connection:
            return _count_open(connection, charge_id)

    def at_work(self, charge_id: str) -> bool:
        """Return whether a worker holds a task of a round at this moment."""
        with self._storage.read() as connection:
            now = self._now(connection)
            is_leased = sa.not_(self._is_free(now))
            query = sa.select(tasks.c.number).where(*_open(charge_id), is_leased).limit(1)
            return connection.execute(query).first() is not None

    def results(self, charge_id: str) -> tuple[TaskResult, ...]:
        """Return the results of a finished round's tasks, and refuse a round that is not finished.

        Args:
            charge_id: The charge's id.

        Returns:
            The results, by the task's number.

        Raises:
            UnknownChargeError: The charge has no round.
            RoundNotFinishedError: A task has no result yet.
            LedgerCorruptedError: A task, or the result of one, is gone.
        """
        with self._storage.read() as connection:
            open_round = find_round(connection, charge_id)
            if open_round is None:
                raise _no_round(charge_id)
            # No early look: which results are there tells how long each trial took.
            if _count_open(connection, charge_id):
                raise RoundNotFinishedError(
                    f"the round of charge {charge_id} is not finished: "
                    "its results can be read when every task has one."
                )
            query = sa.select(tasks).where(*of_round(charge_id)).order_by(tasks.c.number)
            rows = connection.execute(query).all()
        if len(rows) != open_round.tasks:
            raise _place(charge_id, "tasks", "privtune_rounds").error(
                "is not the number of the round's tasks"
            )
        place = _place(charge_id, "result")
        results = []
        for row in rows:
            if row.result is None:
                raise place.error("holds nothing, though a task is marked as done")
            score = -math.inf if row.score is None else row.score
            result = read_object(row.result, place)
            results.append(TaskResult(row.number, score, result))
        return tuple(results)

    def _lock(self, connection: Connection, charge_id: str) -> None:
        """Lock a round's row, and refuse a round whose charge is settled."""
        query = sa.select(rounds).where(*_key(charge_id))
        row = self._storage.lock(connection, query, {})
        if row is None:
            raise _no_round(charge_id)
        _from_row(charge_id, row).check_open()

    def _round(self, charge_id: str) -> OpenRound:
        """Return the round of a charge, which is read from the storage once."""
        if charge_id not in self._rounds:
            open_round = self.find(charge_id)
            if open_round is None:
                raise _no_round(charge_id)
            self._rounds[charge_id] = open_round
        return self._rounds[charge_id]

    def _take(
        self,
        connection: Connection,
        charge_id: str,
        worker: str,
        *,
        most: int,
        workers: int,
    ) -> list[Row[Any]]:
        """Lease the first free tasks of a round in one statement."""
        now = self._now(connection)
        free = self._is_free(now)
        limit: int | sa.ScalarSelect[Any] = most
        if most > 1:
            limit = _share(
                charge_id,
                worker,
                free,
                most=most,
                workers=workers,
            )
        first = (
            sa.select(tasks.c.number)
            .where(*_open(charge_id), free)
            .order_by(tasks.c.number)
            .limit(limit)
            .with_for_update(skip_locked=True)  # another is about to lease those: wait for nobody
            .cte("first_free")
        )
        statement = (
            sa.update(tasks)
            .where(*of_round(charge_id), is_in_selection(connection, first))
            .values(
                attempts=tasks.c.attempts + 1,
                worker=worker,
                leased_until=now + self._seconds,
            )
        )
        return leased(connection, statement)

    def _harmless(self, charge_id: str, worker: str, rows: list[Row[Any]]) -> list[Row[Any]]:
        """Return leased tasks without those that killed too many workers, which are given back."""
        killers = [row.number for row in rows if row.attempts > self._max_attempts]
        if not killers:
            return rows
        is_stuck = rows[0].number in killers
        returns = [row.number for row in rows] if is_stuck else killers
        # Given back at once, and without the attempt: a lease that nobody works on only delays.
        statement = (
            sa.update(tasks)
            .where(
                *of_round(charge_id),
                tasks.c.number.in_(returns),
                tasks.c.worker == worker,
            )
            .values(
                attempts=tasks.c.attempts - 1,
                leased_until=0.0,
            )
        )
        with self._storage.quick() as connection:
            leased(connection, statement)
        if is_stuck:
            raise RoundStuckError(
                f"workers of charge {charge_id} died again and again at one task. Nothing was "
                "released and the charge stays; see what kills them (memory?), then run the "
                "study again: it goes on where it was."
            )
        return [row for row in rows if row.number not in killers]

    def _is_free(self, now: sa.ColumnElement[float]) -> sa.ColumnElement[bool]:
        """Return the condition that nobody holds a lease of a task."""
        # A lease that ends later than any could is of before the clock was set back.
        latest_end = now + 2.0 * self._seconds
        is_over = tasks.c.leased_until <= now
        is_too_late = tasks.c.leased_until > latest_end
        return sa.or_(is_over, is_too_late)

    def _now(self, connection: Connection) -> sa.ColumnElement[float]:
        """Return the time by the storage's clock, in Unix seconds, to compute with in a statement."""
        if self._clock is not None:
            return sa.literal(self._clock(), sa.Double)
        if connection.dialect.name == "postgresql":
            epoch = sa.func.extract("epoch", sa.func.statement_timestamp())
            return sa.cast(epoch, sa.Double)
        return sa.literal(time.time(), sa.Double)


def _no_round(charge_id: str) -> UnknownChargeError:
    """Return the error for a charge whose round was never opened."""
    return UnknownChargeError(f"charge {charge_id} has no round.")


def _place(charge_id: str, column: str, table: str = "privtune_tasks") -> Place:
    """Return the place of a round's column for an error, without a task's number, which is sealed."""
    budget, charge = Ledger.parse(charge_id)
    key = show_key({"budget": budget, "charge": charge})
    return Place(table, column, key)


def _key(charge_id: str) -> Conditions:
    """Return the SQL conditions for the row of a charge's round."""
    budget, charge = Ledger.parse(charge_id)
    return is_of_round(rounds, budget, charge)


def _from_row(charge_id: str, row: Row[Any]) -> OpenRound:
    """Return the round in a row of the table of rounds."""
    secret = bytes.fromhex(row.secret)
    return OpenRound(charge_id, row.tasks, secret)


def find_round(connection: Connection, charge_id: str) -> OpenRound | None:
    """Return the round of a charge, if it was opened."""
    query = sa.select(rounds).where(*_key(charge_id))
    row = connection.execute(query).one_or_none()
    return None if row is None else _from_row(charge_id, row)


def of_round(charge_id: str) -> Conditions:
    """Return the SQL conditions for the tasks of a charge's round."""
    budget, charge = Ledger.parse(charge_id)
    return is_of_round(tasks, budget, charge)


def _open(charge_id: str) -> Conditions:
    """Return the SQL conditions for the tasks of a charge's round that have no result."""
    return *of_round(charge_id), tasks.c.done == 0


def _lock_in_order(name: str, *conditions: sa.ColumnElement[bool]) -> sa.CTE:
    """Return a named subquery that locks tasks in order and yields their numbers.

    Everybody locks tasks by their numbers in order, or two could wait for each other.
    """
    return (
        sa.select(tasks.c.number)
        .where(*conditions)
        .order_by(tasks.c.number)
        .with_for_update()
        .cte(name)
    )


def insert_round(
    connection: Connection,
    charge_id: str,
    count: int,
    secret: bytes | None,
) -> OpenRound:
    """Insert a round and its tasks.

    Args:
        connection: One in a writing transaction.
        charge_id: The charge's id.
        count: The number of tasks.
        secret: What the seeds derive from; None to draw it from the system's entropy.
    """
    budget, charge = Ledger.parse(charge_id)
    if secret is None:
        secret = secrets.token_bytes(32)
    row = {
        "budget": budget,
        "charge": charge,
        "tasks": count,
        "secret": secret.hex(),
    }
    connection.execute(sa.insert(rounds).values(row))
    open_tasks(connection, charge_id, range(count))
    return OpenRound(charge_id, count, secret)


def open_tasks(connection: Connection, charge_id: str, numbers: Sequence[int]) -> None:
    """Insert tasks that a round lacks, and open finished ones again, as their results were lost.

    Args:
        connection: One in a writing transaction, which holds the lock of the round's row.
        charge_id: The charge's id.
        numbers: The tasks; those that do not exist yet are inserted.
    """
    budget, charge = Ledger.parse(charge_id)
    query = sa.select(tasks.c.number).where(*of_round(charge_id))
    existing = set(connection.scalars(query))
    key = {"budget": budget, "charge": charge, "worker": ""}
    fresh = {"attempts": 0, "leased_until": 0.0, "done": 0}
    rows = []
    for number in numbers:
        if number not in existing:
            rows.append({**key, **fresh, "number": number})
    if rows:
        connection.execute(sa.insert(tasks), rows)
    reopened = existing.intersection(numbers)
    if reopened:
        reopening = (
            sa.update(tasks)
            .where(
                *of_round(charge_id),
                tasks.c.number.in_(reopened),
                tasks.c.done == 1,
            )
            .values(**fresh, score=None, result=None)
        )
        connection.execute(reopening)
    count = len(existing.union(numbers))
    counting = sa.update(rounds).where(*_key(charge_id)).values(tasks=count)
    connection.execute(counting)


# Run for every task, built once.
_FINISH = (
    sa.update(tasks)
    .where(
        tasks.c.budget == sa.bindparam("of_budget"),
        tasks.c.charge == sa.bindparam("of_charge"),
        tasks.c.number == sa.bindparam("of_number"),
        tasks.c.done == 0,
    )
    .values(
        done=1,
        score=sa.bindparam("score"),
        result=sa.bindparam("result"),
    )
)


def finish_task(
    connection: Connection,
    charge_id: str,
    number: int,
    score: float,
    result: Document,
) -> bool:
    """Store a task's result unless it has one, and return whether the result was stored.

    Args:
        connection: One in a writing transaction.
        charge_id: The charge's id.
        number: The task.
        score: Its score; what is no number counts as −∞.
        result: What else came out, ready for JSON.
    """
    # −∞ has no portable literal in a column: it is stored as NULL.
    is_worst = math.isnan(score) or score == -math.inf
    finite_score = None if is_worst else score
    budget, charge = Ledger.parse(charge_id)
    values = {
        "of_budget": budget,
        "of_charge": charge,
        "of_number": number,
        "score": finite_score,
        "result": canonical(result),
    }
    if connection.dialect.name != "postgresql":
        return connection.execute(_FINISH, values).rowcount == 1
    # The row is locked from here on: a worker that is cut off now loses its session, not the round.
    limit = sa.func.set_config("idle_in_transaction_session_timeout", f"{_IDLE}s", True)
    statement = _FINISH.returning(tasks.c.number, limit)
    return connection.execute(statement, values).first() is not None


def close_after(connection: Connection, charge_id: str, number: int, result: str) -> None:
    """Store the same result for every open task with a higher number than the given one.

    Args:
        connection: One in a writing transaction.
        charge_id: The charge's id.
        number: The task that has ended the round.
        result: The text of JSON that the others get.
    """
    is_after = tasks.c.number > number
    after = _lock_in_order("after", *_open(charge_id), is_after)
    statement = (
        sa.update(tasks)
        .where(*of_round(charge_id), is_in_selection(connection, after))
        .values(done=1, score=None, result=result)
    )
    connection.execute(statement)


def _count_open(connection: Connection, charge_id: str) -> int:
    """Return how many tasks of a round have no result."""
    count = sa.func.count()
    query = sa.select(count).select_from(tasks).where(*_open(charge_id))
    return int(connection.execute(query).scalar_one())


def is_in_selection(connection: Connection, selection: sa.CTE) -> sa.ColumnElement[bool]:
    """Return the SQL condition that a task's number is among those that a query selects."""
    numbers = sa.select(selection.c.number)
    if connection.dialect.name != "postgresql":
        return tasks.c.number.in_(numbers)
    # PostgreSQL takes a round that was just opened for a short one, and would read all of it.
    first = sa.select(sa.func.min(selection.c.number)).scalar_subquery()
    last = sa.select(sa.func.max(selection.c.number)).scalar_subquery()
    array = sa.func.array(numbers.scalar_subquery())
    return sa.and_(
        tasks.c.number == sa.any_(array),
        tasks.c.number >= first,
        tasks.c.number <= last,
    )


def _share(
    charge_id: str,
    worker: str,
    free: sa.ColumnElement[bool],
    *,
    most: int,
    workers: int,
) -> sa.ScalarSelect[Any]:
    """Return a subquery of how many of the free tasks a worker may lease.

    Args:
        charge_id: The charge's id.
        worker: The worker, who does not count as another one.
        free: The condition that nobody holds a lease of a task.
        most: How many tasks it asks for.
        workers: How many workers share the round at least; those who hold leases may be more.
    """
    window = (
        sa.select(free.label("free"), tasks.c.worker)
        .where(*_open(charge_id))
        .order_by(tasks.c.number)
        .limit(_WINDOW)
        .subquery()
    )
    is_leased = sa.not_(window.c.free)
    is_others = sa.and_(is_leased, window.c.worker != worker)
    holder = sa.case((is_others, window.c.worker))
    holders = sa.func.count(sa.distinct(holder)) + 1
    sharers = sa.case((holders > workers, holders), else_=workers)
    open_count = sa.func.count()
    free_count = sa.func.count().filter(window.c.free)
    # Rounded up, or tasks would be left over.
    part = (free_count + sharers - 1) // sharers
    is_long = sa.or_(open_count >= _WINDOW, part > most)
    share = sa.case(
        (is_long, most),
        (part < 1, 1),
        else_=part,
    )
    return sa.select(share).scalar_subquery()


def leased(connection: Connection, statement: sa.Update) -> list[Row[Any]]:
    """Run an update that leases tasks, and return their rows by number."""
    columns: list[Any] = [
        tasks.c.number,
        tasks.c.attempts,
        tasks.c.leased_until,
    ]
    if connection.dialect.name == "postgresql":
        # A lease that a crash undoes leaves its task free: the next trains on the same seed. What
        # counts (charges, results) waits for the disk, and with it all that was written before.
        unwaited = sa.func.set_config("synchronous_commit", "off", True)
        columns.append(unwaited.label("unwaited"))
    rows = connection.execute(statement.returning(*columns)).all()
    return sorted(rows, key=lambda row: row.number)
