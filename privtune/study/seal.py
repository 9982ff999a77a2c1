"""The seal of a round, which keeps all output of this process from leaving the trust boundary.

Two layers: in every training on private records, what is printed, logged or displayed goes to the curator's
log, since a printed loss is a number that nobody paid for (:func:`kept_for_curator`). A sealed round closes
more (:func:`sealed`): how often something is said would tell how many trials there are.

Under a seal MLflow refuses every read and write, in every thread. What a trial leaves behind (a thread, a
handler of ``atexit``, a finaliser) is not watched: it may speak after the seal, and whoever starts it ends
it. A seat belt, not a sandbox: code that opens a file or a socket itself is inside the trust boundary like
the data.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from privtune.errors import PrivTuneError
from privtune.files import open_own
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
"""Held while the state below changes: threads of one study share a seal."""

_undo = contextlib.ExitStack()  # what the outermost seal has changed
_depth = 0  # of seals that are entered and not left
_ran = False  # whether a sealed round ran here, other than a rehearsal
_undo_output = contextlib.ExitStack()  # what the outermost block of kept output has changed
_output_depth = 0


class _Voice(threading.local):
    """The state of a thread: whether it may print to the terminal while a seal keeps output back."""

    is_loud = False


_voice = _Voice()


class SealedError(PrivTuneError):
    """Code inside a sealed round tried to reach MLflow, or MLflow was logging when the round began."""


class SealedTrialsError(PrivTuneError):
    """Sealed trials were requested outside of the trust boundary."""


@contextlib.contextmanager
def kept_for_curator(log: Path) -> Iterator[None]:
    """Send everything that a ``with`` block prints, warns, logs or displays to the curator's file.

    Args:
        log: The curator's file, to which it is appended; ``os.devnull`` where this user may not write it.
    """
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
    """Let this thread print to the terminal in a ``with`` block of kept output, but not in a sealed round.

    Under a sealed round it does not: an observer would say how many trials there are.
    """
    before = _voice.is_loud
    _voice.is_loud = True
    try:
        yield
    finally:
        _voice.is_loud = before


@contextlib.contextmanager
def sealed(log: Path, *, rehearsal: bool = False) -> Iterator[None]:
    """Seal a ``with`` block: keep its output for the curator and close MLflow.

    Args:
        log: The curator's file, for what is printed inside.
        rehearsal: Whether the block is a rehearsal, on made-up records: ``round_ran`` leaves it out.

    Raises:
        SealedError: If something listens already.
    """
    with kept_for_curator(log), _closed(rehearsal=rehearsal):
        yield


@contextlib.contextmanager
def _closed(*, rehearsal: bool) -> Iterator[None]:
    """Close MLflow for a ``with`` block, perhaps nested or shared by threads; the last one reopens it."""
    global _depth, _ran  # noqa: PLW0603 - one process, one state
    with _lock:
        _ran = _ran or not rehearsal
        if _depth == 0:
            _refuse_listeners()
            with contextlib.ExitStack() as failed:
                failed.callback(_undo.close)
                _close_mlflow()
                failed.pop_all()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _undo.close()


def round_ran() -> bool:
    """Return whether this process has run a sealed round, whose memory use may tell its size.

    A rehearsal does not count: it trains on made-up records, as often as the plan says.
    """
    return _ran


def open_stream(stream: TextIO) -> TextIO:
    """Return a copy of a stream that stays open under a seal.

    Args:
        stream: A stream of now; that a seal puts another in its place later does not matter.

    Returns:
        A stream to a copy of its descriptor, which the caller closes; the stream itself where it has
        none.
    """
    try:
        return os.fdopen(os.dup(stream.fileno()), "w", encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # a notebook's or a test's: no file underneath
        return stream


def _refuse_listeners() -> None:
    """Refuse a seal while an MLflow run is active or MLflow autologging is on."""
    mlflow = sys.modules.get("mlflow")
    if getattr(mlflow, "active_run", lambda: None)() is not None:
        raise SealedError(
            "An MLflow run is active around a sealed round: whatever is logged there shows trials "
            "that must stay secret. End it (mlflow.end_run()); releases are logged by PrivTune."
        )
    tools = sys.modules.get("mlflow.utils.autologging_utils")
    integrations = getattr(tools, "AUTOLOGGING_INTEGRATIONS", {})
    libraries = [name for name, options in integrations.items() if options.get("disable") is False]
    if libraries:
        names = ", ".join(sorted(libraries))
        raise SealedError(
            f"MLflow autologging is on ({names}) around a sealed round: it would log "
            "trials that must stay secret. Turn it off: mlflow.autolog(disable=True)."
        )


def _close_mlflow() -> None:
    """Close MLflow's stores, in modules that are imported now or later and in worker processes.

    MLflow is not imported for that: it takes seconds, and most rounds never meet it.
    """
    for name in _MLFLOW:
        if name in sys.modules:
            _close(sys.modules[name])
    watch = _ImportWatch()
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
    """Replace the method of a module of MLflow through which everything reaches a store."""
    class_name, method = _MLFLOW[module.__name__]
    owner = getattr(module, class_name)
    replace_attribute(_undo, owner, method, _refuse)


def _refuse(*_args: object, **_kwargs: object) -> NoReturn:
    """Raise ``SealedError`` in the place of MLflow's methods."""
    raise SealedError(
        "A sealed round is running: nothing in it may be logged to MLflow, for its trials are not "
        "paid for. To see every trial, use the strategy that pays for everything."
    )


