"""A sample in a stack's hands, and what stands in for records that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from privtune.training.mechanism.kernel import Rows


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


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors of one type hold the same, also where that is no number."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(whole), other.detach().view(whole))


def loss_sums(
    found: Sequence[tuple[torch.Tensor, torch.Tensor]], limit: torch.Tensor
) -> torch.Tensor:
    """Return sums of losses, each held between 0 and a limit; those that are no number count nothing.

    Args:
        found: The losses of every row and the mask of those that count, ``[K, M]`` each; J of both.
        limit: Shape ``[K, 1]``.

    Returns:
        Shape ``[J, K]``.
    """
    values = torch.stack([losses for losses, _ in found])
    values = values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    held = values.clamp_(min=0.0).minimum(limit)
    first, *others = [mask for _, mask in found]
    alike = all(mask is first for mask in others)
    return held.mul_(first if alike else torch.stack([first, *others])).sum(dim=-1)
