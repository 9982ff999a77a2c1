"""Rényi curves of releases and selections on one grid of orders, and conversion to (ε, δ).

Proofs are in `accounting/README.md`, sections 4 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.runs import Binomial, NegativeBinomial, Poisson, RunLaw

Floats = NDArray[np.float64]

_LEAST_NOISE = 0.05  # below it the grid gets long; integer orders alone are still an upper bound
_SIDE = 64  # terms at either end of a binomial sum that are computed one by one, at least
_ROUNDING = 1e-15  # of a log factorial, relatively
_CELLS = 2**17  # of one matrix: 1 MB


def _log_factorial(n: NDArray[Any]) -> Floats:
    """Return log n! for each n, also for a float."""
    return np.asarray(sp.special.gammaln(n + 1.0))


def _log_choose(n: Floats, k: Floats) -> Floats:
    """Return the log of the binomial coefficient "n over k"."""
    ordered = _log_factorial(n) - _log_factorial(k)
    return ordered - _log_factorial(n - k)


def sampled_gaussian_curve(
    rate: float,
    noise_multiplier: float,
    orders: Floats,
) -> Floats:
    """Return the Rényi divergence of one Poisson-sampled Gaussian at each order above 1."""
    rates = np.array([rate])
    noise_multipliers = np.array([noise_multiplier])
    curves = sampled_gaussian_curves(rates, noise_multipliers, orders)
    return np.asarray(curves[0])


def sampled_gaussian_curves(
    rates: Floats,
    noise_multipliers: Floats,
    orders: Floats,
) -> Floats:
    """Return the Rényi divergences of many Poisson-sampled Gaussians, one row for each.

    Args:
        rates: Sampling probabilities in (0, 1], shape ``[n]``.
        noise_multipliers: σ of each, shape ``[n]``.
        orders: Orders α above 1, ascending, shape ``[k]``.

    Returns:
        One row for each Gaussian, shape ``[n, k]``.

    References:
        Mironov, Talwar, Zhang, arXiv:1908.10530, Section 3.3; by Theorem 5 the removal direction is
        the larger.
    """
    values = np.empty((rates.size, orders.size))
    unsampled = rates == 1.0
    sigmas = noise_multipliers[unsampled, None]
    values[unsampled] = orders / (2.0 * sigmas**2)
    rows = np.flatnonzero(~unsampled)
    # Sorted by noise, so that the rows of a block have sums of about as many terms.
    by_noise = np.argsort(noise_multipliers[rows], kind="stable")
    rows = rows[by_noise]
    is_integer = orders == np.floor(orders)
    fractional = orders[~is_integer]
    for row in rows:
        rate = float(rates[row])
        sigma = float(noise_multipliers[row])
        values[row, ~is_integer] = _fractional_orders(rate, sigma, fractional)
    integers = orders[is_integer].astype(int).tolist()
    factors = _term_factors(rates[rows], noise_multipliers[rows])
    largest = float(orders[-1])
    sides = _terms_a_side(noise_multipliers[rows], largest)
    for side in np.unique(sides):
        alike = sides == side
        block = np.ix_(rows[alike], is_integer)
        values[block] = _integer_orders(
            factors[alike],
            tuple(integers),
            int(side),
        )
    # log of a moment near 1 is known to 1e-15 only; that rounding is charged, never refunded.
    at_least_zero = np.maximum(values[rows], 0.0)
    values[rows] = at_least_zero * (1.0 + 1e-14) + 4e-15 / (orders - 1.0)
    return values


def _term_factors(rates: Floats, sigmas: Floats) -> Floats:
    """Return log q, log(1-q) and 1/(2σ²) of each Gaussian, one row each."""
    columns = (
        np.log(rates),
        np.log1p(-rates),
        0.5 / sigmas**2,
    )
    return np.stack(columns, axis=1)


def _terms_a_side(sigmas: Floats, largest_order: float) -> Floats:
    """Return the number of terms computed at either end of each binomial sum: 4σ² or more."""
    least_sides = 4.0 * sigmas**2 / _SIDE
    doublings = np.log2(np.maximum(least_sides, 1.0))
    sides = _SIDE * 2.0 ** np.ceil(doublings)
    # More terms than that there are not.
    return np.minimum(sides, 2.0 * largest_order)


@dataclass(frozen=True, eq=False)
class _BinomialTerms:
    """The terms of binomial sums for integer orders of similar size, as one array.

    Attributes:
        columns: Where the orders stand among all integer orders, shape ``[n]``.
        multipliers: k, α - k and k (k-1) of every term, shape ``[3, n, terms]``.
        log_choose: Log of "α over k"; -inf where an order has no such term.
        skipped: How many terms in the middle are bounded and not computed.
        divisor: α - 1.
    """

    columns: NDArray[np.int64]
    multipliers: Floats
    log_choose: Floats
    skipped: Floats
    divisor: Floats


@lru_cache(maxsize=64)
def _terms(orders: tuple[int, ...], side: int) -> list[_BinomialTerms]:
    """Return the terms of each order's binomial sum by groups: all of a short sum, else both ends."""
    groups: dict[int, list[int]] = {}
    for column, order in enumerate(orders):
        is_long = 2 * side + 2 <= order
        length = 0 if is_long else order.bit_length()
        groups.setdefault(length, []).append(column)
    terms = []
    for length, columns in groups.items():
        n = np.array([orders[column] for column in columns])[:, None]
        if length:
            every_term = np.arange(int(n.max()) + 1)
            k = every_term[None, :]
        else:
            k = _both_ends(n, side)
        terms.append(_group_terms(columns, n, k))
    return terms


