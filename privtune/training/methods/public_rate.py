"""AdamW at a constant public rate: the baseline of the methods that adapt theirs.

Normalised gradients after Bu et al. 2023, arXiv 2206.07136 (automatic clipping); the rate is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.methods._common import check_positive, descend, expect_nothing, first_size
from privtune.training.methods._free import FreeGradient
from privtune.training.methods._optimizers import AdamW
from privtune.training.methods.automatic import LearningRateState

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate


@dataclass(frozen=True)
class PublicRate(FreeGradient):
    """AdamW on noisy gradients at a constant rate of 0.2 times the size of the first weights.

    A weight then moves by a fifth of its first size a step at most. Nothing is adapted to the data:
    a method that pays for its rate has to do better than this.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        share: The rate over the size of the first weights, above 0.
        weight_decay: Decoupled, at least 0; 0.01 as in HyFreeDP.

    **Interval**: the rate is a constant: ``share`` times the root mean square of the first weights, or
    times ``1 / sqrt(3 fan_in)`` where they are all 0. A ``schedule`` scales it as its factors say.

    **Guarantee**: as DP-SGD with the same noise multiplier. First weights hold nothing of the data.

    Example:
        >>> PublicRate(1.1).share, PublicRate.parameters  # nothing is left to tune
        (0.2, ())
    """

    share: float = 0.2
    weight_decay: float = 0.01

    name: ClassVar[str] = "public-rate"
    summary: ClassVar[str] = "AdamW at a constant rate, a fifth of the size of the first weights"
    adapts: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("share", self.share)
        self._optimizer()

    def _optimizer(self) -> AdamW:
        return AdamW(weight_decay=self.weight_decay)

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> LearningRateState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        return LearningRateState(
            params=params,
            learning_rate=params.new_zeros(params.shape[0]),  # known at the first step
            moments=self._optimizer().init(params),
        )

    def update(self, state: LearningRateState, oracle: Oracle) -> LearningRateState:
        """Take one step along the noisy mean gradient."""
        rate = state.learning_rate
        if state.moments.step == 0:
            rate = self.share * first_size(state.params, oracle)[0]
        gradient = self._gradient(oracle, state.params, self._clipping())
        direction, moments = self._optimizer().direction(state.moments, gradient, state.params)
        params = descend(state.params, rate * oracle.pace, direction)
        return replace(state, params=params, learning_rate=rate, moments=moments)
