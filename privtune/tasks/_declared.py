"""The columns of a table as a spec declares them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from privtune.errors import InvalidInputError
from privtune.tasks._cells import PLAIN, UNITS, Notation, differ, moment_of, number_of, placer
from privtune.tasks._columns import PARTS, Category, Column, Date, Number, Ordinal, Paid

NOTATION = ("decimal", "thousands", "na_values")
"""Fields of a table, and of a column, that say how cells are written."""

PAID = "paid"
"""What stands for a public value that a stage releases, and pays for, before the arms."""

_DATA_DEPENDENT = (
    "auto", "minmax", "standard", "data", "robust", "quantile", "mean", "median", "mode",
)  # fmt: skip


def read_columns(bounds: Any, columns: Any, notation: Notation) -> tuple[Column, ...]:
    """Read the ``bounds`` and ``columns`` of a table's spec, written as the table is unless they say more."""
    given: dict[str, Column] = {}
    for field, declared in (("task.bounds", bounds or {}), ("task.columns", columns or {})):
        _refuse_data(declared)
        if not isinstance(declared, Mapping):
            raise InvalidInputError(field, declared, "must give [low, high] of each feature column")
        for name, how in declared.items():
            if str(name) in given:
                raise InvalidInputError(field, str(name), "is declared twice")
            given[str(name)] = _column(f"{field}.{name}", str(name), how, notation)
    if not given:
        raise InvalidInputError(
            "task.bounds", bounds, "must give [low, high] of each feature column"
        )
    return tuple(given.values())


def read_notation(field: str, given: Mapping[str, Any], known: Notation = PLAIN) -> Notation:
    """Return how numbers and nothing are written, of ``decimal``, ``thousands`` and ``na_values``."""
    found = {name: given[name] for name in NOTATION if name in given}
    if found.get("decimal", ".") not in (".", ","):
        raise InvalidInputError(f"{field}.decimal", found["decimal"], 'must be "." or ","')
    if (marks := found.get("thousands", "")) not in ("", ".", ",", " ", "'"):
        raise InvalidInputError(f"{field}.thousands", marks, 'must be ".", ",", " " or "\'"')
    if "na_values" in found:
        found["na_values"] = values_of(f"{field}.na_values", found["na_values"], least=1)
    made = replace(known, **found)
    if made.thousands and made.thousands == made.decimal:
        raise InvalidInputError(f"{field}.thousands", made.thousands, "must differ from decimal")
    return made


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


def _column(field: str, name: str, how: Any, notation: Notation) -> Column:
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
    others = {
        "bounds": ["missing", "decimal", "thousands"],
        "ordinal": ["missing"],
        "date": ["parts", "format", "unit"],
    }.get(kind, [])
    others = [*(["within"] if paid else []), *others, "na_values"]
    if unknown := sorted(map(str, set(how) - {kind, *others})):
        known, what = ", ".join(others), "bounds: paid" if paid else kind
        raise InvalidInputError(field, unknown, f"is not known; beside {what} it takes {known}")
    common: dict[str, Any] = {"name": name, "notation": read_notation(field, how, notation)}
    if paid:
        return _paid(field, common, how)
    if kind == "bounds":
        return _number(field, common, how)
    if kind == "date":
        return _date(field, common, how)
    if kind == "categories":
        return Category(**common, values=values_of(f"{field}.categories", how[kind], least=1))
    levels = values_of(f"{field}.ordinal", how[kind], least=2)
    fill = how.get("missing")
    place = (len(levels) - 1) / 2 if fill is None else placer(levels)(fill)
    if place < 0:
        raise InvalidInputError(f"{field}.missing", fill, "must be one of the levels")
    return Ordinal(**common, levels=levels, missing=2.0 * place / (len(levels) - 1) - 1.0)


def _number(field: str, common: Mapping[str, Any], how: Mapping[str, Any]) -> Number:
    low, high = pair_of(field, how["bounds"])
    fill = how.get("missing", 0.5 * (low + high))
    _refuse_data(fill, f"{field}.missing")
    number = number_of(fill)
    if number is None or not low <= number <= high:
        raise InvalidInputError(f"{field}.missing", fill, "must be a number within the bounds")
    return Number(**common, low=low, high=high, missing=number)


def _paid(field: str, common: Mapping[str, Any], how: Mapping[str, Any]) -> Paid:
    within, fill = how.get("within"), how.get("missing")
    number = None if fill is None else number_of(fill)
    if fill is not None and (number is None or not math.isfinite(number)):
        raise InvalidInputError(f"{field}.missing", fill, "must be a finite number")
    pair = None if within is None else pair_of(f"{field}.within", within)
    return Paid(**common, within=pair, missing=number)


def _date(field: str, common: Mapping[str, Any], how: Mapping[str, Any]) -> Date:
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
    if unknown := [part for part in parts if part not in PARTS]:
        raise InvalidInputError(f"{field}.parts", unknown, f"must be of {', '.join(PARTS)}")
    form, unit = how.get("format", ""), how.get("unit", "")
    if form and (unit or not _is_format(form)):
        raise InvalidInputError(
            f"{field}.format",
            form,
            "must say the year, and what else it holds, as Python's strptime has it, such as %d.%m.%Y, and "
            "goes without a unit",
        )
    if unit and unit not in UNITS:
        raise InvalidInputError(f"{field}.unit", unit, f"must be of {', '.join(UNITS)}, since 1970")
    known = tuple(dict.fromkeys(parts))
    return Date(**common, low=low, high=high, parts=known, format=form, unit=unit)


def _is_format(form: Any) -> bool:
    """Say whether a form of dates is one, and tells years apart."""
    day = datetime.datetime(2001, 2, 3)
    read = moment_of(day.strftime(form), form) if isinstance(form, str) else None
    return read is not None and read.year == day.year


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
    if not differ(given):
        raise InvalidInputError(field, given, "must differ from one another")
    return tuple(given)
