from __future__ import annotations

import json
from typing import Any

import numpy as np
import optuna
import pytest
from scipy import stats

from privtune.errors import InvalidInputError
from privtune.public_priors import public_law
from privtune.spaces import (
    DependentSamplerError,
    LogNormal,
    SearchSpace,
    require_independent_sampler,
)
from privtune.study.spec import SpecError
from privtune.training.mechanism.streams import Streams
from tests.study.conftest import toy_spec
from tests.tiers import ROOT

pytestmark = pytest.mark.quick

RIGHT = {"learning_rate": 0.5, "max_grad_norm": 1.0}

SPACE = SearchSpace.from_dict(
    {
        "learning_rate": {"type": "float", "low": 1e-2, "high": 10.0, "log": True},
        "layers": {"type": "int", "low": 1, "high": 4},
        "optimizer": {"type": "categorical", "choices": ["sgd", "adam"]},
    }
)


@pytest.mark.parametrize(
    "sampler",
    [
        optuna.samplers.TPESampler(),
        optuna.samplers.GridSampler({"x": [1, 2]}),
        # Made without their constructors, which warn that they are experimental or need a package.
        *(
            cls.__new__(cls)
            for cls in (
                optuna.samplers.BruteForceSampler,
                optuna.samplers.QMCSampler,
                optuna.samplers.GPSampler,
                optuna.samplers.CmaEsSampler,
            )
        ),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_only_the_random_sampler_is_independent(sampler: optuna.samplers.BaseSampler) -> None:
    with pytest.raises(DependentSamplerError, match=type(sampler).__name__):
        require_independent_sampler(sampler)


def test_a_subclass_of_the_random_sampler_may_do_anything_and_is_refused() -> None:
    class Sneaky(optuna.samplers.RandomSampler):
        pass

    require_independent_sampler(optuna.samplers.RandomSampler())
    with pytest.raises(DependentSamplerError):
        require_independent_sampler(Sneaky())


def draw(secret: bytes, count: int) -> list[dict]:
    return [SPACE.draw(Streams(secret), index) for index in range(count)]


def test_a_candidate_depends_on_the_secret_and_its_index_alone() -> None:
    assert draw(b"a" * 32, 5)[3] == draw(b"a" * 32, 4)[3]
    assert draw(b"a" * 32, 1) != draw(b"b" * 32, 1)


@pytest.mark.statistical
def test_candidates_follow_their_distribution_and_are_uncorrelated() -> None:
    # Two tests at level 1e-3 each, fixed secret.
    drawn = draw(b"c" * 32, 600)
    logs = np.log([d["learning_rate"] for d in drawn])
    assert stats.kstest(logs, "uniform", args=(np.log(1e-2), np.log(1e3))).pvalue > 1e-3
    assert stats.pearsonr(logs[:-1], logs[1:]).pvalue > 1e-3
    # And power: the same test rejects a law that is off by a quarter of its width.
    assert stats.kstest(logs, "uniform", args=(np.log(1e-2), 0.75 * np.log(1e3))).pvalue < 1e-6


def test_a_public_prior_is_made_of_what_was_best_on_public_data() -> None:
    text = (ROOT / "privtune/public-priors.json").read_text("utf-8")
    methods = json.loads(text)["laws"]["learning_rate"]
    assert sorted(methods) == ["dp-adam", "dpsgd"]
    for falls in methods.values():
        assert sorted(falls) == ["constant", "falling"]
        for shipped in falls.values():
            logs = np.log([row["learning_rate"] for row in shipped["rows"]])
            assert len(logs) >= 10
            law = shipped["law"]
            assert law["median"] == pytest.approx(np.exp(logs.mean()), rel=5e-3)
            assert law["sigma"] == pytest.approx(np.hypot(logs.std(ddof=1), np.log(4)), rel=5e-3)
    law = methods["dpsgd"]["constant"]["law"]
    space = {"learning_rate": {"prior": "public"}}
    assert SearchSpace.from_dict(space).distributions == {
        "learning_rate": LogNormal(median=law["median"], sigma=law["sigma"])
    }
    # What is stored is the law itself, whatever a later version ships.
    assert toy_spec(space=space).model_dump()["space"] == {"learning_rate": law}


SEARCH = {"strategy": "papernot-steinke", "mean_runs": 2, "parameters": {"max_grad_norm": 1.0}}
PUBLIC = {"learning_rate": {"prior": "public"}}


@pytest.mark.parametrize(
    ("arm", "method", "schedule"),
    [
        ({}, "dpsgd", "constant"),
        ({"options": {"schedule": "cosine"}}, "dpsgd", "linear"),
        ({"method": "dp-adam"}, "dp-adam", "constant"),
        ({"method": "dp-adam", "options": {"schedule": "linear"}}, "dp-adam", "linear"),
        (
            {
                "method": "dp-adam",
                "parameters": {"max_grad_norm": 1.0, "schedule": "cosine"},
            },
            "dp-adam",
            "linear",
        ),
        (
            {
                "parameters": {},
                "candidates": [
                    {"method": "hyfreedp"},
                    {"method": "dpsgd", "parameters": {"learning_rate": 1.0, "max_grad_norm": 1.0}},
                    {"method": "dp-adam", "parameters": {"max_grad_norm": 1.0}},
                ],
            },
            "dp-adam",
            "constant",
        ),
    ],
)
def test_a_public_prior_is_of_the_method_that_is_searched(
    arm: dict[str, Any], method: str, schedule: str
) -> None:
    """Rates that suit SGD are forty times those that suit Adam."""
    fixed = {"name": "b", "strategy": "fixed", "method": "dpsgd", "parameters": RIGHT}
    spec = toy_spec(space=PUBLIC, arms=[{**SEARCH, "name": "a", **arm}, fixed])
    text = (ROOT / "privtune/public-priors.json").read_text("utf-8")
    fall = "constant" if schedule == "constant" else "falling"
    law = json.loads(text)["laws"]["learning_rate"][method][fall]["law"]
    assert spec.space == {"learning_rate": law}
    assert spec.search_space() == SearchSpace(
        {"learning_rate": LogNormal(law["median"], law["sigma"])}
    )


@pytest.mark.parametrize(
    ("arms", "space", "says"),
    [
        (
            [{"method": "automatic-clipping", "parameters": {}}],
            {},
            "methods dpsgd and dp-adam alone",
        ),
        ([{"options": {"schedule": "step"}}], {}, "schedules constant, linear, cosine alone"),
        (
            [{"method": "dp-adam", "options": {"noise_floor": 0.1}}],
            {},
            "dpsgd and dp-adam alone, not 'dp-adam with noise_floor'",
        ),
        ([{}, {"method": "dp-adam"}], {}, "they differ in method or schedule"),
        (
            [{"method": "dp-adam"}, {"method": "dp-adam", "options": {"noise_floor": 0.1}}],
            {},
            "they differ in method or schedule",
        ),
        ([{}, {"options": {"schedule": "linear"}}], {}, "they differ in method or schedule"),
        (
            [{}],
            {"schedule": {"type": "categorical", "choices": ["constant", "linear"]}},
            "they differ in method or schedule",
        ),
        ([{}], {"learning_rate": {"prior": "public", "low": 1.0}}, "takes prior, method, schedule"),
        ([{}], {"learning_rate": {"prior": "mine"}}, "must be public"),
        ([{}], {"max_grad_norm": {"prior": "public"}}, "shipped for learning_rate alone"),
    ],
)
def test_a_public_prior_of_what_was_not_measured_is_refused(
    arms: list[dict[str, Any]], space: dict[str, Any], says: str
) -> None:
    named = [{**SEARCH, "name": f"a{n}", **arm} for n, arm in enumerate(arms)]
    with pytest.raises(SpecError, match=says) as caught:
        toy_spec(space={**PUBLIC, **space}, arms=named)
    sentence = str(caught.value)
    assert sentence.startswith("Study spec, space: ")
    assert "\n" not in sentence


def test_a_spec_may_say_which_public_prior_is_meant() -> None:
    floored = {"method": "dp-adam", "options": {"noise_floor": 0.1}}
    arms = [{**SEARCH, "name": "a"}, {**SEARCH, "name": "b", **floored}]
    space = {"learning_rate": {"prior": "public", "method": "dp-adam", "schedule": "linear"}}
    spec = toy_spec(space=space, arms=arms)
    assert spec.space == {"learning_rate": public_law("learning_rate", "dp-adam", "linear")}


def test_priors_of_a_spec_are_drawn_inside_their_support() -> None:
    space = SearchSpace.from_dict(
        {
            "rate": {"type": "log_normal", "median": 0.1, "sigma": 1.0, "low": 0.01, "high": 1.0},
            "clip": {
                "type": "mixture",
                "weights": [3, 1],
                "components": [
                    {"type": "float", "low": 0.1, "high": 0.2},
                    {"type": "log_normal", "median": 5.0, "sigma": 0.1},
                ],
            },
        }
    )
    streams = Streams(bytes(32))
    drawn = [space.draw(streams, n) for n in range(400)]
    rates = np.array([d["rate"] for d in drawn])
    assert rates.min() >= 0.01
    assert rates.max() <= 1.0
    # The median of 400 log-normal draws: standard error 0.063 in the logarithm, tested at five.
    assert abs(np.log(np.median(rates)) - np.log(0.1)) < 0.32
    small = np.mean([d["clip"] < 1.0 for d in drawn])
    assert 0.65 < small < 0.85, "three in four come from the first component"
    assert drawn[3] == space.draw(streams, 3)


def test_a_sampler_of_ones_own_declares_independence_and_stays_in_the_space() -> None:
    class Mine:
        independent = True

        def draw(self, rng: np.random.Generator) -> dict:
            return {"learning_rate": 3.0, "layers": 99, "optimizer": "sgd"}

    class Silent(Mine):
        independent = False

    with pytest.raises(DependentSamplerError, match="does not declare"):
        SearchSpace(SPACE.distributions, Silent())
    with pytest.raises(InvalidInputError, match="must draw layers"):
        SearchSpace(SPACE.distributions, Mine()).draw(Streams(bytes(32)), 0)
