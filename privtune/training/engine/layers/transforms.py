"""Clipped sums of shifted and scaled gradients, ``(g - center) / scale``, coordinate by coordinate.

A matrix used once by each record has the gradient ``g a^T``, an outer product. Its transformed norm
is three matrix products, without the gradient itself:
``Σ g² a² / s² - 2 Σ g a c / s² + Σ c² / s²``. They may nearly cancel, so they are done in float64.
All other uses form their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from privtune.training.engine.layers.sums import Pairs
from privtune.training.engine.layers.uses import LinearUse, Use, longest
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

    def norms(self, pairs: Pairs) -> tuple[torch.Tensor, list[Parts]]:
        """Return the norms, ``[1, K, B]``, and what ``add`` needs."""
        split = self.layout.split
        center, scale = split(self.clipping.center), split(self.clipping.scale)
        squares, saved = [], []
        for use, (a, g) in zip(self.uses, pairs, strict=True):
            if _is_outer(use):
                square, kept = _outer(use, a.double(), g.double(), center, scale)
            else:
                kept = {
                    name: (values - center[name].unsqueeze(1)) / scale[name].unsqueeze(1)
                    for name, values in use.instantiate(a, g).items()
                }
                square = sum(
                    (torch.linalg.vector_norm(v, dim=-1).double().square() for v in kept.values()),
                    torch.zeros((), dtype=torch.float64, device=a.device),
                )
            squares.append(square)
            saved.append(kept)
        norms = torch.stack(squares).sum(dim=0).sqrt_()
        norms.masked_fill_(norms > longest(self.layout.dtype), math.inf)
        return norms.to(self.layout.dtype).unsqueeze(0), saved

    def add(self, coefficients: torch.Tensor, saved: Sequence[Parts], out: torch.Tensor) -> None:
        """Add the sums weighted by ``coefficients``, ``[K, B]``, to ``out``, ``[K, P]``."""
        split = self.layout.split
        targets = split(out)
        center, scale = split(self.clipping.center), split(self.clipping.scale)
        for use, kept in zip(self.uses, saved, strict=True):
            if not _is_outer(use):
                for name, values in kept.items():
                    targets[name].add_(torch.bmm(coefficients.unsqueeze(1), values).squeeze(1))
                continue
            weights = coefficients.double()
            scaled = kept["g"] * weights.unsqueeze(-1)
            sums = {use.weight: torch.bmm(scaled.mT, kept["a"]).flatten(1)}
            if use.bias is not None:
                sums[use.bias] = scaled.sum(dim=1)
            total = weights.sum(dim=1, keepdim=True)
            for name, values in sums.items():
                shifted = values.sub_(center[name].double() * total)
                targets[name].add_(shifted.div_(scale[name].double()).to(out.dtype))


def _is_outer(use: Use) -> bool:
    """Whether each record's gradient is one outer product in the order of the parameter."""
    return type(use) is LinearUse and use.form == "outer"


def _outer(
    use: Use, a: torch.Tensor, g: torch.Tensor, center: Parts, scale: Parts
) -> tuple[torch.Tensor, Parts]:
    """Return the squared norms, ``[K, B]``, of a matrix and its bias, rounded up."""
    candidates, outputs, inputs = len(a), g.shape[-1], a.shape[-1]
    shape = (candidates, outputs, inputs)
    shift = center[use.weight].double().view(shape)
    weight = scale[use.weight].double().view(shape).square().reciprocal_()
    squares = (torch.bmm(g.square(), weight) * a.square()).sum(dim=-1)
    cross = (torch.bmm(g, shift * weight) * a).sum(dim=-1)
    fixed = (shift.square() * weight).sum(dim=(1, 2))
    if use.bias is not None:
        shift = center[use.bias].double()
        weight = scale[use.bias].double().square().reciprocal_()
        squares += torch.bmm(g.square(), weight.unsqueeze(-1)).squeeze(-1)
        cross += torch.bmm(g, (shift * weight).unsqueeze(-1)).squeeze(-1)
        fixed = fixed + (shift.square() * weight).sum(dim=1)
    whole = squares + fixed.unsqueeze(1)
    # The three terms may nearly cancel: add the most that rounding in float64 can have taken away,
    # with all its errors of one sign.
    slack = whole * (4.0 * (inputs + outputs) * torch.finfo(torch.float64).eps)
    square = whole.sub_(2.0 * cross).clamp_(min=0.0).add_(slack)
    return square, {"a": a, "g": g}