def _both_ends(n: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    """Return k = 0, ..., side and n - side, ..., n for each n of a column, one row each."""
    first = np.arange(side + 1)
    low = np.broadcast_to(first, (n.size, first.size))
    high = n - first[::-1]
    return np.concatenate([low, high], axis=1)


def _group_terms(
    columns: list[int],
    n: NDArray[np.int64],
    k: NDArray[np.int64],
) -> _BinomialTerms:
    """Return the terms k of the binomial sums of orders n; a term k > n counts nothing.

    Args:
        columns: Where the orders stand among all integer orders.
        n: The orders, shape ``[n, 1]``.
        k: Numbers of the terms, shape ``[1, terms]`` or ``[n, terms]``.
    """
    is_term = k <= n
    rest = np.where(is_term, n - k, 0)
    k = np.where(is_term, k, 0)
    log_choose = _log_factorial(n) - _log_factorial(k) - _log_factorial(rest)
    # Of a difference of large logarithms the rounding is charged, too; at the ends there is none.
    is_inside = (k > 0) & (rest > 0)
    log_choose += np.where(is_inside, _ROUNDING * _log_factorial(n), 0.0)
    multipliers = np.stack([k, rest, k * (k - 1.0)])
    return _BinomialTerms(
        columns=np.array(columns),
        multipliers=multipliers.astype(np.float64),
        log_choose=np.where(is_term, log_choose, -np.inf),
        skipped=(n[:, 0] + 1.0) - is_term.sum(axis=1),
        divisor=np.asarray(n[:, 0] - 1.0, dtype=np.float64),
    )


def _integer_orders(
    factors: Floats,
    orders: tuple[int, ...],
    side: int,
) -> Floats:
    """Return Rényi divergences of sampled Gaussians at integer orders, one row for each Gaussian.

    Args:
        factors: Of `_term_factors`, shape ``[rows, 3]``.
        orders: Integer orders from 2 on.
        side: Terms at either end of a long sum.

    Returns:
        Shape ``[rows, orders]``.
    """
    # Where k (n-k)/n >= σ² the log terms are convex in k: between two such points each is at most the larger
    # of these two. So only both ends of the sum, of 4σ² and at least 64 terms, are computed one by one.
    result = np.empty((factors.shape[0], len(orders)))
    for group in _terms(orders, side):
        rows = max(_CELLS // group.log_choose.size, 1)
        for start in range(0, factors.shape[0], rows):
            block = slice(start, start + rows)
            log_moments = _log_binomial_sums(factors[block], group)
            result[block, group.columns] = log_moments / group.divisor
    return result


def _log_binomial_sums(factors: Floats, group: _BinomialTerms) -> Floats:
    """Return log E_Q[L^α] of each Gaussian (rows) at each order of a group (columns).

    The largest term is taken out of each sum, so that no exponential overflows.
    """
    log_in = factors[:, 0, None, None]
    log_out = factors[:, 1, None, None]
    half_precision = factors[:, 2, None, None]
    # One product after the other: what a row is does not hang on how many there are.
    terms = log_in * group.multipliers[0]
    terms += log_out * group.multipliers[1]
    terms += half_precision * group.multipliers[2]
    terms += group.log_choose
    top = terms.max(axis=2)
    middle = terms.shape[2] // 2
    largest_inside = np.maximum(terms[..., middle - 1], terms[..., middle])
    inside = np.exp(largest_inside - top)
    terms -= top[..., None]
    ends = np.exp(terms, out=terms).sum(axis=2)
    moment = ends + group.skipped * inside
    return np.asarray(top + np.log(moment))


def _fractional_orders(
    rate: float,
    sigma: float,
    orders: Floats,
) -> Floats:
    """Return Rényi divergences of one sampled Gaussian at fractional orders, by trapezoids.

    The trapezoid rule of an analytic function that falls like a Gaussian converges faster than any power of
    the step: at these steps its error is below 1e-16.
    """
    if orders.size == 0 or sigma < _LEAST_NOISE:
        return np.full_like(orders, np.inf)
    step = min(sigma / 3.0, 0.5 * sigma**2)
    reach = 13.0 * sigma
    largest = float(orders.max())
    x = np.arange(-reach, largest + reach + step, step)
    loss = (2.0 * x - 1.0) / (2.0 * sigma**2)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + loss)
    norm = sigma * math.sqrt(2.0 * math.pi)
    log_density = -0.5 * (x / sigma) ** 2 - math.log(norm)
    terms = np.outer(orders, log_ratio)
    terms += log_density
    top = terms.max(axis=1)
    terms -= top[:, None]
    sums = np.exp(terms, out=terms).sum(axis=1)
    log_moment = top + np.log(sums) + math.log(step)
    return np.asarray(log_moment / (orders - 1.0))


Curve = Callable[[Floats], Floats]
_MAX_ORDER = 256  # of the curves of tuning on a subset


def interpolated(orders: Floats, values: Floats) -> Curve:
    """Return an upper bound on a Rényi curve between known orders, by chords of `(α-1) D_α`."""
    grid = np.concatenate([[1.0], orders])
    weighted = np.concatenate([[0.0], (orders - 1.0) * values])

    def curve(at: Floats) -> Floats:
        """Return the bound on the divergence at each order; infinite above the last known order."""
        points = np.asarray(at, dtype=np.float64)
        finite = np.isfinite(weighted)
        grid_of_finite = grid[finite]
        last = float(grid_of_finite[-1])
        chords = np.interp(points, grid_of_finite, weighted[finite])
        with np.errstate(invalid="ignore", divide="ignore"):
            divergences = chords / (points - 1.0)
        value = np.where(points > 1.0, divergences, 0.0)
        # Beyond the last finite order nothing is known.
        return np.where(points > last, np.inf, value)

    return curve


def _from_integer_orders(orders: Floats, values: Floats) -> Floats:
    """Return a curve at `orders` from its values at 2, 3, ..., by chords; infinite beyond the last."""
    integers = np.arange(2.0, values.size + 2.0)
    curve = interpolated(integers, values)
    return curve(orders)


def _largest_finite_order(orders: Floats, finite: NDArray[np.bool_]) -> int:
    """Return the largest order, at most 256, at which a curve is finite; 1 if none is."""
    largest = orders[finite].max(initial=1.0)
    return int(min(largest, _MAX_ORDER))


def amplified_curve(
    orders: Floats,
    values: Floats,
    rate: float,
) -> Floats:
    """Return the Rényi curve of any mechanism on a Poisson subset of the records, valid in both directions.

    Args:
        orders: Orders α above 1.
        values: The mechanism's curve at these orders.
        rate: Sampling probability q, in (0, 1).

    References:
        Zhu and Wang, ICML 2019, Theorem 6, with its factor 3: a tuner is no Gaussian.
    """
    top = _largest_finite_order(orders, np.isfinite(values))
    if top < 2:
        return np.full_like(orders, np.inf)
    base = interpolated(orders, values)(_orders_from_one(top))
    order, k = _binomial_terms(top)
    log_out = math.log1p(-rate)
    log_in = math.log(rate)
    log_factor = np.where(k > 2.0, math.log(3.0), 0.0)
    with np.errstate(invalid="ignore"):
        terms = _log_choose(order, k) + k * log_in + (order - k) * log_out
        terms += (k - 1.0) * base + log_factor
    # The terms of k = 0 and k = 1 have no divergence in them and are put together.
    above_one = order[:, 0] - 1.0
    log_rest = np.log1p(above_one * rate)
    terms[:, 0] = above_one * log_out + log_rest
    terms[:, 1] = -np.inf
    return _from_integer_orders(orders, _from_terms(order, k, terms))


def _orders_from_one(top: int) -> Floats:
    """Return the orders 1, 1, 2, ..., top that belong to the terms k = 0, 1, 2, ..., top."""
    return np.arange(0.0, top + 1.0).clip(min=1.0)


def _binomial_terms(top: int) -> tuple[Floats, Floats]:
    """Return orders α = 2, 3, ... as a column and the binomial index k = 0, 1, ... as a row."""
    order = np.arange(2.0, top + 1.0)
    k = np.arange(0.0, top + 1.0)
    return order[:, None], k[None, :]


def _from_terms(
    order: Floats,
    k: Floats,
    terms: Floats,
) -> Floats:
    """Return each order's divergence log(Σ_k e^term)/(α-1), summed over k <= α."""
    summands = np.where(k <= order, terms, -np.inf)
    sums = sp.special.logsumexp(summands, axis=1)
    divergences = sums / (order[:, 0] - 1.0)
    return np.asarray(np.maximum(divergences, 0.0))


def split_curve(
    orders: Floats,
    tuning: Floats,
    training: Floats,
    rate: float,
) -> Floats:
    """Return the Rényi curve of subsampled tuning, variant 1: the larger of its two directions.

    Args:
        orders: Orders α above 1.
        tuning: Curve of what happens to the records of the subset.
        training: Curve of what happens to the others.
        rate: Probability q that a record is in the subset, in (0, 1).

    References:
        Koskela and Kulkarni, arXiv:2301.11989, Theorem 3; the reverse by the means' inequality
        (README, 6).
    """
    tuning_curve = interpolated(orders, tuning)
    training_curve = interpolated(orders, training)
    reverse = np.zeros_like(orders)
    for curve, share in ((tuning_curve, rate), (training_curve, 1.0 - rate)):
        at = 1.0 + share * (orders - 1.0)
        reverse += share * curve(at)
    both_finite = np.isfinite(tuning) & np.isfinite(training)
    top = _largest_finite_order(orders, both_finite)
    if top < 2:
        return np.full_like(orders, np.inf)
    whole_orders = _orders_from_one(top)
    tuning_at = tuning_curve(whole_orders)
    training_at = training_curve(whole_orders)
    order, k = _binomial_terms(top)
    rest = np.maximum(order - k, 0.0)
    log_in = math.log(rate)
    log_out = math.log1p(-rate)
    place = rest.astype(np.int64)
    with np.errstate(invalid="ignore"):
        terms = _log_choose(order, k) + rest * log_in + k * log_out
        terms += np.maximum(rest - 1.0, 0.0) * tuning_at[place]
        terms += np.maximum(k - 1.0, 0.0) * training_at
    forward = _from_integer_orders(orders, _from_terms(order, k, terms))
    return np.maximum(forward, reverse)


_LEAST = 1e-200  # of a deviation, by which one may divide


def log_moments(
    orders: Floats,
    sigma: float,
    scales: Sequence[float],
) -> Floats:
    """Return `log E_Q[L^k]` of Gaussian and Laplace releases without sampling, at each order k.

    Args:
        orders: k, at least 1.
        sigma: Noise multiplier of the Gaussian release; infinite for none.
        scales: Noise multipliers b of the Laplace releases.

    References:
        Mironov, arXiv:1702.07476, Proposition 6 (Laplace) and 7 (Gaussian). A Laplace release of
        scale b has E_Q[L^k] = (k e^((k-1)/b) + (k-1) e^(-k/b)) / (2k-1); moments of a product multiply.
    """
    of_gaussian = orders * (orders - 1.0) / (2.0 * sigma**2)
    total = np.asarray(of_gaussian)
    for scale in scales:
        first = np.log(orders) + (orders - 1.0) / scale
        with np.errstate(divide="ignore"):
            second = np.log(orders - 1.0) - orders / scale
        log_sum = np.logaddexp(first, second)
        total += log_sum - np.log(2.0 * orders - 1.0)
    return total


def joint_deviation(
    rate: float,
    sigma: float,
    scales: Sequence[float],
) -> float:
    """Return the size of a sampled joint release's loss: sqrt of its chi-square divergence.

    Args:
        rate: Sampling probability q.
        sigma: Noise multiplier of the Gaussian release; infinite for none.
        scales: Noise multipliers of the Laplace releases.
    """
    laplace = math.fsum(min(1.0 / b, 1.0) ** 2 for b in scales)
    unsampled = math.sqrt(sigma**-2 + laplace)
    second_order = np.array([2.0])
    log_square = float(log_moments(second_order, sigma, scales)[0])
    if log_square > 50.0:
        return unsampled
    chi_square = math.expm1(max(log_square, 0.0))
    sampled = max(rate * math.sqrt(chi_square), _LEAST)
    return min(sampled, unsampled)


def joint_curve(
    rate: float,
    sigma: float,
    scales: Sequence[float],
    orders: Floats,
) -> Floats:
    """Return the Rényi curve of a Gaussian and Laplace releases about one Poisson sample.

    Args:
        rate: Sampling probability q, in (0, 1).
        sigma: Noise multiplier of the Gaussian release; infinite for none.
        scales: Noise multipliers of the Laplace releases.
        orders: Orders α above 1.

    References:
        README, 4: removal is the larger direction.
    """
    # Exact binomial sums at integer orders; (α-1) D_α is convex: chords between them. Removal is the larger.
    around = [np.floor(orders), np.ceil(orders)]
    integers = np.unique(np.concatenate(around))
    integers = integers[integers >= 2.0]
    k = np.arange(integers[-1] + 1.0)
    moments = np.concatenate([[0.0], log_moments(k[1:], sigma, scales)])
    log_factorial = sp.special.gammaln(k + 1.0)
    log_in = math.log(rate)
    log_out = math.log1p(-rate)
    values = np.empty(integers.size)
    for i, order in enumerate(integers.astype(int)):
        to_order = slice(0, order + 1)
        log_choose = log_factorial[order] - log_factorial[to_order]
        log_choose = log_choose - log_factorial[order::-1]
        index = k[to_order]
        log_weights = log_choose + index * log_in + (order - index) * log_out
        terms = log_weights + moments[to_order]
        values[i] = float(sp.special.logsumexp(terms)) / (order - 1.0)
    # The log of a moment near 1 is known to 1e-15 for each term of its exponent; that is charged.
    values = np.maximum(values, 0.0) + 1e-14 / (integers - 1.0)
    return interpolated(integers, values)(orders)


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
    """Return the Rényi curve of a public mixture whose output names the drawn component."""
    # The name of the component is part of the output, so E_Q[L^α] is the average of the components'.
    log_weights = np.log(weights)[:, None]
    log_moments = (ORDERS - 1.0) * curves + log_weights
    log_average = sp.special.logsumexp(log_moments, axis=0)
    divergence = np.asarray(log_average / (ORDERS - 1.0))
    return divergence.clip(min=0.0)


def pure_curve(epsilon: float, orders: Floats = ORDERS) -> Floats:
    """Return the Rényi curve of ε-DP (Bun and Steinke, arXiv:1605.02065, Proposition 3.3)."""
    # Randomised response, of probabilities p and q = 1 - p with p/q = e^ε, is the worst of these releases.
    log_p = -math.log1p(math.exp(-epsilon))
    log_q = log_p - epsilon
    first = orders * log_p + (1.0 - orders) * log_q
    second = orders * log_q + (1.0 - orders) * log_p
    log_moment = np.logaddexp(first, second)
    divergence = np.asarray(log_moment / (orders - 1.0))
    return divergence.clip(0.0, epsilon)


def sampled_laplace_curve(
    rate: float,
    scale: float,
    orders: Floats,
) -> Floats:
    """Return the Rényi divergence of a Poisson-sampled Laplace release at each order.

    Args:
        rate: Sampling probability q, in (0, 1].
        scale: Noise multiplier b.
        orders: Orders α above 1.
    """
    # Exact at integer orders and without sampling; else Gauss-Legendre on pieces across which the exponent
    # moves by at most 1, with a relative error below 1e-20.
    if rate == 1.0:
        values = log_moments(orders, math.inf, (scale,)) / (orders - 1.0)
    else:
        values = joint_curve(rate, math.inf, (scale,), orders)
        is_fractional = orders != np.floor(orders)
        fractional = orders[is_fractional]
        largest = float(fractional.max(initial=1.0))
        pieces = math.ceil(2.0 * largest / scale)
        if pieces <= _MOST_PIECES:
            values[is_fractional] = _laplace_by_pieces(rate, scale, fractional, pieces)
    # No divergence exceeds the largest loss, log(1 - q + q e^(1/b)).
    limit = np.inf
    if scale > 1 / 600:
        largest_loss = min(1.0 / scale, 600.0)
        excess = rate * np.expm1(largest_loss)
        limit = float(np.log1p(excess))
    rounding = 4e-15 / (orders - 1.0)
    return np.asarray(np.clip(values, 0.0, limit) + rounding)


def _laplace_by_pieces(
    rate: float,
    scale: float,
    orders: Floats,
    pieces: int,
) -> Floats:
    """Return a sampled Laplace release's divergences at fractional orders, by Gauss-Legendre.

    Args:
        rate: Sampling probability q, in (0, 1).
        scale: Noise multiplier b.
        orders: Fractional orders α.
        pieces: Into how many equal pieces [0, 1] is cut.
    """
    nodes, weights = np.polynomial.legendre.leggauss(12)
    edges = np.linspace(0.0, 1.0, pieces + 1)
    middles = (edges[1:] + edges[:-1]) / 2.0
    points = middles[:, None] + nodes * 0.5 / pieces
    x = points.ravel()
    log_weights = np.log(weights * 0.5 / pieces)
    log_weight = np.tile(log_weights, pieces)
    # On either half line the loss is constant, -1/b or 1/b.
    scaled_loss = np.concatenate([[-1.0], 2.0 * x - 1.0, [1.0]])
    loss = scaled_loss / scale
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + loss)
    below = math.log(0.5)
    inside = -x / scale - math.log(2.0 * scale) + log_weight
    above = below - 1.0 / scale
    log_mass = np.concatenate([[below], inside, [above]])
    divergences = []
    for order in orders:
        log_moment = sp.special.logsumexp(order * log_ratio + log_mass)
        divergences.append(log_moment / (order - 1.0))
    return np.array(divergences)


