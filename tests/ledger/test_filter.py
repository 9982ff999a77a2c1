"""The filter's theorem against numerical integration, closed forms and exact instances."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import integrate, optimize, stats

import privtune.accounting as dp
from privtune.accounting import delta as delta_of
from privtune.accounting import epsilon as epsilon_of
from privtune.accounting.curves import ORDERS
from privtune.accounting.rdp import rdp_curve
from privtune.errors import InvalidInputError
from privtune.ledger import privacy_filter as pf
from privtune.ledger import weights
from privtune.ledger.weights import weigh


def gaussian_delta(mu: float, epsilon: float) -> float:
    if mu == 0:
        return max(0.0, -math.expm1(epsilon))
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )


def table(mu: float, highest: float = 8.0) -> pf.Profile:
    return pf.tabulate(lambda e: gaussian_delta(mu, e), highest)


@pytest.mark.parametrize("epsilon", [0.1, 8.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-2])
def test_an_empty_block_gives_the_known_conversion(epsilon: float, delta: float) -> None:
    """Canonne, Kamath & Steinke, Proposition 12, solved for the divergence."""
    for order in (1.5, 4.0, 20.0):
        known = epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)
        found = pf.capacity(pf.empty_profile, order, epsilon, delta)
        if known > 0:
            assert found == pytest.approx(known, rel=1e-6)
            assert found <= known
        else:
            assert found <= 0


@pytest.mark.parametrize("mu", [0.05, 2.0])
@pytest.mark.parametrize("order", [2.0, 20.0])
@pytest.mark.parametrize(("spent", "epsilon"), [(0.0, 0.5), (0.2, 5.0), (1.0, 0.5)])
def test_the_theorem_by_integration(mu: float, order: float, spent: float, epsilon: float) -> None:
    """The table is above the integral of the theorem, and close to it."""
    top = epsilon - spent + math.log(order / (order - 1))

    def integrand(t: float) -> float:
        return math.exp(-t) * gaussian_delta(mu, top - t / (order - 1))

    kink = max(0.0, top * (order - 1))
    exact = integrate.quad(integrand, 0, kink, limit=500, epsabs=1e-15)[0]
    exact += integrate.quad(integrand, kink, kink + 60, limit=500, epsabs=1e-15)[0]
    found = pf.total_delta(table(mu), order, spent, epsilon)
    assert found >= exact * (1 - 1e-7) - 1e-15
    assert found <= exact * 1.25 + 1e-15


@pytest.mark.parametrize("mu", [0.1, 1.0])
@pytest.mark.parametrize(("epsilon", "order"), [(1.0, 8.0), (3.0, 3.0)])
def test_never_above_the_sum_of_divergences(mu: float, epsilon: float, order: float) -> None:
    """The theorem, without the table's rounding, is at most plain Rényi composition."""
    block = order * mu**2 / 2
    for spent in (0.05, 0.3):
        total = block + spent
        plain = math.exp((order - 1) * (total - epsilon + math.log1p(-1 / order))) / order
        assert pf.total_delta(table(mu), order, spent, epsilon) <= min(1.0, plain) * 1.1


@pytest.mark.parametrize(("mu", "nu"), [(0.3, 0.7), (1.0, 0.2)])
@pytest.mark.parametrize("order", [2.0, 15.0])
def test_never_below_what_really_happens(mu: float, nu: float, order: float) -> None:
    """A Gaussian block with a Gaussian of that divergence on top: δ is known exactly."""
    for epsilon in (0.3, 1.0, 3.0):
        bound = pf.total_delta(table(mu), order, order * nu**2 / 2, epsilon)
        assert bound >= gaussian_delta(math.hypot(mu, nu), epsilon)


