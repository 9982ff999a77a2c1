"""Clipped sums of one candidate by Opacus' hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.engine.graph.intercept import Intercept
from privtune.training.engine.layers.uses import longest
from privtune.training.engine.opacus_adapter import (
    ClippedSum,
    Mode,
    choose_mode,
    clipped_sum,
    for_one,
    hook,
    padded_tables,
    per_sample_gradients,
    quiet_hooks,
    trains,
)
from privtune.training.engine.self_check import KernelMismatchError, check_kernel
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.kernel import Layout, LossOf, Rows, load_params
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping

__all__ = ["OpacusKernel"]


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

    drops = True
    """Whether a pass draws from the streams of dropout: each takes its seed from there."""

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
        self.module = model().to(device)
        for part in self.module.modules():
            if trains(part):
                part.training = True  # hooks sleep otherwise; dropout keeps the mode it has
        self.layout = Layout(self.module)
        self._bare = deepcopy(self.module)
        self._example = synthetic(x, y, (2, 3), device)
        self._loss_of = loss_of
        self.mode: Mode = choose_mode(mode, self.layout.size, records)
        if mode == "auto" and padded_tables(self.module):
            self.mode = "hooks"  # Opacus' ghost norms count the padding, too
        self._params = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self._wrap(sequences=self.mode == "ghost" and self._sequential(x, device))

    def _wrap(self, *, sequences: bool) -> None:
        """Put the hooks of the mode on the model, and check what comes of them."""
        self._hooked = hook(self.module, self.mode, sequences=sequences)
        try:
            with Intercept(None, deterministic=True):
                check_kernel(self, self._bare, self._loss_of, *self._example, sites=())
        except KernelMismatchError as error:
            raise InvalidInputError("model", type(self.module).__name__, str(error)) from error

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
            self._hooked.remove_hooks()
            self.mode = "hooks"
            self._wrap(sequences=False)
        bad = torch.zeros(len(params), dtype=torch.long)
        done: list[tuple[int, ClippedSum]] = []
        for k, size in enumerate(int(n) for n in rows.sizes):
            if size == 0:
                continue
            load_params(self.module, params[k].detach())
            one = self._hooks if self.mode == "hooks" else self._ghost
            mask = rows.mask[k, :size] > 0
            try:
                with _seeded(rows.dropout[k]):
                    x, y = rows.x[k, :size], rows.y[k, :size]
                    done.append((k, one(x, y, mask, clipping, k, params)))
            except Exception:
                _forget(self.module)
                raise
        for k, (total, counted, dropped) in done:
            out[k] += total
            bad[k] = dropped
            if halves is not None:
                halves[k] += counted
        return bad.to(out.device) if bool(bad.any()) else None

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every row, without dropout, shape ``[K, M]``."""
        out = params.new_zeros(rows.mask.shape)
        self._hooked.disable_hooks()
        with torch.no_grad(), Intercept(None, deterministic=True):
            for k, flat in enumerate(params):
                load_params(self.module, flat)
                out[k] = self._vector(rows.x[k], rows.y[k])
        self._hooked.enable_hooks()
        return out

    def _sequential(self, x: torch.Tensor, device: torch.device) -> bool:
        """Say whether a Linear is used at several places of a record."""
        seen: list[bool] = []

        def note(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            seen.append(inputs[0].ndim > 2)

        handles = [
            part.register_forward_pre_hook(note)
            for part in self.module.modules()
            if isinstance(part, nn.Linear)
        ]
        with torch.no_grad():
            self.module(synthetic(x, x, (1, 2), device)[0][0])
        for handle in handles:
            handle.remove()
        return any(seen)

    def _vector(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = self._loss_of(self._hooked, x, y)
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
        self._hooked.zero_grad(set_to_none=True)
        self._hooked.enable_hooks()
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
        for part in self.module.modules() if self.mode == "ghost" else ():
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
    ) -> ClippedSum:
        """Return the clipped sum of candidate k over the records that ``mask`` keeps."""
        self._backward(x, y)
        gradients = per_sample_gradients(self.module, self._params, len(x))
        self._hooked.zero_grad(set_to_none=True)
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
    ) -> ClippedSum:
        """As ``_hooks``, from norms alone and a second backward pass over the same graph."""
        losses = self._backward(x, y)
        norms: torch.Tensor = self._hooked.get_norm_sample().detach().unsqueeze(0)
        finite = norms[0].isfinite() & ~self._too_long
        if not bool(finite.all()):
            # A coefficient of zero is not enough: 0 * inf is NaN. Such rows leave the batch.
            dropped = int((mask & ~finite).sum())
            if not bool(finite.any()):
                return torch.zeros_like(params[k]), norms.new_zeros(()), dropped
            rest = self._ghost(x[finite], y[finite], mask[finite], clipping, k, params)
            return rest[0], rest[1], rest[2] + dropped
        coefficients, counted = for_one(clipping, norms, mask, k, len(params))
        self._hooked.disable_hooks()
        quiet_hooks()
        grads = torch.autograd.grad(
            (losses * coefficients[0]).sum(),
            list(self._params.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        self._hooked.enable_hooks()
        flat = self.layout.flatten(dict(zip(self._params, grads, strict=True)))
        return flat, counted, 0


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
