"""Scores: bounded, record by record, whatever size was declared, noised by the plan's scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.strategies import ScorePlan
from privtune.training.mechanism import noise
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.scoring import released_sums, score
from privtune.training.mechanism.streams import Streams
from tests.training.simple import blobs, cross_entropy, gathered, mlp

pytestmark = pytest.mark.quick

EXACT = ScorePlan(60, None)
LOSS = ScorePlan(60, None, "gaussian", "loss", {"bound": 0.7})
DATA = TensorData(*blobs(60))


def fitted() -> nn.Module:
    """A model that is right about some records, sure about others, with losses on either side of 0.7."""
    torch.manual_seed(3)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(DATA.x), DATA.y).mean().backward()
        optimizer.step()
    return model


MODEL = fitted()


def rng(number: int = 0) -> np.random.Generator:
    return Streams(number.to_bytes(32, "big")).numpy("score")


def exact(plan: ScorePlan = EXACT, model: nn.Module = MODEL, data: TensorData = DATA) -> float:
    return score(replace(plan, noise_multiplier=None), model, data, rng=rng()).score


def test_the_metrics_against_their_definitions() -> None:
    with torch.no_grad():
        outputs = MODEL(DATA.x)
        losses = cross_entropy(outputs, DATA.y)
    right = int((outputs.argmax(dim=1) == DATA.y).sum())
    assert 0 < right < 60
    assert exact() == right / 60
    assert float(losses.min()) < 0.7 < float(losses.max())
    assert exact(LOSS) == pytest.approx(-float(losses.clamp(0.0, 0.7).mean()), rel=1e-6)
    assert exact(replace(LOSS, options={"bound": 50.0})) == pytest.approx(
        -float(losses.mean()), rel=1e-6
    )


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("options", [{}, {"bound": 0.7}])
def test_the_noise_is_the_stream_s_next_draw_times_the_charged_scale(
    mechanism: str, options: dict[str, float], adjacency: Adjacency
) -> None:
    """Exact: any other factor, sensitivity or stream gives another number."""
    name = "loss" if options else "accuracy"
    plan = ScorePlan(60, 2.0, mechanism, name, options, adjacency=adjacency)
    (sums,) = released_sums(replace(plan, noise_multiplier=None), MODEL, DATA, rng()) or []
    (metric,) = plan.make_metrics()
    for number in range(3):
        draws = rng(number)
        law = noise.exact_gaussian if mechanism == "gaussian" else noise.exact_laplace
        units = law(draws.random, len(sums))
        (noised,) = released_sums(plan, MODEL, DATA, rng(number)) or []
        assert noised == pytest.approx(sums + units * 2.0 * metric.sensitivity, rel=1e-12)


@pytest.mark.parametrize("plan", [EXACT, LOSS])
def test_a_mean_is_that_of_the_records_there_are_whatever_was_declared(plan: ScorePlan) -> None:
    fewer = TensorData(DATA.x[:40], DATA.y[:40])
    alone = exact(replace(plan, records=40), data=fewer)
    if plan is EXACT:
        is_right = MODEL(fewer.x).argmax(dim=1) == fewer.y
        assert alone == pytest.approx(float(is_right.double().mean()), abs=1e-12)
    for declared in (20, 60, 600):
        assert exact(replace(plan, records=declared), data=fewer) == alone


def test_one_record_moves_the_sums_by_their_sensitivity_at_most() -> None:
    wild = nn.Sequential(nn.Linear(8, 3))
    with torch.no_grad():
        wild[0].weight.mul_(1e30)
    for plan in (EXACT, LOSS):
        (metric,) = plan.make_metrics()
        for x in (0.0, 1e30, math.nan, math.inf):
            changed = TensorData(DATA.x.clone(), DATA.y.clone())
            changed.x[5] = x
            for model in (MODEL, wild):
                fewer = TensorData(DATA.x[torch.arange(60) != 5], DATA.y[torch.arange(60) != 5])
                (with_it,) = released_sums(plan, model, changed, rng()) or []
                (without,) = released_sums(plan, model, fewer, rng()) or []
                moved = float(np.linalg.norm(with_it - without))
                assert moved <= (1.0 + 1e-9) * metric.sensitivity
    assert exact(LOSS, wild) >= -0.7
    # A loss that is not a number is the worst one.
    nothing = TensorData(torch.full_like(DATA.x, math.nan), DATA.y)
    assert exact(LOSS, MODEL, nothing) == pytest.approx(-0.7)
    assert exact(EXACT, MODEL, nothing) == 0.0


def test_weights_that_are_not_finite_have_the_worst_score() -> None:
    broken = mlp()
    with torch.no_grad():
        broken[0].bias[0] = math.nan
    found = score(ScorePlan(60, 2.0), broken, DATA, rng=rng())
    assert (found.score, found.estimate) == (-math.inf, None)


class Mixing(nn.Module):
    """Subtracts the batch's mean and keeps a running one, in evaluation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.5).add_(x.detach().mean(dim=0))
        return self.inner(x - x.mean(dim=0) + 0.3 * x + self.seen)


