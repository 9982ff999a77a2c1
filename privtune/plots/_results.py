"""Figures of many studies, from the rows of a results file: means with their standard errors."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from privtune.errors import InvalidInputError
from privtune.numbers import show_epsilon
from privtune.plots._style import apply_style, looks

if TYPE_CHECKING:
    import plotly.graph_objects as go

_COLUMNS = 2
_GIVEN = ", paper"


def plot_lines(
    rows: Sequence[Mapping[str, str]],
    *,
    x: str,
    y: str,
    line: str,
    panel: str | None = None,
    log: Literal["", "x", "y", "xy"] = "",
    bars: Literal["error", "deviation"] = "error",
) -> go.Figure:
    """Plot one column of a results file against another, a line each of a third, panels of a fourth.

    Args:
        rows: The rows, as ``csv.DictReader`` reads them.
        x: The column of the horizontal axis.
        y: The column of the vertical axis.
        line: The column that names the lines. One whose name ends in ``", paper"`` is quoted, not
            measured: it has the colour of the line without that, dashes and hollow markers.
        panel: The column that names the panels, two in a row; all is in one without it.
        log: The axes with logarithmic scales.
        bars: What is shown about a mean: its standard error, or the deviation of the rows.

    Returns:
        A figure. Points are means over the rows that share line, panel and ``x``.

    Raises:
        InvalidInputError: If a row lacks a column.

    Example:
        >>> rows = [{"arm": a, "steps": s, "loss": s} for a in "ab" for s in ("1", "2")]
        >>> [trace.name for trace in plot_lines(rows, x="steps", y="loss", line="arm").data]
        ['a', 'b']
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    needed = [name for name in (panel, line, x, y) if name is not None]
    cells: dict[tuple[str, str], dict[float, list[float]]]
    cells = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if missing := [name for name in needed if not row.get(name)]:
            raise InvalidInputError("row", dict(row), f"lacks {', '.join(missing)}")
        cells[row[panel] if panel else "", row[line]][float(row[x])].append(float(row[y]))
    panels = list(dict.fromkeys(each for each, _ in cells))
    names = list(dict.fromkeys(name.removesuffix(_GIVEN) for _, name in cells))
    look = looks(names)
    columns = min(_COLUMNS, max(1, len(panels)))
    above = max(1, math.ceil(len(panels) / columns))
    figure = make_subplots(rows=above, cols=columns, subplot_titles=panels if panel else None)
    apply_style(figure, height=max(360, 300 * above), side_by_side=columns > 1)
    shown: set[str] = set()
    for (each, name), points in cells.items():
        of, quoted = name.removesuffix(_GIVEN), name.endswith(_GIVEN)
        at = sorted(points)
        row_of, column_of = divmod(panels.index(each), columns)
        figure.add_trace(
            go.Scatter(
                x=at,
                y=[statistics.mean(points[value]) for value in at],
                name=name,
                legendgroup=name,
                showlegend=name not in shown,
                mode="lines+markers",
                line={"color": look[of].colour, "dash": "dash" if quoted else "solid"},
                marker={"symbol": look[of].symbol + ("-open" if quoted else ""), "size": 8},
                error_y={"type": "data", "array": [_bar(points[value], bars) for value in at]},
                hovertemplate=f"{name}<br>%{{y:.4g}} at {x} = %{{x}}<extra></extra>",
            ),
            row=row_of + 1,
            col=column_of + 1,
        )
        shown.add(name)
    figure.update_xaxes(title=x, type="log" if "x" in log else "linear")
    figure.update_yaxes(title=y, type="log" if "y" in log else "linear")
    # A share of the height: below the title of the axis where there is one row of panels.
    below = -0.18 if above > 1 else -0.28
    figure.update_layout(showlegend=True, legend={"yanchor": "top", "y": below})
    return figure


def _bar(values: Sequence[float], what: str) -> float:
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values) / (math.sqrt(len(values)) if what == "error" else 1.0)


def plot_results(rows: Sequence[Mapping[str, str]], *, metric: str = "accuracy") -> go.Figure:
    """Plot a metric of released models against ε, a panel a task and a line an arm.

    Args:
        rows: One a release, as a results file has them: ``task``, ``arm``, ``epsilon``, the metric,
            and, where it is known, ``claimed``: the ε of the released model's training alone.
        metric: The column of the metric.

    Returns:
        A figure. Points are means over the rows of an arm at an ε, bars their standard error (none
        for a single row); a hollow marker stands at the ε that would have been claimed.

    Raises:
        InvalidInputError: If a row lacks a column.

    Example:
        >>> rows = [{"task": "digits", "arm": a, "epsilon": "1", "accuracy": "0.9"} for a in "ab"]
        >>> [trace.name for trace in plot_results(rows).data]
        ['a', 'b']
    """
    import plotly.graph_objects as go

    figure = plot_lines(rows, x="epsilon", y=metric, line="arm", panel="task")
    lines = {(trace.xaxis, trace.name): trace for trace in figure.data}
    tasks = enumerate(dict.fromkeys(row["task"] for row in rows), start=1)
    axes = {task: f"x{i if i > 1 else ''}" for i, task in tasks}  # Plotly's names of axes
    claims = {(row["task"], row["arm"], float(row["epsilon"])): row.get("claimed") for row in rows}
    for (task, arm, epsilon), given in claims.items():
        claimed = float(given or epsilon)
        if claimed < 0.999 * epsilon:
            trace = lines[axes[task], arm]
            mean = trace.y[list(trace.x).index(epsilon)]
            figure.add_trace(
                go.Scatter(
                    x=[claimed, epsilon],
                    y=[mean, mean],
                    xaxis=trace.xaxis,
                    yaxis=trace.yaxis,
                    mode="lines+markers",
                    line={"color": trace.line.color, "dash": "dot", "width": 1},
                    marker={"symbol": ["circle-open", "circle"], "size": [9, 1]},
                    legendgroup=arm,
                    showlegend=False,
                    hovertemplate=f"{arm}: one training alone, ε = {show_epsilon(claimed)}<extra></extra>",
                )
            )
    figure.update_xaxes(title="ε (hollow: as usually claimed)", rangemode="tozero")
    return figure
