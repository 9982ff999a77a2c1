"""The rule for epochs and batch: against other people's accountant, and where it must not go."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting import pld

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.strategies.schedule_rule import (
    GAIN,
    TOLERANCE,
    SchedulePoint,
    TrainingFacts,
    batch_grid,
    best_schedule,
    choose_schedule,
    schedule_curve,
)

pytestmark = pytest.mark.quick

FACTS = TrainingFacts(records=2_000, weights=1_000, epsilon=2.0, delta=1e-5)
MNIST = TrainingFacts(records=55_000, weights=26_010, epsilon=3.0, delta=1e-5)
WORKS = [300.0, 2e3, 2e4, 1e5, 1e6, 1e7, 1e8]


def noise_of_others(batch: int, steps: int) -> float:
    """The noise multiplier of Google's accountant for ``FACTS``."""

    def event(sigma: float) -> dp_accounting.DpEvent:
        step = dp_accounting.GaussianDpEvent(sigma)
        sampled = dp_accounting.PoissonSampledDpEvent(batch / FACTS.records, step)
        return dp_accounting.SelfComposedDpEvent(sampled, steps)

    return float(
        dp_accounting.calibrate_dp_mechanism(
            lambda: pld.PLDAccountant(value_discretization_interval=2e-3),
            event,
            FACTS.epsilon,
            FACTS.delta,
            bracket_interval=dp_accounting.ExplicitBracketInterval(0.4, 60.0),
            tol=1e-2,
        )
    )


@pytest.mark.parametrize("work", [4_000, 20_000])
def test_the_choice_is_the_best_of_a_grid_by_another_accountant(work: int) -> None:
    """Written out anew: noise and missing steps of every batch of the grid, by dp-accounting's noise."""
    shortfalls = {}
    for batch in (8, 16, 32, 64, 128, 256, 512, 1_024, 2_000):
        steps = work // batch
        if steps < 2:
            continue
        noise = math.sqrt(1_000) * noise_of_others(batch, steps) / (batch * math.sqrt(steps))
        shortfalls[batch] = math.sqrt(
            noise**2 * (1.0 + 60.0 / steps) + (2.0 / steps) ** 2 + 0.003**2
        )
    choice = choose_schedule(FACTS, work).point
    assert choice.exact
    others = noise_of_others(choice.batch, choice.steps)
    assert choice.noise_multiplier == pytest.approx(others, rel=0.03)
    # 2% for the central limit theorem, by which schedules are compared.
    assert choice.shortfall <= (1.0 + TOLERANCE + 0.02) * min(shortfalls.values())
    # A grid on which every choice were good would show nothing.
    assert max(shortfalls.values()) > 1.5 * choice.shortfall


@pytest.mark.parametrize(
    ("batch", "steps"), [(32, 100), (64, 1_000), (500, 40), (2_000, 10), (8, 2_500)]
)
def test_the_estimate_is_near_the_accountant_s_noise(batch: int, steps: int) -> None:
    most = 1.3 if steps == 100 else 1.1  # few small samples: the limit theorem is too low
    ratio = FACTS.exact_noise(batch, steps) / FACTS.estimate_noise(batch, steps)
    assert 0.97 < ratio < most


@pytest.mark.parametrize("facts", [FACTS, MNIST])
def test_more_compute_never_leads_to_less(facts: TrainingFacts) -> None:
    choices = [choose_schedule(facts, compute) for compute in WORKS]
    for compute, choice in zip(WORKS, choices, strict=True):
        assert choice.point.work <= compute
        assert 1 <= choice.point.batch <= facts.records
    for less, more in itertools.pairwise(choices):
        assert more.point.shortfall <= (1.0 + TOLERANCE) * less.point.shortfall
        assert more.point.work >= 0.95 * less.point.work  # whole steps
    # What is not spent buys nothing worth it: the last amounts lead to one schedule.
    assert choices[-1].point == choices[-2].point
    assert choices[-1].point.work < WORKS[-2]
    assert choices[-1].gain < GAIN + TOLERANCE


def test_noise_alone_does_not_decide() -> None:
    """One step of all records has the most signal of all, and gets nowhere."""
    full = SchedulePoint(
        records=2_000,
        weights=1_000,
        batch=2_000,
        steps=1,
        noise_multiplier=FACTS.estimate_noise(2_000, 1),
        exact=False,
    )
    best = best_schedule(FACTS, 2_000)
    assert full.signal > best.signal
    assert full.shortfall > 2.0 * best.shortfall
    assert full.signal == pytest.approx(FACTS.most_signal, rel=0.07)