class ByValue(nn.Module):
    """No transform takes it: it looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if bool((x.abs() < 1e6).all()) else self.inner(0.0 * x)


@pytest.mark.parametrize("make", [Mixing, ByValue])
def test_a_model_that_mixes_records_mixes_nothing(make: Any) -> None:
    torch.manual_seed(1)
    model = make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    model.inner[1].eval()
    before = exact(LOSS, model)
    far = DATA.x.clone()
    far[5] = 1e3
    moved = abs(exact(LOSS, model, TensorData(far, DATA.y)) - before)
    assert moved <= (1.0 + 1e-9) * 0.7 / 60
    # One by one, written out.
    each = []
    model.eval()
    for x, y in zip(DATA.x, DATA.y, strict=True):
        model.load_state_dict(state)
        with torch.no_grad():
            each.append(float(cross_entropy(model(x[None]), y[None]).clamp(0.0, 0.7)))
    assert before == pytest.approx(-sum(each) / 60, rel=1e-5)


class Pictured(nn.Module):
    """A net with convolutions, which notes where the channels of what it pools lie."""

    steps: ClassVar[list[int]] = []  # not its own: a copy meets the records

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 6, 2)
        self.ending = ending

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = layer(x).relu()
            self.steps.append(x.stride(1))
        if self.ending == "view":  # which channels that lie last do not have
            return x.view(len(x), -1)
        if self.ending == "strided":  # which says nothing, and reads them in another order
            return x.as_strided((len(x), x[0].numel()), (x[0].numel(), 1))
        return F.max_pool2d(x, 2, 1).flatten(1)


@pytest.mark.parametrize("ending", ["view", "strided", "pooled"])
def test_channels_lie_last_where_a_model_has_no_view_of_them(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The net notes what it sees, and is not to be refused for that here.
    monkeypatch.setattr("privtune.training.mechanism.memory.state_of", lambda *_: {})
    torch.manual_seed(1)
    model = Pictured(ending).eval()
    pictures = TensorData(torch.randn(60, 1, 5, 5), torch.randint(6, (60,)))
    with torch.no_grad():
        plain = cross_entropy(model(pictures.x), pictures.y).clamp(0.0, 0.7).mean()
    model.steps.clear()
    assert exact(LOSS, model, pictures) == pytest.approx(-float(plain), rel=1e-5)
    assert (set(model.steps[-2:]) == {1}) == (ending == "pooled")
    assert model.second.weight.is_contiguous()


def test_a_model_is_left_as_it_was() -> None:
    model = Mixing().train()
    model.inner[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    exact(LOSS, model)
    assert (model.training, model.inner[1].training) == (True, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("plan", [EXACT, LOSS])
@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (DATA.y.unsqueeze(1), r"one whole number a record, shape \(N,\)"),
        (DATA.y.float(), "whole numbers|one number a record"),
    ],
)
def test_other_shapes_are_refused(plan: ScorePlan, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        score(plan, MODEL, TensorData(DATA.x, targets), rng=rng(), loss=_mean)


def test_outputs_are_one_number_a_class() -> None:
    flat = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))
    with pytest.raises(InvalidInputError, match="one number a class for each record"):
        score(EXACT, flat, DATA, rng=rng())
    with pytest.raises(InvalidInputError, match="reduction"):
        score(LOSS, MODEL, DATA, rng=rng(), loss=_mean)


@pytest.mark.parametrize("metric", ["accuracy", "auc", "f1"])
def test_one_logit_scores_as_the_two_classes_of_its_sigmoid(metric: str) -> None:
    torch.manual_seed(5)
    one, data = nn.Linear(8, 1), TensorData(DATA.x, DATA.y % 2)
    two = nn.Linear(8, 2)
    with torch.no_grad():
        for to, of in zip(two.parameters(), one.parameters(), strict=True):
            to.copy_(torch.cat([torch.zeros_like(of), of]))
    plan = replace(EXACT, metric=metric)
    found = exact(plan, one, data)
    assert found == exact(plan, two, data)
    if metric == "accuracy":
        with torch.no_grad():
            right = (one(data.x).sigmoid() > 0.5).squeeze(1).long() == data.y
        assert found == float(right.double().mean())


def _mean(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, y) if not y.is_floating_point() else outputs.mean()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).mean(dim=1))


@pytest.mark.parametrize("plan", [EXACT, LOSS])
@pytest.mark.parametrize("loss", [cross_entropy, gathered])
@pytest.mark.parametrize("fault", ["token", "class", "negative class"])
def test_a_record_that_cannot_be_used_adds_exactly_nothing(
    plan: ScorePlan, loss: Any, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Words()
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randint(5, (60, 3), generator=generator), DATA.y
    # The record is one of some that are right, so that it counts for the accuracy, too.
    place = int((model(x).argmax(dim=1) == y).nonzero()[0])
    others = torch.arange(60) != place

    def sums(x: torch.Tensor, y: torch.Tensor) -> Any:
        (found,) = released_sums(plan, model, TensorData(x, y), rng(), loss) or []
        return found

    without = sums(x[others], y[others])
    bad_x, bad_y = x.clone(), y.clone()
    if fault == "token":
        bad_x[place, 1] = 5
    else:
        bad_y[place] = 3 if fault == "class" else -1
    found = sums(bad_x, bad_y)
    assert found == pytest.approx(without, rel=1e-12)
    assert sums(x, y) != pytest.approx(found, rel=1e-6)
    assert capfd.readouterr() == ("", "")


class Wide(nn.Module):
    """Gives a record as many numbers as 16 MiB hold, on its way to two."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(x) + 0.0 * x.sum() * torch.ones(2**22).sum()
        return found


def test_records_of_large_tensors_are_scored_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A language model's logits of 512 texts fill the memory."""
    sizes: list[int] = []
    fetch = TensorData.fetch

    def counted(self: TensorData, index: torch.Tensor) -> Any:
        sizes.append(len(index))
        return fetch(self, index)

    monkeypatch.setattr(TensorData, "fetch", counted)
    x, y = torch.rand(40, 2), torch.arange(40) % 2
    model = Wide()
    wide = score(EXACT, model, TensorData(x, y), rng=Streams(bytes(32)).numpy("score")).score
    assert sizes == [16, 16, 8]
    narrow = score(EXACT, model.head, TensorData(x, y), rng=Streams(bytes(32)).numpy("score")).score
    assert sizes[3:] == [40]
    assert wide == pytest.approx(narrow)
