"""HyFreeDP by the joint account, and why the paper's own composition may not come back."""

import math

import numpy as np
import pytest
from scipy import integrate
from scipy.stats import norm

from privtune.accounting import (
    Composed,
    Gaussian,
    Joint,
    PoissonSampled,
    Repeated,
    epsilon,
    hyfreedp_event,
    hyfreedp_loss_steps,
    hyfreedp_noise,
)
from privtune.errors import InvalidInputError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("target", "same", "separate"), [(1.0, 8.28, 5.45), (3.0, 5.06, 1.88), (8.0, 3.53, 1.19)]
)
def test_loss_noise_in_the_paper_s_regime(target, same, separate):
    for kind, expected in (("same", same), ("separate", separate)):
        answer = hyfreedp_noise(0.02, 250, interval=5, epsilon=target, delta=1e-5, loss_batch=kind)
        assert answer.loss_noise == pytest.approx(expected, rel=5e-3)
        assert 0.999 * target <= answer.guarantee.epsilon <= target
        assert answer.event == hyfreedp_event(
            0.02,
            250,
            interval=5,
            gradient_noise=answer.gradient_noise,
            loss_noise=answer.loss_noise,
            loss_batch=kind,
        )
    best = hyfreedp_noise(0.02, 250, interval=5, epsilon=target, delta=1e-5)
    assert best.loss_batch == "separate"
    assert best.loss_noise == answer.loss_noise


def paper_composition(rate, count, interval, gradient_noise, loss_noise):
    """Equation 9 of the paper: 3T/K losses as if each had a sample of its own."""
    return Composed(
        [
            Repeated(count, PoissonSampled(rate, Gaussian(gradient_noise))),
            Repeated(3 * count // interval, PoissonSampled(rate, Gaussian(loss_noise))),
        ]
    )


@pytest.mark.parametrize(
    ("rate", "count", "interval", "claim", "truth"),
    [(0.02, 250, 5, 3.0, 4.75), (0.02, 250, 5, 8.0, 16.6), (0.01, 500, 10, 3.0, 8.53)],
)
def test_the_paper_s_composition_understates(rate, count, interval, claim, truth):
    """Solve σ_l as the paper does, then account for one sample per step."""
    from privtune.accounting.calibration import calibrate, solve_decreasing

    plain = calibrate(
        Repeated(count, PoissonSampled(rate, Gaussian(1.0))), epsilon=claim, delta=1e-5
    ).scale
    noise = 1.01 * plain
    loss = solve_decreasing(
        lambda x: epsilon(paper_composition(rate, count, interval, noise, x), 1e-5).epsilon,
        claim,
        1e-4,
        lambda: InvalidInputError("x", 0, "impossible"),
    )
    joint = hyfreedp_event(rate, count, interval=interval, gradient_noise=noise, loss_noise=loss)
    assert epsilon(joint, 1e-5).epsilon == pytest.approx(truth, rel=2e-2)


def test_one_step_by_quadrature():
    """One sample, one gradient and one loss: the exact δ is that of the joint Gaussian, and the
    separately sampled composition lies below it when the noise is small."""
    rate, gradient, loss, value = 0.1, 0.6, 0.6, 1.5
    x = np.linspace(-6, 7, 1601)
    a, b = np.meshgrid(x, x, indexing="ij")

    def density(shift):
        return norm.pdf(a, shift, gradient) * norm.pdf(b, shift, loss)

    p, q = (1 - rate) * density(0) + rate * density(1), density(0)
    inner = integrate.trapezoid(np.maximum(p - math.exp(value) * q, 0.0), x, axis=1)
    exact = integrate.trapezoid(inner, x)
    from privtune.accounting import delta

    joint = PoissonSampled(rate, Joint([Gaussian(gradient), Gaussian(loss)]))
    apart = Composed(
        [PoissonSampled(rate, Gaussian(gradient)), PoissonSampled(rate, Gaussian(loss))]
    )
    assert delta(joint, value).delta == pytest.approx(exact, rel=5e-3)
    assert delta(joint, value).delta >= exact * (1 - 1e-5)
    assert delta(apart, value).delta < 0.9 * exact


def test_which_steps_release_losses():
    assert hyfreedp_loss_steps(250, 5) == 50
    assert hyfreedp_loss_steps(11, 5) == 3
    assert hyfreedp_loss_steps(4, 5) == 1
    every = hyfreedp_event(0.1, 7, interval=1, gradient_noise=1.0, loss_noise=2.0)
    assert isinstance(every, Repeated)
    assert every.count == 7
    with pytest.raises(InvalidInputError):
        hyfreedp_event(0.1, 7, interval=0, gradient_noise=1.0, loss_noise=2.0)
    with pytest.raises(InvalidInputError):
        hyfreedp_noise(0.1, 7, interval=2, epsilon=1.0, delta=1e-5, loss_batch="both")
