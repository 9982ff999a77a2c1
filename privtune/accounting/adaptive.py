"""Instances whose choices hang on what was released before: a composition is no list of strangers.

Who scores the runs of a second selection may have seen what the first released, and scores for the ε that
is left. So each choice among runs comes with many instances, and which one runs next is decided by the
loss so far. The best decisions are found backwards, by dynamic programming over rounded losses; what they
cost is then computed forwards, from the masses of outcomes under P and under Q. Whatever was decided, it is
a mechanism of the composition: a bad decision costs less, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.lower import Outcomes

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_POINTS = 1500  # of the lattice of all losses together, about
_COUNTS = 1e-16  # mass of what has a place of its own on it
_ROUNDS = 4


@dataclass(frozen=True, eq=False)
class _Placed:
    """Outcomes by their rounded losses: masses at `lowest`, `lowest + 1`, ... steps.

    What shows the record lies at no place. It has its mass under P, and there is nothing left to decide.
    """

    lowest: int
    p: Floats
    q: Floats
    shown: float

    @classmethod
    def of(cls, outcomes: Outcomes, step: float) -> _Placed:
        """Place outcomes; what shows that the record is absent counts nothing, and is left out."""
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
    """Return the ends of the losses that happen at all often."""
    losses = outcomes.losses
    counts = np.isfinite(losses) & (np.maximum(outcomes.p, outcomes.q) > _COUNTS)
    ends = losses[counts] if counts.any() else np.zeros(1)
    return float(ends.min()), float(ends.max())


@dataclass(frozen=True, eq=False)
class Stages:
    """Releases one after another: the first are fixed, each further one is one of several instances.

    Args:
        fixed: What does not hang on a choice.
        choices: The instances that each later stage has, at least one.
    """

    fixed: Outcomes
    choices: Sequence[Sequence[Outcomes]]

    def epsilon(self, delta: float, start: float) -> float:
        """Return the largest ε found at which what the decisions make has more than this δ.

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
        """Return the outcomes of the decisions that are best at this ε, as far as rounding lets tell."""
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
        """Stages of one event share a list of instances: each list once, by its identity."""
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
        """Return the values at the places which an instance leads to."""
        low, high = self._ends[stage]
        start = low + one.lowest - self._ends[stage + 1][0]
        return value[start : start + high - low + one.p.size]

    def _after(
        self, stage: int, decision: Indices, p: Floats, q: Floats
    ) -> tuple[Floats, Floats, float]:
        """Return the masses after a stage, and how much of P it shows."""
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
