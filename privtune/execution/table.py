"""Work through the rows of a round: lease, train, hand in; nothing is counted twice."""

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
from privtune.ledger.rounds import Finished, Lease, Rounds

LEASE_SECONDS = 15.0
"""How long a row stays with a worker that has died. Living workers renew three times as often."""

_ATTEMPTS = 10
_PATIENCE = 600.0  # seconds for a database that is restarted to come back
_LONGEST_PAUSE = 1.0
_SHORT = 1.0  # seconds: rows leased together that took less are leased twice as many at once
_MOST = 64  # rows that are leased at once at most: they are lost together

T = TypeVar("T")


@dataclass(frozen=True)
class Handed(Finished):
    """The result of a row, with what was prepared to store it."""

    drop: Callable[[], None] | None = None  # deletes what was staged, of a result that came second
    more: bool = False  # the next result is there already: both are handed in in one transaction


def make_rounds(ledger: Ledger, *, lease_seconds: float = LEASE_SECONDS) -> Rounds:
    """Return the rounds of a ledger with the leases that executors use."""
    return Rounds(ledger, lease_seconds=lease_seconds, max_attempts=_ATTEMPTS)


def patiently(call: Callable[[], T], *, patience: float | None = None) -> T:
    """Return what a call returns; while the database cannot be reached or is held, wait and call again."""
    # For calls that may be made twice: whether the first reached the database is not known.
    deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
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
    run: Callable[[Sequence[Lease]], Iterable[Handed]],
    *,
    stack: int,
    workers: int = 1,
    most: int | None = None,
    enough: float | None = None,
    lease_seconds: float = LEASE_SECONDS,
) -> int:
    """Lease rows and run them until none is open; wait for rows that others hold."""
    worker, count, pause, bundle = f"{os.getpid()}-{uuid.uuid4().hex[:8]}", 0, 0.1, stack
    while True:
        room = bundle if most is None else min(bundle, most - count)
        if room <= 0:
            return count
        leases = patiently(_asked(rounds, charge_id, worker, most=room, workers=workers))
        if not leases:
            if patiently(partial(rounds.open_count, charge_id)) == 0:
                return count
            # Asking takes the table's lock, which those that work need.
            pause = min(2 * pause, _LONGEST_PAUSE)
            time.sleep(pause)
            continue
        pause, begun = 0.1, time.monotonic()
        held = {lease.number: lease for lease in leases}
        with _kept(rounds, held, lease_seconds):
            for done in _at_once(run, leases, stack):
                _hand_in(rounds, done, enough)
                for one in done:
                    held.pop(one.lease.number, None)
                count += len(done)
        # Short rows are leased many at once. One that may end its round makes those after it useless.
        quick = enough is None and time.monotonic() - begun < _SHORT
        bundle = min(2 * bundle, max(stack, _MOST)) if quick else stack


def _asked(
    rounds: Rounds, charge_id: str, worker: str, **terms: int
) -> Callable[[], tuple[Lease, ...]]:
    """Return a function that leases rows; called again, it returns the rows whose answer was lost."""
    asked = False

    def ask() -> tuple[Lease, ...]:
        nonlocal asked
        again, asked = asked, True
        return rounds.lease_some(charge_id, worker, again=again, **terms)

    return ask


def _at_once(
    run: Callable[[Sequence[Lease]], Iterable[Handed]], leases: Sequence[Lease], stack: int
) -> Iterator[list[Handed]]:
    """Run rows in stacks, and gather the results that are there at the same moment."""
    gathered: list[Handed] = []
    for first in range(0, len(leases), stack):
        for done in run(leases[first : first + stack]):
            gathered.append(done)
            if not done.more:
                yield gathered
                gathered = []


def _hand_in(rounds: Rounds, results: Sequence[Handed], enough: float | None) -> None:
    """Hand in results; what was prepared for those that came second is deleted."""
    finished = [replace(r, last=enough is not None and r.score >= enough) for r in results]
    first: Container[int] = ()
    try:
        first = patiently(partial(rounds.complete_some, finished))
    except LedgerConnectionError:
        raise  # whether it was committed is not known
    except Exception:
        for done in results:  # as of a study that was deleted meanwhile
            if done.drop is not None:
                done.drop()
        raise
    for done in results:
        if done.lease.number not in first and done.drop is not None:
            done.drop()


@contextmanager
def _kept(rounds: Rounds, held: dict[int, Lease], seconds: float) -> Iterator[None]:
    """Renew the leases that are held; on the way out by an error, let go of them."""
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(seconds / 3):
            if leases := list(held.values()):
                newer = patiently(partial(rounds.renew_some, leases))
                held.update({lease.number: lease for lease in newer if lease.number in held})

    keeper = threading.Thread(target=renew, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        stop.set()
        keeper.join()
        # Renewed for 0 seconds, a lease has run out: others may take the row at once.
        free = Rounds(rounds._ledger, lease_seconds=0.0)
        with suppress(LedgerConnectionError):
            if held:
                free.renew_some(list(held.values()))
