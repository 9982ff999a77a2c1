"""Noise, scaled from the sensitivity that the clipping states, from a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from privtune.errors import InvalidInputError
from privtune.training.streams import Streams

__all__ = ["NoiseSource", "noise_scale"]


def noise_scale(noise_multiplier: float | torch.Tensor, sensitivity: torch.Tensor) -> torch.Tensor:
    """Return the scale of the noise: multiplier times sensitivity, shape ``[K]``, float64.

    Args:
        noise_multiplier: At least 0; a float, or shape ``[K]``.
        sensitivity: Shape ``[K]``, float64.

    Raises:
        InvalidInputError: If a multiplier is negative or not finite, or noise is asked for without
            a finite sensitivity.
    """
    multiplier = torch.as_tensor(noise_multiplier, dtype=torch.float64).cpu()
    multiplier = multiplier.expand(sensitivity.shape)
    if not bool((multiplier.isfinite() & (multiplier >= 0.0)).all()):
        raise InvalidInputError(
            "noise_multiplier", noise_multiplier, "must be a finite number of at least 0"
        )
    silent = multiplier == 0.0
    if not bool((silent | sensitivity.isfinite()).all()):
        raise InvalidInputError(
            "sensitivity", "infinite", "must be finite where noise is added", "Clip the gradients."
        )
    return torch.where(silent, 0.0, multiplier * sensitivity)


class NoiseSource:
    """Standard noise for a stack of candidates, each from its own stream.

    Args:
        streams: One for each candidate.
        device: Where the noise is needed.

    **Guarantee**: a candidate's noise is a function of its own secret and of what it asked for,
    never of the stack that it is in.
    """

    def __init__(self, streams: Sequence[Streams], device: torch.device) -> None:
        self._device = device
        self._generators = [s.generator("noise", device=device) for s in streams]

    def gaussian(self, size: int) -> torch.Tensor:
        """Return standard normal values, shape ``[K, size]``."""
        out = torch.empty(len(self._generators), size, device=self._device)
        for row, generator in zip(out, self._generators, strict=True):
            row.normal_(generator=generator)
        return out

    def laplace(self, size: int) -> torch.Tensor:
        """Return Laplace values of scale 1, shape ``[K, size]``, in float64."""
        shape = (len(self._generators), 2, size)
        out = torch.empty(shape, device=self._device, dtype=torch.float64)
        for row, generator in zip(out, self._generators, strict=True):
            row.exponential_(generator=generator)
        return out[:, 0] - out[:, 1]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these candidates alone."""
        self._generators = [self._generators[row] for row in rows]
