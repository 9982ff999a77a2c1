"""A selection beside other charges: its composable form."""

import math

import numpy as np
import pytest

from privtune.accounting import Composed, Geometric, Poisson, PrivateSelection, Repeated, epsilon
from privtune.accounting.accountant import lower_bound
from privtune.accounting.lower import Instance
from privtune.accounting.pairs import tuner_pair, under_chords
from privtune.accounting.rdp import gaussian_delta
from privtune.accounting.selection import Tuner
from tests.accounting.helpers import attained, finite_pmf, steps

DELTA = 1e-5
BASE = steps(0.01, 1.0, 1000)


def tuned_profile(p, q, order, law, points):
    """δ of the best of K where outcomes are ranked in this order, exactly."""
    best = [
        np.diff([law.pgf(x) for x in np.minimum(np.append(0.0, np.cumsum(m[order])), 1.0)])
        for m in (p, q)
    ]
    gap = [best[0] - math.exp(e) * best[1] for e in points]
    none = law.zero_probability
    return np.array(
        [
            np.maximum(g, 0).sum() + max(1 - math.exp(e), 0) * none
            for g, e in zip(gap, points, strict=True)
        ]
    )


@pytest.mark.parametrize("law", [Poisson(20), Geometric(10)])
def test_the_composable_form_is_above_every_ranking_of_few_outcomes(law):
    generator = np.random.default_rng(0)
    points = np.linspace(-2.0, 4.0, 61)
    for _ in range(4):
        p, q = (generator.dirichlet(np.ones(5) * 3.0) * 0.96 + 0.008 for _ in range(2))
        remove, add = Tuner(finite_pmf(p, q), law), Tuner(finite_pmf(q, p), law)
        pair = tuner_pair(remove, add, 4096)
        for _ in range(60):
            order = generator.permutation(5)
            assert (
                pair.remove.delta(points) >= tuned_profile(p, q, order, law, points) - 1e-9
            ).all()
            assert (pair.add.delta(points) >= tuned_profile(q, p, order, law, points) - 1e-9).all()


def test_it_is_below_the_envelope_and_above_an_instance():
    law = Poisson(30)
    p = np.array([0.17, 0.185, 0.2, 0.215, 0.23])
    q = p[::-1].copy()
    remove, add = Tuner(finite_pmf(p, q), law), Tuner(finite_pmf(q, p), law)
    pair = tuner_pair(remove, add, 4096)
    instance = Instance(remove.base, law)
    points = np.linspace(0.0, 1.5, 31)
    found = pair.remove.delta(points)
    envelope = np.array([remove.delta(float(e)) for e in points])
    assert (found <= envelope * (1.0 + 1e-6) + 1e-12).all()
    assert (found < 0.8 * envelope).any()
    # The instance lives on the lattice of the pair, so that nothing is lost between them.
    assert (found >= np.array([attained(instance, float(e)) for e in points]) * (1.0 - 1e-5)).all()


@pytest.mark.parametrize(
    ("law", "beside", "three", "ten"),
    [(Geometric(10), 1.02, 1.05, 1.105), (Poisson(40), 1.03, 1.15, 1.35)],
)
def test_selections_in_company_stay_near_an_instance(law, beside, three, ten):
    """Three selections, ten, one and a training: above what some mechanism costs, and not by much."""
    chosen = PrivateSelection(BASE, law)
    events = {
        Composed([chosen, BASE]): beside,
        Repeated(3, chosen): three,
        Repeated(10, chosen): ten,
    }
    for event, most in events.items():
        reported, lower = epsilon(event, DELTA).epsilon, lower_bound(event, DELTA)
        assert lower <= reported <= most * lower


def test_chords_stay_above_the_profile_whose_points_they_join():
    step, places = 0.05, np.array([0, 3, 17, 40, 60])
    exact = np.array([gaussian_delta(1.0, step * i) for i in range(61)])
    found = under_chords(np.ones(61), places, exact[places], step)
    assert (found >= exact).all()
    assert found[places] == pytest.approx(exact[places], rel=1e-12)
    assert (found < 1.0).all()
