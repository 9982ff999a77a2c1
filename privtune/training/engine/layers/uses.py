"""Book-keeping: norms and clipped sums of per-sample gradients, from what layers saw and sent.

A *use* is one place where a model uses a parameter. From what went in (``a``) and the gradient of
what came out (``g``), both with axes ``[K, B, ...]``, it gives the squared norm of every record's
gradient, and adds the weighted sum of those gradients to a buffer: without ever holding the
per-sample gradients of a large layer (Bu et al. 2023, arXiv 2210.00038).

For a matrix used at T places of a record, the norm comes from two Gram matrices (*ghost*, ``T^2``)
or from the gradient itself (*direct*), which is then reused for the sum. Gram norms are computed
in float64 and rounded up by what float32 may lose in the sum: cancellation in float32 alone can
release 1.35 times the bound.

A squared norm may underflow where it is that of a whole gradient (then the gradient is shorter than
1e-18 and no bound is), but not where it is a factor: the other one may be 1e38. So what squares can
lose is added to factors. A gradient, or what a matrix is multiplied with, that is longer than
1.8e19 counts as not finite: its coefficient, or its part of the sum, would lose its digits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

Saved = tuple[torch.Tensor, ...]
"""What a use keeps between its norms and its sum."""

LOST = 2.0**-100
"""More than a sum of squares in float32 loses below 1e-38, up to 60 million of them; 1e-15 squared."""

Form = Literal["outer", "ghost", "direct"]
"""``outer``: one place a record, so the gradient is an outer product; else see the module."""

_DIRECT_BYTES = 256 * 2**20  # the largest cache of per-sample gradients of a layer


@dataclass(frozen=True)
class Use(ABC):
    """One use of the parameters of one layer.

    Args:
        weight: Name of the weight.
        bias: Name of the bias that the same operation adds, if any.
    """

    weight: str
    bias: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients come from this use."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def compact(self, a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay out both as the other methods take them; captured with the pass itself."""
        return a, g

    def merges(self, group):
        return len(group) == 1 or type(self) is LinearUse

    @abstractmethod
    def squared_norms(self, a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """Return the squared norms, shape ``[K, B]``, and what ``accumulate`` needs."""

    @abstractmethod
    def accumulate(
        self, coefficients: torch.Tensor, saved: Saved, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Add the sums weighted by ``coefficients``, ``[K, B]``, to ``out``, ``[K, n]`` each."""

    @abstractmethod
    def instantiate(self, a: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the per-sample gradients, shape ``[K, B, n]`` each."""


@dataclass(frozen=True)
class LinearUse(Use):
    """A weight used as a matrix: ``a`` is ``[K, B, T, d]`` and ``g`` is ``[K, B, T, p]``."""

    form: Form

    def squared_norms(self, a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """Return norms in the chosen form."""
        if self.form == "direct":
            saved = self._gradients(a, g)
            squared = _square(saved[0])
            return (squared if self.bias is None else squared.add_(_square(saved[1]))), saved
        if self.form == "outer":
            squared = _square(a).add_(LOST if self.bias is None else 1.0)
            return squared.mul_(_square(g).add_(LOST)), (a, g)
        return _gram_norms(a, g, biased=self.bias is not None), (a.flatten(1, 2), g.flatten(1, 2))

    def accumulate(
        self, coefficients: torch.Tensor, saved: Saved, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Contract scaled output gradients with activations, or weigh the cached gradients."""
        if self.form == "direct":
            row = coefficients.unsqueeze(1)
            for name, cached in zip(self.names, saved, strict=True):
                total = torch.bmm(row, cached).squeeze(1)
                out[name].add_(self._in_order(total) if name == self.weight else total)
            return
        a, g = saved
        if self.form == "ghost":
            coefficients = coefficients.repeat_interleave(g.shape[1] // coefficients.shape[1], 1)
        scaled = g * coefficients.unsqueeze(-1)
        self._add_product(scaled, a, out[self.weight])
        if self.bias is not None:
            out[self.bias].add_(scaled.sum(dim=1))

    def instantiate(self, a: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the per-sample gradients by the direct form."""
        if self.form == "outer":
            a, g = a.unsqueeze(2), g.unsqueeze(2)
        saved = self._gradients(a, g)
        gradients = dict(zip(self.names, saved, strict=True))
        gradients[self.weight] = self._in_order(gradients[self.weight])
        return gradients

    def compact(self, a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay out both as ``[K, B, T, features]``, without the axis T in the outer form."""
        return (a.squeeze(2), g.squeeze(2)) if self.form == "outer" else (a, g)

    def _gradients(self, a: torch.Tensor, g: torch.Tensor) -> Saved:
        """Return the per-sample gradients of weight and bias, from matrices."""
        weight = torch.matmul(g.mT, a).flatten(2)
        return (weight,) if self.bias is None else (weight, g.sum(dim=2))

    def _in_order(self, weight: torch.Tensor) -> torch.Tensor:
        """Bring flat weight gradients ``[..., p*d]`` into the order of the parameter."""
        return weight

    def _add_product(self, g: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        """Add ``g^T a``, of ``[K, n, p]`` and ``[K, n, d]``, to ``out``, ``[K, p*d]``."""
        place = out.view(len(out), g.shape[-1], a.shape[-1])
        if place.is_contiguous():
            place.baddbmm_(g.mT, a)
        else:  # parts of long rows: a product that is added in place would be copied there and back
            place.add_(torch.bmm(g.mT, a))


@dataclass(frozen=True)
class ConvUse(LinearUse):
    """A convolution: a matrix used at every place of the output, on patches of the input.

    ``a`` is ``[K, B, n, C, H, W]`` and ``g`` is ``[K, B, n, O, H', W']``, for n images a record.
    Patches are laid out with channels last, which makes unfolding a plain copy. In several *bands*
    they are unfolded along the rows of an image alone: as many rows of pixels as the stride has lie
    side by side, and a band of the kernel sees what the one before sees a row of places further up.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    depth: int
    """Input channels of a group."""
    bands: int = 1
    """Bands of the kernel that gradients are taken by, in the direct form: see ``bands_of``."""

    def compact(self, a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unfold images to patches, and lay out both as matrices."""
        lead = a.shape[:2]
        x = a.flatten(0, 2).permute(0, 2, 3, 1)
        pad_h, pad_w = self.padding
        if pad_h or pad_w:
            x = functional.pad(x, (0, 0, pad_w, pad_w, pad_h, pad_h))
        x = x.contiguous()
        out_h, out_w = g.shape[-2:]
        (s_n, s_h, s_w, s_c), (kernel_h, kernel_w) = x.stride(), self.kernel
        rows = g.permute(0, 1, 2, 4, 5, 3).reshape(*lead, -1, g.shape[3])
        if self.bands > 1:
            step_h, step_w = self.stride
            size = (x.shape[0], out_h + self.bands - 1, out_w, kernel_w * s_w)
            strides = (s_n, step_h * s_h, step_w * s_w, s_c)
            first = x.storage_offset()
            strips = [x.as_strided(size, strides, first + i * s_h) for i in range(step_h)]
            return torch.cat(strips, dim=3).view(*lead, -1, step_h * size[3]), rows
        patches = x.as_strided(
            (x.shape[0], out_h, out_w, kernel_h, kernel_w, x.shape[3]),
            (
                s_n,
                s_h * self.stride[0],
                s_w * self.stride[1],
                s_h * self.dilation[0],
                s_w * self.dilation[1],
                s_c,
            ),
        )
        matrix = patches.reshape(*lead, -1, kernel_h * kernel_w * x.shape[3])
        return super().compact(matrix, rows)

    def _gradients(self, a: torch.Tensor, g: torch.Tensor) -> Saved:
        if self.bands > 1:
            places = g.shape[2]
            width = (a.shape[2] - places) // (self.bands - 1)  # places of a row
            parts = [a[:, :, i * width : i * width + places] for i in range(self.bands)]
            weight = torch.cat([torch.matmul(g.mT, part) for part in parts], dim=-1).flatten(2)
            return (weight,) if self.bias is None else (weight, g.sum(dim=2))
        if self.groups == 1:
            return super()._gradients(a, g)
        taps, outs = self.kernel[0] * self.kernel[1], g.shape[-1] // self.groups
        a = a.view(*a.shape[:3], taps, self.groups, -1).permute(0, 1, 4, 2, 3, 5).flatten(4)
        grouped = g.view(*g.shape[:3], self.groups, outs).transpose(2, 3)
        weight = torch.matmul(grouped.mT, a).flatten(2)
        return (weight,) if self.bias is None else (weight, g.sum(dim=2))

    def _in_order(self, weight: torch.Tensor) -> torch.Tensor:
        taps = self.kernel[0] * self.kernel[1]
        last = weight.view(*weight.shape[:-1], -1, taps, self.depth)
        return last.transpose(-1, -2).flatten(-3)

    def _add_product(self, g: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(self._in_order(torch.bmm(g.mT, a).flatten(1)))


@dataclass(frozen=True)
class EmbeddingUse(Use):
    """A table looked up: ``a`` holds indices ``[K, B, T]`` and ``g`` is ``[K, B, T, d]``.

    Two places of a record share a row of the gradient where their indices agree.
    """

    rows: int
    padding: int | None

    def squared_norms(self, a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """Return the sum of inner products over places that look up the same row."""
        if self.padding is not None:
            g = g.masked_fill((a == self.padding).unsqueeze(-1), 0.0)
        if g.shape[2] == 1:
            return _square(g.squeeze(2)), (a, g)
        wide = g.double()
        same = a.unsqueeze(-1) == a.unsqueeze(-2)
        gram = torch.matmul(wide, wide.mT).masked_fill(~same, 0.0).sum(dim=(-1, -2))
        slack = torch.linalg.vector_norm(wide, dim=-1).sum(dim=-1)
        return _rounded_up(gram, slack, g.shape[2], g.dtype), (a, g)

    def accumulate(
        self, coefficients: torch.Tensor, saved: Saved, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Add scaled output gradients to the rows that were looked up."""
        a, g = saved
        scaled = g * coefficients[..., None, None]
        for k in range(len(a)):
            table = out[self.weight][k].view(self.rows, -1)
            table.index_add_(0, a[k].flatten(), scaled[k].flatten(0, 1))

    def instantiate(self, a: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return dense per-sample gradients of the table."""
        if self.padding is not None:
            g = g.masked_fill((a == self.padding).unsqueeze(-1), 0.0)
        dense = g.new_zeros(*a.shape[:2], self.rows, g.shape[-1])
        index = a.unsqueeze(-1).expand_as(g)
        return {self.weight: dense.scatter_add_(2, index, g).flatten(2)}


@dataclass(frozen=True)
class CopyUse(Use):
    """A parameter copied for every record, so that autograd gives per-sample gradients as they are.

    Exact for any use, also for several uses of one parameter. ``g`` is ``[K, B, *shape]``.
    """

    def squared_norms(
        self,
        a: torch.Tensor,
        g: torch.Tensor,
    ) -> tuple[torch.Tensor, Saved]:
        """Return the squared norms of the gradients."""
        flat = self.instantiate(a, g)[self.weight]
        return _square(flat), (flat,)

    def accumulate(
        self, coefficients: torch.Tensor, saved: Saved, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Add the weighted sum of the gradients."""
        out[self.weight].add_(torch.bmm(coefficients.unsqueeze(1), saved[0]).squeeze(1))

    def instantiate(self, a: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients as they are; that of a single number has no dimensions of its own."""
        return {self.weight: g.reshape(*g.shape[:2], -1)}


def cheaper_form(places: int, inputs: int, outputs: int, *, rows: int) -> Form:
    """Choose the form of a matrix's norms.

    Args:
        places: Times T that a record uses the matrix.
        inputs: Columns d.
        outputs: Rows p.
        rows: Records of all candidates that are computed at once.

    Returns:
        The direct form unless Gram matrices are much smaller, ``T^2 (d + p) < 8 d p`` (the direct
        form's result is reused for the sum), or its cache would be too large.
    """
    if places == 1:
        return "outer"
    if 4 * rows * inputs * outputs > _DIRECT_BYTES:
        return "ghost"
    return "ghost" if places**2 * (inputs + outputs) < 8 * inputs * outputs else "direct"


def bands_of(use: ConvUse, *, images: int, places: int, outputs: int) -> int:
    """Choose in how many bands a convolution's gradients are taken.

    Args:
        use: The convolution.
        images: Images n of a record.
        places: Places of the output, of all images.
        outputs: Output channels.

    Returns:
        One, which is to unfold patches whole, unless copying them takes longer than multiplying
        them, and a band is as wide as products are fast at: 16 to 64 columns, on CPU.
    """
    (height, width), step = use.kernel, use.stride[0]
    plain = use.form == "direct" and use.groups == images == 1 and use.dilation == (1, 1)
    fits = height % step == 0 and 16 <= step * width * use.depth <= 64
    return height // step if plain and fits and places >= 4 * outputs else 1


def longest(dtype: torch.dtype) -> float:
    """Return the largest norm whose square is finite."""
    return math.sqrt(torch.finfo(dtype).max)


def _square(rows: torch.Tensor) -> torch.Tensor:
    """Return squared norms over the last axis.

    ``vector_norm`` beats a sum of squares, but not (50 times slower) where that axis is not the
    one that lies together in memory.
    """
    if rows.stride(-1) != 1:
        return (rows * rows).sum(dim=-1)
    squares: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1).square_()
    return squares


def _gram_norms(a: torch.Tensor, g: torch.Tensor, *, biased: bool) -> torch.Tensor:
    """Return ``|g^T a|^2`` (and ``|g^T 1|^2`` with a bias) from the Gram matrices, in float64."""
    wide_a, wide_g = a.double(), g.double()
    gram = torch.matmul(wide_a, wide_a.mT)
    if biased:
        gram.add_(1.0)
    squared = gram.mul_(torch.matmul(wide_g, wide_g.mT)).sum(dim=(-1, -2))
    lengths = torch.linalg.vector_norm(wide_a, dim=-1)
    if biased:
        lengths = lengths.square().add_(1.0).sqrt_()
    squared.masked_fill_((lengths > longest(a.dtype)).any(dim=-1), math.inf)
    slack = lengths.mul_(torch.linalg.vector_norm(wide_g, dim=-1)).sum(dim=-1)
    return _rounded_up(squared, slack, a.shape[2], a.dtype)


def _rounded_up(
    squared: torch.Tensor, lengths: torch.Tensor, places: int, dtype: torch.dtype
) -> torch.Tensor:
    """Add to a norm what ``dtype`` may lose when the released sum over the places is formed.

    ``lengths`` is the sum of the lengths of the terms: where they nearly cancel, the sum that is
    released carries a rounding error that its exact norm does not show.
    """
    slack = lengths * (2.0 * torch.finfo(dtype).eps * math.sqrt(places))
    rounded: torch.Tensor = squared.clamp_(min=0.0).sqrt_().add_(slack).square_()
    return rounded.to(dtype)
