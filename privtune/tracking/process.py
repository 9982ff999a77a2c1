"""The client of the process that writes to MLflow, which is killed when its time limit is over.

A thread could not be ended: it would go on writing behind the next attempt, hold the lock, and be joined
when Python exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger.urls import masked_url
from privtune.tracking.store import TrackingUnavailableError
from privtune.tracking.writer import PackedModel, TrackingPlace

if TYPE_CHECKING:
    from privtune.views.arm import ArmRecord

VARIABLE = "PRIVTUNE_TRACKING_SECONDS"
DEFAULT_SECONDS = 60.0
_LONGEST = 86_400.0
_IMPORT_SECONDS = (
    120.0  # for imports alone, before any tracker is asked: a slow disk is no slow tracker
)
_BYTES_A_SECOND = 1_000_000
_POINTS_A_SECOND = 1_000  # one call of MLflow's
_REAPED = 5.0  # seconds for a killed process to end; it holds nothing of this one meanwhile
# Not by -m, which would make the module of its messages twice. Last in the path: this package may lie beside
# others that have the names of libraries. The working folder is nowhere in the path.
_PROGRAM = (
    "import gc, sys; gc.disable(); sys.path.append(sys.argv[1]); "
    "from privtune.tracking.writer import main; main()"
)
_ROOT = str(Path(__file__).resolve().parents[2])


class TrackingTimeoutError(TrackingUnavailableError):
    """Writing to the tracking store took longer than the time limit."""


def tracking_seconds() -> float:
    """Return how many seconds one release may take to log: ``PRIVTUNE_TRACKING_SECONDS``, or 60.

    Raises:
        InvalidInputError: If the variable holds no number above 0.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= _LONGEST:
        raise InvalidInputError(
            VARIABLE,
            text,
            f"must be a number of seconds above 0 and at most {_LONGEST:,.0f}",
            f"Leave it out for {DEFAULT_SECONDS:g} seconds.",
        )
    return seconds


def seconds_for(record: ArmRecord) -> float:
    """Return the seconds that a record adds to the time limit: for its model, points and trials."""
    model_bytes = 0 if record.model is None else record.model.stat().st_size
    points = len(record.points) + len(record.samples)
    trial_seconds = 0.0
    for child in record.children:
        trial_seconds += 1.0 + len(child.points) / _POINTS_A_SECOND
    return model_bytes / _BYTES_A_SECOND + points / _POINTS_A_SECOND + trial_seconds


