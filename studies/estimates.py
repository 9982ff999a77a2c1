"""Means of repetitions with their intervals, and the arms of a cell that may be the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, variance
from typing import TypeVar

from scipy.special import stdtrit

CONFIDENCE = 0.95
Name = TypeVar("Name")


def _welch_freedom(squares: Sequence[float], freedoms: Sequence[float]) -> float:
    """Return the degrees of freedom of a sum of independent estimates, from their squared errors (Welch)."""
    below = sum(square**2 / freedom for square, freedom in zip(squares, freedoms, strict=True))
    return sum(squares) ** 2 / below if below > 0.0 else math.inf


@dataclass(frozen=True)
class Estimate:
    """A mean of cells' means, its standard error, and the degrees of freedom of that (Welch)."""

    mean: float
    error: float
    freedom: float

    @classmethod
    def of(cls, cells: Sequence[Sequence[float]]) -> Estimate:
        """Return the mean of the means of independent samples."""
        parts = [variance(values) / len(values) / len(cells) ** 2 for values in cells]
        freedom = _welch_freedom(parts, [len(values) - 1 for values in cells])
        return cls(mean(map(mean, cells)), math.sqrt(sum(parts)), freedom)

    @classmethod
    def mean_of(cls, estimates: Sequence[Estimate]) -> Estimate:
        """Return the mean of independent estimates."""
        count = len(estimates)
        squares = [(each.error / count) ** 2 for each in estimates]
        freedom = _welch_freedom(squares, [each.freedom for each in estimates])
        return cls(mean(each.mean for each in estimates), math.sqrt(sum(squares)), freedom)

    def minus(self, other: Estimate) -> Estimate:
        """Return the difference of two independent estimates."""
        squares = (self.error**2, other.error**2)
        freedom = _welch_freedom(squares, (self.freedom, other.freedom))
        return Estimate(self.mean - other.mean, math.sqrt(sum(squares)), freedom)

    def half(self, confidence: float = CONFIDENCE) -> float:
        """Return half the width of the interval."""
        level = 0.5 + 0.5 * confidence
        return self.error * float(stdtrit(self.freedom, level))

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.half():.1f}"


def contenders(arms: Mapping[Name, Estimate]) -> set[Name]:
    """Return a set that holds the best arm with 95 %: those that no other is shown to beat.

    One-sided comparisons with every other arm, corrected for their number (Hsu 1984, with Welch's
    degrees of freedom and Bonferroni's correction): if the best arm is not in the set, another one seemed
    better by more than its bound, and there are as many chances of that as other arms.
    """
    one_side = 1.0 - (1.0 - CONFIDENCE) / max(1, len(arms) - 1)
    return {name for name in arms if not _is_beaten(name, arms, 2.0 * one_side - 1.0)}


def _is_beaten(name: Name, arms: Mapping[Name, Estimate], confidence: float) -> bool:
    """Return whether some other arm is shown to be better than the one of this name."""
    for other in arms.values():
        gap = other.minus(arms[name])
        # Quantiles take most of the time, and an arm that seems worse needs none; nor does the arm itself.
        if gap.mean > 0.0 and gap.mean > gap.half(confidence):
            return True
    return False
