"""Who trains the rows of a round: this process, processes beside it, or workers anywhere.

A worker opens the study, leases rows that are open, trains them on the seeds of their leases, hands
in. It is told names, never secrets: those are in the database, which it must reach by itself.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache, partial
from pathlib import Path
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
from privtune.files import read_private
from privtune.imports import described
from privtune.ledger import Ledger, LedgerBusyError, LedgerConnectionError
from privtune.ledger.urls import masked_url
from privtune.study.failures import NotLoadedError
from privtune.study.lifecycle import Life, Stage
from privtune.study.rounds import TrialFiles, work_on_rows
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

TASK = "task.json"  # the sealed result that says where workers find an arm's functions and data

_POLL = 1.0
_DIED = 1
_AGAIN = 60.0  # seconds after which a study that could not be loaded is tried again
_OPENING = 30.0  # seconds that a worker waits for a database which its driver could reach

Stack = int | Literal["auto"] | None


def give_out(
    executor: Executor, life: Life, plan: Plan, *, compute: Compute, tell: Callable[[str], None]
) -> Callable[[Rounds, str], None]:
    """Return a function that hands an arm's rows to its executor."""
    before, names = len(life.failures(plan.arm)), (life.name, plan.arm)

    def give(rounds: Rounds, charge_id: str) -> None:
        def open_count() -> int:
            return patiently(partial(rounds.open_count, charge_id))

        jobs = executor.jobs
        if executor.name == "external":
            failures = partial(life.failures, plan.arm)
            tell(
                f"Arm {plan.arm!r} of study {life.name!r} waits for workers. {_how_to_start(life)}"
            )
            wait_for(
                open_count,
                lambda: len(patiently(failures)) > before,
                at_work=lambda: patiently(partial(rounds.at_work, charge_id)),
                remind=lambda: tell(
                    f"No worker has been at work on arm {plan.arm!r} of study {life.name!r} for a minute: "
                    f"none runs, or none can load the study, which a worker says. {_how_to_start(life)}"
                ),
            )
        elif executor.name == "ray":
            run_on_ray(assist, names, jobs=jobs, gpus=executor.gpus, open_count=open_count)
        elif executor.name == "slurm":
            # Each run a folder of its own, whose files are submitit's.
            folder, options = life.place(f"sealed/slurm-{uuid.uuid4().hex[:8]}/"), executor.options
            run_on_slurm(
                assist, names, jobs=jobs, folder=folder, options=options, open_count=open_count
            )
        else:
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


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints to standard error, also from inside a seal."""
    stream = open_stream(sys.stderr)
    try:
        yield lambda text: print(text, file=stream, flush=True)
    finally:
        if stream is not sys.stderr:
            stream.close()


def _how_to_start(life: Life) -> str:
    shown = masked_url(life.url)
    command = f"privtune worker {life.name} --storage {shlex.quote(shown)}"
    hidden = " (put in what *** hides, or set PRIVTUNE_STORAGE)" if shown != life.url else ""
    here = life.storage.dialect == "sqlite"
    local = " on this machine" if here else " wherever the storage is reached"
    return f"Start one{local}: {command}{hidden}"


def make_files(
    life: Life, plan: Plan, *, task: Task, data: TaskData, compute: Compute, **more: Any
) -> TrialFiles:
    """Return the trainer of an arm's candidates, with its secret and its sealed results."""
    return TrialFiles(
        plan=plan,
        secret=life.secret(plan),
        results=life.sealed(plan.arm),
        task=task,
        data=data,
        space=space_of(life.spec, plan),
        compute=compute,
        **more,
    )


