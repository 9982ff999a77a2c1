"""Private selection: our envelope bound against exact enumeration, the lower bound and RDP."""

import itertools
import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from privtune.accounting import (
    ApproximateDP,
    Binomial,
    Composed,
    Gaussian,
    Geometric,
    Laplace,
    Logarithmic,
    Poisson,
    PrivateSelection,
    Repeated,
    ThresholdSelection,
    TruncatedNegativeBinomial,
    WorstOf,
    epsilon,
    lower_bound,
)
from privtune.accounting import delta as dp_delta
from privtune.accounting.best_of_k import Threshold, Tuner, _upper_hull
from privtune.accounting.curves import ORDERS, selection_curve
from privtune.accounting.lower import Instance
from privtune.accounting.pmf import LossPmf
from tests.accounting.helpers import finite_pmf, steps
from tests.tiers import FULL

TABLE = [
    ((256 / 60000, 1.0, 2340), TruncatedNegativeBinomial(1, 20), 2.987, 1.815, 1.807),
    ((256 / 60000, 1.0, 2340), TruncatedNegativeBinomial(0, 10), 2.332, 1.571, 1.564),
    ((256 / 60000, 1.0, 2340), Poisson(12), 2.999, 2.235, 2.219),
    ((0.05, 2.0, 400), Geometric(100), 6.064, 4.37, 4.347),
    ((256 / 1400, 4.0, 100), TruncatedNegativeBinomial(0, 10), 3.501, 2.705, 2.692),
]


@pytest.mark.parametrize(("base", "runs", "rdp", "ceiling", "floor"), TABLE)
def test_the_numbers_to_meet(base, runs, rdp, ceiling, floor):
    event = PrivateSelection(steps(*base), runs)
    answer = epsilon(event, 1e-5)
    assert answer.method == "envelope"
    assert floor <= answer.epsilon <= ceiling
    assert answer.bounds["rdp"] == pytest.approx(rdp, abs=2e-3)
    assert 0.997 * floor <= lower_bound(event, 1e-5) <= floor + 2e-3
    if "profile" in answer.bounds:
        assert answer.epsilon < answer.bounds["profile"] < answer.bounds["rdp"]


def test_the_approximate_dp_theorem_is_a_labelled_baseline():
    """Minimised by brute force over both deltas, with the base from dp-accounting's accountant."""
    sampled = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0))
    accountant = RdpAccountant(orders=[1 + i / 10 for i in range(1, 200)] + list(range(21, 200)))
    accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, 400))
    gamma, delta = 0.1, 1e-5
    best = math.inf
    for second in np.geomspace(1e-9, delta, 60, endpoint=False).tolist():
        first = 0.5 * ((delta - second) * gamma / math.log(1.0 / second)) ** 2
        value = 3.0 * accountant.get_epsilon(first) + 3.0 * math.sqrt(2.0 * first)
        best = min(best, value)
    event = PrivateSelection(steps(0.05, 2.0, 400), Geometric(10))
    bounds = epsilon(event, delta).bounds
    assert bounds["liu-talwar"] == pytest.approx(best, rel=0.01)
    assert bounds["envelope"] < bounds["profile"] < bounds["liu-talwar"]
    assert "liu-talwar" not in epsilon(replace(event, runs=Poisson(10)), delta).bounds


MNIST, STRONG = (256 / 60000, 1.0, 2340), (0.05, 2.0, 400)
masses = st.lists(st.floats(0.03, 1.0), min_size=4, max_size=4)
finite_laws = st.sampled_from(
    [
        Geometric(5),
        Logarithmic(4),
        TruncatedNegativeBinomial(-0.5, 3),
        Poisson(2.0),
        Binomial(3, 3.0),
        Binomial(6, 2.0),
        Geometric(8, maximum=4),
        Geometric(5, minimum=2),
        Geometric(8, maximum=6, minimum=3),
        Logarithmic(5, minimum=4),
        Poisson(3.0, minimum=1),
        Binomial(6, 3.0, minimum=2),
    ]
)


