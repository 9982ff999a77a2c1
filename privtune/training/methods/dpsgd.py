"""DP-SGD: fixed clipping, fixed learning rate (Abadi et al. 2016, arXiv 1607.00133)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.methods._common import (
    candidate_column,
    check_nonnegative,
    noise_scale_for,
    rows,
)
from privtune.training.methods._optimizers import SGD, Moments

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.methods._base import Candidate
    from privtune.training.oracle import Oracle
    from privtune.training.schedule import Schedule

__all__ = ["DPSGD", "DPSGDState"]


@dataclass(frozen=True, eq=False)
class DPSGDState:
    """State of K DP-SGD trainings."""

    params: torch.Tensor
    learning_rate: torch.Tensor
    max_grad_norm: torch.Tensor
    moments: Moments


@dataclass(frozen=True)
class DPSGD:
    """Noisy gradient descent on Poisson samples, each gradient clipped to a fixed norm.

    Args:
        noise_multiplier: Noise standard deviation over the clipping norm, at least 0 (0 is not
            private, and its event says so).
        momentum: Momentum in [0, 1) on the noisy gradient.
        weight_decay: Weight of the L2 penalty, at least 0; it touches no data.

    **Guarantee**: each step is one Poisson-sampled Gaussian release.
    """

    noise_multiplier: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "dpsgd"
    summary: ClassVar[str] = "DP-SGD with a fixed learning rate and a fixed clipping norm"
    adapts: ClassVar[tuple[str, ...]] = ()
    gradients_per_step: ClassVar[int] = 1
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    releases: ClassVar[str] = "one clipped noisy gradient"

    def __post_init__(self) -> None:
        check_nonnegative("noise_multiplier", self.noise_multiplier)
        SGD(self.momentum, self.weight_decay)

    @classmethod
    def for_budget(
        cls,
        schedule: Schedule,
        *,
        epsilon: float,
        delta: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> DPSGD:
        """Build the method with the least noise that keeps one training at (epsilon, delta)."""
        unit = cls(noise_multiplier=1.0, momentum=momentum, weight_decay=weight_decay)
        scale = noise_scale_for(unit.event(schedule), epsilon=epsilon, delta=delta)
        return replace(unit, noise_multiplier=scale)

    def event(self, schedule: Schedule) -> Event:
        """Return T Poisson-sampled Gaussian releases."""
        from privtune.accounting import Gaussian, PoissonSampled, Repeated

        step = PoissonSampled(schedule.sample_rate, Gaussian(self.noise_multiplier))
        return Repeated(schedule.steps, step)

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> DPSGDState:
        """Make the state of K candidates; each gives learning_rate and max_grad_norm."""
        return DPSGDState(
            params=params,
            learning_rate=candidate_column(candidates, "learning_rate", params),
            max_grad_norm=candidate_column(candidates, "max_grad_norm", params),
            moments=SGD(self.momentum, self.weight_decay).init(params),
        )

    def update(self, state: DPSGDState, oracle: Oracle) -> DPSGDState:
        """Take one step along the noisy clipped gradient."""
        from privtune.training.clipping import Flat

        gradient = oracle.gradient(
            oracle.sample(),
            state.params,
            clipping=Flat(state.max_grad_norm),
            noise_multiplier=self.noise_multiplier,
        )
        optimizer = SGD(self.momentum, self.weight_decay)
        direction, moments = optimizer.direction(state.moments, gradient, state.params)
        return replace(
            state, params=state.params - rows(state.learning_rate) * direction, moments=moments
        )

    def report(self, state: DPSGDState) -> Mapping[str, torch.Tensor]:
        """Return the learning rate and the clipping norm: constants."""
        return {"learning_rate": state.learning_rate, "max_grad_norm": state.max_grad_norm}
