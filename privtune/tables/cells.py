"""The content of a table's cell: a number, a moment, a label, or nothing.

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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from privtune.imports import PostponedModule

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import compute, types
else:  # records that are no table need none of it, and it takes a tenth of a second
    pa = PostponedModule("pyarrow")
    compute = PostponedModule("pyarrow.compute")
    types = PostponedModule("pyarrow.types")

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_T = TypeVar("_T")

# Why a record is not as declared.
MISSING = "missing"
CLIPPED = "clipped to a bound"
OTHER = "not declared"
NO_NUMBER = "not a number"
NO_DATE = "no date"
LABEL = "with a label that is not declared"
MARKED = "perhaps thousands with a point"

UNREADABLE = "\0"  # stands for what cannot be read: no number, no date, no class
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Units of a time since 1970, with the number of each in a second."""

_EPOCH = datetime.datetime(1970, 1, 1)
_NOTHING = ("", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none")
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$"
_MARKS = {" ": "[ \u00a0\u2009\u202f]", "'": "['\u2019]", ".": r"\."}
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}(\.\d{3})+$"
_DATE = re.compile(r"\d{4}-?\d\d-?\d\d([T ].*)?")
_TRUTHS: dict[float | str, bool] = {
    0.0: False,
    "f": False,
    "no": False,
    "n": False,
    "off": False,
    1.0: True,
    "t": True,
    "yes": True,
    "y": True,
    "on": True,
}
"""Truth values of labels, in which ``true`` and ``false`` already are the numbers 1 and 0."""


@dataclass(frozen=True)
class Fault:
    """Records that are not as declared, in one column and for one reason.

    Attributes:
        column: Its name; empty where it is the whole record.
        why: One of the constants above, or words that are shown to the curator.
        records: Which of the records ``[N]`` are so.
        used: Whether the record counts all the same: its value was clipped, or filled.
        declared: What the column may hold: a list of values, or words.
        cells: The column ``[N]``, for examples of what the file says.
        against: How many records show that the column has no such fault.
    """

    column: str
    why: str
    records: Mask
    used: bool = False
    declared: tuple[Any, ...] | str = ""
    cells: pa.Array | None = None
    against: int = 0

    def count_values(self) -> Counter[str]:
        """Return the text of the faulty cells with their counts, without empty cells."""
        if self.cells is None:
            return Counter()
        is_faulty = pa.array(self.records)
        faulty = self.cells.filter(is_faulty)
        is_filled = pa.array(~is_missing(faulty))
        words = texts(faulty.filter(is_filled))
        counts: Counter[str] = Counter()
        for pair in words.value_counts().to_pylist():
            word = pair["values"]
            counts[word] = pair["counts"]
        return counts


