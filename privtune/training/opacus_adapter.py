"""Per-sample gradients by Opacus, one candidate at a time. The only module that imports opacus.

Only the hooks of Opacus are used: they give per-sample norms (ghost mode). Sampling, clipping,
noise and the account stay PrivTune's own, so none of Opacus' loaders, optimizers and accountants
can disagree with the plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.training.kernel import Layout, Loss, Rows, Sums, load_params

if TYPE_CHECKING:
    from privtune.training.clipping import Clipping

__all__ = ["OpacusKernel"]


class OpacusKernel:
    """Clipped sums through Opacus' ghost mode, candidate by candidate.

    Args:
        model: Makes the model.
        loss: Loss of each record.

    Raises:
        InvalidInputError: If Opacus cannot take the model (BatchNorm, for one).
    """

    def __init__(self, model: Callable[[], nn.Module], loss: Loss) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.validators import ModuleValidator

        self._inner = model().train()
        problems = ModuleValidator.validate(self._inner, strict=False)
        if problems:
            raise InvalidInputError(
                "model", type(self._inner).__name__, "; ".join(str(p) for p in problems)
            )
        self.layout = Layout(self._inner)
        self._loss = loss
        self._module = GradSampleModuleFastGradientClipping(
            self._inner, batch_first=True, loss_reduction="sum", use_ghost_clipping=True
        )
        self._params = {n: p for n, p in self._inner.named_parameters() if p.requires_grad}

    def clipped_sums(self, params: torch.Tensor, rows: Rows, clipping: Clipping) -> Sums:
        """Return the clipped sums, computed for one candidate after the other."""
        if clipping.by_layer:
            raise InvalidInputError("clipping", clipping, "cannot be by layer in ghost mode")
        total = torch.zeros_like(params)
        halves = params.new_zeros(len(params))
        nonfinite = torch.zeros(len(params), dtype=torch.long)
        for k, flat in enumerate(params):
            load_params(self._inner, flat)
            x, y = rows.x[k, rows.mask[k]], rows.y[k, rows.mask[k]]
            if len(x) == 0:
                continue
            norms = self._norms(x, y)
            finite = norms.isfinite()
            if not bool(finite.all()):
                # A coefficient of zero is not enough: 0 * inf is NaN. Such rows leave the batch.
                nonfinite[k] = int((~finite).sum())
                x, y = x[finite], y[finite]
                halves[k] -= 0.5 * float(nonfinite[k])
                if len(x) == 0:
                    continue
                norms = self._norms(x, y)
            spread = norms.new_full((1, len(params), len(x)), 1.0)
            spread[0, k] = norms
            halves[k] += (clipping.unclipped(spread)[k].to(norms) - 0.5).sum()
            total[k] = self._weighted(x, y, clipping.coefficients(spread)[0, k])
        return Sums(total, halves, nonfinite)

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every row, shape ``[K, M]``."""
        out = params.new_zeros(rows.mask.shape)
        self._module.disable_hooks()
        with torch.no_grad():
            for k, flat in enumerate(params):
                load_params(self._inner, flat)
                out[k] = self._vector(rows.x[k], rows.y[k])
        self._module.enable_hooks()
        return out

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing to do: no state is kept by candidate."""

    def _vector(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = self._loss(self._module(x), y)
        if losses.shape != (len(x),):
            raise InvalidInputError(
                "loss",
                tuple(losses.shape),
                f"must be one number a record, shape ({len(x)},)",
                'Use reduction="none"; a mean couples the records.',
            )
        return losses

    def _norms(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the per-sample gradient norms by one backward pass with Opacus' hooks."""
        self._module.zero_grad(set_to_none=True)
        self._module.enable_hooks()
        with _quiet_hooks():
            torch.autograd.backward(self._vector(x, y).sum())
        norms: torch.Tensor = self._module.get_norm_sample().detach()
        return norms

    def _weighted(
        self, x: torch.Tensor, y: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the weighted sum of losses: the clipped sum, flat."""
        self._module.disable_hooks()
        loss = (self._vector(x, y) * coefficients).sum()
        with _quiet_hooks():
            grads = torch.autograd.grad(loss, list(self._params.values()))
        self._module.enable_hooks()
        return self.layout.flatten(dict(zip(self._params, grads, strict=True)))


@contextmanager
def _quiet_hooks() -> Iterator[None]:
    """Silence torch's remark that a backward hook fires although the input needs no gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield
