"""Rényi curves against quadrature, dp-accounting and Opacus; conversions against closed forms."""

import math
import subprocess
import sys

import mpmath
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy import integrate
from scipy.special import gammaln, logsumexp

import privtune.accounting as dp
from privtune.accounting.curves import (
    ORDERS,
    rdp_delta,
    rdp_epsilon,
    sampled_gaussian_curve,
    sampled_gaussian_curves,
    sampled_laplace_curve,
    selection_curve,
)
from privtune.accounting.rdp import composed_by_autodp, confirm_composition, rdp_curve
from privtune.accounting.registry import ENTRIES
from privtune.errors import PrivTuneError
from tests.accounting.helpers import steps

# dp-accounting takes absolute values in the series of fractional orders, which is looser; on whole
# orders both are exact.
WHOLE = ORDERS[(np.floor(ORDERS) == ORDERS) & (ORDERS <= 512)]


def quadrature(log_p, log_q, order, reach):
    def density(x):
        return math.exp(order * log_p(x) + (1 - order) * log_q(x))

    value, _ = integrate.quad(density, -reach, reach + order, limit=800, epsabs=0, epsrel=1e-11)
    return math.log(value) / (order - 1)


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 0.7), (0.001, 2.0), (0.9, 3.0)])
@pytest.mark.parametrize("order", [1.1, 1.75, 2.0, 3.5, 8.0])
def test_sampled_gaussian_by_quadrature(rate, noise, order):
    def log_q(x):
        return -0.5 * (x / noise) ** 2 - math.log(noise * math.sqrt(2 * math.pi))

    def log_p(x):
        return log_q(x) + np.logaddexp(
            math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2)
        )

    ours = sampled_gaussian_curve(rate, noise, np.array([order]))[0]
    reach = 12 * noise
    assert ours == pytest.approx(quadrature(log_p, log_q, order, reach), rel=1e-7, abs=1e-13)
    # The other direction is never the larger one.
    assert ours >= quadrature(log_q, log_p, order, reach) - 1e-12


@pytest.mark.parametrize("rate", [1e-6, 0.02, 0.99])
@pytest.mark.parametrize("noise", [0.02, 1.0, 11.0, 100.0])
def test_both_ends_bound_the_whole_binomial_sum(rate, noise):
    """High orders leave out the middle of the sum, never below the sum and hardly above it."""
    values = sampled_gaussian_curve(rate, noise, WHOLE)
    for order, value in zip(WHOLE, values, strict=True):
        k = np.arange(order + 1)
        log_choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = log_choose + k * math.log(rate) + (order - k) * math.log1p(-rate)
        exact = logsumexp(terms + k * (k - 1) / (2 * noise**2)) / (order - 1)
        assert exact * (1 - 1e-10) - 1e-13 <= value <= exact * (1 + 1e-10) + 1e-13


@pytest.mark.parametrize(
    ("rate", "noise", "order"),
    [(4e-4, 76.0, 200), (4e-4, 76.0, 600), (8e-4, 50.0, 600), (0.08, 60.0, 131), (8e-4, 1.01, 16)],
)
def test_no_rounding_leaves_a_moment_below_the_exact_one(rate, noise, order):
    with mpmath.workdps(50):
        q, s = mpmath.mpf(rate), mpmath.mpf(noise)
        moment = mpmath.fsum(
            math.comb(order, k)
            * (1 - q) ** (order - k)
            * q**k
            * mpmath.exp(k * (k - 1) / (2 * s**2))
            for k in range(order + 1)
        )
        exact = mpmath.log(moment) / (order - 1)
        value = sampled_gaussian_curve(rate, noise, np.array([float(order)]))[0]
        assert exact <= value <= exact * (1 + mpmath.mpf("1e-7")) + mpmath.mpf("1e-14")


def test_many_curves_at_once_are_the_curves_one_by_one():
    rng = np.random.default_rng(7)
    rates = np.append(rng.uniform(1e-4, 0.3, 300), [1.0, 1e-6])
    noises = np.append(rng.uniform(0.3, 12.0, 300), [2.0, 0.04])
    together = sampled_gaussian_curves(rates, noises, ORDERS)
    assert together.shape == (302, ORDERS.size)
    for i in (0, 17, 150, 299, 300, 301):
        alone = sampled_gaussian_curve(rates[i], noises[i], ORDERS)
        np.testing.assert_allclose(together[i], alone, rtol=1e-11)
    np.testing.assert_allclose(together[300], ORDERS / 8.0)


