"""Scores with their intervals: what noised sums over records say about a metric, and how surely.

Every interval here is the set of the values that a test does not reject. For a value θ the test looks at
a statistic that has mean zero where θ is the truth, and is linear in the noised sums: for a mean it is
``sum - θ count``. Its variance is that of the noise plus that of the drawing of the records. The count is a
noised sum, too, so nothing here rests on the declared size of a split (Fieller 1954; without noise, and for
a share of records, it is Wilson's interval of 1927).

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
"""How often an interval holds the truth."""
DRAWING = "the drawing of the records"
NOISE = "the noise"
CHOICE = "the choice of the best candidate"
TIES = "what ties within bins may lose"

NO_INFORMATION = "no information"
"""What is shown in the place of a value whose interval is all that the metric can be."""
NOT_COVERED = (
    "An interval takes records for independent: where rows repeat, or several are of one person, it is "
    "too narrow."
)

_SAFETY = 0.85
"""Part of the allowed misses that is aimed at: variances are estimated, and few records are not normal."""
_GRID = 512  # values that are tested between the ends of a metric
_HIGHEST_PRICE = 1e12
_HALVINGS = 50
_TINY = 1e-30  # variance where there is none: at an end of a share without noise
_FAR, _NEAR = 6.0, 241  # deviations around a root that are tested closely, and values there
_WEAK = 4.0
"""Deviations of its noise that the events of a class need, so that their ratio says something."""
_MANY, _WEAK_IN_THE_MEAN = 10, 9.0
"""Classes from which on the mean of their events needs so many deviations."""
_BEYOND = 0.45  # how far noise may move a share out of [0, 1]


@dataclass(frozen=True)
class ScoreEstimate:
    """A score of a model: its value, a 95% interval, and what the interval covers.

    Args:
        value: The metric, within what it can be; in its own direction, so that less of a loss is better.
        low, high: Ends of the 95% interval, within what the metric can be.
        least, most: What the metric can be.
        covers: What the interval allows for: the noise, the drawing of the records, and what else moves
            this score.
        share: Whether the metric is a share, which is shown in percent.

    Example:
        >>> score = ScoreEstimate(0.874, 0.855, 0.893, 0.0, 1.0, ("noise",), share=True)
        >>> score.text, score.is_informative, round(score.width, 3)
        ('87.4% [85.5, 89.3]', True, 0.038)
        >>> ScoreEstimate(0.5, 0.0, 1.0, 0.0, 1.0).text
        'no information'
        >>> ScoreEstimate.from_dict(score.to_dict()) == score
        True
    """

    value: float
    low: float
    high: float
    least: float
    most: float
    covers: tuple[str, ...] = ()
    share: bool = False

    @property
    def text(self) -> str:
        """The value and its interval as people read them."""
        if not self.is_informative:
            return NO_INFORMATION
        return f"{self._shown(self.value)} {self.ends}"

    @property
    def ends(self) -> str:
        """The interval as people read it; the ends of a share are in percent, without the sign."""
        low = self._shown(self.low).removesuffix("%")
        high = self._shown(self.high).removesuffix("%")
        return f"[{low}, {high}]"

    def _shown(self, value: float) -> str:
        return show_value(value, share=self.share, width=self.width)

    @property
    def width(self) -> float:
        """How wide the interval is, in units of the metric."""
        return self.high - self.low

    @property
    def share_of_range(self) -> float:
        """How much of what the metric can be lies in the interval, from 0 to 1."""
        return self.width / (self.most - self.least)

    @property
    def is_informative(self) -> bool:
        """Whether the interval leaves out anything that the metric can be: else nothing is known."""
        return self.low > self.least or self.high < self.most

    @property
    def caption(self) -> str:
        """What the interval covers, in words."""
        return joined(self.covers)

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON-ready data."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "least": self.least,
            "most": self.most,
            "covers": list(self.covers),
            "share": self.share,
        }

    def to_shown(self) -> dict[str, Any]:
        """Return the estimate as it may be shown: without a value where there is no information."""
        return {
            **self.to_dict(),
            "value": self.value if self.is_informative else None,
            "informative": self.is_informative,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the estimate that :meth:`to_dict` wrote."""
        return cls(**{**data, "covers": tuple(data["covers"])})


