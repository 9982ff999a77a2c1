"""Budgets and charges as the command line shows them: as documents and in lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privtune.ledger import Budget, Charge, Ledger, Verification


def document_of(ledger: Ledger, budget: Budget) -> dict[str, Any]:
    name = budget.name
    found = ledger.charges(name)
    states: dict[str, int] = {}
    for one in found:
        states[str(one.state)] = states.get(str(one.state), 0) + 1
    return {
        **budget.to_dict(),
        "closed": ledger.is_closed(name),
        "charges": len(found),
        "states": states,
        "spent": ledger.spent(name).to_dict(),
        "remaining": ledger.remaining(name),
        "filter": ledger.filter_state(name).to_dict(),
        "head": ledger.head(name),
    }


def document_of_charge(charge: Charge) -> dict[str, Any]:
    def when(value: Any) -> str | None:
        return None if value is None else value.isoformat()

    return {
        "id": charge.id,
        "budget": charge.budget,
        "state": str(charge.state),
        "basis": charge.basis,
        "study": charge.study,
        "arm": charge.arm,
        "note": charge.note,
        "plan_digest": charge.plan_digest,
        "event": charge.event.to_dict(),
        "created_at": when(charge.created_at),
        "started_at": when(charge.started_at),
        "closed_at": when(charge.closed_at),
        "transcript_digest": charge.transcript_digest,
        "unit": charge.unit,
    }


def filter_line(state: dict[str, Any]) -> str:
    if not state["in_force"]:
        return "not in force: nothing has started, so the block may still be declared"
    if state["capacity"] is None:
        return "no room: the declared block uses the budget up"
    return (
        f"Rényi order {state['order']:g}: {state['used']:.4g} of {state['capacity']:.4g} used "
        f"({state['used'] / state['capacity']:.0%})"
        + (", Gaussian charges from now on" if state.get("variance") else "")
    )


def verify_log(ledger: Ledger, name: str, head: str | None) -> Verification:
    """Replay a budget's log; whoever named a certificate's file is told how that is checked."""
    from privtune.errors import PrivTuneError
    from privtune.ledger import UnknownBudgetError, verify

    try:
        return verify(ledger.log.storage, name, head=head)
    except UnknownBudgetError as error:
        if not Path(name).is_file():
            raise
        raise PrivTuneError(f"{error} A file is checked with --certificate {name}.") from None
