"""Workers as spawned processes beside this one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from privtune.execution.supervise import keep_workers

__all__ = ["run_in_processes"]

_GRACE = 5.0  # seconds for a worker to see that no row is open, and leave


class _Process:
    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        process.start()

    def ended(self) -> int | None:
        return self._process.exitcode

    def stop(self, *, finished: bool) -> None:
        self._process.join(_GRACE if finished else 0)
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()


def run_in_processes(
    target: Callable[..., None],
    args: tuple[Any, ...],
    *,
    jobs: int,
    open_count: Callable[[], int],
) -> None:
    """Run ``target(*args)`` in spawned processes until no row is open.

    Args:
        target: A module-level function that works through the round's rows; ends its process with
            ``STOPPED`` after an error.
        args: Its arguments; picklable.
        jobs: How many processes at once, at least 1.
        open_count: Returns how many rows have no result yet.

    Raises:
        WorkersDiedError: If workers keep dying and no row gets a result.
        WorkerStoppedError: If an error stopped one.
    """
    context = multiprocessing.get_context("spawn")

    def start(count: int) -> list[_Process]:
        with _one_thread_each():
            return [
                _Process(context.Process(target=target, args=args, daemon=True))
                for _ in range(count)
            ]

    keep_workers(start, jobs=jobs, open_count=open_count)


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
