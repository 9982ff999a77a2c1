"""Candidates that are ready to be trained, and which of them are trained together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine.optimizers import OPTIMIZER, Own
from privtune.training.engine.program import Program
from privtune.training.mechanism.kernel import Layout, flatten_params, same_fixed
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import GLOBAL_GENERATOR, Streams
from privtune.training.methods._rate_schedule import SEARCHED, rate_factors
from privtune.training.methods.dpsgd import AutomaticClipping, FixedRates

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from privtune.training.methods import Method

_NARROW = 2**15  # weights of a model whose steps take as long as those of a narrower one


@contextmanager
def initialisation(streams: Streams) -> Iterator[None]:
    """Seed torch's global generator for one trial while its model is made, then put it back.

    **Guarantee**: what is drawn inside depends on the trial's secret alone, however many threads run
    trials: they take turns.
    """
    with GLOBAL_GENERATOR:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(streams.seed("initialisation"))
        try:
            yield
        finally:
            torch.set_rng_state(before)


@dataclass(frozen=True, eq=False)
class Made:
    """A candidate that is ready to be trained.

    Args:
        model: Its own, with its first weights; what does not require gradients stays as it is.
        secret: 32 bytes; everything random derives from it.
        values: The method's hyperparameters, and its own ``schedule`` and ``warmup``.
        optimizer: One of torch's over the trainable parameters; None where the method steps by itself.
        scheduler: One of torch's over the optimizer, stepped once after every step.
    """

    model: nn.Module
    secret: bytes
    values: Mapping[str, Any]
    optimizer: torch.optim.Optimizer | None = None
    scheduler: LRScheduler | None = None


@dataclass(frozen=True, eq=False)
class Member:
    """A candidate of a group: which of all it is, from 0, and its optimizer, if it has one.

    Its parameters lie at ``places`` of those of the group's model; None where all are of one width.
    """

    position: int
    made: Made
    own: Own | None = None
    places: torch.Tensor | None = None

    @property
    def values(self) -> dict[str, Any]:
        """What the method is told of it; an optimizer is one of its hyperparameters."""
        own = {} if self.own is None else {OPTIMIZER: self.own}
        return {n: v for n, v in {**self.made.values, **own}.items() if n not in SEARCHED}

    def paces(self, method: Method[Any], schedule: Schedule) -> list[float]:
        """Return the factors on its learning rate, one a step."""
        factors = rate_factors(method, self.made.values, schedule)
        own = (1.0,) * schedule.steps if self.own is None else self.own.paces
        return [a * b for a, b in zip(factors, own, strict=True)]

    def widened(self, size: int) -> torch.Tensor:
        """Return its first parameters among those of the group's model, ``[size]``, zeros elsewhere."""
        flat, places = flatten_params(self.made.model), self.places
        return flat if places is None else flat.new_zeros(size).index_copy_(0, places, flat)

    def narrowed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its own parameters on the CPU, of those of the group's model."""
        flat = flat.detach().to("cpu", copy=True)
        return flat if self.places is None else flat[self.places]


@dataclass(eq=False)
class Group:
    """Candidates whose passes one kernel, that of the first, computes, and whose steps one call takes.

    They have a key in common: program, and what steps them; there is no program where a pass cannot be
    captured.
    """

    key: tuple[Hashable, ...]
    program: Program | None
    members: list[Member]

    @property
    def model(self) -> nn.Module:
        """The model of the first."""
        return self.members[0].made.model

    @property
    def size(self) -> int:
        """How many parameters are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def holds(self, other: Group) -> bool:
        """Say whether the wider passes of this group compute those of another, and soon enough."""
        if self.program is None or other.program is None or self.key[1:] != other.key[1:]:
            return False
        if self.size > max(_NARROW, 2 * other.size) or not same_fixed(self.model, other.model):
            return False
        return self.program.holds(other.program)

    def add(self, other: Group) -> None:
        """Take the candidates of another group, filled up with zeros."""
        wide, narrow = Layout(self.model), Layout(other.model)
        every = torch.arange(wide.size)
        views, shapes = wide.unflatten(every), narrow.shapes.items()
        parts = [views[name][tuple(slice(n) for n in shape)].flatten() for name, shape in shapes]
        places = torch.cat(parts)
        own = [m if m.places is not None else replace(m, places=every) for m in self.members]
        self.members = [*own, *(replace(member, places=places) for member in other.members)]


def put(groups: list[Group], member: Member, program: Program | None) -> int:
    """Put a candidate beside those that are alike; return the bytes that it holds.

    Those are alike that differ in the numbers of what is trained alone; one without a program is like no
    other.
    """
    model, own = member.made.model, member.own
    key = (program and program.digest, "the method" if own is None else own.kind)
    for group in groups if program is not None else ():
        if group.key == key and same_fixed(group.model, model):
            _share_fixed(model, group.model)
            group.members.append(member)
            return sum(p.nbytes for p in model.parameters() if p.requires_grad)
    groups.append(Group(key, program, [member]))
    return sum(p.nbytes for p in model.parameters())


def merged(groups: list[Group], method: Method[Any]) -> list[Group]:
    """Let wide models take narrow ones into their stacks, where nothing looks at all weights at once."""
    if not isinstance(method, FixedRates | AutomaticClipping):
        return groups
    found: list[Group] = []
    for group in sorted(groups, key=lambda group: -group.size):
        plain = all(member.own is None or member.own.widens for member in group.members)
        wide = next((wide for wide in found if wide.holds(group)), None) if plain else None
        if wide is None:
            found.append(group)
        else:
            wide.add(group)
    return found


def _share_fixed(model: nn.Module, like: nn.Module) -> None:
    """Let what is frozen lie in memory once: it is the same, and nothing writes to it."""
    same = dict(like.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = same[name].data


def check_model(model: nn.Module) -> None:
    """Refuse a model of which something would be left out, or trained apart from what it belongs to."""
    layout = Layout(model)
    trained = {n: p for n, p in model.named_parameters() if n in layout.shapes}
    for name, parameter in trained.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InvalidInputError(
                "model",
                name,
                "must have no hook on its gradient: gradients of single records never pass there",
                "Remove the hook; clipping bounds each record.",
            )
    held = {p.untyped_storage().data_ptr() for p in trained.values() if p.numel()}
    others: list[tuple[str, torch.Tensor]] = [*model.named_buffers()]
    others += [(n, p) for n, p in model.named_parameters() if n not in trained]
    others += [(n, v) for m in model.modules() for n, v in vars(m).items() if torch.is_tensor(v)]
    for name, tensor in others:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in held:
            raise InvalidInputError(
                "model",
                name,
                "must not be a view of a parameter that is trained: it would stay as it is now",
                "Take it from the parameter in forward.",
            )
