"""What repetitions of arms say: a mean with its standard error, and how sure the order of two means is."""

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
        """Return the spread of values, of which None is a missing one; None if all are missing."""
        there = np.array([value for value in values if value is not None])
        if (n := there.size) == 0:
            return None
        error = float(there.std(ddof=1)) / math.sqrt(n) if n > 1 else None
        return cls(float(there.mean()), error, n)


def probability_above(
    first: Sequence[float | None], second: Sequence[float | None]
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
    pairs = zip(first, second, strict=False)
    spread = Spread.of([a - b for a, b in pairs if a is not None and b is not None])
    if spread is None or spread.error is None:
        return None
    if spread.error == 0.0:
        return 0.5 + 0.5 * math.copysign(1.0, spread.mean) if spread.mean else 0.5
    return float(stdtr(spread.n - 1, spread.mean / spread.error))


def values_of(release: Release) -> dict[str, list[float | None]]:
    """Return the score and the metrics of a release by name: a value a repetition, None if it has none.

    A repetition that released nothing has none. One that diverged has those that its model was measured at.
    """
    rows = [run.values for run in release.repetitions or (release,)]
    found = {name: [row.get(name) for row in rows] for row in rows for name in row}
    return {
        name: [None if v is None or not math.isfinite(v) else v for v in values]
        for name, values in found.items()
    }
