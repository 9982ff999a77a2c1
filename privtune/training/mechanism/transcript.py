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

    def open_sample(self, rate: float) -> int:
        """Note a sample drawn at ``rate`` for each candidate, and return its number, from 0."""
        self._rates.append(rate)
        return len(self._rates) - 1

    def record(
        self,
        sample: int,
        kind: str,
        noise_multiplier: float | tuple[float, ...],
    ) -> None:
        """Note a release about a sample, with one noise multiplier for all candidates or one for each.

        Args:
            sample: Its index, as ``open_sample`` gave it.
            kind: ``gaussian`` or ``laplace``.
            noise_multiplier: Noise over the sensitivity: a number, or a tuple of K.
        """
        self._records.append((sample, kind, noise_multiplier))

    def by_candidate(self) -> tuple[Transcript, ...]:
        """Return one transcript for each candidate."""
        transcripts: list[Transcript] = []
        for k in range(self.candidates):
            transcript = Transcript(1, list(self._rates))
            for sample, kind, multiplier in self._records:
                transcript.record(sample, kind, _of_candidate(multiplier, k))
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
        }

    def go_to(self, position: Tensors) -> None:
        """Set the transcript to the one in a checkpoint's tensors."""
        self._rates = position["rates"].tolist()
        self._records = []
        samples = position["samples"].tolist()
        kinds = position["kinds"].tolist()
        table = position["multipliers"].tolist()
        for sample, kind, multipliers in zip(samples, kinds, table, strict=True):
            self.record(sample, _KINDS[kind], tuple(multipliers))

    def looks(self) -> Counter[Look]:
        """Return how often one candidate made each look (a sampling rate and its releases at one sample).

        A look is a sampling rate with the releases about one sample at that rate: the unit that
        accountants compose.
        """
        atoms: list[list[Atom]] = [[] for _ in self._rates]
        for sample, kind, multiplier in self._records:
            atoms[sample].append((kind, _of_candidate(multiplier, 0)))
        looks: Counter[Look] = Counter()
        for rate, releases in zip(self._rates, atoms, strict=True):
            if releases:
                looks[rate, tuple(sorted(releases))] += 1
        return looks

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