def tuned(p, q, order, runs):
    """The exact law of the best of K; atoms in one group are ties, broken uniformly."""
    out_p, out_q, below_p, below_q = [], [], 0.0, 0.0
    for group in order:
        mass_p, mass_q = sum(p[i] for i in group), sum(q[i] for i in group)
        gain_p = float(runs.pgf(min(below_p + mass_p, 1.0)) - runs.pgf(below_p))
        gain_q = float(runs.pgf(min(below_q + mass_q, 1.0)) - runs.pgf(below_q))
        for i in group:
            out_p.append(gain_p * p[i] / mass_p)
            out_q.append(gain_q * q[i] / mass_q)
        below_p, below_q = below_p + mass_p, below_q + mass_q
    none = runs.zero_probability
    return np.array([*out_p, none]), np.array([*out_q, none])


def orders(size):
    for permutation in itertools.permutations(range(size)):
        yield [[i] for i in permutation]
        yield [list(permutation[:2]), *[[i] for i in permutation[2:]]]
        yield [[permutation[0]], list(permutation[1:])]


@given(masses, masses, finite_laws)
@settings(max_examples=25 if FULL else 10, deadline=None)
def test_envelope_by_exact_enumeration(first, second, runs):
    """Every order of the scores, ties included, on a four-outcome mechanism, both signs of ε."""
    p, q = np.array(first) / sum(first), np.array(second) / sum(second)
    tuner = Tuner(finite_pmf(p, q), runs)
    points = (-1.0, -0.2, 0.0, 0.3, 1.0, 2.0, 4.0)
    bound = [tuner.delta(e) for e in points]
    tabulated = tuner.profile(2000).delta(np.array([0.0, 0.3, 1.0, 2.0]))
    for order in orders(4):
        a, b = tuned(p, q, order, runs)
        exact = [np.maximum(a - math.exp(e) * b, 0.0).sum() for e in points]
        assert all(x <= y + 1e-9 for x, y in zip(exact, bound, strict=True))
        assert (np.array(exact)[[2, 3, 4, 5]] <= tabulated + 1e-9).all()


def best_by_hand(p, order, masses):
    """The law of the best of K with the masses of K given: `(below + p)^k − below^k`, over all k."""
    found, below = np.zeros(len(p)), 0.0
    for i in order:
        found[i] = sum(m * ((below + p[i]) ** k - below**k) for k, m in masses.items())
        below += p[i]
    return found


SURE = {
    # K = 2 + a geometric number of mean 4, and 3 + a Poisson number of mean 2: masses by hand.
    "geometric": (Geometric(6, minimum=3), {2 + j: 0.25 * 0.75 ** (j - 1) for j in range(1, 150)}),
    "poisson": (
        Poisson(5, minimum=3),
        {3 + j: math.exp(-2.0) * 2.0**j / math.factorial(j) for j in range(60)},
    ),
}


@pytest.mark.parametrize("name", SURE)
@given(masses, masses)
@settings(max_examples=25 if FULL else 10, deadline=None)
def test_sure_runs_by_exact_enumeration(name, first, second):
    """Every order of four outcomes against the bound, the pair that composes, and RDP's pieces."""
    law, counts = SURE[name]
    p, q = np.array(first) / sum(first), np.array(second) / sum(second)
    tuner = Tuner(finite_pmf(p, q), law)
    points = (-0.5, 0.0, 0.3, 1.0, 2.0, 4.0)
    bound = np.array([tuner.delta(e) for e in points])
    order_of_rdp = 4.0
    base = math.log((p**order_of_rdp * q ** (1 - order_of_rdp)).sum()) / (order_of_rdp - 1)
    for order in itertools.permutations(range(4)):
        a, b = best_by_hand(p, order, counts), best_by_hand(q, order, counts)
        assert a.sum() == pytest.approx(1.0, abs=1e-9)
        exact = np.array([np.maximum(a - math.exp(e) * b, 0.0).sum() for e in points])
        assert (exact <= bound + 1e-9).all()
        # K runs are the sure ones beside a selection among those that are drawn.
        sure = law.sure_runs
        fewer = {k - sure: m for k, m in counts.items()}
        c, d = best_by_hand(p, order, fewer), best_by_hand(q, order, fewer)
        if name == "poisson":
            c, d = np.append(c, fewer[0]), np.append(d, fewer[0])
        drawn, whole = (
            math.log((x**order_of_rdp * y ** (1 - order_of_rdp)).sum()) / (order_of_rdp - 1)
            for x, y in ((c, d), (a, b))
        )
        assert whole <= sure * base + drawn + 1e-9


