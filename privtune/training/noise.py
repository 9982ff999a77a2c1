"""Noise, scaled from the sensitivity that the clipping states, from a stream of its own.

Noise in floating point is not noise in the reals: which numbers can come out at all depends on
what they are added to, and the lowest bits of a release can tell two datasets apart (Mironov 2012).
By default nothing is done about that, as in other libraries; ``NoiseOptions`` has two remedies,
and a cryptographic source of randomness. ``studies/benchmarks/engine`` measures what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from privtune.errors import InvalidInputError
from privtune.training.streams import Streams

__all__ = ["NoiseOptions", "NoiseSource", "add_noise", "noise_scale"]

_AHEAD = 4096  # about how many values of a candidate are drawn at once when releases are small
_KEYSTREAM = 2**36  # bytes drawn from one key; ChaCha20 has a block counter of 32 bits
_GRID = 2.0**-20  # of the noise's scale


@dataclass(frozen=True)
class NoiseOptions:
    """Where noise comes from, and how it is kept from leaking through its lowest bits.

    Args:
        secure: Draw from ChaCha20, keyed by the candidate's secret, in place of a generator that
            can be predicted from enough of its output.
        floating_point: ``"plain"``; ``"grid"`` adds float64 noise to the sum and rounds the result
            to a grid of 2^-20 of the noise's scale, so that no bit below it is released;
            ``"four-draws"`` makes a Gaussian of four (Holohan and Braghin 2021, arXiv 2107.10138),
            so that a value has too many origins to be traced back.
    """

    secure: bool = False
    floating_point: Literal["plain", "grid", "four-draws"] = "plain"

    def __post_init__(self) -> None:
        allowed = ("plain", "grid", "four-draws")
        if self.floating_point not in allowed:
            raise InvalidInputError(
                "floating_point", self.floating_point, f"must be one of {', '.join(allowed)}"
            )

    @property
    def wide(self) -> bool:
        """Whether noise is drawn in float64."""
        return self.floating_point == "grid"


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


def add_noise(
    total: torch.Tensor, noise: torch.Tensor, scale: torch.Tensor, options: NoiseOptions
) -> torch.Tensor:
    """Add scaled noise to a sum.

    Args:
        total: The sum, shape ``[K, n]``.
        noise: Standard noise, likewise.
        scale: Scale of the noise, shape ``[K]``.
        options: With the grid, noise is float64 and the result is rounded to multiples of
            ``2^-20 * scale``. Rounding is post-processing.
    """
    column = scale.to(noise).unsqueeze(1)
    if not options.wide:
        return torch.addcmul(total, noise, column)
    grid = torch.exp2(torch.ceil(torch.log2(column.clamp(min=1e-300)))) * _GRID
    exact = total.double() + noise * column
    rounded = torch.round(exact / grid) * grid
    return torch.where(column > 0.0, rounded, exact).to(total.dtype)


class NoiseSource:
    """Standard noise for a stack of candidates, each from its own streams.

    Small releases are drawn ahead, several at once: a call to a generator costs more than the
    values. How many depends on the size of the release alone, never on the stack.

    Args:
        streams: One for each candidate.
        device: Where the noise is needed.
        dtype: Type of the parameters.
        options: Source and treatment.

    **Guarantee**: a candidate's noise is a function of its own secret and of the sizes that it
    asked for, never of the stack that it is in. No value is given out twice.
    """

    def __init__(
        self,
        streams: Sequence[Streams],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        options: NoiseOptions | None = None,
    ) -> None:
        self.options = options or NoiseOptions()
        self._streams = list(streams)
        self._device = device
        self._dtype = torch.float64 if self.options.wide else dtype
        self._sources: dict[tuple[str, int], list[_Source]] = {}
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
        for name, sources in self._sources.items():
            self._sources[name] = [sources[row] for row in rows]
            self._ahead[name] = [block[list(rows)] for block in self._ahead[name]]

    def _next(self, kind: str, size: int) -> torch.Tensor:
        """Take the next release of a kind and size from what was drawn ahead."""
        key = (kind, size)
        if key not in self._sources:
            name = f"noise/{kind}/{size}"
            make = _ChaCha20 if self.options.secure else _Generator
            self._sources[key] = [make(s, name, self._device) for s in self._streams]
            self._ahead[key] = []
        if not self._ahead[key]:
            self._ahead[key] = list(reversed(self._draw(kind, size, self._sources[key])))
        return self._ahead[key].pop()

    def _draw(self, kind: str, size: int, sources: Sequence[_Source]) -> tuple[torch.Tensor, ...]:
        """Draw a block of releases for every candidate."""
        count = max(1, _AHEAD // size)
        out = torch.empty(len(sources), count * size, device=self._device, dtype=self._dtype)
        for row, source in zip(out, sources, strict=True):
            if kind == "laplace":
                source.laplace(row)
            elif self.options.floating_point == "four-draws":
                parts = row.new_empty(4, len(row))
                source.gaussian(parts.view(-1))
                torch.sum(parts, dim=0, out=row).mul_(0.5)
            else:
                source.gaussian(row)
        return out.view(len(sources), count, size).unbind(1)


class _Source(Protocol):
    """Fills a vector with standard noise."""

    def gaussian(self, out: torch.Tensor) -> None:
        """Fill ``out`` with standard normal values."""
        ...

    def laplace(self, out: torch.Tensor) -> None:
        """Fill ``out`` with Laplace values of scale 1."""
        ...


class _Generator:
    """The generators of torch."""

    def __init__(self, streams: Streams, name: str, device: torch.device) -> None:
        self._generator = streams.generator(name, device=device)

    def gaussian(self, out: torch.Tensor) -> None:
        out.normal_(generator=self._generator)

    def laplace(self, out: torch.Tensor) -> None:
        sides = torch.empty((2, len(out)), device=out.device, dtype=torch.float64)
        sides.exponential_(generator=self._generator)
        out.copy_(sides[0] - sides[1])


class _ChaCha20:
    """The keystream of ChaCha20, turned into noise in float64."""

    def __init__(self, streams: Streams, name: str, device: torch.device) -> None:
        self._streams, self._name, self._keys = streams, name, 0
        self._rekey()

    def _rekey(self) -> None:
        """Start the keystream of the next key: one block counter must never come round."""
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        key = self._streams.key(f"{self._name}/chacha20/{self._keys}")
        self._stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._keys += 1
        self._used = 0

    def gaussian(self, out: torch.Tensor) -> None:
        half = (len(out) + 1) // 2
        uniform = self._uniform(2 * half)
        radius = np.sqrt(-2.0 * np.log(uniform[:half]))
        angle = (2.0 * math.pi) * uniform[half:]
        values = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        out.copy_(torch.from_numpy(values[: len(out)]))

    def laplace(self, out: torch.Tensor) -> None:
        sides = -np.log(self._uniform(2 * len(out)))
        out.copy_(torch.from_numpy(sides[: len(out)] - sides[len(out) :]))

    def _uniform(self, size: int) -> npt.NDArray[np.float64]:
        """Return uniform values in (0, 1], multiples of 2^-53."""
        if self._used + 8 * size > _KEYSTREAM:
            self._rekey()
        self._used += 8 * size
        words = np.frombuffer(self._stream.update(bytes(8 * size)), dtype="<u8")
        uniform: npt.NDArray[np.float64] = ((words >> np.uint64(11)) + 1.0).astype(np.float64)
        uniform *= 2.0**-53
        return uniform
