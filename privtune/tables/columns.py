"""Feature columns of a table, which turn each value into numbers by public facts alone.

No mean, mode, minimum or list of the values that occur is taken from the records: bounds, categories,
levels and fills are declared. A value that is missing takes the declared fill; one that is not as
declared makes its record unusable, save a category that is not declared, which has a place of its own.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from privtune.tables.cells import (
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
    Places,
    coded,
    find_thousands,
    is_missing,
    map_distinct,
    moment_of,
    texts,
)

if TYPE_CHECKING:
    import pyarrow as pa

_CELLS = 32  # of a declared range
_POWERS = (-10, 41)  # of 2: from a thousandth to a million millions
Reading = tuple[Floats, list[Fault]]
"""Numbers read from cells, one row or one number each, and the faults of these cells."""

PARTS = {"time": 1, "month": 2, "weekday": 2, "hour": 2}
"""Parts of a date with the number of features of each."""

_TURNS: Mapping[str, Callable[[datetime.datetime], float]] = {
    "month": lambda moment: (moment.month - 1) / 12.0,
    "weekday": lambda moment: moment.weekday() / 7.0,
    "hour": lambda moment: moment.hour / 24.0,
}
"""Functions from a moment to the share of a calendar cycle that has passed, by the cycle's name."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A feature column as it is declared.

    Attributes:
        name: The column's.
        notation: How it writes numbers and nothing.
    """

    name: str
    notation: Notation = PLAIN

    @property
    def width(self) -> int:
        """Number of features that the column becomes."""
        return 1

    @property
    def square(self) -> float:
        """Upper bound on the sum of the squares of its features."""
        return 1.0

    @property
    def words(self) -> str:
        """Public declaration of the column, in words for plans and reports."""
        raise NotImplementedError

    def read(self, cells: pa.Array) -> Reading:
        """Return features ``[N, width]``, each a function of its own cell, and the faults of the cells.

        Args:
            cells: The column ``[N]``, as the file has it.
        """
        return self._read(self.notation.given(cells))

    def _read(self, cells: pa.Array) -> Reading:
        """Return features ``[N, width]`` and faults of cells, where marks of missing values are null."""
        raise NotImplementedError

    def _read_numbers(self, cells: pa.Array) -> Reading:
        """Return the numbers in cells, NaN for none, and the faults of invalid and missing ones."""
        values, broken = self.notation.numbers(cells)
        missing = np.isnan(values) & ~broken
        faults = [
            self._fault(NO_NUMBER, broken, cells, used=False),
            self._fault(MISSING, missing, cells),
        ]
        return values, faults

    def _fault(
        self,
        why: str,
        mask: Mask,
        cells: pa.Array,
        *,
        used: bool = True,
        declared: Any = "",
    ) -> Fault:
        """Return a fault of this column, whose records stay in use by default."""
        return Fault(
            self.name,
            why,
            mask,
            used=used,
            declared=declared,
            cells=cells,
        )


@dataclass(frozen=True, kw_only=True)
class Number(Column):
    """A number, clipped to public bounds and scaled to [-1, 1].

    Attributes:
        low: The lower bound, in the units of the table.
        high: The upper one.
        missing: What stands for a value that is missing, in the units of the table.
    """

    low: float
    high: float
    missing: float

    @property
    def words(self) -> str:
        """Bounds of the column, in words."""
        return f"[{self.low:g}, {self.high:g}]"

    def _read(self, cells: pa.Array) -> Reading:
        """Return one feature ``[N, 1]``, and the faults of invalid, missing and clipped cells."""
        values, faults = self.numbers(cells)
        is_none = np.isnan(values)
        filled = np.where(is_none, self.missing, values)
        clipped = np.clip(filled, self.low, self.high)
        middle = 0.5 * (self.low + self.high)
        half = 0.5 * (self.high - self.low)
        scaled = (clipped - middle) / half
        # Text has no -0: beside text a number of JSON would else have another sign.
        scaled += 0.0
        return scaled[:, None], faults

    def numbers(self, cells: pa.Array) -> Reading:
        """Return the numbers as written, and the faults of invalid, missing and out-of-range ones.

        They are neither clipped nor scaled: a target is, by its task.
        """
        values, faults = self._read_numbers(cells)
        is_below = values < self.low
        is_above = values > self.high
        outside = is_below | is_above
        clipped = self._fault(CLIPPED, outside, cells, declared=f"bounds {self.words}")
        faults.append(clipped)
        has_notation = bool(self.notation.decimal or self.notation.thousands)
        if not has_notation:
            marked, against = find_thousands(cells, values, self.low, self.high)
            fault = self._fault(MARKED, marked, cells)
            faults.append(replace(fault, against=against))
        return values, faults


@dataclass(frozen=True, kw_only=True)
class PaidColumn(Column):
    """A number column whose bounds a stage releases, with a feature of 0 until then.

    Attributes:
        within: A range that is public, for the grid of the stage; None where there is none.
        missing: What will stand for a value that is missing; None for the middle of the bounds.
    """

    within: tuple[float, float] | None = None
    missing: float | None = None

    @property
    def words(self) -> str:
        """Origin of the bounds, in words."""
        return "a number, its bounds released by a stage that is charged"

    @property
    def edges(self) -> Floats:
        """Edges of the cells in which a stage counts: equally spaced in ``within``, else powers of 2."""
        # What lies beyond the first or the last edge is counted in the cell beside it.
        if self.within is not None:
            low, high = self.within
            return np.linspace(low, high, _CELLS + 1)
        exponents = np.arange(*_POWERS, dtype=float)
        powers = np.exp2(exponents)
        negative = -powers[::-1]
        return np.concatenate([negative, [0.0], powers])

    def places(self, cells: pa.Array) -> Places:
        """Return each value's cell of the public grid, ``[N]``, or -1 for a missing or invalid value."""
        filled_cells = self.notation.given(cells)
        values, _ = self.notation.numbers(filled_cells)
        is_number = ~np.isnan(values)
        numbers = np.where(is_number, values, 0.0)
        edges = self.edges
        places = np.searchsorted(edges, numbers, side="right") - 1
        last = len(edges) - 2
        places_or_ends = np.clip(places, 0, last)
        return np.where(is_number, places_or_ends, -1)

    def _read(self, cells: pa.Array) -> Reading:
        """Return zeros ``[N, 1]`` in the place of features, and the faults of invalid and missing cells."""
        values, faults = self._read_numbers(cells)
        features = np.zeros((len(values), 1))
        return features, faults


