"""Rounds of a private selection: one charge, K task rows, and at most one result for each.

The contract, for whoever runs trials (inline, in processes, on a cluster):

- A round is opened in one transaction: the charge is started and its K rows are inserted. K was
  drawn in secret before. Opening it again returns what is there: K is never drawn twice.
- A task's seed derives from the round's secret and the task's number: everything random in its
  trial comes from it. Whoever takes a task over works with the same seed, so that the same output
  comes out. The secret is forgotten when the charge is settled.
- A worker leases a row for a while and renews the lease while it works. A lease that expired is
  given to the next who asks. Leases keep two workers from doing the same work; that
  nothing is counted twice does not hang on them, nor on any clock.
- The first result of a row is accepted, every later one is dropped: one output per trial is ever
  seen.
- A result may end its round: rows after it that have none are closed unrun, in the same transaction.
  Rows before it stay open, so which row is the first to end the round hangs on the seeds alone.
- A worker's death is a retry, and charges nothing. Weights that are not finite are a result, with
  score −∞: their trial is not dropped. Whatever else fails is no result: it stops the round for the
  curator, and the round goes on with the same seeds when it is opened again. So does a task that
  has killed ``max_attempts`` workers: a score for it would tell that it did, which may depend on
  the data.
- Results can be read once all K are there, not before.

Everything here is sealed: K, seeds, times, scores and results stay inside the trust boundary.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from privtune.errors import InvalidInputError
from privtune.ledger.chain import Kind, canonical
from privtune.ledger.errors import ChargeStateError, LedgerError, UnknownChargeError
from privtune.ledger.ledger import Ledger
from privtune.ledger.schema import rounds, tasks
from privtune.ledger.storage import Storage
from privtune.ledger.values import ChargeState
from privtune.training.mechanism.streams import Streams


class RoundNotFinishedError(LedgerError):
    """Not every task of the round has a result yet, so none may be looked at."""


class RoundStuckError(LedgerError):
    """A task has killed too many workers: the curator must see why before it goes on."""


@dataclass(frozen=True)
class OpenRound:
    """An opened round. Sealed.

    Attributes:
        charge_id: The charge that pays for it.
        tasks: K, the number of trials. A secret.
        secret: What the seeds derive from. A secret.

    Example:
        >>> opened = OpenRound("clinic-1", 20, bytes(32))
        >>> opened, opened.seed(3) == opened.seed(3), len(opened.seed(3))  # no secret is shown
        (OpenRound(charge_id='clinic-1'), True, 32)
        >>> opened.check_open()  # its secret is there
    """

    charge_id: str
    tasks: int = field(repr=False)
    secret: bytes = field(repr=False)

    def seed(self, number: int) -> bytes:
        """Return the 32 bytes that a task's random streams derive from; the same at every attempt.

        Args:
            number: The task, from 0.

        Raises:
            ChargeStateError: The charge is settled, and the secret forgotten: nobody trains any more.
        """
        self.check_open()
        return Streams(self.secret).key("trial", number)

    def check_open(self) -> None:
        """Refuse a round whose secret is forgotten: seeds of nothing would be known to everybody.

        Raises:
            ChargeStateError: If it is.
        """
        if not self.secret:
            raise ChargeStateError(f"charge {self.charge_id} is settled: its round is over.")


@dataclass(frozen=True)
class Lease:
    """The right to work on a task for a while. Sealed.

    Attributes:
        charge_id: The round's charge.
        number: The task, from 0 on.
        worker: Who holds it.
        attempt: 1 at first, more after a takeover.
        expires: When it ends, in Unix time of the storage's clock.
        seed: The task's seed, the same at every attempt.

    Example:
        >>> Lease("clinic-1", 3, "worker-a", attempt=1, expires=1.8e9, seed=bytes(32)).attempt
        1
    """

    charge_id: str
    number: int
    worker: str
    attempt: int
    expires: float
    seed: bytes = field(repr=False)


@dataclass(frozen=True)
class Finished:
    """What a worker hands in of a task. Sealed.

    Attributes:
        lease: What was worked on.
        score: The score; NaN counts as −∞.
        result: JSON-ready.
        last: Whether it ends the round: later tasks that have no result are closed unrun. It must
            be a function of the result alone.
        keep: Stores what is too large for the row, in the same transaction; not called for a result
            that came second.

    Example:
        >>> lease = Lease("clinic-1", 3, "worker-a", attempt=1, expires=1.8e9, seed=bytes(32))
        >>> Finished(lease, 0.9, {}).last
        False
    """

    lease: Lease
    score: float
    result: Mapping[str, Any]
    last: bool = False
    keep: Callable[[Connection], None] | None = None


@dataclass(frozen=True)
class TaskResult:
    """The one result of a task. Sealed.

    Attributes:
        number: The task.
        score: Its score; −∞ for weights that are not finite.
        result: What the worker stored, JSON-ready.

    Example:
        >>> max([TaskResult(0, 0.91, {}), TaskResult(1, float("-inf"), {})], key=lambda r: r.score).number
        0
    """

    number: int
    score: float
    result: Mapping[str, Any]


SKIPPED = "skipped"
"""Key of the result of a task that was not run: an earlier one had ended the round."""

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
_IDLE = 120  # seconds for a model to become a file, in the transaction that accepts its result


def _key(charge_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    budget, charge = Ledger.parse(charge_id)
    return rounds.c.budget == budget, rounds.c.charge == charge


def _read(charge_id: str, row: Row[Any] | None) -> OpenRound | None:
    return None if row is None else OpenRound(charge_id, row.tasks, bytes.fromhex(row.secret))


def find_round(connection: Connection, charge_id: str) -> OpenRound | None:
    """Return the round of a charge, if it was opened."""
    query = sa.select(rounds).where(*_key(charge_id))
    return _read(charge_id, connection.execute(query).one_or_none())


def lock_round(storage: Storage, connection: Connection, charge_id: str) -> OpenRound:
    """Lock the row of a round that is not over.

    Raises:
        UnknownChargeError: The charge has no round.
        ChargeStateError: The charge is settled.
    """
    row = storage.lock(connection, sa.select(rounds).where(*_key(charge_id)), {})
    if (opened := _read(charge_id, row)) is None:
        raise UnknownChargeError(f"charge {charge_id} has no round.")
    opened.check_open()
    return opened


def of_round(charge_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    """What the tasks of a round have in common."""
    budget, charge = Ledger.parse(charge_id)
    return tasks.c.budget == budget, tasks.c.charge == charge


def of_task(charge_id: str, number: int) -> tuple[sa.ColumnElement[bool], ...]:
    """What only this task of a round has."""
    return *of_round(charge_id), tasks.c.number == number


def forget_secret(connection: Connection, charge_id: str) -> None:
    """Forget what a round's seeds derive from: with it, noise could be drawn again and subtracted."""
    connection.execute(sa.update(rounds).where(*_key(charge_id)).values(secret=""))


