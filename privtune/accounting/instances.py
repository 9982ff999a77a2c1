"""Explicit mechanisms that fit an event: what they cost is a lower bound on any valid ε."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.events import Event, flatten
from privtune.accounting.lower import Outcomes, Scores, composition
from privtune.accounting.registry import Instances, entry

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_POINTS = 1500  # of the lattice of all losses together, about
_COUNTS = 1e-16  # mass of what has a place of its own on it
_ROUNDS = 4


@dataclass(frozen=True, eq=False)
class _Lattice:
    """The masses of a release's outcomes, added up by privacy loss rounded to multiples of a step.

    Attributes:
        lowest: Number of the first lattice point.
        p: P-masses of consecutive points.
        q: Their Q-masses.
        certain: The P-mass that shows the record for sure.
    """

    lowest: int
    p: Floats
    q: Floats
    certain: float

    @classmethod
    def of(cls, outcomes: Outcomes, step: float) -> _Lattice:
        """Add up outcomes by rounded loss; leave out those of loss -∞, which add nothing to δ."""
        finite = np.isfinite(outcomes.losses)
        low, high = _range(outcomes)
        losses = np.clip(outcomes.losses[finite], low, high)
        multiples = np.round(losses / step)
        places = multiples.astype(np.int64)
        lowest = int(places.min(initial=0))
        places = places - lowest
        size = 1 - lowest  # at least up to no loss
        p = np.bincount(places, outcomes.p[finite], size)
        q = np.bincount(places, outcomes.q[finite], size)
        shows = outcomes.losses == np.inf
        certain = float(outcomes.p[shows].sum())
        return cls(lowest, p.astype(np.float64), q.astype(np.float64), certain)

    @property
    def highest(self) -> int:
        """The number of the last multiple of the step that some loss is rounded to."""
        return self.lowest + self.p.size - 1


def _range(outcomes: Outcomes) -> tuple[float, float]:
    """Return the lowest and the highest finite loss among outcomes with a mass above 1e-16."""
    losses = outcomes.losses
    happens = np.maximum(outcomes.p, outcomes.q) > _COUNTS
    counts = np.isfinite(losses) & happens
    if not counts.any():
        return 0.0, 0.0
    ends = losses[counts]
    return float(ends.min()), float(ends.max())


@dataclass(frozen=True, eq=False)
class Stages:
    """Fixed releases, then stages, each of which runs one of several mechanisms, chosen by earlier losses.

    Which instance runs is decided by the sum of the losses so far (README, 7, *Choices in company*).
    """

    fixed: Outcomes
    choices: Sequence[Sequence[Outcomes]]

    def epsilon(self, delta: float, start: float) -> float:
        """Return the largest ε found at which δ exceeds `delta`, if every stage runs its best mechanism.

        Args:
            delta: The target.
            start: An ε to decide for at first.
        """
        best = 0.0
        point = start
        for _ in range(_ROUNDS):
            cost = self.decided(point).epsilon(delta)
            settled = cost <= best * (1.0 + 1e-4)
            best = max(best, cost)
            point = cost
            if settled:
                break
        return best

    def decided(self, epsilon: float) -> Outcomes:
        """Return the outcomes of all stages, if each runs the mechanism that maximises δ at this ε."""
        p = self._first.p
        q = self._first.q
        certain = self._first.certain
        for stage, decision in enumerate(self._decisions(epsilon)):
            certain += self._certain_after(stage, decision, p)
            p, q = self._after(stage, decision, p, q)
        errors = []
        for stage_of_outcomes in self.choices:
            errors.append(max(outcomes.error for outcomes in stage_of_outcomes))
        error = self.fixed.error + sum(errors)
        return Outcomes(np.append(p, certain), np.append(q, 0.0), error)

    @cached_property
    def _step(self) -> float:
        """The step that losses are rounded to: all stages together span about 1,500 steps."""
        spans = {}
        for stage in self._different.values():
            ends = [_range(outcomes) for outcomes in stage]
            highest = max(high for _, high in ends)
            lowest = min(low for low, _ in ends)
            spans[id(stage)] = highest - lowest
        low, high = _range(self.fixed)
        total = high - low
        total += sum(spans[id(stage)] for stage in self.choices)
        return max(total / _POINTS, 1e-9)

    @cached_property
    def _different(self) -> dict[int, Sequence[Outcomes]]:
        """The distinct lists of mechanisms that stages run one of, by `id`; equal stages share a list."""
        return {id(stage): stage for stage in self.choices}

    @cached_property
    def _first(self) -> _Lattice:
        """The outcomes of the fixed releases, added up by rounded loss."""
        return _Lattice.of(self.fixed, self._step)

    @cached_property
    def _instances(self) -> list[list[_Lattice]]:
        """The outcomes of each mechanism of each stage, added up by rounded loss."""
        lattices = {}
        for key, stage in self._different.items():
            lattices[key] = [_Lattice.of(outcomes, self._step) for outcomes in stage]
        return [lattices[id(stage)] for stage in self.choices]

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        """The lowest and highest rounded sum of losses before each stage and after the last."""
        low = self._first.lowest
        high = self._first.highest
        ends = [(low, high)]
        for stage in self._instances:
            low += min(one.lowest for one in stage)
            high += max(one.highest for one in stage)
            ends.append((low, high))
        return ends

    def _decisions(self, epsilon: float) -> list[Indices]:
        """Return, for each stage, the number of the best mechanism at each rounded sum of earlier losses."""
        low, high = self._ends[-1]
        # Of an outcome of P-mass 1 and loss ℓ, δ(ε) is (1 - e^(ε-ℓ))₊.
        losses = np.arange(low, high + 1) * self._step
        missing = epsilon - losses
        value = -np.expm1(np.minimum(missing, 0.0))
        decisions = []
        for stage in reversed(range(len(self.choices))):
            values = []
            for one in self._instances[stage]:
                ahead = self._window(stage, one, value)
                expected = np.convolve(ahead, one.p[::-1], "valid")
                values.append(expected + one.certain)
            decisions.append(np.argmax(values, axis=0))
            value = np.max(values, axis=0)
        return decisions[::-1]

    def _window(
        self,
        stage: int,
        one: _Lattice,
        value: Floats,
    ) -> Floats:
        """Return the values of those sums of losses that a mechanism's outcomes can lead to."""
        low, high = self._ends[stage]
        next_low, _ = self._ends[stage + 1]
        start = low + one.lowest - next_low
        end = start + high - low + one.p.size
        return value[start:end]

    def _certain_after(
        self,
        stage: int,
        decision: Indices,
        p: Floats,
    ) -> float:
        """Return the P-mass that one more stage moves to an infinite loss."""
        certain = 0.0
        for number in np.unique(decision):
            one = self._instances[stage][number]
            certain += one.certain * float(p[decision == number].sum())
        return certain

    def _after(
        self,
        stage: int,
        decision: Indices,
        p: Floats,
        q: Floats,
    ) -> tuple[Floats, Floats]:
        """Return the P- and Q-masses by rounded sum of losses, without infinite ones, after one more stage.

        Args:
            stage: Number of the stage.
            decision: Which instance runs at each place before it.
            p: P-masses at these places.
            q: Q-masses at these places.
        """
        low, _ = self._ends[stage]
        next_low, next_high = self._ends[stage + 1]
        after_p = np.zeros(next_high - next_low + 1)
        after_q = np.zeros(next_high - next_low + 1)
        for number in np.unique(decision):
            one = self._instances[stage][number]
            here = decision == number
            first, last = np.flatnonzero(here)[[0, -1]]
            span = slice(first, last + 1)
            start = low + int(first) + one.lowest - next_low
            for after, masses, more in ((after_p, p, one.p), (after_q, q, one.q)):
                masses_here = np.where(here, masses, 0.0)
                moved = np.convolve(masses_here[span], more)
                end = start + moved.size
                after[start:end] += moved
        return after_p, after_q


