"""Tables in files as columns of Arrow's, some records at a time.

How a record is read hangs on that record alone: no type, width or quote of one decides how another is
read. What a file may look like (its encoding, delimiter, quotes) is decided in ``_csv``, what a cell may
look like (a number, a word for nothing) in ``number_of`` and ``MISSING``; nowhere else.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, dataset, types
from pyarrow import csv as arrow

from privtune.files import regular_file
from privtune.tasks._facts import TaskAbsentError, TaskDataError

ON_READ: ContextVar[Callable[[float], None] | None] = ContextVar("ON_READ", default=None)
"""Hears how much of a table has been read, as a share; None where nobody wants to know."""

Columns = Mapping[str, "pa.Array"]
"""Some records: by column an array of numbers, of booleans or of text."""

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_T = TypeVar("_T")

MISSING = ("", "na", "n/a", "nan", "nat", "null", "none")
UNREADABLE = "\0"  # stands for what cannot be read: no number, no date, no class
BATCH = 2**15  # records that are read at once
_BLOCK = 2**22  # bytes of a CSV file that are read at once
_QUOTED = re.compile(rb'(?:[^",]*|"(?:[^"]|"")*")(?:,(?:[^",]*|"(?:[^"]|"")*"))*')
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$"


@dataclass(frozen=True)
class Source:
    """A table that has been opened, but for its records."""

    columns: Sequence[str] | None
    words: frozenset[str]
    most: Callable[[], int]
    read: Callable[[Sequence[str]], Iterator[Columns]]

    def check(self, names: Sequence[str], place: str) -> None:
        """Refuse a table that lacks a column, or has two of a name, by its header alone."""
        if self.columns is None:
            return
        if missing := [name for name in names if name not in self.columns]:
            raise TaskDataError(f"{place} lacks the declared columns {', '.join(missing)}.")
        if twice := [name for name in names if list(self.columns).count(name) > 1]:
            raise TaskDataError(f"{place} has two columns called {', '.join(twice)}.")

    def batches(self, names: Sequence[str]) -> Iterator[Columns]:
        """Read columns, and tell who listens how much of the table has been read."""
        most = self.most()
        return heard(self.read(names), most, size=lambda batch: len(batch[names[0]]))


def heard(batches: Iterable[_T], most: int, *, size: Callable[[_T], int]) -> Iterator[_T]:
    """Pass batches on, and tell who listens how much of all they are."""
    listener, done = ON_READ.get(), 0
    for batch in batches:
        done += size(batch)
        if listener is not None:
            listener(min(done / max(most, 1), 1.0))
        yield batch
    if listener is not None and done < most:
        listener(1.0)  # a header and empty lines are no records


def open_table(path: Path) -> Source:
    """Open a table by its ending: ``.parquet``, ``.arrow``, ``.feather``, ``.jsonl``, else CSV."""
    check_file(path)
    try:
        if path.suffix in (".parquet", ".arrow", ".feather"):
            return _arrow(path)
        return _json_lines(path) if path.suffix in (".jsonl", ".ndjson") else _csv(path)
    except (OSError, ValueError, csv.Error) as error:
        raise TaskDataError(f"{path} cannot be read ({type(error).__name__}).") from None


def check_file(path: Path) -> None:
    """Check that a path names a regular file, before it is opened."""
    try:
        regular_file(path)
    except FileNotFoundError:
        raise TaskAbsentError(f"{path} is not there.") from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or type(error).__name__
        raise TaskDataError(f"{path} cannot be read ({said}).") from None


def _csv(path: Path) -> Source:
    """Open a CSV file of one record a line, so that no record can swallow the next ones."""

    def decoded(block: bytes) -> bytes:
        return block if block.isascii() else block.decode("utf-8", "replace").encode()

    with path.open("rb") as file:
        first = file.readline()  # of a file whose lines end in CR alone: all of it
        first = first[: first.find(b"\r", 0, len(first.rstrip())) + 1] or first
        header = _cells(decoded(first).removeprefix(b"\xef\xbb\xbf"))
        start = len(first)

    def blocks() -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(start)
            while block := file.read(_BLOCK):
                yield decoded(block + file.readline())

    def read(names: Sequence[str]) -> Iterator[Columns]:
        places = [header.index(name) for name in names]
        unclosed: list[bytes] = []
        ragged: list[bytes] = []

        def set_apart(row: arrow.InvalidRow) -> str:
            ragged.append(row.text.encode())
            return "skip"

        parse = arrow.ParseOptions(invalid_row_handler=set_apart)
        convert = arrow.ConvertOptions(
            include_columns=list(map(str, places)),
            column_types={str(place): pa.string() for place in places},
        )
        for block in blocks():
            if b'"' in block:  # a quote that stays open would swallow the lines after it
                lines = [(line, _closed(line)) for line in block.splitlines()]
                unclosed += [line for line, closed in lines if not closed]
                block = b"\n".join(line for line, closed in lines if closed)  # noqa: PLW2901
            if not block.strip():
                continue
            whole = arrow.ReadOptions(
                column_names=list(map(str, range(len(header)))),
                block_size=len(block) + 1,
                use_threads=False,
            )
            found = arrow.read_csv(pa.BufferReader(block), whole, parse, convert).combine_chunks()
            if len(found):
                yield {n: _whole(found[str(p)]) for n, p in zip(names, places, strict=True)}
        # Odd lines come last, by kind: in order of blocks, another person's lines would move them.
        odd = (line for line in (*unclosed, *ragged) if line.strip())
        yield from batched(names, (_line(line, places, len(header)) for line in odd))

    return Source(
        header,
        frozenset(),
        lambda: sum(b.count(b"\n") + b.count(b"\r") + 1 for b in blocks()),
        read,
    )


def _closed(line: bytes) -> bool:
    return b'"' not in line or _QUOTED.fullmatch(line) is not None


def _line(line: bytes, places: Sequence[int], width: int) -> list[Any]:
    """Return the cells of a line that Arrow does not take."""
    cells = _cells(line)
    if not 0 < len(cells) <= width:
        return [UNREADABLE] * len(places)
    return [cells[place] if place < len(cells) else None for place in places]


def csv_rows(path: Path) -> tuple[list[str], Iterator[list[str | None]]]:
    """Return the header of a CSV file, and the cells of each line in order; one is a record, as ever."""
    check_file(path)
    with path.open("rb") as file:
        header = _cells(file.readline().removeprefix(b"\xef\xbb\xbf"))

    def read() -> Iterator[list[str | None]]:
        with path.open("rb") as file:
            file.readline()
            for line in filter(bytes.strip, file):
                yield _line(line, range(len(header)), len(header))

    return header, read()


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode("utf-8", "replace").rstrip("\r\n")]), [])
    except csv.Error:
        return []


def _json_lines(path: Path) -> Source:
    """Open a file of one JSON object a line. A key that an object lacks is missing of that record."""

    def lines() -> Iterator[str]:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            yield from file

    def read(names: Sequence[str]) -> Iterator[Columns]:
        return batched(names, (_object(line, names) for line in lines() if line.strip()))

    # Not by Arrow: one object with another type in a key would decide about all of them.
    path.open().close()  # refuses what cannot be opened
    return Source(None, frozenset(), lambda: sum(1 for _ in lines()), read)


def _object(line: str, names: Sequence[str]) -> list[Any]:
    """Return what a line says of some columns; of a line that holds no object nothing can be read."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    return (
        [found.get(name) for name in names]
        if isinstance(found, dict)
        else [UNREADABLE] * len(names)
    )


