"""Plans with correlated noise: the number of steps, what is charged, and what refuses it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from privtune.accounting import Adjacency, epsilon
from privtune.errors import InvalidInputError
from privtune.strategies import (
    Auto,
    DPHyper,
    Everything,
    Fixed,
    LinearScaling,
    PapernotSteinke,
    Plan,
    Strategy,
    SubsampledTuning,
    SubsetSearch,
    bands,
    make_strategy,
    plan_arm,
)
from privtune.strategies.bands import best_bands, error_of_sums
from privtune.strategies.describe import plan_line
from privtune.study.planning import plan_study
from privtune.study.spec import StudySpec
from privtune.training.mechanism.banded import prefix_error
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.methods import FixedDPSGD
from tests.strategies.world import BOTH, RATE, context

CLIP = {"max_grad_norm": 1.0}
FIXED = Fixed(parameters={"learning_rate": 0.5, **CLIP})
MNIST = Schedule.from_epochs(records=60_000, expected_batch_size=512, epochs=10)
AUTO = NoiseOptions(correlation="banded")
FOUR = NoiseOptions(correlation="banded", bands=4)


def test_auto_takes_the_number_with_the_least_error() -> None:
    """At ε = 4 the error of sums falls to 0.61; neighbours of the grid are no better, by their own noise."""
    terms: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5}
    plan = plan_arm(FIXED, context(BOTH, schedule=MNIST, noise=AUTO), epsilon=4.0)
    schedule = plan.training.schedule
    assert schedule == replace(MNIST, bands=16)
    assert plan.training.noise == NoiseOptions(correlation="banded", bands=16)
    assert plan.noise_note == "noise: fast, plain, correlated over 16 steps"
    plain = FixedDPSGD.for_budget(MNIST, **terms).noise_multiplier * prefix_error(1, MNIST.steps)
    share = error_of_sums(plan.training) / plain
    assert share == pytest.approx(0.609, abs=2e-3)
    assert plan.details["error_of_sums"] == pytest.approx(share, rel=1e-3)
    for other in (12, 24):
        banded = FixedDPSGD.for_budget(replace(MNIST, bands=other), **terms)
        assert banded.noise_multiplier * prefix_error(other, MNIST.steps) > share * plain
    guarantee = epsilon(plan.event, 1e-5)
    assert 3.99 < guarantee.epsilon <= 4.0
    assert "noise correlated over 16 steps" in plan_line(plan, guarantee)
    read = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert read.digest() == plan.digest()
    assert read.training == plan.training


@pytest.mark.parametrize(("batch", "target"), [(4096, 1.0), (8192, 2.0), (60_000, 4.0)], ids=str)
def test_auto_takes_independent_noise_where_nothing_is_won(batch: int, target: float) -> None:
    schedule = Schedule.from_epochs(records=60_000, expected_batch_size=batch, epochs=10)
    plan = plan_arm(FIXED, context(BOTH, schedule=schedule, noise=AUTO), epsilon=target)
    plain = plan_arm(FIXED, context(BOTH, schedule=schedule), epsilon=target)
    assert plan == plain
    assert plan.digest() == plain.digest()


def test_a_plan_is_the_same_whether_its_bands_were_chosen_before() -> None:
    """The searches for other bands must not move where the search for the arm's noise begins."""
    arm = {"name": "arm", "strategy": "fixed", "parameters": {"learning_rate": 0.5, **CLIP}}
    spec = StudySpec.parse(
        {
            "name": "bands",
            "task": "digits-mlp",
            "budget": {"name": "bands", "epsilon": 8.0, "delta": 1e-5},
            "arms": [arm],
            "epochs": 2,
            "expected_batch_size": 32,
            "noise": {"correlation": "banded"},
        }
    )
    digests = []
    best_bands.cache_clear()
    for _ in range(2):  # the second time the choice is read from a cache
        (plan,) = plan_study(spec).plans
        assert plan.training.schedule.bands > 1
        digests.append(plan.digest())
    assert digests[0] == digests[1]


