"""One look for all figures: colours that everybody can tell apart, no background of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_TRACES = 24
"""Arms with a trace each; of more no legend can be read, and Plotly takes seconds to make them."""

COLOURS = ("#2f6fdd", "#d1600a", "#0a8f6a", "#b0418f", "#7a6ff0", "#a07c00", "#5b6675", "#c0392b")
"""Distinguishable with any colour vision, and on white as on near-black."""

_GRID = "rgba(128,136,150,0.25)"
_TEXT = "#3c4656"


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name, by position; more than eight start over."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def in_one(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one trace for many of one kind, each point with its own colour and text."""

    def each(value: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
        return [value(trace) for trace in traces for _ in trace["x"]]

    first = traces[0]
    found = {
        **first,
        "x": [x for trace in traces for x in trace["x"]],
        "y": [y for trace in traces for y in trace["y"]],
        "name": "",
        "showlegend": False,
        "marker": {**first["marker"], "color": each(lambda trace: trace["marker"]["color"])},
        "hovertemplate": each(lambda trace: trace["hovertemplate"]),
    }
    if "error_y" in first:
        ends = {
            end: [value for trace in traces for value in trace["error_y"][end]]
            for end in ("array", "arrayminus")
        }
        found["error_y"] = {**first["error_y"], **ends}
    return found


def new_figure(*, x: str = "", y: str = "", height: int = 340) -> go.Figure:
    """Return an empty figure with axis titles (units included) and the common look."""
    import plotly.graph_objects as go

    figure = go.Figure()
    apply_style(figure, height=height)
    figure.update_xaxes(title_text=x)
    figure.update_yaxes(title_text=y)
    return figure


def apply_style(figure: Any, *, height: int = 340, side_by_side: bool = False) -> None:
    """Give a figure the common look; a narrow screen may put two panels side by side one above the other."""
    figure.update_layout(
        meta={"sideBySide": side_by_side},
        template="none",
        height=height,
        margin={"l": 64, "r": 20, "t": 34, "b": 52},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": _TEXT},
        colorway=list(COLOURS),
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        hoverlabel={"align": "left"},
    )
    axis = {"gridcolor": _GRID, "zeroline": False, "automargin": True, "linecolor": _GRID}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
