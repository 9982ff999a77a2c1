"""DP-Adam: Adam (or AdamW) on the noisy clipped gradient (Kingma & Ba 2015, arXiv 1412.6980)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.mechanism.clipping import Flat
from privtune.training.methods._common import candidate_column, descend
from privtune.training.methods._optimizers import AdamW
from privtune.training.methods._sampled import SampledGradient
from privtune.training.methods.dpsgd import DPSGDState

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate

__all__ = ["DPAdam"]


@dataclass(frozen=True)
class DPAdam(SampledGradient):
    """Adam fed the noisy gradient: everything after the release is post-processing.

    Args:
        noise_multiplier: Noise standard deviation over the clipping norm, at least 0.
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1).
        stability: Added to the root of the second moment, above 0.
        weight_decay: At least 0.
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
    parameters: ClassVar[tuple[str, ...]] = ("learning_rate", "max_grad_norm")
    releases: ClassVar[str] = "one clipped noisy gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._optimizer()

    def _optimizer(self) -> AdamW:
        return AdamW(self.beta1, self.beta2, self.stability, self.weight_decay, self.decoupled)

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> DPSGDState:
        """Make the state of K candidates; each gives learning_rate and max_grad_norm."""
        return DPSGDState(
            params=params,
            learning_rate=candidate_column(candidates, "learning_rate", params),
            max_grad_norm=candidate_column(candidates, "max_grad_norm", params),
            moments=self._optimizer().init(params),
        )

    def update(self, state: DPSGDState, oracle: Oracle) -> DPSGDState:
        """Take one Adam step on the noisy clipped gradient."""
        gradient = self._gradient(oracle, state.params, Flat(state.max_grad_norm))
        direction, moments = self._optimizer().direction(state.moments, gradient, state.params)
        params = descend(state.params, state.learning_rate, direction)
        return replace(state, params=params, moments=moments)

    def report(self, state: DPSGDState) -> Mapping[str, torch.Tensor]:
        """Return the learning rate and the clipping norm: constants."""
        return {"learning_rate": state.learning_rate, "max_grad_norm": state.max_grad_norm}
