"""Reported numbers against closed forms, dp-accounting's PLD, Opacus' PRV; laws they must obey."""

import math

import pytest
from dp_accounting.pld import privacy_loss_distribution as reference
from hypothesis import given, settings
from hypothesis import strategies as st

import privtune.accounting as dp
from privtune.accounting.rdp import gaussian_delta, gaussian_epsilon
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger.weights import weigh
from tests.accounting.helpers import steps
from tests.tiers import FULL

REPLACE = dp.Adjacency.REPLACE_ONE
BASES = [(256 / 60000, 1.0, 2340), (0.5, 5.0, 30), (0.01, 0.3, 100)]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("level", [1e-3, 1e-9])
def test_agrees_with_dp_accounting(base, level):
    rate, noise, count = base
    pld = reference.from_gaussian_mechanism(noise, sampling_prob=rate).self_compose(count)
    answer = dp.epsilon(steps(*base), level)
    assert answer.method == "pld"
    assert answer.epsilon == pytest.approx(pld.get_epsilon_for_delta(level), rel=2e-3)
    back = dp.delta(steps(*base), answer.epsilon)
    assert back.delta == pytest.approx(level, rel=2e-2)


def test_laplace_agrees_with_dp_accounting():
    pld = reference.from_laplace_mechanism(2.0).self_compose(10)
    ours = dp.epsilon(dp.Repeated(10, dp.Laplace(2.0)), 1e-5)
    assert ours.bounds["pld"] == pytest.approx(pld.get_epsilon_for_delta(1e-5), rel=1e-3)
    sampled = reference.from_laplace_mechanism(1.0, sampling_prob=0.1).self_compose(100)
    ours = dp.epsilon(dp.Repeated(100, dp.PoissonSampled(0.1, dp.Laplace(1.0))), 1e-5)
    assert ours.epsilon == pytest.approx(sampled.get_epsilon_for_delta(1e-5), rel=1e-3)


@pytest.mark.parametrize(("scale", "count"), [(10.0, 3), (20.0, 12)])
def test_few_laplace_releases_are_not_understated(scale, count):
    """dp-accounting, rounding down, is below; the atom of all largest losses was once lost."""
    pld = reference.from_laplace_mechanism(
        scale, pessimistic_estimate=False, value_discretization_interval=1e-4
    )
    low = pld.self_compose(count).get_epsilon_for_delta(1e-5)
    ours = dp.epsilon(dp.Repeated(count, dp.Laplace(scale)), 1e-5)
    assert all(bound >= low * (1 - 1e-6) for bound in ours.bounds.values())
    assert ours.epsilon <= low * 1.01


@pytest.mark.parametrize("adjacency", list(dp.Adjacency))
def test_gaussian_compositions_are_exact(adjacency):
    """μ-GDP: μ² adds, whatever the grouping (Dong, Roth, Su, Corollary 3.3)."""
    event = dp.Composed(
        [dp.Repeated(9, dp.Gaussian(6.0)), dp.Joint([dp.Gaussian(3.0), dp.Gaussian(1.5)])]
    )
    mu = math.sqrt(9 / 36 + 1 / 9 + 1 / 2.25)
    answer = dp.epsilon(event, 1e-6, adjacency=adjacency)
    assert answer.method == "gdp"
    assert answer.epsilon == pytest.approx(gaussian_epsilon(mu, 1e-6), rel=1e-12)
    assert gaussian_delta(mu, answer.epsilon) <= 1e-6
    assert gaussian_delta(mu, answer.epsilon * (1 - 1e-9)) > 1e-6
    assert dp.delta(event, 1.0).delta == pytest.approx(gaussian_delta(mu, 1.0), rel=1e-12)


@pytest.mark.quick
@pytest.mark.parametrize(("sigma", "value"), [(1.0, 4.377178), (2.0, 1.993), (0.5, 9.997)])
def test_gaussian_mechanism_by_the_analytic_formula(sigma, value):
    """Balle and Wang, Theorem 8."""
    assert dp.epsilon(dp.Gaussian(sigma), 1e-5).epsilon == pytest.approx(value, abs=2e-3)


