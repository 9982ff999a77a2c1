"""Who works on which task of a round, and for how long.

Leases spare work that another does already. Nothing that is charged or released rests on them: the
first result of a task stays, whoever held its lease. They are measured by the database's clock; whatever
that does, nobody waits for one longer than its length, which a waiting worker measures by a clock of
its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from privtune.ledger.round_rows import among_found, of_round, of_task
from privtune.ledger.round_values import Lease, OpenRound, RoundStuckError
from privtune.ledger.schema import tasks
from privtune.ledger.storage import Storage

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
