"""The command line as a Typer application, which imports only the modules of the typed command.

Typer wants all commands before it runs one, and their modules take a second to import. So
:func:`mount` looks at the first two words that were typed, and imports what these need. Help of the
whole, and a word that is no command, need everything.
"""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated, Any

import typer
from typer.main import get_command

from privtune import __version__
from privtune.cli._usage import hint
from privtune.errors import shorten
from privtune.prose import complain

# Typer carries its own copy of Click: the root of its errors is an ancestor of the one that it names.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
_INTERRUPTED = 130
"""Typer's exit code where Ctrl-C stopped a command: it swallows the KeyboardInterrupt itself."""

_GROUPS = {
    "account": "Compute ε, δ or the noise of an event for a target.",
    "budget": "Budgets and their charges.",
    "study": "Studies: create, plan, run, compare.",
    "model": "Released models: export them for MLflow.",
}
"""Groups of commands, each in the module of its name, with their help."""
_COMMANDS = ("strategies", "metrics", "tasks", "demo", "doctor", "ui", "worker", "audit", "predict")
_HOMES = {"audit": "audit", "predict": "model"}
"""The modules of commands outside groups; those that are not named lie in ``commands``."""


def mount(command: str | None = None, inner: str | None = None) -> typer.Typer:
    """Return the Typer application with one command, or with all of them if none has the name.

    Args:
        command: A command, or a group of them.
        inner: A command of that group: then the others of the group are left out, too.

    Returns:
        The application, which :func:`run` runs.
    """
    is_command = command in _GROUPS or command in _COMMANDS
    app = typer.Typer(
        name="privtune",
        no_args_is_help=True,
        # Its options stand before any command, and take long to read where there is one.
        add_completion=not is_command,
        pretty_exceptions_enable=False,
        # Boxes around help take longer to import than all the rest of it.
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for name, text in _GROUPS.items():
        if command == name or not is_command:
            module = importlib.import_module(f"privtune.cli.{name}")
            group = _reduce_group(module.app, inner) if is_command else module.app
            app.add_typer(group, name=name, help=text, no_args_is_help=True)
    for name in _COMMANDS:
        if command == name or not is_command:
            home = _HOMES.get(name, "commands")
            module = importlib.import_module(f"privtune.cli.{home}")
            app.command()(getattr(module, name))
    return app


def run(app: typer.Typer) -> None:
    """Run the application on the process's arguments, and print usage errors at a bounded length.

    A usage error repeats the argument that it is about, and is followed by a hint where there is one.

    Args:
        app: From :func:`mount`.

    Raises:
        SystemExit: Unless the exit code is 0.
        KeyboardInterrupt: Whoever sits there stopped it.
    """
    try:
        code = app(standalone_mode=False)
    except _USAGE_ERROR as error:
        suggestion = hint(error, _list_commands)
        if suggestion:
            full_stop = "" if error.message.endswith(".") else "."
            suggestion = f"{full_stop} {suggestion}"
        # It repeats an argument, however long that is.
        error.message = shorten(error.message) + suggestion
        lines = io.StringIO()
        error.show(lines)
        complain(lines.getvalue().rstrip("\n"))
        raise SystemExit(error.exit_code) from None
    except typer.Abort:
        sys.stderr.write("Aborted!\n")
        raise SystemExit(1) from None
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    if isinstance(code, int) and code != 0:
        raise SystemExit(code)


def _list_commands() -> list[str]:
    """Return every command as it is typed, such as ``study run``, with those of studies first.

    Where two groups have a command of one name, such as ``show``, the first is the one suggested.
    """
    top: Any = get_command(mount())
    paths = []
    for name, command in top.commands.items():
        inner_commands = getattr(command, "commands", {})
        if inner_commands:
            paths += [f"{name} {inner}" for inner in inner_commands]
        else:
            paths.append(name)
    return sorted(paths, key=lambda path: not path.startswith("study"))


def _reduce_group(group: typer.Typer, name: str | None) -> typer.Typer:
    """Return a group with one command left in it, so that Typer need not read the others' options.

    Args:
        group: A group of commands.
        name: The command's name; where the group has none of it, all of its commands stay, for help.
    """
    matches = []
    for command in group.registered_commands:
        # A command that was registered without a name has that of its function.
        command_name = command.name or getattr(command.callback, "__name__", None)
        if command_name == name:
            matches.append(command)
    if not matches:
        return group
    reduced_group = typer.Typer()
    reduced_group.registered_commands = matches
    return reduced_group


def _show_version(wants_version: bool) -> None:
    """Print the version and end, before Typer complains of a command that is missing."""
    if wants_version:
        typer.echo(__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Tune hyperparameters under differential privacy: one budget, every trial charged."""
