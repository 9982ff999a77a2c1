"""What may be suggested: what is released, and loaded again, is what the function was given."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
import typing
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn

import privtune
from privtune.errors import InvalidInputError
from privtune.spaces import LogNormal, Prior, SearchSpace, plain
from privtune.strategies import Everything, Fixed, PapernotSteinke
from privtune.study import Study
from privtune.study.trial import _PLANNED
from privtune.training.methods import METHODS
from privtune.views.comparison import comparison_document
from tests.study.conftest import toy_spec
from tests.study.elsewhere import OWN, TERMS
from tests.study.test_optimize import charges, make, started

STRATEGIES = [Fixed(), PapernotSteinke(mean_runs=3), Everything(trials=3)]


class Colour(enum.Enum):
    RED = 1


class Pair(typing.NamedTuple):
    width: int
    depth: int


@dataclasses.dataclass(frozen=True)
class Options:
    width: int = 4


WRONG: dict[str, list[Any]] = {
    "classes": [nn.ReLU, nn.Tanh],
    "modules": [nn.ReLU(), nn.Tanh()],
    "functions": [torch.relu, torch.tanh],
    "enums": list(Colour),
    "dtypes": [torch.float32, torch.float64],
    "numpy types": [np.float32],
    "tensors": [torch.tensor(1.0)],
    "arrays": [np.zeros(2)],
    "sets": [{1, 2}],
    "dicts": [{"width": 4}],
    "lists": [[64, 32], [16]],
    "named tuples": [Pair(4, 2)],
    "dataclasses": [Options()],
    "objects": [object()],
    "bytes": [b"relu"],
    "long doubles": [np.longdouble(1)],
    "numpy dates": [np.datetime64("2020-01-01")],
    "huge numbers": [10**400],
    "NULs": ["a\0b"],
    "one among good ones": ["relu", 1, None, nn.ReLU],
}


def trained(trial: privtune.Trial) -> privtune.Candidate:
    model = nn.Linear(6, 3)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), 0.5))


@pytest.mark.parametrize("what", WRONG)
def test_what_no_file_can_hold_is_no_choice(what: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^space\.act"):
        SearchSpace.from_dict({"act": {"type": "categorical", "choices": WRONG[what]}})


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_what_no_file_can_hold_is_refused_before_the_charge(storage: str, strategy: Any) -> None:
    def build(trial: privtune.Trial) -> privtune.Candidate:
        trial.suggest_categorical("act", WRONG["one among good ones"])
        return trained(trial)

    with pytest.raises(InvalidInputError, match=r"^act") as refused:
        make(storage).optimize(privtune.make_task(build, **OWN), strategy=strategy, **TERMS)
    assert "\n" not in str(refused.value)
    assert charges(storage) == 0


@pytest.mark.parametrize("what", ["classes", "functions", "enums", "dtypes", "sets", "objects"])
def test_the_form_to_write_instead_is_named(what: str) -> None:
    form = r"suggest_categorical\('act', \['relu', 'tanh'\]\)"
    for choice in WRONG[what]:
        with pytest.raises(InvalidInputError, match=form):
            plain("act", choice)
    with pytest.raises(InvalidInputError, match="Write a tuple"):
        plain("act", [1])


@pytest.mark.parametrize("choices", [{1, 2}, {"a": 1}, "relu", 3, iter([1]), ()])
def test_choices_have_an_order(storage: str, choices: Any) -> None:
    """The order of a set of texts differs from process to process, and so would what is drawn."""

    def build(trial: privtune.Trial) -> privtune.Candidate:
        trial.suggest_categorical("act", choices)
        return trained(trial)

    with pytest.raises(InvalidInputError, match=r"^act"):
        make(storage).optimize(privtune.make_task(build, **OWN), strategy=Fixed(), **TERMS)
    assert charges(storage) == 0


def same(one: Any, other: Any) -> bool:
    """Compare values with their types; a number that is none is like itself."""
    return repr(one) == repr(other) and type(one) is type(other)


RIGHT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "numbers of a range": (np.arange(4, 8), (4, 5, 6, 7)),
    "single floats": ([np.float32(0.5), np.float32(0.25)], (0.5, 0.25)),
    "tuples": ([(64, 32), (16,)], ((64, 32), (16,))),
    "nested tuples": ([((np.int64(1), "a"), None)], (((1, "a"), None),)),
    "nothing and switches": ([None, True, False], (None, True, False)),
    "equal but different": ([1, True, 1.0], (1, True, 1.0)),
    "the same twice": ([1, 1, 2], (1, 1, 2)),
    "not finite": ([math.inf, -math.inf], (math.inf, -math.inf)),
    "no number": ([math.nan], (math.nan,)),
    "other scripts": (["é", "e\u0301", "シ"], ("é", "e\u0301", "シ")),
}


class Single(Prior):
    """A prior of a user's own that draws what NumPy draws."""

    distribution = optuna.distributions.FloatDistribution(0.0, 1.0)

    def draw(self, rng: np.random.Generator) -> Any:
        return np.float32(rng.random())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_what_is_suggested_is_what_is_released_and_loaded(storage: str, strategy: Any) -> None:
    """Choices of every kind, and priors and bounds of NumPy's, whose values are Python's."""
    given: list[dict[str, Any]] = []

    def build(trial: privtune.Trial) -> privtune.Candidate:
        values = {what: trial.suggest_categorical(what, RIGHT[what][0]) for what in RIGHT}
        for what, value in values.items():
            assert same(trial.suggest_categorical(what, RIGHT[what][0]), value)
        given.append(values)
        numbers = [
            trial.suggest("single", Single()),
            trial.suggest("rate", LogNormal(median=np.float64(1e-3), sigma=1.0)),
            trial.suggest_float("low", np.float32(0.5), np.float64(1.0)),
            trial.suggest_float("step", 0.0, 1.0, step=np.float32(0.25)),
            trial.suggest_int("width", np.int64(4), np.int64(8), step=np.int64(2)),
        ]
        assert [type(value) for value in numbers] == [float] * 4 + [int]
        return trained(trial)

    def known(params: Any) -> bool:
        return all(any(same(params[what], c) for c in RIGHT[what][1]) for what in RIGHT)

    study = make(storage, seed=4)
    release = study.optimize(privtune.make_task(build, **OWN), strategy=strategy, **TERMS)
    assert all(known(params) for params in (release.params, *given))
    assert {type(v) for n, v in release.params.items() if n not in RIGHT} == {float, int}
    with closing(Study("loop", storage, curator=True)) as again:
        loaded = again.release(strategy.name)
        assert same(loaded.params, release.params)
        for one, other in zip(loaded.trials, release.trials, strict=True):
            assert same(one.params, other.params)
        json.dumps(again.export(), allow_nan=False)
        json.dumps(comparison_document(again), allow_nan=False)
        for trial in again.sealed_trials(strategy.name):
            for what, (_, expected) in RIGHT.items():
                found = trial["params"][what]
                assert found in expected or found != found  # Optuna has no other NaN


