"""The methods whose every step is one noisy clipped gradient of one Poisson sample.

They differ in how they clip and in what they make of the gradient; their event is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from privtune.training.methods._base import build, check_nonnegative, noise_scale_for
from privtune.training.methods._rate_schedule import Scheduled

if TYPE_CHECKING:
    import torch

    from privtune.accounting import Event
    from privtune.training.mechanism.clipping import Clipping
    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule


@dataclass(frozen=True)
class SampledGradient(Scheduled):
    """A method that releases one Poisson-sampled Gaussian gradient a step.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0; at 0
            the method is not private and its event says so.

    **Guarantee**: T Poisson-sampled Gaussian releases.
    """

    noise_multiplier: float

    reported: ClassVar[tuple[str, ...]] = ("learning_rate",)
    """What of a state may be plotted, one number a candidate: it follows from releases alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative("noise_multiplier", self.noise_multiplier)

    @classmethod
    def for_budget(
        cls, schedule: Schedule, /, *, epsilon: float, delta: float, **options: Any
    ) -> Self:
        """Build the method with the least noise that keeps one training at (epsilon, delta)."""
        unit = build(cls, options, noise_multiplier=1.0)
        scale = noise_scale_for(unit.event(schedule), epsilon=epsilon, delta=delta)
        return build(cls, options, noise_multiplier=scale)

    def gradient_evaluations(self, schedule: Schedule) -> float:
        """Return one per-sample gradient for each record of a sample."""
        return schedule.expected_gradient_evaluations

    def event(self, schedule: Schedule) -> Event:
        """Return T Poisson-sampled Gaussian releases."""
        from privtune.accounting import Gaussian, NonPrivate, PoissonSampled, Repeated

        if self.noise_multiplier == 0.0:
            return NonPrivate()
        step = PoissonSampled(schedule.sample_rate, Gaussian(self.noise_multiplier))
        return Repeated(schedule.steps, step)

    def report(self, state: Any) -> Mapping[str, torch.Tensor]:
        """Return the fields of the state that are ``reported``."""
        return {name: getattr(state, name) for name in self.reported}

    def _gradient(self, oracle: Oracle, params: torch.Tensor, clipping: Clipping) -> torch.Tensor:
        """Ask for the noisy mean gradient of a new sample, shape ``[K, P]``."""
        return oracle.gradient(
            oracle.sample(), params, clipping=clipping, noise_multiplier=self.noise_multiplier
        )
