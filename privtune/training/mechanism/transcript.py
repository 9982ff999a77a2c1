"""What a training really released, and the proof that it is no more than what was charged.

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
    """A training released more than its plan charged. The run failed and its charge stays."""


@dataclass
class Transcript:
    """The releases of K candidates' trainings; one candidate's is K = 1.

    They are kept by sample, since two releases about one sample are one joint event. What happens to all
    candidates is written down once.
    """

    candidates: int = 1
    _rates: list[float] = field(default_factory=list)
    _records: list[tuple[int, str, float | tuple[float, ...]]] = field(default_factory=list)

    def open_sample(self, rate: float) -> int:
        """Note that a sample was drawn at ``rate`` for each candidate and return its index."""
        self._rates.append(rate)
        return len(self._rates) - 1

    def record(self, sample: int, kind: str, noise_multiplier: float | tuple[float, ...]) -> None:
        """Note a release about a sample; one noise multiplier for all, or one for each."""
        self._records.append((sample, kind, noise_multiplier))

    def by_candidate(self) -> tuple[Transcript, ...]:
        """Return one transcript for each candidate."""
        found: list[Transcript] = []
        for k in range(self.candidates):
            found.append(Transcript(1, list(self._rates)))
            for sample, kind, own in self._records:
                found[k].record(sample, kind, own[k] if isinstance(own, tuple) else own)
        return tuple(found)

    def position(self) -> Tensors:
        """Return what was released, as tensors."""
        import torch

        table = np.empty((len(self._records), self.candidates))
        for row, (_, _, own) in zip(table, self._records, strict=True):
            row[:] = own
        return {
            "rates": torch.tensor(self._rates, dtype=torch.float64),
            "samples": torch.tensor([record[0] for record in self._records], dtype=torch.int64),
            "kinds": torch.tensor([_KINDS.index(r[1]) for r in self._records], dtype=torch.uint8),
            "multipliers": torch.from_numpy(table),
        }

    def go_to(self, position: Tensors) -> None:
        """Go on after what was released."""
        self._rates = position["rates"].tolist()
        self._records = []
        columns = (position[name].tolist() for name in ("samples", "kinds", "multipliers"))
        for sample, kind, own in zip(*columns, strict=True):
            self.record(sample, _KINDS[kind], tuple(own))

    def looks(self) -> Counter[Look]:
        """Count one candidate's looks; a sample about which nothing was released costs nothing."""
        atoms: list[list[Atom]] = [[] for _ in self._rates]
        for sample, kind, own in self._records:
            atoms[sample].append((kind, own[0] if isinstance(own, tuple) else own))
        pairs = zip(self._rates, atoms, strict=True)
        return Counter((rate, tuple(sorted(released))) for rate, released in pairs if released)

    def check_within(self, event: Event) -> None:
        """Check that what was released is no more than what a training's event charges."""
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
        """Check that it is also no less: else some of the training may have gone another way."""
        missing = Counter() if isinstance(event, NonPrivate) else looks_of(event) - self.looks()
        if missing:
            (rate, atoms), count = min(missing.items())
            raise TranscriptMismatchError(
                f"The plan charged {count} more samples of rate {rate} with releases {list(atoms)} "
                "than the training made, so it is not the training that was planned. The run is "
                "void and its charge stays spent."
            )

    def digest(self) -> str:
        """Return a SHA-256 of the counted looks, to be stored with the settled charge."""
        rows = sorted(
            [rate, [list(a) for a in atoms], n] for (rate, atoms), n in self.looks().items()
        )
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def looks_of(event: Event) -> Counter[Look]:
    """Count the looks at the data that a training event is made of."""
    try:
        return looks(event)
    except UnknownEventError as error:
        raise TranscriptMismatchError(
            f"{error} A training is made of gaussian, laplace and joint releases, poisson_sampled "
            "or not."
        ) from None
