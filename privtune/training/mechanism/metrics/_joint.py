"""Several metrics by one release: their sums side by side, each in units of its own bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from privtune.training.mechanism.metrics._base import Floats, Loss, Metric, side_by_side
from privtune.training.mechanism.metrics._make import make_metric

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Joint(Metric):
    """Several metrics of the same records. The first one names the release.

    **Sensitivity**: a metric's vector over its own norm is at most 1 long, so m of them side by side
    are at most sqrt(m) long in the L2 norm, and m in the L1 norm. Where a record is replaced, block i
    moves by at most moved_i / norm_i, and all of them by the L2 norm, or the sum, of these.

    Example:
        >>> both = Joint.of({"metric": "accuracy", "beside": [{"metric": "loss", "bound": 9.0}]})
        >>> round(both.norm("gaussian") ** 2), both.norm("laplace"), both.takes
        (2, 2.0, 'classes')
    """

    name: ClassVar[str] = "joint"
    metrics: tuple[Metric, ...]
    mechanism: str = "gaussian"
    _sizes: list[int] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, data: Mapping[str, Any], mechanism: str = "gaussian") -> Joint:
        """Return the metrics that a plan of a score names: its own, and those ``beside`` it."""
        own = {name: value for name, value in data.items() if name != "beside"}
        made = []
        for each in (own, *data["beside"]):
            options = {name: value for name, value in each.items() if name != "metric"}
            made.append(make_metric(each["metric"], **options))
        return cls(metrics=tuple(made), mechanism=mechanism)

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

        found = []
        for metric in self.metrics:
            own, norm = metric.parts(outputs, targets, loss), metric.norm(self.mechanism)
            order = 2 if self.mechanism == "gaussian" else 1
            lengths = torch.linalg.vector_norm(own, ord=order, dim=1, keepdim=True)
            found.append(own / lengths.clamp(min=norm))  # each within its own bound
        self._sizes[:] = [part.shape[1] for part in found]
        return side_by_side(*found)

    def blocks(self, means: Floats) -> Iterator[tuple[Metric, float, Floats]]:
        """Yield each metric with its norm, and the means of what records add to it."""
        start = 0
        for metric, size in zip(self.metrics, self._sizes, strict=True):
            norm = metric.norm(self.mechanism)
            yield metric, norm, means[start : start + size] * norm
            start += size

    def value(self, means: Floats) -> float:
        """See ``Metric``: the first one's."""
        metric, _, own = next(self.blocks(means))
        return metric.value(own)
