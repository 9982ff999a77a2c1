"""Results of many studies side by side: what one ε bought, task by task."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from privtune.errors import InvalidInputError
from privtune.plots._style import COLOURS, apply_style, colours

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["plot_results"]

_COLUMNS = 2
_SYMBOLS = ("circle", "diamond", "square", "x")


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
    from plotly.subplots import make_subplots

    cells: dict[tuple[str, str], dict[float, list[Mapping[str, str]]]]
    cells = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if missing := [name for name in ("task", "arm", "epsilon", metric) if not row.get(name)]:
            raise InvalidInputError("row", dict(row), f"lacks {', '.join(missing)}")
        cells[row["task"], row["arm"]][float(row["epsilon"])].append(row)
    tasks = list(dict.fromkeys(task for task, _ in cells))
    arms = list(dict.fromkeys(arm for _, arm in cells))
    palette = colours(arms)
    # Colours start over after eight: then the marker tells arms apart.
    symbols = {arm: _SYMBOLS[i // len(COLOURS) % len(_SYMBOLS)] for i, arm in enumerate(arms)}
    figure = make_subplots(
        rows=max(1, math.ceil(len(tasks) / _COLUMNS)), cols=_COLUMNS, subplot_titles=tasks
    )
    apply_style(figure, height=300 * max(1, math.ceil(len(tasks) / _COLUMNS)), side_by_side=True)
    shown: set[str] = set()
    for (task, arm), by_epsilon in cells.items():
        above, left = divmod(tasks.index(task), _COLUMNS)
        points = sorted(by_epsilon.items())
        values = [[float(each[metric]) for each in group] for _, group in points]
        means = [statistics.mean(value) for value in values]
        figure.add_trace(
            go.Scatter(
                x=[epsilon for epsilon, _ in points],
                y=means,
                name=arm,
                legendgroup=arm,
                showlegend=arm not in shown,
                mode="lines+markers",
                line={"color": palette[arm]},
                marker={"symbol": symbols[arm], "size": 8},
                error_y={"type": "data", "array": [_standard_error(value) for value in values]},
                hovertemplate=f"{arm}<br>%{{y:.3f}} at ε = %{{x}}<extra></extra>",
            ),
            row=above + 1,
            col=left + 1,
        )
        shown.add(arm)
        for (epsilon, group), mean in zip(points, means, strict=True):
            claimed = float(group[0].get("claimed") or epsilon)
            if claimed < 0.999 * epsilon:
                figure.add_trace(
                    go.Scatter(
                        x=[claimed, epsilon],
                        y=[mean, mean],
                        mode="lines+markers",
                        line={"color": palette[arm], "dash": "dot", "width": 1},
                        marker={"symbol": ["circle-open", "circle"], "size": [9, 1]},
                        legendgroup=arm,
                        showlegend=False,
                        hovertemplate=f"{arm}: one training alone, ε = {claimed:.3f}<extra></extra>",
                    ),
                    row=above + 1,
                    col=left + 1,
                )
    figure.update_xaxes(title="ε (hollow: as usually claimed)", rangemode="tozero")
    figure.update_yaxes(title=metric)
    figure.update_layout(showlegend=True, legend={"yanchor": "top", "y": -0.14})
    return figure


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