@dataclass(frozen=True, kw_only=True)
class Category(Column):
    """A column of declared values, one-hot encoded, with one more feature for any other value."""

    values: tuple[Any, ...]

    @property
    def width(self) -> int:
        """Number of features: one for each value, and one for any other."""
        return len(self.values) + 1

    @property
    def words(self) -> str:
        """Declared values, in words."""
        return f"{', '.join(map(str, self.values))}, or another"

    def _read(self, cells: pa.Array) -> Reading:
        """Return one-hot features ``[N, width]``, and the faults of missing and undeclared values."""
        places = coded(cells, self.values)
        other = places < 0
        missing = is_missing(cells)
        faults = [
            self._fault(MISSING, other & missing, cells),
            self._fault(OTHER, other & ~missing, cells, declared=self.values),
        ]
        last = len(self.values)
        places_or_last = np.where(other, last, places)
        one_of_each = np.eye(self.width)
        return one_of_each[places_or_last], faults


@dataclass(frozen=True, kw_only=True)
class Ordinal(Column):
    """A column of ordered levels, which become equally spaced numbers from -1 to 1.

    Attributes:
        levels: From the lowest to the highest.
        missing: What stands for a level that is missing, in [-1, 1].
    """

    levels: tuple[Any, ...]
    missing: float

    @property
    def words(self) -> str:
        """Declared levels in order, in words."""
        return " < ".join(map(str, self.levels))

    def _read(self, cells: pa.Array) -> Reading:
        """Return one feature ``[N, 1]``, and the faults of missing values and undeclared levels."""
        places = coded(cells, self.levels)
        other = places < 0
        missing = is_missing(cells)
        step = 2.0 / (len(self.levels) - 1)
        scaled = step * places - 1.0
        fill = np.where(missing, self.missing, 0.0)
        values = np.where(other, fill, scaled)
        faults = [
            self._fault(MISSING, other & missing, cells),
            self._fault(
                OTHER,
                other & ~missing,
                cells,
                used=False,
                declared=self.levels,
            ),
        ]
        return values[:, None], faults


