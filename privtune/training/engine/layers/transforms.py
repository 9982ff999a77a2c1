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

import torch

from privtune.training.engine.compute import full_precision
from privtune.training.engine.layers.sums import Pairs
from privtune.training.engine.layers.uses import LOST, LinearUse, Saved, Use, longest
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.mechanism.device import looks_freely
from privtune.training.mechanism.kernel import Layout

__all__ = ["Transformed"]

Parts = Mapping[str, torch.Tensor]


_FAR = 4.0
"""Length of a center over the scale from which on float32 loses too much of what is left of a sum."""


class Transformed:
    """The transformed gradients of one batch, most of them not formed.

    Products are taken in float32 where torch keeps all of its digits and a center is near. Whether it
    is, a candidate's own past releases say: no other candidate changes a bit of its result.

    Args:
        uses: The uses of all parameters.
        layout: Where each parameter lies.
        clipping: Center and scale, ``[K, P]`` each.
    """

    def __init__(self, uses: Sequence[Use], layout: Layout, clipping: CoordinateTransform) -> None:
        center, scale = clipping.center, clipping.scale
        self._far: torch.Tensor | None = None
        types = [torch.float64]
        if layout.dtype != torch.float64 and full_precision(center.device):
            types = [layout.dtype]
            far = ~(torch.linalg.vector_norm(center / scale, dim=1) <= _FAR)
            if not looks_freely(far.device) or bool(far.any()):
                types, self._far = [layout.dtype, torch.float64], far
        self._ways = [_Products(uses, layout, center.to(t), scale.to(t)) for t in types]

    def norms(self, pairs: Pairs) -> tuple[torch.Tensor, list[list[Saved]]]:
        """Return the norms, ``[1, K, B]``, and what ``add`` needs."""
        norms, saved = zip(*(way.norms(pairs) for way in self._ways), strict=True)
        if self._far is None:
            return norms[0], list(saved)
        return torch.where(self._far.view(1, -1, 1), norms[1], norms[0]), list(saved)

    def add(
        self, coefficients: torch.Tensor, saved: Sequence[list[Saved]], out: torch.Tensor
    ) -> None:
        """Add the sums weighted by ``coefficients``, ``[K, B]``, to ``out``, ``[K, P]``."""
        if self._far is None:
            self._ways[0].add(coefficients, saved[0], out)
            return
        near, exact = torch.zeros_like(out), torch.zeros_like(out)
        for way, kept, target in zip(self._ways, saved, (near, exact), strict=True):
            way.add(coefficients, kept, target)
        out += torch.where(self._far.unsqueeze(1), exact, near)


@dataclass(frozen=True, eq=False)
class _Products:
    """Norms and sums by products in the type of center and scale, ``[K, P]`` each."""

    uses: Sequence[Use]
    layout: Layout
    center: torch.Tensor
    scale: torch.Tensor

    def norms(self, pairs: Pairs) -> tuple[torch.Tensor, list[Saved]]:
        """Return the norms, ``[1, K, B]``, and what ``add`` needs."""
        # What squares of float32 lose is added to factors: see ``uses``. From float64 nothing is lost.
        lost = self.scale.new_full((), 0.0 if self.center.dtype == torch.float64 else LOST)
        # A larger weight is a longer norm: what has no weight left is not lost, either.
        weight = self.scale.square().reciprocal_().add_(lost)
        split = self.layout.split
        center, weights, pulls = split(self.center), split(weight), split(weight * self.center)
        squared = torch.zeros(pairs[0][1].shape[:2], dtype=self.center.dtype, device=weight.device)
        whole, cross, roundings = torch.zeros_like(squared), torch.zeros_like(squared), 0
        saved = []
        for use, (a, g) in zip(self.uses, pairs, strict=True):
            kept: Saved
            if _is_outer(use):
                kept = (a.to(self.center.dtype), g.to(self.center.dtype))
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
        # ``whole`` at most, and no way to a result has more roundings than both sides, four for each
        # use that is added up, and sixteen.
        # That covers, too, what the sum of the released gradients loses where it nearly cancels.
        roundings += 4 * len(self.uses) + 16
        slack = whole * (roundings * torch.finfo(self.center.dtype).eps)
        norms = whole.sub_(cross, alpha=2.0).clamp_(min=0.0).add_(slack).add_(squared).sqrt_()
        norms.masked_fill_(norms > longest(self.layout.dtype), math.inf)
        return norms.to(self.layout.dtype).unsqueeze(0), saved

    def _formed(self, use: Use, a: torch.Tensor, g: torch.Tensor) -> Saved:
        """Return the transformed gradients of a use, ``[K, B, n]``, in the order of its names."""
        center, scale = self.layout.split(self.center), self.layout.split(self.scale)
        own = use.instantiate(a, g)
        return tuple(
            (own[name] - center[name].unsqueeze(1)).div_(scale[name].unsqueeze(1))
            for name in use.names
        )

    def add(self, coefficients: torch.Tensor, saved: Sequence[Saved], out: torch.Tensor) -> None:
        """Add the sums weighted by ``coefficients``, ``[K, B]``, to ``out``, ``[K, P]``."""
        weights = coefficients.to(self.center.dtype)
        total = weights.sum(dim=1, keepdim=True)
        targets, center, scale = map(self.layout.split, (out, self.center, self.scale))
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
