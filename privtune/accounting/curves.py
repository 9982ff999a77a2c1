"""Rényi curves on one grid of orders, and their conversion to (ε, δ)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from privtune.accounting.runs import Binomial, NegativeBinomial, Poisson, RunLaw

__all__ = [
    "ORDERS",
    "mixture_curve",
    "pure_curve",
    "rdp_delta",
    "rdp_epsilon",
    "sampled_laplace_curve",
    "selection_curve",
]

Floats = NDArray[np.float64]

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


def mixture_curve(curves: Floats, weights: Floats) -> Floats:
    """Return the divergence of a public mixture whose component is shown."""
    scaled = (ORDERS - 1.0) * curves + np.log(weights)[:, None]
    return np.asarray(special.logsumexp(scaled, axis=0) / (ORDERS - 1.0)).clip(min=0.0)


def pure_curve(epsilon: float) -> Floats:
    """Return the exact curve of ε-DP (randomised response is the worst case).

    References:
        Bun and Steinke, arXiv:1605.02065, Proposition 3.3 and its proof.
    """
    log_p = -math.log1p(math.exp(-epsilon))
    log_q = log_p - epsilon
    first = ORDERS * log_p + (1.0 - ORDERS) * log_q
    second = ORDERS * log_q + (1.0 - ORDERS) * log_p
    return np.asarray(np.logaddexp(first, second) / (ORDERS - 1.0)).clip(0.0, epsilon)


def _log_sum(terms: Floats) -> float:
    top = float(terms.max())
    return top + math.log(float(np.exp(terms - top).sum()))


def sampled_laplace_curve(rate: float, scale: float, orders: Floats) -> Floats:
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
        shape = runs.shape_parameter
        extra = (1.0 + shape) * float(
            np.min((1.0 - 1.0 / orders) * curve - runs.log_gamma / orders)
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
