"""Stacks trained side by side, each in a thread: torch lets go of the interpreter in its kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch

T = TypeVar("T")

OnStep = Callable[[int, Mapping[str, torch.Tensor]], None]


class _StoppedError(Exception):
    """Ends a training whose result nobody waits for any more."""


def side_by_side(
    jobs: Sequence[Callable[[OnStep | None], T]], threads: int, on_step: OnStep | None
) -> list[T]:
    """Run jobs, as many at once as there are threads, and return their results in order.

    Each thread gets an equal share of the threads that torch may use here.

    Args:
        jobs: The trainings; each says so after every step.
        threads: At least 1; with 1 the jobs run in the calling thread.
        on_step: Called after every step of every job, one call at a time, in the calling thread: it is code
            of a user's, and may have to stay there.

    Raises:
        Exception: The first error of a job, a signal's or ``on_step``'s. The other jobs are stopped
            after the step that they are at, and waited for.
    """
    if threads == 1:
        return [job(on_step) for job in jobs]
    news: SimpleQueue[Future[T] | Callable[[], None]] = SimpleQueue()
    stop = threading.Event()

    def stepped(step: int, report: Mapping[str, torch.Tensor]) -> None:
        if stop.is_set():
            raise _StoppedError
        if on_step is not None:
            news.put(partial(on_step, step, report))

    whole = torch.get_num_threads()
    share = max(1, whole // threads)
    pool = ThreadPoolExecutor(
        threads, "privtune-stack", initializer=torch.set_num_threads, initargs=(share,)
    )
    try:
        futures = [pool.submit(job, stepped) for job in jobs]
        for future in futures:
            future.add_done_callback(news.put)
        waiting = len(futures)
        while waiting:
            item = news.get()
            if isinstance(item, Future):
                item.result()
                waiting -= 1
            else:
                item()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        # A thread sets the number for itself (OpenMP's and MKL's), and what threads that are new begin
        # with for the whole process: that is put back once no thread of the pool can set it any more.
        torch.set_num_threads(whole)
    return [future.result() for future in futures]
