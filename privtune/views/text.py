"""Words and numbers as people read them: ε rounded up, the budget in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from privtune.strategies import validation_metric

if TYPE_CHECKING:
    from privtune.accounting import Guarantee
    from privtune.strategies import Plan
    from privtune.study import ArmStatus
    from privtune.study.spec import BudgetSpec

__all__ = [
    "budget_line",
    "ceil_to",
    "floor_to",
    "public_facts",
    "show_epsilon",
    "show_params",
    "together",
    "utility_column",
]


def ceil_to(value: float, digits: int) -> float:
    """Round up: a printed ε is an upper bound too."""
    scale = float(10**digits)
    return math.ceil(value * scale) / scale if math.isfinite(value) else value


def floor_to(value: float, digits: int) -> float:
    """Round down: what is left is never shown as more than it is."""
    scale = float(10**digits)
    return math.floor(value * scale) / scale if math.isfinite(value) else value


def show_epsilon(value: float, digits: int = 3) -> str:
    """Return an ε for the reader: rounded up, infinity as its sign."""
    return f"{ceil_to(value, digits):.{digits}f}" if math.isfinite(value) else "∞"


def show_params(params: Mapping[str, Any]) -> str:
    """Return hyperparameters in one line."""
    return ", ".join(
        f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in params.items()
    )


def public_facts(plans: Sequence[Plan]) -> list[tuple[str, Mapping[str, str]]]:
    """Return what is declared public, each list once, with the arms that rest on it."""
    lists: list[tuple[list[str], Mapping[str, str]]] = []
    for plan in plans:
        arms = next((arms for arms, facts in lists if facts == plan.public_facts), None)
        if arms is None:
            lists.append(([plan.arm], plan.public_facts))
        else:
            arms.append(plan.arm)
    return [(", ".join(arms), facts) for arms, facts in lists]


def utility_column(arms: Sequence[ArmStatus]) -> tuple[str, dict[str, str]]:
    """Return what arms are compared by, and its text for every arm that has it.

    That is the accuracy on a test split that the task declares public; where no arm has one, as in
    open studies, the score on the validation split under the name of its metric.
    """
    released = [(arm.plan, arm.release) for arm in arms if arm.release is not None]
    test = {
        plan.arm: f"{release.utility['test_accuracy']:.1%}"
        for plan, release in released
        if "test_accuracy" in release.utility
    }
    scores = {plan.arm: validation_metric(plan.score, r.score) for plan, r in released}
    if test or not any(scores.values()):
        return "test accuracy", test
    title = " or ".join(dict.fromkeys(name for score in scores.values() for name in score))
    shown = {
        arm: f"{value:.4f}" if name == "validation_loss" else f"{value:.1%}"
        for arm, score in scores.items()
        for name, value in score.items()
    }
    return title.replace("_", " "), shown


def together(spent: Guarantee) -> str:
    """Return how it is known what all charges cost together.

    Once something was charged after the first start, that is no composition: a reading of the
    odometer, or the whole budget, which the filter keeps to. Both are above it.

    Example:
        >>> from privtune.accounting import Adjacency, Guarantee
        >>> together(Guarantee(1.0, 1e-5, "pld", Adjacency.ADD_REMOVE))
        'by pld: the composition of all charges, not their sum'
    """
    bound = {
        "odometer": "by the odometer: a bound on all charges that may be read at any time",
        "filter": "by the filter: the whole budget, which all that it admits stays within",
    }
    known = bound.get(spent.method)
    return known or f"by {spent.method}: the composition of all charges, not their sum"


def budget_line(budget: BudgetSpec, spent: Guarantee, left: float) -> str:
    """Return the state of a budget in one line, for the first line of a note."""
    return (
        f"Privacy budget {budget.name}: ε = {ceil_to(spent.epsilon, 3):.3f} of {budget.epsilon:g} "
        f"charged, {floor_to(left, 3):.3f} left (δ = {budget.delta:g}, {budget.adjacency})"
    )
