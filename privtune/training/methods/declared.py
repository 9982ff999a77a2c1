"""A training that another library does: its event is declared, and nothing here runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from privtune.accounting import Adjacency, Event
    from privtune.training.mechanism.schedule import Schedule


@dataclass(frozen=True)
class Declared:
    """The method of a declared mechanism, as plans hold it: it has no name in specs."""

    declared: str
    declared_by: str
    calibrates: bool = True
    times_noise_multiplier: float = 1.0

    name: ClassVar[str] = "declared"
    summary: ClassVar[str] = "a training by another library, whose event is declared"
    adapts: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[tuple[str, ...]] = ()
    releases: ClassVar[str] = "what its event says"

    def __post_init__(self) -> None:
        if not self.calibrates:
            object.__setattr__(self, "times_noise_multiplier", 1.0)

    def calibrated(self, *, epsilon: float, delta: float, adjacency: Adjacency) -> Self:
        """Return the method with the least noise that keeps one training at a target, if it may change."""
        from privtune.accounting import calibrate

        if not self.calibrates:
            return self
        unit = replace(self, times_noise_multiplier=1.0)
        target = {"epsilon": epsilon, "delta": delta}
        return unit.scaled(calibrate(unit.event(None), adjacency=adjacency, **target).scale)

    def scaled(self, factor: float) -> Self:
        """Return the method with all noise of its event times ``factor``, if it may change."""
        return replace(self, times_noise_multiplier=self.times_noise_multiplier * factor)

    def event(self, schedule: Schedule | None) -> Event:
        """Return the declared event with its noise multiplied; the schedule is part of it."""
        from privtune.accounting import scale_noise

        event = _read(self.declared)
        factor = self.times_noise_multiplier
        return event if factor == 1.0 else scale_noise(event, factor)

    def gradient_evaluations(self, schedule: Schedule) -> float:
        """Return one per-sample gradient for each record of a sample."""
        return schedule.expected_gradient_evaluations

    def report(self, state: Any) -> dict[str, Any]:
        """Return nothing: no step is seen."""
        return {}


@lru_cache(maxsize=64)
def _read(text: str) -> Event:
    from privtune.accounting import event_from_json

    return event_from_json(text)
