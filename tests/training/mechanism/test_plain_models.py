"""Models of torch's own layers alone are told by their structure; whatever a user wrote is told apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune

from privtune.strategies import ScorePlan
from privtune.training.engine import train
from privtune.training.engine.train import TrainableCandidate, Training
from privtune.training.mechanism import scoring
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOfOutputs
from privtune.training.mechanism.plain_models import made_up_like, structure_of
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.methods import FixedDPSGD
from tests.training.simple import blobs, cross_entropy, mlp

pytestmark = pytest.mark.quick

DATA = TensorData(*blobs(60))


class Mine(nn.Linear):
    """A layer of a user's."""


class Shared(nn.Module):
    """A model of a user's own, of torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(64),
        nn.Dropout(0.2),
        nn.Linear(64, 2),
    )


def net(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3, **options), nn.ReLU(), nn.Linear(3, 3))


def tied() -> nn.Module:
    model = net()
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = net()
    model[0].weight.requires_grad_(requires_grad=False)
    return model


def twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


@pytest.mark.parametrize("make", [net, cnn, tied, frozen, twice])
def test_models_that_differ_in_numbers_alone_are_of_one_structure(
    make: Callable[[], nn.Module],
) -> None:
    assert structure_of(make()) == structure_of(make()) is not None


def test_whatever_else_differs_tells_models_apart() -> None:
    leaky = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.1), nn.Linear(3, 3))
    leakier = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.2), nn.Linear(3, 3))
    wide = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    models = [
        *(net(), net(bias=False), net(dtype=torch.float64), net().eval()),
        *(tied(), frozen(), twice(), leaky, leakier, wide, cnn()),
    ]
    structures = [structure_of(model) for model in models]
    assert None not in structures
    assert len(set(structures)) == len(models)


def hooked(method: str) -> nn.Module:
    model = net()
    getattr(model[0], method)(lambda *_: None)
    return model


def with_own_forward() -> nn.Module:
    model = net()
    model[0].forward = lambda x: x
    return model


def with_a_list() -> nn.Module:
    model = net()
    model[0].seen = [torch.zeros(1)]
    return model


def with_a_buffer_of_a_class() -> nn.Module:
    model = net()
    model[0].weight = nn.UninitializedParameter()
    return model


def with_a_hook_of_a_weight() -> nn.Module:
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize(
    "make",
    [
        Shared,
        lambda: nn.Sequential(Mine(3, 3)),
        lambda: hooked("register_forward_hook"),
        lambda: hooked("register_forward_pre_hook"),
        lambda: hooked("register_full_backward_hook"),
        with_own_forward,
        with_a_list,
        with_a_buffer_of_a_class,
        with_a_hook_of_a_weight,
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3))),
        lambda: nn.Sequential(prune.random_unstructured(nn.Linear(3, 3), "weight", amount=0.5)),
        lambda: nn.TransformerEncoderLayer(4, 2, activation=torch.sin),
    ],
)
def test_a_users_code_is_told_by_none(make: Callable[[], nn.Module]) -> None:
    assert structure_of(make()) is None


def test_a_layer_whose_class_was_patched_is_a_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", lambda _self, x: x)
    assert structure_of(net()) is None


def test_a_hook_on_all_modules_is_a_users() -> None:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert structure_of(net()) is None
    finally:
        handle.remove()
    assert structure_of(net()) is not None


def test_made_up_weights_are_always_the_same_and_the_models_own_stay() -> None:
    model = cnn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one = made_up_like(model).state_dict()
    with torch.no_grad():
        for part in model.parameters():
            part.mul_(float("nan"))
    other = made_up_like(model).state_dict()
    for name, value in one.items():
        assert torch.equal(value, other[name])
        if value.is_floating_point():
            assert (value > 0.0).all()
    assert any(not torch.equal(value, before[name]) for name, value in one.items())


class _Counting(torch.overrides.TorchFunctionMode):
    """Counts the passes through linear layers whose weights are all of a size, or larger."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least
        self.passes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and bool((args[1].detach() >= self.least).all()):
            self.passes += 1
        return func(*args, **(kwargs or {}))


def score(model: nn.Module, least: float = -math.inf) -> tuple[float, int]:
    """Return the exact accuracy of a model, and how many layers were passed on the way."""
    with _Counting(least) as counting:
        value = scoring.score(
            ScorePlan(60, None), model, DATA, rng=Streams(bytes(32)).numpy("score")
        ).score
    return value, counting.passes


def test_the_second_score_of_a_structure_passes_real_records_alone() -> None:
    scoring._ways.clear()
    torch.manual_seed(1)
    models = [mlp() for _ in range(3)]
    layers = sum(isinstance(part, nn.Linear) for part in models[0].modules())
    scores = [score(model) for model in models]
    assert scores[0][1] > 10
    assert [passes for _, passes in scores[1:]] == [layers, layers]
    for model, (value, _) in zip(models, scores, strict=True):
        right = model(DATA.x).argmax(dim=1) == DATA.y
        assert value == pytest.approx(float(right.double().mean()))


def test_how_a_candidate_is_scored_hangs_on_no_other_candidates_weights() -> None:
    """What is kept for others is found with weights that are always the same: the first has no part in it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    for part in model.parameters():
        nn.init.constant_(part, 5.0)
    scoring._ways.clear()
    _, passes = score(model, least=5.0)
    assert passes == 2


@dataclass
class Remembering:
    """A loss that keeps what it sees, as a user's may."""

    seen: ClassVar[list[float]] = []

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, targets)


def test_a_score_that_reads_the_loss_or_a_model_of_a_users_is_checked_each_time() -> None:
    scoring._ways.clear()
    own = nn.Sequential(Mine(8, 2))
    passes = [score(own)[1] for _ in range(2)]
    assert passes[0] == passes[1] > 5
    terms = ScorePlan(60, None, "gaussian", "loss", {"bound": 0.7})
    scoring.score(terms, mlp(), DATA, rng=Streams(bytes(32)).numpy("score"), loss=Remembering())
    assert not scoring._ways


def test_models_of_one_structure_are_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outcomes are those of models that are recorded each by itself."""
    recordings: list[int] = []
    program_of = train.program_of

    def counted(*arguments: Any) -> Any:
        recordings.append(1)
        return program_of(*arguments)

    def outcomes() -> list[torch.Tensor]:
        torch.manual_seed(2)
        values = {"learning_rate": 0.5, "max_grad_norm": 1.0}
        candidates = [
            TrainableCandidate(model=mlp(), secret=bytes([number]) * 32, values=values)
            for number in range(4)
        ]
        training = Training(
            FixedDPSGD(noise_multiplier=1.0),
            Schedule(60, 0.2, 5),
            LossOfOutputs(cross_entropy),
            DATA,
        )
        return [each.params for each in training.of(candidates)]

    monkeypatch.setattr(train, "program_of", counted)
    together = outcomes()
    assert len(recordings) == 1
    monkeypatch.setattr(train, "structure_of", lambda _: None)
    apart = outcomes()
    assert len(recordings) == 1 + 4
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
