"""The search on a subset by shown trials: its event, its split of noise, and what its run asks for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from privtune.accounting import (
    Composed,
    Gaussian,
    Parallel,
    Repeated,
    SubsampledTuning,
    delta,
    epsilon,
    lower_bound,
)
from privtune.errors import PrivTuneError
from privtune.spaces import SearchSpace
from privtune.strategies import Everything, Fixed, SubsetSearch, make_strategy, plan_arm
from privtune.strategies.everything import selection_instead
from privtune.strategies.plan import epsilon_spent
from tests.strategies.world import BOTH, FakeRound, context

SPACE = SearchSpace.from_dict(BOTH)
FIXED = Fixed(parameters={"learning_rate": 0.5, "max_grad_norm": 1.0})
EPOCHS = {**BOTH, "epochs": {"type": "categorical", "choices": [1, 2]}}
STEP = 1.02  # of the grid of ratios


@pytest.mark.parametrize("variant", [1, 2])
def test_every_trial_and_every_score_is_charged(variant: int) -> None:
    """72 of 240 records are searched on; the final training sees the other 168, or all."""
    plan = SubsetSearch(trials=5, variant=variant).plan(context(), epsilon=2.0)
    assert plan.search is not None
    assert plan.score is not None
    (trial,) = plan.search.trainings
    tuning = SubsampledTuning(variant, 0.3, Repeated(5, trial.event), plan.training.event)
    assert plan.event == Parallel((tuning, Repeated(5, Gaussian(plan.score.noise_multiplier))))
    assert trial.part == "subset"
    assert trial.schedule.records == 72
    assert plan.training.part == {1: "rest", 2: "all"}[variant]
    assert plan.training.schedule.records == {1: 168, 2: 240}[variant]
    assert plan.rate == 0.3
    assert trial.schedule.sample_rate == plan.training.schedule.sample_rate
    assert plan.expected_gradient_evaluations == pytest.approx(
        2 * (5 * 72 + plan.training.schedule.records)
    )
    assert lower_bound(plan.event, 1e-5) <= 2.0


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("target", [1.0, 4.0])
@pytest.mark.parametrize("trials", [4, 40])
def test_the_plan_leaves_the_final_training_its_noise_and_trials_no_more_than_that_takes(
    variant: int, target: float, trials: int
) -> None:
    """Of the ratios, on a grid of 2%, the least whose final training has at most 1.1 times the noise."""
    plan = SubsetSearch(trials=trials, variant=variant).plan(context(), epsilon=target)
    one = FIXED.plan(context(), epsilon=target).training.method.noise_multiplier
    final = plan.training.method.noise_multiplier
    assert plan.search is not None
    trial = plan.search.trainings[0]
    assert final <= 1.1 * one
    assert plan.details["final_noise_ratio"] == pytest.approx(final / one, rel=2e-3)
    ratio = trial.method.noise_multiplier / final
    assert plan.details["trial_noise_ratio"] == pytest.approx(ratio, abs=1e-4)
    noise = ratio * plan.training.schedule.records / 72
    assert plan.details["trial_gradient_noise_ratio"] == pytest.approx(noise, abs=1e-3)
    alone = epsilon(trial.event, 1e-5).epsilon
    assert alone <= plan.details["trial_epsilon"] < alone + 1e-4
    assert f"{plan.details['final_noise_ratio']:.2f} times the noise" in plan.details["advice"]
    if ratio < 0.26:  # the least that is tried
        return
    # One place further down the grid, at 1.1 times the noise, would cost more than is there.
    factor = 1.1 / 1.004 * one / final
    less = trial.scaled(factor / STEP).event
    training = plan.training.scaled(factor).event
    event = SubsampledTuning(variant, 0.3, Repeated(trials, less), training)
    assert delta(event, target).delta > 1e-5


def test_a_given_split_is_followed_and_what_it_leaves_is_said() -> None:
    strategy = SubsetSearch(trials=10, rate=0.5, trial_noise=1.0, trial_epochs=1.0)
    plan = strategy.plan(context(), epsilon=2.0)
    assert plan.search is not None
    (trial,) = plan.search.trainings
    assert trial.method.noise_multiplier == pytest.approx(plan.training.method.noise_multiplier)
    assert trial.schedule.steps == 10
    assert plan.training.schedule.steps == 20
    assert plan.details["final_noise_ratio"] > 1.1
    assert "Fewer trials, a smaller rate or a larger trial_noise" in plan.details["advice"]
    quieter = SubsetSearch(trials=10, rate=0.5, trial_noise=4.0).plan(context(), epsilon=2.0)
    assert quieter.details["final_noise_ratio"] < plan.details["final_noise_ratio"]


def test_what_the_part_is_worth() -> None:
    """On all records the same trials leave the final training at least a third more noise."""
    on_part = SubsetSearch(trials=10, trial_noise=1.0).plan(context(), epsilon=1.0)
    everything = Everything(trials=11, sampler="random").plan(context(), epsilon=1.0)
    on_all = everything.training.method.noise_multiplier
    assert on_all > 1.33 * on_part.training.method.noise_multiplier
    assert isinstance(on_part.event, Parallel)
    trial, final = on_part.search.trainings[0].event, on_part.training.event
    whole = Composed((Repeated(10, trial), final))
    assert epsilon(whole, 1e-5).epsilon > 1.33


@pytest.mark.parametrize(
    ("rule", "variant", "factor"),
    [("scale-learning-rate", 1, 72 / 168), ("scale-learning-rate", 2, 0.3), ("keep", 2, 1.0)],
)
def test_all_trials_are_shown_and_the_best_one_is_trained_once_more(
    rule: str, variant: int, factor: float
) -> None:
    terms = {"variant": variant, "extrapolation": rule, "sampler": "random"}
    strategy = SubsetSearch(trials=6, **terms)
    plan = strategy.plan(context(), epsilon=2.0)
    assert plan.search is not None
    tried = plan.search.trainings[0].as_trained({"learning_rate": 3.0, "max_grad_norm": 2.0})
    assert tried == {"learning_rate": pytest.approx(3.0 * factor), "max_grad_norm": 2.0}
    trials = FakeRound(SPACE)
    outcome = trials.run(strategy, plan)
    assert [name for name, _, _ in trials.trained] == [*(f"trial-{n}" for n in range(6)), "final"]
    assert all(training == plan.search.trainings[0] for _, training, _ in trials.trained[:-1])
    assert trials.trained[-1][1] == plan.training
    assert plan.training.rate_factor == 1.0
    assert list(trials.told) == [*range(6)], "a sampler learns from each"
    assert len(outcome.trials) == 6
    best = max(outcome.trials, key=lambda trial: trial.score)
    assert outcome.result is not None
    assert outcome.result.params == best.params
    assert outcome.result.score == best.score, "the score that was paid for"
    # A selection on all records is no price of seeing trials on a part.
    assert selection_instead(plan, delta=1e-5, adjacency=context().adjacency) is None


@pytest.mark.parametrize("variant", [1, 2])
def test_what_was_spent_at_a_step_has_the_trials_in_it(variant: int) -> None:
    """They were shown before the first step of the final training."""
    public = replace(context().task, public_validation=True)
    plan = plan_arm(SubsetSearch(trials=4, variant=variant), context(task=public), epsilon=2.0)
    curve = epsilon_spent(plan, delta=1e-5, adjacency=context().adjacency)
    schedule = plan.training.schedule
    assert curve[-1] == (
        schedule.steps - 1,
        pytest.approx(epsilon(plan.event, 1e-5).epsilon, rel=1e-9),
    )
    assert plan.search is not None
    trials = Repeated(4, plan.search.trainings[0].event)
    step, spent = curve[0]
    assert step < 5
    first_steps = plan.training.method.event(replace(schedule, steps=step + 1))
    begun = SubsampledTuning(variant, 0.3, trials, first_steps)
    assert spent == pytest.approx(epsilon(begun, 1e-5).epsilon, rel=1e-9)
    assert spent > 1.5 * epsilon(first_steps, 1e-5).epsilon


def test_nothing_is_trained_where_no_candidate_has_a_finite_score() -> None:
    strategy = SubsetSearch(trials=3)
    plan = strategy.plan(context(), epsilon=2.0)
    trials = FakeRound(SPACE, score=lambda _: -math.inf)
    outcome = trials.run(strategy, plan)
    assert len(trials.trained) == 3
    assert "nothing more was trained" in outcome.note


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "space", "message"),
    [
        ({"trials": 0}, BOTH, "trials = 0: must be a whole number of at least 1"),
        ({"rate": 1.0}, BOTH, "strictly between 0 and 1"),
        ({"variant": 3}, BOTH, "must be 1 or 2"),
        ({"trial_noise": 0.0}, BOTH, "trial_noise = 0.0: must be finite and above 0"),
        ({"trial_epochs": math.inf}, BOTH, "trial_epochs = inf: must be finite and above 0"),
        ({"extrapolation": "never"}, BOTH, "must be one of auto, scale-learning-rate, keep"),
        ({"sampler": "halton"}, BOTH, "must be one of random, tpe"),
        ({"pruner": "median"}, BOTH, r"to study.optimize\(\.\.\., pruner="),
        ({}, EPOCHS, "Take it out of the space, or use subsampled-tuning"),
    ],
)
def test_a_refusal_says_why(options: dict[str, Any], space: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivTuneError, match=message) as refusal:
        make_strategy("subset-search", arm="a", options=options).plan(context(space), epsilon=2.0)
    assert "\n" not in str(refusal.value)
