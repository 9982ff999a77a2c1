"""What in-run methods did with their hyperparameters: functions of paid-for releases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from privtune.plots._style import MOST_TRACES, apply_style, colours

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.study import ArmStatus, Study

_FIRST = ("learning_rate", "max_grad_norm")


def plot_trajectories(study: Study, *, arms: Sequence[ArmStatus] | None = None) -> go.Figure:
    """Plot every released curve by step, one panel a quantity, learning rate and clipping first.

    Args:
        study: A study; arms without curves (sealed ones among them) are left out.
        arms: What ``study.status()`` returned, if it was read already.

    Returns:
        A figure; without panels if there is no curve. Quantities above 0 are on a logarithmic axis.

    Example:
        >>> sorted({line.name for line in plot_trajectories(study).data})
        ['defaults']
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    read = study.status() if arms is None else arms
    released = [status.release for status in read if status.release is not None]
    curves = {release.arm: release.curves for release in released if release.curves}
    found = {name for by_name in curves.values() for name in by_name}
    names = [n for n in _FIRST if n in found] + sorted(found - set(_FIRST))
    if not names:
        figure = go.Figure()
        apply_style(figure)
        return figure
    figure = make_subplots(
        rows=len(names),
        cols=1,
        shared_xaxes=True,
        subplot_titles=[name.replace("_", " ") for name in names],
        vertical_spacing=0.32 / max(len(names), 2),
    )
    apply_style(figure, height=90 + 190 * len(names))
    palette = colours([status.plan.arm for status in read])
    labelled: set[str] = set()
    for row, name in enumerate(names, start=1):
        values = [y for by_name in curves.values() for _, y in _points(by_name.get(name, ()))]
        having = {arm: by_name for arm, by_name in curves.items() if name in by_name}
        if len(having) > MOST_TRACES:
            figure.add_trace(_in_one_line(name, having, palette), row=row, col=1)
            having = {}
        for arm, by_name in having.items():
            figure.add_trace(
                go.Scatter(
                    x=[x for x, _ in _points(by_name[name])],
                    y=[y for _, y in _points(by_name[name])],
                    name=arm,
                    legendgroup=arm,
                    showlegend=arm not in labelled,
                    mode="lines",
                    line_color=palette[arm],
                    hovertemplate="step %{x}: %{y:.4g}<extra>" + arm + "</extra>",
                ),
                row=row,
                col=1,
            )
            labelled.add(arm)
        if values and min(values) > 0 and max(values) > 3 * min(values):
            figure.update_yaxes(type="log", dtick=1, tickformat="~g", row=row, col=1)
            if max(values) < 30 * min(values):
                figure.update_yaxes(dtick="D2", row=row, col=1)
    figure.update_xaxes(title_text="step", row=len(names), col=1)
    figure.update_layout(legend={"y": 1.06})
    return figure


def _in_one_line(
    name: str, curves: Mapping[str, Mapping[str, Sequence[float]]], palette: Mapping[str, str]
) -> go.Scatter:
    """Return one curve for many arms, cut between them; hovering names the arm."""
    import plotly.graph_objects as go

    points = [
        (arm, *point)
        for arm, by_name in curves.items()
        for point in (*_points(by_name[name]), (None, None))
    ]
    return go.Scatter(
        x=[x for _, x, _ in points],
        y=[y for *_, y in points],
        text=[arm for arm, *_ in points],
        showlegend=False,
        mode="lines",
        line_color=next(iter(palette.values())),
        hovertemplate="step %{x}: %{y:.4g}<extra>%{text}</extra>",
    )


def _points(curve: Sequence[float]) -> list[tuple[int, float]]:
    """Return the steps that a curve has values for: some are looked at every few steps only."""
    return [(step, value) for step, value in enumerate(curve) if math.isfinite(value)]
