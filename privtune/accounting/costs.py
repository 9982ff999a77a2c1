"""Explain ε of an event part by part, and compute what a change of the event would cost or save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from privtune.accounting.accountant import Guarantee, epsilon, lower_bound
from privtune.accounting.calibration import calibrate, solve_decreasing
from privtune.accounting.checks import json_number
from privtune.accounting.events import (
    Adjacency,
    Composed,
    Event,
    Parallel,
    PrivateSelection,
    Repeated,
    ThresholdSelection,
)
from privtune.accounting.registry import Choice, entry, scaled, text
from privtune.accounting.runs import RunLaw, run_law_from_dict
from privtune.errors import PrivTuneError

_MOST_SAVED = 24  # different parts of a composition; of more, what each saves would take minutes


@dataclass(frozen=True)
class Explanation:
    """One node of an event's tree: its text, its ε alone, and what leaving it out would save.

    Args:
        text: What the event is, in words.
        epsilon: Its cost alone, at the δ of the question.
        method: The bound that won.
        saved: What the composition above would cost less without this part, the difference of two
            upper bounds; None outside one, or where it has more than 24 different parts.
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
        """Return the node and all nodes below it as JSON-ready data."""
        data: dict[str, Any] = {
            "text": self.text,
            "epsilon": json_number(self.epsilon),
            "method": self.method,
            "saved": None if self.saved is None else json_number(self.saved),
        }
        if self.lower is not None:
            data["lower"] = json_number(self.lower)
        data["children"] = [child.to_dict() for child in self.children]
        return data


