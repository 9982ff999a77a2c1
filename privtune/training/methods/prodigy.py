"""Prodigy: Adam with an estimated distance as rate (Mishchenko & Defazio 2024, arXiv 2306.06101)."""

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
class ProdigyState:
    """State of K Prodigy trainings; scalars have shape ``[K]``, in float64."""

    params: torch.Tensor
    origin: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    weighted: torch.Tensor
    distance: torch.Tensor
    largest: torch.Tensor
    numerator: torch.Tensor


@dataclass(frozen=True)
class Prodigy(DistanceAdam):
    """Adam on noisy gradients whose rate is a running estimate of the distance to the solution.

    The update of ``prodigyopt.Prodigy`` with its defaults, for K candidates at once on an explicit
    state (tests compare the two).

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        learning_rate: Factor on the estimated rate; 1 is the authors' advice.
        beta1: Decay of the average gradient, in [0, 1).
        beta2: Decay of the average squared gradient, in [0, 1); its root weighs the estimate.
        stability: Added to the root of the second moment, above 0.
        weight_decay: Decoupled, at least 0.
        initial_distance: d_0, above 0.

    **Interval**: the distance stays within 1 and 1e12 times ``initial_distance``, and the rate is
    ``learning_rate`` times it. A release that is no number moves neither; the weights it moves are
    no numbers, which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    Example:
        >>> Prodigy(1.1).learning_rate, Prodigy.adapts
        (1.0, ('learning_rate', 'max_grad_norm'))
    """

    name: ClassVar[str] = "prodigy"
    summary: ClassVar[str] = "Adam whose rate is an estimate of the distance to the solution"

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> ProdigyState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        zeros = params.new_zeros(params.shape)
        scalar = params.new_zeros(params.shape[0]).double()
        return ProdigyState(
            params=params,
            origin=params,
            first=zeros,
            second=zeros,
            weighted=zeros,
            distance=scalar + self.initial_distance,
            largest=scalar + self.initial_distance,
            numerator=scalar,
        )

    def update(self, state: ProdigyState, oracle: Oracle) -> ProdigyState:
        """Take one step and update the estimate of the distance."""
        import torch

        gradient = self._gradient(oracle, state.params, self._clipping())
        beta3 = self.beta2**0.5
        distance = state.distance
        rate = distance * self.learning_rate * oracle.pace
        # Relative to d_0, as the authors do it, to stay clear of numbers that are too small.
        weight = distance / self.initial_distance * rate
        moved = (gradient * (state.origin - state.params)).sum(dim=1).double()
        numerator = beta3 * state.numerator + weight * moved

        def by_row(scalars: torch.Tensor) -> torch.Tensor:
            return rows(scalars).to(gradient)

        weighted = beta3 * state.weighted + by_row(weight) * gradient
        first = self.beta1 * state.first + by_row(distance * (1 - self.beta1)) * gradient
        second = self.beta2 * state.second
        second = second + by_row(distance**2 * (1 - self.beta2)) * gradient.square()
        total = weighted.abs().sum(dim=1).double()
        estimate = numerator / total
        known = total > 0
        estimate = torch.where(known, estimate, distance)
        started = torch.where(
            distance == self.initial_distance,
            farther(distance, estimate, self.initial_distance),
            distance,
        )
        largest = farther(state.largest, estimate, self.initial_distance)
        params = state.params * (1.0 - self.weight_decay * by_row(rate))
        step = (
            by_row(rate)
            * first
            / (second.sqrt() + by_row(torch.where(known, largest, started) * self.stability))
        )
        return replace(
            state,
            params=torch.where(rows(known), params - step, state.params),
            first=first,
            second=second,
            weighted=weighted,
            distance=torch.where(known, largest, distance),
            largest=torch.where(known, largest, state.largest),
            numerator=torch.where(known, numerator, state.numerator),
        )
