"""Training of candidates that a ``build`` made: those that run the same program share a stack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine.checkpoint import Keeper
from privtune.training.engine.compute import check_device, check_stack
from privtune.training.engine.optimizers import OPTIMIZER, Optimized, Own, checked
from privtune.training.engine.program import Program, program_of
from privtune.training.engine.stacks import Trained
from privtune.training.engine.threads import OnStep
from privtune.training.engine.train import Training, choose_kernel, held_to_facts
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import (
    Layout,
    LossOf,
    flatten_params,
    load_params,
    same_fixed,
)
from privtune.training.mechanism.noise_options import NoiseOptions
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.transcript import Transcript
from privtune.training.methods._rate_schedule import rate_factors
from privtune.training.methods.automatic import AutomaticClipping
from privtune.training.methods.dpsgd import FixedRates

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from privtune.training.methods import Method

_NARROW = 2**15  # weights of a model whose steps take as long as those of a narrower one
_HELD_BYTES = 512 * 2**20  # of models that wait to be trained together


@dataclass(frozen=True, eq=False)
class Made:
    """A candidate that is ready to be trained.

    Args:
        model: Its own, with its first weights; what does not require gradients stays as it is.
        secret: 32 bytes; everything random derives from it.
        values: The method's hyperparameters; with an optimizer ``max_grad_norm``, and ``schedule`` and
            ``warmup`` where they are used.
        optimizer: One of torch's over the trainable parameters; None where the method steps by itself.
        scheduler: One of torch's over the optimizer, stepped once after every step.
    """

    model: nn.Module
    secret: bytes
    values: Mapping[str, Any]
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of a candidate. Only ``params``, ``report`` and ``module`` are functions of releases.

    Args:
        position: Which of the candidates it was, counted from 0.
        params: Final parameters on the CPU, shape ``[P]``.
        report: What the method reports by name, one value a step, on the CPU, shape ``[T]``.
        transcript: What was released.
        gradient_evaluations: Realised per-sample gradients. Sealed.
        nonfinite: Records that counted as zero, by sample: see ``TrainingResult``. Sealed.
        snapshots: Parameters after the steps that were asked for, by step, on the CPU, shape ``[P]``.
        module: The candidate's model, with the final parameters in it.
    """

    position: int
    params: torch.Tensor
    report: Mapping[str, torch.Tensor]
    transcript: Transcript
    gradient_evaluations: int
    nonfinite: int
    snapshots: Mapping[int, torch.Tensor]
    module: nn.Module


@dataclass(eq=False)
class _Member:
    """A candidate of a group.

    Args:
        position: Which it is.
        made: It.
        own: Its optimizer, if it has one.
        places: Where its parameters lie in those of the group's model; None where they are as many.
    """

    position: int
    made: Made
    own: Own | None
    places: torch.Tensor | None = None


