"""Figures of one study: its budget, its arms side by side, laws of runs, curves, audits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from privtune.accounting import Composed, Event, RunLaw, epsilon
from privtune.errors import PrivTuneError
from privtune.ledger import Charge, Ledger
from privtune.numbers import show_epsilon, show_left
from privtune.plots._style import COLOURS, GREY, MOST_TRACES, Look, apply_style, looks, new_figure
from privtune.strategies.laws import with_law
from privtune.strategies.plan import epsilon_spent
from privtune.strategies.spread import Spread, values_of
from privtune.training.mechanism.estimates import NO_INFORMATION
from privtune.training.mechanism.metrics import is_share, lower_is_better

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.audit import AuditReport
    from privtune.strategies import Plan
    from privtune.study import ArmStatus, Study
    from privtune.study.spec import BudgetSpec

_LONGEST = 28  # characters of a name beside its row


def plot_comparison(
    study: Study,
    *,
    metric: str = "test_accuracy",
    arms: Sequence[ArmStatus] | None = None,
) -> go.Figure:
    """Plot what each arm's released model reached, the ε of its whole procedure, and its cost.

    Args:
        study: A study; arms that released nothing yet stand below the others.
        metric: A metric of the releases on the test split (``test_accuracy``, ``test_auc``, ...), or
            the score that arms chose by (``validation_accuracy``, ``validation_loss``, ...).
        arms: What ``study.status()`` returned, if it was read already.

    Returns:
        A figure with a row for each arm, the best above, and a panel for each quantity. Of repeated
        arms it shows the mean, and a line of one standard error to each side. Of one draw lines are the
        95% intervals of the scores (``release.estimates``), as everywhere. A white mark stands at the ε of
        the released model's training alone: what is reported when the search is forgotten. Gradient
        evaluations are the plan's expectation: what a training took would tell how many records there are,
        and a sealed round its number of runs.

    Example:
        >>> [title.text for title in plot_comparison(study).layout.annotations]
        ['test accuracy, one draw, 95% interval', 'ε (δ = 1e-05)', 'gradients (expected)']
    """
    from plotly.subplots import make_subplots

    budget = study.spec.budget
    read = study.status() if arms is None else arms
    rows = ranked(read, metric)[::-1]  # Plotly draws the first row lowest
    names = [status.plan.arm for status, _ in rows]
    look = looks([status.plan.arm for status in read])
    colours = [look[name].colour for name in names]
    totals = [status.guarantee.epsilon for status, _ in rows]
    # Infinity has no place on an axis: its bar is a text alone.
    finite = [e if math.isfinite(e) else 0.0 for e in totals]
    shown = [show_epsilon(e) if math.isfinite(e) else "no guarantee" for e in totals]
    costs = [status.plan.expected_gradient_evaluations for status, _ in rows]
    reached = _reached(rows, metric, look)
    sure = reached.error_x.visible
    runs = {len(status.release.repetitions) for status, _ in rows if status.release is not None}
    behind = f", mean of {max(runs)}" if any(runs) else ", one draw" if runs else ""
    lines = (" ± standard error" if any(runs) else ", 95% interval") if sure else ""
    figure = make_subplots(
        rows=1,
        cols=3,
        shared_yaxes=True,
        subplot_titles=(
            f"{metric.replace('_', ' ')}{behind}{lines}",
            f"ε (δ = {budget.delta:g})",
            "gradients (expected)",
        ),
        column_widths=[0.46, 0.27, 0.27],
        horizontal_spacing=0.04,
    )
    row = 30 if len(rows) <= MOST_TRACES else 18
    apply_style(figure, height=90 + row * len(rows), side_by_side=True)
    figure.add_trace(reached, row=1, col=1)
    figure.add_trace(_bars(names, finite, shown, colours), row=1, col=2)
    figure.add_trace(_bars(names, costs, [f"{n:,.0f}" for n in costs], colours), row=1, col=3)
    figure.add_trace(_alone(budget, [status for status, _ in rows]), row=1, col=2)
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(
        # Without an interval beside it, a small difference would fill the panel.
        rangemode="normal" if sure else "tozero",
        tickformat=".0%" if is_share(metric.partition("_")[2]) else None,
        col=1,
    )
    labels = [_label(status, value, metric) for status, value in rows]
    figure.update_yaxes(
        categoryorder="array", categoryarray=names, tickvals=names, ticktext=labels, showgrid=False
    )
    figure.update_layout(showlegend=False, bargap=0.25)
    return figure


def ranked(arms: Sequence[ArmStatus], metric: str) -> list[tuple[ArmStatus, float | None]]:
    """Return arms with what they reached, the best first; those that reached nothing stand last."""
    sign = 1.0 if lower_is_better(metric.partition("_")[2]) else -1.0
    found = [(status, _value_of(status, metric)) for status in arms]
    return sorted(found, key=lambda pair: math.inf if pair[1] is None else sign * pair[1])


def _label(status: ArmStatus, value: float | None, metric: str) -> str:
    """Return an arm's name, and in bold what it reached; without that, how far it is."""
    arm = status.plan.arm
    name = arm if len(arm) <= _LONGEST else f"{arm[: _LONGEST - 1]}…"
    if value is None and status.release is not None:
        return f"{name} ({NO_INFORMATION if metric in status.release.scores else 'not measured'})"
    if value is None:
        return f"{name} ({status.state})"
    return f"{name} <b>{value:{_digits(metric)}}</b>"


