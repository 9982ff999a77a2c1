"""``mean_runs: auto``: as many runs in the mean as fit, each of a given price."""

from __future__ import annotations

from typing import Any

import pytest

from privtune.accounting import PrivateSelection, ThresholdSelection, epsilon, run_law_from_dict
from privtune.errors import PrivTuneError
from privtune.strategies import LiuTalwar, NoRunFitsError, PapernotSteinke
from privtune.strategies import SubsampledTuning as Subsampled
from tests.strategies.world import context

AUTO: dict[str, Any] = {"mean_runs": "auto", "training_epsilon": 1.0}


@pytest.mark.parametrize(
    "strategy",
    [
        PapernotSteinke(**AUTO),
        PapernotSteinke(law="logarithmic", **AUTO),
        PapernotSteinke(law="poisson", **AUTO),
        PapernotSteinke(law="truncated_negative_binomial", shape=-0.5, **AUTO),
        PapernotSteinke(law="binomial", n=30, **AUTO),
        LiuTalwar(**AUTO),
        LiuTalwar(threshold=0.9, **AUTO),
    ],
    ids=lambda s: f"{s.name}-{getattr(s, 'law', 'geometric')}",
)
def test_the_mean_is_the_largest_that_fits(strategy: Any) -> None:
    plan = strategy.plan(context(), epsilon=1.5)
    runs = plan.runs
    assert isinstance(plan.event, PrivateSelection | ThresholdSelection)
    assert plan.event == strategy.whole(plan.event.event, runs)
    one = epsilon(plan.event.event, 1e-5).epsilon
    assert 0.999 < one <= 1.0, "each run costs what was said"
    assert epsilon(plan.event, 1e-5).epsilon <= 1.5
    more = {**runs.to_dict(), "mean": runs.to_dict()["mean"] + 0.001}
    above = strategy.whole(plan.event.event, run_law_from_dict(more))
    assert epsilon(above, 1e-5).epsilon > 1.5, "one thousandth more does not fit"
    assert plan.details["mean_runs_auto"]["training_epsilon"] == 1.0
    assert plan.details["mean_runs_auto"]["mean_runs"] == plan.runs.expected_runs


def test_more_budget_means_more_runs_of_the_same_noise() -> None:
    small, large = (PapernotSteinke(**AUTO).plan(context(), epsilon=e) for e in (1.3, 2.0))
    assert small.event.event == large.event.event
    assert small.runs.expected_runs < large.runs.expected_runs


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
    ("strategy", "message"),
    [
        (PapernotSteinke(mean_runs="auto"), "needs training_epsilon"),
        (LiuTalwar(mean_runs="auto"), "needs training_epsilon"),
        (PapernotSteinke(training_epsilon=1.0), "with mean_runs: auto only"),
        (LiuTalwar(mean_runs=3, training_epsilon=1.0), "with mean_runs: auto only"),
        (LiuTalwar(gamma=0.1, mean_runs="auto"), "give one"),
        (PapernotSteinke(law="auto", **AUTO), "leave out mean_runs, training_epsilon"),
        (PapernotSteinke(mean_runs="many"), "mean"),
        (PapernotSteinke(law="binomial", **AUTO), "n"),
        (PapernotSteinke(mean_runs="auto", training_epsilon=0.0), "finite number above 0"),
        (PapernotSteinke(mean_runs="auto", training_epsilon=float("nan")), "finite number above 0"),
        (PapernotSteinke(mean_runs="auto", training_epsilon=True), "finite number above 0"),
        (Subsampled(**AUTO), "Give the mean number of runs of the tuning"),
        (Subsampled(training_epsilon=1.0), "with mean_runs: auto only"),
    ],
)
def test_what_does_not_fit_together_is_refused(strategy: Any, message: str) -> None:
    with pytest.raises(PrivTuneError, match=message) as caught:
        strategy.plan(context(), epsilon=2.0)
    assert "\n" not in str(caught.value)
