"""What the learning-rate-free baselines share: how they clip, and Adam at an estimated distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from privtune.training.methods._by_layer import LayerClipping
from privtune.training.methods._common import (
    check_fraction,
    check_hyperparameter,
    check_nonnegative,
    check_positive,
)
from privtune.training.methods._sampled import SampledGradient

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.clipping import Clipping

_FARTHEST = 1e12
"""Largest distance over the first: far beyond what any training needs, and squares of it are numbers."""


def farther(
    distance: torch.Tensor, seen: torch.Tensor, first: torch.Tensor | float
) -> torch.Tensor:
    """Return the larger of two distances, no more than 1e12 times the first; what is no number is 0.

    Args:
        distance: So far, shape ``[K]``.
        seen: The new ones.
        first: With which a training begins.
    """
    import torch

    return torch.fmax(distance, seen).clamp(
        max=_FARTHEST * first
    )  # fmax takes the one that is a number


class _WithDistance(Protocol):
    @property
    def distance(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class FreeGradient(LayerClipping, SampledGradient):
    """A method with nothing left to set: its gradients are normalised, or clipped to a fixed norm.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient (automatic clipping).
    """

    max_grad_norm: float | None = None

    adapts: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    parameters: ClassVar[tuple[str, ...]] = ()
    releases: ClassVar[str] = "one normalised noisy gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_grad_norm is not None:
            check_hyperparameter("max_grad_norm", "max_grad_norm", self.max_grad_norm)

    def _clipping(self) -> Clipping:
        return self.normalise() if self.max_grad_norm is None else self.clip(self.max_grad_norm)


@dataclass(frozen=True)
class DistanceAdam(FreeGradient):
    """Adam whose rate is an estimate of the distance to the solution.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        learning_rate: Factor on the estimated rate; 1 is the authors' advice.
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1).
        stability: Added to the root of the second moment, above 0.
        weight_decay: Decoupled, at least 0.
        initial_distance: d_0, above 0.
    """

    learning_rate: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    stability: float = 1e-8
    weight_decay: float = 0.0
    initial_distance: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("learning_rate", "stability", "initial_distance"):
            check_positive(name, getattr(self, name))
        check_fraction("beta1", self.beta1)
        check_fraction("beta2", self.beta2)
        check_nonnegative("weight_decay", self.weight_decay)

    def report(self, state: _WithDistance) -> Mapping[str, torch.Tensor]:
        """Return the learning rate, which lies in ``learning_rate * [1, 1e12] * initial_distance``."""
        return {"learning_rate": self.learning_rate * state.distance}
