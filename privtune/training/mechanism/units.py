"""Records that are units: several rows about one person, padded to a common number."""

from __future__ import annotations

import math

import torch
from torch import nn

from privtune.training.mechanism.kernel import LossOf

FILLER = {False: -1.0, True: math.nan}
"""Target of a row that is none, by whether targets are floating."""


class OfUnits(nn.Module):
    """A model of rows, applied to each row of a unit; rows alone pass as they are.

    Args:
        inner: The model of rows.
        axes: Axes of one row.
    """

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
