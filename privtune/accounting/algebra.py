"""What every event is: frozen data with one JSON text, which knows its children and its parts."""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Self

from privtune.accounting.run_law import RunLaw
from privtune.errors import InvalidInputError

SCHEMA_VERSION = 1
_MAX_TOTAL = 10**18  # of one part, multiplied out
MAX_DEPTH = 64  # as text
_DEEPEST = MAX_DEPTH + 8  # with what is put around an event that was read


class Adjacency(StrEnum):
    """Which datasets are neighbours. A guarantee without its adjacency says nothing.

    `ADD_REMOVE`: one record is present or absent. `REPLACE_ONE`: one record is exchanged for
    another one; the number of records is public.
    """

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class Event(ABC):
    """Base of all events: frozen, hashable, JSON both ways.

    Fields hold numbers, laws of runs, events, or tuples of them; None stands for what is left out.

    Example:
        >>> from privtune.accounting import Gaussian, PoissonSampled, Repeated, event_from_json
        >>> training = Repeated(1000, PoissonSampled(0.01, Gaussian(1.1)))
        >>> training.children()[0].to_dict()
        {'type': 'poisson_sampled', 'rate': 0.01, 'event': {'type': 'gaussian', 'noise_multiplier': 1.1}}
        >>> training.parts() == ((training.event, 1000),), Gaussian(1.1).parts()
        (True, None)
        >>> training.rebuild([Gaussian(1.1)])  # the same number of releases, of all records
        Repeated(count=1000, event=Gaussian(noise_multiplier=1.1))
        >>> event_from_json(training.to_json()) == training, {training: "hashable"}[training]
        (True, 'hashable')
    """

    type: ClassVar[str]

    @cached_property
    def depth(self) -> int:
        """How many events stand inside each other below this one."""
        return max((1 + child.depth for child in self.children()), default=0)

    def children(self) -> tuple[Event, ...]:
        """Return the events that this one is made of, in the order of its fields."""
        return tuple(child for _, value in self._values() for child in _events_in(value))

    def rebuild(self, children: Sequence[Event]) -> Self:
        """Return the same event with other children.

        Args:
            children: As many as `children()` returns, in the same order.

        Returns:
            An event of the same type.

        Raises:
            InvalidInputError: Another number of children.
        """
        if len(children) != len(self.children()):
            raise InvalidInputError("children", children, "must be as many as the event has")
        rest = iter(children)
        values: dict[str, Any] = dict(self._values())
        for name, value in self._values():
            if isinstance(value, Event):
                values[name] = next(rest)
            elif _events_in(value):
                values[name] = tuple(next(rest) for _ in value)
        return type(self)(**values)

    def parts(self) -> tuple[tuple[Event, int], ...] | None:
        """Return what this event is the composition of, with counts; None if of itself alone."""
        return None

    def _values(self) -> Iterator[tuple[str, Any]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON-ready data, in the public format."""
        return {
            "type": self.type,
            **{name: _json(value) for name, value in self._values() if value is not None},
        }

    def to_json(self) -> str:
        """Return the canonical text: sorted keys, no spaces, exact floats, the schema version."""
        document = {"schema": SCHEMA_VERSION, **self.to_dict()}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _events_in(value: object) -> tuple[Event, ...]:
    """Return the events that one field holds."""
    if isinstance(value, Event):
        return (value,)
    return tuple(v for v in value if isinstance(v, Event)) if isinstance(value, tuple) else ()


def _json(value: object) -> object:
    if isinstance(value, Event | RunLaw):
        return value.to_dict()
    return [_json(part) for part in value] if isinstance(value, tuple) else value


def set_field(event: Event, name: str, value: object) -> None:
    """Set a field of a frozen event, in its constructor."""
    object.__setattr__(event, name, value)


def check_events(name: str, value: object, *, allow_empty: bool = False) -> tuple[Event, ...]:
    """Return a field that holds events, checked."""
    if isinstance(value, Event | str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidInputError(name, value, "must be a sequence of events")
    events = tuple(value)
    if not events and not allow_empty:
        raise InvalidInputError(name, value, "must hold at least one event")
    for event in events:
        check_event(name, event)
    return events


def check_event(name: str, value: object) -> Event:
    """Return a field that holds an event, checked."""
    if not isinstance(value, Event):
        raise InvalidInputError(name, value, "must be an event")
    if value.depth >= _DEEPEST:
        raise InvalidInputError(name, value.type, f"must be nested at most {_DEEPEST} deep")
    return value


def flatten(event: Event) -> dict[Event, int]:
    """Return the distinct parts that `event` composes, each with its multiplicity.

    The only place where counts are multiplied and added. The value never changes: composition is
    commutative and associative, and releases about all records are a composition. The Gaussians of
    a `Joint` become the one that they equal; a `Joint` stays only where Laplace releases share a
    sample with others.
    """
    parts: dict[Event, int] = {}
    stack: list[tuple[Event, int]] = [(event, 1)]
    while stack:
        part, count = stack.pop()
        if count > _MAX_TOTAL:
            raise InvalidInputError("count", count, "must be at most 10^18, multiplied out")
        inner = part.parts()
        if inner is None:
            parts[part] = parts.get(part, 0) + count
        else:
            stack.extend((child, count * number) for child, number in reversed(inner))
    return parts
