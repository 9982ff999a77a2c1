"""What counts as a number in what people and files say."""

from __future__ import annotations

import sys
from typing import TypeGuard

__all__ = ["is_number"]


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
