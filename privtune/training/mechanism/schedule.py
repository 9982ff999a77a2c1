"""The public clockwork of one training: how many records, at which rate, for how many steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from privtune.errors import InvalidInputError


@dataclass(frozen=True)
class Schedule:
    """How often a training looks at its data: T steps, at each a sample that a record joins at a rate.

    Every number in it is public, the number of records N, too: averages divide by ``sample_rate * records``,
    never by the realised batch size, which is private.

    Raises:
        InvalidInputError: If a field is outside its domain.
    """

    records: int
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        if self.records < 1:
            raise InvalidInputError("records", self.records, "must be a whole number of at least 1")
        if not (math.isfinite(self.sample_rate) and 0.0 < self.sample_rate <= 1.0):
            raise InvalidInputError("sample_rate", self.sample_rate, "must lie in (0, 1]")
        if self.steps < 1:
            raise InvalidInputError("steps", self.steps, "must be a whole number of at least 1")

    @classmethod
    def from_epochs(cls, *, records: int, expected_batch_size: int, epochs: float) -> Schedule:
        """Build the schedule of so many passes in expectation, above 0: ``ceil(epochs / rate)`` steps.

        Raises:
            InvalidInputError: If an argument is outside its domain.
        """
        if not isinstance(expected_batch_size, Real) or not 1 <= expected_batch_size <= records:
            raise InvalidInputError(
                "expected_batch_size",
                expected_batch_size,
                f"must lie between 1 and the number of training records, {records}",
            )
        if not isinstance(epochs, Real) or not (math.isfinite(epochs) and epochs > 0):
            raise InvalidInputError("epochs", epochs, "must be a finite number above 0")
        # The tiny slack keeps 20 epochs at rate 64/1024 at 320 steps whatever the rounding.
        steps = math.ceil(epochs * records / expected_batch_size - 1e-9)
        return cls(records=records, sample_rate=expected_batch_size / records, steps=max(1, steps))

    @property
    def expected_batch_size(self) -> float:
        """Expected number of records in a sample: the public normaliser of every average."""
        return self.sample_rate * self.records

    def checkpoints(self, points: int = 12) -> tuple[int, ...]:
        """Return steps at which a training is looked at, evenly spread, counted from 0, the last included."""
        spread = (round(self.steps * (i + 1) / points) for i in range(points))
        return tuple(sorted({max(1, done) - 1 for done in spread}))

    @property
    def expected_gradient_evaluations(self) -> float:
        """Expected per-sample gradients of one pass of one gradient a step."""
        return self.expected_batch_size * self.steps
