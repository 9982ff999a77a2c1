"""Lower bounds on ε from a statistic of runs on two neighbours, with or without a claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
Indices = npt.NDArray[np.int64]

Curve = tuple[Floats, Floats]
"""A profile: values of ε, ascending, and δ at each."""

Rates = tuple[Floats, Floats]
"""Of several tests: upper bounds on the false positive rates, lower ones on the true positive rates."""

WIDEST = 16.0
"""Factor of the noise, up and down, within which a claim is looked for."""
_POINTS = 25  # of ε at which a profile is held against the rates
_LARGEST_EPSILON = 50.0  # of a profile
_RAREST = 1e-12  # a smaller δ of a profile has no logarithm worth interpolating
_LEAST_FPR = 1e-6  # of a test of the claim's own
_HALVINGS = 12  # of the factor of a claim's noise


class Claim:
    """The claim that an audit tests: an event's privacy profile, as it is and with its noise multiplied.

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
        self,
        event: Event,
        delta: float,
        adjacency: Adjacency = Adjacency.ADD_REMOVE,
    ) -> None:
        self.event = event
        self.delta = delta
        self.adjacency = adjacency

    @property
    def epsilon(self) -> float:
        """The reported ε of the event at the claim's δ."""
        return self._epsilon(1.0)

    def margin(self, fpr: Floats, tpr: Floats, factor: float = 1.0) -> Floats:
        """Return each true positive rate less the largest rate that the claim allows.

        Above 0, no mechanism of the claim has a test of these rates.

        Args:
            fpr: Upper bounds on false positive rates.
            tpr: Lower bounds on true positive rates.
            factor: Of the event's noise.
        """
        largest_tpr, _ = self.allowed(fpr, factor)
        above = tpr - largest_tpr
        return np.asarray(above)

    def allowed(self, fpr: Floats, factor: float = 1.0) -> tuple[Floats, Floats]:
        """Return the largest true positive rates that the claim allows, and its slopes there.

        A profile is a set of lines ``TPR = e^ε FPR + δ``, one for each ε; the lowest of them holds.

        Args:
            fpr: False positive rates.
            factor: Of the event's noise.
        """
        epsilons, deltas = self._profile(factor)
        slopes = np.exp(epsilons)
        lines = slopes * fpr[:, None] + deltas
        lowest = lines.argmin(axis=1)
        return lines.min(axis=1), slopes[lowest]

    def best_test(self, runs: int, risk: float) -> tuple[float, float]:
        """Return the likelihood-ratio threshold that most contradicts the claim in `runs` runs, and a slope.

        A true claim has the tests of Neyman and Pearson, whose rates are the profile's tangents. Of
        them the one that first contradicts a claim of more noise, as its factor grows.

        Args:
            runs: On each side.
            risk: Of the test.

        Returns:
            The threshold of the log-likelihood ratio, and the odds at which a false positive counts.
        """
        coarse, coarse_deltas = self._profile(1.0)
        epsilons = np.linspace(0.0, coarse[-1], 16 * _POINTS)
        # δ falls about exponentially in ε: between two points its logarithm is interpolated.
        coarse_log_deltas = np.log(np.maximum(coarse_deltas, _RAREST))
        log_deltas = np.interp(epsilons, coarse, coarse_log_deltas)
        deltas = np.exp(log_deltas)
        # The tangent at ε touches the trade-off curve where FPR = -δ'(ε) e^-ε, and TPR = δ + e^ε FPR.
        descent = -np.gradient(deltas, epsilons)
        touching_fpr = descent * np.exp(-epsilons)
        fpr = np.maximum(touching_fpr, _LEAST_FPR)
        touching_tpr = deltas + np.exp(epsilons) * fpr
        tpr = np.minimum(touching_tpr, 1.0)
        return self._best_of(epsilons, fpr, tpr, runs=runs, risk=risk)

    def _best_of(
        self,
        thresholds: Floats,
        fpr: Floats,
        tpr: Floats,
        *,
        runs: int,
        risk: float,
    ) -> tuple[float, float]:
        """Return the first threshold to contradict a claim as its noise grows, and the slope there."""
        enough = stats.norm.isf(risk)
        for factor in np.geomspace(1.005, WIDEST, 200):
            allowed, slopes = self.allowed(fpr, float(factor))
            tpr_variance = tpr * (1.0 - tpr)
            fpr_variance = slopes**2 * fpr * (1.0 - fpr)
            deviation = np.sqrt((tpr_variance + fpr_variance) / runs)
            rounding = (1.0 + slopes) / runs  # counts of runs are whole numbers
            margin = tpr - allowed
            worth = margin / (deviation + rounding)
            best = int(worth.argmax())
            if worth[best] > enough:
                break
        threshold = float(thresholds[best])
        slope = float(slopes[best])
        return threshold, slope

    def lowest_fpr(self, tpr: float, factor: float) -> float:
        """Return the least false positive rate that the claim allows at a true positive rate.

        Args:
            tpr: The power.
            factor: Of the event's noise.
        """
        epsilons, deltas = self._profile(factor)
        forward = (tpr - deltas) * np.exp(-epsilons)
        # The same of the complementary test, with the neighbours in each other's place.
        missed = 1.0 - tpr
        backward = 1.0 - deltas - np.exp(epsilons) * missed
        least = max(0.0, forward.max(), backward.max())
        return float(least)

    def largest(self, contradicted: Callable[[float], bool]) -> float:
        """Return ε at the least noise at which the claim is contradicted; 0 if it never is.

        Args:
            contradicted: Whether it is, with this factor of its noise; true from some factor on.
        """
        low = 1.0 / WIDEST
        high = WIDEST
        if not contradicted(high):
            return 0.0
        if contradicted(low):
            return self._epsilon(low)
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            if contradicted(middle):
                high = middle
            else:
                low = middle
        return self._epsilon(high)

    def _epsilon(self, factor: float) -> float:
        event = scale_noise(self.event, factor)
        guarantee = account(event, self.delta, adjacency=self.adjacency)
        return guarantee.epsilon

    def _profile(self, factor: float) -> Curve:
        return _profile(self.event, self.adjacency, factor)


