"""Tables in files: CSV and JSON (one record a line), Parquet and Arrow, opened by their header first."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

from privtune.files import regular_file
from privtune.tasks._task import TaskAbsentError, TaskDataError

if TYPE_CHECKING:
    import pyarrow as pa

ON_READ: ContextVar[Callable[[float], None] | None] = ContextVar("ON_READ", default=None)
"""Hears how much of a table has been read, as a share; None where nobody wants to know."""

_B = TypeVar("_B")

Batch = dict[str, Sequence[Any]]
"""Some records of a table: cells by column, a list, or an array of numbers with NaN for none."""

_UNREADABLE = "\0"  # stands for what cannot be read: no number, no date, no class
_BATCH = 2**15  # records that are read at once


class TableFile(Protocol):
    """A table that has been opened, but for its records."""

    @property
    def columns(self) -> Sequence[str] | None:
        """Names of the columns, in order; None where each record names its own."""
        ...

    @property
    def most(self) -> int:
        """How many records it has at most. Private, like they are."""
        ...

    def text_columns(self) -> set[str]:
        """Return the columns that hold no numbers, by the types that a header declares."""
        ...

    def batches(self, names: Sequence[str], *, exact: Collection[str] = ()) -> Iterator[Batch]:
        """Read columns, some records at a time: how a record is read hangs on that record alone.

        Args:
            names: The columns.
            exact: Those of them whose cells are wanted as they are, numbers too.
        """
        ...


def _records(batch: Any) -> int:
    return max(map(len, batch.values()), default=0)


def counted(
    batches: Iterator[_B], total: int, *, size: Callable[[_B], int] = _records
) -> Iterator[_B]:
    """Pass batches on, and tell who hears of it how much of the table they are."""
    heard, done = ON_READ.get(), 0
    for batch in batches:
        done += size(batch)
        if heard is not None:
            heard(min(done / max(total, 1), 1.0))
        yield batch
    if heard is not None and done < total:
        heard(1.0)  # a header and empty lines are no records


class _Csv:
    """A CSV file of one record a line, so that no record can swallow the next ones.

    A cell that a short line lacks is a missing value; of a line that is too long nothing can be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._lines() as lines:
            self.columns: list[str] = next((_cells(line) for line in lines), [])

    @property
    def most(self) -> int:
        """See ``TableFile``."""
        with self._lines() as lines:
            return sum(1 for _ in lines)

    def _lines(self) -> TextIO:
        return self._path.open(encoding="utf-8-sig", errors="replace")

    def text_columns(self) -> set[str]:
        """See ``TableFile``: a header of a CSV file declares no types."""
        return set()

    def batches(self, names: Sequence[str], *, exact: Collection[str] = ()) -> Iterator[Batch]:
        """See ``TableFile``."""
        places = [self.columns.index(name) for name in names]
        with self._lines() as lines:
            next(lines, None)
            found = (self._record(line, places) for line in lines if line.strip())
            yield from _batched(names, found)

    def _record(self, line: str, places: Sequence[int]) -> list[Any]:
        cells = _cells(line)
        if not 0 < len(cells) <= len(self.columns):
            return [_UNREADABLE] * len(places)
        return [cells[place] if place < len(cells) else None for place in places]


def _batched(names: Sequence[str], records: Iterator[list[Any]]) -> Iterator[Batch]:
    while part := list(itertools.islice(records, _BATCH)):
        yield {name: [cells[n] for cells in part] for n, name in enumerate(names)}


