"""Trials of a round that are trained together: each in a thread of its own, one of which runs at a time.

A trial runs until its loop waits in ``fit``, then the next one begins. Loops that are alike are trained
as one stack; then each trial goes on to its score, one after the other. What is global in a process
(random generators, streams, warnings) is put back as each trial left it, so that no trial sees another.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Generic, TypeVar

from privtune.training.mechanism.streams import GLOBAL_GENERATOR

if TYPE_CHECKING:
    from privtune.strategies import TrialResult
    from privtune.training.own_loop.stacked import Offer

__all__ = ["by_itself", "can_meet", "run_together"]

T = TypeVar("T")

_TURN = threading.Lock()
"""Held by the round whose trials wait for each other: a process has one set of globals."""

_TURNS = itertools.count()

_PATIENCE = 5.0
"""Seconds, beside five times what a rehearsal took, for another one to come as far."""

_SWAPPED = ((sys, "stdout"), (sys, "stderr"), (warnings, "filters"), (warnings, "showwarning"))


class _EndedError(BaseException):
    """Ends an objective whose round was stopped: no failure, so no program of a user's catches it."""


def _globals() -> Callable[[], None]:
    """Note what a process has one of, as whoever runs leaves it; return what puts it back."""
    import numpy as np
    import torch

    named = [getattr(module, name) for module, name in _SWAPPED]
    dtype = torch.get_default_dtype()
    with GLOBAL_GENERATOR:
        python, numpy, drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def put() -> None:
        warnings.filters = []
        warnings.resetwarnings()  # what was said once is forgotten, but in a list of nobody's
        for (module, name), value in zip(_SWAPPED, named, strict=True):
            setattr(module, name, value)
        torch.set_default_dtype(dtype)
        with GLOBAL_GENERATOR:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(drawn)

    return put


class _Seat(Generic[T]):
    """A trial in a thread of its own, which runs while :meth:`go_on` waits for it and at no other time.

    Args:
        run: Runs the trial.
    """

    def __init__(self, run: Callable[[], T]) -> None:
        self.run = run
        self.offer: Offer | None = None
        self.answer: bool | Exception = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self.done = self.met = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._running = self._over = False
        self._turn: int | None = None
        self._inside: Callable[[], None] | None = None
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._live,), name="privtune trial", daemon=True
        )

    def go_on(self) -> None:
        """Let the trial run until it waits or ends."""
        turn = next(_TURNS)
        self.met = self._turn is not None and turn > self._turn + 1
        self._turn = turn
        outside = _globals()
        if self._inside is not None:
            self._inside()
        self._running = True
        try:
            if self._thread.ident is None:
                self._thread.start()
            else:
                self._go.release()
            self._back.acquire()
            self._running = False
            self._inside = _globals()
        except BaseException:  # Ctrl-C: the trial runs, and may hold the generator
            self.end()
            raise
        finally:
            outside()

    def end(self) -> None:
        """End the thread, wherever it is; return when it has ended."""
        if self._thread.ident is None:
            return
        if not self.done:
            self._over = True
            if self._running:  # whoever waited for it was interrupted: it hears of that, too
                ended = ctypes.py_object(_EndedError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ended
                )
            self._go.release()
        self._thread.join()

    def _live(self) -> None:
        from privtune.training.own_loop.stacked import MEETING

        MEETING.set(self._wait)
        try:
            self.result = self.run()
        except BaseException as error:  # handed to whoever runs the round
            self.error = error
        finally:
            self.done = True
            self._back.release()

    def _wait(self, offer: Offer) -> bool:
        """Wait with a loop until it was trained, or goes on by itself."""
        from privtune.training.own_loop.stacked import MEETING

        MEETING.set(None)  # once: whatever else this trial trains, it trains by itself
        self.offer = offer
        self._back.release()
        self._go.acquire()
        if self._over:
            raise _EndedError
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def by_itself(run: Callable[[], T], meeting: Callable[[Offer], bool] | None = None) -> T:
    """Run a trial that waits for nobody, also where this thread is a trial that may.

    Args:
        run: Runs the trial.
        meeting: Hears of a loop that could wait.
    """
    from privtune.training.own_loop.stacked import MEETING

    token = MEETING.set(meeting)
    try:
        return run()
    finally:
        MEETING.reset(token)


