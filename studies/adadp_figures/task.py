"""The networks of the study, at sizes that two cores can train many times, and clients that hold records."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from privtune.tasks import unit_records
from privtune.training.mechanism.data import ModelOfUnits, TensorData, rows_of
from studies.harness import Split, cross_entropy, mnist

POOLED, CONV, SOFTMAX = "196-64-64-10", "conv, then 400-64-5", "49-10"
EVEN, UNEVEN = "3,000 clients with all digits", "3,000 clients with two digits each"
ROWS = 20  # of a client
_CLASSES = 5


@dataclass(frozen=True)
class Net:
    """Layers without biases on records that are as they are, or made smaller in public.

    Where clients are protected, all rows of one are a record: sampled, clipped and noised as one.
    """

    sizes: tuple[int, ...]
    split: Split
    clients: bool = False

    def model(self) -> nn.Module:
        """Return a fresh network; that of clients is called on their rows."""
        return ModelOfUnits(self._rows(), 1) if self.clients else self._rows()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each record: of a client, the sum of its rows'."""
        if not self.clients:
            return cross_entropy(outputs, targets)
        rows, known, there = rows_of(outputs, targets)
        return (cross_entropy(rows, known) * there).view(targets.shape).sum(dim=-1)

    def _rows(self) -> nn.Module:
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
    side, sizes = (4, (49, 10)) if name == SOFTMAX else (2, (196, 64, 64, 10))
    x, tests = _pool(whole.x, side), (_pool(whole.x_test, side), whole.y_test)
    if name in (EVEN, UNEVEN):
        groups = _clients(whole.y, even=name == EVEN)
        records = unit_records(TensorData(x, whole.y), groups, most=ROWS, unit="client")
        return Net(sizes, Split(records.x, records.y, *tests), clients=True)
    return Net(sizes, Split(x, whole.y, *tests))


def _clients(y: torch.Tensor, *, even: bool) -> torch.Tensor:
    """Return the number of each row's client: at random, or of two runs of ten rows of one digit.

    Two digits a client is the split of McMahan et al. 2017, arXiv 1602.05629.
    """
    drawn = torch.Generator().manual_seed(0)
    order = torch.randperm(len(y), generator=drawn)
    part = 1 if even else ROWS // 2
    if not even:
        order = torch.argsort(y, stable=True)
    runs = torch.randperm(-(-len(y) // part), generator=drawn) * part // ROWS
    groups = torch.empty_like(y)
    groups[order] = runs.repeat_interleave(part)[: len(y)]
    return groups


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
