"""Training of many candidates: stacks, steps, transcripts."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import Counter, UserDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine.batched import BatchedKernel, NotBatchableError
from privtune.training.engine.checkpoint import Checkpoint, Keeper
from privtune.training.engine.compiling import Shape
from privtune.training.engine.compute import check_device, check_stack, sums_in_float32
from privtune.training.engine.initialisation import Initialisation
from privtune.training.engine.one_by_one import OneByOneKernel
from privtune.training.engine.program import program_of
from privtune.training.engine.stacks import (
    Memory,
    Split,
    Trained,
    granule,
    longest_sample,
    memory_model,
    run_stack,
    split,
)
from privtune.training.engine.threads import Job, OnStep, side_by_side
from privtune.training.mechanism.data import (
    TensorData,
    find_facts,
    fingerprint,
    targets_are_classes,
)
from privtune.training.mechanism.fresh import fresh
from privtune.training.mechanism.kernel import (
    Kernel,
    Layout,
    Loss,
    LossOf,
    OfOutputs,
    same_fixed,
    say_once,
)
from privtune.training.mechanism.noise_options import NoiseOptions
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.stack_oracle import StackOracle
from privtune.training.mechanism.streams import Streams
from privtune.training.mechanism.transcript import Transcript
from privtune.training.methods._rate_schedule import SEARCHED, rate_factors

if TYPE_CHECKING:
    from privtune.training.methods._base import Candidate, Method


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The trained candidates. Only ``params`` and ``report`` are functions of releases.

    Args:
        params: Final parameters, shape ``[K, P]``.
        report: What the method reports, by name: shape ``[T, K]``; NaN after a candidate's end.
        transcripts: What was released, one a candidate.
        gradient_evaluations: Realised per-sample gradients of each candidate. Sealed.
        nonfinite: Records that counted as zero, once for every sample that drew them: not finite
            gradients, broken public facts, passes that raise. Sealed.
        diverged: Whether the final parameters are not finite: a result, not an error.
        snapshots: For each candidate its parameters after the steps that were asked for, by step,
            on the CPU, shape ``[P]``; like ``params`` functions of releases.
    """

    params: torch.Tensor
    report: Mapping[str, torch.Tensor]
    transcripts: tuple[Transcript, ...]
    gradient_evaluations: tuple[int, ...]
    nonfinite: tuple[int, ...]
    diverged: tuple[bool, ...]
    snapshots: tuple[Mapping[int, torch.Tensor], ...]


def train(
    method: Method[Any],
    schedule: Schedule,
    *,
    model: Callable[[], nn.Module],
    loss: Loss,
    data: TensorData,
    candidates: Sequence[Candidate],
    secrets: Sequence[bytes],
    device: str = "auto",
    stack: int | Literal["auto"] = "auto",
    compiled: bool = False,
    precision: str = "float32",
    steps: Sequence[int] | None = None,
    noise: NoiseOptions | None = None,
    on_step: OnStep | None = None,
    snapshots_at: Collection[int] = (),
    keeper: Keeper | None = None,
) -> TrainingResult:
    """Train candidates of one architecture, each with its own samples, noise and privacy.

    Args:
        method: The training method, with its noise fixed by a plan.
        schedule: Records, sampling rate and steps.
        model: Makes the model; its parameters are initialised from each candidate's own stream.
        loss: Loss of each record: outputs ``[B, ...]`` and targets ``[B, ...]`` to ``[B]``.
        data: The private records.
        candidates: Hyperparameters of each; ``schedule`` and ``warmup`` replace the method's own.
        secrets: 32 bytes a candidate; with them, its result does not depend on its stack.
        device: ``"auto"`` (CUDA when there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        stack: How many candidates to train at once, or ``"auto"``. On CPU, stacks of data in memory
            are trained side by side where that pays, in ``torch.get_num_threads()`` threads at most.
        compiled: Whether to compile what is common: seconds for each shape, then faster steps.
        precision: Of forward and backward pass, ``"float32"`` or ``"bfloat16"``; else float32.
        steps: Of each candidate, at most ``schedule.steps``, None for that; who is done leaves the
            stack, unless the method looks at the number of steps: then each has stacks of its own.
        noise: Where noise comes from and how it is treated; None for the defaults.
        on_step: Called after every step with its number and the stack's report.
        snapshots_at: Steps, counted from 0, after which to keep a copy of the parameters.
        keeper: Where a training of one candidate keeps its checkpoint, and finds it.

    Returns:
        The results, in the order of ``candidates``.

    Raises:
        InvalidInputError: If an argument is outside its domain.
        CompileError: If it is to be compiled, and there is no compiler.
        TranscriptMismatchError: If more was released than ``method.event(schedule)`` charges.

    **Guarantee**: each candidate's parameters and report are an output of the mechanism that
    ``method.event(schedule)`` describes; no candidate's data or divergence touches another's bits.
    """
    _check_secrets(candidates, secrets)
    place = torch.device(check_device(device))
    local, loss_of = data.to(place), OfOutputs(loss)
    counts = _steps(schedule, steps, len(candidates))
    # Made from another stream than any candidate's: what is frozen must not come from a stream.
    first = _made(model, Streams(Streams(secrets[0]).key("kernel")))
    kernel = choose_kernel(first, loss_of, local, place, compiled=compiled, precision=precision)
    training = Training(
        method=method,
        schedule=schedule,
        kernel=kernel,
        data=held_to_facts(local, kernel, loss_of, place),
        values=candidates,
        secrets=secrets,
        steps=counts,
        paces=_paces(method, schedule, candidates, counts),
        initial=lambda k: _initial(_made(model, Streams(secrets[k])), kernel),
        device=place,
        stack=check_stack(stack),
        noise=noise,
        snapshots_at=snapshots_at,
        keeper=keeper if len(candidates) == 1 else None,
    )
    return _joined(training.run(on_step), schedule.steps)


