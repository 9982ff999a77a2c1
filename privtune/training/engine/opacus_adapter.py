"""Per-sample gradients by Opacus, one candidate at a time. The only module that imports opacus.

Only the hooks of Opacus are used: they give per-sample gradients (hooks mode) or their norms
(ghost mode). Sampling, clipping, noise and the account stay PrivTune's own, so none of Opacus'
loaders, optimizers and accountants can disagree with the plan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine.batched import refuse_coupling
from privtune.training.engine.graph.intercept import Intercept
from privtune.training.engine.layers.uses import LOST, longest
from privtune.training.engine.self_check import KernelMismatchError, check_kernel
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.kernel import Layout, LossOf, Rows, load_params, say_once
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping

__all__ = [
    "Mode",
    "OpacusKernel",
    "choose_mode",
    "clipped_sum",
    "has_exact_hook",
    "hook",
    "layer_of_opacus",
    "per_sample_gradients",
    "quiet_hooks",
]

_REMARK = "Full backward hook is firing"
_HOOKS_BYTES = 32 * 2**20  # per-sample gradients above this size are slower than ghost norms


Mode = Literal["hooks", "ghost"]

_Sum = tuple[torch.Tensor, torch.Tensor, int]
"""Clipped sum; halves, +1/2 for an unclipped record and -1/2 for a clipped one; bad records."""


def choose_mode(mode: Mode | Literal["auto"], parameters: int, records: float) -> Mode:
    """Take ghost mode when per-sample gradients would be large, unless a mode is asked for."""
    if mode != "auto":
        return mode
    return "hooks" if 4 * records * parameters < _HOOKS_BYTES else "ghost"


def hook(module: nn.Module, mode: Mode, *, sequences: bool) -> Any:
    """Wrap a module with Opacus' hooks, for losses that are summed.

    Args:
        module: In training mode.
        mode: ``"hooks"`` or ``"ghost"``.
        sequences: Whether a matrix is used at several places of a record. Opacus takes norms of
            such layers from float32 Gram matrices, which cancellation can make too small (a record
            then adds up to 1.35 times the bound); layer-wise gradients are right.

    Raises:
        InvalidInputError: If Opacus cannot take the module: names every problem.
    """
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.validators import ModuleValidator

    refuse_coupling(module)
    problems = ModuleValidator.validate(module, strict=False)
    if problems:
        raise InvalidInputError("model", type(module).__name__, "; ".join(str(p) for p in problems))
    options: dict[str, Any] = {"batch_first": True, "loss_reduction": "sum"}
    without = sorted(
        {type(m).__name__ for m in module.modules() if _trains(m) and not has_exact_hook(m)}
    )
    if without:
        say_once(
            f"Opacus has no formula for the layers {', '.join(without)} of {type(module).__name__}: "
            "their per-sample gradients are computed by functorch, which is slower."
        )
    if mode == "hooks":
        try:
            return GradSampleModule(module, **options)
        except NotImplementedError as error:
            raise InvalidInputError("model", type(module).__name__, str(error)) from None
    ghost = GradSampleModuleFastGradientClipping(
        module, use_ghost_clipping=not sequences, **options
    )
    ghost.NORM_SAMPLERS = {**ghost.NORM_SAMPLERS, nn.Linear: _linear_norms}
    return ghost


def _linear_norms(
    layer: nn.Linear, activations: Sequence[torch.Tensor], backprops: torch.Tensor
) -> dict[torch.Tensor, torch.Tensor]:
    """Return norms of a matrix that a record uses once.

    Opacus' own underflow where one of the two factors is tiny, however large the other is.
    """
    if backprops.ndim != 2:
        raise InvalidInputError("model", "a matrix used at several places", "needs hooks mode")
    inputs = activations[0].to(backprops.dtype)
    outputs = (backprops.square().sum(dim=1) + LOST).sqrt()
    own: torch.Tensor = layer.weight
    norms = {own: outputs * (inputs.square().sum(dim=1) + LOST).sqrt()}
    if layer.bias is not None:
        norms[layer.bias] = outputs
    return norms


def layer_of_opacus(name: str) -> type[nn.Module]:
    """Return one of Opacus' own layers, such as ``DPLSTM``."""
    from opacus import layers

    found: type[nn.Module] = getattr(layers, name)
    return found


