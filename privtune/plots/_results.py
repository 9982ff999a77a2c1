"""Figures of many studies, from the rows of a results file: means with their standard errors."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from privtune.errors import InvalidInputError
from privtune.numbers import show_epsilon
from privtune.plots.style import Look, apply_style, looks

if TYPE_CHECKING:
    import plotly.graph_objects as go

_COLUMNS = 2
_MOST_TICKS = 8  # of a logarithmic axis, one at each place; plotly chooses them for more places
_Points = dict[float, list[float]]  # values of rows by their place on the horizontal axis
_QUOTED = ", paper"  # ends the name of a line that is quoted, not measured


def plot_lines(
    rows: Sequence[Mapping[str, str]],
    *,
    x: str,
    y: str,
    line: str,
    panel: str | None = None,
    log: Literal["", "x", "y", "xy"] = "",
    bars: Literal["error", "deviation"] = "error",
    strategies: Mapping[str, str] | None = None,
) -> go.Figure:
    """Plot two columns of a results file, with lines and panels by the values of two other columns.

    Args:
        rows: The rows, as ``csv.DictReader`` reads them.
        x: The column of the horizontal axis.
        y: The column of the vertical axis.
        line: The column that names the lines. One whose name ends in ``", paper"`` is quoted, not
            measured: it has the colour of the line without that, dashes and hollow markers.
        panel: The column that names the panels, two in a row; all is in one without it.
        log: The axes with logarithmic scales.
        bars: What is shown about a mean: its standard error, or the deviation of the rows.
        strategies: The strategy of each line that is one, whose colour it gets; a line that is named after
            its strategy needs none.

    Returns:
        A figure. Points are means over the rows that share line, panel and ``x``.

    Raises:
        InvalidInputError: If a row lacks a column.

    Example:
        >>> rows = [{"arm": a, "steps": s, "loss": s} for a in "ab" for s in ("1", "2")]
        >>> [trace.name for trace in plot_lines(rows, x="steps", y="loss", line="arm").data]
        ['a', 'b']
    """
    from plotly.subplots import make_subplots

    columns_used = [name for name in (panel, line, x, y) if name is not None]
    cells: dict[tuple[str, str], _Points]
    cells = defaultdict(lambda: defaultdict(list))
    for row in rows:
        missing = [name for name in columns_used if not row.get(name)]
        if missing:
            raise InvalidInputError("row", dict(row), f"lacks {', '.join(missing)}")
        panel_name = row[panel] if panel else ""
        points = cells[panel_name, row[line]]
        place = float(row[x])
        points[place].append(float(row[y]))
    panels = list(dict.fromkeys(panel_name for panel_name, _ in cells))
    measured = dict.fromkeys(name.removesuffix(_QUOTED) for _, name in cells)
    look = looks(list(measured), strategies)
    columns = min(_COLUMNS, max(1, len(panels)))
    above = max(1, math.ceil(len(panels) / columns))
    figure = make_subplots(rows=above, cols=columns, subplot_titles=panels if panel else None)
    height = max(360, 300 * above)
    apply_style(figure, height=height, side_by_side=columns > 1)
    labelled: set[str] = set()
    for (panel_name, name), points in cells.items():
        trace = _line_trace(
            name,
            points,
            look[name.removesuffix(_QUOTED)],
            x=x,
            bars=bars,
            in_legend=name not in labelled,
        )
        row_of, column_of = divmod(panels.index(panel_name), columns)
        figure.add_trace(trace, row=row_of + 1, col=column_of + 1)
        labelled.add(name)
    figure.update_xaxes(title=x, type="log" if "x" in log else "linear")
    places = sorted({place for points in cells.values() for place in points})
    if "x" in log and len(places) <= _MOST_TICKS:
        figure.update_xaxes(tickvals=places, ticktext=[f"{place:g}" for place in places])
    figure.update_yaxes(title=y, type="log" if "y" in log else "linear")
    # A share of the height: below the title of the axis where there is one row of panels.
    below = -0.18 if above > 1 else -0.28
    figure.update_layout(showlegend=True, legend={"yanchor": "top", "y": below})
    return figure


def _line_trace(
    name: str,
    points: _Points,
    look: Look,
    *,
    x: str,
    bars: Literal["error", "deviation"],
    in_legend: bool,
) -> go.Scatter:
    """Return a line through means, with an error bar to each side; dashed for quoted results.

    Args:
        name: The line's.
        points: Values of all rows by their place on the horizontal axis.
        look: Of the line, or of the measured line that it is quoted beside.
        x: What the horizontal axis is.
        bars: What is shown about a mean.
        in_legend: Of several panels the legend has a line once.
    """
    import plotly.graph_objects as go

    is_quoted = name.endswith(_QUOTED)
    places = sorted(points)
    return go.Scatter(
        x=places,
        y=[statistics.mean(points[place]) for place in places],
        name=name,
        legendgroup=name,
        showlegend=in_legend,
        mode="lines+markers",
        line={
            "color": look.colour,
            "dash": "dash" if is_quoted else "solid",
        },
        marker={
            "symbol": f"{look.symbol}-open" if is_quoted else look.symbol,
            "size": 8,
        },
        error_y={
            "type": "data",
            "array": [_bar(points[place], bars) for place in places],
        },
        hovertemplate=f"{name}<br>%{{y:.4g}} at {x} = %{{x}}<extra></extra>",
    )


def _bar(values: Sequence[float], kind: Literal["error", "deviation"]) -> float:
    """Return the length of an error bar: a standard error or a deviation, 0 for a single value."""
    if len(values) < 2:
        return 0.0
    deviation = statistics.stdev(values)
    if kind == "deviation":
        return deviation
    return deviation / math.sqrt(len(values))


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
    axes = {}
    tasks = dict.fromkeys(row["task"] for row in rows)
    for number, task in enumerate(tasks, start=1):
        axes[task] = "x" if number == 1 else f"x{number}"  # Plotly's names of axes
    claims = {}
    for row in rows:
        epsilon = float(row["epsilon"])
        claims[row["task"], row["arm"], epsilon] = row.get("claimed")
    for (task, arm, epsilon), claim in claims.items():
        claimed = float(claim or epsilon)
        if claimed < 0.999 * epsilon:
            trace = lines[axes[task], arm]
            place = list(trace.x).index(epsilon)
            mean = trace.y[place]
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
