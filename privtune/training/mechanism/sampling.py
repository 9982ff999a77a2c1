"""True Poisson sampling of records held in memory, without a DataLoader in the way.

Every record joins a sample independently with the same probability. Instead of N coin flips, the
gaps between joining records are drawn: they are geometric, so a sample costs O(rate * N) whatever
the size of the data. Several samples lie one after the other on one line of coin flips, which
makes drawing for a small expected batch as cheap as for a large one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from privtune.training.mechanism.streams import Tensors, set_state, state_of

Indices = npt.NDArray[np.int64]

GRANULE = 8
"""Physical sizes are multiples of it."""

_BLOCK = 4096  # about how many records are drawn ahead at once
_MAX_STEPS = 256


class PoissonSampler:
    """Poisson samples at a rate in (0, 1] for a stack of candidates.

    **Guarantee**: inclusions are independent Bernoulli(rate) draws, up to the 53 bits of the
    underlying uniform numbers; no sample is ever cut at a maximal size. A candidate's samples are a
    function of its own source of randomness alone.
    """

    def __init__(self, *, records: int, rate: float, rngs: Sequence[np.random.Generator]) -> None:
        self._records = records
        self._rate = rate
        self._rngs = list(rngs)
        steps = math.ceil(_BLOCK / max(1.0, rate * records))
        self._steps = min(steps, _MAX_STEPS)
        self._ready: list[tuple[Indices, Indices]] = []
        self.granule = GRANULE
        """What the widths of samples are multiples of, from the next block that is drawn."""

    def __call__(self) -> tuple[Indices, Indices]:
        """Return the next samples: indices ``[K, width]``, ascending, filled up with 0, and sizes ``[K]``."""
        if not self._ready:
            self._ready = self._draw()[::-1]
        return self._ready.pop()

    def position(self) -> Tensors:
        """Return where the sources are, and what was drawn ahead."""
        found = {f"rng.{k}": state_of(rng) for k, rng in enumerate(self._rngs)}
        for i, (index, sizes) in enumerate(self._ready):
            found[f"index.{i}"] = torch.from_numpy(index.copy())
            found[f"sizes.{i}"] = torch.from_numpy(sizes.copy())
        return found

    def go_to(self, position: Tensors) -> None:
        """Go on from a position: no sample is drawn twice."""
        for k, rng in enumerate(self._rngs):
            set_state(rng, position[f"rng.{k}"])
        ahead = (len(position) - len(self._rngs)) // 2
        parts = [(position[f"index.{i}"], position[f"sizes.{i}"]) for i in range(ahead)]
        self._ready = [(index.numpy(), sizes.numpy()) for index, sizes in parts]

    def _draw(self) -> list[tuple[Indices, Indices]]:
        """Draw a block of samples: one line of ``steps * records`` coin flips a candidate."""
        line = self._steps * self._records
        drawn = [_successes(line, self._rate, rng) for rng in self._rngs]
        starts = np.arange(self._steps) * self._records
        upto = [np.searchsorted(places, starts + self._records) for places in drawn]
        sizes: Indices = np.stack(upto, axis=1)
        sizes[1:] -= sizes[:-1].copy()
        width = padded(int(sizes.max()), self.granule)
        index = np.zeros((self._steps, len(drawn), width), dtype=np.int64)
        there = np.arange(width) < sizes[:, :, None]
        for k, places in enumerate(drawn):
            index[:, k][there[:, k]] = places - np.repeat(starts, sizes[:, k])
        widths = [padded(int(n), self.granule) for n in sizes.max(axis=1)]
        return [
            (np.ascontiguousarray(part[:, :width]), own)
            for part, width, own in zip(index, widths, sizes, strict=True)
        ]


def padded(rows: int, granule: int = GRANULE) -> int:
    """Return the physical size for ``rows`` records: few sizes occur, an eighth apart at most."""
    step = granule
    while step * 16 < rows:
        step *= 2
    return max(granule, -(-rows // step) * step)


def _successes(line: int, rate: float, rng: np.random.Generator) -> Indices:
    """Return the places of the successes among ``line`` independent Bernoulli(rate) draws."""
    mean = line * rate
    # Six deviations more than the mean: nearly always one piece reaches the end of the line.
    size = int(mean + 6.0 * math.sqrt(mean * (1.0 - rate))) + 16
    scale = -math.log1p(-rate) if rate < 1.0 else math.inf
    pieces: list[Indices] = []
    last = -1
    while last < line:
        # P(gap > k) = P(E >= k * scale) = (1 - rate)^k for E ~ Exp(1): geometric, exactly.
        gaps = np.floor(rng.standard_exponential(size) / scale) + 1.0
        steps = np.minimum(gaps, line + 1.0).astype(np.int64)
        pieces.append(last + np.cumsum(steps))
        last = int(pieces[-1][-1])
    places = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    return places[: int(np.searchsorted(places, line))]
