"""Bounding each record's contribution, and saying by how much: the noise reads it from here.

A clipping maps the norms of per-sample gradients to coefficients. Its sensitivity is the largest
L2 norm that one record can add to the clipped sum. A norm that is not finite has coefficient zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    import torch

__all__ = ["Automatic", "Clipping", "CoordinateTransform", "Flat", "PerLayer"]


class Clipping(ABC):
    """How much each record may add to a sum of gradients.

    **Guarantee**: with ``n`` the norms of a record's gradient by group, the scaled gradient
    ``coefficients(n) * gradient`` has an L2 norm of at most ``sensitivity``.
    """

    by_layer: bool = False
    """Whether norms are taken layer by layer; otherwise over all parameters at once."""

    @abstractmethod
    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return the sensitivity of each candidate's sum, shape ``[K]``, float64."""

    @abstractmethod
    def coefficients(self, norms: torch.Tensor) -> torch.Tensor:
        """Map norms, shape ``[G, K, B]``, to coefficients of the same shape.

        G is 1, or the number of layers when ``by_layer`` is set.
        """

    def unclipped(self, norms: torch.Tensor) -> torch.Tensor:
        """Return 1 where a record is not scaled down, shape ``[K, B]``, given ``[G, K, B]``."""
        return (self.coefficients(norms) >= 1.0).all(dim=0)


@dataclass(frozen=True, eq=False)
class Flat(Clipping):
    """Scale a gradient down to ``max_grad_norm`` if it is longer (Abadi et al. 2016).

    Args:
        max_grad_norm: Above 0; a float, or shape ``[K]``. Infinity clips nothing and may only go
            with a noise multiplier of zero.
    """

    max_grad_norm: float | torch.Tensor

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return ``max_grad_norm`` of each candidate."""
        return _column("max_grad_norm", self.max_grad_norm, candidates)

    def coefficients(self, norms: torch.Tensor) -> torch.Tensor:
        """Return ``min(1, max_grad_norm / norm)``."""
        bound = self.sensitivity(norms.shape[1]).to(norms)[:, None]
        return _finite((bound / norms).clamp(max=1.0).nan_to_num(nan=1.0), norms)


@dataclass(frozen=True, eq=False)
class Automatic(Clipping):
    """Normalise every gradient: ``g / (norm + stabilizer)`` (Bu et al. 2023, arXiv 2206.07136).

    Args:
        stabilizer: Above 0; keeps small gradients small.
    """

    stabilizer: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.stabilizer) and self.stabilizer > 0.0):
            raise InvalidInputError(
                "stabilizer", self.stabilizer, "must be a finite number above 0"
            )

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return 1: a normalised gradient is shorter than that."""
        return _column("max_grad_norm", 1.0, candidates)

    def coefficients(self, norms: torch.Tensor) -> torch.Tensor:
        """Return ``1 / (norm + stabilizer)``."""
        return _finite(1.0 / (norms + self.stabilizer), norms)

    def unclipped(self, norms: torch.Tensor) -> torch.Tensor:
        """Return 1 where the norm is at most 1."""
        return (norms <= 1.0).all(dim=0)


@dataclass(frozen=True, eq=False)
class PerLayer(Clipping):
    """Clip the gradient of every layer to a norm of its own.

    A layer is a module that owns trainable parameters.

    Args:
        max_grad_norms: Above 0, shape ``[L]`` or ``[K, L]``.
    """

    max_grad_norms: torch.Tensor
    by_layer = True

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return the root of the sum of the squared norms."""
        return self._bounds(candidates).square().sum(dim=1).sqrt()

    def coefficients(self, norms: torch.Tensor) -> torch.Tensor:
        """Return ``min(1, max_grad_norm / norm)``, layer by layer."""
        bounds = self._bounds(norms.shape[1])
        if bounds.shape[1] != norms.shape[0]:
            raise InvalidInputError(
                "max_grad_norms",
                tuple(self.max_grad_norms.shape),
                f"must give one norm to each of the {norms.shape[0]} layers",
            )
        bound = bounds.T.to(norms)[:, :, None]
        return _finite((bound / norms).clamp(max=1.0).nan_to_num(nan=1.0), norms)

    def _bounds(self, candidates: int) -> torch.Tensor:
        import torch

        bounds = self.max_grad_norms.detach().to("cpu", torch.float64)
        if bounds.ndim not in (1, 2) or not bool((bounds > 0.0).all()):
            raise InvalidInputError(
                "max_grad_norms", self.max_grad_norms, "must be above 0, of shape [L] or [K, L]"
            )
        return bounds.expand(candidates, -1)


@dataclass(frozen=True, eq=False)
class CoordinateTransform(Clipping):
    """Clip ``(g - center) / scale`` instead of ``g`` (AdaCliP, arXiv 1908.07643).

    The noisy mean of the transformed gradients is mapped back by the oracle: it answers
    ``scale * mean + center``.

    Args:
        center: Shape ``[K, P]``; a function of past releases only.
        scale: Shape ``[K, P]``, above 0; likewise.
        max_norm: Norm that transformed gradients are clipped to, above 0.
    """

    center: torch.Tensor
    scale: torch.Tensor
    max_norm: float = 1.0

    def sensitivity(self, candidates: int) -> torch.Tensor:
        """Return ``max_norm``, in transformed coordinates."""
        return _column("max_norm", self.max_norm, candidates)

    def coefficients(self, norms: torch.Tensor) -> torch.Tensor:
        """Return ``min(1, max_norm / norm)`` for norms in transformed coordinates."""
        return Flat(self.max_norm).coefficients(norms)


def _finite(coefficients: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Set the coefficient of every norm that is not finite to zero."""
    return coefficients.masked_fill(~norms.isfinite(), 0.0)


def _column(name: str, value: float | torch.Tensor, candidates: int) -> torch.Tensor:
    """Turn a bound into float64 of shape ``[K]`` and check that it is above 0."""
    import torch

    column = torch.as_tensor(value, dtype=torch.float64).detach()
    if column.ndim > 1 or column.numel() not in (1, candidates):
        raise InvalidInputError(name, tuple(column.shape), f"must be one number or {candidates}")
    if not bool((column > 0.0).all()):
        raise InvalidInputError(name, value, "must be above 0")
    return column.expand(candidates)
