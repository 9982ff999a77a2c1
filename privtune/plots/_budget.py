"""Where the budget went: by arm, and by step."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from privtune.accounting import Composed, Event, epsilon
from privtune.ledger import Charge, Ledger
from privtune.numbers import show_epsilon, show_left
from privtune.plots._style import MOST_TRACES, colours, new_figure
from privtune.strategies.plan import epsilon_spent

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.study import Study


def shares(study: Study) -> list[tuple[str, float, float]]:
    """Return what each charge of a study's budget added, in the order of charging.

    Of more than 24 charges neighbours are taken together: each part is a composition of its own.

    Args:
        study: The study; other studies' charges of the same budget are included.

    Returns:
        By charge: a label, the ε that it added to the composition of those before it, and its ε
        alone. What is added sums to the ε of the whole; what charges cost alone does not.
    """
    budget = study.spec.budget
    with Ledger(study.storage) as ledger:
        charges = [c for c in ledger.charges(budget.name) if c.state != "voided"]
    size = math.ceil(len(charges) / MOST_TRACES)  # each part is composed with all before it
    parts = [charges[start : start + size] for start in range(0, len(charges), max(size, 1))]
    ends = list(accumulate(map(len, parts)))
    events: list[Event] = [charge.event for charge in charges]

    def cost(*parts: Event) -> float:
        return epsilon(Composed(parts), budget.delta, adjacency=budget.adjacency).epsilon

    totals = [0.0, *(cost(*events[:end]) for end in ends)]
    # Bounds are not exactly monotone in what is composed; a share is never shown as negative.
    totals = list(accumulate(totals, max))

    def label(charge: Charge) -> str:
        named = charge.arm if charge.study == study.name else f"{charge.study}/{charge.arm}"
        return named.strip("/") or charge.id

    return [
        (
            label(part[0]) if len(part) == 1 else f"{label(part[0])} to {label(part[-1])}",
            after - before,
            cost(*(charge.event for charge in part)),
        )
        for part, (before, after) in zip(parts, pairwise(totals), strict=True)
    ]


def plot_budget(study: Study) -> go.Figure:
    """Plot the budget as one bar: what each arm added, and what is left.

    Args:
        study: A study; nothing of it need have run.

    Returns:
        A figure. The parts are increments of the composition, in the order of charging.

    Example:
        >>> [bar.name for bar in plot_budget(study).data]
        ['defaults', 'selection', 'left']
    """
    import plotly.graph_objects as go

    budget = study.spec.budget
    parts = shares(study)
    figure = new_figure(x=f"ε (at δ = {budget.delta:g})", height=170)
    for (label, added, alone), colour in zip(
        parts, colours([p[0] for p in parts]).values(), strict=True
    ):
        figure.add_trace(
            go.Bar(
                x=[added],
                y=["budget"],
                orientation="h",
                name=label,
                marker_color=colour,
                text=f"{label} {show_epsilon(added, 2)}",
                textposition="inside",
                insidetextanchor="middle",
                hovertemplate=f"{label}<br>added {show_epsilon(added, 4)}"
                f"<br>alone {show_epsilon(alone, 4)}<extra></extra>",
            )
        )
    left = max(budget.epsilon - sum(part[1] for part in parts), 0.0)
    figure.add_trace(
        go.Bar(
            x=[left],
            y=["budget"],
            orientation="h",
            name="left",
            marker={"color": "rgba(128,136,150,0.18)", "line": {"color": "#808896", "width": 1}},
            hovertemplate=f"left {show_left(left, 4)}<extra></extra>",
        )
    )
    figure.add_vline(x=budget.epsilon, line_dash="dash", line_color="#808896")
    figure.update_layout(barmode="stack", bargap=0.1, legend_traceorder="normal")
    figure.update_yaxes(visible=False)
    figure.update_xaxes(range=[0, budget.epsilon * 1.02])
    return figure


def plot_epsilon_spent(study: Study) -> go.Figure:
    """Plot how ε grows over the steps of every arm that is not sealed.

    Args:
        study: A study.

    Returns:
        A figure; empty if every arm is sealed.

    Example:
        >>> [line.name for line in plot_epsilon_spent(study).data]  # the sealed arm is left out
        ['defaults']
    """
    import plotly.graph_objects as go

    budget = study.spec.budget
    figure = new_figure(x="step", y=f"ε spent (δ = {budget.delta:g})")
    palette = colours([plan.arm for plan in study.plans])
    for plan in study.plans:
        if plan.is_sealed or not plan.is_private:
            continue
        curve = epsilon_spent(plan.training, delta=budget.delta, adjacency=budget.adjacency)
        figure.add_trace(
            go.Scatter(
                x=[step for step, _ in curve],
                y=[value for _, value in curve],
                name=plan.arm,
                mode="lines+markers",
                line_color=palette[plan.arm],
                customdata=[show_epsilon(value, 4) for _, value in curve],
                hovertemplate="step %{x}: ε = %{customdata}<extra>" + plan.arm + "</extra>",
            )
        )
    return figure