def explain(
    event: Event,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> Explanation:
    """Return the tree that shows where ε comes from, part by part.

    Args:
        event: What touched the data.
        delta: In (0, 1).
        adjacency: The relation of neighbouring datasets.

    Returns:
        The tree. Costs of parts do not add up to the cost of the whole; `saved` says what leaving
        a part out of its composition, once, would save.

    Example:
        >>> from privtune.accounting import Composed, Gaussian, Repeated
        >>> tree = explain(Composed([Repeated(100, Gaussian(20.0)), Gaussian(8.0)]), 1e-5)
        >>> [(part.text, round(part.epsilon, 1)) for part in tree.children]
        [('100 times', 2.0), ('gaussian, noise multiplier 8', 0.4)]
    """
    tree = _node(event, delta, adjacency, None)
    lower = lower_bound(event, delta, adjacency=adjacency)
    return replace(tree, lower=min(lower, tree.epsilon))


def _node(
    event: Event,
    delta: float,
    adjacency: Adjacency,
    saved: float | None,
) -> Explanation:
    """Return the tree of one event and the events inside it, with `saved` stored at its root.

    Args:
        event: The event.
        delta: The δ of the question.
        adjacency: The relation of neighbouring datasets.
        saved: What its composition would save without it; None outside one.
    """
    answer = epsilon(event, delta, adjacency=adjacency)
    parts = entry(event).shown(event)
    distinct = list(dict.fromkeys(parts))  # equal parts are explained once
    savings: dict[Event, float] = {}
    if isinstance(event, Composed) and len(distinct) <= _MOST_SAVED:
        for part in distinct:
            savings[part] = _saving(parts, part, answer, adjacency)
    nodes = {part: _node(part, delta, adjacency, savings.get(part)) for part in distinct}
    children = tuple(nodes[part] for part in parts)
    return Explanation(
        text(event),
        answer.epsilon,
        answer.method,
        saved,
        children,
    )


def _saving(
    parts: Sequence[Event],
    part: Event,
    total: Guarantee,
    adjacency: Adjacency,
) -> float:
    """Return how much the total ε of a composition falls if one copy of a part is left out."""
    place = parts.index(part)
    rest = Composed((*parts[:place], *parts[place + 1 :]))
    rest_epsilon = epsilon(rest, total.delta, adjacency=adjacency).epsilon
    if not math.isfinite(rest_epsilon):
        return 0.0
    return max(total.epsilon - rest_epsilon, 0.0)


_CAP = 3.0  # of the mean number of runs, as an example of a cap
_SHARES = (0.05, 0.25, 0.5, 0.75, 0.9, 1.0)
_SAME = 1e-3  # relative
_MOST = 8  # different noises and choices that are looked at


@dataclass(frozen=True)
class Change:
    """A possible change of an event: its text, its ε, and the difference from the present ε."""

    text: str
    epsilon: float
    difference: float

    def to_dict(self) -> dict[str, Any]:
        """Return the change as JSON-ready data."""
        return {
            "text": self.text,
            "epsilon": json_number(self.epsilon),
            "difference": json_number(self.difference),
        }


@dataclass(frozen=True)
class Share:
    """The noise that a score's share of ε requires, if the ε of the whole event stays the same.

    Attributes:
        share: ε of each score over ε of what stands beside it.
        noise_factor: What all noise is multiplied with, for the same ε.
        noise_multipliers: Noise of the scores, that factor included.
    """

    share: float
    noise_factor: float
    noise_multipliers: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the share as JSON-ready data."""
        return {**asdict(self), "noise_multipliers": list(self.noise_multipliers)}


@dataclass(frozen=True)
class Sensitivity:
    """The guarantee of an event, and possible changes of it by ascending ε."""

    guarantee: Guarantee
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the guarantee and the changes as JSON-ready data."""
        changes = [change.to_dict() for change in self.changes]
        return {"guarantee": self.guarantee.to_dict(), "changes": changes}


def sensitivity(
    event: Event,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    names: Mapping[Event, str] | None = None,
) -> Sensitivity:
    """Return possible changes of an event, each with its own ε, by ascending ε.

    Args:
        event: What touched the data.
        delta: In (0, 1).
        adjacency: The relation of neighbouring datasets.
        names: What releases are called, in place of their description.

    Returns:
        Our guarantee, and ε of each changed event that has one.
    """
    now = epsilon(event, delta, adjacency=adjacency)
    stricter = epsilon(event, delta / 10.0, adjacency=adjacency).epsilon
    changes = [_change("δ ten times smaller", stricter, now)]
    for words, make in _changed_events(event, names or {}).items():
        try:
            cost = epsilon(make(), delta, adjacency=adjacency).epsilon
        except PrivTuneError:
            continue
        changes.append(_change(words, cost, now))
    changes.sort(key=lambda change: change.difference)
    return Sensitivity(now, tuple(changes))


def _changed_events(event: Event, names: Mapping[Event, str]) -> dict[str, Callable[[], Event]]:
    """Return functions that make changed events, by a description of the change."""
    # Made one by one, later: some changes lead beyond the numbers that events may have.
    makers: dict[str, Callable[[], Event]] = {"all of it once more": lambda: Repeated(2, event)}
    for choice, node in _choices(event):
        for words, other in _other_runs(choice):
            makers[words] = partial(_replace_part, event, node, other)
        alone = f"one run more, charged by itself ({_law(choice)})"
        makers[alone] = partial(Composed, (event, choice.selection.event))
    noises = [leaf for leaf in _walk(event, {}) if "noise_multiplier" in leaf.to_dict()]
    for leaf in noises[:_MOST]:
        name = names.get(leaf, text(leaf))
        for words, factor in (("half", 0.5), ("twice", 2.0)):
            other = partial(entry(leaf).scaled, leaf, factor)
            makers[f"{words} the noise ({name})"] = partial(_replace_part, event, leaf, other)
    return makers


def _parts_of(event: Event) -> tuple[Event, ...]:
    """Return the parts of a composition; any other event is its own only part."""
    if isinstance(event, Composed):
        return event.events
    return (event,)


def _has_score(event: Event) -> bool:
    """Return whether an event is a training and, on other records, one noised score."""
    if not isinstance(event, Parallel) or len(event.events) != 2:
        return False
    _, score = event.events
    return "noise_multiplier" in score.to_dict()


def shares_of_scores(event: Event, now: Guarantee) -> tuple[Share, ...]:
    """Return the noise that scores need to cost given shares of the ε of their trainings."""
    parts = [part for part in _parts_of(event) if _has_score(part)]
    if not parts or not math.isfinite(now.epsilon) or now.epsilon <= 0.0:
        return ()
    terms: dict[str, Any] = {"delta": now.delta, "adjacency": now.adjacency}
    costs = {part: epsilon(part.children()[0], **terms).epsilon for part in parts}
    shares = []
    for share in _SHARES:
        scores = {}
        for part in parts:
            _, score = part.children()
            target = share * costs[part]
            scores[part] = calibrate(score, epsilon=target, **terms).event
        rescored = _replace_scores(event, scores)
        cost = partial(_scaled_epsilon, rescored, **terms)
        try:
            factor = _factor(cost, now.epsilon)
        except PrivTuneError:
            continue
        noises = []
        for part in parts:
            noise = float(scores[part].to_dict()["noise_multiplier"])
            noises.append(factor * noise)
        shares.append(Share(share, factor, tuple(noises)))
    return tuple(shares)


def _replace_scores(event: Event, scores: Mapping[Event, Event]) -> Event:
    """Return the event with the scores of its trainings replaced as the mapping `scores` says."""
    parts: list[Event] = []
    for part in _parts_of(event):
        if part not in scores:
            parts.append(part)
            continue
        training, _ = part.children()
        parts.append(Parallel((training, scores[part])))
    return Composed(parts)


def _scaled_epsilon(event: Event, factor: float, **terms: Any) -> float:
    """Return ε of an event with all of its noise multiplied by `factor`."""
    return epsilon(scaled(event, factor), **terms).epsilon


def _factor(cost: Callable[[float], float], target: float) -> float:
    """Return the least factor on noise, 1 or more, at which ε meets the target, to a thousandth."""
    if cost(1.0) <= target * (1.0 + _SAME):
        return 1.0
    return solve_decreasing(cost, target, _SAME, PrivTuneError)


def _change(
    words: str,
    cost: float,
    now: Guarantee,
) -> Change:
    """Return a change with the difference of its ε from the present one; 0 if both are infinite."""
    if math.isinf(cost) and math.isinf(now.epsilon):
        return Change(words, cost, 0.0)
    return Change(words, cost, cost - now.epsilon)


def _walk(event: Event, events: dict[Event, None]) -> dict[Event, None]:
    """Add an event and all events inside it to `events`, each once, from the root of the tree."""
    if event not in events:
        events[event] = None
        for child in event.children():
            _walk(child, events)
    return events


def _replace_part(
    event: Event,
    old: Event,
    new: Callable[[], Event],
) -> Event:
    """Return the event with one part replaced wherever it occurs.

    Args:
        event: The whole.
        old: The part.
        new: Makes what stands in its place; it may refuse.
    """
    if event == old:
        return new()
    return event.rebuild([_replace_part(child, old, new) for child in event.children()])


def _choices(event: Event) -> list[tuple[Choice, Event]]:
    """Return the first eight selections among runs inside an event, each with the event that it is."""
    choices = []
    for node in _walk(event, {}):
        choice = entry(node).choice(node)
        if choice is not None:
            choices.append((choice, node))
    return choices[:_MOST]


def _law(choice: Choice) -> str:
    """Describe the law of a selection's number of runs: kind, mean, minimum."""
    law = choice.selection.runs
    kind = "a threshold" if choice.threshold else law.law.replace("_", " ")
    least = "" if law.minimum is None else f", at least {law.minimum}"
    return f"{kind}, mean {law.expected_runs:.4g}{least}"


def _other_runs(choice: Choice) -> list[tuple[str, Callable[[], Event]]]:
    """Return changed selections, described: one more run on average, and a cap if there is none."""
    base = choice.selection.event
    law = choice.selection.runs
    if choice.threshold:
        stop = 1.0 / (law.expected_runs + 1.0)
        words = f"one more run on average, at most ({_law(choice)})"
        return [(words, lambda: ThresholdSelection(base, stop))]
    words = f"one run more on average ({_law(choice)})"
    changes: list[tuple[str, Callable[[], Event]]] = []
    changes.append((words, lambda: PrivateSelection(base, _raise_mean(law, 1.0))))
    cap = round(_CAP * law.expected_runs)
    if law.cap is None and law.law != "binomial" and law.can_have_cap(cap):
        capped = {**law.to_dict(), "maximum": cap}
        words = f"at most {cap} runs ({_law(choice)})"
        changes.append((words, lambda: PrivateSelection(base, run_law_from_dict(capped))))
    return changes


def _raise_mean(law: RunLaw, more: float) -> RunLaw:
    """Return the law with its mean raised by `more`; a binomial law gets more trials, too."""
    data = dict(law.to_dict())
    if "n" in data:
        data["n"] = int(data["n"]) + math.ceil(more)
    data["mean"] = float(data["mean"]) + more
    return run_law_from_dict(data)
