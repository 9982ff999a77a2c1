"""Public schedules of the learning rate, and the weights of averaged iterates.

Both are functions of the step's number alone, so they cost nothing, whatever the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from privtune.accounting.checks import check_number
from privtune.names import refuse_fields, refuse_name

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


_NOT_NEGATIVE = {"at_least": 0.0}
_SHARE = {"at_least": 0.0, "below": 1.0}  # of the steps
_BOUNDS: Mapping[str, dict[str, float]] = {
    "warmup": _SHARE,
    "start": _SHARE,
    "every": {"above": 0.0},
}


@dataclass(frozen=True, kw_only=True)
class RateSchedule:
    """A schedule of factors on the learning rate: a linear warm-up, then a decrease of some shape."""

    type: str = "constant"
    warmup: float = 0.0
    start: float = 0.0
    end: float = 0.0
    every: float = 0.3
    factor: float = 0.1
    decay: float = 0.1

    @classmethod
    def of(cls, value: object, **given: object) -> RateSchedule:
        """Return the schedule from a type's name or a mapping of settings; refuse unknown settings."""
        settings: dict[str, Any] = {"type": value}
        if isinstance(value, Mapping):
            settings = dict(value)
        settings.update(given)
        kind = settings.setdefault("type", "constant")
        if not isinstance(kind, str) or kind not in _TAKES:
            refuse_name("schedule.type", kind, _TAKES)
        takes = ("warmup", *_TAKES[kind])
        if unknown := set(settings) - {"type", *takes}:
            refuse_fields("schedule", unknown, takes, kind)
        for name, entry in settings.items():
            if name == "type":
                continue
            bounds = _BOUNDS.get(name, _NOT_NEGATIVE)
            check_number(f"schedule.{name}", entry, **bounds)
        return cls(**settings)

    def factors(self, schedule: Schedule) -> tuple[float, ...]:
        """Return the factor on the learning rate in every step, in [0, 1] unless a setting exceeds 1."""
        steps = schedule.steps
        warm = self.warmup * steps
        begin = max(warm, self.start * steps)
        falling_steps = steps - begin
        factors = []
        for step in range(steps):
            factor = 1.0
            if step >= begin:
                factor = self._fall(step - begin, falling_steps, schedule.sample_rate)
            if warm:
                factor *= min(1.0, (step + 1) / warm)
            factors.append(factor)
        return tuple(factors)

    def _fall(self, step: float, steps: float, rate: float) -> float:
        """Return the factor after ``step`` of the ``steps`` in which the rate decreases."""
        progress = step / steps
        if self.type == "linear":
            return 1.0 - (1.0 - self.end) * progress
        if self.type == "cosine":
            height = 1.0 + math.cos(math.pi * progress)  # from 2 to 0
            return self.end + (1.0 - self.end) * height / 2.0
        if self.type == "step":
            return float(self.factor ** int(progress / self.every))
        if self.type == "decay":
            return epoch_decay(step * rate, self.decay)
        return 1.0


def epoch_decay(epochs: float, decay: float) -> float:
    """Return the factor ``1 / (1 + decay * k)`` in the k-th epoch (Koskela & Honkela 2020, 5.1)."""
    # Sums of steps times a rate fall a little short of whole epochs.
    k = 1 + int(epochs + 1e-9)
    return 1.0 / (1.0 + decay * k)


def average_weights(average: str, steps: int) -> tuple[float, ...]:
    """Return the weight w of each step's iterate x, by which the average a becomes ``a + w (x - a)``."""
    if average == "tail":
        return tuple(1.0 / max(1, step + 1 - steps // 2) for step in range(steps))
    if average == "ema":
        decays = (min(_EMA_DECAY, (1 + step) / (10 + step)) for step in range(1, steps))
        return (1.0, *(1.0 - decay for decay in decays))
    return (1.0,) * steps


def check_given(settings: Mapping[str, Any]) -> None:
    """Check a candidate's settings of the rate's schedule; refuse invalid ones."""
    _of_candidate("constant", settings)


def check_searched(name: str, law: object) -> None:
    """Check that every choice or end of a searched law, of a name in :data:`SEARCHED`, is a valid setting."""
    ends = (getattr(law, "low", math.inf), getattr(law, "high", math.inf))
    for value in getattr(law, "choices", ends):
        check_given({name: value})


def _of_candidate(value: object, candidate: Mapping[str, Any]) -> RateSchedule:
    value = candidate.get("schedule", value)
    settings = {}
    if "warmup" in candidate:
        settings["warmup"] = candidate["warmup"]
    return RateSchedule.of(value, **settings)


def rate_factors(
    method: object,
    candidate: Mapping[str, Any],
    schedule: Schedule,
) -> tuple[float, ...]:
    """Return the factors on a candidate's learning rate, one for each step of its training."""
    setting = getattr(method, "schedule", "constant")
    return _of_candidate(setting, candidate).factors(schedule)
