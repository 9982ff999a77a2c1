"""Workers as spawned processes. A worker's death is no result: its rows go to the next."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from privtune.errors import InvalidInputError, PrivTuneError

__all__ = [
    "STOPPED",
    "WorkerStoppedError",
    "WorkersDiedError",
    "run_workers",
    "wait_for_workers",
]

STOPPED = 70
"""Exit code of a worker that an error stopped, which it kept for the curator."""

_POLL = 0.2
_GRACE = 5.0  # seconds for a worker to see that no row is open, and leave
_QUICK_DEATHS = 5  # workers that die in a row without any progress


class WorkersDiedError(PrivTuneError):
    """Workers kept dying before they finished anything."""


class WorkerStoppedError(Exception):
    """An error stopped a worker: another one would meet it, too."""


def run_workers(
    target: Callable[..., None],
    args: tuple[Any, ...],
    *,
    jobs: int,
    open_count: Callable[[], int],
) -> None:
    """Run ``target(*args)`` in spawned processes until no row is open.

    Args:
        target: A module-level function that works through the round's rows.
        args: Its arguments; picklable.
        jobs: How many processes at once, at least 1.
        open_count: Returns how many rows have no result yet.

    Raises:
        WorkersDiedError: If workers keep dying and no row gets a result. The charge stays; running
            the study again goes on.
        WorkerStoppedError: If a worker ends with ``STOPPED``.
    """
    if jobs < 1:
        raise InvalidInputError("n_jobs", jobs, "must be a whole number of at least 1")
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = []
    left, deaths = open_count(), 0
    try:
        while left:
            alive = [worker for worker in workers if worker.is_alive()]
            if any(worker.exitcode == STOPPED for worker in workers):
                raise WorkerStoppedError
            deaths += sum(1 for w in workers if not w.is_alive() and w.exitcode != 0)
            if deaths >= max(_QUICK_DEATHS, 2 * jobs) * 2:
                raise WorkersDiedError(
                    f"{deaths} workers died one after the other and finished nothing. What was "
                    "charged stays charged; see what kills them (memory?), then run the study "
                    "again: it goes on where it was."
                )
            workers = alive
            with _one_thread_each():
                while len(workers) < min(jobs, left):
                    worker: BaseProcess = context.Process(target=target, args=args, daemon=True)
                    worker.start()
                    workers.append(worker)
            time.sleep(_POLL)
            before, left = left, open_count()
            if left < before:
                deaths = 0
    finally:
        for worker in workers:
            # With no row open, a worker that is still busy trains what a round's early end made
            # useless, or would hand in a second result.
            worker.join(_GRACE if not left else 0)
            if worker.is_alive():
                worker.terminate()
            worker.join()


def wait_for_workers(open_count: Callable[[], int], stopped: Callable[[], bool]) -> None:
    """Wait until workers that somebody else started have given every row a result.

    Args:
        open_count: Returns how many rows have no result yet.
        stopped: Returns whether an error has stopped a worker.

    Raises:
        WorkerStoppedError: If one was.
    """
    while open_count():
        if stopped():
            raise WorkerStoppedError
        time.sleep(_POLL)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Spawn children with one compute thread: processes share the cores already."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
