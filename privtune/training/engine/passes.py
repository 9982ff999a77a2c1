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
from privtune.training.engine.watch import Entry, Levels, Site
from privtune.training.mechanism.kernel import Apart, Layout, LossOf, traced

T = TypeVar("T")
Program = Callable[..., Tensors]
Tape = tuple[Program, list[Use]]  # and the uses that it gives the parts of, in order

_TRIES = 3  # another thread may draw meanwhile: only what is seen each time is the pass


@dataclass(frozen=True)
class PassPlan:
    """How a model's parameters are used, and where it draws."""

    copied: tuple[str, ...]  # no rule covers these: each record has its own leaf of autograd
    multiplied: tuple[
        str, ...
    ]  # those of them whose copies cost time: used by more than element by element
    sites: tuple[Site, ...]
    uses: tuple[Use, ...]  # in the order of the tape
    all_classes: bool  # no target is an index to ignore


@dataclass(frozen=True, eq=False)
class Lowered:
    """The way forward and back in numbers of fewer digits, and what is frozen in these.

    **Guarantee**: what a layer saw and what came back to it leave a pass in the parameters' own type,
    before anything is made of them. Norms and sums are then functions of one pair of float32 tensors:
    the gradient whose length a record is clipped by is, bit for bit, the one that is summed. How far
    it lies from the true one changes what is learned, and no sensitivity.
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


class Passes:
    """The passes of a model and the loss of its records, over many candidates and records at once."""

    def __init__(self, module: nn.Module, loss_of: LossOf, layout: Layout) -> None:
        self.module, self.loss_of, self.layout = module, loss_of, layout
        self.plan = PassPlan((), (), (), (), False)
        self.low: Lowered | None = None  # in what numbers to run, if not those of the parameters

    def find_plan(
        self, x: torch.Tensor, y: torch.Tensor, *, all_classes: bool, copy_all: bool
    ) -> None:
        """Find out how the model uses its parameters, on rows ``[K, B, ...]`` with K and B above 1.

        To copy all parameters for every record, and catch no use, is exact for whatever a loss does,
        gradients within it included, and slower.
        """
        # Another thread may use the global generator.
        draws = torch.Generator(x.device).manual_seed(0)
        size, dtype = (len(x), self.layout.size), self.layout.dtype
        params = torch.randn(size, generator=draws, dtype=dtype, device=x.device)
        named = self.layout.unflatten(params)
        leaves = {n: leaf.detach().requires_grad_() for n, leaf in named.items()}
        stacked, copies = leaves, dict[str, torch.Tensor]()
        if copy_all:
            stacked, copies = {}, _copies(leaves, tuple(leaves), x.shape[1])
        losses, watch = drawn_with_torch(lambda: self._run(stacked, x, y, copies=copies))
        copied = set(leaves)
        if not copy_all:
            reached: Sequence[torch.Tensor | None] = [None] * len(leaves)
            if losses.requires_grad:
                reached = torch.autograd.grad(losses.sum(), [*leaves.values()], allow_unused=True)
            copied = {name for name, g in zip(leaves, reached, strict=True) if g is not None}
        sites, multiplied = tuple(watch.sites), copied & watch.multiplied
        drawn = tuple(site.empty(x.shape[:2], params) for site in sites)
        while True:
            ordered = tuple(name for name in leaves if name in copied)
            slow = tuple(name for name in ordered if name in multiplied)
            self.plan = PassPlan(ordered, slow, sites, (), all_classes)
            program, uses = self.tape()
            program(params, x, y, *drawn)
            counts = Counter(name for use in uses for name in use.names)
            # What several rules, or a rule and autograd, give a part of the gradient of, is copied whole.
            again = {n for use in uses for n in use.names if any(counts[m] > 1 for m in use.names)}
            again |= {n for e in watch.entries for n in e.names if copied & set(e.names)}
            if again <= copied:
                self.plan = replace(self.plan, uses=tuple(uses))
                return
            copied |= again
            multiplied |= again

    def tape(self) -> Tape:
        """Return the program that runs forward and backward pass, and the uses, filled by each run.

        It goes from ``(params [K, P], x, y, *masks)`` to the parts of every use, one after the other.
        """
        uses: list[Use] = []
        plan, low = self.plan, self.low

        def program(
            params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *masks: torch.Tensor
        ) -> Tensors:
            with torch.enable_grad():
                flat = params.detach()
                if low is not None:
                    flat, x, masks = low.down(flat), low.down(x), tuple(map(low.down, masks))
                named = self.layout.unflatten(flat)
                copies = _copies(named, plan.copied, x.shape[1])
                stacked = {n: p for n, p in named.items() if n not in copies}
                losses, watch = self._run(stacked, x, y, copies=copies, masks=masks, low=low)
                entries = watch.entries
                outs = [entry.out for entry in entries] + list(copies.values())
                # The sum of losses of records; a gradient to start from would import an algebra system.
                grads = torch.autograd.grad(
                    losses.sum(), outs, allow_unused=True, materialize_grads=True
                )
            waiting: dict[str, list[tuple[Entry, torch.Tensor]]] = {}
            for place, entry in enumerate(entries):
                waiting.setdefault(entry.names[0], []).append((entry, grads[place]))
            copied = [
                (DirectUse(n), (g.to(params.dtype),))
                for n, g in zip(copies, grads[len(entries) :], strict=True)
            ]
            del (
                watch,
                losses,
                entries,
                outs,
                grads,
            )  # what rules are done with goes: patches are large
            every: list[tuple[Use, Tensors]] = []
            while waiting:
                every += _merged(waiting.pop(next(iter(waiting))), params.dtype)
            every += copied
            uses[:] = [use for use, _ in every]
            return tuple(part for _, parts in every for part in parts)

        return program, uses

    def losses(self) -> Program:
        """Return the forward pass alone, without draws: ``(params, x, y)`` to losses ``[K, B]``."""

        def program(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Tensors:
            stacked = self.layout.unflatten(params)
            losses, _ = self._run(stacked, x, y, copies={}, deterministic=True)
            return (losses.detach(),)

        return program

    def gradient(
        self, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, masks: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the gradient of one record by itself, by plain autograd: the reference of the check."""
        named = self.layout.unflatten(params)
        parts = dict(zip(named, self.gradients(params, x, y, masks), strict=True))
        full = {}
        for name, part in parts.items():
            gradient = torch.zeros_like(named[name]) if part is None else part
            full[name] = gradient.to_dense() if gradient.is_sparse else gradient
        return self.layout.flatten(full)

    def gradients(
        self, params: torch.Tensor, x: torch.Tensor, y: torch.Tensor, masks: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradient of one record in each parameter, None where the loss does not reach it."""
        named = {n: v.detach().requires_grad_() for n, v in self.layout.unflatten(params).items()}
        with torch.enable_grad():
            with Intercept(None, masks=masks, deterministic=not masks):
                value = self._one(named, x, y)
            if not value.requires_grad:
                return [None for _ in named]
            return torch.autograd.grad(value, list(named.values()), allow_unused=True)

    def _run(
        self,
        stacked: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        copies: Mapping[str, torch.Tensor],
        masks: Sequence[torch.Tensor] | None = None,
        deterministic: bool = False,
        low: Lowered | None = None,
    ) -> tuple[torch.Tensor, Intercept]:
        """Run the model on every row under two nested vmaps; return losses ``[K, B]``, and the watch.

        ``stacked`` parameters are ``[K, ...]``, ``copies`` and masks ``[K, B, ...]``.
        """
        watches: list[Intercept] = []
        sizes, masked = (x.shape[0], x.shape[1]), masks is not None

        def candidate(named: Any, copied: Any, xs: Any, ys: Any, drops: Any) -> torch.Tensor:
            outer = functorch.maybe_get_level(xs)

            def record(own: Any, x: Any, y: Any, drop: Any) -> torch.Tensor:
                levels = Levels(outer, functorch.maybe_get_level(x), sizes)
                mode = Intercept(
                    levels,
                    names={id(tensor): name for name, tensor in named.items()},
                    masks=drop if masked else None,
                    deterministic=deterministic,
                    classes=levels.physical(y) if self.plan.all_classes else None,
                )
                with mode:
                    value = self._one({**named, **own}, x, y, low=low)
                watches.append(mode)
                return value

            return torch.vmap(record)(copied, xs, ys, drops)

        with apart():
            losses = torch.vmap(candidate)(stacked, copies, x, y, tuple(masks or ()))
        if any(entry.out._version != entry.version for entry in watches[0].entries):
            raise RuntimeError("the model changes the output of a layer in place")
        return losses, watches[0]

    def _one(
        self,
        named: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        low: Lowered | None = None,
    ) -> torch.Tensor:
        """Run the model and the loss on one record, as a batch of one."""
        whole = _Whole(self.module, self.loss_of if low is None else _OfRaised(self.loss_of))
        named = named if low is None else {**low.fixed, **named}
        own = {f"model.{name}": tensor for name, tensor in named.items()}
        value: torch.Tensor = functional_call(whole, own, (x.unsqueeze(0), y.unsqueeze(0)))
        if not torch.is_tensor(value) or value.numel() != 1:
            given = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
            raise InvalidInputError(
                "loss", given, "must be one number for one record, a tensor of shape (1,)"
            )
        return value.reshape(())


def _copies(
    named: Mapping[str, torch.Tensor], names: Sequence[str], records: int
) -> dict[str, torch.Tensor]:
    """Return a leaf of autograd for every record of each parameter: views of one memory."""
    own = {n: named[n].detach().unsqueeze(1) for n in names}
    return {
        n: p.expand(-1, records, *p.shape[2:]).detach().requires_grad_() for n, p in own.items()
    }


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
    """Run a model under ``vmap`` where nothing but torch's own code may see all records at once."""
    with traced(), Apart(), disable_saved_tensors_hooks("what is saved holds all records"):
        yield


def drawn_with_torch(run: Callable[[], T]) -> T:
    """Return what a pass returns, if it moves neither Python's generator nor NumPy's."""
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
