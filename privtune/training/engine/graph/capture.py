"""One pass over many candidates and records: planned once, captured as a flat graph.

Planning runs the model once with every parameter a leaf of autograd. A parameter that autograd
still reaches was used in a way that was not caught; it, and any parameter that is used twice, is
copied for every record from then on, which is exact for any use. So no use is missed silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch._C import _functorch as functorch
from torch.func import functional_call
from torch.utils._pytree import tree_map

from privtune.errors import InvalidInputError
from privtune.training.engine.graph.backward import apart, refuse_batched_backward
from privtune.training.engine.graph.chance import drawn_with_torch
from privtune.training.engine.graph.intercept import Intercept
from privtune.training.engine.graph.polish import polish
from privtune.training.engine.graph.record import NotRecordedError, record
from privtune.training.engine.graph.tape import Entry, Levels, Site
from privtune.training.engine.layers.uses import CopyUse, Use, cheaper_form
from privtune.training.mechanism.kernel import Layout, LossOf

Tensors = tuple[torch.Tensor, ...]
Program = Callable[..., Tensors]
Tape = tuple[Program, Sequence[Use]]  # and the uses that it gives (a, g) of, in order


@dataclass(frozen=True)
class PassPlan:
    """How a model's parameters are used.

    Args:
        copied: Parameters that are copied for every record.
        sites: Places of dropout.
        uses: Every use, in the order of the tape; for copies, after the others.
        all_classes: Whether every target is a class, none of them an index to ignore.
    """

    copied: tuple[str, ...]
    sites: tuple[Site, ...]
    uses: tuple[Use, ...]
    all_classes: bool


@dataclass(frozen=True, eq=False)
class Lowered:
    """The way forward and back in numbers of fewer digits.

    **Guarantee**: what a layer saw and what came back to it leave a pass in the parameters' own type,
    before anything is made of them. Norms and sums are then functions of one pair of float32 tensors:
    the gradient whose length a record is clipped by is, bit for bit, the one that is summed. How far
    it lies from the true one changes what is learned, and no sensitivity.

    Args:
        dtype: Their type.
        fixed: What is not trained of the model, by name, in that type.
    """

    dtype: torch.dtype
    fixed: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> Lowered:
        """Return the model's frozen parameters and buffers in a type."""
        frozen = {n: p.detach() for n, p in module.named_parameters() if not p.requires_grad}
        every = {**frozen, **dict(module.named_buffers())}
        return cls(dtype, {n: t.to(dtype) for n, t in every.items() if t.is_floating_point()})

    def down(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring what goes in to the type; whole numbers stay."""
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class _Pass:
    """One run of the model on all rows: losses ``[K, B]``, the tape, dropout places."""

    losses: torch.Tensor
    entries: list[Entry]
    sites: list[Site]


def plan_model(
    module: nn.Module,
    loss_of: LossOf,
    layout: Layout,
    *,
    x: torch.Tensor,
    y: torch.Tensor,
    all_classes: bool = False,
    copy_all: bool = False,
) -> PassPlan:
    """Find out how the model uses its parameters, on rows ``[K, B, ...]`` with K and B above 1.

    Args:
        module: The model.
        loss_of: The loss of a record.
        layout: Where parameters lie.
        x: Inputs.
        y: Targets.
        all_classes: Whether every target is a class, none of them an index to ignore.
        copy_all: Whether every parameter is copied for every record and no use is caught: exact for
            whatever a loss does, gradients within it included, and slower.

    Raises:
        RuntimeError: If the model cannot run under ``vmap``.
    """
    draws = torch.Generator(x.device).manual_seed(0)  # another thread may use the global one
    leaves = {
        name: torch.randn(
            len(x), *shape, dtype=layout.dtype, device=x.device, generator=draws
        ).requires_grad_()
        for name, shape in layout.shapes.items()
    }
    if copy_all:
        own = {
            n: leaf.unsqueeze(1).expand(-1, x.shape[1], *layout.shapes[n])
            for n, leaf in leaves.items()
        }
        done = drawn_with_torch(lambda: _run(module, loss_of, {}, copies=own, x=x, y=y, masks=None))
        refuse_batched_backward(module, done.losses)
        copies = tuple(CopyUse(name, None) for name in layout.shapes)
        return PassPlan(tuple(layout.shapes), tuple(done.sites), copies, all_classes)
    done = drawn_with_torch(lambda: _run(module, loss_of, leaves, copies={}, x=x, y=y, masks=None))
    refuse_batched_backward(module, done.losses)
    reached = (
        torch.autograd.grad(
            done.losses.sum(), list(leaves.values()), allow_unused=True, retain_graph=True
        )
        if done.losses.requires_grad
        else [None] * len(leaves)
    )
    copied = {n for n, g in zip(leaves, reached, strict=True) if g is not None}
    groups = grouped(done.entries)
    counts = Counter(name for group in groups for name in group[0].use.names)
    copied |= {name for name, count in counts.items() if count > 1}
    for group in groups:  # its weight and its bias are caught together or not at all
        if copied & set(group[0].use.names) or not group[0].use.merges(group):
            copied |= set(group[0].use.names)
    uses = [g[0].use for g in groups if not copied & set(g[0].use.names)]
    ordered = tuple(name for name in layout.shapes if name in copied)
    return PassPlan(
        ordered, tuple(done.sites), (*uses, *(CopyUse(n, None) for n in ordered)), all_classes
    )


def tape_of(
    module: nn.Module,
    loss_of: LossOf,
    layout: Layout,
    plan: PassPlan,
    *,
    low: Lowered | None = None,
    losses: bool = False,
) -> Tape:
    """Return the program that runs forward and backward pass.

    Args:
        module: The model.
        loss_of: The loss of a record.
        layout: Where parameters lie.
        plan: How they are used.
        low: In what numbers to run, if not those of the parameters.
        losses: Whether the program gives the losses, too.

    Returns:
        A program from ``(params [K, P], x, y, *masks)`` to ``(a, g)`` of every use, one after the
        other, and then the losses ``[K, B]``, if asked for; run as it is. And the list of uses,
        filled by its first run.
    """
    uses: list[Use] = []

    def program(
        params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *masks: torch.Tensor
    ) -> Tensors:
        with torch.enable_grad():
            flat = params.detach()
            if low is not None:
                flat, x, masks = low.down(flat), low.down(x), tuple(map(low.down, masks))
            named = layout.unflatten(flat)
            copies = {
                name: named.pop(name).unsqueeze(1).expand(-1, x.shape[1], *layout.shapes[name])
                for name in plan.copied
            }
            copies = {name: copy.detach().requires_grad_() for name, copy in copies.items()}
            done = _run(
                module,
                loss_of,
                named,
                copies=copies,
                x=x,
                y=y,
                masks=masks,
                all_classes=plan.all_classes,
                low=low,
            )
            outs = [entry.out for entry in done.entries] + list(copies.values())
            # The sum of losses of records; a gradient to start from would import an algebra system.
            grads = torch.autograd.grad(
                done.losses.sum(), outs, allow_unused=True, materialize_grads=True
            )
        back = dict(zip(map(id, done.entries), grads, strict=False))
        uses[:], found = [], []
        for group in grouped(done.entries):
            use, pair = merged(group, [back[id(entry)] for entry in group])
            uses.append(use)
            found += pair
        for (name, copy), g in zip(copies.items(), grads[len(done.entries):], strict=True):
            uses.append(CopyUse(name, None))
            found += [copy.detach(), g]
        if losses:
            found.append(done.losses.detach())
        return tuple(t.to(params.dtype) if t.is_floating_point() else t for t in found)

    return program, uses


def grouped(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the uses of each weight together, in the order of the first."""
    found: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.use.names, []).append(entry)
    return list(found.values())


