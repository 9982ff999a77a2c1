"""Rules: the norms and the weighted sum of per-record gradients, from what layers saw and sent back.

A *use* is how a pass uses one parameter. From what went in (``a``) and the gradient of what came out
(``g``), both with axes ``[K, B, ...]``, a rule gives the squared norm of every record's gradient and adds the
weighted sum of those gradients to a buffer. The per-record gradients of a large layer are never held at once
(Bu et al. 2023, arXiv 2210.00038).

A matrix that a record uses at T places has the gradient ``g^T a``, a sum of T outer products. Its norm comes
from two Gram matrices of T by T (*ghost*), or from the gradient itself: kept for the sum (*direct*) or formed
a few records at a time, for its norm alone (*twice*). Norms whose sum is formed anew are rounded up by what
float32 may lose in that sum: where its terms cancel, the sum would else be up to 1.35 times the bound.

A squared norm may underflow where it is that of a whole gradient (then the gradient is shorter than 1e-18 and
no bound is), but not where it is a factor: the other one may be 1e38. So what squares can lose is added to
factors. A gradient, or what a matrix is multiplied with, that is longer than 1.8e19 counts as not finite: its
coefficient, or its part of the sum, would lose its digits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Literal

import torch

from privtune.training.engine.compute import full_precision
from privtune.training.mechanism.clipping import CoordinateTransform, looks_freely
from privtune.training.mechanism.kernel import Layout, Rows

if TYPE_CHECKING:
    from privtune.training.mechanism.clipping import Clipping


Tensors = tuple[torch.Tensor, ...]

LOST = 2.0**-100
"""More than a sum of squares in float32 loses below 1e-38, up to 60 million of them; 1e-15 squared."""

Form = Literal["outer", "ghost", "direct", "formed", "twice"]
"""``outer``: one place a record, so the gradient is one outer product; else see the module."""

_DIRECT_BYTES = 64 * 2**20  # of the per-record gradients of a layer that are kept for the sum
_PIECE_BYTES = 8 * 2**20  # of those that are formed at once for their norms alone
_FEW_OUTPUTS = 16  # a vector of numbers of float32
_LANE = 4096  # up to here, a sum of squares in float32 keeps its digits


@dataclass(frozen=True)
class Use(ABC):
    """How a pass uses a weight, and a bias that the same operation adds."""

    weight: str
    bias: str | None = None

    @property
    def parts(self) -> int:
        """How many tensors of a tape belong to it."""
        return 2

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients come from this use."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @abstractmethod
    def squared_norms(self, *parts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Return the squared norms, shape ``[K, B]``, and what ``accumulate`` needs."""

    @abstractmethod
    def accumulate(
        self, coefficients: torch.Tensor, saved: Tensors, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Add the sums weighted by ``coefficients``, ``[K, B]``, to ``out``, ``[K, n]`` each."""

    @abstractmethod
    def instantiate(self, *parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the per-record gradients, shape ``[K, B, n]`` each."""


@dataclass(frozen=True)
class ProductUse(Use):
    """A weight that is multiplied with: ``a`` is ``[K, B, T, d]`` and ``g`` is ``[K, B, T, p]``."""

    form: Form = "outer"
    taps: int = 1
    depth: int = 1
    groups: int = 1

    def laid_out(self, a: torch.Tensor, g: torch.Tensor) -> tuple[ProductUse, Tensors]:
        """Choose the form by what it costs, given parts ``[K, B, T, features]``; return use and parts."""
        # Gram matrices take T² (d + p) operations in float64, a gradient T d p in float32.
        rows, places, inputs, outputs = a.shape[0] * a.shape[1], a.shape[2], a.shape[3], g.shape[3]
        form: Form = "twice" if 4 * rows * inputs * outputs > _DIRECT_BYTES else "direct"
        if self.groups > 1:
            form = "direct"
        elif places == 1:
            form, a, g = "outer", a.squeeze(2), g.squeeze(2)
        elif places**2 * (inputs + outputs) < 8 * inputs * outputs:
            form = "ghost"
        if form == "direct" and inputs * outputs < places * (inputs + outputs) * self.groups:
            return replace(self, form="formed"), self._gradients(a, g)
        return replace(self, form=form), (a, g)

    @property
    def parts(self) -> int:
        """Both sides of the product, or the gradients of weight and bias."""
        return len(self.names) if self.form == "formed" else 2

    def squared_norms(self, *parts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Return norms in the chosen form."""
        if self.form in ("direct", "formed"):
            parts = self._gradients(*parts) if self.form == "direct" else parts
            squared = _square(parts[0])
            return (squared if self.bias is None else squared.add_(_square(parts[1]))), parts
        a, g = parts
        if self.form == "outer":
            squared = _square(a).add_(LOST if self.bias is None else 1.0)
            return squared.mul_(_square(g).add_(LOST)), (a, g)
        biased = self.bias is not None
        formed = _gram_norms(a, g, biased=biased) if self.form == "ghost" else self._piecewise(a, g)
        return _rounded(formed, a, g, biased=biased), (a.flatten(1, 2), g.flatten(1, 2))

    def accumulate(
        self, coefficients: torch.Tensor, saved: Tensors, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Contract scaled output gradients with inputs, or weigh the gradients that were kept."""
        if self.form in ("direct", "formed"):
            row = coefficients.unsqueeze(1)
            for name, kept in zip(self.names, saved, strict=True):
                total = torch.bmm(row, kept).squeeze(1)
                out[name].add_(self._in_order(total) if name == self.weight else total)
            return
        a, g = saved
        if self.form != "outer":
            coefficients = coefficients.repeat_interleave(g.shape[1] // coefficients.shape[1], 1)
        scaled = g * coefficients.unsqueeze(-1)
        place = out[self.weight].view(len(a), g.shape[-1], a.shape[-1])
        if self.taps == 1 and place.is_contiguous():
            place.baddbmm_(scaled.mT, a)
        else:  # parts of long rows: a product that is added in place would be copied there and back
            total = torch.bmm(scaled.mT, a)
            out[self.weight].add_(self._in_order(total.flatten(1)))
        if self.bias is not None:
            out[self.bias].add_(scaled.sum(dim=1))

    def instantiate(self, *parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the per-record gradients by the direct form."""
        if self.form == "outer":
            parts = self._gradients(*(part.unsqueeze(2) for part in parts))
        elif self.form != "formed":
            parts = self._gradients(*parts)
        gradients = dict(zip(self.names, parts, strict=True))
        gradients[self.weight] = self._in_order(gradients[self.weight])
        return gradients

    def _gradients(self, a: torch.Tensor, g: torch.Tensor) -> Tensors:
        """Return the per-record gradients of weight and bias, from matrices."""
        if self.groups > 1:
            by_tap = a.view(*a.shape[:3], self.taps, self.groups, -1).permute(0, 1, 4, 2, 3, 5)
            by_group = g.view(*g.shape[:3], self.groups, -1).transpose(2, 3)
            left, right = by_group, by_tap.flatten(4)
        else:
            left, right = g, a
        weight = torch.matmul(left.mT, right).flatten(2)
        return (weight,) if self.bias is None else (weight, g.sum(dim=2))

    def _in_order(self, weight: torch.Tensor) -> torch.Tensor:
        """Bring flat weight gradients ``[..., p * d]`` into the order of the parameter."""
        if self.taps == 1:
            return weight
        last = weight.view(*weight.shape[:-1], -1, self.taps, self.depth)
        return last.transpose(-1, -2).flatten(-3)

    def _piecewise(self, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return the squared norms in float64, of gradients that are formed a few records at a time."""
        size = max(1, _PIECE_BYTES // (4 * a.shape[0] * a.shape[-1] * g.shape[-1]))
        found = []
        pieces = (torch.split(side, size, dim=1) for side in (a, g))
        for one, other in zip(*pieces, strict=True):
            norms = [length(v).double() for v in self._gradients(one, other)]
            found.append(torch.stack(norms).square_().sum(dim=0))
        return torch.cat(found, dim=1)


@dataclass(frozen=True)
class EmbeddingUse(Use):
    """A table looked up: ``a`` holds indices ``[K, B, T]`` and ``g`` is ``[K, B, T, d]``."""

    rows: int = 1

    def squared_norms(self, *parts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Return the sum of inner products over places that look up the same row."""
        a, g = parts
        if g.shape[2] == 1:
            return _square(g.squeeze(2)), (a, g)
        wide = g.double()
        same = a.unsqueeze(-1) == a.unsqueeze(-2)
        gram = torch.matmul(wide, wide.mT).masked_fill_(~same, 0.0).sum(dim=(-1, -2))
        lengths = torch.linalg.vector_norm(wide, dim=-1).sum(dim=-1)
        # The places of a row are added one after the other, each sum rounded.
        return _rounded_up(gram, lengths, 0.5 * g.shape[2] + 2.0, g.dtype), (a, g)

    def accumulate(
        self, coefficients: torch.Tensor, saved: Tensors, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Add scaled output gradients to the rows that were looked up."""
        a, g = saved
        scaled = g * coefficients[..., None, None]
        for k in range(len(a)):
            table = out[self.weight][k].view(self.rows, -1)
            table.index_add_(0, a[k].flatten(), scaled[k].flatten(0, 1))

    def instantiate(self, *parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return dense per-record gradients of the table."""
        a, g = parts
        dense = g.new_zeros(*a.shape[:2], self.rows, g.shape[-1])
        return {self.weight: dense.scatter_add_(2, a.unsqueeze(-1).expand_as(g), g).flatten(2)}


@dataclass(frozen=True)
class DirectUse(Use):
    """A parameter whose per-record gradient ``[K, B, *shape]`` a pass gives as it is."""

    @property
    def parts(self) -> int:
        """Its gradient alone."""
        return 1

    def squared_norms(self, *parts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Return the squared norms of the gradients."""
        flat = self.instantiate(*parts)[self.weight]
        return _square(flat), (flat,)

    def accumulate(
        self, coefficients: torch.Tensor, saved: Tensors, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Add the weighted sum of the gradients."""
        out[self.weight].add_(torch.bmm(coefficients.unsqueeze(1), saved[0]).squeeze(1))

    def instantiate(self, *parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients, flat; that of a single number has no dimensions of its own."""
        (g,) = parts
        return {self.weight: g.reshape(*g.shape[:2], -1)}


def merged(found: Sequence[tuple[Use, Tensors]]) -> list[tuple[Use, Tensors]]:
    """Make one use of all uses of a weight, so that its gradient is the sum of theirs."""
    uses = [use for use, _ in found]
    first, owner = uses[0], uses[0].weight.rpartition(".")[0]
    shared = {use.bias for use in uses}
    # Norms are taken by layer: a bias that lies in another one than its weight is a use of its own.
    whole = len(shared) == 1 and all(b is None or b.rpartition(".")[0] == owner for b in shared)
    if len(found) == 1 and not isinstance(first, ProductUse):
        return [found[0]]
    if any(isinstance(use, DirectUse) for use in uses):
        if not all(isinstance(use, DirectUse) for use in uses):
            # A plan takes these for two parts of one gradient, and copies the weight.
            return list(found)
        return [(first, (torch.stack([part for _, (part,) in found]).sum(dim=0),))]
    if all(isinstance(use, EmbeddingUse) for use in uses):
        sides = zip(*(parts for _, parts in found), strict=True)
        return [(first, tuple(torch.cat(side, dim=2) for side in sides))]
    own = ProductUse(first.weight, first.bias if whole else None)
    pairs: list[Tensors] = []
    biases: dict[str, torch.Tensor] = {}
    for use, (a, g) in found:
        if isinstance(use, ProductUse):
            own = replace(own, taps=use.taps, depth=use.depth, groups=use.groups)
            pairs.append((a, g))
        elif isinstance(use, EmbeddingUse):
            known = torch.arange(use.rows, device=a.device)
            pairs.append((g, (a.unsqueeze(-1) == known).to(g.dtype)))
        if use.bias is not None and not whole:
            part = g.sum(dim=2)
            biases[use.bias] = biases[use.bias] + part if use.bias in biases else part
    a, g = (
        pairs[0] if len(pairs) == 1 else (torch.cat(side, 2) for side in zip(*pairs, strict=True))
    )
    return [own.laid_out(a, g), *((DirectUse(name), (part,)) for name, part in biases.items())]


def split(uses: Sequence[Use], tape: Sequence[torch.Tensor]) -> list[Tensors]:
    """Return the parts of every use of a tape, which holds them one after the other."""
    left = iter(tape)
    return [tuple(islice(left, use.parts)) for use in uses]


def norms_by_use(
    uses: Sequence[Use], parts: list[Tensors], *, layout: Layout, by_layer: bool
) -> tuple[torch.Tensor, list[Tensors]]:
    """Return norms ``[G, K, B]``, over everything or by layer, and what the sums need."""
    squares: dict[int, torch.Tensor] = {}
    saved = []
    for place, use in enumerate(uses):
        # What a use keeps for its sum often takes the place of a larger pair.
        own, parts[place] = parts[place], ()
        squared, kept = use.squared_norms(*own)
        del own
        saved.append(kept)
        group = layout.layer_of[use.weight] if by_layer else 0
        squares[group] = squares[group].add_(squared) if group in squares else squared
    unused = torch.zeros_like(next(iter(squares.values())))
    groups = range(len(layout.layers) if by_layer else 1)
    return torch.stack([squares.get(group, unused) for group in groups]).sqrt_(), saved


def add_sums(
    uses: Sequence[Use],
    saved: Sequence[Tensors],
    coefficients: torch.Tensor,
    targets: Mapping[str, torch.Tensor],
    *,
    layout: Layout,
) -> None:
    """Add the sums weighted by ``coefficients``, ``[G, K, B]``, to ``[K, n]`` of each parameter."""
    groups = coefficients.unbind()
    for use, kept in zip(uses, saved, strict=True):
        use.accumulate(groups[layout.layer_of[use.weight] if len(groups) > 1 else 0], kept, targets)


def unusable_rows(norms: torch.Tensor, *, look: bool = True) -> torch.Tensor | None:
    """Return which records have a norm that is not finite, ``[K, B]``, or None for none."""
    if look and math.isfinite(norms.sum().item()):
        return None
    unusable = ~norms.isfinite().all(dim=0)
    return unusable if not look or bool(unusable.any()) else None


def emptied(saved: Sequence[Tensors], unusable: torch.Tensor) -> list[Tensors]:
    """Put zeros in place of what unusable records, ``[K, B]``, left for the sums."""

    def clean(kept: torch.Tensor) -> torch.Tensor:
        if not kept.is_floating_point():
            return kept  # indices: what is looked up there is weighted by zero
        # Each record has one place, or all of its places in a row.
        places = kept.shape[1] // unusable.shape[1]
        rows = unusable.repeat_interleave(places, dim=1) if places != 1 else unusable
        where = rows.view(*rows.shape, *(1 for _ in kept.shape[2:]))
        # In the layout that it has, so that every other record keeps its bits.
        return kept.clone(memory_format=torch.preserve_format).masked_fill_(where, 0)

    return [tuple(map(clean, each)) for each in saved]


def count(
    clipping: Clipping,
    norms: torch.Tensor,
    rows: Rows,
    unusable: torch.Tensor | None,
    halves: torch.Tensor | None,
) -> torch.Tensor | None:
    """Count unclipped records into ``halves``; return the number of unusable records, if any."""
    if halves is not None:
        counted = (clipping.unclipped(norms).to(rows.mask) - 0.5) * rows.mask
        halves += (counted if unusable is None else counted.masked_fill(unusable, 0.0)).sum(dim=1)
    return None if unusable is None else (unusable & (rows.mask > 0)).sum(dim=1)


def longest(dtype: torch.dtype) -> float:
    """Return the largest norm whose square is finite."""
    return math.sqrt(torch.finfo(dtype).max)


def turns(outputs: int, device: torch.device) -> bool:
    """Say whether a product of so few columns takes longer than its transpose, whose rows are records."""
    return outputs < _FEW_OUTPUTS and device.type == "cpu"


def multiplied(
    rows: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, *, turned: bool
) -> torch.Tensor:
    """Multiply K stacks of rows with K weights: ``[K, R, d]`` and ``[K, p, d]`` to ``[K, R, p]``."""
    if turned:
        y = torch.bmm(w, rows.mT) if b is None else torch.baddbmm(b.unsqueeze(2), w, rows.mT)
        return y.mT
    return torch.bmm(rows, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), rows, w.mT)


def length(rows: torch.Tensor) -> torch.Tensor:
    """Return norms over the last axis, those of pieces of it first."""
    if rows.stride(-1) != 1:  # a sum of squares is 50 times faster there
        return (rows * rows).sum(dim=-1).sqrt_()
    # vector_norm adds up in a few numbers of float32: of 2^20 equal values it is 0.05% too short.
    whole = rows.shape[-1] // _LANE
    if whole > 1:
        head, tail = rows[..., : whole * _LANE], rows[..., whole * _LANE :]
        parts = torch.linalg.vector_norm(head.view(*rows.shape[:-1], whole, _LANE), dim=-1)
        rows = torch.cat([parts, torch.linalg.vector_norm(tail, dim=-1, keepdim=True)], dim=-1)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms


def _square(rows: torch.Tensor) -> torch.Tensor:
    return length(rows).square_()


def _gram_norms(a: torch.Tensor, g: torch.Tensor, *, biased: bool) -> torch.Tensor:
    """Return ``|g^T a|^2`` (and ``|g^T 1|^2`` with a bias) from the Gram matrices, in float64."""
    wide_a, wide_g = a.double(), g.double()
    gram = torch.matmul(wide_a, wide_a.mT)
    if biased:
        gram.add_(1.0)
    return gram.mul_(torch.matmul(wide_g, wide_g.mT)).sum(dim=(-1, -2))


def _rounded(
    squared: torch.Tensor, a: torch.Tensor, g: torch.Tensor, *, biased: bool
) -> torch.Tensor:
    """Round squared norms of sums of outer products up; infinite where an ``a`` is too long."""
    lengths = torch.linalg.vector_norm(a.double(), dim=-1)
    if biased:
        lengths = lengths.square().add_(1.0).sqrt_()
    squared.masked_fill_((lengths > longest(a.dtype)).any(dim=-1), math.inf)
    total = lengths.mul_(torch.linalg.vector_norm(g.double(), dim=-1)).sum(dim=-1)
    return _rounded_up(squared, total, 2.0 * math.sqrt(a.shape[2]), a.dtype)


def _rounded_up(
    squared: torch.Tensor, lengths: torch.Tensor, roundings: float, dtype: torch.dtype
) -> torch.Tensor:
    """Add to a norm what ``dtype`` may lose when the released sum over the places is formed."""
    # Where terms of these lengths nearly cancel, the released sum has an error that its norm does not show.
    slack = lengths * (roundings * torch.finfo(dtype).eps)
    rounded: torch.Tensor = squared.clamp_(min=0.0).sqrt_().add_(slack).square_()
    return rounded.to(dtype)


Program = Callable[..., tuple[torch.Tensor, ...]]

_FAR = 16.0
"""Squared length of a center over the scale from which on float32 loses too much of what is left of a sum."""


def held_by_norms(uses: Sequence[Use], layout: Layout) -> tuple[int, int] | None:
    """Return the bytes of a candidate, and of a row, that a capture of norms holds beside the pass."""
    if layout.dtype == torch.float64 or not all(map(_is_outer, uses)):
        return None
    shapes = [layout.shapes[use.weight] for use in uses]
    widths = sum(shape[1:].numel() + 5 * shape[0] for shape in shapes)
    return 20 * layout.size, 4 * widths


def with_norms(program: Program, uses: Sequence[Use], layout: Layout) -> Program:
    """Return a program that takes center and scale, and then what ``program`` takes."""

    def run(
        center: torch.Tensor, scale: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tape = program(*inputs)
        products = _Products(uses, layout, center, scale)
        norms, _ = products.norms(split(uses, tape))
        return (*tape, norms[0], products.length, products.inverse)

    return run


class Transformed:
    """The transformed gradients of one batch, most of them not formed."""

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
        unusable = unusable_rows(norms, look=looks_freely(norms.device))
        if unusable is None:
            coefficients = self._clipping.factors(norms)
        else:
            saved = [emptied(kept, unusable) for kept in saved]
            norms = norms.masked_fill(unusable, torch.inf)
            coefficients = self._clipping.coefficients(norms)
        self._add(coefficients.mul_(rows.mask)[0], saved, out)
        return count(self._clipping, norms, rows, unusable, halves)

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
    """Norms and sums by products in the type of center and scale, ``[K, P]`` each."""

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