@dataclass(eq=False)
class _Group:
    """Candidates whose passes one kernel computes, and whose steps one call takes.

    Args:
        key: What they have in common: program, and kind of optimizer.
        program: What the first one's pass does; None where it cannot be captured.
        members: They; the kernel is that of the first.
    """

    key: tuple[Hashable, ...]
    program: Program | None
    members: list[_Member] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        """The model of the first."""
        return self.members[0].made.model

    @property
    def size(self) -> int:
        """How many parameters are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def takes(self, key: tuple[Hashable, ...], model: nn.Module) -> bool:
        """Say whether another candidate is alike: it differs in numbers of what is trained alone."""
        alike = key[0] is not None and self.key == key
        return alike and same_fixed(self.model, model)

    def holds(self, other: _Group) -> bool:
        """Say whether the wider passes of this group compute those of another, and soon enough."""
        if self.program is None or other.program is None or self.key[1:] != other.key[1:]:
            return False
        if self.size > max(_NARROW, 2 * other.size) or not same_fixed(self.model, other.model):
            return False
        return self.program.holds(other.program)

    def add(self, other: _Group) -> None:
        """Take the candidates of another group, filled up with zeros."""
        wide, narrow = Layout(self.model), Layout(other.model)
        found = []
        for name, (start, end) in wide.spans.items():
            part = torch.arange(start, end).view(wide.shapes[name])
            found.append(part[tuple(slice(n) for n in narrow.shapes[name])].flatten())
        places = torch.cat(found)
        for member in other.members:
            self.members.append(replace(member, places=places))


def _merged(groups: list[_Group], method: Method[Any]) -> list[_Group]:
    """Let wide models take narrow ones into their stacks, where nothing looks at all weights at once."""
    if not isinstance(method, FixedRates | AutomaticClipping):
        return groups
    found: list[_Group] = []
    for group in sorted(groups, key=lambda group: -group.size):
        plain = all(member.own is None or member.own.widens for member in group.members)
        wide = next((wide for wide in found if wide.holds(group)), None) if plain else None
        if wide is None:
            found.append(group)
        else:
            wide.add(group)
    return found


def train_made(
    method: Method[Any],
    schedule: Schedule,
    made: Iterable[Made],
    *,
    loss_of: LossOf,
    data: TensorData,
    device: str = "auto",
    stack: int | Literal["auto"] = "auto",
    precision: str = "float32",
    noise: NoiseOptions | None = None,
    on_step: OnStep | None = None,
    snapshots_at: Collection[int] = (),
    keeper: Keeper | None = None,
    look: Callable[[int, torch.Tensor], object] | None = None,
) -> Iterator[Outcome]:
    """Train candidates, each with its own model, samples, noise and privacy.

    Args:
        method: The training method, with its noise fixed by a plan.
        schedule: Records, sampling rate and steps.
        made: The candidates. They are taken one after the other, as many as memory holds; those that
            run the same program are trained in stacks.
        loss_of: The loss of one record: the model, its inputs and targets with a leading axis of 1, to
            shape ``[1]``.
        data: The private records.
        device: ``"auto"`` (CUDA when there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        stack: How many candidates to train at once, or ``"auto"``.
        precision: Of forward and backward pass, ``"float32"`` or ``"bfloat16"``; else float32.
        noise: Where noise comes from and how it is treated; None for the defaults.
        on_step: Called after every step with its number and the stack's report.
        snapshots_at: Steps, counted from 0, after which to keep a copy of the parameters.
        keeper: Where a candidate that is trained alone keeps its checkpoint, and finds it.
        look: Called with the step and the parameters, ``[P]``, after the steps in ``snapshots_at``, where
            one candidate is trained alone; what it raises ends the training.

    Yields:
        What became of each, in any order.

    Raises:
        InvalidInputError: If a candidate cannot be trained as it is; before any sample of it is drawn.
        TranscriptMismatchError: If more or less was released than ``method.event(schedule)`` charges.

    **Guarantee**: each candidate's parameters and report are an output of the mechanism that
    ``method.event(schedule)`` describes; no candidate's data or divergence touches another's bits.
    """
    place = torch.device(check_device(device))
    local, size = data.to(place), check_stack(stack)
    waiting, held = list[_Group](), 0

    def program(model: nn.Module) -> Program | None:
        return program_of(model, loss_of, *local.like)

    def trained() -> Iterator[Outcome]:
        for group in _merged(waiting, method):
            yield from _outcomes(
                group,
                method=method,
                schedule=schedule,
                loss_of=loss_of,
                data=local,
                device=place,
                precision=precision,
                on_step=on_step,
                stack=size,
                noise=noise,
                snapshots_at=snapshots_at,
                keeper=keeper,
                look=look,
            )

    for position, each in enumerate(made):
        held += _put(waiting, position, each, method=method, schedule=schedule, program=program)
        if held > _HELD_BYTES:
            yield from trained()
            waiting, held = [], 0
    yield from trained()


def _put(
    groups: list[_Group],
    position: int,
    made: Made,
    *,
    method: Method[Any],
    schedule: Schedule,
    program: Callable[[nn.Module], Program | None],
) -> int:
    """Check a candidate and put it beside those that are alike; return the bytes that it holds.

    Raises:
        InvalidInputError: If it cannot be trained as it is.
    """
    _check_model(made.model)
    own = None
    if made.optimizer is not None:
        Optimized(method)
        checked(made.optimizer, made.model, made.scheduler)
        own = Own.of(made.optimizer, made.model, made.scheduler, schedule.steps)
    told = program(made.model)
    key = (None if told is None else told.digest, own is None, None if own is None else own.kind)
    group = next((group for group in groups if group.takes(key, made.model)), None)
    if group is None:
        groups.append(group := _Group(key, told))
    else:
        _share_fixed(made.model, group.model)
    group.members.append(_Member(position, made, own))
    shared = len(group.members) > 1
    return sum(p.nbytes for p in made.model.parameters() if p.requires_grad or not shared)


def _share_fixed(model: nn.Module, like: nn.Module) -> None:
    """Let what is frozen lie in memory once: it is the same, and nothing writes to it."""
    frozen = {name: p for name, p in like.named_parameters() if not p.requires_grad}
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.data = frozen[name].data


def _check_model(model: nn.Module) -> None:
    """Refuse a model of which something would be left out, or trained apart from what it belongs to."""
    layout = Layout(model)
    trained = [(n, p) for n, p in model.named_parameters() if n in layout.shapes]
    for name, parameter in trained:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InvalidInputError(
                "model",
                name,
                "must have no hook on its gradient: gradients of single records never pass there",
                "Remove the hook; clipping bounds each record.",
            )
    held = {p.untyped_storage().data_ptr() for _, p in trained if p.numel()}
    others: list[tuple[str, torch.Tensor]] = [*model.named_buffers()]
    others += [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    others += [(n, v) for m in model.modules() for n, v in vars(m).items() if torch.is_tensor(v)]
    for name, tensor in others:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in held:
            raise InvalidInputError(
                "model",
                name,
                "must not be a view of a parameter that is trained: it would stay as it is now",
                "Take it from the parameter in forward.",
            )


def _outcomes(
    group: _Group,
    *,
    method: Method[Any],
    schedule: Schedule,
    loss_of: LossOf,
    data: TensorData,
    device: torch.device,
    precision: str,
    on_step: OnStep | None,
    **options: Any,
) -> Iterator[Outcome]:
    """Train a group and yield what became of each."""
    members, model = group.members, group.model
    kernel = choose_kernel(model, loss_of, data, device, program=group.key[0], precision=precision)
    size = kernel.layout.size

    def initial(k: int) -> torch.Tensor:
        flat, places = flatten_params(members[k].made.model), members[k].places
        return flat if places is None else flat.new_zeros(size).index_copy_(0, places, flat)

    paces, values = [], []
    for member in members:
        given, own = member.made.values, member.own
        factors: Sequence[float] = rate_factors(method, given, schedule)
        if own is not None:
            factors = [a * b for a, b in zip(factors, own.paces, strict=True)]
        paces.append(factors)
        values.append(given if own is None else {**given, OPTIMIZER: own})
    every = torch.arange(size)
    placed = [every if member.places is None else member.places for member in members]
    training = Training(
        method=method if members[0].own is None else cast("Method[Any]", Optimized(method)),
        schedule=schedule,
        kernel=kernel,
        data=held_to_facts(data, kernel, loss_of, device),
        values=values,
        secrets=[member.made.secret for member in members],
        steps=[schedule.steps] * len(members),
        paces=paces,
        initial=initial,
        device=device,
        places=placed if any(member.places is not None for member in members) else None,
        **options,
    )
    for member, found in zip(members, training.run(on_step), strict=True):
        yield _outcome(member, found)


def _outcome(member: _Member, found: Trained) -> Outcome:
    def own(flat: torch.Tensor) -> torch.Tensor:
        flat = flat.cpu()
        return flat if member.places is None else flat[member.places]

    params = own(found.params)
    load_params(member.made.model, params)
    return Outcome(
        position=member.position,
        params=params,
        report={name: values.cpu() for name, values in found.report.items()},
        transcript=found.transcript,
        gradient_evaluations=found.gradient_evaluations,
        nonfinite=found.nonfinite,
        snapshots={step: own(kept) for step, kept in found.snapshots.items()},
        module=member.made.model,
    )
