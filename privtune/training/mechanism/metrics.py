"""Metrics: what each record adds to noised sums, and the values and intervals computed from the sums.

A score is noised where one record can change it by a known amount: in sums over records. Every metric
is computed from noised sums afterwards, which costs nothing more, as it looks at nothing more. Each metric
says what a record adds, and proves how long that vector can be: the L2 norm for Gaussian noise, the L1 norm
for Laplace noise. A neighbour under add-remove has one record more or less, so sums move by one such vector;
under replace-one they move by one such vector less another, and each metric says how far that is, too.

The number of records is one of the sums, or follows from them: it is noised with them, and no value and no
interval rests on the declared size of a split. What makes an interval of the sums is in :mod:`.estimates`.

Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.imports import find_function
from privtune.names import refuse_fields, refuse_name
from privtune.plugins import Registration, Registry
from privtune.training.mechanism.estimates import (
    DRAWING,
    LEVEL,
    NOISE,
    TIES,
    ConstantAnswer,
    ScoreEstimate,
    SumNoise,
    are_weak,
    consistent,
    grid,
    invert,
    mean_of_shares,
)

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.schedule import NoiseOptions
    from privtune.training.mechanism.streams import Streams


Floats = npt.NDArray[np.float64]
Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
Draw = Callable[[int], Floats]
"""Returns so many independent values of the noise's law, of scale 1."""