def test_never_below_an_adaptive_adversary() -> None:
    """Somebody who sees a Gaussian block chooses, by its loss, the worst release that is admitted."""
    mu, order, epsilon, spent = 0.6, 4.0, 1.5, 0.25
    grid = np.linspace(-8, 8, 801)
    weight = stats.norm.pdf(grid - mu) * (grid[1] - grid[0])
    loss = mu * grid - mu**2 / 2

    def best_response(target: float) -> float:
        """Return the largest δ at ε = target over two-point pairs of divergence at most B."""

        def pair(q: float) -> float:
            def divergence(p: float) -> float:
                a = p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)
                return math.log(a) / (order - 1) - spent

            if divergence(1 - 1e-12) <= 0:
                return 1.0
            return optimize.brentq(divergence, q, 1 - 1e-12)

        return max(
            pair(q) - math.exp(target) * q for q in np.concatenate([np.geomspace(1e-9, 0.9, 120)])
        )

    adversary = (
        sum(
            w * max(0.0, best_response(epsilon - x))
            for w, x in zip(weight[::8], loss[::8], strict=True)
        )
        * 8
    )
    bound = pf.total_delta(table(mu), order, spent, epsilon)
    assert bound >= adversary * 0.999
    assert bound <= adversary * 1.5, "the bound should not be loose either"


def test_capacity_shrinks_with_the_block_and_grows_with_the_budget() -> None:
    by_block = [pf.capacity(table(mu), 6.0, 4.0, 1e-5) for mu in (0.01, 0.2, 0.4, 0.6, 0.8)]
    assert by_block == sorted(by_block, reverse=True)
    by_epsilon = [pf.capacity(table(0.3), 6.0, epsilon, 1e-5) for epsilon in (2.0, 3.0, 4.0)]
    assert by_epsilon == sorted(by_epsilon)
    assert pf.capacity(table(2.0), 6.0, 1.0, 1e-5) == -math.inf


@pytest.mark.parametrize("highest", [1.0, 20.0, 700.0])
@pytest.mark.parametrize("mu", [0.01, 3.0])
@pytest.mark.parametrize("order", [1.2, 4.0, 50.0])
def test_few_nodes_refuse_nothing_that_all_of_them_admit(
    mu: float, highest: float, order: float
) -> None:
    fine = table(mu, highest)
    for epsilon in (0.1, 1.0, 4.0):
        known = pf.total_delta(fine, order, 0.0, epsilon)
        floors = list(pf.floors(lambda e: gaussian_delta(mu, e), highest, order, epsilon))
        assert max(floors, default=0.0) <= known * (1 + 1e-9) + 1e-15
        assert all(more >= less * (1 - 1e-9) for less, more in itertools.pairwise(floors))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 8.0])
def test_few_nodes_show_that_a_block_uses_its_budget_up(epsilon: float) -> None:
    """A Gaussian block of exactly the budget, at the order of the filter: four values of δ do."""
    delta = 1e-5
    mu = optimize.brentq(lambda m: gaussian_delta(m, epsilon) / delta - 1.0, 0.05, 8.0, rtol=1e-12)
    order = pf.best_order(epsilon, pf.FILTER_SHARE * delta)
    highest = 2 * epsilon + 4
    floors = list(pf.floors(lambda e: gaussian_delta(mu, e), highest, order, epsilon))
    known = pf.total_delta(table(mu, highest), order, 0.0, epsilon)
    assert pf.FILTER_SHARE * delta < floors[3] <= floors[-1] <= known


def test_few_nodes_of_a_selection_refuse_nothing_either() -> None:
    """Its table rises below ε = 0, where it is made by symmetry of the worse of two directions."""
    event = dp.PrivateSelection(
        dp.Repeated(100, dp.PoissonSampled(0.02, dp.Gaussian(1.0))), dp.Geometric(10.0)
    )

    def delta_at(epsilon: float) -> float:
        return delta_of(event, epsilon).delta

    fine = pf.tabulate(delta_at, 8.0)
    assert (np.diff(fine.deltas) > 0.0).any()
    for order in (1.5, 4.0, 30.0):
        for epsilon in (0.05, 0.5, 2.0):
            known = pf.total_delta(fine, order, 0.0, epsilon)
            highest_floor = max(pf.floors(delta_at, 8.0, order, epsilon))
            assert highest_floor <= known * (1 + 1e-9)


def test_a_block_without_divergence_leaves_room() -> None:
    """Approximate DP has no finite Rényi divergence; its profile does."""
    profile = pf.tabulate(lambda e: max(1e-6, 1e-6 + (1 - 1e-6) * -math.expm1(e - 0.5)), 6.0)
    room = pf.capacity(profile, 6.0, 3.0, 1e-5)
    empty = pf.capacity(pf.empty_profile, 6.0, 3.0, 1e-5)
    assert empty - 0.7 < room < empty - 0.2


