"""The claim about the one mechanism that was run: its law is what rounds draw, and little is lost."""

from __future__ import annotations

import numpy as np
import pytest

from privtune.accounting import (
    Gaussian,
    Geometric,
    Joint,
    Laplace,
    Poisson,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    lower_bound,
    scale_noise,
)
from privtune.audit import audit
from privtune.audit.bounds import Claim
from privtune.audit.bounds import lower_bound as bound
from privtune.audit.selections import InstanceClaim, worst_score
from privtune.strategies import PapernotSteinke
from privtune.training.mechanism.schedule import Schedule
from tests.statistical.rounds import DELTA, RATE, context

pytestmark = pytest.mark.statistical

ALL = Gaussian(1.14)
SAMPLED = Repeated(6, PoissonSampled(0.3, Gaussian(1.6)))
NORM = {"max_grad_norm": 1.0}


def made(base, runs, *, noise=1.0):
    """Return the claim, its statistic, and rounds' law with other noise than it says."""
    event = PrivateSelection(base, runs)
    score = worst_score(base, runs, claim=Claim(event, DELTA), rounds=2000)
    claim = InstanceClaim(event, DELTA, base=base, score=score)
    laws = [score.law(masses) for masses in claim._bins(noise)]
    return event, claim, np.append(score.released, score.nothing), laws[::-1]


@pytest.mark.parametrize(
    ("base", "runs", "share"),
    [(ALL, Geometric(5.0), 0.8), (ALL, Poisson(5.0), 0.8), (SAMPLED, Geometric(5.0), 0.65)],
    ids=["geometric", "poisson", "sampled"],
)
def test_most_of_what_the_instance_costs_is_found_by_2000_rounds(base, runs, share):
    """Four audits each, fixed seeds: a bound is above what is true in one of twenty-five."""
    event, claim, told, laws = made(base, runs)
    for law in laws:
        assert law.sum() == pytest.approx(1.0, abs=1e-9)
    rng = np.random.default_rng(5)
    found = []
    for _ in range(4):
        sides = [rng.choice(told, size=2000, p=law / law.sum()) for law in laws]
        found.append(bound(*sides, delta=DELTA, confidence=0.96, held_out=0.0, claim=claim).epsilon)
    least = lower_bound(event, DELTA)
    assert np.median(found) >= share * least
    assert sum(epsilon > least for epsilon in found) <= 1


def test_noise_that_is_less_is_found_and_noise_that_is_more_costs_less():
    for noise, low, high in ((0.5, 1.3, 9.0), (1.5, 0.0, 0.75)):
        event, claim, told, laws = made(ALL, Geometric(5.0), noise=noise)
        rng = np.random.default_rng(6)
        sides = [rng.choice(told, size=2000, p=law / law.sum()) for law in laws]
        found = bound(*sides, delta=DELTA, confidence=0.96, held_out=0.0, claim=claim).epsilon
        true = lower_bound(scale_noise(event, noise), DELTA)
        assert low * lower_bound(event, DELTA) <= found <= min(true, high * true)


@pytest.mark.quick
def test_only_sums_of_gaussian_likelihoods_have_a_known_law():
    assert InstanceClaim.fits(SAMPLED)
    assert InstanceClaim.fits(PoissonSampled(0.3, Joint([Gaussian(2.0), Gaussian(3.0)])))
    assert not InstanceClaim.fits(PoissonSampled(0.3, Laplace(2.0)))


@pytest.mark.slow
def test_a_selection_of_sampled_trainings_is_audited_as_a_whole():
    """2 x 200 rounds. Above what is reported by chance with a probability of at most 5%."""
    strategy = PapernotSteinke(parameters=NORM, mean_runs=3)
    given = context(RATE)
    given = type(given)(**{**vars(given), "schedule": Schedule(240, 0.3, 4)})
    report = audit(
        strategy.plan(given, epsilon=4.0), strategy=strategy, delta=DELTA, runs=200, seed=2
    )
    row = report.rows[1]
    assert report.passed, report.to_dict()
    assert row.bounds["all released, by its instance"] > 0.3 * row.lower


@pytest.mark.slow
def test_four_fifths_of_what_a_selection_costs_are_found():
    """2 x 1200 rounds of 5 trainings: 0.9 of ``lower`` by 2000 in the middle of ten audits."""
    strategy = PapernotSteinke(parameters=NORM, mean_runs=5)
    plan = strategy.plan(context(RATE), epsilon=4.0)
    row = audit(plan, strategy=strategy, delta=DELTA, runs=1200).rows[1]
    assert 0.75 * row.lower <= row.epsilon <= row.reported
