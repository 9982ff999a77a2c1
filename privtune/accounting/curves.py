"""Rényi curves on one grid of orders: of each kind of release, of choices, and their conversion to (ε, δ).

Proofs are in `accounting/README.md`, sections 4 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.runs import Binomial, NegativeBinomial, Poisson, RunLaw

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
    """Return the Rényi divergence of many Poisson-sampled Gaussians, one row each, orders ascending."""
    # Mironov, Talwar, Zhang, arXiv:1908.10530, Section 3.3; Theorem 5: the removal direction is the larger.
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
    """Terms of the binomial sums for whole orders of similar size, which are computed as one array."""

    place: NDArray[np.int64]
    multipliers: Floats
    log_choose: Floats
    between: Floats
    order: Floats


@lru_cache(maxsize=64)
def _terms(orders: tuple[int, ...], side: int) -> list[_Terms]:
    """Return the terms of each order's binomial sum: those at both ends, all of a short sum."""
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
    """Return Rényi divergences of sampled Gaussians at whole orders, one row for each."""
    # Where k (n-k)/n >= σ² the log terms are convex in k: between two such points each is at most the larger
    # of these two. So only both ends of the sum, of 4σ² and at least 64 terms, are computed one by one.
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
    """Return Rényi divergences of one sampled Gaussian at fractional orders, by the trapezoid rule."""
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


Curve = Callable[[Floats], Floats]
_MAX_ORDER = 256  # of the curves of tuning on a subset


def interpolated(orders: Floats, values: Floats) -> Curve:
    """Return the curve between known orders: `(α-1) D_α` is convex, so chords lie above it."""
    grid = np.concatenate([[1.0], orders])
    weighted = np.concatenate([[0.0], (orders - 1.0) * values])

    def curve(wanted: Floats) -> Floats:
        points = np.asarray(wanted, dtype=np.float64)
        finite = np.isfinite(weighted)
        last = float(grid[finite][-1])
        found = np.interp(points, grid[finite], weighted[finite])
        with np.errstate(invalid="ignore", divide="ignore"):
            value = np.where(points > 1.0, found / (points - 1.0), 0.0)
        return np.where(points > last, np.inf, value)

    return curve


def _whole_orders(orders: Floats, at_whole: Floats) -> Floats:
    """Return a curve at `orders` from its values at 2, 3, ..., by chords; infinite beyond the last."""
    whole = np.arange(2.0, at_whole.size + 2.0)
    return interpolated(whole, at_whole)(orders)


def _log_choose(n: Floats, k: Floats) -> Floats:
    return np.asarray(
        sp.special.gammaln(n + 1.0) - sp.special.gammaln(k + 1.0) - sp.special.gammaln(n - k + 1.0)
    )


def amplified_curve(orders: Floats, values: Floats, rate: float) -> Floats:
    """Return the Rényi curve of any mechanism on a Poisson subset, both directions."""
    # Zhu and Wang, ICML 2019, Theorem 6, with its factor 3: a tuner is no Gaussian.
    top = int(min(orders[np.isfinite(values)].max(initial=1.0), _MAX_ORDER))
    if top < 2:
        return np.full_like(orders, np.inf)
    base = interpolated(orders, values)(np.arange(0.0, top + 1.0).clip(min=1.0))
    order, k = _binomial_terms(top)
    with np.errstate(invalid="ignore"):
        terms = _log_choose(order, k) + k * math.log(rate) + (order - k) * math.log1p(-rate)
        terms += (k - 1.0) * base + np.where(k > 2.0, math.log(3.0), 0.0)
    whole = order[:, 0]
    terms[:, 0] = (whole - 1.0) * math.log1p(-rate) + np.log1p((whole - 1.0) * rate)  # k of 0 and 1
    terms[:, 1] = -np.inf
    return _whole_orders(orders, _from_terms(order, k, terms))


def _binomial_terms(top: int) -> tuple[Floats, Floats]:
    """Return orders α = 2, 3, ... as a column and the binomial index k = 0, 1, ... as a row."""
    return np.arange(2.0, top + 1.0)[:, None], np.arange(0.0, top + 1.0)[None, :]


def _from_terms(order: Floats, k: Floats, terms: Floats) -> Floats:
    """Return log(Σ_k e^term)/(α-1), k up to α: the divergence whose binomial sum has these log terms."""
    sums = sp.special.logsumexp(np.where(k <= order, terms, -np.inf), axis=1)
    return np.asarray(np.maximum(sums / (order[:, 0] - 1.0), 0.0))


