"""Options that the commands share, and functions that print JSON, prose and tables.

Every module of the command line imports this one, and ``privtune --help`` with it. What takes long to import
(rich, the ledger, torch) is therefore imported by the function that needs it.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privtune.errors import InvalidInputError
from privtune.files import read_bounded, write_whole
from privtune.names import first_names, usual_storage
from privtune.numbers import ceil_digits
from privtune.prose import fitted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from privtune.accounting.costs import Sensitivity
    from privtune.study import StudySpec


def _read_storage(context: typer.Context, url: str) -> str:
    """Return a command's storage from its option, or the usual one where no option was typed.

    Args:
        context: The command's call, which knows whether the option was typed.
        url: What ``--storage`` or ``PRIVTUNE_STORAGE`` says, or the default.
    """
    source = context.get_parameter_source("storage")
    if source is None or source.name == "DEFAULT":
        storage = usual_storage()
    else:
        storage = usual_storage(url)
    return str(storage)


Storage = Annotated[
    str,
    typer.Option(
        "--storage",
        envvar="PRIVTUNE_STORAGE",
        callback=_read_storage,
        help="Database of studies and budgets: its URL, or the path of a SQLite file (p.db).",
    ),
]
Wide = Annotated[
    bool, typer.Option("--wide", help="Print every column, however narrow the terminal is.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


@cache
def console() -> Console:
    """Return rich's console, which measures the terminal once and prints all tables.

    It is made at the first table: to print help, rich need not be imported.
    """
    from rich.console import Console

    return Console()


@contextmanager
def patience(what: str, *, after: float = 2.0) -> Iterator[None]:
    """Print on stderr what a command is doing if the ``with`` block takes longer than some seconds.

    Whoever waits in front of a silent terminal stops the command. What is quick says nothing.

    Args:
        what: What takes long, without a full stop.
        after: Seconds until it is said.
    """
    timer = threading.Timer(after, say, (f"{what} ...",), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_MOST_NAMES = 10
"""The most arms that a line names."""


@contextmanager
def planning(spec: StudySpec) -> Iterator[None]:
    """Print on stderr that a task's data is missing, and that planning in the ``with`` block takes long.

    A plan needs no data, so its absence is no error: it is said now, since ``study run`` would stop at it.
    """
    absence = "" if spec.task is None else spec.load_task().check_header()
    if absence:
        say(absence, err=True)
    arms = first_names([arm.name for arm in spec.arms], _MOST_NAMES)
    with patience(f"Planning {arms}: computing the noise for the target ε"):
        yield


def declare_dataset(spec: StudySpec, name: str | None) -> StudySpec:
    """Return a study's spec with the name of its budget's dataset set.

    Args:
        spec: The spec as it was read; it is checked anew with the name in it.
        name: The dataset that the budget protects. None leaves the spec as it is.
    """
    if name is None:
        return spec
    document = spec.model_dump(mode="json")
    budget = {**document["budget"], "dataset": name}
    return type(spec).parse({**document, "budget": budget})


def program() -> str:
    """Return the words that start this program: its name, its path, or ``python -m privtune``.

    The commands that are printed are there to be copied. In a virtual environment that is not active,
    ``privtune`` is on no path, and a copied command would not be found.
    """
    if shutil.which("privtune") is not None:
        return "privtune"
    python = Path(sys.executable)
    script = python.with_name("privtune")
    if script.exists():
        return _quote_path(script)
    python_on_path = shutil.which("python")
    if python_on_path is not None and Path(python_on_path).samefile(python):
        return "python -m privtune"
    return f"{_quote_path(python)} -m privtune"


def _quote_path(file: Path) -> str:
    """Return a path quoted for a shell, relative to the working folder for a file in that folder."""
    try:
        return shlex.quote(str(file.relative_to(Path.cwd())))
    except ValueError:
        return shlex.quote(str(file))


def emit_json(document: Any) -> None:
    """Print one JSON document to standard output.

    Raises:
        ValueError: If a number in it is infinite or NaN, which JSON has no notation for: other programs
            could not read the document. Commands pass such numbers as None or as text.
    """
    text = json.dumps(document, indent=2, allow_nan=False)
    sys.stdout.write(f"{text}\n")


def emit(document: Any, *lines: str, as_json: bool) -> None:
    """Print what a command did: as one JSON document, or as lines for people.

    Args:
        document: The outcome, JSON-ready.
        lines: The same outcome in sentences.
        as_json: Whether the document is printed, and the sentences are not.
    """
    if as_json:
        emit_json(document)
        return
    for line in lines:
        say(line)


def say(
    text: str, *, bold: bool = False, loud: bool = False, err: bool = False, as_is: bool = False
) -> None:
    """Print prose, broken at words on a terminal, in bold or in red where asked.

    Args:
        text: The lines.
        bold: Whether they stand out.
        loud: Whether they must not be overlooked.
        err: Whether they go to standard error.
        as_is: Whether they are no prose, and stay as long as they are.
    """
    stream = sys.stderr if err else sys.stdout
    lines = text if as_is else fitted(text, stream)
    color = "red" if loud else None
    typer.secho(lines, err=err, fg=color, bold=bold or loud)


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    numeric: Sequence[str] = (),
    keep_lines: bool = False,
    wide: bool = False,
    spare: Sequence[str] = (),
    prose: str | None = None,
) -> list[str]:
    """Print a table, and return the columns that the terminal was too narrow for.

    Nothing in a cell is markup. No word is broken: a table whose words need more room is wider than the
    terminal.

    Args:
        columns: The titles of its columns; none where it has one without titles.
        rows: Its cells.
        title: The title of the table.
        numeric: Columns whose numbers stand on the right.
        keep_lines: Break no line: where a terminal is too narrow for rows, print a block for each.
        wide: Break no line: the table is as wide as its rows, whatever the terminal is.
        spare: Columns that are left out of a table that is too wide, the first one first.
        prose: The column of sentences, whose lines may be broken at words where others may not.
    """
    from rich.measure import Measurement

    cells = [list(row) for row in rows]
    # A table's natural width is measured without the terminal's.
    unlimited = console().options.update(max_width=10_000)
    for count in range(len(spare) + 1):
        omitted = list(spare[:count])
        places = [place for place, column in enumerate(columns) if column not in omitted]
        titles = [columns[place] for place in places]
        table_cells = [[row[place] for place in places] for row in cells]
        table = _make_table(
            titles,
            table_cells,
            title=title,
            numeric=numeric,
            keep_lines=keep_lines,
            wide=wide,
            prose=prose,
        )
        measure = Measurement.get(console(), unlimited, table)
        width = measure.maximum
        if prose is not None:
            width = measure.minimum
        if not keep_lines or width <= console().width:
            console().print(table, crop=False)
            return omitted
    for name, *values in cells:
        facts = zip(columns[1:], values, strict=True)
        show_facts(name, facts, keep_lines=True)
    return []


def say_left_out(columns: Sequence[str]) -> None:
    """Say which columns the terminal was too narrow for, if any, and how to see them."""
    if not columns:
        return
    from privtune.training.mechanism.estimates import joined

    say(f"Left out of this table: {joined(columns)}. --wide shows every column.")


def _make_table(
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    *,
    title: str,
    numeric: Sequence[str],
    keep_lines: bool,
    wide: bool,
    prose: str | None,
) -> Table:
    """Return a table as rich prints it, from titles and cells of :func:`show_table`.

    Titles and cells become `Text`, in which rich reads no markup: a value's brackets are printed as they are.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    has_titles = any(columns)
    # Without vertical lines a comparison fits a terminal of 80 columns.
    lines_of_box = box.SIMPLE_HEAD if keep_lines else box.HEAVY_HEAD
    table = Table(
        title=Text(title) if title else None,
        show_header=has_titles,
        box=lines_of_box if has_titles else None,
        pad_edge=not keep_lines,
    )
    for place, column in enumerate(columns):
        values = [row[place] for row in cells]
        head = _break_title(column, values) if keep_lines else column
        justify: Any = "right" if column in numeric else "left"
        is_whole = keep_lines and column != prose
        least = None if is_whole else _least_width([head, *values], wide=wide)
        table.add_column(head, justify=justify, no_wrap=is_whole, overflow="fold", min_width=least)
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _break_title(title: str, cells: Sequence[str]) -> str:
    """Return a column's title, broken at words to the width of its widest cell (at least 9 columns)."""
    widest = max(map(len, cells), default=0)
    return fill(title, max(widest, 9), break_long_words=False)


