"""Keep workers at work until a round is finished, whatever started them. A death is no result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from privtune.errors import InvalidInputError, PrivTuneError

STOPPED = 70
"""How a worker ends that an error stopped, which it kept for the curator."""

_POLL = 0.2
_LONELY = 60.0  # seconds without a worker after which whoever waits is reminded of it
_QUICK_DEATHS = 5  # workers that die in a row without any progress


class WorkersDiedError(PrivTuneError):
    """Workers kept dying before they finished anything."""


class WorkerStoppedError(Exception):
    """An error stopped a worker: another one would meet it, too."""


class Worker(Protocol):
    """Something that works through a round's rows somewhere, and was started for that."""

    def ended(self) -> int | None:
        """Return ``None`` while it works; 0, ``STOPPED``, or another number if it died."""
        ...

    def stop(self, *, finished: bool) -> None:
        """End it: at once, or with time to leave by itself if the round is finished."""
        ...


def keep_workers(
    start: Callable[[int], Sequence[Worker]], *, jobs: int, open_count: Callable[[], int]
) -> None:
    """Keep workers at work until no row is open; those that die are replaced.

    Args:
        start: Starts so many workers.
        jobs: How many at once, at least 1.
        open_count: Returns how many rows have no result yet.

    Raises:
        WorkersDiedError: If workers keep dying and no row gets a result. The charge stays; running
            the study again goes on.
        WorkerStoppedError: If an error stopped one.
    """
    if jobs < 1:
        raise InvalidInputError("n_jobs", jobs, "must be a whole number of at least 1")
    workers: list[Worker] = []
    left, deaths = open_count(), 0
    try:
        while left:
            ends = {worker: worker.ended() for worker in workers}
            if STOPPED in ends.values():
                raise WorkerStoppedError
            deaths += sum(1 for end in ends.values() if end not in {None, 0})
            if deaths >= max(_QUICK_DEATHS, 2 * jobs) * 2:
                raise WorkersDiedError(
                    f"{deaths} workers died one after the other and finished nothing. What was "
                    "charged stays charged; see what kills them (memory?), then run the study "
                    "again: it goes on where it was."
                )
            workers = [worker for worker, end in ends.items() if end is None]
            workers += start(max(0, min(jobs, left) - len(workers)))
            time.sleep(_POLL)
            before, left = left, open_count()
            if left < before:
                deaths = 0
    finally:
        # With no row open, a worker that is still busy trains what a round's early end made useless,
        # or would hand in a second result.
        for worker in workers:
            worker.stop(finished=not left)


def wait_for(
    open_count: Callable[[], int],
    stopped: Callable[[], bool],
    *,
    at_work: Callable[[], bool] = lambda: True,
    remind: Callable[[], None] = lambda: None,
) -> None:
    """Wait until workers that somebody else started have given every row a result.

    Args:
        open_count: Returns how many rows have no result yet.
        stopped: Returns whether an error has stopped a worker.
        at_work: Returns whether a worker holds a row at this moment.
        remind: Called when none has for a minute; once until one does.

    Raises:
        WorkerStoppedError: If one was.
    """
    asked = seen = time.monotonic()
    reminded = False
    while open_count():
        if stopped():
            raise WorkerStoppedError
        now = time.monotonic()
        if now - asked >= _LONELY / 12:
            asked = now
            if at_work():
                seen, reminded = now, False
            elif now - seen >= _LONELY and not reminded:
                reminded = True
                remind()
        time.sleep(_POLL)
