"""The method of a training by another library, known only by its declared privacy event."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from privtune.accounting import Adjacency, Event
    from privtune.training.mechanism.schedule import Schedule


@dataclass(frozen=True)
class DeclaredMethod:
    """The method of a declared mechanism in plans; specs have no name for it."""

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
        """Return the method with the least noise that meets a target, or unchanged if its noise is fixed."""
        from privtune.accounting import calibrate

        if not self.calibrates:
            return self
        unit = replace(self, times_noise_multiplier=1.0)
        target = {"epsilon": epsilon, "delta": delta}
        return unit.scaled(calibrate(unit.event(None), adjacency=adjacency, **target).scale)

    def scaled(self, factor: float) -> Self:
        """Return the method with the noise of its event times ``factor``, unless its noise is fixed."""
        return replace(self, times_noise_multiplier=self.times_noise_multiplier * factor)

    def event(self, schedule: Schedule | None) -> Event:
        """Return the declared event with its noise multiplied; ``schedule`` is not read."""
        from privtune.accounting import scale_noise

        event = _read(self.declared)
        factor = self.times_noise_multiplier
        if factor == 1.0:
            return event
        return scale_noise(event, factor)

    def gradient_evaluations(self, schedule: Schedule) -> float:
        """Return the expected number of per-sample gradients, one for each record of a sample."""
        return schedule.expected_gradient_evaluations

    def report(self, state: Any) -> dict[str, Any]:
        """Return an empty report, since another library takes the steps."""
        return {}


@lru_cache(maxsize=64)
def _read(text: str) -> Event:
    from privtune.accounting import event_from_json

    return event_from_json(text)
