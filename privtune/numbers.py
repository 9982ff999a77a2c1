"""Checks of numbers, and their texts: a cost is rounded up, so that it never reads as less than it is."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeGuard

_LARGE = 1e9  # from here on six digits are shown
_DIGITS = 1000  # digits: more than a float has before and after its point


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number that a float holds.

    Example:
        >>> is_number(3), is_number(10**400), is_number(float("nan")), is_number(True)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def json_ready(value: Any) -> Any:
    """Return data ready for JSON, with the texts ``inf`` and ``nan`` for ∞ and NaN.

    Example:
        >>> json_ready({"bound": math.inf, "widths": (64, 32)})
        {'bound': 'inf', 'widths': [64, 32]}
    """
    if isinstance(value, Mapping):
        return {name: json_ready(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def finite(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with null in the place of ∞ and NaN, which JSON lacks.

    Example:
        >>> finite({"epsilon": math.inf, "alone": {"epsilon": 1.5}})
        {'epsilon': None, 'alone': {'epsilon': 1.5}}
    """
    return {name: _finite_or_none(value) for name, value in document.items()}


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, dict):
        return finite(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def ceil_to(value: float, places: int) -> float:
    """Round up to decimal places; ∞ and NaN stay as they are.

    Example:
        >>> ceil_to(4.22541, 4), ceil_to(0.3, 4)
        (4.2255, 0.3)
    """
    return _round_to_places(value, places, ROUND_CEILING)


def floor_to(value: float, places: int) -> float:
    """Round down to decimal places; ∞ and NaN stay as they are."""
    return _round_to_places(value, places, ROUND_FLOOR)


def ceil_digits(value: float, digits: int) -> float:
    """Round up to significant digits.

    Example:
        >>> ceil_digits(4.37718032, 6), ceil_digits(-4.37718032, 6), ceil_digits(1e-5, 4)
        (4.37719, -4.37718, 1e-05)
    """
    return _round_to_digits(value, digits, ROUND_CEILING)


def show_epsilon(value: float, places: int = 3) -> str:
    """Return a cost as text, rounded up to decimal places; small ones to two digits, large ones to six.

    Example:
        >>> show_epsilon(4.22541), show_epsilon(2.4e-6, 4), show_epsilon(3e99), show_epsilon(math.inf)
        ('4.226', '2.4e-06', '3e+99', '∞')
    """
    return _show_amount(value, places, ROUND_CEILING)


def show_left(value: float, places: int = 3) -> str:
    """Return what is left of a budget, or a least cost, as text rounded down to decimal places.

    Example:
        >>> show_left(2.99999), show_left(1.19e-7), show_left(0.0)
        ('2.999', '1.1e-07', '0.000')
    """
    return _show_amount(value, places, ROUND_FLOOR)


def show_seconds(value: float | None) -> str:
    """Return a time in seconds as text: one decimal, or two digits below one second; a dash if unknown.

    Example:
        >>> show_seconds(83.26), show_seconds(0.04002), show_seconds(1e-5), show_seconds(None)
        ('83.3', '0.04', '<0.001', '—')
    """
    if value is None:
        return "—"
    if value < 0.001:
        return "<0.001"
    if value >= 1:
        return f"{value:.1f}"
    return f"{value:.2g}"


def _show_amount(value: float, places: int, rounding: str) -> str:
    """Return an amount as text, rounded up or down: to decimal places, or to significant digits."""
    if not math.isfinite(value):
        return "∞" if value > 0 else str(value)
    size = abs(value)
    least_of_two_digits = 10.0 ** (1 - places)
    if 0.0 < size < least_of_two_digits:
        number = _round_to_digits(value, 2, rounding)
        return f"{number:g}"
    if size >= _LARGE:
        number = _round_to_digits(value, 6, rounding)
        return f"{number:g}"
    number = _round_to_places(value, places, rounding)
    return f"{number:.{places}f}"


# Both read a float as the shortest decimal that is it: 0.1 rounded up to one place stays 0.1.
def _round_to_places(value: float, places: int, rounding: str) -> float:
    if not math.isfinite(value):
        return value
    decimal = Decimal(repr(float(value)))
    step = Decimal(1).scaleb(-places)
    context = Context(prec=_DIGITS)
    return float(decimal.quantize(step, rounding, context))


def _round_to_digits(value: float, digits: int, rounding: str) -> float:
    context = Context(prec=digits, rounding=rounding)
    decimal = context.create_decimal(repr(float(value)))
    return float(decimal)
