"""The whole domain: a number that is a valid bound, or one sentence; never NaN, never minutes."""

import itertools
import math
import time

import pytest

from privtune.accounting import (
    Binomial,
    Geometric,
    Logarithmic,
    Poisson,
    PrivateSelection,
    TruncatedNegativeBinomial,
    calibrate,
    epsilon,
    lower_bound,
)
from tests.accounting.helpers import steps

CORNERS = list(itertools.product((1e-6, 1e-3, 0.9, 1.0), (0.3, 100.0), (1, 10**6)))
RUNS = {
    "one run": None,
    "geometric": Geometric(10),
    "logarithmic": Logarithmic(1e4),
    "poisson": Poisson(1e4),
}


@pytest.mark.slow
@pytest.mark.parametrize("runs", list(RUNS))
@pytest.mark.parametrize(("rate", "noise", "count"), CORNERS)
def test_corners_of_the_domain(rate, noise, count, runs):
    law = RUNS[runs]
    base = steps(rate, noise, count)
    event = base if law is None else PrivateSelection(base, law)
    started = time.process_time()
    loose, tight = epsilon(event, 1e-3), epsilon(event, 1e-12)
    assert time.process_time() - started < 60.0
    for answer in (loose, tight):
        assert answer.epsilon >= 0.0
        assert not math.isnan(answer.epsilon)
        assert answer.epsilon <= answer.bounds.get("rdp", math.inf)
    assert loose.epsilon <= tight.epsilon
    if law is not None and tight.epsilon > 1e-6 and law.mean > 1:
        assert tight.epsilon >= epsilon(base, 1e-12).epsilon * (1 - 2e-3) * 0.9


@pytest.mark.parametrize(
    ("rate", "noise", "count"), [(1e-3, 1.0, 10**6), (1e-3, 8.0, 10**6), (0.05, 0.7, 10**5)]
)
def test_a_million_steps_at_tiny_deltas(rate, noise, count):
    """FFT rounding grows with the number of steps; the PLD must stay below RDP at 1e-12."""
    answer = epsilon(steps(rate, noise, count), 1e-12)
    assert answer.method == "pld"
    tuned = epsilon(PrivateSelection(steps(rate, noise, count), Geometric(100)), 1e-12)
    assert tuned.method == "envelope"
    assert tuned.bounds["rdp"] > tuned.epsilon > answer.epsilon


@pytest.mark.parametrize("shape", [-0.98, -0.9, -0.5, 0.0, 50.0])
@pytest.mark.parametrize("mean", [1 + 1e-9, 5.0, 50.0, 1e4])
def test_every_shape_has_a_valid_selection(shape, mean):
    event = PrivateSelection(steps(0.01, 1.1, 1000), TruncatedNegativeBinomial(shape, mean))
    answer = epsilon(event, 1e-5)
    assert set(answer.bounds) - {"rearrangement"} == {"rdp", "profile", "envelope"}
    lower = lower_bound(event, 1e-5)
    assert all(lower <= bound < math.inf for bound in answer.bounds.values())
    assert answer.epsilon >= epsilon(event.event, 1e-5).epsilon * (1 - 1e-3)
    if mean < 1.1:
        assert answer.epsilon == pytest.approx(epsilon(event.event, 1e-5).epsilon, rel=1e-3)


def test_calibration_at_the_edges():
    for target in (0.01, 50.0):
        answer = calibrate(steps(1e-3, 1.0, 10_000), epsilon=target, delta=1e-10)
        assert 0.999 * target <= answer.guarantee.epsilon <= target


@pytest.mark.parametrize(
    ("base", "runs", "level"),
    [
        (steps(1e-3, 1.0, 1000), Binomial(10_000, 10_000), 1e-12),
        (steps(1e-6, 1.0, 1000), Binomial(1000, 500), 1e-12),
        (steps(1e-3, 5.0, 10**5), Poisson(1e4), 1e-8),
    ],
)
def test_thousands_of_runs_at_tiny_deltas(base, runs, level):
    """Differences of φ near 1 are rounding alone; the lower bound must not count them."""
    event = PrivateSelection(base, runs)
    answer = epsilon(event, level)
    assert 0.0 <= lower_bound(event, level) <= answer.epsilon < math.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [1e-9, 1e-7])
@pytest.mark.parametrize("count", [60, 1000])
def test_calibration_at_tiny_rates_warns_of_nothing(rate, count):
    """Losses so rare leave the tilt of the composition without an end of its own."""
    answer = calibrate(steps(rate, 1.0, count), epsilon=4.0, delta=1e-5)
    assert answer.guarantee.epsilon <= 4.0