@dataclass(frozen=True, kw_only=True)
class Date(Column):
    """A column of dates or times, clipped to public bounds, of which declared parts become features.

    Attributes:
        low: The first moment.
        high: The last one.
        parts: Of `PARTS`, those that become features, in this order.
        format: How it is written, as Python's ``strptime`` has it; in ISO form unless it or a unit is said.
        unit: Of `UNITS`, that of a number that counts from 1970.
    """

    low: datetime.datetime
    high: datetime.datetime
    parts: tuple[str, ...]
    format: str = ""
    unit: str = ""

    @property
    def width(self) -> int:
        """Number of features, added up over the parts."""
        return sum(PARTS[part] for part in self.parts)

    @property
    def square(self) -> float:
        """Upper bound on the sum of the squares of its features: 1 for each part."""
        return float(len(self.parts))

    @property
    def words(self) -> str:
        """Bounds and parts, in words."""
        return f"{self._bounds}: {', '.join(self.parts)}"

    @property
    def _bounds(self) -> str:
        return f"{self.low:%Y-%m-%d} to {self.high:%Y-%m-%d}"

    def _read(self, cells: pa.Array) -> Reading:
        """Return the parts' features ``[N, width]``, and the faults of invalid, missing or clipped cells."""
        distinct_moments, which = map_distinct(texts(cells), self.moment)
        moments = [*distinct_moments, None]  # the last stands for a null
        features = np.array([self._features(moment) for moment in moments])
        is_none = np.array([moment is None for moment in moments])
        is_outside = np.array([self._is_outside(moment) for moment in moments])
        missing = is_missing(cells)
        form = self.format or self.unit or "dates are written like 2020-12-31, in ISO form"
        faults = [
            self._fault(
                NO_DATE,
                is_none[which] & ~missing,
                cells,
                used=False,
                declared=form,
            ),
            self._fault(MISSING, missing, cells),
            self._fault(
                CLIPPED,
                is_outside[which],
                cells,
                declared=f"bounds {self._bounds}",
            ),
        ]
        return features[which], faults

    def _is_outside(self, moment: datetime.datetime | None) -> bool:
        """Return whether a moment lies outside the bounds, false for None."""
        if moment is None:
            return False
        return not self.low <= moment <= self.high

    def moment(self, cell: Any) -> datetime.datetime | None:
        """Return the time that a cell holds, None if it is none."""
        return moment_of(cell, self.format, self.unit)

    def written(self, moment: datetime.datetime) -> str | int:
        """Return a moment in the notation of the column's cells."""
        if self.unit:
            since = moment - datetime.datetime(1970, 1, 1)
            seconds = since // datetime.timedelta(seconds=1)
            return seconds * UNITS[self.unit]
        if self.format:
            return moment.strftime(self.format)
        return moment.date().isoformat()

    def _features(self, moment: datetime.datetime | None) -> list[float]:
        """Return a moment's features: a number in [-1, 1] for time, a sine and a cosine for a cycle."""
        if moment is None:
            return [0.0] * self.width
        moment_or_low = max(moment, self.low)
        clipped = min(moment_or_low, self.high)
        features = []
        for part in self.parts:
            if part == "time":
                since = clipped - self.low
                share = since / (self.high - self.low)
                features.append(2.0 * share - 1.0)
            else:
                turn_at = _TURNS[part]
                angle = 2.0 * math.pi * turn_at(clipped)
                features.append(math.sin(angle))
                features.append(math.cos(angle))
        return features
