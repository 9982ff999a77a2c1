"""What strategies do with their rounds, on rounds that train nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from privtune.accounting import (
    Event,
    Parallel,
    PrivateSelection,
    Repeated,
    ThresholdSelection,
    epsilon,
)
from privtune.errors import InvalidInputError
from privtune.spaces import SearchSpace
from privtune.strategies import (
    DPHyper,
    Everything,
    LinearScaling,
    LiuTalwar,
    NonPrivateGrid,
    PapernotSteinke,
    Plan,
    StrategyError,
    SubsampledTuning,
)
from privtune.strategies.tuning import extrapolate
from privtune.training.mechanism.schedule import Schedule
from tests.strategies.world import BOTH, RATE, FakeRound, context

SPACE = SearchSpace.from_dict(BOTH)


def test_the_best_is_released() -> None:
    trials = FakeRound(SPACE, count=20)
    outcome = trials.run(PapernotSteinke(), PapernotSteinke().plan(context(), epsilon=2.0))
    scores = [-abs(math.log(SPACE.draw(trials.streams, n)["learning_rate"])) for n in range(20)]
    assert outcome.result is not None
    assert outcome.result.score == max(scores)
    assert outcome.trials == ()


@pytest.mark.parametrize("strategy", [PapernotSteinke(law="poisson", mean_runs=1.5)])
def test_no_run_at_all_is_a_release_of_nothing(strategy: PapernotSteinke) -> None:
    outcome = FakeRound(SPACE, count=0).run(strategy, strategy.plan(context(), epsilon=2.0))
    assert outcome.result is None
    assert "number of runs was 0" in outcome.note
    assert "another law" in outcome.note


def test_nan_and_failures_lose_to_any_score() -> None:
    scores = iter([math.nan, -math.inf, -5.0, math.nan])
    trials = FakeRound(SPACE, score=lambda _: next(scores))
    outcome = trials.run(PapernotSteinke(), PapernotSteinke().plan(context(), epsilon=2.0))
    assert outcome.result is not None
    assert outcome.result.index == 2


def test_ties_are_broken_by_the_rounds_secret_not_by_the_order() -> None:
    winners = set()
    for secret in range(20):
        trials = FakeRound(SPACE, score=lambda _: 1.0)
        trials.streams = type(trials.streams)(bytes([secret]) * 32)
        plan = PapernotSteinke().plan(context(), epsilon=2.0)
        result = trials.run(PapernotSteinke(), plan).result
        winners.add(result.index)
    assert len(winners) > 2


def test_a_known_threshold_releases_the_first_that_reaches_it_or_nothing() -> None:
    scores = [0.1, 0.6, 0.9, 0.7]
    strategy = LiuTalwar(threshold=0.5)
    plan = strategy.plan(context(), epsilon=2.0)
    assert isinstance(plan.event, ThresholdSelection)
    assert plan.event.stop == pytest.approx(0.1)
    capped = LiuTalwar(threshold=0.5, maximum=40).plan(context(), epsilon=2.0)
    assert isinstance(capped.event, PrivateSelection)
    given = iter(scores)
    outcome = FakeRound(SPACE, score=lambda _: next(given)).run(strategy, plan)
    assert outcome.result is not None
    assert outcome.result.score == 0.6
    strict = LiuTalwar(threshold=0.95)
    given = iter(scores)
    outcome = FakeRound(SPACE, score=lambda _: next(given)).run(strict, plan)
    assert outcome.result is None
    assert "0.95" in outcome.note


@pytest.mark.parametrize(
    ("rule", "variant", "factor"),
    [("scale-learning-rate", 1, 24 / 216), ("scale-learning-rate", 2, 0.1), ("keep", 1, 1.0)],
)
def test_subsampled_tuning_tries_smaller_rates_and_releases_what_was_drawn(
    rule: str, variant: int, factor: float
) -> None:
    """24 of 240 records are tuned on; the final training sees the other 216, or all."""
    strategy = SubsampledTuning(variant=variant, extrapolation=rule)
    plan = strategy.plan(context(), epsilon=2.0)
    assert plan.search is not None
    for each in (plan.search, Plan.from_dict(plan.to_dict()).search.scaled(2.0)):
        tried = each.trainings[0].as_trained({"learning_rate": 3.0, "max_grad_norm": 2.0})
        assert tried == {"learning_rate": pytest.approx(3.0 * factor), "max_grad_norm": 2.0}
    assert plan.training.as_trained({"learning_rate": 3.0}) == {"learning_rate": 3.0}
    trials = FakeRound(SPACE, count=8)
    outcome = trials.run(strategy, plan)
    ((name, training, params),) = trials.trained
    assert name == "final"
    assert training.part == ("rest" if variant == 1 else "all")
    assert training.rate_factor == 1.0
    assert training.method == plan.training.method
    best = max(
        (SPACE.draw(trials.streams, n)["learning_rate"] for n in range(8)),
        key=lambda rate: -abs(math.log(rate)),
    )
    assert params["learning_rate"] == best, "what was drawn from the space, to the last digit"
    assert outcome.result is not None
    assert outcome.result.score == -abs(math.log(best)), "the score that was paid for"


@pytest.mark.parametrize(("records", "warned"), [(19_000, True), (21_000, False)])
def test_a_small_tuning_subset_is_said_while_planning(records: int, warned: bool) -> None:
    schedule = Schedule.from_epochs(records=records, expected_batch_size=200, epochs=1)
    plan = SubsampledTuning(rate=0.1).plan(context(schedule=schedule), epsilon=2.0)
    assert ("fewer than 2,000" in plan.details.get("advice", "")) == warned


def test_dp_hyper_searches_at_its_share_and_trains_once_with_the_rest() -> None:
    strategy = DPHyper(share=0.2)
    plan = strategy.plan(context(), epsilon=2.0)
    selection, final = parts_of(plan.event)
    assert epsilon(selection, 1e-5).epsilon < 0.45 < 1.6 < epsilon(final, 1e-5).epsilon < 2.0
    trials = FakeRound(SPACE, count=8)
    outcome = trials.run(strategy, plan)
    ((name, training, params),) = trials.trained
    assert (name, training) == ("final", plan.training)
    best = max(
        (SPACE.draw(trials.streams, n)["learning_rate"] for n in range(8)),
        key=lambda rate: -abs(math.log(rate)),
    )
    assert params["learning_rate"] == best
    assert outcome.result is not None
    assert outcome.result.score == -abs(math.log(best)), "the score that was paid for"
    for wrong in (0.0, 1.0, float("nan")):
        with pytest.raises(InvalidInputError, match="strictly between 0 and 1"):
            DPHyper(share=wrong).plan(context(), epsilon=2.0)
    with pytest.raises(StrategyError, match="auto weighs"):
        DPHyper(law="auto").plan(context(), epsilon=2.0)


def parts_of(event: Event) -> tuple[Event, Event]:
    """What the training records meet: the search, and the final training."""
    assert isinstance(event, Parallel)
    first, second = event.events[0].events
    return first, second


def test_everything_tells_the_sampler_and_releases_every_trial() -> None:
    strategy = Everything(trials=5)
    trials = FakeRound(SPACE)
    outcome = trials.run(strategy, strategy.plan(context(), epsilon=2.0))
    assert len(outcome.trials) == 5
    assert sorted(trials.told) == [0, 1, 2, 3, 4]
    assert outcome.result is not None
    assert outcome.result.score == max(t.score for t in outcome.trials)


def test_linear_scaling_follows_the_line_inside_the_bounds() -> None:
    assert extrapolate([0.1, 0.2, 0.5], [1.0, 2.0], [0.1, 10.0]) == pytest.approx(5.0)
    assert extrapolate([0.1, 0.2, 2.0], [1.0, 2.0], [0.1, 10.0]) == 10.0
    assert extrapolate([0.1, 0.2, 2.0], [2.0, 1.0], [0.1, 10.0]) == 0.1
    strategy = LinearScaling(trials=3, parameters={"max_grad_norm": 1.0})
    plan = strategy.plan(context(RATE), epsilon=2.0)
    assert plan.search is not None
    trials = FakeRound(SearchSpace.from_dict(RATE))
    outcome = trials.run(strategy, plan)
    assert [name for name, _, _ in trials.trained][-1] == "final"
    assert len(trials.trained) == 7 == plan.expected_runs
    noises = [t.method.noise_multiplier for _, t, _ in trials.trained]
    assert noises[0] == noises[2] > noises[3] == noises[5] > noises[6]
    assert len(outcome.trials) == 6


def walk(event: Event) -> Iterator[Event]:
    yield event
    for part in event.children():
        yield from walk(part)


def test_linear_scaling_extrapolates_rate_times_steps() -> None:
    strategy = LinearScaling(trials=3, steps=(0.25, 0.5), parameters={"max_grad_norm": 1.0})
    plan = strategy.plan(context(RATE), epsilon=2.0)
    assert plan.search is not None
    steps = [t.schedule.steps for t in (*plan.search.trainings, plan.training)]
    whole = context(RATE).schedule.steps
    assert steps == [round(whole / 4), round(whole / 2), whole]
    charged = [part.to_json() for part in walk(plan.event)]
    for training in plan.search.trainings:  # what runs for fewer steps is charged for fewer
        assert Repeated(3, training.event).to_json() in charged
    trials = FakeRound(SearchSpace.from_dict(RATE))
    outcome = trials.run(strategy, plan)
    drawn = [trials.space.draw(trials.streams, n)["learning_rate"] for n in range(6)]
    run = [params["learning_rate"] for _, _, params in trials.trained]
    assert run[:6] == pytest.approx(
        [rate * whole / steps[n // 3] for n, rate in enumerate(drawn)], rel=1e-12
    )
    best = [
        max(outcome.trials[k : k + 3], key=lambda t: t.score).params["learning_rate"]
        * steps[k // 3]
        for k in (0, 3)
    ]
    line = extrapolate(plan.details["epsilons"], best, [whole * b for b in plan.details["bounds"]])
    assert run[6] == pytest.approx(line / whole)
    with pytest.raises(InvalidInputError, match="two fractions in"):
        LinearScaling(steps=(0.0, 1.0), parameters={"max_grad_norm": 1.0}).plan(
            context(RATE), epsilon=2.0
        )


def test_the_oracle_walks_the_whole_grid() -> None:
    strategy = NonPrivateGrid(points=3)
    trials = FakeRound(SPACE)
    outcome = trials.run(strategy, strategy.plan(context(), epsilon=2.0))
    assert len(outcome.trials) == 9
    assert len({tuple(t.params.values()) for t in outcome.trials}) == 9
