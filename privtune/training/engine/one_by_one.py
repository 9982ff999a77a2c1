"""Clipped sums record by record, each in a pass of its own: slow, and right for any model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from privtune.training.engine.coupled import refuse_coupling
from privtune.training.engine.graph.intercept import Intercept
from privtune.training.engine.opacus_adapter import clipped_sum
from privtune.training.mechanism.kernel import Layout, LossOf, Rows

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping

__all__ = ["OneByOneKernel"]


class OneByOneKernel:
    """Plain autograd on batches of one record: for what no transform takes.

    Args:
        module: The model itself: its weights are written while it runs elsewhere than where it
            stands, and put back.
        loss_of: The loss of a record.
        flat: The memory of its trainable parameters, shape ``[P]``.

    Raises:
        InvalidInputError: If the model couples the records of a batch.
    """

    drops = True
    """Whether a pass draws from the streams of dropout: nothing says that it does not."""

    def __init__(self, module: nn.Module, loss_of: LossOf, flat: torch.Tensor) -> None:
        refuse_coupling(module)
        self.layout = Layout(module)
        self.module, self._loss_of, self._flat = module, loss_of, flat
        self._params = [p for p in module.parameters() if p.requires_grad]

    def accumulate(
        self,
        params: torch.Tensor,
        rows: Rows,
        clipping: Clipping,
        *,
        out: torch.Tensor,
        halves: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Add the clipped sums, record after record: see ``Kernel``."""
        bad = torch.zeros(len(params), dtype=torch.long)
        sums, counts = torch.zeros_like(out), out.new_zeros(len(out))
        for k, size in enumerate(int(n) for n in rows.sizes):
            with self._at(params[k]):
                for b in range(size):
                    total, counted, dropped = clipped_sum(
                        self._gradient(rows, k, b),
                        clipping,
                        self.layout,
                        mask=rows.mask[k, b : b + 1],
                        row=k,
                        candidates=len(params),
                    )
                    sums[k] += total
                    bad[k] += dropped
                    counts[k] += counted
        out += sums  # all at once: a pass that raises has changed nothing
        if halves is not None:
            halves += counts
        return bad.to(out.device) if bool(bad.any()) else None

    def _gradient(self, rows: Rows, k: int, b: int) -> torch.Tensor:
        """Return the gradient of one record, shape ``[1, P]``."""
        with torch.enable_grad(), Intercept(None, generator=rows.dropout[k]):
            loss = self._loss_of(self.module, rows.x[k, b : b + 1], rows.y[k, b : b + 1])
            grads = torch.autograd.grad(
                loss.sum(), self._params, allow_unused=True, materialize_grads=True
            )
        return torch.cat([g.reshape(1, -1) for g in grads], dim=1)

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every record, without dropout, shape ``[K, M]``."""
        out = params.new_zeros(rows.mask.shape)
        for k, size in enumerate(int(n) for n in rows.sizes):
            with self._at(params[k]), torch.no_grad(), Intercept(None, deterministic=True):
                for b in range(size):
                    x, y = rows.x[k, b : b + 1], rows.y[k, b : b + 1]
                    out[k, b] = self._loss_of(self.module, x, y).sum()
        return out

    @contextmanager
    def _at(self, point: torch.Tensor) -> Iterator[None]:
        """Put the model where it is to be evaluated, and back."""
        if point.data_ptr() == self._flat.data_ptr():
            yield
            return
        stood = self._flat.clone()
        self._flat.copy_(point)
        try:
            yield
        finally:
            self._flat.copy_(stood)
