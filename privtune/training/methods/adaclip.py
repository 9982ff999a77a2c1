"""AdaCliP: coordinate-wise clipping from past noisy gradients (arXiv 1908.07643, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from privtune.errors import InvalidInputError
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.methods import method as base

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.mechanism.schedule import Schedule

_RECTIFIED = 2.0 * math.exp(-0.5) / math.sqrt(2.0 * math.pi)  # E[(z² - 1)₊] of a normal z
_WAITS = 0.05  # of the steps is the least time that may pass until the scale has grown
_FALLEN = 0.01  # of h₂: what a coordinate's variance must be able to fall to


@dataclass(frozen=True, eq=False)
class AdaCliPState:
    """State of K AdaCliP trainings: ``mean`` and ``deviation`` are m and s, shape ``[K, P]``."""

    params: torch.Tensor
    learning_rate: torch.Tensor
    largest_variance: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor

    @cached_property
    def total(self) -> torch.Tensor:
        """The sum of the deviations s, shape ``[K, 1]``, which equals the norm of the scale b."""
        return self.deviation.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class AdaCliP(base.Method):
    """SGD on gradients that are shifted and scaled by coordinate before they are clipped and noised.

    Algorithm 1 adds noise to every record. Under Poisson sampling the number of noise terms would
    then depend on who is in the sample, and at a fixed batch the sum would carry sqrt(B) times the
    noise that was paid for. So the clipped sum is noised once, and equation (5) subtracts the noise
    variance of the mean, ``(b σ / B)^2``. The deviation from the mean in (5) is taken to the mean
    before it is updated by (4): the derivation needs it to be independent of the step's noise.

    Args:
        noise_multiplier: Noise standard deviation of the transformed sum, at least 0.
        mean_decay: β₁ in [0, 1).
        deviation_decay: β₂ in [0, 1). With ``start="paper"`` and 0.997 s needs most of 1,000 steps on
            MNIST to leave its first value, and the training waits for it.
        smallest_variance: h₁, above 0.
        per_record: Scale (5) by the batch size, so that s is the deviation of one record's gradient,
            as Theorem 1 wants it. What (5) measures at a batch above 1 is the deviation of the
            mean, sqrt(B) times smaller: then every record is clipped, s shrinks to h₁ everywhere
            and h₂ has no effect. False takes (5) as it stands.
        start: First value of s. ``"largest"`` is sqrt(h₂), at which P coordinates are clipped together to
            norm sqrt(P h₂): s then falls to what is seen, by β₂ a step at most. ``"paper"`` is sqrt(h₁ h₂)
            to the letter, 3e-8 at the usual h: every record is clipped to next to nothing, and what
            makes s grow is the noise, so that the less of it there is, the longer the training waits.

    A candidate gives ``largest_variance``, h₂. Choosing it by looking at the data is tuning, and is
    charged as such by the strategy that does it.

    **Interval**: each s² stays within h₁ and h₂, but for the first value ``h₁ h₂`` of ``start="paper"``,
    so that the norm of the scale b, their sum, stays within P times the roots of those. The rate is a
    constant.

    **Guarantee**: as DP-SGD with the same noise multiplier; shift and scale are functions of past
    releases.

    References:
        Pichapati et al. 2019, Theorem 1, Algorithm 1, equations (4) and (5).

    Example:
        >>> AdaCliP(1.1, mean_decay=0.9).parameters
        ('learning_rate', 'largest_variance')
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> schedule = Schedule(records=4000, sample_rate=0.025, steps=120)
        >>> AdaCliP(0.3, start="paper").advice(schedule, lambda: 2698)[:59]
        'The scale of each coordinate starts at 1e-06 of its maximum'
        >>> AdaCliP(0.3).advice(schedule, lambda: 2698)
        ''
    """

    noise_multiplier: float
    mean_decay: float = base.fraction(0.99)
    deviation_decay: float = base.fraction(0.9)
    smallest_variance: float = base.positive(1e-12)
    per_record: bool = True
    start: str = base.choice("largest", "paper")

    clips_whole: ClassVar[str] = (
        "it scales every coordinate by itself before it clips them together"
    )
    name: ClassVar[str] = "adaclip"
    summary: ClassVar[str] = "Coordinate-wise clipping by the mean and deviation of past releases"
    adapts: ClassVar[tuple[str, ...]] = ("max_grad_norm of each coordinate",)
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate", "largest_variance")
    releases: ClassVar[str] = "one transformed, clipped noisy gradient"

    def advice(self, schedule: Schedule, dimension: Callable[[], int]) -> str:
        """Return a warning if the clipping scale has too few steps to grow or to fall.

        By noise alone, without a gradient, (5) sees the rectified ``(b σ / B)² (z² - 1)`` of a normal z,
        whose mean is ``2 φ(1)`` times the square. As ``Σ b² = (Σ s)² <= P Σ s²``, one step multiplies
        ``Σ s²`` by ``β₂ + (1 - β₂) 2 φ(1) P (σ / B)² B`` at most in the mean; without ``per_record`` the
        last factor is missing.

        Args:
            schedule: Records, rate and number of steps.
            dimension: Counts the trained parameters, P.

        Returns:
            One sentence and a remedy; empty where the scale has the steps that it needs.
        """
        if self.start == "paper":
            return self._slow_growth(schedule, dimension())
        remainder = self.deviation_decay**schedule.steps
        if remainder <= _FALLEN:
            return ""
        return (
            f"Clipping hardly adapts: each coordinate's variance starts at largest_variance, and "
            f"{schedule.steps} steps later it is still {remainder:.2g} of that or more. Use more epochs, "
            "a smaller deviation_decay, or dpsgd with a max_grad_norm."
        )

    def _slow_growth(self, schedule: Schedule, dimension: int) -> str:
        """Return a warning if noise needs too many steps to grow the scale from the paper's start."""
        batch = schedule.expected_batch_size
        variance = _RECTIFIED * dimension * (self.noise_multiplier / batch) ** 2
        if self.per_record:
            variance = variance * batch
        factor = self.deviation_decay + (1.0 - self.deviation_decay) * variance
        steps = math.inf
        if factor > 1.0:
            steps = math.log(1.0 / self.smallest_variance) / math.log(factor)
        if steps <= _WAITS * schedule.steps:
            return ""
        noise = "noise alone never makes it grow"
        if math.isfinite(steps):
            noise = (
                f"noise needs at least {steps:,.0f} of the {schedule.steps:,} steps to make it grow"
            )
        return (
            f"The scale of each coordinate starts at {self.smallest_variance**0.5:.2g} of its "
            f"maximum, and {noise}. "
            "Until it has grown, every record is clipped to almost nothing. Leave out start: paper."
        )

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> AdaCliPState:
        """Make the state of K candidates; each gives learning_rate and largest_variance.

        Raises:
            InvalidInputError: If h₂ is below h₁.
        """
        largest = base.candidate_column(candidates, "largest_variance", params)
        if bool((largest < self.smallest_variance).any()):
            raise InvalidInputError(
                "largest_variance",
                largest.min().item(),
                "must be at least smallest_variance",
            )
        start = largest.sqrt()
        if self.start == "paper":
            start = (self.smallest_variance * largest).sqrt()
        return AdaCliPState(
            params=params,
            learning_rate=base.candidate_column(candidates, "learning_rate", params),
            largest_variance=largest,
            mean=params.new_zeros(params.shape),
            deviation=base.rows(start).expand(params.shape).clone(),
        )

    def update(self, state: AdaCliPState, oracle: Oracle) -> AdaCliPState:
        """Take one step, then update mean and deviation of the gradient's coordinates."""
        import torch

        total = state.total
        clipping = CoordinateTransform(
            center=state.mean, scale=state.deviation.sqrt().mul_(total.sqrt())
        )
        gradient = self.gradient(oracle, state.params, clipping)
        # Every pass over the vectors counts, so constants are gathered in numbers of candidates:
        # b^2 is s times the sum of all s, and (5) is scaled before it is cut, not after.
        batch = oracle.schedule.expected_batch_size
        share = (1.0 - self.deviation_decay) * (batch if self.per_record else 1.0)
        less = (-share * (self.noise_multiplier / batch) ** 2) * total  # the noise's part
        moved = gradient - state.mean
        scatter = (state.deviation * less).addcmul_(moved, moved, value=share)
        cut = (1.0 - self.deviation_decay) * state.largest_variance
        scatter.clamp_min_((1.0 - self.deviation_decay) * self.smallest_variance)
        # What is no number counts as the largest.
        scatter = torch.where(scatter < base.rows(cut), scatter, base.rows(cut))
        variance = scatter.addcmul_(state.deviation, state.deviation, value=self.deviation_decay)
        return replace(
            state,
            params=base.descend(state.params, state.learning_rate * oracle.pace, gradient),
            mean=torch.add(state.mean, moved, alpha=1.0 - self.mean_decay, out=moved),
            deviation=variance.sqrt_(),
        )

    def report(self, state: AdaCliPState) -> Mapping[str, torch.Tensor]:
        """Return the learning rate and the norm of the scale b, which the noise is multiplied by."""
        return {"learning_rate": state.learning_rate, "scale_norm": state.total.squeeze(1)}
