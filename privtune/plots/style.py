"""One look for all figures: colours that everybody can tell apart, no background of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.strategies import Plan

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
STRATEGIES_BY_LOOK = (
    "fixed", "papernot-steinke", "hyfreedp", "subsampled-tuning", "auto", "public-rate",
    "subset-search", "adadp", "adaclip", "prodigy", "liu-talwar", "everything",
)  # fmt: skip
"""The strategies that have a colour of their own wherever they appear, in the order of the colours."""

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


def looks(names: Sequence[str], strategies: Mapping[str, str] | None = None) -> dict[str, Look]:
    """Return a colour and a mark for each name; no two of 132 share both.

    The first arm of a strategy has that strategy's own look, which is the same in every study. Names of no
    strategy get the looks in order; beside strategies, further arms get the looks of the rarest ones first.

    Args:
        names: Arms or lines, in the order in which they are drawn.
        strategies: The strategy of each name; a name that is missing here stands for itself, in lower case.

    Example:
        >>> looks(["a", "b"], {"a": "hyfreedp", "b": "hyfreedp"})
        {'a': Look(colour='#009e73', symbol='diamond'), 'b': Look(colour='#005544', symbol='triangle-left')}
        >>> looks(["ADADP"])["ADADP"] == looks(["mine"], {"mine": "adadp"})["mine"]
        True
    """
    every = _all_looks(len(names) + len(_TABLE))
    further = every[len(_TABLE) :]
    unused = dict(zip(STRATEGIES_BY_LOOK, every, strict=False))
    fixed: dict[str, Look] = {}
    for name in names:
        strategy = (strategies or {}).get(name, name.lower())
        if strategy in unused:
            fixed[name] = unused.pop(strategy)
    rest = [*unused.values()]
    if fixed:
        rest.reverse()
    free = iter([*rest, *further])
    return {name: fixed[name] if name in fixed else next(free) for name in names}


def looks_of(plans: Iterable[Plan]) -> dict[str, Look]:
    """Return the colour and symbol of each arm of a study, the same in every figure, page and tracker.

    ``auto: hyfreedp`` and the like have the look of ``auto``: what it chose differs from study to study.
    """
    strategies = {plan.arm: plan.strategy.partition(":")[0] for plan in plans}
    return looks([*strategies], strategies)


def _all_looks(count: int) -> list[Look]:
    """Return looks in their order: after every round of the colours the symbols are one further."""
    size = len(_TABLE)
    ordered: list[Look] = []
    for place in range(count):
        turn = place // size
        _, symbol = _TABLE[(place + turn) % size]
        ordered.append(Look(COLOURS[place % size], symbol))
    return ordered


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
