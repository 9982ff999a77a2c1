"""The workers' loop over the rows of a round: lease rows, train them, and hand in each result once."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from privtune.ledger import Ledger, LedgerBusyError, LedgerConnectionError
from privtune.ledger.rounds import Lease, Rounds, Submission

LEASE_SECONDS = 15.0
"""How long a row stays with a worker that has died. Living workers renew three times as often."""

PATIENCE = 600.0
"""Seconds for a database that is restarted to come back."""

_ATTEMPTS = 10
_FIRST_PAUSE = 0.1  # seconds, doubled each time that no row can be had
_LONGEST_PAUSE = 1.0
_SHORT = 1.0  # seconds: rows leased together that took less are leased twice as many at once
_MOST = 64  # rows that are leased at once at most: they are lost together

T = TypeVar("T")


@dataclass(frozen=True)
class RowResult(Submission):
    """The result of a row, with a function that deletes its files if another result came first.

    Attributes:
        drop: Deletes what was staged, of a result that came second; None where nothing was.
        more: Whether the next result is there already: both are handed in in one transaction.
    """

    drop: Callable[[], None] | None = None
    more: bool = False


def make_rounds(ledger: Ledger, *, lease_seconds: float = LEASE_SECONDS) -> Rounds:
    """Return the rounds of a ledger, with the length and number of leases that executors use."""
    return Rounds(ledger, lease_seconds=lease_seconds, max_attempts=_ATTEMPTS)


def patiently(call: Callable[[], T], *, patience: float | None = None) -> T:
    """Repeat a call while the database is busy or cannot be reached, and return the call's answer.

    For calls that may be made twice: whether the first one reached the database is unknown.

    Args:
        call: What to do with the database.
        patience: Seconds until an error is raised; `PATIENCE` unless given.

    Raises:
        LedgerBusyError: If another transaction held the database for all of that time.
        LedgerConnectionError: If the database could not be reached for all of that time.
    """
    if patience is None:
        patience = PATIENCE
    deadline = time.monotonic() + patience
    while True:
        try:
            return call()
        except (LedgerBusyError, LedgerConnectionError):
            if time.monotonic() > deadline:
                raise
        time.sleep(_LONGEST_PAUSE)


def work_through(
    rounds: Rounds,
    charge_id: str,
    run: Callable[[Sequence[Lease]], Iterable[RowResult]],
    *,
    stack: int,
    workers: int = 1,
    most: int | None = None,
    enough: float | None = None,
    lease_seconds: float = LEASE_SECONDS,
) -> int:
    """Lease rows and run them until none is open; wait for rows that others hold.

    Args:
        rounds: The table of rows.
        charge_id: The charge whose round it is.
        run: Trains some rows together, and returns a result of each.
        stack: How many rows are trained together at most.
        workers: How many others share the rows; so many are left for each.
        most: After how many rows to stop; None for no limit.
        enough: The score that ends the round; None if all of its rows run.
        lease_seconds: How long a row stays with a worker that has died.

    Returns:
        How many rows were run here.
    """
    identifier = uuid.uuid4().hex[:8]
    worker = f"{os.getpid()}-{identifier}"
    count = 0
    pause = _FIRST_PAUSE
    bundle = stack
    while True:
        room = bundle if most is None else min(bundle, most - count)
        if room <= 0:
            return count
        lease_rows = _lease_once(rounds, charge_id, worker, most=room, workers=workers)
        leases = patiently(lease_rows)
        if not leases:
            if patiently(partial(rounds.open_count, charge_id)) == 0:
                return count
            # Asking takes the table's lock, which those that work need.
            pause = min(2 * pause, _LONGEST_PAUSE)
            time.sleep(pause)
            continue
        pause = _FIRST_PAUSE
        begin = time.monotonic()
        held_leases = {lease.number: lease for lease in leases}
        with _renew_leases(rounds, held_leases, lease_seconds):
            for results in _run_in_stacks(run, leases, stack):
                _hand_in(rounds, results, enough)
                for result in results:
                    held_leases.pop(result.lease.number, None)
                count += len(results)
        seconds = time.monotonic() - begin
        if enough is None and seconds < _SHORT:
            # Short rows are leased many at once.
            bundle = min(2 * bundle, max(stack, _MOST))
        else:
            # One that may end its round makes those after it useless.
            bundle = stack


def _lease_once(
    rounds: Rounds, charge_id: str, worker: str, **terms: int
) -> Callable[[], tuple[Lease, ...]]:
    """Return a function that leases rows; a retry returns the same rows if the first answer was lost.

    Else a worker would hold rows that it has never heard of, until their leases ran out.
    """
    is_again = False

    def lease() -> tuple[Lease, ...]:
        nonlocal is_again
        again = is_again
        is_again = True
        return rounds.lease_some(charge_id, worker, again=again, **terms)

    return lease


def _run_in_stacks(
    run: Callable[[Sequence[Lease]], Iterable[RowResult]], leases: Sequence[Lease], stack: int
) -> Iterator[list[RowResult]]:
    """Run leased rows in stacks, and yield together the results that are ready at the same moment."""
    results: list[RowResult] = []
    for first in range(0, len(leases), stack):
        rows = leases[first : first + stack]
        for result in run(rows):
            results.append(result)
            if not result.more:
                yield results
                results = []


def _hand_in(rounds: Rounds, results: Sequence[RowResult], enough: float | None) -> None:
    """Hand in results, and delete the staged data of those whose row already had a result.

    A worker whose lease ran out, and that works on, comes second: the first result of a row counts, so
    nobody can choose among two.
    """
    finished = []
    for result in results:
        is_last = enough is not None and result.score >= enough
        finished.append(replace(result, last=is_last))
    first: Container[int] = ()
    try:
        hand_in = partial(rounds.complete_some, finished)
        first = patiently(hand_in)
    except LedgerConnectionError:
        raise  # it may have been committed, and then its files are needed
    except Exception:
        _drop(results)  # as of a study that was deleted meanwhile
        raise
    _drop([result for result in results if result.lease.number not in first])


def _drop(results: Iterable[RowResult]) -> None:
    """Delete the files of results that came after another result of the same row."""
    for result in results:
        if result.drop is not None:
            result.drop()


@contextmanager
def _renew_leases(
    rounds: Rounds,
    leases: dict[int, Lease],
    seconds: float,
) -> Iterator[None]:
    """Renew leases during a ``with`` block, three times within their length; give them back after an error.

    Args:
        rounds: The table of rows.
        leases: Those that are held, by row; whoever hands a result in takes its lease out.
        seconds: How long a lease lasts.
    """
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(seconds / 3):
            current = list(leases.values())
            if not current:
                continue
            for lease in patiently(partial(rounds.renew_some, current)):
                # A result may have been handed in while the database was asked.
                if lease.number in leases:
                    leases[lease.number] = lease

    renewal = threading.Thread(target=renew, daemon=True)
    renewal.start()
    try:
        yield
    finally:
        stop.set()
        renewal.join()
        # Renewed for 0 seconds, a lease has run out: others may take the row at once.
        free = Rounds(rounds._ledger, lease_seconds=0.0)
        with suppress(LedgerConnectionError):
            if leases:
                free.renew_some(list(leases.values()))