@pytest.mark.parametrize("runs", [2, 5, 20])
def test_sure_runs_are_in_the_renyi_curve(runs):
    """Of K sure runs the exact divergence of the best is below the bound, at every order."""
    p, q = np.array([0.75, 0.25]), np.array([0.5, 0.5])

    def renyi(a, b):
        each = ORDERS[:, None] * np.log(a) + (1 - ORDERS[:, None]) * np.log(b)
        return logsumexp(each, axis=1) / (ORDERS - 1)

    best = [best_by_hand(each, [0, 1], {runs: 1.0}) for each in (p, q)]
    bound = selection_curve(renyi(p, q), Geometric(runs, minimum=runs))
    assert (renyi(*best) <= bound * (1 + 1e-9)).all()
    assert (renyi(*best) > selection_curve(renyi(p, q), Geometric(1))).any()


@pytest.mark.parametrize("law", [Geometric(10), Poisson(10.0)], ids=str)
def test_sure_runs_cost_more_than_one_and_less_than_all_shown(law):
    base = steps(0.05, 2.0, 400)
    found = []
    for minimum in (2, 5):
        event = PrivateSelection(base, replace(law, minimum=minimum))
        answer = epsilon(event, 1e-5)
        assert math.isfinite(answer.bounds["rdp"])
        # No less than an explicit instance; no more than the sure runs shown beside a selection.
        least = 1 if not isinstance(law, Poisson) else 0
        drawn = replace(law, mean=law.mean - minimum + least)
        shown = Composed([Repeated(minimum - least, base), PrivateSelection(base, drawn)])
        low, high = lower_bound(event, 1e-5), epsilon(shown, 1e-5).epsilon
        assert low <= answer.epsilon <= min(high, 1.06 * low)
        found.append(answer.epsilon)
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("base", "runs", "envelope", "ceiling"),
    [
        ((0.05, 2.0, 400), Poisson(40), 8.92, 8.75),
        ((1.0, 20.0, 100), Poisson(100), 14.55, 13.64),
        ((1.0, 20.0, 100), Binomial(10, 10), 6.80, 6.66),
        ((256 / 1400, 4.0, 100), Binomial(40, 40), 11.23, 10.62),
    ],
)
def test_the_rearrangement_closes_part_of_the_gap(base, runs, envelope, ceiling):
    event = PrivateSelection(steps(*base), runs)
    answer = epsilon(event, 1e-5)
    assert answer.method == "rearrangement"
    assert answer.bounds["envelope"] == pytest.approx(envelope, rel=3e-3)
    assert lower_bound(event, 1e-5) < answer.epsilon <= ceiling
    back = dp_delta(event, answer.epsilon)
    assert back.delta <= 1.02e-5
    assert back.bounds["envelope"] > 1.1e-5


@given(masses, masses, st.floats(0.02, 0.9))
@settings(max_examples=25 if FULL else 10, deadline=None)
def test_threshold_by_exact_enumeration(first, second, stop):
    p, q = np.array(first) / sum(first), np.array(second) / sum(second)
    bound = Threshold(finite_pmf(p, q), stop)
    for size in range(1, 5):
        for passing in itertools.combinations(range(4), size):
            keep = list(passing)
            scale_p = stop + (1 - stop) * p[keep].sum()
            scale_q = stop + (1 - stop) * q[keep].sum()
            a = np.append(p[keep] / scale_p, stop * (1 - p[keep].sum()) / scale_p)
            b = np.append(q[keep] / scale_q, stop * (1 - q[keep].sum()) / scale_q)
            for e in (0.0, 0.3, 1.0, 3.0):
                exact = np.maximum(a - math.exp(e) * b, 0.0).sum()
                assert exact <= bound.delta(e) + 1e-9