def test_a_resumed_trial_has_the_tuple_that_it_was_given(storage: str) -> None:
    """Optuna's storage gives lists back: of the trials before, and of the one that was stopped."""
    seen: list[Any] = []

    def build(trial: privtune.Trial) -> privtune.Candidate:
        widths = trial.suggest_categorical("widths", [(64, 32), (16,), (8, (4, "x"))])
        assert isinstance(widths, tuple)
        if begun:
            seen.append(widths)
            if len(seen) == 3:
                raise ValueError("stopped in mid-trial")
        return trained(trial)

    begun: list[bool] = []
    study = make(storage, seed=4)
    arguments = {"strategy": Everything(trials=5, sampler="tpe"), "observer": started(begun)}
    task = privtune.make_task(build, **OWN)
    with pytest.raises(privtune.PrivTuneError):
        study.optimize(task, **arguments, **TERMS)
    study.close()
    begun.clear()
    with closing(Study("loop", storage)) as again:
        release = again.optimize(task, **arguments, **TERMS)
    drawn = [trial.params["widths"] for trial in release.trials]
    assert len(drawn) == 5
    assert all(isinstance(widths, tuple) for widths in drawn)
    assert seen[:2] + seen[3:] == drawn
    assert seen[2] == seen[3]
    with closing(Study("loop", storage, curator=True)) as curated:
        assert [t.params["widths"] for t in curated.trials] == drawn


def test_a_declared_space_is_read_likewise() -> None:
    space = SearchSpace.from_dict(
        {
            "learning_rate": {"type": "float", "low": np.float32(0.5), "high": np.float64(5.0)},
            "width": {"type": "categorical", "choices": np.arange(4, 8)},
            "heavy": {"type": "categorical", "choices": [np.bool_(True), np.bool_(False)]},
        }
    )
    assert space["width"].choices == (4, 5, 6, 7)  # type: ignore[attr-defined]
    assert {type(c) for c in space["heavy"].choices} == {bool}  # type: ignore[attr-defined]
    spec = toy_spec(space={"learning_rate": {"type": "categorical", "choices": np.array([0.5, 1])}})
    json.dumps(spec.model_dump(mode="json"), allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_declared_choice_is_finite(value: float) -> None:
    """JSON, in which specs are stored, has no other numbers."""
    with pytest.raises(InvalidInputError, match="finite"):
        SearchSpace.from_dict({"act": {"type": "categorical", "choices": [1.0, value]}})


@pytest.mark.parametrize("name", [3, "", "x" * 600, "a\0b"])
def test_a_name_is_a_text_that_can_be_kept(storage: str, name: Any) -> None:
    def build(trial: privtune.Trial) -> privtune.Candidate:
        trial.suggest_float(name, 0.0, 1.0)
        return trained(trial)

    with pytest.raises(InvalidInputError, match="name of a hyperparameter"):
        make(storage).optimize(
            privtune.make_task(build, **OWN), strategy=Everything(trials=2), **TERMS
        )
    assert charges(storage) == 0


SUGGEST: dict[str, Callable[[privtune.Trial, str], Any]] = {
    "float": lambda trial, name: trial.suggest_float(name, 0.5, 4.0),
    "int": lambda trial, name: trial.suggest_int(name, 1, 4),
    "categorical": lambda trial, name: trial.suggest_categorical(name, [16, 32]),
    "prior": lambda trial, name: trial.suggest(name, LogNormal(median=1.0, sigma=1.0)),
}


NAMES = [
    "expected_batch_size", "steps", "noise_multiplier", "delta", "BATCH SIZE", "nEpochs", "sigma",
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), list(zip(NAMES, itertools.cycle(SUGGEST))))
def test_what_belongs_to_the_plan_is_not_suggested(storage: str, name: str, kind: str) -> None:
    def build(trial: privtune.Trial) -> privtune.Candidate:
        SUGGEST[kind](trial, name)
        return trained(trial)

    with pytest.raises(InvalidInputError, match="belongs to the plan") as refused:
        make(storage).optimize(privtune.make_task(build, **OWN), strategy=STRATEGIES[1], **TERMS)
    assert "study.optimize" in refused.value.remedy
    assert charges(storage) == 0


def test_no_method_leaves_open_what_belongs_to_the_plan() -> None:
    left = {name for method in METHODS.values() for name in method.parameters}
    assert not {name.replace("_", "") for name in left} & _PLANNED
