"""Weights change by releases alone: every other way that is known is found."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from privtune.training.mechanism.kernel import Layout
from privtune.training.own_loop.weights import LoopError, WatchedWeights

pytestmark = pytest.mark.quick


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 3))


def by_method(m):
    with torch.no_grad():
        m[0].weight[0].copy_(torch.ones(8))


def by_data(m):
    m[0].weight.data[0] = 1.0


def by_numpy(m):
    m[2].bias.detach().numpy()[0] += 1.0


def by_state(m):
    state = copy.deepcopy(m.state_dict())
    m.load_state_dict(state)


def by_assignment(m):
    m[0].weight = nn.Parameter(m[0].weight.detach().clone())


def by_buffer(m):
    m[1].running_mean.add_(1.0)


def by_new_buffer(m):
    m[1].running_mean = torch.ones(4)


def by_part(m):
    m.append(nn.Linear(3, 3))


def by_parameter(m):
    m.register_parameter("late", nn.Parameter(torch.ones(1)))


def by_removal(m):
    del m[2]


def by_freezing(m):
    m[0].weight.requires_grad_(False)


def by_type(m):
    m.double()


def by_norm(m):
    parametrizations.weight_norm(m[0])


def by_optimizer(m):
    m(torch.ones(2, 8)).sum().backward()
    torch.optim.SGD(m.parameters(), 0.1).step()


WAYS = [
    by_method, by_data, by_numpy, by_state, by_assignment, by_buffer, by_new_buffer, by_part,
    by_parameter, by_removal, by_freezing, by_type, by_norm, by_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_is_found(way):
    m = model()
    watched = WatchedWeights(m, Layout(m))
    watched.check(whole=True)
    way(m)
    with pytest.raises(LoopError, match="between two releases"):
        watched.check(whole=True)


@pytest.mark.parametrize("way", [by_data, by_numpy])
def test_contents_of_large_models_are_compared(way, monkeypatch):
    monkeypatch.setattr("privtune.training.own_loop.weights._COPIED", 1)
    test_every_way_is_found(way)


def test_what_changes_nothing_passes():
    m = model()
    watched = WatchedWeights(m, Layout(m))
    copy.deepcopy(m)(torch.ones(2, 8)).sum().backward()
    m(torch.ones(2, 8)).sum().backward()
    m.zero_grad()
    m.eval()
    m.train()
    m[1].eval()
    with torch.no_grad():
        watched.flat.mul_(0.5)
    watched.accept()
    watched.check(whole=True)
    assert torch.equal(torch.cat([p.flatten() for p in m.parameters()]), watched.flat)


def test_weights_that_are_not_numbers_equal_themselves():
    for size in (4, 2**18):
        m = nn.Linear(size, 2, bias=False)
        watched = WatchedWeights(m, Layout(m))
        watched.flat.fill_(float("nan"))
        watched.accept()
        watched.check()
