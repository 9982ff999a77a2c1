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
from privtune.plots._style import COLOURS, MOST_TRACES, apply_style, colours, in_one, new_figure
from privtune.strategies.laws import with_law
from privtune.strategies.plan import epsilon_spent
from privtune.strategies.scoring import validation_metric
from privtune.training.mechanism.metrics import is_share

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.audit import AuditReport
    from privtune.strategies import Plan
    from privtune.study import ArmStatus, Study

_Z95 = 1.959963984540054


def wilson_interval(rate: float, records: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a rate that was observed on so many records."""
    z2 = _Z95 * _Z95  # Source: Wilson (1927)
    centre = (rate + z2 / (2 * records)) / (1 + z2 / records)
    half = (
        _Z95
        * math.sqrt(rate * (1 - rate) / records + z2 / (4 * records * records))
        / (1 + z2 / records)
    )
    return max(centre - half, 0.0), min(centre + half, 1.0)


def plot_utility(
    study: Study,
    *,
    metric: str = "test_accuracy",
    arms: Sequence[ArmStatus] | None = None,
) -> go.Figure:
    """Plot what each arm's released model reached against the ε of its whole procedure.

    Args:
        study: A study with at least one release.
        metric: A metric of the releases on the test split (``test_accuracy``, ``test_auc``, ...), or
            the score that arms chose by (``validation_accuracy``, ``validation_loss``, ...).
        arms: What ``study.status()`` returned, if it was read already.

    Returns:
        A figure. Bars are 95% intervals for the drawing of the test records, and for the noise where
        they are private; a score has none, for it was chosen by. A hollow
        marker stands at the ε of the released model's training alone: what is
        reported when the search is forgotten.
        Arms at the same ε are moved apart a little; hovering shows the exact ε. An arm without any
        guarantee has no place on the axis.

    Example:
        >>> plot_utility(study).layout.xaxis.title.text
        'ε of the arm (δ = 1e-05)'
    """
    import plotly.graph_objects as go

    budget = study.spec.budget
    # Only a task declares a test split public; an open study has no such metric.
    records = 1 if study.spec.task is None else study.spec.load_task().test_records
    read = study.status() if arms is None else arms
    palette = colours([status.plan.arm for status in read])
    figure = new_figure(x=f"ε of the arm (δ = {budget.delta:g})", y=metric.replace("_", " "))
    scored = metric.startswith(("validation_", "tuning_"))
    share = is_share(metric.partition("_")[2])
    digits = ".1%" if share else ".4f"
    private = [status for status in read if math.isfinite(status.guarantee.epsilon)]
    alone: dict[str, list[Any]] = {"x": [], "y": [], "hovertemplate": []}
    reached: list[dict[str, Any]] = []
    apart = 0.012 * max((status.guarantee.epsilon for status in private), default=0.0)
    for place, status in enumerate(private):
        arm, value = status.plan.arm, _value_of(status, metric)
        if value is None:
            continue
        low, high = (value, value) if scored else _interval(status, metric, value, records)
        total = status.guarantee.epsilon
        if status.plan.is_sealed:
            event = status.plan.training.event
            one = epsilon(event, budget.delta, adjacency=budget.adjacency).epsilon
            alone["x"] += [one, total + place * apart, None]  # nothing: the line ends here
            alone["y"] += [value, value, None]
            said = f"{arm}: one training alone, ε = {show_epsilon(one, 4)}<extra></extra>"
            alone["hovertemplate"] += [said] * 3
        ends = "" if scored else f" [{low:{digits}}, {high:{digits}}]"
        reached.append(
            {
                "x": [total + place * apart],
                "y": [value],
                "name": arm,
                "mode": "markers",
                "marker": {"color": palette[arm], "size": 12},
                "error_y": {
                    "type": "data",
                    "visible": not scored,
                    "symmetric": False,
                    "array": [high - value],
                    "arrayminus": [value - low],
                    "thickness": 1.5,
                    "width": 6,
                },
                "hovertemplate": f"{arm}<br>{value:{digits}}{ends}<br>ε = {show_epsilon(total, 4)}"
                "<extra></extra>",
            }
        )
    if alone["x"]:
        arms_alone = len(alone["x"]) // 3
        marker = {
            "symbol": ["circle-open", "circle", "circle"] * arms_alone,
            "size": [11, 1, 1] * arms_alone,
            "color": "#808896",
        }
        line = {"color": "#808896", "dash": "dot", "width": 1}
        look: dict[str, Any] = {"mode": "lines+markers", "marker": marker, "line": line}
        figure.add_trace(go.Scatter(**alone, **look, showlegend=False))
    if len(reached) > MOST_TRACES:
        reached = [in_one(reached)]
    figure.add_traces([go.Scatter(**trace) for trace in reached])
    if share:
        figure.update_yaxes(tickformat=".0%")
    figure.update_xaxes(rangemode="tozero")
    return figure


def _interval(status: ArmStatus, metric: str, value: float, records: int) -> tuple[float, float]:
    """Return a public accuracy's Wilson interval; another's own, ends that are no interval if none."""
    release = status.release
    public = status.plan.report is None or status.plan.report.event is None
    if metric == "test_accuracy" and public:
        return wilson_interval(value, records)
    ends = (value, value) if release is None else release.intervals.get(metric, (value, value))
    return min(ends[0], value), max(ends[1], value)


def _value_of(status: ArmStatus, metric: str) -> float | None:
    release = status.release
    if release is None:
        return None
    scores = validation_metric(status.plan.score, release.score, of=status.plan.scored)
    return {**scores, **release.utility}.get(metric)


def plot_cost(study: Study, *, arms: Sequence[ArmStatus] | None = None) -> go.Figure:
    """Plot gradient evaluations and seconds of every arm.

    Args:
        study: A study.
        arms: What ``study.status()`` returned, if it was read already.

    Returns:
        A figure with two panels. Hatched bars are the plan's expectation: what a training took would
        tell how many records there are, and a sealed round its number of runs.

    Example:
        >>> [bar.marker.pattern.shape for bar in plot_cost(study).data if bar.name == "selection"]
        ['/', '/']
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = ("gradient evaluations (expected)", "seconds (hatched: expected)")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.14)
    apply_style(figure, height=320, side_by_side=True)
    read = study.status() if arms is None else arms
    palette = colours([status.plan.arm for status in read])
    bars: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for status in read:
        arm = status.plan.arm
        seconds = None if status.release is None else status.release.cost.wall_seconds
        hatched = {"shape": "/" if status.plan.is_private else ""}
        for column, value in ((1, status.plan.expected_gradient_evaluations), (2, seconds)):
            bars[column].append(
                {
                    "x": [arm],
                    "y": [value],
                    "name": arm,
                    "showlegend": False,
                    "marker": {"color": palette[arm], "pattern": hatched},
                    "hovertemplate": "%{x}: %{y:,.3~s}<extra></extra>",
                }
            )
    for column, drawn in bars.items():
        if len(drawn) > MOST_TRACES:
            shapes = [bar["marker"]["pattern"]["shape"] for bar in drawn]
            together = in_one(drawn)
            together["marker"]["pattern"] = {"shape": shapes}
            bars[column] = [together]
        for bar in bars[column]:
            figure.add_trace(go.Bar(**bar), row=1, col=column)
    return figure


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
    palette = colours([status.plan.arm for status in read])
    labelled: set[str] = set()
    for row, name in enumerate(names, start=1):
        values = [y for by_name in curves.values() for _, y in _points(by_name.get(name, ()))]
        having = {arm: by_name for arm, by_name in curves.items() if name in by_name}
        if len(having) > MOST_TRACES:
            figure.add_trace(_in_one_line(name, having, palette), row=row, col=1)
            having = {}
        for arm, by_name in having.items():
            figure.add_trace(
                go.Scatter(
                    x=[x for x, _ in _points(by_name[name])],
                    y=[y for _, y in _points(by_name[name])],
                    name=arm,
                    legendgroup=arm,
                    showlegend=arm not in labelled,
                    mode="lines",
                    line_color=palette[arm],
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


def _in_one_line(
    name: str, curves: Mapping[str, Mapping[str, Sequence[float]]], palette: Mapping[str, str]
) -> go.Scatter:
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
        line_color=next(iter(palette.values())),
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
