"""Clipped sums record by record, each in a pass of its own: slow, and right for any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.engine.coupled import refuse_coupling
from privtune.training.engine.operations import Intercept
from privtune.training.engine.rules import length
from privtune.training.mechanism.clipping import CoordinateTransform, Flat
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.fresh import fresh, unwritten
from privtune.training.mechanism.kernel import Layout, LossOf, Rows, same_fixed, share_flat
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping


class OneByOneKernel:
    """Plain autograd on batches of one record: for what no transform takes.

    Each record meets a copy of the model, weights aside, so that nothing that a model keeps of one reaches
    the next.

    Args:
        module: A model that nobody else holds: its weights are written while it runs, and put back.
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

    @classmethod
    def of(
        cls,
        model: Callable[[], nn.Module],
        loss_of: LossOf,
        *,
        x: torch.Tensor,
        y: torch.Tensor,
        device: torch.device,
    ) -> OneByOneKernel:
        """Make one of a model that nobody else holds, and try it on records that hold no data.

        Args:
            model: Makes the model.
            loss_of: The loss of a record.
            x: Inputs of a few records, for shape and type alone.
            y: Targets of a few records, likewise.
            device: Where to compute.

        Raises:
            InvalidInputError: If a record by itself has no loss, or a pass changes buffers.
        """
        module = model().to(device)
        flat = share_flat(module)
        kernel = cls(module, loss_of, flat)
        inputs, targets = synthetic(x, y, (1, 2), device)
        streams, mask = [torch.Generator(device)], flat.new_ones(1, 2)
        rows = Rows(inputs, targets, [2], mask, streams)
        try:
            kernel.accumulate(flat[None], rows, Flat(1.0), out=torch.zeros_like(flat)[None])
            seen, own_loss = fresh(module, loss_of)
            with torch.no_grad(), Intercept(None, deterministic=True):
                own_loss(seen, inputs[0, :1], targets[0, :1])
        except PrivTuneError:
            raise
        except Exception as error:
            raise InvalidInputError(
                "model",
                type(module).__name__,
                f"must have a loss for one made-up record by itself ({type(error).__name__}: {error})",
            ) from error
        if not same_fixed(seen, module):
            raise InvalidInputError(
                "model",
                type(module).__name__,
                "must not change its buffers in a pass: they would hold something of every record",
                "Use GroupNorm or LayerNorm in place of running statistics.",
            )
        return kernel

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
            with self._at(params[k]), _seeded(rows.dropout[k]):
                for b in range(size):
                    total, counted, dropped = _clipped_sum(
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
        module, loss_of = fresh(self.module, self._loss_of)
        with torch.enable_grad(), Intercept(None, generator=rows.dropout[k]):
            loss = loss_of(module, rows.x[k, b : b + 1], rows.y[k, b : b + 1])
            if not loss.requires_grad:  # a branch on which no weight has a part
                return self._flat.new_zeros(1, self.layout.size)
            grads = torch.autograd.grad(
                loss.sum(), self._params, allow_unused=True, materialize_grads=True
            )
        return torch.cat(
            [(g.to_dense() if g.is_sparse else g).reshape(1, -1) for g in grads], dim=1
        )

    def losses(self, params: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the loss of every record, without dropout, shape ``[K, M]``."""
        out = params.new_zeros(rows.mask.shape)
        for k, size in enumerate(int(n) for n in rows.sizes):
            with self._at(params[k]), torch.no_grad(), Intercept(None, deterministic=True):
                for b in range(size):
                    module, loss_of = fresh(self.module, self._loss_of)
                    out[k, b] = loss_of(module, rows.x[k, b : b + 1], rows.y[k, b : b + 1]).sum()
        return out

    @contextmanager
    def _at(self, point: torch.Tensor) -> Iterator[None]:
        """Put the model where it is to be evaluated, and back."""
        stood = self._flat.clone()
        self._flat.copy_(point)
        try:
            with unwritten(self.module):
                yield
        finally:
            self._flat.copy_(stood)


@contextmanager
def _seeded(stream: torch.Generator) -> Iterator[None]:
    """Seed the global generator from a candidate's own stream, and leave it as it was."""
    seed = int(torch.randint(2**62, (), generator=stream, device=stream.device))
    devices = [] if stream.device.type == "cpu" else [stream.device]
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices):
        torch.random.manual_seed(seed)
        yield


def _clipped_sum(
    gradients: torch.Tensor,
    clipping: Clipping,
    layout: Layout,
    *,
    mask: torch.Tensor,
    row: int,
    candidates: int,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the clipped sum of per-sample gradients of one candidate.

    Args:
        gradients: Shape ``[B, P]``.
        clipping: Bounds each record.
        layout: Where parameters lie.
        mask: Shape ``[B]``: 1 for records that count.
        row: The candidate's place in its stack.
        candidates: How many the stack holds.

    Returns:
        The sum, shape ``[P]``; +1/2 for each record that counts and was not clipped and -1/2 for
        each other that counts; how many of them were not finite.
    """
    counted = mask > 0
    if isinstance(clipping, CoordinateTransform):
        gradients = (gradients - clipping.center[row]) / clipping.scale[row]
    groups = [(0, layout.size)]
    if clipping.by_layer:
        layers = layout.layers.values()
        groups = [(layout.spans[n[0]][0], layout.spans[n[-1]][1]) for n in layers]
    norms = torch.stack([length(gradients[:, start:end]) for start, end in groups])
    finite = norms.isfinite().all(dim=0)
    usable = finite & counted
    gradients = gradients.masked_fill(~usable.unsqueeze(1), 0.0)
    coefficients, halves = _for_one(clipping, norms, usable, row, candidates)
    total = torch.cat(
        [c @ gradients[:, s:e] for c, (s, e) in zip(coefficients, groups, strict=True)]
    )
    return total, halves, int((~finite & counted).sum())


def _for_one(
    clipping: Clipping, norms: torch.Tensor, kept: torch.Tensor, k: int, candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return candidate k's coefficients ``[G, B]`` and its count of halves over the kept records."""
    stacked = norms.unsqueeze(1).expand(-1, candidates, -1)
    coefficients = clipping.coefficients(stacked)[:, k] * kept
    return coefficients, ((clipping.unclipped(stacked)[k].to(norms) - 0.5) * kept).sum()
