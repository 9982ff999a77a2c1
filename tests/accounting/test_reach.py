"""What noise of finite reach adds to δ, against integrals and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import integrate
from scipy.stats import norm

import privtune.accounting as dp
from privtune.accounting.reach import mass_beyond_reach


def cut(x, centre, reach):
    """Density of a Gaussian of scale 1 that ends at ``reach``."""
    return np.where(abs(x - centre) <= reach, norm.pdf(x - centre), 0.0) / (1 - 2 * norm.sf(reach))


@pytest.mark.parametrize(
    ("sigma", "reach", "rate", "eps"),
    [(1.0, 3.0, 1.0, 1.0), (0.6, 3.5, 0.1, 2.0), (2.0, 2.5, 1.0, 0.1), (0.5, 4.5, 0.01, 3.0)],
)
def test_the_mass_covers_what_a_cut_gaussian_gives_away(sigma, reach, rate, eps):
    """Both hockey-stick divergences of the cut mechanism, by integration."""
    shift = 1.0 / sigma
    points = [-reach, shift - reach, 0.0, shift, reach, shift + reach]

    def divergence(density):
        def swapped(forward):
            def integrand(x):
                one, other = density(x, shift), density(x, 0.0)
                mixed = (1 - rate) * other + rate * one
                p, q = (mixed, other) if forward else (other, mixed)
                return max(float(p - math.exp(eps) * q), 0.0)

            return integrate.quad(
                integrand, -reach, shift + reach, points=points, limit=2000, epsabs=1e-12
            )[0]

        return max(swapped(True), swapped(False))

    true = divergence(lambda x, c: norm.pdf(x - c))
    real = divergence(lambda x, c: cut(x, c, reach))
    event = dp.PoissonSampled(rate, dp.Gaussian(sigma))
    mass = mass_beyond_reach(event, gaussian=reach, coordinates=1)
    scaled = true / (1 - 2 * norm.sf(reach))
    assert real <= scaled + mass + 1e-10
    assert real > true + 0.1 * mass, "what is lost is real, and of that size"


def test_no_split_of_a_gradient_is_worse():
    reach, sigma = 5.768, 0.7
    for count in (1, 2, 3, 10, 1000):
        bound = mass_beyond_reach(dp.Gaussian(sigma), gaussian=reach, coordinates=count)
        rng = np.random.default_rng(count)
        splits = [np.eye(1, count)[0], np.ones(count)]
        splits += [rng.exponential(size=count) ** power for power in (0.5, 1, 2, 5)]
        splits += [np.concatenate([np.full(k, r), np.ones(count - k)])
                   for k, r in itertools.product((1, 2), (3.0, 30.0)) if k < count]  # fmt: skip
        masses = []
        for split in splits:
            g = split / np.linalg.norm(split) / sigma
            masses.append(float((norm.sf(reach - g) - norm.sf(reach)).sum()))
        assert max(masses) <= bound * (1 + 1e-9)
        assert bound <= 2.0 * max(masses)


def test_masses_add_up_over_an_arm():
    options = {"gaussian": 6.0, "laplace": 30.0, "coordinates": 1}

    def mass(event):
        return mass_beyond_reach(event, **options)

    one, two, lap = dp.Gaussian(1.0), dp.Gaussian(0.7), dp.Laplace(0.5)
    a, b = mass(one), mass(two)
    assert a == pytest.approx(norm.sf(5.0) - norm.sf(6.0), rel=1e-9)
    assert mass(lap) == pytest.approx(0.5 * math.exp(2.0 - 30.0), rel=1e-9)
    assert mass(dp.Joint([one, lap])) == pytest.approx(a + mass(lap))
    assert mass(dp.Repeated(7, dp.PoissonSampled(0.1, one))) == pytest.approx(0.7 * a)
    assert mass(dp.Composed((one, two))) == pytest.approx(a + b)
    assert mass(dp.WorstOf((one, two))) == mass(dp.Parallel((one, two))) == b
    assert mass(dp.PrivateSelection(one, dp.Geometric(10))) == pytest.approx(10 * a)
    assert mass(dp.ThresholdSelection(one, 0.05)) == pytest.approx(20 * a)
    assert mass(dp.SubsampledTuning(1, 0.1, one, two)) == pytest.approx(0.1 * a + b)
    assert mass(dp.NonPrivate()) == mass(dp.ApproximateDP(1.0, 0.1)) == 0.0
    assert mass(dp.Gaussian(0.01)) == mass(dp.Laplace(0.01)) == mass(dp.Repeated(10**9, two)) == 1.0
