"""Drivers, workers and sessions with the database that end at recorded points: the same release."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from privtune.study import Study
from tests.ledger.campaigns import processes
from tests.study import driven
from tests.study.conftest import PARAMETERS, toy_spec
from tests.study.test_lifecycle import SEED, WARMED, charges, fresh, outputs
from tests.study.test_workers import eventually
from tests.tiers import FULL, PATIENCE

__all__ = ["fresh"]

LOG = logging.getLogger("campaign")
STRIKES = int(os.environ.get("PRIVTUNE_KILLS", "70" if FULL else "1"))
EACH = 5  # kills in one study at most: a row that loses ten workers stops its round
ARMS = [
    {"name": "fixed", "strategy": "fixed", "parameters": PARAMETERS},
    {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4},
]


class Party:
    """A study, and the processes that run it: one alone, or a driver and a worker."""

    def __init__(self, url: str, folder: Path) -> None:
        self._context, self.url, self._folder = processes(WARMED), url, folder
        self._count = itertools.count()
        self.ends: Counter[str] = Counter()
        Study.create(toy_spec(seed=5, epochs=1, arms=ARMS), url).close()  # six rows

    def run(self, struck: str, *, at: Sequence[int] = (), strike: str, alone: bool) -> list[str]:
        """Run the study to its end, one process struck at points, and replaced where it ends."""
        roles, left = ["alone"] if alone else ["driver", "worker"], list(at)
        running = {role: self.start(role) for role in roles if role != struck}
        running[struck] = self.start(struck, left.pop(0) if left else None, strike)
        limit = time.monotonic() + PATIENCE
        try:
            while True:
                for role, process in running.items():
                    if process.exitcode is None:
                        continue
                    self.ends[f"{role} {process.exitcode}"] += 1
                    assert process.exitcode != driven.TRACEBACK
                    if process.exitcode == 0 and role != "worker":
                        return self.notes(struck)
                    again = (left.pop(0), strike) if role == struck and left else ()
                    running[role] = self.start(role, *again)
                assert time.monotonic() < limit, "waited in vain"
                time.sleep(0.02)
        finally:
            for process in running.values():
                process.kill()
                process.join()

    def start(self, role: str, point: int | None = None, strike: str = "") -> Any:
        """Start a process; of one that is struck, or might be, the points are noted."""
        notes = self._folder / (role if strike else f"{next(self._count)}")
        args = (self.url, role, str(notes), point, strike)
        process = self._context.Process(target=driven.take_part, args=args, daemon=True)
        process.start()
        return process

    def notes(self, struck: str) -> list[str]:
        """Return the points that one came to, from where it was struck on."""
        notes = self._folder / struck
        return notes.read_text().splitlines() if notes.exists() else []


@pytest.fixture
def party(fresh: Callable[[], str], tmp_path: Path) -> Callable[[], Party]:
    folders = (tmp_path / f"party-{n}" for n in itertools.count())

    def make() -> Party:
        folder = next(folders)
        folder.mkdir()
        return Party(fresh(), folder)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("struck", "strike"),
    [
        ("driver", "kill"),
        ("worker", "kill"),
        ("driver", "cut"),
        ("worker", "cut"),
        ("alone", "cut"),
    ],
)
def test_a_study_whose_parts_are_struck_goes_on_to_the_same_release(
    party: Callable[[], Party], struck: str, strike: str
) -> None:
    """By SIGKILL, or by a server that ends all of its sessions, at commits, leases and transitions."""
    whole, alone = party(), struck == "alone"
    if strike == "cut" and not whole.url.startswith("postgresql"):
        pytest.skip("SQLite has no sessions")
    if strike == "kill" and not FULL and whole.url.startswith("postgresql"):
        pytest.skip("SIGKILL on SQLite stands for both: `make campaigns` runs this")
    where = whole.run(struck, strike=strike, alone=alone)
    expected = outputs(whole.url)
    rng, kinds, ends = random.Random(f"{SEED} {struck} {strike}"), Counter[str](), Counter[str]()
    while kinds.total() < STRIKES:
        one, count = party(), min(EACH, STRIKES - kinds.total()) if strike == "kill" else 1
        # Near one another, so that all are reached; the last is anywhere.
        points = [rng.randrange(len(where)) // EACH for _ in range(count - 1)]
        points.append(rng.randrange(len(where)))
        at = one.run(struck, at=points, strike=strike, alone=alone)
        if not at:  # a worker that polled less often than the first
            continue
        at = at if strike == "kill" else at[:1]
        kinds.update(at)
        ends += one.ends
        assert outputs(one.url) == expected, at
        assert charges(one.url, "toy") == ["settled"] * 2, at
        killed = one.ends[f"{struck} {-signal.SIGKILL}"]
        assert killed == (len(at) if strike == "kill" else 0), one.ends
    kind = whole.url.split(":", maxsplit=1)[0]
    LOG.info(f"{kind}: {struck} {strike}, {kinds.total()} of {len(where)} points: {dict(kinds)}")
    LOG.info(f"{kind}: {struck} {strike}, ends: {dict(ends)}")


@pytest.mark.slow
@pytest.mark.parametrize("at", ["train: before", "open: before a commit"])
def test_a_worker_that_is_cut_off_and_comes_back_loses_its_row_not_the_round(
    party: Callable[[], Party], at: str
) -> None:
    """Stopped for longer than its lease: in a training, or with the row locked that it hands in."""
    whole, one = party(), party()
    if "commit" in at and not one.url.startswith("postgresql"):
        pytest.skip("who is stopped in a transaction of SQLite's holds the file")
    if "train" in at and not FULL and one.url.startswith("postgresql"):
        pytest.skip("a stop in training on SQLite stands for both: `make campaigns` runs this")
    where = whole.run("worker", strike="kill", alone=False)
    driver, worker = one.start("driver"), one.start("worker", where.index(at), "stop")
    other = None
    try:
        eventually(lambda: bool(one.notes("worker")))
        other = one.start("worker")
        driver.join(PATIENCE)
        assert driver.exitcode == 0
        assert outputs(one.url) == outputs(whole.url)
        os.kill(worker.pid, signal.SIGCONT)
        worker.join(PATIENCE)
        assert worker.exitcode == 0, "it hands in second, and leaves a study that is finished"
        assert outputs(one.url) == outputs(whole.url)
        assert charges(one.url, "toy") == ["settled"] * 2
    finally:
        for process in filter(None, (driver, worker, other)):
            process.kill()
            process.join()