def test_auto_leaves_methods_alone_that_divide_by_the_noise_of_a_step() -> None:
    adam = Fixed(method="dp-adam", parameters={"learning_rate": 0.006, **CLIP})
    plan = plan_arm(adam, context(BOTH, schedule=MNIST, noise=AUTO), epsilon=4.0)
    assert plan.training.schedule.bands == 1
    given = plan_arm(adam, context(BOTH, schedule=MNIST, noise=FOUR), epsilon=4.0)
    assert given.training.schedule.bands == 4


def test_a_choice_that_is_worse_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides is the arm's own noise, and not that of a training alone, by which bands are searched."""
    monkeypatch.setattr(bands, "best_bands", lambda *_, **__: 8)
    schedule = Schedule.from_epochs(records=60_000, expected_batch_size=4096, epochs=10)
    plan = plan_arm(FIXED, context(BOTH, schedule=schedule, noise=AUTO), epsilon=1.0)
    assert plan.training.schedule.bands == 1


def test_the_search_ends_at_the_rate_of_the_largest_batch() -> None:
    terms: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}
    assert best_bands(MNIST, most=117, **terms) == 32
    assert best_bands(MNIST, most=10, **terms) == 8
    assert best_bands(replace(MNIST, steps=5), most=117, **terms) <= 5


CASES: list[tuple[Strategy, dict[str, Any]]] = [
    (FIXED, BOTH),
    (Fixed(method="dp-adam", parameters={"learning_rate": 0.5, **CLIP}), BOTH),
    (PapernotSteinke(mean_runs=4), BOTH),
    (PapernotSteinke(mean_runs=4, guarantee="common"),
     {**BOTH, "expected_batch_size": {"type": "categorical", "choices": [24, 48]}}),
    (SubsampledTuning(variant=1, mean_runs=4), BOTH),
    (SubsetSearch(trials=4, rate=0.2), BOTH),
    (DPHyper(mean_runs=4), BOTH),
    (Everything(trials=4, sampler="random"), BOTH),
    (LinearScaling(trials=2, parameters=CLIP), RATE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "space"), CASES, ids=lambda v: v.name if hasattr(v, "name") else ""
)
def test_every_strategy_charges_what_it_trains(strategy: Strategy, space: dict) -> None:
    plan = plan_arm(strategy, context(space, noise=FOUR), epsilon=2.0)
    assert 1.97 < epsilon(plan.event, 1e-5).epsilon <= 2.0
    trainings = [plan.training, *(plan.search.trainings if plan.search else ())]
    text = json.dumps(plan.event.to_dict())
    for training in trainings:
        schedule = training.schedule
        assert schedule.bands == 4
        assert training.noise.bands == 4
        event = training.event.to_dict()
        assert event["count"] == -(-schedule.steps // 4)
        assert event["event"]["rate"] == pytest.approx(4 * schedule.sample_rate)
        assert json.dumps(event) in text
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).digest() == plan.digest()


@pytest.mark.parametrize("noise", [AUTO, FOUR], ids=["auto", "four"])
@pytest.mark.parametrize("name", ["hyfreedp", "adadp", "quantile-clipping", "dog"])
def test_methods_that_adapt_refuse_with_a_sentence(name: str, noise: NoiseOptions) -> None:
    options: dict[str, Any] = {}
    if name in ("adadp", "quantile-clipping"):
        options["parameters"] = {"max_grad_norm" if name == "adadp" else "learning_rate": 1.0}
    strategy = make_strategy(name, arm=name, options=options)
    with pytest.raises(InvalidInputError, match=f"alike in every step; {name} is none"):
        plan_arm(strategy, context(noise=noise), epsilon=2.0)
    with pytest.raises(InvalidInputError, match="alike in every step; hyfreedp is none"):
        plan_arm(Auto(), context(noise=noise, schedule=MNIST), epsilon=4.0)


def test_too_many_bands_for_the_batch_are_refused() -> None:
    many = NoiseOptions(correlation="banded", bands=11)
    with pytest.raises(InvalidInputError, match=r"at most 10 at sample rate 0\.1"):
        plan_arm(FIXED, context(noise=many), epsilon=2.0)


def test_one_band_is_the_plan_as_it_is() -> None:
    one = NoiseOptions(correlation="banded", bands=1)
    assert plan_arm(FIXED, context(noise=one), epsilon=2.0) == plan_arm(
        FIXED, context(), epsilon=2.0
    )
