"""Subsampled tuning against quadrature and enumeration on toys, and in its limits."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import integrate
from scipy.stats import norm

import privtune.accounting as dp
from privtune.accounting.curves import ORDERS, amplified_curve, split_curve
from privtune.accounting.pairs import laplace_pair
from privtune.accounting.pmf import LossPmf
from privtune.accounting.rdp import rdp_curve
from tests.accounting.helpers import steps

BASE = steps(0.0213, 1.5, 940)
TUNER = dp.PrivateSelection(BASE, dp.Geometric(10))


def test_the_worked_example():
    """Tuning on a tenth of the data, δ = 1e-5."""
    assert dp.epsilon(BASE, 1e-5).epsilon == pytest.approx(2.04, abs=6e-3)
    everything = dp.epsilon(TUNER, 1e-5)
    assert everything.bounds["rdp"] == pytest.approx(4.41, abs=1e-2)
    assert everything.epsilon == pytest.approx(3.03, abs=6e-3)
    first = dp.epsilon(dp.SubsampledTuning(1, 0.1, TUNER, BASE), 1e-5)
    second = dp.epsilon(dp.SubsampledTuning(2, 0.1, TUNER, BASE), 1e-5)
    assert first.epsilon <= 1.945
    assert first.bounds["rdp"] <= 2.42
    assert second.epsilon <= 2.235
    assert second.bounds["rdp"] == pytest.approx(3.30, abs=6e-3)
    # The record trains the final model with probability 1 - q only.
    assert first.epsilon < dp.epsilon(BASE, 1e-5).epsilon < second.epsilon


def variant_two(rate, tuning, training, value, removed):
    """Quadrature: tuning Gaussian seen with probability `rate`, training Gaussian always."""

    def density(x, y, with_record):
        if not with_record:
            return norm.pdf(x, 0, tuning) * norm.pdf(y, 0, training)
        mixed = (1 - rate) * norm.pdf(x, 0, tuning) + rate * norm.pdf(x, 1, tuning)
        return mixed * norm.pdf(y, 1, training)

    return _integrate(density, value, removed, tuning, training)


def variant_one(rate, tuning, training, value, removed):
    def density(x, y, with_record):
        if not with_record:
            return norm.pdf(x, 0, tuning) * norm.pdf(y, 0, training)
        tuned = norm.pdf(x, 1, tuning) * norm.pdf(y, 0, training)
        trained = norm.pdf(x, 0, tuning) * norm.pdf(y, 1, training)
        return rate * tuned + (1 - rate) * trained

    return _integrate(density, value, removed, tuning, training)


def _integrate(density, value, removed, tuning, training):
    x = np.linspace(-8 * tuning, 1 + 8 * tuning, 701)
    y = np.linspace(-8 * training, 1 + 8 * training, 701)
    grid = np.meshgrid(x, y, indexing="ij")
    p, q = density(*grid, removed), density(*grid, not removed)
    inner = integrate.trapezoid(np.maximum(p - math.exp(value) * q, 0.0), y, axis=1)
    return integrate.trapezoid(inner, x)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize(("variant", "exact"), [(1, variant_one), (2, variant_two)])
def test_profiles_by_quadrature(variant, exact, rate):
    event = dp.SubsampledTuning(variant, rate, dp.Gaussian(0.8), dp.Gaussian(1.3))
    for value in (0.1, 0.7, 1.5, 2.5):
        truth = max(exact(rate, 0.8, 1.3, value, removed) for removed in (True, False))
        ours = dp.delta(event, value)
        assert truth * (1 - 1e-4) <= ours.delta
        assert ours.delta <= truth * 1.02 + 1e-6
        assert ours.delta <= ours.bounds["rdp"]


def finite_divergence(p, q, order):
    return math.log(float((p**order * q ** (1 - order)).sum())) / (order - 1)


def test_renyi_bounds_by_enumeration():
    """On finite mechanisms both Rényi bounds lie above both directions, at every order."""
    rng = np.random.default_rng(11)
    orders = np.array([2.0, 3.0, 5.0, 9.0, 16.0])
    whole = np.arange(2.0, 40.0)
    for rate, _ in itertools.product((0.05, 0.3, 0.7), range(4)):
        p1, q1, p2, q2 = rng.dirichlet(np.full(4, 3.0), size=4) * 0.9 + 0.025
        curves = [
            np.array([max(finite_divergence(a, b, o), finite_divergence(b, a, o)) for o in whole])
            for a, b in ((p1, q1), (p2, q2))
        ]
        with_record = rate * np.outer(p1, q2) + (1 - rate) * np.outer(q1, p2)
        without = np.outer(q1, q2)
        bound = split_curve(whole, curves[0], curves[1], rate)
        sampled = amplified_curve(whole, curves[0], rate)
        mixed = rate * p1 + (1 - rate) * q1
        for order in orders:
            place = int(order) - 2
            for a, b in ((with_record, without), (without, with_record)):
                exact = finite_divergence(a.ravel(), b.ravel(), order)
                assert exact <= bound[place] * (1 + 1e-9)
            for a, b in ((mixed, q1), (q1, mixed)):
                assert finite_divergence(a, b, order) <= sampled[place] * (1 + 1e-9)


def test_the_final_training_is_paid_for_by_every_bound():
    """q → 0: the final training alone, and no bound below it. q → 1: the tuning, by variant 2 both."""
    tuner, training = dp.Gaussian(2.0), dp.Gaussian(3.0)

    def cost(event, method="best"):
        return dp.epsilon(event, 1e-5, method=method).epsilon

    ends = {1: tuner, 2: dp.Composed([tuner, training])}
    for variant, end in ends.items():
        small = dp.SubsampledTuning(variant, 1e-7, tuner, training)
        assert cost(small) == pytest.approx(cost(training), rel=1e-2)
        assert min(cost(small), cost(small, "rdp")) >= cost(training) * (1 - 1e-9)
        large = dp.SubsampledTuning(variant, 1 - 1e-9, tuner, training)
        assert cost(large) == pytest.approx(cost(end), rel=1e-2)


def test_a_subsampled_tuning_composes():
    event = dp.SubsampledTuning(1, 0.1, TUNER, BASE)
    alone = dp.epsilon(event, 1e-5).epsilon
    both = dp.epsilon(dp.Composed([event, BASE]), 1e-5)
    assert alone < both.epsilon < 0.85 * (alone + dp.epsilon(BASE, 1e-5).epsilon)
    assert both.epsilon < both.bounds["rdp"]


def test_a_table_of_millions_of_points_gets_a_wider_lattice(monkeypatch):
    """Rare large losses beside small ones: fewer points, each bound still above the finer one."""
    one, other = (
        (pair.remove, pair.add) for pair in (laplace_pair(0.05, 0.02), laplace_pair(2.0, 0.02))
    )
    fine = dp.pairs.tabulate(one, other, 0.1, 0.01)
    monkeypatch.setattr(dp.pairs, "_MOST_TERMS", 2e5)
    wide = dp.pairs.tabulate(one, other, 0.1, 0.01)
    terms = sum(pair.masses.size for pair in wide) / 2 * one[0].masses.size
    assert terms <= 2.5e5 < sum(pair.masses.size for pair in fine) / 2 * one[0].masses.size
    points = np.linspace(0.0, 20.0, 200)
    for coarse, exact in zip(wide, fine, strict=True):
        assert (coarse.delta(points) >= exact.delta(points) - 1e-12).all()
        assert coarse.epsilon(1e-3) <= exact.epsilon(1e-3) + 4 * coarse.step


def test_a_profile_of_one_atom_and_a_long_reach_has_few_points(monkeypatch):
    """Once there were 800,000, one by one: a quarter of an hour of CPU."""
    points = []

    def counting(*args):
        points.append(args[-1])
        return 0.0

    monkeypatch.setattr(dp.pairs, "split_delta", counting)
    monkeypatch.setattr(dp.pairs, "split_reverse_delta", counting)
    nothing, much = LossPmf(1e-6, 0, np.ones(1), 0.0), LossPmf(0.01, 399, np.full(2, 0.5), 0.0)
    remove, _ = dp.pairs.tabulate((nothing, nothing), (much, much), 0.03, 5e-6)
    assert 100 < len(points) < 100_000
    assert remove.losses[-1] > 3.9


def moment(order, rate, noise):
    """log E_Q[(dP/dQ)^order] of one sampled Gaussian step, by mpmath's quadrature at any real order."""
    q, s, a = map(mpmath.mpf, (rate, noise, order))

    def integrand(x):
        ratio = 1 - q + q * mpmath.e ** ((2 * x - 1) / (2 * s**2))
        return ratio**a * mpmath.npdf(x, 0, s)

    ends = [-12 * s, 0, 1, a, a + 12 * s]
    return mpmath.log(mpmath.quad(integrand, ends))


