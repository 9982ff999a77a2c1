"""Scores with confidence intervals, computed from noised sums over records.

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
DRAWING = "the sampling of the records"
NOISE = "the noise"
CHOICE = "the choice of the best candidate"
TIES = "what ties within bins may lose"

NO_INFORMATION = "no information"
"""What is shown in the place of a value whose interval is all that the metric can be."""
NOT_COVERED = (
    "It assumes independent records: if rows repeat, or one person has several, it is too narrow."
)

_SAFETY = 0.85
"""Part of the allowed misses that is aimed at: variances are estimated, and few records are not normal."""
_GRID = 512  # values that are tested between the ends of a metric
_HIGHEST_PRICE = 1e12
_HALVINGS = 50
_TINY = 1e-30  # variance where there is none: at an end of a share without noise
_FAR = 6.0
_NEAR = 241  # deviations around a root that are tested closely, and values there
_WEAK = 4.0
"""Deviations of its noise that the events of a class need, so that their ratio says something."""
_MANY = 10
_WEAK_IN_THE_MEAN = 9.0
"""Classes from which on the mean of their events needs so many deviations."""
_BEYOND = 0.45  # how far noise may move a share out of [0, 1]


@dataclass(frozen=True)
class ConstantAnswer:
    """The metric of the best answer that looks at no input, with its standard error.

    Args:
        value: The metric, in its own direction.
        error: The standard error of a metric of such an answer, on as many records.

    Example:
        >>> import numpy as np
        >>> ConstantAnswer.of_mean(np.array([0.0, 2.0]))
        ConstantAnswer(value=1.0, error=0.7071067811865475)
    """

    value: float
    error: float = 0.0

    @classmethod
    def of_mean(cls, errors: Floats) -> Self:
        """Return the mean of per-record values of a constant answer, ``[N]``, with its standard error."""
        mean = float(errors.mean())
        deviation = float(errors.std())
        return cls(mean, deviation / math.sqrt(len(errors)))


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
        constant: What the best constant answer reaches; None where that is not public.

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
    constant: float | None = None

    @property
    def text(self) -> str:
        """The value and its interval as text, such as ``87.4% [85.5, 89.3]``."""
        if not self.is_informative:
            return NO_INFORMATION
        return f"{self._shown(self.value)} {self.ends}"

    @property
    def ends(self) -> str:
        """The interval as text in brackets; a share is in percent, without the sign."""
        low = self._shown(self.low).removesuffix("%")
        high = self._shown(self.high).removesuffix("%")
        return f"[{low}, {high}]"

    def _shown(self, value: float) -> str:
        """Return a value as text with as many digits as the interval's width supports."""
        return show_value(value, share=self.share, width=self.width)

    @property
    def width(self) -> float:
        """The width of the interval, in units of the metric."""
        return self.high - self.low

    @property
    def share_of_range(self) -> float:
        """The interval's width as a share of the metric's whole range, from 0 to 1."""
        return self.width / (self.most - self.least)

    @property
    def is_informative(self) -> bool:
        """Whether the interval is narrower than the metric's whole range."""
        return self.low > self.least or self.high < self.most

    @property
    def caption(self) -> str:
        """The causes of error that the interval covers, as a phrase."""
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
            "constant": self.constant,
        }

    def to_shown(self) -> dict[str, Any]:
        """Return the estimate as JSON-ready data, with a value of None if the interval tells nothing."""
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
    """Return a metric's value as text, a share in percent, with digits to fit its interval's width.

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
    if width > 0.0:
        digits = 1 - math.floor(math.log10(width))
    else:
        digits = 0
    if share:
        return f"{value:.{min(max(digits - 2, 1), 4)}%}"
    if abs(value) >= 1e4:
        return f"{value:.6g}"
    return f"{value:.{min(max(digits, 4), 8)}f}"


def joined(parts: Sequence[str]) -> str:
    """Join words to one phrase, as in ``a, b and c``."""
    if not parts:
        return ""
    *first, last = parts
    if first:
        return f"{', '.join(first)} and {last}"
    return last


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
        """Return the number of standard deviations that a statistic stays within with probability ``level``.

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
        misses = _SAFETY * (1.0 - level)
        z = float(ndtri(1.0 - 0.5 * misses))
        if self.mechanism != "laplace":
            return np.full_like(share, z)
        kurtosis = 3.0 * share * share  # κ
        correction = max(z**3 - 3.0 * z, 0.0)
        return z + kurtosis * correction / 24.0


