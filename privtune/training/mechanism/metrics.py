"""Metrics as sums of bounded vectors, one a record, and functions of those sums.

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
from privtune.training.mechanism.estimates import (
    DRAWING,
    LEVEL,
    NOISE,
    TIES,
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

_BOUNDS = (1e-9, 1e30)  # beyond them squares and quotients leave the numbers of 64 bits
REFERENCE = 0.8
"""The share of right answers, or the area under the curve, of a model whose interval is foretold."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A sum of what records add, and what is made of it.

    It takes ``classes`` (outputs ``[N, C]``, whole targets ``[N]``), ``two`` of them (C = 2), ``numbers``
    (outputs ``[N]`` or ``[N, 1]``, targets ``[N]``), or ``any``. ``norms`` are the longest vector that a
    record can add, ``moves`` how far sums can move where one is replaced: in the L2, and in the L1 norm.

    Args:
        mechanism: ``gaussian`` or ``laplace``: by which norm vectors are measured.
        adjacency: Which neighbours the noise hides.
    """

    name: ClassVar[str]
    takes: ClassVar[str] = "classes"
    lower_is_better: ClassVar[bool] = False
    share: ClassVar[bool] = False
    norms: ClassVar[tuple[float, float]]
    moves: ClassVar[tuple[float, float]]
    mechanism: str = "gaussian"
    adjacency: Adjacency = Adjacency.ADD_REMOVE

    @property
    def norm(self) -> float:
        """The longest vector that a record can add: its L2 norm, for ``laplace`` its L1 norm."""
        return self.norms[self.mechanism == "laplace"]

    @property
    def sensitivity(self) -> float:
        """How far the sums of neighbours can be from each other, in the mechanism's norm."""
        if self.adjacency is Adjacency.REPLACE_ONE:
            return self.moves[self.mechanism == "laplace"]
        return self.norm

    @property
    def range(self) -> tuple[float, float]:
        """The least and the most that the metric can be."""
        return 0.0, 1.0

    @property
    def is_tally(self) -> bool:
        """Whether a record adds 1 to one count, of those that are sorted by a number, and no vector."""
        return False

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Functions of the user's that it calls."""
        return ()

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """Return what each record adds, shape ``[N, d]``; every row is a function of its record.

        Of a tally the number that it is sorted by and its class, 1 or 0, shape ``[N, 2]``.
        """
        raise NotImplementedError

    def release(self, sums: Floats, noise: SumNoise, draw: Draw, *, records: int) -> Floats:
        """Return the sums with noise: what is public from here on.

        **Guarantee**: with ``noise.scale`` = σ times :attr:`sensitivity`, this is the Gaussian (Laplace)
        mechanism of noise multiplier σ, or is dominated by it.

        Args:
            sums: Exact sums, shape ``[d]``. Of a tally: the different numbers in ascending order, and how
                many records of class 1 and of class 0 have each, shape ``[3, M]``.
            noise: The noise on each.
            draw: Draws it.
            records: Declared number of records, a public fact.
        """
        return sums + noise.scale * draw(len(sums)) if noise.scale else sums

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        """Return the value that candidates are compared by, from noised sums.

        It may lie beyond what the metric can be: candidates that are cut to an end would tie there.
        """
        return self.estimate(sums, noise).value

    def estimate(self, sums: Floats, noise: SumNoise, *, level: float = LEVEL) -> ScoreEstimate:
        """Return the value of the metric and its interval, from noised sums."""
        value, low, high = self._ends(sums, noise, level)
        least, most = self.range
        low, high = (min(max(end, least), most) for end in (low, high))
        value = min(max(value, low), high)
        return ScoreEstimate(value, low, high, least, most, self.covers(noise), self.share)

    def covers(self, noise: SumNoise) -> tuple[str, ...]:
        """Return what the interval allows for."""
        return (NOISE, DRAWING) if noise.scale else (DRAWING,)

    def expected(self, records: int, classes: int, rarest: float, noise: SumNoise) -> Floats:
        """Return the sums of a model of middling quality, by public facts alone.

        Args:
            records: How many records there are.
            classes: How many classes, 1 for numbers.
            rarest: The share of the rarest class among the records, in (0, 1].
            noise: The noise on each sum.
        """
        raise NotImplementedError

    def _ends(self, sums: Floats, noise: SumNoise, level: float) -> tuple[float, float, float]:
        """Return the value, and the ends of the interval."""
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


