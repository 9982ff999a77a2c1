"""Where ε comes from, part by part, and what a change of an event would cost or save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from privtune.accounting._checks import json_number
from privtune.accounting.accountant import Guarantee, epsilon, lower_bound
from privtune.accounting.calibration import calibrate, solve_decreasing
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
    """One node of the tree.

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
        """Return the tree as JSON-ready data."""
        return {
            "text": self.text,
            "epsilon": json_number(self.epsilon),
            "method": self.method,
            "saved": None if self.saved is None else json_number(self.saved),
            **({} if self.lower is None else {"lower": json_number(self.lower)}),
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
        a part out of its composition, once, would save.

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
    if isinstance(event, Composed) and len(distinct) <= _MOST_SAVED:
        found = [*_saved(parts, distinct, answer, adjacency)]
    made = {
        part: _node(part, delta, adjacency, own) for part, own in zip(distinct, found, strict=True)
    }
    children = tuple(made[part] for part in parts)
    return Explanation(text(event), answer.epsilon, answer.method, saved, children)


def _saved(
    parts: Sequence[Event], distinct: Sequence[Event], whole: Guarantee, adjacency: Adjacency
) -> Iterator[float]:
    """Yield how much ε would fall if one copy of each part were left out."""
    for part in distinct:
        at = parts.index(part)
        rest = Composed((*parts[:at], *parts[at + 1 :]))
        left = epsilon(rest, whole.delta, adjacency=adjacency).epsilon
        yield max(whole.epsilon - left, 0.0) if math.isfinite(left) else 0.0


_CAP = 3.0  # of the mean number of runs, as an example of a cap
_SHARES = (0.05, 0.25, 0.5, 0.75, 0.9, 1.0)
_SAME = 1e-3  # relative
_MOST = 8  # different noises and choices that are looked at


@dataclass(frozen=True)
class Change:
    """One change of an event in words, ε with it, and how much that is more."""

    text: str
    epsilon: float
    difference: float

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        numbers = {"epsilon": self.epsilon, "difference": self.difference}
        return {"text": self.text, **{k: json_number(v) for k, v in numbers.items()}}


@dataclass(frozen=True)
class Share:
    """What scores on records of their own cost the rest, at the same ε of the whole."""

    # share: what each score costs over what stands beside it; noise_factor: on all noise, for the same ε.

    share: float
    noise_factor: float
    noise_multipliers: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {**asdict(self), "noise_multipliers": list(self.noise_multipliers)}


@dataclass(frozen=True)
class Sensitivity:
    """The guarantee of an event, and changes of it, those that save most first."""

    guarantee: Guarantee
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        changes = [change.to_dict() for change in self.changes]
        return {"guarantee": self.guarantee.to_dict(), "changes": changes}


def sensitivity(
    event: Event,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    names: Mapping[Event, str] | None = None,
) -> Sensitivity:
    """Return what changes of an event would cost or save: each changed event is accounted anew."""
    now = epsilon(event, delta, adjacency=adjacency)
    # Made one by one: some changes lead beyond the numbers that events may have.
    asked: dict[str, Callable[[], Event]] = {"all of it once more": lambda: Repeated(2, event)}
    for choice, node in _choices(event):
        for words, other in _other_runs(choice):
            asked[words] = partial(_replaced, event, node, other)
        alone = f"one run more, charged by itself ({_law(choice)})"
        asked[alone] = partial(Composed, (event, choice.selection.event))
    noises = [leaf for leaf in _walk(event, {}) if "noise_multiplier" in leaf.to_dict()]
    for leaf in noises[:_MOST]:
        called = (names or {}).get(leaf, text(leaf))
        for words, factor in (("half", 0.5), ("twice", 2.0)):
            other = partial(entry(leaf).scaled, leaf, factor)
            asked[f"{words} the noise ({called})"] = partial(_replaced, event, leaf, other)
    stricter = epsilon(event, delta / 10.0, adjacency=adjacency).epsilon
    changes = [_change("δ ten times smaller", stricter, now)]
    for words, make in asked.items():
        try:
            found = epsilon(make(), delta, adjacency=adjacency).epsilon
        except PrivTuneError:
            continue
        changes.append(_change(words, found, now))
    return Sensitivity(now, tuple(sorted(changes, key=lambda change: change.difference)))


def _parts(event: Event) -> tuple[Event, ...]:
    return event.events if isinstance(event, Composed) else (event,)


def _scored(event: Event) -> bool:
    """Return whether an event is a pair in parallel whose second part is one noised release."""
    two = isinstance(event, Parallel) and len(event.events) == 2
    return two and "noise_multiplier" in event.children()[1].to_dict()


def shares_of_scores(event: Event, now: Guarantee) -> tuple[Share, ...]:
    """Return what scores on records of their own, such as a study's reports, cost the rest."""
    parts = [part for part in _parts(event) if _scored(part)]
    if not parts or not math.isfinite(now.epsilon) or now.epsilon <= 0.0:
        return ()
    terms: dict[str, Any] = {"delta": now.delta, "adjacency": now.adjacency}
    alone = {part: epsilon(part.children()[0], **terms).epsilon for part in parts}
    found = []
    for share in _SHARES:
        scores = {
            part: calibrate(part.children()[1], epsilon=share * alone[part], **terms).event
            for part in parts
        }

        def changed(factor: float, scores: Mapping[Event, Event] = scores) -> Event:
            others = [
                Parallel((part.children()[0], scores[part])) if part in scores else part
                for part in _parts(event)
            ]
            return scaled(Composed(others), factor)

        try:
            factor = _factor(lambda f: epsilon(changed(f), **terms).epsilon, now.epsilon)
        except PrivTuneError:
            continue
        noises = tuple(factor * float(scores[part].to_dict()["noise_multiplier"]) for part in parts)
        found.append(Share(share, factor, noises))
    return tuple(found)


def _factor(cost: Callable[[float], float], target: float) -> float:
    """Return the least factor on noise from 1 on, to a thousandth, at which the target is met."""
    if cost(1.0) <= target * (1.0 + _SAME):
        return 1.0
    return solve_decreasing(cost, target, _SAME, PrivTuneError)


def _change(words: str, found: float, now: Guarantee) -> Change:
    both = math.isinf(found) and math.isinf(now.epsilon)
    return Change(words, found, 0.0 if both else found - now.epsilon)


def _walk(event: Event, seen: dict[Event, None]) -> dict[Event, None]:
    """Collect an event and all events inside it, each once, from the root of the tree."""
    if event not in seen:
        seen[event] = None
        for child in event.children():
            _walk(child, seen)
    return seen


def _replaced(event: Event, old: Event, new: Callable[[], Event]) -> Event:
    """Return the event with one part replaced, wherever it stands."""
    if event == old:
        return new()
    return event.rebuild([_replaced(child, old, new) for child in event.children()])


def _choices(event: Event) -> list[tuple[Choice, Event]]:
    found = [(entry(node).choice(node), node) for node in _walk(event, {})]
    return [(choice, node) for choice, node in found if choice is not None][:_MOST]


def _law(choice: Choice) -> str:
    law = choice.selection.runs
    kind = "a threshold" if choice.threshold else law.law.replace("_", " ")
    least = "" if law.minimum is None else f", at least {law.minimum}"
    return f"{kind}, mean {law.expected_runs:.4g}{least}"


def _other_runs(choice: Choice) -> list[tuple[str, Callable[[], Event]]]:
    """Return the choice with one run more on average, and with a cap, where that can be said."""
    base, law = choice.selection.event, choice.selection.runs
    if choice.threshold:
        stop = 1.0 / (law.expected_runs + 1.0)
        words = f"one run more at most, on average ({_law(choice)})"
        return [(words, lambda: ThresholdSelection(base, stop))]
    changes: list[tuple[str, Callable[[], Event]]] = [
        (
            f"one run more on average ({_law(choice)})",
            lambda: PrivateSelection(base, _with(law, 1.0)),
        )
    ]
    cap = round(_CAP * law.expected_runs)
    if law.cap is None and law.law != "binomial" and law.can_have_cap(cap):
        capped = {**law.to_dict(), "maximum": cap}
        words = f"at most {cap} runs ({_law(choice)})"
        changes.append((words, lambda: PrivateSelection(base, run_law_from_dict(capped))))
    return changes


def _with(law: RunLaw, more: float) -> RunLaw:
    """Return a law with a larger mean; of a binomial one the trials grow as well."""
    data = dict(law.to_dict())
    if "n" in data:
        data["n"] = int(data["n"]) + math.ceil(more)
    data["mean"] = float(data["mean"]) + more
    return run_law_from_dict(data)
