"""One Gaussian and some Laplace releases about one Poisson sample.

Their pair without sampling is the product pair, whose likelihood ratio `L` is a product of
independent factors: moments multiply. With sampling it is `((1-q) Q + q P, Q)`. Proofs are in
`accounting/README.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.subsampled import interpolated

Floats = NDArray[np.float64]
_LEAST = 1e-200  # of a deviation, by which one may divide


def log_moments(orders: Floats, sigma: float, scales: Sequence[float]) -> Floats:
    """Return `log E_Q[L^k]` of the product pair without sampling, at orders of at least 1.

    For a Laplace release of scale b, `E_Q[L^k] = (k e^((k-1)/b) + (k-1) e^(-k/b)) / (2k-1)`.
    """
    total = np.asarray(orders * (orders - 1.0) / (2.0 * sigma**2))
    for scale in scales:
        first = np.log(orders) + (orders - 1.0) / scale
        with np.errstate(divide="ignore"):
            second = np.log(orders - 1.0) - orders / scale
        total += np.logaddexp(first, second) - np.log(2.0 * orders - 1.0)
    return total


def joint_deviation(rate: float, sigma: float, scales: Sequence[float]) -> float:
    """Return a scale of the loss of one such step: sqrt of its chi-square divergence, capped.

    Args:
        rate: Sampling probability.
        sigma: Noise multiplier of the Gaussian, infinite for none.
        scales: Noise multipliers of the Laplace releases.
    """
    unsampled = math.sqrt(sigma**-2 + math.fsum(min(1.0 / b, 1.0) ** 2 for b in scales))
    square = float(log_moments(np.array([2.0]), sigma, scales)[0])
    if square > 50.0:
        return unsampled
    return min(max(rate * math.sqrt(math.expm1(max(square, 0.0))), _LEAST), unsampled)


def joint_curve(rate: float, sigma: float, scales: Sequence[float], orders: Floats) -> Floats:
    """Return the Rényi curve of one such step, both directions.

    At whole orders `E_Q[((1-q) + q L)^k]` is a binomial sum, exact; between them `(α-1) D_α` is
    convex, so chords lie above it. The removal direction is the larger one for every pair whose
    loss is distributed alike in both directions, as that of these is.

    Args:
        rate: Sampling probability in (0, 1).
        sigma: Noise multiplier of the Gaussian, infinite for none.
        scales: Noise multipliers of the Laplace releases.
        orders: Above 1, ascending.

    Guarantee:
        Every value is an upper bound on the divergence in both directions.
    """
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
