"""A figure as a picture, drawn by Matplotlib: Plotly needs a browser for that."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from privtune.imports import find_extra
from privtune.plots._style import COLOURS

if TYPE_CHECKING:
    import plotly.graph_objects as go

KINDS = (".png", ".svg", ".pdf")
_DATES = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # when it was drawn is nobody's
_POINTS = 0.75  # of a pixel
_MOST = 4  # names side by side in a legend


def to_image(figure: go.Figure, kind: str) -> bytes:
    """Return a figure of markers, lines and intervals as a picture of one of the kinds."""
    module = find_extra("matplotlib.figure", extra="ui", what=f"A chart as {kind}")
    picture = module.Figure(figsize=(8.0, 4.2), dpi=150, layout="constrained")
    axes = picture.subplots()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    named = {trace.name: _draw(axes, trace) for trace in figure.data}
    shown = {name: drawn for name, drawn in named.items() if name}
    if shown:
        place = {"loc": "outside upper left", "ncols": _MOST, "frameon": False}
        picture.legend(list(shown.values()), list(shown), **place)
    axes.set_xlabel(figure.layout.xaxis.title.text)
    axes.set_ylabel(figure.layout.yaxis.title.text)
    if figure.layout.yaxis.tickformat == ".0%":
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if figure.layout.xaxis.rangemode == "tozero":
        axes.set_xlim(left=0.0)
    written = io.BytesIO()
    picture.savefig(written, format=kind.removeprefix("."), metadata=_DATES.get(kind))
    return written.getvalue()


def _draw(axes: Any, trace: Any) -> Any:
    """Draw one trace; return what stands for it in a legend."""
    x, y = ([math.nan if v is None else float(v) for v in values] for values in (trace.x, trace.y))
    marker, colour = trace.marker, trace.marker.color or COLOURS[0]
    hollow = [i for i in range(len(x)) if _each(marker.symbol, i) == "circle-open"]
    if "lines" in (trace.mode or "lines"):
        axes.plot(
            x, y, ":" if trace.line.dash == "dot" else "-", color=trace.line.color or colour, lw=1
        )
        sizes = [_POINTS * float(_each(marker.size, i) or 0) for i in hollow]
        return axes.scatter(
            [x[i] for i in hollow],
            [y[i] for i in hollow],
            [size**2 for size in sizes],
            facecolors="none",
            edgecolors=colour,
        )
    bars = trace.error_y
    if bars.visible:
        ends = [list(bars.arrayminus), list(bars.array)]
        colours = colour if isinstance(colour, str) else list(colour)
        axes.errorbar(x, y, ends, fmt="none", ecolor=colours, lw=bars.thickness, capsize=3)
    return axes.scatter(x, y, (_POINTS * float(marker.size)) ** 2, color=colour, zorder=3)


def _each(value: Any, place: int) -> Any:
    """Return a property of one point, which may be that of all."""
    return value[place] if isinstance(value, (tuple, list)) else value
