"""Rényi curves on one grid of orders, and their conversion to (ε, δ)."""

from __future__ import annotations

import math

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.joint import joint_curve, log_moments
from privtune.accounting.runs import Binomial, NegativeBinomial, Poisson, RunLaw

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
_MOST_PIECES = 4096  # of the unit interval; beyond, chords between whole orders are enough


def mixture_curve(curves: Floats, weights: Floats) -> Floats:
    """Return the divergence of a public mixture whose component is shown."""
    scaled = (ORDERS - 1.0) * curves + np.log(weights)[:, None]
    return np.asarray(sp.special.logsumexp(scaled, axis=0) / (ORDERS - 1.0)).clip(min=0.0)


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


def sampled_laplace_curve(rate: float, scale: float, orders: Floats) -> Floats:
    """Return the Rényi divergence of the Poisson-sampled Laplace release.

    Exact at whole orders, as those of `joint_curve` are, and at all orders without sampling.
    Between whole orders the outcome space splits into two half lines with constant loss and the
    unit interval, where a Gauss-Legendre rule of 12 nodes is used on pieces across which the
    exponent moves by at most 1: its relative error there is below 1e-20.
    """
    if rate == 1.0:
        values = log_moments(orders, math.inf, (scale,)) / (orders - 1.0)
    else:
        values = joint_curve(rate, math.inf, (scale,), orders)
        parted = orders != np.floor(orders)
        pieces = math.ceil(2.0 * float(orders[parted].max(initial=1.0)) / scale)
        if pieces <= _MOST_PIECES:
            values[parted] = _laplace_by_pieces(rate, scale, orders[parted], pieces)
    limit = float(np.log1p(rate * np.expm1(min(1.0 / scale, 600.0)))) if scale > 1 / 600 else np.inf
    return np.asarray(np.clip(values, 0.0, limit) + 4e-15 / (orders - 1.0))


def _laplace_by_pieces(rate: float, scale: float, orders: Floats, pieces: int) -> Floats:
    nodes, weights = np.polynomial.legendre.leggauss(12)
    edges = np.linspace(0.0, 1.0, pieces + 1)
    x = (((edges[1:] + edges[:-1]) / 2.0)[:, None] + nodes * 0.5 / pieces).ravel()
    log_weight = np.tile(np.log(weights * 0.5 / pieces), pieces)
    loss = np.concatenate([[-1.0], 2.0 * x - 1.0, [1.0]]) / scale
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + loss)
    ends = math.log(0.5)
    inside = -x / scale - math.log(2.0 * scale) + log_weight
    log_mass = np.concatenate([[ends], inside, [ends - 1.0 / scale]])
    return np.array([sp.special.logsumexp(a * log_ratio + log_mass) / (a - 1.0) for a in orders])


def selection_curve(curve: Floats, runs: RunLaw, orders: Floats = ORDERS) -> Floats:
    """Return the Rényi curve of a private selection over a base with this curve.

    References:
        Papernot and Steinke, arXiv:2110.03620, Theorem 2 (truncated negative binomial) and
        Theorem 6 (Poisson). Other laws, and capped ones, have no such theorem: infinite.
        Runs that are sure are composed with the selection among the drawn ones.
    """
    if runs.sure_runs:
        return np.asarray(runs.sure_runs * curve + selection_curve(curve, runs.drawn, orders))
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
