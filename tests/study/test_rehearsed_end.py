"""The end of a trial is rehearsed: what cannot be scored, packed or loaded is found before the charge."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import privtune
from privtune.errors import PrivTuneError
from privtune.strategies import Everything, Fixed, PapernotSteinke, TrialResult
from privtune.study import Study
from privtune.study.stored_results import pack_result, unpack_result
from privtune.tasks import Task
from tests import toy
from tests.study.conftest import FIXED, toy_spec
from tests.study.elsewhere import OWN, TERMS
from tests.study.test_optimize import candidate, charges, make

COUNT = itertools.count()


class Weights(nn.Module):
    """A model with a parameter of the name that a flat vector has in a file."""

    def __init__(self, name: str = "weights") -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.register_parameter(name, nn.Parameter(torch.ones(8)))
        self.last = nn.Linear(8, 3)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) * getattr(self, self.name)))


def another_name() -> nn.Module:
    return Weights(f"weights_{next(COUNT)}")


def _refused(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that works in training, where gradients are recorded, and not in a score."""
    if not torch.is_grad_enabled():
        raise RuntimeError("this loss needs gradients")
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def other_names() -> Task:
    return replace(toy.blobs(), model=another_name)


def other_classes() -> Task:
    return replace(toy.blobs(), classes=2)


def no_score() -> Task:
    return replace(toy.blobs(), loss=_refused)


TASKS: dict[str, dict[str, Any]] = {
    "other_names": {},
    "other_classes": {"metric": "auc"},
    "no_score": {"metric": "loss", "bound": 3.0},
}


@pytest.mark.parametrize("what", TASKS)
def test_a_task_whose_end_fails_is_found_before_the_charge(storage: str, what: str) -> None:
    arm = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2}
    spec = toy_spec(task=f"{__name__}:{what}", arms=[arm], scoring=TASKS[what])
    with closing(Study.create(spec, storage)) as study:
        with pytest.raises((PrivTuneError, RuntimeError)):
            study.run()
        assert not study._life.charges()


def weights() -> Task:
    return replace(toy.blobs(), model=Weights)


def test_a_parameter_called_weights_is_one_of_several(storage: str) -> None:
    arms = [
        FIXED,
        {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2},
    ]
    spec = toy_spec(task=f"{__name__}:weights", arms=arms, epochs=1)
    with closing(Study.create(spec, storage)) as study:
        released = study.run()
    with closing(Study("toy", storage)) as again:
        for release in released:
            loaded = again.release(release.arm)
            model = Weights()
            assert loaded.weights.numel() == sum(p.numel() for p in model.parameters())
            model.load_state_dict(loaded.state_dict(), strict=True)
            assert torch.equal(loaded.weights, release.weights)


@pytest.mark.parametrize("shapes", [{}, {"weights": (4,)}, {"weights": (2,), "a": (2,)}])
def test_a_packed_result_is_what_is_unpacked(shapes: dict[str, tuple[int, ...]]) -> None:
    result = TrialResult(
        index=3, params={"a": (1, None)}, weights=torch.arange(4.0), score=0.5, shapes=shapes
    )
    found = unpack_result(pack_result(result))
    assert found.weights.tolist() == result.weights.tolist()
    assert (found.index, dict(found.params), found.score) == (3, {"a": (1, None)}, 0.5)


@pytest.mark.parametrize(
    "strategy", [Fixed(), PapernotSteinke(mean_runs=2), Everything(trials=2)], ids=lambda s: s.name
)
def test_a_parameter_that_no_file_can_hold_is_found_before_the_charge(
    storage: str, strategy: Any
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("__metadata__", nn.Parameter(torch.zeros(3, 6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ getattr(self, "__metadata__").T  # noqa: B009

    with pytest.raises(PrivTuneError, match="no file of a release can hold"):
        make(storage).optimize(
            privtune.make_task(lambda _: candidate(Model()), **OWN), strategy=strategy, **TERMS
        )
    assert charges(storage) == 0


class Tied(nn.Module):
    """A frozen part beside what is trained: the same every time, or drawn anew."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(6) if scale is None else torch.full((6,), scale))
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x * self.scale)


def test_what_is_not_trained_must_be_the_same_every_time(storage: str) -> None:
    study = make(storage)
    with pytest.raises(PrivTuneError, match="what is not trained must be the same every time"):
        study.optimize(
            privtune.make_task(lambda _: candidate(Tied(None)), **OWN), strategy=Fixed(), **TERMS
        )
    assert charges(storage) == 0
    release = study.optimize(
        privtune.make_task(lambda _: candidate(Tied(0.5)), **OWN), strategy=Fixed(), **TERMS
    )
    assert torch.equal(release.model.scale, torch.full((6,), 0.5))
    assert torch.equal(release.model.last.weight.flatten(), release.weights[:18])


def test_what_is_trained_must_reach_the_loss(storage: str) -> None:
    def apart(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sum(dim=1) - y) ** 2 + 0.0 * model(x).sum(dim=1)

    with pytest.raises(PrivTuneError, match="does not reach"):
        make(storage).optimize(
            privtune.make_task(lambda _: candidate(nn.Linear(6, 3)), **{**OWN, "loss": apart}),
            strategy=Fixed(),
            **TERMS,
        )
    assert charges(storage) == 0
