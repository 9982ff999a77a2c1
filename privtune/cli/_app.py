"""The command line itself; it takes longer to import than :func:`privtune.cli.main`."""

from __future__ import annotations

import importlib
from functools import cache

import typer

__all__ = ["app", "mount"]

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
