"""Tables in files: CSV and JSON (one record a line), Parquet and Arrow, opened by their header first."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

from privtune.tasks._cells import MISSING, number_of
from privtune.tasks._task import TaskAbsentError, TaskDataError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ON_READ",
    "Batch",
    "TableFile",
    "check_columns",
    "counted",
    "header_of",
    "open_table",
    "text_columns",
]

ON_READ: ContextVar[Callable[[float], None] | None] = ContextVar("ON_READ", default=None)
"""Hears how much of a table has been read, as a share; None where nobody wants to know."""

_B = TypeVar("_B")

Batch = dict[str, Sequence[Any]]
"""Some records of a table: cells by column, a list, or an array of numbers with NaN for none."""

_LOOKED_AT = 100  # records that a CSV file's types are inferred from
_NAMING = 1000  # objects that name the columns of a file of JSON lines: no record does so alone
_UNREADABLE = "\0"  # stands for what cannot be read: no number, no date, no class
_BATCH = 2**15  # records that are read at once


class TableFile(Protocol):
    """A table that has been opened, but for its records."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns, in order."""
        ...

    @property
    def most(self) -> int:
        """How many records it has at most. Private, like they are."""
        ...

    def text_columns(self) -> set[str]:
        """Return the columns that hold no numbers."""
        ...

    def batches(self, names: Sequence[str], *, exact: Collection[str] = ()) -> Iterator[Batch]:
        """Read columns, some records at a time.

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
    """A CSV file of one record a line, so that no record can swallow the next ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.columns = self._open_columns()

    def _open_columns(self) -> list[str]:
        with self._lines() as lines:
            return next((_cells(line) for line in lines), [])

    @property
    def most(self) -> int:
        """See ``TableFile``."""
        with self._lines() as lines:
            return sum(1 for _ in lines)

    def _lines(self) -> TextIO:
        return self._path.open(encoding="utf-8-sig", errors="replace")

    def _records(self) -> Iterator[list[Any]]:
        with self._lines() as lines:
            next(lines, None)
            yield from (_cells(line) for line in lines if line.strip())

    def text_columns(self) -> set[str]:
        """Return the columns of whose first cells none is a number, though one is there."""
        first = itertools.islice(self._records(), _LOOKED_AT)
        return text_columns(self.columns, first)

    def batches(self, names: Sequence[str], *, exact: Collection[str] = ()) -> Iterator[Batch]:
        """See ``TableFile``; cells are unreadable in a line with another number of them."""
        places = [self.columns.index(name) for name in names]
        found = self._records()
        while records := list(itertools.islice(found, _BATCH)):
            whole = [len(cells) == len(self.columns) for cells in records]
            yield {
                name: [c[place] if w else _UNREADABLE for c, w in zip(records, whole, strict=True)]
                for name, place in zip(names, places, strict=True)
            }


def text_columns(columns: Sequence[str], records: Iterator[Sequence[Any]]) -> set[str]:
    """Return the columns of whose cells none is a number, though one is there."""
    seen: set[str] = set()
    numeric: set[str] = set()
    for cells in records:
        for name, cell in zip(columns, cells, strict=False):
            if cell is not None and str(cell).strip().lower() not in MISSING:
                seen.add(name)
                if number_of(cell) is not None:
                    numeric.add(name)
    return seen - numeric


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
                name: batch.column(name).to_pylist() if name in exact else _fast(batch.column(name))
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


class _JsonLines(_Csv):
    """A file of one JSON object a line. Its first ones together name the columns."""

    def _open_columns(self) -> list[str]:
        with self._lines() as lines:
            first = itertools.islice(filter(str.strip, lines), _NAMING)
            return list(dict.fromkeys(name for line in first for name in self._object(line)))

    @staticmethod
    def _object(line: str) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _records(self) -> Iterator[list[Any]]:
        with self._lines() as lines:
            for line in lines:
                if line.strip():
                    found = self._object(line)
                    yield [found.get(name) for name in self.columns] if found else []


def _fast(cells: pa.Array) -> Sequence[Any]:
    """Return numbers as an array, where their type says that they are such; else a list."""
    from pyarrow import types

    if types.is_floating(cells.type) or types.is_integer(cells.type):
        found: Sequence[Any] = cells.cast("float64", safe=False).to_numpy(zero_copy_only=False)
        return found
    listed: list[Any] = cells.to_pylist()
    return listed


def open_table(path: Path) -> TableFile:
    """Open a table by its ending: ``.parquet``, ``.arrow``, ``.feather``, ``.jsonl``, else CSV.

    Raises:
        TaskAbsentError: If it is not there.
        TaskDataError: If it cannot be read; without any value of a record.
    """
    try:
        if path.suffix in (".parquet", ".arrow", ".feather"):
            return _Arrow(path)
        return _JsonLines(path) if path.suffix in (".jsonl", ".ndjson") else _Csv(path)
    except ModuleNotFoundError:
        raise TaskDataError(
            f"{path} needs pyarrow to be read: pip install 'privtune[tables]', or save it as CSV."
        ) from None
    except FileNotFoundError:
        raise TaskAbsentError(f"{path} is not there.") from None
    except (OSError, ValueError, csv.Error) as error:
        raise TaskDataError(f"{path} cannot be read ({type(error).__name__}).") from None


def check_columns(file: TableFile, names: Sequence[str], place: str) -> None:
    """Refuse a table that lacks a column, or has two of a name: by its header alone.

    Raises:
        TaskDataError: Naming them, and no other: where a header is missing, what stands there is a record.
    """
    if missing := [name for name in names if name not in file.columns]:
        raise TaskDataError(f"{place} lacks the declared columns {', '.join(missing)}.")
    if twice := [name for name in names if list(file.columns).count(name) > 1]:
        raise TaskDataError(f"{place} has two columns called {', '.join(twice)}.")


def header_of(path: Path, names: Sequence[str]) -> None:
    """Check a file's header for its columns, without a record: JSON lines have none.

    Raises:
        TaskAbsentError: If there is no file.
        TaskDataError: If it cannot be read, or lacks a column.
    """
    file = open_table(path)
    if not isinstance(file, _JsonLines):
        check_columns(file, names, str(path))


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:
        return []
