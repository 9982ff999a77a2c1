"""Scores of declared mechanisms: one that cannot run is refused before the charge, and others run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import privtune
from privtune.errors import InvalidInputError
from privtune.strategies import Everything
from privtune.study.declared_arms import DeclaredTrial
from tests.study.test_declared import (
    SELECTION,
    Objective,
    X,
    Y,
    descend,
    make,
    optimize,
    spent,
)


def hinge(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")


def without_target(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x).flatten(1).float() - x).square().mean(dim=1)


def two_parts(model: Any, x: torch.Tensor, more: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).float()[:, 0] - more[:, 0] - y).abs()


def raises_at_once(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not written yet")


def raises_after_the_model(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model(x)
    raise RuntimeError("not written yet")


def names_nothing(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x) - undefined  # type: ignore[no-any-return]  # noqa: F821


def of_a_batch(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return hinge(model, x, y).mean()


def of_floats(model: Any, x: torch.Tensor, y: torch.Tensor) -> float:
    return 0.5


def calls_a_field(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.logits - model(x)  # type: ignore[no-any-return, attr-defined]


def scored(function: Any) -> privtune.Score:
    return privtune.Score(function, bound=2.0)


FLOATS = X[240:], Y[240:].astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"validation": X[240:]},
        {"validation": (X[240:], Y[240:, None])},
        {"validation": FLOATS},
        {"validation": FLOATS, "score": "auc"},
        {"validation": FLOATS, "score": scored(hinge)},
        {"validation": (X[240:], X[240:], Y[240:])},
        {"validation": X[240:], "score": scored(hinge)},
        {"score": scored(without_target)},
        {"score": scored(two_parts)},
        {"score": scored(raises_at_once)},
        {"score": scored(raises_after_the_model)},
        {"score": scored(names_nothing)},
        {"score": scored(of_a_batch)},
        {"score": scored(of_floats)},
        {"score": scored(calls_a_field)},
        {"score": scored(lambda model: model)},
        {"validation": None, "public": {"validation": X[240:]}},
    ],
)
@pytest.mark.parametrize("strategy", [SELECTION, Everything(trials=2)], ids=lambda s: s.name)
def test_a_score_that_cannot_run_is_refused_before_the_charge(
    strategy: Any, options: dict[str, Any], storage: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        optimize(make(storage), strategy=strategy, **options)
    assert "\n" not in str(refused.value)
    assert spent(storage) == 0


def of_outputs(shape: tuple[int, ...]) -> Objective:
    """Return an objective whose model has outputs of a shape for one record."""

    def train(trial: DeclaredTrial) -> Any:
        w = descend(trial, trial.suggest_float("rate", 0.1, 5.0))
        count = int(np.prod(shape))

        def model(x: np.ndarray) -> np.ndarray:
            return np.repeat(x @ w, count).reshape(len(x), *shape)

        return trial.result({"w": w}, score=trial.score(model))

    return train


class Named(torch.nn.Module):
    """A model of one's own, with outputs that are no tensor and parts that scores ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 4)
        self.head = torch.nn.Linear(4, 37)

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.body(x)), loss=None)

    def pair(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.body(x)


def late(trial: DeclaredTrial) -> Any:
    trial.suggest_float("rate", 0.1, 5.0)
    trial.plan  # noqa: B018
    model = Named()
    return trial.result(model, score=trial.score(model))


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (of_outputs((2,)), {"score": scored(hinge)}),
        (of_outputs((3,)), {"validation": X[240:], "score": scored(without_target)}),
        (of_outputs((2,)), {"validation": (X[240:], X[240:], Y[240:]), "score": scored(two_parts)}),
        (late, {"score": scored(lambda m, x, y: m(x).logits[:, 36].abs())}),
        (late, {"score": scored(lambda m, x, y: m(x).logits.view(1, 37)[:, 0] ** 2)}),
        (late, {"score": scored(lambda m, x, y: sum(m.pair(x)).sum(dim=1))}),
        (late, {"score": scored(lambda m, x, y: m.head(m.body(x)).mean(dim=1))}),
        (late, {"score": scored(lambda m, x, y: {"a": m(x).logits}["a"][:, 3])}),
    ],
)
def test_scores_of_whatever_models_run(
    function: Objective, options: dict[str, Any], storage: str
) -> None:
    release = optimize(make(storage), function, **options)
    assert release.score is not None
    assert np.isfinite(release.score)


def test_the_model_that_an_objective_holds_is_tried(storage: str) -> None:
    """No stand-in has such outputs: what the objective holds decides."""

    def early(trial: DeclaredTrial) -> Any:
        trial.suggest_float("rate", 0.1, 5.0)
        model = Named()
        trial.plan  # noqa: B018
        return trial.result(model, score=trial.score(model))

    def wide(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x).logits[:, 50]  # type: ignore[no-any-return]

    with pytest.raises(InvalidInputError, match="IndexError"):
        optimize(make(storage), early, score=scored(wide))
    assert spent(storage) == 0
    optimize(
        make(storage, load_if_exists=True), early, score=scored(lambda m, x, y: m(x).logits[:, 36])
    )