def _arrow(path: Path) -> Source:
    """Open a Parquet or Arrow file, whose header declares the types."""
    known = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    found = dataset.dataset(path, format="parquet" if path.suffix == ".parquet" else "ipc")
    words = {f.name for f in found.schema if not any(is_number(f.type) for is_number in known)}

    def read(names: Sequence[str]) -> Iterator[Columns]:
        # Few batches are read ahead: what is read is held beside what models see of it.
        options = {"batch_size": BATCH, "batch_readahead": 2, "fragment_readahead": 1}
        for batch in found.to_batches(columns=list(names), **options):
            if len(batch):
                yield {name: _typed(batch.column(name)) for name in names}

    return Source(found.schema.names, frozenset(words), found.count_rows, read)


def _typed(column: pa.Array) -> pa.Array:
    """Return a column of a file as numbers, booleans or text."""
    if (
        types.is_integer(column.type)
        or types.is_floating(column.type)
        or types.is_boolean(column.type)
    ):
        return column
    try:
        text = column.cast("string")  # of decimals, too: two ids above 2^53 are one float
        text.validate(full=True)
    except pa.ArrowException:  # text that is not UTF-8, or cells that are lists
        binary = types.is_string(column.type) or types.is_large_string(column.type)
        cells = column.cast("binary").to_pylist() if binary else column.to_pylist()
        return column_of(
            [c.decode("utf-8", "replace") if isinstance(c, bytes) else c for c in cells]
        )
    return text


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks)


