"""How a column of a table becomes numbers: each value by itself, by public facts alone.

No mean, mode, minimum or list of the values that occur is taken from the records: bounds, categories,
levels and fills are declared. A value that is missing takes the declared fill; one that is not as
declared makes its record unusable, save a category that is not declared, which has a place of its own.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.tasks._cells import (
    Floats,
    coded,
    is_missing,
    label_of,
    missing_of,
    moment_of,
    number_of,
    numbers_of,
)
from privtune.tasks._usable import CLIPPED, MISSING, NO_NUMBER, OTHER, Fault, fault_of

Encoded = tuple[Floats, npt.NDArray[np.bool_]]
"""Features of shape ``[N, width]``, and which records are not as declared, ``[N]``.

Cells are a list of anything, or an array of numbers with NaN for none."""

PAID = "paid"
"""What stands for a public value that a stage releases, and pays for, before the arms."""

_CELLS = 32  # of a declared range
_POWERS = (-10, 41)  # of 2: from a thousandth to a million millions

_DATA_DEPENDENT = (
    "auto",
    "minmax",
    "standard",
    "data",
    "robust",
    "quantile",
    "mean",
    "median",
    "mode",
)
_PARTS: Mapping[str, tuple[int, str]] = {
    "time": (1, "where it stands between the bounds"),
    "month": (2, "the month, on a circle"),
    "weekday": (2, "the weekday, on a circle"),
    "hour": (2, "the hour, on a circle"),
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A feature column as it is declared."""

    kind: ClassVar[str]
    name: str

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return 1

    @property
    def words(self) -> str:
        """What is declared public of it."""
        raise NotImplementedError

    def encode(self, cells: Sequence[Any]) -> Encoded:
        """Return the features of some cells, each a function of its own cell."""
        raise NotImplementedError

    def faults(self, cells: Sequence[Any]) -> Iterator[Fault]:
        """Yield which of some cells are not as declared, for the curator."""
        raise NotImplementedError

    def _fault(
        self, why: str, mask: Any, cells: Sequence[Any], *, used: bool = False, declared: Any = ""
    ) -> Fault:
        return fault_of(self.name, why, mask, cells, used=used, declared=declared)


@dataclass(frozen=True, kw_only=True)
class Number(Column):
    """A number, clipped to public bounds and scaled to [-1, 1]."""

    kind: ClassVar[str] = "bounds"
    low: float
    high: float
    missing: float

    @property
    def words(self) -> str:
        """See ``Column``."""
        return f"[{self.low:g}, {self.high:g}]"

    def encode(self, cells: Sequence[Any]) -> Encoded:
        """See ``Column``."""
        values, broken = numbers_of(cells)
        values = np.where(np.isnan(values), self.missing, values)
        middle, half = 0.5 * (self.low + self.high), 0.5 * (self.high - self.low)
        return ((np.clip(values, self.low, self.high) - middle) / half)[:, None], broken

    def faults(self, cells: Sequence[Any]) -> Iterator[Fault]:
        """See ``Column``."""
        values, broken = numbers_of(cells)
        outside = (values < self.low) | (values > self.high)
        said = f"bounds {self.words}"
        yield self._fault(NO_NUMBER, broken, cells)
        yield self._fault(MISSING, np.isnan(values) & ~broken, cells, used=True)
        yield self._fault(CLIPPED, outside, cells, used=True, declared=said)