@pytest.mark.parametrize(("rate", "scale"), [(1.0, 1.0), (0.1, 0.5), (0.3, 3.0)])
def test_sampled_laplace_by_quadrature(rate, scale):
    def log_q(x):
        return -abs(x) / scale - math.log(2 * scale)

    def log_p(x):
        other = -abs(x - 1) / scale - math.log(2 * scale)
        if rate == 1.0:
            return other
        return np.logaddexp(math.log1p(-rate) + log_q(x), math.log(rate) + other)

    curve = rdp_curve(dp.PoissonSampled(rate, dp.Laplace(scale)))
    for order in (1.5, 2.0, 5.0, 20.0):
        index = int(np.argmin(np.abs(ORDERS - order)))

        def density(x, order=float(ORDERS[index])):
            return math.exp(order * log_p(x) + (1 - order) * log_q(x))

        pieces = [(-60 * scale, 0), (0, 1), (1, 1 + 60 * scale)]
        total = sum(integrate.quad(density, a, b, epsabs=0, epsrel=1e-11)[0] for a, b in pieces)
        expected = math.log(total) / (ORDERS[index] - 1)
        assert curve[index] == pytest.approx(expected, rel=1e-7)


def dp_accounting_epsilon(event, delta):
    accountant = RdpAccountant(orders=ORDERS)
    accountant.compose(event)
    return accountant.get_epsilon(delta)


def reference_steps(rate, noise, count):
    return dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise)), count
    )


SHAPES = [0.0, 3.0, math.inf]
MEANS = [2.0, 40.0]
BASES = [(256 / 60000, 1.0, 2340), (0.05, 2.0, 400), (0.5, 8.0, 50)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("base", BASES[:2])
def test_selection_equals_repeat_and_select(shape, mean, base):
    """Papernot and Steinke, Theorems 2 and 6, on 12 settings."""
    runs = dp.Poisson(mean) if math.isinf(shape) else dp.TruncatedNegativeBinomial(shape, mean)
    curve = rdp_curve(steps(*base))
    event = dp_event.RepeatAndSelectDpEvent(reference_steps(*base), mean, shape)
    accountant = RdpAccountant(orders=WHOLE)
    accountant.compose(event)
    tuned = selection_curve(curve[np.isin(ORDERS, WHOLE)], runs, WHOLE)
    assert rdp_epsilon(tuned, 1e-5, WHOLE) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    full = dp.epsilon(dp.PrivateSelection(steps(*base), runs), 1e-5, method="rdp").epsilon
    assert full <= dp_accounting_epsilon(event, 1e-5) * (1 + 1e-6)


@pytest.mark.parametrize("base", [*BASES, (0.01, 0.3, 100), (1e-4, 1.0, 100_000)])
def test_sampled_gaussian_agrees_with_dp_accounting(base):
    reference = dp_accounting_epsilon(reference_steps(*base), 1e-5)
    ours = dp.epsilon(steps(*base), 1e-5, method="rdp").epsilon
    assert ours <= reference * (1 + 1e-6)
    assert ours == pytest.approx(reference, rel=2e-3)


def test_sums_of_curves_are_autodps_composition():
    counts = {
        dp.PoissonSampled(0.01, dp.Gaussian(1.1)): 1000,
        dp.Laplace(2.0): 3,
        dp.Gaussian(4.0): 1,
        dp.PrivateSelection(dp.Repeated(10, dp.Gaussian(9.0)), dp.Geometric(mean=5)): 2,
    }
    ours = rdp_curve(dp.Composed([dp.Repeated(count, event) for event, count in counts.items()]))
    np.testing.assert_allclose(ours, composed_by_autodp(counts), rtol=1e-12)
    confirm_composition(frozenset(counts.items()), dp.Adjacency.ADD_REMOVE)


def test_nothing_is_charged_where_autodp_composes_otherwise(monkeypatch, tmp_path):
    """A witness that never objects proves nothing: a term is lost on either side."""
    from privtune.ledger import Budget, ChargeRequest, Ledger

    whole = dp.rdp.composed_curve
    confirm_composition.cache_clear()
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.create_budget(Budget(8.0, 1e-5, name="b"))
        monkeypatch.setattr(dp.rdp, "composed_curve", lambda parts: whole(parts) * (1 - 1e-6))
        with pytest.raises(PrivTuneError, match="autodp composes"):
            ledger.reserve("b", [ChargeRequest(dp.Gaussian(4.5))])
        assert ledger.charges("b") == ()
        monkeypatch.setattr(dp.rdp, "composed_curve", whole)
        ledger.reserve("b", [ChargeRequest(dp.Gaussian(4.5))])


def test_orders_below_two_are_used():
    # autodp replaces orders below 2 by order 2: 214 where 32 is right.
    assert dp.epsilon(steps(0.01, 0.3, 100), 1e-5, method="rdp").epsilon < 33


def test_a_negative_or_undefined_divergence_is_an_error(monkeypatch):

    for bad in (-1e-3, math.nan):
        wrong = np.full(ORDERS.size, bad)
        monkeypatch.setattr(ENTRIES[dp.Gaussian], "curve", lambda _e, _of, wrong=wrong: wrong)
        dp.rdp._leaf_curve.cache_clear()
        with pytest.raises(PrivTuneError, match="no number is reported"):
            rdp_curve(dp.Gaussian(1.2345))
    dp.rdp._leaf_curve.cache_clear()


def test_pure_dp_curve_is_that_of_randomised_response():
    curve = rdp_curve(dp.ApproximateDP(1.0, 0.0))
    p = math.e / (1 + math.e)
    for i in (0, 40, 100):
        a = ORDERS[i]
        exact = math.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1)
        assert curve[i] == pytest.approx(exact, rel=1e-9)
    assert curve.max() <= 1.0


