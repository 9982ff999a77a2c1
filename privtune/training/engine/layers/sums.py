"""Norms and clipped sums of per-sample gradients, over all uses of a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from privtune.training.engine.layers.uses import Saved, Use
from privtune.training.mechanism.kernel import Layout, Rows

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""``(a, g)`` of every use: what went in, and the gradient of what came out."""


def pairs_of(tape: Sequence[torch.Tensor]) -> Pairs:
    """Return the pairs of a tape, which holds them one after the other."""
    return list(zip(tape[::2], tape[1::2], strict=True))


def norms_of(
    uses: Sequence[Use], pairs: Pairs, *, layout: Layout, by_layer: bool
) -> tuple[torch.Tensor, list[Saved]]:
    """Return norms ``[G, K, B]``, over everything or by layer, and what the sums need."""
    results = [use.squared_norms(a, g) for use, (a, g) in zip(uses, pairs, strict=True)]
    saved = [kept for _, kept in results]
    if not by_layer:
        total = results[0][0]
        for squared, _ in results[1:]:
            total = total.add_(squared)
        return total.sqrt_().unsqueeze(0), saved
    shape = (len(layout.layers), *results[0][0].shape)
    squares = torch.zeros(shape, dtype=layout.dtype, device=results[0][0].device)
    for use, (squared, _) in zip(uses, results, strict=True):
        squares[layout.layer_of[use.weight]] += squared
    return squares.sqrt(), saved


def add_sums(
    uses: Sequence[Use],
    saved: Sequence[Saved],
    coefficients: torch.Tensor,
    targets: Mapping[str, torch.Tensor],
    *,
    layout: Layout,
) -> None:
    """Add the sums weighted by ``coefficients``, ``[G, K, B]``, to ``[K, n]`` of each parameter."""
    groups = coefficients.unbind()
    for use, kept in zip(uses, saved, strict=True):
        group = groups[layout.layer_of[use.weight] if len(groups) > 1 else 0]
        use.accumulate(group, kept, targets)


def nonfinite(norms: torch.Tensor, *, look: bool = True) -> torch.Tensor | None:
    """Return which records have a norm that is not finite, ``[K, B]``, or None for none.

    Args:
        norms: Shape ``[G, K, B]``.
        look: Whether to look if there are any; otherwise the answer is never None.
    """
    if look and math.isfinite(norms.sum().item()):
        return None
    bad = ~norms.isfinite().all(dim=0)
    return bad if not look or bool(bad.any()) else None


def emptied(saved: Sequence[Saved], bad: torch.Tensor) -> list[Saved]:
    """Put zeros in place of what bad records, ``[K, B]``, left for the sums.

    Copies keep their layout, and so every other record its bits.
    """

    def clean(kept: torch.Tensor) -> torch.Tensor:
        if not kept.is_floating_point():
            return kept  # indices: what is looked up there is weighted by zero
        places = kept.shape[1] // bad.shape[1]  # each record has one, or all of its places in a row
        rows = bad.repeat_interleave(places, dim=1) if places > 1 else bad
        where = rows.view(*rows.shape, *(1 for _ in kept.shape[2:]))
        return kept.clone(memory_format=torch.preserve_format).masked_fill_(where, 0)

    return [tuple(map(clean, each)) for each in saved]


def count(
    clipping: Clipping,
    norms: torch.Tensor,
    rows: Rows,
    bad: torch.Tensor | None,
    halves: torch.Tensor | None,
) -> torch.Tensor | None:
    """Count unclipped records into ``halves``; return the number of bad records, if any."""
    if halves is not None:
        counted = (clipping.unclipped(norms).to(rows.mask) - 0.5) * rows.mask
        halves += (counted if bad is None else counted.masked_fill(bad, 0.0)).sum(dim=1)
    return None if bad is None else (bad & (rows.mask > 0)).sum(dim=1)