def has_exact_hook(module: nn.Module) -> bool:
    """Say whether Opacus has a formula of its own for a layer, which sees one use a call."""
    from opacus.grad_sample import GradSampleModule

    return type(module) in GradSampleModule.GRAD_SAMPLERS


def _trains(module: nn.Module) -> bool:
    """Say whether a layer has trainable parameters of its own."""
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _padded(module: nn.Module) -> list[nn.Embedding]:
    """Return the tables with a row that is never trained, of which Opacus' formula knows nothing."""
    return [
        m for m in module.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None
    ]


def per_sample_gradients(
    module: nn.Module, params: Mapping[str, nn.Parameter], records: int
) -> torch.Tensor:
    """Return what the hooks left after a backward pass, shape ``[records, P]``.

    Args:
        module: The model with the hooks.
        params: Its trainable parameters, in the order of the result.
        records: Records of the batch.

    Raises:
        InvalidInputError: If a layer saw something else than one row a record.
    """
    for table in _padded(module):
        sample = getattr(table.weight, "grad_sample", None)
        if sample is not None:
            sample[:, table.padding_idx] = 0.0
    rows = []
    for name, parameter in params.items():
        sample = cast(Any, parameter).grad_sample
        if sample is None:
            sample = parameter.new_zeros(records, *parameter.shape)
        if len(sample) != records:
            raise InvalidInputError(
                "model",
                f"{name}: {len(sample)} rows for {records} records",
                "must give every layer one row of inputs a record",
                "Expand what the records share to the batch: for the positions of a transformer, "
                "pass position_ids=torch.arange(length).expand(len(x), -1).",
            )
        rows.append(sample.flatten(1))
    return torch.cat(rows, dim=1)