def _least_width(lines: Sequence[str], *, wide: bool) -> int:
    """Return the width, in terminal columns, of the longest line or, unless ``wide``, of the longest word.

    Args:
        lines: The title of a table's column and its cells.
        wide: Whether lines stay whole; else words do.
    """
    from rich.cells import cell_len

    parts = list(lines)
    if not wide:
        parts = [word for line in lines for word in line.split()]
    return max(map(cell_len, parts), default=0)


def show_facts(title: str, facts: Iterable[tuple[str, str]], *, keep_lines: bool = False) -> None:
    """Print labelled texts below a title, one a line, without those whose text is empty.

    Args:
        title: The title.
        facts: Names, and what is said of each.
        keep_lines: Leave lines as long as they are, on a terminal, too.
    """
    facts_with_words = [(name, value) for name, value in facts if value]
    widest = max((len(name) for name, _ in facts_with_words), default=0)
    if title:
        say(title, bold=True)
    for name, value in facts_with_words:
        label = f"  {name:<{widest}}  "
        line = f"{label}{value}"
        if not keep_lines:
            line = fitted(line, hang=len(label))
        # Styled after it was broken: the codes of a colour would count as its width.
        rest = line[len(label) :]
        typer.echo(typer.style(label, dim=True) + rest)
    typer.echo()


