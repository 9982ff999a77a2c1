"""What other accountants say of a budget's charges, for its certificate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from privtune.accounting import Composed
from privtune.accounting.witness import DisputedAccountError, ask_witnesses
from privtune.ledger.history import History
from privtune.ledger.values import ChargeState
from privtune.numbers import is_number

__all__ = ["alike", "witnesses_of"]

_CLOSE = 0.02  # relative: what versions of the witnesses may differ by


def witnesses_of(history: History) -> dict[str, Any]:
    """Ask the witnesses about every charge that was not voided, and about all of them together.

    Args:
        history: The budget's log.

    Raises:
        DisputedAccountError: If one of them objects.
    """
    terms = history.terms()
    charges = [c for c in history.charges.values() if c.state is not ChargeState.VOIDED]
    asked = {charge.id: charge.event for charge in charges}
    if len(asked) > 1:
        asked["all together"] = Composed([charge.event for charge in charges])
    said: dict[str, Any] = {}
    for name, event in asked.items():
        found = ask_witnesses(event, terms.delta, adjacency=terms.adjacency)
        if found.objection:
            raise DisputedAccountError(f"{name}: {found.objection}")
        said[name] = found.to_dict()
    return said


def alike(there: Any, now: Any) -> bool:
    """Say whether what a certificate says of witnesses is what they say, up to their versions.

    Args:
        there: What the certificate says.
        now: What they say now.
    """
    if isinstance(now, Mapping):
        same = isinstance(there, Mapping) and there.keys() == now.keys()
        return same and all(key == "why" or alike(there[key], now[key]) for key in now)
    if isinstance(now, list):
        same = isinstance(there, list) and len(there) == len(now)
        return same and all(map(alike, there, now))
    if isinstance(now, float) and is_number(there):
        return math.isclose(there, now, rel_tol=_CLOSE, abs_tol=1e-3)
    return bool(there == now)
