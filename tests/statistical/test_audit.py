"""The audits' own arithmetic, against mechanisms whose epsilon is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tests.statistical.audit import lower_bound

pytestmark = pytest.mark.statistical


def delta_of(mu, epsilon):
    """Dong, Roth, Su, arXiv:1905.02383, Corollary 2.13."""
    first = stats.norm.cdf(mu / 2 - epsilon / mu)
    return first - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


def test_randomised_response_is_found_out():
    """Says the truth with probability 3/4: epsilon = log 3. 30,000 runs; fails at most at 5%."""
    rng = np.random.default_rng(1)
    truth = [(rng.random(40_000) < p).astype(float) for p in (0.25, 0.75)]
    found = lower_bound(*truth, delta=0.0)
    assert 0.95 * math.log(3.0) < found.epsilon <= math.log(3.0)
    assert found.runs == 60_000


def test_an_absence_that_gives_itself_away_is_found():
    """Never 0 with the canary, 0 in a tenth of the runs without: delta = 0.1 at every epsilon."""
    rng = np.random.default_rng(2)
    without, canary = (rng.random(4000) > 0.1).astype(float), np.ones(4000)
    assert lower_bound(without, canary, delta=0.01).epsilon > 4.0
    assert lower_bound(without, canary, delta=0.2).epsilon == 0.0


@pytest.mark.parametrize("gaussian", [False, True])
def test_the_bound_is_above_the_truth_as_rarely_as_stated(gaussian):
    """300 audits of a Gaussian of mu = 1. At a true rate of 5%, 31 or more have probability 1e-4."""
    rng = np.random.default_rng(3)
    delta = delta_of(1.0, 1.5)
    found = [
        lower_bound(
            rng.normal(size=400), rng.normal(1.0, size=400), delta=delta, gaussian=gaussian
        ).epsilon
        for _ in range(300)
    ]
    assert sum(epsilon > 1.5 for epsilon in found) <= 30
    assert max(found) > 0.5
    assert (np.median(found) > 0.7) == gaussian


def test_mu_is_turned_into_epsilon():
    """100,000 runs of a Gaussian of mu = 2: within 3% of its epsilon at delta."""
    rng = np.random.default_rng(4)
    found = lower_bound(
        rng.normal(size=100_000),
        rng.normal(2.0, size=100_000),
        delta=delta_of(2.0, 5.0),
        gaussian=True,
    )
    assert 4.85 < found.epsilon <= 5.0


def test_no_difference_is_no_epsilon():
    rng = np.random.default_rng(5)
    for gaussian in (False, True):
        same = [rng.normal(size=1000) for _ in range(2)]
        assert lower_bound(*same, delta=1e-3, gaussian=gaussian).epsilon < 0.05
