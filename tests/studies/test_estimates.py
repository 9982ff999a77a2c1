"""Means with intervals: SciPy's, and a set that holds the best arm."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from studies.estimates import Estimate, contenders


@pytest.mark.quick
def test_differences_have_the_interval_of_welchs_test():
    rng = np.random.default_rng(0)
    one, other = rng.normal(90.0, 1.0, 10), rng.normal(88.0, 3.0, 4)
    found = Estimate.of([list(one)]).minus(Estimate.of([list(other)]))
    known = stats.ttest_ind(one, other, equal_var=False)
    assert found.freedom == pytest.approx(known.df)
    low, high = known.confidence_interval(0.95)
    assert found.mean - found.half() == pytest.approx(low)
    assert found.mean + found.half() == pytest.approx(high)


@pytest.mark.quick
def test_the_best_arm_is_among_the_contenders_and_one_far_below_is_not():
    rng = np.random.default_rng(1)
    held, far = 0, 0
    for _ in range(400):  # eight arms, of which seven are level with the best: the hardest case
        arms = {str(n): Estimate.of([list(rng.normal(0.0, 1.0 + n, 5))]) for n in range(8)}
        held += "0" in (found := contenders(arms | {"8": Estimate.of([[-90.0, -91.0, -92.0]])}))
        far += "8" in found
    assert held >= 0.95 * 400 - 2.0 * (400 * 0.05 * 0.95) ** 0.5
    assert far == 0