def of_training(noise, rate, steps):
    """Return the Rényi curve of a training of so many steps, as a function of a real order."""
    return lambda order: (
        steps * moment(order, rate, noise) / (order - 1) if order > 1 else mpmath.mpf(0)
    )


def theorem_three(order, rate, tuning, training):
    """Koskela and Kulkarni, arXiv:2301.11989, Theorem 3, term by term as it is printed."""
    q, total = mpmath.mpf(rate), mpmath.mpf(0)
    total += q**order * mpmath.exp((order - 1) * tuning(order))
    total += (1 - q) ** order * mpmath.exp((order - 1) * training(order))
    for j in range(1, order):
        term = mpmath.binomial(order, j) * q ** (order - j) * (1 - q) ** j
        term *= mpmath.exp((order - j - 1) * tuning(order - j))
        total += term * mpmath.exp((j - 1) * training(j))
    return mpmath.log(total) / (order - 1)


def by_the_means(order, rate, tuning, training):
    """The other direction, by the arithmetic and the geometric mean (README, 6)."""
    q = mpmath.mpf(rate)
    first = q * tuning(1 + q * (order - 1))
    return first + (1 - q) * training(1 + (1 - q) * (order - 1))


def zhu_wang(order, rate, tuning, training):
    """Zhu and Wang, ICML 2019, Theorem 6, with its factor 3, and the training on all records."""
    q = mpmath.mpf(rate)
    total = (1 - q) ** (order - 1) * (order * q - q + 1)
    total += mpmath.binomial(order, 2) * q**2 * (1 - q) ** (order - 2) * mpmath.exp(tuning(2))
    for j in range(3, order + 1):
        term = mpmath.binomial(order, j) * (1 - q) ** (order - j) * q**j
        total += 3 * term * mpmath.exp((j - 1) * tuning(j))
    return mpmath.log(total) / (order - 1) + training(order)


