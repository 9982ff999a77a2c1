"""Pages are made from templates: everything that a user wrote is escaped, and nothing comes from outside."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from privtune.numbers import show_epsilon, show_left

if TYPE_CHECKING:
    import plotly.graph_objects as go

Values = dict[str, Any]


def _plain(value: Any) -> Any:
    """Return a value as one line, so that nothing in it begins a line of a questionnaire."""
    return value if isinstance(value, Markup) else " ".join(str(value).split())


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        # Whatever a user wrote is escaped in a page; the questionnaire is text, which a page escapes.
        autoescape=jinja2.select_autoescape(["html"], default=False),
        finalize=_plain,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters |= {
        "epsilon": lambda value: show_epsilon(value, 4),
        "left": lambda value: show_left(value, 4),
    }
    return environment


def render(template: str, *, plotly: bool = False, **values: Any) -> str:
    """Return a template filled in; a page with figures carries Plotly, so that it needs no network."""
    if plotly:
        from plotly.offline import get_plotlyjs

        values["plotly"] = Markup(get_plotlyjs())  # noqa: S704 (a library's own script)
    return _templates().get_template(template).render({"plotly": "", **values})


def figure(name: str, plot: go.Figure, *, numbers: Values | None = None) -> Values:
    """Return what a template shows of a figure: its data, and its numbers as a table."""
    # "</" would end the script element early.
    data = Markup(plot.to_json().replace("</", "<\\/"))  # noqa: S704 (JSON inside a script)
    return {"name": name, "data": data, "height": int(plot.layout.height), "numbers": numbers}
