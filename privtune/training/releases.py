"""The oracle of a stack of candidates: samples, clipped sums, noise, and the transcript."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from privtune.errors import InvalidInputError
from privtune.training.clipping import Clipping, CoordinateTransform
from privtune.training.data import Data
from privtune.training.kernel import Kernel, Rows
from privtune.training.noise import NoiseSource, noise_scale
from privtune.training.oracle import Sample
from privtune.training.sampling import GRANULE, PoissonSampler, padded
from privtune.training.schedule import Schedule
from privtune.training.streams import Streams
from privtune.training.transcript import Transcript

__all__ = ["StackOracle"]


@dataclass(frozen=True, eq=False)
class _Drawn:
    """A sample of each candidate; what is in it stays inside this module."""

    rate: float
    number: int
    index: torch.Tensor
    sizes: tuple[int, ...]


class StackOracle:
    """Noisy answers about the data for K candidates: see ``Oracle`` for the guarantee.

    Args:
        schedule: The public clockwork.
        data: The private records.
        kernel: Computes the clipped sums.
        streams: One for each candidate.
        device: Where to compute.
        physical_rows: Largest number of rows of a candidate that are computed at once; a longer
            sample is computed in pieces, which changes nothing else.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        data: Data,
        kernel: Kernel,
        streams: Sequence[Streams],
        device: torch.device,
        physical_rows: int,
    ) -> None:
        if len(data) != schedule.records and not getattr(data, "sealed_size", False):
            raise InvalidInputError(
                "data",
                f"{len(data)} records",
                f"must hold the {schedule.records} records of the schedule",
            )
        self.schedule = schedule
        self.candidates = len(streams)
        self.gradient_evaluations = [0] * self.candidates
        self.nonfinite = torch.zeros(self.candidates, dtype=torch.long)
        self._data = data
        self._kernel = kernel
        self._device = device
        self._physical_rows = padded(physical_rows)
        self._noise = NoiseSource(streams, device)
        self._dropout = [s.generator("dropout", device=device) for s in streams]
        self._transcripts = [Transcript() for _ in streams]
        self._samplers = [
            PoissonSampler(records=len(data), rate=schedule.sample_rate, rng=s.numpy("sampling"))
            for s in streams
        ]

    def sample(self) -> Sample:
        """Draw an independent Poisson sample for each candidate at the schedule's rate."""
        drawn = [sampler() for sampler in self._samplers]
        sizes = tuple(len(rows) for rows in drawn)
        index = np.zeros((len(drawn), padded(max(sizes))), dtype=np.int64)
        for row, rows in zip(index, drawn, strict=True):
            row[: len(rows)] = rows
        return self._open(self.schedule.sample_rate, torch.from_numpy(index), sizes)

    def everything(self) -> Sample:
        """Return the sample that holds every record, for full-batch methods."""
        records = len(self._data)
        index = torch.arange(records).expand(self.candidates, records)
        return self._open(1.0, index, (records,) * self.candidates)

    def gradient(
        self,
        sample: Sample,
        params: torch.Tensor,
        *,
        clipping: Clipping,
        noise_multiplier: float | torch.Tensor,
    ) -> torch.Tensor:
        """Release the noisy mean of the clipped per-sample gradients: see ``Oracle.gradient``."""
        drawn = self._own(sample)
        return self._gradient(drawn, params, clipping, noise_multiplier, halves=None)

    def gradient_and_fraction(
        self,
        sample: Sample,
        params: torch.Tensor,
        *,
        clipping: Clipping,
        noise_multiplier: float | torch.Tensor,
        count_noise_multiplier: float | torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Release the noisy mean gradient and the noisy fraction of records not clipped."""
        drawn = self._own(sample)
        halves = params.new_zeros(self.candidates)
        gradient = self._gradient(drawn, params, clipping, noise_multiplier, halves=halves)
        half = torch.full((self.candidates,), 0.5, dtype=torch.float64)
        scale = self._charge(drawn, "gaussian", count_noise_multiplier, half)
        count = halves + scale.to(halves) * self._noise.gaussian(1)[:, 0]
        return gradient, count / self._normaliser(drawn) + 0.5

    def losses(
        self,
        sample: Sample,
        params: Sequence[torch.Tensor],
        *,
        bound: torch.Tensor,
        noise_multiplier: float | torch.Tensor,
        mechanism: str = "gaussian",
    ) -> torch.Tensor:
        """Release the noisy mean loss at several parameter vectors: see ``Oracle.losses``."""
        if mechanism not in ("gaussian", "laplace"):
            raise InvalidInputError("mechanism", mechanism, 'must be "gaussian" or "laplace"')
        drawn = self._own(sample)
        sensitivity = bound.detach().to("cpu", torch.float64).expand(self.candidates)
        if not bool((sensitivity.isfinite() & (sensitivity > 0.0)).all()):
            raise InvalidInputError("bound", bound, "must be finite and above 0")
        answers = []
        for point in params:
            total = point.new_zeros(self.candidates)
            for rows in self._physical(drawn):
                values = self._kernel.losses(point, rows)
                usable = (rows.mask > 0) & values.isfinite()
                clipped = values.clamp(min=0.0).minimum(bound.to(values)[:, None])
                total += torch.where(usable, clipped, 0.0).sum(dim=1)
            scale = self._charge(drawn, mechanism, noise_multiplier, sensitivity).to(total)
            draw = self._noise.gaussian if mechanism == "gaussian" else self._noise.laplace
            answers.append((total + scale * draw(1)[:, 0].to(total)) / self._normaliser(drawn))
        return torch.stack(answers)

    def transcripts(self) -> Sequence[Transcript]:
        """Return the K transcripts, one a candidate."""
        return tuple(self._transcripts)

    def _open(self, rate: float, index: torch.Tensor, sizes: tuple[int, ...]) -> _Drawn:
        number = {transcript.open_sample(rate) for transcript in self._transcripts}.pop()
        return _Drawn(rate, number, index.to(self._device), sizes)

    def _own(self, sample: Sample) -> _Drawn:
        if not isinstance(sample, _Drawn):
            raise InvalidInputError("sample", sample, "must come from this oracle")
        return sample

    def _normaliser(self, drawn: _Drawn) -> float:
        """Return the public number that means are divided by; never a realised size."""
        return drawn.rate * self.schedule.records

    def _physical(self, drawn: _Drawn) -> Iterator[Rows]:
        """Fetch the records of a sample, at most ``physical_rows`` of a candidate at a time."""
        for start in range(0, drawn.index.shape[1], self._physical_rows):
            index = drawn.index[:, start : start + self._physical_rows]
            width = index.shape[1]
            if width % GRANULE:  # the last piece of all records; fill up, as samples are
                index = torch.nn.functional.pad(index, (0, padded(width) - width))
            sizes = [min(max(size - start, 0), width) for size in drawn.sizes]
            x, y = self._data.take(index.reshape(-1))
            places = torch.arange(index.shape[1], device=self._device)
            mask = places < torch.tensor(sizes, device=self._device).unsqueeze(1)
            yield Rows(
                x.view(*index.shape, *x.shape[1:]),
                y.view(*index.shape, *y.shape[1:]),
                sizes,
                mask.to(self._kernel.layout.dtype),
                self._dropout,
            )

    def _gradient(
        self,
        drawn: _Drawn,
        params: torch.Tensor,
        clipping: Clipping,
        noise_multiplier: float | torch.Tensor,
        *,
        halves: torch.Tensor | None,
    ) -> torch.Tensor:
        """Release a noisy mean: the noise is laid down first, the clipped sums are added to it."""
        sensitivity = clipping.sensitivity(self.candidates)
        scale = self._charge(drawn, "gaussian", noise_multiplier, sensitivity)
        out = self._noise.gaussian(params.shape[1])
        out *= scale.to(out).unsqueeze(1)
        for rows in self._physical(drawn):
            bad = self._kernel.accumulate(params, rows, clipping, out=out, halves=halves)
            if bad is not None:
                self.nonfinite += bad.cpu()
        self.gradient_evaluations = [
            n + size for n, size in zip(self.gradient_evaluations, drawn.sizes, strict=True)
        ]
        out /= self._normaliser(drawn)
        if isinstance(clipping, CoordinateTransform):
            return out * clipping.scale + clipping.center
        return out

    def _charge(
        self,
        drawn: _Drawn,
        kind: str,
        noise_multiplier: float | torch.Tensor,
        sensitivity: torch.Tensor,
    ) -> torch.Tensor:
        """Write a release into the transcripts and return the scale of its noise, ``[K]``."""
        scale = noise_scale(noise_multiplier, sensitivity)
        if isinstance(noise_multiplier, torch.Tensor):
            multipliers = noise_multiplier.double().expand(self.candidates).tolist()
        else:
            multipliers = [float(noise_multiplier)] * self.candidates
        for transcript, multiplier in zip(self._transcripts, multipliers, strict=True):
            transcript.record(drawn.number, kind, multiplier)
        return scale.to(self._device)
