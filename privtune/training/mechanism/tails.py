"""The tails of noise, which uniform numbers of 24 or 53 bits cannot reach.

A Gaussian made of a uniform number of b bits ends at ``sqrt(2 b ln 2)`` deviations: 5.77 for torch's
float32 on CPU, 6.76 on CUDA and here, 8.57 for float64. Behind that edge lies what a record alone makes
possible, and it is lost at every ε. So whatever lies beyond ``EDGE`` is drawn again here, from the
law of a Gaussian beyond it, by inversion of a uniform number fine enough for ``GAUSSIAN_REACH``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]

Uniform = Callable[[int], Floats]
"""Draws so many uniform values in [0, 1), multiples of 2^-53."""

EDGE = 4.5
"""Where tails begin, in deviations. Up to here 24 bits would be fine enough: ``P(|Z| > 4.5)`` = 6.8e-6
would be right to 1.4e-8, half a step of such uniform numbers. The 32 bits here are right to 1e-4 of
it, and at 6.5 deviations three words are left."""

TOGETHER = 2**15
"""Values that are made and searched together, while they are in a cache."""

_WORDS = 16  # uniform numbers of 53 bits that make a fine one


def _fine(uniform: Uniform, size: int) -> Floats:
    """Return uniform values in (0, 1] whose smallest is 2^-848, each right to 53 bits."""
    digits = uniform(_WORDS * size).reshape(_WORDS, size)
    value = np.ones(size)
    for digit in digits:
        value *= 2.0**-53
        value += digit
    return value


def gaussian_tail(uniform: Uniform, size: int) -> Floats:
    """Return values of a standard normal given that it lies above ``EDGE``."""
    values: Floats = -special.ndtri(_fine(uniform, size) * special.ndtr(-EDGE))
    return values


def gaussian(uniform: Uniform, size: int) -> Floats:
    """Return standard normal values: for a few, this costs more than a generator's own."""
    return _signed(uniform, -special.ndtri(0.5 * _fine(uniform, size)))


def laplace(uniform: Uniform, size: int) -> Floats:
    """Return Laplace values of scale 1."""
    return _signed(uniform, -np.log(_fine(uniform, size)))


def beyond(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.intp]:
    """Return the places of the values beyond ``EDGE`` on either side: few, and in most calls none.

    The search is NumPy's own, in one thread: BLAS has one that wakes threads up for it.
    """
    if max(values.max(), -values.min()) <= EDGE:
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero(np.abs(values) > EDGE)


def most_beyond(size: int) -> int:
    """Return how many of ``size`` normal values lie beyond ``EDGE`` at most, but for odds of 2^-128.

    By Chernoff's bound for a binomial law of mean m: ``P(X >= n) <= exp(n - m) (m / n)^n``.
    """
    mean, count = 2.0 * size * float(special.ndtr(-EDGE)), 1
    while count <= mean or count * math.log(count / mean) - count + mean < 128.0 * math.log(2.0):
        count += max(1, count // 64)
    return count


def _signed(uniform: Uniform, values: Floats) -> Floats:
    return np.where(uniform(len(values)) < 0.5, -values, values)
