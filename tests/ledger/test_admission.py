"""What a budget admits, to the hundredth, and what it does once it is broken."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from numpy.typing import NDArray

import privtune.accounting as dp
from privtune.accounting import epsilon
from privtune.ledger import Budget, BudgetExceededError, ChargeRequest, Ledger
from privtune.ledger.admission import filter_room, filter_state, odometer
from privtune.ledger.privacy_filter import APPROXIMATE_SHARE, ODOMETER_SHARE, tabulate, total_delta

pytestmark = pytest.mark.quick

EPSILON, DELTA = 3.0, 1e-5
Floats = NDArray[np.float64]


def costing(epsilon: float) -> ChargeRequest:
    """A request for one Gaussian release of this ε, from just below."""
    return ChargeRequest(dp.calibrate(dp.Gaussian(1.0), epsilon=epsilon, delta=DELTA).event)


@pytest.fixture
def ledger(sqlite_url: str) -> Ledger:
    opened = Ledger(sqlite_url)
    opened.create_budget(Budget(EPSILON, DELTA, name="b"))
    return opened


def test_a_declared_block_is_the_budget_and_no_hundredth_more(ledger: Ledger) -> None:
    with pytest.raises(BudgetExceededError):
        ledger.reserve("b", [costing(1.008 * EPSILON)])
    ledger.reserve("b", [costing(0.995 * EPSILON)])
    with pytest.raises(BudgetExceededError):
        ledger.reserve("b", [costing(0.5)])
    assert ledger.spent("b").epsilon <= EPSILON


def test_a_refusal_says_bounds() -> None:
    """What is asked and spent is never less than it says, what is left never more."""
    budget = Budget(EPSILON, DELTA, name="b")
    said = str(BudgetExceededError(budget, requested=2.001, spent=1.0049, remaining=1.9959))
    assert "costs ε = 2.001 alone; ε = 1.005 is spent, ε = 1.995 is left" in said


@pytest.mark.parametrize("first", [costing(0.5).event, costing(2.5).event])
def test_block_and_filter_and_odometer_share_one_delta(ledger: Ledger, first: dp.Event) -> None:
    """What the filter may admit, with all that is paid beside it, stays within the budget's δ."""
    [charge] = ledger.reserve("b", [ChargeRequest(first)])
    ledger.start(charge.id)
    state = filter_state(ledger.log.current("b"))
    assert state.capacity is not None
    # Finer than the filter's own, so that it is nearer to the truth from above.
    profile = tabulate(lambda at: dp.delta(first, at).delta, 12.0, points=1500)
    used = total_delta(profile, state.order, state.capacity, EPSILON)
    assert used + (APPROXIMATE_SHARE + ODOMETER_SHARE) * DELTA <= DELTA * (1 + 1e-6)
    more = total_delta(profile, state.order, 1.05 * state.capacity, EPSILON)
    assert more + (APPROXIMATE_SHARE + ODOMETER_SHARE) * DELTA > DELTA


@pytest.mark.parametrize("event", [dp.NonPrivate(), dp.Gaussian(0.1)])
def test_a_broken_budget_shows_that_it_is_broken(ledger: Ledger, event: dp.Event) -> None:
    [charge] = ledger.reserve("b", [costing(0.5)])
    ledger.start(charge.id)
    before = ledger.log.current("b")
    assert min(filter_room(before)) > 0
    assert odometer(before).epsilon <= EPSILON
    ledger.record("b", ChargeRequest(event))
    broken = ledger.log.current("b")
    assert min(filter_room(broken)) < 0
    assert odometer(broken).epsilon > EPSILON
    assert "filter" not in odometer(broken).bounds
    with pytest.raises(BudgetExceededError):
        ledger.reserve("b", [ChargeRequest(dp.Gaussian(1000.0))])


