"""DP-Adam: Adam (or AdamW) on the noisy clipped gradient (Kingma & Ba 2015, arXiv 1412.6980)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from privtune.training.methods._optimizers import AdamW
from privtune.training.methods.dpsgd import FixedRates


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
