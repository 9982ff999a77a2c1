"""Arms side by side: what they reached, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.accounting import epsilon
from privtune.numbers import show_epsilon
from privtune.plots._style import MOST_TRACES, apply_style, colours, in_one, new_figure
from privtune.strategies import validation_metric
from privtune.training.mechanism.metrics import is_share

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.study import ArmStatus, Study

_Z95 = 1.959963984540054


def wilson_interval(rate: float, records: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a success rate.

    Args:
        rate: Observed rate, in [0, 1].
        records: Number of independent records it was observed on, at least 1.

    Example:
        >>> low, high = wilson_interval(0.9, 100)
        >>> round(low, 4), round(high, 4)
        (0.8256, 0.9448)
    """
    z2 = _Z95 * _Z95
    centre = (rate + z2 / (2 * records)) / (1 + z2 / records)
    half = (
        _Z95
        * math.sqrt(rate * (1 - rate) / records + z2 / (4 * records * records))
        / (1 + z2 / records)
    )
    return max(centre - half, 0.0), min(centre + half, 1.0)


def plot_utility(
    study: Study,
    *,
    metric: str = "test_accuracy",
    arms: Sequence[ArmStatus] | None = None,
) -> go.Figure:
    """Plot what each arm's released model reached against the ε of its whole procedure.

    Args:
        study: A study with at least one release.
        metric: A metric of the releases on the test split (``test_accuracy``, ``test_auc``, ...), or
            the score that arms chose by (``validation_accuracy``, ``validation_loss``, ...).
        arms: What ``study.status()`` returned, if it was read already.

    Returns:
        A figure. Bars are 95% intervals for the drawing of the test records, and for the noise where
        they are private; a score has none, for it was chosen by. A hollow
        marker stands at the ε of the released model's training alone: what is
        reported when the search is forgotten.
        Arms at the same ε are moved apart a little; hovering shows the exact ε. An arm without any
        guarantee has no place on the axis.

    Example:
        >>> plot_utility(study).layout.xaxis.title.text
        'ε of the arm (δ = 1e-05)'
    """
    import plotly.graph_objects as go

    budget = study.spec.budget
    # Only a task declares a test split public; an open study has no such metric.
    records = 1 if study.spec.task is None else study.spec.load_task().test_records
    read = study.status() if arms is None else arms
    palette = colours([status.plan.arm for status in read])
    figure = new_figure(x=f"ε of the arm (δ = {budget.delta:g})", y=metric.replace("_", " "))
    share = is_share(
        metric.removeprefix("validation_").removeprefix("tuning_").removeprefix("test_")
    )
    digits = ".1%" if share else ".4f"
    private = [status for status in read if math.isfinite(status.guarantee.epsilon)]
    searched: list[dict[str, Any]] = []
    reached: list[dict[str, Any]] = []
    apart = 0.012 * max((status.guarantee.epsilon for status in private), default=0.0)
    for place, status in enumerate(private):
        arm, value = status.plan.arm, _value_of(status, metric)
        if value is None:
            continue
        scored = metric.startswith(("validation_", "tuning_"))
        low, high = (value, value) if scored else _interval(status, metric, value, records)
        total = status.guarantee.epsilon
        one = epsilon(status.plan.training.event, budget.delta, adjacency=budget.adjacency).epsilon
        if status.plan.is_sealed:
            searched.append(
                {
                    "x": [one, total + place * apart],
                    "y": [value, value],
                    "mode": "lines+markers",
                    "line": {"color": palette[arm], "dash": "dot", "width": 1},
                    "marker": {"symbol": ["circle-open", "circle"], "size": [11, 1]},
                    "showlegend": False,
                    "hovertemplate": f"{arm}: one training alone, ε = {show_epsilon(one, 4)}"
                    "<extra></extra>",
                }
            )
        reached.append(
            {
                "x": [total + place * apart],
                "y": [value],
                "name": arm,
                "mode": "markers",
                "marker": {"color": palette[arm], "size": 12},
                "error_y": {
                    "type": "data",
                    "visible": not scored,
                    "symmetric": False,
                    "array": [high - value],
                    "arrayminus": [value - low],
                    "thickness": 1.5,
                    "width": 6,
                },
                "hovertemplate": f"{arm}<br>{value:{digits}}<br>ε = {show_epsilon(total, 4)}"
                "<extra></extra>"
                if scored
                else f"{arm}<br>{value:{digits}} [{low:{digits}}, {high:{digits}}]<br>"
                f"ε = {show_epsilon(total, 4)}<extra></extra>",
            }
        )
    if len(reached) > MOST_TRACES:
        searched = [in_one([_alone(trace) for trace in searched])] if searched else []
        reached = [in_one(reached)]
    figure.add_traces([go.Scatter(**trace) for trace in (*searched, *reached)])
    if share:
        figure.update_yaxes(tickformat=".0%")
    figure.update_xaxes(rangemode="tozero")
    return figure


