"""Create a study in the storage: its budget, its plans, a secret for each arm."""

from __future__ import annotations

import secrets
import uuid

from privtune.errors import PrivTuneError
from privtune.ledger import Ledger
from privtune.names import check_name
from privtune.study._store import StudyStore
from privtune.study.planning import plan_study
from privtune.study.spec import StudySpec
from privtune.training.streams import Streams

__all__ = ["arm_secret", "store_study"]


def store_study(spec: StudySpec, storage: str) -> None:
    """Plan a study and store it: see :meth:`privtune.Study.create`."""
    check_name(spec.name, "study")
    for arm in spec.arms:
        check_name(arm.name, "arm")
    store = StudyStore(storage)
    try:
        if spec.name in store.names():
            # Before the planning, which takes seconds; `create` checks again.
            store.create(spec.name, {}, {})
        plans = plan_study(spec).plans if spec.arms else ()
        with Ledger(storage) as ledger:
            if spec.budget.name not in {budget.name for budget in ledger.budgets()}:
                ledger.create_budget(spec.budget.to_budget())
            else:
                _check_terms(ledger, spec)
        store.create(
            spec.name,
            {arm.name: {"secret": arm_secret(spec, arm.name)} for arm in spec.arms},
            {
                "uid": uuid.uuid4().hex,
                "spec": spec.model_dump(mode="json"),
                "plans": [plan.to_dict() for plan in plans],
            },
        )
    finally:
        store.close()


def _check_terms(ledger: Ledger, spec: StudySpec) -> None:
    budget = ledger.budget(spec.budget.name)
    asked = (spec.budget.epsilon, spec.budget.delta, spec.budget.adjacency)
    if (budget.epsilon, budget.delta, budget.adjacency) != asked:
        raise PrivTuneError(
            f"Budget {budget.name!r} exists with epsilon = {budget.epsilon}, delta = "
            f"{budget.delta}, {budget.adjacency} adjacency, and cannot be changed; the spec of study "
            f"{spec.name!r} says epsilon = {asked[0]}, delta = {asked[1]}, {asked[2]}. Write the "
            "budget's own terms, and the study's share as 'epsilon' of the study."
        )


def arm_secret(spec: StudySpec, arm: str) -> str:
    """Return the arm's secret: OS entropy, unless the study sets a seed, which it records."""
    if spec.seed is None:
        return secrets.token_bytes(32).hex()
    return Streams(spec.seed.to_bytes(32, "big")).key(f"arm/{arm}").hex()
