"""Metrics as sums of bounded vectors, one a record, and functions of those sums.

A score is noised where one record can change it by a known amount: in sums over records. What is no
sum (an _F1, an area under a curve, a share of variance) is computed from noised sums afterwards, which
costs nothing more, as it looks at nothing more. Each metric says what a record adds, and proves
how long that vector can be: the L2 norm for Gaussian noise, the L1 norm for Laplace noise. A
neighbour under add-remove has one record more or less, so sums move by one such vector; under
replace-one they move by one such vector less another, and each metric says how far that is, too.

Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.imports import find_function

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.schedule import NoiseOptions
    from privtune.training.mechanism.streams import Streams


Floats = npt.NDArray[np.float64]
Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]

_DRAWS = 1000  # of an interval
_SEED = 20_140_611  # public: an interval is a function of what was released


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A sum of what records add, and what is made of it.

    It takes ``classes`` (outputs ``[N, C]``, whole targets ``[N]``), ``two`` of them (C = 2), ``numbers``
    (outputs ``[N]`` or ``[N, 1]``, targets ``[N]``), or ``any``. ``norms`` are the longest vector that a
    record can add, ``moves`` how far sums can move where one is replaced: in the L2, and in the L1 norm.
    """

    name: ClassVar[str]
    takes: ClassVar[str] = "classes"
    lower_is_better: ClassVar[bool] = False
    share: ClassVar[bool] = False
    norms: ClassVar[tuple[float, float]]
    moves: ClassVar[tuple[float, float]]

    def norm(self, mechanism: str) -> float:
        """Return the longest vector that a record can add: its L2 norm, for ``laplace`` its L1 norm."""
        return self.norms[mechanism == "laplace"]

    def moved(self, mechanism: str) -> float:
        """Return how far sums can move where a record is replaced: one vector less another."""
        return self.moves[mechanism == "laplace"]

    @property
    def span(self) -> tuple[float, float]:
        """The least and the most that a record adds to a sum."""
        return 0.0, 1.0

    @property
    def range(self) -> tuple[float, float]:
        """The least and the most that the metric can be."""
        return 0.0, 1.0

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """Return what each record adds, shape ``[N, d]``; every row is a function of its record."""
        raise NotImplementedError

    def value(self, means: Floats) -> float:
        """Return the metric from noised sums, each divided by the declared number of records."""
        return float(means[0])

    def held(self, means: Floats) -> Floats:
        """Return the noised means nearest to what means can be: never further from the true ones."""
        return means

    def blocks(self, means: Floats) -> Iterator[tuple[Metric, float, Floats]]:
        """Yield each metric of the release, the unit of its sums, and their means."""
        yield self, 1.0, means

    def ends(self, means: Floats) -> tuple[float, float]:
        """Return the metric twice; the ends of what it can be where noise leaves nothing to divide by."""
        value = self.value(self.held(means))
        return value, value