def _alone(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hollow marker of a training alone, without the line to the whole procedure."""
    marker = {"color": trace["line"]["color"], "symbol": "circle-open", "size": 11}
    return {
        "x": trace["x"][:1],
        "y": trace["y"][:1],
        "name": "",
        "mode": "markers",
        "marker": marker,
        "hovertemplate": trace["hovertemplate"],
    }


def _interval(status: ArmStatus, metric: str, value: float, records: int) -> tuple[float, float]:
    """Return a public accuracy's Wilson interval; another's own, ends that are no interval if none."""
    release = status.release
    public = status.plan.report is None or status.plan.report.event is None
    if metric == "test_accuracy" and public:
        return wilson_interval(value, records)
    ends = (value, value) if release is None else release.intervals.get(metric, (value, value))
    return min(ends[0], value), max(ends[1], value)


def _value_of(status: ArmStatus, metric: str) -> float | None:
    release = status.release
    if release is None:
        return None
    scores = validation_metric(status.plan.score, release.score, of=status.plan.scored)
    return {**scores, **release.utility}.get(metric)


def plot_cost(study: Study, *, arms: Sequence[ArmStatus] | None = None) -> go.Figure:
    """Plot gradient evaluations and seconds of every arm.

    Args:
        study: A study.
        arms: What ``study.status()`` returned, if it was read already.

    Returns:
        A figure with two panels. Hatched bars are the plan's expectation: what a training took would
        tell how many records there are, and a sealed round its number of runs.

    Example:
        >>> [bar.marker.pattern.shape for bar in plot_cost(study).data if bar.name == "selection"]
        ['/', '/']
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = ("gradient evaluations (expected)", "seconds (hatched: expected)")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.14)
    apply_style(figure, height=320, side_by_side=True)
    read = study.status() if arms is None else arms
    palette = colours([status.plan.arm for status in read])
    bars: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for status in read:
        arm = status.plan.arm
        seconds = None if status.release is None else status.release.cost.wall_seconds
        hatched = {"shape": "/" if status.plan.is_private else ""}
        for column, value in ((1, status.plan.expected_gradient_evaluations), (2, seconds)):
            bars[column].append(
                {
                    "x": [arm],
                    "y": [value],
                    "name": arm,
                    "showlegend": False,
                    "marker": {"color": palette[arm], "pattern": hatched},
                    "hovertemplate": "%{x}: %{y:,.3~s}<extra></extra>",
                }
            )
    for column, drawn in bars.items():
        if len(drawn) > MOST_TRACES:
            shapes = [bar["marker"]["pattern"]["shape"] for bar in drawn]
            together = in_one(drawn)
            together["marker"]["pattern"] = {"shape": shapes}
            bars[column] = [together]
        for bar in bars[column]:
            figure.add_trace(go.Bar(**bar), row=1, col=column)
    return figure
