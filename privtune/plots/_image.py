"""A figure as a picture, drawn by Matplotlib: Plotly needs a browser for that."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from privtune.imports import find_extra

if TYPE_CHECKING:
    import plotly.graph_objects as go

KINDS = (".png", ".svg", ".pdf")
_DATES = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # when it was drawn is nobody's
_MARKS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "x": "X",
    "star": "*", "triangle-down": "v", "pentagon": "p", "triangle-right": ">",
    "diamond-tall": "d", "triangle-left": "<",
}  # fmt: skip


def to_image(figure: go.Figure, kind: str) -> bytes:
    """Return the figure of :func:`~privtune.plots.plot_comparison` as a picture of one of the kinds."""
    module = find_extra("matplotlib.figure", extra="ui", what=f"A chart as {kind}")
    layout = figure.layout
    rows = {arm: place for place, arm in enumerate(layout.yaxis.categoryarray)}
    size = (10.0, 1.0 + 0.3 * len(rows))
    picture = module.Figure(figsize=size, dpi=150, layout="constrained")
    shares = {"width_ratios": [0.46, 0.27, 0.27]}
    panels = picture.subplots(1, 3, sharey=True, gridspec_kw=shares)
    for trace in figure.data:
        _draw(panels[int(trace.xaxis[1:] or 1) - 1], trace, [rows[arm] for arm in trace.y])
    ranges = (layout.xaxis, layout.xaxis2, layout.xaxis3)
    for axes, title, range_ in zip(panels, layout.annotations, ranges, strict=True):
        axes.set_title(title.text, fontsize="medium")
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if range_.rangemode == "tozero":
            axes.margins(x=0.3)  # for the numbers of bars
            axes.set_xlim(left=0.0)
    if layout.xaxis.tickformat == ".0%":
        panels[0].xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    panels[0].set_yticks(range(len(rows)), [re.sub("</?b>", "", n) for n in layout.yaxis.ticktext])
    written = io.BytesIO()
    picture.savefig(written, format=kind.removeprefix("."), metadata=_DATES.get(kind))
    return written.getvalue()


def _draw(axes: Any, trace: Any, rows: list[int]) -> None:
    """Draw one trace; the n-th of its points stands in the n-th of the rows."""
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
        colour, symbol = (
            v[place] if isinstance(v, tuple) else v for v in (look.color, look.symbol)
        )
        edge = {"edgecolors": look.line.color, "linewidths": look.line.width, "zorder": 3}
        axes.scatter(
            x, row, 0.5 * look.size**2, color=colour, marker=_MARKS[symbol or "circle"], **edge
        )
