"""Where epsilon comes from: the tree of an event, each part with its own cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from privtune.accounting.accountant import Guarantee, epsilon, lower_bound
from privtune.accounting.algebra import Adjacency, Event, flatten
from privtune.accounting.events import Composed
from privtune.accounting.leaving import epsilons_on_one_lattice
from privtune.accounting.pmf import GridError
from privtune.accounting.registry import entry, text, under

_KNOWN = 1e-3  # of ε, that the common lattice may add to the whole


@dataclass(frozen=True)
class Explanation:
    """One node of the tree.

    Args:
        text: What the event is, in words.
        epsilon: Its cost alone, at the δ of the question.
        method: The bound that won.
        saved: What the composition above would cost less without this part; None outside one. The
            difference of two upper bounds, no bound itself: known to about 0.001 of the ε above.
        children: The parts.
        lower: What an explicit instance of the whole costs; None for its parts.

    Example:
        >>> from privtune.accounting import Gaussian, Repeated
        >>> explain(Repeated(100, Gaussian(20.0)), 1e-5).to_dict()["text"]
        '100 times'
    """

    text: str
    epsilon: float
    method: str
    saved: float | None
    children: tuple[Explanation, ...]
    lower: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as JSON-ready data."""

        def number(value: float | None) -> float | str | None:
            return value if value is None or math.isfinite(value) else "inf"

        return {
            "text": self.text,
            "epsilon": number(self.epsilon),
            "method": self.method,
            "saved": number(self.saved),
            **({} if self.lower is None else {"lower": number(self.lower)}),
            "children": [child.to_dict() for child in self.children],
        }


def explain(
    event: Event, delta: float, *, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> Explanation:
    """Return the tree that shows where ε comes from, part by part.

    Args:
        event: What touched the data.
        delta: In (0, 1).
        adjacency: The relation of neighbouring datasets.

    Returns:
        The tree. Costs of parts do not add up to the cost of the whole; `saved` says what leaving
        a part out of its composition, once, would save: both are composed on one lattice, or are
        what `epsilon` reports where little is left or other bounds decide.

    Example:
        >>> from privtune.accounting import Composed, Gaussian, Repeated
        >>> tree = explain(Composed([Repeated(100, Gaussian(20.0)), Gaussian(8.0)]), 1e-5)
        >>> [(part.text, round(part.epsilon, 1)) for part in tree.children]
        [('100 times', 2.0), ('gaussian, noise multiplier 8', 0.4)]
    """
    tree = _node(event, delta, adjacency, None)
    return replace(tree, lower=min(lower_bound(event, delta, adjacency=adjacency), tree.epsilon))


def _node(event: Event, delta: float, adjacency: Adjacency, saved: float | None) -> Explanation:
    answer = epsilon(event, delta, adjacency=adjacency)
    parts = entry(event).shown(event)
    distinct = list(dict.fromkeys(parts))  # equal parts are explained once
    found: list[float | None] = [None] * len(distinct)
    if isinstance(event, Composed):
        found = [*_saved(parts, distinct, answer, adjacency)]
    made = {
        part: _node(part, delta, adjacency, own) for part, own in zip(distinct, found, strict=True)
    }
    children = tuple(made[part] for part in parts)
    return Explanation(text(event), answer.epsilon, answer.method, saved, children)


def _saved(
    parts: Sequence[Event], distinct: Sequence[Event], whole: Guarantee, adjacency: Adjacency
) -> Iterator[float]:
    """Yield what leaving out each part, once, saves."""
    together = _on_one_lattice(parts, distinct, whole, adjacency)
    for part, saved in zip(distinct, together, strict=True):
        # The lattice of the whole is too coarse for what is far less private, or nothing, without it.
        if saved <= 0.5 * whole.epsilon:
            yield max(saved, 0.0)
            continue
        at = parts.index(part)
        rest = Composed((*parts[:at], *parts[at + 1 :]))
        left = epsilon(rest, whole.delta, adjacency=adjacency).epsilon
        yield max(whole.epsilon - left, 0.0) if math.isfinite(left) else 0.0


def _on_one_lattice(
    parts: Sequence[Event], distinct: Sequence[Event], whole: Guarantee, adjacency: Adjacency
) -> list[float]:
    """Return the same where the loss distributions decide what the whole costs, else NaN."""
    nothing = [math.nan] * len(distinct)
    if whole.method != "pld" or len(parts) == 1 or not math.isfinite(whole.epsilon):
        return nothing
    everything = Counter(flatten(under(Composed(parts), adjacency)))
    gone = [Counter(flatten(under(part, adjacency))) for part in distinct]
    left = [everything - less for less in gone]
    try:
        first, *others = epsilons_on_one_lattice([everything, *left], whole.delta, whole.epsilon)
    except (GridError, ArithmeticError):
        return nothing
    # Few large atoms want a finer lattice, on which the whole was accounted.
    if not abs(first - whole.epsilon) <= _KNOWN * whole.epsilon:
        return nothing
    # A single release has accounts of its own.
    return [
        first - value if rest.total() > 1 else math.nan
        for rest, value in zip(left, others, strict=True)
    ]
