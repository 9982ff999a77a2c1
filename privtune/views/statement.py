"""The privacy statement: what a data-protection officer is asked to sign, in plain words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from privtune.accounting import Adjacency, epsilon
from privtune.ledger import RECORD
from privtune.numbers import ceil_to, show_epsilon
from privtune.tasks import PRETRAINED, rows_note
from privtune.views.page import Html, section, table, text
from privtune.views.text import declared_trainings, together

if TYPE_CHECKING:
    from privtune.study import ArmStatus, Study
    from privtune.views.record import BudgetView

_NEIGHBOURS = {
    Adjacency.ADD_REMOVE: "is in the data or not",
    Adjacency.REPLACE_ONE: "is what it is or is replaced by any other",
}


def run_and_procedure(study: Study, arms: tuple[ArmStatus, ...]) -> list[tuple[str, float, float]]:
    """Return (arm, ε of one training, ε of the whole procedure), at the budget's δ."""
    budget = study.spec.budget
    return [
        (
            arm.plan.arm,
            epsilon(arm.plan.training.event, budget.delta, adjacency=budget.adjacency).epsilon,
            arm.guarantee.epsilon,
        )
        for arm in arms
    ]


def privacy_statement(study: Study, arms: tuple[ArmStatus, ...], view: BudgetView) -> Html:
    """Return the statement as a section of a page.

    Args:
        study: The study.
        arms: Its arms.
        view: The state of its budget.
    """
    budget = study.spec.budget
    terms = view.certificate["budget"]["terms"]
    unit = terms["unit"]
    dataset = terms["dataset"] or f"the private data of task {study.spec.task_name}"
    spent = ceil_to(view.spent.epsilon, 3)
    rows = [
        (name, show_epsilon(one), show_epsilon(total))
        for name, one, total in run_and_procedure(study, arms)
    ]
    rows.append(("everything charged to the budget", "—", show_epsilon(spent)))
    return section(
        "Privacy statement",
        Html(
            f'<p class="lead">Whatever anybody learns from everything released on this budget, they '
            f"would have learnt almost the same whether any single {unit} "
            f"{_NEIGHBOURS[budget.adjacency]}. How nearly is measured by "
            f"<strong>ε = {show_epsilon(spent)} at δ = {budget.delta:g}</strong>; the limit that was set "
            f"beforehand is ε = {budget.epsilon:g}.</p>"
        ),
        _paragraph("What is protected.", f"Every {unit} of {dataset} ({budget.adjacency})."),
        _paragraph("What the number means.", meaning(spent, budget.delta, unit)),
        _paragraph(
            "Why there are two numbers.",
            "Choosing hyperparameters looks at the data again and again. The ε of one training, "
            "which training libraries report, forgets the search; the ε of the procedure counts it. "
            "Only the second is a promise to the people in the data.",
        ),
        table(
            ["", "ε of one training (not the promise)", "ε of the procedure"],
            rows,
            caption=f"Run ε and procedure ε, both at δ = {budget.delta:g}, {budget.adjacency}",
            numeric=["ε of one training (not the promise)", "ε of the procedure"],
        ),
        Html(f'<p class="quiet">The last line is known {text(together(view.spent))}.</p>'),
        _paragraph("What left the trust boundary.", _released(study, arms)),
        _paragraph("What did not.", _sealed(arms)),
        _paragraph("What this does not promise.", _limits(study)),
        Html('<div class="sign"><div>Name, role</div><div>Date</div><div>Signature</div></div>'),
        anchor="statement",
    )


def meaning(spent: float, delta: float, unit: str = RECORD) -> str:
    """Return what (ε, δ) means for one unit, a person's record unless it is more, in words."""
    if not math.isfinite(spent):
        return "Nothing: something that was charged has no guarantee at all."
    factor = math.exp(min(spent, 700.0))
    certainty = (factor + delta) / (factor + 1.0)
    # Shown with enough digits that it never rounds up to certainty.
    digits = max(1, math.ceil(-math.log10(max(1.0 - certainty, 1e-12))) - 1)
    right = f"{ceil_to(certainty, digits + 2):.{digits}%}"
    one, it = ("person's record", "person") if unit == RECORD else (unit, unit)
    return (
        f"No outcome becomes more than e^{spent:.3f} = {ceil_to(factor, 1):,.1f} times as likely through one "
        f"{one}, but for a part of probability {delta:g}. Somebody who is 50% sure that a "
        f"{it} is in the data, who knows everything else and can compute without limits, is right "
        f"at most {right} of the time after seeing all releases. This is a worst case; "
        "smaller is better, and values below 1 are strong."
    )


def _released(study: Study, arms: tuple[ArmStatus, ...]) -> str:
    lines = [f"stage {s.plan.arm}: {s.words}" for s in study.stages if s.words]
    lines += [
        f"{arm.plan.arm}: {', '.join(arm.plan.released)}" for arm in arms if arm.release is not None
    ]
    return "; ".join(lines) + "." if lines else "Nothing yet."


def _sealed(arms: tuple[ArmStatus, ...]) -> str:
    lines = [f"{arm.plan.arm}: {', '.join(arm.plan.sealed)}" for arm in arms]
    return "; ".join(lines) + "."


def _limits(study: Study) -> str:
    parts = [
        "Records of a test split that the task declares public are not protected.",
        "Who can read the curator's database, or watches its machine while a sealed round runs, is "
        "inside the trust boundary.",
        "Noise is drawn in floating point.",
    ]
    if study.spec.seed is not None:
        parts.insert(
            0,
            f"This study was run with the fixed seed {study.spec.seed}: nothing is promised against "
            "anybody who knows it.",
        )
    if any(rows_note(plan.public_facts) for plan in study.plans):
        parts.insert(
            0,
            "The records are rows of a query that were declared, not checked, to come from one protected "
            "record each: where one comes from several, its people are protected less than is said here.",
        )
    for words in declared_trainings(study):
        parts.insert(
            0, f"Training is {words}: what is said here holds if it does what was declared."
        )
    known = {plan.public_facts.get(PRETRAINED) for plan in study.plans}
    parts += [
        f"Training started from public weights: {said}." for said in sorted(filter(None, known))
    ]
    return " ".join(parts)


def _paragraph(head: str, body: str) -> Html:
    return Html(f"<p><strong>{text(head)}</strong> {text(body)}</p>")
