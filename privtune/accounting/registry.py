"""Everything that depends on the type of an event: one entry for each type, from `mechanisms/`.

To add an event type, write its entry there; a method that is missing is an error at import. No
other module asks for the type of an event to decide how it is charged, scaled or shown.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from privtune.accounting.algebra import Adjacency, Event
from privtune.accounting.mechanisms import choices, compositions, releases
from privtune.accounting.mechanisms.entry import Entry, Look, UnknownEventError
from privtune.errors import InvalidInputError

ENTRIES: dict[type[Event], Entry[Any]] = {
    **releases.ENTRIES,
    **compositions.ENTRIES,
    **choices.ENTRIES,
}


def entry(event: Event) -> Entry[Any]:
    """Return the entry of an event's type.

    Raises:
        UnknownEventError: The type has none; nothing is guessed.
    """
    found = ENTRIES.get(type(event))
    if found is None:
        raise UnknownEventError(f"a {event.type} event has no entry in the registry of accounts.")
    return found


def under(event: Event, adjacency: Adjacency) -> Event:
    """Return the event whose account, as of itself, holds for the event under an adjacency.

    Raises:
        InvalidInputError: The account of a part holds under add-remove only.
    """
    if adjacency is Adjacency.ADD_REMOVE:
        return event
    known = entry(event)
    if not known.replace_one:
        raise InvalidInputError(
            "adjacency",
            adjacency.value,
            f"a {event.type} event is accounted under add-remove only",
            "Convert its add-remove guarantee with group_privacy, which says what that costs.",
        )
    return known.replaced(event.rebuild([under(child, adjacency) for child in event.children()]))


def scaled(event: Event, factor: float) -> Event:
    """Return the event with every noise multiplier multiplied by a factor above 0."""
    children = [scaled(child, factor) for child in event.children()]
    return entry(event).scaled(event.rebuild(children), factor)


def text(event: Event) -> str:
    """Return what an event is, in words, without its parts."""
    return entry(event).text(event, text)


def formula(event: Event) -> str:
    """Return an event as a formula that fits a table cell."""
    return entry(event).formula(event, formula)


def training(event: Event) -> tuple[int, float] | None:
    """Return (steps, rate) of the first training by DP-SGD in an event, None without one."""
    return entry(event).training(event, training)


def looks(event: Event) -> Counter[Look]:
    """Count the looks at the data that the event of a training is made of.

    Raises:
        UnknownEventError: Something in it is no release of a training.
    """
    found = entry(event).looks(event, looks)
    if found is None:
        raise UnknownEventError(f"a {event.type} event is not a release of a training.")
    return found
