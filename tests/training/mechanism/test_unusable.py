"""A record that cannot be used contributes exactly nothing, in every kernel and every release."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from privtune.errors import PrivTuneError
from privtune.training.engine.kernels import BatchedKernel, OneByOneKernel
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import (
    NO_FACTS,
    TensorData,
    find_facts,
    find_unusable,
    targets_are_classes,
)
from privtune.training.mechanism.kernel import LossOfOutputs
from privtune.training.mechanism.oracle import Oracle
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from tests.training.simple import blobs, cross_entropy, gathered, mlp, secrets

CPU = torch.device("cpu")
PLACE = 3  # of the record that cannot be used
KERNELS = ["batched", "one by one"]


class Tokens(nn.Module):
    """A table looked up, and one that no token reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(5, 4), nn.Embedding(2, 4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(2, device=x.device).repeat(len(x), 1))
        return self.head((self.words(x) + places).flatten(1))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))


def tokens(records: int = 24) -> TensorData:
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(5, (records, 2), generator=generator)
    return TensorData(x, torch.randint(3, (records,), generator=generator))


def numbers(records: int = 24) -> TensorData:
    return TensorData(*blobs(records))


def changed(data: TensorData, *, x: Any = None, y: Any = None) -> TensorData:
    inputs, targets = data.x.clone(), data.y.clone()
    if x is not None:
        inputs[PLACE, 0] = x
    if y is not None:
        targets[PLACE] = y
    return TensorData(inputs, targets)