@dataclass(frozen=True)
class Notation:
    """Notation of a column: how it writes numbers and missing values.

    Attributes:
        decimal: The sign before the digits after the point; a point where it is empty.
        thousands: The mark between groups of digits; none where it is empty.
        na_values: Words that stand for nothing, beside those that always do.
    """

    decimal: str = ""
    thousands: str = ""
    na_values: tuple[Any, ...] = ()

    def given(self, column: pa.Array) -> pa.Array:
        """Return the cells with null in the place of declared words for missing values."""
        if not self.na_values:
            return column
        places = coded(column, self.na_values)
        is_nothing = pa.array(places >= 0)
        null = pa.scalar(None, column.type)
        return compute.if_else(is_nothing, null, column)

    def numbers(self, column: pa.Array) -> tuple[Floats, Mask]:
        """Return the numbers in a column, NaN for none, and a mask of cells that hold other text."""
        if types.is_string(column.type):
            cells = self._in_plain_notation(_trimmed(column))
            values = _numbers_in_text(cells)
            broken = np.isnan(values) & ~is_missing(column)
            return values, broken
        if types.is_boolean(column.type):
            column = column.cast("int8")  # Arrow casts no boolean to a float
        numbers = column.cast("float64", safe=False)
        nowhere = np.zeros(len(numbers), dtype=bool)
        return _to_numpy(numbers), nowhere

    def _in_plain_notation(self, cells: pa.Array) -> pa.Array:
        """Return numbers rewritten with a decimal point and no marks, others as unreadable text."""
        if self.decimal in ("", ".") and not self.thousands:
            return cells
        decimal = self.decimal
        if not decimal:
            decimal = "," if self.thousands == "." else "."
        point = re.escape(decimal)
        mark = _MARKS.get(self.thousands)
        if mark is None:
            mark = re.escape(self.thousands)
        integer = r"\d*"
        if mark:
            # Marks stand before groups of three digits (in India also of two): 1,5 is not 15.
            integer = rf"\d{{1,3}}({mark}\d{{2,3}})*{mark}\d{{3}}|\d*"
        pattern = rf"^[+-]?({integer})({point}\d*)?(e[+-]?\d+)?$"
        fits = compute.match_substring_regex(cells, pattern)
        plain = cells
        if mark:
            plain = compute.replace_substring_regex(plain, mark, "")
        plain = compute.replace_substring_regex(plain, point, ".")
        has_digit = compute.match_substring_regex(cells, "[0-9]")
        # A word without a digit stays as it is, since it may stand for nothing.
        unreadable = pa.scalar(UNREADABLE)
        rest = compute.if_else(has_digit, unreadable, cells)
        return compute.if_else(fits, plain, rest)


PLAIN = Notation()


def _numbers_in_text(cells: pa.Array) -> Floats:
    """Return the numbers in plain notation that trimmed text holds, ``[N]``, NaN for other text.

    Arrow reads what is written in digits; the rest, such as inf or true, goes through Python's own reader,
    once for each text.

    Args:
        cells: Text in small letters, without blanks around it ``[N]``; null for nothing.
    """
    is_number = compute.match_substring_regex(cells, _NUMBER)
    null = pa.scalar(None, pa.string())
    numbers = compute.if_else(is_number, cells, null).cast("float64")
    values = np.array(_to_numpy(numbers))
    is_number_or_null = _to_numpy(is_number.fill_null(True))
    others = np.flatnonzero(~is_number_or_null)
    if len(others):
        rest = cells.take(pa.array(others))
        distinct_numbers, which = map_distinct(rest, _float_of)
        numbers_of_distinct = np.array(distinct_numbers)
        values[others] = numbers_of_distinct[which]
    return values


def find_thousands(
    column: pa.Array,
    values: Floats,
    low: float,
    high: float,
) -> tuple[Mask, int]:
    """Return a mask of cells where 1.234 may mean 1,234, and the number of cells that speak against it.

    Args:
        column: The cells ``[N]``.
        values: What they were read as ``[N]``, NaN for no number.
        low: The lower bound that is declared.
        high: The upper one.

    Returns:
        Which cells may be thousands ``[N]``, and the number of other cells with digits after a point.
    """
    is_number = ~np.isnan(values)
    fractions, _ = np.modf(values)
    fractional = is_number & (fractions != 0.0)
    # A number of thousands was read as a thousandth of itself.
    is_above = values >= low / 1000.0
    is_below = values <= high / 1000.0
    inside = is_above & is_below
    candidates = fractional & inside
    if not types.is_string(column.type) or not candidates.any():
        nowhere = np.zeros(len(values), dtype=bool)
        return nowhere, int(fractional.sum())
    matches = compute.match_substring_regex(_trimmed(column), _THOUSANDS)
    in_groups = _to_numpy(matches.fill_null(False))
    marked = in_groups & inside
    decimals = fractional & ~marked
    return marked, int(decimals.sum())


def column_of(cells: Sequence[Any]) -> pa.Array:
    """Return Python's cells as a column of numbers or booleans if all are such, else of text."""
    try:
        column = pa.array(cells)
        if is_plain(column.type):
            return column
    except (pa.ArrowException, ValueError, OverflowError):  # of several types, or too large
        pass
    return _text_column(cells)