def selection_curve(
    curve: Floats,
    runs: RunLaw,
    orders: Floats = ORDERS,
) -> Floats:
    """Return the Rényi curve of a private selection from that of one run; infinite if unknown.

    References:
        Papernot and Steinke, arXiv:2110.03620, Theorem 2 (negative binomial) and 6 (Poisson).

    Args:
        curve: The Rényi curve of one run.
        runs: The law of the number of runs.
        orders: Orders α above 1.
    """
    if runs.sure_runs:
        return np.asarray(runs.sure_runs * curve + selection_curve(curve, runs.drawn, orders))
    unknown = np.full_like(orders, np.inf)
    if runs.cap is not None or isinstance(runs, Binomial):
        return unknown
    if isinstance(runs, Poisson):
        mean = runs.mean
        if mean < 1.0:
            return unknown
        deltas = []
        for order in orders:
            point = math.log1p(1.0 / (order - 1.0))
            deltas.append(rdp_delta(curve, point, orders))
        log_mean = math.log(mean)
        by_runs = mean * np.array(deltas)
        values = curve + by_runs + log_mean / (orders - 1.0)
    elif isinstance(runs, NegativeBinomial):
        eta = runs.shape_parameter
        at_orders = (1.0 - 1.0 / orders) * curve - runs.log_gamma / orders
        least = float(np.min(at_orders))
        extra = (1.0 + eta) * least
        log_mean = math.log(runs.expected_runs)
        values = curve + extra + log_mean / (orders - 1.0)
    else:
        return unknown
    # The true divergence grows with the order: a bound at a higher order holds at a lower one.
    from_highest = np.minimum.accumulate(values[::-1])
    return np.asarray(from_highest[::-1])


