"""The oracle: the only access of a training method to the data, which answers with noisy releases.

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
    """A sample for each candidate, drawn at one rate, which methods pass on without looking inside.

    Attributes:
        rate: Each record is in it with this chance, by itself.
        number: In the transcript: releases about one sample are one joint event.
        index: Of records ``[K, M]``, filled up with 0 to the widest of the stack.
        mask: 1 for what is a record, ``[K, M]``.
        sizes: How many are, ``[K]``: a private number, which no release may hang on.
    """

    rate: float
    number: int
    index: torch.Tensor
    mask: torch.Tensor
    sizes: npt.NDArray[np.int64]
    fetched: list[Rows] = field(default_factory=list)  # kept for the next release, if in one piece


class Oracle:
    """An oracle that answers a method's questions about the data with noisy means, for K candidates.

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
        size = kernel.layout.size
        dtype = kernel.layout.dtype
        self._noise = NoiseSource(streams, device, dtype, noise)
        if places is not None:
            self._noise = PlacedNoise(
                streams,
                device,
                dtype,
                noise,
                places=places,
                size=size,
            )
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
        """The root mean square of weights as torch first draws them for layers of these shapes."""
        return self._kernel.layout.usual_size

    def sample(self) -> Sample:
        """Draw an independent Poisson sample for each candidate at the schedule's rate."""
        index, sizes = self._sampler()
        indices = sent(torch.from_numpy(index), self._device)
        lengths = sent(torch.from_numpy(sizes), self._device)
        places = torch.arange(indices.shape[1], device=self._device)
        mask = places < lengths.unsqueeze(1)
        return self._open(self.schedule.sample_rate, indices, mask, sizes)

    def everything(self) -> Sample:
        """Return the sample that holds every record, for full-batch methods."""
        records = len(self._data)
        every = torch.arange(records, device=self._device)
        index = every.expand(self.candidates, records)
        mask = index >= 0
        sizes = np.full(self.candidates, records)
        return self._open(1.0, index, mask, sizes)

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
        """Release the noisy mean gradient, ``[K, P]``, and the noisy fraction of unclipped records, ``[K]``.

        The count is encoded as ±1/2 a record (Andrew et al. 2021, arXiv 1905.03871, Theorem 1), so its
        sensitivity is 1/2, and ``count_noise_multiplier`` is the deviation over that.
        """
        halves = params.new_zeros(self.candidates)
        gradient = self._gradient(
            sample,
            params,
            clipping,
            noise_multiplier,
            halves=halves,
        )
        scale = self._charge(
            sample,
            "gaussian",
            count_noise_multiplier,
            self._half,
        )
        count = self._noisy(halves[None], scale, "gaussian")[0]
        # The encoded sum is the count less n/2, n records in the sample; its expected size stands for n.
        fraction = count / self._normaliser(sample) + 0.5
        return gradient, fraction

    def losses(
        self,
        sample: Sample,
        params: Sequence[torch.Tensor],
        *,
        bound: torch.Tensor,
        noise_multiplier: float | torch.Tensor,
        mechanism: str = "gaussian",
    ) -> torch.Tensor:
        """Release the noisy mean loss at J weight vectors ``[K, P]`` as shape ``[J, K]``, in J releases.

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
            losses = [self._losses(point, rows) for point in params]
            totals += _loss_sums(losses, limit)
        for _ in params:  # a line of the transcript for each release; the scale of all is the same
            scale = self._charge(sample, mechanism, noise_multiplier, sensitivity)
        noisy = self._noisy(totals, scale, mechanism)
        return noisy / self._normaliser(sample)

    def _losses(self, point: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of every row, and the mask of rows that count, ``[K, M]`` each."""

        def losses(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
            """Return the losses of the given rows, and their mask."""
            return self._kernel.losses(point, rows), rows.mask

        return self._guarded(rows, losses, losses)

    def _guarded(
        self,
        rows: Rows,
        run: Callable[[Rows], T],
        attempt: Callable[[Rows], object],
    ) -> T:
        """Run a pass over rows; if it raises, find the records at fault and run it without them.

        Whether a release is made must not hang on one record: so a pass that raises is no error of
        the training. Rows are halved until those are found that raise by themselves, they are counted
        as unusable, and the pass is run with made-up records of mask 0 in their place.

        Args:
            rows: Of one piece of a sample.
            run: What is wanted of them.
            attempt: The same without an effect, to find what raises.
        """
        # Where the pass is run again, dropout begins where it began.
        states = [s.get_state() for s in rows.dropout] if self._kernel.drops else []

        def only(usable: torch.Tensor) -> Rows:
            """Return the rows with made-up ones in place of unusable ones, and reset the dropout streams."""
            for stream, state in zip(rows.dropout, states, strict=False):
                stream.set_state(state)
            made_up = self._data.domain.draw(
                rows.x[0],
                rows.y[0],
                (1, 1),
                rows.x.device,
            )
            usable = usable.to(rows.mask.device).view(rows.mask.shape)
            x = where(usable, rows.x, made_up[0])
            y = where(usable, rows.y, made_up[1])
            return replace(rows, x=x, y=y, mask=rows.mask * usable)

        try:
            return run(rows)
        except Exception as error:
            faults = find_unusable(error, rows.mask.numel(), lambda usable: attempt(only(usable)))
        unusable = faults.to(self._device).view(rows.mask.shape)
        is_record = rows.mask > 0
        self.unusable += (unusable & is_record).sum(dim=1)
        return run(only(~faults))

    def _noisy(
        self,
        totals: torch.Tensor,
        scale: torch.Tensor,
        kind: str,
    ) -> torch.Tensor:
        """Return the numbers ``[n, K]`` with noise of each candidate's scale added.

        Column by column, since a number of one release is a draw of size 1 of each candidate.
        """
        draw = self._noise.gaussian if kind == "gaussian" else self._noise.laplace
        columns = [draw(1) for _ in range(len(totals))]
        noise = torch.cat(columns, dim=1)
        noisy = add_noise(totals.T, noise, scale, self._noise.options)
        return noisy.T

    def compute_at_once(self, rows: int, granule: int) -> None:
        """Set how many rows of a candidate are computed at once, and what batch sizes are a multiple of."""
        self._physical_rows = padded(rows)
        self._sampler.granule = granule

    def position(self) -> Tensors:
        """Return the oracle's position for a checkpoint: streams, counts and transcript, by name."""
        tensors = {"unusable": self.unusable.to("cpu", copy=True)}
        for k, stream in enumerate(self._dropout):
            tensors[f"dropout.{k}"] = stream.get_state()
        for name, part in self._parts().items():
            tensors |= prefixed(name, part.position())
        return tensors

    def go_to(self, position: Tensors) -> None:
        """Set streams, counts and transcript to a checkpoint's position, so that nothing is drawn twice."""
        self.unusable = position["unusable"].to(self._device)
        for k, stream in enumerate(self._dropout):
            stream.set_state(position[f"dropout.{k}"])
        for name, part in self._parts().items():
            part.go_to(of_prefix(name, position))

    def _parts(self) -> dict[str, PoissonSampler | NoiseSource | Transcript]:
        """Return the parts that have a position of their own, by name."""
        return {"sampler": self._sampler, "noise": self._noise, "transcript": self._log}

    def transcripts(self) -> Sequence[Transcript]:
        """Return the K transcripts, one a candidate."""
        return self._log.by_candidate()

    def _open(
        self,
        rate: float,
        index: torch.Tensor,
        mask: torch.Tensor,
        sizes: npt.NDArray[np.int64],
    ) -> Sample:
        """Note a sample in the transcript, and return it."""
        number = self._log.open_sample(rate)
        return Sample(
            rate,
            number,
            index,
            mask.to(self._kernel.layout.dtype),
            sizes,
        )

    def _normaliser(self, sample: Sample) -> float:
        """Return the public number that sums are divided by: rate times records, not the realised size.

        A realised size would be a second function of the data, and nobody charged it.
        """
        return sample.rate * self.schedule.records

    def _physical(self, sample: Sample) -> Iterator[Rows]:
        """Yield the records of a sample in pieces of at most ``physical_rows`` rows a candidate.

        A sample in one piece is kept for the next release about it, as methods ask for a gradient and
        a loss of the same sample. A record that breaks public facts keeps its place with mask 0.
        """
        if sample.fetched:
            yield sample.fetched[0]
            return
        every = sample.index.shape[1]
        for start in range(0, every, self._physical_rows):
            stop = start + self._physical_rows
            index = sample.index[:, start:stop]
            mask = sample.mask[:, start:stop]
            sizes = sample.sizes
            width = index.shape[1]
            is_full = width == every
            if not is_full:
                sizes = np.clip(sizes - start, 0, width)
            if missing := -width % self._sampler.granule:  # the last piece of all records
                index = torch.nn.functional.pad(index, (0, missing))
                mask = torch.nn.functional.pad(mask, (0, missing))
            x, y, unusable = self._data.fetch(index.reshape(-1))
            if unusable is not None:
                unusable = unusable.view(index.shape)
                is_record = mask > 0
                self.unusable += (is_record & unusable).sum(dim=1)
                mask = mask * ~unusable
            x = x.view(*index.shape, *x.shape[1:])
            y = y.view(*index.shape, *y.shape[1:])
            rows = Rows(x, y, sizes, mask, self._dropout)
            if is_full:
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
        """Release a noisy mean gradient: noise is written first, and clipped sums are added to it.

        One tensor ``[K, P]`` holds both, so noise takes no memory of its own. On the grid the exact
        sum is needed, and noise is added last, in float64.
        """
        sensitivity = clipping.sensitivity(self.candidates)
        scale = self._charge(sample, "gaussian", noise_multiplier, sensitivity)
        noise = self._noise.gaussian(params.shape[1])
        wide = self._noise.options.wide
        if wide:
            out = torch.zeros_like(params)
        else:
            out = noise.mul_(scale.unsqueeze(1))

        def add(rows: Rows) -> torch.Tensor | None:
            """Add the clipped sums of some rows to the release; return the counts of unusable records."""
            return self._kernel.accumulate(
                params,
                rows,
                clipping,
                out=out,
                halves=halves,
            )

        def attempt(rows: Rows) -> object:
            """Compute clipped sums of some rows into a throw-away tensor, to see whether they raise."""
            nowhere = torch.zeros_like(params)
            return self._kernel.accumulate(
                params,
                rows,
                clipping,
                out=nowhere,
            )

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
            return torch.addcmul(
                clipping.center,
                out,
                clipping.scale,
                value=1.0 / size,
            )
        return out.div_(size)

    def _charge(
        self,
        sample: Sample,
        kind: str,
        noise_multiplier: float | torch.Tensor,
        sensitivity: torch.Tensor,
    ) -> torch.Tensor:
        """Write a release into the transcripts and return the scale of its noise, ``[K]``.

        It comes before noise is added, so no release is left out of the transcript.
        """
        multiplier: float | tuple[float, ...]
        if isinstance(noise_multiplier, torch.Tensor):
            multipliers = noise_multiplier.double().expand(self.candidates)
            multiplier = tuple(multipliers.tolist())
        else:
            multiplier = float(noise_multiplier)
        scale = self._scale_of(sensitivity, multiplier)
        self._log.record(sample.number, kind, multiplier)
        return scale

    def _scale_of(
        self,
        sensitivity: torch.Tensor,
        multiplier: float | tuple[float, ...],
    ) -> torch.Tensor:
        """Return multiplier times sensitivity, ``[K]``, on the device, from a cache if possible."""
        for entry in self._scales:
            if entry[0] is sensitivity and entry[1] == multiplier:
                return entry[2]
        scale = noise_scale(multiplier, sensitivity).to(self._kernel.layout.dtype)
        scale = sent(scale, self._device)
        # Of a gradient, and of what is beside it.
        self._scales = [(sensitivity, multiplier, scale), *self._scales[:1]]
        return scale


def _loss_sums(
    losses_of_rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    limit: torch.Tensor,
) -> torch.Tensor:
    """Return masked sums ``[J, K]`` of losses ``[K, M]`` clipped to [0, limit], with NaN as 0.

    Whatever a loss gives, a record adds between 0 and its limit: that is the sensitivity that was
    charged.
    """
    values = torch.stack([losses for losses, _ in losses_of_rows])
    values = values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    bounded = values.clamp_(min=0.0).minimum(limit)
    masks = [mask for _, mask in losses_of_rows]
    weights = masks[0]
    if any(mask is not weights for mask in masks):
        weights = torch.stack(masks)
    return bounded.mul_(weights).sum(dim=-1)
