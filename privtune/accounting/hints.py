"""Where earlier searches ended: the next search for the same noise looks there first.

A hint is never believed. The function that reports is evaluated at it, and it counts only where that
meets the target, and by little: whoever writes a wrong hint costs a search, never a guarantee.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Hints", "Search", "given"]

Hints = MutableMapping[str, float]
"""The place at which a search ended, by the digest of what was searched for."""

_hints: ContextVar[Hints | None] = ContextVar("hints", default=None)


@contextmanager
def given(hints: Hints) -> Iterator[None]:
    """Let the searches within begin at these hints, and leave where they end in them."""
    token = _hints.set(hints)
    try:
        yield
    finally:
        _hints.reset(token)


class Search:
    """One search for the least x with ``function(x) <= target``, told apart by what it is for.

    Args:
        what: All that the end of the search hangs on; JSON can write it.
        near: By how much of the target the end of a search may miss it at most.
    """

    def __init__(self, *what: object, near: float) -> None:
        text = json.dumps(what, sort_keys=True)
        self._key = hashlib.sha256(text.encode()).hexdigest()
        self._near = near

    def ended(self, function: Callable[[float], float], target: float) -> float | None:
        """Return where an earlier search ended, if the function is as near to the target there."""
        hints = _hints.get()
        place = None if hints is None else hints.get(self._key)
        if place is None or not (math.isfinite(place) and place > 0.0):
            return None
        return place if (1.0 - self._near) * target <= function(place) <= target else None

    def end(
        self, function: Callable[[float], float], target: float, search: Callable[[], float]
    ) -> float:
        """Return where an earlier search ended, or search, and keep the end for the next."""
        hint = self.ended(function, target)
        return self.keep(search()) if hint is None else hint

    def keep(self, place: float) -> float:
        """Keep the end of this search as a hint for the next, and return it."""
        if (hints := _hints.get()) is not None:
            hints[self._key] = place
        return place
