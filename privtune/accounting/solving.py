"""The least x at which a function that falls and takes long meets a target."""

from __future__ import annotations

import math
from collections.abc import Callable

from privtune.errors import PrivTuneError

__all__ = ["LARGEST", "SMALLEST", "solve_decreasing"]

LARGEST = 1e6
SMALLEST = 1e-4
_ROUNDS = 60


def solve_decreasing(
    function: Callable[[float], float],
    target: float,
    tolerance: float,
    impossible: Callable[[], PrivTuneError],
    *,
    start: float = 1.0,
    steep: float = 1.2,
    enough: float = 1.0,
) -> float:
    """Return x with `function(x) <= target`, within `tolerance` of the smallest such x.

    The function falls in x. Secants of the logarithms, between a point above the target and one
    below it; the answer is a point at which the function itself was found at or below the target,
    and another one, closer than the tolerance, at which it was found above.

    Args:
        function: It takes long: it is asked for as few points as will do.
        target: What it is to meet.
        tolerance: Relative accuracy of x.
        impossible: Makes the error of a target that no x meets.
        start: Where to look first.
        steep: About how much faster than the function x changes there, relatively.
        enough: A share of the target that is met well enough.
    """
    low, high, stride = start, start, 1.0
    low_value = high_value = function(start)
    if enough * target <= high_value <= target:
        return start
    if high_value > target:
        while high_value > target:
            low, low_value = high, high_value
            ratio = high_value / target if math.isfinite(high_value) else 4.0
            high *= _power(max(min(ratio, 1e6) ** steep, 1.0 + 2.0 * tolerance), stride)
            stride *= 3.0  # where the function is flat, its ratio says little
            if high > LARGEST:
                raise impossible()
            high_value = function(high)
    else:
        while low_value <= target:
            high, high_value = low, low_value
            ratio = target / low_value if low_value > 0.0 else 4.0
            low /= _power(max(min(ratio, 1e6) ** steep, 1.0 + 2.0 * tolerance), stride)
            stride *= 3.0
            if low < SMALLEST:
                return high
            low_value = function(low)
    widths = [math.inf, math.inf]
    for _ in range(_ROUNDS):
        width = math.log(high / low)
        if width <= tolerance or enough * target <= high_value < target:
            break
        above, below = low_value / target, high_value / target
        # A secant that did not halve the interval in two steps is no guide.
        straight = math.isfinite(above) and below > 0.0 and width < 0.5 * widths[-2]
        root = width * math.log(above) / math.log(above / below) if straight else 0.5 * width
        widths.append(width)
        # Near an end, so that the other side of the root is found within the tolerance.
        if straight and width - root < 0.9 * tolerance:
            root = width - 0.9 * tolerance
        elif straight:
            root = max(root + 0.2 * tolerance, 0.9 * tolerance)
        middle = low * math.exp(root)
        value = function(middle)
        if value > target:
            low, low_value = middle, value
        else:
            high, high_value = middle, value
    return high


def _power(base: float, stride: float) -> float:
    """Return ``base ** stride``, 16 at most; floats do not hold what strides grow to."""
    return 16.0 if stride * math.log(base) > 3.0 else min(base**stride, 16.0)
