"""Decides whether a budget admits what is asked of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from privtune.accounting import Adjacency, Composed, Event, Guarantee, epsilon
from privtune.errors import PrivTuneError
from privtune.ledger.errors import BudgetClosedError, DeclarationClosedError
from privtune.ledger.history import BASIS_DECLARED, History
from privtune.ledger.values import ChargeRequest

__all__ = ["BudgetExceededError", "admit", "composed_epsilon", "odometer"]


class BudgetExceededError(PrivTuneError):
    """The budget does not hold what was asked of it. Nothing was reserved.

    Attributes:
        budget: The budget's name.
        requested: ε of the request alone, at the budget's δ.
        spent: ε of what is charged already.
        remaining: ε left by the same odometer.
        total: ε of all of it together, if it were admitted.
    """

    def __init__(
        self, budget: str, *, requested: float, spent: float, remaining: float, total: float
    ) -> None:
        self.budget = budget
        self.requested = requested
        self.spent = spent
        self.remaining = remaining
        self.total = total
        super().__init__(
            f"budget {budget!r} does not hold this: it asks for ε = {requested:.4g} on its own, "
            f"ε = {spent:.4g} is spent and ε = {remaining:.4g} is left; "
            f"all together would be ε = {total:.4g}."
        )


@lru_cache(maxsize=256)
def composed_epsilon(events: tuple[Event, ...], delta: float, adjacency: Adjacency) -> Guarantee:
    """Return the best bound for events that were all fixed before the first release."""
    event = events[0] if len(events) == 1 else Composed(events)
    return epsilon(event, delta, adjacency=adjacency)


def admit(history: History, requests: Sequence[ChargeRequest]) -> str:
    """Decide on a request as a whole.

    Returns:
        The basis on which it is admitted.

    Raises:
        BudgetExceededError: It does not fit.
        BudgetClosedError: The budget was closed for good.
        DeclarationClosedError: A declared budget has started.

    **Guarantee**: everything admitted on the basis "declared" was fixed before the first charge of
    the budget started, so the composition of the whole block by any bound, privacy loss
    distributions included, is at most the budget.
    """
    budget = history.terms()
    if history.closed:
        raise BudgetClosedError(f"budget {budget.name!r} was closed for good.")
    if history.frozen:
        raise DeclarationClosedError(
            f"budget {budget.name!r} has started: what was not declared before cannot be added."
        )
    asked = [request.event for request in requests]
    total = _of(budget.delta, budget.adjacency, [*history.block.values(), *asked])
    if not total.epsilon <= budget.epsilon:
        spent = _of(budget.delta, budget.adjacency, history.block.values())
        raise BudgetExceededError(
            budget.name,
            requested=_of(budget.delta, budget.adjacency, asked).epsilon,
            spent=spent.epsilon,
            remaining=max(0.0, budget.epsilon - spent.epsilon),
            total=total.epsilon,
        )
    return BASIS_DECLARED


def odometer(history: History) -> Guarantee:
    """Return what everything charged costs together, at the budget's δ."""
    budget = history.terms()
    return _of(budget.delta, budget.adjacency, history.block.values())


def _of(delta: float, adjacency: Adjacency, events: Iterable[Event]) -> Guarantee:
    fixed = tuple(events)
    if not fixed:
        return Guarantee(0.0, delta, "nothing", adjacency, {"nothing": 0.0})
    return composed_epsilon(fixed, delta, adjacency)
