"""Clipped sums of shifted and scaled gradients, ``(g - center) / scale``, coordinate by coordinate.

A matrix used once by each record has the gradient ``g a^T``, an outer product. Its transformed norm
is three sums of products, without the gradient itself:
``Σ g² a² / s² - 2 Σ g a c / s² + Σ c² / s²``. They may nearly cancel, so the norm is rounded up by
all that their rounding can have taken away. All other uses form their gradients. Where none does, norms
are captured with the pass: see ``with_norms``.

The sums are taken of the gradients as they are, and shifted and scaled at once, all parameters
together. A parameter that no use covers has the gradient zero, and is shifted and scaled as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from privtune.training.engine.compute import full_precision
from privtune.training.engine.rules import (
    LOST,
    ProductUse,
    Tensors,
    Use,
    count,
    emptied,
    length,
    multiplied,
    nonfinite,
    split,
    turns,
)
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.mechanism.device import looks_freely
from privtune.training.mechanism.kernel import Layout, Rows

Program = Callable[..., tuple[torch.Tensor, ...]]

_FAR = 16.0
"""Squared length of a center over the scale from which on float32 loses too much of what is left of a sum."""


def held_by_norms(uses: Sequence[Use], layout: Layout) -> tuple[int, int] | None:
    """Return the bytes of a candidate, and of a row, that a capture of norms holds beside the pass.

    None where norms are not captured: some gradients are formed, or products are those of float64.
    """
    if layout.dtype == torch.float64 or not all(map(_is_outer, uses)):
        return None
    shapes = [layout.shapes[use.weight] for use in uses]
    widths = sum(shape[1:].numel() + 5 * shape[0] for shape in shapes)
    return 20 * layout.size, 4 * widths


def with_norms(program: Program, uses: Sequence[Use], layout: Layout) -> Program:
    """Return a program that takes center and scale, and then what ``program`` takes.

    It gives the tape, and behind it what :class:`Transformed` knows by then: norms ``[K, B]``, squared
    lengths of the centers, and the inverse of the scale.

    Args:
        program: Gives the tape.
        uses: Filled by its first run.
        layout: Where each parameter lies.
    """

    def run(
        center: torch.Tensor, scale: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tape = program(*inputs)
        products = _Products(uses, layout, center, scale)
        norms, _ = products.norms(split(uses, tape))
        return (*tape, norms[0], products.length, products.inverse)

    return run


class Transformed:
    """The transformed gradients of one batch, most of them not formed.

    Products are taken in float32 where torch keeps all of its digits and a center is near. Whether it
    is, a candidate's own past releases say: no other candidate changes a bit of its result.

    Args:
        uses: The uses of all parameters.
        layout: Where each parameter lies.
        clipping: Center and scale, ``[K, P]`` each.
        known: What ``with_norms`` gave behind the tape, if the pass was captured so.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        layout: Layout,
        clipping: CoordinateTransform,
        known: Sequence[torch.Tensor] = (),
    ) -> None:
        center, scale = clipping.center, clipping.scale
        self._clipping = clipping
        self._far: torch.Tensor | None = None
        self._ways: list[_Products] = []
        if known or (layout.dtype != torch.float64 and full_precision(center.device)):
            self._ways.append(_Products(uses, layout, center, scale, known))
            if (far := self._ways[0].far()) is None:
                return
            self._far = far
        self._ways.append(_Products(uses, layout, center.double(), scale.double()))

    def norms(self, parts: Sequence[Tensors]) -> tuple[torch.Tensor, list[list[Tensors]]]:
        """Return the norms, ``[1, K, B]``, and what ``add`` needs."""
        norms, saved = zip(*(way.norms(parts) for way in self._ways), strict=True)
        if self._far is None:
            return norms[0], list(saved)
        return torch.where(self._far.unsqueeze(0), norms[1], norms[0]), list(saved)

    def accumulate(
        self,
        parts: Sequence[Tensors],
        rows: Rows,
        *,
        out: torch.Tensor,
        halves: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Add the clipped sums over the records of ``rows`` to ``out``: see ``Kernel``."""
        norms, saved = self.norms(parts)
        bad = nonfinite(norms, look=looks_freely(norms.device))
        if bad is None:
            coefficients = self._clipping.factors(norms)
        else:
            saved = [emptied(kept, bad) for kept in saved]
            norms = norms.masked_fill(bad, torch.inf)
            coefficients = self._clipping.coefficients(norms)
        self._add(coefficients.mul_(rows.mask)[0], saved, out)
        return count(self._clipping, norms, rows, bad, halves)

    def _add(
        self, coefficients: torch.Tensor, saved: Sequence[list[Tensors]], out: torch.Tensor
    ) -> None:
        """Add the sums weighted by ``coefficients``, ``[K, B]``, to ``out``, ``[K, P]``."""
        if self._far is None:
            self._ways[0].add(coefficients, saved[0], out)
            return
        near, exact = torch.zeros_like(out), torch.zeros_like(out)
        for way, kept, target in zip(self._ways, saved, (near, exact), strict=True):
            way.add(coefficients, kept, target)
        out += torch.where(self._far, exact, near)


class _Products:
    """Norms and sums by products in the type of center and scale, ``[K, P]`` each.

    Attributes:
        length: Squared length of the center over the scale, ``[K, 1]``, but for what is formed.
        inverse: Of the scale.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        layout: Layout,
        center: torch.Tensor,
        scale: torch.Tensor,
        known: Sequence[torch.Tensor] = (),
    ) -> None:
        self.uses, self.layout, self.center, self.known = uses, layout, center, known
        self._shift = center
        if known:  # all of them products
            self._outer = [True] * len(uses)
            _, self.length, self.inverse = known
            return
        self._outer = [_is_outer(use) for use in uses]
        if not all(self._outer):  # what is formed is shifted as it is formed, the rest at once
            self._shift = center.clone()
            for use, outer in zip(uses, self._outer, strict=True):
                for name in () if outer else use.names:
                    self._of(self._shift, name).zero_()
        self.inverse = scale.reciprocal()
        # What squares of float32 lose is added to factors: see ``rules``. From float64 nothing is lost.
        # A larger weight is a longer norm: what has no weight left is not lost, either.
        lost = _lost(center.dtype, center.device)
        self._weight = torch.addcmul(lost, self.inverse, self.inverse)
        self._pull = self._weight * self._shift
        # Not by a product of matrices: a sum adds up thousands of numbers in few roundings.
        self.length = (self._pull * self._shift).sum(dim=1, keepdim=True)

    def _of(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        start, end = self.layout.spans[name]
        return flat[:, start:end]

    def far(self) -> torch.Tensor | None:
        """Return which centers are far, shape ``[K, 1]``, or None for none, where that can be looked at."""
        # The largest is no number where any is none.
        if looks_freely(self.length.device) and self.length.max().item() <= _FAR:
            return None
        return ~(self.length <= _FAR)

    def norms(self, parts: Sequence[Tensors]) -> tuple[torch.Tensor, list[Tensors]]:
        """Return the norms, ``[1, K, B]``, and what ``add`` needs."""
        if self.known:
            return self.known[0].unsqueeze(0), list(parts)
        dtype, width, roundings = self.center.dtype, parts[0][0].shape[1], 0
        halves: list[torch.Tensor] = []  # of the first term and the second, with the sign turned
        formed: list[torch.Tensor] = []
        saved: list[Tensors] = []
        for use, outer, own in zip(self.uses, self._outer, parts, strict=True):
            if outer:
                a, g = own
                saved.append((a, g) if a.dtype == dtype else (a.to(dtype), g.to(dtype)))
                halves.append(self._half(use, *saved[-1]))
                roundings = max(roundings, a.shape[-1] + g.shape[-1])
            else:
                saved.append(self._formed(use, own))
                formed += [length(v).square_() for v in saved[-1]]
        # The three terms may nearly cancel: add the most that rounding can have taken away, with all
        # its errors of one sign. No way to a result has more roundings than both sides, four for each
        # use that is added up, and sixteen. Absolute values of all terms add up to no more than twice
        # w = |g / s|² + |c / s|², which the norm n itself bounds: |g / s| is n + |c / s| at most, so
        # w is 2 n² + 3 |c / s|² at most.
        # That covers, too, what the sum of the released gradients loses where it nearly cancels.
        lost = (roundings + 4 * len(self.uses) + 16) * torch.finfo(dtype).eps
        lost /= 1.0 - 2.0 * lost  # n², too, is known up to that
        if halves:
            total = halves[0]
            for half in halves[1:]:
                total = total + half
            total = torch.sub(self.length, total, alpha=2.0).clamp_min(0.0)
            total = torch.add(self.length * (3.0 * lost), total, alpha=1.0 + 2.0 * lost)
        else:
            total = self.length.expand(-1, width)
        for squared in formed:
            total = total + squared
        # A square beyond all numbers of the parameters' type is infinite from here on.
        return total.to(self.layout.dtype).sqrt().unsqueeze(0), saved

    def _half(self, use: Use, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return ``Σ g a c / s² - Σ g² a² / 2 s²`` over a matrix and its bias, shape ``[K, B]``."""
        matrix, pull = (
            self._of(part, use.weight).view(len(a), g.shape[-1], a.shape[-1])
            for part in (self._weight, self._pull)
        )
        turned = turns(g.shape[-1], a.device)
        square = torch.addcmul(_lost(a.dtype, a.device), a, a)
        if use.bias is None:
            half = multiplied(square, matrix, None, turned=turned) * g * -0.5
        else:
            half = multiplied(square, matrix, self._of(self._weight, use.bias), turned=turned)
            pulled = self._of(self._pull, use.bias).unsqueeze(1)
            half = torch.addcmul(pulled, half, g, value=-0.5)
        half = torch.baddbmm(half.mT, pull, a.mT).mT if turned else torch.baddbmm(half, a, pull.mT)
        found: torch.Tensor = (half * g).sum(dim=-1)
        return found

    def _formed(self, use: Use, parts: Tensors) -> Tensors:
        """Return the transformed gradients of a use, ``[K, B, n]``, in the order of its names."""
        own = use.instantiate(*parts)
        return tuple(
            (own[name] - self._of(self.center, name).unsqueeze(1)).mul_(
                self._of(self.inverse, name).unsqueeze(1)
            )
            for name in use.names
        )

    def add(self, coefficients: torch.Tensor, saved: Sequence[Tensors], out: torch.Tensor) -> None:
        """Add the sums weighted by ``coefficients``, ``[K, B]``, to ``out``, ``[K, P]``."""
        dtype = self.center.dtype
        weights = coefficients if coefficients.dtype == dtype else coefficients.to(dtype)
        raw = self._shift * weights.sum(dim=1, keepdim=True).neg_()
        sums = self.layout.split(raw)
        for use, outer, kept in zip(self.uses, self._outer, saved, strict=True):
            if outer:
                use.accumulate(weights, kept, sums)
                continue
            for name, values in zip(use.names, kept, strict=True):
                self._of(out, name).add_(torch.bmm(weights.unsqueeze(1), values).squeeze(1))
        out.addcmul_(raw, self.inverse)


@cache
def _lost(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.full((), 0.0 if dtype == torch.float64 else LOST, dtype=dtype, device=device)


def _is_outer(use: Use) -> bool:
    """Whether each record's gradient is one outer product in the order of the parameter."""
    return isinstance(use, ProductUse) and use.taps == 1 and use.form == "outer"