def split_curve(orders: Floats, tuning: Floats, training: Floats, rate: float) -> Floats:
    """Return the Rényi curve of variant 1: the larger of its two directions."""
    # Koskela and Kulkarni, arXiv:2301.11989, Theorem 3; the reverse by the means' inequality (README, 6).
    first, second = interpolated(orders, tuning), interpolated(orders, training)
    reverse = np.zeros_like(orders)
    for curve, share in ((first, rate), (second, 1.0 - rate)):
        reverse += share * curve(1.0 + share * (orders - 1.0))
    finite = np.isfinite(tuning) & np.isfinite(training)
    top = int(min(orders[finite].max(initial=1.0), _MAX_ORDER))
    if top < 2:
        return np.full_like(orders, np.inf)
    whole = np.arange(0.0, top + 1.0).clip(min=1.0)
    one, two = first(whole), second(whole)
    order, k = _binomial_terms(top)
    rest = np.maximum(order - k, 0.0)
    with np.errstate(invalid="ignore"):
        terms = _log_choose(order, k) + rest * math.log(rate) + k * math.log1p(-rate)
        terms += np.maximum(rest - 1.0, 0.0) * one[rest.astype(np.int64)]
        terms += np.maximum(k - 1.0, 0.0) * two
    return np.maximum(_whole_orders(orders, _from_terms(order, k, terms)), reverse)


_LEAST = 1e-200  # of a deviation, by which one may divide


def log_moments(orders: Floats, sigma: float, scales: Sequence[float]) -> Floats:
    """Return `log E_Q[L^k]` of the product pair without sampling, at orders of at least 1."""
    # Mironov, arXiv:1702.07476, Proposition 6 (Laplace) and 7 (Gaussian); moments of a product multiply.
    # A Laplace release of scale b: E_Q[L^k] = (k e^((k-1)/b) + (k-1) e^(-k/b)) / (2k-1).
    total = np.asarray(orders * (orders - 1.0) / (2.0 * sigma**2))
    for scale in scales:
        first = np.log(orders) + (orders - 1.0) / scale
        with np.errstate(divide="ignore"):
            second = np.log(orders - 1.0) - orders / scale
        total += np.logaddexp(first, second) - np.log(2.0 * orders - 1.0)
    return total


def joint_deviation(rate: float, sigma: float, scales: Sequence[float]) -> float:
    """Return the size of a sampled joint release's privacy loss, sqrt of its chi-square divergence."""
    unsampled = math.sqrt(sigma**-2 + math.fsum(min(1.0 / b, 1.0) ** 2 for b in scales))
    square = float(log_moments(np.array([2.0]), sigma, scales)[0])
    if square > 50.0:
        return unsampled
    return min(max(rate * math.sqrt(math.expm1(max(square, 0.0))), _LEAST), unsampled)


def joint_curve(rate: float, sigma: float, scales: Sequence[float], orders: Floats) -> Floats:
    """Return the Rényi curve of a Gaussian (σ may be infinite) and Laplace releases about one sample."""
    # Exact binomial sums at whole orders; (α-1) D_α is convex: chords between them. Removal is the larger.
    whole = np.unique(np.concatenate([np.floor(orders), np.ceil(orders)]))
    whole = whole[whole >= 2.0]
    k = np.arange(whole[-1] + 1.0)
    moments = np.concatenate([[0.0], log_moments(k[1:], sigma, scales)])
    log_factorial = sp.special.gammaln(k + 1.0)
    log_in, log_out = math.log(rate), math.log1p(-rate)
    found = np.empty(whole.size)
    for i, order in enumerate(whole.astype(int)):
        chosen = slice(0, order + 1)
        log_choose = log_factorial[order] - log_factorial[chosen] - log_factorial[order::-1]
        terms = log_choose + k[chosen] * log_in + (order - k[chosen]) * log_out + moments[chosen]
        found[i] = float(sp.special.logsumexp(terms)) / (order - 1.0)
    # The log of a moment near 1 is known to 1e-15 for each term of its exponent; that is charged.
    found = np.maximum(found, 0.0) + 1e-14 / (whole - 1.0)
    return interpolated(whole, found)(orders)


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
    # The name of the component is part of the output, so E_Q[L^α] is the average of the components'.
    scaled = (ORDERS - 1.0) * curves + np.log(weights)[:, None]
    return np.asarray(sp.special.logsumexp(scaled, axis=0) / (ORDERS - 1.0)).clip(min=0.0)


def pure_curve(epsilon: float, orders: Floats = ORDERS) -> Floats:
    """Return the exact curve of ε-DP (Bun and Steinke, arXiv:1605.02065, Proposition 3.3)."""
    # Randomised response, of probabilities p and q = 1 - p with p/q = e^ε, is the worst of these releases.
    log_p = -math.log1p(math.exp(-epsilon))
    log_q = log_p - epsilon
    first = orders * log_p + (1.0 - orders) * log_q
    second = orders * log_q + (1.0 - orders) * log_p
    return np.asarray(np.logaddexp(first, second) / (orders - 1.0)).clip(0.0, epsilon)


def sampled_laplace_curve(rate: float, scale: float, orders: Floats) -> Floats:
    """Return the Rényi divergence of the Poisson-sampled Laplace release."""
    # Exact at whole orders and without sampling; else Gauss-Legendre on pieces across which the exponent
    # moves by at most 1, with a relative error below 1e-20.
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
    """Return the Rényi curve of a private selection over a base with this curve."""
    # Papernot and Steinke, arXiv:2110.03620, Theorem 2 (negative binomial) and 6 (Poisson). Others: infinite.
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
    """Return the smallest ε that any order of the curve gives at this delta."""
    # Canonne, Kamath, Steinke, arXiv:2004.00010, Proposition 12; of tiny curves δ <= sqrt(1 - exp(-KL)).
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
