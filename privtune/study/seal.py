"""The seal of a round: while one runs, nothing in this process speaks to the outside.

Two layers: in every training on private records, what is printed, logged or displayed goes to the curator's
log, since a printed loss is a number that nobody paid for (:func:`kept_for_curator`). A sealed round closes
more (:func:`sealed`): how often something is said would tell how many trials there are.

Under a seal MLflow refuses every read and write. When it is left, no thread, ``atexit`` handler or finaliser
that a user's code started under it may be left: each could print once a trial after the seal. A seat belt,
not a sandbox: code that opens a file or a socket itself is inside the trust boundary like the data.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import io
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from privtune.errors import PrivTuneError
from privtune.study.replacement import replace_attribute

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MLFLOW = {
    "mlflow.tracking._tracking_service.registry": ("TrackingStoreRegistry", "get_store"),
    "mlflow.tracking._model_registry.registry": ("ModelRegistryStoreRegistry", "get_store"),
    # Its artifact repositories are cached by run.
    "mlflow.tracking._tracking_service.client": ("TrackingServiceClient", "_get_artifact_repo"),
}
"""By module of MLflow, the class and the method through which everything reaches a store."""

_FORMAT = logging.Formatter("%(levelname)s %(name)s: %(message)s")
_URI = "MLFLOW_TRACKING_URI"

_lock = threading.RLock()
_undo = contextlib.ExitStack()  # what the outermost seal has changed
_depth = 0
_ran = False
_undo_output = contextlib.ExitStack()  # what the outermost block of kept output has changed
_output_depth = 0


class _Voice(threading.local):
    """Whether this thread speaks to the terminal although output is kept for the curator."""

    is_loud = False


_voice = _Voice()


class SealedError(PrivTuneError):
    """Code inside a sealed round tried to reach a tracking server, or one was listening already."""


class SealedTrialsError(PrivTuneError):
    """Sealed trials were asked for outside of the trust boundary."""


@contextlib.contextmanager
def kept_for_curator(log: Path) -> Iterator[None]:
    """Send what a block prints, warns, logs or displays to a file. Threads share one; the last opens it."""
    global _output_depth  # noqa: PLW0603 - one process, one state
    with _lock:
        if _output_depth == 0:
            with contextlib.ExitStack() as failed:
                failed.callback(_undo_output.close)
                _close_notebook()
                _redirect(log)
                replace_attribute(_undo_output, logging.Logger, "callHandlers", _log)
                failed.pop_all()
        _output_depth += 1
    try:
        yield
    finally:
        with _lock:
            _output_depth -= 1
            if _output_depth == 0:
                _undo_output.close()


@contextlib.contextmanager
def aloud() -> Iterator[None]:
    """Let this thread speak to the terminal within a block of kept output: observers see no record."""
    before = _voice.is_loud
    _voice.is_loud = True
    try:
        yield
    finally:
        _voice.is_loud = before


@contextlib.contextmanager
def sealed(log: Path, *, rehearsal: bool = False) -> Iterator[None]:
    """Seal a block. Seals may be nested, and threads share one: the last to leave opens it."""
    with kept_for_curator(log), _closed(rehearsal=rehearsal):
        yield


@contextlib.contextmanager
def _closed(*, rehearsal: bool) -> Iterator[None]:
    """Close every way to MLflow, and see that nothing is left that could speak after the block."""
    global _depth, _ran  # noqa: PLW0603 - one process, one state
    here, left = threading.get_ident(), list[str]()
    with _lock:
        _ran = _ran or not rehearsal
        if _depth == 0:
            _refuse_listeners()
            with contextlib.ExitStack() as failed:
                failed.callback(_undo.close)
                _close_mlflow()
                _started.watch()
                failed.pop_all()
        _depth += 1
        _started.inside[here] += 1
    try:
        yield
    finally:
        with _lock:
            last = _depth == 1
            _started.inside[here] -= 1
            _depth -= not last
        if last:
            try:
                left = _started.end()  # under the seal: what speaks until now speaks to the log
            finally:
                with _lock:
                    _depth -= 1
                    if _depth == 0:
                        _undo.close()
    if left:
        raise SealedError(
            f"A sealed round has left {', '.join(dict.fromkeys(left))}, which may speak after it, once a "
            "trial: how often would tell the secret number of trials. End what a trial starts before it "
            "returns (join, shutdown, atexit.unregister, detach), or start it before the study runs."
        )


def round_ran() -> bool:
    """Return whether this process has run a sealed round: the memory that it left may tell its size."""
    return _ran


def open_stream(stream: TextIO) -> TextIO:
    """Return a stream to the same place that a seal leaves open, for what says nothing of a round."""
    try:
        return os.fdopen(os.dup(stream.fileno()), "w", encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # a notebook's or a test's: no file underneath
        return stream


_GRACE = 5.0
"""Seconds that threads which are about to end have for it."""

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_OWN = str(Path(__file__).parents[1]) + os.sep


def _is_library(file: str) -> bool:
    packaged = any(folder in Path(file).parts for folder in ("site-packages", "dist-packages"))
    return packaged or file.startswith((*_INSTALLED, _OWN))


def _is_standard(file: str) -> bool:
    return not _is_library(file) and file.startswith((*_STANDARD, "<frozen "))


def _by_user() -> bool:
    """Say whether a user's code asked for what is started, beyond Python's own modules."""
    frame = sys._getframe(2)
    while frame is not None and _is_standard(frame.f_code.co_filename):
        if frame.f_code.co_name == "<module>":  # one of Python's own that is imported
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not _is_library(frame.f_code.co_filename)


class _Started:
    """Threads, handlers and finalisers that code under the seal has started."""

    def __init__(self) -> None:
        self.inside: Counter[int] = Counter()  # how often each thread has entered
        self._clear()

    def _clear(self) -> None:
        self._all: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._threads: list[threading.Thread] = []  # that a user's code has started
        self._finalisers: list[tuple[Any, object]] = []
        self._handlers: list[Any] = []
        self._expected = atexit._ncallbacks()

    def watch(self) -> None:
        """Note what is started from here on, until the seal is opened."""
        self._clear()
        start, finalise = threading.Thread.start, weakref.finalize.__init__
        register, unregister = atexit.register, atexit.unregister

        def started(it: threading.Thread) -> None:
            if inside := self._is_inside():
                self._all.add(it)  # before it starts others
            start(it)
            if inside and _by_user():
                self._threads.append(it)

        def registered(function: Any, *args: Any, **kwargs: Any) -> Any:
            of_finalisers = function == weakref.finalize._exitfunc  # type: ignore[attr-defined]
            if self._is_inside() and not of_finalisers and _by_user():
                self._handlers.append(function)
            self._expected += 1
            return register(function, *args, **kwargs)

        def unregistered(function: Any) -> None:
            self._handlers = [handler for handler in self._handlers if handler != function]
            unregister(function)

        def finalised(it: Any, of: Any, function: Any, /, *args: Any, **kwargs: Any) -> None:
            finalise(it, of, function, *args, **kwargs)
            if self._is_inside() and _by_user():
                self._finalisers.append((it, function))

        replace_attribute(_undo, threading.Thread, "start", started)
        replace_attribute(_undo, atexit, "register", registered)
        replace_attribute(_undo, atexit, "unregister", unregistered)
        replace_attribute(_undo, weakref.finalize, "__init__", finalised)

    def end(self) -> list[str]:
        """Wait for threads that are about to end; name what is left, and unregister handlers."""
        deadline, found = time.monotonic() + _GRACE, []
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                found.append(f"thread {thread.name!r}")
        found += [f"atexit handler {_name(handler)}" for handler in self._handlers]
        if atexit._ncallbacks() > self._expected:  # by a name that register had before the seal
            found.append("an atexit handler")
        for handler in tuple(self._handlers):
            atexit.unregister(handler)
        for finaliser, function in self._finalisers:
            if finaliser.alive and finaliser.atexit:
                found.append(f"finaliser {_name(function)} of weakref.finalize")
                finaliser.detach()
        return found

    def _is_inside(self) -> bool:
        here = threading.current_thread()
        return self.inside[threading.get_ident()] > 0 or here in self._all


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


_started = _Started()


def _refuse_listeners() -> None:
    mlflow = sys.modules.get("mlflow")
    if getattr(mlflow, "active_run", lambda: None)() is not None:
        raise SealedError(
            "An MLflow run is active around a sealed round: whatever is logged there shows trials "
            "that must stay secret. End it (mlflow.end_run()); releases are logged by PrivTune."
        )
    tools = sys.modules.get("mlflow.utils.autologging_utils")
    integrations = getattr(tools, "AUTOLOGGING_INTEGRATIONS", {})
    on = [name for name, options in integrations.items() if options.get("disable") is False]
    if on:
        raise SealedError(
            f"MLflow autologging is on ({', '.join(sorted(on))}) around a sealed round: it would log "
            "trials that must stay secret. Turn it off: mlflow.autolog(disable=True)."
        )


def _close_mlflow() -> None:
    """Close every way to a store, in MLflow as it is imported, or as it will be."""
    for name in _MLFLOW:
        if name in sys.modules:
            _close(sys.modules[name])
    watch = _Watch()
    sys.meta_path.insert(0, watch)
    _undo.callback(sys.meta_path.remove, watch)
    # Worker processes inherit an address that leads nowhere.
    before = os.environ.get(_URI)
    os.environ[_URI] = "privtune-sealed://round"
    if before is None:
        _undo.callback(os.environ.pop, _URI, None)
    else:
        _undo.callback(os.environ.__setitem__, _URI, before)


def _close(module: ModuleType) -> None:
    owner, method = _MLFLOW[module.__name__]
    replace_attribute(_undo, getattr(module, owner), method, _refuse)


def _refuse(*_args: Any, **_kwargs: Any) -> Any:
    raise SealedError(
        "A sealed round is running: nothing in it may be logged to MLflow, for its trials are not "
        "paid for. To see every trial, use the strategy that pays for everything."
    )


class _Watch(MetaPathFinder):
    """Closes MLflow's modules as soon as they are imported."""

    def __init__(self) -> None:
        self._searching = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of MLflow as everybody would, and close it when it was executed."""
        if name not in _MLFLOW or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.now = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_close(module: ModuleType) -> None:
                execute(module)
                with _lock:
                    if _depth:
                        _close(module)

            setattr(spec.loader, "exec_module", execute_and_close)  # noqa: B010 (a method)
        return spec


def _close_notebook() -> None:
    """Let a notebook display nothing: bars would show each trial."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if (publisher := getattr(shell, "display_pub", None)) is not None:
        publish = publisher.publish

        def publish_aloud(*args: Any, **kwargs: Any) -> None:
            if _voice.is_loud and _depth == 0:
                publish(*args, **kwargs)

        replace_attribute(_undo_output, publisher, "publish", publish_aloud)


