"""Work through the rows of a round: lease, train, hand in; nothing is counted twice."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from privtune.ledger import Lease, Ledger, LedgerConnectionError, Rounds

__all__ = ["LEASE_SECONDS", "Handed", "make_rounds", "patiently", "work_through"]

LEASE_SECONDS = 15.0
"""How long a row stays with a worker that has died. Living workers renew three times as often."""

_ATTEMPTS = 10
_PATIENCE = 600.0  # seconds for a database that is restarted to come back
_LONGEST_PAUSE = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Handed:
    """The result of a row.

    Args:
        lease: The row's lease.
        score: Its score.
        document: What to store in the row, JSON-ready.
        keep: Stores the rest, in the transaction that accepts the row's result; a result that comes
            second is stored nowhere.
        drop: Deletes what was prepared for that, of a result that came second.
    """

    lease: Lease
    score: float
    document: Mapping[str, Any]
    keep: Callable[[Any], None] | None = None
    drop: Callable[[], None] | None = None


def make_rounds(ledger: Ledger, *, lease_seconds: float = LEASE_SECONDS) -> Rounds:
    """Return the rounds of a ledger with the leases that executors use."""
    return Rounds(ledger, lease_seconds=lease_seconds, max_attempts=_ATTEMPTS)


def patiently(call: Callable[[], T]) -> T:
    """Return what a call returns; while the database cannot be reached, wait and call again.

    For calls that may be made twice: whether the first reached the database is not known.

    Args:
        call: Reads or writes the table.

    Raises:
        LedgerConnectionError: If it stays away.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return call()
        except LedgerConnectionError:
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
    """Lease rows and run them until none is open; wait for rows that others hold.

    Args:
        rounds: The rounds.
        charge_id: The round's charge.
        run: Trains leased rows together; yields each as soon as it is done.
        stack: How many rows to lease at once, of this worker's share at most.
        workers: How many share the round at least.
        most: How many rows to run before this worker leaves; all that it gets unless given.
        enough: A score that ends the round; rows after the first that reaches it need not run.
        lease_seconds: How long a lease lasts.

    Returns:
        How many rows were run here.
    """
    worker, count, pause = f"{os.getpid()}-{uuid.uuid4().hex[:8]}", 0, 0.1
    while True:
        room = stack if most is None else min(stack, most - count)
        if room <= 0:
            return count
        lease = partial(rounds.lease_some, charge_id, worker, most=room, workers=workers)
        leases = patiently(lease)
        if not leases:
            if patiently(partial(rounds.open_count, charge_id)) == 0:
                return count
            # Asking takes the table's lock, which those that work need.
            pause = min(2 * pause, _LONGEST_PAUSE)
            time.sleep(pause)
            continue
        pause = 0.1
        held = {lease.number: lease for lease in leases}
        with _kept(rounds, held, lease_seconds):
            for done in run(leases):
                last = enough is not None and done.score >= enough
                result = done.lease, done.score, done.document
                hand_in = partial(rounds.complete, *result, last=last, keep=done.keep)
                if not patiently(hand_in) and done.drop is not None:
                    done.drop()
                held.pop(done.lease.number, None)
                count += 1


@contextmanager
def _kept(rounds: Rounds, held: dict[int, Lease], seconds: float) -> Iterator[None]:
    """Renew the leases that are held; on the way out by an error, let go of them."""
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(seconds / 3):
            for number, lease in list(held.items()):
                newer = patiently(partial(rounds.renew, lease))
                if newer is not None and number in held:
                    held[number] = newer

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
            for lease in held.values():
                free.renew(lease)
