"""One pass over many candidates and records: planned once, then run, or captured as a flat graph.

Planning runs the model once with every parameter a leaf of autograd. A parameter that autograd still reaches
was used in a way that no rule covers; it is copied for every record from then on, which is exact for any use.
So no use is missed silently.

The way forward sees one record. The way back is run on tensors of all candidates and records, by formulas of
torch's that treat each by itself. What a user puts on the way back would be handed all records, and what it
makes of one may hang on the others. Hooks on tensors are refused where they are put, hooks of layers and
functions with a ``backward`` of their own by ``vmap``, unless torch runs them record by record.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch._C import _functorch as functorch
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_map

from privtune.errors import InvalidInputError
from privtune.training.engine.operations import Intercept
from privtune.training.engine.rules import DirectUse, Tensors, Use, merged
from privtune.training.engine.watch import Entry, Levels, Site, traced
from privtune.training.mechanism.kernel import Apart, Layout, LossOf

T = TypeVar("T")
Program = Callable[..., Tensors]
Tape = tuple[Program, list[Use]]  # and the uses that it gives the parts of, in order

_TRIES = 3  # another thread may draw meanwhile: only what is seen each time is the pass


@dataclass(frozen=True)
class PassPlan:
    """How a model's parameters are used.

    Args:
        copied: Parameters that no rule covers: each record has its own leaf of autograd.
        multiplied: Those of them that are used by more than element by element: copying them costs time.
        sites: Places of draws.
        uses: Every use, in the order of the tape.
        all_classes: Whether every target is a class, none of them an index to ignore.
    """

    copied: tuple[str, ...]
    multiplied: tuple[str, ...]
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
    """One run of the model on all rows: losses ``[K, B]``, and what its watch noted."""

    losses: torch.Tensor
    watch: Intercept


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
    params = torch.randn(len(x), layout.size, dtype=layout.dtype, device=x.device, generator=draws)
    leaves = {n: leaf.detach().requires_grad_() for n, leaf in layout.unflatten(params).items()}
    stacked, copies = leaves, dict[str, torch.Tensor]()
    if copy_all:
        stacked, copies = {}, _copies(leaves, tuple(leaves), x.shape[1])
    done = drawn_with_torch(
        lambda: _run(module, loss_of, stacked, copies=copies, x=x, y=y, masks=None)
    )
    copied = set(leaves)
    if not copy_all:
        reached: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if done.losses.requires_grad:
            reached = torch.autograd.grad(
                done.losses.sum(), list(leaves.values()), allow_unused=True
            )
        copied = {name for name, g in zip(leaves, reached, strict=True) if g is not None}
    sites, multiplied = tuple(done.watch.sites), copied & done.watch.multiplied
    drawn = tuple(site.empty(x.shape[:2], params) for site in sites)
    while True:
        ordered = tuple(name for name in leaves if name in copied)
        slow = tuple(name for name in ordered if name in multiplied)
        plan = PassPlan(ordered, slow, sites, (), all_classes)
        program, uses = tape_of(module, loss_of, layout, plan)
        program(params, x, y, *drawn)
        counts = Counter(name for use in uses for name in use.names)
        # What several rules, or a rule and autograd, give a part of the gradient of, is copied whole.
        again = {n for use in uses for n in use.names if any(counts[m] > 1 for m in use.names)}
        again |= {n for e in done.watch.entries for n in e.names if copied & set(e.names)}
        if again <= copied:
            return replace(plan, uses=tuple(uses))
        copied |= again
        multiplied |= again


def _copies(
    named: Mapping[str, torch.Tensor], names: Sequence[str], records: int
) -> dict[str, torch.Tensor]:
    """Return a leaf of autograd for every record of each parameter: views of one memory."""
    own = {n: named[n].detach().unsqueeze(1) for n in names}
    return {
        n: p.expand(-1, records, *p.shape[2:]).detach().requires_grad_() for n, p in own.items()
    }


def tape_of(
    module: nn.Module,
    loss_of: LossOf,
    layout: Layout,
    plan: PassPlan,
    *,
    low: Lowered | None = None,
) -> Tape:
    """Return the program that runs forward and backward pass.

    Args:
        module: The model.
        loss_of: The loss of a record.
        layout: Where parameters lie.
        plan: How they are used.
        low: In what numbers to run, if not those of the parameters.

    Returns:
        A program from ``(params [K, P], x, y, *masks)`` to the parts of every use, one after the other; run
        as it is. And the list of uses, filled by each run.
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
            copies = _copies(named, plan.copied, x.shape[1])
            stacked = {n: p for n, p in named.items() if n not in copies}
            done = _run(
                module,
                loss_of,
                stacked,
                copies=copies,
                x=x,
                y=y,
                masks=masks,
                all_classes=plan.all_classes,
                low=low,
            )
            entries = done.watch.entries
            outs = [entry.out for entry in entries] + list(copies.values())
            # The sum of losses of records; a gradient to start from would import an algebra system.
            grads = torch.autograd.grad(
                done.losses.sum(), outs, allow_unused=True, materialize_grads=True
            )
        waiting: dict[str, list[tuple[Entry, torch.Tensor]]] = {}
        for place, entry in enumerate(entries):
            waiting.setdefault(entry.names[0], []).append((entry, grads[place]))
        copied = [
            (DirectUse(n), (g.to(params.dtype),))
            for n, g in zip(copies, grads[len(entries) :], strict=True)
        ]
        del done, entries, outs, grads  # what rules are done with goes: patches are large
        every: list[tuple[Use, Tensors]] = []
        while waiting:
            every += _merged(waiting.pop(next(iter(waiting))), params.dtype)
        every += copied
        uses[:] = [use for use, _ in every]
        return tuple(part for _, parts in every for part in parts)

    return program, uses


