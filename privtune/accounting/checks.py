"""Checks of numbers that the constructors of this package share: finite, in range, never NaN."""

from __future__ import annotations

import math
from numbers import Integral, Real

from privtune.errors import InvalidInputError

LARGEST = 1e100  # of what is squared or counted: no product of such numbers overflows


def check_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return `value` as a finite float inside the given bounds, or raise."""
    words = []
    if above is not None:
        words.append(f"above {above:g}")
    if at_least is not None:
        words.append(f"at least {at_least:g}")
    if below is not None:
        words.append(f"below {below:g}")
    if at_most is not None:
        words.append(f"at most {at_most:g}")
    allowed = " and ".join(["must be a finite number", *words]).replace("number and", "number", 1)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInputError(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if (
        not math.isfinite(number)
        or (above is not None and not number > above)
        or (at_least is not None and not number >= at_least)
        or (below is not None and not number < below)
        or (at_most is not None and not number <= at_most)
    ):
        raise InvalidInputError(name, value, allowed)
    return number


def check_integer(
    name: str,
    value: object,
    *,
    at_least: int,
    at_most: int,
) -> int:
    """Return `value` as an int inside the given bounds, or raise."""
    allowed = f"must be a whole number from {at_least} to {at_most}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidInputError(name, value, allowed)
    number = int(value)
    if not at_least <= number <= at_most:
        raise InvalidInputError(name, value, allowed)
    return number


def check_noise(name: str, value: object) -> float:
    """Return a noise multiplier as a float, or refuse one outside [1e-100, 1e100]."""
    return check_number(name, value, at_least=1.0 / LARGEST, at_most=LARGEST)


def check_delta(value: object) -> float:
    """Return a target δ as a float, or refuse one outside (0, 1)."""
    return check_number("delta", value, above=0.0, below=1.0)


def check_epsilon(value: object) -> float:
    """Return a target ε as a finite float, or refuse one below 0."""
    return check_number("epsilon", value, at_least=0.0)


def json_number(value: float) -> float | str:
    """Return a number ready for JSON: itself, or the text "inf" if it is not finite."""
    return value if math.isfinite(value) else "inf"