def test_every_order_of_a_filter_is_tabulated() -> None:
    """A stored order between two tabulated ones would make old charges weigh more."""
    assert set(pf.ORDERS) <= {float(order) for order in ORDERS}


def test_the_readings_share_the_budgets_delta() -> None:
    parts = [part for _, part in pf.lines(3.0, 1e-5)]
    odometer = sum(parts) + (pf.BLOCK_SHARE + pf.FAILING_SHARE) * 1e-5
    assert odometer <= pf.ODOMETER_SHARE * 1e-5 * (1 + 1e-9)
    assert pytest.approx(1.0) == pf.FILTER_SHARE + pf.APPROXIMATE_SHARE + pf.ODOMETER_SHARE


@pytest.mark.parametrize("order", [6.0, 20.0])
@pytest.mark.parametrize("block", [0, 4])
def test_who_stops_a_line_at_will_has_at_most_its_delta(order: float, block: int) -> None:
    """Dynamic programming over stopping times, with exact losses: the best stopping, and what to run."""
    unit, delta, most = 0.1, 1e-3, 36
    chances = {size: 1.0 / (1.0 + math.exp(-unit * size)) for size in (1, 3)}
    divergence = {
        size: math.log(p**order * (1 - p) ** (1 - order) + (1 - p) ** order * p ** (1 - order))
        / (order - 1)
        for size, p in chances.items()
    }
    losses = np.arange(-200, 201)
    of_block = np.zeros(401)
    for wins in range(block + 1):
        of_block[200 + 3 * (2 * wins - block)] = stats.binom.pmf(wins, block, chances[3])

    def block_delta(epsilon: float) -> float:
        return float(of_block @ np.maximum(-np.expm1(epsilon - unit * losses), 0.0))

    start = pf.start(pf.tabulate(block_delta, 8.0, 2000), order, delta)

    def stopped(ones: int, threes: int) -> np.ndarray:
        reading = start + ones * divergence[1] + threes * divergence[3]
        return np.maximum(-np.expm1(reading - unit * losses), 0.0)

    value = {(most - k, k): stopped(most - k, k) for k in range(most + 1)}
    for total in reversed(range(most)):
        for threes in range(total + 1):
            best = stopped(total - threes, threes)
            for size, p in chances.items():
                after = value[total - threes + (size == 1), threes + (size == 3)]
                # Losses that leave the table only pay less; nobody reaches them.
                ran = p * np.roll(after, -size) + (1 - p) * np.roll(after, size)
                best = np.maximum(best, np.where(np.abs(losses) <= 200 - size, ran, 0.0))
            value[total - threes, threes] = best
    gained = float(of_block @ value[0, 0])
    assert gained <= delta
    assert gained >= 0.15 * delta, "the bound should not be loose either"


def test_the_odometer_is_monotone_and_above_the_truth() -> None:
    profile = table(0.3)
    readings = []
    for nu in (0.05, 0.2, 0.5, 0.8, 1.5):
        reading = pf.odometer_epsilon(
            profile, lambda a, nu=nu: a * nu**2 / 2, epsilon=4.0, delta=1e-5
        )
        assert gaussian_delta(math.hypot(0.3, nu), reading) <= 1e-5
        readings.append(reading)
    assert readings == sorted(readings)
    assert readings[0] < 2.5
    assert pf.odometer_epsilon(profile, lambda a: math.inf, epsilon=4.0, delta=1e-5) == math.inf


