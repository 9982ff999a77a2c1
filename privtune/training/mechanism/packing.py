"""Records of several tensors, or of several rows, in one tensor, and models and losses of these.

Several tensors are those that Hugging Face's collators make; several rows are about one person, and padded
to a common number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from privtune.errors import InvalidInputError
from privtune.training.mechanism.kernel import LossOf

TARGETS = ("labels", "label")
FILLER = {False: -1.0, True: math.nan}
"""Target of a row that is none, by whether targets are floating."""


@dataclass(frozen=True)
class Packing:
    """How the tensors of a record lie in one tensor, which is what samples, kernels and tasks take.

    Whole numbers stay whole numbers, and all but booleans are int64 from there on, whatever integers
    they were: no copy hides which table a token is looked up in, so tokens are held to it as ever.

    Args:
        tree: How the tensors make a dict or a tuple, nested or not: a ``TreeSpec`` of torch's.
        shapes: Shape of each in one record.
        dtypes: Type of each, as torch names it: ``bool``, ``int64``, or a floating one.

    Raises:
        InvalidInputError: If whole numbers and floating ones, or floating ones of two types, meet.

    Example:
        >>> import torch
        >>> batch = {"input_ids": torch.tensor([[5, 7], [3, 0]]), "attention_mask": torch.ones(2, 2).bool()}
        >>> packing = Packing.of(batch)
        >>> x = packing.pack(batch)
        >>> x.tolist(), packing.unpack(x)["attention_mask"].dtype
        ([[5, 7, 1, 1], [3, 0, 1, 1]], torch.bool)
    """

    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        kinds = {d if "float" in d else "whole" for d in self.dtypes}
        if len(kinds) != 1 or any("complex" in d for d in self.dtypes):
            raise InvalidInputError(
                "batch",
                ", ".join(self.dtypes) or "nothing",
                "must hold whole numbers alone, or floating numbers of one type alone",
                "Convert a mask to the type of the numbers beside it.",
            )

    @classmethod
    def of(cls, batch: Mapping[str, Any] | Sequence[Any]) -> Packing:
        """Return how to pack records like these.

        Args:
            batch: Tensors by name, or in order, or dicts and tuples of such, each tensor with the
                same number of records first. Targets stay apart.

        Raises:
            InvalidInputError: If something else than tensors is in it, or their records are not as many.
        """
        tensors, tree = _flat(batch)
        return cls(tree, tuple(tuple(t.shape[1:]) for t in tensors), tuple(map(_dtype, tensors)))

    def pack(self, batch: Mapping[str, Any] | Sequence[Any]) -> torch.Tensor:
        """Return the records in one tensor, shape ``[N, numbers of a record]``.

        Args:
            batch: As in :meth:`of`.

        Raises:
            InvalidInputError: If the tensors are others than those this was made of.
        """
        if (found := Packing.of(batch)) != self:
            raise InvalidInputError(
                "batch", repr(found), f"must be as many records of {self!r} in every tensor"
            )
        whole = None if "float" in self.dtypes[0] else torch.int64
        tensors, _ = _flat(batch)
        return torch.cat([t.reshape(len(t), -1).to(whole or t.dtype) for t in tensors], dim=1)

    def unpack(self, x: torch.Tensor) -> Any:
        """Return the tensors of packed records, by name or in order; whole numbers are int64.

        Args:
            x: Packed records.
        """
        parts = torch.split(x, [math.prod(shape) for shape in self.shapes], dim=1)
        tensors = [
            part.view(len(x), *shape).to(getattr(torch, dtype))
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]
        return tree_unflatten(tensors, self.tree)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model of packed records: it calls ``model(**tensors)``, or ``model(*tensors)``.

        Args:
            model: The model. Of what it returns, ``logits`` are taken where there are any.

        Example:
            >>> import torch
            >>> bilinear = torch.nn.Bilinear(2, 3, 1)
            >>> packing = Packing.of((torch.ones(5, 2), torch.ones(5, 3)))
            >>> packing.wrap(bilinear)(torch.ones(5, 5)).shape
            torch.Size([5, 1])
        """
        return _Unpacking(model, self)


