"""The figures show the study's own numbers, and never a sealed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from privtune import plots
from privtune.accounting import PrivateSelection, epsilon
from privtune.errors import InvalidInputError
from privtune.plots._study import shares, wilson_interval
from privtune.study import Study
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


def test_utility_against_epsilon(study: Study) -> None:
    figure = plots.plot_utility(study)
    for status in study.status():
        trace = named(figure, status.plan.arm)
        accuracy = status.release.utility["test_accuracy"]
        low, high = wilson_interval(accuracy, 60)
        assert trace.y[0] == accuracy
        assert trace.x[0] == pytest.approx(status.guarantee.epsilon, rel=0.05)
        assert trace.error_y.array[0] == pytest.approx(high - accuracy)
        assert trace.error_y.arrayminus[0] == pytest.approx(accuracy - low)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_wilson_s_interval_against_its_definition(rate: float) -> None:
    # Its ends are the rates at which the observation is 1.96 standard errors away.
    for end in wilson_interval(rate, 50):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(rate - end) == pytest.approx(1.959964 * (end * (1 - end) / 50) ** 0.5)


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


def test_a_loss_has_no_interval_and_no_percent(tmp_path: Path) -> None:
    from tests.study.conftest import toy_spec

    arm = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2}
    spec = toy_spec(arms=[arm], scoring={"metric": "loss", "bound": 3.0}, epochs=1, seed=1)
    study = Study.create(spec, f"sqlite:///{tmp_path / 'p.db'}")
    (release,) = study.run()
    figure = plots.plot_utility(study, metric="validation_loss")
    point = figure.data[-1]
    assert release.score is not None
    assert list(point.y) == [-release.score]
    assert point.error_y.visible is False
    assert figure.layout.yaxis.tickformat is None
    assert figure.layout.yaxis.title.text == "validation loss"


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
