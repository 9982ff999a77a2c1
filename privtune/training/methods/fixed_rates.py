"""Methods that step at a given rate: DP-SGD, DP-Adam, automatic clipping, and a norm bound."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.mechanism.clipping import Clipping, Flat
from privtune.training.methods import method as base

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle


@dataclass(frozen=True, eq=False)
class RateState:
    """The state of K trainings with fixed rates; a clipping norm is 0 if candidates give none."""

    params: torch.Tensor
    learning_rate: torch.Tensor
    max_grad_norm: torch.Tensor
    moments: base.Moments


@dataclass(frozen=True)
class FixedRates(base.Method):
    """A method that steps an inner optimizer along one noisy gradient, at a fixed rate."""

    noise_multiplier: float

    parameters: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    reported: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")

    @abstractmethod
    def _optimizer(self) -> base.InnerOptimizer:
        """Return the inner optimizer that turns noisy gradients into directions."""

    def clipping_of(self, max_grad_norm: torch.Tensor) -> Clipping:
        """Return a clipping to the norms that candidates give, ``[K]``."""
        return self.clip(max_grad_norm)

    def init(self, params: torch.Tensor, candidates: Sequence[base.Candidate]) -> RateState:
        """Make the state of K candidates, which give the hyperparameters in :attr:`parameters`."""
        norms = params.new_zeros(params.shape[0])
        if "max_grad_norm" in self.parameters:
            norms = base.candidate_column(candidates, "max_grad_norm", params)
        rate = base.candidate_column(candidates, "learning_rate", params)
        return RateState(params, rate, norms, self._optimizer().init(params))

    def update(self, state: RateState, oracle: Oracle) -> RateState:
        """Take one step of the optimizer along the noisy mean gradient."""
        clipping = self.clipping_of(state.max_grad_norm)
        gradient = self.gradient(oracle, state.params, clipping)
        direction, moments = self._optimizer().direction(state.moments, gradient, state.params)
        params = base.descend(state.params, state.learning_rate * oracle.pace, direction)
        return replace(state, params=params, moments=moments)


@dataclass(frozen=True)
class FixedDPSGD(FixedRates):
    """Noisy gradient descent on Poisson samples, each gradient clipped to a fixed norm.

    Args:
        momentum: Momentum in [0, 1) on the noisy gradient.
        weight_decay: Weight of the L2 penalty, at least 0; it touches no data.

    **Guarantee**: each step is one Poisson-sampled Gaussian release.

    References:
        Abadi et al. 2016, arXiv 1607.00133, Algorithm 1.

    Example:
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> schedule = Schedule.from_epochs(records=60_000, expected_batch_size=600, epochs=10)
        >>> method = FixedDPSGD.for_budget(schedule, epsilon=1.0, delta=1e-5, momentum=0.9)
        >>> round(method.noise_multiplier, 3)
        1.415
    """

    momentum: float = base.fraction(0.0)
    weight_decay: float = base.nonnegative(0.0)
    clipping: str = base.by_layer_option()

    name: ClassVar[str] = "dpsgd"
    summary: ClassVar[str] = "DP-SGD with a fixed learning rate and a fixed clipping norm"
    steps_by_weight: ClassVar[bool] = True

    @property
    def takes_optimizer(self) -> bool:
        """Whether one of torch's optimizers may step: only without own momentum and weight decay."""
        return not self.momentum and not self.weight_decay

    def _optimizer(self) -> base.SGD:
        return base.SGD(self.momentum, self.weight_decay)


@dataclass(frozen=True)
class DPAdam(FixedRates):
    """Adam or AdamW on noisy clipped gradients, as post-processing of what DP-SGD would release.

    Args:
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1).
        stability: Added to the root of the second moment, above 0.
        weight_decay: At least 0.
        decoupled: True decays the parameters (AdamW), False adds the decay to the gradient (Adam).
        noise_floor: Corrects the second moment for the noise (DP-AdamBC), above 0; None leaves it as it is.
            With Φ = (σC/B)², the variance of the noise in a coordinate of the mean gradient, the step is
            ``m̂ / sqrt(max(v̂ - Φ, γ'))`` for the floor γ' = ``noise_floor`` · Φ. Rates are then about
            ``sqrt(noise_floor)`` times those of DP-Adam; 0.1 was best here.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    References:
        Kingma & Ba 2015, arXiv 1412.6980. Tang et al. 2024, arXiv 2312.14334, Algorithm 1, which gives γ' as
        a number; and :attr:`stability` is added to the root, so that without noise it is Adam.

    Example:
        >>> DPAdam(1.1, beta2=0.99).decoupled, DPAdam.parameters
        (True, ('learning_rate', 'max_grad_norm'))
    """

    beta1: float = base.fraction(0.9)
    beta2: float = base.fraction(0.999)
    stability: float = base.positive(1e-8)
    weight_decay: float = base.nonnegative(0.0)
    decoupled: bool = True
    noise_floor: float | None = base.positive(None)
    clipping: str = base.by_layer_option()

    name: ClassVar[str] = "dp-adam"
    summary: ClassVar[str] = "Adam or AdamW on clipped noisy gradients"
    adapts: ClassVar[tuple[str, ...]] = ("step size of each coordinate",)
    scale_free: ClassVar[bool] = True
    steps_by_weight: ClassVar[bool] = True

    def _optimizer(self) -> base.AdamW:
        return base.AdamW(
            self.beta1,
            self.beta2,
            self.stability,
            self.weight_decay,
            self.decoupled,
        )

    def update(self, state: RateState, oracle: Oracle) -> RateState:
        """Take one step of Adam; with a noise floor its second moment is corrected for the noise."""
        if self.noise_floor is None:
            return super().update(state, oracle)
        clipping = self.clipping_of(state.max_grad_norm)
        gradient = self.gradient(oracle, state.params, clipping)
        _, moments = self._optimizer().direction(state.moments, gradient, state.params)
        batch = oracle.schedule.expected_batch_size
        noise = base.rows(self.noise_multiplier * state.max_grad_norm / batch).square()
        direction = self._corrected(moments, noise, self.noise_floor)
        if self.decoupled:
            direction = direction + self.weight_decay * state.params
        params = base.descend(state.params, state.learning_rate * oracle.pace, direction)
        return replace(state, params=params, moments=moments)

    def _corrected(
        self,
        moments: base.Moments,
        noise: torch.Tensor,
        floor: float,
    ) -> torch.Tensor:
        """Return ``m̂ / sqrt(max(v̂ - Φ, γ'))``, shape ``[K, P]``, for the noise's variance Φ ``[K, 1]``."""
        first = moments.first / (1.0 - self.beta1**moments.step)
        second = moments.second / (1.0 - self.beta2**moments.step)
        signal = (second - noise).maximum(floor * noise)
        return first / (signal.sqrt() + self.stability)


