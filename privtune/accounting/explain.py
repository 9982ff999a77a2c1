"""Where epsilon comes from: the tree of an event, each part with its own cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from privtune.accounting.accountant import epsilon
from privtune.accounting.events import (
    Adjacency,
    Composed,
    Event,
    Gaussian,
    Joint,
    Laplace,
    Parallel,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    SubsampledTuning,
    ThresholdSelection,
    WorstOf,
)

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
    """

    text: str
    epsilon: float
    method: str
    saved: float | None
    children: tuple[Explanation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as JSON-ready data."""

        def number(value: float | None) -> float | str | None:
            return value if value is None or math.isfinite(value) else "inf"

        return {
            "text": self.text,
            "epsilon": number(self.epsilon),
            "method": self.method,
            "saved": number(self.saved),
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
    """
    return _node(event, delta, adjacency, None)


def _node(
    event: Event, delta: float, adjacency: Adjacency, siblings: tuple[Event, ...] | None
) -> Explanation:
    answer = epsilon(event, delta, adjacency=adjacency)
    saved = None
    if siblings is not None:
        whole = epsilon(Composed((*siblings, event)), delta, adjacency=adjacency).epsilon
        rest = epsilon(Composed(siblings), delta, adjacency=adjacency).epsilon
        saved = max(whole - rest, 0.0) if math.isfinite(rest) else 0.0
    children = []
    parts = _children(event)
    for i, child in enumerate(parts):
        others = (*parts[:i], *parts[i + 1 :]) if isinstance(event, Composed) else None
        children.append(_node(child, delta, adjacency, others))
    return Explanation(_text(event), answer.epsilon, answer.method, saved, tuple(children))


def _children(event: Event) -> tuple[Event, ...]:
    if isinstance(event, Composed | WorstOf | Parallel):
        return event.events
    if isinstance(event, PrivateSelection | ThresholdSelection):
        return (event.event,)
    if isinstance(event, Repeated) and not isinstance(event.event, PoissonSampled):
        return (event.event,)
    if isinstance(event, SubsampledTuning):
        return (event.tuning, event.training)
    return ()


def _text(event: Event) -> str:
    if isinstance(event, Gaussian | Laplace):
        return f"{event.type}, noise multiplier {event.noise_multiplier:.6g}"
    if isinstance(event, Joint):
        sigma = event.noise_multiplier
        noises = [f"noise {sigma:.6g}"] if math.isfinite(sigma) else []
        noises += [f"Laplace {scale:.6g}" for scale in event.laplace_multipliers]
        return f"{len(event.events)} releases of one sample = {', '.join(noises)}"
    if isinstance(event, PoissonSampled):
        return f"Poisson sample at rate {event.rate:.6g}: {_text(event.event)}"
    if isinstance(event, Repeated):
        if isinstance(event.event, PoissonSampled):
            return f"{event.count} × {_text(event.event)}"
        return f"{event.count} times"
    if isinstance(event, PrivateSelection):
        law = ", ".join(f"{k} {v}" for k, v in event.runs.to_dict().items() if k != "law")
        return f"best of K runs, K {event.runs.law.replace('_', ' ')} ({law})"
    if isinstance(event, ThresholdSelection):
        return f"first run above a threshold, giving up with probability {event.stop:.6g}"
    if isinstance(event, SubsampledTuning):
        return f"tuning on a subset at rate {event.rate:.6g}, variant {event.variant}"
    if isinstance(event, Composed):
        return f"composition of {len(event.events)}"
    if isinstance(event, WorstOf):
        kind = "worst of" if event.weights is None else "public mixture of"
        return f"{kind} {len(event.events)}"
    if isinstance(event, Parallel):
        return f"{len(event.events)} disjoint parts of the data"
    fields = ", ".join(f"{k} {v}" for k, v in event.to_dict().items() if k != "type")
    return f"{event.type.replace('_', ' ')}{' (' + fields + ')' if fields else ''}"
