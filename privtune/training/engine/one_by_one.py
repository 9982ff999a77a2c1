"""Clipped sums record by record, each in a pass of its own: slow, and right for any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.engine.coupled import refuse_coupling
from privtune.training.engine.graph.intercept import Intercept
from privtune.training.engine.opacus_adapter import clipped_sum
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import synthetic
from privtune.training.mechanism.fresh import fresh, unwritten
from privtune.training.mechanism.kernel import Layout, LossOf, Rows, same_fixed, share_flat
from privtune.training.mechanism.streams import GLOBAL_GENERATOR

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
        forgets: Whether each record meets a copy of the model, weights aside, so that nothing that
            a model keeps of one reaches the next. A loop of a user's own holds the model itself.

    Raises:
        InvalidInputError: If the model couples the records of a batch.
    """

    drops = True
    """Whether a pass draws from the streams of dropout: nothing says that it does not."""

    def __init__(
        self, module: nn.Module, loss_of: LossOf, flat: torch.Tensor, *, forgets: bool = False
    ) -> None:
        refuse_coupling(module)
        self.layout = Layout(module)
        self.module, self._loss_of, self._flat = module, loss_of, flat
        self._params = [p for p in module.parameters() if p.requires_grad]
        self._forgets = forgets

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
        kernel = cls(module, loss_of, flat, forgets=True)
        inputs, targets = synthetic(x, y, (1, 2), device)
        streams, mask = [torch.Generator(device)], flat.new_ones(1, 2)
        rows = Rows(inputs, targets, [2], mask, streams)
        try:
            kernel.accumulate(flat[None], rows, Flat(1.0), out=torch.zeros_like(flat)[None])
            seen, own_loss = kernel._met()
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

    def _met(self) -> tuple[nn.Module, LossOf]:
        """Return the model and the loss that a record meets."""
        if not self._forgets:
            return self.module, self._loss_of
        return fresh(self.module, self._loss_of)

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
            with self._at(params[k]), self._drawing(rows.dropout[k]):
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
        module, loss_of = self._met()
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
                    module, loss_of = self._met()
                    out[k, b] = loss_of(module, rows.x[k, b : b + 1], rows.y[k, b : b + 1]).sum()
        return out

    @contextmanager
    def _at(self, point: torch.Tensor) -> Iterator[None]:
        """Put the model where it is to be evaluated, and back."""
        if point.data_ptr() == self._flat.data_ptr():
            with self._watched():
                yield
            return
        stood = self._flat.clone()
        self._flat.copy_(point)
        try:
            with self._watched():
                yield
        finally:
            self._flat.copy_(stood)

    def _watched(self) -> AbstractContextManager[None]:
        return unwritten(self.module) if self._forgets else nullcontext()

    def _drawing(self, stream: torch.Generator) -> AbstractContextManager[None]:
        """Feed what a model draws by no call that is caught; a loop's own seeds stay the loop's."""
        return _seeded(stream) if self._forgets else nullcontext()


@contextmanager
def _seeded(stream: torch.Generator) -> Iterator[None]:
    """Seed the global generator from a candidate's own stream, and leave it as it was."""
    seed = int(torch.randint(2**62, (), generator=stream, device=stream.device))
    devices = [] if stream.device.type == "cpu" else [stream.device]
    with GLOBAL_GENERATOR, torch.random.fork_rng(devices=devices):
        torch.random.manual_seed(seed)
        yield
