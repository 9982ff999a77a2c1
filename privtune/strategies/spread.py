"""Statistics over an arm's repetitions: means with standard errors, and the order of two means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from scipy.special import stdtr

if TYPE_CHECKING:
    from privtune.strategies.release import Release


@dataclass(frozen=True)
class Spread:
    """The mean of a metric over repetitions.

    Args:
        mean: The mean of the values there are, in units of the metric.
        error: Its standard error: their standard deviation over √n; None of one value.
        n: How many values there are: a repetition that released nothing has none.

    Example:
        >>> Spread.of([0.75, 0.25, None])
        Spread(mean=0.5, error=0.25, n=2)
    """

    mean: float
    error: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Self | None:
        """Return the spread of the values that are not None, or None if all are."""
        present_values = [value for value in values if value is not None]
        numbers = np.array(present_values)
        n = numbers.size
        if n == 0:
            return None
        mean = float(numbers.mean())
        if n == 1:
            return cls(mean, None, n)
        deviation = float(numbers.std(ddof=1))
        return cls(mean, deviation / math.sqrt(n), n)


def probability_above(
    first: Sequence[float | None],
    second: Sequence[float | None],
) -> float | None:
    """Return the probability that the first mean is above the second, paired by repetition.

    The posterior of the mean difference under a flat prior (on it and on the logarithm of the standard
    deviation) is Student's t with n - 1 degrees of freedom. Source: Gelman et al., Bayesian Data Analysis
    (2013), section 3.2.

    Args:
        first: A metric's value of each repetition; None is a missing one, whose pair is left out.
        second: Those of the same repetitions of the other.

    Returns:
        The probability; None of fewer than two pairs. If all differences are equal it is 1, 0, or, if
        they are zero, 0.5.

    Example:
        >>> round(probability_above([0.91, 0.93, 0.92], [0.90, 0.91, 0.92]), 3)
        0.887
    """
    differences = []
    for a, b in zip(first, second, strict=False):
        if a is not None and b is not None:
            differences.append(a - b)
    spread = Spread.of(differences)
    if spread is None or spread.error is None:
        return None
    if spread.error == 0.0:
        # All differences are equal, and so is their sign.
        if spread.mean == 0.0:
            return 0.5
        return float(spread.mean > 0.0)
    statistic = spread.mean / spread.error
    return float(stdtr(spread.n - 1, statistic))


def values_of(release: Release) -> dict[str, list[float | None]]:
    """Return the values of each score and metric of a release by name, one or None per repetition.

    A repetition that released nothing has none. One that diverged has those that its model was measured at.
    """
    runs = release.repetitions or (release,)
    rows = [run.values for run in runs]
    values: dict[str, list[float | None]] = {}
    for row in rows:
        for name in row:
            values[name] = [_finite(each.get(name)) for each in rows]
    return values


def _finite(value: float | None) -> float | None:
    """Return a value if it is finite, else None."""
    if value is None or not math.isfinite(value):
        return None
    return value
