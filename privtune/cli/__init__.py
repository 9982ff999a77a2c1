"""The command line: ``privtune account | budget | study | worker | strategies | tasks | ui | ...``.

The script ``privtune`` calls :func:`main`. It sets up the process and turns errors into sentences and
exit codes. The commands themselves lie in the modules beside it, of which :mod:`privtune.cli._app`
imports the one that was typed: ``privtune --version`` imports none, and answers at once.
"""

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
from privtune.errors import PrivTuneError, interruptible, was_interrupted
from privtune.imports import OWN_PROCESS, libraries
from privtune.prose import complain

__all__ = ["main"]

_LONGEST = 300  # characters of a file's name in a message
_CHARGING = {("demo",), ("study", "run"), ("budget", "charge")}
"""Commands that charge a budget, by their words: only these speak of charges when they are stopped."""
_CHARGES_STAY = ". What was charged stays charged, and nothing is charged twice"


def main() -> None:
    """Run the command line.

    Exit codes: 0 done; 1 refused or failed, with one sentence on standard error; 2 usage; 130
    stopped, by Ctrl-C or by SIGTERM, with one sentence that says how to go on.

    Raises:
        SystemExit: The command did not succeed; its code is one of these.
    """
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return
    # What is imported by now lives as long as the process: the collector need not look at it again.
    gc.freeze()
    OWN_PROCESS.set()
    try:
        # Schedulers stop a job with SIGTERM first: it is told how to go on like whoever sits there.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _quieten()
        _leave_working_folder()
        with libraries():
            from privtune.cli._app import mount, run

            # What else there is need not be imported.
            app = mount(*sys.argv[1:3])
        _escape_output()
        try:
            with interruptible():
                run(app)
        except PrivTuneError as error:
            complain(str(error))
            raise SystemExit(1) from None
        except OSError as error:  # a file that was named, or a disk that is full
            where = "" if error.filename is None else f"{str(error.filename)[:_LONGEST]}: "
            complain(f"{where}{error.strerror or error}.")
            raise SystemExit(1) from None
    except (KeyboardInterrupt, SystemExit) as stop:
        if not was_interrupted(stop):
            raise
        charges = _CHARGES_STAY if _may_charge() else ""
        complain(f"Interrupted{charges}. To continue, run: {_command_to_repeat()}")
        raise SystemExit(130) from None


class _Warnings(logging.Handler):
    """A logging handler that writes warnings to standard error, broken at words like other messages.

    Python's own handler of last resort would print a warning as one long line, which a terminal breaks
    within words.
    """

    def emit(self, record: logging.LogRecord) -> None:
        complain(self.format(record))


def _escape_output() -> None:
    """Have standard output and standard error escape characters that their encoding lacks.

    Where the terminal's encoding lacks a character, Python would otherwise end the command with a
    UnicodeEncodeError in the middle of a line. A stream that a test or another program put in place of
    standard output stays as it is.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _may_charge() -> bool:
    """Return whether the typed command is one that charges a budget."""
    words = sys.argv[1:]
    command = tuple(words[:1])
    inner_command = tuple(words[:2])
    return command in _CHARGING or inner_command in _CHARGING


def _command_to_repeat() -> str:
    """Return the command as it was typed, quoted for a shell and without passwords."""
    words = [_mask_password(word) for word in sys.argv[1:]]
    return shlex.join(["privtune", *words])


def _mask_password(word: str) -> str:
    """Return a word of the command, or ``***`` for a URL that may hold a password.

    A password stands before an ``@``, or among a URL's options. Such a URL is masked as a whole: what
    would find the password in it, the ledger's ``masked_url``, must not be imported by a command that was
    just stopped.
    """
    if "://" not in word:
        return word
    may_hold_password = "@" in word or "?" in word or "#" in word
    return "***" if may_hold_password else word


def _leave_working_folder() -> None:
    """Take the working folder off the import path, in this process and in those that it starts.

    Libraries try modules that are not installed. Whoever types a command in a folder that somebody handed
    over must not run a file there that has such a name.
    """
    # Without it, Python puts the working folder first on the path of each process that it spawns.
    os.environ["PYTHONSAFEPATH"] = "1"
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [place for place in places if place]
    if len(folders) in {0, len(places)}:
        return
    # An empty place, as in "$PYTHONPATH:/more", is the working folder by accident.
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    here = os.path.abspath("")
    is_on_purpose = here in map(os.path.abspath, folders)
    if here in sys.path and not is_on_purpose:
        sys.path.remove(here)


def _quieten() -> None:
    """Silence libraries: their warnings, their logs below errors, and MLflow's telemetry.

    An environment variable that the user has set stays as it is. This runs before any library is
    imported, as most of them read their variables only once.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # Threads that spin while they wait make small models many times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # To look for plugins, Pydantic reads the metadata of every package that is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    warnings.filterwarnings("ignore", module=r"(opacus|mlflow|torch|optuna|autodp)")
    logging.lastResort = _Warnings(logging.WARNING)
    for name in ("optuna.storages", "mlflow", "alembic", "opacus", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)
