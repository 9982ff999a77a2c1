"""How many candidates to train at once, and stacks of them side by side, each in a thread.

torch lets go of the interpreter in its kernels.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch

from privtune.training.engine.kernels import BatchedKernel
from privtune.training.mechanism.kernel import Kernel
from privtune.training.mechanism.sampling import GRANULE, padded
from privtune.training.mechanism.schedule import Schedule

T = TypeVar("T")

OnStep = Callable[[int, Mapping[str, torch.Tensor]], None]
"""Called after every step of a stack with its number, from 0, and the stack's report."""

STACK_BYTES = 128 * 2**20  # larger work spaces fall out of the caches, and stacking gains nothing
_ABREAST_BYTES = 512 * 2**20  # of all stacks that are trained side by side: memory, not caches
_TURN_BYTES = 4 * 2**20  # a step on these takes about as long as threads wait for the interpreter
_PIECE_BYTES = 256 * 2**20  # of one candidate's physical batch
_LARGEST = 256
_VECTORS = 8  # parameters, gradient, noise, and up to five vectors of a method's state
_SLACK = 1.6  # allocators hold on to free memory in pieces too small to be used again: 1.36 seen
_CAPTURE_SECONDS = 0.03  # a shape's capture, and its first steps without one
_BYTE_SECONDS = 2e-10  # of a step, for each byte that it works on
_FIXED_BYTES = 32 * 2**20  # programs, kernels and pools of the libraries, whatever is trained


@dataclass(frozen=True)
class Memory:
    """The memory model of a training."""

    row_bytes: float  # work space of a record in a step
    captured_bytes: float  # and while its pass is captured
    state_bytes: int
    rows: int
    piece: int

    @property
    def candidate_bytes(self) -> float:
        """Bytes that one candidate of a stack works on in a step: what should stay in caches."""
        return self.state_bytes + self.rows * self.row_bytes

    def peak_bytes(self, candidates: int) -> int:
        """Return a bound on what training so many candidates at once adds to the memory of a process."""
        own = self.state_bytes + self.rows * self.captured_bytes
        return int(_FIXED_BYTES + _SLACK * candidates * own)


def memory_model(kernel: Kernel, *, longest: int) -> Memory:
    """Say what a candidate takes, whose samples are so many records at most, before anything runs."""
    gradient = 4.0 * kernel.layout.size
    row = captured = gradient
    if isinstance(kernel, BatchedKernel):
        row, captured = kernel.row_bytes
    piece = max(8, min(max(longest, 1024), int(_PIECE_BYTES / max(row, 1.0))))
    return Memory(row, captured, _VECTORS * 4 * kernel.layout.size, min(longest, piece), piece)


def longest_sample(schedule: Schedule) -> int:
    """Return the size that a sample stays below, all but surely: six deviations above the mean."""
    mean = schedule.expected_batch_size
    return padded(min(schedule.records, math.ceil(mean + 6.0 * math.sqrt(mean) + 8.0)))


def granule(schedule: Schedule, kernel: Kernel, row_bytes: float, candidates: int) -> int:
    """Return what physical sizes are to be multiples of: a power of two, from the plan alone."""
    if isinstance(kernel, BatchedKernel) and not kernel.captures:
        return 1
    # Half a granule fills up in every step; a shape is captured for each multiple that occurs, among sizes
    # some six deviations apart. The sum of both costs is least at the root.
    mean = schedule.expected_batch_size
    filling = 0.5 * schedule.steps * candidates * row_bytes * _BYTE_SECONDS
    best = math.sqrt(6.0 * math.sqrt(mean) * _CAPTURE_SECONDS / max(filling, 1e-300))
    most = max(min(best, 0.5 * mean) / GRANULE, 1.0)
    return int(GRANULE * 2 ** math.floor(math.log2(most)))


@dataclass(frozen=True)
class Division:
    """How candidates are trained."""

    sizes: list[int]
    threads: int

    @property
    def at_once(self) -> int:
        """Most candidates that are trained at once: what ``Memory.peak_bytes`` is asked about."""
        return sum(sorted(self.sizes)[-self.threads :])


def divide(
    kernel: Kernel, memory: Memory, candidates: int, *, stack: int | None = None, cores: int = 1
) -> Division:
    """Split candidates into stacks, and say how many stacks to train side by side, a thread for each."""
    # Record after record, and convolutions on CPU, run candidate by candidate: stacks gain nothing.
    apart = not isinstance(kernel, BatchedKernel) or kernel.convolves
    fit = min(_LARGEST, int(STACK_BYTES / memory.candidate_bytes))
    # Between two kernels of torch a thread holds the interpreter: a step lets t threads run without waiting
    # if it takes t times as long as what it does there, so t threads pay from t² such turns on.
    threads = 1
    if cores > 1 and isinstance(kernel, BatchedKernel) and kernel.captures:
        most = int(_ABREAST_BYTES / memory.candidate_bytes) if apart else fit
        together = min(candidates, _LARGEST, most if stack is None else stack)
        turns = int(together * memory.candidate_bytes / _TURN_BYTES)
        threads = max(1, min(cores, together, math.isqrt(turns)))
    if stack is None:
        stack = 1 if apart else fit
    each = min(max(1, stack // threads), -(-candidates // threads))
    count = -(-candidates // each)
    count = min(candidates, -(-count // threads) * threads)  # no thread is left without at the end
    return Division([candidates // count + (i < candidates % count) for i in range(count)], threads)


class _StoppedError(Exception):
    """Ends a training whose result nobody waits for any more."""


def side_by_side(
    jobs: Sequence[Callable[[OnStep | None], T]], threads: int, on_step: OnStep | None
) -> list[T]:
    """Run jobs, as many at once as there are threads, and return their results in order."""
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
