"""Automatic clipping: normalised gradients, no clipping norm (Bu et al. 2023, arXiv 2206.07136)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.methods._by_layer import LayerClipping
from privtune.training.methods._common import candidate_column, check_positive, descend
from privtune.training.methods._optimizers import SGD, Moments
from privtune.training.methods._sampled import SampledGradient

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate


@dataclass(frozen=True, eq=False)
class LearningRateState:
    """State of K trainings whose only hyperparameter is the learning rate."""

    params: torch.Tensor
    learning_rate: torch.Tensor
    moments: Moments


@dataclass(frozen=True)
class AutomaticClipping(LayerClipping, SampledGradient):
    """SGD on the noisy sum of ``g / (|g| + stabilizer)``, whose sensitivity is 1.

    Args:
        noise_multiplier: Noise standard deviation over 1, at least 0.
        stabilizer: Added to the norm, above 0; 0.01 in the paper.
        momentum: Momentum in [0, 1) on the noisy gradient.
        weight_decay: Weight of the L2 penalty, at least 0.
        clipping: ``flat``, or ``by-layer``: the gradient of each of L layers is normalised to 1/sqrt(L).

    **Guarantee**: as DP-SGD with the same noise multiplier.

    Example:
        >>> AutomaticClipping.parameters, AutomaticClipping.adapts  # no clipping norm to tune
        (('learning_rate',), ('max_grad_norm',))
    """

    stabilizer: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "automatic-clipping"
    summary: ClassVar[str] = "SGD on normalised gradients: no clipping norm to choose"
    adapts: ClassVar[tuple[str, ...]] = ("max_grad_norm",)
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate",)
    releases: ClassVar[str] = "one normalised noisy gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("stabilizer", self.stabilizer)
        self._optimizer()

    def _optimizer(self) -> SGD:
        return SGD(self.momentum, self.weight_decay)

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> LearningRateState:
        """Make the state of K candidates; each gives learning_rate."""
        return LearningRateState(
            params=params,
            learning_rate=candidate_column(candidates, "learning_rate", params),
            moments=self._optimizer().init(params),
        )

    def update(self, state: LearningRateState, oracle: Oracle) -> LearningRateState:
        """Take one step along the noisy mean of normalised gradients."""
        gradient = self._gradient(oracle, state.params, self.normalise(self.stabilizer))
        direction, moments = self._optimizer().direction(state.moments, gradient, state.params)
        params = descend(state.params, state.learning_rate * oracle.pace, direction)
        return replace(state, params=params, moments=moments)
