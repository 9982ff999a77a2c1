"""The filter's second theorem: from Rényi divergences to Gaussian charges, and what it holds then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from scipy import stats

import privtune.accounting as dp
from privtune.ledger import (
    Budget,
    BudgetExceededError,
    ChargeRequest,
    Ledger,
    LedgerCorruptedError,
    admission,
    verify,
    weights,
)
from privtune.ledger import privacy_filter as pf
from privtune.ledger.admission import filter_room, filter_state
from privtune.ledger.history import BASIS_FILTER, BASIS_GAUSSIAN
from privtune.ledger.weights import Weight, weigh_as_gaussian

ADD = dp.Adjacency.ADD_REMOVE
EPSILON, DELTA = 3.0, 1e-5
TRAINING = dp.Repeated(500, dp.PoissonSampled(0.02, dp.Gaussian(4.0)))
LOUD = dp.Repeated(500, dp.PoissonSampled(0.02, dp.Gaussian(2.0)))


def gaussian_profile(variance: float, at: np.ndarray) -> np.ndarray:
    mu = math.sqrt(variance)
    above = stats.norm.cdf(mu / 2 - at / mu)
    return above - np.exp(at) * stats.norm.cdf(-mu / 2 - at / mu)


@pytest.mark.parametrize("order", [1.5, 18.0])
@pytest.mark.parametrize("variance", [1e-3, 0.1, 2.0])
def test_what_gaussian_charges_take_of_a_filter(order: float, variance: float) -> None:
    """The profile of G(V) lies under the conversion of d_α(V), and touches it."""
    found = pf.gaussian_divergence(order, variance)
    assert 0.0 < found <= order * variance / 2 * (1 + 1e-6)
    at = np.linspace(math.log1p(-1 / order), order * variance + 2, 20001)
    constant = (1 - 1 / order) ** (order - 1) / order
    ratio = gaussian_profile(variance, at) / (constant * np.exp((order - 1) * (found - at)))
    reached = at < order * variance  # further out the plain formula loses its digits
    assert float(ratio[reached].max()) == pytest.approx(1.0, abs=1e-5)
    assert float(ratio[reached].max()) <= 1.0 + 1e-9
    assert pf.gaussian_room(order, 0.0) == pf.gaussian_room(order, -1.0) == 0.0
    room = pf.gaussian_room(order, found)
    assert variance * (1 - 1e-4) <= room
    assert (
        pf.gaussian_divergence(order, room) <= found < pf.gaussian_divergence(order, 1.001 * room)
    )


def test_the_gaussian_profile_loses_no_digits() -> None:
    at = np.array([-3.0, -0.1, 0.0, 0.3, 2.0, 9.0])
    exact = [0.9502132850776621, 0.3132768382765646, 0.27632639016823696]
    exact += [0.17708811108714592, 0.0012601169324970847, 9.608485335905896e-37]
    np.testing.assert_allclose(pf.gaussian_delta(0.5, at), exact, rtol=1e-12)


def laplace_profile(at: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, -np.expm1((at - 0.25) / 2))


def failing_response(at: np.ndarray) -> np.ndarray:
    top = math.exp(0.3)
    return 1e-8 + (1 - 1e-8) * np.maximum(0.0, top - np.exp(at)) / (1 + top)


@pytest.mark.parametrize(
    ("event", "profile"),
    [(dp.Laplace(4.0), laplace_profile), (dp.ApproximateDP(0.3, 1e-8), failing_response)],
)
@pytest.mark.parametrize("slack", [1e-7, 1e-4])
def test_a_weight_dominates_the_exact_profile_and_hardly_more(
    event: dp.Event, profile: type[np.ndarray], slack: float
) -> None:
    weight = weigh_as_gaussian(event, ADD, slack)
    at = np.linspace(0.0, 1.0, 30001)
    assert weight.delta == slack
    over = profile(at) - gaussian_profile(weight.divergence, at)
    assert float(over.max()) <= slack
    less = profile(at) - gaussian_profile(0.97 * weight.divergence, at)
    assert float(less.max()) > slack


def test_weights_as_gaussian() -> None:
    assert weigh_as_gaussian(
        dp.Repeated(3, dp.Gaussian(2.0)), ADD, 0.0
    ).divergence == pytest.approx(0.75)
    assert weigh_as_gaussian(dp.Gaussian(2.0), ADD, 1e-6).delta == 0.0
    # What is infinite with a probability above d is Gaussian with no variance at all.
    assert weigh_as_gaussian(dp.ApproximateDP(0.3, 1e-6), ADD, 9e-7).divergence == math.inf
    # The whole profile counts, so a charge weighs at least what its ε at δ = d says.
    weight = weigh_as_gaussian(TRAINING, ADD, 1e-7)
    tight = dp.epsilon(TRAINING, 1e-6).epsilon
    assert float(gaussian_profile(weight.divergence, np.array(tight))) + 1e-7 >= 0.995e-6


def test_the_gap_is_looked_for_between_points_too() -> None:
    """Two points that hold, with a chord that does not: the Gaussian profile is convex."""
    points = np.array([0.0, 1.5])
    deltas = gaussian_profile(1.0, points)
    profile = weights.OneSidedProfile(points, deltas, 0.0)
    assert not weights._is_below_gaussian(profile, 1.0001, 1e-3)
    assert weights._is_below_gaussian(profile, 1.0001, 0.2)


# Mechanisms whose losses are multiples of STEP, as (loss in steps, probability with the record);
# the last one fails. An adversary's best way through them is found exactly.
STEP = 0.25
Mechanism = tuple[tuple[int, float], ...]


def response(steps: int) -> Mechanism:
    p = 1 / (1 + math.exp(-steps * STEP))
    return ((steps, p), (-steps, 1 - p))


def spike(steps: int, back: int) -> Mechanism:
    """Rarely much is lost; both laws sum up to 1."""
    up, down = math.exp(-steps * STEP), math.exp(back * STEP)
    p = (down - 1) / (down - up)
    return ((steps, p), (-back, 1 - p))


MENU = (response(1), response(2), spike(5, 1), spike(8, 1))


def divergence(mechanism: Mechanism, order: float) -> float:
    both = []
    for sign, power in ((1, order - 1), (-1, order)):
        moment = sum(p * math.exp(sign * power * k * STEP) for k, p in mechanism)
        both.append(math.log(moment) / (order - 1))
    return max(both)


def variance_of(mechanism: Mechanism, slack: float) -> float:
    points = np.arange(0, 10) * STEP
    sides = []
    for sign in (1, -1):
        losses = [
            (sign * k * STEP, p if sign > 0 else p * math.exp(-k * STEP)) for k, p in mechanism
        ]
        deltas = [sum(p * max(0.0, -math.expm1(e - x)) for x, p in losses) for e in points]
        sides.append(weights.OneSidedProfile(points, np.array(deltas), 0.0))
    grid = np.geomspace(1e-4, 20.0, 4000)
    return next(
        float(v) for v in grid if all(weights._is_below_gaussian(side, v, slack) for side in sides)
    )


def worst(order: float, limit: float, slack: float, most: float, *, free: bool = False) -> float:
    """Return the exact δ of the best adversary whom the rule lets go on, at ε = 6 steps."""
    end = math.exp(6 * STEP)
    plain = [divergence(m, order) for m in MENU]
    gaussian = [variance_of(m, slack) for m in MENU]

    @cache
    def value(at: int, counts: tuple[int, ...], late: tuple[int, ...], failed: int) -> float:
        z = math.exp(at * STEP)
        used = sum(n * d for n, d in zip(counts, plain, strict=True))
        variance = sum(n * v for n, v in zip(late, gaussian, strict=True))
        best = max(0.0, z - end)
        for i, mechanism in enumerate(MENU):
            if not any(late) and used + plain[i] <= limit:
                nxt = tuple(n + (j == i) for j, n in enumerate(counts))
                best = max(best, step(at, mechanism, nxt, late, failed))
            taken = pf.gaussian_divergence(order, variance + gaussian[i])
            if used + taken <= limit and (free or (sum(late) + failed + 1) * slack <= most):
                nxt = tuple(n + (j == i) for j, n in enumerate(late))
                best = max(best, step(at, mechanism, counts, nxt, failed))
        if (free and failed < 40) or (sum(late) + failed + 1) * slack <= most:
            best = max(best, (1 - slack) * value(at, counts, late, failed + 1) + slack * z)
        return best

    def step(
        at: int, mechanism: Mechanism, counts: tuple[int, ...], late: tuple[int, ...], failed: int
    ) -> float:
        return sum(
            p * math.exp(-k * STEP) * value(at + k, counts, late, failed) for k, p in mechanism
        )

    return value(0, (0,) * len(MENU), (0,) * len(MENU), 0)


@pytest.mark.parametrize(("order", "limit"), [(2.5, 0.6), (5.0, 0.35)])
def test_no_adaptive_adversary_gets_past_the_theorem(order: float, limit: float) -> None:
    """Every choice, after every outcome, of what the rule admits: divergences first, then Gaussian."""
    slack, most = 2e-3, 8e-3
    bound = pf.total_delta(pf.empty_profile, order, limit, 6 * STEP) + most
    found = worst(order, limit, slack, most)
    assert 0.15 * bound < found <= bound
    # The same without paying for d: what the theorem forbids is found.
    assert worst(order, limit, slack, most, free=True) > bound


def test_a_divergence_after_a_gaussian_charge_is_not_what_the_theorem_says() -> None:
    """The order matters: the potential of the other order is not kept."""
    order, left, variance, target = 5.0, 0.3, 0.3, 2.0
    nodes, probabilities = np.polynomial.hermite_e.hermegauss(120)
    probabilities = probabilities / probabilities.sum()
    loss = math.sqrt(variance) * nodes - variance / 2
    inside = [pf.total_delta(pf.empty_profile, order, left, target - x) * math.exp(x) for x in loss]
    both = left + pf.gaussian_divergence(order, variance)
    assert float(np.dot(probabilities, inside)) > 1.2 * pf.total_delta(
        pf.empty_profile, order, both, target
    )


@pytest.mark.parametrize(
    ("order", "variance", "exact"),
    [(1024.0, 0.01, 5.1156), (512.0, 0.02, 5.1118), (138.0, 0.3, 20.67)],
)
def test_what_gaussian_charges_take_where_profiles_are_no_numbers(
    order: float, variance: float, exact: float
) -> None:
    """Against 400 digits: the maximum lies where the profile is below 1e-308."""
    assert pf.gaussian_divergence(order, variance) == pytest.approx(exact, rel=1e-3)


TINY = (
    dp.Laplace(1e12),
    dp.PoissonSampled(1e-6, dp.Gaussian(1000.0)),
    dp.ApproximateDP(0.0, 1e-12),
)


@pytest.mark.parametrize("event", TINY)
def test_what_d_alone_covers_weighs_next_to_nothing(event: dp.Event) -> None:
    weight = weigh_as_gaussian(event, ADD, 1e-8)
    assert 0.0 < weight.divergence < 1e-10
    assert weight.delta == 1e-8


@pytest.fixture
def ledger(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A filter in force; its refusals look for nothing that would fit, which takes most of the time."""
    monkeypatch.setattr("privtune.ledger.ledger.suggestions", lambda *_, **__: ())
    opened = Ledger(sqlite_url)
    opened.create_budget(Budget(EPSILON, DELTA, name="b"))
    [first] = opened.reserve("b", [ChargeRequest(dp.Gaussian(1000.0))])
    opened.start(first.id)
    opened.settle(first.id)
    return opened