@lru_cache(maxsize=256)
def _profile(event: Event, adjacency: Adjacency, factor: float) -> Curve:
    """Return the profile of an event with its noise multiplied: 25 values of ε, and δ at each."""
    event = scale_noise(event, factor)
    end = account(event, 1e-4, adjacency=adjacency).epsilon
    if math.isfinite(end):
        last = min(end, _LARGEST_EPSILON)
    else:
        last = _LARGEST_EPSILON
    epsilons = np.linspace(0.0, last, _POINTS)
    deltas = []
    for epsilon in epsilons.tolist():
        guarantee = delta_of(event, epsilon, adjacency=adjacency)
        deltas.append(guarantee.delta)
    return epsilons, np.array(deltas)


_THRESHOLDS = 400  # that are tried on the held-out part
_ABOVE = 1.2  # factor of the noise
_CELLS = 100  # in which a false positive rate may lie
_RARE = 1e-9  # of a count: what is beyond is counted whole
_FEW = 30.0  # false positives below which they are bounded by themselves
_SHARES = (0.04, 0.2, 0.6)  # of the canaries: how many are guessed, fixed in advance
_STEEPEST = 64.0  # ε from which the search doubles it no more


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on ε, and the number of runs that it rests on.

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
    """Bound ε from below by the best threshold test between two neighbouring datasets.

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
    fewest = min(len(without), len(canary))
    cut = round(held_out * fewest)
    sides = _Sides(without[cut:], canary[cut:])
    slope: float | None
    if claim is not None and not cut:
        threshold, slope = claim.best_test(len(canary), risk)
    else:
        first_runs = _Sides(without[:cut], canary[:cut])
        search = _TestSearch(first_runs, risk / 2.0)
        if claim is None:
            choice = search.against_epsilon(delta)
        else:
            choice = search.against_claim(claim)
        threshold = choice.threshold
        false_positives = choice.fpr * len(sides.without)
        slope = choice.slope if false_positives > _FEW else None
        if choice.is_mirrored:
            sides = sides.mirrored()
    test = _Test(sides, threshold, slope, risk)
    runs = len(sides.without) + len(sides.canary)
    if claim is None:
        return LowerBound(test.largest_epsilon(delta), runs)
    return LowerBound(test.largest_of_claim(claim), runs)


@dataclass(frozen=True, eq=False)
class _Sides:
    """A statistic of runs with and without the canary, whose large values indicate the canary.

    Args:
        without: One value a run, on the dataset without the canary.
        canary: One value a run, with it.
    """

    without: Floats
    canary: Floats

    def mirrored(self) -> _Sides:
        """Return the negated statistic with both sides exchanged, to test for the canary's absence."""
        return _Sides(-self.canary, -self.without)

    def rates(self, thresholds: Floats, risk: float) -> Rates:
        """Return upper bounds on false positive rates and lower bounds on true ones, by threshold.

        Args:
            thresholds: A test each: above it the canary is said to be in.
            risk: That a single bound is wrong (Clopper and Pearson).
        """
        false = _count_above(self.without, thresholds)
        true = _count_above(self.canary, thresholds)
        right = len(self.without) - false
        missing = len(self.canary) - true
        # All and none are set apart: the law of Beta wants parameters above 0.
        some_right = np.maximum(right, 1)
        some_true = np.maximum(true, 1)
        upper = stats.beta.ppf(1.0 - risk, false + 1, some_right)
        lower = stats.beta.ppf(risk, some_true, missing + 1)
        fpr = np.where(right > 0, upper, 1.0)
        tpr = np.where(true > 0, lower, 0.0)
        return fpr, tpr