def insert_round(
    connection: Connection, charge_id: str, count: int, secret: bytes | None
) -> OpenRound:
    """Insert a round and its tasks."""
    budget, charge = Ledger.parse(charge_id)
    opened = OpenRound(charge_id, count, secrets.token_bytes(32) if secret is None else secret)
    connection.execute(
        sa.insert(rounds).values(
            budget=budget, charge=charge, tasks=count, secret=opened.secret.hex()
        )
    )
    _insert_tasks(connection, charge_id, range(count))
    return opened


def _insert_tasks(connection: Connection, charge_id: str, numbers: Iterable[int]) -> None:
    budget, charge = Ledger.parse(charge_id)
    fresh = {"attempts": 0, "worker": "", "leased_until": 0.0, "done": 0}
    rows = [{"budget": budget, "charge": charge, "number": n, **fresh} for n in numbers]
    if rows:
        connection.execute(sa.insert(tasks), rows)


def open_tasks(connection: Connection, charge_id: str, numbers: Sequence[int]) -> None:
    """Open tasks, anew if their results were lost; those that have none stay with who works on them."""
    known = set(connection.scalars(sa.select(tasks.c.number).where(*of_round(charge_id))))
    _insert_tasks(connection, charge_id, [number for number in numbers if number not in known])
    for number in known.intersection(numbers):
        connection.execute(
            sa.update(tasks)
            .where(*of_task(charge_id, number), tasks.c.done == 1)
            .values(done=0, score=None, result=None, attempts=0, leased_until=0.0)
        )
    count = len(known.union(numbers))
    connection.execute(sa.update(rounds).where(*_key(charge_id)).values(tasks=count))


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
    # From here on the task's row is locked. A worker that is stopped or cut off now loses its session,
    # not the round; said in this statement's own answer, it costs no question.
    limit = sa.func.set_config("idle_in_transaction_session_timeout", f"{_IDLE}s", True)
    statement = _FINISH.returning(tasks.c.number, limit)
    return connection.execute(statement, values).first() is not None


