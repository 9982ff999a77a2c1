"""What counts as a number in what people and files say, and how one is shown to them as a bound."""

from __future__ import annotations

import sys
from decimal import ROUND_CEILING, Context
from typing import TypeGuard

__all__ = ["is_number", "rounded_down", "rounded_up"]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number that a float holds.

    Python's whole numbers may be larger; whatever asked them for a float would end in an error of its
    own.

    Example:
        >>> is_number(3), is_number(10**400), is_number(float("nan")), is_number(True)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def rounded_up(value: float, digits: int = 6) -> float:
    """Round up to so many digits: what is printed is a bound, too.

    Example:
        >>> rounded_up(4.37718032), rounded_up(-4.37718032), rounded_up(1.0049, 3), rounded_up(1.1, 3)
        (4.37719, -4.37718, 1.01, 1.1)
    """
    return float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value))))


def rounded_down(value: float, digits: int = 6) -> float:
    """Round down to so many digits: what is left, and what something costs at least.

    Example:
        >>> rounded_down(1.0059, 3), rounded_down(float("inf"))
        (1.0, inf)
    """
    return -rounded_up(-value, digits)
