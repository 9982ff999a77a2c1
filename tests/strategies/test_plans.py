"""Every strategy's plan: never above its target, close to it, and the same after JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest

from privtune.accounting import (
    ApproximateDP,
    Composed,
    Gaussian,
    Geometric,
    NonPrivate,
    Parallel,
    PrivateSelection,
    Repeated,
    epsilon,
)
from privtune.accounting.reach import mass_beyond_reach
from privtune.strategies import (
    STRATEGIES,
    Auto,
    DPHyper,
    Everything,
    Fixed,
    LinearScaling,
    LiuTalwar,
    NonPrivateGrid,
    PapernotSteinke,
    Plan,
    Scoring,
    Strategy,
    StrategyError,
    SubsetSearch,
    plan_arm,
)
from privtune.strategies import SubsampledTuning as Subsampled
from privtune.strategies.everything import selection_instead
from privtune.training.mechanism.schedule import NoiseOptions
from tests.strategies.world import BOTH, RATE, context
from tests.toy import LOADS

CLIP = {"max_grad_norm": 1.0}
FIXED = Fixed(parameters={"learning_rate": 0.5, **CLIP})
EPOCHS = {**BOTH, "epochs": {"type": "categorical", "choices": [1, 2]}}
NOISES = {**BOTH, "noise_multiplier": {"type": "categorical", "choices": [1.0, 1.5]}}

CASES: list[tuple[Strategy, dict[str, Any]]] = [
    (Auto(), BOTH),
    (Fixed(parameters={"learning_rate": 0.5, **CLIP}), BOTH),
    (PapernotSteinke(mean_runs=4), BOTH),
    (PapernotSteinke(law="poisson", mean_runs=4), BOTH),
    (PapernotSteinke(law="binomial", n=8, mean_runs=4), BOTH),
    (PapernotSteinke(law="truncated_negative_binomial", shape=-0.5, mean_runs=4), BOTH),
    (PapernotSteinke(law="logarithmic", mean_runs=4, maximum=30), BOTH),
    (PapernotSteinke(mean_runs=4, guarantee="common"), EPOCHS),
    (PapernotSteinke(mean_runs=4, guarantee="weighted"), NOISES),
    (PapernotSteinke(mean_runs=4, guarantee="common"), NOISES),
    (LiuTalwar(gamma=0.25, maximum=20), BOTH),
    (Subsampled(variant=1, mean_runs=4), BOTH),
    (Subsampled(variant=2, mean_runs=4, guarantee="common"), EPOCHS),
    (DPHyper(mean_runs=4), BOTH),
    (Everything(trials=4, sampler="random"), BOTH),
    (SubsetSearch(trials=4, variant=1), BOTH),
    (SubsetSearch(trials=4, variant=2, sampler="gp"), BOTH),
    (LinearScaling(trials=2, parameters=CLIP), RATE),
]


@pytest.mark.parametrize(
    ("strategy", "space"), CASES, ids=lambda v: v.name if hasattr(v, "name") else ""
)
def test_a_plan_meets_its_target_and_survives_json(strategy: Strategy, space: dict) -> None:
    before = len(LOADS)
    plan = strategy.plan(context(space), epsilon=2.0)
    spent = epsilon(plan.event, 1e-5).epsilon
    assert spent <= 2.0
    assert spent > 1.97, "the target is used"
    read = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert read.digest() == plan.digest()
    assert read.event == plan.event
    assert len(LOADS) == before, "planning touches no data"
    assert plan.is_sealed == (plan.runs is not None)


@pytest.mark.quick
def test_every_strategy_has_a_case() -> None:
    covered = {strategy.name for strategy, _ in CASES} | {"non-private-grid"}
    assert covered == set(STRATEGIES), (
        "add a case to CASES, and an audit to tests/statistical/test_strategies.py"
    )


@pytest.mark.quick
def test_what_is_charged_is_what_runs() -> None:
    plan = PapernotSteinke(mean_runs=4).plan(context(), epsilon=2.0)
    assert plan.search is not None
    assert plan.score is not None
    (training,) = plan.search.trainings
    assert plan.event == PrivateSelection(
        Parallel((training.event, Gaussian(plan.score.noise_multiplier))), Geometric(4.0)
    )


def test_a_public_score_is_free_and_leaves_more_for_training() -> None:
    public = dataclasses.replace(context().task, public_validation=True)
    noisy = PapernotSteinke(mean_runs=4).plan(context(), epsilon=2.0)
    exact = PapernotSteinke(mean_runs=4).plan(context(task=public), epsilon=2.0)
    assert exact.score is not None
    assert exact.score.noise_multiplier is None
    assert isinstance(exact.event, PrivateSelection)
    assert not isinstance(exact.event.event, Parallel)
    assert exact.training.method.noise_multiplier <= 1.001 * noisy.training.method.noise_multiplier


def test_laplace_scores_on_a_clipped_loss() -> None:
    scoring = Scoring(metric="loss", mechanism="laplace", bound=4.0)
    plan = PapernotSteinke(mean_runs=4).plan(context(scoring=scoring), epsilon=2.0)
    assert plan.score is not None
    assert plan.event.to_dict()["event"]["events"][1]["type"] == "laplace"
    # Scale of the noise on the sums: a record adds a vector of length 1 at most.
    assert plan.score.noises[0].scale == pytest.approx(plan.score.noise_multiplier)
    assert plan.score.options["bound"] == 4.0


def test_subsampled_tuning_charges_both_stages_and_counts_both() -> None:
    first = Subsampled(variant=1, mean_runs=10).plan(context(), epsilon=2.0)
    second = Subsampled(variant=2, mean_runs=10).plan(context(), epsilon=2.0)
    for plan, records in ((first, 216), (second, 240)):
        tuning = plan.event.to_dict()["events"][0]
        assert tuning["type"] == "subsampled_tuning"
        assert plan.training.schedule.records == records
        assert plan.search is not None
        assert plan.search.trainings[0].schedule.records == 24
        assert plan.details["ratio"] == records / 24
        # Theory: (μ q + 1) n · epochs against μ n · epochs; a variant-1 final sees 1 - q of them.
        baseline = plan.details["baseline_gradient_evaluations"]
        assert baseline == pytest.approx(10 * 240 * 2)
        assert plan.expected_gradient_evaluations == pytest.approx((10 * 24 + records) * 2)
        assert baseline / plan.expected_gradient_evaluations >= 4.5
    one, two = (p.training.method.noise_multiplier for p in (first, second))
    whole = PapernotSteinke(mean_runs=10).plan(context(), epsilon=2.0)
    assert one < two < whole.training.method.noise_multiplier


def test_everything_is_charged_by_composition_and_says_what_selection_would_cost() -> None:
    plan = Everything(trials=5, sampler="random").plan(context(), epsilon=2.0)
    assert isinstance(plan.event, Parallel)
    assert plan.event.events[0] == Repeated(5, plan.training.event)
    instead = selection_instead(plan, delta=1e-5, adjacency=context().adjacency)
    assert instead is not None
    assert instead.epsilon < 2.0
    adaptive = Everything(trials=5, sampler="tpe").plan(context(), epsilon=2.0)
    assert selection_instead(adaptive, delta=1e-5, adjacency=context().adjacency) is None


def test_a_grid_that_changes_the_guarantee_shares_one_curve_or_is_weighted() -> None:
    common = PapernotSteinke(mean_runs=4, guarantee="common").plan(context(EPOCHS), epsilon=2.0)
    assert common.search is not None
    each = [epsilon(t.event, 1e-5).epsilon for t in common.search.trainings]
    assert each[0] == pytest.approx(each[1], rel=0.1), "nearly one curve"
    assert [t.schedule.steps for t in common.search.trainings] == [10, 20]
    assert common.search.training_of({"epochs": 2}).schedule.steps == 20

    weighted = PapernotSteinke(mean_runs=4, guarantee="weighted").plan(context(NOISES), epsilon=2.0)
    assert weighted.event.to_dict()["event"]["events"][0]["weights"] == [0.5, 0.5]
    assert weighted.search is not None
    low, high = (t.method.noise_multiplier for t in weighted.search.trainings)
    assert high / low == pytest.approx(1.5)


def test_a_grid_of_noise_under_one_curve_chooses_the_steps() -> None:
    plan = PapernotSteinke(mean_runs=4, guarantee="common").plan(context(NOISES), epsilon=2.0)
    assert plan.search is not None
    low, high = plan.search.trainings
    assert low.schedule.steps < high.schedule.steps


def test_the_oracle_has_no_guarantee() -> None:
    plan = NonPrivateGrid(points=3).plan(context(), epsilon=2.0)
    assert plan.event == NonPrivate()
    assert not plan.is_private
    assert plan.search is not None
    assert plan.search.trials == 9
    assert plan.score is not None
    assert plan.score.noise_multiplier is None


def test_where_noise_comes_from_is_part_of_the_plan() -> None:
    secure = NoiseOptions.of("secure")
    for strategy in (
        Fixed(parameters={"learning_rate": 0.5, "max_grad_norm": 1.0}),
        PapernotSteinke(mean_runs=4),
    ):
        plain = plan_arm(strategy, context(), epsilon=4.0)
        other = plan_arm(strategy, context(noise=secure), epsilon=4.0)
        assert plain.digest() == plan_arm(strategy, context(), epsilon=4.0).digest()
        if plain.score is not None:
            assert plain.score.candidates == plain.runs.expected_runs
        assert other.digest() != plain.digest()
        assert other.event == plain.event
        again = Plan.from_dict(json.loads(json.dumps(other.to_dict())))
        assert again.training.noise == secure
        assert again.search is None or {t.noise for t in again.search.trainings} == {secure}
        assert Plan.from_dict(json.loads(json.dumps(plain.to_dict()))).training.noise != secure


def test_what_noise_cannot_reach_is_charged_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a shorter reach, so that the mass beyond is a thousandth to a tenth of δ, or more."""
    strategy = FIXED
    for reach, case in ((34.0, "nothing"), (6.3, "charged"), (5.0, "refused")):
        short = functools.partial(mass_beyond_reach, gaussian=reach, coordinates=1)
        monkeypatch.setattr("privtune.strategies.plan.mass_beyond_reach", short)
        if case == "refused":
            with pytest.raises(StrategyError, match="ask for a smaller ε"):
                plan_arm(strategy, context(), epsilon=4.0)
            continue
        plan = plan_arm(strategy, context(), epsilon=4.0)
        guarantee = epsilon(plan.event, 1e-5)
        assert 3.9 < guarantee.epsilon <= 4.0
        if case == "nothing":
            assert plan == strategy.plan(context(), epsilon=4.0)
            continue
        mass = plan.details["beyond_reach"]
        assert isinstance(plan.event, Composed)
        assert 1e-8 < mass < 1e-6
        assert plan.event.events[1] == ApproximateDP(0.0, mass)
        assert short(plan.training.event) <= mass
