"""Instances whose choices hang on what was released before, against all decisions there are."""

import itertools
import math

import numpy as np
import pytest

from privtune.accounting import Composed, Gaussian, Geometric, Laplace, Poisson, PrivateSelection
from privtune.accounting.accountant import lower_bound
from privtune.accounting.adaptive import Stages
from privtune.accounting.instances import instance_epsilon
from privtune.accounting.lower import Outcomes, composition

POINTS = (-0.4, 0.0, 0.3, 0.8, 1.4)


def tuned(p, q, order, law):
    """The laws of the best of K where outcomes are ranked in this order, exactly."""
    order = list(order)
    masses = [
        np.diff([float(law.pgf(min(x, 1.0))) for x in np.append(0.0, np.cumsum(m[order]))])
        for m in (p, q)
    ]
    none = law.zero_probability
    return np.append(masses[0], none), np.append(masses[1], none)


def best_by_hand(first, orders, epsilon):
    """The largest δ(ε) of two stages: the second's order is chosen for each outcome of the first."""
    found = 0.0
    for p, q in first:
        total = 0.0
        for a, b in zip(p, q, strict=True):
            scale = math.exp(epsilon) * b
            total += max(np.maximum(a * c - scale * d, 0.0).sum() for c, d in orders)
        found = max(found, total)
    return found


def best_of_strangers(first, orders, epsilon):
    """The same where no order hangs on anything."""
    return max(
        np.maximum(np.outer(p, c) - math.exp(epsilon) * np.outer(q, d), 0.0).sum()
        for (p, q), (c, d) in itertools.product(first, orders)
    )


@pytest.mark.quick
@pytest.mark.parametrize("law", [Geometric(4), Poisson(3)])
def test_decisions_are_as_good_as_the_best_of_all(law):
    generator = np.random.default_rng(1)
    gained = 0
    for _ in range(4):
        p, q = (generator.dirichlet(np.ones(4)) * 0.9 + 0.025 for _ in range(2))
        orders = [tuned(p, q, order, law) for order in itertools.permutations(range(4))]
        stage = [Outcomes(a, b, 0.0) for a, b in orders]
        stages = Stages(composition([]), [stage, stage])
        for epsilon in POINTS:
            best = best_by_hand(orders, orders, epsilon)
            found = stages.decided(epsilon).delta(epsilon)
            assert found <= best * (1.0 + 1e-9)
            assert found >= best * 0.995 - 1e-6
            gained += found > 1.001 * best_of_strangers(orders, orders, epsilon)
    assert gained >= 5


def test_a_fixed_release_is_what_the_choice_hangs_on():
    law, generator = Geometric(5), np.random.default_rng(2)
    p, q = (generator.dirichlet(np.ones(4)) * 0.9 + 0.025 for _ in range(2))
    a, b = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
    orders = [tuned(p, q, order, law) for order in itertools.permutations(range(4))]
    stages = Stages(Outcomes(a, b, 0.0), [[Outcomes(c, d, 0.0) for c, d in orders]])
    for epsilon in POINTS:
        best = best_by_hand([(a, b)], orders, epsilon)
        assert best * 0.995 - 1e-6 <= stages.decided(epsilon).delta(epsilon) <= best * (1 + 1e-9)


def test_the_cost_answers_to_delta():
    stage = [Outcomes(np.array([0.7, 0.3]), np.array([0.4, 0.6]), 0.0)]
    stages = Stages(composition([]), [stage] * 3)
    found = stages.epsilon(0.05, 0.5)
    assert stages.decided(found).delta(found) >= 0.05 * (1.0 - 1e-9)
    # Three times a release of two outcomes, by hand: losses add, the number of ones is binomial.
    counts = np.arange(4)
    ways = np.array([1, 3, 3, 1])
    p, q = 0.7 ** (3 - counts) * 0.3**counts * ways, 0.4 ** (3 - counts) * 0.6**counts * ways
    assert np.maximum(p - math.exp(found) * q, 0.0).sum() == pytest.approx(0.05, rel=1e-3)


def test_what_shows_the_record_and_what_hardly_happens_is_kept():
    shown = Outcomes(np.array([0.01, 0.59, 0.4, 0.0]), np.array([0.0, 0.4, 0.59, 0.01]), 0.0)
    rare = Outcomes(np.array([1e-14, 0.5, 0.5]), np.array([1e-30, 0.5, 0.5]), 0.0)
    stages = Stages(shown, [[rare, shown]])
    found = stages.decided(3.0)
    assert found.p.sum() == pytest.approx(1.0, rel=1e-12)
    assert found.q.sum() == pytest.approx(0.99**2, rel=1e-12)  # what shows the absence is left out
    assert found.delta(3.0) >= 1.0 - 0.99**2 - 1e-9


@pytest.mark.parametrize("law", [Geometric(10), Poisson(20)])
def test_company_costs_no_less_where_choices_may_look_back(law):
    chosen = PrivateSelection(Gaussian(3.0), law)
    for event in (Composed([chosen, Laplace(4.0)]), Composed([chosen, chosen, Gaussian(2.0)])):
        together = lower_bound(event, 1e-5)
        alone = max(instance_epsilon(part, 1e-5) for part in event.events)
        assert together > 1.05 * alone
