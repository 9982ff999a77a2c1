"""Stacks trained side by side, each in a thread: torch lets go of the interpreter in its kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

OnStep = Callable[[int, Mapping[str, torch.Tensor]], None]


class Job(Protocol[T_co]):
    """A training that says so after every step."""

    def __call__(self, *, on_step: OnStep | None) -> T_co:
        """Train."""
        ...


class _StoppedError(Exception):
    """Ends a training whose result nobody waits for any more."""


def side_by_side(jobs: Iterable[Job[T]], threads: int, on_step: OnStep | None) -> list[T]:
    """Run jobs, as many at once as there are threads, and return their results in order.

    Jobs are made, and ``on_step`` is called, in the calling thread: both are code of a user's, and may
    have to stay there. Each thread gets an equal share of the threads that torch may use here.

    Args:
        jobs: The trainings; each is made when a thread is free for it.
        threads: At least 1; with 1 the jobs run in the calling thread.
        on_step: Called after every step of every job, one call at a time.

    Raises:
        Exception: The first error of a job, a signal's or ``on_step``'s. The other jobs are stopped
            after the step that they are at, and waited for.
    """
    if threads == 1:
        return [job(on_step=on_step) for job in jobs]
    news: SimpleQueue[Future[T] | Callable[[], None]] = SimpleQueue()
    stop = threading.Event()

    def stepped(step: int, report: Mapping[str, torch.Tensor]) -> None:
        if stop.is_set():
            raise _StoppedError
        if on_step is not None:
            news.put(partial(on_step, step, report))

    waiting = enumerate(jobs)
    running: dict[Future[T], int] = {}
    results: dict[int, T] = {}
    whole = torch.get_num_threads()
    share = max(1, whole // threads)
    try:
        with ThreadPoolExecutor(
            threads, "privtune-stack", initializer=torch.set_num_threads, initargs=(share,)
        ) as pool:
            try:
                while True:
                    for number, job in islice(waiting, threads - len(running)):
                        running[pool.submit(job, on_step=stepped)] = number
                        next(reversed(running)).add_done_callback(news.put)
                    if not running:
                        break
                    item = news.get()
                    if isinstance(item, Future):
                        results[running.pop(item)] = item.result()
                    else:
                        item()
            finally:
                stop.set()
    finally:
        # A thread sets the number for itself (OpenMP's and MKL's), and what threads that are new begin
        # with for the whole process: that is put back once no thread of the pool can set it any more.
        torch.set_num_threads(whole)
    return [results[number] for number in range(len(results))]