def test_little_noise_takes_more_steps_of_the_same_work() -> None:
    steps = [best_schedule(replace(MNIST, weights=d), 55_000).steps for d in (10, 1_000, 100_000)]
    assert steps[0] > steps[1] > steps[2] >= 10


def test_a_given_rate_gets_the_steps_that_it_needs() -> None:
    """Written out anew, over a fine grid of steps in the place of batches."""
    work = 20_000.0
    chosen = []
    for length in (0.125, 0.5, 2.0):
        facts = replace(FACTS, given_rate=True, step_length=length)
        point = best_schedule(facts, work)
        chosen.append(point.steps)

        def worth(steps: float, length: float = length) -> float:
            batch = work / steps
            # μ of T steps at rate q is that of ε: the limit theorem, solved for the noise.
            square = (FACTS.most_signal / batch) ** 2 / steps
            noise = length * math.sqrt(steps / math.log1p(square)) / batch
            return math.sqrt(1_000**0.5 * noise**2 + 1_400.0 / (length * steps))

        best = min(worth(10.0 * 1.01**n) for n in range(700))
        assert worth(point.steps) <= 1.1 * best
        assert worth(4.0 * point.steps) > 1.5 * best
        assert worth(point.steps / 4.0) > 1.5 * best
    assert chosen[0] > 1.5 * chosen[1] > 2.0 * chosen[2]


def test_much_noise_takes_fewer_steps_of_a_given_length() -> None:
    digits = TrainingFacts(
        records=1_077, weights=4_810, epsilon=0.5, delta=1e-5, given_rate=True, step_length=0.5
    )
    steps = [best_schedule(replace(digits, epsilon=e), 10_770).steps for e in (0.1, 0.5, 2.0, 8.0)]
    assert steps[0] < steps[1] < steps[2] <= steps[3]
    # 336 steps without a length, which lost 9.7 points.
    assert steps[1] < 0.6 * best_schedule(replace(digits, step_length=None), 10_770).steps


def test_replaced_records_are_refused_as_arms_refuse_them() -> None:
    with pytest.raises(InvalidInputError, match="accounted under add-remove only"):
        choose_schedule(replace(FACTS, adjacency=Adjacency.REPLACE_ONE), 20_000)


def test_more_arms_cost_signal() -> None:
    four = replace(FACTS, trainings=4)
    assert four.most_signal == pytest.approx(FACTS.most_signal / 2.0, rel=1e-9)
    assert four.exact_noise(64, 300) == pytest.approx(FACTS.exact_noise(64, 1_200), rel=2e-3)


def test_the_literature_s_schedule_of_mnist_is_near_the_default() -> None:
    """Twenty epochs of 1,024 is what experience has for a network of this size at ε = 3."""
    point = choose_schedule(MNIST, MNIST.usual_compute).point
    assert 19.9 < point.epochs <= 20.0
    assert point.batch in {768, 1_024, 1_536}


def test_a_given_batch_is_kept() -> None:
    point = choose_schedule(FACTS, 1e6, 100).point
    assert (point.batch, point.work <= 1e6) == (100, True)


def test_work_below_one_step_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="must be at least 100 gradient evaluations"):
        best_schedule(FACTS, 99.0, 100)


@pytest.mark.parametrize("records", [1, 2, 3, 7, 64, 1_000])
def test_the_grid_ends_with_all_records(records: int) -> None:
    grid = batch_grid(records)
    assert grid[0] == 1
    assert grid[-1] == records
    assert list(grid) == sorted(set(grid))
    choice = choose_schedule(replace(FACTS, records=records), 50.0 * records)
    assert choice.point.batch <= records


def test_a_curve_has_the_plan_once_and_the_best_below_it() -> None:
    chosen = choose_schedule(FACTS, 20_000).point
    curve = schedule_curve(FACTS, chosen)
    assert [point for point in curve.by_batch if point.exact] == [chosen]
    least = min(point.shortfall for point in curve.by_batch)
    assert chosen.shortfall <= (1.0 + TOLERANCE + 0.005) * least
    falls = [point.shortfall for point in curve.by_work]
    assert falls == sorted(falls, reverse=True)
    assert 0.0 <= curve.gain < 0.3
