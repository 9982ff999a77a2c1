"""Entries of what is put together from other events: repeated, composed, one of several, in parallel."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from privtune.accounting.algebra import Event
from privtune.accounting.curves import mixture_curve
from privtune.accounting.events import (
    Composed,
    Laplace,
    Parallel,
    PoissonSampled,
    Repeated,
    WorstOf,
)
from privtune.accounting.lower import Outcomes, mixed
from privtune.accounting.mechanisms._kinds import Composition, Compound
from privtune.accounting.mechanisms.entry import (
    CurveOf,
    Edges,
    Entry,
    Floats,
    Instances,
    Look,
    LooksOf,
    MassOf,
    Pairs,
    TextOf,
    TrainingOf,
)
from privtune.accounting.pairs import Pair, worst_pair
from privtune.accounting.pmf import mixture

_MOST_PARTS = 6  # of which every two are composed; of more, the dearest twice


class _Repeated(Composition[Repeated]):
    def beyond(self, event: Repeated, edges: Edges, of: MassOf) -> float:
        return event.count * of(event.event)

    def text(self, event: Repeated, of: TextOf) -> str:
        return f"{event.count} times" if self.shown(event) else f"{event.count} × {of(event.event)}"

    def formula(self, event: Repeated, of: TextOf) -> str:
        return f"{event.count} × {of(event.event)}"

    def looks(self, event: Repeated, of: LooksOf) -> Counter[Look]:
        return Counter({look: n * event.count for look, n in of(event.event).items()})

    def shown(self, event: Repeated) -> tuple[Event, ...]:
        return () if isinstance(event.event, PoissonSampled) else (event.event,)

    def training(self, event: Repeated, of: TrainingOf) -> tuple[int, float] | None:
        step = event.event
        if isinstance(step, PoissonSampled) and not isinstance(step.event, Laplace):
            return event.count, step.rate
        return of(step)


class _Composed(Composition[Composed]):
    def text(self, event: Composed, of: TextOf) -> str:
        return f"composition of {len(event.events)}"

    def formula(self, event: Composed, of: TextOf) -> str:
        return " + ".join(map(of, event.events))

    def looks(self, event: Composed, of: LooksOf) -> Counter[Look]:
        return sum(map(of, event.events), Counter())


class _WorstOf(Compound[WorstOf]):
    one_instance = False

    def curve(self, event: WorstOf, of: CurveOf) -> Floats:
        curves = np.stack([of(child) for child in event.events])
        if event.weights is not None:
            return mixture_curve(curves, np.asarray(event.weights))
        return np.asarray(curves.max(axis=0))

    def own_pair(self, event: WorstOf, fineness: float, pairs: Pairs) -> Pair:
        found = _together(event.events, fineness, pairs)
        if event.weights is None:
            return worst_pair(found)
        return Pair(
            mixture([pair.remove for pair in found], event.weights),
            mixture([pair.add for pair in found], event.weights),
        )

    def instance(self, event: WorstOf, instances: Instances) -> Outcomes:
        if event.weights is None:
            return instances.dearest(event.events)
        return mixed([instances.of(child) for child in event.events], event.weights)

    def text(self, event: WorstOf, of: TextOf) -> str:
        kind = "worst of" if event.weights is None else "public mixture of"
        return f"{kind} {len(event.events)}"

    def formula(self, event: WorstOf, of: TextOf) -> str:
        return f"worst of [{', '.join(map(of, event.events))}]"


class _Parallel(Compound[Parallel]):
    one_instance = False

    def curve(self, event: Parallel, of: CurveOf) -> Floats:
        return np.asarray(np.max([of(child) for child in event.events], axis=0))

    def own_pair(self, event: Parallel, fineness: float, pairs: Pairs) -> Pair:
        return worst_pair(_together(event.events, fineness, pairs))

    def instance(self, event: Parallel, instances: Instances) -> Outcomes:
        return instances.dearest(event.events)

    def replaced(self, event: Parallel) -> Event:
        # The record that goes and the one that comes may stand in two parts: the composition of
        # the two dearest, whichever they are.
        counts = Counter(event.events)
        if len(event.events) == 1:
            return event.events[0]
        if len(counts) > _MOST_PARTS:
            return Repeated(2, WorstOf(tuple(counts)))
        both = [Composed(pair) for pair in itertools.combinations(counts, 2)]
        both += [Composed((part, part)) for part, count in counts.items() if count > 1]
        return both[0] if len(both) == 1 else WorstOf(both)

    def text(self, event: Parallel, of: TextOf) -> str:
        return f"{len(event.events)} disjoint parts of the data"

    def formula(self, event: Parallel, of: TextOf) -> str:
        return " ∥ ".join(map(of, event.events))


def _together(events: Sequence[Event], fineness: float, pairs: Pairs) -> list[Pair]:
    """Return the pairs of alternatives on one lattice, fine enough for each."""
    step = min(pairs.step(child, fineness) for child in events)
    return [pairs.at(child, step) for child in events]


ENTRIES: dict[type[Event], Entry[Any]] = {
    Repeated: _Repeated(),
    Composed: _Composed(),
    WorstOf: _WorstOf(),
    Parallel: _Parallel(),
}
