"""Where earlier searches ended: the next search for the same noise, or nearly the same, looks there first.

A hint is never believed. The function that reports is evaluated at it, and it counts only where that
meets the target, and by little: whoever writes a wrong hint costs a search, never a guarantee.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from privtune.errors import PrivTuneError

__all__ = ["Ends", "Hints", "Search", "ends", "given", "target_moves"]

Hints = MutableMapping[str, float]
"""The place at which a search ended, by the digest of what was searched for."""

Ends = dict[object, tuple[float, ...]]
"""What is known of the end of a search, by what was searched for but for the target."""

_hints: ContextVar[Hints | None] = ContextVar("hints", default=None)
_ends: ContextVar[Ends | None] = ContextVar("ends", default=None)


@contextmanager
def given(hints: Hints) -> Iterator[None]:
    """Let the searches within begin at these hints, and leave where they end in them."""
    token = _hints.set(hints)
    try:
        yield
    finally:
        _hints.reset(token)


@contextmanager
def target_moves() -> Iterator[None]:
    """Let searches within, for the same at one target after another, begin where the last ended."""
    token = _ends.set({})
    try:
        yield
    finally:
        _ends.reset(token)


def ends() -> Ends:
    """Return the ends of searches for other targets, for this one to look at and to leave its own in."""
    kept = _ends.get()
    return {} if kept is None else kept


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
        if hints is None or place is None or not (math.isfinite(place) and place > 0.0):
            return None
        tried: dict[str, float] = {}  # searches for a target that does not count leave nothing
        value = math.nan
        # Where a damaged one lies, there may be nothing to compute.
        with given(ChainMap(tried, hints)), suppress(PrivTuneError, ArithmeticError):
            value = function(place)
        if not (1.0 - self._near) * target <= value <= target:
            return None
        for key, end in tried.items():  # one by one: an update of a dictionary would keep no line
            hints[key] = end
        return place

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
