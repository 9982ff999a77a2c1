"""Predictions of a released model for the rows of a file.

Rows pass in parts of some thousand lines: a file may be larger than the memory, and only a file of arrays is
read at once.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privtune.errors import PrivTuneError

if TYPE_CHECKING:
    from privtune.tables.raw_rows import Answers, Rows, ServedModel

_PART_LINES = 4096
"""Lines of a file that the model is asked about at once."""

_NUMBERS = "biuf"
"""Kinds of numpy's types that hold numbers: booleans, whole numbers, floats."""

Cells = Sequence[Any]
Part = tuple[list[Cells], Any]
"""Some rows at a time: their cells by column, as they are printed, and what the model is asked."""


def read_parts(file: Path, rows: Rows, task: Any) -> tuple[list[str], Iterator[Part]]:
    """Return the header of a file and its rows in parts, read as the file and the model require.

    Args:
        file: A CSV file, or an array of numpy.
        rows: What the model takes.
        task: As in the study's spec, where it says how a CSV file is written.

    Returns:
        The titles of the columns, none of an array; and the rows in parts, at least one, which may be empty.

    Raises:
        PrivTuneError: If the file cannot be read, or holds what the model does not take.
    """
    if file.suffix == ".npy":
        return [], _read_array(file, rows)
    if rows.names:
        return _read_cells(file, rows, task)
    return _read_numbers(file, rows)


def _read_cells(file: Path, rows: Rows, task: Any) -> tuple[list[str], Iterator[Part]]:
    """Return the header of a CSV file with named columns, and its rows in parts.

    How it is written, its separator and encoding, is what the task's spec says of the training data.
    """
    from privtune.tables.raw_rows import ArrayRows
    from privtune.tables.reader import csv_rows
    from privtune.tasks.described import read_form

    while isinstance(task, Mapping) and "task" in task:
        task = task["task"]  # of a fine-tuning
    form = read_form(task if isinstance(task, Mapping) else {})
    header, lines = csv_rows(file, rows.names, form)
    duplicates: list[str] = []
    for name in rows.names:
        if header.count(name) > 1:
            duplicates.append(name)
    if duplicates:
        raise PrivTuneError(f"{file} has two columns called {', '.join(duplicates)}.")
    takes_numbers = isinstance(rows, ArrayRows)

    def parts() -> Iterator[Part]:
        for part in _split_lines(lines):
            cells = _columns_of(part, len(header))
            raw = {}
            for name, column in zip(header, cells, strict=True):
                if takes_numbers:
                    raw[name] = _numbers_of(column)
                else:
                    raw[name] = list(column)
            yield cells, raw

    return header, parts()


def _columns_of(lines: Sequence[Sequence[str | None]], width: int) -> list[Cells]:
    """Return the cells of lines column by column; empty columns if there are no lines."""
    if not lines:
        return [()] * width
    return list(zip(*lines, strict=True))


def _numbers_of(column: Sequence[str | None]) -> list[float | None]:
    """Return the numbers in a column's cells, None for each cell that holds none."""
    return [_number_of(cell) for cell in column]


def _number_of(cell: str | None) -> float | None:
    """Return the number in a cell, or None if it holds none."""
    if cell is None:
        return None
    try:
        return float(cell)
    except ValueError:
        return None


def _read_numbers(file: Path, rows: Rows) -> tuple[list[str], Iterator[Part]]:
    """Return the header of a CSV file that holds an array ``[n, width]``, and its rows in parts.

    A first line is a header where it holds a word, or counts the columns from 0 as pandas does. The whole
    file is checked before anything is answered: a line of another width makes the array another one.
    """
    import numpy as np

    from privtune.tables.reader import check_file

    width = _width_of(rows)
    check_file(file)
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        table = [line for line in csv.reader(text) if any(line)]
    for number, line in enumerate(table, start=1):
        if len(line) != width:
            raise PrivTuneError(
                f"{file}: row {number} holds {len(line)} cells, and the model takes {rows.takes}."
            )
    header, lines = _split_header(table)
    first_row = len(table) - len(lines) + 1
    numbers = [_numbers_of(line) for line in lines]
    values = np.array(numbers, dtype=np.float64)  # None is NaN
    values = values.reshape(len(lines), width)
    _check_values(file, values, rows, first_row)
    columns = _columns_of(lines, len(header))

    def parts() -> Iterator[Part]:
        for place in _slices(len(lines)):
            cells = [column[place] for column in columns]
            yield cells, values[place]

    return header, parts()