def run(ledger: Ledger, event: dp.Event) -> str:
    [charge] = ledger.reserve("b", [ChargeRequest(event)])
    ledger.start(charge.id)
    ledger.settle(charge.id)
    return charge.basis


def until_refused(ledger: Ledger, unit: Sequence[dp.Event]) -> tuple[float, list[str]]:
    """Run a unit again and again; return ε of all of it, not adaptive, and the bases."""
    done, bases = 0, []
    while True:
        try:
            bases += [run(ledger, event) for event in unit]
        except BudgetExceededError:
            counted = [dp.Repeated(done, event) for event in unit]
            return dp.epsilon(dp.Composed(tuple(counted)), DELTA).epsilon, bases
        done += 1


@pytest.mark.parametrize(
    ("unit", "least"), [((dp.Gaussian(12.0),), 0.94), ((TRAINING, dp.Gaussian(40.0)), 0.93)]
)
def test_what_is_admitted_until_refusal(
    ledger: Ledger, unit: tuple[dp.Event, ...], least: float
) -> None:
    spent, bases = until_refused(ledger, unit)
    assert least * EPSILON <= spent <= EPSILON
    over = bases.index(BASIS_GAUSSIAN)
    assert set(bases[:over]) == {BASIS_FILTER}
    assert set(bases[over:]) == {BASIS_GAUSSIAN}
    assert 0.6 < over / len(bases) < 0.85
    found = verify(ledger.log.storage, "b")
    assert found.within_budget
    assert not found.warnings
    state = filter_state(ledger.log.current("b"))
    assert state.variance > 0
    assert state.delta_used <= state.delta_capacity
    assert ledger.spent("b").epsilon <= EPSILON