@pytest.mark.parametrize(("base", "mean"), [(STRONG, 1), (STRONG, 50), (MNIST, 5)])
def test_a_known_threshold_costs_less_than_the_best_of_as_many(base, mean):
    """What passes is a post-processing of the best under "passed or not", ties broken at random."""
    threshold = epsilon(ThresholdSelection(steps(*base), 1.0 / mean), 1e-5)
    best = epsilon(PrivateSelection(steps(*base), Geometric(mean)), 1e-5)
    alone = epsilon(steps(*base), 1e-5)
    assert threshold.method == ("threshold" if mean > 1 else "envelope")
    assert alone.epsilon * (1 - 2e-3) <= threshold.epsilon <= best.epsilon * (1 + 2e-3)


def test_pure_dp_recovers_the_published_constants():
    """Liu and Talwar: 3ε for the best of a geometric number of runs, 2ε with a threshold."""
    base = ApproximateDP(1.0, 0.0)
    best = epsilon(PrivateSelection(base, Geometric(1000)), 1e-12).epsilon
    passed = epsilon(ThresholdSelection(base, 1e-3), 1e-12).epsilon
    assert 2.9 <= best <= 3.0 * 1.001
    assert 1.9 <= passed <= 2.0 * 1.001
    # Papernot and Steinke, Corollary 3: (2 + η) ε.
    for shape in (0.0, 0.5):
        law = TruncatedNegativeBinomial(shape, 1000)
        assert epsilon(PrivateSelection(base, law), 1e-12).epsilon <= (2 + shape) * 1.001


def test_one_run_costs_one_run():
    base = steps(0.05, 2.0, 400)
    for runs in (Geometric(1), Binomial(1, 1), Logarithmic(1)):
        tuned_once = epsilon(PrivateSelection(base, runs), 1e-5).epsilon
        assert tuned_once == pytest.approx(epsilon(base, 1e-5).epsilon, rel=2e-3)


def test_monotone_in_the_mean_and_below_composition():
    base = steps(0.05, 2.0, 400)
    costs = [epsilon(PrivateSelection(base, Geometric(m)), 1e-5).epsilon for m in (1, 2, 8, 64)]
    assert costs == sorted(costs)
    fixed = epsilon(PrivateSelection(base, Binomial(2, 2)), 1e-5)
    assert fixed.epsilon <= epsilon(Repeated(2, base), 1e-5).epsilon * (1 + 1e-9)
    assert fixed.bounds["composition"] == epsilon(Repeated(2, base), 1e-5, method="pld").epsilon


def test_a_cap_belongs_into_the_law():
    base = steps(0.05, 2.0, 400)
    free = epsilon(PrivateSelection(base, Geometric(20)), 1e-5).epsilon
    loose = epsilon(PrivateSelection(base, Geometric(20, maximum=300)), 1e-5).epsilon
    assert loose == pytest.approx(free, rel=1e-3)
    assert math.isinf(
        epsilon(PrivateSelection(base, Geometric(20, maximum=50)), 1e-5).bounds["rdp"]
    )


def test_candidates_with_different_guarantees():
    """σ in {0.9, 1, 1.3, 2}: maximum 4.43 by RDP, weighted RDP 4.01, envelope 2.851 (δ = 1e-5)."""
    noises = (0.9, 1.0, 1.3, 2.0)
    candidates = [steps(0.01, s, 1000) for s in noises]
    mixed = PrivateSelection(WorstOf(candidates, [0.25] * 4), Logarithmic(10))
    worst = PrivateSelection(WorstOf(candidates), Logarithmic(10))
    answer, plain = epsilon(mixed, 1e-5), epsilon(worst, 1e-5)
    assert answer.epsilon < plain.epsilon < plain.bounds["rdp"]
    assert answer.bounds["rdp"] < plain.bounds["rdp"]
    lower = lower_bound(mixed, 1e-5)
    assert lower <= answer.epsilon <= lower * 1.005


