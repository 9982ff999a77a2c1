"""Figures of one study: its budget, its arms side by side, laws of runs, curves, audits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from privtune.accounting import Composed, RunLaw
from privtune.errors import PrivTuneError
from privtune.ledger import Charge, Ledger
from privtune.numbers import show_epsilon, show_left
from privtune.plots.style import COLOURS, GREY, MOST_TRACES, Look, apply_style, looks_of, new_figure
from privtune.strategies.laws import with_law
from privtune.strategies.plan import epsilon_spent
from privtune.strategies.spread import Spread, values_of
from privtune.study.arm_row import beats_constant
from privtune.study.observer import releases_of
from privtune.training.mechanism.estimates import NO_INFORMATION
from privtune.training.mechanism.metric_name import MetricName

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.audit import AuditReport
    from privtune.strategies import Plan
    from privtune.study import ArmStatus, Study

_LONGEST = 28  # characters of a name beside its row


def plot_comparison(
    study: Study,
    *,
    metric: str | MetricName = "test_accuracy",
    arms: Sequence[ArmStatus] | None = None,
) -> go.Figure:
    """Plot the arms side by side: the metric of the released model, the ε of the procedure, and the cost.

    Args:
        study: A study; arms that released nothing yet stand below the others.
        metric: A metric of the releases on the test split (``test_accuracy``, ``test_auc``, ...), or
            the score that arms chose by (``validation_accuracy``, ``validation_loss``, ...).
        arms: What ``study.status()`` returned, if it was read already.

    Returns:
        A figure with a row for each arm, the best above, and a panel for each quantity. Of repeated
        arms it shows the mean, and a line of one standard error to each side. Of one draw lines are the
        95% intervals of the scores (``release.estimates``), as everywhere. Gradient evaluations are the
        plan's expectation: what a training took would tell how many records there are, and a sealed round
        its number of runs.

    Example:
        >>> [title.text for title in plot_comparison(study).layout.annotations]
        ['test accuracy<br>one draw, 95% interval', 'ε (δ = 1e-05)', 'gradients (expected)']
    """
    from plotly.subplots import make_subplots

    budget = study.spec.budget
    name = MetricName.parse(str(metric))
    statuses = study.status() if arms is None else arms
    rows = ranked(statuses, name)[::-1]  # Plotly draws the first row lowest
    names = [status.plan.arm for status, _ in rows]
    look = looks_of(status.plan for status in statuses)
    colours = [look[name].colour for name in names]
    marks = _marks(rows, name, look)
    has_intervals = marks.error_x.visible
    figure = make_subplots(
        rows=1,
        cols=3,
        shared_yaxes=True,
        subplot_titles=(
            _title(rows, name, has_intervals=has_intervals),
            f"ε (δ = {budget.delta:g})",
            "gradients (expected)",
        ),
        column_widths=[0.46, 0.27, 0.27],
        horizontal_spacing=0.04,
    )
    labels = [_label(status, value, name) for status, value in rows]
    height = 112 + _row_height(labels) * len(rows)
    apply_style(figure, height=height, side_by_side=True)
    figure.update_layout(margin_t=56)  # for a title of two lines
    figure.add_trace(marks, row=1, col=1)
    figure.add_trace(_epsilon_bars(rows, colours), row=1, col=2)
    costs = [status.plan.expected_gradient_evaluations for status, _ in rows]
    cost_texts = [f"{cost:,.0f}" for cost in costs]
    cost_bars = _bars(names, costs, cost_texts, colours)
    figure.add_trace(cost_bars, row=1, col=3)
    figure.update_xaxes(rangemode="tozero", nticks=4)
    figure.update_xaxes(
        # Without an interval beside it, a small difference would fill the panel.
        rangemode="normal" if has_intervals else "tozero",
        tickformat=".0%" if name.is_share else None,
        col=1,
    )
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=names,
        tickvals=names,
        ticktext=labels,
        showgrid=False,
    )
    figure.update_layout(showlegend=False, bargap=0.25)
    return figure


_Row = tuple["ArmStatus", float | None]  # an arm, and what it reached


def _title(rows: Sequence[_Row], metric: MetricName, *, has_intervals: bool) -> str:
    """Return the title of the first panel: the metric, and how many draws its values stand for.

    It has two lines: beside long labels the panel is narrow, and the next title begins at its edge.
    """
    releases = releases_of([status for status, _ in rows])
    if not releases:
        return metric.words
    most = max(len(release.repetitions) for release in releases)
    origin = f"mean of {most}" if most else "one draw"
    interval = ""
    if has_intervals:
        interval = " ± standard error" if most else ", 95% interval"
    return f"{metric.words}<br>{origin}{interval}"


def _row_height(labels: Sequence[str]) -> int:
    """Return the height of an arm's row in pixels: less for many arms, more for labels of two lines."""
    if len(labels) > MOST_TRACES:
        return 18
    if any("<br>" in label for label in labels):
        return 38
    return 30


