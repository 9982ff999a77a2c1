"""Workers as spawned processes beside this one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from privtune.execution.supervise import keep_workers

_GRACE = 5.0  # seconds for a worker to see that no row is open, and leave


class _Process:
    def __init__(self, process: BaseProcess, slot: int) -> None:
        self._process, self.slot = process, slot
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
    gpus: Sequence[str | None] | None = None,
) -> None:
    """Run ``target(*args)`` in spawned processes until no row is open.

    Args:
        target: A module-level function that works through the round's rows; ends its process with
            ``STOPPED`` after an error.
        args: Its arguments; picklable.
        jobs: How many processes at once, at least 1.
        open_count: Returns how many rows have no result yet.
        gpus: ``CUDA_VISIBLE_DEVICES`` of each process at once; a process that takes the place of one
            that died sees the same. ``None`` leaves it as it is.

    Raises:
        WorkersDiedError: If workers keep dying and no row gets a result.
        WorkerStoppedError: If an error stopped one.
    """
    context = multiprocessing.get_context("spawn")
    slots = list(gpus or [None] * jobs)
    running: list[_Process] = []

    def start(count: int) -> list[_Process]:
        running[:] = [process for process in running if process.ended() is None]
        taken = {process.slot for process in running}
        started = []
        for slot in [slot for slot in range(len(slots)) if slot not in taken][:count]:
            with _environment(slots[slot]):
                process = context.Process(target=target, args=args, daemon=True)
                started.append(_Process(process, slot))
        running.extend(started)
        return started

    keep_workers(start, jobs=jobs, open_count=open_count)


@contextmanager
def _environment(gpus: str | None) -> Iterator[None]:
    """Spawn children with one compute thread, since they share the cores, and with their own GPUs."""
    asked = {"OMP_NUM_THREADS": "1"} | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