def _width_of(rows: Rows) -> int:
    """Return the width of a CSV row for a model of one vector a record; refuse other models.

    Raises:
        PrivTuneError: If the model takes several arrays, or one of more dimensions: a line cannot hold it.
    """
    from privtune.tables.raw_rows import ArrayRows

    shapes: list[Sequence[int]] = []
    if isinstance(rows, ArrayRows):
        shapes = list(rows.parts.values())
    if len(shapes) != 1:
        remedy = "ask release.predict in Python, with arrays by name"
        raise PrivTuneError(f"The model takes {rows.takes}: {remedy}.")
    (shape,) = shapes
    if len(shape) != 1:
        raise PrivTuneError(f"The model takes {rows.takes}: save them as a .npy file.")
    return shape[0]


def _split_header(table: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return a table's header and its other lines; without a header, the columns' positions stand for it."""
    first = table[0] if table else []
    places = [str(place) for place in range(len(first))]
    if first == places or None in _numbers_of(first):
        return first, table[1:]
    return places, table


def _read_array(file: Path, rows: Rows) -> Iterator[Part]:
    """Return the records of a .npy file, an array ``[n, ...]``, in parts.

    A file that holds Python objects is refused: to read them would run code that the file brings.
    """
    import numpy as np

    from privtune.tables.raw_rows import ArrayRows, PictureRows
    from privtune.tables.reader import check_file

    takes_array = isinstance(rows, PictureRows)
    if isinstance(rows, ArrayRows):
        takes_array = not rows.columns and len(rows.parts) == 1
    if not takes_array:
        raise PrivTuneError(f"The model takes {rows.takes}, which no .npy file holds.")
    check_file(file)
    try:
        values = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise PrivTuneError(f"{file} cannot be read as an array of numbers: {error}.") from None
    is_array = isinstance(values, np.ndarray)
    if not is_array or values.dtype.kind not in _NUMBERS or values.ndim == 0:
        raise PrivTuneError(f"{file} holds no array of numbers; the model takes {rows.takes}.")
    _check_values(file, values, rows, first_row=1)

    def parts() -> Iterator[Part]:
        for place in _slices(len(values)):
            yield [], values[place]

    return parts()


def _slices(size: int) -> list[slice]:
    """Return slices that divide ``size`` rows into parts; one empty slice if there are no rows."""
    starts = range(0, max(size, 1), _PART_LINES)
    return [slice(start, start + _PART_LINES) for start in starts]


def _check_values(file: Path, values: Any, rows: Rows, first_row: int) -> None:
    """Refuse an array that the model does not take, or with NaN or infinite values.

    Args:
        file: Where they are from.
        values: The rows ``[n, ...]``.
        rows: What the model takes.
        first_row: The number of the first row in the file, for messages.
    """
    import numpy as np

    rows.read(values)
    axes_of_record = tuple(range(1, values.ndim))
    is_unusable = ~np.isfinite(values).all(axis=axes_of_record)
    if is_unusable.any():
        row = int(is_unusable.argmax()) + first_row
        raise PrivTuneError(f"{file}: row {row} holds what is no finite number.")


def _split_lines(lines: Iterator[list[str | None]]) -> Iterator[list[list[str | None]]]:
    """Yield lists of many lines; one empty list if there are no lines, so that columns are checked."""
    part = list(itertools.islice(lines, _PART_LINES))
    yield part
    while part:
        part = list(itertools.islice(lines, _PART_LINES))
        if part:
            yield part


def predict_parts(
    parts: Iterator[Part], model: ServedModel
) -> Iterator[tuple[list[Cells], Answers]]:
    """Yield each part's cells with the model's answers for its rows, one part in memory at a time."""
    for cells, raw in parts:
        inputs, usable = model.rows.read(raw)
        yield cells, model.answers(inputs, usable)