def _bars(
    names: Sequence[str], values: Sequence[float], texts: Sequence[str], colours: Sequence[str]
) -> go.Bar:
    """Return a bar for each arm, from zero, with its number as a text."""
    import plotly.graph_objects as go

    return go.Bar(
        x=values,
        y=names,
        orientation="h",
        marker_color=colours,
        text=texts,
        textposition=["auto" if value else "outside" for value in values],
        insidetextanchor="start",
        constraintext="none",
        textfont_size=11,
        hovertemplate="%{y}: %{text}<extra></extra>",
    )


def _alone(budget: BudgetSpec, arms: Sequence[ArmStatus]) -> go.Scatter:
    """Return a white mark at the ε of the released training alone, where it claims less than the arm's."""
    import plotly.graph_objects as go

    terms: dict[str, Any] = {"delta": budget.delta, "adjacency": budget.adjacency}
    ones = [(arm, epsilon(arm.plan.training.event, **terms).epsilon) for arm in arms]
    less = {arm.plan.arm: one for arm, one in ones if one < 0.999 * arm.guarantee.epsilon}
    return go.Scatter(
        x=list(less.values()),
        y=list(less),
        mode="markers",
        marker={"color": "#fff", "size": 9, "line": {"color": "#1c2430", "width": 1.5}},
        text=[show_epsilon(value, 4) for value in less.values()],
        hovertemplate="%{y}: one training alone, ε = %{text}<extra></extra>",
    )


def _reached(
    rows: Sequence[tuple[ArmStatus, float | None]],
    metric: str,
    look: Mapping[str, Look],
) -> go.Scatter:
    """Return a mark for what each arm reached, with its interval if the metric has one."""
    import plotly.graph_objects as go

    digits = _digits(metric)
    known = [(s, v, _interval(s, metric, v)) for s, v in rows if v is not None]
    return go.Scatter(
        x=[value for _, value, _ in known],
        y=[status.plan.arm for status, *_ in known],
        mode="markers",
        marker={
            "color": [look[status.plan.arm].colour for status, *_ in known],
            "symbol": [look[status.plan.arm].symbol for status, *_ in known],
            "size": 12,
            "line": {"color": GREY, "width": 1},
        },
        error_x={
            "visible": any(low < high for *_, (low, high) in known),
            "symmetric": False,
            "array": [high - value for _, value, (_, high) in known],
            "arrayminus": [value - low for _, value, (low, _) in known],
            "color": GREY,
            "thickness": 1.5,
            "width": 5,
        },
        text=[f" [{a:{digits}}, {b:{digits}}]" if a < b else "" for *_, (a, b) in known],
        hovertemplate=f"%{{y}}: %{{x:{digits}}}%{{text}}<extra></extra>",
    )


def _digits(metric: str) -> str:
    return ".1%" if is_share(metric.partition("_")[2]) else ".4f"


def _interval(status: ArmStatus, metric: str, value: float) -> tuple[float, float]:
    """Return the ends of a line: of repetitions, or of the score's interval; equal ends are none."""
    release = status.release
    if release is None:
        return value, value
    if release.repetitions:
        spread = Spread.of(values_of(release)[metric])
        error = 0.0 if spread is None else spread.error or 0.0
        return value - error, value + error
    score = release.scores[metric]
    return score.low, score.high


def _value_of(status: ArmStatus, metric: str) -> float | None:
    release = status.release
    if release is None:
        return None
    spread = Spread.of(values_of(release).get(metric, ()))
    return None if spread is None else spread.mean


def shares(study: Study) -> list[tuple[str, float, float]]:
    """Return a label, the ε added and the ε alone of each charge, in the order of charging."""
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
    # What is added sums to the ε of the whole; what charges cost alone does not.
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
    look = looks([plan.arm for plan in study.plans])  # other studies' charges are grey
    for label, added, alone in parts:
        figure.add_trace(
            go.Bar(
                x=[added],
                y=["budget"],
                orientation="h",
                name=label,
                marker={
                    "color": look[label].colour if label in look else GREY,
                    "line": {"color": "#fff", "width": 1},
                },
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
            marker={"color": "rgba(128,136,150,0.18)", "line": {"color": GREY, "width": 1}},
            hovertemplate=f"left {show_left(left, 4)}<extra></extra>",
        )
    )
    figure.add_vline(x=budget.epsilon, line_dash="dash", line_color=GREY)
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
    look = looks([plan.arm for plan in study.plans])
    for plan in study.plans:
        if plan.is_sealed or not plan.is_private:
            continue
        curve = epsilon_spent(plan, delta=budget.delta, adjacency=budget.adjacency)
        figure.add_trace(
            go.Scatter(
                x=[step for step, _ in curve],
                y=[value for _, value in curve],
                name=plan.arm,
                mode="lines+markers",
                line_color=look[plan.arm].colour,
                marker_symbol=look[plan.arm].symbol,
                customdata=[show_epsilon(value, 4) for _, value in curve],
                hovertemplate="step %{x}: ε = %{customdata}<extra>" + plan.arm + "</extra>",
            )
        )
    return figure


