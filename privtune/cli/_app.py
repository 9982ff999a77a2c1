"""The command line itself: its commands by name, and the modules that bring them."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from privtune import __version__

_GROUPS = {
    "account": "What an event costs: epsilon, delta, calibration.",
    "budget": "Budgets and their charges.",
    "study": "Studies: create, plan, run, compare.",
    "model": "Released models: export.",
}
_COMMANDS = ("strategies", "tasks", "demo", "doctor", "ui", "worker", "audit", "predict")


def mount(command: str | None = None, inner: str | None = None) -> typer.Typer:
    """Return the command line with this command; with all of them where none has this name.

    Args:
        command: A command, or a group of them.
        inner: A command of that group: then the others of the group are left out, too.
    """
    known = command in _GROUPS or command in _COMMANDS
    app = typer.Typer(
        name="privtune",
        no_args_is_help=True,
        # Its options stand before any command, and take long to read where there is one.
        add_completion=not known,
        pretty_exceptions_enable=False,
        # Boxes around help take longer to import than all the rest of it.
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for name, text in _GROUPS.items():
        if command == name or not known:
            module = importlib.import_module(f"privtune.cli.{name}")
            group = _only(module.app, inner) if known else module.app
            app.add_typer(group, name=name, help=text, no_args_is_help=True)
    for name in _COMMANDS:
        if command == name or not known:
            home = {"audit": "audit", "predict": "model"}.get(name, "commands")
            module = importlib.import_module(f"privtune.cli.{home}")
            app.command()(getattr(module, name))
    return app


def _only(group: typer.Typer, name: str | None) -> typer.Typer:
    """Return a group with one of its commands: Typer reads the options of every command there is."""
    commands = group.registered_commands
    one = [c for c in commands if name == (c.name or getattr(c.callback, "__name__", None))]
    if not one:
        return group
    alone = typer.Typer()
    alone.registered_commands = one
    return alone


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Tune hyperparameters under differential privacy: one budget, every trial charged."""