def is_plain(kind: pa.DataType) -> bool:
    """Return whether a type is one of whole numbers, floating numbers or booleans."""
    checks = (types.is_integer, types.is_floating, types.is_boolean)
    return any(check(kind) for check in checks)


def _text_column(cells: Iterable[Any]) -> pa.Array:
    """Return Python's cells as a column of text, each converted by itself."""
    words: list[str | None] = []
    for cell in cells:
        if cell is None:
            words.append(None)
        else:
            words.append(_text_of(cell))
    return pa.array(words, pa.string())


def _text_of(cell: Any) -> str:
    """Return a cell as text, the same for a number whether its column is of numbers or of text.

    It has no point: text beside it may be written otherwise, and would decide how it is read.
    """
    if isinstance(cell, dict | list):
        return UNREADABLE
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, float | Decimal) and math.isfinite(cell):
        decimal = Decimal(str(cell))
        sign, digits, exponent = decimal.as_tuple()
        mantissa = "".join(map(str, digits))
        if sign:
            mantissa = f"-{mantissa}"
        return f"{mantissa}e{exponent}" if exponent else mantissa
    return str(cell).encode(errors="replace").decode()  # JSON may hold half of a character


def texts(column: pa.Array) -> pa.Array:
    """Return the cells of a column as text.

    Ids and classes are compared by it: a cell is the same text whatever type its column has.
    """
    if types.is_floating(column.type) or types.is_boolean(column.type):
        # Arrow writes 1.0 and true where Python writes 1 and True: an id would be two.
        return _text_column(column.to_pylist())
    return column.cast("string")


def _trimmed(column: pa.Array) -> pa.Array:
    """Return the cells of a text column in lower case, without blanks around them."""
    trimmed = compute.utf8_trim_whitespace(column)
    return compute.utf8_lower(trimmed)


def is_missing(column: pa.Array) -> Mask:
    """Return a mask ``[N]`` of cells that are empty, or hold a word for missing such as NA or null.

    In a column of numbers, NaN is nothing, too.
    """
    if types.is_string(column.type):
        words = pa.array(_NOTHING)
        is_word = compute.is_in(_trimmed(column), words)
        is_null = compute.is_null(column)
        is_nothing = compute.or_(is_null, is_word)
    else:
        is_nothing = compute.is_null(column, nan_is_null=True)
    return np.asarray(is_nothing, dtype=bool)


def number_of(cell: Any) -> float | None:
    """Return the number in a cell, with 1 and 0 for ``true`` and ``false``, or None if it holds none."""
    if isinstance(cell, str):
        word = cell.strip().lower()
        if word in ("true", "false"):
            return float(word == "true")
        if "_" in cell:  # Python reads 1_000 as a number, which no table means
            return None
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return None


def _float_of(cell: Any) -> float:
    """Return the number that a cell holds, NaN if it is none."""
    number = number_of(cell)
    if number is None:
        return math.nan
    return number


def moment_of(
    cell: Any,
    form: str = "",
    unit: str = "",
) -> datetime.datetime | None:
    """Return the moment in a cell as a time without a zone, or None if it holds something else.

    Args:
        cell: What a table holds.
        form: How the time is written, as ``strptime`` has it; in ISO form where it is empty.
        unit: One of `UNITS`, of a number that counts from 1970.
    """
    text = str(cell).strip()
    try:
        if unit:
            seconds = float(text) / UNITS[unit]
            return _EPOCH + datetime.timedelta(seconds=seconds)
        if form:
            moment = datetime.datetime.strptime(text, form)
        elif _DATE.fullmatch(text):  # else milliseconds since 1970 could be a day of the year 1612
            moment = datetime.datetime.fromisoformat(text)
        else:
            return None
        if moment.tzinfo is not None:
            moment = moment.astimezone(datetime.UTC).replace(tzinfo=None)
        return moment
    except (ValueError, OverflowError):
        return None


