"""The processes and workers, here or on other machines, that train the rows of a round.

A worker opens the study, leases rows that are open, trains them on the seeds of their leases, hands
in. It is told names, never secrets: those are in the database, which it must reach by itself.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from privtune.errors import PrivTuneError
from privtune.execution.executor import Executor
from privtune.execution.launchers import (
    STOPPED,
    run_in_processes,
    run_on_ray,
    run_on_slurm,
    wait_for,
)
from privtune.execution.table import make_rounds, patiently
from privtune.imports import described
from privtune.ledger import Ledger, LedgerBusyError, LedgerConnectionError
from privtune.ledger.urls import masked_url
from privtune.names import usual_storage
from privtune.prose import fitted
from privtune.study.arm_rounds import TrialFiles, work_on_rows
from privtune.study.failures import NotLoadedError
from privtune.study.lifecycle import Life, Stage
from privtune.study.program import check_worker
from privtune.study.rows import StudyStore
from privtune.study.seal import open_stream
from privtune.study.spec import space_of
from privtune.tasks import TaskDataError, get_task
from privtune.training.engine.compute import Compute, check_device

if TYPE_CHECKING:
    from privtune.ledger.rounds import Rounds
    from privtune.strategies import Plan
    from privtune.study.trials import ShownTrials
    from privtune.tasks import Task, TaskData

TASK = "task.json"
"""The sealed result that says where workers find an arm's functions and data."""

_POLL = 1.0
"""Seconds between two looks for work."""

_DIED = 1
"""Exit status of a process that lost the database: another may go on with its rows."""

_AGAIN = 60.0
"""Seconds after which a study that could not be loaded is tried again."""

_OPENING = 30.0
"""Seconds that a worker waits for a database which its driver could reach."""

Stack = int | Literal["auto"] | None


def give_out(
    executor: Executor, life: Life, plan: Plan, *, compute: Compute, notify: Callable[[str], None]
) -> Callable[[Rounds, str], None]:
    """Return a function that hands an arm's rows to its executor.

    Args:
        executor: Who trains the rows: processes, Ray, SLURM, or workers that somebody else starts.
        life: The study.
        plan: The arm's plan.
        compute: The device, and how many candidates are a stack.
        notify: Hears how to start a worker, where somebody must.

    Returns:
        A function of the rounds and the charge's id, which returns when no row is open.
    """
    failures_before = len(life.failures(plan.arm))
    names = (life.name, plan.arm)

    def give(rounds: Rounds, charge_id: str) -> None:
        def open_count() -> int:
            return patiently(partial(rounds.open_count, charge_id))

        jobs = executor.jobs
        match executor.name:
            case "external":
                _wait_for_workers(
                    life,
                    plan,
                    open_count=open_count,
                    at_work=lambda: patiently(partial(rounds.at_work, charge_id)),
                    failures_before=failures_before,
                    notify=notify,
                )
            case "ray":
                run_on_ray(assist, names, jobs=jobs, gpus=executor.gpus, open_count=open_count)
            case "slurm":
                # Each run a folder of its own, whose files are submitit's.
                folder = life.place(f"sealed/slurm-{uuid.uuid4().hex[:8]}/")
                run_on_slurm(
                    assist,
                    names,
                    jobs=jobs,
                    folder=folder,
                    options=executor.options,
                    open_count=open_count,
                )
            case _:
                run_in_processes(
                    assist,
                    names,
                    slots=executor.slots(compute.device),
                    open_count=open_count,
                    url=life.url,
                    workers=jobs,
                    stack=compute.stack,
                    device=compute.device,
                )

    return give


def _wait_for_workers(
    life: Life,
    plan: Plan,
    *,
    open_count: Callable[[], int],
    at_work: Callable[[], bool],
    failures_before: int,
    notify: Callable[[str], None],
) -> None:
    """Wait until external workers have trained an arm's rows, or one of them has failed.

    Args:
        life: The study.
        plan: The arm's plan.
        open_count: Counts the rows that have no result.
        at_work: Says whether a worker has a row now; None of them for a minute brings a reminder.
        failures_before: How many failures of the arm were noted before: one more ends the wait.
        notify: Hears how to start a worker.
    """
    arm = f"{plan.arm!r} of study {life.name!r}"
    how_to_start = _how_to_start(life)

    def has_failed() -> bool:
        failures = patiently(partial(life.failures, plan.arm))
        return len(failures) > failures_before

    def remind() -> None:
        notify(
            f"No worker has worked on arm {arm} for a minute. Either "
            "none is running, or none can load the study (then its output says why). "
            f"{how_to_start}"
        )

    notify(f"Arm {arm} waits for workers. {how_to_start}")
    wait_for(open_count, has_failed, at_work=at_work, remind=remind)


