"""Metrics of numbers: losses, errors on a declared range, and a function of one's own."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from privtune.errors import InvalidInputError
from privtune.imports import find_function
from privtune.training.mechanism.metrics._base import Floats, Metric, OneSum, clipped, side_by_side

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.metrics._base import Loss


@dataclass(frozen=True, kw_only=True)
class ClippedLoss(OneSum):
    """The mean of the loss that was trained on, clipped to ``[0, bound]``; no number counts as the bound.

    **Sensitivity**: a record adds a number in [0, bound] to one sum: both norms are at most the bound.
    """

    name: ClassVar[str] = "loss"
    takes: ClassVar[str] = "any"
    lower_is_better: ClassVar[bool] = True
    bound: float = 1.0

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        return self.bound

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        return clipped(loss(outputs, targets), self.bound, worst=self.bound)


@dataclass(frozen=True, kw_only=True)
class _OfNumbers(Metric):
    takes: ClassVar[str] = "numbers"

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
class _ClippedPower(OneSum, _OfNumbers):
    """The mean of a power of the absolute error, clipped to ``bound`` if that is less."""

    lower_is_better: ClassVar[bool] = True
    power: ClassVar[int]
    bound: float | None = None

    @property
    def largest(self) -> float:
        """The most that a record adds."""
        most = self.width**self.power
        return most if self.bound is None else min(self.bound, most)

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        return self.largest

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        given, known = self._pair(outputs, targets)
        return clipped((given - known).abs() ** self.power, self.largest, worst=self.largest)


@dataclass(frozen=True, kw_only=True)
class MAE(_ClippedPower):
    """The mean absolute error, of outputs and targets clipped to the declared range.

    **Sensitivity**: both are in a range of width w, so a record adds a number in [0, w], clipped to
    ``bound`` if that is less, to one sum: both norms are at most min(w, bound).
    """

    name: ClassVar[str] = "mae"
    power: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class MSE(_ClippedPower):
    """The mean squared error, of outputs and targets clipped to the declared range.

    **Sensitivity**: both are in a range of width w, so a record adds a number in [0, w²], clipped to
    ``bound`` if that is less, to one sum: both norms are at most min(w², bound). Most errors are far
    below w, so a ``bound`` of a few typical squared errors buys a score with less noise.
    """

    name: ClassVar[str] = "mse"
    power: ClassVar[int] = 2


@dataclass(frozen=True, kw_only=True)
class R2(_OfNumbers):
    """The share of the targets' variance that the model explains, clipped to [-1, 1].

    A ratio, so its parts are noised together: with targets z and errors e in units of half the
    declared range, z in [-1, 1] and e in [-2, 2], the sums of e²/4, of z, of z² and the count.

    **Sensitivity**: each of the four is in [-1, 1], so a record adds a vector of L2 norm at most
    √4 = 2 and of L1 norm at most 4; both are reached at z = -1, e = 2. The cost of the ratio: the noise is
    divided by the variance, so targets that use little of the declared range make it inexact. ``mse``
    costs half the noise, or a quarter by Laplace's.
    """

    name: ClassVar[str] = "r2"

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        return 4.0 if mechanism == "laplace" else 2.0

    def moved(self, mechanism: str) -> float:
        """√5, or 4, as where one that adds nothing takes the place of the longest.

        Else e²/4 moves by 1, z by d and z² by d·s, where d + |s| ≤ 2: d²(1 + s²) is at most 4 (d = 2,
        s = 0), and d(1 + |s|) at most 9/4 (d = 3/2).
        """
        return 4.0 if mechanism == "laplace" else math.sqrt(5.0)

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        given, known = self._pair(outputs, targets)
        unit = 2.0 / self.width
        middle = 0.5 * (self.target_range[0] + self.target_range[1])
        error = clipped((unit * (given - known)).square() / 4.0, 1.0, worst=1.0)
        z = (unit * (known - middle)).unsqueeze(1)
        return side_by_side(error, z, z.square(), z * 0.0 + 1.0)

    def ends(self, means: Floats) -> tuple[float, float]:
        """See ``Metric``: where targets seem to have no variance, nothing is known."""
        return super().ends(means) if self._spread(means) > 0.0 else (-1.0, 1.0)

    def value(self, means: Floats) -> float:
        """See ``Metric``."""
        spread = self._spread(means)
        if spread <= 0.0:
            return -1.0
        return min(max(1.0 - 4.0 * max(float(means[0]), 0.0) / spread, -1.0), 1.0)

    @staticmethod
    def _spread(means: Floats) -> float:
        _, z, square, count = (float(part) for part in means)
        return square - z * z / count if count > 0.0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Cost(Metric):
    """The mean of a function of the model and one record, ``(model, *record) -> [1]``; less is better.

    It is called for one record at a time, and clipped to ``[-bound, bound]``; what is no number counts
    as the worst.

    **Sensitivity**: a record adds a number in [-bound, bound] to one sum: both norms are at most the
    bound, and two records differ by at most twice it.
    """

    name: ClassVar[str] = "cost"
    takes: ClassVar[str] = "any"
    lower_is_better: ClassVar[bool] = True
    bound: float = 1.0

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        return self.bound

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        worst = self.bound if self.lower_is_better else -self.bound
        values = loss(outputs, targets).double().nan_to_num(nan=worst)
        return values.clamp(-self.bound, self.bound).unsqueeze(-1)

    def held(self, means: Floats) -> Floats:
        """Within [-bound, bound], as every mean of such numbers is: see ``Metric``."""
        return np.clip(means, -self.bound, self.bound)


@dataclass(frozen=True, kw_only=True)
class Value(Cost):
    """The same mean where more is better."""

    name: ClassVar[str] = "value"
    lower_is_better: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class OwnScore(OneSum):
    """The mean of a function of one's own, ``(outputs [N, ...], targets [N, ...]) -> [N]``.

    It is called for one record at a time, and clipped to ``[0, bound]``; what is no number counts as
    0, and more is better.

    **Sensitivity**: a record adds a number in [0, bound] to one sum: both norms are at most the bound.
    """

    name: ClassVar[str] = "package.module:function"
    takes: ClassVar[str] = "any"
    function: str
    bound: float = 1.0

    def __post_init__(self) -> None:
        _own(self.function)

    def norm(self, mechanism: str) -> float:
        """See ``Metric``."""
        return self.bound

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """See ``Metric``."""
        return clipped(_own(self.function)(outputs, targets), self.bound, worst=0.0)

    def try_on(self, *, classes: int | None, numbers: bool, rows: int | None) -> None:
        """Call the function on a made-up record, and refuse what gives no number for it.

        Args:
            classes: Number of classes; None where it is not known, or for a regression.
            numbers: Whether targets are numbers of a declared range. Where neither is declared, only
                how it can be called is looked at.
            rows: Rows of one record, where records are units; None where a record is a row.

        Raises:
            InvalidInputError: Saying what it did.
        """
        import torch

        function = _own(self.function)
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
            raise self._refused(
                f"fails on made-up outputs of shape {tuple(outputs.shape)} with {type(error).__name__}"
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


def _own(path: str) -> Any:
    return find_function(
        "scoring.metric",
        path,
        allowed="must be package.module:function",
        must="must name a function of outputs and targets",
    )