def label_of(value: Any) -> float | str:
    """Return the form in which a label is compared: a number, or text without case and blanks."""
    composed = unicodedata.normalize("NFKC", str(value))
    letters = []
    for letter in composed.casefold():
        is_format_mark = unicodedata.category(letter) == "Cf"
        if not is_format_mark:
            letters.append(letter)
    text = "".join(letters).strip()
    number = _float_of(text)
    if math.isnan(number):
        return "".join(text.split())
    return number


def placer(values: Sequence[Any]) -> Callable[[Any], int]:
    """Return a function from a cell to the place of its declared value, or -1 for another value.

    Case and blanks count only where declared values differ in nothing else. Where one of two values
    means yes and one no (yes/no, true/false, t/f, 1/0, on/off), each stands for all such words.
    """
    key: Callable[[Any], Any] = label_of
    labels = list(map(label_of, values))
    truths = list(map(_TRUTHS.get, labels))
    if len(set(labels)) < len(labels):
        key = _exact_label_of
    elif len(truths) == 2 and set(truths) == {False, True}:
        key = _truth_of
    places = {key(value): place for place, value in enumerate(values)}

    def place_of(cell: Any) -> int:
        label = key(cell)
        return places.get(label, -1)

    return place_of


def _truth_of(value: Any) -> bool | int:
    """Return the truth value of a label such as ``yes``, or -1 for any other label."""
    return _TRUTHS.get(label_of(value), -1)


def _exact_label_of(value: Any) -> float | str:
    """Return a label as a number, or as text with its case and its inner blanks."""
    text = str(value).strip()
    number = _float_of(text)
    if math.isnan(number):
        return text
    return number


def differ(values: Sequence[Any]) -> bool:
    """Return whether all declared values differ, if only in case or in inner blanks."""
    labels = set(map(_exact_label_of, values))
    return len(labels) == len(values)


def coded(column: pa.Array, values: Sequence[Any]) -> Places:
    """Return the place of each cell's value among the declared ones, ``[N]``, or -1 for any other.

    Args:
        column: The cells.
        values: All that are declared; their places are what is returned.
    """
    places_of_distinct, which = map_distinct(column, placer(values))
    places_of_distinct.append(-1)  # the last stands for a null
    places = np.array(places_of_distinct, dtype=np.int64)
    return places[which]


def labelled(
    name: str,
    cells: pa.Array,
    classes: Sequence[Any],
    *,
    without: str,
) -> tuple[Places, list[Fault]]:
    """Return the class numbers of records, and the faults of labels that are missing or undeclared.

    Args:
        name: The column.
        cells: What it holds ``[N]``.
        classes: All that are declared.
        without: What a record without a label is called, such as "without a target".
    """
    places = coded(cells, classes)
    is_other = places < 0
    missing = is_missing(cells)
    absent = Fault(name, without, is_other & missing, cells=cells)
    undeclared = Fault(
        name,
        LABEL,
        is_other & ~missing,
        declared=tuple(classes),
        cells=cells,
    )
    return places, [absent, undeclared]


def unusable(faults: Iterable[Fault], count: int) -> Mask:
    """Return a mask ``[N]`` of the records that some fault makes unusable.

    Args:
        faults: What is not as declared; that of a record that is used all the same counts for nothing.
        count: How many records there are.
    """
    mask = np.zeros(count, dtype=bool)
    for fault in faults:
        if not fault.used:
            mask |= fault.records
    return mask


def map_distinct(column: pa.Array, function: Callable[[Any], _T]) -> tuple[list[_T], Places]:
    """Return a function's values at the distinct cells, and each cell's place among these, -1 for null.

    A column of labels or days has few different ones, and Python's functions are slow.

    Args:
        column: The cells ``[N]``.
        function: Takes a cell as Python has it.
    """
    encoded = column.dictionary_encode()
    distinct_cells = encoded.dictionary.to_pylist()
    results = [function(cell) for cell in distinct_cells]
    indices = encoded.indices.fill_null(-1)
    places = np.asarray(indices, dtype=np.int64)
    return results, places


def _to_numpy(column: pa.Array) -> Any:
    """Return a column as a numpy array, copied where Arrow's memory cannot be shared."""
    return column.to_numpy(zero_copy_only=False)
