"""Weights change by releases alone: every other way that is known is found."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from privtune.errors import InvalidInputError
from privtune.study._loop_data import clipping_of
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import Layout
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from privtune.training.own_loop.optimizer import checked
from privtune.training.own_loop.private_training import PrivateTraining
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


def by_other_part(m):
    m[1] = nn.Identity()


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
    by_other_part, by_parameter, by_removal, by_freezing, by_type, by_norm, by_optimizer,
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


class Tied(nn.Module):
    """Layers that are tied by their memory, or by a view that is kept beside them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        if how == "memory":
            self.other.weight.data = self.one.weight.data
        elif how == "part":
            self.other.bias.data = self.one.weight.data[1]
        elif how == "view":
            self.kept = self.one.weight.detach()
        elif how == "buffer":
            self.register_buffer("kept", self.one.weight.detach().T)
        else:
            self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.other(self.one(x))
        return out


def begun(model: nn.Module) -> PrivateTraining:
    return PrivateTraining(
        model,
        TensorData(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)),
        schedule=Schedule(4, 1.0, 1),
        method=FixedDPSGD(0.0),
        optimizer=torch.optim.SGD(model.parameters(), 1.0),
        clipping=Flat(1.0),
        secret=bytes(32),
    )


@pytest.mark.parametrize("how", ["memory", "part", "view", "buffer"])
def test_weights_that_would_come_apart_are_refused(how: str) -> None:
    with pytest.raises(InvalidInputError, match="memory" if how in ("memory", "part") else "view"):
        begun(Tied(how))
    begun(Tied("parameter")).close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_without_shapes_or_of_torchscript_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match="a lazy layer once"):
        begun(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(InvalidInputError, match=r"torch\.jit"):
        begun(torch.jit.script(nn.Linear(3, 3)))


@pytest.mark.parametrize("returned", [None, 1.0, {"loss": 1.0}, (1.0, 2.0)])
def test_a_loss_that_is_no_tensor_is_refused_in_a_sentence(returned: object) -> None:
    private = begun(nn.Linear(3, 3))
    with pytest.raises(InvalidInputError, match=f"{type(returned).__name__}.*one number"):
        private.fit(lambda m, x, y: returned)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    "optimizer",
    [[], torch.optim.SGD, nn.Linear(3, 3).parameters(), "adam"],
    ids=["none", "a class", "parameters", "a name"],
)
def test_what_is_no_optimizer_is_refused_in_a_sentence(optimizer: object) -> None:
    with pytest.raises(InvalidInputError, match="must be one optimizer"):
        checked(optimizer, nn.Linear(3, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", [None, [1.0, 1.0], "one"])
def test_what_is_no_bound_is_refused_in_a_sentence(norm: object) -> None:
    with pytest.raises(InvalidInputError, match="must be one number"):
        clipping_of(FixedDPSGD(1.0), norm)  # type: ignore[arg-type]


def test_a_batch_that_is_taken_for_another_says_how_it_is_read() -> None:
    private = begun(nn.Linear(3, 3))
    for batch in private.batches():
        with pytest.raises(AttributeError, match=r"'pop': read it as x, y = batch"):
            batch.pop("labels")
        private.step(batch, lambda m, x, y: m(x).sum(1))


def test_a_copy_of_a_loop_trains_nothing() -> None:
    with pytest.raises(LoopError, match="was replaced"):
        copy.deepcopy(begun(nn.Linear(3, 3))).fit(lambda m, x, y: m(x).sum(1))
