"""The numbers that the whole project hangs on, against independent references."""

import math

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution as reference_pld
from dp_accounting.rdp import RdpAccountant

from privtune.accounting import (
    Composed,
    Gaussian,
    Geometric,
    Logarithmic,
    NonPrivate,
    Poisson,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    TruncatedNegativeBinomial,
    calibrate,
    delta,
    epsilon,
    event_from_json,
    hyfreedp_noise,
    share_budget,
)
from privtune.accounting.rdp import ORDERS


def steps(rate, noise, count):
    return Repeated(count, PoissonSampled(rate, Gaussian(noise)))


@pytest.mark.parametrize(
    ("event", "ceiling", "lower"),
    [
        (
            PrivateSelection(steps(256 / 60000, 1.0, 2340), TruncatedNegativeBinomial(1, 20)),
            1.815,
            1.807,
        ),
        (PrivateSelection(steps(256 / 60000, 1.0, 2340), Logarithmic(10)), 1.571, 1.564),
        (PrivateSelection(steps(256 / 60000, 1.0, 2340), Poisson(12)), 2.235, 2.219),
        (PrivateSelection(steps(0.05, 2.0, 400), Geometric(100)), 4.37, 4.347),
        (PrivateSelection(steps(256 / 1400, 4.0, 100), Logarithmic(10)), 2.705, 2.692),
    ],
)
def test_selection_meets_the_numbers(event, ceiling, lower):
    answer = epsilon(event, 1e-5)
    assert lower <= answer.epsilon <= ceiling
    assert answer.method == "envelope"
    assert answer.bounds["rdp"] > answer.epsilon


@pytest.mark.parametrize(
    ("rate", "noise", "count"), [(256 / 60000, 1.0, 2340), (0.05, 2.0, 400), (0.5, 5.0, 30)]
)
def test_sampled_gaussian_agrees_with_dp_accounting(rate, noise, count):
    pld = reference_pld.from_gaussian_mechanism(noise, sampling_prob=rate).self_compose(count)
    answer = epsilon(steps(rate, noise, count), 1e-5)
    assert answer.epsilon == pytest.approx(pld.get_epsilon_for_delta(1e-5), rel=1e-3)
    back = delta(steps(rate, noise, count), answer.epsilon)
    assert back.delta == pytest.approx(1e-5, rel=1e-2)


def test_rdp_agrees_with_dp_accounting():
    reference = RdpAccountant(orders=ORDERS)
    reference.compose(
        dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.1)), 1000
        )
    )
    answer = epsilon(steps(0.01, 1.1, 1000), 1e-5, method="rdp")
    assert answer.epsilon == pytest.approx(reference.get_epsilon(1e-5), rel=1e-6)


def test_unsampled_gaussian_is_exact():
    # The closed form at mu = 1, known to many digits.
    assert epsilon(Gaussian(1.0), 1e-5).epsilon == pytest.approx(4.377178, abs=1e-6)


def test_one_event_has_one_text():
    event = Composed([steps(0.01, 1.1, 10), PrivateSelection(Gaussian(2), Geometric(4))])
    assert event_from_json(event.to_json()) == event
    assert event_from_json(event.to_json()).to_json() == event.to_json()


def test_nothing_costs_nothing_and_non_private_costs_everything():
    assert epsilon(Composed([]), 1e-5).epsilon == 0.0
    assert math.isinf(epsilon(Composed([Gaussian(1.0), NonPrivate()]), 1e-5).epsilon)


def test_calibration_ends_on_the_safe_side():
    answer = calibrate(steps(0.01, 1.0, 1000), epsilon=1.0, delta=1e-5)
    assert 0.9995 <= answer.guarantee.epsilon <= 1.0


@pytest.mark.parametrize(("target", "noise"), [(1.0, 8.28), (3.0, 5.06), (8.0, 3.53)])
def test_hyfreedp_noise_by_the_joint_account(target, noise):
    answer = hyfreedp_noise(0.02, 250, interval=5, epsilon=target, delta=1e-5, loss_batch="same")
    assert answer.loss_noise == pytest.approx(noise, rel=5e-3)
    assert answer.guarantee.epsilon <= target


def test_arms_share_one_budget():
    def plain(target):
        return calibrate(steps(0.05, 1.0, 400), epsilon=target, delta=1e-5).event

    def tuned(target):
        event = PrivateSelection(steps(0.05, 1.0, 400), Geometric(8))
        return calibrate(event, epsilon=target, delta=1e-5).event

    shared = share_budget([plain, tuned], epsilon=8.0, delta=1e-5)
    assert 7.97 <= shared.total.epsilon <= 8.0
    assert shared.arm_epsilons[0] == shared.arm_epsilons[1] > 4.0
