"""Whose turn it is to write to a SQLite file: the threads and processes that want to wait here.

SQLite's own waiting is a lottery in which whoever has waited long has the worse tickets: it asks every
100 ms, whoever is new every millisecond. Under many writers somebody starves, and a limit on the whole
wait fails those who wait for nobody but each other. Here all ask alike, and patience counts from the last
time that the turn went to another: nobody gives up while it goes round.

It spares waiting and decides nothing: that nobody writes between another's statements hangs on SQLite's
lock, which programs that know nothing of turns take too.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from privtune.ledger.errors import LedgerBusyError


def pause() -> None:
    """Sleep for a few random milliseconds, before asking for a lock again."""
    time.sleep(random.uniform(0.0005, 0.01))  # noqa: S311  a pause, not a secret


class Turn:
    """The turn to write to a database.

    Args:
        database: SQLite's file; None where there is none, and threads alone wait here.
        patience: For how long it may stay with one holder, in seconds.
        busy: What to say then.
    """

    def __init__(self, database: Path | None, patience: float, busy: str) -> None:
        self._database = database
        self._path = None if database is None else database.with_name(f"{database.name}-turn")
        self._patience, self._busy = patience, busy
        self._threads = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn, and have it until the block, or the process, ends.

        Raises:
            LedgerBusyError: One holder has it for too long.
        """
        self._wait(lambda: self._threads.acquire(timeout=0.05))
        try:
            file = self._opened()
            try:
                self._wait(lambda: _locked(file))
                yield
            finally:
                if file is not None:
                    os.close(file)
        finally:
            self._threads.release()

    def _wait(self, taken: Callable[[], bool]) -> None:
        last, since = self._passed(), time.monotonic()
        while not taken():
            if (now := self._passed()) != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience:
                raise LedgerBusyError(self._busy)
            pause()

    def _passed(self) -> int:
        """Return a number that changes when the turn goes to another: the time of the file."""
        try:
            return 0 if self._path is None else self._path.stat().st_mtime_ns
        except OSError:
            return 0

    def _opened(self) -> int | None:
        """Open the file, for this turn alone: a child that was forked would hold it, too."""
        if self._path is None or self._database is None or not self._database.exists():
            return None  # where there is no database, nothing is left behind
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # whoever may not write here is told so by SQLite
            return None


def _locked(file: int | None) -> bool:
    """Lock a file if nobody has; where there are no such locks, SQLite's own is all that is waited for."""
    if file is None:
        return True
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(file)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows; some network file systems
        return True
    return True
