"""Public schedules: of the learning rate, one factor a step, and of the average that is released.

Both are functions of the step's number alone, so they cost nothing, whatever the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from privtune.errors import InvalidInputError
from privtune.numbers import is_number
from privtune.training.methods._base import check_choice, check_fraction, check_nonnegative

if TYPE_CHECKING:
    from privtune.training.mechanism.schedule import Schedule
    from privtune.training.methods._base import Candidate

SEARCHED = ("schedule", "warmup")
"""What a candidate may say of its schedule: the type, and the share of its steps to warm up in."""

AVERAGES: Mapping[str, str] = {
    "last": "the last iterate",
    "tail": "the average of the last half of the iterates",
    "ema": "an exponential moving average of the iterates",
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
    """Factors on the learning rate: a linear warm-up, then a fall of some shape.

    Args:
        type: ``"constant"``; ``"linear"`` and ``"cosine"`` fall to ``end`` over the steps that are
            left; ``"step"`` multiplies by ``factor`` whenever a share ``every`` of them is done;
            ``"decay"`` divides by ``1 + decay * k`` in the k-th epoch of them, k from 1: equation 5.1.
        warmup: Share of the steps in [0, 1) over which the rate rises from nothing.
        start: Share of the steps in [0, 1) after which it falls; never before it is warm.
        end: Factor that ``"linear"`` and ``"cosine"`` reach after the last step, at least 0.
        every: Share of the falling steps, above 0.
        factor: What ``"step"`` multiplies by, at least 0.
        decay: What ``"decay"`` adds an epoch, at least 0.

    Raises:
        InvalidInputError: If a field is out of its range.

    References:
        Loshchilov & Hutter 2017, arXiv 1608.03983 (cosine); Koskela & Honkela 2020, arXiv
        1809.03832, equation 5.1 (decay).

    Example:
        >>> from privtune.training.mechanism.schedule import Schedule
        >>> schedule = Schedule(records=1000, sample_rate=0.1, steps=5)
        >>> RateSchedule.of("linear").factors(schedule)
        (1.0, 0.8, 0.6, 0.4, 0.19999999999999996)
        >>> RateSchedule.of({"type": "step", "warmup": 0.4, "every": 0.5}).factors(schedule)
        (0.5, 1.0, 1.0, 1.0, 0.1)
        >>> RateSchedule.of("cosin")
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: schedule.type = 'cosin': must be one of constant, ...
    """

    type: str = "constant"
    warmup: float = 0.0
    start: float = 0.0
    end: float = 0.0
    every: float = 0.3
    factor: float = 0.1
    decay: float = 0.1

    def __post_init__(self) -> None:
        check_fraction("schedule.warmup", self.warmup)
        check_fraction("schedule.start", self.start)
        for name in ("end", "factor", "decay"):
            check_nonnegative(f"schedule.{name}", getattr(self, name))
        if not (is_number(self.every) and self.every > 0.0):
            raise InvalidInputError("schedule.every", self.every, "must be a number above 0")

    @classmethod
    def of(cls, value: object, **given: object) -> RateSchedule:
        """Return the schedule that a spec, or a candidate, describes.

        Args:
            value: A type, or a mapping of ``type`` and what the type takes.
            **given: Fields that take the place of the value's.

        Returns:
            The schedule.

        Raises:
            InvalidInputError: Naming what is unknown, of no use to the type, or no number.
        """
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
            if isinstance(entry, bool) or not isinstance(entry, int | float):
                raise InvalidInputError(f"schedule.{name}", entry, "must be a number")
        return cls(**said)

    def factors(self, schedule: Schedule) -> tuple[float, ...]:
        """Return the factor of every step.

        Args:
            schedule: How many steps there are, and how much of an epoch each is.

        Returns:
            ``schedule.steps`` of them, in [0, 1] but for an ``end`` or ``factor`` above 1.
        """
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
    """Return ``1 / (1 + decay * (k - 50))``, equation 5.1 of Koskela & Honkela 2020: epoch k > 50.

    Args:
        epochs: Epochs that ended since the fall began; the epoch under way counts from 1.
        decay: What an epoch adds, at least 0; 0.1 in the paper.

    Example:
        >>> [round(epoch_decay(epochs, 0.1), 4) for epochs in (0.0, 0.99, 1.0, 49.0)]
        [0.9091, 0.9091, 0.8333, 0.1667]
    """
    # Sums of steps times a rate fall a little short of whole epochs.
    return 1.0 / (1.0 + decay * (1 + int(epochs + 1e-9)))


@dataclass(frozen=True)
class Scheduled:
    """A method whose learning rate follows a public schedule, and of whose iterates one average is released.

    Args:
        schedule: A type, or a mapping of ``type`` and what it takes: see ``RateSchedule``.
        average: What is scored and released: one of :data:`AVERAGES`, see :func:`average_weights`.
            It is a function of what each step releases, and costs nothing.
    """

    schedule: Mapping[str, Any] | str = field(default="constant", kw_only=True)
    average: str = field(default="last", kw_only=True)

    def __post_init__(self) -> None:
        RateSchedule.of(self.schedule)
        check_choice("average", self.average, tuple(AVERAGES))


def average_weights(average: str, steps: int) -> tuple[float, ...]:
    """Return the weight w of the iterate x of every step: the average a becomes ``a + w (x - a)``.

    Args:
        average: ``"last"``: the iterate itself. ``"tail"``: the mean of the last half of the steps, one
            more of an odd number; before that the iterate. ``"ema"``: ``1 - w`` is ``min(0.9999,
            (1 + t) / (10 + t))`` in step t, from 0, and the first iterate is where it begins.
        steps: Of the training, at least 1.

    Returns:
        ``steps`` weights in (0, 1].

    References:
        Polyak & Juditsky 1992 and Rakhlin, Shamir & Sridharan 2012, arXiv 1109.5647 (the mean of the
        last half); De et al. 2022, arXiv 2204.13650 (moving averages under differential privacy; their
        code, jax_privacy's ``averaging.ema``, has this decay and warm-up).

    Example:
        >>> average_weights("tail", 5)
        (1.0, 1.0, 1.0, 0.5, 0.3333333333333333)
        >>> [round(weight, 3) for weight in average_weights("ema", 4)]
        [1.0, 0.818, 0.75, 0.692]
    """
    if average == "tail":
        return tuple(1.0 / max(1, step + 1 - steps // 2) for step in range(steps))
    if average == "ema":
        decays = (min(_EMA_DECAY, (1 + step) / (10 + step)) for step in range(1, steps))
        return (1.0, *(1.0 - decay for decay in decays))
    return (1.0,) * steps


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse what a candidate says of its schedule, if it says anything that is none.

    Args:
        given: The candidate's hyperparameters; others than :data:`SEARCHED` are left alone.
    """
    _of_candidate("constant", given)


def check_searched(name: str, law: object) -> None:
    """Refuse a law of which some value is no part of a schedule.

    Args:
        name: One of :data:`SEARCHED`.
        law: Choices, or numbers between two bounds.

    Raises:
        InvalidInputError: Naming the value.
    """
    ends = (getattr(law, "low", math.inf), getattr(law, "high", math.inf))
    for value in getattr(law, "choices", ends):
        check_given({name: value})


def _of_candidate(value: object, candidate: Mapping[str, Any]) -> RateSchedule:
    value = candidate.get("schedule", value)
    given = {"warmup": candidate["warmup"]} if "warmup" in candidate else {}
    return RateSchedule.of(value, **given)


def rate_factors(method: object, candidate: Candidate, schedule: Schedule) -> tuple[float, ...]:
    """Return the factor on a candidate's learning rate in every step of its training.

    Args:
        method: The training method; one without a schedule keeps the rate as it is.
        candidate: May say :data:`SEARCHED`, which then takes the place of the method's.
        schedule: The candidate's own, with its number of steps.

    Raises:
        InvalidInputError: If what the candidate says is no schedule.
    """
    own = getattr(method, "schedule", "constant")
    return _of_candidate(own, candidate).factors(schedule)
