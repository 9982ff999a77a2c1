"""The public schedule of a training, with records, rate and steps, and its options for noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

from privtune.errors import InvalidInputError
from privtune.names import refuse_fields, refuse_name
from privtune.numbers import is_number


@dataclass(frozen=True)
class Schedule:
    """The public plan of a training: T steps, each on a Poisson sample of the records at one rate.

    All of it is public. Averages divide by ``sample_rate * records``, never by a realised, private size.
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
    def from_epochs(
        cls,
        *,
        records: int,
        expected_batch_size: int,
        epochs: float,
    ) -> Schedule:
        """Build the schedule of an expected number of epochs: ``ceil(epochs / rate)`` steps.

        Args:
            records: Declared number of records.
            expected_batch_size: Expected records in a sample, from 1 to all.
            epochs: Expected times that a record is looked at.

        Raises:
            InvalidInputError: If one of them is out of its range.
        """
        is_whole = isinstance(expected_batch_size, Integral) and expected_batch_size is not True
        if not is_whole or not 1 <= expected_batch_size <= records:
            raise InvalidInputError(
                "expected_batch_size",
                expected_batch_size,
                f"must be a whole number between 1 and the number of training records, {records}",
            )
        if not is_number(epochs) or epochs <= 0:
            raise InvalidInputError("epochs", epochs, "must be a finite number above 0")
        # The tiny slack keeps 20 epochs at rate 64/1024 at 320 steps whatever the rounding.
        steps = math.ceil(epochs * records / expected_batch_size - 1e-9)
        return cls(records=records, sample_rate=expected_batch_size / records, steps=max(1, steps))

    @property
    def expected_batch_size(self) -> float:
        """The expected number of records in a sample, by which all means are divided."""
        return self.sample_rate * self.records

    def checkpoints(self, points: int = 12) -> tuple[int, ...]:
        """Return evenly spread steps, from 0 to the last, at which to evaluate a training."""
        steps = set()
        for i in range(points):
            end = round(self.steps * (i + 1) / points)
            steps.add(max(1, end) - 1)
        return tuple(sorted(steps))

    @property
    def expected_gradient_evaluations(self) -> float:
        """The expected number of per-sample gradients, at one gradient for each step."""
        return self.expected_batch_size * self.steps


Source = Literal["fast", "chacha20"]
FloatingPoint = Literal["plain", "grid", "four-draws"]


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """Options of the noise: its random source, and the protection of its lowest bits.

    The tails are the same under every option: see ``docs/noise.md``.

    Args:
        source: ``"chacha20"``: the keystream of a cipher, keyed by the candidate's secret, from
            which nothing can be predicted; ``"fast"``: the same, but on a GPU its own generator.
        floating_point: ``"plain"``; ``"grid"`` adds float64 noise to the sum and rounds the result
            to a grid of 2^-20 of the noise's scale, so that no bit below it is released;
            ``"four-draws"`` makes a Gaussian of four (Holohan and Braghin 2021, arXiv 2107.10138),
            so that a value has too many origins to be traced back.

    Raises:
        InvalidInputError: If a word is not one of these.

    Example:
        >>> NoiseOptions(source="chacha20", floating_point="grid") == NoiseOptions.of("secure")
        True
        >>> NoiseOptions.of("secure").to_dict()
        {'source': 'chacha20', 'floating_point': 'grid'}
    """

    source: Source = "fast"
    floating_point: FloatingPoint = "plain"

    def __post_init__(self) -> None:
        for name, allowed in (("source", Source), ("floating_point", FloatingPoint)):
            words = get_args(allowed)
            value = getattr(self, name)
            if value not in words:
                refuse_name(f"noise.{name}", value, words)

    @property
    def wide(self) -> bool:
        """Whether noise is drawn in float64."""
        return self.floating_point == "grid"

    @classmethod
    def of(cls, value: str | Mapping[str, Any] | NoiseOptions | None) -> NoiseOptions:
        """Return noise options from a preset's name, a mapping of fields, or None for the defaults.

        Args:
            value: ``"plain"``; ``"secure"``, which is chacha20 on a grid; the fields by name; or
                None for the defaults.

        Raises:
            InvalidInputError: If it is none of these.
        """
        if value is None or isinstance(value, NoiseOptions):
            return value or cls()
        if isinstance(value, str):
            if value not in _PRESETS:
                refuse_name(
                    "noise",
                    value,
                    _PRESETS,
                    also="or a mapping of its fields",
                )
            return _PRESETS[value]
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := set(value) - set(names):
            refuse_fields("noise", unknown, names, "it")
        return cls(**value)

    @property
    def note(self) -> str:
        """The text about the noise in charges and certificates; empty for the default options."""
        if self == NoiseOptions():
            return ""
        return f"noise: {self.source}, {self.floating_point}"

    def to_dict(self) -> dict[str, str]:
        """Return the options as JSON-ready data."""
        return dataclasses.asdict(self)


_PRESETS = {
    "plain": NoiseOptions(),
    "secure": NoiseOptions(source="chacha20", floating_point="grid"),
}