def show_changes(sensitivity: Sensitivity) -> None:
    """Print a table of changes to an event, each with the ε after it and the difference."""
    rows = []
    for change in sensitivity.changes:
        difference = f"{change.difference:+.4f}".replace("+inf", "∞")
        rows.append((change.text, show_cost(change.epsilon), difference))
    show_table(("change", "epsilon", "difference"), rows)


def show_cost(value: float) -> str:
    """Return a cost, such as an ε, as text in six digits, rounded up."""
    if not math.isfinite(value):
        return "∞"
    return f"{ceil_digits(value, 6):.6g}"


def read_bytes(path: Path, *, remedy: str = "") -> bytes:
    """Return the bytes of a file that the user named, and refuse a file above a size limit.

    Args:
        path: The file.
        remedy: What else to do where there is none, as the end of the message.

    Raises:
        InvalidInputError: If it cannot be read.
    """
    try:
        return read_bounded(path)
    except OSError as error:
        allowed = f"cannot be read ({error.strerror})"
        raise InvalidInputError("file", str(path), allowed, remedy) from None


def read_json(path: Path, *, remedy: str = "") -> dict[str, Any]:
    """Return the JSON object that a file holds, and refuse an object with a duplicate name.

    Args:
        path: The file.
        remedy: What else to do where there is none, as the end of the message.

    Raises:
        InvalidInputError: If it cannot be read, or holds anything but one JSON object.
    """
    content = read_bytes(path, remedy=remedy)
    try:
        value = json.loads(content.decode(), object_pairs_hook=_check_names)
    except ValueError as error:
        raise InvalidInputError("file", str(path), f"is no readable JSON ({error})") from None
    except RecursionError:
        raise InvalidInputError("file", str(path), "is nested too deeply") from None
    if not isinstance(value, dict):
        raise InvalidInputError("file", str(path), "must hold one JSON object")
    return value


def _check_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict, and refuse a duplicate name."""
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return document


def write_page(path: Path, page: str | bytes) -> None:
    """Write a self-contained page, or a picture, and say where it is and who may read it.

    Args:
        path: The file, which is replaced as a whole.
        page: HTML as text, or the bytes of a picture.
    """
    write_whole(path, page)
    opens = ", which opens in any browser, also offline" if isinstance(page, str) else ""
    say(f"Wrote {path}{opens}.\n{handing_on(path)}")


def handing_on(*paths: Path) -> str:
    """Return a sentence that only the user can read some files, with the command that shares them.

    Every file is written for its owner alone, as a sealed score may stand in one; what is released is shared
    by a command that somebody types.
    """
    command = shlex.join(["chmod", "a+r", *map(str, paths)])
    return f"Only you can read this. To share it, run: {command}"
