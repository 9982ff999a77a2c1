"""The networks of the study, at sizes that two cores can train many times."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from studies.harness import Split, mnist

POOLED, CONV, SOFTMAX = "196-64-64-10", "conv, then 400-64-5", "49-10"
_CLASSES = 5


@dataclass(frozen=True)
class Net:
    """Layers without biases on records that are as they are, or made smaller in public."""

    sizes: tuple[int, ...]
    split: Split

    def model(self) -> nn.Module:
        """Return a fresh network."""
        layers: list[nn.Module] = []
        for one, two in itertools.pairwise(self.sizes):
            layers += [nn.Linear(one, two, bias=False), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


@functools.cache
def net(name: str, data: Path | None, *, smoke: bool) -> Net:
    """Return a network and its records."""
    whole = mnist(data, smoke=smoke)
    if name == CONV:
        return Net((400, 64, _CLASSES), _features(whole))
    side = 2 if name == POOLED else 4
    sizes = (196, 64, 64, 10) if name == POOLED else (49, 10)
    return Net(sizes, Split(_pool(whole.x, side), whole.y, _pool(whole.x_test, side), whole.y_test))


def _pool(x: torch.Tensor, side: int) -> torch.Tensor:
    return F.avg_pool2d(x.view(-1, 1, 28, 28), side).flatten(1)


def _half(whole: Split, first: int) -> Split:
    """Return the records of five digits, from ``first`` on, labelled from 0."""
    rows, tests = ((y >= first) & (y < first + _CLASSES) for y in (whole.y, whole.y_test))
    return Split(
        whole.x[rows], whole.y[rows] - first, whole.x_test[tests], whole.y_test[tests] - first
    )


def _features(whole: Split, *, epochs: int = 2) -> Split:
    """Train two convolutions on the digits 0 to 4, public here; return what they make of 5 to 9."""
    source, target = _half(whole, 0), _half(whole, 5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolutions = nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        )
        model = nn.Sequential(convolutions, nn.Linear(400, _CLASSES))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(source)).split(256):
                optimizer.zero_grad()
                F.cross_entropy(model(source.x[rows]), source.y[rows]).backward()
                optimizer.step()
    with torch.no_grad():
        x, x_test = (
            torch.cat([convolutions(part) for part in images.split(1024)])
            for images in (target.x, target.x_test)
        )
    return Split(x, target.y, x_test, target.y_test)
