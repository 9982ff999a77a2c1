"""Create a study in the storage: its budget, its plans, a secret for each arm. Or delete one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from privtune.errors import PrivTuneError
from privtune.files import OwnFolder
from privtune.ledger import Ledger
from privtune.ledger.doctor import Check
from privtune.ledger.migrate import schema_version
from privtune.ledger.places import artifact_root, checked_url, database_path
from privtune.ledger.schema import HEAD
from privtune.ledger.storage import Storage
from privtune.study.lifecycle import AnyPlan, Life, new_arm
from privtune.study.planning import plan_study
from privtune.study.rows import StudyRow, StudyStore
from privtune.study.spec import StudySpec


def store_study(spec: StudySpec, storage: str) -> None:
    """Plan a study and store it: see :meth:`privtune.Study.create`."""
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


def delete_study(name: str, storage: str, *, leave_objects: bool = False) -> list[Path]:
    """Delete a study, its trials and its models.

    Its charges are the ledger's and stay: what was released cannot be taken back.

    Args:
        name: Name of the study.
        storage: Database URL of studies and budgets.
        leave_objects: Leave what is in an object store that is gone for good.

    Returns:
        The study's folders that stay, since they hold files of others.

    Raises:
        StudyNotFoundError: If there is no such study.

    Example:
        >>> import privtune
        >>> study = privtune.create_study("old", budget=privtune.Budget(4.0, 1e-5, name="clinic"))
        >>> delete_study("old", study.storage)
        []
        >>> from privtune.study import study_names
        >>> study_names(study.storage)
        []
    """
    with closing(Life(name, storage)) as life:
        return life.delete(leave_objects=leave_objects)


def check_studies(storage: str) -> Iterator[Check]:
    """Report deletions that were stopped half way, and folders of no study.

    Args:
        storage: Database URL of studies and budgets.

    Raises:
        PrivTuneError: If the storage cannot be read.
    """
    path = database_path(checked_url(storage))
    if path is not None and not path.exists():
        return
    with closing(Storage(storage, patience=5)) as opened:
        with opened.read() as connection:
            if schema_version(connection) != HEAD:
                return
        store = StudyStore(opened)
        rows, half = [store.study(name) for name in store.names()], store.deleting()
    for name in half:
        says = f"The deletion of study {name!r} is not complete. Run: privtune study delete {name}"
        yield Check("deletion", "warn", says)
    known = {row.uid for row in rows}
    roots = dict.fromkeys([artifact_root(storage), *(row.root for row in rows)])
    lists = [found for root in roots for found in sorted(root.glob(f"*/{OwnFolder.LIST}"))]
    for folder in (found.parent for found in lists):
        if not known & {owner for owner, _ in OwnFolder.listed(folder)}:
            says = f"{folder} is of a study that this storage does not have: remove it by hand, unless "
            yield Check("deletion", "warn", f"{says}another storage keeps its files there, too.")
    if not half:
        yield Check("deletion", "ok", "No deletion of a study was stopped half way.")


def _check_terms(ledger: Ledger, spec: StudySpec) -> None:
    budget = ledger.budget(spec.budget.name)
    asked = (spec.budget.epsilon, spec.budget.delta, spec.budget.adjacency, spec.budget.unit)
    if (budget.epsilon, budget.delta, budget.adjacency, budget.unit) != asked:
        raise PrivTuneError(
            f"Budget {budget.name!r} exists with epsilon = {budget.epsilon}, delta = "
            f"{budget.delta}, {budget.adjacency} adjacency, unit {budget.unit}, and cannot be changed; "
            f"the spec of study {spec.name!r} says epsilon = {asked[0]}, delta = {asked[1]}, {asked[2]}, "
            f"unit {asked[3]}. Write the "
            "budget's own terms, and the study's share as 'epsilon' of the study."
        )