def test_gaussian_extremes():
    for mu in (1e-8, 1e-3, 1.0, 30.0, 1000.0):
        for level in (1e-3, 1e-12):
            value = gaussian_epsilon(mu, level)
            assert value >= 0
            assert gaussian_delta(mu, value) <= level
    assert gaussian_delta(0.0, 1.0) == 0.0


@pytest.mark.quick
def test_known_mechanisms():
    assert dp.epsilon(dp.ApproximateDP(0.7, 1e-6), 1e-5).epsilon <= 0.7 * 1.001
    assert math.isinf(dp.epsilon(dp.ApproximateDP(0.7, 1e-4), 1e-5).epsilon)
    assert dp.epsilon(dp.Laplace(2.0), 1e-9).epsilon == pytest.approx(0.5, rel=1e-3)
    # A bound through zCDP is looser than the Gaussian it comes from, and not by much.
    assert 4.377 <= dp.epsilon(dp.ZCDP(0.5), 1e-5).epsilon <= 4.8


def test_repeated_approximate_dp_by_the_optimal_composition():
    """Kairouz, Oh, Viswanath, Theorem 3.3: k-fold (ε, δ), exactly, by enumeration."""
    eps, dlt, k, level = 0.1, 1e-7, 10, 1e-5
    p = math.exp(eps) / (1 + math.exp(eps))
    lost = 1 - (1 - dlt) ** k

    def exact(value):
        total = 0.0
        for j in range(k + 1):
            a = math.comb(k, j) * p**j * (1 - p) ** (k - j)
            b = math.comb(k, j) * p ** (k - j) * (1 - p) ** j
            total += max(a - math.exp(value) * b, 0.0)
        return lost + (1 - lost) * total

    ours = dp.epsilon(dp.Repeated(k, dp.ApproximateDP(eps, dlt)), level).epsilon
    assert exact(ours) <= level
    assert exact(ours * 0.998) > level


small = st.sampled_from(
    [
        steps(0.02, 1.0, 50),
        steps(0.3, 4.0, 10),
        dp.Gaussian(3.0),
        dp.Laplace(4.0),
        dp.ApproximateDP(0.2, 1e-7),
        dp.ZCDP(0.02),
        dp.PrivateSelection(steps(0.02, 2.0, 50), dp.Geometric(5)),
    ]
)


@given(small, st.integers(2, 4))
@settings(max_examples=12 if FULL else 6, deadline=None)
def test_repetition_is_composition(event, count):
    """The wheel forgets no multiplicity: n times = n copies = n copies, nested."""
    repeated = dp.epsilon(dp.Repeated(count, event), 1e-5)
    copies = dp.epsilon(dp.Composed([event] * count), 1e-5)
    nested = dp.epsilon(dp.Composed([dp.Composed([event]), dp.Repeated(count - 1, event)]), 1e-5)
    assert repeated.epsilon == copies.epsilon == nested.epsilon
    assert repeated.epsilon > dp.epsilon(event, 1e-5).epsilon * 1.05


@given(small, small, small)
@settings(max_examples=12 if FULL else 6, deadline=None)
def test_order_does_not_matter_and_more_costs_more(a, b, c):
    forward = dp.epsilon(dp.Composed([a, b, c]), 1e-5).epsilon
    assert forward == pytest.approx(dp.epsilon(dp.Composed([c, b, a]), 1e-5).epsilon, rel=1e-3)
    assert forward >= dp.epsilon(dp.Composed([a, b]), 1e-5).epsilon * (1 - 1e-3)
    single = [dp.epsilon(e, 1e-5 / 3).epsilon for e in (a, b, c)]
    assert forward <= sum(single) * (1 + 1e-3)


@pytest.mark.quick
def test_parallel_is_the_maximum_and_worst_of_too():
    cheap, dear = steps(0.01, 2.0, 100), steps(0.02, 1.0, 400)
    alone = dp.epsilon(dear, 1e-5).epsilon
    for kind in (dp.Parallel, dp.WorstOf):
        assert dp.epsilon(kind([cheap, dear]), 1e-5).epsilon == pytest.approx(alone, rel=2e-3)
    mixed = dp.epsilon(dp.WorstOf([cheap, dear], [0.5, 0.5]), 1e-5).epsilon
    assert dp.epsilon(cheap, 1e-5).epsilon < mixed < alone
    whole = dp.epsilon(dp.Composed([dp.Parallel([cheap, dear]), dear]), 1e-5).epsilon
    assert whole == pytest.approx(dp.epsilon(dp.Repeated(2, dear), 1e-5).epsilon, rel=3e-3)


