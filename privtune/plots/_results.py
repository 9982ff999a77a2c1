"""Results of many studies side by side: what one ε bought, task by task."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from privtune.numbers import show_epsilon
from privtune.plots._lines import plot_lines

if TYPE_CHECKING:
    import plotly.graph_objects as go


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
    axes = dict(zip(dict.fromkeys(row["task"] for row in rows), _axes(), strict=False))
    claims = {(row["task"], row["arm"], float(row["epsilon"])): row.get("claimed") for row in rows}
    for (task, arm, epsilon), given in claims.items():
        claimed = float(given or epsilon)
        if claimed < 0.999 * epsilon:
            trace = lines[f"x{axes[task]}", arm]
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


def _axes() -> Iterator[str]:
    """Return Plotly's names of axes after their first letter: nothing, 2, 3 and so on."""
    return itertools.chain([""], map(str, itertools.count(2)))