@dataclass(frozen=True)
class RecordTree:
    """A record of several tensors: one of inputs and a target within, a dict or tuple for a loop.

    The target of a dict is its ``labels``, else its ``label``, else what stands last in it; that of a
    tuple stands last. A dict or tuple of one entry has none. ``names`` are those of a dict's entries, and
    ``size`` is how many there are.
    """

    inputs: Packing
    names: tuple[str, ...]
    target: str
    size: int

    @classmethod
    def split(
        cls, records: Any, target: str | None = None
    ) -> tuple[RecordTree | None, torch.Tensor, torch.Tensor]:
        """Return what records are made of, their inputs in one tensor, and their targets.

        Of a pair of tensors nothing is packed. The target of one entry alone is 0, which nobody reads.

        Raises:
            InvalidInputError: If they hold anything but tensors or trees of tensors, a target is no tensor,
                or not all of the tensors have as many records.
        """
        tensors, _ = _flat(records)
        names: tuple[str, ...] = ()
        if not tensors:
            raise InvalidInputError("dataset", "nothing", "must hold inputs and a target")
        if len(records) == 1:
            names = tuple(records) if isinstance(records, Mapping) else ()
            packing = Packing.of(records)
            return cls(packing, names, "", 1), packing.pack(records), torch.zeros(len(tensors[0]))
        if isinstance(records, Mapping):
            names = tuple(records)
            target = target or next((name for name in TARGETS if name in records), names[-1])
            rest: Any = {name: part for name, part in records.items() if name != target}
            y = records[target]
        else:
            target, (*rest, y) = "the last part", records
            rest = rest[0] if len(rest) == 1 else tuple(rest)
        if not isinstance(y, torch.Tensor):
            raise InvalidInputError("dataset", target, "must be a tensor: it is the target")
        if isinstance(rest, torch.Tensor):
            return None, rest, y
        packing = Packing.of(rest)
        return cls(packing, names, target, len(records)), packing.pack(rest), y

    def loss_of(self, loss_of: Any) -> LossOf:
        """Return a loss of packed records that calls one of a dict, or of a tuple's entries."""

        def packed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            parts = self.inputs.unpack(x)
            if self.names:
                record: list[Any] = [{n: y if n == self.target else parts[n] for n in self.names}]
            else:
                record = [*((parts,) if self.size == 2 else parts), *([y] if self.target else [])]
            found: torch.Tensor = loss_of(model, *record)
            return found

        return packed


class _Unpacking(nn.Module):
    """A model of several tensors, on records that are packed into one."""

    def __init__(self, model: nn.Module, packing: Packing) -> None:
        super().__init__()
        self.model, self._packing = model, packing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs: of several, the logits."""
        tensors = self._packing.unpack(x)
        named = isinstance(tensors, dict)
        outputs = self.model(**tensors) if named else self.model(*tensors)
        found: torch.Tensor = getattr(outputs, "logits", outputs)
        return found


def _dtype(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return "int64" if name.startswith(("int", "uint")) else name


def _flat(batch: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors of a tree, and the tree without them."""
    found, tree = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    for part in found:
        usable = isinstance(part, torch.Tensor) and part.layout is torch.strided and part.ndim
        if not usable or part.is_nested:
            raise InvalidInputError(
                "batch",
                type(part).__name__,
                "must be tensors, or dicts and tuples of tensors, with records along the first axis",
                "Pad records to one public length, and leave texts and lists of numbers out.",
            )
    if len(sizes := {len(tensor) for tensor in found}) > 1:
        found_sizes = ", ".join(map(str, sorted(sizes)))
        raise InvalidInputError("batch", found_sizes, "must hold as many records in every tensor")
    return found, tree


class OfUnits(nn.Module):
    """A model of rows that have so many axes, applied to each row of a unit; rows alone pass as they are."""

    def __init__(self, inner: nn.Module, axes: int) -> None:
        super().__init__()
        self.inner, self.axes = inner, axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs ``[B, R, ...]`` of units ``[B, R, ...]``, ``[B, ...]`` of rows."""
        if x.dim() == self.axes + 1:
            rows: torch.Tensor = self.inner(x)
            return rows
        outputs: torch.Tensor = self.inner(x.flatten(0, 1))
        return outputs.reshape(*x.shape[:2], *outputs.shape[1:])


def there_are(targets: torch.Tensor) -> torch.Tensor:
    """Say which targets ``[B, R]`` are those of rows, and not fillers."""
    return targets.isfinite() if targets.is_floating_point() else targets >= 0


def rows_of(
    outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs and targets of all rows, and which of them are no fillers."""
    there = there_are(targets)
    return outputs.flatten(0, 1), torch.where(there, targets, 0).flatten(), there.flatten()


def sum_of_rows(loss_of: LossOf) -> LossOf:
    """Return the loss of units: the sum of what ``loss_of`` says of each of their rows."""

    def of_units(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        there = there_are(y)
        rows = loss_of(model, x.flatten(0, 1), torch.where(there, y, 0).flatten())
        return (rows.view(y.shape) * there).sum(dim=1)

    return of_units


def mean_of_rows(score_of: LossOf) -> LossOf:
    """Return the score of units: the mean of what ``score_of`` says of each of their rows."""
    total = sum_of_rows(score_of)

    def of_units(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return total(model, x, y) / there_are(y).sum(dim=1).clamp(min=1)

    return of_units