def _count_above(values: Floats, thresholds: Floats) -> Indices:
    ordered = np.sort(values)
    at_most = np.searchsorted(ordered, thresholds, "right")
    return len(values) - at_most


class _Test:
    """A threshold test with its counts of false and true positives.

    Args:
        sides: What it is put to; these runs have not chosen it.
        threshold: Above it the test says "canary".
        slope: The odds at which a false positive counts; None bounds both rates by themselves.
        risk: That the test refutes what is true.
    """

    def __init__(
        self,
        sides: _Sides,
        threshold: float,
        slope: float | None,
        risk: float,
    ) -> None:
        self.without = len(sides.without)
        self.canary = len(sides.canary)
        self.slope = slope
        self.risk = risk
        says_canary = sides.without > threshold
        self.false = int(says_canary.sum())
        says_canary = sides.canary > threshold
        self.true = int(says_canary.sum())
        thresholds = np.array([threshold])
        self.rates = sides.rates(thresholds, risk / 2.0)

    def largest_epsilon(self, delta: float) -> float:
        """Return the largest ε such that the test refutes it and all smaller ones at this δ."""

        def is_refuted(epsilon: float) -> bool:
            return self.refutes(lambda fpr: np.exp(epsilon) * fpr + delta)

        return _largest(is_refuted)

    def largest_of_claim(self, claim: Claim) -> float:
        """Return ε of the claim with the least noise at which the test refutes it."""

        def is_refuted(factor: float) -> bool:
            return self.refutes(lambda fpr: claim.allowed(fpr, factor)[0])

        return claim.largest(is_refuted)

    def refutes(self, allowed: Callable[[Floats], Floats]) -> bool:
        """Return whether the test refutes that true positive rates are at most `allowed`."""
        if self.slope is not None:
            return self._chance(self.slope, allowed) <= self.risk
        fpr, tpr = self.rates
        [largest_tpr] = allowed(fpr)
        return bool(tpr[0] > largest_tpr)

    def _chance(self, slope: float, allowed: Callable[[Floats], Floats]) -> float:
        """Return the largest probability of evidence this strong if rates are as `allowed`."""
        # Evidence is the true positive rate less slope times the false one: over a cell of false rates the
        # chance is at most that of its lower end with the power that its upper end is allowed.
        beyond = self.risk / 50.0  # that the false positive rate lies in none of the cells
        first, last = self._fpr_interval(beyond)
        edges = np.linspace(first, last, _CELLS + 1)
        fpr = edges[:-1]
        upper_fpr = edges[1:]
        tpr = np.clip(allowed(upper_fpr), 0.0, 1.0)
        few = stats.binom.ppf(_RARE, self.without, first)
        many = stats.binom.ppf(1.0 - _RARE, self.without, last)
        counts = np.arange(max(few, 0), many + 1)
        more = (counts - self.false) / self.without
        # So many true positives make up for these false ones; rounding must not ask for one more.
        making_up = self.true + self.canary * slope * more
        enough = np.ceil(making_up - 1e-9)
        # A row is a cell, a column a count of false positives.
        false_chances = stats.binom.pmf(counts, self.without, fpr[:, None])
        true_chances = stats.binom.sf(enough - 1, self.canary, tpr[:, None])
        joint = false_chances * true_chances
        chances = joint.sum(axis=1)
        below_counts = stats.binom.cdf(few - 1, self.without, fpr)
        above_counts = stats.binom.sf(many, self.without, fpr)
        rare = below_counts + above_counts
        most = chances + rare
        return beyond + float(most.max())

    def _fpr_interval(self, risk: float) -> tuple[float, float]:
        """Return an interval that misses the false positive rate with probability ``risk``."""
        right = self.without - self.false
        tail = risk / 2.0
        first = 0.0
        last = 1.0
        if self.false:
            first = stats.beta.ppf(tail, self.false, right + 1)
        if right:
            last = stats.beta.ppf(1.0 - tail, self.false + 1, right)
        return float(first), float(last)