def test_what_alone_is_more_than_the_filter_holds_is_refused(ledger: Ledger) -> None:
    with pytest.raises(BudgetExceededError):
        run(ledger, dp.Gaussian(0.5))
    assert run(ledger, dp.Gaussian(3.0)) == BASIS_FILTER


def nearly_full(ledger: Ledger) -> dp.Event:
    """Fill the filter to just above a quarter; return what then goes over."""
    while float(filter_room(ledger.log.current("b"))[0]) > 0.3 * (
        filter_state(ledger.log.current("b")).capacity or 0.0
    ):
        assert run(ledger, dp.Gaussian(10.0)) == BASIS_FILTER
    return dp.Gaussian(6.0)


def test_it_goes_over_when_everything_else_is_done_and_back_if_nothing_ran(ledger: Ledger) -> None:
    late = nearly_full(ledger)
    [running] = ledger.reserve("b", [ChargeRequest(dp.Gaussian(60.0))])
    [beside] = ledger.reserve("b", [ChargeRequest(late)])
    assert (running.basis, beside.basis) == (BASIS_FILTER, BASIS_FILTER)
    ledger.void(beside.id)
    ledger.start(running.id)
    [beside] = ledger.reserve("b", [ChargeRequest(late)])
    assert beside.basis == BASIS_FILTER
    ledger.void(beside.id)
    ledger.settle(running.id)
    before = filter_state(ledger.log.current("b"))
    [over] = ledger.reserve("b", [ChargeRequest(late)])
    assert over.basis == BASIS_GAUSSIAN
    ledger.void(over.id)
    assert filter_state(ledger.log.current("b")) == before
    verify(ledger.log.storage, "b")


