"""Forward and backward passes over many candidates and records at once: planned, run and captured.

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
from collections import Counter, defaultdict
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
from privtune.training.engine.watch import Levels, ParameterUse, Site
from privtune.training.mechanism.kernel import Apart, Layout, LossOf, traced

T = TypeVar("T")
Program = Callable[..., Tensors]
Tape = tuple[Program, list[Use]]  # and the uses that it gives the parts of, in order

_TRIES = 3  # another thread may draw meanwhile: only what is seen each time is the pass


@dataclass(frozen=True)
class PassPlan:
    """How a model uses its parameters, and where it draws random values.

    It is found on made-up records and holds for all records: a model whose use of its parameters hung
    on values would fail the check, or its capture.

    Attributes:
        copied: Names of parameters, each of which becomes a leaf ``[K, B, *shape]``.
        sites: Where it draws, in order; a pass is given a mask for each.
        uses: What the tape holds parts of.
    """

    copied: tuple[str, ...]  # no rule covers these: each record has its own leaf of autograd
    multiplied: tuple[
        str, ...
    ]  # those of them whose copies cost time: used by more than element by element
    sites: tuple[Site, ...]
    uses: tuple[Use, ...]  # in the order of the tape
    all_classes: bool  # no target is an index to ignore


@dataclass(frozen=True, eq=False)
class Lowered:
    """A lower-precision type for passes, with the frozen parameters and buffers converted to it.

    **Guarantee**: what a layer saw and what came back to it leave a pass in the parameters' own type,
    before anything is made of them. Norms and sums are then functions of one pair of float32 tensors:
    the gradient whose length a record is clipped by is, bit for bit, the one that is summed. How far
    it lies from the true one changes what is learned, and no sensitivity.
    """

    dtype: torch.dtype
    fixed: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> Lowered:
        """Convert a model's frozen parameters and buffers to a type, once for all passes.

        Once for a model: a frozen network of some hundred million weights would else be converted in
        every pass.
        """
        every: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                every[name] = parameter.detach()
        every |= dict(module.named_buffers())
        fixed = {}
        for name, tensor in every.items():
            if tensor.is_floating_point():
                fixed[name] = tensor.to(dtype)
        return cls(dtype, fixed)

    def down(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a floating-point tensor to the lower type; return whole numbers as they are.

        Indices of words are whole numbers, and an embedding takes no others.
        """
        if tensor.is_floating_point():
            return tensor.to(self.dtype)
        return tensor


