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
    "tags.`privtune.strategy`": 150,
    "metrics.`eps/total`": 110,
    "metrics.`cost/gradient_evaluations`": 200,
    "metrics.`cost/wall_seconds`": 150,
    "tags.`privtune.cost`": 110,
    "metrics.`eps/one_run`": 120,
    "metrics.`eps/left`": 100,
    "params.`delta`": 90,
    "tags.`privtune.visibility`": 190,
}


def knows_view(version: str) -> bool:
    """Return whether a version of MLflow was seen to understand the view.

    Example:
        >>> knows_view("3.17.2"), knows_view("3.18.0rc1")
        (True, False)
    """
    return ".".join(version.split(".")[:2]) in VIEW_VERSIONS


def experiment_url(base: str, experiment_id: str, *, view: bool = True, charts: bool = True) -> str:
    """Return the address of an experiment in MLflow's UI: its saved view, with charts or as a table."""
    # Any search term in the address would make MLflow ignore the saved view.
    url = f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if view and charts:
        url += "&compareRunsMode=CHART"
    return f"{url}&viewStateShareKey={VIEW_KEY}" if view else url


def saved_view(
    *,
    params: Sequence[str],
    curves: Sequence[str],
    utility: str = "acc/test",
    ascending: bool = False,
) -> str:
    """Return the value of the experiment tag :data:`VIEW_TAG`; the best by ``utility`` comes first."""
    section = "privtune-budget"
    charts = _charts(section, params, curves, utility)
    columns = {f"metrics.`{utility}`": 110, **_COLUMNS}
    state = {
        "searchFilter": "",
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
            _section(section, "Privacy budget", shown=True),
            # MLflow adds a chart of every metric by itself; these sections keep them folded.
            *(_section(f"privtune-{name}", name, shown=False) for name in ("acc", "cost", "eps")),
            _section("privtune-model", "Model metrics", shown=False),
            _section("privtune-system", "System metrics", shown=False),
        ],
    }
    now = midnight() * 1000
    envelope = {"name": "Privacy budget", "createdAt": now, "updatedAt": now}
    return json.dumps({**envelope, "state": json.dumps(state)})


def _charts(
    section: str, params: Sequence[str], curves: Sequence[str], utility: str
) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = [
        {
            "type": "SCATTER",
            "xaxis": {"key": "eps/total", "type": "METRIC"},
            "yaxis": {"key": utility, "type": "METRIC"},
            "runsCountToCompare": 100,
        },
        _bar("eps/total", "ε of each arm"),
        _bar("cost/gradient_evaluations", "Gradient evaluations"),
        _bar("cost/wall_seconds", "Seconds (expected)"),
        _bar("eps/one_run", "ε of one training (not the promise)"),
    ]
    if "acc/val" in curves:
        charts.append(_line("acc/val", "Accuracy over ε spent", "eps/spent"))
    charts.append(_line("eps/spent", "ε spent by step", None))
    charts += [_line(name, f"{name} by step", None) for name in ("lr", "clip") if name in curves]
    if params:
        charts.append(
            {
                "type": "PARALLEL",
                "selectedParams": list(params),
                "selectedMetrics": [utility],
                "showAllRuns": False,
                "runsCountToCompare": 100,
            }
        )
    return [
        {
            "uuid": f"privtune-chart-{number}",
            "metricSectionId": section,
            "deleted": False,
            "isGenerated": False,
            "runsCountToCompare": 20,
            **chart,
        }
        for number, chart in enumerate(charts)
    ]


def _bar(metric: str, title: str) -> dict[str, Any]:
    return {"type": "BAR", "metricKey": metric, "displayName": title}


def _line(metric: str, title: str, over: str | None) -> dict[str, Any]:
    return {
        "type": "LINE",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "displayName": title,
        "xAxisKey": "step" if over is None else "metric",
        "selectedXAxisMetricKey": over or "",
        "useGlobalXaxisKey": False,
        "useGlobalLineSmoothing": True,
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": {},
    }


def _section(uuid: str, name: str, *, shown: bool) -> dict[str, Any]:
    return {"uuid": uuid, "name": name, "display": shown, "isReordered": False, "deleted": False}