def rdp_epsilon(
    curve: Floats,
    delta: float,
    orders: Floats = ORDERS,
) -> float:
    """Return the smallest ε that any order of a Rényi curve gives at this δ.

    References:
        Canonne, Kamath, Steinke, arXiv:2004.00010, Proposition 12; of tiny curves
        δ <= sqrt(1 - exp(-KL)).

    Args:
        curve: Rényi divergences at the orders.
        delta: In (0, 1).
        orders: Orders α above 1.
    """
    with np.errstate(invalid="ignore"):
        total_variation = np.sqrt(-np.expm1(-curve))
        if bool((total_variation <= delta).any()):
            return 0.0
        by_delta = np.log(delta * orders) / (orders - 1.0)
        values = curve + np.log1p(-1.0 / orders) - by_delta
    return max(float(values.min()), 0.0)


def rdp_delta(
    curve: Floats,
    epsilon: float,
    orders: Floats = ORDERS,
) -> float:
    """Return the smallest δ that any order of a Rényi curve gives at this ε."""
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = curve - epsilon + np.log1p(-1.0 / orders)
        log_delta = (orders - 1.0) * exponent - np.log(orders)
        of_orders = np.sqrt(-np.expm1(-curve))
        total_variation = float(of_orders.min())
    least = float(log_delta.min())
    by_orders = math.exp(min(least, 0.0))
    return min(by_orders, total_variation, 1.0)
