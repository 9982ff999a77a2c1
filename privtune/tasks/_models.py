"""Models of the built-in and the described tasks. Imports torch: it is imported when a model is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional


class _InRange(nn.Module):
    """Takes outputs from units of half a range to the range: -1 is its low end, 1 its high end."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self._middle, self._half = 0.5 * (low + high), 0.5 * (high - low)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return self._middle + self._half * x


def in_range(make: Callable[[], nn.Module], low: float, high: float) -> nn.Module:
    """Return a model of a regression whose outputs are in units of half a target's range."""
    return nn.Sequential(make(), _InRange(low, high))


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


def relu_mlp(features: int) -> nn.Module:
    """Return a perceptron of 64 ReLU units for ten classes."""
    return nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 10))


def digits_cnn() -> nn.Module:
    """Return two small convolutions on pictures of 8x8."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def mnist_cnn() -> nn.Module:
    """Return the network of the DP-SGD literature on pictures of 28x28: 26,010 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class _Residual(nn.Module):
    """Two convolutions beside what they are added to."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(8, outputs),
        )
        self.past = (
            nn.Identity()
            if (inputs, stride) == (outputs, 1)
            else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what both say together."""
        return functional.relu(self.inner(x) + self.past(x))


def resnet_gn(shape: Sequence[int], classes: int) -> nn.Module:
    """Return a residual network of 8 layers whose norms look at one record alone."""
    # He et al. 2016, arXiv 1512.03385; GroupNorm as Wu and He 2018, arXiv 1803.08494: statistics of a
    # batch would mix its records.
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(),
        _Residual(16, 16, 1),
        _Residual(16, 32, 2),
        _Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def small_cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """Return two convolutions with tanh units and a linear layer."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )
