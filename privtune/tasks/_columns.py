"""How a column of a table becomes numbers: each value by itself, by public facts alone.

No mean, mode, minimum or list of the values that occur is taken from the records: bounds, categories,
levels and fills are declared. A value that is missing takes the declared fill; one that is not as
declared makes its record unusable, save a category that is not declared, which has a place of its own.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from privtune.errors import InvalidInputError
from privtune.tasks._reader import (
    Floats,
    Mask,
    coded,
    distinct,
    is_missing,
    label_of,
    number_of,
    numbers_of,
    texts,
)
from privtune.tasks._usable import CLIPPED, MISSING, NO_NUMBER, OTHER, Fault

PAID = "paid"
"""What stands for a public value that a stage releases, and pays for, before the arms."""

_CELLS = 32  # of a declared range
_POWERS = (-10, 41)  # of 2: from a thousandth to a million millions
_DATA_DEPENDENT = (
    "auto", "minmax", "standard", "data", "robust", "quantile", "mean", "median", "mode",
)  # fmt: skip
_PARTS = {"time": 1, "month": 2, "weekday": 2, "hour": 2}  # of a date: how many features each is


@dataclass(frozen=True, kw_only=True)
class Column:
    """A feature column as it is declared."""

    name: str

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return 1

    @property
    def square(self) -> float:
        """What the squares of its features add up to at most."""
        return 1.0

    @property
    def words(self) -> str:
        """What is declared public of it."""
        raise NotImplementedError

    def read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return features ``[N, width]``, each a function of its own cell, and what is not as declared."""
        raise NotImplementedError

    def _fault(
        self, why: str, mask: Mask, cells: pa.Array, *, used: bool = True, declared: Any = ""
    ) -> Fault:
        return Fault(self.name, why, mask, used=used, declared=declared, cells=cells)


@dataclass(frozen=True, kw_only=True)
class Number(Column):
    """A number, clipped to public bounds and scaled to [-1, 1]."""

    low: float
    high: float
    missing: float

    @property
    def words(self) -> str:
        """The bounds."""
        return f"[{self.low:g}, {self.high:g}]"

    def read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return one feature, and what is no number, missing or clipped."""
        values, broken = numbers_of(cells)
        missing = np.isnan(values)
        outside = (values < self.low) | (values > self.high)
        values = np.where(missing, self.missing, values)
        middle, half = 0.5 * (self.low + self.high), 0.5 * (self.high - self.low)
        return ((np.clip(values, self.low, self.high) - middle) / half)[:, None], [
            self._fault(NO_NUMBER, broken, cells, used=False),
            self._fault(MISSING, missing & ~broken, cells),
            self._fault(CLIPPED, outside, cells, declared=f"bounds {self.words}"),
        ]


@dataclass(frozen=True, kw_only=True)
class Paid(Column):
    """A number whose bounds a stage releases; until then it is a place among the features."""

    within: tuple[float, float] | None = None
    missing: float | None = None

    @property
    def words(self) -> str:
        """Who says the bounds."""
        return "a number, its bounds released by a stage that is charged"

    @property
    def edges(self) -> Floats:
        """Edges of the cells that a stage counts in: evenly within what is declared, else by powers of 2."""
        # What lies beyond the first or the last edge is counted in the cell beside it.
        if self.within is not None:
            return np.linspace(*self.within, _CELLS + 1)
        powers = np.exp2(np.arange(*_POWERS, dtype=float))
        return np.concatenate([-powers[::-1], [0.0], powers])

    def places(self, cells: pa.Array) -> npt.NDArray[np.int64]:
        """Return which cell of the grid each value is in; -1 for what is missing or no number."""
        values, _ = numbers_of(cells)
        known = ~np.isnan(values)
        found = np.searchsorted(self.edges, np.where(known, values, 0.0), side="right") - 1
        return np.where(known, np.clip(found, 0, len(self.edges) - 2), -1)

    def read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return no features yet, and what is no number or missing."""
        values, broken = numbers_of(cells)
        return np.zeros((len(values), 1)), [
            self._fault(NO_NUMBER, broken, cells, used=False),
            self._fault(MISSING, np.isnan(values) & ~broken, cells),
        ]


@dataclass(frozen=True, kw_only=True)
class Category(Column):
    """One of declared values: a one for each, and one for every other value and for none."""

    values: tuple[Any, ...]

    @property
    def width(self) -> int:
        """One for each value, and one for any other."""
        return len(self.values) + 1

    @property
    def words(self) -> str:
        """The values."""
        return f"{', '.join(map(str, self.values))}, or another"

    def read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return a one among zeros, and what is missing or another value: both are used."""
        found = coded(cells, self.values)
        other, missing = found < 0, is_missing(cells)
        return np.eye(self.width)[np.where(other, len(self.values), found)], [
            self._fault(MISSING, other & missing, cells),
            self._fault(OTHER, other & ~missing, cells, declared=self.values),
        ]


@dataclass(frozen=True, kw_only=True)
class Ordinal(Column):
    """One of declared levels in their order, evenly from -1 to 1."""

    levels: tuple[Any, ...]
    missing: float

    @property
    def words(self) -> str:
        """The levels."""
        return " < ".join(map(str, self.levels))

    def read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return one feature, and what is missing or no level."""
        found = coded(cells, self.levels)
        other, missing = found < 0, is_missing(cells)
        scaled = 2.0 / (len(self.levels) - 1) * found - 1.0
        return np.where(other, np.where(missing, self.missing, 0.0), scaled)[:, None], [
            self._fault(MISSING, other & missing, cells),
            self._fault(OTHER, other & ~missing, cells, used=False, declared=self.levels),
        ]


