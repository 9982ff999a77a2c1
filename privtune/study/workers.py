"""Who trains the rows of a round: this process, processes beside it, or workers anywhere.

A worker opens the study, leases rows that are open, trains them on the seeds of their leases, hands
in. It is told names, never secrets: those are in the database, which it must reach by itself.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from privtune.errors import PrivTuneError
from privtune.execution.executor import Executor
from privtune.execution.gpus import gpu_slots
from privtune.execution.processes import run_in_processes
from privtune.execution.ray import run_on_ray
from privtune.execution.slurm import run_on_slurm
from privtune.execution.supervise import STOPPED, wait_for
from privtune.execution.table import make_rounds, patiently
from privtune.files import read_private
from privtune.ledger import Ledger, LedgerConnectionError
from privtune.study._round import Files, TrialFiles, work_on_rows
from privtune.study._standing import Stage
from privtune.study._store import StudyStore
from privtune.study.failures import stopping
from privtune.study.lifecycle import Life
from privtune.training.engine.compute import Compute, check_device

if TYPE_CHECKING:
    from privtune.ledger import Rounds
    from privtune.strategies import Plan
    from privtune.tasks import Task, TaskData

__all__ = ["assist", "give_out", "make_files", "serve", "storage_here", "work"]

_POLL = 1.0
_DIED = 1
_OPENING = 30.0  # seconds that a worker waits for a database which its driver could reach


def give_out(
    executor: Executor, life: Life, plan: Plan, *, compute: Compute
) -> Callable[[Rounds], None] | None:
    """Return what has the rows of an arm's round worked through by others, if others shall."""
    charge = life.charge_of(plan)
    if charge is None or executor.name == "inline":
        return None
    charge_id, before = charge.id, len(life.failures(plan.arm))

    def give(rounds: Rounds) -> None:
        def open_count() -> int:
            return patiently(partial(rounds.open_count, charge_id))

        jobs, names = executor.jobs, (life.name, plan.arm)
        if executor.name == "external":
            failures = partial(life.failures, plan.arm)
            wait_for(open_count, lambda: len(patiently(failures)) > before)
        elif executor.name == "ray":
            run_on_ray(assist, names, jobs=jobs, gpus=executor.gpus, open_count=open_count)
        elif executor.name == "slurm":
            folder, options = life.folder / "sealed" / "slurm", executor.options
            run_on_slurm(
                assist, names, jobs=jobs, folder=folder, options=options, open_count=open_count
            )
        else:
            slots = gpu_slots(jobs, gpus=executor.gpus, device=compute.device)
            args = (life.url, *names, jobs, compute.stack, compute.device)
            run_in_processes(work, args, jobs=jobs, open_count=open_count, gpus=slots)

    return give


def make_files(
    life: Life, plan: Plan, *, task: Task, data: TaskData, compute: Compute
) -> TrialFiles:
    """Return what trains the candidates of an arm of a task."""
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
    jobs: int,
    stack: int | Literal["auto"],
    device: str,
) -> None:
    """Work through an arm's rows beside ``jobs - 1`` others, as a process of its own."""
    sys.exit(assist(study, arm, url=url, workers=jobs, stack=stack, device=device))


def assist(study: str, arm: str, *, url: str | None = None, **how: Any) -> int:
    """Work through an arm's rows on a machine that somebody else's scheduler chose.

    There it is told two names; the storage is in that machine's environment. Never raises: what
    schedulers catch they show.

    Args:
        study: The study's name.
        arm: The arm's.
        url: Of the storage, for a process of this machine.
        how: What ``_work`` takes.

    Returns:
        0; ``STOPPED`` after an error, which is kept for the curator; another number if the database
        stayed away.
    """
    try:
        opened = partial(Life, study, url or storage_here())
        with closing(patiently(opened, patience=_OPENING)) as life:
            try:
                for plan, charge_id in _open_rounds(life, arm):
                    _work(life, plan.arm, charge_id=charge_id, **how)
            except LedgerConnectionError:
                return _DIED  # no fault of the program's: whoever comes next finds the same rows
            except Exception as error:
                life.record_failure(arm, error)
                return STOPPED
    except LedgerConnectionError:
        return _DIED
    except Exception:
        return STOPPED  # no storage can be reached from here, so nobody can be told why
    return 0


def storage_here() -> str:
    """Return the URL of the storage, as this machine has it.

    Raises:
        PrivTuneError: If it has none, or others may read the file that holds it.
    """
    if url := os.environ.get("PRIVTUNE_STORAGE"):
        return url
    if file := os.environ.get("PRIVTUNE_STORAGE_FILE"):
        return read_private(Path(file)).decode(errors="replace").strip()
    raise PrivTuneError(
        "A worker finds no storage: set PRIVTUNE_STORAGE on its machine, or PRIVTUNE_STORAGE_FILE to a "
        "file that only its owner can read."
    )


