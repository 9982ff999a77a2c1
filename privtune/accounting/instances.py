"""The explicit instance of an event, part by part: what no valid bound may fall below."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from privtune.accounting.adaptive import Stages
from privtune.accounting.algebra import Event, flatten
from privtune.accounting.lower import Outcomes, Scores, composition
from privtune.accounting.registry import entry

_COARSE, _FINER = 6, 3  # δ tried in proportion, and how often the gaps around the best are halved
_FAR = 0.9  # of the other direction's ε: below that a direction is not looked at more closely
_NESTED = np.geomspace(0.97, 1e-5, 10)
_SPREAD = np.geomspace(0.97, 1e-5, 18)  # δ at which runs are scored where decisions come later
_STAGES = 12  # choices at most that hang on what was released before


@dataclass(frozen=True)
class _Instances:
    """Instances that cost much in one direction at one δ.

    Args:
        asked: The δ of the question.
        delta: The δ at which runs are scored: in company, what happens more often counts more.
        flip: Whether the record is added; else it is removed.
        scores: How runs are scored.
    """

    asked: float
    delta: float
    flip: bool
    scores: Scores = Scores.SHUFFLED

    def of(self, event: Event) -> Outcomes:
        return outcomes_of(event, self.asked) if _is_fixed(event) else self.composed(event)

    def composed(self, event: Event) -> Outcomes:
        parts = flatten(event).items()
        return composition(
            [(entry(part).instance(part, self), count) for part, count in parts], self.asked
        )

    def cost(self, event: Event) -> float:
        return self._turned(self.of(event)).epsilon(self.asked)

    def _turned(self, outcomes: Outcomes) -> Outcomes:
        return outcomes.flipped() if self.flip else outcomes

    def dearest(self, events: Sequence[Event]) -> Outcomes:
        found = (self.of(event) for event in dict.fromkeys(events))
        return max(found, key=lambda one: self._turned(one).epsilon(self.delta))

    def chosen(self, event: Event, choose: Callable[[Outcomes], Outcomes]) -> Outcomes:
        base = self.of(event)
        return choose(base.flipped()).flipped() if self.flip else choose(base)


def _is_fixed(event: Event) -> bool:
    return entry(event).one_instance and all(map(_is_fixed, event.children()))


@lru_cache(maxsize=64)
def outcomes_of(event: Event, delta: float) -> Outcomes:
    """Return the explicit instance of an event without choices: it is the same in both directions."""
    return _Instances(delta, delta, flip=False).composed(event)


@lru_cache(maxsize=1024)
def instance_epsilon(event: Event, delta: float) -> float:
    """Return ε of an explicit instance at δ, the worse direction, at most 700; rounded down."""
    with np.errstate(all="ignore"):
        try:
            if _is_fixed(event):
                return max(_Instances(delta, delta, flip).cost(event) for flip in (False, True))
            found = _best_aim(event, delta, False, 0.0)
            found = max(found, _best_aim(event, delta, True, found))
            return max(found, _adaptive_epsilon(event, delta, found))
        except ArithmeticError:
            return 0.0  # numbers that leave their range say nothing


def _best_aim(event: Event, delta: float, flip: bool, other: float) -> float:
    """Return the largest ε found over the δ for which runs are scored and parts compared.

    Which δ is best depends on what follows the choice. A few are tried, then those between the best and
    its neighbours. A direction whose few are far below the other direction's ε is left.
    """
    found = 0.0
    for scores in (Scores.RANKED, Scores.SPREAD):
        aims = list(np.geomspace(0.97, min(delta, 0.9), _COARSE))
        costs = {aim: _Instances(delta, aim, flip, scores).cost(event) for aim in aims}
        if max(costs.values()) < _FAR * other:
            return found
        for _ in range(_FINER):
            place = aims.index(max(aims, key=lambda aim: costs[aim]))
            for first, second in ((place, place + 1), (place - 1, place)):
                if first >= 0 and second < len(aims):
                    middle = math.sqrt(aims[first] * aims[second])
                    costs[middle] = _Instances(delta, middle, flip, scores).cost(event)
            aims = sorted(costs, reverse=True)
        found = max(found, *costs.values())
        if scores is Scores.RANKED:
            best = {*sorted(aims, key=lambda aim: costs[aim])[-2:], delta}
            found = max(found, *(_Instances(delta, aim, flip).cost(event) for aim in best))
    return found


def _adaptive_epsilon(event: Event, delta: float, start: float) -> float:
    """Return ε of an instance whose choices hang on what came before, 0 where there is none of them."""
    parts = flatten(event)
    chosen = {part: count for part, count in parts.items() if not _is_fixed(part)}
    if not chosen or sum(parts.values()) < 2 or sum(chosen.values()) > _STAGES:
        return 0.0
    others = [(outcomes_of(part, delta), parts[part]) for part in parts if part not in chosen]
    fixed = composition(others, delta)
    choices = [stage for part in chosen for stage in [_instances_of(part, delta)] * chosen[part]]
    flipped = {id(stage): [outcomes.flipped() for outcomes in stage] for stage in choices}
    back = Stages(fixed.flipped(), [flipped[id(stage)] for stage in choices])
    return max(Stages(fixed, choices).epsilon(delta, start), back.epsilon(delta, start))


def _instances_of(part: Event, delta: float) -> list[Outcomes]:
    """Return instances of a choice for many aims, in both directions."""
    simple = all(map(_is_fixed, part.children()))
    aims = _SPREAD if simple else _NESTED  # what is nested is scored anew for each
    return [
        entry(part).instance(part, _Instances(delta, float(aim), flip, scores))
        for aim in aims
        for flip in (False, True)
        for scores in (Scores if simple else (Scores.RANKED, Scores.SPREAD))
    ]
