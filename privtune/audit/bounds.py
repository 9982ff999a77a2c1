"""Lower bounds on ε from what was seen of two neighbours, and what an event claims about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import stats

from privtune.accounting import Adjacency, Event, scale_noise
from privtune.accounting import delta as delta_of
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError

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


_THRESHOLDS = 400  # that are tried on the held-out part
_ABOVE = 1.2  # factor of the noise
_CELLS = 100  # in which a false positive rate may lie
_RARE = 1e-9  # of a count: what is beyond is counted whole
_FEW = 30.0  # false positives below which they are bounded by themselves
_GUESSED = (0.04, 0.2, 0.6)  # shares of the canaries that are guessed, fixed in advance


@dataclass(frozen=True)
class LowerBound:
    """What an audit found.

    Args:
        epsilon: The mechanism is not (epsilon', delta)-DP for any epsilon' below this; against a
            claim, no mechanism of its family with an epsilon' below this fits what was seen.
        runs: Runs, or canaries, that the bounds rest on; those that chose the test not counted.

    Example:
        >>> LowerBound(1.2, runs=20_000).epsilon
        1.2
    """

    epsilon: float
    runs: int


def lower_bound(
    without: Floats,
    canary: Floats,
    *,
    delta: float,
    confidence: float = 0.95,
    held_out: float = 0.25,
    claim: Claim | None = None,
) -> LowerBound:
    """Bound epsilon from below by the best threshold test between two neighbours.

    The direction, the threshold and the odds at which its two errors count are chosen on the first runs
    of each side, or by the claim alone; the others are put to one exact test of both rates together.

    Args:
        without: A statistic of all that was released, one value a run, on one dataset.
        canary: Likewise on its neighbour, where it should be larger; runs are independent.
        delta: In [0, 1).
        confidence: Of the lower bound: it is above the truth with probability 1 - confidence at most.
        held_out: Fraction of the runs that choose the test. 0 where the statistic is the log-likelihood
            ratio of the claim: the claim then chooses, and every run counts.
        claim: What is held against the bound, as a whole profile: see the module. Without it,
            nothing is assumed.

    Returns:
        The bound, at least 0.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> truth = [(rng.random(20_000) < p).astype(float) for p in (0.25, 0.75)]
        >>> round(lower_bound(*truth, delta=0.0).epsilon, 2)  # randomised response: log 3 = 1.10
        1.08

    References:
        Kairouz, Oh, Viswanath, arXiv:1311.0776, Theorem 2.1: (epsilon, delta)-DP if and only if every
        test has ``TPR <= e^epsilon FPR + delta``. Dong, Roth, Su, arXiv:1905.02383: a profile and a
        trade-off curve say the same (Proposition 2.13). Nasr et al., arXiv:2302.07956, Section 4:
        audits by the trade-off curve of the mechanism. Berger and Boos 1994 (JASA 89): p-values
        maximised over a confidence set of what is not asked for.
    """
    risk = 1.0 - confidence
    cut = round(held_out * min(len(without), len(canary)))
    slope: float | None
    if claim is not None and not cut:
        side, (threshold, slope) = 0, claim.best_test(len(canary), risk)
    else:
        side, threshold, odds, false = _chosen(
            without[:cut], canary[:cut], risk / 2.0, delta, claim
        )
        slope = odds if false * (len(without) - cut) > _FEW else None
    low, high = list(_sides(without[cut:], canary[cut:]))[side]
    test = _Test(low, high, threshold, slope, risk)
    if claim is None:
        epsilon = _largest(lambda e: test.refutes(lambda rate: np.exp(e) * rate + delta))
    else:
        epsilon = claim.largest(
            lambda factor: test.refutes(lambda rate: claim.allowed(rate, factor)[0])
        )
    return LowerBound(epsilon, len(low) + len(high))


class _Test:
    """How often a test said "canary" without it, ``false``, and with it, ``true``."""

    def __init__(
        self, low: Floats, high: Floats, threshold: float, slope: float | None, risk: float
    ) -> None:
        self.without, self.canary, self.slope, self.risk = len(low), len(high), slope, risk
        self.false, self.true = int((low > threshold).sum()), int((high > threshold).sum())
        self.apart = _rates(low, high, np.array([threshold]), risk / 2.0)

    def refutes(self, allowed: Callable[[Floats], Floats]) -> bool:
        """Say whether so much is seen too rarely where true positives are as rare as allowed."""
        if self.slope is None:
            fpr, tpr = self.apart
            return bool(tpr[0] > allowed(fpr)[0])
        return self._chance(self.slope, allowed) <= self.risk

    def _chance(self, slope: float, allowed: Callable[[Floats], Floats]) -> float:
        """Return the largest chance of so much evidence."""
        # Evidence is the true positive rate less slope times the false one: over a cell of false rates the
        # chance is at most that of its lower end with the power that its upper end is allowed.
        beyond = self.risk / 50.0  # that the false positive rate lies in none of the cells
        ends = stats.beta.ppf(
            [beyond / 2.0, 1.0 - beyond / 2.0],
            [max(self.false, 1), self.false + 1],
            [self.without - self.false + 1, max(self.without - self.false, 1)],
        )
        first, last = np.where([self.false == 0, self.false == self.without], [0.0, 1.0], ends)
        edges = np.linspace(first, last, _CELLS + 1)
        fpr, tpr = edges[:-1], np.clip(allowed(edges[1:]), 0.0, 1.0)[:, None]
        few, many = stats.binom.ppf([_RARE, 1.0 - _RARE], self.without, [first, last])
        counts = np.arange(max(few, 0), many + 1)
        more = (counts - self.false) / self.without
        needed = np.ceil(self.true + self.canary * slope * more - 1e-9)
        chance = stats.binom.pmf(counts, self.without, fpr[:, None]) * stats.binom.sf(
            needed - 1, self.canary, tpr
        )
        rare = stats.binom.cdf(few - 1, self.without, fpr) + stats.binom.sf(many, self.without, fpr)
        return beyond + float((chance.sum(axis=1) + rare).max())


def _largest(found: Callable[[float], bool]) -> float:
    """Return the largest ε such that all smaller ones are refuted; 0 if none is."""
    low, high = 0.0, 1.0
    if not found(0.0):
        return 0.0
    while found(high) and high < 64.0:
        low, high = high, 2.0 * high
    for _ in range(20):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if found(middle) else (low, middle)
    return low


def _chosen(
    without: Floats, canary: Floats, risk: float, delta: float, claim: Claim | None
) -> tuple[int, float, float, float]:
    """Return direction and threshold of the best test, the slope of what it refutes, its errors."""
    tests = []
    for low, high in _sides(without, canary):
        tried = np.quantile(np.concatenate([low, high]), np.linspace(0.0, 1.0, _THRESHOLDS))
        tests.append((tried, _rates(low, high, tried, risk)))
    if claim is None:
        worth = [_found(*rates, delta) for _, rates in tests]
    else:
        # The test that contradicts the claim by most, a little above the least noise at which any
        # does: just there it would be the luckiest.
        for factor in np.geomspace(0.5, WIDEST, 36):
            worth = [claim.margin(*rates, _ABOVE * float(factor)) for _, rates in tests]
            if max(float(claim.margin(*rates, float(factor)).max()) for _, rates in tests) > 0.0:
                break
    side = int(np.argmax([values.max() for values in worth]))
    best = int(np.argmax(worth[side]))
    tried, (fpr, _) = tests[side]
    if claim is None:
        slope = math.exp(max(0.0, float(worth[side][best])))
    else:
        slope = float(claim.allowed(fpr[[best]], float(factor))[1][0])
    return side, float(tried[best]), slope, float(fpr[best])


def _sides(without: Floats, canary: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Yield the two directions: large values that give the canary away, small ones its absence."""
    yield without, canary
    yield -canary, -without


def _rates(low: Floats, high: Floats, thresholds: Floats, risk: float) -> tuple[Floats, Floats]:
    """Return upper bounds on the false positive rates and lower ones on the true positive rates."""
    false, true = (len(s) - np.searchsorted(np.sort(s), thresholds, "right") for s in (low, high))
    upper = stats.beta.ppf(1.0 - risk, false + 1, np.maximum(len(low) - false, 1))
    lower = stats.beta.ppf(risk, np.maximum(true, 1), len(high) - true + 1)
    return np.where(false < len(low), upper, 1.0), np.where(true > 0, lower, 0.0)


def _found(fpr: Floats, tpr: Floats, delta: float) -> Floats:
    """Return the bounds on epsilon."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.maximum(tpr - delta, 0.0) / fpr))


def one_run_bound(
    absent: Floats,
    present: Floats,
    *,
    delta: float,
    confidence: float = 0.95,
    claim: Claim | None = None,
) -> LowerBound:
    """Bound epsilon from below by how many canaries of a single run are guessed right.

    Of those that score highest the auditor says that they are in, of those that score lowest that
    they are out, of the others nothing. How many are guessed is fixed in advance, in three ways; each
    has a third of what may go wrong.

    Args:
        absent: Scores of the canaries that were left out.
        present: Scores of those that were in: each with probability 1/2, independently.
        delta: In [0, 1).
        confidence: Of the lower bound.
        claim: What is held against the bound, as in :func:`lower_bound`.

    Returns:
        The best of the three bounds, at least 0.

    Example:
        >>> import numpy as np
        >>> scores = np.random.default_rng(0).normal(size=4000) + np.repeat([0.0, 3.0], 2000)
        >>> found = one_run_bound(scores[:2000], scores[2000:], delta=1e-5)
        >>> 2.0 < found.epsilon < 3.0 ** 2 / 2 + 3.0 * 3.9  # of a Gaussian of mu = 3
        True

    References:
        Steinke, Nasr, Jagielski, arXiv:2305.08846, Theorem 5.2 with guesses withheld (and its
        Appendix D for the number). Mahloujifar, Melis, Chaudhuri, arXiv:2410.22235, Algorithm 3: the
        same for a trade-off curve, here that of the claim.
    """
    scores = np.concatenate([absent, present])
    inside = np.repeat([False, True], [len(absent), len(present)])
    inside = inside[np.argsort(scores, kind="stable")]
    total, risk = len(scores), (1.0 - confidence) / len(_GUESSED)
    best = 0.0
    for share in _GUESSED:
        half = max(1, round(share * total / 2))
        right = int(inside[-half:].sum() + (~inside[:half]).sum())
        if claim is None:
            found = _one_run(total, 2 * half, right, delta, risk)
        else:
            found = claim.largest(_guesses(claim, total, 2 * half, right, risk))
        best = max(best, found)
    return LowerBound(best, total)


def _one_run(total: int, guesses: int, right: int, delta: float, risk: float) -> float:
    """Return the largest ε at which so many right guesses have a probability of ``risk`` at most."""

    def chance(epsilon: float) -> float:
        each = 1.0 / (1.0 + math.exp(-epsilon))
        binomial = stats.binom(guesses, each)
        beyond = float(binomial.sf(right - 1))
        if delta == 0.0:
            return beyond
        steps = np.arange(1, right + 1)
        missed = (binomial.sf(right - steps - 1) - beyond) / steps
        return beyond + 2.0 * total * delta * float(missed.max(initial=0.0))

    return _largest(lambda epsilon: chance(epsilon) <= risk)


def _guesses(
    claim: Claim, total: int, guesses: int, right: int, risk: float
) -> Callable[[float], bool]:
    """Return a function of the claim's noise factor: whether so many right guesses contradict the claim."""
    # hits and misses: P(at least i guesses are right), split by whether the guess in question is; the
    # trade-off curve bounds one by the other. If both exceed the share of guesses, the first exceeded `risk`.
    if not guesses:
        raise InvalidInputError("guesses", guesses, "must be at least 1")

    def contradicted(factor: float) -> bool:
        hits = risk * right / total
        misses = risk * (guesses - right) / total
        for i in range(right - 1, -1, -1):
            least = max(misses, claim.lowest_fpr(hits, factor))
            if least == misses:
                break
            hits = min(1.0, hits + i / (guesses - i) * (least - misses))
            misses = least
        return hits + misses > guesses / total

    return contradicted