def _epsilon_bars(rows: Sequence[_Row], colours: Sequence[str]) -> go.Bar:
    """Return a bar of ε for each arm, lowest row first, with one colour a row."""
    names = []
    values = []
    texts = []
    for status, _ in rows:
        epsilon = status.guarantee.epsilon
        names.append(status.plan.arm)
        if math.isfinite(epsilon):
            values.append(epsilon)
            texts.append(show_epsilon(epsilon))
        else:
            # Infinity has no place on an axis: its bar is a text alone.
            values.append(0.0)
            texts.append("no guarantee")
    return _bars(names, values, texts, colours)


def ranked(arms: Sequence[ArmStatus], metric: MetricName) -> list[_Row]:
    """Return arms with their values of a metric, the best first, and arms without a value last.

    Of equal arms the one of fewer gradients stands first.

    Args:
        arms: What ``study.status()`` returned.
        metric: What they are compared by.

    Returns:
        Pairs of an arm and its value, of repetitions their mean; None where nothing was measured.
    """
    sign = 1.0 if metric.lower_is_better else -1.0
    rows = [(status, _value_of(status, metric)) for status in arms]

    def place(row: _Row) -> tuple[float, float]:
        status, value = row
        if value is None:
            return math.inf, 0.0
        return sign * value, status.plan.expected_gradient_evaluations

    return sorted(rows, key=place)


def _label(status: ArmStatus, value: float | None, metric: MetricName) -> str:
    """Return an arm's name as a label, with its value in bold or, without a value, its state."""
    name = status.plan.arm
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 1]}…"
    if value is None:
        state = status.state
        if status.release is not None:
            is_measured = str(metric) in status.release.scores
            state = NO_INFORMATION if is_measured else "not measured"
        return f"{name} ({state})"
    label = f"{name} <b>{value:{_digits(metric)}}</b>"
    if status.release is not None and beats_constant(status.release, metric) is False:
        label += "<br>(not shown to beat the constant answer)"
    return label


def _bars(
    names: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    colours: Sequence[str],
) -> go.Bar:
    """Return a horizontal bar for each arm, from zero, with its number as text.

    The text stands inside where the bar is long enough; a bar of 0 has no inside.
    """
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


def _marks(
    rows: Sequence[_Row],
    metric: MetricName,
    look: Mapping[str, Look],
) -> go.Scatter:
    """Return a mark at each arm's value, with its interval if the metric has one.

    Args:
        rows: Arms, the lowest row first; those without a value have no mark.
        metric: What they reached it in.
        look: Colour and symbol by arm.
    """
    import plotly.graph_objects as go

    digits = _digits(metric)
    names = []
    values = []
    above = []
    below = []
    texts = []
    for status, value in rows:
        if value is None:
            continue
        low, high = _interval(status, metric, value)
        interval = ""
        if low < high:
            interval = f" [{low:{digits}}, {high:{digits}}]"
        names.append(status.plan.arm)
        values.append(value)
        above.append(high - value)
        below.append(value - low)
        texts.append(interval)
    return go.Scatter(
        x=values,
        y=names,
        mode="markers",
        marker={
            "color": [look[name].colour for name in names],
            "symbol": [look[name].symbol for name in names],
            "size": 12,
            "line": {"color": GREY, "width": 1},
        },
        error_x={
            "visible": any(texts),
            "symmetric": False,
            "array": above,
            "arrayminus": below,
            "color": GREY,
            "thickness": 1.5,
            "width": 5,
        },
        text=texts,
        hovertemplate=f"%{{y}}: %{{x:{digits}}}%{{text}}<extra></extra>",
    )


