"""Methods whose learning rate a candidate gives: DP-SGD, DP-Adam, automatic clipping, norm bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.mechanism.clipping import Flat
from privtune.training.methods._base import (
    SGD,
    AdamW,
    InnerOptimizer,
    Moments,
    candidate_column,
    check_positive,
    descend,
    rows,
)
from privtune.training.methods._by_layer import LayerClipping
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


@dataclass(frozen=True)
class DPAdam(FixedRates):
    """Adam fed the noisy gradient: everything after the release is post-processing.

    Args:
        noise_multiplier: Noise standard deviation over the clipping norm, at least 0.
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1).
        stability: Added to the root of the second moment, above 0.
        weight_decay: At least 0.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        decoupled: True decays the parameters (AdamW), False adds the decay to the gradient (Adam).

    **Guarantee**: as DP-SGD with the same noise multiplier.

    Example:
        >>> DPAdam(1.1, beta2=0.99).decoupled, DPAdam.parameters
        (True, ('learning_rate', 'max_grad_norm'))
    """

    beta1: float = 0.9
    beta2: float = 0.999
    stability: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True

    name: ClassVar[str] = "dp-adam"
    summary: ClassVar[str] = "Adam or AdamW on clipped noisy gradients"
    adapts: ClassVar[tuple[str, ...]] = ("step size of each coordinate",)
    scale_free: ClassVar[bool] = True

    def _optimizer(self) -> AdamW:
        return AdamW(self.beta1, self.beta2, self.stability, self.weight_decay, self.decoupled)


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
