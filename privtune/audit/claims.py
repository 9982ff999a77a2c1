"""What an event claims: its privacy profile, and the tests that would contradict it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import stats

from privtune.accounting import Adjacency, Event, scale_noise
from privtune.accounting import delta as delta_of
from privtune.accounting import epsilon as account

Floats = npt.NDArray[np.float64]

WIDEST = 16.0
"""Factor of the noise, up and down, within which a claim is looked for."""
_POINTS = 25  # of ε at which a profile is held against the rates


class Claim:
    """What an event claims: its privacy profile, and those of the same event with other noise.

    Args:
        event: What is charged.
        delta: At which δ its ε is asked for.
        adjacency: Under which relation.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> claim = Claim(Gaussian(1.0), 1e-3)
        >>> round(claim.epsilon, 3), claim.margin(np.full(2, 0.01), np.array([0.2, 0.05])) > 0.0
        (3.139, array([ True, False]))
    """

    def __init__(
        self, event: Event, delta: float, adjacency: Adjacency = Adjacency.ADD_REMOVE
    ) -> None:
        self.event, self.delta, self.adjacency = event, delta, adjacency

    @property
    def epsilon(self) -> float:
        """What is reported of the event."""
        return self._epsilon(1.0)

    def margin(self, fpr: Floats, tpr: Floats, factor: float = 1.0) -> Floats:
        """Return by how much true positive rates are above what the claim allows.

        Above 0, no mechanism of the claim has a test of these rates.

        Args:
            fpr: Upper bounds on false positive rates.
            tpr: Lower bounds on true positive rates.
            factor: Of the event's noise.
        """
        return np.asarray(tpr - self.allowed(fpr, factor)[0])

    def allowed(self, fpr: Floats, factor: float = 1.0) -> tuple[Floats, Floats]:
        """Return the largest true positive rates that the claim allows, and its slope there.

        Args:
            fpr: False positive rates.
            factor: Of the event's noise.
        """
        epsilons, deltas = self._profile(factor)
        lines = np.exp(epsilons) * fpr[:, None] + deltas
        return lines.min(axis=1), np.exp(epsilons)[lines.argmin(axis=1)]

    def best_test(self, runs: int, risk: float) -> tuple[float, float]:
        """Return the likelihood ratio's threshold that so many runs find most by, and the slope there.

        A true claim has the tests of Neyman and Pearson, whose rates are the profile's tangents. Of
        them the one that first contradicts a claim of more noise, as its factor grows.

        Args:
            runs: On each side.
            risk: Of the test.

        Returns:
            The threshold of the log-likelihood ratio, and the odds at which a false positive counts.
        """
        known, deltas = self._profile(1.0)
        epsilons = np.linspace(0.0, known[-1], 16 * _POINTS)
        found = np.exp(np.interp(epsilons, known, np.log(np.maximum(deltas, 1e-12))))
        fpr = np.maximum(-np.gradient(found, epsilons) * np.exp(-epsilons), 1e-6)
        tpr = np.minimum(found + np.exp(epsilons) * fpr, 1.0)
        return self._best_of(epsilons, fpr, tpr, runs=runs, risk=risk)

    def _best_of(
        self, thresholds: Floats, fpr: Floats, tpr: Floats, *, runs: int, risk: float
    ) -> tuple[float, float]:
        """Return the threshold whose rates first contradict a claim of more noise, as it grows."""
        for factor in np.geomspace(1.005, WIDEST, 200):
            allowed, slopes = self.allowed(fpr, float(factor))
            variance = tpr * (1.0 - tpr) + slopes**2 * fpr * (1.0 - fpr)
            worth = (tpr - allowed) / (np.sqrt(variance / runs) + (1.0 + slopes) / runs)
            best = int(worth.argmax())
            if worth[best] > stats.norm.isf(risk):
                break
        return float(thresholds[best]), float(slopes[best])

    def lowest_fpr(self, tpr: float, factor: float) -> float:
        """Return the least false positive rate that the claim allows a test of this power.

        Args:
            tpr: The power.
            factor: Of the event's noise.
        """
        epsilons, deltas = self._profile(factor)
        one = (tpr - deltas) * np.exp(-epsilons)
        # The same of the complementary test, with the neighbours in each other's place.
        other = 1.0 - deltas - np.exp(epsilons) * (1.0 - tpr)
        return float(max(0.0, one.max(), other.max()))

    def largest(self, contradicted: Callable[[float], bool]) -> float:
        """Return ε with the least noise at which the claim is contradicted; 0 if it never is.

        Args:
            contradicted: Whether it is, with this factor of its noise; true from some factor on.
        """
        low, high = 1.0 / WIDEST, WIDEST
        if not contradicted(high):
            return 0.0
        if contradicted(low):
            return self._epsilon(low)
        for _ in range(12):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if contradicted(middle) else (middle, high)
        return self._epsilon(high)

    def _epsilon(self, factor: float) -> float:
        event = scale_noise(self.event, factor)
        return account(event, self.delta, adjacency=self.adjacency).epsilon

    def _profile(self, factor: float) -> tuple[Floats, Floats]:
        return _profile(self.event, self.adjacency, factor)


@lru_cache(maxsize=256)
def _profile(event: Event, adjacency: Adjacency, factor: float) -> tuple[Floats, Floats]:
    """Return the profile of an event with its noise multiplied, at some ε that matter."""
    event = scale_noise(event, factor)
    end = account(event, 1e-4, adjacency=adjacency).epsilon
    epsilons = np.linspace(0.0, min(end, 50.0) if math.isfinite(end) else 50.0, _POINTS)
    deltas = [delta_of(event, float(e), adjacency=adjacency).delta for e in epsilons]
    return epsilons, np.array(deltas)
