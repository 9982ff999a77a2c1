"""Create a study in the storage: its budget, its plans, a secret for each arm. Or delete one."""

from __future__ import annotations

import uuid
from contextlib import closing

from privtune.errors import PrivTuneError
from privtune.ledger import Ledger
from privtune.ledger.places import artifact_root
from privtune.names import check_name
from privtune.study._rows import StudyRow
from privtune.study._standing import AnyPlan
from privtune.study._store import StudyStore
from privtune.study.lifecycle import Life, new_arm
from privtune.study.planning import plan_study
from privtune.study.spec import StudySpec

__all__ = ["delete_study", "store_study"]


def store_study(spec: StudySpec, storage: str) -> None:
    """Plan a study and store it: see :meth:`privtune.Study.create`."""
    check_name(spec.name, "study")
    for arm in spec.arms:
        check_name(arm.name, "arm")
    with Ledger(storage) as ledger:
        store = StudyStore(ledger.log.storage)
        store.check_new(
            spec.name
        )  # before the planning, which takes seconds; `create` checks again
        planned = plan_study(spec) if spec.arms else None
        plans: list[AnyPlan] = [] if planned is None else [*planned.stages, *planned.plans]
        if spec.budget.name not in {budget.name for budget in ledger.budgets()}:
            ledger.create_budget(spec.budget.to_budget())
        else:
            _check_terms(ledger, spec)
        document = spec.model_dump(mode="json")
        row = StudyRow(spec.name, uuid.uuid4().hex, document, artifact_root(storage))
        store.create(row, [new_arm(spec, row.uid, plan) for plan in plans])


def delete_study(name: str, storage: str) -> None:
    """Delete a study, its trials and its models.

    Its charges are the ledger's and stay: what was released cannot be taken back.

    Args:
        name: Name of the study.
        storage: Database URL of studies and budgets.

    Raises:
        StudyNotFoundError: If there is no such study.

    Example:
        >>> import privtune
        >>> study = privtune.create_study("old", budget=privtune.Budget(4.0, 1e-5, name="clinic"))
        >>> delete_study("old", study.storage)
        >>> from privtune.study import study_names
        >>> study_names(study.storage)
        []
    """
    with closing(Life(name, storage)) as life:
        life.delete()


def _check_terms(ledger: Ledger, spec: StudySpec) -> None:
    budget = ledger.budget(spec.budget.name)
    asked = (spec.budget.epsilon, spec.budget.delta, spec.budget.adjacency, spec.budget.unit)
    unit = ledger.unit(budget.name)
    if (budget.epsilon, budget.delta, budget.adjacency, unit) != asked:
        raise PrivTuneError(
            f"Budget {budget.name!r} exists with epsilon = {budget.epsilon}, delta = "
            f"{budget.delta}, {budget.adjacency} adjacency, unit {unit}, and cannot be changed; "
            f"the spec of study {spec.name!r} says epsilon = {asked[0]}, delta = {asked[1]}, {asked[2]}, "
            f"unit {asked[3]}. Write the "
            "budget's own terms, and the study's share as 'epsilon' of the study."
        )
