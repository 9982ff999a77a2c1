"""What the commands share: options, JSON, tables."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
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

    from privtune.accounting.costs import Sensitivity
    from privtune.study import StudySpec

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
        help="Database of studies and budgets: its URL, or the path of a SQLite file (p.db).",
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
    timer = threading.Timer(after, say, (f"{what} ...",), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def planning(spec: StudySpec) -> Iterator[None]:
    """Say on stderr what planning does if it takes long, and that a task's data is not here."""
    if spec.task is not None and (absent := spec.load_task().look()):
        typer.echo(absent, err=True)
    arms = ", ".join(arm.name for arm in spec.arms)
    with patience(f"Planning {arms}: looking for the noise that meets the target ε"):
        yield


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


def tell(document: Any, *lines: str, as_json: bool) -> None:
    """Print what a command did: as one JSON document, or as lines for people."""
    if as_json:
        emit_json(document)
        return
    for line in lines:
        say(line)


def say(text: str, *, bold: bool = False, loud: bool = False, err: bool = False) -> None:
    """Print a line, as long as it is; what must not be overlooked stands in red."""
    typer.secho(text, err=err, fg="red" if loud else None, bold=bold or loud)


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    numeric: Sequence[str] = (),
    whole: bool = False,
) -> None:
    """Print a table; in its cells nothing is markup.

    Args:
        columns: The titles of its columns; none where it has one without titles.
        rows: Its cells.
        title: The title of the table.
        numeric: Columns whose numbers stand on the right.
        whole: Break no word: where a terminal is too narrow for rows, print a block for each.
    """
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    named = any(columns)
    table = Table(
        title=Text(title) if title else None,
        show_header=named,
        # Without vertical lines a comparison fits a terminal of 80 columns.
        box=(box.SIMPLE_HEAD if whole else box.HEAVY_HEAD) if named else None,
        pad_edge=not whole,
    )
    for column in columns:
        head = column.replace(" ", "\n") if whole else column
        justify: Any = "right" if column in numeric else "left"
        table.add_column(head, justify=justify, no_wrap=whole, overflow="fold")
    cells = [list(row) for row in rows]
    for row in cells:
        table.add_row(*map(Text, row))
    free = console().options.update(max_width=10_000)
    if whole and Measurement.get(console(), free, table).maximum > console().width:
        for name, *rest in cells:
            show_facts(name, zip(columns[1:], rest, strict=True), whole=True)
    else:
        console().print(table)


def show_facts(title: str, facts: Iterable[tuple[str, str]], *, whole: bool = False) -> None:
    """Print names and what is said of each, below a title; facts without words are left out."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=whole, overflow="ignore" if whole else "fold")
    for name, value in facts:
        if value:
            table.add_row(Text(name), Text(value))
    if title:
        say(title, bold=True)
    console().print(Padding(table, (0, 0, 1, 2)), soft_wrap=whole)


def show_changes(found: Sensitivity) -> None:
    """Print what changes of an event would cost or save; those that save most first."""
    rows = [
        (change.text, show_cost(change.epsilon), f"{change.difference:+.4f}".replace("+inf", "∞"))
        for change in found.changes
    ]
    show_table(("change", "epsilon", "difference"), rows)


def show_cost(value: float) -> str:
    """Return a cost in six digits, rounded up."""
    return f"{ceil_digits(value, 6):.6g}" if math.isfinite(value) else "∞"


def read_bytes(path: Path) -> bytes:
    """Read a file that the user named."""
    try:
        return read_bounded(path)
    except OSError as error:
        raise InvalidInputError("file", str(path), f"cannot be read ({error.strerror})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object, each name in it once."""
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


def write_page(path: Path, page: str | bytes) -> None:
    """Write a self-contained page, or a picture."""
    from privtune.ledger.page import write_file

    write_file(path, page)
    opens = ": it opens in any browser, without a network" if isinstance(page, str) else ""
    say(f"Wrote {path}{opens}.")
