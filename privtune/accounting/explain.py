"""Where epsilon comes from: the tree of an event, each part with its own cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from privtune.accounting.accountant import epsilon, lower_bound
from privtune.accounting.algebra import Adjacency, Event
from privtune.accounting.events import Composed
from privtune.accounting.registry import entry, text

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """One node of the tree.

    Args:
        text: What the event is, in words.
        epsilon: Its cost alone, at the δ of the question.
        method: The bound that won.
        saved: What the composition above would cost less without this part; None outside one.
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
        a part out of its composition would save.

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
    made: dict[Event, Explanation] = {}  # equal parts are explained once
    for i, part in enumerate(parts):
        if part not in made:
            own = None
            if isinstance(event, Composed):
                rest = Composed((*parts[:i], *parts[i + 1 :]))
                left = epsilon(rest, delta, adjacency=adjacency).epsilon
                own = max(answer.epsilon - left, 0.0) if math.isfinite(left) else 0.0
            made[part] = _node(part, delta, adjacency, own)
    children = [made[part] for part in parts]
    return Explanation(text(event), answer.epsilon, answer.method, saved, tuple(children))
