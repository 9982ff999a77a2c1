"""The network of the DP-SGD literature on MNIST with tanh units, which no built-in task has."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from privtune.tasks import Task, get_task


def tanh_cnn() -> nn.Module:
    """Return two convolutions of 16 and 32 channels with tanh units on pictures of 28x28: 26,010 weights.

    Papernot et al. 2021 (arXiv 2007.14191), Table 1.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def mnist_tanh() -> Task:
    """Return MNIST with the network of :func:`tanh_cnn`; a test split of 10,000 public records."""
    return replace(get_task("mnist-cnn"), name="mnist-tanh-cnn", model=tanh_cnn)
