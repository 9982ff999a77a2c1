"""Tables in files: CSV (one record a line), Parquet and Arrow, opened by their header first."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from privtune.tasks._columns import MISSING, number_of
from privtune.tasks._task import TaskDataError

__all__ = ["TableFile", "open_table"]

_LOOKED_AT = 100  # records that a CSV file's types are inferred from
_UNREADABLE = "\0"  # stands for what cannot be read: no number, no date, no class


class _Csv:
    """A CSV file of one record a line, so that no record can swallow the next ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._lines() as lines:
            self.columns = next((_cells(line) for line in lines), [])

    def _lines(self) -> TextIO:
        return self._path.open(encoding="utf-8-sig", errors="replace")

    def _records(self) -> Iterator[list[str]]:
        with self._lines() as lines:
            next(lines, None)
            yield from (_cells(line) for line in lines if line.strip())

    def text_columns(self) -> set[str]:
        """Return the columns of whose first cells none is a number, though one is there."""
        seen: set[str] = set()
        numeric: set[str] = set()
        for cells in itertools.islice(self._records(), _LOOKED_AT):
            for name, cell in zip(self.columns, cells, strict=False):
                if cell.strip().lower() not in MISSING:
                    seen.add(name)
                    if number_of(cell) is not None:
                        numeric.add(name)
        return seen - numeric

    def read(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return columns of cells; unreadable ones for a line with another number of cells."""
        places = [self.columns.index(name) for name in names]
        table: list[list[Any]] = [[] for _ in names]
        for cells in self._records():
            whole = len(cells) == len(self.columns)
            for column, place in zip(table, places, strict=True):
                column.append(cells[place] if whole else _UNREADABLE)
        return dict(zip(names, table, strict=True))


class _Arrow:
    """A Parquet or Arrow file, whose header declares the types."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.suffix == ".parquet":
            from pyarrow import parquet

            self._schema = parquet.ParquetFile(path).schema_arrow
        else:
            from pyarrow import ipc

            with ipc.open_file(path) as file:
                self._schema = file.schema
        self.columns: list[str] = list(self._schema.names)

    def text_columns(self) -> set[str]:
        """Return the columns whose type is no number."""
        from pyarrow import types

        known = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
        return {f.name for f in self._schema if not any(is_number(f.type) for is_number in known)}

    def read(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return columns of cells."""
        if self._path.suffix == ".parquet":
            from pyarrow import parquet

            found = parquet.ParquetFile(self._path).read(columns=list(names))
        else:
            from pyarrow import ipc

            with ipc.open_file(self._path) as file:
                found = file.read_all().select(list(names))
        columns: dict[str, list[Any]] = found.to_pydict()
        return columns


TableFile = _Csv | _Arrow
"""A table in a file: ``columns``, ``text_columns()`` and ``read(names)``."""


def open_table(path: Path) -> TableFile:
    """Open a table by the ending of its name: ``.parquet``, ``.arrow``, ``.feather``, else CSV.

    Raises:
        TaskDataError: If it cannot be read; without any value of a record.
    """
    try:
        return _Arrow(path) if path.suffix in (".parquet", ".arrow", ".feather") else _Csv(path)
    except ModuleNotFoundError:
        raise TaskDataError(
            f"{path} needs pyarrow to be read: pip install 'privtune[tables]', or save it as CSV."
        ) from None
    except (OSError, ValueError, csv.Error) as error:
        raise TaskDataError(f"{path} cannot be read ({type(error).__name__}).") from None


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:
        return []
