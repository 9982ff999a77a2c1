"""What the draw of rates does by itself, against its law worked out by hand and by drawing."""

from __future__ import annotations

import numpy as np
import pytest

from studies.selection_against_adaptation.luck import mean_and_deviation, tables_of_luck


@pytest.mark.quick
def test_one_good_rate_of_two():
    # It is missed with probability sum over k of 2^-k 2^-k = 1/3.
    mean, deviation = mean_and_deviation([[0.0], [90.0]], 0.5)
    assert mean == pytest.approx(60.0)
    assert deviation == pytest.approx(90.0 * 2**0.5 / 3.0)


@pytest.mark.quick
def test_it_is_what_drawing_gives():
    rates = [[10.0, 12.0], [50.0, 60.0], [80.0, 90.0], [30.0, 31.0]]
    rng = np.random.default_rng(0)
    found = []
    for runs in rng.geometric(0.3, size=20_000):
        best = max(rng.integers(4, size=runs), key=lambda rate: sum(rates[rate]))
        found.append(rates[best][rng.integers(2)])
    mean, deviation = mean_and_deviation(rates, 0.3)
    assert mean == pytest.approx(np.mean(found), abs=6 * deviation / 20_000**0.5)
    assert deviation == pytest.approx(np.std(found), rel=0.05)


@pytest.mark.quick
def test_a_rate_that_was_not_trained_leaves_no_table():
    assert tables_of_luck({"1": [5.0]}, {"selection": ["1", "2"]}) == []
    first, second = tables_of_luck({"1": [5.0], "2": [1.0]}, {"selection": ["1", "2"]})
    assert "| accuracy | 5.0 | 1.0 |" in first
    assert second.count("2^-") == 8
