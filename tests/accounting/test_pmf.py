"""Lattice pairs: every operation is pessimistic, and nearly exact."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import signal, stats

from privtune.accounting import pmf
from privtune.accounting.pairs import Direction, loss_deviation, sampled_gaussian
from privtune.accounting.pmf import LossPmf, _discounted, compose, from_profile, mixture
from privtune.accounting.rdp import gaussian_delta
from tests.accounting.helpers import finite_pmf

EPSILONS = np.linspace(-3.0, 5.0, 81)


def exact_profile(p, q, epsilons=EPSILONS):
    return np.array([np.maximum(p - math.exp(e) * q, 0.0).sum() for e in epsilons])


weights = st.lists(st.floats(0.02, 1.0), min_size=3, max_size=5)


@given(weights, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_finite_pair_is_dominated(values, seed):
    p = np.array(values) / sum(values)
    q = np.random.default_rng(seed).permutation(p) * 0.7 + 0.3 / p.size
    q /= q.sum()
    pmf = finite_pmf(p, q)
    exact = exact_profile(p, q)
    assert (pmf.delta(EPSILONS) >= exact - 1e-12).all()
    np.testing.assert_allclose(pmf.delta(EPSILONS), exact, atol=2e-3)
    swapped = -np.expm1(EPSILONS) + np.exp(EPSILONS) * pmf.delta(-EPSILONS)
    np.testing.assert_allclose(swapped, exact_profile(q, p), atol=4e-3)


def test_composition_by_enumeration():
    """A threefold composition, outcome by outcome, against the FFT."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    joint_p = np.array([math.prod(c) for c in itertools.product(p, repeat=3)])
    joint_q = np.array([math.prod(c) for c in itertools.product(q, repeat=3)])
    ours = compose([(finite_pmf(p, q), 3)]).delta(EPSILONS)
    exact = exact_profile(joint_p, joint_q)
    assert (ours >= exact - 1e-12).all()
    np.testing.assert_allclose(ours, exact, atol=3e-3)


@given(st.floats(1e-3, 0.02), st.floats(0.5, 20.0), st.integers(2, 8))
@example(0.003464101615137755, 5.0, 3)  # once lost the atom at the largest loss, 5% of all mass
@settings(max_examples=40, deadline=None)
def test_bounded_losses_keep_all_their_mass(step, scale, count):
    """Laplace losses: a heavy atom at the largest loss, which no tilt may round away."""
    kept = np.array([1.0, math.exp(-1.0 / scale)]) / 2.0
    inside = max(1.0 - kept.sum(), 0.0)
    p, q = np.array([kept[0], inside, kept[1]]), np.array([kept[1], inside, kept[0]])
    pmf = finite_pmf(p, q, step=step)
    direct = pmf.masses
    for _ in range(count - 1):
        direct = np.convolve(direct, pmf.masses)
    ours = compose([(pmf, count)])
    start = ours.lowest - count * pmf.lowest
    expected = direct[start : start + ours.masses.size]
    assert (ours.masses >= expected * (1 - 1e-9) - 1e-15).all()
    assert ours.masses.sum() + ours.infinite == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("low", "high", "rare", "count"),
    [(54.0, 55.5, 2e-3, 1), (50.0, 59.0, 3e-5, 1), (70.0, 200.0, 0.5, 2), (0.7, 2.0, 0.4, 110)],
)
def test_where_all_losses_are_large_no_mass_is_lost(low, high, rare, count):
    """So little of Q may have a loss that it cannot say where P begins."""
    step = 0.1
    masses = np.zeros(round((high - low) / step) + 1)
    masses[0], masses[-1] = rare, 1.0 - rare
    pmf = LossPmf(step, round(low / step), masses, 0.0)
    nothing = LossPmf(step, 0, np.ones(1), 0.0)
    found = compose([(pmf, count), (nothing, 1)])
    many = np.arange(count + 1)
    losses = low * many + high * (count - many)
    exact = stats.binom.pmf(many, count, rare)
    points = np.linspace(0.0, losses.max(), 40)
    gaps = -np.expm1(np.minimum(points[:, None] - losses, 0.0)) @ exact
    assert (found.delta(points) >= gaps - 1e-15).all()
    assert found.delta(points) == pytest.approx(gaps, abs=1e-9)


def test_what_has_a_finite_loss_hardly_ever_is_answered_at_once():
    rare = LossPmf(0.1, 0, np.array([1e-30]), 1.0 - 1e-16)
    assert compose([(rare, 3)]).infinite == 1.0


