"""The HTML report of a study, with a privacy statement to sign, and a page or picture of one chart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from privtune.accounting import explain
from privtune.accounting.registry import formula
from privtune.errors import InvalidInputError
from privtune.facts import rows_note
from privtune.ledger.audits import contradictions
from privtune.ledger.wording import PromiseWording
from privtune.numbers import ceil_to, show_epsilon, show_left
from privtune.strategies.laws import say_few_runs
from privtune.study.arm_audits import audits_of
from privtune.study.observer import releases_of
from privtune.tasks import PRETRAINED
from privtune.views import text
from privtune.views.comparison import table_of
from privtune.views.headline import constant_notes, headline
from privtune.views.order import order_of, show_probability
from privtune.views.record import budget_view
from privtune.views.templating import Values, figure, render

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from privtune.strategies import Plan
    from privtune.strategies.schedule_rule import ScheduleCurve
    from privtune.study import Study
    from privtune.study.observer import Arms, ArmStatus
    from privtune.study.spec import BudgetSpec
    from privtune.views.record import BudgetView


def render_study(study: Study) -> str:
    """Return the report of a study: HTML with Plotly inside, which opens without a network.

    It shows releases, plans and charges, and none of a sealed arm's trials.
    """
    arms = study.status()
    view = budget_view(study)
    return render(
        "study.html",
        plotly=True,
        title=f"{study.name}: hyperparameter tuning under differential privacy",
        study=study.name,
        budget=text.budget_line(study.spec.budget, view.spent, view.left),
        seed=study.spec.seed,
        declared=text.declared_trainings(study),
        comparison=_comparison(arms),
        order=_probability_table(arms),
        answer=headline(study, arms).lines,
        spread=[*constant_notes(arms), *text.spread_notes(arms)],
        expected=text.EXPECTED,
        stages=_stages(study),
        figures=_figures(study, arms),
        charges=_charges(study, view),
        audits=_audits(audits_of(study)),
        public=text.public_facts(study.plans),
        certificate=view.certificate,
        **_statement(study, arms, view),
    )


def _stages(study: Study) -> list[tuple[str, ...]]:
    """Return a row for each stage: its name, type, ε, noise, and its release or its state."""
    rows: list[tuple[str, ...]] = []
    for stage in study.stages:
        plan = stage.plan
        row = (
            plan.arm,
            plan.stage.type,
            show_epsilon(stage.guarantee.epsilon),
            f"{plan.scale:.4g}",
            stage.words or stage.state,
        )
        rows.append(row)
    return rows


def render_chart(study: Study, kind: str = ".html") -> str | bytes:
    """Return the comparison chart as a page or a picture: the metric, ε and cost of each arm.

    Args:
        study: The study.
        kind: A page, ``.html``, or a picture: ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        InvalidInputError: If arms have no metric in common, or none is released.
    """
    from privtune.plots import plot_comparison
    from privtune.plots.image import to_image

    arms = study.status()
    name, values = text.utility_column(arms)
    is_measured = any(value != text.NOT_MEASURED for value in values.values())
    if " or " in name or not is_measured:
        why = "no released arm has it, or arms have different metrics"
        remedy = "Run the study first, or see the table: privtune study compare NAME."
        raise InvalidInputError("metric", name, why, remedy)
    metric = text.first_metric(arms)
    chart = plot_comparison(study, metric=metric, arms=arms)
    if kind != ".html":
        return to_image(chart, kind)
    return render(
        "chart.html",
        plotly=True,
        title=study.name,
        shown=_compared(chart, arms),
    )


def render_schedule(curve: ScheduleCurve, title: str) -> str:
    """Return the chart of a schedule's choice as a page: noise and work of other epochs and batches.

    Args:
        curve: The schedules, with the one of the plan.
        title: The study's name.
    """
    from privtune.plots import plot_schedule

    return render(
        "schedule.html",
        plotly=True,
        title=title,
        shown=figure("schedule", plot_schedule(curve)),
        twice=f"Twice the work would lower it by {100.0 * curve.gain:.2g}%.",
    )


def _compared(chart: go.Figure, arms: Arms) -> Values:
    """Return the template's values of the comparison's figure, and whether arms are noised or repeated.

    Args:
        chart: From :func:`privtune.plots.plot_comparison`.
        arms: The arms that it shows: their metric may be noised, and their runs repeated.
    """
    is_noised = False
    is_repeated = False
    for arm in arms:
        report = arm.plan.report
        if report is not None and report.event is not None:
            is_noised = True
        if arm.release and arm.release.repetitions:
            is_repeated = True
    return {
        **figure("arms", chart),
        "lines": chart.data[0].error_x.visible,
        "utility": text.explain_utility(arms),
        "noised": is_noised,
        "repeated": is_repeated,
    }


def _comparison(arms: Arms) -> Values:
    """Return the table of the comparison, and which of its columns are numbers."""
    rows = table_of(arms)
    columns = list(rows[0]) if rows else ["arm"]
    return {
        "columns": columns,
        "rows": [list(row.values()) for row in rows],
        "caption": "The same in numbers",
        "numeric": columns[2:-1],
    }


def _probability_table(arms: Arms) -> Values:
    """Return the table of probabilities that one repeated arm beats another; empty for fewer than two."""
    order = order_of(arms)
    if len(order) < 2:
        return {}
    rows = []
    for arm, row in order.items():
        cells = [arm]
        for other in order:
            cell = "—" if arm == other else show_probability(row[other])
            cells.append(cell)
        rows.append(tuple(cells))
    return {
        "columns": ("", *order),
        "rows": rows,
        "caption": (
            "Probability that the mean of the row's arm is better than the mean of the column's arm"
        ),
        "numeric": tuple(order),
    }


def _figures(study: Study, arms: Arms) -> Values:
    """Return the page's figures by name, without those that lack measurements.

    Charts are imported here and not above: a page is the only thing that needs Plotly.
    """
    from privtune import plots

    budget_chart = plots.plot_budget(study)
    metric = text.first_metric(arms)
    comparison_chart = plots.plot_comparison(study, metric=metric, arms=arms)
    figures: Values = {
        "budget": figure("budget", budget_chart, numbers=_shares_table(study)),
        "comparison": _compared(comparison_chart, arms),
    }
    if any(release.curves for release in releases_of(arms)):
        curves = plots.plot_trajectories(study, arms=arms)
        figures["trajectories"] = figure("trajectories", curves)
    figures["laws"] = _laws(study, arms)
    return figures


def _shares_table(study: Study) -> Values:
    """Return the table behind the budget's figure: each charge with the ε it added and its ε alone."""
    from privtune.plots.study_charts import shares

    rows = []
    for label, added, alone in shares(study):
        row = (
            label,
            show_epsilon(added, 4),
            show_epsilon(alone, 4),
        )
        rows.append(row)
    return {
        "columns": ("charge", "ε added", "ε alone"),
        "rows": rows,
        "caption": "How much each charge added to the ε spent, and what it costs alone",
        "numeric": ("ε added", "ε alone"),
    }


