"""Studies that are run in processes of their own, raced and killed: module level, to be spawned."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

import privtune
from privtune.cli import main
from privtune.errors import PrivTuneError
from privtune.execution import table
from privtune.files import OwnFolder
from privtune.ledger import rounds as ledger_rounds
from privtune.ledger.storage import Storage
from privtune.strategies import Fixed, PapernotSteinke
from privtune.study import Study, arm_rounds, delete_study
from privtune.study import run as running
from privtune.study._objects import ObjectStore
from privtune.study.lifecycle import Life
from privtune.study.rows import StoredStudy
from privtune.study.trials import StudyTrials
from privtune.training.engine import checkpoint
from tests.study.elsewhere import OWN, TERMS, simple

TRACEBACK = 99
"""How a process ends whose command ended in a traceback."""

_LEASE = 1.0
OPEN = privtune.Budget(100.0, 1e-5, name="open")


def run(url: str, gate: Any, results: Any) -> None:
    """Run the study `toy`, and tell what it said."""
    gate.wait()
    _tell(results, lambda: _released(Study("toy", url).run()))


def charge(url: str, gate: Any, results: Any) -> None:
    """Charge the arms of the study `toy`, without asking whether another process does."""

    def charged() -> list[str]:
        with closing(Life("toy", url)) as life:
            life.charge([arm.plan for arm in life.arms().values()])
            return sorted(found.id for found in life.charges().values())

    gate.wait()
    _tell(results, charged)


def add(url: str, gate: Any, results: Any, arm: str) -> None:
    """Add an arm to the study `open`, and run it."""
    gate.wait()
    _tell(results, lambda: [added(url, arm)])


def added(url: str, arm: str) -> str:
    """Add an arm, of one run or a selection's as its name says; return the name of the released."""
    chooses = arm.startswith("selection")
    strategy = PapernotSteinke(mean_runs=2) if chooses else Fixed()
    with closing(Study("open", url)) as study:
        release = study.optimize(
            privtune.make_task(simple, **OWN), strategy=strategy, epsilon=0.5, arm=arm, **TERMS
        )
    return release.arm


def _released(releases: Any) -> list[str]:
    return [release.arm for release in releases]


def _tell(results: Any, act: Callable[[], list[str]]) -> None:
    try:
        results.put(("done", act()))
    except PrivTuneError as error:
        results.put((type(error).__name__, str(error)))
    except BaseException:
        results.put(("failed", traceback.format_exc()))


def die(url: str, point: int) -> None:
    """Run the study `toy` by its command, and die at one of the points that :func:`points` counts."""
    with _watched(lambda number, _: number == point and os.kill(os.getpid(), signal.SIGKILL)):
        _command(url)


def take_part(url: str, role: str, notes: str, point: int | None, strike: str) -> None:
    """Be `alone`, a `driver` or a `worker`; note every point, and be killed, stopped or cut off at one."""
    # Who dies in mid-row keeps it until its lease ends.
    table.make_rounds.__kwdefaults__["lease_seconds"] = _LEASE  # type: ignore[attr-defined]
    table.work_through.__kwdefaults__["lease_seconds"] = _LEASE  # type: ignore[attr-defined]
    ledger_rounds._IDLE = 2  # type: ignore[misc]
    sessions: set[int] = set()
    sa.event.listen(
        sa.pool.Pool,
        "connect",
        lambda connection, _: strike == "cut" and sessions.add(connection.info.backend_pid),
    )
    server = sa.make_url(url)

    def reached(number: int, stage: str) -> None:
        if point is None or number >= point:
            file.write(f"{stage}\n")
        if number != point:
            return
        if strike == "cut":
            cut(server, sessions)
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[strike])

    words = ["worker", "toy", "--storage", url, "--stack", "1"]
    if role != "worker":
        words = [*command(url), *(["--executor", "external"] if role == "driver" else [])]
    sys.argv = ["privtune", *words]
    try:
        with Path(notes).open("a", buffering=1) as file, _watched(reached):
            main()
    except Exception:
        traceback.print_exc()
        os._exit(TRACEBACK)


def cut(server: sa.URL, sessions: set[int]) -> None:
    """Have a server end sessions, and wait until it has."""
    import psycopg

    with psycopg.connect(
        **server.translate_connect_args(username="user", database="dbname")
    ) as own:
        for session in list(sessions):
            own.execute("SELECT pg_terminate_backend(%s, 5000)", (session,))


def stop_deleting(url: str, point: str, behind: bool, by: str) -> None:
    """Delete the study `toy`, and die or exit at the named call, before it or behind it."""
    owner, name = point.split(".")
    owners = {o.__name__: o for o in (ObjectStore, OwnFolder, Path, StoredStudy, StudyTrials)}
    call = getattr(owners[owner], name)

    def stops(*args: Any, **options: Any) -> None:
        if behind:
            call(*args, **options)
        if by == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(3)

    setattr(owners[owner], name, stops)
    delete_study("toy", url)


def points(url: str, results: Any) -> None:
    """Run the study `toy` by its command, and tell where it could have died, in order."""
    seen: list[str] = []
    with _watched(lambda _, stage: seen.append(stage)), suppress(SystemExit):
        _command(url)
    results.put(seen)


def _command(url: str) -> None:
    sys.argv = ["privtune", *command(url)]
    main()


def command(url: str) -> list[str]:
    """Return the words of the command that runs the study `toy`."""
    return ["study", "run", "toy", "--storage", url, "--no-mlflow", "--stack", "1"]


@contextmanager
def _watched(reached: Callable[[int, str], object]) -> Iterator[None]:
    """Call a function before and after every commit, and before every transition; keep every step."""
    count, stage = [0], ["open"]
    originals: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, value: Any) -> None:
        originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def point(where: str) -> None:
        count[0] += 1
        reached(count[0] - 1, where)

    def named(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            before, stage[0] = stage[0], name
            point(f"{name}: before")
            try:
                return original(*args, **options)
            finally:
                stage[0] = before

        return call

    def watching(name: str, what: str) -> None:
        original = getattr(Storage, name)

        @contextmanager
        def committing(self: Storage) -> Iterator[Connection]:
            with original(self) as connection:
                yield connection
                point(f"{stage[0]}: before {what}")
            point(f"{stage[0]}: after {what}")

        patch(Storage, name, committing)

    watching("write", "a commit")
    watching("quick", "a lease's commit")
    for name in ("charge", "start", "keep", "settle", "announce"):
        patch(Life, name, named(name, getattr(Life, name)))
    patch(running, "rehearse", named("plan", running.rehearse))
    patch(arm_rounds, "train_trials", named("train", arm_rounds.train_trials))
    patch(checkpoint, "_SECONDS", 0.0)
    patch(checkpoint, "_SHARE", 1e9)
    try:
        yield
    finally:
        for owner, name, value in reversed(originals):
            setattr(owner, name, value)
