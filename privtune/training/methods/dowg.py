"""DoWG: distance over weighted gradients (Khaled et al. 2023, arXiv 2305.16284), on noisy ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.training.methods._common import check_positive, expect_nothing, rows
from privtune.training.methods._free import FreeGradient, farther

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate


@dataclass(frozen=True, eq=False)
class DoWGState:
    """State of K DoWG trainings."""

    params: torch.Tensor
    origin: torch.Tensor
    distance: torch.Tensor
    weighted_squares: torch.Tensor
    learning_rate: torch.Tensor


@dataclass(frozen=True)
class DoWG(FreeGradient):
    """SGD with the rate ``r² / sqrt(sum of r² |g|²)``, r the largest distance from the start.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        initial_distance: r_ε, above 0; 1e-4 is the default of the authors' code.

    **Interval**: the distance r stays within 1 and 1e12 times ``initial_distance``, and the rate within 0
    and ``1e20 r²``. A release that is no number makes the rate 0; the weights it moves are no numbers,
    which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier.

    Example:
        >>> DoWG(1.1).initial_distance, DoWG(1.1, max_grad_norm=0.5).parameters
        (0.0001, ())
    """

    initial_distance: float = 1e-4

    name: ClassVar[str] = "dowg"
    summary: ClassVar[str] = "SGD with distance over distance-weighted gradients as rate"
    reported: ClassVar[tuple[str, ...]] = ("learning_rate", "distance")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("initial_distance", self.initial_distance)

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> DoWGState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        nothing = params.new_zeros(params.shape[0])
        return DoWGState(
            params=params,
            origin=params,
            distance=nothing + self.initial_distance,
            weighted_squares=nothing,
            learning_rate=nothing,
        )

    def update(self, state: DoWGState, oracle: Oracle) -> DoWGState:
        """Take one step at the rate that distance and weighted gradients give."""
        gradient = self._gradient(oracle, state.params, self._clipping())
        seen = (state.params - state.origin).norm(dim=1)
        distance = farther(state.distance, seen, self.initial_distance)
        weighted = state.weighted_squares + distance.square() * gradient.square().sum(dim=1)
        rate = (distance.square() / weighted.sqrt().clamp_min(1e-20)).nan_to_num(0.0)
        rate = oracle.pace * rate
        return replace(
            state,
            params=state.params - rows(rate) * gradient,
            distance=distance,
            weighted_squares=weighted,
            learning_rate=rate,
        )