class _ImportWatch(MetaPathFinder):
    """An import hook that closes MLflow's modules right after they are imported."""

    def __init__(self) -> None:
        self._searching = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of MLflow, whose loader closes it at the end; else None.

        None for any other module, and for its own search: the other finders have their turn.
        """
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
    """Keep a notebook from displaying anything, since a progress bar would show each trial."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    publisher = getattr(get_shell(), "display_pub", None)
    if publisher is None:
        return
    publish = publisher.publish

    def publish_aloud(*args: object, **kwargs: object) -> None:
        if _voice.is_loud and _depth == 0:
            publish(*args, **kwargs)

    replace_attribute(_undo_output, publisher, "publish", publish_aloud)


def _log(_logger: logging.Logger, record: logging.LogRecord) -> None:
    """Write a record of any logger to the curator's log.

    It goes past the handlers that there are: they may write to a file, a server, or a stream of before.
    """
    sys.stderr.write(f"{_FORMAT.format(record)}\n")


class _Output(io.TextIOBase):
    """A stream to the curator's log, or to its former target for a thread that may print."""

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
            terminal = os.dup(descriptor)
        except OSError:  # the stream is closed, as those of a daemon are
            continue
        os.dup2(file.fileno(), descriptor)
        # Undone from the last to the first: the descriptor is put back, then its copy closed.
        _undo_output.callback(os.close, terminal)
        _undo_output.callback(os.dup2, terminal, descriptor)
    # Text that waits in a buffer was printed under the seal: it goes to the log, before the
    # streams are put back.
    _undo_output.callback(_flush)
    for name, stream in outside.items():
        replace_attribute(_undo_output, sys, name, _Output(file, stream))
    _undo_output.callback(_flush)


def _open(log: Path) -> TextIO:
    """Return a stream that appends to a log, or to the null device if the log cannot be written."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    nowhere = Path(os.devnull)
    try:
        descriptor = os.open(nowhere, flags) if log == nowhere else open_own(log, flags)
    except OSError:  # a worker of another machine or user: the folder is not its own
        descriptor = os.open(nowhere, flags)
    return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def _flush() -> None:
    """Empty the buffers of Python's streams and of the C library's."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()  # type: ignore[union-attr]
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).fflush(None)
