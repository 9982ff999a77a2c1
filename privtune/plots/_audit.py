"""What an audit found, between 0 and what is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privtune.plots._style import COLOURS, new_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.audit import AuditReport

__all__ = ["plot_audit"]


def plot_audit(report: AuditReport) -> go.Figure:
    """Plot the chain audited ≤ lower ≤ reported ≤ published, a line for each mechanism.

    Args:
        report: What :func:`privtune.audit.audit` returned.

    Returns:
        A figure: by mechanism four marks, from left to right if all is well.

    Example:
        >>> from privtune.audit import audit
        >>> report = audit(study.plans[0], delta=1e-5, runs=100, published=8.0)
        >>> [marks.name for marks in plot_audit(report).data]
        ['audited', 'lower', 'reported', 'published']
    """
    import plotly.graph_objects as go

    figure = new_figure(x=f"ε (at δ = {report.delta:g})", height=150 + 60 * len(report.rows))
    names = [row.name for row in report.rows]
    chain = {
        "audited": [row.epsilon for row in report.rows],
        "lower": [row.lower for row in report.rows],
        "reported": [row.reported for row in report.rows],
        **({} if report.published is None else {"published": [report.published for _ in names]}),
    }
    for (name, values), colour in zip(chain.items(), COLOURS, strict=False):
        figure.add_trace(
            go.Scatter(
                x=values,
                y=names,
                mode="markers",
                name=name,
                marker={"color": colour, "size": 12, "symbol": "line-ns-open", "line_width": 3},
                hovertemplate=f"{name}<br>%{{x:.4f}}<extra></extra>",
            )
        )
    figure.update_xaxes(rangemode="tozero")
    return figure
