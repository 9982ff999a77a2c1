"""Rényi DP: exact curves of every event, their composition, and the conversion to (ε, δ).

autodp carries the composition: each part enters as a custom mechanism with our exact curve, and the
composed curve is read back on our grid of orders. Its own curves and conversions are not used. This
is the only module that imports autodp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from autodp.autodp_core import Mechanism
from autodp.transformer_zoo import Composition
from numpy.typing import NDArray
from scipy import special

from privtune.accounting.events import (
    ZCDP,
    ApproximateDP,
    Event,
    Gaussian,
    Laplace,
    NonPrivate,
    Parallel,
    PoissonSampled,
    PrivateSelection,
    SubsampledTuning,
    ThresholdSelection,
    WorstOf,
    flatten,
)
from privtune.accounting.runs import Binomial, Geometric, NegativeBinomial, Poisson, RunLaw
from privtune.accounting.subsampled import amplified_curve, split_curve
from privtune.errors import PrivTuneError

__all__ = ["ORDERS", "rdp_curve", "rdp_delta", "rdp_epsilon", "selection_curve"]

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]

ORDERS: Floats = np.unique(
    np.concatenate(
        [
            1.0 + np.geomspace(1e-3, 0.1, 15),
            np.arange(11.0, 110.0) / 10.0,
            np.arange(11.0, 64.0),
            np.round(np.geomspace(64.0, 4096.0, 49)),
        ]
    )
)
ORDERS.setflags(write=False)
_LEAST_NOISE = 0.05  # below it the grid gets long; whole orders alone are still an upper bound
_LOG_FACTORIAL: Floats = special.gammaln(np.arange(1.0, ORDERS[-1] + 2.0))


class _CurveMechanism(Mechanism):  # type: ignore[misc]
    """An autodp mechanism of which an RDP curve is known, and nothing else."""

    def __init__(self, name: str, curve: Curve) -> None:
        Mechanism.__init__(self)
        self.name = name
        self.params = {"name": name}
        self.propagate_updates(curve, "RDP")


def _tabulated(values: Floats) -> Curve:
    def curve(orders: Floats) -> Floats:
        index = np.searchsorted(ORDERS, orders)
        return values[index]

    return curve


def rdp_curve(event: Event) -> Floats:
    """Return an upper bound on the Rényi divergence at each of `ORDERS`, both directions.

    Raises:
        PrivTuneError: A value came out NaN or negative; no number is reported then.
    """
    parts = flatten(event)
    if not parts:
        return np.zeros_like(ORDERS)
    mechanisms, counts = [], []
    for number, (part, count) in enumerate(parts.items()):
        # autodp keys its bookkeeping by name; equal names would overwrite each other.
        mechanisms.append(_CurveMechanism(f"part{number}", _tabulated(_leaf_curve(part))))
        counts.append(count)
    composed = Composition()(mechanisms, counts)
    values = np.asarray(composed.get_RDP(ORDERS), dtype=np.float64)
    return _checked(values)


def _checked(values: Floats) -> Floats:
    if np.isnan(values).any() or (values < 0.0).any():
        raise PrivTuneError("a Rényi divergence came out NaN or negative; no number is reported.")
    return values


@lru_cache(maxsize=1024)
def _leaf_curve(event: Event) -> Floats:
    values = _checked(_compute_leaf(event))
    values.setflags(write=False)
    return values


def _compute_leaf(event: Event) -> Floats:
    if isinstance(event, NonPrivate):
        return np.full_like(ORDERS, np.inf)
    if isinstance(event, Gaussian):
        return ORDERS / (2.0 * event.noise_multiplier**2)
    if isinstance(event, Laplace):
        return _sampled_laplace(1.0, event.noise_multiplier, ORDERS)
    if isinstance(event, ZCDP):
        return event.rho * ORDERS
    if isinstance(event, PoissonSampled):
        inner = event.event
        if isinstance(inner, Laplace):
            return _sampled_laplace(event.rate, inner.noise_multiplier, ORDERS)
        if isinstance(inner, Gaussian):
            return sampled_gaussian_curve(event.rate, inner.noise_multiplier, ORDERS)
    if isinstance(event, ApproximateDP):
        if event.delta > 0.0:
            return np.full_like(ORDERS, np.inf)
        return _pure_curve(event.epsilon)
    if isinstance(event, WorstOf | Parallel):
        curves = np.stack([rdp_curve(child) for child in event.events])
        if isinstance(event, WorstOf) and event.weights is not None:
            return _mixture_curve(curves, np.asarray(event.weights))
        return np.asarray(curves.max(axis=0))
    if isinstance(event, PrivateSelection):
        return selection_curve(rdp_curve(event.event), event.runs)
    if isinstance(event, ThresholdSelection):
        # The best of K with K geometric and the score "passed or not", then post-processing.
        return selection_curve(rdp_curve(event.event), Geometric(1.0 / event.stop))
    if isinstance(event, SubsampledTuning):
        tuning, training = rdp_curve(event.tuning), rdp_curve(event.training)
        if event.variant == 1:
            return split_curve(ORDERS, tuning, training, event.rate)
        return amplified_curve(ORDERS, tuning, event.rate) + training
    raise PrivTuneError(f"no Rényi curve is known for {event.type}.")


def _mixture_curve(curves: Floats, weights: Floats) -> Floats:
    """Return the divergence of a public mixture whose component is shown."""
    scaled = (ORDERS - 1.0) * curves + np.log(weights)[:, None]
    return np.asarray(special.logsumexp(scaled, axis=0) / (ORDERS - 1.0)).clip(min=0.0)


def _pure_curve(epsilon: float) -> Floats:
    """Return the exact curve of ε-DP (randomised response is the worst case).

    References:
        Bun and Steinke, arXiv:1605.02065, Proposition 3.3 and its proof.
    """
    log_p = -math.log1p(math.exp(-epsilon))
    log_q = log_p - epsilon
    first = ORDERS * log_p + (1.0 - ORDERS) * log_q
    second = ORDERS * log_q + (1.0 - ORDERS) * log_p
    return np.asarray(np.logaddexp(first, second) / (ORDERS - 1.0)).clip(0.0, epsilon)


def sampled_gaussian_curve(rate: float, noise_multiplier: float, orders: Floats) -> Floats:
    """Return the exact Rényi divergence of the Poisson-sampled Gaussian at each order above 1.

    Whole orders by the binomial sum, others by the trapezoid rule, whose error on this analytic
    integrand is below exp(-36). The removal direction is the larger one.

    References:
        Mironov, Talwar, Zhang, arXiv:1908.10530, Section 3.3 and Theorem 5.
    """
    sigma = noise_multiplier
    if rate == 1.0:
        return np.asarray(orders / (2.0 * sigma**2))
    values = np.empty_like(orders)
    log_in, log_out = math.log(rate), math.log1p(-rate)
    whole = orders == np.floor(orders)
    values[~whole] = _fractional(rate, sigma, orders[~whole])
    for i in np.flatnonzero(whole):
        order = orders[i]
        k = np.arange(order + 1.0)
        log_factorial = _LOG_FACTORIAL[: k.size]
        log_terms = (
            log_factorial[-1]
            - log_factorial
            - log_factorial[::-1]
            + k * log_in
            + (order - k) * log_out
            + k * (k - 1.0) / (2.0 * sigma**2)
        )
        log_moment = _log_sum(log_terms)
        values[i] = log_moment / (order - 1.0)
    # log of a moment near 1 is known to 1e-15 only; that rounding is charged, never refunded.
    return np.asarray(np.maximum(values, 0.0) + 4e-15 / (orders - 1.0))


def _fractional(rate: float, sigma: float, orders: Floats) -> Floats:
    """Return the divergence at fractional orders, by the trapezoid rule on one common grid."""
    if orders.size == 0 or sigma < _LEAST_NOISE:
        return np.full_like(orders, np.inf)
    step = min(sigma / 3.0, 0.5 * sigma**2)
    x = np.arange(-13.0 * sigma, float(orders.max()) + 13.0 * sigma + step, step)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2.0 * x - 1.0) / (2.0 * sigma**2))
    log_density = -0.5 * (x / sigma) ** 2 - math.log(sigma * math.sqrt(2.0 * math.pi))
    terms = np.outer(orders, log_ratio) + log_density
    top = terms.max(axis=1)
    log_moment = top + np.log(np.exp(terms - top[:, None]).sum(axis=1)) + math.log(step)
    return np.asarray(log_moment / (orders - 1.0))


def _log_sum(terms: Floats) -> float:
    top = float(terms.max())
    return top + math.log(float(np.exp(terms - top).sum()))


def _sampled_laplace(rate: float, scale: float, orders: Floats) -> Floats:
    """Return the Rényi divergence of the Poisson-sampled Laplace release.

    The outcome space splits into two half lines with constant loss and the unit interval, where
    Gauss-Legendre quadrature is used on pieces no wider than a decay length.
    """
    pieces = max(math.ceil(2.0 * float(min(orders.max(), 512.0)) / scale), 1)
    pieces = min(pieces, 4096)
    nodes, weights = np.polynomial.legendre.leggauss(12)
    edges = np.linspace(0.0, 1.0, pieces + 1)
    x = ((edges[1:] + edges[:-1]) / 2.0)[:, None] + nodes * 0.5 / pieces
    log_weight = np.log(weights * 0.5 / pieces)[None, :]
    log_in = math.log(rate)
    log_out = math.log1p(-rate) if rate < 1.0 else -math.inf

    def log_ratio(shift: Floats | float) -> Floats:
        return np.asarray(np.logaddexp(log_out, log_in + shift))

    inner = log_ratio((2.0 * x - 1.0) / scale)
    log_density = -x / scale - math.log(2.0 * scale) + log_weight
    values = np.empty_like(orders)
    for i, order in enumerate(orders):
        terms = np.concatenate(
            [
                np.atleast_1d(order * log_ratio(-1.0 / scale) + math.log(0.5)),
                np.atleast_1d(order * log_ratio(1.0 / scale) + math.log(0.5) - 1.0 / scale),
                (order * inner + log_density).ravel(),
            ]
        )
        values[i] = _log_sum(terms) / (order - 1.0)
    limit = float(log_ratio(1.0 / scale))
    return np.asarray(np.clip(values, 0.0, limit) + 4e-15 / (orders - 1.0))


def selection_curve(curve: Floats, runs: RunLaw, orders: Floats = ORDERS) -> Floats:
    """Return the Rényi curve of a private selection over a base with this curve.

    References:
        Papernot and Steinke, arXiv:2110.03620, Theorem 2 (truncated negative binomial) and
        Theorem 6 (Poisson). Other laws, and capped ones, have no such theorem: infinite.
    """
    infinite = np.full_like(orders, np.inf)
    if runs.cap is not None or isinstance(runs, Binomial):
        return infinite
    if isinstance(runs, Poisson):
        mean = runs.mean
        if mean < 1.0:
            return infinite
        deltas = np.array([rdp_delta(curve, math.log1p(1.0 / (a - 1.0)), orders) for a in orders])
        values = curve + mean * deltas + math.log(mean) / (orders - 1.0)
    elif isinstance(runs, NegativeBinomial):
        shape, gamma = runs.shape_parameter, runs.gamma
        extra = (1.0 + shape) * float(
            np.min((1.0 - 1.0 / orders) * curve - math.log(gamma) / orders)
        )
        values = curve + extra + math.log(runs.expected_runs) / (orders - 1.0)
    else:
        return infinite
    # The true divergence grows with the order: a bound at a higher order holds at a lower one.
    return np.asarray(np.minimum.accumulate(values[::-1])[::-1])


def rdp_epsilon(curve: Floats, delta: float, orders: Floats = ORDERS) -> float:
    """Return the smallest ε that any order of the curve gives at this delta.

    References:
        Canonne, Kamath, Steinke, arXiv:2004.00010, Proposition 12; and for tiny curves
        δ <= sqrt(1 - exp(-KL)) (Bretagnolle and Huber).
    """
    with np.errstate(invalid="ignore"):
        if bool((np.sqrt(-np.expm1(-curve)) <= delta).any()):
            return 0.0
        values = curve + np.log1p(-1.0 / orders) - np.log(delta * orders) / (orders - 1.0)
    return max(float(values.min()), 0.0)


def rdp_delta(curve: Floats, epsilon: float, orders: Floats = ORDERS) -> float:
    """Return the smallest δ that any order of the curve gives at this epsilon."""
    with np.errstate(invalid="ignore", over="ignore"):
        log_delta = (orders - 1.0) * (curve - epsilon + np.log1p(-1.0 / orders)) - np.log(orders)
        kl = float(np.sqrt(-np.expm1(-curve)).min())
    return min(math.exp(min(float(log_delta.min()), 0.0)), kl, 1.0)
