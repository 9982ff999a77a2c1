"""How many candidates to train at once and side by side, and how a stack runs from start to end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from privtune.training.engine.batched import BatchedKernel
from privtune.training.engine.checkpoint import Checkpoint, Middle
from privtune.training.engine.threads import OnStep
from privtune.training.mechanism.device import sent
from privtune.training.mechanism.kernel import Kernel
from privtune.training.mechanism.sampling import GRANULE, padded
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.stack_oracle import StackOracle
from privtune.training.mechanism.transcript import Transcript
from privtune.training.methods._rate_schedule import average_weights

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

    Args:
        row_bytes: Work space of a record in a step.
        captured_bytes: Work space of a record while its pass is captured: at least as much.
        state_bytes: Vectors of the length of the parameters, for one candidate.
        rows: Records of a candidate's sample that are computed at once.
        piece: Most records of a candidate that may be computed at once.
    """

    row_bytes: float
    captured_bytes: float
    state_bytes: int
    rows: int
    piece: int

    @property
    def candidate_bytes(self) -> float:
        """Bytes that one candidate of a stack works on in a step: what should stay in caches."""
        return self.state_bytes + self.rows * self.row_bytes

    def peak_bytes(self, candidates: int) -> int:
        """Return a bound on what training so many candidates at once adds to the memory of a process.

        Captures, what an allocator cannot give back, and a fixed amount are counted; the
        data is not.
        """
        own = self.state_bytes + self.rows * self.captured_bytes
        return int(_FIXED_BYTES + _SLACK * candidates * own)


def memory_model(kernel: Kernel, *, longest: int) -> Memory:
    """Say what a candidate takes, before anything runs.

    Args:
        kernel: The kernel.
        longest: Records of the largest sample that is to be expected. A larger physical batch
            than fits is computed in pieces; their size does not depend on the stack.
    """
    gradient = 4.0 * kernel.layout.size
    row = captured = gradient
    if isinstance(kernel, BatchedKernel):
        row, captured = kernel.row_bytes
    piece = max(8, min(max(longest, 1024), int(_PIECE_BYTES / max(row, 1.0))))
    return Memory(row, captured, _VECTORS * 4 * kernel.layout.size, min(longest, piece), piece)


def longest_sample(schedule: Schedule) -> int:
    """Return the size that a sample stays below, all but surely: six deviations above the mean.

    A longer one is computed in pieces.
    """
    mean = schedule.expected_batch_size
    return padded(min(schedule.records, math.ceil(mean + 6.0 * math.sqrt(mean) + 8.0)))


def granule(schedule: Schedule, row_bytes: float, candidates: int) -> int:
    """Return what physical sizes are to be multiples of: a power of two, from the plan alone.

    Half of it fills up in every step; a shape is captured for each multiple that occurs, among sizes
    some six deviations apart. The sum of both is least at the root. A short training of a small net
    would else take longer to capture its shapes than to train.

    Args:
        schedule: The schedule.
        row_bytes: What a step works on for each record of a candidate.
        candidates: How many are trained together.
    """
    mean = schedule.expected_batch_size
    filling = 0.5 * schedule.steps * candidates * row_bytes * _BYTE_SECONDS
    best = math.sqrt(6.0 * math.sqrt(mean) * _CAPTURE_SECONDS / max(filling, 1e-300))
    most = max(min(best, 0.5 * mean) / GRANULE, 1.0)
    return int(GRANULE * 2 ** math.floor(math.log2(most)))


def threads_for(
    kernel: Kernel, memory: Memory, candidates: int, *, stack: int | None, cores: int
) -> int:
    """Say how many stacks to train side by side, each in a thread of its own.

    Between two kernels of torch a thread holds the interpreter, which there is one of: a step lets t
    threads run without waiting if it takes t times as long as what it does in there. So t threads are
    worth it from t^2 such turns on; below, one stack of all candidates is faster.

    Args:
        kernel: The kernel: one of a model too large to be captured uses all cores for each product,
            and one that takes record after record holds one model.
        memory: The memory model.
        candidates: How many there are.
        stack: How many to train at once, or None to choose.
        cores: Threads that torch may use; 1 where stacks have to be trained one after the other.
    """
    if cores == 1 or not (isinstance(kernel, BatchedKernel) and kernel.threads_safely):
        return 1
    if stack is None:
        stack = int((_ABREAST_BYTES if kernel.convolves else STACK_BYTES) / memory.candidate_bytes)
    together = min(candidates, stack, _LARGEST)
    turns = int(together * memory.candidate_bytes / _TURN_BYTES)
    return max(1, min(cores, together, math.isqrt(turns)))


