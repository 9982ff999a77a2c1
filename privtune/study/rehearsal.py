"""Rehearsals of a user's function, on made-up records, before anything is charged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.data import Data, Fetched
    from privtune.training.mechanism.records import RecordFacts

__all__ = ["REHEARSED_STEPS", "made_up"]

REHEARSED_STEPS = 2
"""How many steps a rehearsal takes: what works once may fail on what the first has left behind."""


class _MadeUp:
    """Records of the shapes and types of a dataset's that hold nothing of it.

    Args:
        x: Inputs of a record, for shape and type.
        y: Targets of a record, likewise.
        size: How many records these are.
        stands_for: The dataset, of which nothing is read: a loop that reads it is refused.
    """

    sealed_size = True

    def __init__(self, x: torch.Tensor, y: torch.Tensor, size: int, stands_for: Data) -> None:
        self._x, self._y, self._size, self.stands_for = x, y, size, stands_for
        self.unit = getattr(stands_for, "unit", "")
        self.tree = getattr(stands_for, "tree", None)

    def __len__(self) -> int:
        return self._size

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return as many made-up records as were asked for."""
        from privtune.training.mechanism.data import synthetic

        x, y = synthetic(self._x, self._y, (1, max(1, len(index))), self._x.device)
        return x[0, : len(index)], y[0, : len(index)]

    @property
    def like(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Data``."""
        return self._x[:0], self._y[:0]

    def fetch(self, index: torch.Tensor) -> Fetched:
        """Return as many made-up records; all of them can be used."""
        return (*self.take(index), None)

    def held_to(self, facts: RecordFacts) -> _MadeUp:
        """Return the same: what is made up keeps to any facts."""
        return self

    def to(self, device: torch.device) -> _MadeUp:
        """Return the same on a device."""
        return _MadeUp(self._x.to(device), self._y.to(device), self._size, self.stands_for)

    def head(self, size: int) -> Any:
        """Return the first few, in memory."""
        import torch

        from privtune.training.mechanism.data import TensorData

        return TensorData(*self.take(torch.arange(size)), unit=self.unit)


def made_up(data: Data, records: int) -> _MadeUp:
    """Return as many made-up records like those of ``data``: of their shapes and types."""
    return _MadeUp(*data.like, records, data)
