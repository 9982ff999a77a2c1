"""Where ε comes from, part by part, and what a change of an event would cost or save."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

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
    flatten,
)
from privtune.accounting.pld import epsilons_on_one_lattice
from privtune.accounting.pmf import GridError
from privtune.accounting.registry import Choice, entry, scaled, text, under
from privtune.accounting.runs import RunLaw, run_law_from_dict
from privtune.errors import PrivTuneError

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


_CAP = 3.0  # of the mean number of runs, as an example of a cap
_SHARES = (0.05, 0.25, 0.5, 0.75, 0.9, 1.0)
_SAME = 1e-3  # relative
_MOST = 8  # different noises and choices that are looked at


@dataclass(frozen=True)
class Change:
    """One change, and ε with it.

    Args:
        text: What is changed, in words.
        epsilon: An upper bound on ε with the change; may be infinite.
        difference: That less what the event costs unchanged: the difference of two upper bounds.
    """

    text: str
    epsilon: float
    difference: float

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        numbers = {"epsilon": self.epsilon, "difference": self.difference}
        known = {k: v if math.isfinite(v) else "inf" for k, v in numbers.items()}
        return {"text": self.text, **known}


@dataclass(frozen=True)
class Share:
    """What scores on records of their own cost the rest, at the same ε of the whole.

    Args:
        share: What each score costs, as a share of what stands beside it, both before the factor.
        noise_factor: On all noise, the scores' included, so that the whole costs what it does now.
        noise_multipliers: Of the scores with that factor, in the order of the event.
    """

    share: float
    noise_factor: float
    noise_multipliers: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {**asdict(self), "noise_multipliers": list(self.noise_multipliers)}


@dataclass(frozen=True)
class Sensitivity:
    """What an event costs, and what it would cost otherwise.

    Args:
        guarantee: The event's, unchanged.
        changes: The changes, those that save most first.
    """

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
    """Return what changes of an event would cost or save.

    One run more on average, one that is charged by itself, and a cap, for each choice among runs;
    half and twice the noise of each release; a δ ten times smaller; all of it once more.

    Args:
        event: What touches the data.
        delta: In (0, 1).
        adjacency: The relation of neighbouring datasets.
        names: What to call releases of the event; others are called by their noise.

    Returns:
        ε unchanged and with each change. Every ε is an upper bound; a difference of two says what
        is reported more or less, not what is lost.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> found = sensitivity(Gaussian(4.0), 1e-5)
        >>> [change.text for change in found.changes if change.difference < 0]
        ['twice the noise (gaussian, noise multiplier 4)']
    """
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
    """Return what scores on records of their own, such as a study's reports, cost the rest.

    Args:
        event: What touches the data.
        now: What it costs.

    Returns:
        The trade at several shares; nothing where no score stands in parallel to something else.

    Example:
        >>> from privtune.accounting import Gaussian, Parallel
        >>> event = Parallel((Gaussian(4.0), Gaussian(9.0)))
        >>> found = shares_of_scores(event, epsilon(event, 1e-5))
        >>> [(row.share, round(row.noise_factor, 2)) for row in found][-1]
        (1.0, 1.0)
    """
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
            return Composed(
                [
                    scaled(
                        Parallel((part.children()[0], scores[part])) if part in scores else part,
                        factor,
                    )
                    for part in _parts(event)
                ]
            )

        try:
            factor = _factor(lambda f: epsilon(changed(f), **terms).epsilon, now.epsilon)
        except PrivTuneError:
            continue
        noises = tuple(factor * float(scores[part].to_dict()["noise_multiplier"]) for part in parts)
        found.append(Share(share, factor, noises))
    return tuple(found)


def _factor(cost: Callable[[float], float], target: float) -> float:
    """Return the least factor on noise from 1 on, to a thousandth, at which the target is met.

    Raises:
        PrivTuneError: If no factor does.
    """
    if cost(1.0) <= target * (1.0 + _SAME):
        return 1.0
    return solve_decreasing(cost, target, _SAME, PrivTuneError)


def _change(words: str, found: float, now: Guarantee) -> Change:
    both = math.isinf(found) and math.isinf(now.epsilon)
    return Change(words, found, 0.0 if both else found - now.epsilon)


def _walk(event: Event, seen: dict[Event, None]) -> dict[Event, None]:
    """Collect an event and all that is in it, each once, in the order of the tree."""
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
