"""Clipped sums of shifted and scaled gradients, ``(g - center) / scale``, coordinate by coordinate.

A matrix used once by each record has the gradient ``g a^T``, an outer product. Its transformed norm
is three sums of products, without the gradient itself:
``Σ g² a² / s² - 2 Σ g a c / s² + Σ c² / s²``. They may nearly cancel, so the norm is rounded up by
all that their rounding can have taken away. All other uses form their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from privtune.training.engine.compute import full_precision
from privtune.training.engine.layers.sums import Pairs
from privtune.training.engine.layers.uses import LOST, LinearUse, Saved, Use, longest
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.mechanism.kernel import Layout

__all__ = ["Transformed"]

Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Transformed:
    """The transformed gradients of one batch, most of them not formed.

    Args:
        uses: The uses of all parameters.
        layout: Where each parameter lies.
        clipping: Center and scale, ``[K, P]`` each.
    """

    uses: Sequence[Use]
    layout: Layout
    clipping: CoordinateTransform

    @cached_property
    def _wide(self) -> torch.dtype:
        """The type that products are taken in: where torch may shorten those of float32, float64."""
        full = full_precision(self.clipping.center.device)
        return self.layout.dtype if full else torch.float64

    @cached_property
    def _center(self) -> torch.Tensor:
        return self.clipping.center.to(self._wide)

    @cached_property
    def _scale(self) -> torch.Tensor:
        return self.clipping.scale.to(self._wide)

    def norms(self, pairs: Pairs) -> tuple[torch.Tensor, list[Saved]]:
        """Return the norms, ``[1, K, B]``, and what ``add`` needs."""
        # What squares of float32 lose is added to factors: see ``uses``. From float64 nothing is lost.
        lost = self._scale.new_tensor(0.0 if self._wide == torch.float64 else LOST)
        # A larger weight is a longer norm: what has no weight left is not lost, either.
        weight = self._scale.square().reciprocal_().add_(lost)
        split = self.layout.split
        center, weights, pulls = split(self._center), split(weight), split(weight * self._center)
        squared = torch.zeros(pairs[0][1].shape[:2], dtype=self._wide, device=weight.device)
        whole, cross, roundings = torch.zeros_like(squared), torch.zeros_like(squared), 0
        saved = []
        for use, (a, g) in zip(self.uses, pairs, strict=True):
            kept: Saved
            if _is_outer(use):
                kept = (a.to(self._wide), g.to(self._wide))
                square_a, square_g = (torch.addcmul(lost, part, part) for part in kept)
                whole += _products(use, square_a, square_g, weights)
                cross += _products(use, *kept, pulls)
                for name in use.names:
                    whole += torch.linalg.vecdot(pulls[name], center[name]).unsqueeze(1)
                roundings = max(roundings, a.shape[-1] + g.shape[-1])
            else:
                kept = self._formed(use, a, g)
                for values in kept:
                    squared += torch.linalg.vector_norm(values, dim=-1).square_()
            saved.append(kept)
        # The three terms may nearly cancel: add the most that rounding can have taken away, with all
        # its errors of one sign. Each term is a sum of products whose absolute values add up to
        # ``whole`` at most, and no way to a result has more roundings than both sides and sixteen.
        # That covers, too, what the sum of the released gradients loses where it nearly cancels.
        slack = whole * ((roundings + 16) * torch.finfo(self._wide).eps)
        norms = whole.sub_(cross, alpha=2.0).clamp_(min=0.0).add_(slack).add_(squared).sqrt_()
        norms.masked_fill_(norms > longest(self.layout.dtype), math.inf)
        return norms.to(self.layout.dtype).unsqueeze(0), saved

    def _formed(self, use: Use, a: torch.Tensor, g: torch.Tensor) -> Saved:
        """Return the transformed gradients of a use, ``[K, B, n]``, in the order of its names."""
        center, scale = self.layout.split(self._center), self.layout.split(self._scale)
        own = use.instantiate(a, g)
        return tuple(
            (own[name] - center[name].unsqueeze(1)).div_(scale[name].unsqueeze(1))
            for name in use.names
        )

    def add(self, coefficients: torch.Tensor, saved: Sequence[Saved], out: torch.Tensor) -> None:
        """Add the sums weighted by ``coefficients``, ``[K, B]``, to ``out``, ``[K, P]``."""
        weights = coefficients.to(self._wide)
        total = weights.sum(dim=1, keepdim=True)
        targets, center, scale = map(self.layout.split, (out, self._center, self._scale))
        for use, kept in zip(self.uses, saved, strict=True):
            if not _is_outer(use):
                for name, values in zip(use.names, kept, strict=True):
                    targets[name].add_(torch.bmm(weights.unsqueeze(1), values).squeeze(1))
                continue
            sums = {name: center[name] * -total for name in use.names}
            use.accumulate(weights, kept, sums)
            for name, values in sums.items():
                targets[name].add_(values.div_(scale[name]))


def _is_outer(use: Use) -> bool:
    """Whether each record's gradient is one outer product in the order of the parameter."""
    return type(use) is LinearUse and use.form == "outer"


def _products(use: Use, a: torch.Tensor, g: torch.Tensor, weight: Parts) -> torch.Tensor:
    """Return ``g^T W a`` and what the bias adds to it, ``[K, B]``, for a matrix of weights ``W``."""
    matrix = weight[use.weight].view(len(a), g.shape[-1], a.shape[-1])
    # The shorter side is multiplied first: the same work, most of it in longer rows.
    if g.shape[-1] <= a.shape[-1]:
        total: torch.Tensor = torch.linalg.vecdot(torch.bmm(g, matrix), a)
    else:
        total = torch.linalg.vecdot(torch.bmm(a, matrix.mT), g)
    if use.bias is not None:
        total += torch.linalg.vecdot(g, weight[use.bias].unsqueeze(1))
    return total
