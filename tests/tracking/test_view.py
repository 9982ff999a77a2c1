"""The saved view and the links to it; the browser tests hold both against the real page."""

from __future__ import annotations

import json

import pytest

from privtune.tracking.view import VIEW_KEY, VIEW_TAG, experiment_url
from tests.tracked import Tracked

pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def state_of(value: str) -> dict:
    envelope = json.loads(value)
    assert isinstance(envelope["name"], str)
    assert isinstance(envelope["createdAt"], int)
    assert isinstance(envelope["state"], str)
    return json.loads(envelope["state"])


def test_the_experiment_carries_its_view(tracked: Tracked) -> None:
    state = state_of(tracked.experiment.tags[VIEW_TAG])
    assert state["orderByKey"] == "metrics.`acc/test`"
    assert state["orderByAsc"] is False
    shown = {name.split("`")[1] for name in state["selectedColumns"]}
    logged = set().union(*(run.data.metrics for run in tracked.runs.values()))
    assert {"eps/arm", "eps/budget", "eps/left", "eps/one_run", "acc/test"} <= shown & logged
    assert state["runsHiddenMode"] == "SHOW_ALL"
    found = tracked.client.search_runs(
        [tracked.experiment.experiment_id], filter_string=state["searchFilter"]
    )
    assert {run.info.run_name for run in found} == {plan.arm for plan in tracked.study.plans}


def test_every_chart_shows_something_that_is_logged(tracked: Tracked) -> None:
    state = state_of(tracked.experiment.tags[VIEW_TAG])
    logged = set().union(*(run.data.metrics for run in tracked.runs.values()))
    params = set().union(*(run.data.params for run in tracked.runs.values()))
    section = state["compareRunSections"][0]
    assert (section["display"], section["columns"]) == (True, 2)
    charts = state["compareRunCharts"]
    assert {chart["type"] for chart in charts} == {"BAR", "LINE", "PARALLEL"}
    assert len({chart["uuid"] for chart in charts}) == len(charts)
    for chart in charts:
        assert chart["metricSectionId"] == section["uuid"]
        for key in ("metricKey", "selectedXAxisMetricKey"):
            assert chart.get(key) in {None, "", *logged}
        assert set(chart.get("selectedParams", ())) <= params


def test_the_answer_and_its_epsilon_come_first_then_how_sure_it_is(tracked: Tracked) -> None:
    state = state_of(tracked.experiment.tags[VIEW_TAG])
    # Bars, for a scatter chart of MLflow's spreads equal ε over its axis.
    names = ("acc/test", "eps/arm", "acc/test_low", "acc/test_high", "cost/gradients")
    wanted = [("BAR", name) for name in names]
    charts = state["compareRunCharts"]
    assert [(c["type"], c["metricKey"]) for c in charts[:5]] == wanted
    drawn = {chart.get("metricKey") for chart in charts}
    assert "eps/one_run" not in drawn, "it is not the promise"
    lines = [c["metricKey"] for c in charts if c["type"] == "LINE"]
    assert "lr" in lines
    assert ("clip" in lines) == any(
        len(set(release.curves.get("max_grad_norm", ()))) > 1
        for release in tracked.study.releases()
    ), "a clip that never moves needs no chart"
    columns = [name.split("`")[1] for name in state["selectedColumns"][:4]]
    assert columns == ["acc/test", "acc/test_low", "acc/test_high", "eps/arm"]


def test_a_run_has_the_colour_of_its_arm_in_the_figures(tracked: Tracked) -> None:
    from privtune.plots import plot_comparison

    reached = plot_comparison(tracked.study).data[0]
    for arm, colour in zip(reached.y, reached.marker.color, strict=True):
        assert tracked.runs[arm].data.tags["mlflow.runColor"] == colour


def test_links() -> None:
    base = "http://127.0.0.1:5000/"
    plain = "http://127.0.0.1:5000/#/experiments/3/runs?workflowType=machine_learning"
    assert experiment_url(base, "3", view=False) == plain
    assert experiment_url(base, "3", charts=False) == f"{plain}&viewStateShareKey={VIEW_KEY}"
    assert (
        experiment_url(base, "3") == f"{plain}&compareRunsMode=CHART&viewStateShareKey={VIEW_KEY}"
    )


@pytest.mark.parametrize(
    ("running", "tagged", "view"),
    [
        ("3.17.2", True, True),
        ("3.17.2", False, False),
        ("3.18.0", True, False),
        ("4.0", True, False),
    ],
)
def test_a_version_that_does_not_know_the_view_gets_a_plain_link(
    running: str, tagged: bool, view: bool
) -> None:
    from privtune.cli.commands import _address
    from privtune.tracking.process import Experiment

    experiment = Experiment("7", has_view=tagged, owner="study")
    address = _address("http://127.0.0.1:5000", experiment, running)
    assert address == experiment_url("http://127.0.0.1:5000", "7", view=view)
    assert ("viewStateShareKey" in address) == view


def test_the_installed_version_is_one_that_the_browser_tests_look_at() -> None:
    from importlib.metadata import version

    from privtune.tracking.view import knows_view

    assert knows_view(version("mlflow"))
