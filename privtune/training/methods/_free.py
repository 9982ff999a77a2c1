"""What the learning-rate-free baselines share: how their gradients are clipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from privtune.errors import InvalidInputError
from privtune.training.mechanism.clipping import Automatic, Clipping, Flat
from privtune.training.methods._common import check_positive
from privtune.training.methods._sampled import SampledGradient

if TYPE_CHECKING:
    from privtune.training.methods._base import Candidate

__all__ = ["FreeGradient"]


@dataclass(frozen=True)
class FreeGradient(SampledGradient):
    """A method with nothing left to set: its gradients are normalised, or clipped to a fixed norm.

    Args:
        noise_multiplier: Noise standard deviation over the clipping's sensitivity, at least 0.
        max_grad_norm: Clipping norm; None normalises every gradient (automatic clipping).
    """

    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_grad_norm is not None:
            check_positive("max_grad_norm", self.max_grad_norm)

    def _clipping(self) -> Clipping:
        return Automatic() if self.max_grad_norm is None else Flat(self.max_grad_norm)

    def _expect_nothing(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            if candidate:
                raise InvalidInputError(
                    "candidate", dict(candidate), "must be empty: the method sets everything itself"
                )