class TrackingProcess:
    """A process of its own that speaks to MLflow, started when it is first needed.

    It ends with this one at the latest, or when an answer takes too long. Closed, it may be started again.

    Attributes:
        seconds: The budget of time of one release, without what its model and its points add.

    Raises:
        InvalidInputError: If ``PRIVTUNE_TRACKING_SECONDS`` is no number above 0.
    """

    def __init__(self) -> None:
        self.seconds = tracking_seconds()
        self._left = self.seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._end: Any = None

    def __enter__(self) -> TrackingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, unless it runs already; it imports MLflow in the background."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-c", _PROGRAM, _ROOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C is for whoever asks
        )
        self._end = weakref.finalize(
            self, _end, self._process
        )  # at the exit of Python at the latest

    def close(self) -> None:
        """Kill the process and all that it has started."""
        if self._end is not None:
            self._end()
        self._process = None
        self._is_ready = False

    @contextlib.contextmanager
    def opened(self, place: TrackingPlace) -> Iterator[OpenStore]:
        """Yield a study's MLflow store, opened as its only writer, with the whole time limit to go.

        Raises:
            TrackingTimeoutError: If the budget is used up. The process has been ended.
            TrackingUnavailableError: If the store cannot be reached.
        """
        self._left = self.seconds
        self.start()
        if not self._is_ready:
            self._ask(None, place, within=max(_IMPORT_SECONDS, self.seconds))
            self._is_ready = True
        self._call(("open", (place,)), place)
        try:
            yield OpenStore(self, place)
            self._call(("close", ()), place)
        except TrackingUnavailableError:
            raise  # the other process has closed the store, or has been ended
        except BaseException:
            self.close()  # it would wait for more, and hold the lock
            raise

    def _call(self, request: tuple[str, tuple[Any, ...]], place: TrackingPlace) -> Any:
        """Send a request and return the answer; take the time it lasted off the time limit."""
        begin = time.monotonic()
        try:
            return self._ask(request, place, within=self._left)
        finally:
            self._left -= time.monotonic() - begin

    def _ask(self, request: Any, place: TrackingPlace, *, within: float) -> Any:
        """Send a request and return the answer, or kill the process after ``within`` seconds.

        Args:
            request: Its name and arguments; None to wait for the first answer, after the imports.
            place: Of the store, for messages.
            within: Seconds after which the process is killed.

        Raises:
            TrackingTimeoutError: If there was no answer within that time.
            TrackingUnavailableError: If the process has ended, or the store cannot be reached.
            PrivTuneError: If the request was refused.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise TrackingUnavailableError("The process that logs to MLflow has been closed.")
        over = threading.Event()

        def end() -> None:
            over.set()
            _kill(process)

        timer = threading.Timer(max(0.0, within), end)
        timer.daemon = True
        line = b""
        try:
            timer.start()
            with contextlib.suppress(BrokenPipeError):  # it has ended, which reading says, too
                if request is not None:
                    pickle.dump(request, process.stdin)
                    process.stdin.flush()
                line = process.stdout.readline()
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        if over.is_set():
            self.close()
            raise TrackingTimeoutError(
                f"MLflow at {masked_url(place.uri)}, or who else writes to it, took longer than "
                f"{self.seconds:g} seconds ({VARIABLE})."
            )
        if not line.endswith(b"\n"):
            code = process.wait()
            self.close()
            raise TrackingUnavailableError(
                f"MLflow at {masked_url(place.uri)} cannot be used: the process that speaks to it ended "
                f"by itself (code {code})."
            )
        answer: dict[str, Any] = json.loads(line)
        if "unavailable" in answer:
            raise TrackingUnavailableError(answer["unavailable"])
        if "refused" in answer:
            raise PrivTuneError(answer["refused"])
        return answer["result"]


@dataclass(frozen=True)
class Experiment:
    """An experiment of MLflow: its id, whether it has the saved view, and the study that owns it."""

    number: str
    has_view: bool
    owner: str


class OpenStore:
    """A study's store in MLflow, which the other process holds open.

    Each method but `begin_anew` has one of the same name called there (`writer.Session`), takes its time from
    the budget, and raises `TrackingUnavailableError` where it is used up or the store cannot be reached.
    """

    def __init__(self, process: TrackingProcess, place: TrackingPlace) -> None:
        self._process = process
        self._place = place

    def begin_anew(self) -> None:
        """Reset the time limit to its full length, for the requests that follow."""
        self._process._left = self._process.seconds

    def published(self) -> dict[str, str]:
        """Return the run ids of arms that are logged completely, by the digest of their plan."""
        return dict(self._ask("published"))

    def write(self, record: ArmRecord) -> None:
        """Write one arm's run."""
        self._process._left += seconds_for(record)
        self._ask("write", record)

    def describe(self, note: str, view: str) -> None:
        """Set the note of the study's experiment, and its saved view."""
        self._ask("describe", note, view)

    def log_model(self, model: PackedModel) -> str:
        """Log a model, and return its URI."""
        self._process._left += _size(model.flavour) / _BYTES_A_SECOND
        return str(self._ask("log_model", model))

    def experiments(self) -> dict[str, Experiment]:
        """Return the store's experiments by name."""
        rows = self._ask("experiments")
        return {name: Experiment(*row) for name, row in rows.items()}

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the other process's session by its name, and return the answer."""
        return self._process._call((name, arguments), self._place)


def _size(flavour: Mapping[str, Any]) -> int:
    """Return the size of a packed model's files in bytes."""
    files = Path(flavour["data_path"]).rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all that it has started."""
    if process.poll() is not None:
        return
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except (ProcessLookupError, PermissionError):
        process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, wait for its end, and close its pipes."""
    _kill(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_REAPED)
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not written yet has nobody to read it
            if stream is not None:
                stream.close()
