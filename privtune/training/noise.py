"""Noise, scaled from the sensitivity that the clipping states, from a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from privtune.errors import InvalidInputError
from privtune.training.streams import Streams

__all__ = ["NoiseSource", "noise_scale"]

_AHEAD = 4096  # about how many values of a candidate are drawn at once when releases are small


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
    """Standard noise for a stack of candidates, each from its own streams.

    Small releases are drawn ahead, several at once: a call to a generator costs more than the
    values. How many depends on the size of the release alone, never on the stack.

    Args:
        streams: One for each candidate.
        device: Where the noise is needed.
        dtype: Type of the parameters.

    **Guarantee**: a candidate's noise is a function of its own secret and of the sizes that it
    asked for, never of the stack that it is in. No value is given out twice.
    """

    def __init__(
        self, streams: Sequence[Streams], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self._streams = list(streams)
        self._device = device
        self._dtype = dtype
        self._generators: dict[tuple[str, int], list[torch.Generator]] = {}
        self._ahead: dict[tuple[str, int], list[torch.Tensor]] = {}

    def gaussian(self, size: int) -> torch.Tensor:
        """Return standard normal values, shape ``[K, size]``."""
        return self._next("gaussian", size)

    def laplace(self, size: int) -> torch.Tensor:
        """Return Laplace values of scale 1, shape ``[K, size]``."""
        return self._next("laplace", size)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these candidates alone."""
        self._streams = [self._streams[row] for row in rows]
        for name, generators in self._generators.items():
            self._generators[name] = [generators[row] for row in rows]
            self._ahead[name] = [block[list(rows)] for block in self._ahead[name]]

    def _next(self, kind: str, size: int) -> torch.Tensor:
        """Take the next release of a kind and size from what was drawn ahead."""
        key = (kind, size)
        if key not in self._generators:
            name = f"noise/{kind}/{size}"
            self._generators[key] = [s.generator(name, device=self._device) for s in self._streams]
            self._ahead[key] = []
        if not self._ahead[key]:
            self._ahead[key] = list(reversed(self._draw(kind, size, self._generators[key])))
        return self._ahead[key].pop()

    def _draw(
        self, kind: str, size: int, generators: Sequence[torch.Generator]
    ) -> tuple[torch.Tensor, ...]:
        """Draw a block of releases for every candidate."""
        count = max(1, _AHEAD // size)
        shape = (len(generators), count * size)
        out = torch.empty(shape, device=self._device, dtype=self._dtype)
        for row, generator in zip(out, generators, strict=True):
            if kind == "gaussian":
                row.normal_(generator=generator)
            else:
                sides = torch.empty((2, *row.shape), device=self._device, dtype=torch.float64)
                sides.exponential_(generator=generator)
                row.copy_(sides[0] - sides[1])
        return out.view(len(generators), count, size).unbind(1)
