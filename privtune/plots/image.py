"""A figure as a picture, drawn by Matplotlib: Plotly needs a browser for that."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.imports import OWN_PROCESS, find_extra

if TYPE_CHECKING:
    import plotly.graph_objects as go

KINDS = (".png", ".svg", ".pdf")
_DATES = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # when it was drawn is nobody's
_MARKS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "cross": "P",
    "x": "X",
    "star": "*",
    "triangle-down": "v",
    "pentagon": "p",
    "triangle-right": ">",
    "diamond-tall": "d",
    "triangle-left": "<",
}
"""Matplotlib's letters for Plotly's symbols."""


@contextlib.contextmanager
def _away_from_settings() -> Iterator[None]:
    """Change to a folder without settings for a ``with`` block that imports Matplotlib for the first time.

    It reads ``matplotlibrc`` in the working folder, which may belong to anybody; the user's own counts.
    """
    if "matplotlib" in sys.modules or not OWN_PROCESS.is_set():
        yield
        return
    with contextlib.chdir(Path(__file__).parent):
        yield


def to_image(figure: go.Figure, kind: str) -> bytes:
    """Return the figure of :func:`~privtune.plots.plot_comparison` as a picture in one of ``KINDS``.

    Args:
        figure: Its axes, traces and titles are read; no other figure has the same panels.
        kind: One of ``KINDS``, with its point.

    Returns:
        The bytes of the file, without a date: equal figures give equal files.
    """
    with _away_from_settings():
        module = find_extra("matplotlib.figure", extra="ui", what=f"A chart as {kind}")
    layout = figure.layout
    rows = {arm: place for place, arm in enumerate(layout.yaxis.categoryarray)}
    size = (10.0, 1.2 + 0.38 * len(rows))
    picture = module.Figure(figsize=size, dpi=150, layout="constrained")
    shares = {"width_ratios": [0.46, 0.27, 0.27]}
    panels = picture.subplots(1, 3, sharey=True, gridspec_kw=shares)
    for trace in figure.data:
        number = int(trace.xaxis[1:] or 1)  # Plotly's axes are x, x2, x3
        places = [rows[arm] for arm in trace.y]
        _draw(panels[number - 1], trace, places)
    ranges = (layout.xaxis, layout.xaxis2, layout.xaxis3)
    for axes, title, range_ in zip(panels, layout.annotations, ranges, strict=True):
        axes.set_title(_plain(title.text), fontsize="medium")
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if range_.rangemode == "tozero":
            axes.margins(x=0.3)  # for the numbers of bars
            axes.set_xlim(left=0.0)
    if layout.xaxis.tickformat == ".0%":
        panels[0].xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    labels = [_plain(text) for text in layout.yaxis.ticktext]
    panels[0].set_yticks(range(len(rows)), labels)
    file = io.BytesIO()
    picture.savefig(file, format=kind.removeprefix("."), metadata=_DATES.get(kind))
    return file.getvalue()


def _plain(text: str) -> str:
    """Return a text of Plotly's as plain text: without bold, and with line breaks for ``<br>``."""
    lines = text.replace("<br>", "\n")
    return re.sub("</?b>", "", lines)


def _draw(axes: Any, trace: Any, rows: list[int]) -> None:
    """Draw one trace of Plotly's into Matplotlib's axes, with its points in the given rows.

    Args:
        axes: Of Matplotlib's.
        trace: Bars, or marks with the ends of their intervals.
        rows: Places on the vertical axis.
    """
    look = trace.marker
    if trace.type == "bar":
        bars = axes.barh(rows, trace.x, 0.75, color=look.color)
        axes.bar_label(bars, trace.text, padding=3, fontsize="small")
        return
    ends = trace.error_x
    if ends.visible:
        errors = [ends.arrayminus, ends.array]
        axes.errorbar(trace.x, rows, xerr=errors, fmt="none", ecolor=ends.color, capsize=3)
    for place, (x, row) in enumerate(zip(trace.x, rows, strict=True)):
        symbol = _value_at(look.symbol, place)
        axes.scatter(
            x,
            row,
            0.5 * look.size**2,
            color=_value_at(look.color, place),
            marker=_MARKS[symbol or "circle"],
            edgecolors=look.line.color,
            linewidths=look.line.width,
            zorder=3,
        )


def _value_at(values: Any, place: int) -> Any:
    """Return a property of one point: Plotly has a tuple with one for each point, or one for all."""
    return values[place] if isinstance(values, tuple) else values