def _digits(metric: MetricName) -> str:
    """Return the number format of a metric's values: percent for a share, else four decimals."""
    return ".1%" if metric.is_share else ".4f"


def _interval(status: ArmStatus, metric: MetricName, value: float) -> tuple[float, float]:
    """Return the ends of an arm's error bar, by repetitions or the score's interval; equal if it has none."""
    release = status.release
    if release is None:
        return value, value
    if release.repetitions:
        spread = Spread.of(values_of(release)[str(metric)])
        error = 0.0
        if spread is not None and spread.error is not None:
            error = spread.error
        return value - error, value + error
    score = release.scores[str(metric)]
    return score.low, score.high


def _value_of(status: ArmStatus, metric: MetricName) -> float | None:
    """Return an arm's value of a metric, over repetitions the mean; None if it has none."""
    release = status.release
    if release is None:
        return None
    values = values_of(release).get(str(metric), ())
    spread = Spread.of(values)
    return None if spread is None else spread.mean


def shares(study: Study) -> list[tuple[str, float, float]]:
    """Return each charge's label, the ε that it added, and the ε of it alone, in the order of charging.

    Args:
        study: All charges of its budget count, also those of others.

    Returns:
        A row for each charge that is not voided. What was added sums to the ε that the budget has spent, as
        its odometer reads it after each charge. Of more than 24 charges several neighbours share a row: a
        bar has no room for more.
    """
    budget = study.spec.budget
    with Ledger(study.storage) as ledger:
        charges = [charge for charge in ledger.charges(budget.name) if charge.state != "voided"]
        readings = ledger.spent_by_charge(budget.name)
        spent = ledger.spent(budget.name).epsilon

    rows = []
    before = 0.0
    size = max(1, math.ceil(len(charges) / MOST_TRACES))
    for start in range(0, len(charges), size):
        end = start + size
        part = charges[start:end]
        first = part[0]
        last = part[-1]
        label = _charge_label(first, study)
        if len(part) > 1:
            label = f"{label} to {_charge_label(last, study)}"
        # What is added sums to what the budget has spent; what charges cost alone does not.
        after = readings[last.id]
        if end >= len(charges):
            after = spent
        added = max(0.0, after - before)
        events = [charge.event for charge in part]
        alone = budget.guarantee_of(Composed(events))
        row = (label, added, alone.epsilon)
        rows.append(row)
        before = after
    return rows


def _charge_label(charge: Charge, study: Study) -> str:
    """Return a charge's arm, with its study's name if that is another one; else the charge's id."""
    label = charge.arm
    if charge.study != study.name:
        label = f"{charge.study}/{charge.arm}"
    return label.strip("/") or charge.id