def count_open(connection: Connection, charge_id: str) -> int:
    """Return how many tasks have no result yet."""
    query = sa.select(sa.func.count()).select_from(tasks)
    return int(
        connection.execute(query.where(*of_round(charge_id), tasks.c.done == 0)).scalar_one()
    )


def among_found(connection: Connection, found: sa.CTE) -> sa.ColumnElement[bool]:
    """What tasks that were found have, so that they are looked up by their key.

    PostgreSQL takes a round that was just opened for a short one, and would read all of it.
    """
    numbers = sa.select(found.c.number)
    if connection.dialect.name != "postgresql":
        return tasks.c.number.in_(numbers)
    first, last = (f(found.c.number) for f in (sa.func.min, sa.func.max))
    return sa.and_(
        tasks.c.number == sa.any_(sa.func.array(numbers.scalar_subquery())),
        # It takes the line above for a filter of the whole round, and these for where to look.
        tasks.c.number >= sa.select(first).scalar_subquery(),
        tasks.c.number <= sa.select(last).scalar_subquery(),
    )


def close_after(connection: Connection, charge_id: str, number: int, result: str) -> None:
    """Give every open task after one a result, in the order in which others lock them."""
    after = (
        sa.select(tasks.c.number)
        .where(*of_round(charge_id), tasks.c.number > number, tasks.c.done == 0)
        .order_by(tasks.c.number)
        .with_for_update()
        .cte("after")
    )
    connection.execute(
        sa.update(tasks)
        .where(*of_round(charge_id), among_found(connection, after))
        .values(done=1, score=None, result=result)
    )


_STEP = 64  # how many tasks a lease may look at in vain before it is found out where the open ones begin
_WINDOW = 256
"""Open tasks that are looked at to share them; where there are as many, there are enough for all."""