def clipped_sum(
    gradients: torch.Tensor,
    clipping: Clipping,
    layout: Layout,
    *,
    mask: torch.Tensor | None = None,
    row: int = 0,
    candidates: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the clipped sum of per-sample gradients of one candidate, however they were computed.

    Args:
        gradients: Shape ``[B, P]``.
        clipping: Bounds each record.
        layout: Where parameters lie.
        mask: Shape ``[B]``: 1 for records that count; None for all.
        row: The candidate's place in its stack.
        candidates: How many the stack holds.

    Returns:
        The sum, shape ``[P]``; +1/2 for each record that counts and was not clipped and -1/2 for
        each other that counts; how many of them were not finite.
    """
    counted = torch.ones_like(gradients[:, 0], dtype=torch.bool) if mask is None else mask > 0
    if isinstance(clipping, CoordinateTransform):
        gradients = (gradients - clipping.center[row]) / clipping.scale[row]
    groups = [(0, layout.size)]
    if clipping.by_layer:
        layers = layout.layers.values()
        groups = [(layout.spans[n[0]][0], layout.spans[n[-1]][1]) for n in layers]
    norms = torch.stack([gradients[:, start:end].norm(dim=1) for start, end in groups])
    finite = norms.isfinite().all(dim=0)
    usable = finite & counted
    gradients = gradients.masked_fill(~usable.unsqueeze(1), 0.0)
    coefficients, halves = _for_one(clipping, norms, usable, row, candidates)
    total = torch.cat(
        [c @ gradients[:, s:e] for c, (s, e) in zip(coefficients, groups, strict=True)]
    )
    return total, halves, int((~finite & counted).sum())


class OpacusKernel:
    """Clipped sums through Opacus' hooks, candidate by candidate.

    Args:
        model: Makes the model.
        loss_of: The loss of a record; it must take a batch as well.
        x: Inputs of a few records, for shape and type alone.
        y: Targets of a few records, likewise.
        device: Where to compute.
        mode: ``"hooks"`` keeps per-sample gradients, ``"ghost"`` only norms where Opacus can;
            ``"auto"`` takes ghost mode when per-sample gradients would be large.

    Raises:
        InvalidInputError: If Opacus cannot take the model, or the result of its hooks is wrong for
            it: parameters used outside of their module, losses that couple records.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss_of: LossOf,
        *,
        x: torch.Tensor,
        y: torch.Tensor,
        device: torch.device,
        mode: Mode | Literal["auto"] = "auto",
        records: int = 256,
    ) -> None:
        self._inner = model().to(device)
        for part in self._inner.modules():
            if _trains(part):
                part.training = True  # hooks sleep otherwise; dropout keeps the mode it has
        self.layout = Layout(self._inner)
        self._bare = deepcopy(self._inner)
        self._example = synthetic(x, y, (2, 3), device)
        self._loss_of = loss_of
        self.mode: Mode = choose_mode(mode, self.layout.size, records)
        if mode == "auto" and _padded(self._inner):
            self.mode = "hooks"  # Opacus' ghost norms count the padding, too
        self._params = {n: p for n, p in self._inner.named_parameters() if p.requires_grad}
        self._wrap(sequences=self.mode == "ghost" and self._sequential(x, device))

    def _wrap(self, *, sequences: bool) -> None:
        """Put the hooks of the mode on the model, and check what comes of them."""
        self._module = hook(self._inner, self.mode, sequences=sequences)
        try:
            with Intercept(None, deterministic=True):
                check_kernel(self, self._bare, self._loss_of, *self._example, sites=())
        except KernelMismatchError as error:
            raise InvalidInputError("model", type(self._inner).__name__, str(error)) from error

    def accumulate(
        self,
        params: torch.Tensor,
        rows: Rows,
        clipping: Clipping,
        *,
        out: torch.Tensor,
        halves: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Add the clipped sums, one candidate after the other: see ``Kernel``.

        A clipping that needs per-sample gradients turns ghost mode into hooks mode for good.
        """
        separate = clipping.by_layer or isinstance(clipping, CoordinateTransform)
        if self.mode == "ghost" and separate:
            self._module.remove_hooks()
            self.mode = "hooks"
            self._wrap(sequences=False)
        bad = torch.zeros(len(params), dtype=torch.long)
        done: list[tuple[int, _Sum]] = []
        for k, size in enumerate(int(n) for n in rows.sizes):
            if size == 0:
                continue
            load_params(self._inner, params[k].detach())
            one = self._hooks if self.mode == "hooks" else self._ghost
            mask = rows.mask[k, :size] > 0
            try:
                with _seeded(rows.dropout[k]):
                    x, y = rows.x[k, :size], rows.y[k, :size]
                    done.append((k, one(x, y, mask, clipping, k, params)))
            except Exception:
                _forget(self._inner)
                raise
        for k, (total, counted, dropped) in done:
            out[k] += total
            bad[k] = dropped
            if halves is not None:
                halves[k] += counted
        return bad.to(out.device) if bool(bad.any()) else None

    @property
    def drops(self) -> bool:
        """Whether a pass draws from the streams of dropout: each takes its seed from there."""
        return True

    @property
    def module(self) -> nn.Module:
        """The model that is run."""
        return self._inner

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every row, without dropout, shape ``[K, M]``."""
        out = params.new_zeros(rows.mask.shape)
        self._module.disable_hooks()
        with torch.no_grad(), Intercept(None, deterministic=True):
            for k, flat in enumerate(params):
                load_params(self._inner, flat)
                out[k] = self._vector(rows.x[k], rows.y[k])
        self._module.enable_hooks()
        return out

    def _sequential(self, x: torch.Tensor, device: torch.device) -> bool:
        """Say whether a Linear is used at several places of a record."""
        seen: list[bool] = []

        def note(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            seen.append(inputs[0].ndim > 2)

        handles = [
            part.register_forward_pre_hook(note)
            for part in self._inner.modules()
            if isinstance(part, nn.Linear)
        ]
        with torch.no_grad():
            self._inner(synthetic(x, x, (1, 2), device)[0][0])
        for handle in handles:
            handle.remove()
        return any(seen)

    def _vector(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = self._loss_of(self._module, x, y)
        if losses.shape != (len(x),):
            raise InvalidInputError(
                "loss",
                tuple(losses.shape),
                f"must be one number a record, shape ({len(x)},)",
                'Use reduction="none"; a mean or a sum couples the records.',
            )
        return losses

    def _backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Run forward and backward with Opacus' hooks on; return the losses, graph kept."""
        self._module.zero_grad(set_to_none=True)
        self._module.enable_hooks()
        for parameter in self._params.values():
            # What is not used in this pass must not keep the norms of the last one.
            cast(Any, parameter)._norm_sample = parameter.new_zeros(len(x))
        losses = self._vector(x, y)
        self._too_long = self._any_too_long(x)
        quiet_hooks()
        torch.autograd.backward(losses.sum(), retain_graph=self.mode == "ghost")
        return losses

    def _any_too_long(self, x: torch.Tensor) -> torch.Tensor:
        """Say which records have an input to some layer so long that a clipped sum loses its digits."""
        found = x.new_zeros(len(x), dtype=torch.bool)
        for part in self._inner.modules() if self.mode == "ghost" else ():
            for seen in (a for call in getattr(part, "activations", ()) for a in call):
                if seen.is_floating_point() and len(seen) == len(x):
                    largest = seen.detach().flatten(1).abs().amax(dim=1)
                    found |= largest * math.sqrt(seen[0].numel()) > longest(seen.dtype)
        return found

    def _hooks(  # noqa: PLR0917
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor,
        clipping: Clipping,
        k: int,
        params: torch.Tensor,
    ) -> _Sum:
        """Return the clipped sum of candidate k over the records that ``mask`` keeps."""
        self._backward(x, y)
        gradients = per_sample_gradients(self._inner, self._params, len(x))
        self._module.zero_grad(set_to_none=True)
        return clipped_sum(
            gradients, clipping, self.layout, mask=mask, row=k, candidates=len(params)
        )

    def _ghost(  # noqa: PLR0917
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor,
        clipping: Clipping,
        k: int,
        params: torch.Tensor,
    ) -> _Sum:
        """As ``_hooks``, from norms alone and a second backward pass over the same graph."""
        losses = self._backward(x, y)
        norms: torch.Tensor = self._module.get_norm_sample().detach().unsqueeze(0)
        finite = norms[0].isfinite() & ~self._too_long
        if not bool(finite.all()):
            # A coefficient of zero is not enough: 0 * inf is NaN. Such rows leave the batch.
            dropped = int((mask & ~finite).sum())
            if not bool(finite.any()):
                return torch.zeros_like(params[k]), norms.new_zeros(()), dropped
            rest = self._ghost(x[finite], y[finite], mask[finite], clipping, k, params)
            return rest[0], rest[1], rest[2] + dropped
        coefficients, counted = _for_one(clipping, norms, mask, k, len(params))
        self._module.disable_hooks()
        quiet_hooks()
        grads = torch.autograd.grad(
            (losses * coefficients[0]).sum(),
            list(self._params.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        self._module.enable_hooks()
        flat = self.layout.flatten(dict(zip(self._params, grads, strict=True)))
        return flat, counted, 0


def _for_one(
    clipping: Clipping, norms: torch.Tensor, kept: torch.Tensor, k: int, candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return candidate k's coefficients ``[G, B]`` and its count of halves over the kept records."""
    stacked = norms.unsqueeze(1).expand(-1, candidates, -1)
    coefficients = clipping.coefficients(stacked)[:, k] * kept
    return coefficients, ((clipping.unclipped(stacked)[k].to(norms) - 0.5) * kept).sum()


def _forget(module: nn.Module) -> None:
    """Drop what Opacus' hooks keep of a pass that raised: they would take it for the next one's."""
    for part in module.modules():
        getattr(part, "activations", []).clear()
        vars(part).pop("max_batch_len", None)
    for parameter in cast(Any, module.parameters()):
        parameter._forward_counter = 0
        vars(parameter).pop("_current_grad_sample", None)
        parameter.grad = parameter.grad_sample = None


@contextmanager
def _seeded(stream: torch.Generator) -> Iterator[None]:
    """Feed dropout from a candidate's own stream, leaving the global generator as it was."""
    seed = int(torch.randint(2**62, (), generator=stream, device=stream.device))
    devices: Sequence[torch.device] = [] if stream.device.type == "cpu" else [stream.device]
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=list(devices)):
        torch.random.manual_seed(seed)
        yield


def quiet_hooks() -> None:
    """Silence torch's remark that a backward hook fires although the input needs no gradient.

    For good: filters belong to the process, and trials in other threads run backward passes, too.
    """
    if not any(known[1] is not None and known[1].pattern == _REMARK for known in warnings.filters):
        warnings.filterwarnings("ignore", message=_REMARK)
