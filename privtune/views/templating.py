"""Templates of pages: everything that a user wrote is escaped, and nothing comes from outside."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from privtune.numbers import show_epsilon, show_left

if TYPE_CHECKING:
    import plotly.graph_objects as go

Values = dict[str, Any]


def _plain(value: Any) -> Any:
    """Return a value as one line, so that nothing in it begins a line of a questionnaire."""
    if isinstance(value, Markup):
        return value
    words = str(value).split()
    return " ".join(words)


def _prose(value: Any) -> Any:
    """Return a sentence as escaped HTML, with texts between backticks as code."""
    if isinstance(value, Markup):
        return value
    escaped = str(escape(value))
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", escaped)
    return Markup(marked)  # noqa: S704 (escaped before)


@cache
def _templates() -> jinja2.Environment:
    """Return the environment of all templates, once a process: compiling them takes a while."""
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
        "prose": _prose,
    }
    return environment


def render(template: str, *, plotly: bool = False, **values: Any) -> str:
    """Return a template filled in; a page with figures carries Plotly, so that it needs no network.

    Args:
        template: Name of a file in ``templates``. Those of HTML escape what they are given.
        plotly: Whether the page has figures: Plotly's script has several megabytes.
        values: What the template names. A name that is missing is an error, not an empty text.
    """
    if plotly:
        from plotly.offline import get_plotlyjs

        values["plotly"] = Markup(get_plotlyjs())  # noqa: S704 (a library's own script)
    page = _templates().get_template(template)
    return page.render({"plotly": "", **values})


def figure(name: str, plot: go.Figure, *, numbers: Values | None = None) -> Values:
    """Return the values of a figure for a template: its data, its height, and its numbers as a table.

    Args:
        name: Unique on the page: the figure's element is found by it.
        plot: The figure.
        numbers: The same as a table, for who cannot see the figure.
    """
    # "</" would end the script element early.
    json = plot.to_json().replace("</", "<\\/")
    return {
        "name": name,
        "data": Markup(json),  # noqa: S704 (JSON inside a script)
        "height": int(plot.layout.height),
        "numbers": numbers,
    }
