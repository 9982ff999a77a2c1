"""What an audit found, between 0 and what is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.plots._style import COLOURS, new_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.audit import AuditReport


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
    return plot_audits([report.to_dict()])


def plot_audits(records: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Plot the chains of kept audits, as certificates carry them, in one figure.

    Args:
        records: From :func:`privtune.study.audits_of`; at one δ, which is their budget's.

    Returns:
        As :func:`plot_audit`; arms are named where there are several.

    Example:
        >>> from privtune.audit import audit
        >>> made = [audit(plan, delta=1e-5, runs=100).to_dict() for plan in study.plans[:1]]
        >>> plot_audits(made).data[0].y
        ('one training',)
    """
    import plotly.graph_objects as go

    several = len(records) > 1
    chains = [
        {
            "of": f"{record['arm']} ({record['seed']}): {row['mechanism']}"
            if several
            else row["mechanism"],
            **{name: row[name] for name in ("audited", "lower", "reported")},
            "published": record["published"],
        }
        for record in records
        for row in record["rows"]
    ]
    figure = new_figure(x=f"ε (at δ = {records[0]['delta']:g})", height=150 + 60 * len(chains))
    names = [chain.pop("of") for chain in chains]
    marks = {name: [chain[name] for chain in chains] for name in chains[0]}
    chain = {name: values for name, values in marks.items() if None not in values}
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