def merged(group, grads):
    if len(group) == 1:
        return group[0].use, group[0].use.compact(group[0].a, grads[0])
    a = torch.cat([entry.a for entry in group], dim=2)
    g = torch.cat(list(grads), dim=2)
    use = group[0].use
    use = replace(use, form=cheaper_form(a.shape[2], a.shape[-1], g.shape[-1], rows=a.shape[0] * a.shape[1]))
    return use, use.compact(a, g)


def capture_tape(
    module: nn.Module,
    loss_of: LossOf,
    layout: Layout,
    plan: PassPlan,
    example: Tensors,
    *,
    low: Lowered | None = None,
    losses: bool = False,
    then: Callable[[Program, Sequence[Use]], Program] | None = None,
) -> Tape:
    """Capture the program of ``tape_of``, or what is made of it, for tensors like the example."""
    program, uses = tape_of(module, loss_of, layout, plan, low=low, losses=losses)
    program = program if then is None else then(program, uses)
    return polish(record(program, example), example), uses


def capture_losses(
    module: nn.Module, loss_of: LossOf, layout: Layout, plan: PassPlan, example: Tensors
) -> Program:
    """Capture the forward pass alone, without dropout: ``(params, x, y)`` to losses ``[K, B]``.

    One that reads a value is returned as it is.
    """

    def program(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        named = layout.unflatten(params)
        return (
            _run(
                module,
                loss_of,
                named,
                copies={},
                x=x,
                y=y,
                masks=None,
                deterministic=True,
                all_classes=plan.all_classes,
            ).losses.detach(),
        )

    try:
        return polish(record(program, example), example)
    except NotRecordedError:
        return program


def run_one(
    module: nn.Module,
    loss_of: LossOf,
    named: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the loss of one record by itself, by plain autograd: the reference of the check.

    Without masks nothing is dropped.
    """
    with Intercept(None, masks=masks, deterministic=not masks):
        return _one(module, loss_of, named, x, y)


def _run(
    module: nn.Module,
    loss_of: LossOf,
    stacked: Mapping[str, torch.Tensor],
    *,
    copies: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    masks: Sequence[torch.Tensor] | None,
    deterministic: bool = False,
    all_classes: bool = False,
    low: Lowered | None = None,
) -> _Pass:
    """Run the model on every row under two nested vmaps.

    ``stacked`` parameters are ``[K, ...]``, ``copies`` and masks ``[K, B, ...]``.
    """
    found: list[_Pass] = []
    sizes = (x.shape[0], x.shape[1])
    masked = masks is not None

    def candidate(
        named: Mapping[str, torch.Tensor],
        copied: Mapping[str, torch.Tensor],
        xs: torch.Tensor,
        ys: torch.Tensor,
        drops: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        outer = functorch.maybe_get_level(xs)

        def record(
            own: Mapping[str, torch.Tensor],
            x: torch.Tensor,
            y: torch.Tensor,
            drop: Sequence[torch.Tensor],
        ) -> torch.Tensor:
            levels = Levels(outer, functorch.maybe_get_level(x), sizes)
            names = {id(tensor): name for name, tensor in named.items()}
            mode = Intercept(
                levels,
                names=names,
                masks=drop if masked else None,
                deterministic=deterministic,
                classes=levels.physical(y) if all_classes else None,
            )
            with mode:
                value = _one(module, loss_of, {**named, **own}, x, y, low=low)
            found.append(_Pass(value, mode.entries, mode.sites))
            return value

        return torch.vmap(record, in_dims=(0, 0, 0, 0))(copied, xs, ys, drops)

    with apart():
        losses = torch.vmap(candidate)(stacked, copies, x, y, tuple(masks or ()))
    if any(entry.out._version != entry.version for entry in found[0].entries):
        raise RuntimeError("the model changes the output of a layer in place")
    return _Pass(losses, found[0].entries, found[0].sites)


def _one(
    module: nn.Module,
    loss_of: LossOf,
    named: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    low: Lowered | None = None,
) -> torch.Tensor:
    """Run the model and the loss on one record, as a batch of one."""
    whole = _Whole(module, loss_of if low is None else _OfRaised(loss_of))
    named = named if low is None else {**low.fixed, **named}
    own = {f"model.{name}": tensor for name, tensor in named.items()}
    value: torch.Tensor = functional_call(whole, own, (x.unsqueeze(0), y.unsqueeze(0)))
    if not torch.is_tensor(value) or value.numel() != 1:
        given = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
        raise InvalidInputError(
            "loss", given, "must be one number for one record, a tensor of shape (1,)"
        )
    return value.reshape(())


@dataclass(frozen=True)
class _OfRaised:
    """A loss in float32 of what a model gives in numbers of fewer digits."""

    loss_of: LossOf

    def __call__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def raised(*args: Any, **kwargs: Any) -> Any:
            def up(part: Any) -> Any:
                return part.float() if torch.is_tensor(part) and part.is_floating_point() else part

            return tree_map(up, model(*args, **kwargs))

        return self.loss_of(cast(nn.Module, raised), x, y)


class _Whole(nn.Module):
    """A model and the loss of its records as one module, so that parameters can be replaced."""

    def __init__(self, model: nn.Module, loss_of: LossOf) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss_of(self.model, x, y)
