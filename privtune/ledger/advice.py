"""Says what would still fit into a budget, in terms of a training's noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from privtune.accounting import (
    Event,
    Gaussian,
    Geometric,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    scale_noise,
)
from privtune.accounting.registry import training
from privtune.ledger.admission import block_epsilon, fits
from privtune.ledger.history import History

_MEAN = 10
_LARGEST = 1e4
_DIGITS = 3


def suggestions(history: History, asked: Sequence[Event]) -> tuple[str, ...]:
    """Return what would fit in place of a refused request, one phrase each.

    Args:
        history: The budget's log.
        asked: The refused events.

    Returns:
        For one training by DP-SGD: from which noise multiplier σ on it would fit, alone and tuned by
        private selection. For everything else, as all arms of a study together: by how much its
        noise would have to grow, and the ε of that, to which a study's spec may be lowered.

    **Guarantee**: the noise that is named fits, by the same rule that refused, as the log stands now; the
    ε of a spec is about what it comes to.
    """
    found = training(asked[0]) if len(asked) == 1 else None
    if found is None:
        return (_together(history, asked),)
    count, rate = found

    def plain(sigma: float) -> Event:
        return Repeated(count, PoissonSampled(rate, Gaussian(sigma)))

    alone = _smallest(lambda sigma: fits(history, [plain(sigma)]), 1.0)
    if alone is None:
        return ("no DP-SGD training of this length, at any noise",)
    phrases = [f"a DP-SGD training with q = {rate:g}, T = {count} from σ ≥ {alone:g}"]
    tuned = _smallest(
        lambda sigma: fits(history, [PrivateSelection(plain(sigma), Geometric(_MEAN))]), 1.7 * alone
    )
    if tuned is not None:
        phrases.append(f"a selection of mean {_MEAN} over it from σ ≥ {tuned:g}")
    return tuple(phrases)


def _together(history: History, asked: Sequence[Event]) -> str:
    """Return by how much the noise of everything asked has to grow, and what that costs."""

    def louder(factor: float) -> tuple[Event, ...]:
        return tuple(scale_noise(event, factor) for event in asked)

    factor = _smallest(lambda by: fits(history, louder(by)), 1.0)
    if factor is None:
        return "nothing of this kind, at any noise"
    budget = history.terms()
    cost = block_epsilon(louder(factor), budget.delta, budget.adjacency).epsilon
    phrase = f"the same with all noise multiplied by {factor:g}"
    if not 0.0 < cost < math.inf:
        return phrase
    step = 10.0 ** (math.floor(math.log10(cost)) - 1)  # two digits, from below: what is lower fits
    return (
        f"{phrase}; in a study's spec, about epsilon: {round(math.floor(cost / step) * step, 12):g}"
    )


def _smallest(holds: Callable[[float], bool], start: float) -> float | None:
    """Return the smallest number found that holds, up to a percent, rounded up; None beyond 1e4."""
    high = start
    while not holds(high):
        high *= 2
        if high > _LARGEST:
            return None
    low = high / 2
    while low > 1e-2 and holds(low):
        low, high = low / 2, low
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if holds(middle):
            high = middle
        else:
            low = middle
    step = 10.0 ** (math.floor(math.log10(high)) + 1 - _DIGITS)
    return round(math.ceil(high / step) * step, 12)
