"""The explicit instance of an event, part by part: what no valid bound may fall below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from privtune.accounting.algebra import Event, flatten
from privtune.accounting.lower import Outcomes, composition
from privtune.accounting.registry import entry

__all__ = ["instance_epsilon", "outcomes_of"]

_AIMS = (1e-2, 0.2)


@dataclass(frozen=True)
class _Instances:
    """Instances that cost much in one direction at one δ.

    Args:
        asked: The δ of the question.
        delta: The δ at which runs are scored: in company, what happens more often counts more.
        flip: Whether the record is added; else it is removed.
        shuffle: Whether outcomes are shuffled for the δ at which runs are scored. That costs less
            at other δ, and so may cost less in company.
    """

    asked: float
    delta: float
    flip: bool
    shuffle: bool = True

    def of(self, event: Event) -> Outcomes:
        return outcomes_of(event) if _is_fixed(event) else self.composed(event)

    def composed(self, event: Event) -> Outcomes:
        return composition(
            [(entry(part).instance(part, self), count) for part, count in flatten(event).items()]
        )

    def cost(self, outcomes: Outcomes) -> float:
        return (outcomes.flipped() if self.flip else outcomes).epsilon(self.asked)

    def dearest(self, events: Sequence[Event]) -> Outcomes:
        return max((self.of(event) for event in dict.fromkeys(events)), key=self.cost)

    def chosen(self, event: Event, choose: Callable[[Outcomes], Outcomes]) -> Outcomes:
        base = self.of(event)
        return choose(base.flipped()).flipped() if self.flip else choose(base)


def _is_fixed(event: Event) -> bool:
    return entry(event).one_instance and all(map(_is_fixed, event.children()))


@lru_cache(maxsize=64)
def outcomes_of(event: Event) -> Outcomes:
    """Return the instance of an event that is the same for every question: one of releases alone."""
    return _Instances(1.0, 1.0, flip=False).composed(event)


@lru_cache(maxsize=1024)
def instance_epsilon(event: Event, delta: float) -> float:
    """Return ε of an explicit instance at δ, the worse direction, at most 700; rounded down."""
    with np.errstate(all="ignore"):
        chooses = _chooses(event)
        found = [
            _Instances(delta, aim, flip, shuffle)
            for aim in ((delta, *_AIMS) if chooses else (delta,))
            for flip in (False, True)
            for shuffle in ((True, False) if chooses else (True,))
        ]
        try:
            return max(instances.cost(instances.of(event)) for instances in found)
        except ArithmeticError:
            return 0.0  # numbers that leave their range say nothing


def _chooses(event: Event) -> bool:
    return entry(event).choice(event) is not None or any(map(_chooses, event.children()))