def test_a_refused_study_is_told_an_epsilon_that_fits(ledger: Ledger) -> None:
    """Of several charges asked together, the refusal names what all of them may cost; that fits."""
    [first] = ledger.reserve("b", [costing(1.5)])
    ledger.start(first.id)
    training = dp.Repeated(100, dp.PoissonSampled(0.02, dp.Gaussian(1.0)))
    study = dp.Composed((training, dp.PrivateSelection(training, dp.Geometric(5))))

    def arms(epsilon: float) -> list[ChargeRequest]:
        both = dp.calibrate(study, epsilon=epsilon, delta=DELTA).event
        assert isinstance(both, dp.Composed)
        return [ChargeRequest(event, study="toy") for event in both.events]

    with pytest.raises(BudgetExceededError) as refused:
        ledger.reserve("b", arms(2.9))
    [said] = refused.value.fitting
    assert "times the noise" in said
    assert "σ" not in said  # of one training that nobody asked for
    first_word, number, *_ = said.split()
    assert first_word == "epsilon:", "the simplest remedy stands first"
    lower = float(number)
    assert 1.0 < lower < 2.9
    with pytest.raises(BudgetExceededError) as outside:
        ledger.reserve("b", [ChargeRequest(request.event) for request in arms(2.9)])
    assert [said.partition(", ")[2]] == list(outside.value.fitting), "no spec of a study"
    ledger.reserve("b", arms(lower))


def test_a_refused_study_of_one_training_is_told_an_epsilon_that_fits(ledger: Ledger) -> None:
    ledger.reserve("b", [costing(1.5)], start=True)
    training = dp.Repeated(100, dp.PoissonSampled(0.02, dp.Gaussian(1.0)))

    def request(epsilon: float) -> ChargeRequest:
        event = dp.calibrate(training, epsilon=epsilon, delta=DELTA).event
        return ChargeRequest(event, study="toy")

    with pytest.raises(BudgetExceededError, match=r"What fits: epsilon: ") as refused:
        ledger.reserve("b", [request(2.9)])
    [said] = refused.value.fitting
    lower = float(said.split()[1])
    assert 1.0 < lower < 2.9
    ledger.reserve("b", [request(lower)])


@pytest.mark.parametrize("is_started", [False, True])
def test_what_a_charge_would_leave_is_what_it_leaves(ledger: Ledger, is_started: bool) -> None:
    if is_started:
        ledger.reserve("b", [costing(0.5)], start=True)
    assert ledger.remaining_after("b", []) == ledger.remaining("b")
    events = [dp.Gaussian(8.0), dp.Repeated(10, dp.PoissonSampled(0.1, dp.Gaussian(2.0)))]
    foretold = ledger.remaining_after("b", events)
    ledger.reserve("b", [ChargeRequest(event) for event in events], start=True)
    assert ledger.remaining("b") == pytest.approx(foretold, rel=1e-12)
    with pytest.raises(BudgetExceededError):
        ledger.remaining_after("b", [dp.Gaussian(0.1)])


def best_stopping(block: dp.Repeated, later: dp.ApproximateDP, readings: list[float]) -> float:
    """Return max over stopping rules of P(S) − E_Q[e^reading; S], by dynamic programming."""
    losses = np.arange(-3000, 3001)

    def gain(reading: float) -> Floats:
        return np.maximum(-np.expm1(reading - losses / 100.0), 0.0)

    def ran(event: dp.ApproximateDP, after: Floats) -> Floats:
        size, p = round(100 * event.epsilon), 1.0 / (1.0 + math.exp(-event.epsilon))
        up, down = np.roll(after, -size), np.roll(after, size)
        return event.delta + (1.0 - event.delta) * (p * up + (1.0 - p) * down)

    value = gain(readings[-1])
    for reading in reversed(readings[:-1]):
        value = np.maximum(gain(reading), ran(later, value))
    for _ in range(block.count):
        assert isinstance(block.event, dp.ApproximateDP)
        value = ran(block.event, value)
    return float(value[3000])


