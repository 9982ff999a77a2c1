"""The report: one page that shows a study, explains its ε, and needs nothing from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from privtune.accounting import explain
from privtune.accounting.registry import formula
from privtune.ledger.audits import contradictions
from privtune.numbers import show_epsilon, show_left, show_seconds
from privtune.strategies.laws import say_few_runs
from privtune.study.audits import audits_of
from privtune.tasks import rows_note
from privtune.views.page import (
    Html,
    details,
    document,
    facts,
    figure,
    rows_of,
    section,
    table,
    text,
)
from privtune.views.record import LEDGER_TABLE, budget_view, ledger_table
from privtune.views.statement import privacy_statement
from privtune.views.text import (
    EXPECTED,
    NOT_MEASURED,
    budget_line,
    declared_trainings,
    explain_utility,
    public_facts,
    show_params,
    utility_column,
    utility_name,
)

if TYPE_CHECKING:
    from privtune.accounting import Event, Explanation
    from privtune.strategies import Plan
    from privtune.study import ArmStatus, Study
    from privtune.views.record import ArmRecord, BudgetView


def render_arm(record: ArmRecord, view: BudgetView) -> str:
    """Return the page of one arm, without scripts: MLflow shows it among the run's artifacts.

    Args:
        record: What is logged of the arm.
        view: The state of the budget.
    """
    lines = [line for line in record.note.splitlines() if line]
    values = {name: value for name, value, step in record.points if step == 0}
    shown = {
        "ε of the procedure": show_epsilon(values["eps/total"], 4)
        if "eps/total" in values
        else "no guarantee",
        "ε of one training (not the promise)": show_epsilon(values["eps/one_run"], 4)
        if "eps/one_run" in values
        else "no guarantee",
        **record.params,
    }
    ledger = record.documents[LEDGER_TABLE]
    return document(
        f"{record.arm}: privacy report",
        Html(f"<h1>{text(record.arm)}</h1>"),
        Html(f'<p class="lead">{text(lines[0])}</p>'),
        *(Html(f"<p>{text(line.replace('**', ''))}</p>") for line in lines[1:]),
        section("Numbers", facts(shown, caption="The arm's guarantee and parameters")),
        section(
            "Charges of the budget",
            table(
                ledger["columns"],
                rows_of(ledger),
                caption="Every charge; costs alone do not add up to the cost of the whole",
                numeric=["ε alone"],
                wide=["event"],
            ),
        ),
        _checking(view),
    )


def render_study(study: Study) -> str:
    """Return the page that ``privtune study compare --html`` writes.

    Args:
        study: A study; arms that have not been released are shown as planned.

    Returns:
        HTML with Plotly inside: it opens without a network.
    """
    arms = study.status()
    view = budget_view(study)
    budget = study.spec.budget
    return document(
        f"{study.name}: hyperparameter tuning under differential privacy",
        Html(
            f'<p class="quiet">PrivTune study report</p><h1>{text(study.name)}</h1>'
            f'<p class="lead">{text(budget_line(budget, view.spent, view.left))}.</p>'
        ),
        _weakened(study),
        _comparison(arms),
        _stages(study),
        *_figures(study, arms),
        _charges(study, view),
        _audits(audits_of(study)),
        _declared(study),
        privacy_statement(study, arms, view),
        _checking(view),
        plotly=True,
    )


def _weakened(study: Study) -> Html:
    said = []
    if study.spec.seed is not None:
        said.append(
            f"<strong>Fixed seed {study.spec.seed}.</strong> No guarantee holds against whoever knows the "
            "seed."
        )
    if any(rows_note(plan.public_facts) for plan in study.plans):
        said.append(
            "<strong>Rows of a query, declared independent.</strong> That each comes from one protected "
            "record was not checked."
        )
    said += [f"<strong>Training {text(words)}.</strong>" for words in declared_trainings(study)]
    return Html("".join(f'<p class="lead warn">{line}</p>' for line in said))


def _comparison(arms: tuple[ArmStatus, ...]) -> Html:
    utility, values = utility_column(arms)
    rows = []
    for arm in arms:
        release = arm.release
        seconds = None if release is None else release.cost.wall_seconds
        params = {} if release is None else release.params
        rows.append(
            (
                arm.plan.arm,
                arm.plan.strategy,
                show_epsilon(arm.guarantee.epsilon),
                values.get(arm.plan.arm, arm.state),
                f"{arm.plan.expected_gradient_evaluations:,.0f}",
                show_seconds(seconds),
                show_params(params) or "—",
            )
        )
    columns = [
        "arm",
        "strategy",
        "ε",
        utility,
        "gradients",
        "seconds",
        "released parameters",
    ]
    return section(
        "Comparison",
        table(
            columns,
            rows,
            caption="What each arm reached, at what ε, at what cost",
            numeric=["ε", utility, "gradients", "seconds"],
        ),
        Html(f'<p class="quiet">{text(explain_utility(arms))}</p>'),
        Html(f'<p class="quiet">{text(EXPECTED)}</p>'),
        anchor="comparison",
    )


def _stages(study: Study) -> Html:
    if not study.stages:
        return Html("")
    rows = []
    for stage in study.stages:
        cost, noise = show_epsilon(stage.guarantee.epsilon), f"{stage.plan.scale:.4g}"
        shown = stage.words or stage.state
        rows.append((stage.plan.arm, stage.plan.stage.type, cost, noise, shown))
    return section(
        "Before the arms",
        table(
            ["stage", "type", "ε", "noise", "released"],
            rows,
            caption="What was released once, and is shared by all arms",
            numeric=["ε", "noise"],
            wide=["released"],
        ),
        Html(
            '<p class="quiet">Each is a charge of its own, on top of those of the arms. The noise is the '
            "standard deviation on each of its sums; what was released follows from these alone.</p>"
        ),
        anchor="stages",
    )


def _figures(study: Study, arms: tuple[ArmStatus, ...]) -> list[Html]:
    from privtune import plots

    released = [arm.release for arm in arms if arm.release is not None]
    shown = [_budget_figure(study)]
    name = utility_name(arms)
    measured = [value for value in utility_column(arms)[1].values() if value != NOT_MEASURED]
    if measured and " or " not in name:  # losses and accuracies have no axis in common
        shown.append(
            section(
                "Utility against ε",
                figure(
                    "utility",
                    plots.plot_utility(study, metric=name, arms=arms),
                    caption=f"{explain_utility(arms)} It stands against the ε of the arm's "
                    "procedure, on the test split with 95% intervals. The hollow marker is the ε of the "
                    "released training alone, which "
                    "forgets the search.",
                ),
            )
        )
    if released:
        shown.append(
            section(
                "Cost",
                figure(
                    "cost",
                    plots.plot_cost(study, arms=arms),
                    caption="Gradient evaluations and time of each arm; hatched: the plan's "
                    "expectation.",
                ),
            )
        )
    if any(release.curves for release in released):
        shown.append(
            section(
                "What the trainings did with their hyperparameters",
                figure(
                    "trajectories",
                    plots.plot_trajectories(study, arms=arms),
                    caption="Released curves by step. Each is computed from noisy, paid-for releases.",
                ),
            )
        )
    laws: dict[object, list[Plan]] = {}
    for plan in (arm.plan for arm in arms if arm.plan.runs is not None):
        laws.setdefault((plan.runs, plan.event), []).append(plan)
    return shown + [_law_figure(study, plans, number) for number, plans in enumerate(laws.values())]


def _budget_figure(study: Study) -> Html:
    from privtune import plots
    from privtune.plots._budget import shares

    parts = table(
        ["charge", "ε added", "ε alone"],
        [
            (label, show_epsilon(added, 4), show_epsilon(alone, 4))
            for label, added, alone in shares(study)
        ],
        caption="What each charge added to the composition",
        numeric=["ε added", "ε alone"],
    )
    return section(
        "The budget",
        figure(
            "budget",
            plots.plot_budget(study),
            caption="What each arm added to the budget, in the order of charging. The parts are "
            "increments of the composition; costs alone do not add up.",
            numbers=parts,
        ),
    )


def _law_figure(study: Study, plans: list[Plan], number: int) -> Html:
    """Show the law of arms that draw by the same one, at the same cost."""
    from privtune import plots
    from privtune.plots._runs import costs_at_other_means

    plan = plans[0]
    law: Any = plan.runs
    costs = table(
        ["mean runs", "ε"],
        [(f"{mean:g}", show_epsilon(cost, 4)) for mean, cost in costs_at_other_means(study, plan)],
        caption="ε of the selection at other means, with the same noise",
        numeric=["mean runs", "ε"],
    )
    return section(
        f"The number of runs of {', '.join(plan.arm for plan in plans)}",
        figure(
            f"runs-{number}",
            plots.plot_runs(study, arm=plan.arm),
            caption="The law from which the secret number of runs K was drawn, and what the "
            "selection would cost at other means with the same noise. It draws "
            f"{say_few_runs(law)}. What K was is sealed.",
            numbers=costs,
        ),
    )


def _charges(study: Study, view: BudgetView) -> Html:
    document = ledger_table(view.charges, study)
    columns = ["charge", "study", "arm", "state", "ε alone", "why this ε"]
    why = {event: _why(study, event) for event in {charge.event for charge in view.charges}}
    rows = [
        (*row[:5], why[charge.event])
        for row, charge in zip(rows_of(document), view.charges, strict=True)
    ]
    return section(
        "Every charge",
        table(
            columns,
            rows,
            caption=f"All charges of budget {study.spec.budget.name}",
            numeric=["ε alone"],
            wide=["why this ε"],
        ),
        anchor="charges",
    )


def _audits(records: list[dict[str, Any]]) -> Html:
    from privtune import plots

    if not records:
        return Html("")
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
    untouched = dict.fromkeys(line for record in records for line in record["untouched"])
    columns = ["of", "audited ≤", "lower ≤", "reported ≤", "published", "runs", "seed"]
    numbers = table(
        columns,
        rows,
        caption=f"Bounds on ε from below, by experiment, at {records[0]['confidence']:.0%} confidence each",
        numeric=columns[1:],
    )
    return section(
        "Audits",
        *(Html(f'<p class="lead warn">{text(said)}</p>') for said in contradictions(records)),
        numbers,
        figure(
            "audits",
            plots.plot_audits(records),
            caption="What experiments on made-up records found, what the worst mechanism costs, what is "
            "reported, and what the budget promises: from left to right if all is well.",
        ),
        Html(f'<p class="quiet">Nothing is said of {text("; nor of ".join(untouched))}.</p>'),
        anchor="audits",
    )


def _declared(study: Study) -> Html:
    return section(
        "Declared public",
        Html(
            '<p class="quiet">What the numbers above rest on and no guarantee covers. Rates, averages '
            "and scores are computed with the declared numbers of records.</p>"
        ),
        *(facts(known, caption=arms) for arms, known in public_facts(study.plans)),
        anchor="public",
    )


def _why(study: Study, event: Event) -> Html:
    budget = study.spec.budget
    tree = explain(event, budget.delta, adjacency=budget.adjacency)
    return details(formula(event), Html(f'<ul class="tree">{_node(tree)}</ul>'))


def _node(node: Explanation) -> str:
    saved = "" if node.saved is None else f"; leaving it out would save {show_left(node.saved, 4)}"
    line = f"{text(node.text)}: <strong>ε = {show_epsilon(node.epsilon, 4)}</strong> by {text(node.method)}"
    children = "".join(_node(child) for child in node.children)
    inner = f'<ul class="tree">{children}</ul>' if children else ""
    return f"<li>{line}{saved}{inner}</li>"


def _checking(view: BudgetView) -> Html:
    certificate: Any = view.certificate
    name = certificate["budget"]["terms"]["name"]
    return section(
        "How to check it",
        Html(
            "<p>Everybody can edit a page. The record is the ledger, and its certificate checks itself: "
            f"<code>privtune budget verify --certificate {text(name)}.certificate.json</code>. It holds "
            "the events of this page, from which every ε follows.</p>"
        ),
        facts(
            {
                "Chain head": Html(f"<code>{text(certificate['head'])}</code>"),
                "Digest of the certificate": Html(f"<code>{text(certificate['digest'])}</code>"),
                "Libraries": ", ".join(f"{k} {v}" for k, v in certificate["libraries"].items()),
            },
            caption="What the certificate is known by",
        ),
        anchor="check",
    )
