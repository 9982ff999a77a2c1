"""Many, rare and different sampled Gaussians: composition in stages."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as dp_pld
from scipy import stats

from privtune.accounting import ZCDP, Composed, Gaussian, PoissonSampled, Repeated, epsilon
from privtune.accounting.accountant import lower_bound
from privtune.accounting.pairs import Direction, sampled_gaussian
from privtune.accounting.pld import composed_in_stages, gathered, split_step
from privtune.accounting.pmf import compose
from tests.accounting.helpers import sampled_profile, steps

DELTA = 1e-5


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("rate", "sigma", "step"),
    [(0.3, 0.8, 0.15), (0.5, 1.0, 0.12), (0.01, 0.5, 0.01), (1e-3, 0.35, 0.02), (0.9, 2.0, 0.1)],
)
def test_usual_and_rare_losses_together_dominate_one_step(rate, sigma, step, direction):
    usual, rare = split_step((rate, sigma), step, 16, direction)
    both = rare if usual is None else compose([(usual.coarsen(16), 1), (rare, 1)])
    points = np.linspace(-1.5, 4.0, 221)
    slack = both.delta(points) - sampled_profile(rate, sigma, points, direction)
    assert slack.min() > -1e-15
    assert slack[points >= 0.0].max() < 0.5 * step
    if direction is Direction.REMOVE:
        assert rare.infinite > 0.0  # what lies beyond the lattice is charged


def test_the_rare_losses_are_raised_by_what_usual_ones_may_take():
    # Where few outcomes are usual, their masses under P and Q differ much: the shift is felt.
    usual, rare = split_step((0.4, 0.6), 0.05, 4, Direction.REMOVE)
    tilted = usual.masses @ np.exp(-usual.losses)
    assert tilted > 1.02
    both = compose([(usual.coarsen(4), 1), (rare, 1)])
    points = np.linspace(0.2, 6.0, 200)
    exact = sampled_profile(0.4, 0.6, points, Direction.REMOVE)
    assert (both.delta(points) >= exact * (1.0 - 1e-12)).all()


@pytest.mark.parametrize(("rate", "sigma", "count"), [(256 / 60000, 1.0, 2340), (0.05, 2.0, 400)])
def test_stages_agree_with_one_lattice_and_with_another_library(rate, sigma, count):
    found = []
    for direction in Direction:
        parts = composed_in_stages([((rate, sigma), count)], 0.01, direction)
        pmf = compose([(part, 1) for part in parts])
        found.append(pmf.epsilon(DELTA))
    once = epsilon(steps(rate, sigma, count), DELTA, method="pld").epsilon
    assert max(found) == pytest.approx(once, rel=3e-3)
    optimistic = dp_pld.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=1e-4, pessimistic_estimate=False
    ).self_compose(count)
    assert max(found) >= optimistic.get_epsilon_for_delta(DELTA) * (1.0 - 1e-6)


@pytest.mark.parametrize("direction", list(Direction))
def test_several_stages_dominate_one(direction, monkeypatch):
    """Coarsened between, as where a sum does not fit."""
    monkeypatch.setattr("privtune.accounting.pld._MOST", 1000)
    rate, count = 5e-4, 300_000
    parts = composed_in_stages([((rate, 1.0), count)], 0.02, direction)
    found = compose([(part, 1) for part in parts])
    once = compose([(sampled_gaussian(rate, 1.0, 1e-4, direction), count)])
    both = dp_pld.from_gaussian_mechanism(
        1.0, sampling_prob=rate, value_discretization_interval=1e-4, pessimistic_estimate=False
    ).self_compose(count)
    points = np.linspace(0.0, 2.0, 11)
    optimistic = np.array([both.get_delta_for_epsilon(float(e)) for e in points])
    assert (found.delta(points) <= once.delta(points) * 1.01 + 1e-12).all()
    if direction is Direction.REMOVE:
        assert (found.delta(points) >= optimistic * (1.0 - 1e-3) - 1e-12).all()


def test_rare_participation_costs_less_the_rarer_it_is():
    found = [epsilon(steps(10.0**-k, 0.35, 10**k), DELTA) for k in (6, 7, 8)]
    values = [answer.epsilon for answer in found]
    assert values == sorted(values, reverse=True)
    assert [answer.method for answer in found] == ["pld"] * 3
    assert values[1] < 0.5
    assert values[2] < 0.0625
    for k, value in zip((6, 7, 8), values, strict=True):
        lower = lower_bound(steps(10.0**-k, 0.35, 10**k), DELTA)
        assert lower <= value <= 1.02 * lower


def test_a_billion_steps_at_the_rate_of_their_root():
    hundred_million, billion = (
        epsilon(steps(count**-0.5, 1.0, count), DELTA).epsilon for count in (10**8, 10**9)
    )
    # Both are near the Gaussian limit with μ = sqrt(e - 1).
    limit = epsilon(Gaussian(1.0 / math.sqrt(math.expm1(1.0))), DELTA).epsilon
    assert limit < billion < limit * 1.01
    assert billion == pytest.approx(hundred_million, rel=1e-3)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("times", [2, 10, 40])
def test_gathered_steps_dominate(direction, times):
    rate, sigma, count = 1e-3, 0.5, 40
    (kind, fewer), lost = gathered((rate, sigma), count, times)
    assert fewer * times == count
    many = compose([(sampled_gaussian(rate, sigma, 2e-4, direction), count)])
    few = compose([(sampled_gaussian(*kind, 2e-4, direction), fewer)])
    points = np.linspace(0.0, 2.0, 81)
    assert (few.delta(points) + lost >= many.delta(points) - 1e-9).all()
    twice = fewer * stats.binom.sf(1, times, rate)
    assert twice <= lost <= 2.1 * twice


def test_very_many_very_rare_steps():
    event = Repeated(10**9, steps(1e-12, 0.35, 10**3))
    answer = epsilon(event, DELTA)
    assert answer.method == "pld"
    assert answer.epsilon < epsilon(steps(1e-8, 0.35, 10**8), DELTA).epsilon
    hopeless = epsilon(Repeated(10**9, steps(1e-9, 1.0, 10**9)), DELTA)
    assert hopeless.method == "rdp"
    assert "too many" in hopeless.reasons["pld"]


def test_a_schedule_costs_what_its_steps_cost():
    noises = [1.0 + 1e-9 * i for i in range(100)]
    schedule = Composed([PoissonSampled(0.02, Gaussian(s)) for s in noises])
    equal = epsilon(steps(0.02, 1.0, 100), DELTA).epsilon
    answer = epsilon(schedule, DELTA)
    assert answer.method == "pld"
    assert answer.epsilon == pytest.approx(equal, rel=2e-3)
    cosine = [1.4 - 0.6 * math.cos(math.pi * i / 199) for i in range(200)]
    dear = epsilon(Composed([PoissonSampled(0.02, Gaussian(s)) for s in cosine]), DELTA)
    assert dear.epsilon < 0.85 * dear.bounds["rdp"]
    # In any order, and never below an instance of its own.
    event = Composed([PoissonSampled(0.02, Gaussian(s)) for s in reversed(cosine)])
    assert epsilon(event, DELTA).epsilon == pytest.approx(dear.epsilon, rel=1e-9)
    assert lower_bound(event, DELTA) <= dear.epsilon


def test_neighbours_are_charged_as_the_worst(monkeypatch):
    cosine = [((0.02, 1.4 - 0.6 * math.cos(math.pi * i / 99)), 1) for i in range(100)]
    costs = []
    for most in (100, 30, 5, 1):
        monkeypatch.setattr("privtune.accounting.pld._MOST_STEPS", most)
        parts = composed_in_stages(cosine, 0.005, Direction.REMOVE)
        costs.append(compose([(part, 1) for part in parts]).epsilon(DELTA))
    assert costs == sorted(costs)
    worst = compose([(sampled_gaussian(0.02, 0.8, 5e-4, Direction.REMOVE), 100)])
    assert costs[-1] == pytest.approx(worst.epsilon(DELTA), rel=5e-3)


def test_many_zcdp_parts_are_one():
    training = steps(0.01, 1.0, 100)
    parts = [ZCDP(0.001 * (1.0 + i / 100)) for i in range(100)]
    total = ZCDP(sum(part.rho for part in parts))
    together = epsilon(Composed([total, training]), DELTA)
    apart = epsilon(Composed([*parts, training]), DELTA)
    assert apart.bounds["pld"] == pytest.approx(together.bounds["pld"], rel=1e-6)
    noises = [Gaussian(20.0 + i) for i in range(100)]
    merged = Gaussian(sum(g.noise_multiplier**-2 for g in noises) ** -0.5)
    both = [
        epsilon(Composed(e), DELTA).bounds["pld"] for e in ([*noises, training], [merged, training])
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-6)
