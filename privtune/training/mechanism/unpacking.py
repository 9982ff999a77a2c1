"""A model of several tensors, on records that are packed into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Unpacking(nn.Module):
    """A model of several tensors, on records that are packed into one.

    Args:
        model: The model.
        unpack: Returns its arguments, by name or in order.
    """

    def __init__(self, model: nn.Module, unpack: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.model, self._unpack = model, unpack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs: of several, the logits."""
        tensors: Any = self._unpack(x)
        named = isinstance(tensors, dict)
        outputs = self.model(**tensors) if named else self.model(*tensors)
        found: torch.Tensor = getattr(outputs, "logits", outputs)
        return found