_COARSE = 6  # δ tried in proportion
_FINER = 3  # how often the gaps around the best are halved
_FAR = 0.9  # of the other direction's ε: below that a direction is not looked at more closely
_NESTED = np.geomspace(0.97, 1e-5, 10)
_SPREAD = np.geomspace(0.97, 1e-5, 18)  # δ at which runs are scored where decisions come later
_STAGES = 12  # choices at most that hang on what was released before


@dataclass(frozen=True)
class _Instances(Instances):
    """A maker of explicit mechanisms for events, with the δ, direction and scores to aim at.

    Attributes:
        target: The δ of the question.
        delta: The δ at which runs are scored.
        flip: Whether the record is added.
        scores: How runs are scored.
    """

    target: float
    delta: float
    flip: bool
    scores: Scores = Scores.SHUFFLED

    def of(self, event: Event) -> Outcomes:
        """Return the outcomes of the mechanism made for an event, cached if the event selects nothing."""
        if _is_fixed(event):
            return outcomes_of(event, self.target)
        return self.composed(event)

    def composed(self, event: Event) -> Outcomes:
        """Return the joint outcomes of the mechanisms made for the parts of an event."""
        parts = []
        for part, count in flatten(event).items():
            outcomes = entry(part).instance(part, self)
            parts.append((outcomes, count))
        return composition(parts, self.target)

    def cost(self, event: Event) -> float:
        """Return ε, at the target δ, of the mechanism made for an event in this direction."""
        return self._in_direction(self.of(event)).epsilon(self.target)

    def _in_direction(self, outcomes: Outcomes) -> Outcomes:
        """Return outcomes with P (with the record) and Q (without it) swapped if the record is added."""
        return outcomes.flipped() if self.flip else outcomes

    def dearest(self, events: Sequence[Event]) -> Outcomes:
        """Return the outcomes of that event, among several, whose mechanism has the largest ε."""

        def cost(outcomes: Outcomes) -> float:
            return self._in_direction(outcomes).epsilon(self.delta)

        candidates = [self.of(event) for event in dict.fromkeys(events)]
        return max(candidates, key=cost)

    def selected(self, event: Event, select: Callable[[Outcomes], Outcomes]) -> Outcomes:
        """Apply `select` to an event's outcomes in this direction, and turn the result back."""
        base = self._in_direction(self.of(event))
        return self._in_direction(select(base))


