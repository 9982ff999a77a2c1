"""Race and crash campaigns: what a ledger survives, counted.

Processes come from a fork server that has PrivTune loaded, so that 64 of them start in a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.queues
import multiprocessing.synchronize
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

from privtune.accounting import Gaussian
from privtune.files import write_whole
from privtune.ledger import (
    Budget,
    BudgetExceededError,
    ChargeRequest,
    ChargeState,
    Ledger,
    export_certificate,
    verify,
    verify_certificate,
)
from privtune.ledger.rounds import Rounds
from tests.ledger.conftest import complete_one, lease_one

_BUDGET = "campaign"
_Results: TypeAlias = "mp.queues.Queue[tuple[list[str], int, float, str]]"


_preloaded = {"tests.ledger.campaigns"}


def processes(*modules: str) -> ForkServerContext:
    """Return the context in which campaigns start their processes."""
    context = mp.get_context("forkserver")
    if not set(modules) <= _preloaded:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # nothing public stops it
        _preloaded.update(modules)
    context.set_forkserver_preload(sorted(_preloaded))
    # The server leaves out, silently, what it does not find from where it is started.
    before, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


@dataclass(frozen=True)
class RaceReport:
    """What a race counted."""

    workers: int
    admitted: tuple[str, ...]
    refused: int
    logged: tuple[str, ...]
    seconds: float
    longest: float


def race(
    url: str, *, workers: int, sigma: float, start: bool = True, timeout: float = 300.0
) -> RaceReport:
    """Let processes charge one budget at once, each as often as it can."""
    context = processes()
    results: _Results = context.Queue()
    gate = context.Event()
    started = [
        context.Process(target=_racer, args=(url, sigma, start, gate, results), daemon=True)
        for _ in range(workers)
    ]
    for process in started:
        process.start()
    begin = time.monotonic()
    gate.set()
    admitted: list[str] = []
    refused, longest = 0, 0.0
    for _ in started:
        mine, no, slowest, error = results.get(timeout=timeout)
        if error:
            raise AssertionError(f"a worker failed: {error}")
        admitted += mine
        refused += no
        longest = max(longest, slowest)
    seconds = time.monotonic() - begin
    for process in started:
        process.join(30)
    with Ledger(url) as ledger:
        logged = tuple(charge.id for charge in ledger.charges(_BUDGET) if charge.study == "race")
        verify(ledger.log.storage, _BUDGET)
    return RaceReport(workers, tuple(admitted), refused, logged, seconds, longest)


def _racer(
    url: str, sigma: float, start: bool, gate: mp.synchronize.Event, results: _Results
) -> None:
    request = ChargeRequest(Gaussian(sigma), study="race")
    mine: list[str] = []
    refused = in_a_row = 0
    longest = 0.0
    try:
        with Ledger(url) as ledger:
            gate.wait()
            while in_a_row < 3:
                begin = time.monotonic()
                try:
                    [charge] = ledger.reserve(_BUDGET, [request])
                except BudgetExceededError:
                    refused += 1
                    in_a_row += 1
                else:
                    in_a_row = 0
                    mine.append(charge.id)
                    if start:
                        ledger.settle(ledger.start(charge.id).id)
                longest = max(longest, time.monotonic() - begin)
    except BaseException as error:
        results.put((mine, refused, longest, repr(error)))
        raise
    results.put((mine, refused, longest, ""))


@dataclass
class CrashReport:
    """What a crash campaign counted."""

    crashes: int = 0
    finished: int = 0
    where: dict[str, int] = field(default_factory=dict)
    jobs: int = 0


def crash(
    url: str, folder: Path, *, crashes: int, seed: int, steps: int = 60, jobs: int = 40
) -> CrashReport:
    """Kill a worker with SIGKILL at random moments, and let the next one go on."""
    rng = random.Random(seed)
    report = CrashReport()
    context = processes()
    while report.crashes < crashes:
        name = f"{_BUDGET}-{report.jobs // jobs}"
        notes = folder / f"{name}.notes"
        process = context.Process(target=_worker, args=(url, name, str(notes), jobs))
        killed = _kill_after(process, notes, rng.randint(1, steps), rng.uniform(0.0, 0.01))
        if killed:
            report.crashes += 1
            last = notes.read_text().splitlines()[-1].split()[0]
            report.where[last] = report.where.get(last, 0) + 1
        elif process.exitcode != 0:
            raise AssertionError(f"the worker failed by itself ({process.exitcode})")
        else:
            report.finished += 1
            report.jobs += jobs
        _check(url, name, notes, complete=not killed)
    return report


def _kill_after(process: BaseProcess, notes: Path, steps: int, delay: float) -> bool:
    """Start a worker, kill it a moment after so many notes; return whether it was killed."""

    def noted() -> int:
        return notes.read_bytes().count(b"\n") if notes.exists() else 0

    enough = noted() + steps
    process.start()
    while process.exitcode is None and noted() < enough:
        time.sleep(0.001)
    process.join(delay)
    _kill(process)
    return process.exitcode == -signal.SIGKILL


def _kill(process: BaseProcess) -> None:
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it came to its end by itself
            os.kill(process.pid, signal.SIGKILL)
    process.join(30)


def _worker(url: str, name: str, notes: str, jobs: int) -> None:
    with Path(notes).open("a", buffering=1) as file:
        file.write("open\n")
        with Ledger(url) as ledger:
            ledger.create_budget(Budget(50.0, 1e-5, name=name))
            for job in range(jobs):
                _do(ledger, name, f"job-{job}", file.write)
            write_whole(Path(f"{notes}.json"), str(export_certificate(ledger.log.storage, name)))
            file.write("export\n")


def _do(ledger: Ledger, name: str, job: str, note: Callable[[str], object]) -> None:
    """Do one job, from wherever an earlier worker left it."""
    rounds = Rounds(ledger, lease_seconds=0.0, max_attempts=1000)
    mine = ledger.charges(name, study=job)
    if not mine:
        note(f"reserve {job}\n")
        mine = ledger.reserve(name, [ChargeRequest(Gaussian(20.0), study=job)])
        note(f"reserved {mine[0].id}\n")
    [charge] = mine
    if charge.state is ChargeState.SETTLED:
        return
    note(f"start {charge.id}\n")
    opened = rounds.open(charge.id, count=3)
    note(f"started {charge.id}\n")
    while (lease := lease_one(rounds, charge.id, f"pid-{os.getpid()}")) is not None:
        note(f"run {charge.id}\n")
        complete_one(rounds, lease, float(lease.number), {"seed": lease.seed.hex()})
    results = rounds.results(charge.id)
    assert [r.result["seed"] for r in results] == [opened.seed(n).hex() for n in range(3)]
    note(f"settle {charge.id}\n")
    ledger.settle(charge.id, transcript_digest="-".join(str(r.result["seed"]) for r in results))
    note(f"settled {charge.id}\n")


def _check(url: str, name: str, notes: Path, *, complete: bool) -> None:
    """Compare the log with what the workers were told."""
    with Ledger(url) as ledger:
        if name not in {budget.name for budget in ledger.budgets()}:
            return  # killed before the budget was there
        verify(ledger.log.storage, name)
        charges = {charge.id: charge for charge in ledger.charges(name)}
        rounds = Rounds(ledger)
        jobs = [charge.study for charge in charges.values()]
        assert len(jobs) == len(set(jobs)), "a job was charged twice"
        rank = {"reserved": 0, "started": 1, "settled": 2}
        for line in notes.read_text().splitlines():
            word, _, subject = line.partition(" ")
            if word in rank:
                assert subject in charges, f"{subject} was admitted and is lost"
                assert rank[str(charges[subject].state)] >= rank[word], f"{subject} went back"
        for charge in charges.values():
            if charge.state is ChargeState.SETTLED:
                seeds = [str(result.result["seed"]) for result in rounds.results(charge.id)]
                opened = rounds.find(charge.id)
                assert opened is not None
                assert not opened.secret, "noise could be drawn again"
                assert charge.transcript_digest == "-".join(seeds)
        if complete:
            assert {str(charge.state) for charge in charges.values()} == {"settled"}
            verify_certificate(export_certificate(ledger.log.storage, name))
