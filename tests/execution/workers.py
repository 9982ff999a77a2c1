"""Workers that train nothing: module level, so that a spawned process finds them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from privtune.execution.table import RowResult, make_rounds, patiently, work_through
from privtune.ledger import Ledger
from privtune.ledger.rounds import Lease


def place(*_: str) -> int:
    """Write down where this worker works, and where it looks for modules."""
    Path("place.json").write_text(json.dumps([os.getcwd(), sys.path]))
    return 0


def honest(url: str, charge: str) -> None:
    """Hand in a number that is a function of the row's seed."""
    with Ledger(url) as ledger:
        rounds = make_rounds(ledger, lease_seconds=1.0)
        work_through(rounds, charge, numbers, stack=1, lease_seconds=1.0)


def dying(url: str, charge: str, folder: str, deaths: int) -> None:
    """Die in the middle of a row, as often as ``deaths`` says, over all workers together."""

    def run(leases: Sequence[Lease]) -> Iterator[RowResult]:
        for done in numbers(leases):
            lease = done.lease
            Path(folder, f"output-{lease.number}-{lease.attempt}").write_text(str(done.score))
            if lease.attempt == 1 and _is_next_to_die(Path(folder), deaths):
                os.kill(os.getpid(), signal.SIGKILL)
            yield done

    with Ledger(url) as ledger:
        rounds = make_rounds(ledger, lease_seconds=1.0)
        work_through(rounds, charge, run, stack=1, lease_seconds=1.0)


def _is_next_to_die(folder: Path, deaths: int) -> bool:
    """Take one of so many deaths, which no other process then takes; False when all are taken."""
    for number in range(deaths):
        try:
            (folder / f"death-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


def hopeless(url: str, charge: str) -> None:
    """Die before anything is done."""
    os.kill(os.getpid(), signal.SIGKILL)


def numbers(leases: Sequence[Lease]) -> Iterator[RowResult]:
    for lease in leases:
        score = int.from_bytes(lease.seed[:6]) / 2**48
        yield RowResult(lease, score, {"pid": os.getpid()})


def slow(url: str, charge: str) -> None:
    """Hand in the same numbers, each after a while; opening the ledger, too, waits for a database."""

    def run(leases: Sequence[Lease]) -> Iterator[RowResult]:
        for done in numbers(leases):
            time.sleep(0.05)
            yield done

    with patiently(lambda: Ledger(url)) as ledger:
        rounds = make_rounds(ledger, lease_seconds=2.0)
        work_through(rounds, charge, run, stack=1, lease_seconds=2.0)
