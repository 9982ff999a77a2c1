"""What the commands share: options, JSON, tables."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.errors import InvalidInputError
from privtune.files import read_bounded
from privtune.numbers import ceil_digits

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from privtune.accounting.costs import Sensitivity

DEFAULT_STORAGE = "sqlite:///privtune.db"


def _from_file(given: str) -> str:
    """Return what the file says that ``PRIVTUNE_STORAGE_FILE`` names, where nothing else was said."""
    if given != DEFAULT_STORAGE or "PRIVTUNE_STORAGE_FILE" not in os.environ:
        return given
    from privtune.study.workers import storage_here

    return storage_here()


Storage = Annotated[
    str,
    typer.Option(
        "--storage",
        envvar="PRIVTUNE_STORAGE",
        callback=_from_file,
        help="URL of the database of studies and budgets.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@cache
def console() -> Console:
    """Return what everything is printed with; help needs none of it."""
    from rich.console import Console

    return Console()


@contextmanager
def patience(what: str, *, after: float = 2.0) -> Iterator[None]:
    """Say on stderr what a command is doing, if it is still at it after some seconds."""

    def say() -> None:
        typer.echo(f"{what} ...", err=True)

    timer = threading.Timer(after, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def program() -> str:
    """Return how the reader can call this program: by name, or by path if it is not on PATH."""
    if shutil.which("privtune") is not None:
        return "privtune"
    script = Path(sys.executable).with_name("privtune")
    try:
        return str(script.relative_to(Path.cwd()))
    except ValueError:
        return str(script)


def emit_json(document: Any) -> None:
    """Print one JSON document to standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def read_bytes(path: Path) -> bytes:
    """Read a file that the user named."""
    try:
        return read_bounded(path)
    except OSError as error:
        raise InvalidInputError("file", str(path), f"cannot be read ({error.strerror})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object, each name in it once."""
    from privtune.errors import InvalidInputError

    content = read_bytes(path)
    try:
        value = json.loads(content.decode(), object_pairs_hook=_once)
    except ValueError as error:
        raise InvalidInputError("file", str(path), f"is no readable JSON ({error})") from None
    except RecursionError:
        raise InvalidInputError("file", str(path), "is nested too deeply") from None
    if not isinstance(value, dict):
        raise InvalidInputError("file", str(path), "must hold one JSON object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that stands twice: programs differ in which of the two values they read."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def write_page(path: Path, page: str) -> None:
    """Write a self-contained page."""
    from privtune.ledger import write_file

    write_file(path, page)
    console().print(f"Wrote {path}: it opens in any browser, without a network.", soft_wrap=True)


def changes_table(found: Sensitivity) -> Table:
    """Return what changes of an event would cost or save; those that save most first."""
    from rich.table import Table

    table = Table("change", "epsilon", "difference")
    for change in found.changes:
        numbers = (f"{ceil_digits(change.epsilon, 6):.6g}", f"{change.difference:+.4f}")
        table.add_row(change.text, *("∞" if "inf" in number else number for number in numbers))
    return table