@contextmanager
def notifier() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints to standard error, also from inside a seal.

    For words that say nothing of a round: which command starts a worker, what is skipped.
    """
    stream = open_stream(sys.stderr)
    try:
        yield lambda text: print(fitted(text, stream), file=stream, flush=True)
    finally:
        if stream is not sys.stderr:
            stream.close()


def _how_to_start(life: Life) -> str:
    """Return the command that starts a worker, in a sentence; a password is not printed."""
    url = masked_url(life.url)
    command = f"privtune worker {life.name} --storage {shlex.quote(url)}"
    place = "on any machine that can reach the storage"
    if life.storage.dialect == "sqlite":
        place = "on this machine"
    sentence = f"Start one {place}: {command}"
    if url != life.url:
        sentence += " (replace *** by the password, or set PRIVTUNE_STORAGE)"
    return sentence


def make_files(
    life: Life,
    plan: Plan,
    *,
    task: Task,
    data: TaskData,
    compute: Compute,
) -> TrialFiles:
    """Return the trainer of an arm's candidates, with its secret and its sealed results.

    Args:
        life: The study.
        plan: The arm's plan.
        task: Its task.
        data: The task's records.
        compute: The device, and how many candidates are a stack.
    """
    return TrialFiles(
        plan=plan,
        secret=life.secret(plan),
        results=life.sealed(plan.arm),
        task=task,
        data=data,
        space=space_of(life.spec, plan),
        compute=compute,
    )


def assist(
    study: str,
    arm: str,
    *,
    url: str | None = None,
    workers: int = 1,
    stack: Stack = None,
    device: str | None = None,
    most: int | None = None,
) -> int:
    """Train an arm's rows as a process of an executor; return an exit status and raise nothing.

    It never raises: what schedulers catch they show. It returns 0; ``STOPPED`` after an error, which is kept
    for the curator; another number if the database stayed away.
    """
    try:
        opened = partial(Life, study, str(usual_storage(url)))
        with closing(patiently(opened, patience=_OPENING)) as life:
            try:
                for plan, charge_id in _open_rounds(life, arm):
                    _work(
                        life,
                        plan,
                        charge_id=charge_id,
                        workers=workers,
                        stack=stack,
                        device=device,
                        most=most,
                    )
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


def serve(
    url: str,
    *,
    study: str | None = None,
    arm: str | None = None,
    device: str | None = None,
    stack: Stack = None,
    most: int | None = None,
    idle_exit: float = math.inf,
    notify: Callable[[str], None] = lambda _: None,
) -> int:
    """Train rows of open rounds and wait for more; return the number of rows trained.

    Args:
        url: The URL of the storage.
        study: The only study to work for, until it is finished; else all of them.
        arm: The only arm to work for.
        device: Where to train, in the place of what the study says.
        stack: How many candidates to train together, likewise.
        most: How many rows to run before leaving.
        idle_exit: Seconds to wait for work.
        notify: Hears what is skipped, and why, and that a study is finished.

    Returns:
        How many rows were run: a sealed number, which tells of the law of runs.
    """
    if device is not None:
        check_device(device)
    count = 0
    idle = time.monotonic()
    with ExitStack() as opened:
        studies = _Studies(url, study, opened, notify)
        while True:
            before = count
            try:
                if patiently(studies.is_over):
                    notify(
                        f"Study {study} is finished: every arm has been released, so there is "
                        f"nothing left to do."
                    )
                    return count
                for life, plan, charge_id in studies.at_work(arm):
                    remaining = None if most is None else most - count
                    with studies.skipping(life.name, plan.arm), life.stopping(plan.arm):
                        count += _work(
                            life,
                            plan,
                            charge_id=charge_id,
                            device=device,
                            stack=stack,
                            most=remaining,
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
    """The studies that a worker serves, each opened once when a round of it has work.

    Args:
        url: The URL of the storage.
        only: The only study to work for; None for all of them.
        opened: Closes what is opened here.
        notify: Hears what is skipped, once.
    """

    def __init__(
        self, url: str, only: str | None, opened: ExitStack, notify: Callable[[str], None]
    ) -> None:
        self._url = url
        self._only = only
        self._opened = opened
        self._notify = notify
        self._ledger = opened.enter_context(Ledger(url))
        self._rounds = make_rounds(self._ledger)
        self._store = StudyStore(self._ledger.log.storage)
        self._lives: dict[str, Life] = {}  # by the study's id
        # When to try again, on the monotonic clock: by a study's id, or by the names of study and arm.
        self._skipped: dict[tuple[str, ...], float] = {}
        self._texts: set[str] = set()  # that were told
        self._one: Life | None = None
        if only is not None:
            self._one = opened.enter_context(closing(Life(only, url)))

    def is_over(self) -> bool:
        """Return whether the only study to work for is finished.

        Raises:
            StudyNotFoundError: If it was deleted meanwhile.
        """
        if self._one is None or self._only is None:
            return False
        self._store.study(self._only)
        return self._one.finished()

    def at_work(self, arm: str | None) -> Iterator[tuple[Life, Plan, str]]:
        """Yield study, plan and charge id of each open round that this worker can train."""
        if not patiently(self._rounds.open_charges):
            return
        for name, uid in patiently(self._store.uids).items():
            if self._only not in {None, name} or not self._is_due(uid):
                continue
            rounds: list[tuple[Life, Plan, str]] = []
            with self.skipping(name, uid=uid):
                life = patiently(partial(self._life, name, uid))
                # All of them or none: a study that fails in the middle is skipped whole.
                rounds = [(life, *plan_and_charge) for plan_and_charge in _open_rounds(life, arm)]
            for life, plan, charge_id in rounds:
                # An arm before it in the list may have been skipped since.
                if self._is_due(name, plan.arm):
                    yield life, plan, charge_id

    @contextmanager
    def skipping(self, name: str, arm: str = "", *, uid: str = "") -> Iterator[None]:
        """Skip a study or an arm that fails in a ``with`` block, and notify once of the reason.

        A worker for all studies must not end with the first that it cannot load. A worker for one study
        ends, as does any with an error of the user's code in an arm, which is a bug to be seen.

        Args:
            name: The study's name.
            arm: The arm's name; empty for the study as a whole.
            uid: The study's id, for the study as a whole.
        """
        try:
            yield
        except (LedgerConnectionError, LedgerBusyError):
            raise
        except Exception as error:
            if self._only is not None or (arm and not isinstance(error, PrivTuneError)):
                raise
            again = math.inf
            if not arm or isinstance(error, NotLoadedError):
                # What could not be loaded may be there later, as a folder that is mounted.
                again = time.monotonic() + _AGAIN
            if arm:
                self._skipped[name, arm] = again
                what = f"Arm {arm!r} of study {name!r}"
            else:
                self._skipped[uid,] = again
                what = f"Study {name!r}"
            text = f"{what} is skipped here: {error or type(error).__name__}"
            if text not in self._texts:
                self._texts.add(text)
                self._notify(text)

    def _is_due(self, *key: str) -> bool:
        """Return whether a skipped study (by id) or arm (by study and arm name) is to be tried now."""
        return time.monotonic() >= self._skipped.get(key, -math.inf)

    def _life(self, name: str, uid: str) -> Life:
        """Return a study by its id, opened at the first call."""
        if uid not in self._lives:
            life = Life(name, self._url)
            self._lives[uid] = self._opened.enter_context(closing(life))
        return self._lives[uid]


def _open_rounds(life: Life, arm: str | None) -> Iterator[tuple[Plan, str]]:
    """Yield the plan and charge id of each arm whose rows this process can train now."""
    charges = life.charges()
    rounds = make_rounds(life.ledger)
    for name, plan in life.plans().items():
        charge = charges.get(name)
        if arm not in {None, name} or charge is None or plan.search is None:
            continue
        if life.spec.task is None and _code(life, plan) is None:
            continue  # functions that only their own process knows
        if life.stage(plan) is Stage.STARTED and rounds.open_count(charge.id):
            yield plan, charge.id


def _work(
    life: Life,
    plan: Plan,
    *,
    charge_id: str,
    workers: int = 1,
    stack: Stack = None,
    device: str | None = None,
    most: int | None = None,
) -> int:
    """Train rows of an arm's round here, inside its seal; return how many.

    Raises:
        NotLoadedError: If the arm's task or records cannot be loaded on this machine.
    """
    with life.seal(plan):
        try:
            compute = life.spec.placement.given(device, stack)
            files = _files(life, plan, compute)
        except (LedgerConnectionError, LedgerBusyError):
            raise
        except (Exception, SystemExit) as error:  # no failure of the arm: others may load it
            reason = str(error) if isinstance(error, PrivTuneError) else described(error)
            raise NotLoadedError(reason) from error
        rounds = make_rounds(life.ledger)
        return work_on_rows(rounds, charge_id, files, workers=workers, most=most)


def _code(life: Life, plan: Plan) -> bytes | None:
    """Return the stored document on where to import an arm's functions and data; None without one."""
    return life.sealed(plan.arm).get(TASK)


