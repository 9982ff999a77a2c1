"""What a worker process does: open the study, work through one arm's rows, leave."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from privtune.errors import PrivTuneError
from privtune.execution.processes import STOPPED
from privtune.execution.table import make_rounds
from privtune.ledger import Ledger
from privtune.strategies import Plan
from privtune.study._round import TrialFiles, work_on_rows
from privtune.study._store import StudyStore, artifact_root
from privtune.study.failures import record_failure
from privtune.study.spec import StudySpec

if TYPE_CHECKING:
    from privtune.tasks import Task, TaskData

__all__ = ["make_files", "work"]


def make_files(
    store: StudyStore, spec: StudySpec, plan: Plan, *, task: Task, data: TaskData
) -> TrialFiles:
    """Return what trains the candidates of an arm; its secret is read from the store."""
    secret = store.get(spec.name, plan.arm, "secret")
    if secret is None:
        raise PrivTuneError(
            f"Arm {plan.arm!r} of study {spec.name!r} has no secret any more: it has been released."
        )
    return TrialFiles(
        plan=plan,
        secret=bytes.fromhex(secret),
        folder=artifact_root(store.url) / spec.name / "sealed" / plan.arm,
        task=task,
        data=data,
        space=spec.search_space(),
        compute=spec.compute,
    )


def work(  # noqa: PLR0917 (a process is given them by position)
    url: str,
    study: str,
    arm: str,
    charge_id: str,
    jobs: int,
    stack: int | Literal["auto"],
) -> None:
    """Work through an arm's rows beside ``jobs - 1`` others. Runs in a process of its own.

    What raises is kept for the curator, and ends the process without a word on standard error.
    """
    store = StudyStore(url)
    try:
        _work(store, study, arm, charge_id=charge_id, jobs=jobs, stack=stack)
    except Exception as error:
        record_failure(store, study, arm, error)
        sys.exit(STOPPED)
    finally:
        store.close()


def _work(
    store: StudyStore,
    study: str,
    arm: str,
    *,
    charge_id: str,
    jobs: int,
    stack: int | Literal["auto"],
) -> None:
    document = store.document(study)
    spec = StudySpec.parse(document["spec"], stored=True)
    (plan,) = (p for p in map(Plan.from_dict, document["plans"]) if p.arm == arm)
    task = spec.load_task()
    files = make_files(store, spec, plan, task=task, data=task.load_checked())
    files = replace(files, compute=replace(files.compute, stack=stack))
    with Ledger(store.url) as ledger:
        rounds = make_rounds(ledger)
        # Not all rows for the one who comes first.
        share = math.ceil(rounds.open_count(charge_id) / jobs)
        work_on_rows(rounds, charge_id, files, most=max(1, share))