def assist(study: str, arm: str, *, url: str | None = None, **how: Any) -> int:
    """Work through an arm's rows as a process, or on a machine that somebody else's scheduler chose.

    It never raises: what schedulers catch they show. It returns 0; ``STOPPED`` after an error, which is kept
    for the curator; another number if the database stayed away.
    """
    try:
        opened = partial(Life, study, url or storage_here())
        with closing(patiently(opened, patience=_OPENING)) as life:
            try:
                for plan, charge_id in _open_rounds(life, arm):
                    _work(life, plan, charge_id=charge_id, **how)
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
    """Return the URL of the storage, as this machine has it."""
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
    study: str | None = None,  # the only one to work for, until it is finished
    arm: str | None = None,
    device: str | None = None,
    stack: Stack = None,
    most: int | None = None,  # rows to run before leaving
    idle_exit: float = math.inf,  # seconds to wait for work
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Work on every round that is open, and wait for more; return how many rows were run, a sealed number."""
    if device is not None:
        check_device(device)
    count, idle = 0, time.monotonic()
    with ExitStack() as opened:
        studies = _Studies(url, study, opened, tell)
        while True:
            before = count
            try:
                if patiently(studies.is_over):
                    tell(
                        f"Study {study} is finished: every arm has been released, nothing is left to do."
                    )
                    return count
                for life, plan, charge_id in studies.at_work(arm):
                    left = None if most is None else most - count
                    how: dict[str, Any] = {"device": device, "stack": stack, "most": left}
                    with studies.skipping(life.name, plan.arm), life.stopping(plan.arm):
                        count += _work(life, plan, charge_id=charge_id, **how)
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

    def __init__(
        self, url: str, only: str | None, opened: ExitStack, tell: Callable[[str], None]
    ) -> None:
        self._url, self._only, self._opened, self._tell = url, only, opened, tell
        self._ledger = opened.enter_context(Ledger(url))
        self._rounds = make_rounds(self._ledger)
        self._store = StudyStore(self._ledger.log.storage)
        self._lives: dict[str, Life] = {}
        self._skipped: dict[tuple[str, ...], float] = {}
        self._told: set[str] = set()
        self._one = None if only is None else opened.enter_context(closing(Life(only, url)))

    def is_over(self) -> bool:
        """Return whether the only study to work for is finished."""
        if self._one is None or self._only is None:
            return False
        self._store.study(self._only)
        return self._one.finished()

    def at_work(self, arm: str | None) -> Iterator[tuple[Life, Plan, str]]:
        """Yield the open rounds of all studies; where there is none, one query says so."""
        if not patiently(self._rounds.open_charges):
            return
        for name, uid in patiently(self._store.uids).items():
            if self._only in {None, name} and self._is_due(uid):
                found: list[tuple[Life, Plan, str]] = []
                with self.skipping(name, uid=uid):
                    life = patiently(partial(self._life, name, uid))
                    found = [(life, *each) for each in _open_rounds(life, arm)]
                yield from (each for each in found if self._is_due(name, each[1].arm))

    @contextmanager
    def skipping(self, name: str, arm: str = "", *, uid: str = "") -> Iterator[None]:
        """Skip a study, or an arm, that cannot be worked for here; say so once, with the reason."""
        try:
            yield
        except (LedgerConnectionError, LedgerBusyError):
            raise
        except Exception as error:
            if self._only is not None or (arm and not isinstance(error, PrivTuneError)):
                raise
            loading = not arm or isinstance(error, NotLoadedError)
            again = time.monotonic() + _AGAIN if loading else math.inf
            self._skipped[(name, arm) if arm else (uid,)] = again
            what = f"Arm {arm!r} of study {name!r}" if arm else f"Study {name!r}"
            if (
                text := f"{what} is skipped here: {error or type(error).__name__}"
            ) not in self._told:
                self._told.add(text)
                self._tell(text)

    def _is_due(self, *key: str) -> bool:
        return time.monotonic() >= self._skipped.get(key, -math.inf)

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
    """Train rows of an arm's round here, inside its seal; return how many."""
    with life.seal(plan):
        try:
            files = _files(life, plan, life.spec.compute.given(device, stack))
        except (LedgerConnectionError, LedgerBusyError):
            raise
        except (Exception, SystemExit) as error:  # no failure of the arm: others may load it
            said = str(error) if isinstance(error, PrivTuneError) else described(error)
            raise NotLoadedError(said) from error
        return work_on_rows(make_rounds(life.ledger), charge_id, files, workers=workers, most=most)


def _code(life: Life, plan: Plan) -> bytes | None:
    """Return where an arm's functions and data are found, if other processes can import them."""
    return life.sealed(plan.arm).get(TASK)


def _files(life: Life, plan: Plan, compute: Compute) -> TrialFiles:
    if life.spec.task is not None:
        task = life.task()
    elif (stored := _code(life, plan)) is not None:
        task = get_task(json.loads(stored))
    else:
        raise PrivTuneError(
            f"Arm {plan.arm!r} of study {life.name!r} is trained by functions that no other process can "
            "import: give them as 'package.module:function'."
        )
    try:
        data = task.load_checked()
    except TaskDataError:  # of public facts
        raise
    except (Exception, SystemExit) as error:  # its words may come from a record
        raise NotLoadedError(
            "The records could not be read on this machine. Load them here by hand to see why."
        ) from error
    shown: Any = None
    if task.build is not None:

        def shown(repetition: int) -> ShownTrials:
            results = life.sealed(plan.arm)
            return life.trials.shown(plan.arm, results, repetition=repetition)

        if plan.details.get("sampler") == "random":
            shown = cache(shown)  # it asks for no scores: none need be read anew
    return make_files(life, plan, task=task, data=data, compute=compute, shown=shown)
