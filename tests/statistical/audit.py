"""Empirical lower bounds on epsilon, from runs on two neighbouring datasets.

No account is used: what an account reports is held against these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.optimize import brentq

__all__ = ["LowerBound", "lower_bound"]

Floats = npt.NDArray[np.float64]

_THRESHOLDS = 400  # that are tried on the held-out part


@dataclass(frozen=True)
class LowerBound:
    """What an audit found.

    Args:
        epsilon: The mechanism is not (epsilon', delta)-DP for any epsilon' below this.
        false_positive_rate: Upper confidence bound.
        true_positive_rate: Lower confidence bound.
        runs: Runs on both sides that the bounds rest on; those that chose the test not counted.
    """

    epsilon: float
    false_positive_rate: float
    true_positive_rate: float
    runs: int


def lower_bound(
    without: Floats,
    canary: Floats,
    *,
    delta: float,
    confidence: float = 0.95,
    held_out: float = 0.25,
    gaussian: bool = False,
) -> LowerBound:
    """Bound epsilon from below by the best threshold test between two neighbours.

    The direction and the threshold are chosen on the first runs of each side; the bounds on the two
    rates come from the others, so one test is made of them: Clopper and Pearson, each one-sided at
    half of what may go wrong.

    Args:
        without: A statistic of all that was released, one value a run, on one dataset.
        canary: Likewise on its neighbour, where it should be larger; runs are independent.
        delta: In [0, 1).
        confidence: Of the lower bound: it is above the truth with probability 1 - confidence at most.
        held_out: Fraction of the runs that choose the test.
        gaussian: Whether what is held against the bound is a claim of mu-GDP, as that of a
            composition of Gaussians without sampling is. The bound is then on mu, and epsilon is
            what that mu means at delta: tighter, and a bound for mechanisms of that claim alone.

    Returns:
        The bound, at least 0.

    References:
        Kairouz, Oh, Viswanath, arXiv:1311.0776, Theorem 2.1: (epsilon, delta)-DP if and only if every
        test has ``TPR <= e^epsilon FPR + delta``. Dong, Roth, Su, arXiv:1905.02383, Definition 2.6:
        mu-GDP if and only if every test has ``TPR <= Phi(Phi^-1(FPR) + mu)``; Corollary 2.13: then
        ``delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)``, and no less.
    """
    risk = (1.0 - confidence) / 2.0
    cut = round(held_out * min(len(without), len(canary)))
    # Of a Gaussian every threshold tells the same mu; those in the middle are known best.
    span = (0.2, 0.8) if gaussian else (0.0, 1.0)
    best, side, threshold = -math.inf, 0, np.array([math.inf])
    for number, (low, high) in enumerate(_sides(without[:cut], canary[:cut])):
        tried = np.quantile(np.concatenate([low, high]), np.linspace(*span, _THRESHOLDS))
        found = _found(*_rates(low, high, tried, risk), delta, gaussian)
        most = int(np.argmax(found))
        if found[most] > best:
            best, side, threshold = float(found[most]), number, tried[[most]]
    low, high = list(_sides(without[cut:], canary[cut:]))[side]
    rates = _rates(low, high, threshold, risk)
    value = float(_found(*rates, delta, gaussian)[0])
    epsilon = _epsilon_of(value, delta) if gaussian else value
    return LowerBound(
        max(0.0, epsilon), float(rates[0][0]), float(rates[1][0]), len(low) + len(high)
    )


def _sides(without: Floats, canary: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Yield the two directions: large values that give the canary away, small ones its absence."""
    yield without, canary
    yield -canary, -without


def _rates(low: Floats, high: Floats, thresholds: Floats, risk: float) -> tuple[Floats, Floats]:
    """Return upper bounds on the false positive rates and lower ones on the true positive rates."""
    false, true = ((side > thresholds[:, None]).sum(axis=1) for side in (low, high))
    upper = stats.beta.ppf(1.0 - risk, false + 1, np.maximum(len(low) - false, 1))
    lower = stats.beta.ppf(risk, np.maximum(true, 1), len(high) - true + 1)
    return np.where(false < len(low), upper, 1.0), np.where(true > 0, lower, 0.0)


def _found(fpr: Floats, tpr: Floats, delta: float, gaussian: bool) -> Floats:
    """Return the bounds on mu, or those on epsilon."""
    with np.errstate(divide="ignore"):
        if gaussian:
            return np.where(fpr < 1.0, stats.norm.ppf(tpr) - stats.norm.ppf(fpr), -np.inf)
        return np.log(np.maximum(tpr - delta, 0.0) / fpr)


def _epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest epsilon with which mu-GDP is (epsilon, delta)-DP."""

    def excess(epsilon: float) -> float:
        tail = stats.norm.logcdf(-mu / 2.0 - epsilon / mu)
        return float(stats.norm.cdf(mu / 2.0 - epsilon / mu) - math.exp(epsilon + tail)) - delta

    if mu <= 0.0 or excess(0.0) <= 0.0:
        return 0.0
    return float(brentq(excess, 0.0, mu * mu + 20.0 * mu + 1.0))