_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)


def costs_at_other_means(study: Study, plan: Plan) -> list[tuple[float, float]]:
    """Return (mean number of runs, ε) of a selection with the same noise and other means."""
    budget = study.spec.budget
    law: Any = plan.runs
    answers = []
    for factor in _FACTORS:
        mean = law.mean * factor
        if mean < 1.0:
            continue
        try:
            other = replace(law, mean=mean)
            event = with_law(plan.charged, law, other)
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
    colour = looks([p.arm for p in study.plans])[plan.arm].colour
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
    figure.add_vline(x=law.expected_runs, line_dash="dash", line_color=GREY, row=1, col=1)
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
    """Return the plan of an arm that draws its number of runs, or refuse."""
    for plan in study.plans:
        if plan.runs is not None and arm in (None, plan.arm):
            return plan
    wanted = "no arm" if arm is None else f"no arm {arm!r}"
    raise PrivTuneError(
        f"Study {study.name!r} has {wanted} that draws its number of runs; plot_runs shows the law "
        "of a selection."
    )


_FIRST = ("learning_rate", "max_grad_norm")


def plot_trajectories(study: Study, *, arms: Sequence[ArmStatus] | None = None) -> go.Figure:
    """Plot every released curve by step, one panel a quantity, learning rate and clipping first.

    Args:
        study: A study; arms without curves (sealed ones among them) are left out.
        arms: What ``study.status()`` returned, if it was read already.

    Returns:
        A figure; without panels if there is no curve. Quantities above 0 are on a logarithmic axis.

    Example:
        >>> sorted({line.name for line in plot_trajectories(study).data})
        ['defaults']
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    read = study.status() if arms is None else arms
    released = [status.release for status in read if status.release is not None]
    curves = {release.arm: release.curves for release in released if release.curves}
    found = {name for by_name in curves.values() for name in by_name}
    names = [n for n in _FIRST if n in found] + sorted(found - set(_FIRST))
    if not names:
        figure = go.Figure()
        apply_style(figure)
        return figure
    figure = make_subplots(
        rows=len(names),
        cols=1,
        shared_xaxes=True,
        subplot_titles=[name.replace("_", " ") for name in names],
        vertical_spacing=0.32 / max(len(names), 2),
    )
    apply_style(figure, height=90 + 190 * len(names))
    look = looks([status.plan.arm for status in read])
    labelled: set[str] = set()
    for row, name in enumerate(names, start=1):
        values = [y for by_name in curves.values() for _, y in _points(by_name.get(name, ()))]
        having = {arm: by_name for arm, by_name in curves.items() if name in by_name}
        if len(having) > MOST_TRACES:
            figure.add_trace(_in_one_line(name, having), row=row, col=1)
            having = {}
        for arm, by_name in having.items():
            figure.add_trace(
                go.Scatter(
                    x=[x for x, _ in _points(by_name[name])],
                    y=[y for _, y in _points(by_name[name])],
                    name=arm,
                    legendgroup=arm,
                    showlegend=arm not in labelled,
                    mode="lines+markers",
                    line_color=look[arm].colour,
                    marker={"symbol": look[arm].symbol, "size": 8, "maxdisplayed": 6},
                    hovertemplate="step %{x}: %{y:.4g}<extra>" + arm + "</extra>",
                ),
                row=row,
                col=1,
            )
            labelled.add(arm)
        if values and min(values) > 0 and max(values) > 3 * min(values):
            figure.update_yaxes(type="log", dtick=1, tickformat="~g", row=row, col=1)
            if max(values) < 30 * min(values):
                figure.update_yaxes(dtick="D2", row=row, col=1)
    figure.update_xaxes(title_text="step", row=len(names), col=1)
    figure.update_layout(legend={"y": 1.06})
    return figure


def _in_one_line(name: str, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> go.Scatter:
    """Return one curve for many arms, cut between them; hovering names the arm."""
    import plotly.graph_objects as go

    points = [
        (arm, *point)
        for arm, by_name in curves.items()
        for point in (*_points(by_name[name]), (None, None))
    ]
    return go.Scatter(
        x=[x for _, x, _ in points],
        y=[y for *_, y in points],
        text=[arm for arm, *_ in points],
        showlegend=False,
        mode="lines",
        line_color=COLOURS[0],
        hovertemplate="step %{x}: %{y:.4g}<extra>%{text}</extra>",
    )


def _points(curve: Sequence[float]) -> list[tuple[int, float]]:
    """Return the steps that a curve has values for: some are looked at every few steps only."""
    return [(step, value) for step, value in enumerate(curve) if math.isfinite(value)]


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
