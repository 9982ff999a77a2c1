"""What a worker process does: open the study, work through one arm's rows, leave."""

from __future__ import annotations

import math
import sys
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from privtune.execution.processes import STOPPED
from privtune.execution.table import make_rounds
from privtune.study._round import TrialFiles, work_on_rows
from privtune.study.lifecycle import Life

if TYPE_CHECKING:
    from privtune.strategies import Plan
    from privtune.tasks import Task, TaskData
    from privtune.training.engine.compute import Compute

__all__ = ["make_files", "work"]


def make_files(
    life: Life, plan: Plan, *, task: Task, data: TaskData, compute: Compute
) -> TrialFiles:
    """Return what trains the candidates of an arm."""
    return TrialFiles(
        plan=plan,
        secret=life.secret(plan),
        results=life.sealed(plan.arm),
        task=task,
        data=data,
        space=life.spec.search_space(),
        compute=compute,
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
    with closing(Life(study, url)) as life:
        try:
            _work(life, arm, charge_id=charge_id, jobs=jobs, stack=stack)
        except Exception as error:
            life.record_failure(arm, error)
            sys.exit(STOPPED)


def _work(life: Life, arm: str, *, charge_id: str, jobs: int, stack: int | Literal["auto"]) -> None:
    plan = life.arms()[arm].plan
    with life.seal(plan):
        task = life.spec.load_task()
        compute = replace(life.spec.compute, stack=stack)
        files = make_files(life, plan, task=task, data=task.load_checked(), compute=compute)
        rounds = make_rounds(life.ledger)
        # This worker's share at most: the first to come must not lease all rows.
        share = math.ceil(rounds.open_count(charge_id) / jobs)
        work_on_rows(rounds, charge_id, files, most=max(1, share))