@pytest.mark.parametrize(
    ("count", "noise"), [(1, 1.0), (50, 10.0), (10_000, 100.0), (10**6, 1000.0)]
)
def test_gaussian_composition_by_closed_form(count, noise):
    """Far tails, where FFT rounding hides: the profile down to 1e-14, both sides."""
    mu = math.sqrt(count) / noise
    step = (0.02 if count == 1 else 0.05) / noise
    ours = compose([(sampled_gaussian(1.0, noise, step, Direction.REMOVE), count)])
    for target in (1e-2, 1e-5, 1e-9, 1e-12, 1e-14):
        value = ours.epsilon(target)
        exact = gaussian_delta(mu, value)
        assert exact <= target * (1 + 1e-9)
        assert exact >= target * 0.98
    for value in (-0.5, -2.0):
        exact = -math.expm1(value) + math.exp(value) * gaussian_delta(mu, -value)
        assert exact - 1e-10 <= float(ours.delta(value)) <= exact + 1e-3
    assert abs(ours.masses.sum() + ours.infinite - 1.0) < 1e-6
    assert abs((ours.masses * np.exp(-ours.losses)).sum() - 1.0) < 1e-6


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.3, 0.5), (1e-4, 0.6), (0.999, 2.0)])
def test_one_sampled_release_by_closed_form(rate, noise, direction):
    from scipy.stats import norm

    def exact(value):
        if direction is Direction.REMOVE:
            x = noise**2 * math.log((math.exp(value) - 1 + rate) / rate) + 0.5
            return rate * norm.sf((x - 1) / noise) - (math.exp(value) - 1 + rate) * norm.sf(
                x / noise
            )
        if math.exp(-value) <= 1 - rate:
            return 0.0
        x = noise**2 * math.log((math.exp(-value) - 1 + rate) / rate) + 0.5
        left = norm.cdf(x / noise)
        mixed = (1 - rate) * left + rate * norm.cdf((x - 1) / noise)
        return left - math.exp(value) * mixed

    pmf = sampled_gaussian(rate, noise, 1e-2 * loss_deviation(rate, noise), direction)
    for value in np.linspace(0.0, 0.5, 6) * min(10 * rate, 1):
        ours = float(pmf.delta(value))
        assert ours >= exact(value) * (1 - 1e-9) - 1e-16
        assert ours == pytest.approx(exact(value), rel=2e-2, abs=2e-3 * exact(0.0))
    assert pmf.masses.sum() + pmf.infinite == pytest.approx(1.0, abs=1e-12)


@given(st.integers(2, 40))
@settings(max_examples=10, deadline=None)
def test_coarsening_is_pessimistic_and_keeps_both_masses(factor):
    pmf = compose([(sampled_gaussian(0.1, 1.0, 2e-3, Direction.REMOVE), 20)])
    coarse = pmf.coarsen(factor)
    assert (coarse.delta(EPSILONS) >= pmf.delta(EPSILONS) - 1e-13).all()
    assert coarse.masses.sum() == pytest.approx(pmf.masses.sum(), rel=1e-12)
    assert (coarse.masses * np.exp(-coarse.losses)).sum() == pytest.approx(
        (pmf.masses * np.exp(-pmf.losses)).sum(), rel=1e-12
    )


def test_epsilon_inverts_delta():
    pmf = compose([(sampled_gaussian(0.1, 1.0, 1e-2, Direction.REMOVE), 20)])
    for target in (0.1, 1e-2, 1e-5, 1e-11):
        assert float(pmf.delta(pmf.epsilon(target))) == pytest.approx(target, rel=1e-8)
    assert pmf.epsilon(0.99) == 0.0
    certain = LossPmf(0.1, 0, np.array([0.9]), 0.1)
    assert certain.epsilon(0.05) == math.inf
    assert certain.epsilon(0.1) == 0.0


def test_a_profile_that_is_not_convex_is_made_convex():
    """The true profile is convex in e^ε, so chords between valid points are valid."""

    def rough(points):
        return np.where(points < 1.0, 0.9, 0.01 * np.exp(-points))

    pmf = from_profile(rough, rough, 0.01, -800, 800)
    values = pmf.delta(EPSILONS[EPSILONS >= 0])
    assert (values <= rough(EPSILONS[EPSILONS >= 0]) + 1e-9).all()
    assert float(pmf.delta(0.9)) < 0.5
    x, d = np.exp(np.linspace(-2, 3, 400)), pmf.delta(np.linspace(-2, 3, 400))
    slopes = np.diff(d) / np.diff(x)
    assert (np.diff(slopes) > -1e-9).all()


def test_mixture_is_the_average_profile():
    first = finite_pmf([0.6, 0.4], [0.4, 0.6])
    second = finite_pmf([0.9, 0.1], [0.5, 0.5])
    mixed = mixture([first, second], [0.25, 0.75])
    np.testing.assert_allclose(
        mixed.delta(EPSILONS),
        0.25 * first.delta(EPSILONS) + 0.75 * second.delta(EPSILONS),
        atol=1e-12,
    )


@pytest.mark.parametrize("step", [1e-9, 1e-4, 0.1, 1.0, 50.0, 250.0])
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 20_000])
def test_discounted_sums_are_those_of_a_filter(size, step):
    rng = np.random.default_rng(0)
    values = np.exp(-700.0 * rng.random(size)) * (rng.random(size) < 0.8)
    expected = signal.lfilter([1.0], [1.0, -math.exp(-step)], values)
    np.testing.assert_allclose(_discounted(values, step), expected, rtol=1e-10, atol=1e-295)


@pytest.mark.parametrize(
    ("rate", "noise", "count"), [(0.06, 1.4, 337), (0.2, 10.0, 1000), (1e-4, 0.5, 1000)]
)
def test_double_precision_is_taken_only_where_its_noise_is_beside(rate, noise, count, monkeypatch):
    one = sampled_gaussian(rate, noise, 1e-3, Direction.REMOVE)
    found = compose([(one, count)])
    monkeypatch.setattr(pmf, "_is_negligible", lambda *_: False)
    exact = compose([(one, count)])
    points = np.array([0.1, 1.0, 3.0, 6.0])
    known = exact.delta(points)
    kept = known > 1e-14
    assert kept.any()
    np.testing.assert_allclose(found.delta(points)[kept], known[kept], rtol=1e-4)
