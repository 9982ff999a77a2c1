"""Exact Rényi curves of Poisson-sampled Gaussians, many at once.

A thousand different charges need a thousand curves. They are computed together, order by order, as
matrices in log space whose size is bounded.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import scipy as sp
from numpy.typing import NDArray

__all__ = ["sampled_gaussian_curve", "sampled_gaussian_curves"]

Floats = NDArray[np.float64]

_LEAST_NOISE = 0.05  # below it the grid gets long; whole orders alone are still an upper bound
_SIDE = 64  # terms at either end of a binomial sum that are computed one by one, at least
_CELLS = 2**17  # of one matrix: 1 MB


@lru_cache(maxsize=1)
def _log_factorial() -> Floats:
    return np.asarray(sp.special.gammaln(np.arange(1.0, 4098.0)))


def sampled_gaussian_curve(rate: float, noise_multiplier: float, orders: Floats) -> Floats:
    """Return the Rényi divergence of one Poisson-sampled Gaussian at each order above 1."""
    curves = sampled_gaussian_curves(np.array([rate]), np.array([noise_multiplier]), orders)
    return np.asarray(curves[0])


def sampled_gaussian_curves(rates: Floats, noise_multipliers: Floats, orders: Floats) -> Floats:
    """Return the Rényi divergence of many Poisson-sampled Gaussians, one row for each.

    Whole orders by the binomial sum, others by the trapezoid rule, whose error on this analytic
    integrand is below exp(-36). The removal direction is the larger one.

    Args:
        rates: Sampling rates in (0, 1].
        noise_multipliers: Above 0, of the same length.
        orders: Above 1, ascending.

    Returns:
        An array of shape `[rates, orders]`.

    Guarantee:
        Every value is an upper bound on the divergence in both directions.

    References:
        Mironov, Talwar, Zhang, arXiv:1908.10530, Section 3.3 and Theorem 5.
    """
    values = np.empty((rates.size, orders.size))
    full = rates == 1.0
    values[full] = orders / (2.0 * noise_multipliers[full, None] ** 2)
    whole = orders == np.floor(orders)
    rest = np.flatnonzero(~full)
    rest = rest[np.argsort(noise_multipliers[rest], kind="stable")]  # rows of a block are alike
    for i in rest:
        values[i, ~whole] = _fractional(
            float(rates[i]), float(noise_multipliers[i]), orders[~whole]
        )
    sigmas = noise_multipliers[rest]
    factors = np.stack([np.log(rates[rest]), np.log1p(-rates[rest]), 0.5 / sigmas**2], axis=1)
    for j in np.flatnonzero(whole):
        values[rest, j] = _whole(factors, sigmas, int(orders[j]))
    # log of a moment near 1 is known to 1e-15 only; that rounding is charged, never refunded.
    values[rest] = np.maximum(values[rest], 0.0) + 4e-15 / (orders - 1.0)
    return values


@lru_cache(maxsize=1024)
def _terms(order: int, side: int) -> tuple[Floats, Floats, int]:
    """Return what multiplies the factors, log C(n, k), and how many terms are left out between."""
    if 2 * side + 2 <= order:
        k = np.concatenate([np.arange(side + 1), np.arange(order - side, order + 1)])
    else:
        k = np.arange(order + 1)
    log_factorial = _log_factorial()
    if order >= log_factorial.size:
        log_factorial = sp.special.gammaln(np.arange(1.0, order + 2.0))
    log_choose = log_factorial[order] - log_factorial[k] - log_factorial[order - k]
    return (
        np.stack([k, order - k, k * (k - 1.0)]).astype(np.float64),
        log_choose,
        order + 1 - k.size,
    )


def _whole(factors: Floats, sigmas: Floats, order: int) -> Floats:
    """Return the divergence at one whole order, noise multipliers ascending.

    The logarithms of the terms are convex in k where `k (n-k)/n >= σ²`, as then the second
    difference of `log C(n, k)`, at least `-(1/k + 1/(n-k))`, is outweighed by that of
    `k (k-1)/2σ²`. Between two such points every term is at most the larger of the terms at these
    points. So only both ends of the sum are computed term by term, `4σ²` terms and 64 at least.
    """
    result = np.empty(sigmas.size)
    start = 0
    while start < sigmas.size:
        end = min(start + max(_CELLS // (2 * _SIDE + 1), 1), sigmas.size)
        side = _SIDE
        while side < min(4.0 * sigmas[end - 1] ** 2, order):
            side *= 2
        multipliers, log_choose, between = _terms(order, side)
        width = log_choose.size
        end = min(end, start + max(_CELLS // width, 1))
        terms = factors[start:end] @ multipliers
        terms += log_choose
        top = terms.max(axis=1)
        inner = np.maximum(terms[:, width // 2 - 1], terms[:, width // 2]) - top
        terms -= top[:, None]
        moment = np.exp(terms, out=terms).sum(axis=1) + between * np.exp(inner)
        result[start:end] = (top + np.log(moment)) / (order - 1.0)
        start = end
    return result


def _fractional(rate: float, sigma: float, orders: Floats) -> Floats:
    """Return the divergence at fractional orders, by the trapezoid rule on one common grid."""
    if orders.size == 0 or sigma < _LEAST_NOISE:
        return np.full_like(orders, np.inf)
    step = min(sigma / 3.0, 0.5 * sigma**2)
    x = np.arange(-13.0 * sigma, float(orders.max()) + 13.0 * sigma + step, step)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2.0 * x - 1.0) / (2.0 * sigma**2))
    log_density = -0.5 * (x / sigma) ** 2 - math.log(sigma * math.sqrt(2.0 * math.pi))
    terms = np.outer(orders, log_ratio)
    terms += log_density
    top = terms.max(axis=1)
    terms -= top[:, None]
    log_moment = top + np.log(np.exp(terms, out=terms).sum(axis=1)) + math.log(step)
    return np.asarray(log_moment / (orders - 1.0))