@dataclass(frozen=True, kw_only=True)
class Paid(Column):
    """A number whose bounds a stage releases; until then it is a place among the features."""

    kind: ClassVar[str] = "bounds"
    within: tuple[float, float] | None = None
    missing: float | None = None

    @property
    def words(self) -> str:
        """See ``Column``."""
        return "a number, its bounds released by a stage that is charged"

    @property
    def edges(self) -> Floats:
        """Edges of the cells that a stage counts in: evenly within what is declared, else by powers of 2.

        What lies beyond the first or the last edge is counted in the cell beside it.
        """
        if self.within is not None:
            return np.linspace(*self.within, _CELLS + 1)
        powers = np.exp2(np.arange(*_POWERS, dtype=float))
        return np.concatenate([-powers[::-1], [0.0], powers])

    def cells(self, cells: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Return the number of each cell's own cell; -1 for what is missing or no number."""
        values, _ = numbers_of(cells)
        known = ~np.isnan(values)
        found = np.searchsorted(self.edges, np.where(known, values, 0.0), side="right") - 1
        return np.where(known, np.clip(found, 0, len(self.edges) - 2), -1)

    def faults(self, cells: Sequence[Any]) -> Iterator[Fault]:
        """See ``Column``."""
        values, broken = numbers_of(cells)
        yield self._fault(NO_NUMBER, broken, cells)
        yield self._fault(MISSING, np.isnan(values) & ~broken, cells, used=True)

    def encode(self, cells: Sequence[Any]) -> Encoded:
        """Refuse: there are no bounds yet."""
        raise PrivTuneError(f"The bounds of column {self.name} have not been released yet.")


@dataclass(frozen=True, kw_only=True)
class Category(Column):
    """One of declared values: a one for each, and one for every other value and for none."""

    kind: ClassVar[str] = "categories"
    values: tuple[Any, ...]

    @property
    def width(self) -> int:
        """See ``Column``."""
        return len(self.values) + 1

    @property
    def words(self) -> str:
        """See ``Column``."""
        return f"{', '.join(map(str, self.values))}, or another"

    def encode(self, cells: Sequence[Any]) -> Encoded:
        """See ``Column``."""
        found = coded(cells, self.values)
        known = np.where(found < 0, len(self.values), found)
        return np.eye(self.width)[known], np.zeros(len(cells), dtype=bool)

    def faults(self, cells: Sequence[Any]) -> Iterator[Fault]:
        """See ``Column``: another value has a place of its own."""
        other, missing = coded(cells, self.values) < 0, missing_of(cells)
        yield self._fault(MISSING, other & missing, cells, used=True)
        yield self._fault(OTHER, other & ~missing, cells, used=True, declared=self.values)


@dataclass(frozen=True, kw_only=True)
class Ordinal(Column):
    """One of declared levels in their order, evenly from -1 to 1."""

    kind: ClassVar[str] = "ordinal"
    levels: tuple[Any, ...]
    missing: float

    @property
    def words(self) -> str:
        """See ``Column``."""
        return " < ".join(map(str, self.levels))

    def encode(self, cells: Sequence[Any]) -> Encoded:
        """See ``Column``."""
        found = coded(cells, self.levels)
        missing = (found < 0) & missing_of(cells)
        broken = (found < 0) & ~missing
        scaled = 2.0 / (len(self.levels) - 1) * found - 1.0
        return np.where(missing, self.missing, np.where(broken, 0.0, scaled))[:, None], broken

    def faults(self, cells: Sequence[Any]) -> Iterator[Fault]:
        """See ``Column``."""
        other, missing = coded(cells, self.levels) < 0, missing_of(cells)
        yield self._fault(MISSING, other & missing, cells, used=True)
        yield self._fault(OTHER, other & ~missing, cells, declared=self.levels)


@dataclass(frozen=True, kw_only=True)
class Date(Column):
    """A date or a time in ISO form, clipped to public bounds; its parts. All 0 where it is missing."""

    kind: ClassVar[str] = "date"
    low: datetime.datetime
    high: datetime.datetime
    parts: tuple[str, ...]

    @property
    def width(self) -> int:
        """See ``Column``."""
        return sum(_PARTS[part][0] for part in self.parts)

    @property
    def words(self) -> str:
        """See ``Column``."""
        return f"{self.low:%Y-%m-%d} to {self.high:%Y-%m-%d}: {', '.join(self.parts)}"

    def encode(self, cells: Sequence[Any]) -> Encoded:
        """See ``Column``."""
        features = np.zeros((len(cells), self.width))
        broken = np.zeros(len(cells), dtype=bool)
        for row, cell in enumerate(cells):
            if is_missing(cell):
                continue
            moment = moment_of(cell)
            if moment is None:
                broken[row] = True
            else:
                features[row] = self._features(min(max(moment, self.low), self.high))
        return features, broken

    def faults(self, cells: Sequence[Any]) -> Iterator[Fault]:
        """See ``Column``."""
        missing = missing_of(cells)
        moments = [None if lost else moment_of(c) for c, lost in zip(cells, missing, strict=True)]
        broken = np.array([m is None for m in moments], dtype=bool) & ~missing
        outside = [m is not None and not self.low <= m <= self.high for m in moments]
        said = f"bounds {self.low:%Y-%m-%d} to {self.high:%Y-%m-%d}"
        yield self._fault(
            "no date", broken, cells, declared="dates are written like 2020-12-31, in ISO form"
        )
        yield self._fault(MISSING, missing, cells, used=True)
        mask = np.array(outside, dtype=bool)
        yield self._fault(CLIPPED, mask, cells, used=True, declared=said)

    def _features(self, moment: datetime.datetime) -> list[float]:
        turns = {
            "month": (moment.month - 1) / 12.0,
            "weekday": moment.weekday() / 7.0,
            "hour": moment.hour / 24.0,
        }
        found = []
        for part in self.parts:
            if part == "time":
                found.append(2.0 * ((moment - self.low) / (self.high - self.low)) - 1.0)
            else:
                angle = 2.0 * math.pi * turns[part]
                found += [math.sin(angle), math.cos(angle)]
        return found


def read_columns(bounds: Any, columns: Any) -> tuple[Column, ...]:
    """Read the ``bounds`` and ``columns`` of a table's spec.

    Args:
        bounds: By numeric column ``[low, high]``; or None.
        columns: By column a list of bounds, or a mapping with one of ``bounds``, ``categories``,
            ``ordinal`` and ``date``, and what goes with it; or None.

    Raises:
        InvalidInputError: If a column is not well declared, or would be scaled by the records.
    """
    if bounds is None and not columns:
        bounds = {}
    if _depends(bounds) or _depends(columns):
        raise _refused("task.bounds", bounds if _depends(bounds) else columns)
    given: dict[str, Any] = {}
    for field, declared in (("task.bounds", bounds or {}), ("task.columns", columns or {})):
        if not isinstance(declared, Mapping):
            raise InvalidInputError(field, declared, "must give [low, high] of each feature column")
        for name, how in declared.items():
            if str(name) in given:
                raise InvalidInputError(field, str(name), "is declared twice")
            given[str(name)] = _column(f"{field}.{name}", str(name), how)
    if not given:
        raise InvalidInputError(
            "task.bounds", bounds, "must give [low, high] of each feature column"
        )
    return tuple(given.values())


def _depends(given: Any) -> bool:
    return isinstance(given, str) and given in _DATA_DEPENDENT


def _refused(field: str, given: Any) -> InvalidInputError:
    return InvalidInputError(
        field,
        given,
        "must be public numbers for each feature: a minimum, maximum, mean or deviation of the "
        "records is a release about them that nothing charges",
        "Write [low, high] of each column from what is known without the data, or bounds: paid with a "
        "stage of quantiles.",
    )


def _column(field: str, name: str, how: Any) -> Column:
    if _depends(how):
        raise _refused("task.bounds", how)
    if not isinstance(how, Mapping):
        how = {"bounds": how}
    kinds = [kind for kind in ("bounds", "categories", "ordinal", "date") if kind in how]
    if len(kinds) != 1:
        raise InvalidInputError(
            field, dict(how), "must say one of bounds, categories, ordinal and date"
        )
    (kind,) = kinds
    if kind == "bounds" and how[kind] == PAID:
        return _paid(field, name, how)
    others = {"bounds": {"missing"}, "ordinal": {"missing"}, "date": {"parts"}}.get(kind, set())
    if unknown := sorted(map(str, set(how) - {kind} - others)):
        known = ", ".join(sorted(others)) or "nothing else"
        raise InvalidInputError(field, unknown, f"is not known; beside {kind} it takes {known}")
    if kind == "bounds":
        return _number(field, name, how)
    if kind == "categories":
        return Category(name=name, values=values_of(f"{field}.categories", how[kind], least=1))
    if kind == "date":
        return _date(field, name, how)
    levels = values_of(f"{field}.ordinal", how[kind], least=2)
    fill = how.get("missing")
    place = {label_of(value): 2.0 * i / (len(levels) - 1) - 1.0 for i, value in enumerate(levels)}
    if fill is not None and label_of(fill) not in place:
        raise InvalidInputError(f"{field}.missing", fill, "must be one of the levels")
    return Ordinal(name=name, levels=levels, missing=0.0 if fill is None else place[label_of(fill)])


def _number(field: str, name: str, how: Mapping[str, Any]) -> Number:
    low, high = pair_of(field, how["bounds"])
    fill = how.get("missing", 0.5 * (low + high))
    if _depends(fill):
        raise _refused(f"{field}.missing", fill)
    number = number_of(fill)
    if number is None or not low <= number <= high:
        raise InvalidInputError(f"{field}.missing", fill, "must be a number within the bounds")
    return Number(name=name, low=low, high=high, missing=number)


def _paid(field: str, name: str, how: Mapping[str, Any]) -> Paid:
    if unknown := sorted(map(str, set(how) - {"bounds", "within", "missing"})):
        raise InvalidInputError(
            field, unknown, "is not known; beside bounds: paid it takes within, missing"
        )
    within, fill = how.get("within"), how.get("missing")
    number = None if fill is None else number_of(fill)
    if fill is not None and (number is None or not math.isfinite(number)):
        raise InvalidInputError(f"{field}.missing", fill, "must be a finite number")
    pair = None if within is None else pair_of(f"{field}.within", within)
    return Paid(name=name, within=pair, missing=number)


def _date(field: str, name: str, how: Mapping[str, Any]) -> Date:
    given = how["date"]
    ends = [moment_of(end) for end in given] if isinstance(given, list | tuple) else []
    low, high = ends if len(ends) == 2 else (None, None)
    if low is None or high is None or not low < high:
        raise InvalidInputError(
            f"{field}.date", given, "must be [first, last], dates in ISO form, first < last"
        )
    parts = how.get("parts", ["time"])
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        parts = [parts]
    if unknown := [part for part in parts if part not in _PARTS]:
        raise InvalidInputError(f"{field}.parts", unknown, f"must be of {', '.join(_PARTS)}")
    return Date(name=name, low=low, high=high, parts=tuple(dict.fromkeys(parts)))


def pair_of(field: str, pair: Any) -> tuple[float, float]:
    """Return ``[low, high]`` as numbers, or refuse it."""
    try:
        low, high = (float(value) for value in pair)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInputError(field, pair, "must be [low, high]") from None
    if not (low < high and math.isfinite(high - low)):
        raise InvalidInputError(field, pair, "must be [low, high], finite, low < high")
    return low, high


def values_of(field: str, given: Any, *, least: int) -> tuple[Any, ...]:
    """Return declared values, or refuse what is no list of different ones."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or len(given) < least:
        raise InvalidInputError(
            field, given, f"must be a list of at least {least} values, all that it can have"
        )
    if not all(isinstance(value, str | int | float | datetime.date) for value in given):
        raise InvalidInputError(field, given, "must be words and numbers")
    if len({label_of(value) for value in given}) < len(given):
        raise InvalidInputError(field, given, "must differ from one another")
    return tuple(given)
