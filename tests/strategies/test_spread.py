"""Means over repetitions and the certainty of their order, against a printed table and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from privtune.strategies.spread import Spread, probability_above

pytestmark = pytest.mark.quick

# Source: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, critical values of Student's t.
TABLE = [(1, 0.90, 3.078), (2, 0.99, 6.965), (4, 0.975, 2.776), (9, 0.95, 1.833), (30, 0.90, 1.310)]


@pytest.mark.parametrize(("freedom", "level", "critical"), TABLE)
def test_the_order_of_means_against_a_printed_table(
    freedom: int, level: float, critical: float
) -> None:
    n = freedom + 1
    around = np.arange(n) - freedom / 2  # zero mean; its variance is n (n + 1) / 12
    apart = critical * math.sqrt((n + 1) / 12)  # so many standard errors are `critical`
    second = np.linspace(0.3, 0.7, n)
    first = second + around + apart
    assert probability_above([*first], [*second]) == pytest.approx(level, abs=3e-4)
    assert probability_above([*second], [*first]) == pytest.approx(1 - level, abs=3e-4)


def test_what_is_said_to_be_95_percent_sure_is_wrong_in_one_of_20() -> None:
    # Arms of equal means that share their seeds' luck. The share of 4,000 claims leaves four standard
    # deviations around 5% with probability 6e-5. Normal quantiles instead of Student's would claim in 9%.
    rng = np.random.default_rng(22)
    shared = rng.normal(size=(4000, 1, 5))
    own = 0.3 * rng.normal(size=(4000, 2, 5))
    sure = [probability_above([*a], [*b]) > 0.95 for a, b in shared + own]
    assert abs(np.mean(sure) - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 4000)


def test_what_is_missing_or_without_spread() -> None:
    assert Spread.of([2.0, None, 4.0, 9.0]) == Spread(5.0, pytest.approx(math.sqrt(13 / 3)), 3)
    assert Spread.of([0.25]) == Spread(0.25, None, 1)
    assert Spread.of([None, None]) is None
    # Whose pair is missing leaves one pair, of which no spread is known.
    assert probability_above([0.9, None, 0.8], [0.1, 0.2, None]) is None
    assert probability_above([0.75, 0.5], [0.5, 0.25]) == 1.0
    assert probability_above([0.5, 0.25], [0.75, 0.5]) == 0.0
    assert probability_above([0.5, 0.25], [0.5, 0.25]) == 0.5