class _Arrow:
    """A Parquet or Arrow file, whose header declares the types."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.suffix == ".parquet":
            from pyarrow import parquet

            self._schema = parquet.read_schema(path)
        else:
            from pyarrow import ipc

            with ipc.open_file(path) as arrow:
                self._schema = arrow.schema
        self.columns: list[str] = list(self._schema.names)

    @property
    def most(self) -> int:
        """See ``TableFile``."""
        if self._path.suffix == ".parquet":
            from pyarrow import parquet

            return int(parquet.read_metadata(self._path).num_rows)
        import pyarrow as pa
        from pyarrow import ipc

        with pa.memory_map(str(self._path)) as source:
            arrow = ipc.open_file(source)
            return sum(arrow.get_batch(i).num_rows for i in range(arrow.num_record_batches))

    def text_columns(self) -> set[str]:
        """Return the columns whose type is no number."""
        from pyarrow import types

        known = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
        return {f.name for f in self._schema if not any(is_number(f.type) for is_number in known)}

    def batches(self, names: Sequence[str], *, exact: Collection[str] = ()) -> Iterator[Batch]:
        """See ``TableFile``."""
        for batch in self._batches(names):
            yield {
                name: _listed(batch.column(name)) if name in exact else _fast(batch.column(name))
                for name in names
            }

    def _batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if self._path.suffix == ".parquet":
            from pyarrow import parquet

            file = parquet.ParquetFile(self._path, pre_buffer=False)
            yield from file.iter_batches(batch_size=_BATCH, columns=list(names))
            return
        import pyarrow as pa
        from pyarrow import ipc

        with pa.memory_map(str(self._path)) as source:
            file = ipc.open_file(source)
            for number in range(file.num_record_batches):
                batch = file.get_batch(number).select(list(names))
                for start in range(0, batch.num_rows, _BATCH):
                    yield batch.slice(start, _BATCH)


class _JsonLines:
    """A file of one JSON object a line. A key that an object lacks is a missing value of that record."""

    columns = None

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._lines():  # refuses what cannot be opened
            pass

    def _lines(self) -> TextIO:
        return self._path.open(encoding="utf-8-sig", errors="replace")

    @property
    def most(self) -> int:
        """See ``TableFile``."""
        with self._lines() as lines:
            return sum(1 for _ in lines)

    def text_columns(self) -> set[str]:
        """See ``TableFile``."""
        return set()

    def batches(self, names: Sequence[str], *, exact: Collection[str] = ()) -> Iterator[Batch]:
        """See ``TableFile``."""
        with self._lines() as lines:
            yield from _batched(names, (_object(line, names) for line in lines if line.strip()))


def _object(line: str, names: Sequence[str]) -> list[Any]:
    """Return what a line says of some columns; of a line that holds no object nothing can be read."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return [_UNREADABLE] * len(names)
    return [_encodable(found.get(name)) for name in names]


def _encodable(cell: Any) -> Any:
    """Return a cell that can be written: JSON may hold half of a character, or a list in its place."""
    if isinstance(cell, dict | list):
        return _UNREADABLE
    return cell.encode(errors="replace").decode() if isinstance(cell, str) else cell


def _fast(cells: pa.Array) -> Sequence[Any]:
    """Return numbers as an array, where their type says that they are such; else a list."""
    from pyarrow import types

    if types.is_floating(cells.type) or types.is_integer(cells.type):
        found: Sequence[Any] = cells.cast("float64", safe=False).to_numpy(zero_copy_only=False)
        return found
    return _listed(cells)


def _listed(cells: pa.Array) -> list[Any]:
    """Return cells as Python has them; one that it has not, a date of the year 20000, is unreadable."""
    try:
        listed: list[Any] = cells.to_pylist()
    except (ValueError, ArithmeticError):
        if len(cells) == 1:
            return [_UNREADABLE]
        half = len(cells) // 2
        return [*_listed(cells[:half]), *_listed(cells[half:])]
    return listed


def open_table(path: Path) -> TableFile:
    """Open a table by its ending: ``.parquet``, ``.arrow``, ``.feather``, ``.jsonl``, else CSV.

    Raises:
        TaskAbsentError: If it is not there.
        TaskDataError: If it cannot be read; without any value of a record.
    """
    check_file(path)
    try:
        if path.suffix in (".parquet", ".arrow", ".feather"):
            return _Arrow(path)
        return _JsonLines(path) if path.suffix in (".jsonl", ".ndjson") else _Csv(path)
    except ModuleNotFoundError:
        raise TaskDataError(
            f"{path} needs pyarrow to be read: pip install 'privtune[tables]', or save it as CSV."
        ) from None
    except (OSError, ValueError, csv.Error) as error:
        raise TaskDataError(f"{path} cannot be read ({type(error).__name__}).") from None


def check_file(path: Path) -> None:
    """Check that a path names a regular file, before it is opened.

    Raises:
        TaskAbsentError: If there is none.
        TaskDataError: If it is something else: a folder, a pipe, a device.
    """
    try:
        regular_file(path)
    except FileNotFoundError:
        raise TaskAbsentError(f"{path} is not there.") from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or type(error).__name__
        raise TaskDataError(f"{path} cannot be read ({said}).") from None


def check_columns(file: TableFile, names: Sequence[str], place: str) -> None:
    """Refuse a table that lacks a column, or has two of a name: by its header alone, where it has one.

    Raises:
        TaskDataError: Naming them, and no other: where a header is missing, what stands there is a record.
    """
    if file.columns is None:
        return
    if missing := [name for name in names if name not in file.columns]:
        raise TaskDataError(f"{place} lacks the declared columns {', '.join(missing)}.")
    if twice := [name for name in names if list(file.columns).count(name) > 1]:
        raise TaskDataError(f"{place} has two columns called {', '.join(twice)}.")


def header_of(path: Path, names: Sequence[str]) -> None:
    """Check a file's header for its columns, without a record.

    Raises:
        TaskAbsentError: If there is no file.
        TaskDataError: If it cannot be read, or lacks a column.
    """
    check_columns(open_table(path), names, str(path))


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:
        return []
