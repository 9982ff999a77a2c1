"""Columns of a table, read and checked from their declaration in a spec."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from privtune.errors import InvalidInputError
from privtune.names import refuse_fields
from privtune.tables.cells import PLAIN, UNITS, Notation, differ, moment_of, number_of, placer
from privtune.tables.columns import PARTS, Category, Column, Date, Number, Ordinal, PaidColumn

NOTATION = ("decimal", "thousands", "na_values")
"""Fields of a table, and of a column, that say how cells are written."""

PAID = "paid"
"""The word in a spec for a public value that a stage releases, and pays for, before the arms."""

_BOUNDS = "must give [low, high] of each feature column"
_DATA_DEPENDENT = (
    "auto", "minmax", "standard", "data", "robust", "quantile", "mean", "median", "mode",
)  # fmt: skip
_KINDS = ("bounds", "categories", "ordinal", "date")
_OPTIONS = {
    "bounds": ("missing", "decimal", "thousands", "na_values"),
    PAID: ("within", "missing", "decimal", "thousands", "na_values"),
    "categories": ("na_values",),
    "ordinal": ("missing", "na_values"),
    "date": ("parts", "format", "unit", "na_values"),
}
"""Optional fields of a column by its kind, in the order in which errors list them."""


def read_columns(
    bounds: Any,
    columns: Any,
    notation: Notation,
) -> tuple[Column, ...]:
    """Return the columns that the ``bounds`` and ``columns`` of a spec declare.

    Args:
        bounds: ``[low, high]`` by name.
        columns: By name what a column is.
        notation: How the table writes numbers and nothing.

    Raises:
        InvalidInputError: If one is not well declared, or declared twice, or there is none.
    """
    features: dict[str, Column] = {}
    fields = {"task.bounds": bounds, "task.columns": columns}
    for field, declaration in fields.items():
        for key, how in _read_mapping(field, declaration).items():
            name = str(key)
            if name in features:  # 1 and "1" are two keys of YAML, and one column
                raise InvalidInputError(field, name, "is declared twice")
            features[name] = _read_column(f"{field}.{name}", name, how, notation)
    if not features:
        raise InvalidInputError("task.bounds", bounds, _BOUNDS)
    return tuple(features.values())


def _read_mapping(field: str, declaration: Any) -> Mapping[Any, Any]:
    """Return a declaration of columns by name, or refuse one that is no mapping.

    ``bounds: minmax`` and the like are refused with their reason, before they are no mapping.
    """
    columns = declaration or {}
    _refuse_statistics(columns)
    if not isinstance(columns, Mapping):
        raise InvalidInputError(field, columns, _BOUNDS, "{age: [18, 100]} is one.")
    return columns


def read_notation(
    field: str,
    options: Mapping[str, Any],
    base: Notation = PLAIN,
) -> Notation:
    """Return the notation that the fields ``decimal``, ``thousands`` and ``na_values`` declare.

    Args:
        field: Where the fields stand in the spec, for errors.
        options: The fields of a table or of a column.
        base: What holds where they say nothing.
    """
    fields = {name: options[name] for name in NOTATION if name in options}
    decimal = fields.get("decimal", ".")
    if decimal not in (".", ","):
        raise InvalidInputError(f"{field}.decimal", decimal, 'must be "." or ","')
    mark = fields.get("thousands", "")
    if mark not in ("", ".", ",", " ", "'"):
        raise InvalidInputError(f"{field}.thousands", mark, 'must be ".", ",", " " or "\'"')
    if "na_values" in fields:
        fields["na_values"] = values_of(f"{field}.na_values", fields["na_values"], least=1)
    notation = replace(base, **fields)
    if notation.thousands and notation.thousands == notation.decimal:
        raise InvalidInputError(
            f"{field}.thousands",
            notation.thousands,
            "must differ from decimal",
        )
    return notation


def _refuse_statistics(value: Any, field: str = "task.bounds") -> None:
    """Refuse a word such as ``minmax``, which asks for a statistic of the records."""
    if isinstance(value, str) and value in _DATA_DEPENDENT:
        raise InvalidInputError(
            field,
            value,
            "must be public numbers for each feature: a minimum, maximum, mean or deviation of the "
            "records is a release about them that nothing charges",
            "Write [low, high] of each column from what is known without the data, or bounds: paid with a "
            "stage of quantiles.",
        )


@dataclass(frozen=True)
class _Declaration:
    """Declaration of one column in a spec.

    Attributes:
        field: Where it stands in the spec, for errors.
        name: The column's.
        notation: How the column writes numbers and nothing.
        options: What the spec says, by the names of its fields.
    """

    field: str
    name: str
    notation: Notation
    options: Mapping[str, Any]

    @property
    def common(self) -> dict[str, Any]:
        """The arguments that every kind of column takes."""
        return {"name": self.name, "notation": self.notation}

    def refusal(
        self,
        option: str,
        value: Any,
        allowed: str,
    ) -> InvalidInputError:
        """Return the error for an invalid option of the column."""
        return InvalidInputError(f"{self.field}.{option}", value, allowed)


def _read_column(
    field: str,
    name: str,
    how: Any,
    notation: Notation,
) -> Column:
    """Return the column that its options declare, or refuse an invalid declaration.

    Args:
        field: Where it stands in the spec, for errors.
        name: The column's.
        how: Its options; bounds may stand without their name.
        notation: How the table writes numbers and nothing.
    """
    _refuse_statistics(how)
    options = how if isinstance(how, Mapping) else {"bounds": how}
    kinds = [kind for kind in _KINDS if kind in options]
    if len(kinds) != 1:
        raise InvalidInputError(
            field,
            dict(options),
            "must say one of bounds, categories, ordinal and date",
        )
    (kind,) = kinds
    reader = kind
    owner = kind
    if kind == "bounds" and options[kind] == PAID:
        reader = PAID
        owner = "bounds: paid"
    unknown = set(options) - {kind, *_OPTIONS[reader]}
    if unknown:
        refuse_fields(field, unknown, _OPTIONS[reader], owner)
    column_notation = read_notation(field, options, notation)
    declaration = _Declaration(field, name, column_notation, options)
    return _READERS[reader](declaration)


def _read_number(declaration: _Declaration) -> Number:
    """Return a number column with its bounds, filling missing values with their middle by default.

    The name of a statistic as a fill is refused: it would be computed from the records.
    """
    field = declaration.field
    low, high = pair_of(field, declaration.options["bounds"])
    fill = declaration.options.get("missing", 0.5 * (low + high))
    _refuse_statistics(fill, f"{field}.missing")
    number = number_of(fill)
    if number is None or not low <= number <= high:
        raise declaration.refusal("missing", fill, "must be a number within the bounds")
    return Number(**declaration.common, low=low, high=high, missing=number)


def _read_paid(declaration: _Declaration) -> PaidColumn:
    """Return a number column whose bounds a stage releases."""
    range_option = declaration.options.get("within")
    fill = declaration.options.get("missing")
    number = None
    if fill is not None:
        number = number_of(fill)
        if number is None or not math.isfinite(number):
            raise declaration.refusal("missing", fill, "must be a finite number")
    within = None
    if range_option is not None:
        within = pair_of(f"{declaration.field}.within", range_option)
    return PaidColumn(**declaration.common, within=within, missing=number)


def _read_category(declaration: _Declaration) -> Category:
    """Return a column of categories from its list of values."""
    listing = declaration.options["categories"]
    values = values_of(f"{declaration.field}.categories", listing, least=1)
    return Category(**declaration.common, values=values)


def _read_ordinal(declaration: _Declaration) -> Ordinal:
    """Return a column of ordered levels, filling missing ones with their middle by default."""
    listing = declaration.options["ordinal"]
    levels = values_of(f"{declaration.field}.ordinal", listing, least=2)
    fill = declaration.options.get("missing")
    highest = len(levels) - 1
    place = highest / 2
    if fill is not None:
        place = placer(levels)(fill)
    if place < 0:
        raise declaration.refusal("missing", fill, "must be one of the levels")
    missing = 2.0 * place / highest - 1.0  # evenly from -1 to 1
    return Ordinal(**declaration.common, levels=levels, missing=missing)


def _read_date(declaration: _Declaration) -> Date:
    """Return a column of dates from its bounds, parts, format and unit."""
    options = declaration.options
    low, high = _ends_of(declaration)
    parts = options.get("parts", ["time"])
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        parts = [parts]
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise declaration.refusal("parts", unknown, f"must be of {', '.join(PARTS)}")
    form = options.get("format", "")
    unit = options.get("unit", "")
    if form and (unit or not _is_format(form)):
        raise declaration.refusal(
            "format",
            form,
            "must say the year, and what else it holds, as Python's strptime has it, such as %d.%m.%Y, and "
            "goes without a unit",
        )
    if unit and unit not in UNITS:
        raise declaration.refusal("unit", unit, f"must be of {', '.join(UNITS)}, since 1970")
    distinct_parts = tuple(dict.fromkeys(parts))
    return Date(
        **declaration.common,
        low=low,
        high=high,
        parts=distinct_parts,
        format=form,
        unit=unit,
    )


def _ends_of(declaration: _Declaration) -> tuple[datetime.datetime, datetime.datetime]:
    """Return the first and the last moment of a column of dates, or refuse them."""
    pair = declaration.options["date"]
    ends = []
    if isinstance(pair, list | tuple):
        ends = list(map(moment_of, pair))
    if len(ends) == 2:
        low, high = ends
        if low is not None and high is not None and low < high:
            return low, high
    raise declaration.refusal(
        "date",
        pair,
        "must be [first, last], dates in ISO form, first < last",
    )


_READERS: Mapping[str, Callable[[_Declaration], Column]] = {
    "bounds": _read_number,
    PAID: _read_paid,
    "categories": _read_category,
    "ordinal": _read_ordinal,
    "date": _read_date,
}


def _is_format(form: Any) -> bool:
    """Return whether a format of dates can be read back and contains the year.

    Without a year, all dates would be of 1900 and beyond the bounds.
    """
    if not isinstance(form, str):
        return False
    day = datetime.datetime(2001, 2, 3)
    moment = moment_of(day.strftime(form), form)
    return moment is not None and moment.year == day.year


def pair_of(field: str, pair: Any) -> tuple[float, float]:
    """Return ``[low, high]`` as two finite numbers in order, or refuse anything else.

    Args:
        field: Where it stands in the spec, for errors.
        pair: What stands there.

    Raises:
        InvalidInputError: If it is no pair, or not finite, or in the wrong order.
    """
    try:
        low, high = (float(value) for value in pair)
    except (TypeError, ValueError, OverflowError):
        remedy = ""
        if isinstance(pair, str) and field.startswith("task.columns."):
            remedy = "A column of words has {categories: [...]}, one of days {date: [first, last]}."
        raise InvalidInputError(field, pair, "must be [low, high]", remedy) from None
    if low < high and math.isfinite(high - low):
        return low, high
    remedy = "Exchange the two." if high < low else ""
    raise InvalidInputError(
        field,
        pair,
        "must be [low, high], finite, low < high",
        remedy,
    )


def values_of(
    field: str,
    values: Any,
    *,
    least: int,
) -> tuple[Any, ...]:
    """Return a list of declared values as a tuple, or refuse too few or equal ones.

    Args:
        field: Where they stand in the spec, for errors.
        values: What stands there.
        least: How many there must be.

    Raises:
        InvalidInputError: If two cannot be told apart: a cell would be either of them.
    """
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or len(values) < least:
        raise InvalidInputError(
            field,
            values,
            f"must be a list of at least {least} values, all that there can be",
        )
    scalar = str | int | float | datetime.date
    if not all(isinstance(value, scalar) for value in values):
        raise InvalidInputError(field, values, "must be words and numbers")
    if not differ(values):
        raise InvalidInputError(field, values, "must differ from one another")
    return tuple(values)