def test_a_false_weight_and_a_false_order_are_found(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = nearly_full(ledger)
    with monkeypatch.context() as patch:
        patch.setattr(admission, "weigh_as_gaussian", lambda *_: Weight(1e-3, 0.0))
        assert run(ledger, late) == BASIS_GAUSSIAN
    with pytest.raises(LedgerCorruptedError, match="weighs more than it notes"):
        verify(ledger.log.storage, "b")


@pytest.mark.parametrize("bases", [(BASIS_GAUSSIAN, BASIS_FILTER), (BASIS_FILTER, BASIS_GAUSSIAN)])
def test_the_wrong_order_is_no_log(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, bases: tuple[str, str]
) -> None:
    """A divergence after a Gaussian charge, or a Gaussian charge beside what still runs."""
    found = iter(bases)
    monkeypatch.setattr("privtune.ledger.ledger.ask", lambda *_, **__: None)
    weights = [Weight(1e-3, 0.0)]
    monkeypatch.setattr("privtune.ledger.ledger.admit", lambda *_: (next(found), weights))
    request = [ChargeRequest(dp.Gaussian(50.0))]
    ledger.reserve("b", request)
    with pytest.raises(LedgerCorruptedError, match=r"alone from then on|was not over"):
        ledger.reserve("b", request)


def test_what_is_recorded_late_weighs_twice(ledger: Ledger) -> None:
    late = nearly_full(ledger)
    assert run(ledger, late) == BASIS_GAUSSIAN
    before = ledger.log.current("b")
    used, variance = before.used, before.variance
    ledger.record("b", ChargeRequest(dp.Gaussian(100.0)))
    after = ledger.log.current("b")
    assert after.used > used
    assert float(after.variance - variance) == pytest.approx(1e-4)


@pytest.mark.parametrize("event", TINY)
def test_tiny_charges_after_going_over_leave_a_log_that_opens(
    ledger: Ledger, sqlite_url: str, event: dp.Event
) -> None:
    late = nearly_full(ledger)
    assert run(ledger, late) == BASIS_GAUSSIAN
    ledger.record("b", ChargeRequest(event))
    assert run(ledger, event) == BASIS_GAUSSIAN
    with Ledger(sqlite_url) as again:
        assert len(again.charges("b")) == len(ledger.charges("b"))
        verify(again.log.storage, "b")
