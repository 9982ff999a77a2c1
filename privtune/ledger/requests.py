"""Requests of charges, as a budget's log takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from privtune.errors import InvalidInputError
from privtune.ledger.admission import admission_of, admit
from privtune.ledger.advice import suggestions
from privtune.ledger.chain import Kind
from privtune.ledger.errors import BudgetExceededError, BudgetExistsError, ChargeStateError
from privtune.ledger.history import BASIS_RECORDED, History
from privtune.ledger.log import Line
from privtune.ledger.units import refuse_other_unit
from privtune.ledger.values import Budget, Charge, ChargeRequest, ChargeState


def reservations(history: History, requests: Sequence[ChargeRequest], basis: str) -> list[Line]:
    """Return the lines that reserve what was admitted on a basis."""
    for request in requests:
        who = f"Arm {request.arm!r}" if request.arm else "The event"
        refuse_other_unit(request.unit, history.terms().unit, who, history.name)
    bodies: list[dict[str, Any]] = [
        {
            "event": request.event.to_dict(),
            "study": request.study,
            "arm": request.arm,
            "note": request.note,
            "plan_digest": request.plan_digest,
            "basis": basis,
            **({"public": dict(request.public)} if request.public else {}),
            "unit": request.unit,
        }
        for request in requests
    ]
    if basis == BASIS_RECORDED:
        for request in requests:
            history.confirm_weight(request.event)
    elif history.frozen:
        # Noted, so that opening a ledger need not compute it again; verifying does.
        found = admission_of(history, [request.event for request in requests])
        for body, weight in zip(bodies, found[1] if found else (), strict=True):
            body["weight"] = list(weight)
    first = len(history.charges) + 1
    return [Line(Kind.RESERVED, number, body=body) for number, body in enumerate(bodies, first)]


def numbered(
    history: History, requests: Sequence[ChargeRequest]
) -> tuple[list[int], list[ChargeRequest]]:
    """Return the number of each request's charge, and the requests that have none yet.

    Raises:
        ChargeStateError: A plan's digest is that of a charge for another event or unit.
    """
    there: dict[str, tuple[int, Charge | ChargeRequest]] = {
        charge.plan_digest: (number, charge)
        for number, charge in history.charges.items()
        if charge.plan_digest and charge.state is not ChargeState.VOIDED
    }
    numbers: list[int] = []
    missing: list[ChargeRequest] = []
    for request in requests:
        number, known = there.get(request.plan_digest, (0, request))
        if not number:
            missing.append(request)
            number = len(history.charges) + len(missing)
            if request.plan_digest:
                there[request.plan_digest] = number, request
        _check_plan(history.name, number, known, request)
        numbers.append(number)
    return numbers, missing


def _check_plan(
    budget: str, number: int, known: Charge | ChargeRequest, request: ChargeRequest
) -> None:
    """Refuse the digest of a plan that was charged for something else: that would be all it pays for."""
    if (known.unit, known.event.to_dict()) != (request.unit, request.event.to_dict()):
        raise ChargeStateError(
            f"plan {request.plan_digest!r} is what charge {budget}-{number} is for, which charges another "
            "event: a plan is charged for what runs, so give every plan a digest of its own."
        )


def check_requests(requests: Sequence[ChargeRequest]) -> None:
    """Refuse what is no request.

    Raises:
        InvalidInputError: If there is none, or one is something else.
    """
    if not requests or not all(isinstance(request, ChargeRequest) for request in requests):
        raise InvalidInputError("requests", requests, "must be at least one ChargeRequest")


def ask(history: History, requests: Sequence[ChargeRequest]) -> None:
    """Decide outside of the lock, and say what would fit.

    A composition may take seconds. Inside the lock it is found in the cache, unless somebody
    else was faster.

    Args:
        history: The log as it was when it was seen that these are not charged yet: what somebody
            else has charged since may be the same.
        requests: What is asked.
    """
    if not requests:
        return
    events = [request.event for request in requests]
    try:
        admit(history, events)
    except BudgetExceededError as error:
        raise error.with_fitting(suggestions(history, events)) from None


def check_same(there: Budget, asked: Budget) -> None:
    """Refuse other terms than those that are there.

    Raises:
        BudgetExistsError: If they differ.
    """
    ours, theirs = asked.to_dict(), there.to_dict()
    other = [
        f"{key} is {theirs[key]!r}, not {ours[key]!r}" for key in ours if ours[key] != theirs[key]
    ]
    if other:
        raise BudgetExistsError(
            f"a budget called {asked.name!r} exists with other terms ({', '.join(other)}): "
            "a budget never changes, so choose another name."
        )
