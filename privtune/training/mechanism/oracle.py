"""The only door between a training method and the data: it asks for noisy releases, no more.

A method draws a sample (an opaque handle), asks for releases about it, and gets noisy means. The oracle
clips, adds noise of the scale that the clipping's own sensitivity dictates, and writes the transcript.
Row ``k`` of every tensor belongs to candidate ``k`` of a stack, which has its own samples and noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from privtune.errors import InvalidInputError
from privtune.training.mechanism.clipping import Clipping, CoordinateTransform, sent
from privtune.training.mechanism.data import TensorData, find_unusable, where
from privtune.training.mechanism.kernel import Kernel, Rows
from privtune.training.mechanism.noise import NoiseSource, PlacedNoise, add_noise, noise_scale
from privtune.training.mechanism.sampling import PoissonSampler, padded
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from privtune.training.mechanism.streams import Streams, Tensors, of_prefix, prefixed
from privtune.training.mechanism.transcript import Transcript

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample of each candidate, drawn at a rate: a handle into which no method looks."""

    rate: float
    number: int
    index: torch.Tensor
    mask: torch.Tensor
    sizes: npt.NDArray[np.int64]
    fetched: list[Rows] = field(default_factory=list)  # kept for the next release, if in one piece


class Oracle:
    """Noisy answers about the data for K candidates.

    ``physical_rows`` is how many rows of a candidate are computed at once; it changes no sample and no
    noise. ``places`` say where the parameters of each lie in those of the kernel, if its model is wider
    than theirs; what is released is zero beside them. ``pace`` is a public factor on the learning rate of
    the next step: one for all, or shape ``[K]``.

    **Guarantee**: every answer is a Gaussian or Laplace release of a sum with bounded sensitivity,
    divided by the public expected batch size. An empty sample still releases noise; a record whose
    gradient or loss is not finite contributes zero.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        data: TensorData,
        kernel: Kernel,
        streams: Sequence[Streams],
        device: torch.device,
        physical_rows: int,
        noise: NoiseOptions | None = None,
        places: Sequence[torch.Tensor] | None = None,
    ) -> None:
        if len(data) != schedule.records and not data.sealed_size:
            raise InvalidInputError(
                "data",
                f"{len(data)} records",
                f"must hold the {schedule.records} records of the schedule",
            )
        self.schedule = schedule
        self.candidates = len(streams)
        self.pace: torch.Tensor | float = 1.0
        self.unusable = torch.zeros(self.candidates, dtype=torch.long, device=device)
        self._data = data
        self._kernel = kernel
        self._device = device
        self._physical_rows = padded(physical_rows)
        size, dtype = kernel.layout.size, kernel.layout.dtype
        self._noise = NoiseSource(streams, device, dtype, noise)
        if places is not None:
            self._noise = PlacedNoise(streams, device, dtype, noise, places=places, size=size)
        self._dropout = [s.generator("dropout", device=device) for s in streams]
        self._half = torch.full((self.candidates,), 0.5, dtype=torch.float64)
        self._scales: list[tuple[torch.Tensor, float | tuple[float, ...], torch.Tensor]] = []
        self._log = Transcript(self.candidates)
        self._sampler = PoissonSampler(
            records=len(data),
            rate=schedule.sample_rate,
            rngs=[s.numpy("sampling") for s in streams],
        )

    @property
    def usual_size(self) -> float:
        """Root mean square of the first weights that torch draws for layers of these shapes."""
        return self._kernel.layout.usual_size

    def sample(self) -> Sample:
        """Draw an independent Poisson sample for each candidate at the schedule's rate."""
        index, sizes = self._sampler()
        own, lengths = (sent(torch.from_numpy(part), self._device) for part in (index, sizes))
        mask = torch.arange(own.shape[1], device=self._device) < lengths.unsqueeze(1)
        return self._open(self.schedule.sample_rate, own, mask, sizes)

    def everything(self) -> Sample:
        """Return the sample that holds every record, for full-batch methods."""
        records = len(self._data)
        index = torch.arange(records, device=self._device).expand(self.candidates, records)
        mask = index >= 0
        return self._open(1.0, index, mask, np.full(self.candidates, records))

    def gradient(
        self,
        sample: Sample,
        params: torch.Tensor,
        *,
        clipping: Clipping,
        noise_multiplier: float | torch.Tensor,
    ) -> torch.Tensor:
        """Release ``(sum of clipped gradients + noise) / expected batch size`` at ``params``, ``[K, P]``.

        The noise's deviation over the clipping's sensitivity is a float, or shape ``[K]``.
        """
        return self._gradient(sample, params, clipping, noise_multiplier)

    def gradient_and_fraction(
        self,
        sample: Sample,
        params: torch.Tensor,
        *,
        clipping: Clipping,
        noise_multiplier: float | torch.Tensor,
        count_noise_multiplier: float | torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Release the noisy mean gradient and the noisy fraction ``[K]`` of records not clipped.

        The count is encoded as ±1/2 a record (Andrew et al. 2021, arXiv 1905.03871, Theorem 1), so its
        sensitivity is 1/2, and ``count_noise_multiplier`` is the deviation over that.
        """
        halves = params.new_zeros(self.candidates)
        gradient = self._gradient(sample, params, clipping, noise_multiplier, halves=halves)
        scale = self._charge(sample, "gaussian", count_noise_multiplier, self._half)
        count = self._noisy(halves[None], scale, "gaussian")[0]
        # The encoded sum is the count less n/2, n records in the sample; its expected size stands for n.
        return gradient, count / self._normaliser(sample) + 0.5

    def losses(
        self,
        sample: Sample,
        params: Sequence[torch.Tensor],
        *,
        bound: torch.Tensor,
        noise_multiplier: float | torch.Tensor,
        mechanism: str = "gaussian",
    ) -> torch.Tensor:
        """Release the noisy mean loss at J vectors ``[K, P]``, shape ``[J, K]``: a release for each.

        Each record's loss is clipped to ``[0, bound]``; the noise's scale is the multiplier times that.
        """
        if mechanism not in ("gaussian", "laplace"):
            raise InvalidInputError("mechanism", mechanism, 'must be "gaussian" or "laplace"')
        sensitivity = bound.detach().to("cpu", torch.float64).expand(self.candidates)
        if not all(0.0 < limit < math.inf for limit in sensitivity.tolist()):
            raise InvalidInputError("bound", bound, "must be finite and above 0")
        totals = params[0].new_zeros(len(params), self.candidates)
        limit = bound.to(totals).unsqueeze(-1)
        for rows in self._physical(sample):
            totals += _loss_sums([self._losses(point, rows) for point in params], limit)
        for _ in params:  # a line of the transcript for each release; the scale of all is the same
            scale = self._charge(sample, mechanism, noise_multiplier, sensitivity)
        return self._noisy(totals, scale, mechanism) / self._normaliser(sample)

    def _losses(self, point: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of every row and the mask of those that count, ``[K, M]`` each."""

        def losses(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
            return self._kernel.losses(point, rows), rows.mask

        return self._guarded(rows, losses, losses)

    def _guarded(
        self, rows: Rows, run: Callable[[Rows], T], attempt: Callable[[Rows], object]
    ) -> T:
        """Run a pass; where it raises, find the records that raise alone and run it without them."""
        states = [s.get_state() for s in rows.dropout] if self._kernel.drops else []

        def only(kept: torch.Tensor) -> Rows:
            """Return the rows with made-up ones, of mask 0, in place of the others; dropout as it began."""
            for stream, state in zip(rows.dropout, states, strict=False):
                stream.set_state(state)
            made_up = self._data.domain.draw(rows.x[0], rows.y[0], (1, 1), rows.x.device)
            kept = kept.to(rows.mask.device).view(rows.mask.shape)
            own = (where(kept, rows.x, made_up[0]), where(kept, rows.y, made_up[1]))
            return replace(rows, x=own[0], y=own[1], mask=rows.mask * kept)

        try:
            return run(rows)
        except Exception as error:
            found = find_unusable(error, rows.mask.numel(), lambda kept: attempt(only(kept)))
        unusable = found.to(self._device).view(rows.mask.shape)
        self.unusable += (unusable & (rows.mask > 0)).sum(dim=1)
        return run(only(~found))

    def _noisy(self, totals: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
        """Add noise to numbers of each candidate, shape ``[n, K]``."""
        draw = self._noise.gaussian if kind == "gaussian" else self._noise.laplace
        noise = torch.cat([draw(1) for _ in range(len(totals))], dim=1)
        return add_noise(totals.T, noise, scale, self._noise.options).T

    def compute_at_once(self, rows: int, granule: int) -> None:
        """Compute at most this many rows of a candidate at once, in multiples of a granule."""
        self._physical_rows, self._sampler.granule = padded(rows), granule

    def position(self) -> Tensors:
        """Return where all streams are, what was counted and what was released, by name."""
        found = {
            "unusable": self.unusable.to("cpu", copy=True),
            **{f"dropout.{k}": stream.get_state() for k, stream in enumerate(self._dropout)},
        }
        for name, part in self._parts().items():
            found |= prefixed(name, part.position())
        return found

    def go_to(self, position: Tensors) -> None:
        """Go on from a position that an oracle of the same streams was at, and draw nothing twice."""
        self.unusable = position["unusable"].to(self._device)
        for k, stream in enumerate(self._dropout):
            stream.set_state(position[f"dropout.{k}"])
        for name, part in self._parts().items():
            part.go_to(of_prefix(name, position))

    def _parts(self) -> dict[str, PoissonSampler | NoiseSource | Transcript]:
        return {"sampler": self._sampler, "noise": self._noise, "transcript": self._log}

    def transcripts(self) -> Sequence[Transcript]:
        """Return the K transcripts, one a candidate."""
        return self._log.by_candidate()

    def _open(
        self, rate: float, index: torch.Tensor, mask: torch.Tensor, sizes: npt.NDArray[np.int64]
    ) -> Sample:
        number = self._log.open_sample(rate)
        return Sample(rate, number, index, mask.to(self._kernel.layout.dtype), sizes)

    def _normaliser(self, sample: Sample) -> float:
        """Return the public number that means are divided by; never a realised size."""
        return sample.rate * self.schedule.records

    def _physical(self, sample: Sample) -> Iterator[Rows]:
        """Fetch the records of a sample, at most ``physical_rows`` of a candidate at a time."""
        if sample.fetched:
            yield sample.fetched[0]
            return
        every = sample.index.shape[1]
        for start in range(0, every, self._physical_rows):
            stop = start + self._physical_rows
            index, mask, sizes = (
                sample.index[:, start:stop],
                sample.mask[:, start:stop],
                sample.sizes,
            )
            width = index.shape[1]
            whole = width == every
            if not whole:
                sizes = np.clip(sizes - start, 0, width)
            if missing := -width % self._sampler.granule:  # the last piece of all records
                index, mask = (
                    torch.nn.functional.pad(part, (0, missing)) for part in (index, mask)
                )
            x, y, unusable = self._data.fetch(index.reshape(-1))
            if unusable is not None:
                self.unusable += ((mask > 0) & unusable.view(index.shape)).sum(dim=1)
                mask = mask * ~unusable.view(index.shape)
            x, y = x.view(*index.shape, *x.shape[1:]), y.view(*index.shape, *y.shape[1:])
            rows = Rows(x, y, sizes, mask, self._dropout)
            if whole:
                sample.fetched.append(rows)
            yield rows

    def _gradient(
        self,
        sample: Sample,
        params: torch.Tensor,
        clipping: Clipping,
        noise_multiplier: float | torch.Tensor,
        *,
        halves: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Release a noisy mean: the noise is laid down first, the clipped sums are added to it."""
        sensitivity = clipping.sensitivity(self.candidates)
        scale = self._charge(sample, "gaussian", noise_multiplier, sensitivity)
        noise = self._noise.gaussian(params.shape[1])
        wide = self._noise.options.wide
        out = torch.zeros_like(params) if wide else noise.mul_(scale.unsqueeze(1))

        def add(rows: Rows) -> torch.Tensor | None:
            return self._kernel.accumulate(params, rows, clipping, out=out, halves=halves)

        def attempt(rows: Rows) -> object:
            return self._kernel.accumulate(params, rows, clipping, out=torch.zeros_like(params))

        for rows in self._physical(sample):
            unusable = self._guarded(rows, add, attempt)
            if unusable is not None:
                self.unusable += unusable.to(self._device)
        if wide:
            out = add_noise(out, noise, scale, self._noise.options)
        if self._noise.outside is not None:
            out.masked_fill_(self._noise.outside, 0.0)
        size = self._normaliser(sample)
        if isinstance(clipping, CoordinateTransform):
            return torch.addcmul(clipping.center, out, clipping.scale, value=1.0 / size)
        return out.div_(size)

    def _charge(
        self,
        sample: Sample,
        kind: str,
        noise_multiplier: float | torch.Tensor,
        sensitivity: torch.Tensor,
    ) -> torch.Tensor:
        """Write a release into the transcripts and return the scale of its noise, ``[K]``."""
        own: float | tuple[float, ...]
        if isinstance(noise_multiplier, torch.Tensor):
            own = tuple(noise_multiplier.double().expand(self.candidates).tolist())
        else:
            own = float(noise_multiplier)
        known = next((k for k in self._scales if k[0] is sensitivity and k[1] == own), None)
        if known is None:
            scale = noise_scale(own, sensitivity).to(self._kernel.layout.dtype)
            known = (sensitivity, own, sent(scale, self._device))
            self._scales = [known, *self._scales[:1]]  # of a gradient, and of what is beside it
        self._log.record(sample.number, kind, known[1])
        return known[2]


def _loss_sums(
    found: Sequence[tuple[torch.Tensor, torch.Tensor]], limit: torch.Tensor
) -> torch.Tensor:
    """Return sums ``[J, K]`` of J times losses and masks ``[K, M]``: losses held to [0, limit], NaN to 0."""
    values = torch.stack([losses for losses, _ in found])
    values = values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    held = values.clamp_(min=0.0).minimum(limit)
    first, *others = [mask for _, mask in found]
    alike = all(mask is first for mask in others)
    return held.mul_(first if alike else torch.stack([first, *others])).sum(dim=-1)
