"""The least x at which a function that falls and takes long meets a target."""

from __future__ import annotations

import math
from collections.abc import Callable

from privtune.errors import PrivTuneError

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
    aim = 0.5 * (1.0 + enough) * target
    seen: list[tuple[float, float]] = []  # the points on the side that is left

    def outward(x: float, value: float) -> float:
        """Return how far to go from a point, as a factor; further each time it was not enough."""
        seen.append((x, value))
        ratio = max(value / aim, aim / value) if 0.0 < value < math.inf else 4.0
        power, stride, least = steep, 3.0 ** (len(seen) - 1), 1.0 + 2.0 * tolerance
        if enough < 1.0 and len(seen) <= 3:  # a band is met by a secant, where an edge is not
            power, stride, least = _slope(*seen[-2:], usual=steep), 1.0, 1.0
        return _power(max(min(ratio, 1e6) ** power, least), stride)

    low, high = start, start
    low_value = high_value = function(start)
    if enough * target <= high_value <= target:
        return start
    if high_value > target:
        while high_value > target:
            if high >= LARGEST:
                raise impossible()
            low, low_value = high, high_value
            high = min(high * outward(high, high_value), LARGEST)
            high_value = function(high)
    else:
        while low_value <= target:
            high, high_value = low, low_value
            if enough < 1.0 and enough * target <= high_value:
                return high
            low /= outward(low, low_value)
            if low < SMALLEST:
                return high
            low_value = function(low)
    widths = [math.inf, math.inf]
    for _ in range(_ROUNDS):
        width = math.log(high / low)
        if width <= tolerance or (enough < 1.0 and enough * target <= high_value):
            break
        above, below = low_value / aim, high_value / aim
        # A secant that did not halve the interval in two steps is no guide.
        straight = math.isfinite(above) and below > 0.0 and width < 0.5 * widths[-2]
        root = width * math.log(above) / math.log(above / below) if straight else 0.5 * width
        widths.append(width)
        # Near an end, so that the other side of the root is found within the tolerance.
        if straight and enough == 1.0:
            near = width - 0.9 * tolerance
            root = near if root > near else max(root + 0.2 * tolerance, 0.9 * tolerance)
        middle = low * math.exp(root)
        value = function(middle)
        if value > target:
            low, low_value = middle, value
        else:
            high, high_value = middle, value
    return high


def _slope(*seen: tuple[float, float], usual: float) -> float:
    """Return how much faster than the function x changes between two points, relatively."""
    (x, value), (other, beyond) = seen[0], seen[-1]
    if not 0.0 < beyond < math.inf or not 0.0 < value < math.inf or value == beyond:
        return usual
    found = math.log(other / x) / math.log(value / beyond)
    return found if 0.25 * usual < found < 4.0 * usual else usual


def _power(base: float, stride: float) -> float:
    """Return ``base ** stride``, 16 at most; floats do not hold what strides grow to."""
    return 16.0 if stride * math.log(base) > 3.0 else min(base**stride, 16.0)