@dataclass(frozen=True, eq=False)
class Training:
    """The training of some candidates whose passes one kernel computes.

    Args:
        method: The training method.
        schedule: Records, sampling rate and steps.
        kernel: Computes the passes.
        data: The private records, on the device.
        values: Hyperparameters of each.
        secrets: 32 bytes of each.
        steps: Of each.
        paces: Factors on the learning rate of each, one a step.
        initial: Returns the first parameters of a candidate, by number, shape ``[P]``.
        device: Where to train.
        places: Where the parameters of each lie in those of the kernel, if its model is wider.
        stack: How many to train at once, or ``"auto"``.
        noise: Source and treatment of the noise.
        snapshots_at: Steps after which to keep a copy of the parameters.
        keeper: Where a stack of one keeps its checkpoint.
        look: Called where a stack of one keeps a copy.
    """

    method: Method[Any]
    schedule: Schedule
    kernel: Kernel
    data: TensorData
    values: Sequence[Candidate]
    secrets: Sequence[bytes]
    steps: Sequence[int]
    paces: Sequence[Sequence[float]]
    initial: Callable[[int], torch.Tensor]
    device: torch.device
    places: Sequence[torch.Tensor] | None = None
    stack: int | Literal["auto"] = "auto"
    noise: NoiseOptions | None = None
    snapshots_at: Collection[int] = ()
    keeper: Keeper | None = None
    look: Callable[[int, torch.Tensor], object] | None = None

    def run(self, on_step: OnStep | None = None) -> list[Trained]:
        """Train all of them; return what became of each, in order.

        Args:
            on_step: Called after every step of every stack.

        Raises:
            TranscriptMismatchError: If more or less was released than the method's event charges.
        """
        memory = memory_model(self.kernel, longest=longest_sample(self.schedule))
        division = self._division(memory)
        # Before any thread runs: one that runs the model itself puts other weights into it, and what is
        # made is held against these.
        early = range(len(self.steps)) if division.threads > 1 else ()
        first = {k: self.initial(k) for k in early}
        started = partial(self._started, memory, first)
        with sums_in_float32():
            done = side_by_side(map(started, division.stacks), division.threads, on_step)
        found = _in_order(division.stacks, done)
        _check_transcripts(self.method, self.schedule, found, self.steps)
        return found

    def _division(self, memory: Memory) -> Split:
        """Return how candidates are trained."""
        return split(
            self.kernel,
            memory,
            steps=self.steps,
            stack=None if self.stack == "auto" else self.stack,
            together=getattr(self.method, "open_ended", False),
            cores=torch.get_num_threads() if self.device.type == "cpu" else 1,
        )

    def _started(
        self, memory: Memory, first: dict[int, torch.Tensor], members: Sequence[int]
    ) -> Job[list[Trained]]:
        """Return the training of a stack, its models made and its state initialised."""
        streams = [Streams(self.secrets[k]) for k in members]
        oracle = StackOracle(
            dataclasses.replace(self.schedule, steps=max(self.steps[k] for k in members)),
            data=self.data,
            kernel=self.kernel,
            streams=streams,
            device=self.device,
            physical_rows=memory.piece,
            noise=self.noise,
            places=None if self.places is None else [self.places[k] for k in members],
        )
        oracle.compute_at_once(
            memory.piece, granule(oracle.schedule, memory.row_bytes, len(members))
        )
        flats = [first.pop(k) if k in first else self.initial(k) for k in members]
        own = [{n: v for n, v in self.values[k].items() if n not in SEARCHED} for k in members]
        state = self.method.init(torch.stack(flats).to(self.device), own)
        checkpoint = None
        # Of noise that is placed in longer vectors no position is kept: it would be drawn twice.
        if self.keeper is not None and len(members) == 1 and self.places is None:
            checkpoint = self._checkpoint(self.keeper, members[0], oracle, state)
        return partial(
            run_stack,
            self.method,
            state,
            oracle,
            steps=[self.steps[k] for k in members],
            paces=[self.paces[k] for k in members],
            snapshots_at=self.snapshots_at,
            checkpoint=checkpoint,
            look=self.look,
        )

    def _checkpoint(self, keeper: Keeper, k: int, oracle: StackOracle, state: Any) -> Checkpoint:
        kernel, own = self.kernel, Streams(self.secrets[k]).key("checkpoint").hex()
        about = (self.method, oracle.schedule, self.values[k], tuple(self.paces[k]), self.noise)
        seen = kernel.seen if isinstance(kernel, BatchedKernel) else Counter[Shape]()
        training = repr((own, *about, fingerprint(self.data), kernel.module))
        return Checkpoint(keeper, training, state, oracle, seen)