class Passes:
    """The passes of a model and the loss of its records, over many candidates and records at once.

    It knows nothing of clipping, noise or samples: it turns weights ``[K, P]`` and records
    ``[K, B, ...]`` into tapes, and the rules make norms and sums of these.

    Attributes:
        plan: Empty until ``find_plan`` was called.
        low: Numbers of fewer digits, set after the plan was found in full ones.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_of: LossOf,
        layout: Layout,
    ) -> None:
        self.module = module
        self.loss_of = loss_of
        self.layout = layout
        self.plan = PassPlan((), (), (), (), False)
        self.low: Lowered | None = None  # in what numbers to run, if not those of the parameters

    def find_plan(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        all_classes: bool,
        copy_all: bool,
    ) -> None:
        """Find which parameters the rules cover, on made-up rows ``[K, B, ...]`` with K and B above 1.

        To copy all parameters for every record, and catch no use, is exact for whatever a loss does,
        gradients within it included, and slower.

        A first run has every parameter as a leaf of autograd, uncopied; rules cut off those that they
        catch. What autograd still reaches is copied. A parameter that is reached in two ways (tied
        weights: one a layer, one a plain product) would have its gradient in two parts, whose norms
        do not add up, so it is copied as a whole, and so is what shares a use with it. That repeats
        until nothing more is to be copied, and it ends, as the set of copies only grows.

        Args:
            x: Made-up inputs ``[K, B, ...]``.
            y: Made-up targets ``[K, B, ...]``.
            all_classes: Whether no target is an index to ignore.
            copy_all: Whether to copy every parameter and to use no rule.
        """
        # Another thread may use the global generator.
        draws = torch.Generator(x.device).manual_seed(0)
        size = (len(x), self.layout.size)
        dtype = self.layout.dtype
        params = torch.randn(
            size,
            generator=draws,
            dtype=dtype,
            device=x.device,
        )
        tensors = self.layout.unflatten(params)
        leaves = {n: leaf.detach().requires_grad_() for n, leaf in tensors.items()}
        stacked = leaves
        copies = dict[str, torch.Tensor]()
        if copy_all:
            stacked = {}
            copies = _record_views(leaves, tuple(leaves), x.shape[1])
        losses, watch = drawn_with_torch(lambda: self._run(stacked, x, y, copies=copies))
        copied = set(leaves)
        if not copy_all:
            copied = _reached(losses, leaves)
        sites = tuple(watch.sites)
        multiplied = copied & watch.multiplied
        lead = x.shape[:2]
        planned_draws = [site.empty(lead, params) for site in sites]
        while True:
            ordered = [name for name in leaves if name in copied]
            slow = [name for name in ordered if name in multiplied]
            self.plan = PassPlan(tuple(ordered), tuple(slow), sites, (), all_classes)
            program, uses = self.tape()
            program(params, x, y, *planned_draws)
            counts: Counter[str] = Counter()
            for use in uses:
                counts.update(use.names)
            again: set[str] = set()
            for use in uses:
                # What several rules, or a rule and autograd, give a part of the gradient of, is copied whole.
                if any(counts[name] > 1 for name in use.names):
                    again |= set(use.names)
            for entry in watch.entries:
                if copied & set(entry.names):
                    again |= set(entry.names)
            if again <= copied:
                self.plan = replace(self.plan, uses=tuple(uses))
                return
            copied |= again
            multiplied |= again

    def tape(self) -> Tape:
        """Return the program of a forward and backward pass, and a list of uses of parameters that it fills.

        It goes from ``(params [K, P], x, y, *masks)`` to the parts of every use, one after the other.

        The parts are in the parameters' own type, whatever type the pass ran in. Tensors are dropped
        as soon as a rule has read them, since at its end a pass holds the inputs of all layers.

        The list of uses is one object that each run fills anew: which form a product takes (ghost,
        direct, ...) hangs on the shape of its rows, which is known within a run alone.
        """
        uses: list[Use] = []
        plan = self.plan
        low = self.low

        def program(
            params: torch.Tensor,
            x: torch.Tensor,
            y: torch.Tensor,
            *masks: torch.Tensor,
        ) -> Tensors:
            """Run forward and backward for K candidates of B records; return the tensors of all uses.

            Shapes: ``params`` ``[K, P]``, ``x`` and ``y`` ``[K, B, ...]``, ``masks`` ``[K, B, ...]``
            each. The sum of all losses is differentiated, in which each loss has a factor of 1: so
            what comes back to a row is the gradient of that row's own loss.
            """
            with torch.enable_grad():
                flat = params.detach()
                if low is not None:
                    flat = low.down(flat)
                    x = low.down(x)
                    masks = tuple(map(low.down, masks))
                tensors = self.layout.unflatten(flat)
                copies = _record_views(tensors, plan.copied, x.shape[1])
                stacked = {n: p for n, p in tensors.items() if n not in copies}
                losses, watch = self._run(
                    stacked,
                    x,
                    y,
                    copies=copies,
                    masks=masks,
                    low=low,
                )
                entries = watch.entries
                outs = [entry.out for entry in entries] + list(copies.values())
                # The sum of losses of records; a gradient to start from would import an algebra system.
                grads = torch.autograd.grad(
                    losses.sum(),
                    outs,
                    allow_unused=True,
                    materialize_grads=True,
                )
            # Entries and what came back to them, by the name of the weight.
            waiting: dict[str, list[tuple[ParameterUse, torch.Tensor]]] = defaultdict(list)
            for place, entry in enumerate(entries):
                waiting[entry.names[0]].append((entry, grads[place]))
            # In one expression: a name would hold the last gradient until the end of the pass.
            copied = [
                (DirectUse(name), (g.to(params.dtype),))
                for name, g in zip(copies, grads[len(entries) :], strict=True)
            ]
            # What rules are done with goes: patches are large.
            del watch, losses, entries, outs, grads
            every: list[tuple[Use, Tensors]] = []
            while waiting:
                first = next(iter(waiting))
                every += _merged(waiting.pop(first), params.dtype)
            every += copied
            uses[:] = [use for use, _ in every]
            return tuple(part for _, parts in every for part in parts)

        return program, uses

    def losses(self) -> Program:
        """Return a program of the forward pass without dropout: ``(params, x, y)`` to losses ``[K, B]``.

        Nothing is kept for a way back, and what would be drawn is its mean.
        """

        def program(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Tensors:
            """Return the losses ``[K, B]`` as a tuple of one tensor, the form of captured programs."""
            stacked = self.layout.unflatten(params)
            losses, _ = self._run(
                stacked,
                x,
                y,
                copies={},
                deterministic=True,
            )
            return (losses.detach(),)

        return program

    def gradient(
        self,
        params: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        masks: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return the gradient of one record by plain autograd, ``[P]``: the reference of the kernel's check.

        No rule and no vmap has a part in it, so an error in either cannot hide in both sides of the
        comparison.

        Args:
            params: Weights, ``[P]``.
            x: Inputs of one record, without a batch axis.
            y: Its targets.
            masks: What is drawn for it at each place of dropout.

        Returns:
            The gradient, ``[P]``.
        """
        tensors = self.layout.unflatten(params)
        gradients = self.gradients(params, x, y, masks)
        full = {}
        for name, gradient in zip(tensors, gradients, strict=True):
            if gradient is None:
                full[name] = torch.zeros_like(tensors[name])
            elif gradient.is_sparse:
                full[name] = gradient.to_dense()
            else:
                full[name] = gradient
        return self.layout.flatten(full)

    def gradients(
        self,
        params: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        masks: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradient of one record in each parameter, None where the loss does not reach it.

        The draws are given as masks, so that the reference drops what the batched pass drops.
        """
        tensors = {}
        for name, part in self.layout.unflatten(params).items():
            tensors[name] = part.detach().requires_grad_()
        with torch.enable_grad():
            with Intercept(None, masks=masks, deterministic=not masks):
                value = self._one(tensors, x, y)
            if not value.requires_grad:
                return [None] * len(tensors)
            return torch.autograd.grad(value, list(tensors.values()), allow_unused=True)

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

        The model sees one record, as a batch of one, and cannot see another: vmap hides the axes
        ``[K, B]`` from it. One watch stands for all rows, since vmap runs Python once. An output that
        was written to in place after a rule had noted it would come back with the gradient of
        something else; its version shows that.

        Args:
            stacked: Parameters ``[K, ...]`` by name.
            x: Inputs ``[K, B, ...]``.
            y: Targets ``[K, B, ...]``.
            copies: The other parameters, ``[K, B, ...]``, with a copy for each record.
            masks: What is drawn at each place, ``[K, B, ...]``; None where draws are noted or left out.
            deterministic: Whether whatever is drawn is its mean.
            low: Numbers of fewer digits, in which the loss is raised to float32.
        """
        watches: list[Intercept] = []
        sizes = (x.shape[0], x.shape[1])
        masked = masks is not None

        def candidate(
            tensors: Any,
            copied: Any,
            xs: Any,
            ys: Any,
            drops: Any,
        ) -> torch.Tensor:
            """Return the losses ``[B]`` of one candidate, inside of the outer vmap."""
            outer = functorch.maybe_get_level(xs)

            def record(
                values: Any,
                x: Any,
                y: Any,
                drop: Any,
            ) -> torch.Tensor:
                """Return the loss of one record, inside of both vmaps, and append its watch to the list."""
                levels = Levels(outer, functorch.maybe_get_level(x), sizes)
                classes = levels.physical(y) if self.plan.all_classes else None
                mode = Intercept(
                    levels,
                    names={id(tensor): name for name, tensor in tensors.items()},
                    masks=drop if masked else None,
                    deterministic=deterministic,
                    classes=classes,
                )
                every = {**tensors, **values}
                with mode:
                    value = self._one(every, x, y, low=low)
                watches.append(mode)
                return value

            return torch.vmap(record)(copied, xs, ys, drops)

        drops = tuple(masks or ())
        with apart():
            losses = torch.vmap(candidate)(stacked, copies, x, y, drops)
        watch = watches[0]
        for entry in watch.entries:
            if entry.out._version != entry.version:
                raise RuntimeError("the model changes the output of a layer in place")
        return losses, watch

    def _one(
        self,
        tensors: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        *,
        low: Lowered | None = None,
    ) -> torch.Tensor:
        """Return the loss of one record as a scalar; refuse a loss that gives several numbers.

        Its shape is checked here, where a loss of several numbers would else be added up without a
        word.
        """
        loss_of: LossOf = self.loss_of
        if low is not None:
            loss_of = _OfRaised(self.loss_of)
            tensors = {**low.fixed, **tensors}
        module = _Whole(self.module, loss_of)
        prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
        record = (x.unsqueeze(0), y.unsqueeze(0))
        value: torch.Tensor = functional_call(module, prefixed, record)
        must = "must be one number for one record, a tensor of shape (1,)"
        if not torch.is_tensor(value):
            raise InvalidInputError("loss", type(value).__name__, must)
        if value.numel() != 1:
            raise InvalidInputError("loss", tuple(value.shape), must)
        return value.reshape(())


def _reached(losses: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the parameters that autograd reaches from some loss.

    Args:
        losses: Of all rows, ``[K, B]``.
        leaves: Parameters ``[K, ...]`` by name.
    """
    if not losses.requires_grad:
        return set()
    grads = torch.autograd.grad(losses.sum(), [*leaves.values()], allow_unused=True)
    names = set()
    for name, gradient in zip(leaves, grads, strict=True):
        if gradient is not None:
            names.add(name)
    return names


def _record_views(
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str],
    records: int,
) -> dict[str, torch.Tensor]:
    """Return an expanded view of each named parameter per record, as leaves of autograd.

    The axis of records is expanded, so a copy takes no memory before a gradient is asked for. Then
    autograd makes one for every record, instead of their sum.

    Args:
        tensors: Parameters ``[K, *shape]`` by name.
        names: Which of them to copy.
        records: How many records there are, B.

    Returns:
        Leaves ``[K, B, *shape]`` by name.
    """
    copies = {}
    for name in names:
        p = tensors[name].detach().unsqueeze(1)
        shape = p.shape[2:]
        view = p.expand(-1, records, *shape)
        copies[name] = view.detach().requires_grad_()
    return copies


def _merged(
    entries: Sequence[tuple[ParameterUse, torch.Tensor]], dtype: torch.dtype
) -> list[tuple[Use, Tensors]]:
    """Return one use for each weight, with its tensors converted to the parameters' own type.

    What came back in bfloat16 is raised before norms are taken of it: norm and sum then see the same
    numbers.
    """
    by_weight: dict[str, list[tuple[Use, Tensors]]] = {}
    for entry, g in entries:
        for use, parts in entry.back(g):
            wide = tuple(t.to(dtype) if t.is_floating_point() else t for t in parts)
            by_weight.setdefault(use.weight, []).append((use, wide))
    result = []
    for group in by_weight.values():
        result += merged(group)
    return result


@dataclass(frozen=True)
class _OfRaised:
    """A loss that converts the outputs of a lower-precision model to float32 first.

    A loss takes exponentials and logarithms: in 8 binary digits a probability near 1 would be 1.
    """

    loss_of: LossOf

    def __call__(
        self,
        model: nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of one record, shape ``[1]``, in float32.

        The loss is given a function in the place of the model, so that whatever it calls it with is
        passed on.
        """

        def raised(*args: Any, **kwargs: Any) -> Any:
            """Run the model and convert its outputs to float32."""

            def up(part: Any) -> Any:
                """Convert one output to float32; return anything but a floating-point tensor as it is."""
                if torch.is_tensor(part) and part.is_floating_point():
                    return part.float()
                return part

            return tree_map(up, model(*args, **kwargs))

        return self.loss_of(cast(nn.Module, raised), x, y)


class _Whole(nn.Module):
    """A module of a model and its loss, so that ``functional_call`` can replace the parameters in both.

    ``functional_call`` replaces parameters by name for one call of a module. A loss may call its
    model several times, or read a parameter for a penalty; it then meets the replaced ones each time.
    """

    def __init__(self, model: nn.Module, loss_of: LossOf) -> None:
        super().__init__()
        self.model = model
        self.loss_of = loss_of

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of the record, shape ``[1]``."""
        return self.loss_of(self.model, x, y)


@contextmanager
def apart() -> Iterator[None]:
    """Let only torch's code see all records at once in the ``with`` block: refuse hooks and vmap rules.

    Hooks on saved tensors and a ``vmap`` rule of a user's would be handed ``[K, B, ...]``: what they
    made of one record could hang on the others, and no clipping bounds that.
    """
    with traced(), Apart(), disable_saved_tensors_hooks("what is saved holds all records"):
        yield


def drawn_with_torch(run: Callable[[], T]) -> T:
    """Run a pass, and refuse it if it draws from Python's or NumPy's random generators.

    Python runs once for all records, so such a number would be common to all of them: an augmentation
    would shift every record alike. Another thread may draw meanwhile, so it is tried a few times.
    """
    for _ in range(_TRIES):
        before = _states()
        result = run()
        if _states() == before:
            return result
    raise RuntimeError(
        "it draws from Python's random or NumPy, which would be once for all records; torch's own "
        "random numbers are drawn for each"
    )


def _states() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's random generators, in a form that can be compared.

    As values that can be compared: arrays would compare element by element.
    """
    of_python = random.getstate()
    kind, words, *place = np.random.get_state(legacy=True)
    bits = np.asarray(words).tobytes()
    return of_python, kind, bits, *place
