"""The audits' own arithmetic, against mechanisms whose epsilon is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from privtune.accounting import Gaussian
from privtune.audit.bounds import Claim, lower_bound, one_run_bound

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


@pytest.mark.parametrize("by_profile", [False, True])
def test_the_bound_is_above_the_truth_as_rarely_as_stated(by_profile):
    """80 audits of a Gaussian of mu = 1. 14 or more have probability 4e-5 at a rate of 5%, 0.96 at 25%."""
    rng = np.random.default_rng(3)
    delta = delta_of(1.0, 1.5)
    claim = Claim(Gaussian(1.0), delta) if by_profile else None
    found = [
        lower_bound(
            rng.normal(size=400), rng.normal(1.0, size=400), delta=delta, claim=claim
        ).epsilon
        for _ in range(80)
    ]
    assert sum(epsilon > 1.5 for epsilon in found) <= 13
    assert max(found) > 0.5
    assert np.median(found) > (0.9 if by_profile else 0.6)


def test_mu_is_turned_into_epsilon():
    """100,000 runs of a Gaussian of mu = 2: within 3% of its epsilon at delta."""
    rng = np.random.default_rng(4)
    found = lower_bound(
        rng.normal(size=100_000),
        rng.normal(2.0, size=100_000),
        delta=delta_of(2.0, 5.0),
        claim=Claim(Gaussian(0.5), delta_of(2.0, 5.0)),
    )
    assert 4.85 < found.epsilon <= 5.0


def test_no_difference_is_no_epsilon():
    rng = np.random.default_rng(5)
    for claim in (None, Claim(Gaussian(1.0), 1e-3)):
        same = [rng.normal(size=1000) for _ in range(2)]
        assert lower_bound(*same, delta=1e-3, claim=claim).epsilon < 0.05


@pytest.mark.parametrize("by_profile", [False, True])
def test_one_run_is_above_the_truth_as_rarely_as_stated(by_profile):
    """80 runs of 300 canaries of mu = 1. 14 or more have probability 4e-5 at a rate of 5%, 0.96 at 25%."""
    rng = np.random.default_rng(6)
    claim = Claim(Gaussian(1.0), 1e-3)
    found = []
    for _ in range(80):
        inside = rng.random(300) < 0.5
        scores = rng.normal(size=300) + inside
        split = scores[~inside], scores[inside]
        found.append(one_run_bound(*split, delta=1e-3, claim=claim if by_profile else None).epsilon)
    assert sum(epsilon > claim.epsilon for epsilon in found) <= 13
    assert np.median(found) > (0.3 if by_profile else 0.15) * claim.epsilon


def test_one_run_without_any_privacy_is_found():
    """Every guess is right, of 1200 in 2000: more than randomised response of epsilon = 4 does."""
    scores = np.arange(2000.0)
    for claim in (None, Claim(Gaussian(1.0), 1e-5)):
        assert one_run_bound(scores[:1000], scores[1000:], delta=1e-6, claim=claim).epsilon > 4.0