def held_to_facts(
    data: TensorData, kernel: Kernel, loss_of: LossOf, device: torch.device
) -> TensorData:
    """Return data of which records that a model's tables and classes cannot hold count as unusable."""
    facts = find_facts(lambda x, y: loss_of(kernel.module, x, y), *data.like, device=device)
    return data.held_to(facts)


def _in_order(stacks: Sequence[Sequence[int]], done: Sequence[Sequence[Trained]]) -> list[Trained]:
    """Return what was trained in stacks by the number of each candidate."""
    numbers, outcomes = chain.from_iterable(stacks), chain.from_iterable(done)
    found = dict(zip(numbers, outcomes, strict=True))
    return [found[number] for number in range(len(found))]


def _check_transcripts(
    method: Method[Any], schedule: Schedule, outcomes: Sequence[Trained], counts: Sequence[int]
) -> None:
    """Hold what was released for each candidate against what was charged: no more and no less."""
    events = {n: method.event(dataclasses.replace(schedule, steps=n)) for n in set(counts)}
    for outcome, count in zip(outcomes, counts, strict=True):
        outcome.transcript.check_within(events[count])
        outcome.transcript.check_whole(events[count])


def _check_secrets(candidates: Sequence[Candidate], secrets: Sequence[bytes]) -> None:
    if len(candidates) != len(secrets) or not candidates:
        raise InvalidInputError(
            "secrets", f"{len(secrets)} of them", "must be one for each candidate, at least 1"
        )


def _paces(
    method: Method[Any], schedule: Schedule, candidates: Sequence[Candidate], counts: Sequence[int]
) -> list[tuple[float, ...]]:
    """Return the factors of each candidate's learning rate, step by step."""
    return [
        rate_factors(method, candidate, dataclasses.replace(schedule, steps=count))
        for candidate, count in zip(candidates, counts, strict=True)
    ]


def _steps(schedule: Schedule, steps: Sequence[int] | None, candidates: int) -> list[int]:
    counts = [schedule.steps] * candidates if steps is None else list(steps)
    if len(counts) != candidates or not all(1 <= n <= schedule.steps for n in counts):
        raise InvalidInputError(
            "steps", steps, f"must be one for each candidate, from 1 to {schedule.steps}"
        )
    return counts


