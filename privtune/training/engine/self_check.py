"""The check that every kernel passes when it is built, on records that hold no data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from privtune.errors import PrivTuneError
from privtune.training.engine.passes import run_one
from privtune.training.engine.rules import length
from privtune.training.engine.watch import Site
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.kernel import Kernel, Layout, LossOf, Rows
from privtune.training.mechanism.streams import Streams

_TOLERANCE = 1e-4


class KernelMismatchError(PrivTuneError):
    """A kernel's clipped sums differ from those of records taken one by one."""


def check_kernel(
    kernel: Kernel,
    module: nn.Module,
    loss_of: LossOf,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    sites: Sequence[Site],
    tolerance: float = _TOLERANCE,
) -> None:
    """Compare clipped sums of synthetic records with records taken one by one.

    One bound clips about half of the records, another none; the sums show wrong norms, wrong
    gradients, missed uses of parameters, and losses that couple the records of a batch.

    Raises:
        KernelMismatchError: If they differ by more than a relative ``tolerance``.
    """
    candidates, records = x.shape[:2]
    layout = kernel.layout
    generator = torch.Generator().manual_seed(1)
    params = 0.3 * torch.randn(candidates, layout.size, generator=generator, dtype=layout.dtype)
    params = params.to(x.device)
    masks = _masks(sites, candidates, records, params)

    def alone(x: torch.Tensor) -> torch.Tensor:
        """Return the gradients of records taken one by one, shape ``[K, B, P]``."""
        rows = [
            _gradient(
                module,
                loss_of,
                layout,
                params[k],
                record=(x[k, b], y[k, b], *(mask[k, b] for mask in masks)),
            )
            for k in range(candidates)
            for b in range(records)
        ]
        return torch.stack(rows).view(candidates, records, -1)

    gradients = alone(x)
    if x.is_floating_point() and not bool(gradients.isfinite().all()):
        x = x.abs() + 1.0  # a loss may take logarithms or roots of inputs that are above 0
        gradients = alone(x)
    norms = length(gradients)
    if not bool(norms.isfinite().all()):
        raise KernelMismatchError(
            "gradients of made-up records are not finite, so the path cannot be checked"
        )
    for bound in (float(norms.median()), 10.0 * float(norms.max()) + 1.0):
        clipping = Flat(max(bound, 1e-6))
        coefficients = clipping.coefficients(norms.unsqueeze(0))[0]
        expected = (coefficients.unsqueeze(-1) * gradients).sum(dim=1)
        found = torch.zeros_like(params)
        streams = [Streams(_SECRET) for _ in range(candidates)]
        rows = Rows(
            x,
            y,
            [records] * candidates,
            torch.ones(candidates, records, dtype=params.dtype, device=x.device),
            [s.generator("dropout", k, device=x.device) for k, s in enumerate(streams)],
        )
        kernel.accumulate(params, rows, clipping, out=found)
        scale = float(expected.abs().max())
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance * scale + 1e-9):
            raise KernelMismatchError(
                "clipped sums of a few synthetic records differ from those of records taken one "
                "by one: the model or the loss couples records, or uses a parameter in a way "
                "that this path does not see"
            )


_SECRET = bytes(32)  # the check's masks are public: they touch no data


def _masks(
    sites: Sequence[Site], candidates: int, records: int, like: torch.Tensor
) -> list[torch.Tensor]:
    """Draw the masks that a kernel draws from the check's streams."""
    masks = [site.empty((candidates, records), like) for site in sites]
    streams = Streams(_SECRET)
    generators = [streams.generator("dropout", k, device=like.device) for k in range(candidates)]
    for site, mask in zip(sites, masks, strict=True):
        for row, generator in zip(mask, generators, strict=True):
            site.fill(row, generator)
    return masks


def _gradient(
    module: nn.Module,
    loss_of: LossOf,
    layout: Layout,
    params: torch.Tensor,
    *,
    record: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Return the gradient of one record ``(x, y, *masks)`` by itself, by plain autograd."""
    x, y, *masks = record
    named = {n: v.detach().requires_grad_() for n, v in layout.unflatten(params).items()}
    with torch.enable_grad():
        value = run_one(module, loss_of, named, x, y, masks=masks)
        grads = torch.autograd.grad(
            value, list(named.values()), allow_unused=True, materialize_grads=True
        )
    full = [g.to_dense() if g.is_sparse else g for g in grads]
    return layout.flatten(dict(zip(named, full, strict=True)))
