"""One look for all figures: colours that everybody can tell apart, no background of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_TRACES = 24
"""Arms with a trace each; of more no legend can be read, and Plotly takes seconds to make them."""

_TABLE = (
    ("#0072b2", "circle"), ("#d55e00", "square"), ("#009e73", "diamond"),
    ("#aa55ff", "triangle-up"), ("#ccbb00", "cross"), ("#66bbff", "x"), ("#6611aa", "star"),
    ("#882200", "triangle-down"), ("#ff77bb", "pentagon"), ("#bb0077", "triangle-right"),
    ("#0000ee", "diamond-tall"), ("#005544", "triangle-left"),
)  # fmt: skip
"""Colours, the first three of Okabe and Ito (2008), far apart with any colour vision and on any paper."""

COLOURS = tuple(colour for colour, _ in _TABLE)
GREY = "#808896"
_GRID = "rgba(128,136,150,0.25)"
_TEXT = "#3c4656"


class Look(NamedTuple):
    """The colour and symbol of an arm in every figure, page and tracker.

    Args:
        colour: As CSS writes it.
        symbol: Plotly's name of a mark: it tells arms apart where colours do not.
    """

    colour: str
    symbol: str


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Return a colour and a mark for each name, by position; no two of 144 share both.

    Example:
        >>> looks(["a", "b"])["b"]
        Look(colour='#d55e00', symbol='square')
    """
    size = len(_TABLE)
    look = {}
    for place, name in enumerate(names):
        # After every round of the colours the symbols are one further.
        turn = place // size
        _, symbol = _TABLE[(place + turn) % size]
        look[name] = Look(COLOURS[place % size], symbol)
    return look


def new_figure(*, x: str = "", y: str = "", height: int = 340) -> go.Figure:
    """Return an empty figure with axis titles (units included) and the common look."""
    import plotly.graph_objects as go

    figure = go.Figure()
    apply_style(figure, height=height)
    figure.update_xaxes(title_text=x)
    figure.update_yaxes(title_text=y)
    return figure


def apply_style(figure: Any, *, height: int = 340, side_by_side: bool = False) -> None:
    """Give a figure the common look; ``side_by_side`` lets a narrow screen stack its panels."""
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
    figure.update_xaxes(**axis, tickangle=0)
    figure.update_yaxes(**axis)