@pytest.mark.parametrize(
    "event",
    [
        steps(0.1, 1.0, 10),
        dp.PrivateSelection(steps(0.1, 1.0, 10), dp.Geometric(3)),
        dp.Composed([dp.Gaussian(1), dp.Parallel([steps(0.1, 1.0, 10)])]),
        dp.SubsampledTuning(1, 0.1, dp.Gaussian(1), dp.Gaussian(1)),
    ],
)
def test_sampled_events_have_no_replace_one_account(event):
    with pytest.raises(InvalidInputError, match="group_privacy"):
        dp.epsilon(event, 1e-5, adjacency=REPLACE)


@pytest.mark.parametrize("kinds", [1, 2, 7])
def test_a_replaced_record_may_move_to_another_part(kinds):
    """Two counts, one for each label: both change. The dearest two of a partition are charged."""
    parts = [dp.Gaussian(1.0), dp.Gaussian(1.0), *[dp.Gaussian(2.0 + i) for i in range(kinds)]]
    exact = gaussian_epsilon(math.sqrt(2.0), 1e-5)
    assert exact == pytest.approx(6.573, abs=1e-3)
    two = dp.epsilon(dp.Parallel(parts[:2]), 1e-5, adjacency=REPLACE)
    assert two.epsilon == pytest.approx(exact, rel=1e-9)
    answer = dp.epsilon(dp.Parallel(parts), 1e-5, adjacency=REPLACE)
    assert exact <= answer.epsilon <= exact * 1.002
    assert dp.epsilon(dp.Parallel(parts), 1e-5).epsilon == pytest.approx(4.377, rel=2e-3)
    apart = dp.epsilon(dp.Parallel([dp.Gaussian(1.0), dp.Gaussian(2.0)]), 1e-5, adjacency=REPLACE)
    assert apart.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(1.25), 1e-5), rel=1e-6)
    one = dp.epsilon(dp.Parallel([dp.Gaussian(1.0)]), 1e-5, adjacency=REPLACE)
    assert one.epsilon == dp.epsilon(dp.Gaussian(1.0), 1e-5).epsilon
    tuned = dp.PrivateSelection(dp.Parallel(parts[:2]), dp.Geometric(5))
    both = dp.PrivateSelection(dp.Composed(parts[:2]), dp.Geometric(5))
    assert dp.epsilon(tuned, 1e-5, adjacency=REPLACE).epsilon == dp.epsilon(both, 1e-5).epsilon
    ledger = [weigh(e, 8.0, REPLACE) for e in (dp.Parallel(parts[:2]), dp.Composed(parts[:2]))]
    assert ledger[0] == ledger[1]


def test_group_privacy_is_explicit_and_above_the_truth():
    """Replacing a record moves a Gaussian release by twice its add-remove sensitivity."""
    answer = dp.group_privacy(dp.Gaussian(4.0), 1e-5)
    truth = dp.epsilon(dp.Gaussian(2.0), 1e-5).epsilon
    assert answer.adjacency is REPLACE
    assert answer.method == "group privacy of gdp"
    assert truth <= answer.epsilon <= 1.1 * truth
    half = answer.epsilon / 2
    assert (1 + math.exp(half)) * gaussian_delta(0.25, half) <= 1e-5 * (1 + 1e-9)
    assert math.isinf(dp.group_privacy(dp.NonPrivate(), 1e-5).epsilon)


def test_non_private_is_infinite_everywhere():
    for event in (
        dp.NonPrivate(),
        dp.Composed([dp.Gaussian(5), dp.NonPrivate()]),
        dp.Parallel([dp.Gaussian(5), dp.NonPrivate()]),
        dp.PrivateSelection(dp.NonPrivate(), dp.Geometric(3)),
        dp.SubsampledTuning(2, 0.1, dp.NonPrivate(), dp.Gaussian(5)),
    ):
        assert math.isinf(dp.epsilon(event, 1e-5).epsilon)
        assert dp.delta(event, 1.0).delta == 1.0
    assert dp.epsilon(dp.NonPrivate(), 1e-5).to_dict()["epsilon"] == "inf"


