"""Where noise comes from and how it is treated: what a plan says about it, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from privtune.errors import InvalidInputError

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
