"""A round's tasks one at a time: what tests of leases ask for, and no worker does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from privtune.ledger import Finished, Lease, Rounds


def lease_one(rounds: Rounds, charge_id: str, worker: str) -> Lease | None:
    return next(iter(rounds.lease_some(charge_id, worker, most=1)), None)


def renew_one(rounds: Rounds, lease: Lease) -> Lease | None:
    return next(iter(rounds.renew_some([lease])), None)


def complete_one(
    rounds: Rounds, lease: Lease, score: float, result: Mapping[str, Any], **more: Any
) -> bool:
    return bool(rounds.complete_some([Finished(lease, score, result, **more)]))
