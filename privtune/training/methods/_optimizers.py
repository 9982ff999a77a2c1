"""Optimizers as explicit state: they turn a noisy gradient into a step direction, no more.

A step is ``params - learning_rate * direction``. Whatever happens here is post-processing of a
release, so it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from privtune.training.methods._common import check_fraction, check_nonnegative, check_positive

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Moments:
    """State of an inner optimizer: moving averages of shape ``[K, P]`` and a step count."""

    first: torch.Tensor
    second: torch.Tensor
    step: int


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD`` defines it.

    Args:
        momentum: Factor in [0, 1) on the running sum of gradients; 0 for none.
        weight_decay: Weight of the L2 penalty that is added to the gradient, at least 0.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("momentum", self.momentum)
        check_nonnegative("weight_decay", self.weight_decay)

    def init(self, params: torch.Tensor) -> Moments:
        """Return the state before the first step."""
        empty = params.new_zeros((params.shape[0], 0))
        first = params.new_zeros(params.shape) if self.momentum else empty
        return Moments(first=first, second=empty, step=0)

    def direction(
        self, state: Moments, gradient: torch.Tensor, params: torch.Tensor
    ) -> tuple[torch.Tensor, Moments]:
        """Return the direction of this step, shape ``[K, P]``, and the next state."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * params
        if not self.momentum:
            return gradient, Moments(state.first, state.second, state.step + 1)
        first = self.momentum * state.first + gradient
        return first, Moments(first, state.second, state.step + 1)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, as ``torch.optim.AdamW`` defines it.

    Args:
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1).
        stability: Added to the root of the second moment, above 0.
        weight_decay: Decay of the parameters per unit of learning rate, at least 0.
        decoupled: False adds the decay to the gradient, as ``torch.optim.Adam`` does.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    stability: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True

    def __post_init__(self) -> None:
        check_fraction("beta1", self.beta1)
        check_fraction("beta2", self.beta2)
        check_positive("stability", self.stability)
        check_nonnegative("weight_decay", self.weight_decay)

    def init(self, params: torch.Tensor) -> Moments:
        """Return the state before the first step."""
        zeros = params.new_zeros(params.shape)
        return Moments(first=zeros, second=zeros.clone(), step=0)

    def direction(
        self, state: Moments, gradient: torch.Tensor, params: torch.Tensor
    ) -> tuple[torch.Tensor, Moments]:
        """Return the direction of this step, shape ``[K, P]``, and the next state."""
        if self.weight_decay and not self.decoupled:
            gradient = gradient + self.weight_decay * params
        step = state.step + 1
        first = state.first.lerp(gradient, 1.0 - self.beta1)
        second = (self.beta2 * state.second).addcmul_(gradient, gradient, value=1.0 - self.beta2)
        # Both corrections of the bias go into the divisor: every pass over the vectors counts.
        bias = 1.0 - self.beta1**step
        divisor = second.sqrt().mul_(bias / (1.0 - self.beta2**step) ** 0.5)
        direction = first / divisor.add_(bias * self.stability)
        if self.weight_decay and self.decoupled:
            direction.add_(params, alpha=self.weight_decay)
        return direction, Moments(first, second, step)


InnerOptimizer = SGD | AdamW
