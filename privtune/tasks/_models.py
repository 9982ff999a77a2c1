"""Torch models of the built-in and the described tasks, imported only when a model is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional


class _InRange(nn.Module):
    """Layer that scales outputs linearly: -1 becomes the low end of a range, 1 its high end."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self._middle = 0.5 * (low + high)
        self._half = 0.5 * (high - low)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs in the units of the target."""
        return self._middle + self._half * x


def in_range(make: Callable[[], nn.Module], low: float, high: float) -> nn.Module:
    """Return a regression model whose outputs are scaled from [-1, 1] to the target's range.

    The model itself learns numbers from -1 to 1, so that rates and clipping norms that suit one target suit
    another.

    Args:
        make: Builds the model.
        low: The low end of the public range.
        high: Its high end.
    """
    return nn.Sequential(make(), _InRange(low, high))


def linear(features: int, outputs: int) -> nn.Module:
    """Return a linear model whose weights and biases are zero, as its proven constants assume."""
    layer = nn.Linear(features, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(features: int, outputs: int, hidden: Sequence[int]) -> nn.Module:
    """Return a perceptron with tanh units, whose bounded outputs suit clipping (arXiv 2007.14191)."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(features, width), nn.Tanh()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, outputs))


def relu_mlp(features: int) -> nn.Module:
    """Return a perceptron with one hidden layer of 64 ReLU units and ten outputs."""
    return nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 10))


def digits_cnn() -> nn.Module:
    """Return a network of two small convolutions for pictures of 8x8."""
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
    """Residual block: two convolutions, to whose output the block's input or its projection is added.

    Args:
        inputs, outputs: Channels.
        stride: Of the first convolution, and of the projection.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(8, outputs),
        )
        is_same_shape = inputs == outputs and stride == 1
        self.past: nn.Module
        if is_same_shape:
            self.past = nn.Identity()
        else:
            self.past = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ReLU of the sum of both branches, the convolutions and the shortcut."""
        return functional.relu(self.inner(x) + self.past(x))


def resnet_gn(shape: Sequence[int], classes: int) -> nn.Module:
    """Return a residual network of 8 layers with group norms, which use statistics of one record alone.

    He et al. 2016, arXiv 1512.03385; GroupNorm as Wu and He 2018, arXiv 1803.08494: statistics of a batch
    would mix its records.

    Args:
        shape: Channels, height and width of a picture.
        classes: How many there are.
    """
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
    """Return a network of two convolutions with tanh units and a linear layer.

    Args:
        shape: Channels, height and width of a picture, these at least 4: each is halved twice.
        classes: How many there are.
    """
    channels, height, width = shape
    numbers = 32 * (height // 4) * (width // 4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(numbers, classes),
    )
