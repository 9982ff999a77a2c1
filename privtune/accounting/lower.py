"""An explicit instance of private selection: no valid bound may fall below what it costs.

Outcomes of the base are scored in decreasing order of privacy loss, so that the outcomes up to a
level u under Q have probability F(u) under P, the worst that Neyman and Pearson allow. The rare
outcomes that pay at the ε of the question are scored where they pay most. The tuned pair is then
computed atom by atom, from below.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.pmf import LossPmf
from privtune.accounting.runs import RunLaw
from privtune.accounting.selection import Tuner

__all__ = ["Instance"]

Floats = NDArray[np.float64]
_ROUNDING = 1e-6  # of masses, relative
_LARGE = 4e-10  # mass, for each run, from which a difference of φ is right to that


class Instance:
    """Attainable δ of a private selection over one direction of a base pair.

    Args:
        base: One direction of the pair of a single run.
        runs: The law of the number of runs.
    """

    def __init__(self, base: LossPmf, runs: RunLaw) -> None:
        self.runs = runs
        keep = base.masses > 0.0
        self.losses = base.losses[keep][::-1]
        self.p = base.masses[keep][::-1]
        with np.errstate(over="ignore"):
            self.q = np.exp(np.log(self.p) - self.losses)
        self.infinite = base.infinite
        self.tuner = Tuner(base, runs)
        # What rounding took away or added is given to an atom at the end: a legal pair again.
        self.levels = np.cumsum(self.q) - 0.5 * self.q

    def order(self, epsilon: float, threshold: float) -> NDArray[np.int64]:
        """Return the atoms from worst to best score; losses above `threshold` are moved."""
        key = np.minimum(self.levels, 1.0)
        moved = self.losses > threshold
        z = np.exp(np.minimum(epsilon - self.losses[moved], 700.0))
        key[moved] = self.tuner.best_level(z)
        return np.argsort(key, kind="stable")

    def tuned(self, order: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return the masses of the tuned pair for one order of the atoms, on the safe side.

        The infinite atom of the base has the best score of all, which only helps. Differences of φ
        are exact for atoms of some size; for small ones they would be rounding alone, which adds up
        to more than a small δ. There ``p φ'(a) <= φ(b) - φ(a) <= p φ'(b)`` is used.
        """
        p = self.p[order] / (self.p.sum() + self.infinite)
        q = self.q[order] / self.q.sum()
        below_p = np.minimum(np.concatenate([[0.0], np.cumsum(p)]), 1.0)
        below_q = np.minimum(np.concatenate([[0.0], np.cumsum(q)]), 1.0)
        gain_p, gain_q = np.diff(self.runs.pgf(below_p)), np.diff(self.runs.pgf(below_q))
        enough = _LARGE * (1.0 + float(self.runs.pgf_derivative(1.0)))
        least = p * self.runs.pgf_derivative(below_p[:-1])
        most = q * self.runs.pgf_derivative(below_q[1:])
        return (
            np.where(gain_p > enough, gain_p, least) * (1.0 - _ROUNDING),
            np.where(gain_q > enough, gain_q, most) * (1.0 + _ROUNDING),
        )

    def delta(self, epsilon: float, count: int = 12) -> float:
        """Return the largest δ at this ε among the instances that are tried."""
        best = 0.0
        z = np.exp(np.minimum(epsilon - self.losses, 700.0))
        pays = self.losses[self.tuner.support(z) > 0.0]
        lowest = float(pays[-1]) if pays.size else epsilon
        for threshold in (math.inf, *np.linspace(lowest, epsilon, count)):
            p, q = self.tuned(self.order(epsilon, float(threshold)))
            best = max(best, float(np.maximum(p - math.exp(min(epsilon, 700.0)) * q, 0.0).sum()))
        return best

    def epsilon(self, delta: float) -> float:
        """Return an ε at which some instance still has a δ above the target, nearly the largest."""
        low, high = 0.0, self.tuner.epsilon(delta)
        if not math.isfinite(high) or self.delta(0.0) <= delta:
            return 0.0
        for _ in range(20):
            middle = 0.5 * (low + high)
            if self.delta(middle) > delta:
                low = middle
            else:
                high = middle
        return low
