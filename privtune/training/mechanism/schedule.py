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
    With b bands, records are put into b groups at random, step t samples group ``t mod b`` at b times the
    rate, and noise is correlated over b steps: see ``banded.py``. A record then takes part in each step
    with the same probability as before, and at most once in b steps.
    """

    records: int
    sample_rate: float
    steps: int
    bands: int = 1

    def __post_init__(self) -> None:
        if self.records < 1:
            raise InvalidInputError("records", self.records, "must be a whole number of at least 1")
        if not (math.isfinite(self.sample_rate) and 0.0 < self.sample_rate <= 1.0):
            raise InvalidInputError("sample_rate", self.sample_rate, "must lie in (0, 1]")
        if self.steps < 1:
            raise InvalidInputError("steps", self.steps, "must be a whole number of at least 1")
        if self.bands != 1:
            self._check_bands()

    def _check_bands(self) -> None:
        """Refuse a number of bands that is out of range, or that asks for a rate above 1 in a group."""
        check_bands(self.bands)
        if self.bands * self.sample_rate > 1.0 + 1e-12:
            most = int(1.0 / self.sample_rate)
            raise InvalidInputError(
                "noise.bands",
                self.bands,
                f"must be at most {most} at sample rate {self.sample_rate:.4g}: each of so many groups of "
                "records is sampled at so many times the rate, which is at most 1",
                "Take fewer bands, or a smaller expected_batch_size.",
            )

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

    @property
    def group_rate(self) -> float:
        """The probability with which a record of a step's group is sampled: b times the rate."""
        return min(1.0, self.bands * self.sample_rate)

    @property
    def rounds(self) -> int:
        """The most steps that sample one group, ``ceil(T / b)``: as often may a record take part."""
        return -(-self.steps // self.bands)

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as JSON-ready data, with bands where there are several."""
        data = dataclasses.asdict(self)
        if self.bands == 1:
            del data["bands"]
        return data

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
Correlation = Literal["none", "banded"]

MOST_BANDS = 256
"""The most steps that noise may be correlated over: each takes a vector of a candidate's memory."""


def check_bands(bands: object) -> None:
    """Refuse a number of bands that is no whole number from 1 to 256."""
    is_whole = isinstance(bands, Integral) and not isinstance(bands, bool)
    if not is_whole or not 1 <= int(bands) <= MOST_BANDS:  # type: ignore[call-overload]
        raise InvalidInputError(
            "noise.bands", bands, f"must be auto, or a whole number from 1 to {MOST_BANDS}"
        )


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """Options of the noise: its random source, the protection of its lowest bits, and correlation.

    The tails are the same under every option: see ``docs/noise.md``.

    Args:
        source: ``"chacha20"``: the keystream of a cipher, keyed by the candidate's secret, from
            which nothing can be predicted; ``"fast"``: the same, but on a GPU its own generator.
        floating_point: ``"plain"``; ``"grid"`` adds float64 noise to the sum and rounds the result
            to a grid of 2^-20 of the noise's scale, so that no bit below it is released;
            ``"four-draws"`` makes a Gaussian of four (Holohan and Braghin 2021, arXiv 2107.10138),
            so that a value has too many origins to be traced back.
        correlation: ``"none"``; ``"banded"`` lets the noise of a step cancel a part of that of earlier
            steps, in trainings whose noise and clipping are the same in every step
            (Choquette-Choo et al. 2023, arXiv 2306.08153).
        bands: Of banded noise, the number of steps that are correlated, from 1 (no correlation) to 256
            and at most one over the sampling rate; ``"auto"`` lets the plan of an arm choose it.

    Raises:
        InvalidInputError: If a word is not one of these, or bands are given without ``"banded"``.

    Example:
        >>> NoiseOptions(source="chacha20", floating_point="grid") == NoiseOptions.of("secure")
        True
        >>> NoiseOptions.of("secure").to_dict()
        {'source': 'chacha20', 'floating_point': 'grid'}
        >>> NoiseOptions(correlation="banded", bands=8).note
        'noise: fast, plain, correlated over 8 steps'
    """

    source: Source = "fast"
    floating_point: FloatingPoint = "plain"
    correlation: Correlation = "none"
    bands: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name, allowed in _WORDS.items():
            value = getattr(self, name)
            if value not in allowed:
                refuse_name(f"noise.{name}", value, allowed)
        if self.bands == "auto":
            return
        check_bands(self.bands)
        if not self.is_correlated:
            raise InvalidInputError(
                "noise.bands",
                self.bands,
                "is for correlated noise alone",
                "Write noise: {correlation: banded, bands: 8}, or leave bands out.",
            )

    @property
    def is_correlated(self) -> bool:
        """Whether noise is asked for that is correlated over steps."""
        return self.correlation == "banded"

    @property
    def independent(self) -> NoiseOptions:
        """The same options for a single release, which has no other to be correlated with."""
        return dataclasses.replace(self, correlation="none", bands="auto")

    def over(self, bands: int) -> NoiseOptions:
        """Return the options of a training whose noise is correlated over so many steps.

        Args:
            bands: The number of steps, from 1 (independent noise) to 256.

        Returns:
            The same source and treatment of the lowest bits, with that correlation.

        Raises:
            InvalidInputError: If the number is out of its range.

        Example:
            >>> NoiseOptions.of("secure").over(8).words
            'chacha20, grid, correlated over 8 steps'
        """
        if bands == 1:
            return self.independent
        return dataclasses.replace(self, correlation="banded", bands=bands)

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
        return f"noise: {self.words}"

    @property
    def words(self) -> str:
        """The options in words: source, floating point, and over how many steps noise is correlated."""
        words = f"{self.source}, {self.floating_point}"
        if not self.is_correlated:
            return words
        steps = "several" if self.bands == "auto" else self.bands
        return f"{words}, correlated over {steps} steps"

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON-ready data, with the correlation where there is one."""
        data = dataclasses.asdict(self)
        if not self.is_correlated:
            del data["correlation"]
            del data["bands"]
        return data


_WORDS = {
    "source": get_args(Source),
    "floating_point": get_args(FloatingPoint),
    "correlation": get_args(Correlation),
}

_PRESETS = {
    "plain": NoiseOptions(),
    "secure": NoiseOptions(source="chacha20", floating_point="grid"),
}
