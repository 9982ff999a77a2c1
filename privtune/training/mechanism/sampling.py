"""Poisson sampling of records in memory, by drawing the gaps between sampled records.

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

from privtune.training.mechanism.streams import Streams, Tensors, set_state, state_of

Indices = npt.NDArray[np.int64]
Groups = npt.NDArray[np.uint8]

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

    def __init__(
        self,
        *,
        records: int,
        rate: float,
        rngs: Sequence[np.random.Generator],
    ) -> None:
        self._records = records
        self._rate = rate
        self._rngs = list(rngs)
        expected_size = max(1.0, rate * records)
        steps = math.ceil(_BLOCK / expected_size)
        self._steps = min(steps, _MAX_STEPS)
        # Samples that are drawn already, the next one last: indices `[K, width]`, sizes `[K]`.
        self._ready: list[tuple[Indices, Indices]] = []
        self.granule = GRANULE
        """What the widths of samples are multiples of, from the next block that is drawn."""

    def __call__(self) -> tuple[Indices, Indices]:
        """Return the next samples: indices ``[K, width]``, ascending, filled up with 0, and sizes ``[K]``.

        Widths are padded, so that few shapes occur; what fills up points at record 0 and has mask 0.
        """
        if not self._ready:
            samples = self._draw()
            samples.reverse()
            self._ready = samples
        return self._ready.pop()

    @property
    def group(self) -> int:
        """The group of records that the last sample was drawn from: the only one."""
        return 0

    def position(self) -> Tensors:
        """Return the generators' states and the samples drawn ahead, for a checkpoint.

        Samples that are ready were drawn from a source that has moved on, so they are part of it.
        """
        tensors: Tensors = {}
        for k, rng in enumerate(self._rngs):
            tensors[f"rng.{k}"] = state_of(rng)
        for i, (index, sizes) in enumerate(self._ready):
            tensors[f"index.{i}"] = torch.from_numpy(index.copy())
            tensors[f"sizes.{i}"] = torch.from_numpy(sizes.copy())
        return tensors

    def go_to(self, position: Tensors) -> None:
        """Set generators and samples drawn ahead to a checkpoint's position."""
        for k, rng in enumerate(self._rngs):
            set_state(rng, position[f"rng.{k}"])
        # A sample ahead has two tensors, a source one.
        samples = (len(position) - len(self._rngs)) // 2
        self._ready = []
        for i in range(samples):
            index = position[f"index.{i}"].numpy()
            sizes = position[f"sizes.{i}"].numpy()
            self._ready.append((index, sizes))

    def _draw(self) -> list[tuple[Indices, Indices]]:
        """Draw the samples of several steps at once, for every candidate.

        A sample is a stretch of ``records`` flips on the line, so a success belongs to the sample in whose
        stretch it lies, and is there the record by its distance from the stretch's start.

        Returns:
            As many samples as there are steps in a block, the first one first: indices ``[K, width]``, of
            a width of each sample's own, and sizes ``[K]``.
        """
        line = self._steps * self._records
        successes = [self._draw_places(k, line) for k in range(len(self._rngs))]
        starts = np.arange(self._steps) * self._records
        ends = starts + self._records
        # Successes up to the end of each sample, ``[steps, K]``; their differences are the sizes.
        totals = [np.searchsorted(places, ends) for places in successes]
        sizes: Indices = np.stack(totals, axis=1)
        sizes[1:] -= sizes[:-1].copy()
        largest = int(sizes.max())
        width = padded(largest, self.granule)
        shape = (self._steps, len(successes), width)
        index = np.zeros(shape, dtype=np.int64)
        # The first places of a row hold records, the others fill up: ``[steps, K, width]``.
        is_record = np.arange(width) < sizes[:, :, None]
        for k, places in enumerate(successes):
            start_of_each = np.repeat(starts, sizes[:, k])
            records = places - start_of_each
            index[:, k][is_record[:, k]] = records
        samples = []
        for part, counts in zip(index, sizes, strict=True):
            most = int(counts.max())
            own_width = padded(most, self.granule)
            rows = np.ascontiguousarray(part[:, :own_width])
            samples.append((rows, counts))
        return samples

    def _draw_places(self, candidate: int, line: int) -> Indices:
        """Return the places of a candidate's successes on a line of so many flips, ascending."""
        return _successes(line, self._rate, self._rngs[candidate])