def plot_budget(study: Study) -> go.Figure:
    """Plot the budget as one bar: the ε that each charge added, and what is left.

    Args:
        study: A study; nothing of it need have run.

    Returns:
        A figure. The parts are increments of the ε spent, in the order of charging.

    Example:
        >>> [bar.name for bar in plot_budget(study).data]
        ['defaults', 'selection', 'left']
    """
    import plotly.graph_objects as go

    budget = study.spec.budget
    parts = shares(study)
    figure = new_figure(
        x=f"ε added by each charge to the ε spent (at δ = {budget.delta:g})", height=170
    )
    look = looks_of(study.plans)
    for label, added, alone in parts:
        # Other studies' charges are grey.
        colour = look[label].colour if label in look else GREY
        figure.add_trace(
            go.Bar(
                x=[added],
                y=["budget"],
                orientation="h",
                name=label,
                marker={
                    "color": colour,
                    "line": {"color": "#fff", "width": 1},
                },
                text=f"{label} +{show_epsilon(added, 2)}",
                textposition="inside",
                insidetextanchor="middle",
                hovertemplate=f"{label}<br>added {show_epsilon(added, 4)}"
                f"<br>alone {show_epsilon(alone, 4)}<extra></extra>",
            )
        )
    charged = sum(added for _, added, _ in parts)
    remaining = max(budget.epsilon - charged, 0.0)
    figure.add_trace(
        go.Bar(
            x=[remaining],
            y=["budget"],
            orientation="h",
            name="left",
            marker={
                "color": "rgba(128,136,150,0.18)",
                "line": {"color": GREY, "width": 1},
            },
            hovertemplate=f"left {show_left(remaining, 4)}<extra></extra>",
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
    look = looks_of(study.plans)
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
    """Return (mean number of runs, ε) of a selection with the same noise and other means.

    Args:
        study: Its budget gives δ and the relation of neighbours.
        plan: Of an arm with a law of runs.

    Returns:
        Up to five pairs, by rising mean: from half of the plan's mean to eight times it. A mean below 1,
        or one that the law refuses, is left out.
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
            event = with_law(plan.charged, law, other)
        except PrivTuneError:  # beyond the law's own bounds, such as a cap
            continue
        cost = budget.guarantee_of(event)
        answers.append((other.expected_runs, cost.epsilon))
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
    colour = looks_of(study.plans)[plan.arm].colour
    last = int(law.quantile(0.99))
    # Of many numbers of runs 61 bars at most.
    ks = sorted({1 + round(step * (last - 1) / 60) for step in range(61)})
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
    answers = costs_at_other_means(study, plan)
    if answers:
        means, costs = zip(*answers, strict=True)
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
            type="log",
            tickvals=means,
            ticktext=[f"{mean:g}" for mean in means],
            row=1,
            col=2,
        )
    figure.update_xaxes(title_text="K", row=1, col=1)
    figure.update_xaxes(title_text="mean runs", row=1, col=2)
    return figure


def selection_plan(study: Study, arm: str | None = None) -> Plan:
    """Return the plan of an arm that draws its number of runs; refuse if there is none.

    Args:
        study: The study.
        arm: The arm's name; None takes the first one that there is.

    Raises:
        PrivTuneError: If there is none.
    """
    for plan in study.plans:
        if plan.runs is not None and arm in (None, plan.arm):
            return plan
    absence = "no arm" if arm is None else f"no arm {arm!r}"
    raise PrivTuneError(
        f"Study {study.name!r} has {absence} that draws its number of runs; plot_runs shows the law "
        "of a selection."
    )


_FIRST = ("learning_rate", "max_grad_norm")
_Curves = Mapping[str, Sequence[float]]  # values by step, of quantities or of arms


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

    statuses = study.status() if arms is None else arms
    curves: dict[str, _Curves] = {}
    for release in releases_of(statuses):
        if release.curves:
            curves[release.arm] = release.curves
    names = _curve_names(curves)
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
    look = looks_of(status.plan for status in statuses)
    labelled: set[str] = set()
    for row, name in enumerate(names, start=1):
        curve_by_arm: dict[str, Sequence[float]] = {}
        values: list[float] = []
        for arm, by_name in curves.items():
            if name in by_name:
                curve = by_name[name]
                curve_by_arm[arm] = curve
                values += [value for _, value in _points(curve)]
        if len(curve_by_arm) > MOST_TRACES:
            trace = _in_one_line(curve_by_arm)
            figure.add_trace(trace, row=row, col=1)
        else:
            for arm, curve in curve_by_arm.items():
                trace = _curve_trace(arm, curve, look[arm], in_legend=arm not in labelled)
                figure.add_trace(trace, row=row, col=1)
                labelled.add(arm)
        _scale_axis(figure, values, row)
    figure.update_xaxes(title_text="step", row=len(names), col=1)
    figure.update_layout(legend={"y": 1.06})
    return figure


def _curve_names(curves: Mapping[str, _Curves]) -> list[str]:
    """Return the names of all released curves: those of a training first, the others sorted."""
    names: set[str] = set()
    for by_name in curves.values():
        names.update(by_name)
    first = [name for name in _FIRST if name in names]
    others = names.difference(_FIRST)
    return first + sorted(others)


def _curve_trace(arm: str, curve: Sequence[float], look: Look, *, in_legend: bool) -> go.Scatter:
    """Return the line of one arm's curve, with a name in the legend if ``in_legend``."""
    import plotly.graph_objects as go

    points = _points(curve)
    return go.Scatter(
        x=[step for step, _ in points],
        y=[value for _, value in points],
        name=arm,
        legendgroup=arm,
        showlegend=in_legend,
        mode="lines+markers",
        line_color=look.colour,
        marker={"symbol": look.symbol, "size": 8, "maxdisplayed": 6},
        hovertemplate="step %{x}: %{y:.4g}<extra>" + arm + "</extra>",
    )


def _scale_axis(figure: go.Figure, values: Sequence[float], row: int) -> None:
    """Give a panel a logarithmic axis where its values are positive and far apart."""
    if not values:
        return
    lowest = min(values)
    highest = max(values)
    if lowest <= 0 or highest <= 3 * lowest:
        return
    figure.update_yaxes(type="log", dtick=1, tickformat="~g", row=row, col=1)
    if highest < 30 * lowest:
        # A tick a decade would leave the axis with one: ticks at 1, 2 and 5 of each.
        figure.update_yaxes(dtick="D2", row=row, col=1)


def _in_one_line(curves: _Curves) -> go.Scatter:
    """Return the curves of many arms as one line with gaps between them; hovering names the arm.

    Plotly takes seconds for a trace each, and a legend of many arms cannot be read.
    """
    import plotly.graph_objects as go

    steps: list[int | None] = []
    values: list[float | None] = []
    texts: list[str] = []
    for arm, curve in curves.items():
        for step, value in _points(curve):
            steps.append(step)
            values.append(value)
            texts.append(arm)
        # A point without a value cuts the line.
        steps.append(None)
        values.append(None)
        texts.append(arm)
    return go.Scatter(
        x=steps,
        y=values,
        text=texts,
        showlegend=False,
        mode="lines",
        line_color=COLOURS[0],
        hovertemplate="step %{x}: %{y:.4g}<extra>%{text}</extra>",
    )


def _points(curve: Sequence[float]) -> list[tuple[int, float]]:
    """Return (step, value) of a curve where its values are finite."""
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


_CHAIN = ("audited", "lower", "reported", "published")  # from left to right if all is well


def plot_audits(records: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Plot the chains of kept audits, as certificates carry them, in one figure.

    Args:
        records: From :func:`privtune.study.audits_of`; at one δ, which is their budget's.

    Returns:
        As :func:`plot_audit`; arms are named where there are several.

    Example:
        >>> from privtune.audit import audit
        >>> records = [audit(plan, delta=1e-5, runs=100).to_dict() for plan in study.plans[:1]]
        >>> plot_audits(records).data[0].y
        ('one training',)
    """
    import plotly.graph_objects as go

    names = []
    marks: dict[str, list[float | None]] = {name: [] for name in _CHAIN}
    for record in records:
        for row in record["rows"]:
            mechanism = row["mechanism"]
            if len(records) > 1:
                mechanism = f"{record['arm']} ({record['seed']}): {mechanism}"
            names.append(mechanism)
            for name in ("audited", "lower", "reported"):
                marks[name].append(row[name])
            marks["published"].append(record["published"])
    figure = new_figure(
        x=f"ε (at δ = {records[0]['delta']:g})",
        height=150 + 60 * len(names),
    )
    # Outside of a study nothing is published: then that mark is missing.
    chain = {name: values for name, values in marks.items() if None not in values}
    for (name, values), colour in zip(chain.items(), COLOURS, strict=False):
        figure.add_trace(
            go.Scatter(
                x=values,
                y=names,
                mode="markers",
                name=name,
                marker={
                    "color": colour,
                    "size": 12,
                    "symbol": "line-ns-open",
                    "line_width": 3,
                },
                hovertemplate=f"{name}<br>%{{x:.4f}}<extra></extra>",
            )
        )
    figure.update_xaxes(rangemode="tozero")
    return figure