@pytest.mark.parametrize(("rate", "trials", "ratio"), [(0.1, 10, 1.0), (0.3, 4, 2.0)])
def test_shown_trials_on_a_part_by_the_printed_formulas(rate, trials, ratio):
    """Ten or four trials with noise and steps of their own, then one training: each order anew."""
    part, final = steps(0.05, 1.5 * ratio, 30), steps(0.05, 1.5, 40)
    trial = of_training(1.5 * ratio, 0.05, 30)
    training = of_training(1.5, 0.05, 40)

    def tuning(order):
        return trials * trial(order)

    for variant in (1, 2):
        event = dp.SubsampledTuning(variant, rate, dp.Repeated(trials, part), final)
        curve = rdp_curve(event)
        for order in (2, 3, 5, 8):
            if variant == 1:
                forward = theorem_three(order, rate, tuning, training)
                expected = max(forward, by_the_means(order, rate, tuning, training))
            else:
                expected = zhu_wang(order, rate, tuning, training)
            (reported,) = curve[order == ORDERS]
            assert reported == pytest.approx(float(expected), rel=1e-6)
        guarantee = dp.epsilon(event, 1e-5)
        assert dp.lower_bound(event, 1e-5) <= guarantee.epsilon
        assert guarantee.epsilon < 1.05 * dp.lower_bound(event, 1e-5)
        assert guarantee.epsilon <= guarantee.bounds["rdp"]


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize(("variant", "exact"), [(1, variant_one), (2, variant_two)])
def test_four_shown_trials_by_quadrature(variant, exact, rate):
    """Four Gaussian releases of 1.6 are one of 0.8."""
    trials = dp.Repeated(4, dp.Gaussian(1.6))
    event = dp.SubsampledTuning(variant, rate, trials, dp.Gaussian(1.3))
    for value in (0.1, 0.7, 1.5, 2.5):
        truth = max(exact(rate, 0.8, 1.3, value, removed) for removed in (True, False))
        ours = dp.delta(event, value).delta
        assert truth * (1 - 1e-4) <= ours <= truth * 1.02 + 1e-6


@pytest.mark.parametrize("variant", [1, 2])
def test_trials_that_follow_from_each_other_cost_their_sum_at_most(variant):
    """Two shown trials, the second by what the first said, and a training by what both said."""
    rng = np.random.default_rng(3)
    whole = np.arange(2.0, 40.0)
    for rate in (0.1, 0.4):
        # Of outcomes y1, y2 and y3: each release's law may hang on all that was shown before.
        first, second, last = (
            rng.dirichlet(np.full(3, 3.0), size=(2, *before)) * 0.9 + 0.1 / 3
            for before in ((), (3,), (3, 3))
        )
        (p1, q1), (p2, q2), (p3, q3) = first, second, last

        def worst(p, q, order):
            rows = zip(p.reshape(-1, 3), q.reshape(-1, 3), strict=True)
            pairs = [pair for a, b in rows for pair in ((a, b), (b, a))]
            return max(finite_divergence(a, b, order) for a, b in pairs)

        curves = [
            np.array([worst(p, q, order) for order in whole])
            for p, q in ((p1, q1), (p2, q2), (p3, q3))
        ]
        tuning = curves[0] + curves[1]
        if variant == 1:
            bound = split_curve(whole, tuning, curves[2], rate)
        else:
            bound = amplified_curve(whole, tuning, rate) + curves[2]
        inside = (p1[:, None] * p2)[:, :, None] * (q3 if variant == 1 else p3)
        outside = (q1[:, None] * q2)[:, :, None]
        with_record = rate * inside + (1 - rate) * outside * p3
        without = outside * q3
        for order in (2.0, 3.0, 5.0, 9.0):
            for a, b in ((with_record, without), (without, with_record)):
                exact = finite_divergence(a.ravel(), b.ravel(), order)
                assert exact <= bound[int(order) - 2] * (1 + 1e-9)
