"""Public schedules of the learning rate, and of the average of the iterates that is released.

Both are functions of the step's number alone, so they cost nothing, whatever the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privtune.accounting._checks import check_number
from privtune.errors import InvalidInputError

if TYPE_CHECKING:
    from privtune.training.mechanism.schedule import Schedule

SEARCHED = ("schedule", "warmup")
"""What a candidate may say of its schedule: the type, and the share of its steps to warm up in."""

AVERAGES: Mapping[str, str] = {
    "last": "the model after the last step",
    "tail": "the average of the models after each step of the last half",
    "ema": "an exponential moving average of the models after each step",
}
"""What is scored and released of a training, in words."""

_EMA_DECAY = 0.9999

_TAKES: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("start", "end"),
    "cosine": ("start", "end"),
    "step": ("start", "every", "factor"),
    "decay": ("start", "decay"),
}


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """Factors on the learning rate: a linear warm-up, then a fall of some shape."""

    type: str = "constant"
    warmup: float = 0.0
    start: float = 0.0
    end: float = 0.0
    every: float = 0.3
    factor: float = 0.1
    decay: float = 0.1

    @classmethod
    def of(cls, value: object, **given: object) -> RateSchedule:
        """Return the schedule that a spec or a candidate describes: a type, or a mapping with one."""
        said: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"type": value}
        said.update(given)
        kind = said.setdefault("type", "constant")
        if not isinstance(kind, str) or kind not in _TAKES:
            raise InvalidInputError("schedule.type", kind, f"must be one of {', '.join(_TAKES)}")
        takes = ("warmup", *_TAKES[kind])
        for name, entry in said.items():
            if name == "type":
                continue
            if name not in takes:
                allowed = ", ".join(takes)
                raise InvalidInputError(f"schedule.{name}", entry, f"{kind} takes {allowed} alone")
            bounds = {"at_least": 0.0, "below": 1.0} if name in ("warmup", "start") else {}
            bounds = bounds or ({"above": 0.0} if name == "every" else {"at_least": 0.0})
            check_number(f"schedule.{name}", entry, **bounds)
        return cls(**said)

    def factors(self, schedule: Schedule) -> tuple[float, ...]:
        """Return the factor of every step: in [0, 1] but for an ``end`` or ``factor`` above 1."""
        warm = self.warmup * schedule.steps
        begin = max(warm, self.start * schedule.steps)
        rate = schedule.sample_rate
        return tuple(
            (min(1.0, (step + 1) / warm) if warm else 1.0)
            * (1.0 if step < begin else self._fall(step - begin, schedule.steps - begin, rate))
            for step in range(schedule.steps)
        )

    def _fall(self, step: float, steps: float, rate: float) -> float:
        """Return the factor after ``step`` of the falling steps."""
        done = step / steps
        if self.type == "linear":
            return 1.0 - (1.0 - self.end) * done
        if self.type == "cosine":
            return self.end + (1.0 - self.end) * (1.0 + math.cos(math.pi * done)) / 2.0
        if self.type == "step":
            return float(self.factor ** int(done / self.every))
        if self.type == "decay":
            return epoch_decay(step * rate, self.decay)
        return 1.0


def epoch_decay(epochs: float, decay: float) -> float:
    """Return ``1 / (1 + decay * k)`` in the k-th epoch of the fall (Koskela & Honkela 2020, 5.1)."""
    # Sums of steps times a rate fall a little short of whole epochs.
    return 1.0 / (1.0 + decay * (1 + int(epochs + 1e-9)))


def average_weights(average: str, steps: int) -> tuple[float, ...]:
    """Return the weight w of the iterate x of every step: the average a becomes ``a + w (x - a)``."""
    if average == "tail":
        return tuple(1.0 / max(1, step + 1 - steps // 2) for step in range(steps))
    if average == "ema":
        decays = (min(_EMA_DECAY, (1 + step) / (10 + step)) for step in range(1, steps))
        return (1.0, *(1.0 - decay for decay in decays))
    return (1.0,) * steps


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse what a candidate says of its schedule, if it says anything that is none."""
    _of_candidate("constant", given)


def check_searched(name: str, law: object) -> None:
    """Refuse a law, of one of :data:`SEARCHED`, of which some value is no part of a schedule."""
    ends = (getattr(law, "low", math.inf), getattr(law, "high", math.inf))
    for value in getattr(law, "choices", ends):
        check_given({name: value})


def _of_candidate(value: object, candidate: Mapping[str, Any]) -> RateSchedule:
    value = candidate.get("schedule", value)
    given = {"warmup": candidate["warmup"]} if "warmup" in candidate else {}
    return RateSchedule.of(value, **given)


def rate_factors(
    method: object, candidate: Mapping[str, Any], schedule: Schedule
) -> tuple[float, ...]:
    """Return the factor on a candidate's learning rate in every step of its training."""
    own = getattr(method, "schedule", "constant")
    return _of_candidate(own, candidate).factors(schedule)
