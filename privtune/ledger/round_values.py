"""What a round is made of: tasks, leases, results. Sealed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from privtune.ledger.errors import ChargeStateError, LedgerError
from privtune.training.mechanism.streams import Streams

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection


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
