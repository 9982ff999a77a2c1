"""Training of many candidates: stacks, steps, transcripts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.batched import BatchedKernel, NotBatchableError
from privtune.training.data import Data, TensorData
from privtune.training.kernel import Kernel, Layout, Loss, flatten_params, load_params
from privtune.training.opacus_adapter import OpacusKernel
from privtune.training.releases import StackOracle
from privtune.training.schedule import Schedule
from privtune.training.streams import Streams
from privtune.training.transcript import Transcript

if TYPE_CHECKING:
    from privtune.training.methods._base import Candidate, Method

__all__ = [
    "FallbackWarning",
    "TensorData",
    "TrainingResult",
    "flatten_params",
    "load_params",
    "train",
]

_PHYSICAL_ROWS = 4096


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The trained candidates. Only ``params`` and ``report`` are functions of releases.

    Args:
        params: Final parameters, shape ``[K, P]``.
        report: What the method reports, by name: shape ``[T, K]``.
        transcripts: What was released, one a candidate.
        gradient_evaluations: Realised per-sample gradients of each candidate. Sealed.
        nonfinite: Per-sample gradients that were not finite and counted as zero. Sealed.
        diverged: Whether the final parameters are not finite: a result, not an error.
    """

    params: torch.Tensor
    report: Mapping[str, torch.Tensor]
    transcripts: tuple[Transcript, ...]
    gradient_evaluations: tuple[int, ...]
    nonfinite: tuple[int, ...]
    diverged: tuple[bool, ...]


def train(
    method: Method[Any],
    schedule: Schedule,
    *,
    model: Callable[[], nn.Module],
    loss: Loss,
    data: Data,
    candidates: Sequence[Candidate],
    secrets: Sequence[bytes],
    device: str = "auto",
    stack: int | Literal["auto"] = "auto",
    on_step: Callable[[int, Mapping[str, torch.Tensor]], None] | None = None,
) -> TrainingResult:
    """Train candidates of one architecture, each with its own samples, noise and privacy.

    Args:
        method: The training method, with its noise fixed by a plan.
        schedule: Records, sampling rate and steps.
        model: Makes the model; its parameters are initialised from each candidate's own stream.
        loss: Loss of each record: outputs ``[B, ...]`` and targets ``[B, ...]`` to ``[B]``.
        data: The private records.
        candidates: Hyperparameters of each candidate.
        secrets: 32 bytes a candidate; with them, its result does not depend on its stack.
        device: ``"auto"`` (CUDA when there is one), ``"cpu"`` or ``"cuda"``.
        stack: How many candidates to train at once, or ``"auto"``.
        on_step: Called after every step with its number and the stack's report.

    Returns:
        The results, in the order of ``candidates``.

    Raises:
        InvalidInputError: If an argument is outside its domain.
        TranscriptMismatchError: If more was released than ``method.event(schedule)`` charges.

    **Guarantee**: each candidate's parameters and report are an output of the mechanism that
    ``method.event(schedule)`` describes; no candidate's data or divergence touches another's bits.
    """
    if len(candidates) != len(secrets) or not candidates:
        raise InvalidInputError(
            "secrets", f"{len(secrets)} of them", "must be one for each candidate, at least 1"
        )
    place = _device(device)
    size = len(candidates) if stack == "auto" else stack
    if size < 1:
        raise InvalidInputError("stack", stack, 'must be "auto" or at least 1')
    local = data.to(place)
    kernel = choose_kernel(model, loss, local, place, schedule)
    parts = []
    for start in range(0, len(candidates), size):
        streams = [Streams(secret) for secret in secrets[start : start + size]]
        oracle = StackOracle(
            schedule,
            data=local,
            kernel=kernel,
            streams=streams,
            device=place,
            physical_rows=_PHYSICAL_ROWS,
        )
        params = torch.stack([_initial(model, s, kernel.layout) for s in streams]).to(place)
        state = method.init(params, candidates[start : start + size])
        parts.append(_run(method, state, oracle, on_step))
    result = _concatenate(parts)
    event = method.event(schedule)
    for transcript in result.transcripts:
        transcript.check_within(event)
    return result


def choose_kernel(
    model: Callable[[], nn.Module],
    loss: Loss,
    data: Data,
    device: torch.device,
    schedule: Schedule,
) -> Kernel:
    """Return the batched kernel, or Opacus one by one for a model that it cannot take."""
    x, y = data.take(torch.zeros(1, dtype=torch.long, device=device))
    try:
        return BatchedKernel(
            model, loss, x=x, y=y, device=device, all_classes=data.targets_are_classes()
        )
    except NotBatchableError as reason:
        records = math.ceil(schedule.expected_batch_size)
        kernel = OpacusKernel(model, loss, x=x, y=y, device=device, records=records)
        _say_once(
            f"{type(model()).__name__} cannot be trained in stacks ({reason}): candidates are "
            f"trained one by one through Opacus ({kernel.mode} mode), which costs several times as "
            "much for small models."
        )
        return kernel


_said: set[str] = set()


def _say_once(message: str) -> None:
    """Warn about a fallback, the first time only."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, FallbackWarning, stacklevel=4)


class FallbackWarning(UserWarning):
    """A model takes a slower path than the batched engine. Results and privacy are the same."""


def _run(
    method: Method[Any],
    state: Any,
    oracle: StackOracle,
    on_step: Callable[[int, Mapping[str, torch.Tensor]], None] | None,
) -> TrainingResult:
    """Train one stack from its initial state."""
    reports: list[Mapping[str, torch.Tensor]] = []
    for step in range(oracle.schedule.steps):
        state = method.update(state, oracle)
        reports.append(method.report(state))
        if on_step is not None:
            on_step(step, reports[-1])
    params = state.params.detach()
    return TrainingResult(
        params=params,
        report={name: torch.stack([r[name] for r in reports]) for name in reports[0]},
        transcripts=tuple(oracle.transcripts()),
        gradient_evaluations=tuple(oracle.gradient_evaluations.tolist()),
        nonfinite=tuple(oracle.nonfinite.tolist()),
        diverged=tuple((~params.isfinite().all(dim=1)).tolist()),
    )


def _concatenate(parts: Sequence[TrainingResult]) -> TrainingResult:
    """Join the results of several stacks."""
    return TrainingResult(
        params=torch.cat([p.params for p in parts]),
        report={n: torch.cat([p.report[n] for p in parts], dim=1) for n in parts[0].report},
        transcripts=tuple(t for p in parts for t in p.transcripts),
        gradient_evaluations=tuple(n for p in parts for n in p.gradient_evaluations),
        nonfinite=tuple(n for p in parts for n in p.nonfinite),
        diverged=tuple(d for p in parts for d in p.diverged),
    )


def _initial(model: Callable[[], nn.Module], streams: Streams, layout: Layout) -> torch.Tensor:
    """Initialise the model from the candidate's stream, leaving the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(streams.seed("initialisation"))
        return layout.flatten({n: p.detach() for n, p in model().named_parameters()})


def _device(device: str) -> torch.device:
    """Choose the device."""
    if device not in ("auto", "cpu", "cuda"):
        raise InvalidInputError("device", device, 'must be "auto", "cpu" or "cuda"')
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("device", device, "needs a CUDA device, and there is none")
    return torch.device(device)
