"""The page of a study, with the privacy statement that somebody is asked to sign, and that of one chart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from privtune.accounting import epsilon, explain
from privtune.accounting.registry import formula
from privtune.errors import InvalidInputError
from privtune.ledger.audits import contradictions
from privtune.ledger.wording import PromiseWording
from privtune.numbers import ceil_to, show_epsilon, show_left
from privtune.strategies.laws import say_few_runs
from privtune.study.audits import audits_of
from privtune.tasks import PRETRAINED
from privtune.tasks._facts import rows_note
from privtune.views import text
from privtune.views.comparison import order_of, show_probability, table_of
from privtune.views.page import Values, figure, render
from privtune.views.record import budget_view, ledger_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from privtune.strategies import Plan
    from privtune.study import ArmStatus, Study
    from privtune.views.record import BudgetView


def render_study(study: Study) -> str:
    """Return the report of a study: HTML with Plotly inside, which opens without a network."""
    arms, view, budget = study.status(), budget_view(study), study.spec.budget
    stages = [
        (
            stage.plan.arm,
            stage.plan.stage.type,
            show_epsilon(stage.guarantee.epsilon),
            f"{stage.plan.scale:.4g}",
            stage.words or stage.state,
        )
        for stage in study.stages
    ]
    return render(
        "study.html",
        plotly=True,
        title=f"{study.name}: hyperparameter tuning under differential privacy",
        study=study.name,
        budget=text.budget_line(budget, view.spent, view.left),
        seed=study.spec.seed,
        declared=text.declared_trainings(study),
        comparison=_comparison(arms),
        order=_order(arms),
        spread=text.spread_notes(arms),
        expected=text.EXPECTED,
        stages=stages,
        figures=_figures(study, arms),
        charges=_charges(study, view),
        audits=_audits(audits_of(study)),
        public=text.public_facts(study.plans),
        certificate=view.certificate,
        **_statement(study, arms, view),
    )


def render_chart(study: Study, kind: str = ".html") -> str | bytes:
    """Return one chart: what arms reached, their ε and their cost.

    Args:
        study: The study.
        kind: A page, ``.html``, or a picture: ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        InvalidInputError: If arms have no metric in common, or none is released.
    """
    from privtune.plots import plot_comparison
    from privtune.plots._image import to_image

    arms = study.status()
    name, values = text.utility_column(arms)
    if " or " in name or set(values.values()) <= {text.NOT_MEASURED}:
        why = "no released arm has it, or others have another one"
        remedy = "Run the study first, or see the table: privtune study compare NAME."
        raise InvalidInputError("metric", name, why, remedy)
    chart = plot_comparison(study, metric=text.first_metric(arms), arms=arms)
    if kind != ".html":
        return to_image(chart, kind)
    return render("chart.html", plotly=True, title=study.name, shown=_compared(chart, arms))


def _compared(chart: go.Figure, arms: Sequence[ArmStatus]) -> Values:
    """Return the figure of the comparison, and what its lines are for."""
    noised = any(arm.plan.report is not None and arm.plan.report.event is not None for arm in arms)
    said = {"utility": text.explain_utility(arms), "noised": noised}
    said |= {"repeated": any(arm.release and arm.release.repetitions for arm in arms)}
    return {**figure("arms", chart), "lines": chart.data[0].error_x.visible, **said}


def _comparison(arms: Sequence[ArmStatus]) -> Values:
    rows = table_of(arms)
    columns = [*rows[0]] if rows else ["arm"]
    return {
        "columns": columns,
        "rows": [[*row.values()] for row in rows],
        "caption": "The same in numbers",
        "numeric": columns[2:-1],
    }


def _order(arms: Sequence[ArmStatus]) -> Values:
    """Return the table of all pairs of repeated arms; nothing of fewer than two."""
    order = order_of(arms)
    if len(order) < 2:
        return {}
    rows = [
        (arm, *("—" if arm == other else show_probability(row[other]) for other in order))
        for arm, row in order.items()
    ]
    caption = (
        "The probability that the mean of the arm in the row is better than that in the column"
    )
    return {"columns": ("", *order), "rows": rows, "caption": caption, "numeric": (*order,)}


def _figures(study: Study, arms: Sequence[ArmStatus]) -> Values:
    """Return the figures by name; those of which nothing was measured are left out."""
    from privtune import plots
    from privtune.plots._study import costs_at_other_means, shares

    parts: Values = {
        "columns": ("charge", "ε added", "ε alone"),
        "rows": [(of, show_epsilon(a, 4), show_epsilon(b, 4)) for of, a, b in shares(study)],
        "caption": "What each charge added to the composition",
        "numeric": ("ε added", "ε alone"),
    }
    found: Values = {"budget": figure("budget", plots.plot_budget(study), numbers=parts)}
    chart = plots.plot_comparison(study, metric=text.first_metric(arms), arms=arms)
    found["comparison"] = _compared(chart, arms)
    if any(arm.release is not None and arm.release.curves for arm in arms):
        found["trajectories"] = figure("trajectories", plots.plot_trajectories(study, arms=arms))
    laws: dict[object, list[Plan]] = {}
    for plan in (arm.plan for arm in arms if arm.plan.runs is not None):
        laws.setdefault((plan.runs, plan.charged), []).append(plan)
    found["laws"] = []
    for number, plans in enumerate(laws.values()):
        costs = costs_at_other_means(study, plans[0])
        numbers: Values = {
            "columns": ("mean runs", "ε"),
            "rows": [(f"{mean:g}", show_epsilon(cost, 4)) for mean, cost in costs],
            "caption": "ε of the selection at other means, with the same noise",
            "numeric": ("mean runs", "ε"),
        }
        chart = plots.plot_runs(study, arm=plans[0].arm)
        law: Any = plans[0].runs
        shown = figure(f"runs-{number}", chart, numbers=numbers)
        found["laws"].append((", ".join(plan.arm for plan in plans), say_few_runs(law), shown))
    return found


def _charges(study: Study, view: BudgetView) -> Values:
    budget = study.spec.budget
    why = {
        event: {
            "summary": formula(event),
            "tree": explain(event, budget.delta, adjacency=budget.adjacency),
        }
        for event in {charge.event for charge in view.charges}
    }
    rows = ledger_table(view.charges, study)["data"]
    return {
        "columns": ("charge", "study", "arm", "state", "ε alone", "why this ε"),
        "rows": [(*row[:5], why[c.event]) for row, c in zip(rows, view.charges, strict=True)],
        "caption": f"All charges of budget {budget.name}",
        "numeric": ("ε alone",),
        "wide": ("why this ε",),
    }


def _audits(records: list[Values]) -> Values:
    from privtune import plots

    if not records:
        return {}
    rows = [
        (
            f"{record['arm']}: {row['mechanism']}",
            *(show_left(row[name], 4) for name in ("audited", "lower")),
            show_epsilon(row["reported"], 4),
            f"{record['published']:g}",
            f"{row['runs']:,}",
            f"{record['seed']}",
        )
        for record in records
        for row in record["rows"]
    ]
    columns = ("of", "audited ≤", "lower ≤", "reported ≤", "published", "runs", "seed")
    sure = f"{records[0]['confidence']:.0%}"
    return {
        "contradictions": contradictions(records),
        "table": {
            "columns": columns,
            "rows": rows,
            "caption": f"Bounds on ε from below, by experiment, at {sure} confidence each",
            "numeric": columns[1:],
        },
        "figure": figure("audits", plots.plot_audits(records)),
        "untouched": list(dict.fromkeys(line for r in records for line in r["untouched"])),
    }


def _statement(study: Study, arms: Sequence[ArmStatus], view: BudgetView) -> Values:
    """Return what the privacy statement says, which a data-protection officer is asked to sign."""
    budget, terms = study.spec.budget, view.certificate["budget"]["terms"]
    wording = PromiseWording(terms["unit"])
    spent = ceil_to(view.spent.epsilon, 3)
    costs = []
    for plan, guarantee in ((arm.plan, arm.guarantee) for arm in arms):
        one = epsilon(plan.training.event, budget.delta, adjacency=budget.adjacency).epsilon
        costs.append((plan.arm, show_epsilon(one), show_epsilon(guarantee.epsilon)))
    released = [f"stage {stage.plan.arm}: {stage.words}" for stage in study.stages if stage.words]
    released += [f"{a.plan.arm}: {', '.join(a.plan.released)}" for a in arms if a.release]
    return {
        "terms": terms,
        "neighbour": wording.state_change(budget.adjacency),
        "spent": show_epsilon(spent),
        "delta": f"{budget.delta:g}",
        "limit": f"{budget.epsilon:g}",
        "dataset": terms["dataset"] or f"the private data of task {study.spec.task_name}",
        "meaning": wording.explain_epsilon(spent, budget.delta),
        "caveat": wording.caveat,
        "costs": [*costs, ("everything charged to the budget", "—", show_epsilon(spent))],
        "together": text.together(view.spent),
        "released": released,
        "sealed": [f"{arm.plan.arm}: {', '.join(arm.plan.sealed)}" for arm in arms],
        "uncharged": any(p.repeats > 1 and not p.repeats_charged for p in study.plans),
        "rows_of_a_query": any(rows_note(plan.public_facts) for plan in study.plans),
        "pretrained": sorted(filter(None, {p.public_facts.get(PRETRAINED) for p in study.plans})),
    }
