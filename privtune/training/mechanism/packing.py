"""Records of several tensors, as Hugging Face's collators make them, in one tensor and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

TARGETS = ("labels", "label")


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
        return cls(
            tree,
            tuple(tuple(t.shape[1:]) for t in tensors),
            tuple(map(_dtype, tensors)),
        )

    def pack(self, batch: Mapping[str, Any] | Sequence[Any]) -> torch.Tensor:
        """Return the records in one tensor, shape ``[N, numbers of a record]``.

        Args:
            batch: As in :meth:`of`.

        Raises:
            InvalidInputError: If the tensors are others than those this was made of.
        """
        import torch

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
        import torch
        from torch.utils._pytree import tree_unflatten

        parts = torch.split(x, [math.prod(shape) for shape in self.shapes], dim=1)
        tensors = [
            part.view(len(x), *shape).to(getattr(torch, dtype))
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]
        return tree_unflatten(tensors, self.tree)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
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
        from privtune.training.mechanism.unpacking import Unpacking

        return Unpacking(model, self.unpack)


@dataclass(frozen=True)
class RecordTree:
    """A record of several tensors: one of inputs and a target within, a dict or tuple for a loop.

    The target of a dict is its ``labels``, else its ``label``, else what stands last in it; that of a
    tuple stands last. A dict or tuple of one entry has none.

    Args:
        inputs: How all but the target lie in one tensor.
        names: Of a dict's entries, in order; empty for a tuple.
        target: The name of the target; empty where there is none.
        size: How many entries there are.
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

        Args:
            records: A mapping or a tuple of tensors or trees of tensors. Of a pair of tensors nothing is
                packed. The target of one entry alone is 0, which nobody reads.
            target: The name of a mapping's target, unless it is ``labels``, ``label`` or the last.

        Raises:
            InvalidInputError: If they hold anything else, a target is no tensor, or not all of the
                tensors have as many records.
        """
        import torch

        tensors, _ = _flat(records)
        names: tuple[str, ...] = ()
        if not tensors:
            raise InvalidInputError("dataset", "nothing", "must hold inputs and a target")
        if len(records) == 1:
            names = tuple(records) if isinstance(records, Mapping) else ()
            packing = Packing.of(records)
            y = torch.zeros(len(tensors[0]))
            return cls(packing, names, "", 1), packing.pack(records), y
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

    def record(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """Return records as a loop sees them.

        Args:
            x: Their inputs, packed.
            y: Their targets.
        """
        inputs = self.inputs.unpack(x)
        if not self.target:
            return inputs
        if self.names:
            return {name: y if name == self.target else inputs[name] for name in self.names}
        return (inputs, y) if self.size == 2 else (*inputs, y)

    def loss_of(self, loss_of: Any) -> Any:
        """Return a loss of packed records that calls one of a dict, or of a tuple's entries.

        Args:
            loss_of: Takes the model, and then the dict, or as many arguments as the tuple has entries.
        """

        def packed(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            record = self.record(x, y)
            found: torch.Tensor = loss_of(model, *((record,) if self.names else record))
            return found

        return packed


def _dtype(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return "int64" if name.startswith(("int", "uint")) else name


def _flat(batch: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors of a tree, and the tree without them."""
    import torch
    from torch.utils._pytree import tree_flatten

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
    if len({len(tensor) for tensor in found}) > 1:
        raise InvalidInputError(
            "batch",
            ", ".join(sorted({str(len(tensor)) for tensor in found})),
            "must hold as many records in every tensor",
        )
    return found, tree