def invert(
    statistic: Callable[[Floats], Floats],
    drawing_variance: Callable[[Floats], Floats],
    noised: Callable[[Floats], Floats],
    *,
    noise: SumNoise,
    values: Floats,
    level: float,
) -> tuple[float, float]:
    """Return the smallest and the largest value that a test of size ``1 - level`` does not reject.

    The misfit of a value is the square of the statistic over its variance. A value is not rejected if its
    misfit is above the least of all by no more than the square of a normal quantile: where noise leaves no
    value without a misfit, as at 100% of noised hits, some are left nevertheless.

    Args:
        statistic: Of values θ, shape ``[G]``: what has mean 0 where θ is the truth. Linear in θ.
        drawing_variance: Its variance for the drawing of the records, if θ is the truth.
        noised: Its variance for the noise, if θ is the truth.
        noise: The law of the noise.
        values: What θ can be, in ascending order: a grid from the least to the most.
        level: How often the interval holds the truth.

    Returns:
        The least and the largest value that is not rejected, by interpolation between values of the grid.
    """

    def total_variance(theta: Floats) -> Floats:
        """Return the variance of the statistic for each true value θ, from drawing and noise together."""
        return drawing_variance(theta) + noised(theta)

    values = _around_root(statistic, total_variance, values)
    by_noise = noised(values)
    by_drawing = drawing_variance(values)
    variance = np.maximum(by_noise + by_drawing, _TINY)
    misfit = statistic(values) ** 2 / variance
    critical = noise.critical(level, by_noise / variance)
    excess = misfit - misfit.min() - critical**2
    inside = np.flatnonzero(excess <= 0.0)
    first = int(inside[0])
    last = int(inside[-1])
    low = _crossing(values, excess, first, first - 1)
    high = _crossing(values, excess, last, last + 1)
    return low, high


def grid(least: float, most: float) -> Floats:
    """Return test values from the least to the most, closer together at both ends."""
    angles = np.linspace(0.0, np.pi, _GRID + 1)
    turn = 0.5 * (1.0 - np.cos(angles))
    values: Floats = least + (most - least) * turn
    return values


def _around_root(
    statistic: Callable[[Floats], Floats],
    variance: Callable[[Floats], Floats],
    values: Floats,
) -> Floats:
    """Return a grid with more values around a linear statistic's root, spaced by its deviation there.

    Without them an interval that is narrower than the grid would be one of its points.
    """
    least = values[0]
    most = values[-1]
    ends = np.array([least, most])
    first, last = (float(part) for part in statistic(ends))
    if first == last:
        return values
    slope = (last - first) / (most - least)
    root = np.clip(least - first / slope, least, most)
    variance_at_root = float(variance(np.array([root]))[0])
    deviation = math.sqrt(max(variance_at_root, 0.0)) / abs(slope)
    near = root + deviation * np.linspace(-_FAR, _FAR, _NEAR)
    inside = near[(near > least) & (near < most)]
    together: Floats = np.unique(np.concatenate([values, inside, [root]]))
    return together


def _crossing(
    values: Floats,
    excess: Floats,
    inside: int,
    outside: int,
) -> float:
    """Return where the line through two neighbouring grid points of ``excess`` crosses zero."""
    if not 0 <= outside < len(values):
        return float(values[inside])
    part = excess[inside] / (excess[inside] - excess[outside])
    step = values[outside] - values[inside]
    return float(values[inside] + part * step)