def serve(
    url: str,
    *,
    study: str | None = None,
    arm: str | None = None,
    device: str | None = None,
    stack: int | Literal["auto"] | None = None,
    most: int | None = None,
    idle_exit: float = math.inf,
) -> int:
    """Work on every round that is open, and wait for more.

    Args:
        url: URL of the storage.
        study: The only study to work for; all unless given.
        arm: The only arm of each study to work for; all unless given.
        device: Where to train; what the study says unless given.
        stack: How many candidates to train in one pass, likewise.
        most: How many rows to run before leaving.
        idle_exit: How many seconds to wait for work before leaving.

    Returns:
        How many rows were run. Sealed: it tells of the number of runs.

    Raises:
        InvalidInputError: If there is no such device here.
        ArmStoppedError: If a training was stopped by an error, which is kept for the curator.
    """
    if device is not None:
        check_device(device)
    count, idle = 0, time.monotonic()
    with ExitStack() as opened:
        studies = _Studies(url, study, opened)
        while True:
            before = count
            try:
                for life in patiently(studies.at_work):
                    for plan, charge_id in _open_rounds(life, arm):
                        left = None if most is None else most - count
                        count += _serve(
                            life, plan, charge_id, device=device, stack=stack, most=left
                        )
                        if most is not None and count >= most:
                            return count
            except LedgerConnectionError:
                if time.monotonic() - idle >= idle_exit:
                    raise
                continue  # the database was restarted: ask again, which waits
            if count > before:
                idle = time.monotonic()
            elif time.monotonic() - idle >= idle_exit:
                return count
            else:
                time.sleep(_POLL)


class _Studies:
    """The studies of a storage, each opened once, when one of its rounds has work."""

    def __init__(self, url: str, only: str | None, opened: ExitStack) -> None:
        self._url, self._only, self._opened = url, only, opened
        self._ledger = opened.enter_context(Ledger(url))
        self._rounds = make_rounds(self._ledger)
        self._store = StudyStore(self._ledger.log.storage)
        self._lives: dict[str, Life] = {}
        if only is not None:
            self._store.study(only)  # says that there is none

    def at_work(self) -> list[Life]:
        """Return the studies that may hold an open round; none at the price of one question."""
        if not self._rounds.open_charges():
            return []
        return [
            self._life(name, uid)
            for name, uid in self._store.uids().items()
            if self._only in {None, name}
        ]

    def _life(self, name: str, uid: str) -> Life:
        # One that was deleted and made again is another.
        if uid not in self._lives:
            self._lives[uid] = self._opened.enter_context(closing(Life(name, self._url)))
        return self._lives[uid]


def _open_rounds(life: Life, arm: str | None) -> Iterator[tuple[Plan, str]]:
    """Find the arms whose rows this process can train now."""
    charges, rounds = life.charges(), make_rounds(life.ledger)
    for name, plan in life.plans().items():
        charge = charges.get(name)
        if arm not in {None, name} or charge is None or plan.search is None:
            continue
        if life.spec.task is None and _objective(life, plan) is None:
            continue  # a function that only its own process knows
        if life.stage(plan) is Stage.STARTED and rounds.open_count(charge.id):
            yield plan, charge.id


def _serve(
    life: Life,
    plan: Plan,
    charge_id: str,
    *,
    device: str | None,
    stack: int | Literal["auto"] | None,
    most: int | None,
) -> int:
    with stopping(life.name, plan.arm, life.record_failure):
        return _work(life, plan.arm, charge_id=charge_id, stack=stack, device=device, most=most)


def _work(
    life: Life,
    arm: str,
    *,
    charge_id: str,
    workers: int = 1,
    stack: int | Literal["auto"] | None = None,
    device: str | None = None,
    most: int | None = None,
) -> int:
    plan = life.plans()[arm]
    with life.seal(plan):
        compute = life.spec.compute
        compute = replace(compute, stack=stack or compute.stack, device=device or compute.device)
        files = _files(life, plan, compute)
        return work_on_rows(make_rounds(life.ledger), charge_id, files, workers=workers, most=most)


def _objective(life: Life, plan: Plan) -> bytes | None:
    """Return where an arm's function is found, if other processes can import it."""
    from privtune.study.objective import OBJECTIVE

    return life.sealed(plan.arm).get(OBJECTIVE)


def _files(life: Life, plan: Plan, compute: Compute) -> Files:
    if life.spec.task is not None:
        task = life.task()
        return make_files(life, plan, task=task, data=task.load_checked(), compute=compute)
    stored = _objective(life, plan)
    if stored is None:
        raise PrivTuneError(
            f"Arm {plan.arm!r} of study {life.name!r} is trained by a function that no other process "
            "can import: give it as 'package.module:function'."
        )
    from privtune.study.imported import ImportedObjective
    from privtune.study.objective import ObjectiveFiles, rehearse

    objective = ImportedObjective.from_json(stored).load()
    shown = partial(life.trials.shown, plan.arm, life.sealed(plan.arm))
    # A random sampler asks for no scores: none need be read anew.
    blind = plan.details.get("sampler") == "random"
    found = rehearse(objective, plan, stack=compute.stack)
    return ObjectiveFiles.make(
        life,
        plan,
        objective,
        facts=found.facts,
        stack=found.stack,
        shown=cache(shown) if blind else shown,
    )