def _laws(study: Study, arms: Arms) -> list[tuple[str, str, Values]]:
    """Return the charts of the laws of K, the secret numbers of runs, each with its arms and a warning."""
    from privtune import plots

    plans_by_law: dict[object, list[Plan]] = {}
    for arm in arms:
        plan = arm.plan
        if plan.runs is None:
            continue
        law = (plan.runs, plan.charged)
        plans_by_law.setdefault(law, []).append(plan)
    laws = []
    for number, plans in enumerate(plans_by_law.values()):
        first = plans[0]
        runs: Any = first.runs
        names = ", ".join(plan.arm for plan in plans)
        chart = plots.plot_runs(study, arm=first.arm)
        numbers = _runs_table(study, first)
        picture = figure(f"runs-{number}", chart, numbers=numbers)
        laws.append((names, say_few_runs(runs), picture))
    return laws


def _runs_table(study: Study, plan: Plan) -> Values:
    """Return the table behind the figure of a law of runs: mean numbers of runs and their ε.

    Args:
        study: Its budget gives δ and the relation of neighbours.
        plan: Of the first arm with this law.
    """
    from privtune.plots.study_charts import costs_at_other_means

    columns = ("mean runs", "ε")
    rows = []
    for mean, cost in costs_at_other_means(study, plan):
        rows.append((f"{mean:g}", show_epsilon(cost, 4)))
    return {
        "columns": columns,
        "rows": rows,
        "caption": "ε of the selection for other mean numbers of runs, with the same noise",
        "numeric": columns,
    }


