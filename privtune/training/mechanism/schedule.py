"""The public clockwork of one training: how many records, at which rate, for how many steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from privtune.errors import InvalidInputError


@dataclass(frozen=True)
class Schedule:
    """How often a training looks at its data: T steps, at each a sample that a record joins at a rate.

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
    def from_epochs(cls, *, records: int, expected_batch_size: int, epochs: float) -> Schedule:
        """Build the schedule of so many passes in expectation, above 0: ``ceil(epochs / rate)`` steps."""
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


Source = Literal["fast", "chacha20"]
FloatingPoint = Literal["plain", "grid", "four-draws"]


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """Where noise comes from, and how it is kept from leaking through its lowest bits.

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
            words, value = get_args(allowed), getattr(self, name)
            if value not in words:
                raise InvalidInputError(f"noise.{name}", value, f"must be {' or '.join(words)}")

    @property
    def wide(self) -> bool:
        """Whether noise is drawn in float64."""
        return self.floating_point == "grid"

    @classmethod
    def of(cls, value: str | Mapping[str, Any] | NoiseOptions | None) -> NoiseOptions:
        """Return the options that a spec or a caller names.

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
                raise InvalidInputError("noise", value, "must be plain or secure, or its fields")
            return _PRESETS[value]
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(map(str, set(value) - set(names))):
            raise InvalidInputError("noise", unknown, f"knows {' and '.join(names)}")
        return cls(**value)

    @property
    def note(self) -> str:
        """What a charge and its certificate say about it; nothing about the defaults."""
        return "" if self == NoiseOptions() else f"noise: {self.source}, {self.floating_point}"

    def to_dict(self) -> dict[str, str]:
        """Return the fields, JSON-ready."""
        return dataclasses.asdict(self)


_PRESETS = {
    "plain": NoiseOptions(),
    "secure": NoiseOptions(source="chacha20", floating_point="grid"),
}
