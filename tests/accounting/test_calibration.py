"""Calibration ends on the safe side, close to the target, or says why it cannot."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import privtune.accounting as dp
from privtune.accounting import calibration, epsilon
from privtune.accounting.accountant import _answer
from privtune.accounting.best_of_k import Table
from privtune.accounting.calibration import rounded_up, sketch, solve_decreasing
from privtune.errors import InvalidInputError, PrivTuneError
from tests.accounting.helpers import counted, steps


def solved(function, target, tolerance=1e-4, **more):
    return solve_decreasing(function, target, tolerance, lambda: PrivTuneError("no"), **more)


@pytest.mark.parametrize(
    ("event", "target"),
    [
        (steps(0.01, 1.0, 1000), 0.1),
        (steps(0.01, 1.0, 1000), 8.0),
        (dp.PrivateSelection(steps(0.05, 1.0, 400), dp.Geometric(8)), 1.0),
        (dp.Composed([steps(0.05, 1.0, 100), dp.Laplace(5.0), dp.Gaussian(3.0)]), 1.0),
        (dp.SubsampledTuning(2, 0.2, dp.Gaussian(1.0), dp.Gaussian(2.0)), 1.0),
    ],
)
def test_ends_just_below_the_target(event, target):
    answer = dp.calibrate(event, epsilon=target, delta=1e-5)
    assert answer.event == dp.scale_noise(event, answer.scale)
    assert epsilon(answer.event, 1e-5) == answer.guarantee
    assert answer.guarantee.epsilon <= target
    looser = epsilon(dp.scale_noise(event, answer.scale * (1 - 5e-4)), 1e-5).epsilon
    assert looser > target * (1 - 1e-3)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-7])
def test_noise_has_few_digits_and_its_last_ones_move_nothing(tolerance):
    for event in (dp.Laplace(1.0), dp.Gaussian(1.0), steps(0.01, 1.0, 1000)):
        scale = dp.calibrate(event, epsilon=1.0, delta=1e-5, tolerance=tolerance).scale
        assert scale == float(f"{scale:.{1 - math.floor(math.log10(tolerance))}e}")
        below = math.nextafter(scale * (1 - 1e-12), 0.0)
        assert rounded_up(below, tolerance) == rounded_up(scale, tolerance) == scale
        assert rounded_up(scale * (1 + 1e-12), tolerance) > scale


@given(st.floats(1e-4, 1e6), st.floats(1e-9, 0.4))
def test_rounding_adds_at_most_a_tenth_of_the_tolerance(noise, tolerance):
    assert noise <= rounded_up(noise, tolerance) <= noise * (1 + 0.1 * tolerance)


def test_unsampled_gaussians_under_replace_one():
    answer = dp.calibrate(
        dp.Repeated(10, dp.Gaussian(1.0)),
        epsilon=1.0,
        delta=1e-5,
        adjacency=dp.Adjacency.REPLACE_ONE,
    )
    assert answer.guarantee.adjacency is dp.Adjacency.REPLACE_ONE
    assert 0.9995 <= answer.guarantee.epsilon <= 1.0


@pytest.mark.parametrize(
    "event",
    [
        dp.Composed([dp.Gaussian(1.0), dp.ApproximateDP(2.0, 0.0)]),
        dp.Composed([dp.Gaussian(1.0), dp.NonPrivate()]),
        dp.Composed([dp.Gaussian(1.0), dp.ApproximateDP(0.1, 1e-4)]),
    ],
)
def test_impossible_targets_say_why(event):
    with pytest.raises(dp.CalibrationError, match="cannot be reached by any noise"):
        dp.calibrate(event, epsilon=1.0, delta=1e-5)


def test_nothing_to_scale():
    with pytest.raises(InvalidInputError, match="no noise multiplier"):
        dp.calibrate(dp.ApproximateDP(1, 0), epsilon=1.0, delta=1e-5)


@given(st.floats(1e-3, 1e3), st.sampled_from([1.0, 0.3, 3.0]))
@settings(max_examples=60, deadline=None)
def test_root_finding_is_exact_to_tolerance_from_above(root, power):
    calls = []

    def function(x):
        calls.append(x)
        return (root / x) ** power

    found = solved(function, 1.0)
    assert function(found) <= 1.0
    assert root * (1 - 1e-12) <= found <= root * (1 + 2e-4)
    assert len(calls) < 30


def test_root_finding_ends_where_nothing_meets_the_target():
    with pytest.raises(PrivTuneError, match="no"):
        solved(lambda _: 1.0, 1e-300)


def test_three_arms_share_one_budget():
    rate, count = 64 / 1300, 400

    def plain(target):
        return dp.calibrate(steps(rate, 1.0, count), epsilon=target, delta=1e-5).event

    def tuned(target):
        event = dp.PrivateSelection(steps(rate, 1.0, count), dp.Geometric(8))
        return dp.calibrate(event, epsilon=target, delta=1e-5).event

    with counted() as work:
        shared = dp.share_budget([plain, tuned, plain], epsilon=8.0, delta=1e-5)
    assert work.transformed <= 2**24
    assert work.convolved <= 2**29
    assert 8.0 * (1 - 5e-3) <= shared.total.epsilon <= 8.0
    assert len(set(shared.arm_epsilons)) == 1
    # Composition is cheaper than the sum: each gets clearly more than a third.
    assert shared.arm_epsilons[0] > 1.3 * 8 / 3
    for answer, target in zip(shared.guarantees, shared.arm_epsilons, strict=True):
        assert target * (1 - 1e-3) <= answer.epsilon <= target
    assert shared.total == epsilon(dp.Composed(shared.events), 1e-5)


def test_weights_give_proportions():
    def arm(target):
        return dp.calibrate(dp.Gaussian(1.0), epsilon=target, delta=1e-5).event

    shared = dp.share_budget([arm, arm], epsilon=2.0, delta=1e-5, weights=[1.0, 3.0])
    assert shared.arm_epsilons[1] == pytest.approx(3 * shared.arm_epsilons[0])
    assert shared.total.epsilon <= 2.0
    with pytest.raises(InvalidInputError):
        dp.share_budget([arm], epsilon=2.0, delta=1e-5, weights=[1.0, 1.0])
    with pytest.raises(InvalidInputError):
        dp.share_budget([], epsilon=2.0, delta=1e-5)


@pytest.mark.parametrize(
    ("function", "target"),
    [
        (lambda x: 3.0 / x, 1.0),
        (lambda x: 3.0 / x**1.3 + 0.1 / x**2, 1.0),
        (lambda x: 1.0 + 0.01 / x**2, 1.0001),
        (lambda x: math.inf if x < 50.0 else 3.0 / x, 0.1),
        (lambda x: math.ceil(1000.0 / x) / 1000.0, 0.1),
        (lambda x: math.exp(-x), 1e-3),
        (lambda x: 0.0 if x > 7.0 else 3.0, 1.0),
    ],
)
def test_the_answer_meets_the_target_and_a_little_less_does_not(function, target):
    found = solved(function, target)
    assert function(found) <= target < function(found / (1.0 + 1.01e-4))


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda x: 2.5 / x, 2),  # as steep as it is taken to be
        (lambda x: 2.5 / x**0.9 + 0.1, 4),
        (lambda x: 0.7 / x**1.1, 4),
        (lambda x: math.inf if x < 2.0 else 2.5 / x, 7),
        (lambda x: math.ceil(1000.0 / x) / 1000.0, 8),
    ],
)
def test_a_band_below_the_target_is_met_by_few_points(function, most):
    calls = []

    def counted(x):
        calls.append(x)
        return function(x)

    found = solved(counted, 1.0, 1e-3, start=1.3, steep=1.0, enough=0.999)
    assert 0.999 <= function(found) <= 1.0
    assert len(calls) <= most


@pytest.mark.parametrize("enough", [1.0, 0.999])
def test_a_cliff_that_ends_on_the_target_itself_is_found(enough):
    found = solved(
        lambda x: 1.0 if x > 3.0 else math.nextafter(1.0, 2.0), 1.0, 1e-3, start=0.02, enough=enough
    )
    assert found > 3.0


def test_an_answer_between_the_last_stride_and_the_largest_is_found():
    found = solved(lambda x: math.inf if x < 8e5 else 0.5, 1.0, 1e-3, start=7e4)
    assert 8e5 <= found <= 8e5 * 1.01


TRAINING = steps(0.06, 1.2, 300)
TUNED = [
    dp.SubsampledTuning(variant, 0.1, dp.PrivateSelection(TRAINING, dp.Geometric(10)), TRAINING)
    for variant in (1, 2)
]


def planned(target, event, find):
    return dp.scale_noise(event, find(event, epsilon=target, delta=1e-5))


def shared(total=5.0):
    """Share a budget among two arms that tune on a subset, beside a selection."""

    def exact(event, *, epsilon, delta):
        return dp.calibrate(event, epsilon=epsilon, delta=delta).scale

    events = [*TUNED, dp.PrivateSelection(TRAINING, dp.Geometric(10))]
    arms = [partial(planned, event=event, find=exact) for event in events]
    sketches = [partial(planned, event=event, find=sketch) for event in events]
    return dp.share_budget(arms, epsilon=total, delta=1e-5, sketches=sketches)


def forget_all():
    for function in (_answer, dp.pld._own, dp.pld._composed_pair, dp.pld.tuners):
        function.cache_clear()


def test_a_search_builds_few_of_the_finest_pairs(monkeypatch):
    built, real = [], dp.pairs._lowest
    monkeypatch.setattr(dp.pairs, "_lowest", lambda t, size: built.append(t) or real(t, size))
    forget_all()
    found = shared()
    assert 5.0 * (1 - 1e-3) <= found.total.epsilon <= 5.0
    assert len(built) <= 14  # two directions each; anew for every noise that is tried, they are 42


def few_steps():
    """Trainings that are tuned on a subset, and their scores: ε jumps by 0.2% between noises 0.02% apart."""
    law = dp.Geometric(4.0, minimum=2)
    training = dp.Repeated(20, dp.PoissonSampled(0.1, dp.Gaussian(2.1)))
    tuned = dp.SubsampledTuning(1, 0.1, dp.PrivateSelection(training, law), training)
    return tuned, dp.PrivateSelection(dp.Gaussian(2.0), law)


def test_an_account_that_moves_with_its_lattice_is_asked_few_times(monkeypatch):
    """No noise that a line leads to is within the tolerance, so an early answer is taken."""
    target = {"epsilon": 2.0, "delta": 1e-5}
    forget_all()
    with calibration.searches_learn():
        sides = [dp.scale_noise(side, sketch(side, **target)) for side in few_steps()]
        asked, real = [], calibration.report
        monkeypatch.setattr(calibration, "report", lambda *a, **k: asked.append(a) or real(*a, **k))
        found = dp.calibrate(dp.Parallel(tuple(sides)), tolerance=5e-4, **target)
    assert len(asked) <= 5  # three, a fourth where all are above the target, and the guarantee's
    assert 2.0 * (1 - 2e-3) <= found.guarantee.epsilon <= 2.0


def test_an_account_without_jumps_keeps_its_tolerance():
    """Under replace-one the first guess is far off, and the third answer no end of a search."""
    releases = dp.Repeated(30, dp.Laplace(1.0))
    found = dp.calibrate(
        dp.Parallel((releases, dp.Gaussian(1.0))),
        epsilon=0.7,
        delta=1e-5,
        adjacency=dp.Adjacency.REPLACE_ONE,
        tolerance=1e-6,
    )
    assert 0.7 * (1 - 1e-5) <= found.guarantee.epsilon <= 0.7


@pytest.mark.parametrize("target", [1.0, 2.0])
def test_one_arm_is_planned_once(target):
    """Its own search decides how near it comes: to plan it again at another target gains nothing."""
    event = dp.Parallel(few_steps())
    targets = []

    def arm(epsilon_of_arm):
        targets.append(epsilon_of_arm)
        return dp.calibrate(event, epsilon=epsilon_of_arm, delta=1e-5, tolerance=5e-4).event

    forget_all()
    found = dp.share_budget([arm], epsilon=target, delta=1e-5)
    assert targets == [target]
    assert target * (1 - 2e-3) <= found.total.epsilon <= target


@pytest.mark.parametrize("promised", [0.0, 3.0])
def test_what_a_search_learnt_decides_no_answer(monkeypatch, promised):
    """Gains that promise too little δ, or too much, cost answers of the accountant, never ε."""

    def wrong(self, event, direction, tuner, size):
        table = tuner.profile(size)
        return Table(table.step, np.minimum(promised * table.values, 1.0))

    monkeypatch.setattr(dp.pairs.Gains, "_table", wrong)
    forget_all()
    found = dp.calibrate(TUNED[1], epsilon=2.0, delta=1e-5)
    both = shared() if promised else None
    monkeypatch.undo()
    forget_all()
    assert epsilon(found.event, 1e-5).epsilon == found.guarantee.epsilon <= 2.0
    if both is not None:
        assert epsilon(dp.Composed(both.events), 1e-5).epsilon == both.total.epsilon <= 5.0
