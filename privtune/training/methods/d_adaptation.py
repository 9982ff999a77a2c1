"""D-Adaptation for Adam (Defazio & Mishchenko 2023, arXiv 2301.07733), on noisy gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.methods._common import expect_nothing, rows
from privtune.training.methods._free import DistanceAdam, farther

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate


@dataclass(frozen=True, eq=False)
class DAdaptationState:
    """State of K D-Adaptation trainings; scalars have shape ``[K]``, in float64."""

    params: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    weighted: torch.Tensor
    distance: torch.Tensor
    numerator: torch.Tensor


@dataclass(frozen=True)
class DAdaptation(DistanceAdam):
    """Adam on noisy gradients whose rate is a growing lower bound on the distance.

    The update of ``dadaptation.DAdaptAdam`` with its defaults, for K candidates at once on an
    explicit state (tests compare the two).

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        learning_rate: Factor on the estimated rate; 1 is the authors' advice.
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1).
        stability: Added to the root of the second moment, above 0.
        weight_decay: Decoupled, at least 0.
        initial_distance: d_0, above 0.

    **Interval**: the distance stays within 1 and 1e12 times ``initial_distance``, and the rate is
    ``learning_rate`` times it. A release that is no number moves neither; the weights it moves are
    no numbers, which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    Example:
        >>> DAdaptation(1.1).adapts
        ('learning_rate', 'max_grad_norm')
    """

    name: ClassVar[str] = "d-adaptation"
    summary: ClassVar[str] = "Adam whose rate is a growing lower bound on the distance"

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> DAdaptationState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        zeros = params.new_zeros(params.shape)
        scalar = params.new_zeros(params.shape[0]).double()
        return DAdaptationState(
            params=params,
            first=zeros,
            second=zeros,
            weighted=zeros,
            distance=scalar + self.initial_distance,
            numerator=scalar,
        )

    def update(self, state: DAdaptationState, oracle: Oracle) -> DAdaptationState:
        """Take one step and raise the estimate of the distance if the gradients say so."""
        import torch

        gradient = self._gradient(oracle, state.params, self._clipping())
        root = self.beta2**0.5
        rate = state.distance * self.learning_rate
        by_row = rows(rate).to(gradient)
        scaled = state.weighted / (state.second.sqrt() + self.stability)
        inner = rate * (gradient * scaled).sum(dim=1).double()
        first = self.beta1 * state.first + by_row * (1.0 - self.beta1) * gradient
        second = self.beta2 * state.second + (1.0 - self.beta2) * gradient.square()
        weighted = root * state.weighted + by_row * (1.0 - root) * gradient
        numerator = root * state.numerator + (1.0 - root) * inner
        total = weighted.abs().sum(dim=1).double()
        known = total > 0
        estimate = torch.where(known, numerator / ((1.0 - root) * total), state.distance)
        # The average holds the rates of earlier steps, so a schedule scales the step as a whole.
        step = first / (second.sqrt() + self.stability)
        step = step + self.weight_decay * by_row * state.params
        params = state.params - torch.as_tensor(oracle.pace).to(step).reshape(-1, 1) * step
        return replace(
            state,
            params=torch.where(rows(known), params, state.params),
            first=first,
            second=second,
            weighted=weighted,
            distance=farther(state.distance, estimate, self.initial_distance),
            numerator=torch.where(known, numerator, state.numerator),
        )
