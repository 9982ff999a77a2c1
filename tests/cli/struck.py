"""Commands that are killed, or find the disk full, anywhere: run in processes of their own.

A *point* is a moment at which a command is about to change something: to open a file for writing, to rename,
remove or make one, to send a statement to a database, or to commit. The points of a command are counted once;
then it is struck at some of them.
"""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from privtune.cli import main
from privtune.ledger import Ledger, StoreCopyError, verify
from privtune.study import Study, rows, study_names

KILL, FULL_DISK = "kill", "full disk"

_CHANGES = {
    "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate",
    "shutil.rmtree", "shutil.move", "sqlite3.connect", "socket.connect",
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def take_strike(
    words: list[str],
    folder: str,
    notes: str,
    point: int | None,
    strike: str,
    large: int,
    environment: Mapping[str, str],
) -> None:
    """Run a command in a folder; note its points and what it says; be struck at one of them."""
    os.chdir(folder)
    os.environ.update(environment)
    rows._LARGE = large
    out, err = io.StringIO(), io.StringIO()
    sys.argv, sys.stdout, sys.stderr = ["privtune", *words], out, err
    code: Any = 0
    with Path(notes).open("a", buffering=1) as file:
        _watch(lambda number, what: _reach(number, what, point, strike, file))
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc(file=err)
            code = 99
        _let_grow()
        Path(f"{notes}.said").write_text(f"{code}\n{err.getvalue()}", encoding="utf-8")
    os._exit(0)


def _reach(number: int, what: str, point: int | None, strike: str, file: Any) -> None:
    if point is not None and number != point:
        return
    file.write(f"{what}\n")
    if point is None:
        return
    if strike == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))


def _let_grow() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def _watch(reached: Callable[[int, str], None]) -> None:
    """Call a function at each point from now on; that cannot be undone in this process."""
    count, within = [0], [False]

    def point(what: str) -> None:
        if within[0]:
            return  # the note of a point is a file that is written
        within[0] = True
        count[0] += 1
        reached(count[0] - 1, what)
        within[0] = False

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES:
            point(event)
        elif event == "open" and _changes(*arguments):
            point(f"open {Path(os.fsdecode(arguments[0])).name[:20]}")

    sys.addaudithook(hear)
    sa.event.listen(sa.Engine, "commit", lambda _: point("commit"))
    sa.event.listen(
        sa.Engine, "before_cursor_execute", lambda *given: point(str(given[2]).split()[0])
    )


def _changes(path: object, mode: str | None, flags: int) -> bool:
    if not isinstance(path, str | bytes) or not flags & _WRITES:
        return False
    name = os.fsdecode(path)
    return not name.startswith(("/dev", "/proc")) and not name.endswith("/notes.said")


RANDOM = re.compile(r"\b[0-9a-f]{12,64}\b")


def state_of(url: str, folder: Path, *, models: bool = True) -> dict[str, Any]:
    """Return what a store and a folder hold, whatever the moment or the process that made it.

    Args:
        url: The store, every log of which is verified meanwhile.
        folder: The folder of all files.
        models: Whether to read what was released, too: not of a study that is being deleted.
    """
    try:
        with Ledger(url) as ledger:
            budgets = {
                budget.name: (
                    sorted((c.note, str(c.state), c.study) for c in ledger.charges(budget.name)),
                    ledger.is_closed(budget.name),
                )
                for budget in ledger.budgets()
            }
            for name in budgets:
                verify(ledger.log.storage, name)
            copied = ledger.log.storage.original() is not None
        studies = {name: _study(name, url) for name in study_names(url)} if models else {}
    except StoreCopyError:
        raise AssertionError("a copy cannot be read") from None
    return {
        "budgets": budgets,
        "studies": studies,
        "copied": copied,
        "files": sorted(RANDOM.sub("ID", str(path)) for path in _files(folder)),
        "runs": _runs(folder),
    }


def _study(name: str, url: str) -> list[Any]:
    with closing(Study(name, url)) as study:
        released = {
            release.arm: (str(release.params), float(release.weights.double().sum()))
            for release in study.releases()
        }
        return [
            (each.plan.arm, str(each.state), released.get(each.plan.arm)) for each in study.status()
        ]


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder but for those that databases and locks keep beside themselves."""
    ends = ("-wal", "-shm", "-journal", ".lock", "-lock", "-heads")
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [path for path in found if not path.name.endswith(ends) and "mlflow" not in str(path)]


def _runs(folder: Path) -> list[tuple[str, ...]]:
    """Return name and state of the runs that MLflow has."""
    [store] = list(folder.rglob("mlflow.db")) or [None]
    if store is None:
        return []
    query = "SELECT name, status FROM runs WHERE lifecycle_stage = 'active'"
    with closing(sqlite3.connect(store)) as connection:
        return sorted(connection.execute(query))
