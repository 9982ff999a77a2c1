"""The law of the number of runs of a selection, and what other means would cost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from privtune.accounting import RunLaw, epsilon
from privtune.errors import PrivTuneError
from privtune.numbers import show_epsilon
from privtune.plots._style import apply_style, colours
from privtune.strategies.laws import with_law

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.strategies import Plan
    from privtune.study import Study

_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)


def costs_at_other_means(study: Study, plan: Plan) -> list[tuple[float, float]]:
    """Return (mean number of runs, ε) of a selection with the same noise and other means.

    Args:
        study: Gives δ and the adjacency.
        plan: A plan with a law of runs.
    """
    budget = study.spec.budget
    law: Any = plan.runs
    answers = []
    for factor in _FACTORS:
        mean = law.mean * factor
        if mean < 1.0:
            continue
        try:
            other = replace(law, mean=mean)
            event = with_law(plan.event, law, other)
        except PrivTuneError:  # beyond the law's own bounds, such as a cap
            continue
        cost = epsilon(event, budget.delta, adjacency=budget.adjacency).epsilon
        answers.append((other.expected_runs, cost))
    return answers


def plot_runs(study: Study, *, arm: str | None = None) -> go.Figure:
    """Plot the law of K, the secret number of runs, and what the selection would cost at other means.

    Args:
        study: A study with a selection arm.
        arm: Which; the first one with a law of runs unless given.

    Returns:
        A figure with two panels. It shows the plan: what K really was stays sealed.

    Raises:
        PrivTuneError: If no such arm draws its number of runs.

    Example:
        >>> law, costs = plot_runs(study, arm="selection").data
        >>> law.x[0], round(float(law.y[0]), 3), costs.y[0] < costs.y[-1]
        (1, 0.25, True)
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    plan = selection_plan(study, arm)
    law: RunLaw = plan.runs  # type: ignore[assignment]
    colour = colours([p.arm for p in study.plans])[plan.arm]
    last = int(law.quantile(0.99))
    ks = sorted({1 + round(i * (last - 1) / 60) for i in range(61)})
    figure = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=(f"{plan.arm}: probability of K runs", "ε at other mean numbers of runs"),
        horizontal_spacing=0.14,
    )
    apply_style(figure, height=320, side_by_side=True)
    figure.add_trace(
        go.Bar(
            x=ks,
            y=[law.pmf(k) for k in ks],
            marker_color=colour,
            showlegend=False,
            hovertemplate="K = %{x}: %{y:.2%}<extra></extra>",
        ),
        row=1,
        col=1,
    )
    figure.add_vline(x=law.expected_runs, line_dash="dash", line_color="#808896", row=1, col=1)
    if known := costs_at_other_means(study, plan):
        means, costs = zip(*known, strict=True)
        figure.add_trace(
            go.Scatter(
                x=means,
                y=costs,
                mode="lines+markers",
                line_color=colour,
                showlegend=False,
                customdata=[show_epsilon(cost, 4) for cost in costs],
                hovertemplate="mean %{x:.4g} runs: ε = %{customdata}<extra></extra>",
            ),
            row=1,
            col=2,
        )
        figure.update_xaxes(
            type="log", tickvals=means, ticktext=[f"{mean:g}" for mean in means], row=1, col=2
        )
    figure.update_xaxes(title_text="K", row=1, col=1)
    figure.update_xaxes(title_text="mean runs", row=1, col=2)
    return figure


def selection_plan(study: Study, arm: str | None = None) -> Plan:
    """Return the plan of an arm that draws its number of runs.

    Raises:
        PrivTuneError: If there is none.
    """
    for plan in study.plans:
        if plan.runs is not None and arm in (None, plan.arm):
            return plan
    wanted = "no arm" if arm is None else f"no arm {arm!r}"
    raise PrivTuneError(
        f"Study {study.name!r} has {wanted} that draws its number of runs; plot_runs shows the law "
        "of a selection."
    )