def _largest(is_refuted: Callable[[float], bool]) -> float:
    """Return the largest ε such that it and all smaller ones are refuted; 0 if none is."""
    low = 0.0
    high = 1.0
    if not is_refuted(0.0):
        return 0.0
    while is_refuted(high) and high < _STEEPEST:
        low = high
        high = 2.0 * high
    for _ in range(20):
        middle = 0.5 * (low + high)
        if is_refuted(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class _BestTest:
    """The chosen threshold test: its direction, threshold, slope, and false positive rate.

    Args:
        is_mirrored: Whether small values give the canary's absence away.
        threshold: Of the statistic, in the test's direction.
        slope: The odds at which a false positive counts.
        fpr: Upper bound on its false positive rate.
    """

    is_mirrored: bool
    threshold: float
    slope: float
    fpr: float


class _TestSearch:
    """The search for the best threshold test, in both directions, on the held-out runs.

    Args:
        sides: The held-out part.
        risk: That a single rate is beyond its bound.
    """

    def __init__(self, sides: _Sides, risk: float) -> None:
        self.thresholds: list[Floats] = []
        self.rates: list[Rates] = []
        levels = np.linspace(0.0, 1.0, _THRESHOLDS)
        for direction in (sides, sides.mirrored()):
            values = np.concatenate([direction.without, direction.canary])
            thresholds = np.quantile(values, levels)
            rates = direction.rates(thresholds, risk)
            self.thresholds.append(thresholds)
            self.rates.append(rates)

    def against_epsilon(self, delta: float) -> _BestTest:
        """Return the test that refutes the largest ε at this δ."""
        epsilons = [_epsilons_of(fpr, tpr, delta) for fpr, tpr in self.rates]
        side, best = _argmax(epsilons)
        epsilon = max(0.0, float(epsilons[side][best]))
        slope = math.exp(epsilon)
        return self._choice(side, best, slope)

    def against_claim(self, claim: Claim) -> _BestTest:
        """Return the test that most contradicts the claim, with its noise somewhat increased.

        Just there it would be the luckiest.
        """
        factor = self._refuted_factor(claim)
        side, best = _argmax(self._margins(claim, _ABOVE * factor))
        fpr, _ = self.rates[side]
        _, slopes = claim.allowed(fpr[[best]], factor)
        return self._choice(side, best, float(slopes[0]))

    def _refuted_factor(self, claim: Claim) -> float:
        """Return about the least noise factor at which a test contradicts the claim, or 16."""
        for factor in np.geomspace(0.5, WIDEST, 36).tolist():
            margins = np.concatenate(self._margins(claim, factor))
            if margins.max() > 0.0:
                break
        return float(factor)

    def _margins(self, claim: Claim, factor: float) -> list[Floats]:
        return [claim.margin(fpr, tpr, factor) for fpr, tpr in self.rates]

    def _choice(self, side: int, best: int, slope: float) -> _BestTest:
        thresholds = self.thresholds[side]
        fpr, _ = self.rates[side]
        return _BestTest(
            is_mirrored=side == 1,
            threshold=float(thresholds[best]),
            slope=slope,
            fpr=float(fpr[best]),
        )


def _argmax(worth: Sequence[Floats]) -> tuple[int, int]:
    """Return the direction and the index of the largest value."""
    largest = [values.max() for values in worth]
    side = int(np.argmax(largest))
    best = int(np.argmax(worth[side]))
    return side, best


def _epsilons_of(fpr: Floats, tpr: Floats, delta: float) -> Floats:
    """Return the lower bounds on ε by tests of these rates: ``log((TPR - δ) / FPR)``."""
    above = np.maximum(tpr - delta, 0.0)
    with np.errstate(divide="ignore"):  # log 0 is a bound of -∞: none
        odds = above / fpr
        return np.asarray(np.log(odds))


def one_run_bound(
    absent: Floats,
    present: Floats,
    *,
    delta: float,
    confidence: float = 0.95,
    claim: Claim | None = None,
) -> LowerBound:
    """Bound ε from below by how many canaries of a single run are guessed correctly.

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
        >>> bound = one_run_bound(scores[:2000], scores[2000:], delta=1e-5)
        >>> 2.0 < bound.epsilon < 3.0 ** 2 / 2 + 3.0 * 3.9  # of a Gaussian of mu = 3
        True

    References:
        Steinke, Nasr, Jagielski, arXiv:2305.08846, Theorem 5.2 with guesses withheld (and its
        Appendix D for the number). Mahloujifar, Melis, Chaudhuri, arXiv:2410.22235, Algorithm 3: the
        same for a trade-off curve, here that of the claim.
    """
    scores = np.concatenate([absent, present])
    counts = [len(absent), len(present)]
    truth = np.repeat([False, True], counts)
    ascending = np.argsort(scores, kind="stable")
    truth = truth[ascending]
    total = len(scores)
    risk = (1.0 - confidence) / len(_SHARES)
    best = 0.0
    for share in _SHARES:
        half = max(1, round(share * total / 2))
        guessed_in = truth[-half:]
        guessed_out = truth[:half]
        right = guessed_in.sum() + (~guessed_out).sum()
        guesses = _Guesses(
            total=total,
            guesses=2 * half,
            right=int(right),
            risk=risk,
        )
        if claim is None:
            epsilon = guesses.largest_epsilon(delta)
        else:
            epsilon = guesses.largest_of_claim(claim)
        best = max(best, epsilon)
    return LowerBound(best, total)


@dataclass(frozen=True)
class _Guesses:
    """The numbers of canaries, guesses and correct guesses in one run.

    Args:
        total: Canaries.
        guesses: Those of which something was said, at least 1.
        right: Of these, the right ones.
        risk: That a true ε, or a true claim, is refuted.
    """

    total: int
    guesses: int
    right: int
    risk: float

    def __post_init__(self) -> None:
        if not self.guesses:
            raise InvalidInputError("guesses", self.guesses, "must be at least 1")

    def largest_epsilon(self, delta: float) -> float:
        """Return the largest ε such that the guesses refute it and all smaller ones at this δ."""
        return _largest(lambda epsilon: self.refute_epsilon(epsilon, delta))

    def largest_of_claim(self, claim: Claim) -> float:
        """Return ε of the claim with the least noise at which the guesses refute it."""
        return claim.largest(lambda factor: self.refute_claim(claim, factor))

    def refute_epsilon(self, epsilon: float, delta: float) -> bool:
        """Return whether this many correct guesses refute (ε, δ)-DP at the risk."""
        right_one = 1.0 / (1.0 + math.exp(-epsilon))
        binomial = stats.binom(self.guesses, right_one)
        chance = float(binomial.sf(self.right - 1))
        if delta > 0.0:
            # Theorem 5.2: β + 2 m δ α, where m is `total` and α is the largest gain.
            steps = np.arange(1, self.right + 1)
            fewer = binomial.sf(self.right - steps - 1)
            gains = (fewer - chance) / steps
            largest_gain = float(gains.max(initial=0.0))
            chance += 2.0 * self.total * delta * largest_gain
        return chance <= self.risk

    def refute_claim(self, claim: Claim, factor: float) -> bool:
        """Return whether this many correct guesses refute the claim with its noise multiplied."""
        # hits and misses: P(at least i guesses are right), split by whether the guess in question is; the
        # trade-off curve bounds one by the other. If both exceed the share of guesses, the first exceeded
        # `risk`.
        wrong = self.guesses - self.right
        hits = self.risk * self.right / self.total
        misses = self.risk * wrong / self.total
        for i in reversed(range(self.right)):
            least = max(misses, claim.lowest_fpr(hits, factor))
            if least == misses:
                break
            odds = i / (self.guesses - i)
            hits = min(1.0, hits + odds * (least - misses))
            misses = least
        return hits + misses > self.guesses / self.total