def test_weights() -> None:
    add = dp.Adjacency.ADD_REMOVE
    assert weigh(dp.Gaussian(2.0), 4.0, add).divergence == pytest.approx(0.5, rel=1e-9)
    assert weigh(dp.Repeated(3, dp.Gaussian(2.0)), 4.0, add).divergence == pytest.approx(
        1.5, rel=1e-9
    )
    assert weigh(dp.NonPrivate(), 4.0, add).divergence == math.inf
    assert weigh(dp.Composed(()), 4.0, add) == (0.0, 0.0)
    # At an order between two tabulated ones the next higher counts.
    assert weigh(dp.Gaussian(1.0), 6.25, add).divergence == pytest.approx(6.3 / 2, rel=1e-9)
    approximate = weigh(dp.Repeated(2, dp.ApproximateDP(0.5, 1e-6)), 3.0, add)
    p = math.exp(0.5) / (1 + math.exp(0.5))
    exact = math.log(p**3 * (1 - p) ** -2 + (1 - p) ** 3 * p**-2) / 2
    assert approximate.divergence == pytest.approx(2 * exact, rel=1e-9)
    assert approximate.delta == pytest.approx(2e-6, rel=1e-9)


SAMPLED = dp.Repeated(1000, dp.PoissonSampled(0.01, dp.Gaussian(1.2)))


def test_a_dominating_pair_weighs_what_the_exact_divergence_is() -> None:
    """Where nothing rare matters, the pair's moment is the divergence, rounded up a little."""
    for order in (1.5, 3.0, 6.0):
        index = int(np.searchsorted(ORDERS, order))
        exact = rdp_curve(SAMPLED)[index]
        paired = weights._weigh_by_pair(
            dp.PoissonSampled(0.01, dp.Gaussian(1.2)), 1000, float(ORDERS[index])
        )
        assert paired is not None
        assert paired.delta < 1e-12
        assert exact * (1 - 1e-6) <= paired.divergence <= exact * 1.02


def test_a_pair_without_a_moment_weighs_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mass below zero has no logarithm: then the moment says nothing, and is no divergence of zero."""
    pair = weights._pair
    step = dp.PoissonSampled(0.01, dp.Gaussian(1.2))

    def with_mass_below_zero(event: dp.Event) -> Any:
        directions = []
        for pmf in pair(event):
            masses = pmf.masses.copy()
            masses[0] = -1e-300
            directions.append(replace(pmf, masses=masses))
        return directions

    assert weights._weigh_by_pair(step, 1000, 3.0) is not None
    monkeypatch.setattr(weights, "_pair", with_mass_below_zero)
    assert weights._weigh_by_pair(step, 1000, 3.0) is None


@pytest.mark.parametrize(
    "event",
    [
        SAMPLED,
        dp.PrivateSelection(SAMPLED, dp.Geometric(10)),
        dp.PrivateSelection(SAMPLED, dp.Logarithmic(5)),
        dp.SubsampledTuning(2, 0.1, dp.PrivateSelection(SAMPLED, dp.Geometric(10)), SAMPLED),
    ],
)
def test_a_weight_is_never_below_the_tight_account(event: dp.Event) -> None:
    """What any order's weight says about ε must not fall below the tight bound on the event."""
    add, delta = dp.Adjacency.ADD_REMOVE, 1e-5
    tight = epsilon_of(event, delta).epsilon
    converted = []
    for order in ORDERS[20:110:6]:
        weight = weigh(event, float(order), add, 1e-10)
        assert weight.divergence <= weigh(event, float(order), add).divergence
        left = delta - weight.delta
        converted.append(
            weight.divergence + math.log1p(-1 / order) - math.log(left * order) / (order - 1)
        )
    assert tight * (1 - 2e-3) <= min(converted) <= tight * 1.5


def test_a_selection_weighs_less_than_its_renyi_theorem() -> None:
    event = dp.PrivateSelection(SAMPLED, dp.Geometric(10))
    plain = weigh(event, 6.25, dp.Adjacency.ADD_REMOVE)
    paired = weigh(event, 6.25, dp.Adjacency.ADD_REMOVE, 1e-10)
    assert paired.divergence < 0.7 * plain.divergence
    assert 0 < paired.delta <= 1e-10
    # Without the right to fail, the theorem is all there is.
    assert weigh(event, 6.25, dp.Adjacency.ADD_REMOVE, 1e-300) == plain


def test_weights_know_the_adjacency() -> None:
    with pytest.raises(InvalidInputError, match="adjacency"):
        weigh(dp.PoissonSampled(0.1, dp.Gaussian(1.0)), 4.0, dp.Adjacency.REPLACE_ONE)
