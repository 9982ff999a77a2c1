"""The saved view that goes with a study's experiment, and the links into MLflow's UI.

MLflow keeps saved views of its runs page as experiment tags in a format of its own, which is not
documented: a browser test holds it against the version that is installed, and `VIEW_VERSIONS` lists
those that were. With another version links open the plain runs page; the view stays in the menu.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from privtune.files import midnight

VIEW_KEY = "privtune"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"

VIEW_VERSIONS = ("3.17",)
"""Minor versions of MLflow whose pages were seen to understand the view."""

_COLUMNS = {
    "metrics.`eps/arm`": 85,
    "metrics.`cost/gradients`": 120,
    "tags.`privtune.strategy`": 150,
    "tags.`privtune.draws`": 100,
    "metrics.`cost/cpu_seconds`": 110,
    "tags.`privtune.beats_constant`": 150,
    "metrics.`eps/one_run`": 100,
    "metrics.`eps/budget`": 100,
    "metrics.`eps/left`": 85,
    "params.`delta`": 70,
    "tags.`privtune.visibility`": 190,
}
"""Columns of the list of runs and their widths; beside the charts MLflow lists names alone."""


def knows_view(version: str) -> bool:
    """Return whether the saved view was tried with a version of MLflow.

    Example:
        >>> knows_view("3.17.2"), knows_view("3.18.0rc1")
        (True, False)
    """
    return ".".join(version.split(".")[:2]) in VIEW_VERSIONS


def experiment_url(base: str, experiment_id: str, *, view: bool = True, charts: bool = True) -> str:
    """Return the address of an experiment in MLflow's UI: its saved view, with charts or as a table."""
    # Any search term in the address would make MLflow ignore the saved view.
    url = f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if not view:
        return url
    if charts:
        url += "&compareRunsMode=CHART"
    return f"{url}&viewStateShareKey={VIEW_KEY}"


def saved_view(
    *,
    params: Sequence[str],
    curves: Sequence[str],
    utility: str = "acc/test",
    sureness: Sequence[str] = (),
    ascending: bool = False,
    arms: int = 1,
) -> str:
    """Return the saved view of an experiment, as the value of its tag :data:`VIEW_TAG`.

    Args:
        params: Hyperparameters that several arms have.
        curves: Curves that move.
        utility: The metric that arms are compared by; the best comes first.
        sureness: The metrics that tell how sure it is: the ends of its interval, or its standard error.
        ascending: Whether less is better.
        arms: How many arms there are.
    """
    section = "privtune-arms"
    charts = _charts(section, params, curves, utility, sureness)
    # What an arm reached, how surely and at what ε, before all else: a narrow page shows the first alone.
    scores = [f"metrics.`{name}`" for name in (utility, *sureness)]
    columns = {**dict.fromkeys(scores, 100), **_COLUMNS}
    state = {
        "searchFilter": "tags.`privtune.kind` = 'arm'",  # no trials of an arm that shows them
        "orderByKey": f"metrics.`{utility}`",
        "orderByAsc": ascending,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(columns),
        "columnOrder": list(columns),
        "columnWidths": columns,
        "runsHiddenMode": "SHOW_ALL",
        "runsHidden": [],
        "runListHidden": False,
        "viewMaximized": False,
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "useGroupedValuesInCharts": True,
        "globalLineChartConfig": {
            "xAxisKey": "step",
            "lineSmoothness": 0,
            "selectedXAxisMetricKey": "",
        },
        "compareRunCharts": charts,
        "compareRunSections": [
            # Two in a row, or MLflow cuts the titles beside its assistant; heights are MLflow's own.
            {
                **_section(section, "Arms, best first", is_open=True),
                "columns": 2,
                "cardHeight": 360 if arms < 10 else 400,
            },
            # MLflow adds a chart of every metric by itself; these sections keep them folded.
            _section("privtune-acc", "acc"),
            _section("privtune-cost", "cost"),
            _section("privtune-eps", "eps"),
            _section("privtune-model", "Model metrics"),
            _section("privtune-system", "System metrics"),
        ],
    }
    now = midnight() * 1000
    envelope = {"name": "Privacy budget", "createdAt": now, "updatedAt": now}
    return json.dumps({**envelope, "state": json.dumps(state)})


def _charts(
    section: str,
    params: Sequence[str],
    curves: Sequence[str],
    utility: str,
    sureness: Sequence[str],
) -> list[dict[str, Any]]:
    """Return the saved view's charts: the answer and its ε, its certainty, cost, curves and the rest."""
    # Two stand in the first row, and little else is on a first screen.
    charts = [_bar(metric) for metric in (utility, "eps/arm", *sureness, "cost/gradients")]
    if "acc/val" in curves:
        charts.append(_line("acc/val", "eps/arm_steps"))
    charts += [_line(name) for name in ("lr", "clip") if name in curves]
    charts += [_bar("cost/cpu_seconds"), _line("eps/arm_steps")]
    if params:
        charts.append(
            {
                "type": "PARALLEL",
                "selectedParams": list(params),
                "selectedMetrics": [utility],
                "showAllRuns": False,
            }
        )
    return [
        {
            "uuid": f"privtune-chart-{number}",
            "metricSectionId": section,
            "deleted": False,
            "isGenerated": False,
            "runsCountToCompare": 100,
            **chart,
        }
        for number, chart in enumerate(charts)
    ]


def _bar(metric: str) -> dict[str, Any]:
    """Return a bar chart of a metric.

    They start at zero and stand in the order of the list of runs; a scatter chart has no such axis.
    """
    return {"type": "BAR", "metricKey": metric}


def _line(metric: str, over: str = "") -> dict[str, Any]:
    """Return a line chart of a metric, over steps or over another metric."""
    return {
        "type": "LINE",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "xAxisKey": "metric" if over else "step",
        "selectedXAxisMetricKey": over,
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": True,
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": {},
    }


def _section(
    uuid: str,
    name: str,
    *,
    is_open: bool = False,
) -> dict[str, Any]:
    """Return a section of charts in MLflow's form, open or folded."""
    return {
        "uuid": uuid,
        "name": name,
        "display": is_open,
        "isReordered": False,
        "deleted": False,
    }
