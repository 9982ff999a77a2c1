"""Transcripts: the releases that a training really made, and their comparison with its charge.

The transcript is written by the oracle at the moment of each release, not by the method that asks
for it: it is evidence, not a declaration.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from privtune.accounting import Event, NonPrivate
from privtune.accounting.registry import Atom, Look, UnknownEventError, looks
from privtune.errors import PrivTuneError

if TYPE_CHECKING:
    from privtune.training.mechanism.streams import Tensors

_KINDS = ("gaussian", "laplace")


class TranscriptMismatchError(PrivTuneError):
    """The error that a training's releases differ from those that its plan charged."""


@dataclass
class Transcript:
    """The releases of K candidates' trainings, noted by sample.

    They are kept by sample, since two releases about one sample are one joint event. What happens to all
    candidates is written down once.
    """

    candidates: int = 1
    _rates: list[float] = field(default_factory=list)
    _records: list[tuple[int, str, float | tuple[float, ...]]] = field(default_factory=list)
    _groups: list[int] = field(default_factory=list)  # of each sample
    _bands: list[int] = field(default_factory=list)  # of each release

    def open_sample(self, rate: float, group: int = 0) -> int:
        """Note a sample of a group of records for each candidate, and return its number, from 0.

        Args:
            rate: Probability with which each record of the group is in it.
            group: Which records it is drawn from; where there are no groups, all are in group 0.
        """
        self._rates.append(rate)
        self._groups.append(group)
        return len(self._rates) - 1

    def record(
        self,
        sample: int,
        kind: str,
        noise_multiplier: float | tuple[float, ...],
        bands: int = 1,
    ) -> None:
        """Note a release about a sample, with one noise multiplier for all candidates or one for each.

        Args:
            sample: Its index, as ``open_sample`` gave it.
            kind: ``gaussian`` or ``laplace``.
            noise_multiplier: Noise over the sensitivity: a number, or a tuple of K.
            bands: Over how many releases in a row the noise is correlated; 1 for none.
        """
        self._records.append((sample, kind, noise_multiplier))
        self._bands.append(bands)

    def by_candidate(self) -> tuple[Transcript, ...]:
        """Return one transcript for each candidate."""
        transcripts: list[Transcript] = []
        for k in range(self.candidates):
            transcript = Transcript(1, list(self._rates), _groups=list(self._groups))
            for (sample, kind, multiplier), bands in zip(self._records, self._bands, strict=True):
                transcript.record(sample, kind, _of_candidate(multiplier, k), bands)
            transcripts.append(transcript)
        return tuple(transcripts)

    def position(self) -> Tensors:
        """Return the transcript so far as tensors, for a checkpoint."""
        import torch

        table = np.empty((len(self._records), self.candidates))
        samples = []
        kinds = []
        for row, (sample, kind, multiplier) in zip(table, self._records, strict=True):
            samples.append(sample)
            kinds.append(_KINDS.index(kind))
            row[:] = multiplier
        return {
            "rates": torch.tensor(self._rates, dtype=torch.float64),
            "samples": torch.tensor(samples, dtype=torch.int64),
            "kinds": torch.tensor(kinds, dtype=torch.uint8),
            "multipliers": torch.from_numpy(table),
            "groups": torch.tensor(self._groups, dtype=torch.int64),
            "bands": torch.tensor(self._bands, dtype=torch.int64),
        }

    def go_to(self, position: Tensors) -> None:
        """Set the transcript to the one in a checkpoint's tensors."""
        self._rates = position["rates"].tolist()
        self._groups = position["groups"].tolist()
        self._records = []
        self._bands = []
        samples = position["samples"].tolist()
        kinds = position["kinds"].tolist()
        table = position["multipliers"].tolist()
        bands = position["bands"].tolist()
        for sample, kind, multipliers, of_release in zip(samples, kinds, table, bands, strict=True):
            self.record(sample, _KINDS[kind], tuple(multipliers), of_release)

    def looks(self) -> Counter[Look]:
        """Return how often one candidate made each look (a sampling rate and its releases at one sample).

        A look is a sampling rate with the releases about one sample at that rate: the unit that
        accountants compose. A record is in the samples of its own group alone, so of groups the largest
        count of each look is returned.

        Raises:
            TranscriptMismatchError: If noise is correlated over steps between which a group is sampled
                again: a record would be in both, and no look would be one by itself.
        """
        self._check_apart()
        atoms: list[list[Atom]] = [[] for _ in self._rates]
        for sample, kind, multiplier in self._records:
            atoms[sample].append((kind, _of_candidate(multiplier, 0)))
        of_groups: dict[int, Counter[Look]] = {}
        for rate, group, releases in zip(self._rates, self._groups, atoms, strict=True):
            if releases:
                looks = of_groups.setdefault(group, Counter())
                looks[rate, tuple(sorted(releases))] += 1
        largest: Counter[Look] = Counter()
        for looks in of_groups.values():
            largest |= looks
        return largest

    def _check_apart(self) -> None:
        """Check that a group is sampled again no sooner than the correlation of its noise ends."""
        last: dict[int, int] = {}
        for (sample, _, _), bands in zip(self._records, self._bands, strict=True):
            group = self._groups[sample]
            before = last.get(group)
            if bands > 1 and before is not None and sample - before < bands:
                raise TranscriptMismatchError(
                    f"The noise of the training is correlated over {bands} steps, and steps {before} and "
                    f"{sample} sampled the same group of records. The run is void and its charge stays "
                    "spent."
                )
            last[group] = sample

    def check_bands(self, bands: int) -> None:
        """Check that noise was correlated, and groups were sampled in turn, as the schedule of a plan says.

        Args:
            bands: Over how many steps; 1 for independent noise.

        Raises:
            TranscriptMismatchError: If a release or a sample differs.
        """
        longest = min(bands, len(self._rates))  # of a training that is shorter than its bands
        for of_release in self._bands:
            if of_release != longest:
                raise TranscriptMismatchError(
                    f"The noise of the training is correlated over {of_release} steps, but its plan says "
                    f"{longest}. The run is void and its charge stays spent."
                )
        for sample, group in enumerate(self._groups):
            if group != sample % bands:
                raise TranscriptMismatchError(
                    f"Step {sample} of the training sampled group {group} of {bands}, but its plan says "
                    f"group {sample % bands}. The run is void and its charge stays spent."
                )

    def check_within(self, event: Event) -> None:
        """Check that the releases are no more than those that a training's event charges.

        Look by look, at equal rates and multipliers: a release with less noise is not made up for by
        one with more.

        Raises:
            TranscriptMismatchError: If some look was made more often than it was charged.
        """
        if isinstance(event, NonPrivate):
            return  # charged as having no guarantee at all: nothing can exceed it
        charged = looks_of(event)
        for look, count in sorted(self.looks().items()):
            if count > charged.get(look, 0):
                rate, atoms = look
                raise TranscriptMismatchError(
                    f"The training released {list(atoms)} about {count} samples of rate {rate}, "
                    f"but its plan charged {charged.get(look, 0)} of them. The run is void and its "
                    "charge stays spent."
                )

    def check_whole(self, event: Event) -> None:
        """Check that the releases are no fewer than those that a training's event charges.

        Raises:
            TranscriptMismatchError: If some look was charged and not made.
        """
        if isinstance(event, NonPrivate):
            return
        missing = looks_of(event) - self.looks()
        if missing:
            (rate, atoms), count = min(missing.items())
            raise TranscriptMismatchError(
                f"The plan charged {count} more samples of rate {rate} with releases {list(atoms)} "
                "than the training made, so it is not the training that was planned. The run is "
                "void and its charge stays spent."
            )

    def digest(self) -> str:
        """Return a SHA-256 of the counted looks, to be stored with the settled charge."""
        rows = []
        for (rate, atoms), count in self.looks().items():
            rows.append([rate, [list(atom) for atom in atoms], count])
        rows.sort()
        correlated = sorted({bands for bands in self._bands if bands > 1})
        if correlated:
            rows.append(["bands", correlated])
        text = json.dumps(rows, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _of_candidate(multiplier: float | tuple[float, ...], k: int) -> float:
    """Return candidate k's noise multiplier from one number for all, or from a tuple."""
    if isinstance(multiplier, tuple):
        return multiplier[k]
    return multiplier


def looks_of(event: Event) -> Counter[Look]:
    """Return how often a training event charges each look (a sampling rate and its releases)."""
    try:
        return looks(event)
    except UnknownEventError as error:
        raise TranscriptMismatchError(
            f"{error} A training is made of gaussian, laplace and joint releases, poisson_sampled "
            "or not."
        ) from None
