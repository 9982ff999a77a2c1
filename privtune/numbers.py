"""What counts as a number in what people and files say, and how a cost is shown: never as less than it is."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeGuard

_LARGE = 1e9  # from here on six digits are shown
_WHOLE = 1000  # digits: more than a float has before and after its point


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
    """Return data with words for ∞ and NaN, which JSON does not have.

    Example:
        >>> json_ready({"bound": math.inf, "widths": (64, 32)})
        {'bound': 'inf', 'widths': [64, 32]}
    """
    if isinstance(value, Mapping):
        return {name: json_ready(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def ceil_to(value: float, places: int) -> float:
    """Round up to decimal places; ∞ and NaN stay as they are.

    Example:
        >>> ceil_to(4.22541, 4), ceil_to(0.3, 4)
        (4.2255, 0.3)
    """
    return _rounded(value, places, ROUND_CEILING)


def floor_to(value: float, places: int) -> float:
    """Round down to decimal places; ∞ and NaN stay as they are."""
    return _rounded(value, places, ROUND_FLOOR)


def ceil_digits(value: float, digits: int) -> float:
    """Round up to significant digits.

    Example:
        >>> ceil_digits(4.37718032, 6), ceil_digits(-4.37718032, 6), ceil_digits(1e-5, 4)
        (4.37719, -4.37718, 1e-05)
    """
    return _to_digits(value, digits, ROUND_CEILING)


def show_epsilon(value: float, places: int = 3) -> str:
    """Show a cost: rounded up, with two digits at least, six of what is large; infinity as its sign.

    Example:
        >>> show_epsilon(4.22541), show_epsilon(2.4e-6, 4), show_epsilon(3e99), show_epsilon(math.inf)
        ('4.226', '2.4e-06', '3e+99', '∞')
    """
    return _shown(value, places, ROUND_CEILING)


def show_left(value: float, places: int = 3) -> str:
    """Show what is left, or what something costs at least: rounded down, with two digits at least.

    Example:
        >>> show_left(2.99999), show_left(1.19e-7), show_left(0.0)
        ('2.999', '1.1e-07', '0.000')
    """
    return _shown(value, places, ROUND_FLOOR)


def show_seconds(value: float | None) -> str:
    """Show a time: to a tenth of a second, to two digits below one; a dash where it is not known.

    Example:
        >>> show_seconds(83.26), show_seconds(0.04002), show_seconds(1e-5), show_seconds(None)
        ('83.3', '0.04', '<0.001', '—')
    """
    if value is None:
        return "—"
    if value < 0.001:
        return "<0.001"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _shown(value: float, places: int, rounding: str) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0 else str(value)
    if 0.0 < abs(value) < 10.0 ** (1 - places):
        return f"{_to_digits(value, 2, rounding):g}"
    if abs(value) >= _LARGE:
        return f"{_to_digits(value, 6, rounding):g}"
    return f"{_rounded(value, places, rounding):.{places}f}"


# Both read a float as the shortest decimal that is it: 0.1 rounded up to one place stays 0.1.
def _rounded(value: float, places: int, rounding: str) -> float:
    if not math.isfinite(value):
        return value
    step = Decimal(1).scaleb(-places)
    return float(Decimal(repr(float(value))).quantize(step, rounding, Context(prec=_WHOLE)))


def _to_digits(value: float, digits: int, rounding: str) -> float:
    return float(Context(prec=digits, rounding=rounding).create_decimal(repr(float(value))))
