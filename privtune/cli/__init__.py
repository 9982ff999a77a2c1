"""The command line: ``privtune account | budget | study | worker | strategies | tasks | ui | ...``."""

from __future__ import annotations

import importlib
import io
import logging
import os
import shlex
import sys
import warnings
from functools import cache

import typer

__all__ = ["app", "main", "mount"]

app = typer.Typer(
    name="privtune",
    help="Tune hyperparameters under differential privacy: one budget, every trial charged.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@cache
def mount() -> typer.Typer:
    """Return the command line with all of its commands."""
    for name, text in (
        ("account", "What an event costs: epsilon, delta, calibration."),
        ("budget", "Budgets and their charges."),
        ("study", "Studies: create, plan, run, compare."),
    ):
        module = importlib.import_module(f"privtune.cli.{name}")
        app.add_typer(module.app, name=name, help=text, no_args_is_help=True)
    importlib.import_module("privtune.cli.catalogue")
    importlib.import_module("privtune.cli.demo")
    importlib.import_module("privtune.cli.doctor")
    importlib.import_module("privtune.cli.sync")
    importlib.import_module("privtune.cli.ui")
    importlib.import_module("privtune.cli.worker")
    return app


def main() -> None:
    """Run the command line.

    Exit codes: 0 done; 1 refused or failed, with one sentence on standard error; 2 usage.
    """
    try:
        from privtune.errors import PrivTuneError

        _quieten()
        # Tasks and functions of one's own may lie here; last, so that they hide no library.
        sys.path.append(os.getcwd())
        for stream in (sys.stdout, sys.stderr):
            # What a terminal cannot show is escaped: a name must not be able to break the command.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            mount()()
        except PrivTuneError as error:
            sys.stderr.write(f"{error}\n")
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
    words = ("***" if "@" in word or "password" in word else word for word in sys.argv[1:])
    return shlex.join(["privtune", *words])


def _quieten() -> None:
    # Libraries talk on standard error; the command line says what matters itself.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # Threads that spin while they wait make small models many times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.filterwarnings("ignore", module=r"(opacus|mlflow|torch|optuna|autodp)")
    for name in ("optuna.storages", "mlflow", "alembic", "opacus", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)