def test_a_tuner_composes_with_everything():
    base = steps(0.05, 2.0, 400)
    tuned_event = PrivateSelection(base, Geometric(10))
    alone, plain = epsilon(tuned_event, 1e-5).epsilon, epsilon(base, 1e-5).epsilon
    whole = epsilon(Composed([tuned_event, base, Laplace(5.0)]), 1e-5)
    assert whole.method == "pld"
    assert max(alone, plain) < whole.epsilon < 0.9 * (alone + plain + 0.2)
    # The pair of the tuner, alone, costs what the tuner costs.
    nothing = epsilon(Composed([tuned_event, Gaussian(1e5)]), 1e-5).epsilon
    assert nothing == pytest.approx(alone, rel=2e-3)
    # And a tuner can be tuned.
    nested = epsilon(PrivateSelection(tuned_event, Geometric(2)), 1e-5)
    assert alone < nested.epsilon < nested.bounds["rdp"]


@pytest.mark.parametrize(
    "law",
    [
        Geometric(17.4, maximum=50),
        Poisson(30, maximum=4),
        Poisson(8, maximum=2000),
        TruncatedNegativeBinomial(-0.9, 40, maximum=3000),
        Logarithmic(5, maximum=1),
        Binomial(6, 3.0, maximum=2),
    ],
)
def test_masses_of_wide_outcomes_are_right_under_a_cap(law):
    """What is chosen from once more needs both masses, not their safe side: φ summed, by hand."""
    p, q = np.array([0.1, 0.25, 0.4, 0.25]), np.array([0.3, 0.45, 0.15, 0.1])
    losses = np.log(p / q)
    places = np.round(losses / 2e-3).astype(int)
    masses = np.bincount(places - places.min(), p)
    named = LossPmf(2e-3, int(places.min()), masses, 0.0)
    instance = Instance(named, law, np.bincount(places - places.min(), q))
    runs = np.arange(law.cap + 1)
    weights = law.pmf(runs)
    for order in np.array([[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]]):
        for found, base in zip(
            instance.tuned(order), (instance.p[order], instance.q[order]), strict=True
        ):
            ends = np.append(0.0, np.cumsum(base))
            exact = np.diff([math.fsum(weights * min(end, 1.0) ** runs) for end in ends])
            assert found == pytest.approx(exact, rel=3e-6, abs=1e-12)


@pytest.mark.parametrize("digits", [1, 2, 15])
def test_the_hull_of_lines_is_their_maximum_and_no_more(digits: int) -> None:
    """Lines with long stretches that are all hull, with ties, and in any order, against all of them."""
    rng = np.random.default_rng(digits)
    z = np.exp(np.linspace(-12.0, 12.0, 20_001))
    for _ in range(60):
        slopes = rng.random(int(rng.integers(3, 40)))
        convex = rng.random() < 0.5
        offsets = slopes**2 if convex else rng.random(slopes.size)
        outliers = rng.random(slopes.size) < 0.1
        offsets = np.where(outliers, rng.random(slopes.size), offsets)
        slopes = np.round(slopes, digits)
        offsets = np.round(offsets, digits)
        hull = _upper_hull(slopes, offsets)
        values = slopes[:, None] - offsets[:, None] * z
        largest = values.max(axis=0)
        np.testing.assert_allclose(values[hull].max(axis=0), largest, rtol=1e-12, atol=1e-12)
        a = slopes[hull]
        b = offsets[hull]
        assert (np.diff(a) > 0.0).all()
        assert (np.diff(b) > 0.0).all()
        # Each line is the largest from where the next one ends to where it begins.
        assert (np.diff(np.diff(a) / np.diff(b)) < 1e-9).all()
