"""A sample in a stack's hands, and what stands in for records that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from privtune.training.mechanism.kernel import Rows

__all__ = ["Drawn", "rewind", "where"]


@dataclass(frozen=True, eq=False)
class Drawn:
    """A sample of each candidate; what is in it stays inside this module."""

    rate: float
    number: int
    index: torch.Tensor
    mask: torch.Tensor
    sizes: npt.NDArray[np.int64]
    fetched: list[Rows] = field(default_factory=list)  # kept for the next release, if in one piece


def rewind(rows: Rows, states: Sequence[torch.Tensor]) -> None:
    """Put the streams of dropout back, so that a pass that is repeated drops the same."""
    for stream, state in zip(rows.dropout, states, strict=False):
        stream.set_state(state)


def where(kept: torch.Tensor, values: torch.Tensor, made_up: torch.Tensor) -> torch.Tensor:
    """Return the values of records that are kept, and what is made up in place of the others."""
    return torch.where(kept.view(*kept.shape, *(1 for _ in values.shape[2:])), values, made_up)
