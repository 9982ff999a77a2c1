"""Work through the rows of a round: lease, train, hand in; nothing is counted twice."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from privtune.ledger import Lease, Ledger, Rounds

__all__ = ["LEASE_SECONDS", "Handed", "make_rounds", "work_through"]

LEASE_SECONDS = 15.0
"""How long a row stays with a worker that has died. Living workers renew three times as often."""

_ATTEMPTS = 10


@dataclass(frozen=True)
class Handed:
    """The result of a row.

    Args:
        lease: The row's lease.
        score: Its score.
        document: What to store in the row, JSON-ready.
        keep: Stores the rest, in the transaction that accepts the row's result; a result that comes
            second is stored nowhere.
    """

    lease: Lease
    score: float
    document: Mapping[str, Any]
    keep: Callable[[Any], None] | None = None


def make_rounds(ledger: Ledger, *, lease_seconds: float = LEASE_SECONDS) -> Rounds:
    """Return the rounds of a ledger with the leases that executors use."""
    return Rounds(ledger, lease_seconds=lease_seconds, max_attempts=_ATTEMPTS)


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
    worker, count = f"{os.getpid()}-{uuid.uuid4().hex[:8]}", 0
    while True:
        room = stack if most is None else min(stack, most - count)
        if room <= 0:
            return count
        leases = rounds.lease_some(charge_id, worker, most=room, workers=workers)
        if not leases:
            if rounds.open_count(charge_id) == 0:
                return count
            time.sleep(0.2)
            continue
        held = {lease.number: lease for lease in leases}
        with _kept(rounds, held, lease_seconds):
            for done in run(leases):
                last = enough is not None and done.score >= enough
                rounds.complete(done.lease, done.score, done.document, last=last, keep=done.keep)
                held.pop(done.lease.number, None)
                count += 1


@contextmanager
def _kept(rounds: Rounds, held: dict[int, Lease], seconds: float) -> Iterator[None]:
    """Renew the leases that are held; on the way out by an error, let go of them."""
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(seconds / 3):
            for number, lease in list(held.items()):
                newer = rounds.renew(lease)
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
        for lease in held.values():
            free.renew(lease)
