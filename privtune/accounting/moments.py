"""Exact Rényi curves of Poisson-sampled Gaussians, many at once.

A thousand different charges need a thousand curves. They are computed together, order by order, as
matrices in log space whose size is bounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy as sp
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LEAST_NOISE = 0.05  # below it the grid gets long; whole orders alone are still an upper bound
_SIDE = 64  # terms at either end of a binomial sum that are computed one by one, at least
_ROUNDING = 1e-15  # of a log factorial, relatively
_CELLS = 2**17  # of one matrix: 1 MB


def _log_factorial(n: NDArray[np.int64]) -> Floats:
    return np.asarray(sp.special.gammaln(n + 1.0))


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
    sides = _SIDE * 2.0 ** np.ceil(np.log2(np.maximum(4.0 * sigmas**2 / _SIDE, 1.0)))
    sides = np.minimum(sides, 2.0 * orders[-1])  # more terms than that there are not
    for side in np.unique(sides):
        alike = rest[sides == side]
        values[np.ix_(alike, whole)] = _whole(
            factors[sides == side], tuple(orders[whole].astype(int).tolist()), int(side)
        )
    # log of a moment near 1 is known to 1e-15 only; that rounding is charged, never refunded.
    values[rest] = np.maximum(values[rest], 0.0) * (1.0 + 1e-14) + 4e-15 / (orders - 1.0)
    return values


@dataclass(frozen=True, eq=False)
class _Terms:
    """Terms of the sums of orders whose sums are about as long, and are cut alike or not at all.

    Args:
        place: Of the orders among all.
        multipliers: What multiplies the three factors, shape ``[3, orders, terms]``.
        log_choose: log C(n, k), ``[orders, terms]``; -inf where an order has no such term.
        between: How many terms of each order are left out in the middle.
        order: Less 1, what the logarithm is divided by.
    """

    place: NDArray[np.int64]
    multipliers: Floats
    log_choose: Floats
    between: Floats
    order: Floats


@lru_cache(maxsize=64)
def _terms(orders: tuple[int, ...], side: int) -> list[_Terms]:
    """Return the terms of all orders: both ends of a sum, or all of it where these meet."""
    groups: dict[int, list[int]] = {}
    for place, order in enumerate(orders):
        cut = 2 * side + 2 <= order
        groups.setdefault(0 if cut else order.bit_length(), []).append(place)
    found = []
    for length, places in groups.items():
        n = np.array([orders[place] for place in places])[:, None]
        if length:
            k = np.arange(int(n.max()) + 1)[None, :]
        else:
            ends = np.arange(side + 1)
            k = np.concatenate([np.broadcast_to(ends, (n.size, ends.size)), n - ends[::-1]], axis=1)
        is_term = k <= n
        k, rest = np.where(is_term, k, 0), np.where(is_term, n - k, 0)
        log_choose = _log_factorial(n) - _log_factorial(k) - _log_factorial(rest)
        # Of a difference of large logarithms the rounding is charged, too; at the ends there is none.
        log_choose += np.where((k > 0) & (rest > 0), _ROUNDING * _log_factorial(n), 0.0)
        found.append(
            _Terms(
                np.array(places),
                np.stack([k, rest, k * (k - 1.0)]).astype(np.float64),
                np.where(is_term, log_choose, -np.inf),
                (n[:, 0] + 1.0) - is_term.sum(axis=1),
                n[:, 0] - 1.0,
            )
        )
    return found


def _whole(factors: Floats, orders: tuple[int, ...], side: int) -> Floats:
    """Return the divergence at whole orders, a row for each row of factors.

    The logarithms of the terms are convex in k where `k (n-k)/n >= σ²`, as then the second
    difference of `log C(n, k)`, at least `-(1/k + 1/(n-k))`, is outweighed by that of
    `k (k-1)/2σ²`. Between two such points every term is at most the larger of the terms at these
    points. So only both ends of the sum are computed term by term, `4σ²` terms and 64 at least.
    """
    result = np.empty((factors.shape[0], len(orders)))
    for group in _terms(orders, side):
        rows = max(_CELLS // group.log_choose.size, 1)
        for start in range(0, factors.shape[0], rows):
            own = factors[start : start + rows]
            # One product after the other: what a row is does not hang on how many there are.
            terms = own[:, 0, None, None] * group.multipliers[0]
            terms += own[:, 1, None, None] * group.multipliers[1]
            terms += own[:, 2, None, None] * group.multipliers[2]
            terms += group.log_choose
            top = terms.max(axis=2)
            middle = terms.shape[2] // 2
            inner = np.maximum(terms[..., middle - 1], terms[..., middle]) - top
            terms -= top[..., None]
            moment = np.exp(terms, out=terms).sum(axis=2) + group.between * np.exp(inner)
            result[start : start + rows, group.place] = (top + np.log(moment)) / group.order
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
