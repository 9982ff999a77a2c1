"""Events from JSON: every field checked, one sentence for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from privtune.accounting import choices, events
from privtune.accounting.algebra import MAX_DEPTH, SCHEMA_VERSION, Event
from privtune.accounting.runs import run_law_from_dict
from privtune.errors import InvalidInputError

_TYPES: dict[str, type[Event]] = {
    kind.type: kind
    for module in (events, choices)
    for kind in map(vars(module).__getitem__, module.__all__)
}


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event that `data` describes in the public format.

    Args:
        data: JSON data, as `Event.to_dict` writes it; `schema`, if present, must be 1.

    Returns:
        The event, checked.

    Raises:
        InvalidInputError: Unknown type or field, missing field, or a value out of its range.

    Example:
        >>> event_from_dict({"type": "gaussian", "noise_multiplier": 1.1})
        Gaussian(noise_multiplier=1.1)
        >>> event_from_dict({"type": "gaussian", "sigma": 1.1})
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: field = 'sigma': gaussian knows noise_multiplier.
    """
    if isinstance(data, Mapping) and "schema" in data:
        if data["schema"] != SCHEMA_VERSION or isinstance(data["schema"], bool):
            raise InvalidInputError(
                "schema", data["schema"], f"this version reads schema {SCHEMA_VERSION}"
            )
        data = {key: value for key, value in data.items() if key != "schema"}
    return _read(data, 0)


def _read(data: object, depth: int) -> Event:
    if depth > MAX_DEPTH:
        raise InvalidInputError("event", "...", f"must be nested at most {MAX_DEPTH} deep")
    if not isinstance(data, Mapping):
        raise InvalidInputError("event", data, "must be a JSON object with a type")
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise InvalidInputError("type", kind, f"must be one of {', '.join(_TYPES)}")
    cls = _TYPES[kind]
    names = [field.name for field in fields(cls)]
    for name in data:
        if name != "type" and name not in names:
            known = ", ".join(names) if names else "no fields"
            raise InvalidInputError("field", name, f"{kind} knows {known}")
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in data:
            values[field.name] = _field(field.name, field.type, data[field.name], depth + 1)
        elif field.default is MISSING:
            raise InvalidInputError("field", field.name, f"is required by {kind}")
    return cls(**values)


def _field(name: str, kind: object, value: Any, depth: int) -> object:
    """Return the value of a field, by what the field is declared to hold."""
    if kind == "Event":
        return _read(value, depth)
    if kind == "tuple[Event, ...]":
        if not isinstance(value, list | tuple):
            raise InvalidInputError(name, value, "must be a list of events")
        return tuple(_read(child, depth) for child in value)
    return run_law_from_dict(value) if kind == "RunLaw" else value


def event_from_json(text: str) -> Event:
    """Return the event that a JSON text describes; NaN, infinities and doubled keys are refused.

    Args:
        text: JSON, as `Event.to_json` writes it.

    Returns:
        The event, checked.

    Raises:
        InvalidInputError: It is not JSON, or not an event.

    Example:
        >>> event_from_json('{"type": "zcdp", "rho": 0.1}')
        ZCDP(rho=0.1)
    """
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise InvalidInputError("event", str(error), "must be valid JSON") from None
    return event_from_dict(data)


def _no_constant(text: str) -> NoReturn:
    raise InvalidInputError("event", text, "numbers must be finite")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise InvalidInputError("event", sorted(k for k, _ in pairs), "a key appears twice")
    return data