class _Mean(Metric):
    """A mean of one number a record, clipped to its span; what is no number counts as the worst.

    A record adds its number, and with it the count: moved and scaled to x in [-1/2, 1/2], the vector of
    ``_NUMBERS`` (for a share of ``_SHARES``), which says its sensitivity for each noise and adjacency.
    The mean is the ratio of two of the sums, so it does not depend on the declared size.

    **Error**: a mean at distance d from the middle has the noise σ s √(1 + d²/w²)/n, where w is what the
    count weighs and s² = 1/4 + w² the squared sensitivity. The best weight for a known d gives (1/2 + d) σ/n;
    w = 1/2 is the best for the worst d, where it is the σ/n that the sum alone has for a known n, and 0.71 of
    it in the middle. It stays the best where noise is large. Under replace-one the noise is at most 1.16 σ/n.

    The third sum, of squares, gives the spread of the records for the interval; it costs at most 6% of noise.
    """

    @property
    def span(self) -> tuple[float, float]:
        """The least and the most that a record counts as."""
        return 0.0, 1.0

    @property
    def range(self) -> tuple[float, float]:
        return self.span

    @property
    def norm(self) -> float:
        return self._terms[1]

    @property
    def sensitivity(self) -> float:
        return self._terms[1]

    @property
    def _terms(self) -> tuple[tuple[tuple[float, ...], ...], float]:
        table = _SHARES if self.share else _NUMBERS
        return table[self.mechanism, self.adjacency]

    @property
    def _rows(self) -> Floats:
        return np.array(self._terms[0])

    def number(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """Return the number of each record, shape ``[N]``, before it is clipped."""
        return loss(outputs, targets)

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        import torch

        least, most = self.span
        values = self.number(outputs, targets, loss).double()
        values = values.nan_to_num(nan=most if self.lower_is_better else least).clamp(least, most)
        x = (values - least) / (most - least) - 0.5
        powers = [torch.ones_like(x), x] if self.share else [torch.ones_like(x), x, x * x]
        rows = torch.tensor(self._terms[0], dtype=torch.float64, device=x.device)
        return torch.stack(powers, dim=-1) @ rows.T

    def expected(self, records: int, classes: int, rarest: float, noise: SumNoise) -> Floats:
        # Of a share the usual quality; of others a third of the range, with a tenth of it as deviation.
        if self.share:
            of_one: Floats = self._rows @ np.array([1.0, REFERENCE - 0.5])
        else:
            x = -1.0 / 6.0
            of_one = self._rows @ np.array([1.0, x, x * x + 0.01])
        return records * of_one

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        inverse = np.linalg.inv(self._rows)
        count, total = (inverse @ sums)[:2]
        # Where noise leaves no count, the mean keeps its order by the sum.
        least_count = max(1.0, noise.deviation * float(np.linalg.norm(inverse[0])))
        return self._shown(total / max(count, least_count) + 0.5)

    def _shown(self, u: float) -> float:
        """Return a value in units of the metric, of u in [0, 1]."""
        least, most = self.span
        return float(least + (most - least) * u)

    def _ends(self, sums: Floats, noise: SumNoise, level: float) -> tuple[float, float, float]:
        inverse = np.linalg.inv(self._rows)
        fitted = inverse @ sums
        covariance = noise.variance * inverse @ inverse.T
        unsure = math.sqrt(float(covariance[0, 0]))
        if fitted[0] <= _SURE * unsure:
            return self._shown(0.5), self._shown(0.0), self._shown(1.0)
        count = max(float(fitted[0]), 1.0)
        of_count = float(covariance[0, 0])
        of_total = float(covariance[1, 1])
        of_both = float(covariance[0, 1])
        size = float(fitted[0])
        total = float(fitted[1])

        def statistic(x: Floats) -> Floats:
            return total - x * size

        def noised(x: Floats) -> Floats:
            return of_total - 2.0 * x * of_both + x * x * of_count

        def drawn(x: Floats) -> Floats:
            # Bhatia and Davis 2000: in [a, b] with mean m no variance is above (b - m)(m - a).
            most: Floats = 0.25 - x * x
            return count * most if self.share else count * np.minimum(most, spread)

        spread = 0.25 if self.share else _spread(fitted, covariance, count)
        values = grid(-0.5, 0.5)
        low, high = invert(statistic, drawn, noised, noise=noise, values=values, level=level)
        middle = total / size
        return self._shown(middle + 0.5), self._shown(low + 0.5), self._shown(high + 0.5)


def _spread(fitted: Floats, covariance: Floats, count: float) -> float:
    """Return the variance of records in [-1/2, 1/2], as large as their noised sums leave it possible.

    Rare records far from the others may be missing in the sample: the deviation may be larger by a multiple
    of 1/√n (Maurer, Pontil 2009, Theorem 10, at a probability of 0.2).
    """
    mean = float(np.clip(fitted[1] / count, -0.5, 0.5))
    gradient = np.array([-(fitted[2] / count - 2.0 * mean * mean), -2.0 * mean, 1.0]) / count
    error = math.sqrt(float(gradient @ covariance @ gradient))
    variance = max(float(fitted[2]) / count - mean * mean, 0.0) + error
    return (math.sqrt(variance) + _RARE / math.sqrt(count)) ** 2


class _Accuracy(_Mean):
    """The share of records that are classified correctly: a record is a hit or a miss."""

    name = "accuracy"
    share = True

    def number(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        return _right(outputs, targets)


@dataclass(frozen=True, kw_only=True)
class _TopK(_Mean):
    """The share of records whose class is among the ``k`` largest outputs; ties count against it."""

    name = "top_k"
    share = True
    k: int = 5

    def number(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        right = outputs.gather(1, targets.long().unsqueeze(1))
        return ((outputs >= right).sum(dim=1) <= self.k) & ~outputs.isnan().any(dim=-1)


_FARTHEST = 0.9  # of shares that noise moves out of [0, 1], which F1 still has in order


class _Ratio(Metric):
    """The mean over classes of ``w hits / (w hits + misses)``, which is a function of the share of hits.

    Its interval is that of :func:`.estimates.mean_of_shares`. What a record adds to several classes counts in
    the variance of each (``weight_of_misses``), so that their sum is no less than it is.
    """

    weight: ClassVar[float]
    weight_of_misses: ClassVar[float] = 1.0

    def _of_share(self, p: Floats) -> Floats:
        return self.weight * p / (1.0 + (self.weight - 1.0) * p)

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        hits, misses = sums.reshape(2, -1)
        # Where noise leaves few events, a class keeps its order by the hits.
        least = max(1e-9, noise.deviation)
        shares = hits / np.maximum(hits + misses, least)
        return float(np.mean(self._of_share(np.clip(shares, -_FARTHEST, 1.0 + _FARTHEST))))

    def _value(self, sums: Floats, noise: SumNoise) -> float:
        """Return the mean over the classes: a weak one counts 1/2, one without records nothing."""
        hits, misses = sums.reshape(2, -1)
        weak = are_weak(hits + misses, noise)
        shares = self._of_share(hits / np.where(weak, 1.0, hits + misses))
        if noise.scale:
            return float(np.mean(np.where(weak, 0.5, shares)))
        return 0.5 if weak.all() else float(np.mean(shares[~weak]))

    def _ends(self, sums: Floats, noise: SumNoise, level: float) -> tuple[float, float, float]:
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

    def _of_classes(self, records: int, classes: int, rarest: float) -> Floats:
        """Return how many records each class has: the rarest first, all others alike."""
        others = (1.0 - rarest) / max(classes - 1, 1)
        return records * np.array([rarest, *[others] * (classes - 1)])


class _BalancedAccuracy(_Ratio):
    """The mean over classes of the share of their records that are classified correctly.

    **Sensitivity**: a record has one class and is right or wrong, so it adds 1 to exactly one of the
    2C sums: both norms are 1, whatever C. Replaced, a one goes from one sum to another: √2, or 2.
    """

    name = "balanced_accuracy"
    share = True
    weight = 1.0
    norms = (1.0, 1.0)
    moves = (math.sqrt(2.0), 2.0)

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        of_class = _one_hot(targets, outputs.shape[1])
        right = _right(outputs, targets).unsqueeze(1)
        return _side_by_side(of_class & right, of_class & ~right)

    def expected(self, records: int, classes: int, rarest: float, noise: SumNoise) -> Floats:
        sizes = self._of_classes(records, classes, rarest)
        return np.concatenate([REFERENCE * sizes, (1.0 - REFERENCE) * sizes])


class _F1(_Ratio):
    """F1 of the second of two classes: 2 TP / (2 TP + errors).

    **Sensitivity**: a record is a true positive, or an error (of either kind), or neither, so it adds 1 to at
    most one of the two sums: both norms are at most 1. Replaced, a one goes from one to the other: √2, or 2.
    """

    name = "f1"
    takes = "two"
    weight = 2.0
    norms = (1.0, 1.0)
    moves = (math.sqrt(2.0), 2.0)

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        right = _right(outputs, targets)
        return _side_by_side((right & (targets == 1)).unsqueeze(1), ~right.unsqueeze(1))

    def expected(self, records: int, classes: int, rarest: float, noise: SumNoise) -> Floats:
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
    weight = 2.0
    weight_of_misses = 2.0  # (a + b)² <= 2 a² + 2 b² for the two classes of an error
    norms = (math.sqrt(2.0), 2.0)
    moves = (2.0, 4.0)

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        classes = outputs.shape[1]
        of_class = _one_hot(targets, classes)
        right = _right(outputs, targets).unsqueeze(1)
        taken = _one_hot(outputs.argmax(dim=-1), classes)
        return _side_by_side(of_class & right, (of_class | taken) & ~right)

    def expected(self, records: int, classes: int, rarest: float, noise: SumNoise) -> Floats:
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
    takes = "two"
    norms = (1.0, 1.0)
    moves = (math.sqrt(2.0), 2.0)
    bins: int | None = None

    @property
    def is_tally(self) -> bool:
        """See ``Metric``: margins, of the second class and of the first."""
        return True

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        import torch

        margin = (outputs[:, 1] - outputs[:, 0]).double()
        positive = targets == 1
        # What is not a number stands where it helps least.
        worst = torch.where(positive, -math.inf, math.inf).to(margin.dtype)
        known = torch.where(margin.isnan(), worst, margin)
        margin = known.clamp(-_FARTHEST_MARGIN, _FARTHEST_MARGIN)
        return torch.stack([margin, positive.to(margin.dtype)], dim=-1)

    def _of_tree(self, noise: SumNoise) -> SumNoise:
        """Return the noise on the counts of the tree."""
        if noise.mechanism == _LAPLACE:
            return SumNoise(_LAPLACE, _HEIGHT * noise.scale / _FOR_BINS)
        return SumNoise(_GAUSSIAN, math.sqrt(_HEIGHT / _FOR_BINS) * noise.scale)

    def _of_histograms(self, noise: SumNoise) -> SumNoise:
        """Return the noise on the counts of both histograms."""
        share = 1.0 - _FOR_BINS
        return replace(
            noise, scale=noise.scale / (share if noise.mechanism == _LAPLACE else math.sqrt(share))
        )

    def release(self, sums: Floats, noise: SumNoise, draw: Draw, *, records: int) -> Floats:
        """Return two histograms ``[2, bins]`` as one vector; without noise of all margins. See ``Metric``."""
        margins, *classes = sums
        if not noise.scale:
            return np.concatenate(classes)
        of_tree = self._of_tree(noise).scale
        of_histograms = self._of_histograms(noise).scale
        cells = _BRANCHES**_HEIGHT
        far = math.asinh(_LARGEST / _SMALLEST)
        places = np.floor(0.5 * cells * (1.0 + np.arcsinh(margins / _SMALLEST) / far))
        where = np.clip(places, 0, cells - 1).astype(np.int64)
        fine = np.array([np.bincount(where, each, minlength=cells) for each in classes])
        leaves = fine.sum(axis=0)
        levels = []
        for height in range(1, _HEIGHT + 1):
            counts = leaves.reshape(_BRANCHES**height, -1).sum(axis=1)
            levels.append(counts + of_tree * draw(len(counts)))
        bins = self._number_of_bins(records, of_histograms)
        starts = _starts(consistent(levels), bins)
        counts = np.add.reduceat(fine, starts, axis=1).ravel()
        return counts + of_histograms * draw(len(counts))

    def _number_of_bins(self, records: int, scale: float) -> int:
        """Return how many bins are worth their noise: ties lose 1/bins, noise grows with its root.

        A sixth of the records is taken for the rarer class.
        """
        if self.bins is not None:
            return self.bins
        best = (0.15 * records / scale) ** (2.0 / 3.0)
        return int(min(max(best, 8.0), _MOST_BINS))

    def expected(self, records: int, classes: int, rarest: float, noise: SumNoise) -> Floats:
        # Two normal laws of margins, apart so that the area is that of a model of middling quality.
        apart = math.sqrt(2.0) * float(ndtri(REFERENCE))
        edges = np.linspace(-4.0, 4.0 + apart, 513)
        negative = np.diff(ndtr(edges), prepend=0.0)
        positive = np.diff(ndtr(edges - apart), prepend=0.0)
        together = np.cumsum(rarest * positive + (1.0 - rarest) * negative)
        scale = self._of_histograms(noise).scale
        bins = self._number_of_bins(records, scale) if scale else _MOST_BINS
        starts = np.searchsorted(together, np.arange(bins) / bins)
        starts = np.unique(np.minimum(starts, len(edges) - 1))
        shares = [rarest * positive, (1.0 - rarest) * negative]
        return records * np.concatenate([np.add.reduceat(share, starts) for share in shares])

    def covers(self, noise: SumNoise) -> tuple[str, ...]:
        return (*super().covers(noise), TIES) if noise.scale else super().covers(noise)

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        pairs, many, few = _pairs(sums)
        of_size = math.sqrt(len(sums) / 2.0) * self._of_histograms(noise).deviation
        least = max(1.0, of_size)
        return pairs / (max(many, least) * max(few, least))

    def _ends(self, sums: Floats, noise: SumNoise, level: float) -> tuple[float, float, float]:
        positive, negative = sums.reshape(2, -1)
        pairs, many, few = _pairs(sums)
        by = self._of_histograms(noise)
        below = np.cumsum(negative) - 0.5 * negative
        above = positive.sum() - np.cumsum(positive) + 0.5 * positive
        size = len(positive)

        # Σ_bc P_b Q_c (w_bc - θ), w_bc 1 above, 1/2 beside: what each count is multiplied by is known.
        def statistic(area: Floats) -> Floats:
            return pairs - area * many * few

        def noised(area: Floats) -> Floats:
            of_positive = np.sum(below**2) - 2 * area * few * below.sum() + size * (area * few) ** 2
            of_negative = (
                np.sum(above**2) - 2 * area * many * above.sum() + size * (area * many) ** 2
            )
            # Products of two noises are in both of these, and should be in one.
            halves = (
                size * (size - 1) / 2 * ((1.0 - area) ** 2 + area**2) + size * (0.5 - area) ** 2
            )
            whole = by.variance * (of_positive + of_negative) - by.variance**2 * halves
            least: Floats = np.maximum(whole, by.variance**2 * halves)
            return least

        p = max(many, 1.0)
        q = max(few, 1.0)

        def drawn(area: Floats) -> Floats:
            # Hanley and McNeil 1982, equation 1, with their Q1 and Q2: of exponential laws.
            both = area / (2.0 - area)
            alone = 2.0 * area * area / (1.0 + area)
            usual = (
                area * (1.0 - area) + (p - 1.0) * (both - area**2) + (q - 1.0) * (alone - area**2)
            )
            # DeLong, DeLong and Clarke-Pearson 1988: of the counts there are, where these say more; no law
            # has more than area (1 - area) / min(p, q) (Birnbaum and Klose 1957).
            of_positive = _squared_distances(positive, below / q, area)
            of_negative = _squared_distances(negative, above / p, area)
            counted = of_positive * q / p + of_negative * p / q
            most = area * (1.0 - area) * max(p, q)
            spread = np.maximum(usual, np.minimum(counted, most))
            return p * q * np.maximum(spread, 0.0)

        unsure = math.sqrt(size) * by.deviation
        if min(many, few) <= _SURE * unsure:
            return 0.5, 0.0, 1.0
        values = grid(0.0, 1.0)
        low, high = invert(statistic, drawn, noised, noise=by, values=values, level=level)
        if noise.scale:
            tied = min(max(float(positive @ negative) / (2.0 * many * few), 0.0), 0.5)
            low, high = low - tied, high + tied
        return pairs / (many * few), low, high


def _squared_distances(counts: Floats, ranks: Floats, area: Floats) -> Floats:
    """Return the sum over counted records of the squared distance of their rank from each area."""
    squares = float(counts @ ranks**2)
    return squares - 2.0 * area * float(counts @ ranks) + area**2 * float(counts.sum())


def _starts(leaves: Floats, bins: int) -> npt.NDArray[np.int64]:
    """Return the first cells of bins with about equally many records, by noised counts of the cells."""
    until = np.maximum.accumulate(np.cumsum(leaves))
    ranks = until[-1] * np.arange(1, bins) / bins
    inner = np.searchsorted(until, ranks, side="left") + 1
    places = np.clip(inner, 1, len(leaves) - 1)
    starts: npt.NDArray[np.int64] = np.unique(np.concatenate([[0], places]))
    return starts


def _pairs(sums: Floats) -> tuple[float, float, float]:
    """Return how many pairs are in order, those of one bin half, and the sizes of both classes."""
    positive, negative = sums.reshape(2, -1)
    pairs = float(positive @ (np.cumsum(negative) - 0.5 * negative))
    return pairs, float(positive.sum()), float(negative.sum())


@dataclass(frozen=True, kw_only=True)
class _ClippedLoss(_Mean):
    """The mean of the loss that was trained on, clipped to ``[0, bound]``."""

    name = "loss"
    takes = "any"
    lower_is_better = True
    bound: float = 1.0

    @property
    def span(self) -> tuple[float, float]:
        return 0.0, self.bound


class _Perplexity(_ClippedLoss):
    """The exponential of that mean: of a token loss in nats, the perplexity. It is computed afterwards."""

    name = "perplexity"

    @property
    def range(self) -> tuple[float, float]:
        return 1.0, perplexity(self.bound)

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        return perplexity(super().choice(sums, noise))

    def _ends(self, sums: Floats, noise: SumNoise, level: float) -> tuple[float, float, float]:
        value, low, high = super()._ends(sums, noise, level)
        return perplexity(value), perplexity(low), perplexity(high)


class _Cost(_ClippedLoss):
    """The mean of a function ``(model, *record) -> [1]``, clipped to ``[-bound, bound]``; less is better."""

    name = "cost"

    @property
    def span(self) -> tuple[float, float]:
        return -self.bound, self.bound


class _Value(_Cost):
    """The same mean where more is better."""

    name = "value"
    lower_is_better = False


@dataclass(frozen=True, kw_only=True)
class _OfNumbers(Metric):
    takes = "numbers"
    target_range: tuple[float, float]

    def __post_init__(self) -> None:
        low, high = self.target_range
        if not (low < high and -_BOUNDS[1] <= low and high <= _BOUNDS[1]):
            raise InvalidInputError(
                "target_range",
                self.target_range,
                f"must be [low, high], low < high, within {-_BOUNDS[1]:g} and {_BOUNDS[1]:g}",
            )

    @property
    def width(self) -> float:
        """How wide the declared range is."""
        return self.target_range[1] - self.target_range[0]

    def _pair(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and targets in the declared range, shape ``[N]``, in float64."""
        low, high = self.target_range
        predicted = outputs.reshape(len(targets)).double()
        return predicted.clamp(low, high), targets.double().nan_to_num(nan=low).clamp(low, high)


@dataclass(frozen=True, kw_only=True)
class _MAE(_Mean, _OfNumbers):
    """The mean absolute error, of outputs and targets clipped to the declared range.

    Both lie in a range of width w, so an error lies in [0, w], or below ``bound``.
    """

    name = "mae"
    lower_is_better = True
    power = 1
    bound: float | None = None

    @property
    def span(self) -> tuple[float, float]:
        most = self.width**self.power
        return 0.0, most if self.bound is None else min(self.bound, most)

    def number(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        predicted, known = self._pair(outputs, targets)
        errors: torch.Tensor = (predicted - known).abs() ** self.power
        return errors


class _MSE(_MAE):
    """The mean squared error, of outputs and targets clipped to the declared range.

    Both lie in a range of width w, so an error lies in [0, w²], or below ``bound``.
    """

    name = "mse"
    power = 2


_WORST = 1e6  # 1 - R² of a model so bad that its R² is as good as -∞


class _R2(_OfNumbers):
    """The share of the targets' variance that the model explains, clipped to [-1, 1].

    With targets z and errors e in units of half the declared range, z in [-1, 1] and e in [-2, 2], the sums
    of e²/4, of z, of z² and the count are noised together.

    **Sensitivity**: each of the four is in [-1, 1], so a record adds a vector of L2 norm at most
    √4 = 2 and of L1 norm at most 4; both are reached at z = -1, e = 2. Replaced: √5, or 4, as where one
    that adds nothing takes the place of the longest. Else e²/4 moves by 1, z by d and z² by d·s, where
    d + |s| ≤ 2: d²(1 + s²) is at most 4 (d = 2, s = 0), and d(1 + |s|) at most 9/4 (d = 3/2).
    """

    name = "r2"
    norms = (2.0, 4.0)
    moves = (math.sqrt(5.0), 4.0)

    @property
    def range(self) -> tuple[float, float]:
        return -1.0, 1.0

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        predicted, known = self._pair(outputs, targets)
        unit = 2.0 / self.width
        middle = 0.5 * (self.target_range[0] + self.target_range[1])
        error = ((unit * (predicted - known)).square() / 4.0).nan_to_num(nan=1.0).clamp(0.0, 1.0)
        z = (unit * (known - middle)).unsqueeze(1)
        return _side_by_side(error.unsqueeze(-1), z, z.square(), z * 0.0 + 1.0)

    def expected(self, records: int, classes: int, rarest: float, noise: SumNoise) -> Floats:
        # Targets with half of the range as their deviation, most of it explained.
        variance = 0.25
        return records * np.array([(1.0 - REFERENCE) * variance / 4.0, 0.0, variance, 1.0])

    def _ends(self, sums: Floats, noise: SumNoise, level: float) -> tuple[float, float, float]:
        error, total, square, count = (float(part) for part in sums)
        count = max(count, 1.0)
        mean = float(min(max(total / count, -1.0), 1.0))
        spread = square - total * total / count
        # The sum of 4 (e²/4) - (1 - r) (z - mean)², which has mean zero at the truth.
        squares = square - 2.0 * mean * total + mean * mean * count
        in_error = min(max(4.0 * error / count, 0.0), 4.0)
        in_targets = min(max(spread / count, 0.0), 1.0 - mean * mean)

        def statistic(r: Floats) -> Floats:
            return 4.0 * error - (1.0 - r) * squares

        def noised(r: Floats) -> Floats:
            return noise.variance * (16.0 + (1.0 - r) ** 2 * (1.0 + 4.0 * mean**2 + mean**4))

        def drawn(r: Floats) -> Floats:
            # Bhatia and Davis 2000, of squared errors in [0, 4] and of (z - mean)² in [0, (1 + |mean|)²].
            of_errors = math.sqrt(in_error * (4.0 - in_error))
            most = (1.0 + abs(mean)) ** 2
            of_targets = math.sqrt(in_targets * (most - in_targets))
            return count * (of_errors + (1.0 - r) * of_targets) ** 2

        # Far below -1, where a model is that bad: else a spread that noise made small would fit nothing.
        far = 1.0 - np.geomspace(_WORST, 2.0, 256)
        values = np.concatenate([far, np.linspace(-1.0, 1.0, 513)[1:]])
        low, high = invert(statistic, drawn, noised, noise=noise, values=values, level=level)
        return self.choice(sums, noise), low, high

    def choice(self, sums: Floats, noise: SumNoise) -> float:
        error, total, square, count = (float(part) for part in sums)
        spread = square - total * total / max(count, 1.0)
        return 1.0 - 4.0 * error / max(spread, noise.deviation, 1e-9)


@dataclass(frozen=True, kw_only=True)
class OwnScore(_ClippedLoss):
    """The mean of a function ``(outputs [N, ...], targets [N, ...]) -> [N]``, clipped to ``[0, bound]``."""

    name = "package.module:function"
    lower_is_better = False
    function: str

    def __post_init__(self) -> None:
        self._found()

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """See ``Metric``."""
        return (self._found(),)

    def number(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        values: torch.Tensor = self._found()(outputs, targets)
        return values

    def try_on(self, *, classes: int | None, numbers: bool, rows: int | None) -> None:
        """Refuse a function that takes other arguments, or gives no number for a record like the task's."""
        import torch

        function = self._found()
        try:
            inspect.signature(function).bind(None, None)
        except TypeError:
            raise self._refused("takes other arguments") from None
        except ValueError:
            pass  # some builtins tell nobody what they take
        if classes is None and not numbers:
            return
        shape = (1,) if rows is None else (1, rows)
        outputs = torch.linspace(0.1, 1.0, classes or 1).expand(*shape, -1).clone()
        targets = torch.zeros(shape, dtype=torch.float32 if numbers else torch.int64)
        try:
            found = function(outputs, targets)
        except Exception as error:
            kind = type(error).__name__
            raise self._refused(
                f"fails on made-up outputs of shape {tuple(outputs.shape)} with {kind}"
            ) from error
        if not isinstance(found, torch.Tensor):
            raise self._refused(f"returns {type(found).__name__}")
        if tuple(found.shape) != (1,):
            raise self._refused(f"returns shape {tuple(found.shape)} for one record")

    def _refused(self, what: str) -> InvalidInputError:
        return InvalidInputError(
            "scoring.metric",
            self.function,
            f"{what}, and must give one number a record: (outputs [N, ...], targets [N, ...]) -> "
            "tensor of shape [N]",
        )

    def _found(self) -> Any:
        return find_function(
            "scoring.metric",
            self.function,
            allowed="must be package.module:function",
            must="must name a function of outputs and targets",
        )


_OF_CLASSES = (_Accuracy, _BalancedAccuracy, _TopK, _F1, _MacroF1, _AUC)
_OF_NUMBERS = (_ClippedLoss, _Perplexity, _MAE, _MSE, _R2, _Cost, _Value)
METRICS: Mapping[str, type[Metric]] = {m.name: m for m in (*_OF_CLASSES, *_OF_NUMBERS)}
"""Metrics by name; a function of one's own is named by its path."""


def make_metric(
    metric: str,
    *,
    mechanism: str = _GAUSSIAN,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    **options: Any,
) -> Metric:
    """Return a metric by its name in a spec; options that are None are left out."""
    given = {key: value for key, value in options.items() if value is not None}
    if metric not in METRICS and ":" not in metric:
        allowed = f"must be one of {', '.join(METRICS)}, or package.module:function"
        raise InvalidInputError("scoring.metric", metric, allowed)
    cls = METRICS.get(metric, OwnScore)
    known = set(options_of(cls))
    if unknown := sorted(set(given) - known):
        own = ", ".join(sorted(known)) or "none"
        raise InvalidInputError(
            f"options of metric {metric!r}", unknown, f"are not known; it takes {own}"
        )
    if "target_range" in known and "target_range" not in given:
        raise InvalidInputError(
            "scoring.target_range",
            None,
            f"is missing: {metric} needs [low, high], the public range of the targets",
        )
    for option, least in (("k", 1), ("bins", 2)):
        value = given.get(option, least)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 1000:
            raise InvalidInputError(
                f"scoring.{option}", value, f"must be a whole number from {least} to 1000"
            )
    if not _BOUNDS[0] <= given.get("bound", 1.0) <= _BOUNDS[1]:
        allowed = f"must be from {_BOUNDS[0]:g} to {_BOUNDS[1]:g}"
        raise InvalidInputError("scoring.bound", given["bound"], allowed)
    if cls is OwnScore:
        given["function"] = metric
    return cls(mechanism=mechanism, adjacency=adjacency, **given)


def options_of(metric: Metric | type[Metric]) -> list[str]:
    """Return the names of the options that a metric takes in a spec."""
    names = [field.name for field in dataclasses.fields(metric)]
    return [name for name in names if name not in ("function", "mechanism", "adjacency")]


def label(name: str) -> str:
    """Return what people call a metric: a function of one's own by its last name."""
    return name.rpartition(":")[2].rpartition(".")[2]


def lower_is_better(name: str) -> bool:
    """Return whether less of a metric is better."""
    return METRICS.get(name, OwnScore).lower_is_better


def is_mean(name: str) -> bool:
    """Return whether a metric is one mean of bounded numbers, as a function of one's own is."""
    return issubclass(METRICS.get(name, OwnScore), _Mean)


def is_of_loss(name: object) -> bool:
    """Return whether a metric is computed of the loss that was trained on."""
    return name in (_ClippedLoss.name, _Perplexity.name)


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean token loss in nats."""
    return math.exp(min(loss, 709.0))  # e to more is no number of 64 bits


def is_clipped(name: str) -> bool:
    """Return whether a metric is told the most that a record adds as ``bound``: a loss, or one's own."""
    return issubclass(METRICS.get(name, OwnScore), _ClippedLoss)


def is_share(name: str) -> bool:
    """Return whether a metric is a share of records, shown in percent."""
    return METRICS.get(name, OwnScore).share


def _right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return which records are classified correctly; none whose outputs are not numbers."""
    return (outputs.argmax(dim=-1) == targets) & ~outputs.isnan().any(dim=-1)


def _one_hot(numbers: torch.Tensor, classes: int) -> torch.Tensor:
    import torch

    return numbers.unsqueeze(1) == torch.arange(classes, device=numbers.device)


def _side_by_side(*parts: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([part.double() for part in parts], dim=1)


_ROWS = 2**14  # records whose products are summed at once


def counts(cells: npt.NDArray[np.int64], sizes: Sequence[int]) -> Floats:
    """Count the records in each cell of each column; a record of a negative cell is in none."""
    found = []
    for column, size in enumerate(sizes):
        own = cells[:, column]
        found.append(np.bincount(own[(own >= 0) & (own < size)], minlength=size)[:size])
    return np.concatenate(found).astype(np.float64)


def count_sensitivity(columns: int, adjacency: Adjacency) -> float:
    """Return how far the counts of so many columns together can move, in the L2 norm.

    **Guarantee**: a record adds one unit vector, or nothing, to the block of each of the d columns: sqrt(d)
    under add-remove. Replaced, it moves each block by sqrt(2) at most, and all of them by sqrt(2 d).
    """
    return math.sqrt(columns * (2 if adjacency is Adjacency.REPLACE_ONE else 1))


def moments(x: Floats) -> Floats:
    """Return the sum of the outer products of records ``[N, d]``, clipped to length 1, as one vector.

    It is the diagonal, then what is above it times sqrt(2), shape ``[d (d + 1) / 2]``: as long as the matrix
    in the Frobenius norm. A record that is not finite counts as zero.
    """
    width = x.shape[1]
    total = np.zeros((width, width))
    for start in range(0, len(x), _ROWS):
        rows = np.asarray(x[start : start + _ROWS], dtype=np.float64)
        rows = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
        # Scaled down before it is squared, and shortened by what rounding may add.
        largest = np.maximum(np.abs(rows).max(axis=1, keepdims=True, initial=0.0), 1.0)
        rows = rows / largest
        length = np.linalg.norm(rows, axis=1, keepdims=True) * (1.0 + 1e-12)
        rows = rows * (1.0 / np.maximum(length, 1.0 / largest))
        total += rows.T @ rows
    above = np.triu_indices(width, k=1)
    return np.concatenate([np.diag(total), math.sqrt(2.0) * total[above]])


def moment_sensitivity(adjacency: Adjacency) -> float:
    r"""Return how far :func:`moments` can move, in the L2 norm.

    **Guarantee**: a record x of length at most 1 adds x xᵀ, of Frobenius norm \\|x\\|² ≤ 1: 1 under
    add-remove. Replaced by y it moves the matrix by \\|x xᵀ - y yᵀ\\|² = \\|x\\|⁴ + \\|y\\|⁴ - 2 (x·y)² ≤ 2:
    by sqrt(2). The vector of :func:`moments` is an isometry of symmetric matrices.

    References:
        Dwork, Talwar, Thakurta, Zhang 2014, "Analyze Gauss", Algorithm 1; off the diagonal the noise here has
        1/sqrt(2) of its deviation, at the same sensitivity.
    """
    return math.sqrt(2.0) if adjacency is Adjacency.REPLACE_ONE else 1.0


def symmetric(vector: Floats) -> Floats:
    """Return the symmetric matrix that :func:`moments` made a vector of."""
    width = (math.isqrt(8 * len(vector) + 1) - 1) // 2
    matrix = np.zeros((width, width))
    matrix[np.triu_indices(width, k=1)] = vector[width:] / math.sqrt(2.0)
    return matrix + matrix.T + np.diag(vector[:width])


def noised(sums: Floats, *, scale: float, streams: Streams, noise: NoiseOptions) -> Floats:
    """Return sums with Gaussian noise of a scale, from a stream of its own: asked again, the same."""
    import torch

    from privtune.training.mechanism.noise import NoiseSource, add_noise

    source = NoiseSource([streams], torch.device("cpu"), torch.float64, noise)
    drawn = source.gaussian(len(sums))
    total = torch.from_numpy(np.ascontiguousarray(sums)).unsqueeze(0)
    column = torch.tensor([scale], dtype=torch.float64)
    found: Floats = add_noise(total, drawn, column, noise).squeeze(0).numpy()
    return found