# Whatever handlers there are: they may write to a file, a server, or a stream of before.
def _log(_logger: logging.Logger, record: logging.LogRecord) -> None:
    sys.stderr.write(f"{_FORMAT.format(record)}\n")


class _Output(io.TextIOBase):
    """A stream to the curator's log, and to where it led before for a thread that may speak."""

    def __init__(self, log: TextIO, before: TextIO) -> None:
        super().__init__()
        self._log = log
        self._before = before

    @property
    def _stream(self) -> TextIO:
        return self._before if _voice.is_loud and _depth == 0 else self._log

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._log.flush()
        # What it led to may be closed by now: nothing of this stream waits there.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._before.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    @property
    def buffer(self) -> Any:
        return self._stream.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors


def _redirect(log: Path) -> None:
    """Send what this process prints to a file: its streams, and the descriptors below them."""
    file = _undo_output.enter_context(_open(log))
    _flush()
    outside = {name: open_stream(getattr(sys, name)) for name in ("stdout", "stderr")}
    for name, stream in outside.items():
        if stream is not getattr(sys, name):
            _undo_output.callback(stream.close)
    for descriptor in (1, 2):
        try:
            before = os.dup(descriptor)
        except OSError:  # the stream is closed, as those of a daemon are
            continue
        os.dup2(file.fileno(), descriptor)
        _undo_output.callback(os.close, before)
        _undo_output.callback(os.dup2, before, descriptor)
    # Text that waits in a buffer was printed under the seal: it goes to the log, before the
    # streams are put back.
    _undo_output.callback(_flush)
    for name, stream in outside.items():
        replace_attribute(_undo_output, sys, name, _Output(file, stream))
    _undo_output.callback(_flush)


def _open(log: Path) -> TextIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        descriptor = os.open(log, flags, 0o600)
    except OSError:  # a worker of another machine or user: the folder is not its own
        descriptor = os.open(os.devnull, flags)
    return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def _flush() -> None:
    """Empty the buffers of Python's streams and of the C library's."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()  # type: ignore[union-attr]
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).fflush(None)
