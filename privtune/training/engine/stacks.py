"""Division of candidates into stacks by memory and caches, and threads that train stacks side by side.

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
    """The memory model of a training.

    All of it follows from public facts: sizes of the model, and the plan's rate and number of
    records.

    Attributes:
        state_bytes: Of a candidate's vectors ``[P]``: parameters, gradient, noise, a method's state.
        rows: Records of a candidate in a physical batch, at most.
        piece: Rows of a candidate that are computed at once; a larger sample is computed in pieces.
    """

    row_bytes: float  # work space of a record in a step
    captured_bytes: float  # and while its pass is captured
    state_bytes: int
    rows: int
    piece: int

    @property
    def candidate_bytes(self) -> float:
        """The bytes that one candidate of a stack works on in a step, which should fit into the caches."""
        return self.state_bytes + self.rows * self.row_bytes

    def peak_bytes(self, candidates: int) -> int:
        """Return a bound on the bytes that training so many candidates at once adds to a process.

        It is what says, before a study runs, whether its trainings fit.
        """
        state = self.state_bytes + self.rows * self.captured_bytes
        return int(_FIXED_BYTES + _SLACK * candidates * state)


def memory_model(kernel: Kernel, *, longest: int, noise_rows: int = 0) -> Memory:
    """Return the memory model of a training, from a kernel's measured bytes and the longest sample.

    A kernel that takes record after record holds one gradient ``[P]`` at a time, whatever its rows.

    Args:
        kernel: Of which the work space of a row was measured.
        longest: Most records in a sample.
        noise_rows: Vectors of earlier noise that a candidate keeps, where noise is correlated.
    """
    gradient = 4.0 * kernel.layout.size
    row = captured = gradient
    if isinstance(kernel, BatchedKernel):
        row, captured = kernel.row_bytes
    most = int(_PIECE_BYTES / max(row, 1.0))
    piece = min(max(longest, 1024), most)
    piece = max(8, piece)
    return Memory(
        row,
        captured,
        (_VECTORS + noise_rows) * 4 * kernel.layout.size,
        min(longest, piece),
        piece,
    )


def longest_sample(schedule: Schedule) -> int:
    """Return a padded sample size that is almost never exceeded: six deviations above the mean.

    Poisson samples have no largest size. A longer one is not cut, which would change the sampling
    that is charged: it is computed in pieces.
    """
    mean = schedule.expected_batch_size
    size = math.ceil(mean + 6.0 * math.sqrt(mean) + 8.0)
    size = min(schedule.records, size)
    return padded(size)


def granule(
    schedule: Schedule,
    kernel: Kernel,
    row_bytes: float,
    candidates: int,
) -> int:
    """Return the power of two that physical batch sizes are padded to a multiple of.

    It hangs on no realised sample, so what shapes are computed tells nothing but a rounded size.

    Args:
        schedule: Steps and expected sample of a training.
        kernel: Where it captures nothing, shapes cost nothing.
        row_bytes: Work space of a record in a step.
        candidates: How many share the shape.
    """
    if isinstance(kernel, BatchedKernel) and not kernel.captures:
        return 1
    # Half a granule fills up in every step; a shape is captured for each multiple that occurs, among sizes
    # some six deviations apart. The sum of both costs is least at the root.
    mean = schedule.expected_batch_size
    filling = 0.5 * schedule.steps * candidates * row_bytes * _BYTE_SECONDS
    capturing = 6.0 * math.sqrt(mean) * _CAPTURE_SECONDS
    best = math.sqrt(capturing / max(filling, 1e-300))
    granules = min(best, 0.5 * mean) / GRANULE
    granules = max(granules, 1.0)
    exponent = math.floor(math.log2(granules))
    return int(GRANULE * 2**exponent)


@dataclass(frozen=True)
class Division:
    """The sizes of the stacks, and how many stacks are trained at the same time.

    Attributes:
        sizes: Candidates of each stack, in order; they differ by one at most.
        threads: How many stacks are trained at the same time.
    """

    sizes: list[int]
    threads: int

    @property
    def at_once(self) -> int:
        """The largest number of candidates that are trained at the same time, over all threads."""
        largest = sorted(self.sizes)[-self.threads :]
        return sum(largest)


def divide(
    kernel: Kernel,
    memory: Memory,
    candidates: int,
    *,
    stack: int | None = None,
    cores: int = 1,
) -> Division:
    """Divide candidates into stacks, and choose how many stacks are trained at the same time.

    Two bounds are met: what is computed as one tensor should stay in the caches (``STACK_BYTES``),
    and all stacks together in memory. How candidates are divided changes no result, since each has
    its own streams.

    Args:
        kernel: That computes them.
        memory: What a candidate takes.
        candidates: How many there are.
        stack: Most in one stack, if a user says so.
        cores: Threads that torch may use.
    """
    # Record after record, and convolutions on CPU, run candidate by candidate: stacks gain nothing.
    apart = not isinstance(kernel, BatchedKernel) or kernel.convolves
    fit = min(_LARGEST, int(STACK_BYTES / memory.candidate_bytes))
    # Between two kernels of torch a thread holds the interpreter: a step lets t threads run without waiting
    # if it takes t times as long as what it does there, so t threads pay from t² such turns on.
    threads = 1
    if cores > 1 and isinstance(kernel, BatchedKernel) and kernel.captures:
        most = fit
        if stack is not None:
            most = stack
        elif apart:
            most = int(_ABREAST_BYTES / memory.candidate_bytes)
        together = min(candidates, _LARGEST, most)
        turns = int(together * memory.candidate_bytes / _TURN_BYTES)
        threads = max(1, min(cores, together, math.isqrt(turns)))
    if stack is None:
        stack = 1 if apart else fit
    of_thread = -(-candidates // threads)
    each = min(max(1, stack // threads), of_thread)
    count = -(-candidates // each)
    # As many for every thread: none is left without at the end.
    rounds = -(-count // threads)
    count = min(candidates, rounds * threads)
    size, larger = divmod(candidates, count)
    sizes = [size + 1] * larger + [size] * (count - larger)
    return Division(sizes, threads)


class _StoppedError(Exception):
    """The error that ends a stack's training after another stack has failed."""


def side_by_side(
    jobs: Sequence[Callable[[OnStep | None], T]],
    threads: int,
    on_step: OnStep | None,
) -> list[T]:
    """Run jobs, as many at once as there are threads, and return their results in order.

    A user's callback runs in the calling thread: it may draw, plot or write to a database, and none
    of that need be safe in threads. Reports reach it by a queue, one after the other. Where one job
    raises, the others are stopped at their next step, and its error is raised here.

    Args:
        jobs: Each takes what it is to call after every step.
        threads: How many run at once.
        on_step: What the user is told of every step, or None.
    """
    if threads == 1:
        return [job(on_step) for job in jobs]
    news: SimpleQueue[Future[T] | Callable[[], None]] = SimpleQueue()
    stop = threading.Event()

    def stepped(step: int, report: Mapping[str, torch.Tensor]) -> None:
        """Queue a stack's step for the user's callback; raise an error once the run is stopped."""
        if stop.is_set():
            raise _StoppedError
        if on_step is not None:
            news.put(partial(on_step, step, report))

    threads_before = torch.get_num_threads()
    share = max(1, threads_before // threads)
    pool = ThreadPoolExecutor(
        threads,
        "privtune-stack",
        initializer=torch.set_num_threads,
        initargs=(share,),
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
        torch.set_num_threads(threads_before)
    return [future.result() for future in futures]