def mean_of_shares(
    hits: Floats,
    misses: Floats,
    *,
    value: Callable[[Floats], Floats],
    noise: SumNoise,
    level: float,
    weight_of_misses: float = 1.0,
) -> tuple[float, float]:
    """Return the interval of a mean over classes, each a function of the class's share of hits.

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
    least = 0.0
    most = 1.0
    if noise.scale:
        least = -_BEYOND
        most = 1.0 + _BEYOND
    events = np.maximum(hits + misses, 1.0)  # n, shape [C]
    weak = are_weak(hits + misses, noise)
    p = _shares_to_test(hits / events, events, weak, noise, least, most)
    statistic = (1.0 - p) * hits[:, np.newaxis] - p * misses[:, np.newaxis]
    share = np.clip(p, 0.0, 1.0)
    by_drawing = events[:, np.newaxis] * share * (1.0 - share)  # n p (1 - p)
    by_drawing = by_drawing * (1.0 - share + weight_of_misses * share)
    by_noise = noise.variance * ((1.0 - p) ** 2 + p * p)
    variance = np.maximum(by_drawing + by_noise, _TINY)
    critical = noise.critical(level, by_noise / variance)
    misfit = (statistic / critical) ** 2 / variance
    # A weak class costs nothing within [0, 1], and cannot be beyond.
    misfit_of_weak = np.where(p == share, 0.0, math.inf)
    misfit = np.where(weak[:, np.newaxis], misfit_of_weak, misfit)
    values = value(p)
    low = _extreme(misfit, values, largest=False)
    high = _extreme(misfit, values, largest=True)
    return low, high


def _shares_to_test(  # noqa: PLR0917
    observed: Floats,
    events: Floats,
    weak: npt.NDArray[np.bool_],
    noise: SumNoise,
    least: float,
    most: float,
) -> Floats:
    """Return the shares of hits to test for each class, ascending, shape ``[C, G]``.

    They are a common grid, and for each class a dense one around the share that it was observed with: an
    interval narrower than the common grid would else be one of its points.
    """
    roots = np.where(weak, 0.5, observed)
    roots = np.clip(roots, least, most)
    inner = np.clip(roots, 0.0, 1.0)
    by_drawing = (inner * (1.0 - inner) + 1.0 / events) / events
    spread = by_drawing + noise.variance / events**2
    steps = np.linspace(-_FAR, _FAR, _NEAR)
    near = roots[:, np.newaxis] + np.outer(np.sqrt(spread), steps)
    near = np.clip(near, least, most)
    shares = np.append(grid(least, most), [0.0, 1.0])
    common = np.broadcast_to(shares, (len(events), len(shares)))
    return np.sort(np.concatenate([common, near], axis=1), axis=1)


def are_weak(events: Floats, noise: SumNoise) -> npt.NDArray[np.bool_]:
    """Return which classes have too few noised events to estimate their share of hits.

    Where there are many classes, and the mean of all is not far above the limit, all are weak: those that
    noise lifts over it have hits that noise lifts, too, and a mean of many is sure enough to show it.
    """
    # Two noises are in a number of events.
    unsure = math.sqrt(2.0) * noise.deviation
    enough_in_the_mean = _WEAK_IN_THE_MEAN * unsure
    few_in_the_mean = len(events) >= _MANY and float(events.mean()) <= enough_in_the_mean
    all_are_weak = few_in_the_mean and unsure > 0.0
    weak: npt.NDArray[np.bool_] = (events <= _WEAK * unsure) | all_are_weak
    return weak


def _extreme(misfit: Floats, values: Floats, *, largest: bool) -> float:
    """Return the least or largest mean whose summed misfit is at most 1 above the smallest misfit.

    Each row of ``misfit`` and of ``values``, shape ``[C, G]``, is one summand.
    """
    sign = 1.0 if largest else -1.0
    rows = np.arange(len(misfit))
    least = float(misfit.min(axis=1).sum())
    end = values[rows, -1 if largest else 0].mean()

    def at(price: float) -> tuple[float, float]:
        """Return the mean of the values that one Lagrange multiplier makes best, and their excess misfit."""
        cost = misfit - sign * price * values
        best = np.argmin(cost, axis=1)
        mean = float(values[rows, best].mean())
        misfit_of_mean = float(misfit[rows, best].sum())
        return mean, misfit_of_mean - least

    low = 0.0
    high = 1.0
    while at(high)[1] <= 1.0:
        mean, _ = at(high)
        if mean == end or high > _HIGHEST_PRICE:
            return mean
        low = high
        high = 4.0 * high
    for _ in range(_HALVINGS):
        price = 0.5 * (low + high)
        if at(price)[1] <= 1.0:
            low = price
        else:
            high = price
    inside, misfit_inside = at(low)
    outside, misfit_outside = at(high)
    # Between two neighbours of the grid, on a line.
    step = max(misfit_outside - misfit_inside, _TINY)
    return inside + (outside - inside) * (1.0 - misfit_inside) / step


def consistent(levels: Sequence[Floats]) -> Floats:
    """Return the leaves of a tree of noised counts, fitted by least squares to the counts of all levels.

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
        leaves = float(branches**height)
        part = float(branches ** (height - 1))
        of_children = sums[-1].reshape(-1, branches).sum(axis=1)
        weight = (leaves - part) / (leaves - 1.0)
        sums.append(weight * counts + (1.0 - weight) * of_children)
    fitted = sums[-1]
    for below in reversed(sums[:-1]):
        children = below.reshape(-1, branches)
        missing = (fitted - children.sum(axis=1)) / branches
        fitted = (children + missing[:, np.newaxis]).ravel()
    return fitted
