"""Costs as they are shown: never below what they are, and never far above."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privtune.numbers import ceil_digits, ceil_to, floor_to, show_epsilon, show_left

pytestmark = pytest.mark.quick

PACKAGE = Path(__file__).parents[1] / "privtune"
FLOATS = st.floats(0.0, 1e300) | st.floats(0.0, 100.0) | st.floats(0.0, 1e-3)


@given(FLOATS, st.integers(1, 6))
def test_a_cost_is_shown_rounded_up_and_what_is_left_down(value: float, places: int) -> None:
    shown, left = float(show_epsilon(value, places)), float(show_left(value, places))
    assert left <= value <= shown
    # A unit of the last place, of the second digit where all places are zeros, or of the sixth.
    last = Decimal(10) ** -places if value >= 10.0 ** (1 - places) else Decimal(value) / 10
    last = max(last, Decimal(value) / 10**5 if value >= 1e9 else 0)
    assert Decimal(shown) - Decimal(value) <= last + Decimal(math.ulp(value))
    assert Decimal(value) - Decimal(left) <= last + Decimal(math.ulp(value))
    assert (shown == 0.0) == (value == 0.0)
    assert floor_to(value, places) <= value <= ceil_to(value, places)
    assert value <= ceil_digits(value, places) <= value * (1 + 10.0 ** (1 - places)) * (1 + 1e-15)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 4.35, 4.2255, 123.4568, 1e-5, 8.0])
def test_what_has_so_many_digits_is_shown_as_it_is(value: float) -> None:
    assert float(show_epsilon(value, 4)) == float(show_left(value, 4)) == value
    assert ceil_to(value, 5) == floor_to(value, 5) == ceil_digits(value, 7) == value


def test_an_epsilon_of_hundreds_keeps_its_places() -> None:
    assert (
        show_epsilon(123.45612, 4) == "123.4562"
    )  # six digits of it, to nearest, are less than it


def test_no_source_shows_an_epsilon_to_nearest() -> None:
    """Not in a sentence, and not in a chart's hover."""
    nearest = re.compile(
        r"(ε = |left |added |alone |(reported|spent|lower) .{0,4})\{[^{}]*:\.\d+[fg]\}|ε = %\{y:"
    )
    assert nearest.search("ε = {total:.4f}")
    found = {
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if nearest.search(line)
    }
    assert not found