def can_meet(run: Callable[[], object]) -> bool:
    """Say whether trials can wait for each other: rehearse one in a thread, and another while it waits.

    They cannot where something belongs to a thread, as handlers of signals and connections do, or where
    one holds what the next one needs, or changes it.

    Args:
        run: Runs a rehearsal that succeeds by itself.

    Raises:
        BaseException: What stops more than a trial: an interrupt, an exit.
    """
    from privtune.training.mechanism.streams import GLOBAL_GENERATOR
    from privtune.training.own_loop.stacked import plain_modes

    # Within another rehearsal this thread holds the generator, and waits for a thread that needs it.
    within = GLOBAL_GENERATOR._is_owned()  # type: ignore[attr-defined]
    if within or not plain_modes() or not _TURN.acquire(blocking=False):
        return False
    one, other = _Seat(run), _Seat(run)
    try:
        begun = time.monotonic()
        one.go_on()
        if not one.done:
            # What the first holds while it waits (a lock, a file) it lets go of when it is ended.
            late = threading.Timer(_PATIENCE + 5 * (time.monotonic() - begun), one.end)
            late.start()
            try:
                other.go_on()
            finally:
                late.cancel()
                late.join()
            if other.error is None and not one.done:
                other.end()
                other.error = None
                one.go_on()
    finally:
        one.end()
        other.end()
        _TURN.release()
    errors = [error for error in (one.error, other.error) if error is not None]
    for error in errors:
        if not isinstance(error, Exception | _EndedError):
            raise error
    return not errors


def run_together(runs: Sequence[Callable[[], TrialResult]]) -> Iterator[TrialResult]:
    """Run trials, those whose loops are alike as stacks; yield each as soon as it is done.

    A trial that fails after others ran while it waited is run again by itself, in the thread of whoever
    runs the round, from its start and on the same streams: what failed may be that it met them (a model
    that is kept in a global variable, a number that another has changed). Only what fails then, too, is
    its outcome. After a failure no more trials are begun; those that wait go on to their ends.

    Args:
        runs: Each runs one trial.

    Raises:
        Exception: What the first trial that failed has raised, after the others have ended.
    """
    from privtune.training.own_loop.stacked import plain_modes

    if len(runs) < 2 or not plain_modes() or not _TURN.acquire(blocking=False):
        yield from map(by_itself, runs)
        return
    try:
        left, failed = iter(runs), list[Exception]()
        while not failed:
            seats: list[_Seat[TrialResult]] = []
            try:
                yield from _begin(left, seats, failed)
                if not seats:
                    break
                yield from _finish(seats, failed)
            finally:
                for seat in seats:
                    seat.end()
        if failed:
            raise failed[0]
    finally:
        _TURN.release()


def _begin(
    left: Iterator[Callable[[], TrialResult]],
    seats: list[_Seat[TrialResult]],
    failed: list[Exception],
) -> Iterator[TrialResult]:
    """Begin trials until all wait or have ended, or those that wait hold as much as a stack may."""
    from privtune.training.engine.stacks import STACK_BYTES
    from privtune.training.own_loop.stacked import held_bytes

    for run in left:
        seat = _Seat(run)
        seats.append(seat)
        seat.go_on()
        if seat.done:
            seats.pop()
            yield from _outcome(seat, failed)
            if failed:
                return
        elif held_bytes([each.offer for each in seats if each.offer]) > STACK_BYTES:
            return


def _finish(seats: Sequence[_Seat[TrialResult]], failed: list[Exception]) -> Iterator[TrialResult]:
    """Train the loops that wait, and let each trial go on to its end."""
    from privtune.training.own_loop.stacked import groups_of, train_stack

    seat_of = {id(seat.offer): seat for seat in seats}
    for group in groups_of([seat.offer for seat in seats if seat.offer]):
        # What runs between may have changed what a loss refers to: that trial begins anew.
        standing = [offer for offer in group if offer.stands()]
        try:
            stopped = train_stack(standing)
        except Exception as error:  # of them all: by itself, each shows whose it was
            stopped = [error] * len(standing)
        for offer, why in zip(standing, stopped, strict=bool(stopped)):
            seat_of[id(offer)].answer = True if why is None else why
        for offer in group:
            seat = seat_of[id(offer)]
            if offer in standing:
                seat.go_on()
            seat.end()
            yield from _outcome(seat, failed)


def _outcome(seat: _Seat[TrialResult], failed: list[Exception]) -> Iterator[TrialResult]:
    """Yield the result of a trial that has ended; run it again by itself if it failed among others."""
    error, seat.error, seat.offer = seat.error, None, None
    if error is None and seat.result is not None:
        yield seat.result
    elif isinstance(error, _EndedError) or (seat.met and isinstance(error, Exception)):
        next(_TURNS)
        try:
            result = by_itself(seat.run)
        except Exception as again:
            failed.append(again)
            return
        yield result
    elif isinstance(error, Exception):
        failed.append(error)
    elif error is not None:
        raise error