def stack_sizes(
    kernel: Kernel, memory: Memory, candidates: int, *, stack: int | None, threads: int = 1
) -> list[int]:
    """Split candidates into stacks.

    Args:
        kernel: The kernel: record after record gains nothing from stacking, nor do
            convolutions on CPU, which run candidate by candidate and leave the caches.
        memory: The memory model.
        candidates: How many there are.
        stack: How many to train at once, in all threads together, or None to choose.
        threads: How many stacks to train side by side.

    Returns:
        Sizes of stacks, as even as can be, so that few shapes are captured.
    """
    if stack is None:
        largest = min(_LARGEST, int(STACK_BYTES / memory.candidate_bytes))
        single = not isinstance(kernel, BatchedKernel) or kernel.convolves
        stack = 1 if single else largest
    each = min(max(1, stack // threads), -(-candidates // threads))
    count = -(-candidates // each)
    count = min(candidates, -(-count // threads) * threads)  # no thread is left without at the end
    return [candidates // count + (i < candidates % count) for i in range(count)]


@dataclass(frozen=True)
class Split:
    """How candidates are trained.

    Args:
        stacks: Candidates of each stack, by number.
        threads: How many stacks are trained side by side.
    """

    stacks: list[list[int]]
    threads: int

    @property
    def at_once(self) -> int:
        """Most candidates that are trained at once: what ``Memory.peak_bytes`` is asked about."""
        return sum(sorted(map(len, self.stacks))[-self.threads :])


def split(
    kernel: Kernel,
    memory: Memory,
    *,
    steps: Sequence[int],
    stack: int | None,
    together: bool,
    cores: int,
) -> Split:
    """Split candidates into stacks by number.

    Args:
        kernel: The kernel.
        memory: The memory model.
        steps: Steps of each candidate.
        stack: How many to train at once, or None to choose.
        together: Whether candidates of unequal steps may share a stack. If not, those of each
            number of steps are split by themselves: a method that looks at the number of steps
            then sees the candidate's own.
        cores: Threads that torch may use; 1 to train stacks one after the other.
    """
    groups: dict[int, list[int]] = {}
    for candidate, count in enumerate(steps):
        groups.setdefault(0 if together else count, []).append(candidate)
    threads = max(
        threads_for(kernel, memory, len(group), stack=stack, cores=cores)
        for group in groups.values()
    )
    stacks = []
    for group in groups.values():
        left = iter(group)
        for size in stack_sizes(kernel, memory, len(group), stack=stack, threads=threads):
            stacks.append([next(left) for _ in range(size)])
    return Split(stacks, threads)


@dataclass(frozen=True, eq=False)
class Trained:
    """What became of one candidate.

    Args:
        params: What is released: the method's average of the parameters, shape ``[P]``.
        report: What the method reported, by name, one value a step.
        transcript: What was released.
        gradient_evaluations: Realised per-sample gradients. Sealed.
        nonfinite: Records that counted as zero, by sample: see ``TrainingResult``. Sealed.
        snapshots: The average after some of the steps, by step, on the CPU, shape ``[P]``.
    """

    params: torch.Tensor
    report: Mapping[str, torch.Tensor]
    transcript: Transcript
    gradient_evaluations: int
    nonfinite: int
    snapshots: Mapping[int, torch.Tensor]


def run_stack(
    method: Any,
    state: Any,
    oracle: StackOracle,
    *,
    steps: Sequence[int],
    paces: Sequence[Sequence[float]],
    on_step: OnStep | None,
    snapshots_at: Collection[int] = (),
    checkpoint: Checkpoint | None = None,
    look: Callable[[int, torch.Tensor], object] | None = None,
) -> list[Trained]:
    """Train one stack from its initial state; candidates leave it when their steps are done.

    Args:
        method: The method.
        state: Its state for the K candidates.
        oracle: Their oracle.
        steps: Steps of each candidate.
        paces: Factors on the learning rate of each candidate, one a step.
        on_step: Called after every step.
        snapshots_at: Steps after which to keep a copy of the average.
        checkpoint: Where a stack of one goes on from, and what it keeps.
        look: Called with the step and the parameters, ``[P]``, where a stack of one keeps a copy.
    """
    alive = list(range(len(steps)))
    outcomes: dict[int, Trained] = {}
    reports: list[dict[str, torch.Tensor]] = [{} for _ in steps]
    snapshots: list[dict[int, torch.Tensor]] = [{} for _ in steps]
    history: list[Mapping[str, torch.Tensor]] = []
    first, mean = 0, state.params
    if checkpoint is not None:
        kept = checkpoint.load()
        first, state, history = kept.step, kept.state, list(kept.history)
        mean = state.params if kept.average is None else kept.average
        snapshots[0].update(kept.snapshots)
    averages = _Averages(getattr(method, "average", "last"), steps, like=state.params)
    level = all(pace == 1.0 for each in paces for pace in each)
    by_step = [] if level else list(zip_longest(*paces, fillvalue=1.0))
    factors = sent(torch.tensor(by_step, dtype=state.params.dtype), state.params.device)
    for step in range(first, max(steps)):
        if not level:
            oracle.pace = factors[step]
        state = method.update(state, oracle)
        mean = averages.after(step, mean, state.params)
        history.append(method.report(state))
        if on_step is not None:
            on_step(step, history[-1])
        if step in snapshots_at:
            for row, k in enumerate(alive):
                snapshots[k][step] = mean[row].detach().to("cpu", copy=True)
            if look is not None and len(steps) == 1:
                look(step, snapshots[0][step])
        done = [row for row, k in enumerate(alive) if steps[k] == step + 1]
        if not done:
            if checkpoint is not None:
                own = None if mean is state.params else mean
                checkpoint.after(Middle(step + 1, state, history, snapshots[0], own))
            continue
        for row, k in enumerate(alive):
            _extend(reports[k], history, row)
        history = []
        transcripts = oracle.transcripts()
        for row in done:
            k = alive[row]
            outcomes[k] = Trained(
                mean[row].detach().clone(),
                reports[k],
                transcripts[row],
                int(oracle.gradient_evaluations[row]),
                int(oracle.nonfinite[row]),
                snapshots[k],
            )
        left = [row for row in range(len(alive)) if row not in done]
        if left:
            state, mean = _rows_of(state, left, len(alive)), mean[left]
            averages.keep(left)
            oracle.keep(left)
            factors = factors if level else factors[:, left]
        alive = [alive[row] for row in left]
    return [outcomes[k] for k in range(len(steps))]


class _Averages:
    """The weight of every step in each candidate's average.

    Args:
        average: Of the method's: see ``average_weights``.
        steps: Steps of each candidate.
        like: A tensor where the parameters are.
    """

    def __init__(self, average: str, steps: Sequence[int], *, like: torch.Tensor) -> None:
        each = [average_weights(average, count) for count in steps]
        # A done candidate has left the stack: what its column is filled up with has no part in anything.
        rows = list(zip_longest(*each, fillvalue=1.0))
        self._weights = sent(torch.tensor(rows, dtype=like.dtype), like.device)
        self._moving = [min(row) < 1.0 for row in rows]

    def after(self, step: int, mean: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Return the averages after a step, shape ``[K, P]``: of weight 1 the iterates themselves."""
        if not self._moving[step]:
            return params
        weight = self._weights[step].unsqueeze(1)
        # Chosen, not multiplied: before its last half, no earlier iterate has a part in the average.
        return torch.where(weight < 1.0, mean + weight * (params - mean), params)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep some of the candidates."""
        self._weights = self._weights[:, list(rows)]


def _extend(
    report: dict[str, torch.Tensor], history: Sequence[Mapping[str, torch.Tensor]], row: int
) -> None:
    """Append what was reported about one row since the stack last changed."""
    for name in history[0]:
        values = torch.stack([entry[name][row].detach() for entry in history])
        report[name] = torch.cat([report[name], values]) if name in report else values


def _rows_of(value: Any, rows: Sequence[int], candidates: int) -> Any:
    """Keep some rows of every tensor in a method's state whose first axis is the candidates."""
    if isinstance(value, torch.Tensor):
        return value[list(rows)] if value.ndim and len(value) == candidates else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            f.name: _rows_of(getattr(value, f.name), rows, candidates)
            for f in dataclasses.fields(value)
            if f.init
        }
        return dataclasses.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(_rows_of(part, rows, candidates) for part in value)
    return value