OF_CLASSES = ("classes", "two")
"""What metrics of classes take: any number of classes, or two."""
_BOUNDS = (1e-9, 1e30)  # beyond them squares and quotients leave the numbers of 64 bits
REFERENCE = 0.8
"""The share of right answers, or the area under the curve, of a model whose interval is foretold."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of models, computed from noised sums of one bounded vector for each record.

    A new one inherits from this and writes :meth:`parts`, with :attr:`norms` and :attr:`moves`,
    :meth:`expected` and :meth:`ends`; or from :class:`MeanMetric`, and writes the number of each record. What
    other code asks of a metric is answered here: none of it looks at names or classes. Its fields are options
    of a spec: ``bound``, ``k``, ``bins``, ``target_range``, which ``scoring`` and ``report`` know.

    Args:
        mechanism: ``gaussian`` or ``laplace``: by which norm vectors are measured.
        adjacency: Which neighbours the noise hides.
    """

    name: ClassVar[str]
    """Name in specs."""
    summary: ClassVar[str]
    """One line: what it is."""
    takes: ClassVar[str] = "classes"
    """``classes`` (outputs ``[N, C]``, whole targets ``[N]``), ``two`` of them (C = 2), ``numbers`` (outputs
    ``[N]`` or ``[N, 1]``, targets ``[N]``), or ``any``."""
    reads: ClassVar[str] = "outputs"
    """What it is computed of: ``outputs`` and targets, the ``loss`` that was trained on, or a ``function`` of
    the model and a record that the user gives as ``score``."""
    lower_is_better: ClassVar[bool] = False
    """Whether less of it is better: candidates and arms are ordered by this."""
    share: ClassVar[bool] = False
    """Whether it is a share of records, shown in percent."""
    is_mean: ClassVar[bool] = False
    """Whether it is one mean of a bounded number a record, so that its noise is that of the sum over n."""
    counts_alike: ClassVar[bool] = False
    """Whether all records count alike: then a rare class makes its interval no wider."""
    norms: ClassVar[tuple[float, float]]
    """The longest vector that a record can add: its L2, and its L1 norm."""
    moves: ClassVar[tuple[float, float]]
    """How far the sums can move where one record is replaced: in the L2, and in the L1 norm."""
    mechanism: str = "gaussian"
    adjacency: Adjacency = Adjacency.ADD_REMOVE

    @property
    def norm(self) -> float:
        """The largest norm of a record's vector: L2 for Gaussian noise, L1 for ``laplace``."""
        return self.norms[self.mechanism == "laplace"]

    @property
    def sensitivity(self) -> float:
        """The largest distance between the sums of neighbouring datasets, in the mechanism's norm."""
        if self.adjacency is Adjacency.REPLACE_ONE:
            return self.moves[self.mechanism == "laplace"]
        return self.norm

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest value that the metric can have."""
        return 0.0, 1.0

    @property
    def is_tally(self) -> bool:
        """Whether records are counted by a sorted number, one count each, in place of adding vectors."""
        return False

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions that the metric calls."""
        return ()

    def parts(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        """Return the vector that each record adds, shape ``[N, d]``, a function of that record alone.

        Of a tally the number that it is sorted by and its class, 1 or 0, shape ``[N, 2]``.
        """
        raise NotImplementedError

    def release(
        self,
        sums: Floats,
        noise: SumNoise,
        draw: Draw,
        *,
        records: int,
    ) -> Floats:
        """Return the sums with noise added; only these are public.

        **Guarantee**: with ``noise.scale`` = σ times :attr:`sensitivity`, this is the Gaussian (Laplace)
        mechanism of noise multiplier σ, or is dominated by it.

        Args:
            sums: Exact sums, shape ``[d]``. Of a tally: the different numbers in ascending order, and how
                many records of class 1 and of class 0 have each, shape ``[3, M]``.
            noise: The noise on each.
            draw: Draws it.
            records: Declared number of records, a public fact.
        """
        if noise.scale:
            return sums + noise.scale * draw(len(sums))
        return sums

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        """Return the value by which candidates are compared, from noised sums.

        It may lie beyond what the metric can be: candidates that are cut to an end would tie there.
        """
        return self.estimate(sums, noise).value

    def estimate(
        self,
        sums: Floats,
        noise: SumNoise,
        *,
        level: float = LEVEL,
    ) -> ScoreEstimate:
        """Return the value of the metric and its interval, from noised sums."""
        value, low, high = self.ends(sums, noise, level)
        least, most = self.range
        low = min(max(low, least), most)
        high = min(max(high, least), most)
        value = min(max(value, low), high)
        return ScoreEstimate(
            value,
            low,
            high,
            least,
            most,
            self.covers(noise),
            self.share,
        )

    def covers(self, noise: SumNoise) -> tuple[str, ...]:
        """Return the causes of error that the interval covers, in words."""
        if noise.scale:
            return (NOISE, DRAWING)
        return (DRAWING,)

    def expected(
        self,
        records: int,
        classes: int,
        rarest: float,
        noise: SumNoise,
    ) -> Floats:
        """Return the sums that a model of middling quality would have, from public facts alone.

        Args:
            records: How many records there are.
            classes: How many classes, 1 for numbers.
            rarest: The share of the rarest class among the records, in (0, 1].
            noise: The noise on each sum.
        """
        raise NotImplementedError

    @classmethod
    def constant_answer(cls, targets: Floats) -> ConstantAnswer | None:
        """Return the metric of the best answer that looks at no input, on public records.

        A model that is no better has learnt nothing, and is marked so wherever a metric tells.

        Args:
            targets: Numbers, or classes from 0, at least one, shape ``[N]``.

        Returns:
            The metric of that answer; None where nobody has said what it is.
        """
        return None

    @classmethod
    def declared_constant(cls, *, classes: int | None, rarest: float | None) -> float | None:
        """Return the metric of the best constant answer by declared facts; None if they do not give it.

        Args:
            classes: How many classes there are; None for numbers.
            rarest: The declared share of the rarest class, if there is one.
        """
        return None

    def ends(
        self,
        sums: Floats,
        noise: SumNoise,
        level: float,
    ) -> tuple[float, float, float]:
        """Return the metric's value and both ends of its interval, from noised sums.

        Args:
            sums: Noised sums, as ``release`` gave them.
            noise: The noise on each.
            level: How often the interval holds the truth.

        Returns:
            Three numbers in units of the metric; ``estimate`` holds them to what it can be.
        """
        raise NotImplementedError


_ROOT = math.sqrt(3.0) / 2.0
_WIDE = math.sqrt(11.0) / 4.0
_GAUSSIAN = "gaussian"
_LAPLACE = "laplace"

# What a record of value x in [-1/2, 1/2] adds, a row a sum, as polynomials a + b x + c x² of it, and the
# sensitivity. A share has x² = 1/4 always, so two sums say all.
_SHARES: Mapping[tuple[str, Adjacency], tuple[tuple[tuple[float, ...], ...], float]] = {
    # Hits and misses: (1, 0) or (0, 1).
    (_GAUSSIAN, Adjacency.ADD_REMOVE): (((0.5, 1.0), (0.5, -1.0)), 1.0),
    (_LAPLACE, Adjacency.ADD_REMOVE): (((0.5, 1.0), (0.5, -1.0)), 1.0),
    # Replaced, x moves by at most 1 and the count stays; a record that comes or goes adds 1/4 + 3/4 = 1.
    (_GAUSSIAN, Adjacency.REPLACE_ONE): (((0.0, 1.0), (_ROOT, 0.0)), 1.0),
    (_LAPLACE, Adjacency.REPLACE_ONE): (((0.0, 1.0), (0.5, 0.0)), 1.0),
}
_NUMBERS: Mapping[tuple[str, Adjacency], tuple[tuple[tuple[float, ...], ...], float]] = {
    # x² + 1/4 + 4 (x² - 1/8)² = 5/16 + 4 x⁴ is at most 9/16.
    (_GAUSSIAN, Adjacency.ADD_REMOVE): (
        ((0.0, 1.0, 0.0), (0.5, 0.0, 0.0), (-0.25, 0.0, 2.0)),
        0.75,
    ),
    # u², 2u(1 - u), (1 - u)² with u = x + 1/2: none is negative, and they add up to 1.
    (_LAPLACE, Adjacency.ADD_REMOVE): (
        ((0.25, 1.0, 1.0), (0.5, 0.0, -2.0), (0.25, -1.0, 1.0)),
        1.0,
    ),
    # From t to s it moves by (s - t)² (1 + 4 (s + t)²), at most 1 (from end to end); a record that comes or
    # goes adds x² + 11/16 + 4 (x² - 1/8)² = 3/4 + 4 x⁴, at most 1.
    (_GAUSSIAN, Adjacency.REPLACE_ONE): (
        ((0.0, 1.0, 0.0), (_WIDE, 0.0, 0.0), (-0.25, 0.0, 2.0)),
        1.0,
    ),
    # From t to s by |s - t| (1 + |s + t|) <= 1; a record that comes or goes adds 1/2 + 3/8 + 1/8 at most.
    (_LAPLACE, Adjacency.REPLACE_ONE): (
        ((0.0, 1.0, 0.0), (0.375, 0.0, 0.0), (-0.125, 0.0, 1.0)),
        1.0,
    ),
}

_SURE = 2.0
"""Deviations of its noise that a count needs, so that what is divided by it says something."""
_RARE = 1.8
"""Deviations of records that a sample of one record may miss, in ranges of the metric, times its root."""


class MeanMetric(Metric):
    """A mean of one number for each record, clipped to a span; NaN counts as the worst number.

    A record adds its number, and with it the count: moved and scaled to x in [-1/2, 1/2], the vector of
    ``_NUMBERS`` (for a share of ``_SHARES``), which says its sensitivity for each noise and adjacency.
    The mean is the ratio of two of the sums, so it does not depend on the declared size.

    **Error**: a mean at distance d from the middle has the noise σ s √(1 + d²/w²)/n, where w is what the
    count weighs and s² = 1/4 + w² the squared sensitivity. The best weight for a known d gives (1/2 + d) σ/n;
    w = 1/2 is the best for the worst d, where it is the σ/n that the sum alone has for a known n, and 0.71 of
    it in the middle. It stays the best where noise is large. Under replace-one the noise is at most 1.16 σ/n.

    The third sum, of squares, gives the spread of the records for the interval; it costs at most 6% of noise.
    """

    is_mean = True
    counts_alike = True

    @property
    def span(self) -> tuple[float, float]:
        """The least and the largest number that a record can count as."""
        return 0.0, 1.0

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest mean, the same as a record's span."""
        return self.span

    @property
    def norm(self) -> float:
        """The largest norm of a record's vector, from the table of polynomials."""
        return self._terms[1]

    @property
    def sensitivity(self) -> float:
        """The largest distance between the sums of neighbouring datasets, from the table of polynomials."""
        return self._terms[1]

    @property
    def _terms(self) -> tuple[tuple[tuple[float, ...], ...], float]:
        """The table's polynomials for this noise and adjacency, with their sensitivity."""
        table = _SHARES if self.share else _NUMBERS
        return table[self.mechanism, self.adjacency]

    @property
    def _rows(self) -> Floats:
        """The coefficients of the polynomials in x that a record adds, shape ``[d, d]``."""
        return np.array(self._terms[0])

    def number(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        """Return the number of each record, shape ``[N]``, before it is clipped."""
        return loss(outputs, targets)

    def parts(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        """Return the table's polynomials at each record's clipped number, shape ``[N, d]``.

        What is no number counts as the worst, so that a model gains nothing by it.
        """
        import torch

        least, most = self.span
        worst = most if self.lower_is_better else least
        values = self.number(outputs, targets, loss).double()
        values = values.nan_to_num(nan=worst)
        values = values.clamp(least, most)
        x = (values - least) / (most - least) - 0.5
        powers = [torch.ones_like(x), x]
        if not self.share:
            powers.append(x * x)
        rows = torch.tensor(self._terms[0], dtype=torch.float64, device=x.device)
        return torch.stack(powers, dim=-1) @ rows.T

    def expected(
        self,
        records: int,
        classes: int,
        rarest: float,
        noise: SumNoise,
    ) -> Floats:
        """Return the sums of a middling model: a share of ``REFERENCE``, or numbers a third up the range."""
        if self.share:
            powers = np.array([1.0, REFERENCE - 0.5])
        else:
            # A third of the range, with a tenth of it as deviation.
            x = -1.0 / 6.0
            powers = np.array([1.0, x, x * x + 0.01])
        of_one: Floats = self._rows @ powers
        return records * of_one

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        """Return the mean from noised sums, not limited to its range, so that candidates keep their order.

        Where noise takes the count to 0 or below, a ratio would have any size and sign; divided by a
        fixed count, candidates keep the order of their sums.
        """
        inverse = np.linalg.inv(self._rows)
        count, total = (inverse @ sums)[:2]
        # Where noise leaves no count, the mean keeps its order by the sum.
        deviation_of_count = noise.deviation * float(np.linalg.norm(inverse[0]))
        least_count = max(1.0, deviation_of_count)
        return self._shown(total / max(count, least_count) + 0.5)

    def _shown(self, u: float) -> float:
        """Return a value in units of the metric from u, where 0 to 1 is the span."""
        least, most = self.span
        return float(least + (most - least) * u)

    def ends(
        self,
        sums: Floats,
        noise: SumNoise,
        level: float,
    ) -> tuple[float, float, float]:
        """Return the mean and its interval, the values that the noised count and sum do not reject.

        The ratio of two noised sums has no bounded variance, so its interval is not value ± width:
        the statistic ``total - x size`` is linear in x and tested at each x. Where the noise leaves
        no count that is surely above 0, nothing can be said, and the interval is all that a mean can
        be.
        """
        inverse = np.linalg.inv(self._rows)
        fitted = inverse @ sums  # sums of 1, of x and, where it is no share, of x²
        covariance = noise.variance * inverse @ inverse.T
        of_count = float(covariance[0, 0])
        of_total = float(covariance[1, 1])
        of_both = float(covariance[0, 1])
        unsure = math.sqrt(of_count)
        if fitted[0] <= _SURE * unsure:
            return self._shown(0.5), self._shown(0.0), self._shown(1.0)
        size = float(fitted[0])
        total = float(fitted[1])
        count = max(size, 1.0)

        def statistic(x: Floats) -> Floats:
            """Return ``total - x size`` at each value x of the metric, which has mean 0 at the true value."""
            return total - x * size

        def noised(x: Floats) -> Floats:
            """Return the statistic's variance due to noise."""
            return of_total - 2.0 * x * of_both + x * x * of_count

        def drawn(x: Floats) -> Floats:
            """Return a bound on the statistic's variance due to the drawing of the records."""
            # Bhatia and Davis 2000: in [a, b] with mean m no variance is above (b - m)(m - a).
            most: Floats = 0.25 - x * x
            if self.share:
                return count * most
            return count * np.minimum(most, spread)

        spread = 0.25 if self.share else _spread(fitted, covariance, count)
        values = grid(-0.5, 0.5)
        low, high = invert(
            statistic,
            drawn,
            noised,
            noise=noise,
            values=values,
            level=level,
        )
        middle = total / size
        # x lies in [-1/2, 1/2], what is shown in [0, 1].
        value_shown = self._shown(middle + 0.5)
        low_shown = self._shown(low + 0.5)
        high_shown = self._shown(high + 0.5)
        return value_shown, low_shown, high_shown


def _spread(fitted: Floats, covariance: Floats, count: float) -> float:
    """Return a cautious variance of records in [-1/2, 1/2], at the upper end of what their sums allow.

    Rare records far from the others may be missing in the sample: the deviation may be larger by a multiple
    of 1/√n (Maurer, Pontil 2009, Theorem 10, at a probability of 0.2).
    """
    mean = float(np.clip(fitted[1] / count, -0.5, 0.5))
    mean_square = float(fitted[2]) / count
    # Of the variance by the three sums, times the count.
    by_count = -(fitted[2] / count - 2.0 * mean * mean)
    by_total = -2.0 * mean
    by_square = 1.0
    gradient = np.array([by_count, by_total, by_square]) / count
    error = math.sqrt(float(gradient @ covariance @ gradient))
    variance = max(mean_square - mean * mean, 0.0) + error
    deviation = math.sqrt(variance) + _RARE / math.sqrt(count)
    return deviation**2


class _Accuracy(MeanMetric):
    """The share of records that are classified correctly: a record is a hit or a miss."""

    name = "accuracy"
    summary = "the share of records that are classified correctly"
    share = True

    def number(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        return _right(outputs, targets)

    @classmethod
    def constant_answer(cls, targets: Floats) -> ConstantAnswer | None:
        """Return the share of the largest class, with its binomial standard error."""
        counts = np.bincount(targets.astype(int))
        largest = float(counts.max())
        share = largest / len(targets)
        variance = share * (1.0 - share) / len(targets)
        return ConstantAnswer(share, math.sqrt(variance))

    @classmethod
    def declared_constant(cls, *, classes: int | None, rarest: float | None) -> float | None:
        """Return one minus the rarest class's share if there are two classes, else None."""
        if classes == 2 and rarest is not None:
            return 1.0 - rarest
        return None


@dataclass(frozen=True, kw_only=True)
class _TopK(MeanMetric):
    """The share of records whose class is among the ``k`` largest outputs; ties count as wrong."""

    name = "top_k"
    summary = "the share of records whose class is among the k largest outputs"
    share = True
    k: int = 5

    def number(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        right = outputs.gather(1, targets.long().unsqueeze(1))
        rank = (outputs >= right).sum(dim=1)
        has_nan = outputs.isnan().any(dim=-1)
        return (rank <= self.k) & ~has_nan


_FARTHEST = 0.9  # of shares that noise moves out of [0, 1], which F1 still has in order


class _Ratio(Metric):
    """A mean over classes of ``w hits / (w hits + misses)``, a function of each class's share of hits.

    Its interval is that of :func:`.estimates.mean_of_shares`. What a record adds to several classes counts in
    the variance of each (``weight_of_misses``), so that their sum is no less than it is.
    """

    weight: ClassVar[float]
    weight_of_misses: ClassVar[float] = 1.0

    def _of_share(self, p: Floats) -> Floats:
        """Return ``w p / (1 + (w - 1) p)``: a class's part of the metric, p its share of hits."""
        return self.weight * p / (1.0 + (self.weight - 1.0) * p)

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        """Return the mean over classes from noised counts, with each share of hits held near [0, 1].

        A rare class under much noise would else decide alone which candidate is chosen.
        """
        hits, misses = sums.reshape(2, -1)
        # Where noise leaves few events, a class keeps its order by the hits.
        least = max(1e-9, noise.deviation)
        shares = hits / np.maximum(hits + misses, least)
        shares = np.clip(shares, -_FARTHEST, 1.0 + _FARTHEST)
        return float(np.mean(self._of_share(shares)))

    def _value(self, sums: Floats, noise: SumNoise) -> float:
        """Return the mean over classes; with noise, a class with too few events counts as 1/2."""
        hits, misses = sums.reshape(2, -1)
        weak = are_weak(hits + misses, noise)
        shares = self._of_share(hits / np.where(weak, 1.0, hits + misses))
        if noise.scale:
            return float(np.mean(np.where(weak, 0.5, shares)))
        if weak.all():
            return 0.5
        return float(np.mean(shares[~weak]))

    def ends(
        self,
        sums: Floats,
        noise: SumNoise,
        level: float,
    ) -> tuple[float, float, float]:
        """Return the mean over classes, with the ends of the interval of ``mean_of_shares``."""
        hits, misses = sums.reshape(2, -1)
        low, high = mean_of_shares(
            hits,
            misses,
            value=self._of_share,
            noise=noise,
            level=level,
            weight_of_misses=self.weight_of_misses,
        )
        return self._value(sums, noise), low, high

    def _of_classes(
        self,
        records: int,
        classes: int,
        rarest: float,
    ) -> Floats:
        """Return how many records each class has: the rarest first, all others alike."""
        others = (1.0 - rarest) / max(classes - 1, 1)
        return records * np.array([rarest, *[others] * (classes - 1)])


class _BalancedAccuracy(_Ratio):
    """The mean over classes of the share of their records that are classified correctly.

    **Sensitivity**: a record has one class and is right or wrong, so it adds 1 to exactly one of the
    2C sums: both norms are 1, whatever C. Replaced, a one goes from one sum to another: √2, or 2.
    """

    name = "balanced_accuracy"
    summary = "the mean over classes of the share of their records that are classified correctly"
    share = True
    weight = 1.0
    norms = (1.0, 1.0)
    moves = (math.sqrt(2.0), 2.0)

    def parts(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        of_class = _one_hot(targets, outputs.shape[1])
        right = _right(outputs, targets).unsqueeze(1)
        return _side_by_side(of_class & right, of_class & ~right)

    def expected(
        self,
        records: int,
        classes: int,
        rarest: float,
        noise: SumNoise,
    ) -> Floats:
        sizes = self._of_classes(records, classes, rarest)
        return np.concatenate([REFERENCE * sizes, (1.0 - REFERENCE) * sizes])

    @classmethod
    def constant_answer(cls, targets: Floats) -> ConstantAnswer | None:
        """Return one over the number of classes, with its standard error.

        Its error is that of the mean of as many binomial shares, one a class, each of the records of its
        class.
        """
        counts = np.bincount(targets.astype(int))
        share = 1.0 / len(counts)
        of_each = share * (1.0 - share) / np.maximum(counts, 1)
        variance = float(of_each.sum())
        return ConstantAnswer(share, share * math.sqrt(variance))

    @classmethod
    def declared_constant(cls, *, classes: int | None, rarest: float | None) -> float | None:
        """Return one over the number of classes."""
        return None if classes is None else 1.0 / classes


class _F1(_Ratio):
    """F1 of the second of two classes: 2 TP / (2 TP + errors).

    **Sensitivity**: a record is a true positive, or an error (of either kind), or neither, so it adds 1 to at
    most one of the two sums: both norms are at most 1. Replaced, a one goes from one to the other: √2, or 2.
    """

    name = "f1"
    summary = "F1 of the second of two classes"
    takes = "two"
    weight = 2.0
    norms = (1.0, 1.0)
    moves = (math.sqrt(2.0), 2.0)

    def parts(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        right = _right(outputs, targets)
        true_positive = right & (targets == 1)
        return _side_by_side(true_positive.unsqueeze(1), ~right.unsqueeze(1))

    def expected(
        self,
        records: int,
        classes: int,
        rarest: float,
        noise: SumNoise,
    ) -> Floats:
        # As many records are taken for positives wrongly as are missed.
        positives = records * rarest
        return np.array([REFERENCE * positives, 2.0 * (1.0 - REFERENCE) * positives])


class _MacroF1(_Ratio):
    """The mean over classes of their F1, each against all others.

    **Sensitivity**: for each class two sums, its true positives and its errors. A record that is
    right adds 1 to one sum. One that is wrong adds 1 to the errors of its own class and 1 to those of
    the class it is taken for, and to nothing else: at most two ones, so the L2 norm is at most √2 and
    the L1 norm at most 2. Replaced, two ones go, and two others come: 2, or 4.
    """

    name = "macro_f1"
    summary = "the mean over the classes of their F1"
    weight = 2.0
    weight_of_misses = 2.0  # (a + b)² <= 2 a² + 2 b² for the two classes of an error
    norms = (math.sqrt(2.0), 2.0)
    moves = (2.0, 4.0)

    def parts(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        classes = outputs.shape[1]
        of_class = _one_hot(targets, classes)
        right = _right(outputs, targets).unsqueeze(1)
        predicted = _one_hot(outputs.argmax(dim=-1), classes)
        return _side_by_side(of_class & right, (of_class | predicted) & ~right)

    def expected(
        self,
        records: int,
        classes: int,
        rarest: float,
        noise: SumNoise,
    ) -> Floats:
        sizes = self._of_classes(records, classes, rarest)
        return np.concatenate([REFERENCE * sizes, 2.0 * (1.0 - REFERENCE) * sizes])


_BRANCHES = 4
_HEIGHT = 8  # of the tree in which bins are sought
_SMALLEST = 1e-3  # margins below it are told apart by their difference, above it by their ratio
_LARGEST = 1e9
_FARTHEST_MARGIN = 1e300
_FOR_BINS = 0.25
"""Share of the noise's precision that finding the bins takes."""
_MOST_BINS = 64


@dataclass(frozen=True, kw_only=True)
class _AUC(Metric):
    """Area under the ROC curve of two classes, from noised histograms of the model's margin.

    The margin m (second output less the first) lies in one of 65,536 public cells, equal in
    ``arsinh(1000 m)``, each 0.09% of the margin wide. Bins of about equally many records are made of these
    cells: their edges are read off a noised tree of counts of both classes together. Then each class is
    counted in each bin, with noise; a pair in one bin counts half, and the interval holds what that may lose.
    Without noise there are no bins: all pairs of margins are counted.

    **Sensitivity**: a record has one class and one cell. In the tree it adds 1 to one of the counts of each
    of eight levels, so √8 in the L2 and 8 in the L1 norm; in the histograms it adds 1 to exactly one count.
    Replaced, a one goes from one count to another: √2 times, or twice, as far.

    **Guarantee**: the tree takes the share r of the precision, the histograms 1 - r: for Gaussian noise
    r/σ² + (1 - r)/σ² = 1/σ², and releases one after the other are the one Gaussian of σ, though the second
    looks at the first (Dong, Roth, Su 2019, Corollary 3.3). For Laplace noise the scales are b/r and
    b/(1 - r), and two such releases are dominated by one of b (compared in ``test_auc.py``).
    """

    name = "auc"
    summary = "the area under the ROC curve of two classes"
    takes = "two"
    norms = (1.0, 1.0)
    moves = (math.sqrt(2.0), 2.0)
    bins: int | None = None

    @property
    def is_tally(self) -> bool:
        """Whether records are counted by a sorted number: True, by their margins."""
        return True

    def parts(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        import torch

        margin = (outputs[:, 1] - outputs[:, 0]).double()
        positive = targets == 1
        # What is not a number stands where it helps least.
        worst = torch.where(positive, -math.inf, math.inf).to(margin.dtype)
        margins = torch.where(margin.isnan(), worst, margin)
        margin = margins.clamp(-_FARTHEST_MARGIN, _FARTHEST_MARGIN)
        return torch.stack([margin, positive.to(margin.dtype)], dim=-1)

    def _of_tree(self, noise: SumNoise) -> SumNoise:
        """Return the noise on each count of the tree that finds the bins."""
        if noise.mechanism == _LAPLACE:
            scale = _HEIGHT * noise.scale / _FOR_BINS
            return SumNoise(_LAPLACE, scale)
        scale = math.sqrt(_HEIGHT / _FOR_BINS) * noise.scale
        return SumNoise(_GAUSSIAN, scale)

    def _of_histograms(self, noise: SumNoise) -> SumNoise:
        """Return the noise on each count of the two histograms."""
        share = 1.0 - _FOR_BINS
        # The precision of Gaussian noise is 1/σ², of Laplace noise 1/b.
        factor = share if noise.mechanism == _LAPLACE else math.sqrt(share)
        return replace(noise, scale=noise.scale / factor)

    def release(
        self,
        sums: Floats,
        noise: SumNoise,
        draw: Draw,
        *,
        records: int,
    ) -> Floats:
        """Return the noised histograms ``[2, bins]`` as one vector; without noise, counts of every margin."""
        margins, *classes = sums
        if not noise.scale:
            return np.concatenate(classes)
        of_tree = self._of_tree(noise).scale
        of_histograms = self._of_histograms(noise).scale
        fine = _count_cells(margins, classes)
        leaves = fine.sum(axis=0)
        levels = []
        for height in range(1, _HEIGHT + 1):
            counts = leaves.reshape(_BRANCHES**height, -1).sum(axis=1)
            noisy = counts + of_tree * draw(len(counts))
            levels.append(noisy)
        bins = self._number_of_bins(records, of_histograms)
        starts = _starts(consistent(levels), bins)
        counts = np.add.reduceat(fine, starts, axis=1).ravel()
        return counts + of_histograms * draw(len(counts))

    def _number_of_bins(self, records: int, scale: float) -> int:
        """Return the number of bins that balances ties, which lose 1/bins, with noise, which grows with bins.

        A sixth of the records is taken for the rarer class.
        """
        if self.bins is not None:
            return self.bins
        best = (0.15 * records / scale) ** (2.0 / 3.0)
        return int(min(max(best, 8.0), _MOST_BINS))

    def expected(
        self,
        records: int,
        classes: int,
        rarest: float,
        noise: SumNoise,
    ) -> Floats:
        """Return the histograms of two normal laws of margins, with as many bins as ``release`` chooses."""
        # Two normal laws of margins, apart so that the area is that of a model of middling quality.
        apart = math.sqrt(2.0) * float(ndtri(REFERENCE))
        edges = np.linspace(-4.0, 4.0 + apart, 513)
        negative = np.diff(ndtr(edges), prepend=0.0)
        positive = np.diff(ndtr(edges - apart), prepend=0.0)
        of_positives = rarest * positive
        of_negatives = (1.0 - rarest) * negative
        together = np.cumsum(of_positives + of_negatives)
        scale = self._of_histograms(noise).scale
        bins = self._number_of_bins(records, scale) if scale else _MOST_BINS
        starts = np.searchsorted(together, np.arange(bins) / bins)
        starts = np.unique(np.minimum(starts, len(edges) - 1))
        positives_by_bin = np.add.reduceat(of_positives, starts)
        negatives_by_bin = np.add.reduceat(of_negatives, starts)
        return records * np.concatenate([positives_by_bin, negatives_by_bin])

    @classmethod
    def constant_answer(cls, targets: Floats) -> ConstantAnswer | None:
        """Return one half, with the standard error of the area under a curve of random scores.

        Its variance is ``(m + n + 1) / (12 m n)``, with m and n the records of the two classes (Mann and
        Whitney 1947).
        """
        counts = np.bincount(targets.astype(int), minlength=2)
        counts = np.maximum(counts, 1)
        variance = float((counts.sum() + 1) / (12.0 * counts.prod()))
        return ConstantAnswer(0.5, math.sqrt(variance))

    @classmethod
    def declared_constant(cls, *, classes: int | None, rarest: float | None) -> float | None:
        """Return one half, the area for any constant answer."""
        return 0.5

    def covers(self, noise: SumNoise) -> tuple[str, ...]:
        if noise.scale:
            return (*super().covers(noise), TIES)
        return super().covers(noise)

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        """Return the area from noised counts, not limited to [0, 1]; class sizes are at least their noise."""
        pairs, many, few = _pairs(sums)
        # The noise of a class's size is that of its bins together.
        deviation_of_size = math.sqrt(len(sums) / 2.0) * self._of_histograms(noise).deviation
        least = max(1.0, deviation_of_size)
        return pairs / (max(many, least) * max(few, least))

    def ends(
        self,
        sums: Floats,
        noise: SumNoise,
        level: float,
    ) -> tuple[float, float, float]:
        """Return the area and its interval, which is widened by the pairs of records within one bin.

        The statistic is the pairs in order less what an area would give. Its variance has a term for
        each histogram and one for the products of their noises. Records of one bin cannot be told
        apart: their pairs count half, and the interval allows for either order of them.
        """
        positive, negative = sums.reshape(2, -1)
        pairs, many, few = _pairs(sums)
        by = self._of_histograms(noise)
        below = np.cumsum(negative) - 0.5 * negative
        above = positive.sum() - np.cumsum(positive) + 0.5 * positive
        size = len(positive)

        # Σ_bc P_b Q_c (w_bc - θ), w_bc 1 above, 1/2 beside: what each count is multiplied by is known.
        def statistic(area: Floats) -> Floats:
            """Return the count of ordered pairs less that of each area, which has mean 0 at the true area."""
            return pairs - area * many * few

        def noised(area: Floats) -> Floats:
            """Return the statistic's variance due to noise on both histograms."""
            of_positive = np.sum(below**2) - 2 * area * few * below.sum()
            of_positive = of_positive + size * (area * few) ** 2
            of_negative = np.sum(above**2) - 2 * area * many * above.sum()
            of_negative = of_negative + size * (area * many) ** 2
            # Products of two noises are in both of these, and should be in one.
            of_other_bins = size * (size - 1) / 2 * ((1.0 - area) ** 2 + area**2)
            of_same_bin = size * (0.5 - area) ** 2
            halves = of_other_bins + of_same_bin
            of_products = by.variance**2 * halves
            variance = by.variance * (of_positive + of_negative) - of_products
            least: Floats = np.maximum(variance, of_products)
            return least

        p = max(many, 1.0)
        q = max(few, 1.0)

        def drawn(area: Floats) -> Floats:
            """Return the statistic's variance due to the drawing of the records."""
            # Hanley and McNeil 1982, equation 1, with their Q1 and Q2: of exponential laws.
            both = area / (2.0 - area)  # Q1
            alone = 2.0 * area * area / (1.0 + area)  # Q2
            usual = area * (1.0 - area) + (p - 1.0) * (both - area**2)
            usual = usual + (q - 1.0) * (alone - area**2)
            # DeLong, DeLong and Clarke-Pearson 1988: of the counts there are, where these say more; no law
            # has more than area (1 - area) / min(p, q) (Birnbaum and Klose 1957).
            of_positive = _squared_distances(positive, below / q, area)
            of_negative = _squared_distances(negative, above / p, area)
            by_count = of_positive * q / p + of_negative * p / q
            most = area * (1.0 - area) * max(p, q)
            spread = np.maximum(usual, np.minimum(by_count, most))
            return p * q * np.maximum(spread, 0.0)

        unsure = math.sqrt(size) * by.deviation
        if min(many, few) <= _SURE * unsure:
            return 0.5, 0.0, 1.0
        values = grid(0.0, 1.0)
        low, high = invert(
            statistic,
            drawn,
            noised,
            noise=by,
            values=values,
            level=level,
        )
        if noise.scale:
            pairs_of_one_bin = float(positive @ negative)
            # Each counts half: what it loses, or gains, is another half at most.
            share_of_ties = pairs_of_one_bin / (2.0 * many * few)
            share_of_ties = min(max(share_of_ties, 0.0), 0.5)
            low = low - share_of_ties
            high = high + share_of_ties
        return pairs / (many * few), low, high


def _count_cells(margins: Floats, classes: Sequence[Floats]) -> Floats:
    """Count the records of each class in each public cell of margins, shape ``[2, cells]``."""
    cells = _BRANCHES**_HEIGHT
    farthest = math.asinh(_LARGEST / _SMALLEST)
    # arsinh is linear near 0 and a logarithm far from it, on both sides.
    relative = np.arcsinh(margins / _SMALLEST) / farthest
    places = np.floor(0.5 * cells * (1.0 + relative))
    cell_of_each = np.clip(places, 0, cells - 1).astype(np.int64)
    rows = [np.bincount(cell_of_each, weights, minlength=cells) for weights in classes]
    return np.array(rows)


def _squared_distances(counts: Floats, ranks: Floats, area: Floats) -> Floats:
    """Return the sum of squared distances of the records' ranks from each area."""
    squares = float(counts @ ranks**2)
    total = float(counts @ ranks)
    size = float(counts.sum())
    return squares - 2.0 * area * total + area**2 * size


def _starts(leaves: Floats, bins: int) -> npt.NDArray[np.int64]:
    """Return the first cell of each bin, for bins with about equally many records by noised counts."""
    until = np.maximum.accumulate(np.cumsum(leaves))
    ranks = until[-1] * np.arange(1, bins) / bins
    inner = np.searchsorted(until, ranks, side="left") + 1
    places = np.clip(inner, 1, len(leaves) - 1)
    starts: npt.NDArray[np.int64] = np.unique(np.concatenate([[0], places]))
    return starts


def _pairs(sums: Floats) -> tuple[float, float, float]:
    """Return the number of ordered pairs, with pairs within a bin as half, and both class sizes."""
    positive, negative = sums.reshape(2, -1)
    pairs = float(positive @ (np.cumsum(negative) - 0.5 * negative))
    return pairs, float(positive.sum()), float(negative.sum())


@dataclass(frozen=True, kw_only=True)
class _ClippedLoss(MeanMetric):
    """The mean of the training loss of each record, clipped to ``[0, bound]``."""

    name = "loss"
    summary = "the mean of the loss that was trained on, clipped to [0, bound]"
    takes = "any"
    reads = "loss"
    lower_is_better = True
    bound: float = 1.0

    @property
    def span(self) -> tuple[float, float]:
        return 0.0, self.bound


class _Perplexity(_ClippedLoss):
    """The perplexity, e to the mean training loss: of a language model, from token losses in nats."""

    name = "perplexity"
    summary = "e to the mean of the loss that was trained on, clipped to [0, bound]"

    @property
    def range(self) -> tuple[float, float]:
        return 1.0, perplexity(self.bound)

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        return perplexity(super().choice(sums, noise))

    def ends(
        self,
        sums: Floats,
        noise: SumNoise,
        level: float,
    ) -> tuple[float, float, float]:
        """Return e to the mean loss and to both ends of its interval."""
        value, low, high = super().ends(sums, noise, level)
        return perplexity(value), perplexity(low), perplexity(high)


class _CostMetric(_ClippedLoss):
    """The mean of a user's function ``(model, *record) -> [1]``, clipped to ``±bound``; less is better."""

    name = "cost"
    summary = "the mean of the task's score function, clipped to [-bound, bound]; less is better"
    reads = "function"

    @property
    def span(self) -> tuple[float, float]:
        return -self.bound, self.bound


class _Value(_CostMetric):
    """The mean of a user's function ``(model, *record) -> [1]``, clipped; more is better."""

    name = "value"
    summary = "the mean of the task's score function, clipped to [-bound, bound]; more is better"
    lower_is_better = False


@dataclass(frozen=True, kw_only=True)
class NumberMetric(Metric):
    """A metric of numbers whose targets lie in a declared range."""

    takes = "numbers"
    target_range: tuple[float, float]

    def __post_init__(self) -> None:
        """Refuse an empty range, and one whose squares float64 cannot hold."""
        low, high = self.target_range
        if not (low < high and -_BOUNDS[1] <= low and high <= _BOUNDS[1]):
            raise InvalidInputError(
                "target_range",
                self.target_range,
                f"must be [low, high], low < high, within {-_BOUNDS[1]:g} and {_BOUNDS[1]:g}",
            )

    @property
    def width(self) -> float:
        """The width of the declared range."""
        return self.target_range[1] - self.target_range[0]

    def _pair(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and targets clipped to the declared range, shape ``[N]`` each, in float64."""
        low, high = self.target_range
        predicted = outputs.reshape(len(targets)).double()
        truth = targets.double().nan_to_num(nan=low)
        return predicted.clamp(low, high), truth.clamp(low, high)


@dataclass(frozen=True, kw_only=True)
class _MAE(MeanMetric, NumberMetric):
    """The mean absolute error, of outputs and targets clipped to the declared range.

    Both lie in a range of width w, so an error lies in [0, w], or below ``bound``.
    """

    name = "mae"
    summary = "the mean absolute error, of numbers clipped to the declared range"
    lower_is_better = True
    power = 1
    bound: float | None = None

    @property
    def span(self) -> tuple[float, float]:
        most = self.width**self.power
        if self.bound is not None:
            most = min(self.bound, most)
        return 0.0, most

    def number(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        predicted, truth = self._pair(outputs, targets)
        errors: torch.Tensor = (predicted - truth).abs() ** self.power
        return errors

    @classmethod
    def constant_answer(cls, targets: Floats) -> ConstantAnswer | None:
        """Return the mean absolute error of the median as a constant answer."""
        return ConstantAnswer.of_mean(np.abs(targets - np.median(targets)))


class _MSE(_MAE):
    """The mean squared error, of outputs and targets clipped to the declared range.

    Both lie in a range of width w, so an error lies in [0, w²], or below ``bound``.
    """

    name = "mse"
    summary = "the mean squared error, of numbers clipped to the declared range"
    power = 2

    @classmethod
    def constant_answer(cls, targets: Floats) -> ConstantAnswer | None:
        """Return the mean squared error of the mean as a constant answer."""
        return ConstantAnswer.of_mean(np.square(targets - targets.mean()))


_WORST = 1e6  # 1 - R² of a model so bad that its R² is as good as -∞


class _R2(NumberMetric):
    """The share of the targets' variance that the model explains, clipped to [-1, 1].

    With targets z and errors e in units of half the declared range, z in [-1, 1] and e in [-2, 2], the sums
    of e²/4, of z, of z² and the count are noised together.

    **Sensitivity**: each of the four is in [-1, 1], so a record adds a vector of L2 norm at most
    √4 = 2 and of L1 norm at most 4; both are reached at z = -1, e = 2. Replaced: √5, or 4, as where one
    that adds nothing takes the place of the longest. Else e²/4 moves by 1, z by d and z² by d·s, where
    d + |s| ≤ 2: d²(1 + s²) is at most 4 (d = 2, s = 0), and d(1 + |s|) at most 9/4 (d = 3/2).
    """

    name = "r2"
    summary = "the share of the targets' variance that the model explains"
    norms = (2.0, 4.0)
    moves = (math.sqrt(5.0), 4.0)

    @property
    def range(self) -> tuple[float, float]:
        return -1.0, 1.0

    def parts(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        """Return e²/4, z, z² and 1 of each record, ``[N, 4]``, in float64: e is its error, z its target.

        An error that is no number counts as the largest there can be.
        """
        predicted, truth = self._pair(outputs, targets)
        unit = 2.0 / self.width
        middle = 0.5 * (self.target_range[0] + self.target_range[1])
        e = unit * (predicted - truth)
        error = e.square() / 4.0
        error = error.nan_to_num(nan=1.0).clamp(0.0, 1.0)
        z = (unit * (truth - middle)).unsqueeze(1)
        ones = z * 0.0 + 1.0
        return _side_by_side(error.unsqueeze(-1), z, z.square(), ones)

    def expected(
        self,
        records: int,
        classes: int,
        rarest: float,
        noise: SumNoise,
    ) -> Floats:
        # Targets with half of the range as their deviation, most of it explained.
        variance = 0.25
        error = (1.0 - REFERENCE) * variance / 4.0
        return records * np.array([error, 0.0, variance, 1.0])

    @classmethod
    def constant_answer(cls, targets: Floats) -> ConstantAnswer | None:
        """Return 0, as a constant answer explains none of the variance."""
        return ConstantAnswer(0.0)

    @classmethod
    def declared_constant(cls, *, classes: int | None, rarest: float | None) -> float | None:
        """Return 0, as a constant answer explains none of the variance, whatever the declared facts."""
        return 0.0

    def ends(
        self,
        sums: Floats,
        noise: SumNoise,
        level: float,
    ) -> tuple[float, float, float]:
        """Return the share of variance explained and its interval, from noised errors and squares.

        It is ``1 - Σe² / Σ(z - mean)²``, a ratio again. For its test the mean of the targets is taken
        as it was released.
        """
        error, total, square, count = (float(part) for part in sums)
        count = max(count, 1.0)
        mean = float(min(max(total / count, -1.0), 1.0))
        spread = square - total * total / count
        # The sum of 4 (e²/4) - (1 - r) (z - mean)², which has mean zero at the truth.
        squares = square - 2.0 * mean * total + mean * mean * count
        in_error = min(max(4.0 * error / count, 0.0), 4.0)
        in_targets = min(max(spread / count, 0.0), 1.0 - mean * mean)

        def statistic(r: Floats) -> Floats:
            """Return ``Σ (e² - (1 - r) (z - mean)²)`` at each r, which has mean 0 at the true R²."""
            return 4.0 * error - (1.0 - r) * squares

        def noised(r: Floats) -> Floats:
            """Return the statistic's variance due to noise."""
            of_squares = 1.0 + 4.0 * mean**2 + mean**4
            return noise.variance * (16.0 + (1.0 - r) ** 2 * of_squares)

        def drawn(r: Floats) -> Floats:
            """Return a bound on the statistic's variance due to the drawing of the records."""
            # Bhatia and Davis 2000, of squared errors in [0, 4] and of (z - mean)² in [0, (1 + |mean|)²].
            of_errors = math.sqrt(in_error * (4.0 - in_error))
            most = (1.0 + abs(mean)) ** 2
            of_targets = math.sqrt(in_targets * (most - in_targets))
            return count * (of_errors + (1.0 - r) * of_targets) ** 2

        # Far below -1, where a model is that bad: else a spread that noise made small would fit nothing.
        far = 1.0 - np.geomspace(_WORST, 2.0, 256)
        near = np.linspace(-1.0, 1.0, 513)[1:]
        values = np.concatenate([far, near])
        low, high = invert(
            statistic,
            drawn,
            noised,
            noise=noise,
            values=values,
            level=level,
        )
        return self.choice(sums, noise), low, high

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        """Return the share of variance explained from noised sums, not limited to [-1, 1].

        Targets whose noised variance is near 0 or below it would turn its sign: their variance counts
        as the deviation of its noise, at least.
        """
        error, total, square, count = (float(part) for part in sums)
        spread = square - total * total / max(count, 1.0)
        return 1.0 - 4.0 * error / max(spread, noise.deviation, 1e-9)


@dataclass(frozen=True, kw_only=True)
class OwnScore(_ClippedLoss):
    """The mean of a user's function of outputs and targets, ``[N]``, clipped to ``[0, bound]``."""

    name = "package.module:function"
    summary = "the mean of a function of outputs and targets, clipped to [0, bound]"
    reads = "outputs"
    lower_is_better = False
    function: str

    def __post_init__(self) -> None:
        self._function()

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's function, as a tuple of one."""
        return (self._function(),)

    def number(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        """Return the number of each record by the user's function, shape ``[N]``, before it is clipped."""
        values: torch.Tensor = self._function()(outputs, targets)
        return values

    def try_on(
        self,
        *,
        classes: int | None,
        numbers: bool,
        rows: int | None,
    ) -> None:
        """Refuse a function that takes other arguments, or fails to give one number for a made-up record."""
        import torch

        function = self._function()
        try:
            inspect.signature(function).bind(None, None)
        except TypeError:
            raise self._refusal("takes other arguments") from None
        except ValueError:
            pass  # some builtins tell nobody what they take
        if classes is None and not numbers:
            return
        shape = (1,) if rows is None else (1, rows)
        outputs = torch.linspace(0.1, 1.0, classes or 1).expand(*shape, -1).clone()
        targets = torch.zeros(shape, dtype=torch.float32 if numbers else torch.int64)
        try:
            scores = function(outputs, targets)
        except Exception as error:
            kind = type(error).__name__
            raise self._refusal(
                f"fails on made-up outputs of shape {tuple(outputs.shape)} with {kind}"
            ) from error
        if not isinstance(scores, torch.Tensor):
            raise self._refusal(f"returns {type(scores).__name__}")
        if tuple(scores.shape) != (1,):
            raise self._refusal(f"returns shape {tuple(scores.shape)} for one record")

    def _refusal(self, what: str) -> InvalidInputError:
        """Return the error about the user's function, with what is wrong and what it must return."""
        return InvalidInputError(
            "scoring.metric",
            self.function,
            f"{what}, and must give one number a record: (outputs [N, ...], targets [N, ...]) -> "
            "tensor of shape [N]",
        )

    def _function(self) -> Any:
        """Return the user's function, imported by its path."""
        return find_function(
            "scoring.metric",
            self.function,
            allowed="must be package.module:function",
            must="must name a function of outputs and targets",
        )


def _lacking(cls: type[Any]) -> str:
    """Say what a class of an installed package lacks to be a metric; empty if nothing."""
    if not issubclass(cls, Metric):
        return "must inherit from privtune.training.mechanism.metrics.Metric"
    missing = []
    for method in ("parts", "expected", "ends"):
        if getattr(cls, method) is getattr(Metric, method):
            missing.append(method)
    if missing:
        return f"must have the method {' and '.join(missing)}"
    if not issubclass(cls, MeanMetric) and not (hasattr(cls, "norms") and hasattr(cls, "moves")):
        return "must say how long a record's vector can be, as norms and moves"
    return ""


_OF_CLASS_TARGETS = (_Accuracy, _BalancedAccuracy, _TopK, _F1, _MacroF1, _AUC)
_OF_OTHER_TARGETS = (_ClippedLoss, _Perplexity, _MAE, _MSE, _R2, _CostMetric, _Value)
METRICS: Registry[type[Metric]] = Registry(
    "metric",
    "privtune.metrics",
    {m.name: f"{__name__}:{m.__name__}" for m in (*_OF_CLASS_TARGETS, *_OF_OTHER_TARGETS)},
    lacking=_lacking,
)
"""Metrics by name; a function of one's own is named by its path."""


def registered_metrics() -> list[Registration]:
    """Return the metrics that installed packages register, problems included.

    Example:
        >>> [entry.name for entry in registered_metrics() if entry.problem]
        []
    """
    return list(METRICS.registered())


def find_metric(name: str) -> type[Metric]:
    """Return the class of a metric by its name; for any other name ``OwnScore``, a user's function.

    Args:
        name: In a spec, or as people call it.

    Example:
        >>> find_metric("auc").takes, find_metric("package.module:function").name
        ('two', 'package.module:function')
    """
    return METRICS.get(name, OwnScore)


def make_metric(
    metric: str,
    *,
    mechanism: str = _GAUSSIAN,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    **options: Any,
) -> Metric:
    """Return a metric by its name in a spec; options that are None are left out."""
    settings = {}
    for key, value in options.items():
        if value is not None:
            settings[key] = value
    if metric not in METRICS and ":" not in metric:
        refuse_name(
            "scoring.metric",
            metric,
            METRICS.names(),
            also="or package.module:function",
        )
    cls = find_metric(metric)
    names = set(options_of(cls))
    unknown = set(settings) - names
    if unknown:
        refuse_fields(
            "scoring",
            unknown,
            sorted(names),
            f"metric {metric}",
        )
    if "target_range" in names and "target_range" not in settings:
        raise InvalidInputError(
            "scoring.target_range",
            None,
            f"is missing: {metric} needs [low, high], the public range of the targets",
        )
    for option, least in (("k", 1), ("bins", 2)):
        value = settings.get(option, least)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= 1000:
            raise InvalidInputError(
                f"scoring.{option}",
                value,
                f"must be a whole number from {least} to 1000",
            )
    if not _BOUNDS[0] <= settings.get("bound", 1.0) <= _BOUNDS[1]:
        allowed = f"must be from {_BOUNDS[0]:g} to {_BOUNDS[1]:g}"
        raise InvalidInputError("scoring.bound", settings["bound"], allowed)
    if cls is OwnScore:
        settings["function"] = metric
    return cls(mechanism=mechanism, adjacency=adjacency, **settings)


def options_of(metric: Metric | type[Metric]) -> list[str]:
    """Return the names of the options that a metric takes in a spec."""
    names = [field.name for field in dataclasses.fields(metric)]
    return [name for name in names if name not in ("function", "mechanism", "adjacency")]


def label(name: str) -> str:
    """Return a metric's name for people: of a user's function, the last part of its path."""
    return name.rpartition(":")[2].rpartition(".")[2]


def lower_is_better(name: str) -> bool:
    """Return whether less of a metric is better."""
    return find_metric(name).lower_is_better


def is_mean(name: str) -> bool:
    """Return whether a metric is one mean of bounded numbers, as a user's function is."""
    return find_metric(name).is_mean


def is_of_loss(name: object) -> bool:
    """Return whether a metric is computed from the training loss."""
    return isinstance(name, str) and find_metric(name).reads == "loss"


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean token loss in nats."""
    return math.exp(min(loss, 709.0))  # e to more is no number of 64 bits


def is_share(name: str) -> bool:
    """Return whether a metric is a share of records, shown in percent."""
    return find_metric(name).share


def _right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return which records are classified correctly, shape ``[N]``; outputs with NaN count as wrong."""
    has_nan = outputs.isnan().any(dim=-1)
    return (outputs.argmax(dim=-1) == targets) & ~has_nan


def _one_hot(numbers: torch.Tensor, classes: int) -> torch.Tensor:
    """Return a bool table ``[N, C]`` that is True at each number's class."""
    import torch

    return numbers.unsqueeze(1) == torch.arange(classes, device=numbers.device)


def _side_by_side(*parts: torch.Tensor) -> torch.Tensor:
    """Return tensors ``[N, d]`` joined along their columns, in float64."""
    import torch

    return torch.cat([part.double() for part in parts], dim=1)


_ROWS = 2**14  # records whose products are summed at once


def counts(cells: npt.NDArray[np.int64], sizes: Sequence[int]) -> Floats:
    """Return counts of the records in each cell of each column, joined; negative cells are not counted."""
    tallies = []
    for column, size in enumerate(sizes):
        places = cells[:, column]
        places = places[(places >= 0) & (places < size)]
        tally = np.bincount(places, minlength=size)
        tallies.append(tally[:size])
    return np.concatenate(tallies).astype(np.float64)


def count_sensitivity(columns: int, adjacency: Adjacency) -> float:
    """Return the L2 sensitivity of the counts of ``columns`` columns together.

    **Guarantee**: a record adds one unit vector, or nothing, to the block of each of the d columns: sqrt(d)
    under add-remove. Replaced, it moves each block by sqrt(2) at most, and all of them by sqrt(2 d).
    """
    return math.sqrt(columns * (2 if adjacency is Adjacency.REPLACE_ONE else 1))


def moments(x: Floats) -> Floats:
    """Return the sum of outer products of records ``[N, d]``, each clipped to length 1, as a vector.

    It is the diagonal, then what is above it times sqrt(2), shape ``[d (d + 1) / 2]``: as long as the matrix
    in the Frobenius norm. A record that is not finite counts as zero.
    """
    width = x.shape[1]
    total = np.zeros((width, width))
    for start in range(0, len(x), _ROWS):
        rows = np.asarray(x[start : start + _ROWS], dtype=np.float64)
        is_finite = np.isfinite(rows).all(axis=1, keepdims=True)
        rows = np.where(is_finite, rows, 0.0)
        # Scaled down before it is squared, and shortened by what rounding may add.
        largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
        largest = np.maximum(largest, 1.0)
        rows = rows / largest
        length = np.linalg.norm(rows, axis=1, keepdims=True) * (1.0 + 1e-12)
        factor = 1.0 / np.maximum(length, 1.0 / largest)
        rows = rows * factor
        total += rows.T @ rows
    above = np.triu_indices(width, k=1)
    return np.concatenate([np.diag(total), math.sqrt(2.0) * total[above]])


def moment_sensitivity(adjacency: Adjacency) -> float:
    r"""Return the L2 sensitivity of :func:`moments`.

    **Guarantee**: a record x of length at most 1 adds x xᵀ, of Frobenius norm \\|x\\|² ≤ 1: 1 under
    add-remove. Replaced by y it moves the matrix by \\|x xᵀ - y yᵀ\\|² = \\|x\\|⁴ + \\|y\\|⁴ - 2 (x·y)² ≤ 2:
    by sqrt(2). The vector of :func:`moments` is an isometry of symmetric matrices.

    References:
        Dwork, Talwar, Thakurta, Zhang 2014, "Analyze Gauss", Algorithm 1; off the diagonal the noise here has
        1/sqrt(2) of its deviation, at the same sensitivity.
    """
    if adjacency is Adjacency.REPLACE_ONE:
        return math.sqrt(2.0)
    return 1.0


def symmetric(vector: Floats) -> Floats:
    """Return the symmetric matrix from its vector, as :func:`moments` lays it out."""
    width = (math.isqrt(8 * len(vector) + 1) - 1) // 2
    matrix = np.zeros((width, width))
    matrix[np.triu_indices(width, k=1)] = vector[width:] / math.sqrt(2.0)
    return matrix + matrix.T + np.diag(vector[:width])


def noised(
    sums: Floats,
    *,
    scale: float,
    streams: Streams,
    noise: NoiseOptions,
) -> Floats:
    """Return sums with Gaussian noise from the streams' secret; the same call gives the same noise."""
    import torch

    from privtune.training.mechanism.noise import NoiseSource, add_noise

    source = NoiseSource([streams], torch.device("cpu"), torch.float64, noise)
    values = source.gaussian(len(sums))
    total = torch.from_numpy(np.ascontiguousarray(sums)).unsqueeze(0)
    column = torch.tensor([scale], dtype=torch.float64)
    noisy: Floats = add_noise(total, values, column, noise).squeeze(0).numpy()
    return noisy
