"""Coefficients of noise that is correlated over a few steps, and the error that they leave in sums.

The noise of step t is row t of ``C^-1 Z``, Z independent and C lower triangular with the same b numbers
in every column. The account rests on two of its properties, which :func:`coefficients` guarantees: b
numbers at most, with a sum of squares of at most 1. Which numbers they are changes the error alone.
They stand beside the noise, not in ``accounting/``, since an event knows nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from privtune.training.mechanism.schedule import check_bands

Floats = npt.NDArray[np.float64]

_LENGTH = (
    2**14
)  # steps for which numbers are optimised; those of longer trainings are about the same
_ROUNDING = 2.0**-20  # more than numbers move where they are rounded to float32
_ITERATIONS = 200
_GAIN = 1e-7  # relative fall of the error below which the search ends
_HALVINGS = 40
_ARMIJO = 1e-4

Objective = Callable[[Floats], tuple[float, Floats]]
"""Maps numbers ``[b]`` to a value, infinite where they cannot be used, and its gradient ``[b]``."""


@lru_cache(maxsize=256)
def coefficients(bands: int, steps: int) -> tuple[float, ...]:
    """Return the first column of C: the numbers that leave the least error in sums of noise.

    They minimise :func:`prefix_error` by a quasi-Newton search (Broyden, Fletcher, Goldfarb, Shanno) that
    begins at the root of the matrix of prefix sums (Henzinger, Upadhyay, Upadhyay 2023, arXiv 2202.11205),
    cut off after b numbers. The search is deterministic.

    Args:
        bands: How many numbers, b; 1 is independent noise.
        steps: Steps of the training, at least 1.

    Returns:
        The b numbers, of which the first is above 0, with a sum of squares just below 1; ``(1.0,)`` for
        one band. There are fewer than b where there are fewer steps.

    Raises:
        InvalidInputError: If the number of bands is not from 1 to 256.

    References:
        Choquette-Choo et al. 2023, arXiv 2306.08153, Sections 3 and 4.
    """
    check_bands(bands)
    count = min(bands, steps)
    if count == 1:
        return (1.0,)
    terms = min(steps, _LENGTH)
    start = _root_of_prefix_sums(count)
    best = _minimise(lambda numbers: _log_error(numbers, terms), start)
    # Just below 1: the sum of squares stays at most 1 when the noise rounds the numbers.
    column = best * ((1.0 - _ROUNDING) / np.linalg.norm(best))
    return tuple(column.tolist())


@lru_cache(maxsize=256)
def prefix_error(bands: int, steps: int) -> float:
    """Return the root mean square error of all prefix sums of the noise, at a noise multiplier of 1.

    Args:
        bands: How many steps noise is correlated over.
        steps: Steps of the training, T: the mean is over the sums of the first 1, 2, ... T steps.

    Returns:
        ``sqrt(|A C^-1|_F^2 / T)``, A the matrix of prefix sums; ``sqrt((T + 1) / 2)`` for one band.
    """
    column = np.array(coefficients(bands, steps))
    value, _ = _log_error(column, steps)
    return math.exp(value)


def inverse(column: Floats, terms: int) -> Floats:
    """Return the first column of ``C^-1``: the power series ``1 / c(x)`` up to ``terms`` numbers.

    Newton's iteration ``g <- g (2 - c g)`` doubles the number of right terms each time.
    """
    series = np.array([1.0 / column[0]])
    while len(series) < terms:
        length = min(2 * len(series), terms)
        product = _product(column[:length], series, length)
        rest = -product
        rest[0] += 2.0
        series = _product(series, rest, length)
    return series


def _product(first: Floats, second: Floats, terms: int) -> Floats:
    """Return the first ``terms`` numbers of the product of two power series."""
    size = 2 ** math.ceil(math.log2(len(first) + len(second)))
    spectrum = np.fft.rfft(first, size) * np.fft.rfft(second, size)
    return np.fft.irfft(spectrum, size)[:terms]


def _root_of_prefix_sums(count: int) -> Floats:
    """Return the first ``count`` coefficients of ``(1 - x)^(-1/2)``: 1, 1/2, 3/8, ..."""
    numbers = np.arange(1, count)
    factors = np.concatenate([[1.0], (2 * numbers - 1) / (2 * numbers)])
    return np.cumprod(factors)


def _log_error(numbers: Floats, terms: int) -> tuple[float, Floats]:
    """Return the log of the error of the column ``numbers / |numbers|``, and its gradient.

    With ``f = 1 / ((1 - x) c(x))`` the squared error is ``sum_i (1 - i/T) f_i^2``, and ``df = -f/c dc``.
    """
    norm = float(np.linalg.norm(numbers))
    column = numbers / norm
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        series = inverse(column, terms)
        sums = np.cumsum(series)
        weights = 1.0 - np.arange(terms) / terms
        weighted = weights * sums
        square = float(weighted @ sums)
        if not (math.isfinite(square) and square > 0.0):
            return math.inf, np.zeros_like(numbers)
        moves = _product(sums, series, terms)
        slopes = []
        for lag in range(len(column)):
            slopes.append(-2.0 * float(weighted[lag:] @ moves[: terms - lag]))
    gradient = np.array(slopes) / (2.0 * square)
    # The length of the numbers changes nothing.
    gradient -= column * float(column @ gradient)
    return 0.5 * math.log(square), gradient / norm


def _minimise(objective: Objective, start: Floats) -> Floats:
    """Return the numbers where a quasi-Newton search from ``start`` ends."""
    numbers = start / np.linalg.norm(start)
    value, gradient = objective(numbers)
    size = len(numbers)
    inverse_hessian = np.eye(size)
    for _ in range(_ITERATIONS):
        direction = -inverse_hessian @ gradient
        slope = float(direction @ gradient)
        if slope >= 0.0:
            break
        step = 1.0
        for _ in range(_HALVINGS):
            trial = numbers + step * direction
            trial_value, trial_gradient = objective(trial)
            if trial_value <= value + _ARMIJO * step * slope:
                break
            step *= 0.5
        else:
            break
        move = trial - numbers
        turn = trial_gradient - gradient
        fall = value - trial_value
        numbers = trial
        value = trial_value
        gradient = trial_gradient
        curvature = float(move @ turn)
        if curvature > 1e-300:
            projection = np.eye(size) - np.outer(move, turn) / curvature
            inverse_hessian = projection @ inverse_hessian @ projection.T
            inverse_hessian += np.outer(move, move) / curvature
        if fall < _GAIN:
            break
    return numbers
