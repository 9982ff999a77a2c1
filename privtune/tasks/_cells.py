"""What a cell of a table holds: a number, a moment, a label, or nothing.

It is a function of the cell and of what is declared, never of another record. This module and
``_columns`` need NumPy and PyArrow alone.
"""

from __future__ import annotations

import datetime
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, types

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_T = TypeVar("_T")

MISSING, CLIPPED, OTHER = "missing", "clipped to a bound", "not declared"
NO_NUMBER, NO_DATE, LABEL = "not a number", "no date", "with a label that is not declared"
MARKED = "perhaps thousands with a point"
"""Why a record is not as declared."""

UNREADABLE = "\0"  # stands for what cannot be read: no number, no date, no class
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Units of a time since 1970, by how many are a second."""

_NOTHING = ("", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none")
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$"
_MARKS = {" ": "[ \u00a0\u2009\u202f]", "'": "['\u2019]", ".": r"\."}
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}(\.\d{3})+$"
_DATE = re.compile(r"\d{4}-?\d\d-?\d\d([T ].*)?")
_TRUTHS: dict[float | str, bool] = {
    **dict.fromkeys((0.0, "f", "no", "n", "off"), False),
    **dict.fromkeys((1.0, "t", "yes", "y", "on"), True),
}


@dataclass(frozen=True)
class Fault:
    """Which of some records are not as declared, in one column and in one way."""

    column: str  # empty where it is the whole record
    why: str
    records: Mask
    used: bool = False  # the record counts all the same: its value was clipped, or filled
    declared: tuple[Any, ...] | str = ""  # what the column may hold
    cells: pa.Array | None = None
    against: int = 0  # records that show that the column has no such fault

    def written(self) -> Counter[str]:
        """Return what such records hold, and how often."""
        if self.cells is None:
            return Counter()
        held = self.cells.filter(pa.array(self.records))
        known = texts(held.filter(pa.array(~is_missing(held)))).value_counts()
        return Counter({one["values"]: one["counts"] for one in known.to_pylist()})


@dataclass(frozen=True)
class Notation:
    """How a column writes numbers, and nothing, as it is declared."""

    decimal: str = ""  # a point, where nothing is said
    thousands: str = ""
    na_values: tuple[Any, ...] = ()

    def given(self, column: pa.Array) -> pa.Array:
        """Return the cells, null where a declared word for nothing stands."""
        if not self.na_values:
            return column
        nothing = pa.array(coded(column, self.na_values) >= 0)
        return compute.if_else(nothing, pa.scalar(None, column.type), column)

    def numbers(self, column: pa.Array) -> tuple[Floats, Mask]:
        """Return the numbers in a column, NaN for none, and where a cell is neither number nor nothing."""
        if not types.is_string(column.type):
            whole = column.cast("int8") if types.is_boolean(column.type) else column
            values = _numpy(whole.cast("float64", safe=False))
            return values, np.zeros(len(values), dtype=bool)
        cells = self._plain(_trimmed(column))
        plain = compute.match_substring_regex(cells, _NUMBER)
        values = np.array(
            _numpy(compute.if_else(plain, cells, pa.scalar(None, pa.string())).cast("float64"))
        )
        other = np.flatnonzero(~_numpy(plain.fill_null(True)))
        if len(other):
            found, which = distinct(cells.take(pa.array(other)), number_of)
            values[other] = np.array([math.nan if v is None else v for v in found])[which]
        return values, np.isnan(values) & ~is_missing(column)

    def _plain(self, cells: pa.Array) -> pa.Array:
        """Return numbers with a point and no marks; what is written otherwise is no number."""
        if self.decimal in ("", ".") and not self.thousands:
            return cells
        point = re.escape(self.decimal or ("," if self.thousands == "." else "."))
        mark = _MARKS.get(self.thousands, re.escape(self.thousands))
        # Marks stand before groups of three digits (in India also of two): 1,5 is not 15.
        whole = rf"\d{{1,3}}({mark}\d{{2,3}})*{mark}\d{{3}}|\d*" if mark else r"\d*"
        fits = compute.match_substring_regex(cells, rf"^[+-]?({whole})({point}\d*)?(e[+-]?\d+)?$")
        plain = cells
        if mark:
            plain = compute.replace_substring_regex(plain, mark, "")
        plain = compute.replace_substring_regex(plain, point, ".")
        number = compute.match_substring_regex(cells, "[0-9]")
        return compute.if_else(fits, plain, compute.if_else(number, pa.scalar(UNREADABLE), cells))


PLAIN = Notation()


def thousands(column: pa.Array, values: Floats, low: float, high: float) -> tuple[Mask, int]:
    """Return where 1.234 may stand for 1,234 within bounds, and how many cells show that it does not."""
    broken = ~np.isnan(values) & (np.modf(values)[0] != 0.0)
    inside = (values >= low / 1000.0) & (values <= high / 1000.0)
    if not types.is_string(column.type) or not (broken & inside).any():
        return np.zeros(len(values), dtype=bool), int(broken.sum())
    marked = compute.match_substring_regex(_trimmed(column), _THOUSANDS).fill_null(False)
    found = np.array(_numpy(marked)) & inside
    return found, int((broken & ~found).sum())


def column_of(cells: Sequence[Any]) -> pa.Array:
    """Return cells of Python's as a column: of numbers, of booleans, else of text."""
    try:
        found = pa.array(cells)
        if is_plain(found.type):
            return found
    except (pa.ArrowException, ValueError, OverflowError):  # of several types, or too large
        pass
    return pa.array([None if cell is None else _text(cell) for cell in cells], pa.string())


