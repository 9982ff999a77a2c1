"""DP-SGD: fixed clipping, fixed learning rate (Abadi et al. 2016, arXiv 1607.00133)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.methods._by_layer import LayerClipping
from privtune.training.methods._common import candidate_column, descend
from privtune.training.methods._optimizers import SGD, InnerOptimizer, Moments
from privtune.training.methods._sampled import SampledGradient

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate


@dataclass(frozen=True, eq=False)
class DPSGDState:
    """State of K DP-SGD trainings."""

    params: torch.Tensor
    learning_rate: torch.Tensor
    max_grad_norm: torch.Tensor
    moments: Moments


@dataclass(frozen=True)
class FixedRates(LayerClipping, SampledGradient, ABC):
    """A fixed learning rate and a fixed clipping norm; what differs is the optimizer."""

    parameters: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    releases: ClassVar[str] = "one clipped noisy gradient"
    reported: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._optimizer()

    @abstractmethod
    def _optimizer(self) -> InnerOptimizer:
        """Return the optimizer that the noisy gradients are fed to; checks its fields."""

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> DPSGDState:
        """Make the state of K candidates; each gives learning_rate and max_grad_norm."""
        return DPSGDState(
            params=params,
            learning_rate=candidate_column(candidates, "learning_rate", params),
            max_grad_norm=candidate_column(candidates, "max_grad_norm", params),
            moments=self._optimizer().init(params),
        )

    def update(self, state: DPSGDState, oracle: Oracle) -> DPSGDState:
        """Take one step of the optimizer on the noisy clipped gradient."""
        gradient = self._gradient(oracle, state.params, self.clip(state.max_grad_norm))
        direction, moments = self._optimizer().direction(state.moments, gradient, state.params)
        params = descend(state.params, state.learning_rate * oracle.pace, direction)
        return replace(state, params=params, moments=moments)


@dataclass(frozen=True)
class FixedDPSGD(FixedRates):
    """Noisy gradient descent on Poisson samples, each gradient clipped to a fixed norm.

    Args:
        noise_multiplier: Noise standard deviation over the clipping norm, at least 0.
        momentum: Momentum in [0, 1) on the noisy gradient.
        weight_decay: Weight of the L2 penalty, at least 0; it touches no data.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).

    **Guarantee**: each step is one Poisson-sampled Gaussian release.

    Example:
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> schedule = Schedule.from_epochs(records=60_000, expected_batch_size=600, epochs=10)
        >>> method = FixedDPSGD.for_budget(schedule, epsilon=1.0, delta=1e-5, momentum=0.9)
        >>> round(method.noise_multiplier, 3)
        1.415
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "dpsgd"
    summary: ClassVar[str] = "DP-SGD with a fixed learning rate and a fixed clipping norm"
    adapts: ClassVar[tuple[str, ...]] = ()

    def _optimizer(self) -> SGD:
        return SGD(self.momentum, self.weight_decay)
