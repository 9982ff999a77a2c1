"""Norm bound: noise scaled to a proven bound on the gradient, no clipping (arXiv 1908.07643, §6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.mechanism.clipping import Flat
from privtune.training.methods._common import candidate_column, check_positive, rows
from privtune.training.methods._optimizers import SGD
from privtune.training.methods._sampled import SampledGradient
from privtune.training.methods.automatic import LearningRateState

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate


@dataclass(frozen=True)
class NormBound(SampledGradient):
    """SGD with noise for the largest gradient that the model allows: nothing is ever clipped.

    Args:
        noise_multiplier: Noise standard deviation over ``gradient_bound``, at least 0.
        gradient_bound: Proven bound on the norm of a record's gradient, above 0. It is enforced by
            clipping to it, so a wrong proof costs accuracy and not privacy.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    Example:
        >>> import math  # logistic loss on inputs of norm 1 and a constant: a gradient's norm is below √2
        >>> NormBound(1.1, gradient_bound=round(math.sqrt(2), 4))
        NormBound(schedule='constant', average='last', noise_multiplier=1.1, gradient_bound=1.4142)
    """

    gradient_bound: float = 1.0

    clips_whole: ClassVar[str] = (
        "gradient_bound is proven for the whole gradient, none of which is cut"
    )
    name: ClassVar[str] = "norm-bound"
    summary: ClassVar[str] = "SGD with noise scaled to a proven bound on the gradient"
    adapts: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate",)
    releases: ClassVar[str] = "one noisy gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("gradient_bound", self.gradient_bound)

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> LearningRateState:
        """Make the state of K candidates; each gives learning_rate."""
        rate = candidate_column(candidates, "learning_rate", params)
        return LearningRateState(params=params, learning_rate=rate, moments=SGD().init(params))

    def update(self, state: LearningRateState, oracle: Oracle) -> LearningRateState:
        """Take one step along the noisy mean gradient."""
        gradient = self._gradient(oracle, state.params, Flat(self.gradient_bound))
        return replace(
            state, params=state.params - rows(state.learning_rate * oracle.pace) * gradient
        )