def is_plain(kind: pa.DataType) -> bool:
    """Say whether a type is one of whole numbers, floating numbers or booleans."""
    return any(known(kind) for known in (types.is_integer, types.is_floating, types.is_boolean))


def _text(cell: Any) -> str:
    """Return a cell as text: a number is the same in a column of others, and of text.

    It has no point: text beside it may be written otherwise, and would decide how it is read.
    """
    if isinstance(cell, dict | list):
        return UNREADABLE
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, float | Decimal) and math.isfinite(cell):
        sign, digits, exponent = Decimal(str(cell)).as_tuple()
        whole = "-" * sign + "".join(map(str, digits))
        return f"{whole}e{exponent}" if exponent else whole
    return str(cell).encode(errors="replace").decode()  # JSON may hold half of a character


def texts(column: pa.Array) -> pa.Array:
    """Return the cells of a column as text."""
    if types.is_floating(column.type) or types.is_boolean(column.type):
        return pa.array(
            [None if cell is None else _text(cell) for cell in column.to_pylist()], pa.string()
        )
    return column.cast("string")


def _trimmed(column: pa.Array) -> pa.Array:
    return compute.utf8_lower(compute.utf8_trim_whitespace(column))


def is_missing(column: pa.Array) -> Mask:
    """Return which cells hold nothing, or a word for it."""
    if types.is_string(column.type):
        word = compute.is_in(_trimmed(column), pa.array(_NOTHING))
        return np.asarray(compute.or_(compute.is_null(column), word), dtype=bool)
    return np.asarray(compute.is_null(column, nan_is_null=True), dtype=bool)


def number_of(cell: Any) -> float | None:
    """Return the number that a cell holds, None if it is none."""
    if isinstance(cell, str) and (said := cell.strip().lower()) in ("true", "false"):
        return float(said == "true")
    try:
        return None if isinstance(cell, str) and "_" in cell else float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def moment_of(cell: Any, form: str = "", unit: str = "") -> datetime.datetime | None:
    """Return a cell as a time without a zone, None if it is none; in ISO form unless another is said."""
    text = str(cell).strip()
    try:
        if unit:
            seconds = float(text) / UNITS[unit]
            return datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds)
        if form:
            found = datetime.datetime.strptime(text, form)
        elif _DATE.fullmatch(text):  # else milliseconds since 1970 could be a day of the year 1612
            found = datetime.datetime.fromisoformat(text)
        else:
            return None
        zoned = found.tzinfo is not None
        return found.astimezone(datetime.UTC).replace(tzinfo=None) if zoned else found
    except (ValueError, OverflowError):
        return None


def label_of(value: Any) -> float | str:
    """Return what is compared of a label: a number, or text without case, blanks and format marks."""
    text = unicodedata.normalize("NFKC", str(value)).casefold()
    text = "".join(one for one in text if unicodedata.category(one) != "Cf").strip()
    number = number_of(text)
    return "".join(text.split()) if number is None or math.isnan(number) else number


def placer(values: Sequence[Any]) -> Callable[[Any], int]:
    """Return what says which of the declared values a cell holds; -1 for another.

    Case and blanks count only where declared values differ in nothing else. Where one of two values
    means yes and one no (yes/no, true/false, t/f, 1/0, on/off), each stands for all such words.
    """
    key: Callable[[Any], Any] = label_of
    known = [label_of(value) for value in values]
    if len(set(known)) < len(known):
        key = _exact
    elif len(known) == 2 and {_TRUTHS.get(one) for one in known} == {False, True}:
        key = lambda value: _TRUTHS.get(label_of(value), -1)  # noqa: E731
    place = {key(value): index for index, value in enumerate(values)}
    return lambda cell: place.get(key(cell), -1)


def _exact(value: Any) -> float | str:
    text = str(value).strip()
    number = number_of(text)
    return text if number is None or math.isnan(number) else number


def differ(values: Sequence[Any]) -> bool:
    """Say whether declared values can be told apart."""
    return len(set(map(_exact, values))) == len(values)


def coded(column: pa.Array, values: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return which of the declared values each cell holds; -1 for another, or none."""
    found, which = distinct(column, placer(values))
    return np.array([*found, -1], dtype=np.int64)[which]


def labelled(
    name: str, cells: pa.Array, classes: Sequence[Any], *, without: str
) -> tuple[npt.NDArray[np.int64], list[Fault]]:
    """Return the classes of some records, and which have none: it is missing, or not declared."""
    found, missing = coded(cells, classes), is_missing(cells)
    return found, [
        Fault(name, without, (found < 0) & missing, cells=cells),
        Fault(name, LABEL, (found < 0) & ~missing, declared=tuple(classes), cells=cells),
    ]


def unusable(faults: Iterable[Fault], count: int) -> Mask:
    """Return which of some records cannot be used."""
    found = np.zeros(count, dtype=bool)
    for fault in faults:
        found |= fault.records & (not fault.used)
    return found


def distinct(
    column: pa.Array, function: Callable[[Any], _T]
) -> tuple[list[_T], npt.NDArray[np.int64]]:
    """Return a function of each different cell, and which of them each cell is; -1 for a null."""
    known = column.dictionary_encode()
    found = [function(cell) for cell in known.dictionary.to_pylist()]
    return found, np.asarray(known.indices.fill_null(-1), dtype=np.int64)


def _numpy(column: pa.Array) -> Any:
    return column.to_numpy(zero_copy_only=False)