class _OneSum(Metric):
    """A mean of one number a record, clipped to its span; what is no number counts as the worst.

    **Sensitivity**: a record adds a number in [least, most], where least is 0 or -most, to one sum: both
    norms are at most ``most``, and two records differ by at most ``most - least``.
    """

    @property
    def range(self) -> tuple[float, float]:
        return self.span

    def number(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """Return the number of each record, shape ``[N]``, before it is clipped."""
        return loss(outputs, targets)

    def norm(self, mechanism: str) -> float:
        return self.span[1]

    def moved(self, mechanism: str) -> float:
        least, most = self.span
        return most - least

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        values, (least, most) = self.number(outputs, targets, loss).double(), self.span
        values = values.nan_to_num(nan=most if self.lower_is_better else least)
        return values.clamp(least, most).unsqueeze(-1)

    def held(self, means: Floats) -> Floats:
        return np.clip(means, *self.span)


class _Accuracy(_OneSum):
    """The share of records that are classified correctly: a record adds 1 or 0."""

    name = "accuracy"
    share = True

    def number(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        return _right(outputs, targets)


@dataclass(frozen=True, kw_only=True)
class _TopK(_OneSum):
    """The share of records whose class is among the ``k`` largest outputs; ties count against it."""

    name = "top_k"
    share = True
    k: int = 5

    def number(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        own = outputs.gather(1, targets.long().unsqueeze(1))
        return ((outputs >= own).sum(dim=1) <= self.k) & ~outputs.isnan().any(dim=-1)


class _Ratio(Metric):
    """The mean over classes of ``w hits / (w hits + misses)``; 0 where the noised whole is not above 0."""

    weight: ClassVar[float]

    def held(self, means: Floats) -> Floats:
        return np.maximum(means, 0.0)

    def value(self, means: Floats) -> float:
        hits, misses = self.held(means).reshape(2, -1)
        whole = self.weight * hits + misses
        return float(np.mean(self.weight * hits / np.where(whole > 0.0, whole, 1.0)))


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
        own, right = _one_hot(targets, outputs.shape[1]), _right(outputs, targets).unsqueeze(1)
        return _side_by_side(own & right, own & ~right)


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


class _MacroF1(_Ratio):
    """The mean over classes of their F1, each against all others.

    **Sensitivity**: for each class two sums, its true positives and its errors. A record that is
    right adds 1 to one sum. One that is wrong adds 1 to the errors of its own class and 1 to those of
    the class it is taken for, and to nothing else: at most two ones, so the L2 norm is at most √2 and
    the L1 norm at most 2. Replaced, two ones go, and two others come: 2, or 4.
    """

    name = "macro_f1"
    weight = 2.0
    norms = (math.sqrt(2.0), 2.0)
    moves = (2.0, 4.0)

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        classes = outputs.shape[1]
        own, right = _one_hot(targets, classes), _right(outputs, targets).unsqueeze(1)
        taken = _one_hot(outputs.argmax(dim=-1), classes)
        return _side_by_side(own & right, (own | taken) & ~right)


@dataclass(frozen=True, kw_only=True)
class _AUC(Metric):
    """Area under the ROC curve of two classes, from noised histograms of the model's margin.

    The margin m (second output less the first) is put into ``bins`` public bins, equal in ``m / (1 + |m|)``,
    for each class apart; a pair in one bin counts half.

    **Sensitivity**: a record has one class and one bin, so it adds 1 to exactly one of the 2·bins
    sums: both norms are 1. Replaced, a one goes from one sum to another: √2, or 2.
    """

    name = "auc"
    takes = "two"
    norms = (1.0, 1.0)
    moves = (math.sqrt(2.0), 2.0)
    bins: int = 20

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        margin, positive = outputs[:, 1] - outputs[:, 0], targets == 1
        # Infinite margins are the ends; what is not a number stands where it helps least.
        place = (0.5 * self.bins * (1.0 + margin / (1.0 + margin.abs()))).nan_to_num(nan=-1.0)
        place = place.where(~margin.isinf(), (margin > 0) * (self.bins - 1.0))
        place = place.where(~margin.isnan(), (~positive) * (self.bins - 1.0))
        bin_ = _one_hot(place.floor().clamp(0, self.bins - 1).long(), self.bins)
        own = positive.unsqueeze(1)
        return _side_by_side(bin_ & own, bin_ & ~own)

    def ends(self, means: Floats) -> tuple[float, float]:
        """See ``Metric``: of a class without records nothing is known."""
        known = bool((means.reshape(2, -1).sum(axis=1) > 0.0).all())
        return super().ends(means) if known else (0.0, 1.0)

    def value(self, means: Floats) -> float:
        positive, negative = means.reshape(2, -1)
        pairs = float(positive @ (np.cumsum(negative) - negative / 2.0))
        many, few = float(positive.sum()), float(negative.sum())
        return min(max(pairs / (many * few), 0.0), 1.0) if min(many, few) > 0.0 else 0.5


@dataclass(frozen=True, kw_only=True)
class _ClippedLoss(_OneSum):
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

    def value(self, means: Floats) -> float:
        return perplexity(float(means[0]))


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
        if not (math.isfinite(high - low) and low < high):
            raise InvalidInputError(
                "target_range", self.target_range, "must be [low, high], finite, low < high"
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
        given = outputs.reshape(len(targets)).double()
        return given.clamp(low, high), targets.double().nan_to_num(nan=low).clamp(low, high)


@dataclass(frozen=True, kw_only=True)
class _MAE(_OneSum, _OfNumbers):
    """The mean absolute error, of outputs and targets clipped to the declared range.

    **Sensitivity**: both lie in a range of width w, so an error lies in [0, w], or below ``bound``.
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
        given, known = self._pair(outputs, targets)
        errors: torch.Tensor = (given - known).abs() ** self.power
        return errors


class _MSE(_MAE):
    """The mean squared error, of outputs and targets clipped to the declared range.

    **Sensitivity**: both lie in a range of width w, so an error lies in [0, w²], or below ``bound``.
    """

    name = "mse"
    power = 2


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
        given, known = self._pair(outputs, targets)
        unit, middle = 2.0 / self.width, 0.5 * (self.target_range[0] + self.target_range[1])
        error = ((unit * (given - known)).square() / 4.0).nan_to_num(nan=1.0).clamp(0.0, 1.0)
        z = (unit * (known - middle)).unsqueeze(1)
        return _side_by_side(error.unsqueeze(-1), z, z.square(), z * 0.0 + 1.0)

    def ends(self, means: Floats) -> tuple[float, float]:
        """See ``Metric``: where targets seem to have no variance, nothing is known."""
        return super().ends(means) if self._spread(means) > 0.0 else (-1.0, 1.0)

    def value(self, means: Floats) -> float:
        spread = self._spread(means)
        if spread <= 0.0:
            return -1.0
        return min(max(1.0 - 4.0 * max(float(means[0]), 0.0) / spread, -1.0), 1.0)

    @staticmethod
    def _spread(means: Floats) -> float:
        _, z, square, count = (float(part) for part in means)
        return square - z * z / count if count > 0.0 else 0.0


@dataclass(frozen=True, kw_only=True)
class OwnScore(_ClippedLoss):
    """The mean of a function ``(outputs [N, ...], targets [N, ...]) -> [N]``, clipped to ``[0, bound]``."""

    name = "package.module:function"
    lower_is_better = False
    function: str

    def __post_init__(self) -> None:
        self._found()

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


def make_metric(metric: str, **options: Any) -> Metric:
    """Return a metric by its name in a spec; options that are None are left out."""
    given = {key: value for key, value in options.items() if value is not None}
    if metric not in METRICS and ":" not in metric:
        allowed = f"must be one of {', '.join(METRICS)}, or package.module:function"
        raise InvalidInputError("scoring.metric", metric, allowed)
    cls = METRICS.get(metric, OwnScore)
    known = {field.name for field in dataclasses.fields(cls)} - {"function"}
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
    if not 0.0 < given.get("bound", 1.0) < math.inf:
        raise InvalidInputError("scoring.bound", given["bound"], "must be finite and above 0")
    return cls(**given, **({"function": metric} if cls is OwnScore else {}))


def label(name: str) -> str:
    """Return what people call a metric: a function of one's own by its last name."""
    return name.rpartition(":")[2].rpartition(".")[2]


def lower_is_better(name: str) -> bool:
    """Return whether less of a metric is better."""
    return METRICS.get(name, OwnScore).lower_is_better


def is_mean(name: str) -> bool:
    """Return whether a metric is one mean of bounded numbers, as a function of one's own is."""
    return issubclass(METRICS.get(name, OwnScore), _OneSum)


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


@dataclass(frozen=True, kw_only=True)
class Joint(Metric):
    """Several metrics of the same records by one release. The first one names it.

    **Sensitivity**: a metric's vector over its own norm is at most 1 long, so m of them side by side
    are at most sqrt(m) long in the L2 norm, and m in the L1 norm. Where a record is replaced, block i
    moves by at most moved_i / norm_i, and all of them by the L2 norm, or the sum, of these.
    """

    name = "joint"
    metrics: tuple[Metric, ...]
    mechanism: str = "gaussian"
    _sizes: list[int] = field(default_factory=list, compare=False)

    @property
    def takes(self) -> str:  # type: ignore[override]
        """What all of them take: see ``Metric``."""
        found = {metric.takes for metric in self.metrics}
        return next((kind for kind in ("two", "classes", "numbers") if kind in found), "any")

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        count = float(len(self.metrics))
        return math.sqrt(count) if mechanism == "gaussian" else count

    def moved(self, mechanism: str) -> float:
        """See ``Metric``."""
        moves = [metric.moved(mechanism) / metric.norm(mechanism) for metric in self.metrics]
        return math.hypot(*moves) if mechanism == "gaussian" else sum(moves)

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        import torch

        found, order = [], 2 if self.mechanism == "gaussian" else 1
        for metric in self.metrics:
            own, norm = metric.parts(outputs, targets, loss), metric.norm(self.mechanism)
            lengths = torch.linalg.vector_norm(own, ord=order, dim=1, keepdim=True)
            found.append(own / lengths.clamp(min=norm))  # each within its own bound
        self._sizes[:] = [part.shape[1] for part in found]
        return _side_by_side(*found)

    def blocks(self, means: Floats) -> Iterator[tuple[Metric, float, Floats]]:
        """See ``Metric``: the units are their norms."""
        start = 0
        for metric, size in zip(self.metrics, self._sizes, strict=True):
            norm = metric.norm(self.mechanism)
            yield metric, norm, means[start : start + size] * norm
            start += size

    def value(self, means: Floats) -> float:
        """See ``Metric``: the first one's."""
        metric, _, own = next(self.blocks(means))
        return metric.value(own)


def interval(
    metric: Metric, means: Floats, *, scale: float, mechanism: str, records: int
) -> tuple[float, float]:
    """Return a 95% interval of a metric, for the noise and for the drawing of the records together.

    Means of so many records are drawn again around the released ones, with the noise's own law and scale and
    the largest variance that sums of bounded records can have. Correlations between parts are left out, so it
    is approximate for ratios. It looks at what was released alone, and lies within what the metric can be.
    """
    rng = np.random.default_rng(_SEED)
    size = (_DRAWS, len(means))
    noise = rng.standard_normal(size) if mechanism == "gaussian" else rng.laplace(size=size)
    means = metric.held(means)
    least, most = metric.span
    # Bhatia and Davis 2000: in [a, b] with mean m no variance is above (b - m)(m - a).
    inside = np.clip(means, least, most)
    spread = np.sqrt((inside - least) * (most - inside) / records)
    if isinstance(metric, _R2):
        spread[1] = math.sqrt(max(1.0 - min(float(means[1]) ** 2, 1.0), 0.0) / records)
    drawn = means + scale * noise + spread * rng.standard_normal(size)
    lows, highs = np.array([metric.ends(row) for row in drawn]).T
    return float(np.quantile(lows, 0.025)), float(np.quantile(highs, 0.975))


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