class Leases:
    """The leases of the tasks in a storage.

    Args:
        storage: The ledger's storage.
        seconds: How long a lease lasts; the same for all who work on a round.
        max_attempts: How many workers a task may kill before its round is stuck.
        clock: Unix time, for tests; else the storage's clock.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        seconds: float,
        max_attempts: int,
        clock: Callable[[], float] | None,
    ) -> None:
        self._storage = storage
        self._seconds = seconds
        self._max_attempts = max_attempts
        self._clock = clock
        self._seen: dict[tuple[str, int, float], float] = {}  # since when a lease stands unrenewed
        self._first: dict[str, int] = {}  # a task before which none is open, unless opened anew

    def take(self, opened: OpenRound, worker: str, *, most: int, workers: int) -> tuple[Lease, ...]:
        """Lease the first tasks that nobody works on: see ``Rounds.lease_some``."""
        rows = self._free(opened.charge_id, worker, most=most, workers=workers)
        return _handed(opened, worker, self._harmless(opened.charge_id, worker, rows))

    def regain(self, opened: OpenRound, worker: str) -> tuple[Lease, ...]:
        """Return what stands under a worker's name, prolonged: see ``Rounds.lease_some``."""
        charge_id = opened.charge_id
        with self._storage.quick() as connection:
            mine = *of_round(charge_id), tasks.c.done == 0, tasks.c.worker == worker
            until = self._now(connection) + self._seconds
            rows = leased(connection, sa.update(tasks).where(*mine).values(leased_until=until))
        return _handed(opened, worker, rows)

    def _free(self, charge_id: str, worker: str, *, most: int, workers: int) -> list[Row[Any]]:
        since = self._first.get(charge_id, 0)
        with self._storage.quick() as connection:
            rows = self._take_first(
                connection, charge_id, worker, since=since, most=most, workers=workers
            )
        if not rows:
            self._first.pop(charge_id, None)  # whatever was opened anew is found next time
            rows = self._take_over(charge_id, worker, most)
        elif rows[0].number >= since + _STEP:
            query = sa.select(sa.func.min(tasks.c.number)).where(*_open(charge_id, since))
            with self._storage.read() as connection:
                first = connection.execute(query).scalar()
            self._first[charge_id] = since if first is None else int(first)
        return rows

    def renew(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Prolong what a worker still holds: see ``Rounds.renew_some``."""
        by_number = {lease.number: lease for lease in leases}
        charge_id, worker = leases[0].charge_id, leases[0].worker
        with self._storage.quick() as connection:
            mine = (  # in the order in which others lock them
                sa.select(tasks.c.number)
                .where(*_open(charge_id), tasks.c.number.in_(sorted(by_number)))
                .where(tasks.c.worker == worker)
                .order_by(tasks.c.number)
                .with_for_update()
                .cte("mine")
            )
            until = self._now(connection) + self._seconds
            statement = (
                sa.update(tasks)
                .where(*of_round(charge_id), among_found(connection, mine))
                .values(leased_until=until)
            )
            rows = leased(connection, statement)
        return tuple(
            replace(by_number[row.number], expires=row.leased_until)
            for row in rows
            if row.attempts == by_number[row.number].attempt
        )

    def forget_deaths(self, connection: Connection, charge_id: str) -> None:
        """Count the deaths at tasks that nobody works on anew."""
        free = tasks.c.leased_until <= self._now(connection)
        statement = sa.update(tasks).where(*_open(charge_id), free)
        connection.execute(statement.values(attempts=0))

    def _take_first(
        self,
        connection: Connection,
        charge_id: str,
        worker: str,
        *,
        since: int,
        most: int,
        workers: int,
    ) -> list[Row[Any]]:
        """Lease the first open tasks that nobody works on, in one statement; few rows are looked at.

        It locks no more than it takes, and waits for nobody: tasks that another is about to lease are
        passed over.
        """
        now = self._now(connection)
        limit: Any = most
        if most > 1:
            limit = _share(charge_id, worker, now, since=since, most=most, workers=workers)
        free = (
            sa.select(tasks.c.number)
            .where(*_open(charge_id, since), tasks.c.leased_until <= now)
            .order_by(tasks.c.number)
            .limit(limit)
            .with_for_update(skip_locked=True)
            .cte("free")
        )
        chosen = *of_round(charge_id), among_found(connection, free)
        return leased(connection, self._to(worker, now).where(*chosen))

    def _take_over(self, charge_id: str, worker: str, most: int) -> list[Row[Any]]:
        """Lease tasks whose leases have stood for their length without being renewed.

        However the storage's clock was set, whoever waits measures that by a clock of its own.
        """
        asked = sa.select(tasks.c.number, tasks.c.attempts, tasks.c.leased_until)
        query = asked.where(*_open(charge_id)).order_by(tasks.c.number)
        with self._storage.read() as connection:
            rows = connection.execute(query).all()
        now = time.monotonic()
        keys = [(charge_id, row.number, row.leased_until) for row in rows]
        self._seen = {held: self._seen.get(held, now) for held in keys}
        stood = zip(rows, self._seen.values(), strict=True)
        overdue = [row for row, seen in stood if now - seen > self._seconds]
        taken: list[Row[Any]] = []
        for row in overdue[:most]:
            with self._storage.quick() as connection:
                same = tasks.c.done == 0, tasks.c.leased_until == row.leased_until
                statement = self._to(worker, self._now(connection))
                taken += leased(connection, statement.where(*of_task(charge_id, row.number), *same))
        return taken

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

    def any_held(self, connection: Connection, charge_id: str) -> bool:
        """Return whether a worker holds a task of a round."""
        held = tasks.c.done == 0, tasks.c.leased_until > self._now(connection)
        query = sa.select(tasks.c.number).where(*of_round(charge_id), *held)
        return connection.execute(query.limit(1)).first() is not None

    def _to(self, worker: str, now: Any) -> sa.Update:
        """Give tasks to a worker."""
        until = now + self._seconds
        return sa.update(tasks).values(
            attempts=tasks.c.attempts + 1, worker=worker, leased_until=until
        )

    def _now(self, connection: Connection) -> Any:
        """The time by the storage's clock, to compute with in a statement."""
        if self._clock is not None:
            return sa.literal(self._clock(), sa.Double)
        if connection.dialect.name == "postgresql":
            epoch = sa.func.extract("epoch", sa.func.statement_timestamp())
            return sa.cast(epoch, sa.Double)
        return sa.literal(time.time(), sa.Double)


def _handed(opened: OpenRound, worker: str, rows: Sequence[Row[Any]]) -> tuple[Lease, ...]:
    """Return the leases of a worker on the tasks of some rows."""
    return tuple(
        Lease(
            opened.charge_id,
            row.number,
            worker,
            row.attempts,
            row.leased_until,
            opened.seed(row.number),
        )
        for row in rows
    )


def _open(charge_id: str, since: int = 0) -> tuple[sa.ColumnElement[bool], ...]:
    """What the tasks of a round have that have no result yet, from one of them on."""
    found = *of_round(charge_id), tasks.c.done == 0
    return (*found, tasks.c.number >= since) if since else found


def _share(
    charge_id: str, worker: str, now: Any, *, since: int, most: int, workers: int
) -> sa.ScalarSelect[Any]:
    """How many tasks a worker gets of those that are free; where many are open, all that it asks."""
    seen = (
        sa.select(tasks.c.leased_until, tasks.c.worker)
        .where(*_open(charge_id, since))
        .order_by(tasks.c.number)
        .limit(_WINDOW)
        .subquery()
    )
    is_free = seen.c.leased_until <= now
    held = sa.case((sa.and_(sa.not_(is_free), seen.c.worker != worker), seen.c.worker))
    others = sa.func.count(sa.distinct(held)) + 1
    sharing = sa.case((others > workers, others), else_=workers)
    part = (sa.func.count().filter(is_free) + sharing - 1) // sharing
    return sa.select(
        sa.case(
            (sa.func.count() >= _WINDOW, most),
            (part > most, most),
            (part < 1, 1),
            else_=part,
        )
    ).scalar_subquery()


def leased(connection: Connection, statement: sa.Update) -> list[Row[Any]]:
    """Run a statement that leases tasks, and return these.

    PostgreSQL need not have written it when it returns. A lease that a crash undoes leaves its task
    free, and whoever leases it next trains on the same seed; whichever of the two hands in first
    stays, by the row's ``done`` alone. Charges, results, releases and settlements are transactions
    of their own, which wait for the disk, and with them everything before: PostgreSQL's log is
    written in order.
    """
    found: list[Any] = [tasks.c.number, tasks.c.attempts, tasks.c.leased_until]
    if connection.dialect.name == "postgresql":
        found.append(sa.func.set_config("synchronous_commit", "off", True).label("unwaited"))
    rows = connection.execute(statement.returning(*found)).all()
    return sorted(rows, key=lambda row: row.number)


class Rounds:
    """The rounds in a ledger's storage.

    Args:
        ledger: The ledger.
        lease_seconds: How long a lease lasts; the same for all who work on a round.
        max_attempts: How many workers a task may kill before its round is stuck.
        clock: Unix time, for tests; else the storage's clock.

    Example:
        >>> from privtune.accounting import Gaussian, Geometric, PrivateSelection
        >>> from privtune.ledger import Budget, ChargeRequest, Finished
        >>> ledger = Ledger()
        >>> budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        >>> event = PrivateSelection(Gaussian(10.0), Geometric(5.0))
        >>> rounds = Rounds(ledger, lease_seconds=60.0)
        >>> [charge] = ledger.reserve("clinic", [ChargeRequest(event)])
        >>> opened = rounds.open(charge.id, count=2)  # K, drawn in secret
        >>> rounds.open(opened.charge_id, count=7) == rounds.find(opened.charge_id) == opened
        True
        >>> [share] = rounds.lease_some(opened.charge_id, "worker-a", most=4, workers=2)
        >>> [share] = rounds.renew_some([share])  # a sign of life, for all that it holds
        >>> rounds.at_work(opened.charge_id)
        True
        >>> rounds.complete_some([Finished(share, 0.8, {})])
        frozenset({0})
        >>> while leases := rounds.lease_some(opened.charge_id, "worker-b", most=1):
        ...     [lease] = rounds.renew_some(leases)
        ...     first = rounds.complete_some([Finished(lease, score=0.9, result={})])
        >>> rounds.open_count(opened.charge_id), [r.score for r in rounds.results(opened.charge_id)]
        (0, [0.8, 0.9])
        >>> rounds.reopen(opened.charge_id, 1, lose=lambda connection: None)  # its store lost it
        >>> rounds.open_charges()
        frozenset({'clinic-1'})
        >>> ledger.close()
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        lease_seconds: float = 300.0,
        max_attempts: int = 5,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._ledger = ledger
        self._leases = Leases(
            ledger.log.storage, seconds=lease_seconds, max_attempts=max_attempts, clock=clock
        )
        self._rounds: dict[str, OpenRound] = {}

    def open(self, charge_id: str, *, count: int, secret: bytes | None = None) -> OpenRound:
        """Start a reserved charge and insert its task rows, in one transaction.

        Args:
            charge_id: A reserved charge, or one whose round is open.
            count: K; ignored, and that is the point, if the round is open already.
            secret: 32 bytes that the seeds derive from, ignored likewise; None takes the operating
                system's entropy.

        Returns:
            The round, as it was opened first. Tasks that nobody works on count no deaths any more:
            who opens a round again has seen what happened.

        Raises:
            ChargeStateError: The charge is voided, or was started or settled without a round.
        """
        _check_count(count)
        done: list[OpenRound] = []

        def insert(connection: Connection) -> bool:
            there = find_round(connection, charge_id)
            if there is not None:
                self._leases.forget_deaths(connection, charge_id)
            done.append(there or insert_round(connection, charge_id, count, secret))
            return there is None

        self._ledger.move(charge_id, Kind.STARTED, work=insert)
        return done[-1]

    def propose(self, charge_id: str, numbers: Sequence[int], *, secret: bytes) -> None:
        """Open tasks of a charge whose trials are all paid for and shown, a batch after the other.

        Tasks that are there stay as they are; those whose result was lost where it was stored are
        open again.

        Args:
            charge_id: A started charge.
            numbers: The tasks, from 0 on; none has a result any more.
            secret: 32 bytes that the seeds derive from; the same in every batch.

        Raises:
            ChargeStateError: The charge is not started, or is settled.

        Example:
            >>> from privtune.accounting import Gaussian
            >>> from privtune.ledger import Budget, ChargeRequest
            >>> with Ledger() as ledger:
            ...     budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
            ...     [charge] = ledger.reserve("clinic", [ChargeRequest(Gaussian(10.0))])
            ...     rounds = Rounds(ledger)
            ...     rounds.propose(ledger.start(charge.id).id, [0, 1], secret=bytes(32))
            ...     rounds.open_count(charge.id)
            2
        """
        if (state := self._ledger.charge(charge_id).state) is not ChargeState.STARTED:
            raise ChargeStateError(f"charge {charge_id} is {state}: only a started one has tasks.")
        with self._ledger.log.storage.write() as connection:
            if find_round(connection, charge_id) is None:
                insert_round(connection, charge_id, 0, secret)
            self._lock(connection, charge_id)
            open_tasks(connection, charge_id, numbers)

    def find(self, charge_id: str) -> OpenRound | None:
        """Return the round of a charge, None if it was not opened.

        Args:
            charge_id: The charge's id, as ``"clinic-1"``.
        """
        with self._ledger.log.storage.read() as connection:
            return find_round(connection, charge_id)

    def lease_some(
        self, charge_id: str, worker: str, *, most: int, workers: int = 1, again: bool = False
    ) -> tuple[Lease, ...]:
        """Lease the first tasks that nobody works on, in one transaction.

        Args:
            charge_id: The round's charge.
            worker: Who asks: any name that no other worker has.
            most: How many tasks at most.
            workers: How many share the round at least. Whoever comes first must not lease all
                tasks: it gets its share of those that are free, among these or those at work.
            again: Whether it asked before and got no answer: it gets what it was leased then, if
                anything, and nobody is taken to have died of that.

        Returns:
            The leases; none when every open task is leased, or none is left.

        Raises:
            RoundStuckError: If the first of the tasks has killed too many workers.
        """
        opened = self._opened(charge_id)
        lost = self._leases.regain(opened, worker) if again else ()
        return lost or self._leases.take(opened, worker, most=most, workers=workers)

    def renew_some(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Prolong a worker's leases of one round in one statement.

        Args:
            leases: What it works on, at least one.

        Returns:
            The leases with their new end, but for tasks that others have taken over or finished.
        """
        return self._leases.renew(leases)

    def complete_some(self, results: Sequence[Finished]) -> frozenset[int]:
        """Hand in results that were there at the same moment, in one transaction: all of them or none.

        Args:
            results: Of different tasks of one round.

        Returns:
            The tasks whose result was the first.
        """
        accepted: set[int] = set()
        with self._ledger.log.storage.write() as connection:
            # The tasks' own rows are locks enough, taken in the order in which others take them:
            # results of others need not wait for these.
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
        with self._ledger.log.storage.read() as connection:
            return frozenset(f"{row.budget}-{row.charge}" for row in connection.execute(query))

    def reopen(self, charge_id: str, number: int, lose: Callable[[Connection], None]) -> None:
        """Open a task again whose result was lost where it was stored: the same seed trains it anew.

        What was lost is not what came out: what stores lose does not hang on it.

        Args:
            charge_id: The round's charge, which pays for the one output of the seed.
            number: The task.
            lose: Forgets what is left of the result, in the same transaction.

        Raises:
            ChargeStateError: The charge is settled.
        """
        with self._ledger.log.storage.write() as connection:
            self._lock(connection, charge_id)
            lose(connection)
            open_tasks(connection, charge_id, [number])

    def open_count(self, charge_id: str) -> int:
        """Return how many tasks have no result yet. Sealed, like everything here.

        Args:
            charge_id: The round's charge.
        """
        with self._ledger.log.storage.read() as connection:
            return count_open(connection, charge_id)

    def at_work(self, charge_id: str) -> bool:
        """Return whether a worker holds a task of a round at this moment.

        Args:
            charge_id: The round's charge.
        """
        with self._ledger.log.storage.read() as connection:
            return self._leases.any_held(connection, charge_id)

    def results(self, charge_id: str) -> tuple[TaskResult, ...]:
        """Return every task's result, once all are there.

        Args:
            charge_id: The round's charge.

        Raises:
            RoundNotFinishedError: Some are missing: there is no early look.
        """
        with self._ledger.log.storage.read() as connection:
            if find_round(connection, charge_id) is None:
                raise UnknownChargeError(f"charge {charge_id} has no round.")
            if count_open(connection, charge_id):
                raise RoundNotFinishedError(
                    f"the round of charge {charge_id} is not finished: "
                    "its results can be read when every task has one."
                )
            rows = connection.execute(
                sa.select(tasks).where(*of_round(charge_id)).order_by(tasks.c.number)
            ).all()
        return tuple(
            TaskResult(
                row.number, -math.inf if row.score is None else row.score, json.loads(row.result)
            )
            for row in rows
        )

    def _lock(self, connection: Connection, charge_id: str) -> OpenRound:
        return lock_round(self._ledger.log.storage, connection, charge_id)

    def _opened(self, charge_id: str) -> OpenRound:
        """Return a round; its secret never changes, so it is read once."""
        if charge_id not in self._rounds:
            if (opened := self.find(charge_id)) is None:
                raise UnknownChargeError(f"charge {charge_id} has no round.")
            self._rounds[charge_id] = opened
        return self._rounds[charge_id]


def _check_count(count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 1_000_000:
        raise InvalidInputError("count", "sealed", "must be a whole number from 0 to 1000000")
