"""What descent with a schedule needs to know of logistic regression, from public bounds alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from privtune.errors import InvalidInputError
from privtune.training.methods._common import check_nonnegative, check_positive

__all__ = ["LogisticConstants"]


@dataclass(frozen=True)
class LogisticConstants:
    """What the schedules need to know of regularised logistic regression, from public bounds.

    Args:
        feature_bound: Z, a public bound on the norm of a record's features, above 0. Features have
            to be scaled to it by public constants, not by statistics of the data.
        regularisation: λ, the weight of ``λ/2 |θ|²``, at least 0.
        radius: R, a public bound on ``|θ_t - θ*|``; None derives ``sqrt(2 log 2 / λ)``, since
            ``λ/2 |θ*|² <= F(θ*) <= F(0) = log 2``. It must be given where λ = 0.
    """

    feature_bound: float
    regularisation: float = 0.0
    radius: float | None = None

    def __post_init__(self) -> None:
        check_positive("feature_bound", self.feature_bound)
        check_nonnegative("regularisation", self.regularisation)
        if self.radius is not None:
            check_positive("radius", self.radius)
        elif self.regularisation == 0.0:
            raise InvalidInputError(
                "radius", None, "must be given where there is no regularisation to bound it"
            )

    @property
    def distance(self) -> float:
        """R, the bound on the distance from the minimiser."""
        if self.radius is not None:
            return self.radius
        return math.sqrt(2.0 * math.log(2.0) / self.regularisation)

    @property
    def lipschitz(self) -> float:
        """Z: the regulariser is the same for all records, so it moves no difference of sums."""
        return self.feature_bound

    @property
    def paper_lipschitz(self) -> float:
        """``λ R + Z``, what the paper takes for L; never smaller than needed."""
        return self.regularisation * self.distance + self.feature_bound

    @property
    def smoothness(self) -> float:
        """``M = λ + Z²/4``."""
        return self.regularisation + self.feature_bound**2 / 4.0

    @property
    def gap(self) -> float:
        """``log 2``: the loss at θ = 0 is a constant, and no loss is below 0."""
        return math.log(2.0)
