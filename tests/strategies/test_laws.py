"""The number of runs: `mean_runs: auto`, `min_runs`, and `law: auto` against every law on a grid."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq

from privtune.accounting import (
    Adjacency,
    Binomial,
    Event,
    Gaussian,
    Geometric,
    Poisson,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    RunLaw,
    ThresholdSelection,
    TruncatedNegativeBinomial,
    epsilon,
    event_from_dict,
    event_from_json,
    run_law_from_dict,
    scale_noise,
)
from privtune.errors import PrivTuneError
from privtune.strategies import DPHyper, LiuTalwar, NoRunFitsError, PapernotSteinke, Plan
from privtune.strategies import SubsampledTuning as Subsampled
from privtune.strategies import laws as laws_of_runs
from privtune.strategies.laws import choose_law, floor_of, price_of_minimums, priced_floor_of
from privtune.study.planning import plan_study
from privtune.study.spec import StudySpec
from tests.strategies.world import BOTH, context

AUTO: dict[str, Any] = {"mean_runs": "auto", "training_epsilon": 1.0}


@pytest.mark.parametrize(
    "strategy",
    [
        PapernotSteinke(**AUTO),
        PapernotSteinke(law="logarithmic", **AUTO),
        PapernotSteinke(law="poisson", **AUTO),
        PapernotSteinke(law="truncated_negative_binomial", shape=-0.5, **AUTO),
        PapernotSteinke(law="binomial", n=30, **AUTO),
        LiuTalwar(threshold=0.9, **AUTO),
    ],
    ids=lambda s: f"{s.name}-{getattr(s, 'law', 'geometric')}",
)
def test_the_mean_is_the_largest_that_fits(strategy: Any) -> None:
    plan = strategy.plan(context(), epsilon=1.5)
    runs = plan.runs
    assert isinstance(plan.event, PrivateSelection | ThresholdSelection)
    assert plan.event == strategy._selection_event(plan.event.event, runs)
    one = epsilon(plan.event.event, 1e-5).epsilon
    assert 0.999 < one <= 1.0, "each run costs what was said"
    assert epsilon(plan.event, 1e-5).epsilon <= 1.5
    more = {**runs.to_dict(), "mean": runs.to_dict()["mean"] + 0.001}
    above = strategy._selection_event(plan.event.event, run_law_from_dict(more))
    assert epsilon(above, 1e-5).epsilon > 1.5, "one thousandth more does not fit"
    assert plan.details["mean_runs_auto"]["training_epsilon"] == 1.0
    assert plan.details["mean_runs_auto"]["mean_runs"] == plan.runs.expected_runs


def test_the_mean_ends_at_a_thousand_and_at_the_most_runs_of_the_law() -> None:
    assert PapernotSteinke(**AUTO).plan(context(), epsilon=20.0).runs.mean == 1000
    capped = LiuTalwar(maximum=12, **AUTO).plan(context(), epsilon=20.0).runs
    assert (capped.mean, capped.cap) == (12, 12)


def test_not_even_one_run_fits() -> None:
    with pytest.raises(
        NoRunFitsError, match=r"a mean of a single run, but the arm's target is 0\.8"
    ):
        PapernotSteinke(arm="a", **AUTO).plan(context(), epsilon=0.8)


@pytest.mark.parametrize(
    ("strategy", "fewest"),
    [
        (PapernotSteinke(mean_runs=6, min_runs=3), 3),
        (PapernotSteinke(law="poisson", mean_runs=6, min_runs=2), 2),
        (PapernotSteinke(law="binomial", n=9, mean_runs=6, min_runs=2), 2),
        (LiuTalwar(mean_runs=6, min_runs=3, threshold=0.9), 3),
        (Subsampled(mean_runs=6, min_runs=3), 3),
        (LiuTalwar(min_runs=2, mean_runs="auto", training_epsilon=1.0), 2),
    ],
)
def test_a_fewest_number_of_runs_is_part_of_what_is_charged(strategy: Any, fewest: int) -> None:
    plan = strategy.plan(context(), epsilon=4.0)
    assert plan.runs.pmf(range(fewest)).sum() == 0.0 < plan.runs.pmf(fewest)
    assert plan.runs.mean == pytest.approx(6.0) or strategy.mean_runs == "auto"
    charged = json.dumps(plan.event.to_dict())
    assert f'"minimum": {fewest}' in charged
    assert epsilon(plan.event, 1e-5).epsilon <= 4.0
    assert event_from_json(charged) == plan.event
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).runs == plan.runs
    draws = {plan.runs.sample(np.random.default_rng(seed)) for seed in range(200)}
    assert min(draws) >= fewest


@pytest.mark.parametrize(
    ("strategy", "fewest"),
    [
        (PapernotSteinke(), 2),
        (PapernotSteinke(law="logarithmic", mean_runs=6), 2),
        (PapernotSteinke(law="truncated_negative_binomial", shape=0.5), 2),
        (LiuTalwar(), 2),
        (LiuTalwar(maximum=40), 2),
        (Subsampled(), 3),
        (Subsampled(mean_runs=5), 2),  # no more than half of the mean is sure
        (DPHyper(), 2),
        (PapernotSteinke(min_runs=1), None),
        (LiuTalwar(min_runs=1), None),
        (Subsampled(min_runs=1), None),
        (PapernotSteinke(min_runs=5), 5),
        (PapernotSteinke(mean_runs=5.9), None),  # a third of it is less than 2
        (PapernotSteinke(mean_runs=6), 2),
        (Subsampled(mean_runs=3.9), None),
        (PapernotSteinke(maximum=5), None),
        (PapernotSteinke(maximum=5000), None),  # no law with a floor has this cap
        (PapernotSteinke(law="poisson"), None),  # its release may be nothing
        (PapernotSteinke(law="binomial", n=30), None),
        (LiuTalwar(gamma=0.1), None),  # 1 / gamma is the mean
        (LiuTalwar(threshold=0.9), None),  # charged 2 epsilon only without
        (LiuTalwar(gamma=0.1, min_runs=3), 3),
    ],
    ids=str,
)
def test_a_law_has_a_floor_where_there_is_room(strategy: Any, fewest: int | None) -> None:
    """The mean is the one that was asked for, and the floor is in the law that is charged and drawn."""
    law = strategy.run_law()
    assert law.minimum == fewest
    given = 12.0 if strategy.min_runs == 3 else strategy.mean_runs or 10.0
    assert law.mean == pytest.approx(given)
    least = 0 if getattr(strategy, "law", "") in ("poisson", "binomial") else fewest or 1
    masses = law.pmf(range(200))
    assert masses[:least].sum() == 0.0 < masses[least]


def test_the_floor_costs_what_the_plan_says() -> None:
    """Without it the same noise costs what the event without its minimum costs, and K is 1 in a tenth."""
    for strategy, fewest in ((PapernotSteinke(), 2), (Subsampled(variant=2), 3)):
        plan = strategy.plan(context(), epsilon=2.0)
        terms: dict[str, Any] = {"delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}
        floor = priced_floor_of(plan.event, plan.runs, **terms)
        assert floor is not None
        charged = json.dumps(plan.event.to_dict())
        assert f'"minimum": {fewest}' in charged
        without = event_from_json(charged.replace(f', "minimum": {fewest}', ""))
        assert floor.epsilon_without == epsilon(without, 1e-5).epsilon
        assert 1.8 < floor.epsilon_without < epsilon(plan.event, 1e-5).epsilon
        assert floor.few_without == pytest.approx(0.1)
        assert floor.words.startswith(
            f"{fewest} (min_runs); without this minimum the same noise would cost"
        )
        assert floor.words.endswith("but train at most one candidate with probability 10%")
        unpriced = floor_of(plan.runs)
        assert unpriced == replace(floor, epsilon_without=None)
        assert unpriced.to_dict() == {"min_runs": fewest, "few_without": floor.few_without}
        assert "train at most one candidate with probability 10%; --prices" in unpriced.words
    plain = PapernotSteinke(min_runs=1).plan(context(), epsilon=2.0)
    assert floor_of(plain.runs) is None
    assert priced_floor_of(plain.event, plain.runs, **terms) is None


def test_a_mean_that_is_found_has_the_floor_where_it_fits() -> None:
    """Of a training of epsilon = 1: few fit a target of 1.2 in the mean, and many one of 2."""
    few = PapernotSteinke(**AUTO).plan(context(), epsilon=1.2).runs
    many = PapernotSteinke(**AUTO).plan(context(), epsilon=2.0).runs
    assert few.mean < 6.0 <= many.mean
    assert (few.minimum, many.minimum) == (None, 2)


@pytest.mark.parametrize(
    ("space", "law", "offered"),
    [
        (BOTH, {"mean_runs": 5}, [2, 3]),  # two powers of ten
        (BOTH, {"mean_runs": 6}, []),  # the floor is there
        (BOTH, {"mean_runs": 2.5}, [2]),
        (BOTH, {"mean_runs": 20}, []),  # one run in a twentieth of rounds
        (BOTH, {"mean_runs": 5, "min_runs": 2}, []),
        ({"learning_rate": {"low": 0.5, "high": 5.0, "log": True}}, {"mean_runs": 5}, []),
        ({"learning_rate": {"low": 0.05, "high": 6.0}}, {"mean_runs": 5}, []),
    ],
)
def test_more_runs_are_offered_at_their_price(space: Any, law: Any, offered: list[int]) -> None:
    facts = context(space)
    given = {} if "max_grad_norm" in space else {"max_grad_norm": 1.0}
    plan = PapernotSteinke(parameters=given, **law).plan(facts, epsilon=2.0)
    terms: dict[str, Any] = {"delta": 1e-5, "adjacency": facts.adjacency}
    prices = price_of_minimums(plan.event, plan.runs, facts.space, **terms)
    assert list(prices) == offered
    for fewest, price in prices.items():
        charged = plan.event.to_dict()
        charged["runs"]["minimum"] = fewest
        assert price == epsilon(event_from_dict(charged), 1e-5).epsilon > 2.0 * 0.99


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (PapernotSteinke(min_runs=11), r"mean_runs = 10\.0: must be at least the minimum, 11 runs"),
        (PapernotSteinke(min_runs=0), "min_runs = 0"),
        (PapernotSteinke(law="auto", min_runs=3), "leave out min_runs"),
        (LiuTalwar(maximum=0), "maximum = 0"),
        (PapernotSteinke(mean_runs="auto"), "needs training_epsilon"),
        (LiuTalwar(gamma=0.1, mean_runs="auto"), "give one"),
        (PapernotSteinke(law="auto", **AUTO), "leave out mean_runs, training_epsilon"),
        (PapernotSteinke(law="binomial", **AUTO), "n"),
        (PapernotSteinke(mean_runs="auto", training_epsilon=float("nan")), "finite number above 0"),
        (Subsampled(**AUTO), "Give the mean number of runs of the tuning"),
        (Subsampled(training_epsilon=1.0), "with mean_runs: auto only"),
    ],
)
def test_what_does_not_fit_together_is_refused(strategy: Any, message: str) -> None:
    with pytest.raises(PrivTuneError, match=message) as caught:
        strategy.plan(context(), epsilon=2.0)
    assert "\n" not in str(caught.value)


TRAINING = Repeated(100, PoissonSampled(0.05, Gaussian(1.0)))
SHAPES = (-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 10.0, 50.0)
LARGEST_MEAN = 1000.0


def finds(law: RunLaw) -> float:
    """The probability that one of the best tenth is among the runs, by the masses of the law."""
    few = np.arange(250)  # of more runs, hardly any misses
    return float(1.0 - law.pmf(few) @ 0.9**few)


def admissible(power: float) -> list[RunLaw]:
    """Each family with the least mean that finds with this probability, where one does."""
    fewest = math.ceil(math.log1p(-power) / math.log1p(-0.1))
    families = [lambda m, s=s: TruncatedNegativeBinomial(s, m) for s in SHAPES]
    families += [Poisson, lambda m: Poisson(m, maximum=2 * fewest)]
    families += [lambda m: Geometric(m, maximum=8 * fewest)]
    sizes = {fewest + 1, fewest + 2, 2 * fewest, 4 * fewest, 20 * fewest}
    families += [lambda m, n=n: Binomial(n, min(m, n)) for n in sizes]
    laws: list[RunLaw] = [Binomial(n, n) for n in (fewest, fewest + 1)]
    for family in families:
        if finds(family(1.0)) < power <= finds(family(LARGEST_MEAN)):
            mean = brentq(lambda m, f=family: finds(f(m)) - power, 1.0, LARGEST_MEAN, xtol=1e-4)
            laws.append(family(mean))
    return laws


def test_a_fixed_number_and_one_by_hand_find_as_often_as_the_table_says() -> None:
    assert finds(Binomial(9, 9)) == pytest.approx(1.0 - 0.9**9)
    assert finds(Geometric(13.5)) == pytest.approx(0.6, abs=1e-6)  # 1 - 0.9 / (1 + 0.1 * 12.5)


@pytest.mark.parametrize(
    ("base", "target", "power"),
    [
        (Gaussian(1.0), 2.0, 0.3),
        (Gaussian(1.0), 0.5, 0.8),
        pytest.param(TRAINING, 4.0, 0.9, marks=pytest.mark.slow),
    ],
)
def test_no_law_that_finds_as_often_does_with_less_noise(
    base: Event, target: float, power: float
) -> None:
    law, trade = choose_law(
        base, epsilon=target, delta=1e-5, adjacency=Adjacency.ADD_REMOVE, power=power
    )
    assert finds(law) >= power - 1e-6
    # The choice is made at a power of 1.25, and noise is calibrated to half a percent.
    level = 1.25 ** round(math.log(target, 1.25))
    (noise,) = (row["noise"] for row in trade if row["chosen"])
    enough, less = scale_noise(base, noise), scale_noise(base, 0.98 * noise)
    assert epsilon(PrivateSelection(enough, law), 1e-5).epsilon <= level * 1.001
    laws = admissible(power)
    assert len(laws) >= 15
    for other in laws:
        assert epsilon(PrivateSelection(less, other), 1e-5).epsilon > level, other


def test_a_plan_is_the_same_whether_its_law_was_chosen_before() -> None:
    """The searches for the laws' noise must not move where the search for the arm's noise begins."""
    arm = {"name": "arm", "strategy": "papernot-steinke", "law": "auto"}
    spec = StudySpec.parse(
        {
            "name": "laws",
            "task": "digits-mlp",
            "budget": {"name": "laws", "epsilon": 4.0, "delta": 1e-5},
            "space": BOTH,
            "arms": [arm],
            "epochs": 2,
            "expected_batch_size": 32,
        }
    )
    digests = []
    laws_of_runs._choose.cache_clear()
    for _ in range(2):  # the second time the choice is read from a cache
        (plan,) = plan_study(spec).plans
        assert plan.runs is not None
        digests.append(plan.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("power", [0.11, 0.9, 0.985])
def test_a_law_whose_tail_is_too_long_for_the_power_is_left_out(power: float) -> None:
    """The logarithmic law finds with 0.9 at no mean below a million."""
    law, trade = choose_law(
        Gaussian(1.0), epsilon=2.0, delta=1e-5, adjacency=Adjacency.ADD_REMOVE, power=power
    )
    names = {row["law"] for row in trade}
    assert ("logarithmic" in names) == (power < 0.9)
    assert {"geometric", "poisson", "binomial", "fixed number of runs"} <= names
    assert finds(law) >= power - 1e-6
