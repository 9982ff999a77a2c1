"""The command line: ``privtune account | budget | study | worker | strategies | tasks | ui | ...``."""

from __future__ import annotations

import gc
import io
import logging
import os
import shlex
import signal
import sys
import warnings

from privtune import __version__
from privtune.imports import OWN_PROCESS, libraries

__all__ = ["main"]

_LONGEST = 300  # characters of a file's name in a message


def main() -> None:
    """Run the command line.

    Exit codes: 0 done; 1 refused or failed, with one sentence on standard error; 2 usage; 130
    stopped, by Ctrl-C or by SIGTERM, with one sentence that says how to go on.
    """
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return
    gc.freeze()
    OWN_PROCESS.set()
    try:
        # Schedulers stop a job with SIGTERM first: it is told how to go on like whoever sits there.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _quieten()
        with libraries():
            from privtune.cli._app import mount
            from privtune.errors import PrivTuneError

            # What else there is need not be imported.
            app = mount(*sys.argv[1:3])
        # Tasks and functions of one's own may lie here; last, so that they hide no library.
        sys.path.append(os.getcwd())
        for stream in (sys.stdout, sys.stderr):
            # What a terminal cannot show is escaped: a name must not be able to break the command.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            app()
        except PrivTuneError as error:
            sys.stderr.write(f"{error}\n")
            raise SystemExit(1) from None
        except OSError as error:  # a file that was named, or a disk that is full
            where = "" if error.filename is None else f"{str(error.filename)[:_LONGEST]}: "
            sys.stderr.write(f"{where}{error.strerror or error}.\n")
            raise SystemExit(1) from None
    except (KeyboardInterrupt, SystemExit) as stop:
        if not _was_interrupted(stop):
            raise
        sys.stderr.write(
            "Interrupted. What was charged stays charged, and nothing is charged twice; go on with: "
            f"{_again()}\n"
        )
        raise SystemExit(130) from None


def _was_interrupted(stop: BaseException | None) -> bool:
    """Return whether Ctrl-C is behind an exit: Typer turns it into one that says nothing."""
    while stop is not None and not isinstance(stop, KeyboardInterrupt):
        stop = stop.__cause__ or stop.__context__
    return stop is not None


def _again() -> str:
    # A password must not be shown, and nothing more be imported to mask it.
    words = (
        "***" if "://" in word and ("@" in word or "?" in word or "#" in word) else word
        for word in sys.argv[1:]
    )
    return shlex.join(["privtune", *words])


def _quieten() -> None:
    # Libraries talk on standard error; the command line says what matters itself.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # Threads that spin while they wait make small models many times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # To look for plugins, Pydantic reads the metadata of every package that is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    warnings.filterwarnings("ignore", module=r"(opacus|mlflow|torch|optuna|autodp)")
    for name in ("optuna.storages", "mlflow", "alembic", "opacus", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)
