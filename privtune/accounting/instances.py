"""The explicit instance of an event, part by part: what no valid bound may fall below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from privtune.accounting.adaptive import Stages
from privtune.accounting.algebra import Event, flatten
from privtune.accounting.lower import Outcomes, composition
from privtune.accounting.registry import entry

__all__ = ["instance_epsilon", "outcomes_of"]

_AIMS = (1e-2, 0.2)
_SPREAD = np.geomspace(0.97, 1e-5, 24)  # δ at which runs are scored where decisions come later
_STAGES = 12  # choices at most that hang on what was released before


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
            fixed = max(instances.cost(instances.of(event)) for instances in found)
            return max(fixed, _adaptive_epsilon(event, delta, fixed))
        except ArithmeticError:
            return 0.0  # numbers that leave their range say nothing


def _adaptive_epsilon(event: Event, delta: float, start: float) -> float:
    """Return ε of an instance whose choices hang on what came before, 0 where there is none of them."""
    parts = flatten(event)
    chosen = {part: count for part, count in parts.items() if not _is_fixed(part)}
    if not chosen or sum(parts.values()) < 2 or sum(chosen.values()) > _STAGES:
        return 0.0
    fixed = composition([(outcomes_of(part), parts[part]) for part in parts if part not in chosen])
    choices = [stage for part in chosen for stage in [_instances_of(part, delta)] * chosen[part]]
    flipped = {id(stage): [outcomes.flipped() for outcomes in stage] for stage in choices}
    back = Stages(fixed.flipped(), [flipped[id(stage)] for stage in choices])
    return max(Stages(fixed, choices).epsilon(delta, start), back.epsilon(delta, start))


def _instances_of(part: Event, delta: float) -> list[Outcomes]:
    """Return instances of a choice for many aims, in both directions."""
    simple = all(map(_is_fixed, part.children()))
    aims = _SPREAD if simple else (delta, *_AIMS)  # what is nested is scored anew for each
    return [
        entry(part).instance(part, _Instances(delta, float(aim), flip, shuffle))
        for aim in aims
        for flip in (False, True)
        for shuffle in (True, False)
    ]


def _chooses(event: Event) -> bool:
    return entry(event).choice(event) is not None or any(map(_chooses, event.children()))