def test_conversions_are_inverse_and_above_the_truth():
    curve = rdp_curve(dp.ZCDP(0.5))  # sigma = 1
    value = rdp_epsilon(curve, 1e-5)
    assert rdp_delta(curve, value) == pytest.approx(1e-5, rel=1e-6)
    assert 4.377178 <= value <= 4.80


@pytest.mark.parametrize(
    ("rate", "scale"), [(1e-4, 0.05), (1e-4, 30.0), (0.05, 0.5), (0.9, 0.05), (0.9, 30.0)]
)
def test_a_sampled_laplace_release_is_on_the_safe_side(rate, scale):
    """Whole orders against the sum in 60 digits; a quadrature was low by 8e-11 at order 4096."""
    with mpmath.workdps(60):
        b, q = mpmath.mpf(scale), mpmath.mpf(rate)
        for order in (12, 64, 512, 4096):
            total = mpmath.mpf(0)
            term = (1 - q) ** order  # C(order, k) (1-q)^(order-k) q^k
            for k in range(order + 1):
                moment = (
                    (k * mpmath.exp((k - 1) / b) + (k - 1) * mpmath.exp(-k / b)) / (2 * k - 1)
                    if k
                    else mpmath.mpf(1)
                )
                total += term * moment
                term *= mpmath.mpf(order - k) / (k + 1) * q / (1 - q)
            exact = mpmath.log(total) / (order - 1)
            ours = sampled_laplace_curve(rate, scale, np.array([float(order)]))[0]
            assert exact * (1 - 2e-12) <= ours <= exact * (1 + 1e-11) + 2e-14


def test_a_margin_is_added_to_what_renyi_reports():
    event = steps(0.02, 1.0, 300)
    plain = rdp_epsilon(rdp_curve(event), 1e-5)
    reported = dp.epsilon(event, 1e-5, method="rdp").epsilon
    assert plain * (1 + 1e-9) < reported < plain * (1 + 2.1e-9)


def test_what_fails_outright_has_no_renyi_bound():
    """With mass 1e-3 it may show everything: no ε is enough at a smaller δ, by any bound."""
    event = dp.ApproximateDP(1.0, 1e-3)
    assert dp.epsilon(event, 1e-5, method="rdp").epsilon == math.inf
    assert dp.epsilon(event, 1e-5).epsilon == math.inf


_COMPOSE = """
import sys
{first}
import privtune.accounting as dp
from privtune.accounting.events import flatten
from privtune.accounting.rdp import composed_by_autodp

training = dp.Repeated(300, dp.PoissonSampled(0.02, dp.Gaussian(1.1)))
event = dp.Composed((training, dp.Gaussian(4.0), dp.Laplace(9.0)))
curve = composed_by_autodp(flatten(event))
names = ("scipy.stats", "scipy.optimize")
print(sum(name in sys.modules for name in names), curve.tobytes().hex())
import scipy.optimize
import scipy.stats
from autodp import converter, utils
least = converter.minimize_scalar(lambda x: (x - 3.0) ** 2)
assert least.x == scipy.optimize.minimize_scalar(lambda x: (x - 3.0) ** 2).x
assert utils.norm.logcdf(-3.25) == scipy.stats.norm.logcdf(-3.25)
"""


def test_autodp_composes_the_same_without_the_libraries_that_it_does_not_use():
    answers = []
    for first in ("", "import scipy.optimize, scipy.stats"):
        command = [sys.executable, "-c", _COMPOSE.format(first=first)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        imported, curve = done.stdout.split()
        answers.append(curve)
        assert imported == str(2 * bool(first))
    assert answers[0] == answers[1]
