"""A table of one's own, as CSV or Parquet: features scaled by public bounds."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from privtune.errors import InvalidInputError
from privtune.tasks._data import logistic
from privtune.tasks._partition import KEY, Sizes, split
from privtune.tasks._task import Task, TaskData, TaskDataError

__all__ = ["tabular"]

_DATA_DEPENDENT = ("auto", "minmax", "standard", "data", "robust", "quantile")
_FIELDS = {
    "type", "name", "path", "target", "classes", "bounds", "train", "validation", "test", "public_test",
    "id", "key",
}  # fmt: skip


_LOOKED_AT = 100  # records that a CSV file's types are inferred from
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})


@dataclass(frozen=True)
class _Table:
    path: str
    target: str
    classes: tuple[Any, ...]
    bounds: Mapping[str, tuple[float, float]]
    sizes: Sizes
    id: str | None
    key: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.bounds, self.target, *([] if self.id is None else [self.id]))

    def check(self) -> None:
        """Check what can be checked before anything is charged: the file and its header.

        How many records there are is private, and not checked.

        Raises:
            TaskDataError: Without any value of a record.
        """
        file = _open(Path(self.path))
        if missing := [c for c in self.columns if c not in file.columns]:
            raise TaskDataError(f"{self.path} lacks the declared columns {', '.join(missing)}.")
        if text := [c for c in self.bounds if c in file.text_columns()]:
            raise TaskDataError(
                f"{self.path}: task.bounds names {', '.join(text)}, which holds no numbers. Features "
                "are numbers; leave it out of the bounds."
            )

    def load(self) -> TaskData:
        """Read the records. One that is not as declared has class -1, and so contributes nothing."""
        import numpy as np

        self.check()
        table = _open(Path(self.path)).read(self.columns)
        features = []
        broken = np.zeros(len(table[self.target]), dtype=bool)
        for name, (low, high) in self.bounds.items():
            values, unparsed = _numbers(table[name])
            broken |= unparsed
            # What is missing becomes the middle of the bounds: no mean of the others is used.
            values = np.nan_to_num(np.clip(values, low, high), nan=(low + high) / 2)
            features.append(2.0 * (values - low) / (high - low) - 1.0)
        number = {_label(value): index for index, value in enumerate(self.classes)}
        labels = np.array([number.get(_label(value), -1) for value in table[self.target]])
        x, y = np.stack(features, axis=1), np.where(broken, -1, labels)
        x[y < 0] = 0.0  # unusable rows are made alike: they share a split
        ids = None if self.id is None else [_id_text(value) for value in table[self.id]]
        return split(x, y, self.sizes, ids=ids, key=self.key)


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
                if cell.strip().lower() not in _MISSING:
                    seen.add(name)
                    if _number(cell) is not None:
                        numeric.add(name)
        return seen - numeric

    def read(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """Return columns of cells; None in all of them for a line with another number of cells."""
        places = {name: self.columns.index(name) for name in names}
        rows = [cells if len(cells) == len(self.columns) else None for cells in self._records()]
        return {
            name: [_UNREADABLE if cells is None else cells[place] for cells in rows]
            for name, place in places.items()
        }


class _Parquet:
    """A Parquet file, whose header declares the types."""

    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._file = parquet.ParquetFile(path)
        self.columns: list[str] = list(self._file.schema_arrow.names)

    def text_columns(self) -> set[str]:
        from pyarrow import types

        known = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
        schema = self._file.schema_arrow
        return {f.name for f in schema if not any(is_number(f.type) for is_number in known)}

    def read(self, names: Sequence[str]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = self._file.read(columns=list(names)).to_pydict()
        return columns


_UNREADABLE = "\0"  # stands for what cannot be read: neither a number nor a class


def _open(path: Path) -> _Csv | _Parquet:
    try:
        return _Parquet(path) if path.suffix == ".parquet" else _Csv(path)
    except (OSError, ValueError, ImportError, csv.Error) as error:
        raise TaskDataError(f"{path} cannot be read ({type(error).__name__}).") from None


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:
        return []


def _number(cell: Any) -> float | None:
    try:
        return None if isinstance(cell, str) and "_" in cell else float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def _numbers(cells: Sequence[Any]) -> tuple[Any, Any]:
    """Return the numbers in some cells, NaN for none, and where a cell is neither number nor empty."""
    import numpy as np

    found = [_number(cell) for cell in cells]
    missing = [cell is None or str(cell).strip().lower() in _MISSING for cell in cells]
    values = np.array([math.nan if v is None else v for v in found], dtype=float)
    return values, np.isnan(values) & ~np.array(missing)


def _label(value: Any) -> float | str:
    """Return what stands for a class, written as a number or a word, with or without blanks."""
    text = str(value).strip()
    if text.lower() in {"true", "false"}:
        return text.lower()
    number = _number(text)
    return text if number is None or math.isnan(number) else number


def tabular(spec: Mapping[str, Any]) -> Task:
    """Return a task of logistic regression on a table.

    Args:
        spec: ``path`` (CSV with one record a line, or Parquet), ``target`` (column), ``classes``
            (every value it can have), ``bounds`` (by feature column: public ``[low, high]``; values
            are clipped to them and scaled to [-1, 1]), ``train``, ``validation``, ``test`` (numbers
            of records, declared public: how many each split is expected to hold; records fall into
            splits by a keyed hash, and the file's own number of records is not checked, for it is
            private), ``public_test`` (false unless said), ``id`` (column that records are known by;
            their content unless given), ``key`` (the hash's public key), ``name``.

    Returns:
        The task; the file has not been opened. ``check`` looks at the file and its header before
        anything is charged. A record that is not as declared (a class that is none, a word for a
        number) contributes nothing; a missing number counts as the middle of its bounds.

    Raises:
        InvalidInputError: If a field is missing, unknown or outside its domain, or bounds would
            come from the data.
    """
    if unknown := sorted(map(str, set(spec) - _FIELDS)):
        raise InvalidInputError("task", unknown, f"a table takes {', '.join(sorted(_FIELDS))}")
    for field in ("path", "target", "classes", "bounds", "train", "validation", "test"):
        if field not in spec:
            raise InvalidInputError(f"task.{field}", None, "is required for a table")
    bounds = _bounds(spec["bounds"])
    if str(spec["target"]) in bounds:
        raise InvalidInputError("task.bounds", spec["target"], "is the target, not a feature")
    column = None if spec.get("id") is None else str(spec["id"])
    if column is not None and column in (*bounds, str(spec["target"])):
        raise InvalidInputError("task.id", column, "must be a column of its own")
    sizes = Sizes(*(_size(field, spec[field]) for field in ("train", "validation", "test")))
    classes = _classes(spec["classes"])
    table = _Table(
        str(spec["path"]),
        str(spec["target"]),
        classes,
        bounds,
        sizes,
        column,
        str(spec.get("key", KEY)),
    )
    task = logistic(
        str(spec.get("name", Path(table.path).stem)),
        f"logistic regression on {Path(table.path).name}",
        features=len(bounds),
        classes=len(classes),
        sizes=sizes,
        load=table.load,
        bounds=bounds,
        partition="content" if column is None else "id",
    )
    public = spec.get("public_test", False)
    if not isinstance(public, bool):
        raise InvalidInputError("task.public_test", public, "must be true or false")
    return replace(task, public_test=public, class_names=classes, check=table.check)


def _size(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**12:
        allowed = "must be a whole number of at least 1, and of records that exist"
        raise InvalidInputError(f"task.{field}", value, allowed)
    return value


def _classes(given: Any) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) < 2:
        raise InvalidInputError(
            "task.classes",
            given,
            "must be a list of at least 2 values, all that the target can have",
        )
    if len({_label(value) for value in given}) < len(given):
        raise InvalidInputError("task.classes", given, "must differ from one another")
    return tuple(given)


def _id_text(value: Any) -> str:
    """Return an id as text: a whole number is the same whether or not its column lacks others."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _bounds(given: Any) -> dict[str, tuple[float, float]]:
    if given in _DATA_DEPENDENT or given is None:
        raise InvalidInputError(
            "task.bounds",
            given,
            "must be public numbers for each feature: a minimum, maximum, mean or deviation of the "
            "records is a release about them that nothing charges",
            "Write [low, high] of each column from what is known without the data.",
        )
    if not isinstance(given, Mapping) or not given:
        raise InvalidInputError(
            "task.bounds", given, "must give [low, high] of each feature column"
        )
    bounds: dict[str, tuple[float, float]] = {}
    for name, pair in given.items():
        if isinstance(pair, str):
            return _bounds(pair)
        try:
            low, high = (float(value) for value in pair)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInputError(f"task.bounds.{name}", pair, "must be [low, high]") from None
        if not (low < high and math.isfinite(high - low)):
            raise InvalidInputError(
                f"task.bounds.{name}", pair, "must be [low, high], finite, low < high"
            )
        bounds[str(name)] = (low, high)
    return bounds