def _merged(
    entries: Sequence[tuple[Entry, torch.Tensor]], dtype: torch.dtype
) -> list[tuple[Use, Tensors]]:
    """Return one use for each weight of some entries, with parts in the parameters' own type."""
    by_weight: dict[str, list[tuple[Use, Tensors]]] = {}
    for entry, g in entries:
        for use, parts in entry.back(g):
            whole = tuple(t.to(dtype) if t.is_floating_point() else t for t in parts)
            by_weight.setdefault(use.weight, []).append((use, whole))
    return [one for group in by_weight.values() for one in merged(group)]


def losses_of(module: nn.Module, loss_of: LossOf, layout: Layout, plan: PassPlan) -> Program:
    """Return the forward pass alone, without draws: ``(params, x, y)`` to losses ``[K, B]``."""

    def program(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        how: dict[str, Any] = {
            "masks": None,
            "deterministic": True,
            "all_classes": plan.all_classes,
        }
        done = _run(module, loss_of, layout.unflatten(params), copies={}, x=x, y=y, **how)
        return (done.losses.detach(),)

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
    watches: list[Intercept] = []
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
            watches.append(mode)
            return value

        return torch.vmap(record, in_dims=(0, 0, 0, 0))(copied, xs, ys, drops)

    with apart():
        losses = torch.vmap(candidate)(stacked, copies, x, y, tuple(masks or ()))
    if any(entry.out._version != entry.version for entry in watches[0].entries):
        raise RuntimeError("the model changes the output of a layer in place")
    return _Pass(losses, watches[0])


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


@contextmanager
def apart() -> Iterator[None]:
    """Run a model under ``vmap`` where nothing but torch's own code may see all records at once.

    Hooks on saved tensors, which are handed what autograd keeps for the way back, raise.
    """
    with traced(), Apart(), disable_saved_tensors_hooks("what is saved holds all records"):
        yield


def drawn_with_torch(run: Callable[[], T]) -> T:
    """Return what a pass returns, if it moves neither Python's generator nor NumPy's.

    Args:
        run: The pass.

    Raises:
        RuntimeError: If it draws from one of them.
    """
    for _ in range(_TRIES):
        before = _states()
        found = run()
        if _states() == before:
            return found
    raise RuntimeError(
        "it draws from Python's random or NumPy, which would be once for all records; torch's own "
        "random numbers are drawn for each"
    )


def _states() -> tuple[object, ...]:
    kind, words, *place = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(words).tobytes(), *place
