"""Gaussian and Laplace releases about one Poisson sample, against quadrature and dp-accounting; HyFreeDP."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from privtune.accounting import (
    Composed,
    Gaussian,
    Joint,
    Laplace,
    PoissonSampled,
    Repeated,
    delta,
    epsilon,
    scale_noise,
)
from privtune.accounting.curves import ORDERS
from privtune.accounting.events import flatten
from privtune.accounting.rdp import rdp_curve
from privtune.errors import InvalidInputError
from privtune.training.methods.hyfreedp_account import (
    hyfreedp_event,
    hyfreedp_loss_steps,
    hyfreedp_noise,
)
from tests.tiers import FULL

SETTINGS = [(0.1, 0.6, 0.7), (0.5, 2.0, 1.0), (1e-3, 0.5, 0.3)]


def mixed(rate, sigma, *scales):
    return PoissonSampled(rate, Joint([Gaussian(sigma), *map(Laplace, scales)]))


def exact_delta(rate, sigma, scale, eps, *, removed):
    """δ of one step with one Laplace release: the Gaussian in closed form, the Laplace by pieces."""

    def inner(y):
        factor = math.exp((abs(y) - abs(y - 1)) / scale)
        density = math.exp(-abs(y) / scale) / (2 * scale)
        need = math.exp(eps if removed else -eps) - (1 - rate)
        if need <= 0:
            return density * (1 - rate + rate * factor - math.exp(eps)) if removed else 0.0
        x = sigma**2 * math.log(need / rate / factor) + 0.5
        if removed:
            above = stats.norm.sf((x - 1) / sigma), stats.norm.sf(x / sigma)
            return density * (rate * factor * above[0] - need * above[1])
        below = stats.norm.cdf((x - 1) / sigma), stats.norm.cdf(x / sigma)
        return density * math.exp(eps) * (need * below[1] - rate * factor * below[0])

    ends = (-40 * scale, 0, 1, 1 + 40 * scale)
    pieces = itertools.pairwise(ends)
    return sum(integrate.quad(inner, a, b, epsabs=0, epsrel=1e-10, limit=500)[0] for a, b in pieces)


@pytest.mark.parametrize(("rate", "sigma", "scale"), SETTINGS)
@pytest.mark.parametrize("eps", [0.01, 1.5])
def test_one_step_by_quadrature(rate, sigma, scale, eps):
    exact = max(exact_delta(rate, sigma, scale, eps, removed=r) for r in (True, False))
    ours = delta(mixed(rate, sigma, scale), eps).bounds["pld"]
    assert exact * (1 - 1e-8) <= ours <= exact * 1.006


def cells(rate, sigma, scales, count):
    """Log masses of P and Q on a grid of cells: quantised outcomes, hence a weaker mechanism."""
    axes = [(stats.norm(0, sigma), stats.norm(1, sigma))]
    axes += [(stats.laplace(0, b), stats.laplace(1, b)) for b in scales]
    base, moved = np.ones(1), np.ones(1)
    for still, shifted in axes:
        edges = np.r_[-np.inf, np.linspace(still.ppf(1e-9), shifted.ppf(1 - 1e-9), count), np.inf]
        base = np.outer(base, np.diff(still.cdf(edges))).ravel()
        moved = np.outer(moved, np.diff(shifted.cdf(edges))).ravel()
    keep = (base > 1e-14) & (moved > 1e-14)  # fewer outcomes: weaker still, by 1e-10 at most
    mix = (1 - rate) * base + rate * moved
    return np.log(mix[keep]), np.log(base[keep])


@pytest.mark.parametrize(
    ("rate", "sigma", "scales", "count", "steps"),
    [(0.1, 2.0, (1.5,), 400, 30), (0.02, 1.0, (5.0, 5.0), 60, 250), (0.3, 0.8, (0.9,), 400, 3)],
)
def test_compositions_against_quantised_outcomes(rate, sigma, scales, count, steps):
    """dp-accounting composes the quantised mechanism, rounded down: a lower bound, and near."""
    mix, base = cells(rate, sigma, scales, count)
    pld = reference.from_two_probability_mass_functions(
        dict(enumerate(base)),
        dict(enumerate(mix)),
        pessimistic_estimate=False,
        value_discretization_interval=1e-4,
        symmetric=False,
    )
    low = pld.self_compose(steps).get_epsilon_for_delta(1e-5)
    ours = epsilon(Repeated(steps, mixed(rate, sigma, *scales)), 1e-5)
    assert low * (1 - 1e-4) <= ours.epsilon <= low * 1.03  # 60 cells an axis lose some
    assert ours.method == "pld"
    assert ours.epsilon <= ours.bounds["rdp"]


@pytest.mark.parametrize("steps", [1, 250])
@pytest.mark.parametrize(
    ("joint", "alone"),
    [
        (Joint([Gaussian(1.0), Laplace(1e5)]), Gaussian(1.0)),
        (Joint([Gaussian(1e5), Laplace(1.0)]), Laplace(1.0)),
    ],
)
def test_a_vanishing_part_leaves_the_other(joint, alone, steps):
    both, one = (epsilon(Repeated(steps, PoissonSampled(0.05, e)), 1e-5) for e in (joint, alone))
    assert both.bounds["pld"] == pytest.approx(one.bounds["pld"], rel=1e-2 if steps == 1 else 2e-3)
    # Between whole orders the joint curve is a chord; the Gaussian's is exact.
    assert one.bounds["rdp"] * (1 - 1e-6) <= both.bounds["rdp"] <= one.bounds["rdp"] * 1.05


@pytest.mark.parametrize(("rate", "sigma", "scale"), [(0.02, 1.0, 2.0), (0.3, 2.0, 0.8)])
@pytest.mark.parametrize("order", [1.5, 2.0, 2.5, 5.0, 16.0])
def test_renyi_by_quadrature(rate, sigma, scale, order):
    """Both directions on a grid of outcomes; whole orders are exact, chords lie above the rest."""
    x = np.linspace(-14 * sigma, (order + 14) * sigma + 14, 6001)
    # Gauss-Legendre between the kinks at 0 and 1, where the loss is constant beyond.
    node, weight = np.polynomial.legendre.leggauss(60)
    y, dy = (node + 1) / 2, weight / 2
    log_q = [-np.abs(y) / scale - math.log(2 * scale) + np.log(dy), np.array([math.log(0.5)])]
    log_q += [np.array([math.log(0.5) - 1 / scale])]
    shift = [(2 * y - 1) / scale, np.array([-1 / scale]), np.array([1 / scale])]
    log_q, shift = np.concatenate(log_q), np.concatenate(shift)
    base = stats.norm.logpdf(x, 0, sigma)[:, None] + log_q
    loss = np.logaddexp(
        math.log1p(-rate), math.log(rate) + ((2 * x - 1) / (2 * sigma**2))[:, None] + shift
    )
    step = math.log(x[1] - x[0])
    exact = [
        (special.logsumexp(base + a * loss) + step) / (order - 1) for a in (order, 1.0 - order)
    ]
    index = int(np.argmin(np.abs(ORDERS - order)))
    assert ORDERS[index] == pytest.approx(order)
    ours = rdp_curve(mixed(rate, sigma, scale))[index]
    assert ours >= max(exact) - 1e-12
    assert exact[0] >= exact[1]
    if order == round(order):
        assert ours == pytest.approx(exact[0], rel=1e-6)


def test_a_joint_about_all_records_is_its_parts():
    joint = Joint([Gaussian(2.0), Laplace(3.0), Gaussian(2.0), Laplace(3.0)])
    parts = Composed([Gaussian(2.0), Laplace(3.0), Gaussian(2.0), Laplace(3.0)])
    (gaussian, one), (laplace, two) = flatten(joint).items()
    assert gaussian.noise_multiplier == pytest.approx(math.sqrt(2.0))
    assert (one, laplace, two) == (1, Laplace(3.0), 2)
    assert flatten(PoissonSampled(1.0, joint)) == flatten(joint)
    assert epsilon(joint, 1e-5).epsilon == pytest.approx(epsilon(parts, 1e-5).epsilon)
    # One canonical part, whatever the order and however the Gaussians are split.
    shuffled = Joint([Laplace(3.0), *[Gaussian(2.0)] * 2, Laplace(3.0)])
    assert flatten(PoissonSampled(0.1, joint)) == flatten(PoissonSampled(0.1, shuffled))
    assert flatten(PoissonSampled(0.1, joint)) == {
        PoissonSampled(0.1, Joint([gaussian, laplace, laplace])): 1
    }
    assert flatten(PoissonSampled(0.1, Joint([Laplace(3.0)]))) == {
        PoissonSampled(0.1, Laplace(3.0)): 1
    }


@given(
    st.floats(1e-4, 0.9),
    st.floats(0.4, 20.0),
    st.lists(st.floats(0.3, 50.0), min_size=1, max_size=3),
)
@settings(max_examples=25 if FULL else 8, deadline=None)
def test_laws(rate, sigma, scales):
    """A part more costs more, more noise costs less; no direction, order or bound is broken."""
    event = mixed(rate, sigma, *scales)
    answer = epsilon(Repeated(20, event), 1e-6)
    slack = 1 - 3e-3
    for fewer in (PoissonSampled(rate, Gaussian(sigma)), PoissonSampled(rate, Laplace(scales[0]))):
        assert answer.epsilon >= slack * epsilon(Repeated(20, fewer), 1e-6).epsilon - 1e-9
    quieter = epsilon(Repeated(20, scale_noise(event, 1.3)), 1e-6).epsilon
    assert quieter <= answer.epsilon / slack
    curve = rdp_curve(event)
    assert np.isfinite(curve).all()
    assert (np.diff(curve) >= -1e-9 * curve[1:] - 1e-10).all()


@pytest.mark.parametrize(("kind", "count"), [("same", 250), ("separate", 300)])
def test_hyfreedp_noise_for_laplace_losses(kind, count):
    terms = {"interval": 5, "mechanism": "laplace"}
    answer = hyfreedp_noise(0.02, 250, epsilon=3.0, delta=1e-5, loss_batch=kind, **terms)
    assert 0.999 * 3.0 <= answer.guarantee.epsilon <= 3.0
    noise = {"gradient_noise": answer.gradient_noise, "loss_noise": answer.loss_noise}
    assert answer.event == hyfreedp_event(0.02, 250, loss_batch=kind, **noise, **terms)
    looks = flatten(answer.event)
    assert sum(looks.values()) == count
    assert any(isinstance(look.event, Joint) for look in looks)
    best = hyfreedp_noise(0.02, 250, epsilon=3.0, delta=1e-5, **terms)
    assert best.loss_noise <= answer.loss_noise * (1 + 1e-3)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("target", "same", "separate"), [(1.0, 8.28, 5.45), (3.0, 5.06, 1.88), (8.0, 3.53, 1.19)]
)
def test_loss_noise_in_the_paper_s_regime(target, same, separate):
    for kind, expected in (("same", same), ("separate", separate)):
        answer = hyfreedp_noise(0.02, 250, interval=5, epsilon=target, delta=1e-5, loss_batch=kind)
        assert answer.loss_noise == pytest.approx(expected, rel=5e-3)
        assert 0.999 * target <= answer.guarantee.epsilon <= target
        noise = {"gradient_noise": answer.gradient_noise, "loss_noise": answer.loss_noise}
        assert answer.event == hyfreedp_event(0.02, 250, interval=5, loss_batch=kind, **noise)
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


@pytest.mark.quick
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


@pytest.mark.quick
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
    with pytest.raises(InvalidInputError, match="gaussian or laplace"):
        hyfreedp_event(0.1, 7, interval=2, gradient_noise=1.0, loss_noise=2.0, mechanism="cauchy")