class CyclicSampler(PoissonSampler):
    """Poisson samples of one group of records after the other, for noise that is correlated over steps.

    Step t samples the records of group ``t mod b``, each with probability ``rate``. So no record is in two
    of b successive samples.

    **Guarantee**: given the groups, inclusions are independent Bernoulli(rate) draws in the steps of a
    record's group, and there are none in other steps.

    Args:
        records: How many there are.
        rate: Probability of a record in a step of its group, in (0, 1].
        rngs: A source of randomness for each candidate.
        groups: The group of each record, from 0, for each candidate: see :func:`assign_groups`.
        bands: How many groups there are.

    References:
        Choquette-Choo et al. 2023, arXiv 2306.08153, Algorithm 2 (there the groups have equal sizes).
    """

    def __init__(
        self,
        *,
        records: int,
        rate: float,
        rngs: Sequence[np.random.Generator],
        groups: Sequence[Groups],
        bands: int,
    ) -> None:
        super().__init__(records=records, rate=rate, rngs=rngs)
        self.groups = list(groups)
        """The group of each record, for each candidate."""
        self._bands = bands
        self._drawn = 0  # samples so far, with those that are ready

    @property
    def group(self) -> int:
        """The group of records that the last sample was drawn from."""
        last = self._drawn - len(self._ready) - 1
        return last % self._bands

    def position(self) -> Tensors:
        """Return generators' states, samples drawn ahead and their number; groups are drawn anew."""
        return {**super().position(), "drawn": torch.tensor(self._drawn)}

    def go_to(self, position: Tensors) -> None:
        """Set generators, samples drawn ahead and their number to a checkpoint's position."""
        rest = dict(position)
        self._drawn = int(rest.pop("drawn"))
        super().go_to(rest)

    def _draw(self) -> list[tuple[Indices, Indices]]:
        """Draw the samples of several steps, and count them."""
        samples = super()._draw()
        self._drawn += len(samples)
        return samples

    def _draw_places(self, candidate: int, line: int) -> Indices:
        """Return the places of a candidate's successes whose records are in the group of their step."""
        places = super()._draw_places(candidate, line)
        steps, records = np.divmod(places, self._records)
        group_of_step = (self._drawn + steps) % self._bands
        is_member = self.groups[candidate][records] == group_of_step
        members: Indices = places[is_member]
        return members


def assign_groups(streams: Streams, *, records: int, bands: int) -> Groups:
    """Return the group of each record, from 0 to ``bands - 1``, drawn uniformly and independently.

    The groups come from a stream of their own, without a look at the data: whether another record is
    there changes the law of no record's group.
    """
    rng = streams.numpy("groups")
    return rng.integers(bands, size=records, dtype=np.uint8)


def padded(rows: int, granule: int = GRANULE) -> int:
    """Return a padded size for ``rows`` records: one of few sizes, at most an eighth apart."""
    step = granule
    while step * 16 < rows:
        step *= 2
    steps = -(-rows // step)
    return max(granule, steps * step)


def _successes(line: int, rate: float, rng: np.random.Generator) -> Indices:
    """Return the places of the successes among ``line`` independent Bernoulli(rate) draws.

    The memory is that of the successes, not that of the line, and the work too.

    Args:
        line: How many draws.
        rate: Chance of each, in (0, 1].
        rng: One candidate's source.

    Returns:
        Places in [0, line), ascending.
    """
    mean = line * rate
    deviation = math.sqrt(mean * (1.0 - rate))
    # Six deviations more than the mean: nearly always one piece reaches the end of the line.
    size = int(mean + 6.0 * deviation) + 16
    if rate < 1.0:
        scale = -math.log1p(-rate)
    else:
        scale = math.inf
    pieces: list[Indices] = []
    last = -1
    while last < line:
        # P(gap > k) = P(E >= k * scale) = (1 - rate)^k for E ~ Exp(1): geometric, exactly.
        exponential = rng.standard_exponential(size)
        gaps = np.floor(exponential / scale) + 1.0
        # Beyond the end of the line all places are alike; int64 could not hold the farthest.
        gaps = np.minimum(gaps, line + 1.0)
        steps = gaps.astype(np.int64)
        piece = last + np.cumsum(steps)
        pieces.append(piece)
        last = int(piece[-1])
    if len(pieces) > 1:
        places = np.concatenate(pieces)
    else:
        places = pieces[0]
    within = int(np.searchsorted(places, line))
    return places[:within]
