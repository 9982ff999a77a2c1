"""DoG: distance over gradients (Ivgi, Hinder & Carmon 2023, arXiv 2302.12022), on noisy gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from privtune.errors import InvalidInputError
from privtune.training.methods._common import check_positive, expect_nothing, rows
from privtune.training.methods._free import FreeGradient, farther

if TYPE_CHECKING:
    import torch

    from privtune.training.mechanism.oracle import Oracle
    from privtune.training.methods._base import Candidate


@dataclass(frozen=True, eq=False)
class DoGState:
    """State of K DoG trainings: ``params`` is the average that is released, if one is kept."""

    params: torch.Tensor
    iterate: torch.Tensor
    origin: torch.Tensor
    distance: torch.Tensor
    squares: torch.Tensor
    learning_rate: torch.Tensor
    step: int


@dataclass(frozen=True)
class DoG(FreeGradient):
    """SGD with the rate ``max distance from the start / root of the sum of squared gradients``.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient.
        clipping: ``flat``, or ``by-layer``: each of L layers to the norm over sqrt(L).
        initial_distance: r_ε relative to ``1 + |x_0|``, above 0; 1e-6 is the paper's advice.
        averaging: γ of the polynomial-decay average that is released (8 in the paper); None
            releases the last iterate.

    Raises:
        InvalidInputError: If a field is out of its range.

    **Interval**: the distance r stays within 1 and 1e12 times its first value, ``initial_distance * (1 +
    |x_0|)``, and the rate within 0 and 1e4 times it. A release that is no number makes the rate 0; the
    weights it moves are no numbers, which the training's result declares as diverged.

    **Guarantee**: as DP-SGD with the same noise multiplier. The norms are of noisy gradients, which
    hold about ``sqrt(P) * noise`` however small the true ones are.

    Example:
        >>> DoG(1.1).adapts, DoG(1.1, max_grad_norm=0.5).parameters  # nothing is left to tune
        (('learning_rate', 'max_grad_norm'), ())
    """

    initial_distance: float = 1e-6
    averaging: float | None = 8.0

    name: ClassVar[str] = "dog"
    summary: ClassVar[str] = "SGD with the distance travelled over the gradients seen as rate"
    reported: ClassVar[tuple[str, ...]] = ("learning_rate", "distance")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("initial_distance", self.initial_distance)
        if self.averaging is not None and not self.averaging >= 0.0:
            raise InvalidInputError("averaging", self.averaging, "must be at least 0, or None")

    def init(self, params: torch.Tensor, candidates: Sequence[Candidate]) -> DoGState:
        """Make the state of K candidates; a candidate gives nothing."""
        expect_nothing(candidates)
        nothing = params.new_zeros(params.shape[0])
        return DoGState(
            params=params,
            iterate=params,
            origin=params,
            distance=self.initial_distance * (1.0 + params.norm(dim=1)),
            squares=nothing,
            learning_rate=nothing,
            step=0,
        )

    def update(self, state: DoGState, oracle: Oracle) -> DoGState:
        """Take one step at the rate that distance and gradients give."""
        gradient = self._gradient(oracle, state.iterate, self._clipping())
        first = self.initial_distance * (1.0 + state.origin.norm(dim=1))
        seen = (state.iterate - state.origin).norm(dim=1)
        distance = farther(state.distance, seen, first)
        squares = state.squares + gradient.square().sum(dim=1)
        rate = oracle.pace * (distance / (squares + 1e-8).sqrt()).nan_to_num(0.0)
        iterate = state.iterate - rows(rate) * gradient
        step = state.step + 1
        return replace(
            state,
            params=iterate if self.averaging is None else self._average(state, iterate, step),
            iterate=iterate,
            distance=distance,
            squares=squares,
            learning_rate=rate,
            step=step,
        )

    def _average(self, state: DoGState, iterate: torch.Tensor, step: int) -> torch.Tensor:
        gamma = self.averaging or 0.0
        weight = (gamma + 1.0) / (step + gamma)
        return state.params + weight * (iterate - state.params)
