"""Rounds of a private selection: one charge, K task rows, and at most one result for each.

The contract, for whoever runs trials (inline, in processes, on a cluster):

- A round is opened in one transaction: the charge is started and its K rows are inserted. K was
  drawn in secret before. Opening it again returns what is there: K is never drawn twice.
- A task's seed derives from the round's secret and the task's number: everything random in its
  trial comes from it. Whoever takes a task over works with the same seed, so that the same output
  comes out. The secret is forgotten when the charge is settled.
- A worker leases a row for a while and renews the lease while it works. A lease that expired is
  given to the next who asks. Leases (``leases.py``) keep two workers from doing the same work; that
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
from collections.abc import Callable, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.errors import InvalidInputError
from privtune.ledger.chain import Kind, canonical
from privtune.ledger.errors import ChargeStateError, UnknownChargeError
from privtune.ledger.leases import Leases
from privtune.ledger.ledger import Ledger
from privtune.ledger.round_rows import (
    close_after,
    count_open,
    find_round,
    finish_task,
    insert_round,
    lock_round,
    of_round,
    open_tasks,
)
from privtune.ledger.round_values import (
    SKIPPED,
    Finished,
    Lease,
    OpenRound,
    RoundNotFinishedError,
    TaskResult,
)
from privtune.ledger.schema import tasks
from privtune.ledger.values import ChargeState


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
