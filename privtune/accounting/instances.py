"""The explicit instance of an event, part by part: no valid bound falls below what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.events import Event, flatten
from privtune.accounting.lower import Outcomes, Scores, composition
from privtune.accounting.registry import entry

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_POINTS = 1500  # of the lattice of all losses together, about
_COUNTS = 1e-16  # mass of what has a place of its own on it
_ROUNDS = 4


@dataclass(frozen=True, eq=False)
class _Placed:
    """Outcomes of a release by their rounded losses; `shown`: the P-mass that shows the record for sure."""

    lowest: int
    p: Floats
    q: Floats
    shown: float

    @classmethod
    def of(cls, outcomes: Outcomes, step: float) -> _Placed:
        """Round the losses of outcomes to the lattice; outcomes that only Q has add nothing to δ."""
        finite = np.isfinite(outcomes.losses)
        losses = np.clip(outcomes.losses[finite], *_range(outcomes))
        places = np.round(losses / step).astype(np.int64)
        lowest = int(places.min(initial=0))
        masses = [
            np.bincount(places - lowest, of[finite], 1 - lowest).astype(np.float64)
            for of in (outcomes.p, outcomes.q)
        ]
        shown = float(outcomes.p[outcomes.losses == np.inf].sum())
        return cls(lowest, masses[0], masses[1], shown)

    @property
    def highest(self) -> int:
        return self.lowest + self.p.size - 1


def _range(outcomes: Outcomes) -> tuple[float, float]:
    """Return the lowest and the highest loss that happen with any noticeable probability."""
    losses = outcomes.losses
    counts = np.isfinite(losses) & (np.maximum(outcomes.p, outcomes.q) > _COUNTS)
    ends = losses[counts] if counts.any() else np.zeros(1)
    return float(ends.min()), float(ends.max())


@dataclass(frozen=True, eq=False)
class Stages:
    """Releases one after another: the first are fixed, each further one is one of several instances."""

    fixed: Outcomes
    choices: Sequence[Sequence[Outcomes]]

    def epsilon(self, delta: float, start: float) -> float:
        """Return the largest ε found at which the best decisions have a δ above the target.

        Args:
            delta: The target.
            start: An ε to decide for at first.
        """
        found, point = 0.0, start
        for _ in range(_ROUNDS):
            cost = self.decided(point).epsilon(delta)
            settled = cost <= found * (1.0 + 1e-4)
            found, point = max(found, cost), cost
            if settled:
                break
        return found

    def decided(self, epsilon: float) -> Outcomes:
        """Return the outcomes of all stages under the decisions that are best at this ε, rounding aside."""
        p, q, shown = self._first.p, self._first.q, self._first.shown
        for stage, decision in enumerate(self._decisions(epsilon)):
            p, q, more = self._after(stage, decision, p, q)
            shown += more
        error = self.fixed.error + sum(max(o.error for o in stage) for stage in self.choices)
        return Outcomes(np.append(p, shown), np.append(q, 0.0), error)

    @cached_property
    def _step(self) -> float:
        """The step of the lattice of losses, so that all of them together have so many places."""
        spans = {}
        for stage in self._different.values():
            ends = [_range(outcomes) for outcomes in stage]
            spans[id(stage)] = max(high for _, high in ends) - min(low for low, _ in ends)
        low, high = _range(self.fixed)
        return max((high - low + sum(spans[id(each)] for each in self.choices)) / _POINTS, 1e-9)

    @cached_property
    def _different(self) -> dict[int, Sequence[Outcomes]]:
        """The lists of instances, each once: stages of equal events share one."""
        return {id(stage): stage for stage in self.choices}

    @cached_property
    def _first(self) -> _Placed:
        return _Placed.of(self.fixed, self._step)

    @cached_property
    def _placed(self) -> list[list[_Placed]]:
        placed = {key: [_Placed.of(o, self._step) for o in s] for key, s in self._different.items()}
        return [placed[id(stage)] for stage in self.choices]

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        """The lowest and the highest place before each stage, and after the last."""
        ends = [(self._first.lowest, self._first.highest)]
        for stage in self._placed:
            low, high = min(one.lowest for one in stage), max(one.highest for one in stage)
            ends.append((ends[-1][0] + low, ends[-1][1] + high))
        return ends

    def _decisions(self, epsilon: float) -> list[Indices]:
        """Return which instance is best at each place before each stage."""
        low, high = self._ends[-1]
        # Of an outcome of P-mass 1 and loss ℓ, δ(ε) is (1 - e^(ε-ℓ))₊.
        left = epsilon - np.arange(low, high + 1) * self._step
        value = -np.expm1(np.minimum(left, 0.0))
        found = []
        for stage in reversed(range(len(self.choices))):
            low, high = self._ends[stage]
            values = [
                np.convolve(self._window(stage, one, value), one.p[::-1], "valid") + one.shown
                for one in self._placed[stage]
            ]
            found.append(np.argmax(values, axis=0))
            value = np.max(values, axis=0)
        return found[::-1]

    def _window(self, stage: int, one: _Placed, value: Floats) -> Floats:
        """Return the values at the lattice places that an instance's outcomes lead to."""
        low, high = self._ends[stage]
        start = low + one.lowest - self._ends[stage + 1][0]
        return value[start : start + high - low + one.p.size]

    def _after(
        self, stage: int, decision: Indices, p: Floats, q: Floats
    ) -> tuple[Floats, Floats, float]:
        """Return the masses after one more stage, and the P-mass on which it shows the record for sure."""
        low, high = self._ends[stage + 1]
        shown = 0.0
        after = np.zeros(high - low + 1), np.zeros(high - low + 1)
        for number in np.unique(decision):
            one, here = self._placed[stage][number], decision == number
            shown += one.shown * float(p[here].sum())
            first, last = np.flatnonzero(here)[[0, -1]]
            start = self._ends[stage][0] + int(first) + one.lowest - low
            for total, masses, more in ((after[0], p, one.p), (after[1], q, one.q)):
                led = np.convolve(np.where(here, masses, 0.0)[first : last + 1], more)
                total[start : start + led.size] += led
        return *after, shown


_COARSE, _FINER = 6, 3  # δ tried in proportion, and how often the gaps around the best are halved
_FAR = 0.9  # of the other direction's ε: below that a direction is not looked at more closely
_NESTED = np.geomspace(0.97, 1e-5, 10)
_SPREAD = np.geomspace(0.97, 1e-5, 18)  # δ at which runs are scored where decisions come later
_STAGES = 12  # choices at most that hang on what was released before


@dataclass(frozen=True)
class _Instances:
    """Candidate instances of one choice: each costs much in one direction at one δ."""

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
    """Return the largest ε found over the δ for which runs are scored and parts compared."""
    # Which δ is best depends on what follows the choice: a few are tried, then those around the best.
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
    """Return ε of an instance whose choices depend on earlier outcomes; 0 where nothing is chosen."""
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
