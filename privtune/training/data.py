"""The private records of a training, fetched by index."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils.data import Dataset, default_collate

from privtune.errors import InvalidInputError

__all__ = ["Data", "DatasetData", "TensorData", "targets_are_classes"]


class Data(Protocol):
    """Records that can be fetched by index."""

    @property
    def sealed_size(self) -> bool:
        """Whether how many records these are is private, as that of a Poisson subset is.

        The schedule then counts the records that are expected: a check of ``len`` would tell.
        """
        ...

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs ``[n, ...]`` and targets ``[n, ...]`` of the records at ``index``."""
        ...

    def to(self, device: torch.device) -> Data:
        """Return the same data, fetched onto ``device``."""
        ...


@dataclass(frozen=True, eq=False)
class TensorData:
    """Data in memory.

    Args:
        x: Inputs, shape ``[N, ...]``.
        y: Targets, shape ``[N, ...]``.
        sealed_size: Whether N is private, as that of a Poisson subset is: it is then not compared
            with the schedule's records, and nothing divides by it.

    Raises:
        InvalidInputError: If the two do not have the same number of records, or none.
    """

    x: torch.Tensor
    y: torch.Tensor
    sealed_size: bool = False

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) == 0:
            raise InvalidInputError(
                "data",
                (len(self.x), len(self.y)),
                "inputs and targets must have the same number of records, at least 1",
            )

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the records at ``index``: ``index_select`` is 5 times faster than ``x[i]``."""
        return self.x.index_select(0, index), self.y.index_select(0, index)

    def part(self, index: torch.Tensor, *, sealed_size: bool) -> TensorData:
        """Return the records at ``index``; one that cannot be used, where that is empty."""
        if len(index) == 0:
            # A record that is not a number adds exactly nothing.
            nothing = torch.full_like(self.x[:1], math.nan)
            return TensorData(nothing, self.y[:1], sealed_size)
        return TensorData(self.x[index], self.y[index], sealed_size)

    def to(self, device: torch.device) -> TensorData:
        """Return the data on ``device``."""
        return TensorData(self.x.to(device), self.y.to(device), self.sealed_size)


class DatasetData:
    """Data that does not fit into memory, fetched record by record when it is sampled.

    Args:
        dataset: A map-style dataset of pairs ``(input, target)`` of tensors, arrays or numbers,
            all of one shape.
        device: Where to put what was fetched.
    """

    sealed_size = False

    def __init__(
        self, dataset: Dataset[tuple[object, object]], device: torch.device | None = None
    ) -> None:
        if not hasattr(dataset, "__len__") or len(dataset) == 0:
            raise InvalidInputError(
                "dataset", type(dataset).__name__, "must have a length, of at least 1"
            )
        self._dataset = dataset
        self._size = len(dataset)
        self._device = device or torch.device("cpu")

    def __len__(self) -> int:
        return self._size

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fetch the records at ``index``, each of them once."""
        if len(index) == 0:
            x, y = self.take(torch.zeros(1, dtype=torch.long))
            return x[:0], y[:0]
        unique, places = torch.unique(index.cpu(), return_inverse=True)
        pairs = [self._dataset[int(i)] for i in unique]
        x, y = default_collate(pairs)
        return x[places].to(self._device), y[places].to(self._device)

    def to(self, device: torch.device) -> DatasetData:
        """Return the data, fetched onto ``device``."""
        return DatasetData(self._dataset, device)


def targets_are_classes(data: Data) -> bool:
    """Say whether targets are known to be whole numbers of at least 0; looks at whole tensors alone."""
    if not isinstance(data, TensorData) or data.sealed_size:
        return False
    return not data.y.dtype.is_floating_point and bool((data.y >= 0).all())
