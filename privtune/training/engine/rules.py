"""Rules for the norms and weighted sums of per-record gradients, from layer inputs and output gradients.

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
from privtune.training.engine.windows import Windows
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
    """A use of a weight in a pass, and of a bias that the same operation adds.

    Attributes:
        weight: Name of the weight in the layout.
        bias: Name of a bias that the operation adds, whose gradient is ``g`` summed over the places.
    """

    weight: str
    bias: str | None = None

    @property
    def parts(self) -> int:
        """The number of the pass's tensors that belong to this use of a weight.

        A tape is one flat tuple, as a captured graph gives it; this is how ``split`` cuts it up.
        """
        return 2

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients come from this use."""
        if self.bias is None:
            return (self.weight,)
        return (self.weight, self.bias)

    @abstractmethod
    def squared_norms(self, *parts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Return the squared gradient norms, shape ``[K, B]``, and the tensors that ``accumulate`` takes.

        The squares of weight and bias together. What is saved may be laid out otherwise than the
        parts, or take less memory, and the parts are let go.
        """

    @abstractmethod
    def accumulate(
        self,
        coefficients: torch.Tensor,
        saved: Tensors,
        out: Mapping[str, torch.Tensor],
    ) -> None:
        """Add the gradient sums weighted by ``coefficients``, ``[K, B]``, to ``out``, ``[K, n]`` each.

        Each target is a view of the sum ``[K, P]``, to which noise may have been added before.
        """

    @abstractmethod
    def instantiate(self, *parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the per-record gradients by parameter name, shape ``[K, B, n]`` each.

        The plain way, and the only one for transformed gradients of uses that are no outer product.
        Its memory is that of all gradients of the parameter.
        """


@dataclass(frozen=True)
class ProductUse(Use):
    """A use of a weight in a product: inputs ``a`` ``[K, B, T, d]``, output gradients ``g`` ``[K, B, T, p]``.

    Linear layers have one place (T = 1) or those of a sequence. A convolution is such a product, too:
    its places are those of the output, and a row of ``a`` is the patch of the image there, tap by
    tap.

    Attributes:
        form: How norms are taken, chosen by ``laid_out``.
        taps: Places of a convolution's kernel (kh times kw); 1 for a linear layer.
        depth: Channels of a group that go in, with more than one tap.
        groups: Groups of a convolution.
        windows: Of a convolution whose ``a`` is images ``[K, B, n, C, H, W]`` as yet.
    """

    form: Form = "outer"
    taps: int = 1
    depth: int = 1
    groups: int = 1
    windows: Windows | None = None

    def laid_out(self, a: torch.Tensor, g: torch.Tensor) -> tuple[ProductUse, Tensors]:
        """Choose the cheapest form of a product's gradients; return the use in that form, and its tensors.

        A gradient that is smaller than the sides it is made of takes their place at once. That of a
        convolution is then formed without patches, where these would be most of the work.
        """
        rows = a.shape[0] * a.shape[1]
        inputs = a.shape[3] * self.taps
        form = self._form(rows, g.shape[2], inputs, g.shape[3])
        use = replace(self, form=form, windows=None)
        if self.windows is not None:
            spares = self.groups == 1 and self.windows.spares_patches(a, g.shape[3])
            if form == "formed" and spares:
                weight = self.windows.gradients(a, g)
                return use, (weight, *use._gradients_of_bias(g))
            a = self.windows.patches(a)
        if form == "formed":
            return use, use._gradients(a, g)
        if form == "outer":
            return use, (a.squeeze(2), g.squeeze(2))
        return use, (a, g)

    def _form(self, rows: int, places: int, inputs: int, outputs: int) -> Form:
        """Return how the gradients of so many rows are cheapest to take norms of.

        A gradient costs memory as well as operations: *ghost* is taken where ``T² (d + p)`` is below
        8 times its size ``d p``. With groups, each would need Gram matrices of its own, so gradients
        are formed.

        Args:
            rows: Candidates times records.
            places: At which the matrix is used, T.
            inputs: Numbers that go in at a place, d.
            outputs: Numbers that come out, p.
        """
        # Gram matrices take T² (d + p) operations in float64, a gradient T d p in float32.
        size = inputs * outputs
        if self.groups == 1:
            if places == 1:
                return "outer"
            if places**2 * (inputs + outputs) < 8 * size:
                return "ghost"
            if 4 * rows * size > _DIRECT_BYTES:
                return "twice"
        if size < places * (inputs + outputs) * self.groups:
            return "formed"
        return "direct"

    @property
    def parts(self) -> int:
        """The number of tensors: two sides of the product, or one formed gradient for each parameter."""
        if self.form == "formed":
            return len(self.names)
        return 2

    def squared_norms(self, *parts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Return the squared norms ``[K, B]`` of a product's gradients, computed in the chosen form.

        For one place a record (*outer*) the gradient is ``g a^T``, so its squared norm is
        ``|g|^2 |a|^2``, and ``|g|^2 (|a|^2 + 1)`` with a bias: nothing of the size of the weight is
        formed. What squares may have lost is added to both factors, so a norm is never too short;
        with a bias the 1 covers that of ``a``.

        Args:
            *parts: As ``laid_out`` gave them: both sides of the product, or the gradients.

        Returns:
            Squared norms ``[K, B]``, and both sides with the places of all records in a row,
            ``[K, B T, features]``, or the gradients ``[K, B, n]``.
        """
        if self.form in ("direct", "formed"):
            if self.form == "direct":
                parts = self._gradients(*parts)
            squared = _square(parts[0])
            if self.bias is not None:
                squared.add_(_square(parts[1]))
            return squared, parts
        a, g = parts
        if self.form == "outer":
            more = LOST if self.bias is None else 1.0
            of_inputs = _square(a).add_(more)
            of_outputs = _square(g).add_(LOST)
            return of_inputs.mul_(of_outputs), (a, g)
        biased = self.bias is not None
        if self.form == "ghost":
            squared = _gram_norms(a, g, biased=biased)
        else:
            squared = self._piecewise(a, g)
        squared = _rounded(squared, a, g, biased=biased)
        return squared, (a.flatten(1, 2), g.flatten(1, 2))

    def accumulate(
        self,
        coefficients: torch.Tensor,
        saved: Tensors,
        out: Mapping[str, torch.Tensor],
    ) -> None:
        """Add the weighted sum, as one product of scaled output gradients and inputs, or of formed gradients.

        The sum over records is one product of matrices, ``(c g)^T a`` over all rows and places: this
        is why no per-record gradient is needed. Coefficients ``[K, B]`` are repeated for the places
        of their record.

        Args:
            coefficients: One a record, ``[K, B]``.
            saved: What ``squared_norms`` gave beside the norms.
            out: Added to, ``[K, n]`` for each parameter by name.
        """
        if self.form in ("direct", "formed"):
            row = coefficients.unsqueeze(1)
            for name, values in zip(self.names, saved, strict=True):
                total = torch.bmm(row, values).squeeze(1)
                if name == self.weight:
                    total = self._in_order(total)
                out[name].add_(total)
            return
        a, g = saved
        if self.form != "outer":
            places = g.shape[1] // coefficients.shape[1]
            coefficients = coefficients.repeat_interleave(places, 1)
        scaled = g * coefficients.unsqueeze(-1)
        sizes = (len(a), g.shape[-1], a.shape[-1])
        place = out[self.weight].view(sizes)
        if self.taps == 1 and place.is_contiguous():
            place.baddbmm_(scaled.mT, a)
        else:  # parts of long rows: a product that is added in place would be copied there and back
            total = torch.bmm(scaled.mT, a)
            out[self.weight].add_(self._in_order(total.flatten(1)))
        if self.bias is not None:
            out[self.bias].add_(scaled.sum(dim=1))

    def instantiate(self, *parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the per-record gradients of weight and bias, in the parameters' order of entries.

        In the order of the parameter, so that they can be laid beside parts of a flat vector.
        """
        if self.form == "outer":
            parts = self._gradients(*(part.unsqueeze(2) for part in parts))
        elif self.form != "formed":
            parts = self._gradients(*parts)
        gradients = dict(zip(self.names, parts, strict=True))
        gradients[self.weight] = self._in_order(gradients[self.weight])
        return gradients

    def _gradients(self, a: torch.Tensor, g: torch.Tensor) -> Tensors:
        """Return the per-record gradients of weight and bias, from inputs and output gradients.

        Shapes ``[K, B, p * d]`` and ``[K, B, p]``, of ``a`` ``[K, B, T, d]`` and ``g``
        ``[K, B, T, p]``, tap by tap as in ``a``: see ``_in_order``. With groups, an output sees the
        inputs of its own group alone.
        """
        left = g
        right = a
        if self.groups > 1:
            lead = a.shape[:3]
            # [K, B, T, taps, groups, depth] to [K, B, groups, T, taps * depth].
            by_tap = a.view(*lead, self.taps, self.groups, -1)
            right = by_tap.permute(0, 1, 4, 2, 3, 5).flatten(4)
            # [K, B, T, groups, p / groups] to [K, B, groups, T, p / groups].
            by_group = g.view(*lead, self.groups, -1)
            left = by_group.transpose(2, 3)
        weight = torch.matmul(left.mT, right).flatten(2)
        return (weight, *self._gradients_of_bias(g))

    def _gradients_of_bias(self, g: torch.Tensor) -> Tensors:
        """Return the per-record gradients of the bias, ``[K, B, p]``; nothing if there is none."""
        if self.bias is None:
            return ()
        return (g.sum(dim=2),)

    def _in_order(self, weight: torch.Tensor) -> torch.Tensor:
        """Reorder flat weight gradients ``[..., p * d]`` of a convolution from patch to parameter order.

        Patches hold the channels of a tap side by side; a parameter ``[p, depth, kh, kw]`` holds the
        taps of a channel. It is turned once, in the sum, and not in every patch.
        """
        if self.taps == 1:
            return weight
        lead = weight.shape[:-1]
        last = weight.view(*lead, -1, self.taps, self.depth)
        return last.transpose(-1, -2).flatten(-3)

    def _piecewise(self, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return the squared norms ``[K, B]`` in float64, from gradients formed a few records at a time.

        Shape ``[K, B]``. Gradients of a piece stay in a cache, and are gone before the next one is
        formed.
        """
        bytes_of_record = 4 * a.shape[0] * a.shape[-1] * g.shape[-1]
        size = max(1, _PIECE_BYTES // bytes_of_record)
        sums = []
        pieces_of_a = torch.split(a, size, dim=1)
        pieces_of_g = torch.split(g, size, dim=1)
        for one, other in zip(pieces_of_a, pieces_of_g, strict=True):
            norms = []
            for gradient in self._gradients(one, other):
                norms.append(length(gradient).double())
            squares = torch.stack(norms).square_()
            sums.append(squares.sum(dim=0))
        return torch.cat(sums, dim=1)


@dataclass(frozen=True)
class EmbeddingUse(Use):
    """A use of an embedding table: indices ``a`` ``[K, B, T]`` and output gradients ``g`` ``[K, B, T, d]``.

    The one-hot vectors that it would be multiplied with as a matrix are not formed. A record's
    gradient has rows that are zero but for the words of the record.

    Attributes:
        rows: Words of the table.
    """

    rows: int = 1

    def squared_norms(self, *parts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Return the squared norms ``[K, B]`` of the table's gradients, by pairs of places with one index.

        A word that a record has twice gets the sum of two gradients, so the squared norm is the sum
        of ``g_s · g_t`` over all pairs of places (s, t) with the same word; that of the places alone
        would be too short. With one place a record there are no such pairs.
        """
        a, g = parts
        if g.shape[2] == 1:
            return _square(g.squeeze(2)), (a, g)
        wide = g.double()
        same = a.unsqueeze(-1) == a.unsqueeze(-2)
        # In one expression: a Gram matrix is large, and not needed beside what follows.
        squared = torch.matmul(wide, wide.mT).masked_fill_(~same, 0.0).sum(dim=(-1, -2))
        lengths = torch.linalg.vector_norm(wide, dim=-1).sum(dim=-1)
        # The places of a row are added one after the other, each sum rounded.
        roundings = 0.5 * g.shape[2] + 2.0
        return _rounded_up(squared, lengths, roundings, g.dtype), (a, g)

    def accumulate(
        self,
        coefficients: torch.Tensor,
        saved: Tensors,
        out: Mapping[str, torch.Tensor],
    ) -> None:
        """Add the scaled output gradients to the looked-up rows of each candidate's table.

        Candidates one after the other: each has a table, and ``index_add_`` takes one.
        """
        a, g = saved
        scaled = g * coefficients[..., None, None]
        for k in range(len(a)):
            table = out[self.weight][k].view(self.rows, -1)
            table.index_add_(0, a[k].flatten(), scaled[k].flatten(0, 1))

    def instantiate(self, *parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the per-record gradients of the table as dense tensors, ``[K, B, rows * d]``.

        Shape ``[K, B, rows * d]``, nearly all zeros: used where a table is no product, for
        transformed gradients.
        """
        a, g = parts
        dense = g.new_zeros(*a.shape[:2], self.rows, g.shape[-1])
        rows = a.unsqueeze(-1).expand_as(g)
        dense.scatter_add_(2, rows, g)
        return {self.weight: dense.flatten(2)}


@dataclass(frozen=True)
class DirectUse(Use):
    """A use of a parameter whose per-record gradient ``[K, B, *shape]`` the pass itself computes.

    Biases that stand by themselves, layers with a rule of a user's, and copied parameters end here.
    """

    @property
    def parts(self) -> int:
        """The number of tensors: one, the gradient."""
        return 1

    def squared_norms(self, *parts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Return the squared norms ``[K, B]`` of the gradients, and the flat gradients for the sum.

        Shape ``[K, B]``; the flat gradients are kept for the sum.
        """
        flat = self.instantiate(*parts)[self.weight]
        return _square(flat), (flat,)

    def accumulate(
        self,
        coefficients: torch.Tensor,
        saved: Tensors,
        out: Mapping[str, torch.Tensor],
    ) -> None:
        """Add the weighted sum of the stored gradients to the parameter's part of ``out``."""
        (gradients,) = saved
        total = torch.bmm(coefficients.unsqueeze(1), gradients).squeeze(1)
        out[self.weight].add_(total)

    def instantiate(self, *parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients flattened to ``[K, B, n]``, by the parameter's name."""
        (g,) = parts
        return {self.weight: g.reshape(*g.shape[:2], -1)}


def merged(together: Sequence[tuple[Use, Tensors]]) -> list[tuple[Use, Tensors]]:
    """Merge all uses of one weight into one, so that its gradient is the sum of theirs.

    A weight that is used twice (tied, or called in a loop) has one gradient, whose norm is not that
    of its parts: ``|a + b|`` is no function of ``|a|`` and ``|b|``. Products are joined along their
    places, ``[K, B, T1 + T2, d]``, since a gradient sums over places anyway. A table that is looked
    up and multiplied with, as the tied one of a language model, becomes one product of both.

    A bias that is not the same in all uses, or that lies in another layer, is summed by itself.

    Args:
        together: Uses of one weight, with parts ``[K, B, T, ...]``.

    Returns:
        One use for the weight, and one for each bias that stands by itself; the uses as they are,
        where a rule and autograd each give a part, which ``Passes.find_plan`` then resolves by a
        copy.
    """
    uses = [use for use, _ in together]
    first = uses[0]
    if len(together) == 1 and not isinstance(first, ProductUse):
        return [together[0]]
    if any(isinstance(use, DirectUse) for use in uses):
        if not all(isinstance(use, DirectUse) for use in uses):
            # A plan takes these for two parts of one gradient, and copies the weight.
            return list(together)
        gradients = torch.stack([part for _, (part,) in together])
        return [(first, (gradients.sum(dim=0),))]
    if all(isinstance(use, EmbeddingUse) for use in uses):
        indices = torch.cat([a for _, (a, _) in together], dim=2)
        gradients = torch.cat([g for _, (_, g) in together], dim=2)
        return [(first, (indices, gradients))]
    with_bias = _have_bias_in_their_layer(uses)
    product = ProductUse(first.weight, first.bias if with_bias else None)
    pairs: list[Tensors] = []
    biases: dict[str, torch.Tensor] = {}
    for use, (a, g) in together:
        if isinstance(use, ProductUse):
            product = replace(
                product,
                taps=use.taps,
                depth=use.depth,
                groups=use.groups,
                windows=use.windows if len(together) == 1 else None,
            )
            inputs = a
            if use.windows is not None and product.windows is None:
                inputs = use.windows.patches(a)
            pairs.append((inputs, g))
        elif isinstance(use, EmbeddingUse):
            # A table looked up is one multiplied with vectors of one 1.
            words = torch.arange(use.rows, device=a.device)
            one_hot = (a.unsqueeze(-1) == words).to(g.dtype)
            pairs.append((g, one_hot))
        if use.bias is not None and not with_bias:
            part = g.sum(dim=2)
            if use.bias in biases:
                part = biases[use.bias] + part
            biases[use.bias] = part
    if len(pairs) == 1:
        a, g = pairs[0]
    else:
        a = torch.cat([inputs for inputs, _ in pairs], 2)
        g = torch.cat([outputs for _, outputs in pairs], 2)
    result: list[tuple[Use, Tensors]] = [product.laid_out(a, g)]
    for name, part in biases.items():
        result.append((DirectUse(name), (part,)))
    return result


def _have_bias_in_their_layer(uses: Sequence[Use]) -> bool:
    """Say whether uses of a weight share one bias of the weight's own layer, or have no bias.

    Norms are taken by layer: a bias that lies in another one than its weight is a use of its own.
    """
    owner, _, _ = uses[0].weight.rpartition(".")
    biases = {use.bias for use in uses}
    if len(biases) > 1:
        return False
    return all(bias is None or bias.rpartition(".")[0] == owner for bias in biases)


def split(uses: Sequence[Use], tape: Sequence[torch.Tensor]) -> list[Tensors]:
    """Return the tensors of each use of a weight, cut from the flat list of a pass's tensors."""
    tensors = iter(tape)
    return [tuple(islice(tensors, use.parts)) for use in uses]


def norms_by_use(
    uses: Sequence[Use],
    parts: list[Tensors],
    *,
    layout: Layout,
    by_layer: bool,
) -> tuple[torch.Tensor, list[Tensors]]:
    """Return gradient norms ``[G, K, B]``, whole or by layer, and the tensors to make weighted sums of.

    Parameters lie apart, so squares add up over the uses of a group. With ``by_layer`` there are G =
    L groups, else one. A layer that no use reaches has norms of 0.

    The list of parts is emptied on the way: patches of a convolution are let go before the next
    layer's norms are taken.

    Args:
        uses: What the tape holds, in its order.
        parts: Tensors of each use; the list is empty afterwards.
        layout: Says to which layer a weight belongs.
        by_layer: Whether norms are those of layers.
    """
    squares: dict[int, torch.Tensor] = {}
    saved = []
    for place, use in enumerate(uses):
        # What a use keeps for its sum often takes the place of a larger pair.
        tensors = parts[place]
        parts[place] = ()
        squared, tensors_for_sums = use.squared_norms(*tensors)
        del tensors
        saved.append(tensors_for_sums)
        group = layout.layer_of[use.weight] if by_layer else 0
        if group in squares:
            squared = squares[group].add_(squared)
        squares[group] = squared
    example = next(iter(squares.values()))
    unused = torch.zeros_like(example)
    groups = len(layout.layers) if by_layer else 1
    of_groups = [squares.get(group, unused) for group in range(groups)]
    stack = torch.stack(of_groups)
    return stack.sqrt_(), saved


def add_sums(
    uses: Sequence[Use],
    saved: Sequence[Tensors],
    coefficients: torch.Tensor,
    targets: Mapping[str, torch.Tensor],
    *,
    layout: Layout,
) -> None:
    """Add the gradient sums weighted by ``coefficients``, ``[G, K, B]``, to each parameter's ``[K, n]``.

    Coefficients of a layer weigh that layer's part of the sum; with one group they are the same
    everywhere.

    Args:
        uses: What the tape holds.
        saved: What ``norms_by_use`` gave for each of them.
        coefficients: One a record and group.
        targets: What is added to, by the names of the parameters.
        layout: Says to which layer a weight belongs.
    """
    groups = coefficients.unbind()
    for use, tensors in zip(uses, saved, strict=True):
        group = layout.layer_of[use.weight] if len(groups) > 1 else 0
        use.accumulate(groups[group], tensors, targets)


def unusable_rows(norms: torch.Tensor, *, may_wait: bool = True) -> torch.Tensor | None:
    """Return which records have an infinite or NaN gradient norm, ``[K, B]``, or None if none has.

    On a GPU a look would make the host wait for all of the pass, in every step: there the mask is
    always made (``may_wait`` False) and applied, which costs less.
    """
    if may_wait and math.isfinite(norms.sum().item()):
        return None
    unusable = ~norms.isfinite().all(dim=0)
    if not may_wait or bool(unusable.any()):
        return unusable
    return None


def emptied(saved: Sequence[Tensors], unusable: torch.Tensor) -> list[Tensors]:
    """Return the tensors that gradient sums are made of, with zeros at unusable records, ``[K, B]``.

    Their coefficient is 0, and 0 times infinity is NaN: one such record would spoil the sum of its
    candidate.
    """

    def clean(tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor ``[K, B times places, ...]`` with zeros at unusable records."""
        if not tensor.is_floating_point():
            return tensor  # indices: what is looked up there is weighted by zero
        # Each record has one place, or all of its places in a row.
        places = tensor.shape[1] // unusable.shape[1]
        rows = unusable
        if places != 1:
            rows = unusable.repeat_interleave(places, dim=1)
        further_axes = tensor.ndim - rows.ndim
        mask = rows.view(*rows.shape, *[1] * further_axes)
        # In the layout that it has, so that every other record keeps its bits.
        copy = tensor.clone(memory_format=torch.preserve_format)
        return copy.masked_fill_(mask, 0)

    return [tuple(map(clean, each)) for each in saved]


def count(
    clipping: Clipping,
    norms: torch.Tensor,
    rows: Rows,
    unusable: torch.Tensor | None,
    halves: torch.Tensor | None,
) -> torch.Tensor | None:
    """Count clipped and unclipped records into ``halves`` (-1/2 and 1/2); return unusable counts.

    Each record of mask 1 adds 1/2 if it was not clipped, else -1/2, so that one record more or less
    changes the count by 1/2: the sensitivity that the oracle charges (Andrew et al. 2021, arXiv
    1905.03871).

    Args:
        clipping: Says which norms it leaves.
        norms: Shape ``[G, K, M]``.
        rows: Of which the mask ``[K, M]`` says what is a record.
        unusable: Rows whose norm is not finite, ``[K, M]``, or None for none; they count as nothing.
        halves: What is added to, ``[K]``, or None.
    """
    if halves is not None:
        unclipped = clipping.unclipped(norms).to(rows.mask)
        halves_of_rows = (unclipped - 0.5) * rows.mask
        if unusable is not None:
            halves_of_rows = halves_of_rows.masked_fill(unusable, 0.0)
        halves += halves_of_rows.sum(dim=1)
    if unusable is None:
        return None
    is_record = rows.mask > 0
    return (unusable & is_record).sum(dim=1)


def longest(dtype: torch.dtype) -> float:
    """Return the largest norm whose square is finite in a type.

    1.8e19 in float32.
    """
    return math.sqrt(torch.finfo(dtype).max)


def turns(outputs: int, device: torch.device) -> bool:
    """Say whether to compute a product with so few outputs as its transpose, which is faster on CPU.

    A library of products works through columns in vectors of 16 numbers; fewer of them leave a part
    idle.
    """
    return outputs < _FEW_OUTPUTS and device.type == "cpu"


def multiplied(
    rows: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    *,
    turned: bool,
) -> torch.Tensor:
    """Multiply K stacks of rows with K weights: ``[K, R, d]`` and ``[K, p, d]`` to ``[K, R, p]``.

    Args:
        rows: R rows of each candidate.
        w: Its weight.
        b: Its bias, ``[K, p]``, or None.
        turned: Computes the transpose, and gives a view of it: the same numbers but for their last
            digits.
    """
    if turned:
        if b is None:
            y = torch.bmm(w, rows.mT)
        else:
            y = torch.baddbmm(b.unsqueeze(2), w, rows.mT)
        return y.mT
    if b is None:
        return torch.bmm(rows, w.mT)
    return torch.baddbmm(b.unsqueeze(1), rows, w.mT)


def length(rows: torch.Tensor) -> torch.Tensor:
    """Return Euclidean norms over the last axis, summed in short pieces to limit rounding.

    The error of a sum of n squares grows with n. A norm that came out too short would let a gradient
    pass that is longer than its bound, and the sensitivity is that of the bound. So at most ``_LANE``
    numbers are summed at a time, and then the norms of these pieces.
    """
    if rows.stride(-1) != 1:  # a sum of squares is 50 times faster there
        return (rows * rows).sum(dim=-1).sqrt_()
    # vector_norm adds up in a few numbers of float32: of 2^20 equal values it is 0.05% too short.
    pieces = rows.shape[-1] // _LANE
    if pieces > 1:
        end = pieces * _LANE
        head = rows[..., :end]
        tail = rows[..., end:]
        lead = rows.shape[:-1]
        lanes = head.view(*lead, pieces, _LANE)
        of_head = torch.linalg.vector_norm(lanes, dim=-1)
        of_tail = torch.linalg.vector_norm(tail, dim=-1, keepdim=True)
        rows = torch.cat([of_head, of_tail], dim=-1)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms


def _square(rows: torch.Tensor) -> torch.Tensor:
    """Return squared Euclidean norms over the last axis, as accurate as ``length``.

    By way of the norm, so that its care for rounding holds here, too.
    """
    return length(rows).square_()


def _gram_norms(a: torch.Tensor, g: torch.Tensor, *, biased: bool) -> torch.Tensor:
    """Return ``|g^T a|^2`` (and ``|g^T 1|^2`` with a bias) from the Gram matrices, in float64.

    ``|g^T a|^2`` is the sum over places s, t of ``(a_s · a_t) (g_s · g_t)``: two matrices
    ``[K, B, T, T]`` in the place of a gradient ``[K, B, p, d]``. In float64, since terms of either
    sign may nearly cancel. A bias is an input of 1 at each place, which adds 1 to every
    ``a_s · a_t``.
    """
    wide_a = a.double()
    wide_g = g.double()
    gram = torch.matmul(wide_a, wide_a.mT)
    if biased:
        gram.add_(1.0)
    gram.mul_(torch.matmul(wide_g, wide_g.mT))
    return gram.sum(dim=(-1, -2))


def _rounded(
    squared: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    biased: bool,
) -> torch.Tensor:
    """Round squared norms up by the rounding of the released sum; infinite where inputs are too long.

    The sum over T places is formed in float32 when it is released, with some ``2 sqrt(T)`` roundings,
    each a share of ``|a_t| |g_t|``. Such a norm came from float64 and does not see these.

    Args:
        squared: Squared norms ``[K, B]`` in float64; written to.
        a: Inputs ``[K, B, T, d]``.
        g: Gradients of outputs ``[K, B, T, p]``.
        biased: Whether a bias is part of the gradient.
    """
    lengths = torch.linalg.vector_norm(a.double(), dim=-1)
    if biased:
        lengths = lengths.square().add_(1.0).sqrt_()
    too_long = (lengths > longest(a.dtype)).any(dim=-1)
    squared.masked_fill_(too_long, math.inf)
    lengths.mul_(torch.linalg.vector_norm(g.double(), dim=-1))
    roundings = 2.0 * math.sqrt(a.shape[2])
    total = lengths.sum(dim=-1)
    return _rounded_up(squared, total, roundings, a.dtype)


def _rounded_up(
    squared: torch.Tensor,
    lengths: torch.Tensor,
    roundings: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return squared norms with the possible rounding error of the released sum added to each norm.

    Too long is safe: a gradient is clipped a little more than it need be. Too short is not.

    Args:
        squared: Squared norms, ``[K, B]``; written to.
        lengths: Lengths of the terms of each sum, added up, ``[K, B]``.
        roundings: How many there are on the way to the sum, each a share of these lengths.
        dtype: The type of the sum.
    """
    # Where terms of these lengths nearly cancel, the released sum has an error that its norm does not show.
    slack = lengths * (roundings * torch.finfo(dtype).eps)
    norms = squared.clamp_(min=0.0).sqrt_()
    rounded: torch.Tensor = norms.add_(slack).square_()
    return rounded.to(dtype)


Program = Callable[..., tuple[torch.Tensor, ...]]

_FAR = 16.0
"""Squared length of a center over the scale from which on float32 loses too much of what is left of a sum."""


def held_by_norms(uses: Sequence[Use], layout: Layout) -> tuple[int, int] | None:
    """Return the extra bytes, per candidate and per row, of a captured pass that computes norms; or None.

    None where norms are not captured: for float64, and where some use is no outer product. The
    numbers count weights, pulls and products of ``_Products``, in float32 of 4 bytes.
    """
    if layout.dtype == torch.float64 or not all(map(_is_outer, uses)):
        return None
    shapes = [layout.shapes[use.weight] for use in uses]
    widths = 0
    for shape in shapes:
        outputs = shape[0]
        inputs = shape[1:].numel()
        widths += inputs + 5 * outputs
    return 20 * layout.size, 4 * widths


def with_norms(program: Program, uses: Sequence[Use], layout: Layout) -> Program:
    """Return a program that, given center and scale first, also computes norms of transformed gradients.

    What AdaCliP clips is ``(g - center) / scale``, so its norms hang on both, which change in every
    step: they are inputs of the graph, and no constants of it.
    """

    def run(
        center: torch.Tensor,
        scale: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the pass's tensors, norms ``[K, B]``, squared length of the center, and inverse scale."""
        tape = program(*inputs)
        products = _Products(uses, layout, center, scale)
        norms, _ = products.norms(split(uses, tape))
        return (*tape, norms[0], products.length, products.inverse)

    return run


class Transformed:
    """Norms and clipped sums of the transformed gradients of a batch, mostly without forming them.

    For an outer product, ``|(g a^T - c) / s|^2`` is expanded into three terms, of which none needs
    the gradient itself: see ``_Products.norms``. Where a center is far from zero, in units of the
    scale, these terms nearly cancel in float32, and float64 is used; both are computed where a GPU
    cannot be asked which.

    Args:
        uses: What the tape holds.
        layout: Where the parameters lie.
        clipping: Center and scale, ``[K, P]`` each, and the bound.
        captured: Norms, length of the center and inverse scale, if the graph has given these already.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        layout: Layout,
        clipping: CoordinateTransform,
        captured: Sequence[torch.Tensor] = (),
    ) -> None:
        center = clipping.center
        scale = clipping.scale
        self._clipping = clipping
        self._far: torch.Tensor | None = None
        self._ways: list[_Products] = []
        in_float32 = layout.dtype != torch.float64 and full_precision(center.device)
        if captured or in_float32:
            way = _Products(uses, layout, center, scale, captured)
            self._ways.append(way)
            self._far = way.far()
            if self._far is None:
                return
        self._ways.append(_Products(uses, layout, center.double(), scale.double()))

    def norms(self, parts: Sequence[Tensors]) -> tuple[torch.Tensor, list[list[Tensors]]]:
        """Return the norms of transformed gradients, ``[1, K, B]``, and the tensors that ``_add`` takes.

        Of each candidate from float32 or float64, as its own center asks: not as those of others in
        the stack do.
        """
        norms, saved = zip(*(way.norms(parts) for way in self._ways), strict=True)
        if self._far is None:
            return norms[0], list(saved)
        near, exact = norms
        return torch.where(self._far.unsqueeze(0), exact, near), list(saved)

    def accumulate(
        self,
        parts: Sequence[Tensors],
        rows: Rows,
        *,
        out: torch.Tensor,
        halves: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Add the clipped sums of transformed gradients over ``rows`` to ``out``.

        In the original coordinates it is ``Σ c_i (g_i - center) / scale`` that is added: the oracle
        maps it back after noise.
        """
        norms, saved = self.norms(parts)
        unusable = unusable_rows(norms, may_wait=looks_freely(norms.device))
        if unusable is None:
            coefficients = self._clipping.factors(norms)
        else:
            saved = [emptied(tensors, unusable) for tensors in saved]
            norms = norms.masked_fill(unusable, torch.inf)
            coefficients = self._clipping.coefficients(norms)
        coefficients = coefficients.mul_(rows.mask)
        self._add(coefficients[0], saved, out)
        return count(
            self._clipping,
            norms,
            rows,
            unusable,
            halves,
        )

    def _add(
        self,
        coefficients: torch.Tensor,
        saved: Sequence[list[Tensors]],
        out: torch.Tensor,
    ) -> None:
        """Add the weighted sums to ``out``, ``[K, P]``: float32 or float64, by each candidate's center.

        Both ways are added into zeros first: a candidate must not get a bit of the way that is not
        its own.
        """
        if self._far is None:
            self._ways[0].add(coefficients, saved[0], out)
            return
        near = torch.zeros_like(out)
        exact = torch.zeros_like(out)
        in_float32, in_float64 = self._ways
        in_float32.add(coefficients, saved[0], near)
        in_float64.add(coefficients, saved[1], exact)
        out += torch.where(self._far, exact, near)


class _Products:
    """Norms and sums of transformed gradients, in the number type of center and scale, ``[K, P]`` each.

    Attributes:
        inverse: ``1 / s``, ``[K, P]``.
        length: ``|c / s|^2``, ``[K, 1]``: of the part of the center whose gradients are not formed.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        layout: Layout,
        center: torch.Tensor,
        scale: torch.Tensor,
        captured: Sequence[torch.Tensor] = (),
    ) -> None:
        self.uses = uses
        self.layout = layout
        self.center = center
        self.captured = captured
        self._shift = center
        if captured:  # all of them products
            self._outer = [True] * len(uses)
            _, self.length, self.inverse = captured
            return
        self._outer = [_is_outer(use) for use in uses]
        if not all(self._outer):  # what is formed is shifted as it is formed, the rest at once
            self._shift = center.clone()
            for use, outer in zip(uses, self._outer, strict=True):
                if outer:
                    continue
                for name in use.names:
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
        """Return the columns ``[K, n]`` of a flat tensor ``[K, P]`` that belong to a parameter."""
        start, end = self.layout.spans[name]
        return flat[:, start:end]

    def far(self) -> torch.Tensor | None:
        """Return which candidates' centers are too long for float32, ``[K, 1]``; None if the CPU sees none.

        A GPU is not asked, so as not to wait: there the mask is always given.
        """
        # The largest is no number where any is none.
        if looks_freely(self.length.device) and self.length.max().item() <= _FAR:
            return None
        return ~(self.length <= _FAR)

    def norms(self, parts: Sequence[Tensors]) -> tuple[torch.Tensor, list[Tensors]]:
        """Return the norms of transformed gradients, ``[1, K, B]``, and the tensors that ``add`` takes.

        With a gradient ``g a^T`` and weights ``w = 1 / s^2``, the squared norm is
        ``Σ w (g a)^2 - 2 Σ w c (g a) + Σ w c^2``. ``_half`` gives the first two terms of a use, times
        -1/2; the third, ``length``, is that of all uses, and the same for all records.
        """
        if self.captured:
            return self.captured[0].unsqueeze(0), list(parts)
        dtype = self.center.dtype
        width = parts[0][0].shape[1]
        roundings = 0
        halves: list[torch.Tensor] = []  # of the first term and the second, with the sign turned
        formed: list[torch.Tensor] = []
        saved: list[Tensors] = []
        for use, outer, tensors in zip(self.uses, self._outer, parts, strict=True):
            if not outer:
                gradients = self._formed(use, tensors)
                saved.append(gradients)
                formed += [length(gradient).square_() for gradient in gradients]
                continue
            a, g = tensors
            roundings = max(roundings, a.shape[-1] + g.shape[-1])
            if a.dtype != dtype:
                a = a.to(dtype)
                g = g.to(dtype)
            saved.append((a, g))
            halves.append(self._half(use, a, g))
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
            # n² = |c / s|² - 2 (the halves), and what of it rounding can have taken away.
            total = torch.sub(self.length, total, alpha=2.0).clamp_min(0.0)
            slack = self.length * (3.0 * lost)
            total = torch.add(slack, total, alpha=1.0 + 2.0 * lost)
        else:
            total = self.length.expand(-1, width)
        for squared in formed:
            total = total + squared
        # A square beyond all numbers of the parameters' type is infinite from here on.
        norms = total.to(self.layout.dtype).sqrt()
        return norms.unsqueeze(0), saved

    def _half(
        self,
        use: Use,
        a: torch.Tensor,
        g: torch.Tensor,
    ) -> torch.Tensor:
        """Return one use's part ``Σ g a c / s² - Σ g² a² / 2 s²`` of the squared norms, shape ``[K, B]``.

        Both sums run over a matrix ``[p, d]`` for each record, but as products: ``g^2 · (W a^2)`` and
        ``g · (W c a)``.

        Args:
            use: An outer product.
            a: What its inputs were, ``[K, B, d]``.
            g: Gradients of its outputs, ``[K, B, p]``.
        """
        sizes = (len(a), g.shape[-1], a.shape[-1])
        matrix = self._of(self._weight, use.weight).view(sizes)
        pull = self._of(self._pull, use.weight).view(sizes)
        turned = turns(g.shape[-1], a.device)
        square = torch.addcmul(_lost(a.dtype, a.device), a, a)
        if use.bias is None:
            half = multiplied(square, matrix, None, turned=turned) * g * -0.5
        else:
            weight_of_bias = self._of(self._weight, use.bias)
            half = multiplied(square, matrix, weight_of_bias, turned=turned)
            pull_of_bias = self._of(self._pull, use.bias).unsqueeze(1)
            half = torch.addcmul(pull_of_bias, half, g, value=-0.5)
        if turned:
            half = torch.baddbmm(half.mT, pull, a.mT).mT
        else:
            half = torch.baddbmm(half, a, pull.mT)
        sums: torch.Tensor = (half * g).sum(dim=-1)
        return sums

    def _formed(self, use: Use, parts: Tensors) -> Tensors:
        """Return the transformed gradients of a use, formed in full, ``[K, B, n]`` for each of its names.

        For uses that are no outer product, such as biases of a sequence: their gradients are small.
        """
        gradients = use.instantiate(*parts)
        transformed = []
        for name in use.names:
            center = self._of(self.center, name).unsqueeze(1)
            inverse = self._of(self.inverse, name).unsqueeze(1)
            difference = gradients[name] - center
            transformed.append(difference.mul_(inverse))
        return tuple(transformed)

    def add(
        self,
        coefficients: torch.Tensor,
        saved: Sequence[Tensors],
        out: torch.Tensor,
    ) -> None:
        """Add the weighted sums of transformed gradients to ``out``, ``[K, P]``, in one number type.

        ``Σ_i c_i (g_i - center) = Σ_i c_i g_i - center Σ_i c_i``: the center is taken off once, and
        not from each gradient. What was formed has it taken off already.
        """
        weights = coefficients.to(self.center.dtype)
        total = weights.sum(dim=1, keepdim=True)
        raw = self._shift * total.neg_()
        sums = self.layout.split(raw)
        for use, outer, tensors in zip(self.uses, self._outer, saved, strict=True):
            if outer:
                use.accumulate(weights, tensors, sums)
                continue
            row = weights.unsqueeze(1)
            for name, values in zip(use.names, tensors, strict=True):
                part = torch.bmm(row, values).squeeze(1)
                self._of(out, name).add_(part)
        out.addcmul_(raw, self.inverse)


@cache
def _lost(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a scalar tensor with the most that a squared number of a type may lose by underflow.

    Outside of inference mode, since passes in either mode use it.
    """
    value = 0.0 if dtype == torch.float64 else LOST
    with torch.inference_mode(mode=False):
        return torch.full((), value, dtype=dtype, device=device)


def _is_outer(use: Use) -> bool:
    """Say whether each record's gradient is one outer product in the parameter's order of entries."""
    return isinstance(use, ProductUse) and use.taps == 1 and use.form == "outer"