@dataclass(frozen=True, kw_only=True)
class Date(Column):
    """A date or a time in ISO form, clipped to public bounds; its parts. All 0 where it is missing."""

    low: datetime.datetime
    high: datetime.datetime
    parts: tuple[str, ...]

    @property
    def width(self) -> int:
        """Those of all parts."""
        return sum(_PARTS[part] for part in self.parts)

    @property
    def square(self) -> float:
        """One for each part: a number in [-1, 1], or a point on a circle."""
        return float(len(self.parts))

    @property
    def words(self) -> str:
        """The bounds and the parts."""
        return f"{self._bounds}: {', '.join(self.parts)}"

    @property
    def _bounds(self) -> str:
        return f"{self.low:%Y-%m-%d} to {self.high:%Y-%m-%d}"

    def read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return the features of the parts, and what is no date, missing or clipped."""
        found, which = distinct(texts(cells), moment_of)
        moments = [*found, None]  # -1 stands for a null
        none = [moment is None for moment in moments]
        outside = [m is not None and not self.low <= m <= self.high for m in moments]
        made = [[0.0] * self.width if m is None else self._features(m) for m in moments]
        missing = is_missing(cells)
        said = "dates are written like 2020-12-31, in ISO form"
        return np.array(made)[which], [
            self._fault(
                "no date", np.array(none)[which] & ~missing, cells, used=False, declared=said
            ),
            self._fault(MISSING, missing, cells),
            self._fault(
                CLIPPED, np.array(outside)[which], cells, declared=f"bounds {self._bounds}"
            ),
        ]

    def _features(self, moment: datetime.datetime) -> list[float]:
        moment = min(max(moment, self.low), self.high)
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


def moment_of(cell: Any) -> datetime.datetime | None:
    """Return a cell as a time without a zone, None if it is none."""
    try:
        found = datetime.datetime.fromisoformat(str(cell).strip())
        return (
            found if found.tzinfo is None else found.astimezone(datetime.UTC).replace(tzinfo=None)
        )
    except (ValueError, OverflowError):
        return None


def read_columns(bounds: Any, columns: Any) -> tuple[Column, ...]:
    """Read the ``bounds`` and ``columns`` of a table's spec."""
    given: dict[str, Column] = {}
    for field, declared in (("task.bounds", bounds or {}), ("task.columns", columns or {})):
        _refuse_data(declared)
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


def _refuse_data(given: Any, field: str = "task.bounds") -> None:
    """Refuse what would be computed from the records."""
    if isinstance(given, str) and given in _DATA_DEPENDENT:
        raise InvalidInputError(
            field,
            given,
            "must be public numbers for each feature: a minimum, maximum, mean or deviation of the "
            "records is a release about them that nothing charges",
            "Write [low, high] of each column from what is known without the data, or bounds: paid with a "
            "stage of quantiles.",
        )


def _column(field: str, name: str, how: Any) -> Column:
    _refuse_data(how)
    if not isinstance(how, Mapping):
        how = {"bounds": how}
    kinds = [kind for kind in ("bounds", "categories", "ordinal", "date") if kind in how]
    if len(kinds) != 1:
        raise InvalidInputError(
            field, dict(how), "must say one of bounds, categories, ordinal and date"
        )
    (kind,) = kinds
    paid = kind == "bounds" and how[kind] == PAID
    others = {"bounds": ["missing"], "ordinal": ["missing"], "date": ["parts"]}.get(kind, [])
    others = ["within", *others] if paid else others
    if unknown := sorted(map(str, set(how) - {kind, *others})):
        known = ", ".join(others) or "nothing else"
        what = "bounds: paid" if paid else kind
        raise InvalidInputError(field, unknown, f"is not known; beside {what} it takes {known}")
    if paid:
        return _paid(field, name, how)
    if kind == "bounds":
        return _number(field, name, how)
    if kind == "date":
        return _date(field, name, how)
    if kind == "categories":
        return Category(name=name, values=values_of(f"{field}.categories", how[kind], least=1))
    levels = values_of(f"{field}.ordinal", how[kind], least=2)
    fill = how.get("missing")
    place = {label_of(value): 2.0 * i / (len(levels) - 1) - 1.0 for i, value in enumerate(levels)}
    if fill is not None and label_of(fill) not in place:
        raise InvalidInputError(f"{field}.missing", fill, "must be one of the levels")
    return Ordinal(name=name, levels=levels, missing=0.0 if fill is None else place[label_of(fill)])


def _number(field: str, name: str, how: Mapping[str, Any]) -> Number:
    low, high = pair_of(field, how["bounds"])
    fill = how.get("missing", 0.5 * (low + high))
    _refuse_data(fill, f"{field}.missing")
    number = number_of(fill)
    if number is None or not low <= number <= high:
        raise InvalidInputError(f"{field}.missing", fill, "must be a number within the bounds")
    return Number(name=name, low=low, high=high, missing=number)


def _paid(field: str, name: str, how: Mapping[str, Any]) -> Paid:
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