@pytest.mark.parametrize(
    ("block", "later"),
    [
        (dp.Repeated(1, dp.ApproximateDP(1.0, 0.7 * DELTA)), dp.ApproximateDP(0.05, 0.09 * DELTA)),
        (dp.Repeated(30, dp.ApproximateDP(0.1, 0.0)), dp.ApproximateDP(0.1, 0.0)),
        (dp.Repeated(6, dp.ApproximateDP(0.2, 0.01 * DELTA)), dp.ApproximateDP(0.1, 0.004 * DELTA)),
        (dp.Repeated(3, dp.ApproximateDP(0.1, 0.0)), dp.ApproximateDP(0.2, 0.03 * DELTA)),
    ],
)
def test_who_stops_at_will_has_at_most_delta(
    ledger: Ledger, block: dp.Repeated, later: dp.ApproximateDP
) -> None:
    """The readings of a real budget, from the block alone until nothing more is admitted."""
    [charge] = ledger.reserve("b", [ChargeRequest(block)])
    ledger.start(charge.id)
    readings = [ledger.spent("b").epsilon]
    with contextlib.suppress(BudgetExceededError):
        for _ in range(60):
            [charge] = ledger.reserve("b", [ChargeRequest(later)])
            ledger.start(charge.id)
            ledger.settle(charge.id, "")
            readings.append(ledger.spent("b").epsilon)
    assert len(readings) > 1
    assert ledger.spent("b").delta == DELTA
    assert best_stopping(block, later, readings) <= DELTA
    # The block's best bound, which takes all of δ, cannot be read while more may come.
    charged = dp.Composed(list(ledger.log.current("b").block.values()))
    whole = epsilon(charged, DELTA).epsilon
    assert best_stopping(block, later, [whole, *readings[1:]]) > DELTA


def test_a_release_recorded_where_none_was_admitted_is_read_at_a_larger_delta(
    ledger: Ledger,
) -> None:
    [charge] = ledger.reserve("b", [costing(EPSILON)])
    ledger.start(charge.id)
    assert ledger.spent("b").delta == DELTA
    ledger.record("b", ChargeRequest(dp.Gaussian(20.0)))
    found = ledger.spent("b")
    assert found.delta == pytest.approx((1.0 + APPROXIMATE_SHARE + ODOMETER_SHARE) * DELTA)
    assert EPSILON < found.epsilon < 1.5 * EPSILON


@pytest.mark.parametrize("started", [False, True])
def test_what_fits_next_fits(ledger: Ledger, started: bool) -> None:
    """One more arm of the ε that is said, by itself, is admitted."""
    training = dp.Repeated(100, dp.PoissonSampled(0.02, dp.Gaussian(2.0)))
    [charge] = ledger.reserve("b", [ChargeRequest(training)])
    if started:
        ledger.start(charge.id)
    selection = dp.PrivateSelection(training, dp.Geometric(10, minimum=2))
    kinds = (training, selection, dp.Gaussian(1.0))
    for arm, kind in zip(ledger.next_arms("b"), kinds, strict=True):
        assert arm.epsilon > 0.5
        ledger.check("b", [dp.calibrate(kind, epsilon=arm.epsilon, delta=DELTA).event])


def test_nothing_fits_on_a_budget_that_is_used_up(ledger: Ledger) -> None:
    [charge] = ledger.reserve("b", [costing(EPSILON)])
    ledger.start(charge.id)
    assert [arm.epsilon for arm in ledger.next_arms("b")] == [0.0, 0.0, 0.0]
    ledger.record("b", ChargeRequest(dp.NonPrivate()))
    assert [arm.epsilon for arm in ledger.next_arms("b")] == [0.0, 0.0, 0.0]
    assert list(ledger.spent_by_charge("b").values())[-1] == math.inf


def test_a_charge_s_cost_with_all_before_it_is_what_the_odometer_read(ledger: Ledger) -> None:
    """After the declared block: the same number as at that time; what was given up counts for nothing."""
    for charge in ledger.reserve("b", [costing(0.5), costing(0.7)]):
        ledger.start(charge.id)
    readings = [ledger.spent("b").epsilon]
    for _ in range(3):
        ledger.reserve("b", [ChargeRequest(dp.Gaussian(15.0))], start=True)
        readings.append(ledger.spent("b").epsilon)
    costs = ledger.spent_by_charge("b")
    assert list(costs.values())[1:] == readings
    assert 0.5 <= costs["b-1"] < costs["b-2"]
    [charge] = ledger.reserve("b", [ChargeRequest(dp.Gaussian(15.0))])
    ledger.void(charge.id)
    assert ledger.spent_by_charge("b")["b-6"] == readings[-1]
