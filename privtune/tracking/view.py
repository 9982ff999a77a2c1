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
    "metrics.`eps/total`": 85,
    "metrics.`cost/gradients`": 120,
    "tags.`privtune.strategy`": 150,
    "tags.`privtune.draws`": 100,
    "metrics.`cost/seconds`": 110,
    "tags.`privtune.cost`": 110,
    "metrics.`eps/one_run`": 100,
    "metrics.`eps/left`": 85,
    "params.`delta`": 70,
    "tags.`privtune.visibility`": 190,
}
"""Columns of the list of runs and their widths; beside the charts MLflow lists names alone."""


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
    arms: int = 1,
) -> str:
    """Return the value of the experiment tag :data:`VIEW_TAG`; the best by ``utility`` comes first."""
    section = "privtune-arms"
    charts = _charts(section, params, curves, utility)
    columns = {f"metrics.`{utility}`": 85, **_COLUMNS}
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
            _section(section, "Arms, best first", shown=True)
            | {"columns": 2, "cardHeight": 360 if arms < 10 else 400},
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
    # Bars start at zero and stand in the order of the list of runs; a scatter chart has no such axis.
    bars = (utility, "cost/gradients", "eps/total", "eps/one_run", "cost/seconds")
    charts: list[dict[str, Any]] = [{"type": "BAR", "metricKey": metric} for metric in bars]
    if "acc/val" in curves:
        charts.append(_line("acc/val", "eps/spent"))
    charts.append(_line("eps/spent"))
    charts += [_line(name) for name in ("lr", "clip") if name in curves]
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


def _line(metric: str, over: str = "") -> dict[str, Any]:
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


def _section(uuid: str, name: str, *, shown: bool) -> dict[str, Any]:
    return {"uuid": uuid, "name": name, "display": shown, "isReordered": False, "deleted": False}
