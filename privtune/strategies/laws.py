"""Which law of the number of runs: as it was asked for, or chosen for the budget at hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from scipy.optimize import brentq

from privtune.accounting import (
    Adjacency,
    Event,
    Geometric,
    Logarithmic,
    Poisson,
    PrivateSelection,
    Repeated,
    RunLaw,
    TruncatedNegativeBinomial,
    calibrate,
)
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError

__all__ = ["choose_law", "finding_probability", "largest_mean"]

_TOP = 0.1  # a good candidate is one of the best tenth
_TOLERANCE = 5e-3
_BUCKET = 1.25
_MOST_RUNS = 1000
_GRAIN = 1000  # means are found in thousandths, so that a plan shows the number it charges

_FAMILIES: tuple[tuple[str, Callable[[float], RunLaw]], ...] = (
    ("geometric", Geometric),
    ("truncated negative binomial, shape 0.5", lambda m: TruncatedNegativeBinomial(0.5, m)),
    ("truncated negative binomial, shape 2", lambda m: TruncatedNegativeBinomial(2.0, m)),
    ("logarithmic", Logarithmic),
    ("poisson", Poisson),
)


def finding_probability(law: RunLaw) -> float:
    """Return the probability that a candidate of the best tenth is among the runs."""
    return 1.0 - float(law.pgf(1.0 - _TOP))


def choose_law(
    base: Event, *, epsilon: float, delta: float, adjacency: Adjacency, power: float
) -> tuple[RunLaw, list[dict[str, Any]]]:
    """Choose the law that finds a top-10% candidate with a given probability at the least noise.

    Args:
        base: One run, with noise in the right proportions.
        epsilon: Target of the whole selection. The choice is made at the next power of 1.25, so
            that it does not flicker while a budget is shared.
        delta: Target, in (0, 1).
        adjacency: The neighbouring relation.
        power: The probability, in (0.1, 0.99).

    Returns:
        The law, and the trade: for each law its mean and the factor on the base's noise, with the
        composition of as many visible runs for comparison.
    """
    if not 0.1 < power < 0.99:
        raise InvalidInputError("power", power, "must lie between 0.1 and 0.99")
    level = _BUCKET ** round(math.log(epsilon, _BUCKET))
    return _choose(base, level, delta, adjacency, power)


@lru_cache(maxsize=64)
def _choose(
    base: Event, epsilon: float, delta: float, adjacency: Adjacency, power: float
) -> tuple[RunLaw, list[dict[str, Any]]]:
    def factor(event: Event) -> float:
        return calibrate(
            event, epsilon=epsilon, delta=delta, adjacency=adjacency, tolerance=_TOLERANCE
        ).scale

    laws = {name: family(_mean(family, power)) for name, family in _FAMILIES}
    noise = {name: factor(PrivateSelection(base, law)) for name, law in laws.items()}
    chosen = min(noise, key=lambda name: noise[name])
    trade: list[dict[str, Any]] = [
        {
            "law": name,
            "mean_runs": round(law.expected_runs, 4),
            "noise": round(noise[name], 4),
            "chosen": name == chosen,
        }
        for name, law in laws.items()
    ]
    count = math.ceil(math.log1p(-power) / math.log1p(-_TOP))
    everything = factor(Repeated(count, base))
    trade.append(
        {
            "law": "everything released (composition)",
            "mean_runs": count,
            "noise": round(everything, 4),
            "chosen": False,
        }
    )
    return laws[chosen], trade


def _mean(family: Callable[[float], RunLaw], power: float) -> float:
    low, high = 1.0 + 1e-9, 2.0
    if finding_probability(family(low)) >= power:
        return low
    while finding_probability(family(high)) < power:
        high *= 2.0
    return float(brentq(lambda m: finding_probability(family(m)) - power, low, high, xtol=1e-6))


def largest_mean(
    base: Event,
    family: Callable[[float], RunLaw],
    *,
    whole: Callable[[Event, RunLaw], Event] = PrivateSelection,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
) -> RunLaw | None:
    """Return the law of the largest mean whose selection stays within a target; bisection.

    Args:
        base: One run, its noise given.
        family: Maps a mean to a law. Means up to 1000 are tried, and up to the most runs of the law.
        whole: Makes the event of the selection.
        epsilon: Target of the whole selection.
        delta: Target, in (0, 1).
        adjacency: The neighbouring relation.

    Returns:
        The law, its mean in thousandths; None if not even a mean of 1 fits.

    **Guarantee**: the accountant reports at most ``epsilon`` for the selection with this very law.
    """

    def fits(thousandths: int) -> bool:
        event = whole(base, family(thousandths / _GRAIN))
        return account(event, delta, adjacency=adjacency).epsilon <= epsilon

    most = family(1.0).most
    low, top = _GRAIN, min(_MOST_RUNS, most or _MOST_RUNS) * _GRAIN
    if not fits(low):
        return None
    high = low
    while high < top:
        high = min(2 * high, top)
        if not fits(high):
            break
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return family(low / _GRAIN)