def _is_fixed(event: Event) -> bool:
    """Return whether an event contains no selection, so that one mechanism serves every question."""
    return entry(event).one_instance and all(map(_is_fixed, event.children()))


@lru_cache(maxsize=64)
def outcomes_of(event: Event, delta: float) -> Outcomes:
    """Return the outcomes of the mechanism made for an event without selections, from a cache of 64."""
    return _Instances(delta, delta, flip=False).composed(event)


@lru_cache(maxsize=1024)
def instance_epsilon(event: Event, delta: float) -> float:
    """Return ε at δ of an explicit mechanism that fits an event, in the worse direction, rounded down."""
    with np.errstate(all="ignore"):
        try:
            if _is_fixed(event):
                remove = _Instances(delta, delta, flip=False).cost(event)
                add = _Instances(delta, delta, flip=True).cost(event)
                return max(remove, add)
            best = _best_aim(event, delta, False, 0.0)
            best = max(best, _best_aim(event, delta, True, best))
            return max(best, _adaptive_epsilon(event, delta, best))
        except ArithmeticError:
            return 0.0  # numbers that leave their range say nothing


def _best_aim(
    event: Event,
    delta: float,
    flip: bool,
    other: float,
) -> float:
    """Return the largest ε found by varying the δ for which a selection's runs are scored, in one direction.

    Args:
        event: The event.
        delta: The δ of the question.
        flip: Whether the record is added.
        other: ε of the other direction; where this one stays far below, it is left.
    """
    best = 0.0
    for scores in (Scores.RANKED, Scores.SPREAD):
        costs = _costs_by_aim(
            event,
            delta,
            flip,
            scores,
            _FAR * other,
        )
        if not costs:
            return best
        best = max(best, *costs.values())
        if scores is Scores.RANKED:
            by_cost = sorted(sorted(costs, reverse=True), key=lambda aim: costs[aim])
            for aim in {*by_cost[-2:], delta}:
                best = max(best, _Instances(delta, aim, flip).cost(event))
    return best


def _costs_by_aim(
    event: Event,
    delta: float,
    flip: bool,
    scores: Scores,
    least: float,
) -> dict[float, float]:
    """Return ε by the δ for which a selection's runs are scored; empty if first tries are below `least`.

    Args:
        event: The event.
        delta: The δ of the question.
        flip: Whether the record is added.
        scores: How runs are scored.
        least: An ε below which nothing is worth more time.
    """
    # Which δ is best depends on what follows the choice: a few are tried, then those around the best.
    aims = list(np.geomspace(0.97, min(delta, 0.9), _COARSE))
    costs = {}
    for aim in aims:
        costs[aim] = _Instances(delta, aim, flip, scores).cost(event)
    if max(costs.values()) < least:
        return {}
    for _ in range(_FINER):
        dearest = max(aims, key=lambda aim: costs[aim])
        place = aims.index(dearest)
        for first in (place, place - 1):
            if 0 <= first < len(aims) - 1:
                middle = math.sqrt(aims[first] * aims[first + 1])
                costs[middle] = _Instances(delta, middle, flip, scores).cost(event)
        aims = sorted(costs, reverse=True)
    return costs


def _adaptive_epsilon(
    event: Event,
    delta: float,
    start: float,
) -> float:
    """Return ε of a mechanism that selects by earlier outcomes; 0 for one part or too many selections."""
    parts = flatten(event)
    choosing = {part: count for part, count in parts.items() if not _is_fixed(part)}
    is_lone = sum(parts.values()) < 2
    if not choosing or is_lone or sum(choosing.values()) > _STAGES:
        return 0.0
    others = []
    choices = []
    flipped = []
    for part, count in parts.items():
        if part not in choosing:
            others.append((outcomes_of(part, delta), count))
            continue
        # Copies of one event share one list, on which the stages tell that they are alike.
        stage = _instances_of(part, delta)
        choices += [stage] * count
        flipped += [[outcomes.flipped() for outcomes in stage]] * count
    fixed = composition(others, delta)
    remove = Stages(fixed, choices).epsilon(delta, start)
    add = Stages(fixed.flipped(), flipped).epsilon(delta, start)
    return max(remove, add)


def _instances_of(part: Event, delta: float) -> list[Outcomes]:
    """Return the outcomes of mechanisms for a selection: for many δ and scores, in both directions."""
    simple = all(map(_is_fixed, part.children()))
    aims = _SPREAD if simple else _NESTED  # what is nested is scored anew for each
    ways = list(Scores) if simple else [Scores.RANKED, Scores.SPREAD]
    instances = []
    for aim, flip, scores in itertools.product(aims, (False, True), ways):
        question = _Instances(delta, float(aim), flip, scores)
        instances.append(entry(part).instance(part, question))
    return instances
