"""What the draw of rates and of their number does by itself, from the accuracy at each rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from studies.sheet import markdown

__all__ = ["mean_and_deviation", "tables_of_luck"]


def tables_of_luck(
    alone: Mapping[str, Sequence[float]], rates: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return accuracy by rate, and what the draw makes of it; nothing where a rate is missing.

    Args:
        alone: Accuracies at each rate.
        rates: Names of the rates that each selection draws from.
    """
    if any(name not in alone for of in rates.values() for name in of):
        return []
    lines = []
    for halvings in range(1, 9):
        numbers = [
            number
            for of in rates.values()
            for number in mean_and_deviation([alone[name] for name in of], 0.5**halvings)
        ]
        lines.append((f"2^-{halvings}", *(f"{number:.1f}" for number in numbers)))
    head = (f"{name}: {what}" for name in rates for what in ("mean", "deviation"))
    means = (f"{statistics.mean(values):.1f}" for values in alone.values())
    first = markdown(("rate, alone", *alone), [("accuracy", *means)])
    return [first, markdown(("γ, the draw alone", *head), lines)]


def mean_and_deviation(accuracies: Sequence[Sequence[float]], gamma: float) -> tuple[float, float]:
    """Return mean and deviation of a selection that always releases the best of the rates it drew.

    Args:
        accuracies: Those measured at each rate. Each rate is as likely.
        gamma: The probability of halting after a run.
    """
    ordered = sorted(accuracies, key=statistics.mean, reverse=True)
    mean = square = 0.0
    for rank, values in enumerate(ordered):
        # Among the runs is one of the first r rates, but for what the generating function says.
        here = _misses(rank, len(ordered), gamma) - _misses(rank + 1, len(ordered), gamma)
        mean += here * statistics.mean(values)
        square += here * statistics.mean(value**2 for value in values)
    return mean, math.sqrt(max(0.0, square - mean**2))


def _misses(first: int, rates: int, gamma: float) -> float:
    """Return the probability that none of the first rates is among a geometric number of draws."""
    other = 1.0 - first / rates
    return gamma * other / (1.0 - (1.0 - gamma) * other)
