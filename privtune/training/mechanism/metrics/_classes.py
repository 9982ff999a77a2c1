"""Metrics of classes: counts of records, and ratios of such counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from privtune.training.mechanism.metrics._base import Floats, Metric, OneSum, ratio, side_by_side

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.metrics._base import Loss


@dataclass(frozen=True, kw_only=True)
class Accuracy(OneSum):
    """The share of records that are classified correctly.

    **Sensitivity**: a record adds 1 or 0 to one sum, so both norms are at most 1.
    """

    name: ClassVar[str] = "accuracy"
    share: ClassVar[bool] = True

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        return 1.0

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        return _right(outputs, targets).unsqueeze(1).double()


@dataclass(frozen=True, kw_only=True)
class TopK(OneSum):
    """The share of records whose class is among the ``k`` largest outputs; ties count against it.

    **Sensitivity**: a record adds 1 or 0 to one sum, so both norms are at most 1.
    """

    name: ClassVar[str] = "top_k"
    share: ClassVar[bool] = True
    k: int = 5

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        return 1.0

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        own = outputs.gather(1, targets.long().unsqueeze(1))
        known = ~outputs.isnan().any(dim=-1)
        return (((outputs >= own).sum(dim=1) <= self.k) & known).unsqueeze(1).double()


@dataclass(frozen=True, kw_only=True)
class _OfCounts(Metric):
    """A ratio of counts of records."""

    def held(self, means: Floats) -> Floats:
        """None below 0: see ``Metric``."""
        return np.maximum(means, 0.0)


@dataclass(frozen=True, kw_only=True)
class _OfOnes(Metric):
    """Of sums to at most one of which a record adds 1."""

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        return 1.0

    def moved(self, mechanism: str) -> float:
        """√2, or 2: a one goes from one sum to another."""
        return 2.0 if mechanism == "laplace" else math.sqrt(2.0)


@dataclass(frozen=True, kw_only=True)
class BalancedAccuracy(_OfOnes, _OfCounts):
    """The mean over classes of the share of their records that are classified correctly.

    A ratio for each class, so its two counts are noised: right and wrong ones, 2C sums.

    **Sensitivity**: a record has one class and is right or wrong, so it adds 1 to exactly one of the
    2C sums: both norms are 1, whatever C. The cost of the ratio: for a class of n records the share
    has a deviation of about σ/n, so a class of few records makes it as inexact as it is rare.
    A class whose noised count is not above 0 counts as 0.
    """

    name: ClassVar[str] = "balanced_accuracy"
    share: ClassVar[bool] = True

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        own, right = _one_hot(targets, outputs.shape[1]), _right(outputs, targets).unsqueeze(1)
        return side_by_side(own & right, own & ~right)

    def value(self, means: Floats) -> float:
        """See ``Metric``."""
        right, wrong = self.held(means).reshape(2, -1)
        return float(np.mean(ratio(right, right + wrong)))


@dataclass(frozen=True, kw_only=True)
class F1(_OfOnes, _OfCounts):
    """F1 of the second of two classes: 2 TP / (2 TP + errors).

    A ratio, so two sums are noised: true positives, and errors (false ones of both kinds).

    **Sensitivity**: a record is a true positive, or an error, or neither, so it adds 1 to at most one
    of the two sums: both norms are at most 1. The cost of the ratio: with P positive records a
    deviation of about ``σ sqrt(1 + F1²) / P`` or less, so by the number of positives, not of records.
    """

    name: ClassVar[str] = "f1"
    takes: ClassVar[str] = "two"

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        right = _right(outputs, targets)
        return side_by_side((right & (targets == 1)).unsqueeze(1), ~right.unsqueeze(1))

    def value(self, means: Floats) -> float:
        """See ``Metric``."""
        hits, errors = self.held(means)
        return float(ratio(2.0 * hits, 2.0 * hits + errors))


@dataclass(frozen=True, kw_only=True)
class MacroF1(_OfCounts):
    """The mean over classes of their F1, each against all others.

    **Sensitivity**: for each class two sums, its true positives and its errors. A record that is
    right adds 1 to one sum. One that is wrong adds 1 to the errors of its own class and 1 to those of
    the class it is taken for, and to nothing else: at most two ones, so the L2 norm is at most √2 and
    the L1 norm at most 2. It costs √2 times the noise of ``balanced_accuracy``, for sums that are
    fewer than those of a table of all pairs of classes (norm 1, C² sums).
    """

    name: ClassVar[str] = "macro_f1"

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        return 2.0 if mechanism == "laplace" else math.sqrt(2.0)

    def moved(self, mechanism: str) -> float:
        """2, or 4: two ones go, and two others come."""
        return 4.0 if mechanism == "laplace" else 2.0

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        classes = outputs.shape[1]
        own, right = _one_hot(targets, classes), _right(outputs, targets).unsqueeze(1)
        return side_by_side(own & right, (own | _one_hot(outputs.argmax(dim=-1), classes)) & ~right)

    def value(self, means: Floats) -> float:
        """See ``Metric``."""
        hits, errors = self.held(means).reshape(2, -1)
        return float(np.mean(ratio(2.0 * hits, 2.0 * hits + errors)))


@dataclass(frozen=True, kw_only=True)
class AUC(_OfOnes):
    """Area under the ROC curve of two classes, from noised histograms of the model's margin.

    The area counts pairs of records, so one record can change it by 1/P or 1/N, and P and N are
    private. Instead the margin m (second output less the first) is put into ``bins`` public bins,
    equal in ``m / (1 + |m|)``, for each class apart; the area is computed from the two histograms,
    a pair in one bin counting half.

    **Sensitivity**: a record has one class and one bin, so it adds 1 to exactly one of the 2·bins
    sums: both norms are 1. The cost of the histograms: a deviation of about
    ``σ sqrt(bins / 3 · (1/P² + 1/N²))``, and up to half of the pairs that share a bin; more bins, more
    noise.
    """

    name: ClassVar[str] = "auc"
    takes: ClassVar[str] = "two"
    bins: int = 20

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        margin, positive = outputs[:, 1] - outputs[:, 0], targets == 1
        # Infinite margins are the ends; what is not a number stands where it helps least.
        place = (0.5 * self.bins * (1.0 + margin / (1.0 + margin.abs()))).nan_to_num(nan=-1.0)
        place = place.where(~margin.isinf(), (margin > 0) * (self.bins - 1.0))
        place = place.where(~margin.isnan(), (~positive) * (self.bins - 1.0))
        bin_ = _one_hot(place.floor().clamp(0, self.bins - 1).long(), self.bins)
        own = positive.unsqueeze(1)
        return side_by_side(bin_ & own, bin_ & ~own)

    def ends(self, means: Floats) -> tuple[float, float]:
        """See ``Metric``: of a class without records nothing is known."""
        known = bool((means.reshape(2, -1).sum(axis=1) > 0.0).all())
        return super().ends(means) if known else (0.0, 1.0)

    def value(self, means: Floats) -> float:
        """See ``Metric``."""
        positive, negative = means.reshape(2, -1)
        pairs = float(positive @ (np.cumsum(negative) - negative / 2.0))
        every = float(positive.sum()) * float(negative.sum())
        if min(float(positive.sum()), float(negative.sum())) <= 0.0:
            return 0.5
        return min(max(pairs / every, 0.0), 1.0)


def _right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return which records are classified correctly; none whose outputs are not numbers."""
    return (outputs.argmax(dim=-1) == targets) & ~outputs.isnan().any(dim=-1)


def _one_hot(numbers: torch.Tensor, classes: int) -> torch.Tensor:
    import torch

    return numbers.unsqueeze(1) == torch.arange(classes, device=numbers.device)