def answers(
    kind: str, model: Any, data: Any, *, loss: Any = cross_entropy, watched: bool = True
) -> tuple[list[torch.Tensor], Oracle]:
    """Every kind of release about the same samples, from the same seeds."""
    made = {"batched": BatchedKernel, "one by one": OneByOneKernel}[kind]
    x, y = data.like
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kernel = made(model, LossOfOutputs(loss), x=x, y=y, device=CPU)
    facts = find_facts(lambda x, y: loss(kernel.module(x), y), x, y)
    oracle = Oracle(
        Schedule(len(data), 0.5, 8),
        data=data.held_to(facts if watched else NO_FACTS),
        kernel=kernel,
        streams=[Streams(secret) for secret in secrets(2)],
        device=CPU,
        physical_rows=1024,
    )
    generator = torch.Generator().manual_seed(1)
    params = 0.5 * torch.randn(2, kernel.layout.size, generator=generator)
    found = []
    for _ in range(2):
        sample = oracle.sample()
        noise = {"clipping": Flat(0.7), "noise_multiplier": 0.1}
        found.append(oracle.gradient(sample, params, **noise))
        found += oracle.gradient_and_fraction(sample, params, **noise, count_noise_multiplier=0.1)
        bound = torch.tensor(2.0)
        found.append(
            oracle.losses(sample, [params, 0.5 * params], bound=bound, noise_multiplier=0.1)
        )
    return found, oracle


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("model", [mlp, dropping])
def test_whatever_is_wrong_with_a_record_no_release_changes_by_a_bit(
    kind: str, model: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The neighbour without the record is the one whose record is marked as no record at all."""
    good = numbers()
    absent = good.marked(torch.arange(len(good)) == PLACE)
    reference, counts = answers(kind, model, absent)
    assert not same(reference, answers(kind, model, good)[0]), "it was sampled"
    unseen = answers(kind, model, absent, loss=gathered)[0]
    for label in (3, -1):
        found, oracle = answers(kind, model, changed(good, y=label))
        assert same(found, reference), label
        assert oracle.unusable.tolist() == counts.unusable.tolist()
        # What nothing public says is found by evaluating records alone, and drops the same.
        hidden = answers(kind, model, changed(good, y=label), loss=gathered, watched=False)[0]
        assert same(hidden, unseen), label
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_record_that_is_not_a_number_is_no_record(kind: str, value: float) -> None:
    good = numbers()
    reference, _ = answers(kind, mlp, good.marked(torch.arange(len(good)) == PLACE))
    found, oracle = answers(kind, mlp, changed(good, x=value))
    if value == math.inf:  # tanh makes a number of it, which is a loss as good as any
        found, reference = found[:3], reference[:3]
    assert same(found, reference)
    assert int(oracle.unusable.min()) > 0


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(("watched", "token"), [(True, 5), (True, -1), (False, 10**12)])
def test_a_token_outside_of_its_table(
    kind: str, watched: bool, token: int, capfd: pytest.CaptureFixture[str]
) -> None:
    good = tokens()
    reference, _ = answers(kind, Tokens, good.marked(torch.arange(len(good)) == PLACE))
    found, _ = answers(kind, Tokens, changed(good, x=token), watched=watched)
    assert same(found, reference)
    assert capfd.readouterr() == ("", "")


def moody(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if bool((y == 7).any()):
        raise ValueError(f"cannot look at {y.tolist()}")
    return cross_entropy(outputs, y.clamp(max=2))


def test_a_mistake_of_the_program_is_no_records_fault() -> None:
    calls: list[int] = []

    def wrong(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(len(y))
        if len(calls) > 40:
            raise RuntimeError("not of any record")
        return moody(outputs, y)

    with pytest.raises(RuntimeError, match="not of any record"):
        answers("one by one", mlp, numbers(), loss=wrong)


def test_what_made_up_records_raise_too_is_no_records_fault() -> None:
    def attempt(kept: torch.Tensor) -> None:
        raise RuntimeError("whatever it is given")

    with pytest.raises(RuntimeError, match="at first"):
        find_unusable(RuntimeError("at first"), 4, attempt)


def test_in_memory_zeros_are_put_in_place_once() -> None:
    x, y = blobs(6)
    given, lost = x.clone(), torch.tensor([False, True, False, False, True, False])
    x[1] = torch.nan
    data = TensorData(x, y).marked(lost)
    others = data.part(torch.tensor([4, 0, 1]), sealed_size=False)
    for found, places in (
        (data.fetch(torch.arange(6)), range(6)),
        (others.fetch(torch.arange(3)), (4, 0, 1)),
    ):
        assert found[2] is not None
        assert found[2].tolist() == [bool(lost[i]) for i in places]
        for row, place in enumerate(places):
            expected = torch.zeros_like(given[place]) if lost[place] else given[place]
            assert torch.equal(found[0][row], expected)
            assert int(found[1][row]) == (0 if lost[place] else int(y[place]))
    assert x[1].isnan().all()  # what was given stays as it is
    assert torch.equal(x[4], given[4])
    assert data.x is x
    assert data.y is y
    assert data._usable is data._usable
    # Where none is lost nothing is copied, neither now nor in a step.
    assert TensorData(x, y, unusable=torch.zeros(6, dtype=torch.bool))._usable[0] is x


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("no"), PrivTuneError("ours")]
)
def test_no_memory_and_errors_of_our_own_are_no_records_fault(error: Exception) -> None:
    tried: list[int] = []

    def wrong(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if bool((y == 7).any()):
            tried.append(len(y))
            raise error
        return moody(outputs, y)

    with pytest.raises(type(error)):
        answers("one by one", mlp, changed(numbers(), y=7), loss=wrong)
    assert len(tried) == 1, "nothing was searched"


def test_facts_are_what_a_record_is_looked_up_in_as_it_stands() -> None:
    table = nn.Embedding(7, 3)
    empty = torch.zeros(0, 4, dtype=torch.long)

    def mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen = (
            table(x[:, 0])
            + table(x[:, 1].clamp(0, 6))
            + nn.functional.embedding(x[:, 2], table.weight[:5])
        )
        return cross_entropy(seen, y)

    facts = find_facts(mixed, empty, empty[:, 0])
    assert facts.inputs is not None
    assert facts.inputs[[0, 2]].tolist() == [7, 5]
    assert int(facts.inputs[[1, 3]].min()) > 10**12
    assert int(facts.targets) == 3
    x = torch.tensor([[6, 9, 4, -9], [7, 0, 0, 0], [0, 0, 5, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    y = torch.tensor([2, 0, 0, 3, -100])
    assert facts.unusable(x, y).tolist() == [False, True, True, True, False]
    assert find_facts(lambda x, y: 1 / 0, empty, empty) == NO_FACTS


def test_an_unusable_target_does_not_choose_how_the_others_are_computed() -> None:
    y = torch.tensor([0, -1, 2])
    data = TensorData(torch.zeros(3, 2), y)
    assert not targets_are_classes(data)
    assert targets_are_classes(data.marked(y < 0))
