"""What a pass draws from elsewhere than torch: once for all records, and never again once it is captured."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import numpy as np

_T = TypeVar("_T")
_TRIES = 3  # another thread may draw meanwhile: only what is seen each time is the pass


def drawn_with_torch(run: Callable[[], _T]) -> _T:
    """Return what a pass returns, if it moves neither Python's generator nor NumPy's.

    Args:
        run: The pass.

    Raises:
        RuntimeError: If it draws from one of them.
    """
    for _ in range(_TRIES):
        before = _states()
        found = run()
        if _states() == before:
            return found
    raise RuntimeError(
        "it draws from Python's random or NumPy, which would be once for all records; torch's own "
        "random numbers are drawn for each"
    )


def _states() -> tuple[object, ...]:
    kind, words, *place = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(words).tobytes(), *place