def batched(names: Sequence[str], records: Iterator[Sequence[Any]]) -> Iterator[Columns]:
    """Yield records of Python's as columns."""
    while part := list(itertools.islice(records, BATCH)):
        yield {name: column_of([cells[n] for cells in part]) for n, name in enumerate(names)}


def column_of(cells: Sequence[Any]) -> pa.Array:
    """Return cells of Python's as a column: of numbers, of booleans, else of text."""
    try:
        found = pa.array(cells)
        if (
            types.is_integer(found.type)
            or types.is_floating(found.type)
            or types.is_boolean(found.type)
        ):
            return found
    except (pa.ArrowException, ValueError, OverflowError):  # of several types, or too large
        pass
    return pa.array([None if cell is None else _text(cell) for cell in cells], pa.string())


def _text(cell: Any) -> str:
    """Return a cell as text: a whole number is the same in a column of others, and of text."""
    if isinstance(cell, dict | list):
        return UNREADABLE
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell).encode(errors="replace").decode()  # JSON may hold half of a character


def texts(column: pa.Array) -> pa.Array:
    """Return the cells of a column as text."""
    if types.is_floating(column.type) or types.is_boolean(column.type):
        return pa.array(
            [None if cell is None else _text(cell) for cell in column.to_pylist()], pa.string()
        )
    return column.cast("string")


def _folded(column: pa.Array) -> pa.Array:
    return compute.utf8_lower(compute.utf8_trim_whitespace(column))


def is_missing(column: pa.Array) -> Mask:
    """Return which cells hold nothing, or a word for it."""
    if types.is_string(column.type):
        word = compute.is_in(_folded(column), pa.array(MISSING))
        return np.asarray(compute.or_(compute.is_null(column), word), dtype=bool)
    return np.asarray(compute.is_null(column, nan_is_null=True), dtype=bool)


def numbers_of(column: pa.Array) -> tuple[Floats, Mask]:
    """Return the numbers in a column, NaN for none, and where a cell is neither number nor missing."""
    if not types.is_string(column.type):
        whole = column.cast("int8") if types.is_boolean(column.type) else column
        values = _numpy(whole.cast("float64", safe=False))
        return values, np.zeros(len(values), dtype=bool)
    cells = _folded(column)
    plain = compute.match_substring_regex(cells, _NUMBER)
    values = np.array(
        _numpy(compute.if_else(plain, cells, pa.scalar(None, pa.string())).cast("float64"))
    )
    other = np.flatnonzero(~_numpy(plain.fill_null(True)))
    if len(other):
        found, which = distinct(cells.take(pa.array(other)), number_of)
        values[other] = np.array([math.nan if v is None else v for v in found])[which]
    return values, np.isnan(values) & ~is_missing(column)


def number_of(cell: Any) -> float | None:
    """Return the number that a cell holds, None if it is none."""
    if isinstance(cell, str) and (said := cell.strip().lower()) in ("true", "false"):
        return float(said == "true")
    try:
        return None if isinstance(cell, str) and "_" in cell else float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def coded(column: pa.Array, values: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return which of the declared values each cell holds; -1 for another, or none."""
    place = {label_of(value): index for index, value in enumerate(values)}
    found, which = distinct(column, lambda cell: place.get(label_of(cell), -1))
    return np.array([*found, -1], dtype=np.int64)[which]


def label_of(value: Any) -> float | str:
    """Return what stands for a value, written as a number or a word, with or without blanks."""
    text = str(value).strip()
    if text.lower() in ("true", "false"):
        return text.lower()
    number = number_of(text)
    return text if number is None or math.isnan(number) else number


def distinct(
    column: pa.Array, function: Callable[[Any], _T]
) -> tuple[list[_T], npt.NDArray[np.int64]]:
    """Return a function of each different cell, and which of them each cell is; -1 for a null."""
    known = column.dictionary_encode()
    found = [function(cell) for cell in known.dictionary.to_pylist()]
    return found, np.asarray(known.indices.fill_null(-1), dtype=np.int64)


def _numpy(column: pa.Array) -> Any:
    return column.to_numpy(zero_copy_only=False)