def choose_kernel(
    module: nn.Module,
    loss_of: LossOf,
    data: TensorData,
    device: torch.device,
    *,
    compiled: bool = False,
    precision: str = "float32",
    program: Hashable = None,
) -> Kernel:
    """Return the batched kernel, or one that takes record after record for a model that it cannot take.

    Whoever runs such a model on a batch trusts that its way hangs on no record but its own: a scale
    that is read from the batch where a pixel is above 1 shows on no record that is made up.

    Args:
        module: The model. The kernel runs a copy of it.
        loss_of: The loss of a record.
        data: Gives the shapes and types of records.
        device: Where to compute.
        compiled: Whether to compile what is common.
        precision: Of passes.
        program: What tells the program of model and loss apart, where it is known; else it is captured.
    """
    x, y = data.like
    classes = targets_are_classes(data)
    low = _LOW[precision]
    if low is not None and compiled:
        raise InvalidInputError(
            "precision", precision, "is not compiled", "Leave compile off, or precision float32."
        )
    if program is None:
        found = program_of(module, loss_of, x, y)
        program = None if found is None else found.digest
    seen = (x.shape, x.dtype, y.shape, y.dtype)
    key = (program, seen, device, classes, compiled, low)
    known = _kernels.get(key)
    if known is not None and same_fixed(module, known.module):
        return known
    try:
        kernel = BatchedKernel(
            lambda: fresh(module, trained=True)[0],
            loss_of,
            x=x,
            y=y,
            device=device,
            all_classes=classes,
            compiled=compiled,
            low=low,
        )
    except NotBatchableError as reason:
        name = type(module).__name__
        if low is not None:
            raise InvalidInputError(
                "precision",
                precision,
                f"does not suit {name} ({reason})",
                "Leave it out: float32 is the default.",
            ) from reason
        single = OneByOneKernel.of(
            lambda: fresh(module, trained=True)[0], loss_of, x=x, y=y, device=device
        )
        say_once(
            f"{name} cannot be trained in stacks ({reason}): each record is "
            "computed in a pass of its own, which costs many times as much."
        )
        return single
    if program is not None:
        _kernels.pop(key, None)
        while len(_kernels) >= _KERNELS:
            _kernels.pop(next(iter(_kernels)))
        _kernels[key] = kernel
    return kernel


_LOW = {"float32": None, "bfloat16": torch.bfloat16}
_KERNELS = 4  # what was captured for a model is kept for the next trial of it


class _OfThread(UserDict[Hashable, BatchedKernel], threading.local):
    """Kernels by what they are for; of each thread its own, as a kernel's model serves one training."""


_kernels = _OfThread()


def _joined(outcomes: Sequence[Trained], steps: int) -> TrainingResult:
    """Put the outcomes of all candidates side by side."""
    params = torch.stack([o.params for o in outcomes])
    report = {}
    for name in outcomes[0].report:
        columns = [o.report[name] for o in outcomes]
        if any(len(column) < steps for column in columns):
            columns = [c if c.is_floating_point() else c.to(params) for c in columns]
            columns = [torch.cat([c, c.new_full((steps - len(c),), math.nan)]) for c in columns]
        report[name] = torch.stack(columns, dim=1)
    return TrainingResult(
        params=params,
        report=report,
        transcripts=tuple(o.transcript for o in outcomes),
        gradient_evaluations=tuple(o.gradient_evaluations for o in outcomes),
        nonfinite=tuple(o.nonfinite for o in outcomes),
        diverged=tuple((~params.isfinite().all(dim=1)).tolist()),
        snapshots=tuple(o.snapshots for o in outcomes),
    )


def _made(model: Callable[[], nn.Module], streams: Streams) -> nn.Module:
    """Initialise a model from the candidate's stream, leaving the global generator as it was."""
    with Initialisation(streams):
        return model()


def _initial(module: nn.Module, kernel: Kernel) -> torch.Tensor:
    """Return the parameters of a model, if the kernel computes its passes."""
    if Layout(module).shapes != kernel.layout.shapes or not same_fixed(module, kernel.module):
        raise InvalidInputError(
            "model",
            type(module).__name__,
            "must have the same shape, frozen parameters and buffers every time it is made",
            "Load what is frozen from a file, or seed it.",
        )
    return kernel.layout.flatten({n: p.detach() for n, p in module.named_parameters()})
