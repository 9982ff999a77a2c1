"""The figures show the study's own numbers, and never a sealed one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from privtune import create_study, plots
from privtune.accounting import Gaussian, PrivateSelection, epsilon
from privtune.errors import InvalidInputError
from privtune.ledger import Budget, ChargeRequest, Ledger
from privtune.plots.study_charts import ranked, shares
from privtune.plots.style import STRATEGIES_BY_LOOK, looks, looks_of
from privtune.strategies import Repetition
from privtune.study import ArmStatus, Study
from privtune.training.mechanism.metric_name import MetricName
from tests.toy import exact_score
from tests.tracked import Tracked

pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def study(tracked: Tracked) -> Study:
    return tracked.study


def named(figure, name: str):
    (trace,) = [t for t in figure.data if t.name == name and t.showlegend is not False]
    return trace


def test_parts_of_the_budget_sum_to_what_was_spent(study: Study) -> None:
    parts = shares(study)
    assert [label for label, _, _ in parts] == ["defaults", "selection", "hyfree"]
    assert sum(added for _, added, _ in parts) == pytest.approx(study.spent().epsilon, rel=1e-9)
    assert sum(alone for _, _, alone in parts) > study.spent().epsilon
    bar = plots.plot_budget(study)
    assert [trace.x[0] for trace in bar.data[:3]] == [added for _, added, _ in parts]
    assert named(bar, "left").x[0] == pytest.approx(6.0 - study.spent().epsilon, rel=1e-9)


def test_parts_of_a_budget_that_goes_on_sum_to_what_its_odometer_reads(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    budget = Budget(4.0, 1e-5, name="b")
    with Ledger(storage) as ledger:
        ledger.create_budget(budget)
        for sigma in (9.0, 8.0, 7.0):
            ledger.reserve("b", [ChargeRequest(Gaussian(sigma))], start=True)
        readings = ledger.spent_by_charge("b")
    study = create_study("s", budget=budget, storage=storage)
    parts = shares(study)
    sums = np.cumsum([added for _, added, _ in parts])
    assert sums == pytest.approx(list(readings.values()), rel=1e-9)
    assert sums[-1] == pytest.approx(study.spent().epsilon, rel=1e-9)
    alone = [epsilon(Gaussian(sigma), 1e-5).epsilon for sigma in (9.0, 8.0, 7.0)]
    assert [cost for _, _, cost in parts] == pytest.approx(alone, rel=1e-6)


def test_the_comparison_has_a_row_for_each_arm_the_best_above(study: Study) -> None:
    reached, cost, gradients = plots.plot_comparison(study).data
    assert list(reached.x) == sorted(reached.x)
    assert list(reached.y) == list(cost.y) == list(gradients.y)
    for place, arm in enumerate(reached.y):
        (status,) = [status for status in study.status() if status.plan.arm == arm]
        accuracy = status.release.estimates["test_accuracy"]
        # Of a public split: 2.03 standard errors of the ends themselves (Wilson 1927, at 95.75%).
        for end in (accuracy.low, accuracy.high):
            error = (end * (1 - end) / 60) ** 0.5
            assert abs(accuracy.value - end) == pytest.approx(2.0286 * error, rel=1e-2)
        assert reached.x[place] == accuracy.value
        assert reached.error_x.array[place] == accuracy.high - accuracy.value
        assert reached.error_x.arrayminus[place] == accuracy.value - accuracy.low
        assert cost.x[place] == status.guarantee.epsilon
        assert gradients.x[place] == status.plan.expected_gradient_evaluations


def test_repeated_arms_stand_at_their_mean_with_its_standard_error(study: Study) -> None:
    def twice(status: ArmStatus) -> ArmStatus:
        runs = [
            Repetition(params={}, score=None, estimates={"test_accuracy": exact_score(v)})
            for v in (0.5, 0.7)
        ]
        return replace(status, release=replace(status.release, repetitions=tuple(runs)))

    figure = plots.plot_comparison(study, arms=[twice(status) for status in study.status()])
    reached = figure.data[0]
    assert reached.x == pytest.approx([0.6] * 3)
    assert reached.error_x.array == pytest.approx([0.1] * 3)
    assert reached.error_x.arrayminus == pytest.approx([0.1] * 3)
    title = figure.layout.annotations[0].text
    assert title == "test accuracy<br>mean of 2 ± standard error"


def test_titles_of_panels_do_not_run_into_each_other(study: Study) -> None:
    figure = plots.plot_comparison(study)
    # A third of the panel is what labels beside it may leave.
    for title in figure.layout.annotations:
        assert max(map(len, title.text.split("<br>"))) <= 28
    for axis in (figure.layout.xaxis, figure.layout.xaxis2, figure.layout.xaxis3):
        assert (axis.tickangle, axis.nticks) == (0, 4)


def test_parts_of_the_budget_are_shown_as_what_they_add(study: Study) -> None:
    bar = plots.plot_budget(study)
    assert all(" +" in trace.text for trace in bar.data if trace.name != "left")
    assert "added" in bar.layout.xaxis.title.text


def test_arms_of_equal_epsilon_stand_at_it(study: Study) -> None:
    planned = [replace(status, release=None, state="failed") for status in study.status()]
    equal = [replace(s, guarantee=planned[0].guarantee) for s in planned]
    endless = replace(equal[1], guarantee=replace(equal[1].guarantee, epsilon=math.inf))
    figure = plots.plot_comparison(study, arms=[equal[0], endless, equal[2]])
    reached, cost, *_ = figure.data
    one = equal[0].guarantee.epsilon
    assert not reached.x
    assert list(cost.x) == [one, 0.0, one]
    assert cost.text[1] == "no guarantee"
    assert set(figure.layout.yaxis.ticktext) == {f"{s.plan.arm} (failed)" for s in planned}
    assert figure.layout.xaxis2.rangemode == "tozero"


def test_no_two_arms_look_alike() -> None:
    names = [f"arm-{i}" for i in range(144)]
    assert len(set(looks(names).values())) == 144
    first = list(looks(names).values())[:12]
    assert len({look.colour for look in first}) == len({look.symbol for look in first}) == 12
    for eyes, seen in EYES.items():
        places = [oklab(seen @ linear(look.colour)) for look in first]
        for i, one in enumerate(places):
            for other in places[:i]:
                assert np.linalg.norm(one - other) > 0.08, eyes
    for paper in (1.0, 0.0087):  # white, and the report's dark page
        for look in first:
            light = linear(look.colour) @ [0.2126, 0.7152, 0.0722]
            assert (max(light, paper) + 0.05) / (min(light, paper) + 0.05) > 1.8


def test_a_strategy_has_one_colour_in_every_study() -> None:
    """Beside whatever arms, under whatever name; its second arm has another, and so has each other arm."""
    alone = looks(["hyfreedp"])["hyfreedp"]
    strategies = {"a": "fixed", "mine": "hyfreedp", "other": "hyfreedp", "odd": "dog"}
    beside = looks([*strategies], strategies)
    assert beside["mine"] == alone
    assert len(set(beside.values())) == 4
    arms = [f"{number}-{name}" for number, name in enumerate(STRATEGIES_BY_LOOK * 11)]
    crowded = looks(arms, {arm: arm.split("-", 1)[1] for arm in arms})
    assert len(set(crowded.values())) == 132
    for name, arm in zip(STRATEGIES_BY_LOOK, arms, strict=False):
        assert crowded[arm] == looks([name])[name]


def test_auto_has_its_own_colour_whatever_it_chose(study: Study) -> None:
    (plan,) = [plan for plan in study.plans if plan.arm == "hyfree"]
    plans = [plan, replace(plan, arm="chosen", strategy="auto: hyfreedp")]
    assert looks_of(plans) == {
        "hyfree": looks(["hyfreedp"])["hyfreedp"],
        "chosen": looks(["auto"])["auto"],
    }


def test_an_arm_has_one_colour_in_charts_and_in_mlflow(study: Study) -> None:
    look = looks([plan.arm for plan in study.plans], {p.arm: p.strategy for p in study.plans})
    figure = plots.plot_comparison(study)
    drawn = set(figure.data[0].marker.color)
    assert drawn <= {look[plan.arm].colour for plan in study.plans}
    assert look[study.plans[0].arm] == looks([study.plans[0].strategy])[study.plans[0].strategy]


EYES = {
    "any": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
"""What eyes make of linear red, green and blue. Source: Machado et al. (2009), severity 1."""


def linear(colour: str) -> np.ndarray:
    share = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """A space in which distances are those that people see. Source: Ottosson (2020)."""
    cones = np.array(
        [
            [0.4122215, 0.5363325, 0.0514460],
            [0.2119035, 0.6806995, 0.1073970],
            [0.0883025, 0.2817188, 0.6299787],
        ]
    )
    axes = np.array(
        [
            [0.2104543, 0.7936178, -0.0040720],
            [1.9779985, -2.4285922, 0.4505937],
            [0.0259040, 0.7827718, -0.8086758],
        ]
    )
    return axes @ np.cbrt(cones @ np.clip(rgb, 0, 1))


def test_trajectories_are_the_released_curves(study: Study) -> None:
    figure = plots.plot_trajectories(study)
    names = {trace.name for trace in figure.data}
    assert names == {"defaults", "hyfree"}
    curve = list(study.release("hyfree").curves["learning_rate"])
    assert any(list(trace.y) == curve for trace in figure.data)


def test_the_law_of_runs_and_other_means(study: Study) -> None:
    law, costs = plots.plot_runs(study).data
    assert sum(law.y) == pytest.approx(0.99, abs=0.02)
    plan = study.plans[1]
    at = list(costs.x).index(plan.runs.expected_runs)
    assert costs.y[at] == epsilon(plan.event, 1e-5).epsilon
    assert list(costs.y) == sorted(costs.y)
    assert isinstance(plan.event, PrivateSelection)


def test_epsilon_by_step(study: Study) -> None:
    figure = plots.plot_epsilon_spent(study)
    assert {trace.name for trace in figure.data} == {"defaults", "hyfree"}
    for trace in figure.data:
        total = study.release(trace.name).guarantee.epsilon
        assert trace.y[-1] == pytest.approx(total)


def test_a_loss_has_its_interval_and_no_percent(tmp_path: Path) -> None:
    from tests.study.conftest import toy_spec

    arm = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2}
    spec = toy_spec(arms=[arm], scoring={"metric": "loss", "bound": 3.0}, epochs=1, seed=1)
    study = Study.create(spec, f"sqlite:///{tmp_path / 'p.db'}")
    (release,) = study.run()
    figure = plots.plot_comparison(study, metric="validation_loss")
    point = figure.data[0]
    assert release.score is not None
    assert list(point.x) == [-release.score]
    (score,) = release.choice.values()
    assert point.error_x.array[0] == pytest.approx(score.high - score.value)
    assert figure.layout.xaxis.tickformat is None
    assert figure.layout.annotations[0].text == "validation loss<br>one draw, 95% interval"


def test_the_smallest_loss_stands_above(study: Study) -> None:
    arms = study.status()
    values = {arm.plan.arm: float(i) for i, arm in enumerate(arms)}
    released = [
        replace(
            s, release=replace(s.release, estimates={"test_loss": exact_score(values[s.plan.arm])})
        )
        for s in arms[:2]
    ]
    rows = ranked([arms[2], *released[::-1]], MetricName("test", "loss"))
    assert [(s.plan.arm, value) for s, value in rows] == [
        ("defaults", 0.0), ("selection", 1.0), ("hyfree", None)
    ]  # fmt: skip


def test_results_of_many_studies_stand_in_one_panel_a_task() -> None:
    from privtune.plots import plot_results

    rows = [
        {
            "task": task,
            "arm": arm,
            "epsilon": e,
            "accuracy": a,
            "claimed": "1.5" if arm == "b" else "",
        }
        for task in ("t", "u")
        for arm in ("a", "b")
        for e, a in (("1", "0.5"), ("2", "0.7"), ("2", "0.9"))
    ]
    figure = plot_results(rows)
    lines = [trace for trace in figure.data if trace.name]
    assert [(line.name, line.showlegend) for line in lines] == [
        ("a", True), ("b", True), ("a", False), ("b", False)
    ]  # fmt: skip
    for line in lines:
        assert list(line.x) == [1.0, 2.0]
        assert list(line.y) == pytest.approx([0.5, 0.8])
        assert list(line.error_y.array) == pytest.approx([0.0, 0.1])  # 0.1 * sqrt(2) / sqrt(2)
    hollow = [tuple(trace.x) for trace in figure.data if not trace.name]
    assert hollow == [(1.5, 2.0)] * 2  # what exceeds the honest epsilon is no claim below it
    with pytest.raises(InvalidInputError, match="lacks epsilon"):
        plot_results([{"task": "t", "arm": "a", "accuracy": "0.5"}])


def test_a_logarithmic_axis_is_marked_where_the_results_are() -> None:
    rows = [
        {"arm": arm, "ε": spent, "error": "1"} for arm in "ab" for spent in ("0.5", "2.0", "8.0")
    ]
    axis = plots.plot_lines(rows, x="ε", y="error", line="arm", log="x").layout.xaxis
    assert axis.tickvals == (0.5, 2.0, 8.0)
    assert axis.ticktext == ("0.5", "2", "8")
    many = [{"arm": "a", "ε": str(2**power), "error": "1"} for power in range(20)]
    assert (
        plots.plot_lines(many, x="ε", y="error", line="arm", log="x").layout.xaxis.tickvals is None
    )
    assert plots.plot_lines(rows, x="ε", y="error", line="arm").layout.xaxis.tickvals is None
