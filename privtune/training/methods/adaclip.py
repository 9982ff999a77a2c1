"""AdaCliP: coordinate-wise clipping from past noisy gradients (arXiv 1908.07643, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from privtune.errors import InvalidInputError
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.methods import _base as base

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle


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
        """Sum of the deviations, which is the norm of the scale b, shape ``[K, 1]``."""
        return self.deviation.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class AdaCliP(base.Method):
    """SGD with gradients shifted, scaled by coordinate, clipped to norm 1, noised, scaled back.

    Algorithm 1 adds noise to every record. Under Poisson sampling the number of noise terms would
    then depend on who is in the sample, and at a fixed batch the sum would carry sqrt(B) times the
    noise that was paid for. So the clipped sum is noised once, and equation (5) subtracts the noise
    variance of the mean, ``(b σ / B)^2``. The deviation from the mean in (5) is taken to the mean
    before it is updated by (4): the derivation needs it to be independent of the step's noise.

    Args:
        noise_multiplier: Noise standard deviation of the transformed sum, at least 0.
        mean_decay: β₁ in [0, 1).
        deviation_decay: β₂ in [0, 1). At 0.997 s needs most of 1,000 steps on MNIST to leave its
            first value, sqrt(h₁ h₂), and the training waits for it.
        smallest_variance: h₁, above 0.
        per_record: Scale (5) by the batch size, so that s is the deviation of one record's gradient,
            as Theorem 1 wants it. What (5) measures at a batch above 1 is the deviation of the
            mean, sqrt(B) times smaller: then every record is clipped, s shrinks to h₁ everywhere
            and h₂ has no effect. False takes (5) as it stands.

    A candidate gives ``largest_variance``, h₂. Choosing it by looking at the data is tuning, and is
    charged as such by the strategy that does it.

    **Interval**: each s² stays within h₁ and h₂, but for its first value ``h₁ h₂``, so that the norm
    of the scale b, their sum, stays within P times the roots of those. The rate is a constant.

    **Guarantee**: as DP-SGD with the same noise multiplier; shift and scale are functions of past
    releases.

    References:
        Pichapati et al. 2019, Theorem 1, Algorithm 1, equations (4) and (5).

    Example:
        >>> AdaCliP(1.1, mean_decay=0.9).parameters
        ('learning_rate', 'largest_variance')
    """

    noise_multiplier: float
    mean_decay: float = base.fraction(0.99)
    deviation_decay: float = base.fraction(0.9)
    smallest_variance: float = base.positive(1e-12)
    per_record: bool = True

    clips_whole: ClassVar[str] = (
        "it scales every coordinate by itself before it clips them together"
    )
    name: ClassVar[str] = "adaclip"
    summary: ClassVar[str] = "Coordinate-wise clipping by the mean and deviation of past releases"
    adapts: ClassVar[tuple[str, ...]] = ("max_grad_norm of each coordinate",)
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate", "largest_variance")
    releases: ClassVar[str] = "one transformed, clipped noisy gradient"

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> AdaCliPState:
        """Make the state of K candidates; each gives learning_rate and largest_variance.

        Raises:
            InvalidInputError: If h₂ is below h₁.
        """
        largest = base.candidate_column(candidates, "largest_variance", params)
        if bool((largest < self.smallest_variance).any()):
            raise InvalidInputError(
                "largest_variance", largest.min().item(), "must be at least smallest_variance"
            )
        start = (self.smallest_variance * largest).sqrt()
        return AdaCliPState(
            params=params,
            learning_rate=base.candidate_column(candidates, "learning_rate", params),
            largest_variance=largest,
            mean=params.new_zeros(params.shape),
            deviation=base.rows(start).expand(params.shape).clone(),
        )

    def update(self, state: AdaCliPState, oracle: Oracle) -> AdaCliPState:
        """Take one step, then update mean and deviation from what was released."""
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
        seen = (state.deviation * less).addcmul_(moved, moved, value=share)
        cut = (1.0 - self.deviation_decay) * state.largest_variance
        seen.clamp_min_((1.0 - self.deviation_decay) * self.smallest_variance)
        # What is no number counts as the largest.
        seen = torch.where(seen < base.rows(cut), seen, base.rows(cut))
        variance = seen.addcmul_(state.deviation, state.deviation, value=self.deviation_decay)
        return replace(
            state,
            params=base.descend(state.params, state.learning_rate * oracle.pace, gradient),
            mean=torch.add(state.mean, moved, alpha=1.0 - self.mean_decay, out=moved),
            deviation=variance.sqrt_(),
        )

    def report(self, state: AdaCliPState) -> Mapping[str, torch.Tensor]:
        """Return the learning rate and the norm of the scale b, which the noise is multiplied by."""
        return {"learning_rate": state.learning_rate, "scale_norm": state.total.squeeze(1)}
