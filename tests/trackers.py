"""One process that writes to MLflow for many tests: each start of one imports MLflow, for 1.5 seconds of CPU.

A test that is about the process itself asks for the fixture ``new_trackers``.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from subprocess import Popen

import pytest

from privtune.tracking import process as tracking
from privtune.tracking.process import OpenStore, TrackingProcess
from privtune.tracking.writer import TrackingPlace

KEPT = ("MLFLOW", "PYTHON")
"""Beginnings of the variables that a process reads as it imports; it takes all others from each request."""


def surroundings() -> tuple[object, ...]:
    """Return what a process keeps from its start: some variables, and where its standard error leads."""
    variables = sorted(pair for pair in os.environ.items() if pair[0].startswith(KEPT))
    errors = os.fstat(2)
    return (*variables, errors.st_dev, errors.st_ino)


def file_of(uri: str) -> tuple[int, int] | None:
    """Return the identity of a SQLite store's file, or None of a store that is none or not there yet."""
    if not uri.startswith("sqlite:///"):
        return None
    try:
        status = os.stat(uri.removeprefix("sqlite:///"))
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


@dataclass
class Started:
    """A process that has been started, and whom it works for.

    Attributes:
        process: The process.
        surroundings: Those of its start.
        is_ready: Whether it has said that its imports are done.
        is_waiting: Whether it waits for a store to open, and has met no error.
        others: The stores that it has opened for others, and their files. MLflow remembers stores.
        stores: The stores that it has opened for whoever has it now.
    """

    process: Popen[bytes]
    surroundings: tuple[object, ...]
    is_ready: bool = False
    is_waiting: bool = True
    others: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    stores: set[str] = field(default_factory=set)

    def may_open(self, uri: str) -> bool:
        """Return whether a store is new to it, or in the file in which it was left."""
        file = file_of(uri)
        return uri not in self.others or (file is not None and self.others[uri] == file)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


class Lending:
    """Keeps a process that was closed, for the next that is started in the same surroundings.

    A store that it has opened for one `TrackingProcess` it opens for another in the same file only: what has
    its name by then may be another store.
    """

    def __init__(self) -> None:
        self.idle: Started | None = None
        self.starts = 0
        self._is_paused = False
        self._lent: weakref.WeakKeyDictionary[TrackingProcess, Started] = (
            weakref.WeakKeyDictionary()
        )
        self._start: Callable[[TrackingProcess], None] = TrackingProcess.start
        self._opened = TrackingProcess.opened
        self._close: Callable[[TrackingProcess], None] = TrackingProcess.close

    def pause(self) -> None:
        """Lend and keep nothing until `resume` is called."""
        self._is_paused = True

    def resume(self) -> None:
        """Lend and keep processes again."""
        self._is_paused = False

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Let every tracking process be one that is lent."""
        lending = self

        def start(tracker: TrackingProcess) -> None:
            lending.start(tracker)

        @contextlib.contextmanager
        def opened(tracker: TrackingProcess, place: TrackingPlace) -> Iterator[OpenStore]:
            with lending.opened(tracker, place) as store:
                yield store

        def close(tracker: TrackingProcess) -> None:
            lending.close(tracker)

        patch.setattr(TrackingProcess, "start", start)
        patch.setattr(TrackingProcess, "opened", opened)
        patch.setattr(TrackingProcess, "close", close)

    def start(self, tracker: TrackingProcess) -> None:
        """Give a tracker the idle process if that is as good as a new one; else a new one."""
        lent = self._lent.get(tracker)
        if lent is not None and lent.is_alive:
            return
        if lent is not None:
            self.close(tracker)
        idle = None if self._is_paused else self.idle
        if idle is None or idle.surroundings != surroundings() or not idle.is_alive:
            self._start_new(tracker)
            return
        self.idle = None
        self._lent[tracker] = idle
        tracker._process = idle.process
        tracker._is_ready = idle.is_ready
        tracker._end = weakref.finalize(tracker, tracking._end, idle.process)

    def _start_new(self, tracker: TrackingProcess) -> None:
        self.starts += 1
        self._start(tracker)
        assert tracker._process is not None
        self._lent[tracker] = Started(tracker._process, surroundings())

    @contextlib.contextmanager
    def opened(self, tracker: TrackingProcess, place: TrackingPlace) -> Iterator[OpenStore]:
        """Open a store in a process that has met no other of its name."""
        self.start(tracker)
        if not self._lent[tracker].may_open(place.uri):
            self.close(tracker)
            self._start_new(tracker)
        lent = self._lent[tracker]
        lent.stores.add(place.uri)
        lent.is_waiting = False
        with self._opened(tracker, place) as store:
            yield store
        lent.is_waiting = True

    def close(self, tracker: TrackingProcess) -> None:
        """Keep a process that waits for a store to open, in place of the one that is kept; kill any other."""
        lent = self._lent.pop(tracker, None)
        if self._is_paused or lent is None or not (lent.is_alive and lent.is_waiting):
            self._close(tracker)
            return
        self.end()
        lent.is_ready = tracker._is_ready
        lent.others |= {uri: file_of(uri) for uri in lent.stores}
        lent.stores = set()
        tracker._end.detach()
        tracker._end = None
        tracker._process = None
        tracker._is_ready = False
        self.idle = lent

    def end(self) -> None:
        """Kill the process that is kept."""
        if self.idle is not None:
            tracking._end(self.idle.process)
            self.idle = None
