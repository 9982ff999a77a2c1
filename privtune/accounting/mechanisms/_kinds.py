"""What several entries have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter

from privtune.accounting.algebra import Event
from privtune.accounting.lower import Outcomes
from privtune.accounting.mechanisms.entry import (
    CurveOf,
    E,
    Edges,
    Entry,
    Floats,
    Instances,
    Look,
    LooksOf,
    MassOf,
    Pairs,
    UnknownEventError,
)
from privtune.accounting.pairs import Pair, on_lattice

_OWN = 2.0  # fineness of a lattice of its own


class NoLook(Entry[E]):
    """What is no part of a training, and has no noise of its own that could be scaled."""

    def looks(self, event: E, of: LooksOf) -> Counter[Look] | None:
        return None

    def scaled(self, event: E, factor: float) -> Event:
        return event


class Composition(Entry[E]):
    """Events of which only the parts are ever charged, as `flatten` returns them."""

    def curve(self, event: E, of: CurveOf) -> Floats:
        return of(event)

    def deviation(self, event: E, pairs: Pairs) -> float:
        raise UnknownEventError(f"a {event.type} event is charged by its parts.")

    def pair(self, event: E, step: float, pairs: Pairs) -> Pair:
        return pairs.at(event, step)

    def instance(self, event: E, instances: Instances) -> Outcomes:
        return instances.of(event)

    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        return math.fsum(map(of, event.children()))

    def scaled(self, event: E, factor: float) -> Event:
        return event


class Compound(NoLook[E]):
    """What carries a lattice of its own; its profile becomes a pair on that of a composition."""

    own_lattice = True

    def deviation(self, event: E, pairs: Pairs) -> float:
        pair = pairs.own(event, _OWN)
        return max(pair.remove.deviation, pair.add.deviation, 1e-6)

    def pair(self, event: E, step: float, pairs: Pairs) -> Pair:
        return on_lattice(pairs.own(event, _OWN), step)

    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        return max(map(of, event.children()))

    @abstractmethod
    def own_pair(self, event: E, fineness: float, pairs: Pairs) -> Pair: ...