@pytest.mark.parametrize(
    "ask",
    [
        *[
            lambda bad=bad: dp.epsilon(dp.Gaussian(1), bad)
            for bad in (0.0, 1.0, -1e-5, math.nan, math.inf, True, "1e-5", None)
        ],
        lambda: dp.delta(dp.Gaussian(1), -1.0),
        lambda: dp.epsilon(dp.Gaussian(1), 1e-5, method="fft"),
        lambda: dp.epsilon(dp.Gaussian(1), 1e-5, adjacency="swap"),
        lambda: dp.Guarantee(math.nan, 1e-5, "x", REPLACE),
        lambda: dp.Guarantee(-0.1, 1e-5, "x", REPLACE),
    ],
)
def test_bad_questions_are_refused(ask):
    with pytest.raises(PrivTuneError):
        ask()


def test_methods():
    event = steps(0.02, 1.0, 300)
    assert set(dp.epsilon(event, 1e-5, method="rdp").bounds) == {"rdp"}
    assert set(dp.epsilon(event, 1e-5, method="pld").bounds) == {"pld"}
    assert set(dp.epsilon(event, 1e-5).bounds) == {"rdp", "pld"}


@pytest.mark.parametrize("adjacency", list(dp.Adjacency))
def test_what_leaving_a_part_out_saves_is_accounted_anew(adjacency):
    parts = [dp.Laplace(10.0), dp.Laplace(15.0), dp.Gaussian(12.0), dp.Laplace(10.0)]
    tree = dp.explain(dp.Composed(parts), 1e-5, adjacency=adjacency)
    assert tree.children[0] == tree.children[3]  # equal parts, equally explained
    for i, part in enumerate(tree.children):
        rest = dp.Composed([*parts[:i], *parts[i + 1 :]])
        assert part.saved == tree.epsilon - dp.epsilon(rest, 1e-5, adjacency=adjacency).epsilon
    alone = dp.explain(dp.Composed(parts[:1]), 1e-5, adjacency=adjacency)
    assert alone.children[0].saved == alone.epsilon
    open_data = dp.explain(dp.Composed([*parts[:1], dp.NonPrivate()]), 1e-5, adjacency=adjacency)
    assert [part.saved for part in open_data.children] == [0.0, math.inf]
    many = dp.explain(
        dp.Composed([dp.Laplace(100.0 + i) for i in range(66)]), 1e-5, adjacency=adjacency
    )
    assert {part.saved for part in many.children} == {None}


def test_few_coarse_releases_never_cost_more_than_their_sum():
    # Found by a random search: the lattice alone gave 0.7031 for 0.25 + 0.25 + 0.2.
    event = dp.Composed([dp.Laplace(4.0), dp.Laplace(4.0), dp.ApproximateDP(0.2, 1e-7)])
    answer = dp.epsilon(event, 1e-5)
    assert answer.epsilon == pytest.approx(0.7, rel=1e-9)
    assert answer.method == "basic"
    # Not beyond its delta, and not where a part has no such guarantee.
    assert "basic" not in dp.epsilon(event, 1e-8).bounds
    assert "basic" not in dp.epsilon(dp.Composed([event, dp.Gaussian(5.0)]), 1e-5).bounds
    assert dp.delta(event, 0.71).delta == pytest.approx(1e-7, rel=1e-9)


def test_a_guarantee_in_one_line() -> None:
    found = dp.Guarantee(1.80749, 1e-5, "envelope", dp.Adjacency.ADD_REMOVE, {"envelope": 1.80749})
    assert str(found) == "(ε = 1.808, δ = 1e-05) under add-remove, by envelope"
    assert str(dp.Guarantee(math.inf, 0.0, "none", REPLACE)).startswith("(ε = inf, δ = 0) under ")


@pytest.mark.parametrize("value", [1e-9, 0.0123401, 0.99999, 3.00004, 123.411, 98765.4, 1.1e30])
def test_a_printed_number_is_an_upper_bound_and_close(value: float) -> None:
    printed = str(dp.Guarantee(value, 0.5, "pld", REPLACE)).split("= ")[1].split(",")[0]
    assert value <= float(printed) <= value * 1.001