def _files(life: Life, plan: Plan, compute: Compute) -> TrialFiles:
    """Return the trainer of an arm's candidates in a worker, with the records as this machine has them."""
    task = _task_of(life, plan)
    try:
        data = task.load_checked()
    except TaskDataError:  # of public facts
        raise
    except (Exception, SystemExit) as error:  # its words may come from a record
        raise NotLoadedError(
            "The records could not be read on this machine. Load them here by hand to see why."
        ) from error
    open_trials: Any = None
    if task.build is not None:

        def open_trials(repetition: int) -> ShownTrials:
            results = life.sealed(plan.arm)
            return life.trials.shown(plan.arm, results, repetition=repetition)

        if plan.details.get("sampler") == "random":
            open_trials = cache(open_trials)  # it asks for no scores: none need be read anew
    files = make_files(life, plan, task=task, data=data, compute=compute)
    return replace(files, open_trials=open_trials)


def _task_of(life: Life, plan: Plan) -> Task:
    """Return an arm's task: the study's, or in an open study the one that its program has stored."""
    if life.spec.task is not None:
        task = life.task()
        check_worker(life, plan, task)
        return task
    document = _code(life, plan)
    if document is None:
        raise PrivTuneError(
            f"Arm {plan.arm!r} of study {life.name!r} is trained by functions that no other process can "
            "import: give them as 'package.module:function'."
        )
    return get_task(json.loads(document))