def _charges(study: Study, view: BudgetView) -> Values:
    """Return the table of all charges, with the derivation of each ε."""
    budget = study.spec.budget
    rows = []
    for row, charge in zip(view.ledger["data"], view.charges, strict=True):
        derivation = {
            "summary": formula(charge.event),
            "tree": explain(charge.event, budget.delta, adjacency=budget.adjacency),
        }
        rows.append((*row[:5], derivation))
    return {
        "columns": ("charge", "study", "arm", "state", "ε alone", "why this ε"),
        "rows": rows,
        "caption": f"All charges of budget {budget.name}",
        "numeric": ("ε alone",),
        "wide": ("why this ε",),
    }


def _audits(records: list[Values]) -> Values:
    """Return the section of kept audits, contradictions first; empty without any audit.

    Lower bounds are rounded down and upper ones up: rounding must not hide that one is above another.
    """
    from privtune import plots

    if not records:
        return {}
    rows = []
    untouched: dict[str, None] = {}  # what an audit says nothing about, each once
    for record in records:
        untouched |= dict.fromkeys(record["untouched"])
        for row in record["rows"]:
            cells = (
                f"{record['arm']}: {row['mechanism']}",
                show_left(row["audited"], 4),
                show_left(row["lower"], 4),
                show_epsilon(row["reported"], 4),
                f"{record['published']:g}",
                f"{row['runs']:,}",
                f"{record['seed']}",
            )
            rows.append(cells)
    columns = ("of", "audited ≤", "lower ≤", "reported ≤", "published", "runs", "seed")
    confidence = f"{records[0]['confidence']:.0%}"
    return {
        "contradictions": contradictions(records),
        "table": {
            "columns": columns,
            "rows": rows,
            "caption": f"Lower bounds on ε from attacks on made-up records, each at {confidence} confidence",
            "numeric": columns[1:],
        },
        "figure": figure("audits", plots.plot_audits(records)),
        "untouched": list(untouched),
    }


def _statement(study: Study, arms: Arms, view: BudgetView) -> Values:
    """Return the values of the privacy statement, which a data-protection officer is asked to sign.

    Args:
        study: The study.
        arms: The states of its arms.
        view: The budget's state: ε is rounded up to three places, once, so that the words that explain it
            and the number agree.
    """
    budget = study.spec.budget
    terms = view.certificate["budget"]["terms"]
    wording = PromiseWording(terms["unit"])
    spent = ceil_to(view.spent.epsilon, 3)
    costs = [_cost_of(arm, budget) for arm in arms]
    total = ("everything charged to the budget", "—", show_epsilon(spent))
    pretrained = {plan.public_facts.get(PRETRAINED) for plan in study.plans}
    return {
        "terms": terms,
        "neighbour": wording.state_change(budget.adjacency),
        "spent": show_epsilon(spent),
        "delta": f"{budget.delta:g}",
        "limit": f"{budget.epsilon:g}",
        "dataset": text.describe_dataset(view.certificate),
        "meaning": wording.explain_epsilon(spent, budget.delta),
        "caveat": wording.caveat,
        "costs": [*costs, total],
        "together": text.together(view.spent),
        "released": _released(study, arms),
        "sealed": [f"{arm.plan.arm}: {', '.join(arm.plan.sealed)}" for arm in arms],
        "uncharged": any(plan.repeats > 1 and not plan.repeats_charged for plan in study.plans),
        "rows_of_a_query": any(rows_note(plan.public_facts) for plan in study.plans),
        "pretrained": sorted(filter(None, pretrained)),
    }


def _released(study: Study, arms: Arms) -> list[str]:
    """Return a line for each stage and arm that has released something, with what it released."""
    lines = []
    for stage in study.stages:
        if stage.words:
            lines.append(f"stage {stage.plan.arm}: {stage.words}")
    for arm in arms:
        if arm.release:
            lines.append(f"{arm.plan.arm}: {', '.join(arm.plan.released)}")
    return lines


def _cost_of(arm: ArmStatus, budget: BudgetSpec) -> tuple[str, str, str]:
    """Return an arm's name, the ε of one of its trainings, and the ε of the whole arm.

    Args:
        arm: How far it is.
        budget: Whose δ both numbers are at.
    """
    plan = arm.plan
    training = budget.guarantee_of(plan.training.event)
    return (
        plan.arm,
        show_epsilon(training.epsilon),
        show_epsilon(arm.guarantee.epsilon),
    )