@dataclass(frozen=True)
class AutomaticClipping(FixedRates):
    """SGD on the noisy sum of ``g / (|g| + stabilizer)``, whose sensitivity is 1.

    Args:
        stabilizer: Added to the norm, above 0; 0.01 in the paper.
        momentum: Momentum in [0, 1) on the noisy gradient.
        weight_decay: Weight of the L2 penalty, at least 0.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    References:
        Bu et al. 2023, arXiv 2206.07136.

    Example:
        >>> AutomaticClipping.parameters, AutomaticClipping.adapts  # no clipping norm to tune
        (('learning_rate',), ('max_grad_norm',))
    """

    stabilizer: float = base.positive(0.01)
    momentum: float = base.fraction(0.0)
    weight_decay: float = base.nonnegative(0.0)
    clipping: str = base.by_layer_option()

    name: ClassVar[str] = "automatic-clipping"
    summary: ClassVar[str] = "SGD on normalised gradients: no clipping norm to choose"
    adapts: ClassVar[tuple[str, ...]] = ("max_grad_norm",)
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate",)
    reported: ClassVar[tuple[str, ...]] = ("learning_rate",)
    normalises: ClassVar[bool] = True
    releases: ClassVar[str] = "one normalised noisy gradient"
    steps_by_weight: ClassVar[bool] = True

    @property
    def takes_optimizer(self) -> bool:
        """Whether one of torch's optimizers may step: only without own momentum and weight decay."""
        return not self.momentum and not self.weight_decay

    def _optimizer(self) -> base.SGD:
        return base.SGD(self.momentum, self.weight_decay)

    def clipping_of(self, max_grad_norm: torch.Tensor) -> Clipping:
        """Return the clipping that normalises gradients, for which candidates give no norm."""
        return self.normalise(self.stabilizer)


@dataclass(frozen=True)
class NormBound(FixedRates):
    """SGD with noise scaled to a proven bound on every gradient's norm, so that clipping changes nothing.

    Args:
        gradient_bound: Proven bound on the norm of a record's gradient, above 0. It is enforced by
            clipping to it, so a wrong proof costs accuracy and not privacy.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    References:
        Pichapati et al. 2019, arXiv 1908.07643, Section 6.

    Example:
        >>> import math  # logistic loss on inputs of norm 1 and a constant: a gradient's norm is below √2
        >>> NormBound(1.1, gradient_bound=round(math.sqrt(2), 4))
        NormBound(schedule='constant', average='last', noise_multiplier=1.1, gradient_bound=1.4142)
    """

    gradient_bound: float = base.positive(1.0)

    clips_whole: ClassVar[str] = (
        "gradient_bound is proven for the whole gradient, none of which is cut"
    )
    name: ClassVar[str] = "norm-bound"
    summary: ClassVar[str] = "SGD with noise scaled to a proven bound on the gradient"
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate",)
    reported: ClassVar[tuple[str, ...]] = ("learning_rate",)
    releases: ClassVar[str] = "one noisy gradient"

    def _optimizer(self) -> base.SGD:
        return base.SGD()

    def clipping_of(self, max_grad_norm: torch.Tensor) -> Clipping:
        """Return a clipping to the proven bound, in place of the candidates' norms."""
        return Flat(self.gradient_bound)

    def update(self, state: RateState, oracle: Oracle) -> RateState:
        """Take one step along the noisy mean gradient, without an inner optimizer."""
        clipping = self.clipping_of(state.max_grad_norm)
        gradient = self.gradient(oracle, state.params, clipping)
        rate = base.rows(state.learning_rate * oracle.pace)
        return replace(state, params=state.params - rate * gradient)
