"""Models and losses of tables. Imports torch: it is imported when a model is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from privtune.errors import InvalidInputError

__all__ = [
    "InRange",
    "Unpacking",
    "linear",
    "mlp",
    "own_model",
    "squared_error",
    "weighted_cross_entropy",
]


class Unpacking(nn.Module):
    """A model of several tensors, on records that are packed into one."""

    def __init__(self, model: nn.Module, unpack: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.model, self._unpack = model, unpack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs."""
        tensors: Any = self._unpack(x)
        named = isinstance(tensors, dict)
        outputs = self.model(**tensors) if named else self.model(*tensors)
        found: torch.Tensor = getattr(outputs, "logits", outputs)
        return found


class InRange(nn.Module):
    """Takes outputs from units of half a range to the range: -1 is its low end, 1 its high end."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self._middle, self._half = 0.5 * (low + high), 0.5 * (high - low)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return self._middle + self._half * x


def linear(features: int, outputs: int) -> nn.Module:
    """Return a linear model from zero weights."""
    layer = nn.Linear(features, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(features: int, outputs: int, hidden: Sequence[int]) -> nn.Module:
    """Return a perceptron with tanh units: bounded ones suit clipped gradients (arXiv 2007.14191)."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(features, width), nn.Tanh()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, outputs))


def own_model(factory: Callable[..., object], path: str, features: int, outputs: int) -> nn.Module:
    """Call a factory of the user's own with the numbers of features and outputs.

    Raises:
        InvalidInputError: If it returns no module.
    """
    model = factory(features, outputs)
    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            "task.model", path, f"must return a torch.nn.Module, not {type(model).__name__}"
        )
    return model


def squared_error(outputs: torch.Tensor, targets: torch.Tensor, *, half: float) -> torch.Tensor:
    """Return the squared error of each record in units of half a range."""
    return ((outputs.squeeze(-1) - targets) / half).square()


def weighted_cross_entropy(
    outputs: torch.Tensor, targets: torch.Tensor, *, weights: Sequence[float]
) -> torch.Tensor:
    """Return the cross-entropy of each record, times the public weight of its class."""
    known = torch.tensor(weights, dtype=outputs.dtype, device=outputs.device)
    return functional.cross_entropy(outputs, targets, weight=known, reduction="none")
