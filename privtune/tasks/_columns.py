"""How a column of a table becomes numbers: each value by itself, by public facts alone.

No mean, mode, minimum or list of the values that occur is taken from the records: bounds, categories,
levels and fills are declared. A value that is missing takes the declared fill; one that is not as
declared makes its record unusable, save a category that is not declared, which has a place of its own.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from privtune.tasks._cells import (
    CLIPPED,
    MARKED,
    MISSING,
    NO_DATE,
    NO_NUMBER,
    OTHER,
    PLAIN,
    UNITS,
    Fault,
    Floats,
    Mask,
    Notation,
    coded,
    distinct,
    is_missing,
    moment_of,
    texts,
    thousands,
)

_CELLS = 32  # of a declared range
_POWERS = (-10, 41)  # of 2: from a thousandth to a million millions
PARTS = {"time": 1, "month": 2, "weekday": 2, "hour": 2}
"""Parts of a date, and how many features each is."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A feature column as it is declared."""

    name: str
    notation: Notation = PLAIN

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
        return self._read(self.notation.given(cells))

    def _read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
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

    def _read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return one feature, and what is no number, missing or clipped."""
        values, faults = self.numbers(cells)
        values = np.where(np.isnan(values), self.missing, values)
        middle, half = 0.5 * (self.low + self.high), 0.5 * (self.high - self.low)
        # Text has no -0: beside text a number of JSON would else have another sign.
        return ((np.clip(values, self.low, self.high) - middle) / half)[:, None] + 0.0, faults

    def numbers(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return the numbers as they are written, and what is no number, missing or clipped."""
        values, broken = self.notation.numbers(cells)
        outside = (values < self.low) | (values > self.high)
        found = [
            self._fault(NO_NUMBER, broken, cells, used=False),
            self._fault(MISSING, np.isnan(values) & ~broken, cells),
            self._fault(CLIPPED, outside, cells, declared=f"bounds {self.words}"),
        ]
        if not (self.notation.decimal or self.notation.thousands):
            marked, against = thousands(cells, values, self.low, self.high)
            fault = self._fault(MARKED, marked, cells)
            found.append(replace(fault, against=against))
        return values, found


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
        values, _ = self.notation.numbers(self.notation.given(cells))
        known = ~np.isnan(values)
        found = np.searchsorted(self.edges, np.where(known, values, 0.0), side="right") - 1
        return np.where(known, np.clip(found, 0, len(self.edges) - 2), -1)

    def _read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return no features yet, and what is no number or missing."""
        values, broken = self.notation.numbers(cells)
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

    def _read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
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

    def _read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
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
    """A date or a time, clipped to public bounds; its parts. All 0 where it is missing."""

    low: datetime.datetime
    high: datetime.datetime
    parts: tuple[str, ...]
    format: str = ""  # as Python's strptime has it; ISO unless it or a unit is said
    unit: str = ""  # of a number that counts from 1970

    @property
    def width(self) -> int:
        """Those of all parts."""
        return sum(PARTS[part] for part in self.parts)

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

    def _read(self, cells: pa.Array) -> tuple[Floats, list[Fault]]:
        """Return the features of the parts, and what is no date, missing or clipped."""
        found, which = distinct(texts(cells), self.moment)
        moments = [*found, None]  # -1 stands for a null
        none = [moment is None for moment in moments]
        outside = [m is not None and not self.low <= m <= self.high for m in moments]
        made = [[0.0] * self.width if m is None else self._features(m) for m in moments]
        missing = is_missing(cells)
        lost, far = np.array(none)[which] & ~missing, np.array(outside)[which]
        said = self.format or self.unit or "dates are written like 2020-12-31, in ISO form"
        return np.array(made)[which], [
            self._fault(NO_DATE, lost, cells, used=False, declared=said),
            self._fault(MISSING, missing, cells),
            self._fault(CLIPPED, far, cells, declared=f"bounds {self._bounds}"),
        ]

    def moment(self, cell: Any) -> datetime.datetime | None:
        """Return the time that a cell holds, None if it is none."""
        return moment_of(cell, self.format, self.unit)

    def written(self, moment: datetime.datetime) -> str | int:
        """Return a time as a cell holds it."""
        if self.unit:
            since = moment - datetime.datetime(1970, 1, 1)
            return since // datetime.timedelta(seconds=1) * UNITS[self.unit]
        return moment.strftime(self.format) if self.format else moment.date().isoformat()

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
