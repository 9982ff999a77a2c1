"""What a metric is: a sum of bounded vectors, and a function of the sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float64]
Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A sum of what records add, and what is made of it.

    Attributes:
        name: Name in specs.
        takes: ``classes`` (outputs ``[N, C]``, whole targets ``[N]``), ``two`` (likewise, C = 2),
            ``numbers`` (outputs ``[N]`` or ``[N, 1]``, targets ``[N]``), or ``any``.
        lower_is_better: Whether less is better; its score is then negated.
        share: Whether it is a share of records, shown in percent.

    Example:
        >>> from privtune.training.mechanism.metrics import make_metric
        >>> make_metric("f1").norm("gaussian"), make_metric("macro_f1").norm("laplace")
        (1.0, 2.0)
        >>> make_metric("accuracy").moved("laplace"), make_metric("auc").moved("laplace")
        (1.0, 2.0)
    """

    name: ClassVar[str]
    takes: ClassVar[str] = "classes"
    lower_is_better: ClassVar[bool] = False
    share: ClassVar[bool] = False

    def norm(self, mechanism: str) -> float:
        """Return the longest vector that a record can add: its L2 norm, for ``laplace`` its L1 norm."""
        raise NotImplementedError

    def moved(self, mechanism: str) -> float:
        """Return how far sums can move where a record is replaced: one vector less another.

        Twice the norm holds for any; metrics say less where their vectors are on one side.
        """
        return 2.0 * self.norm(mechanism)

    def parts(self, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> torch.Tensor:
        """Return what each record adds, shape ``[N, d]``; every row is a function of its record."""
        raise NotImplementedError

    def value(self, means: Floats) -> float:
        """Return the metric from noised sums, each divided by the declared number of records."""
        return float(means[0])

    def held(self, means: Floats) -> Floats:
        """Return the noised means nearest to what means can be.

        It looks at what was released alone, so it is free, and it never moves a mean away from the
        true one. Scores that decide are left as they are: held ones would tie.
        """
        return means

    def ends(self, means: Floats) -> tuple[float, float]:
        """Return the metric twice; the ends of what it can be where noise leaves nothing to divide by."""
        value = self.value(self.held(means))
        return value, value


class OneSum(Metric):
    """A metric of one sum, to which each record adds one number in [0, norm]."""

    def moved(self, mechanism: str) -> float:
        """The norm: two numbers in [0, norm] differ by no more."""
        return self.norm(mechanism)

    def held(self, means: Floats) -> Floats:
        """Within [0, norm], as every mean of such numbers is: see ``Metric``."""
        return np.clip(means, 0.0, self.norm("gaussian"))


def side_by_side(*parts: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([part.double() for part in parts], dim=1)


def clipped(values: torch.Tensor, bound: float, *, worst: float) -> torch.Tensor:
    """Clip to [0, bound]; what is not a number counts as the worst, so that the bound holds."""
    values = values.double().nan_to_num(nan=worst, posinf=bound)
    return values.clamp(0.0, bound).unsqueeze(-1)


def ratio(part: Any, whole: Any) -> Any:
    """Return a part of a whole; 0 where the whole is nothing."""
    return np.where(whole > 0.0, part / np.where(whole > 0.0, whole, 1.0), 0.0)