def show_value(value: float, *, share: bool, width: float = 1.0) -> str:
    """Return a value of a metric as people read it: a share in percent.

    Args:
        value: The value.
        share: Whether it is a share.
        width: Width of its interval, of which two digits are shown: a value known to 0.0001 is not 100.0%.

    Example:
        >>> show_value(0.912, share=True), show_value(12.34567, share=False)
        ('91.2%', '12.3457')
        >>> show_value(0.99981, share=True, width=0.0004)
        '99.981%'
    """
    digits = 1 - math.floor(math.log10(width)) if width > 0.0 else 0
    if share:
        return f"{value:.{min(max(digits - 2, 1), 4)}%}"
    if abs(value) >= 1e4:
        return f"{value:.6g}"
    return f"{value:.{min(max(digits, 4), 8)}f}"


def joined(parts: Sequence[str]) -> str:
    """Return words as a list of a sentence: ``a, b and c``."""
    if not parts:
        return ""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


@dataclass(frozen=True)
class SumNoise:
    """The noise on each of the sums of one metric.

    Args:
        mechanism: ``gaussian`` or ``laplace``.
        scale: Standard deviation, or Laplace's scale, in units of the sums; 0 where the split is public.

    Example:
        >>> SumNoise("laplace", 3.0).variance
        18.0
    """

    mechanism: str
    scale: float

    @property
    def variance(self) -> float:
        """Variance of the noise on a sum: that of Laplace noise is twice the square of its scale."""
        factor = 2.0 if self.mechanism == "laplace" else 1.0
        return factor * self.scale * self.scale

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on a sum."""
        return math.sqrt(self.variance)

    def critical(self, level: float, share: Floats) -> Floats:
        """Return how many standard deviations a statistic stays below with probability ``level``.

        Args:
            level: Probability, in (0, 1), of both sides together.
            share: Share of the noise in the variance of the statistic, from 0 to 1, any shape. The heavy
                tails of Laplace noise matter as far as it reaches.

        Returns:
            The number of standard deviations, in the shape of ``share``.

        References:
            Cornish, Fisher 1938: a symmetric law of excess kurtosis κ has the quantile z + κ (z³ - 3z)/24. A
            sum of independent Laplace values of one scale has at most the 3 of a single one.
        """
        z = float(ndtri(1.0 - 0.5 * _SAFETY * (1.0 - level)))
        if self.mechanism != "laplace":
            return np.full_like(share, z)
        kurtosis = 3.0 * share * share
        return z + kurtosis * max(z**3 - 3.0 * z, 0.0) / 24.0


def invert(
    statistic: Callable[[Floats], Floats],
    drawn: Callable[[Floats], Floats],
    noised: Callable[[Floats], Floats],
    *,
    noise: SumNoise,
    values: Floats,
    level: float,
) -> tuple[float, float]:
    """Return the ends of the values that a test of size ``1 - level`` does not reject.

    The misfit of a value is the square of the statistic over its variance. A value is not rejected if its
    misfit is above the least of all by no more than the square of a normal quantile: where noise leaves no
    value without a misfit, as at 100% of noised hits, some are left nevertheless.

    Args:
        statistic: Of values θ, shape ``[G]``: what has mean 0 where θ is the truth. Linear in θ.
        drawn: Its variance for the drawing of the records, if θ is the truth.
        noised: Its variance for the noise, if θ is the truth.
        noise: The law of the noise.
        values: What θ can be, in ascending order: a grid from the least to the most.
        level: How often the interval holds the truth.

    Returns:
        The least and the largest value that is not rejected, by interpolation between values of the grid.
    """
    values = _around_root(statistic, lambda v: drawn(v) + noised(v), values)
    by_noise = noised(values)
    variance = np.maximum(by_noise + drawn(values), _TINY)
    misfit = statistic(values) ** 2 / variance
    excess = misfit - misfit.min() - noise.critical(level, by_noise / variance) ** 2
    inside = np.flatnonzero(excess <= 0.0)
    first, last = int(inside[0]), int(inside[-1])
    return _crossing(values, excess, first, first - 1), _crossing(values, excess, last, last + 1)


def grid(least: float, most: float) -> Floats:
    """Return values from the least to the most, denser at the ends: there are shares of rare records."""
    turn = 0.5 * (1.0 - np.cos(np.linspace(0.0, np.pi, _GRID + 1)))
    values: Floats = least + (most - least) * turn
    return values


def _around_root(
    statistic: Callable[[Floats], Floats], variance: Callable[[Floats], Floats], values: Floats
) -> Floats:
    """Return a grid with more values around the root of a linear statistic, as dense as it is sure.

    Without them an interval that is narrower than the grid would be one of its points.
    """
    ends = np.array([values[0], values[-1]])
    first, last = (float(part) for part in statistic(ends))
    if first == last:
        return values
    slope = (last - first) / (ends[1] - ends[0])
    root = np.clip(ends[0] - first / slope, ends[0], ends[1])
    deviation = math.sqrt(max(float(variance(np.array([root]))[0]), 0.0)) / abs(slope)
    near = root + deviation * np.linspace(-_FAR, _FAR, _NEAR)
    inside = near[(near > ends[0]) & (near < ends[1])]
    together: Floats = np.unique(np.concatenate([values, inside, [root]]))
    return together


def _crossing(values: Floats, excess: Floats, inside: int, outside: int) -> float:
    """Return where a line between two neighbours of a grid crosses zero."""
    if not 0 <= outside < len(values):
        return float(values[inside])
    part = excess[inside] / (excess[inside] - excess[outside])
    return float(values[inside] + part * (values[outside] - values[inside]))


def mean_of_shares(
    hits: Floats,
    misses: Floats,
    *,
    value: Callable[[Floats], Floats],
    noise: SumNoise,
    level: float,
    weight_of_misses: float = 1.0,
) -> tuple[float, float]:
    """Return the interval of a mean over classes of a function of each class's share of hits.

    For the share p of a class the statistic is ``(1 - p) hits - p misses``. Among n events that are hits with
    probability p its variance is ``n p (1 - p)``, and n is estimated by the events there are. The misfit of
    shares is the sum of the squared statistics, each over its variance. A mean is not rejected if some shares
    have it whose misfit is above the least of all by no more than the square of a normal quantile.

    The shares that have a mean at the least misfit are found by Lagrange's rule. Where misfits are not convex
    this gives their convex hull, which rejects less.

    Noise moves shares beyond 0 and 1. They are not cut there: of many classes at an end all would be cut on
    one side. A class whose events are few beside their noise may have any share.

    Args:
        hits: Noised counts of hits, shape ``[C]``.
        misses: Noised counts of misses, shape ``[C]``.
        value: Increasing function of a share, applied to an array.
        noise: The noise on each count.
        level: How often the interval holds the truth.
        weight_of_misses: Factor on what misses add to the variance; 2 where a miss counts in two classes.

    Returns:
        Least and largest mean that is not rejected.

    References:
        Venzon, Moolgavkar 1988, "A method for computing profile-likelihood-based confidence intervals".
    """
    least, most = (-_BEYOND, 1.0 + _BEYOND) if noise.scale else (0.0, 1.0)
    events = np.maximum(hits + misses, 1.0)
    weak = are_weak(hits + misses, noise)
    roots = np.clip(np.where(weak, 0.5, hits / events), least, most)
    inner = np.clip(roots, 0.0, 1.0)
    spread = (inner * (1.0 - inner) + 1.0 / events) / events + noise.variance / events**2
    near = roots[:, np.newaxis] + np.outer(np.sqrt(spread), np.linspace(-_FAR, _FAR, _NEAR))
    shares = np.append(grid(least, most), [0.0, 1.0])
    common = np.broadcast_to(shares, (len(hits), len(shares)))
    p = np.sort(np.concatenate([common, np.clip(near, least, most)], axis=1), axis=1)
    statistic = (1.0 - p) * hits[:, np.newaxis] - p * misses[:, np.newaxis]
    share = np.clip(p, 0.0, 1.0)
    drawn = events[:, np.newaxis] * share * (1.0 - share)
    drawn = drawn * (1.0 - share + weight_of_misses * share)
    by_noise = noise.variance * ((1.0 - p) ** 2 + p * p)
    variance = np.maximum(drawn + by_noise, _TINY)
    misfit = (statistic / noise.critical(level, by_noise / variance)) ** 2 / variance
    # A weak class costs nothing within [0, 1], and cannot be beyond.
    misfit = np.where(weak[:, np.newaxis], np.where(p == share, 0.0, math.inf), misfit)
    values = value(p)
    return _extreme(misfit, values, largest=False), _extreme(misfit, values, largest=True)


def are_weak(events: Floats, noise: SumNoise) -> npt.NDArray[np.bool_]:
    """Return which classes have too few noised events to say anything of their share of hits.

    Where there are many classes, and the mean of all is not far above the limit, all are weak: those that
    noise lifts over it have hits that noise lifts, too, and a mean of many is sure enough to show it.
    """
    # Two noises are in a number of events.
    unsure = math.sqrt(2.0) * noise.deviation
    few_in_the_mean = len(events) >= _MANY and float(events.mean()) <= _WEAK_IN_THE_MEAN * unsure
    weak: npt.NDArray[np.bool_] = (events <= _WEAK * unsure) | (few_in_the_mean and unsure > 0.0)
    return weak


def _extreme(misfit: Floats, values: Floats, *, largest: bool) -> float:
    """Return the least or largest mean of values whose summed misfit is at most 1 above the least.

    Each row of ``misfit`` and of ``values``, shape ``[C, G]``, is one summand.
    """
    sign = 1.0 if largest else -1.0
    rows = np.arange(len(misfit))
    least = float(misfit.min(axis=1).sum())
    ends = values[rows, -1 if largest else 0]

    def at(price: float) -> tuple[float, float]:
        """Return the mean and the misfit above the least where a unit of value is worth a price."""
        chosen = np.argmin(misfit - sign * price * values, axis=1)
        return float(values[rows, chosen].mean()), float(misfit[rows, chosen].sum()) - least

    low, high = 0.0, 1.0
    while at(high)[1] <= 1.0:
        if at(high)[0] == ends.mean() or high > _HIGHEST_PRICE:
            return at(high)[0]
        low, high = high, 4.0 * high
    for _ in range(_HALVINGS):
        price = 0.5 * (low + high)
        low, high = (price, high) if at(price)[1] <= 1.0 else (low, price)
    inside, of_inside = at(low)
    outside, of_outside = at(high)
    # Between two neighbours of the grid, on a line.
    return inside + (outside - inside) * (1.0 - of_inside) / max(of_outside - of_inside, _TINY)


def consistent(levels: Sequence[Floats]) -> Floats:
    """Return the leaves of a tree of noised counts that fit the counts of all its levels best.

    Args:
        levels: Noised counts of each level from the top, shapes ``[k], [k²], ..., [k^h]``, with equal noise.

    Returns:
        The leaves, shape ``[k^h]``; their sums over any subtree are the least squares estimates.

    References:
        Hay, Rastogi, Miklau, Suciu 2010, "Boosting the accuracy of differentially private histograms through
        consistency", Theorem 3; here the root is not released, so each top node is a root of its own.
    """
    branches = len(levels[0])
    sums = [levels[-1]]  # z of the theorem, from the leaves upwards
    for height, counts in enumerate(reversed(levels[:-1]), start=2):
        whole = float(branches**height)
        part = float(branches ** (height - 1))
        of_children = sums[-1].reshape(-1, branches).sum(axis=1)
        weight = (whole - part) / (whole - 1.0)
        sums.append(weight * counts + (1.0 - weight) * of_children)
    fitted = sums[-1]
    for below in reversed(sums[:-1]):
        children = below.reshape(-1, branches)
        missing = (fitted - children.sum(axis=1)) / branches
        fitted = (children + missing[:, np.newaxis]).ravel()
    return fitted
