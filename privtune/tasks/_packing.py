"""Records of several tensors, as Hugging Face's collators make them, in one tensor and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

__all__ = ["Packing"]


@dataclass(frozen=True)
class Packing:
    """How the tensors of a record lie in one tensor, which is what samples, kernels and tasks take.

    Whole numbers stay whole numbers, so that tokens are held to their tables as ever.

    Args:
        names: Names of the tensors; empty where they have an order alone.
        shapes: Shape of each in one record.
        dtypes: Type of each, as torch names it.

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

    names: tuple[str, ...]
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
    def of(cls, batch: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> Packing:
        """Return how to pack records like these.

        Args:
            batch: Tensors by name, or in order, each with the same number of records first. Targets
                stay apart.
        """
        names = tuple(batch) if isinstance(batch, Mapping) else ()
        tensors = _tensors(batch)
        return cls(
            names,
            tuple(tuple(t.shape[1:]) for t in tensors),
            tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
        )

    def pack(self, batch: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the records in one tensor, shape ``[N, numbers of a record]``.

        Args:
            batch: As in :meth:`of`.

        Raises:
            InvalidInputError: If the tensors are others than those this was made of.
        """
        import torch

        found = Packing.of(batch)
        tensors = _tensors(batch)
        if found != self or len({len(t) for t in tensors}) != 1:
            raise InvalidInputError(
                "batch", repr(found), f"must be as many records of {self!r} in every tensor"
            )
        whole = None if "float" in self.dtypes[0] else torch.int64
        return torch.cat([t.reshape(len(t), -1).to(whole or t.dtype) for t in tensors], dim=1)

    def unpack(self, x: torch.Tensor) -> Any:
        """Return the tensors of packed records, by name or in order.

        Args:
            x: Packed records.
        """
        import torch

        parts = torch.split(x, [math.prod(shape) for shape in self.shapes], dim=1)
        tensors = [
            part.view(len(x), *shape).to(getattr(torch, dtype))
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]
        return dict(zip(self.names, tensors, strict=True)) if self.names else tuple(tensors)

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
        from privtune.tasks._models import Unpacking

        return Unpacking(model, self.unpack)


def _tensors(batch: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(batch.values()) if isinstance(batch, Mapping) else list(batch)
