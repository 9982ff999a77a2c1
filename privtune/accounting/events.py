"""What touched the data: events, their JSON, and `flatten`, the only place where counts are multiplied."""

from __future__ import annotations

import json
import math
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, NoReturn, Self

from privtune.accounting._checks import LARGEST, check_integer, check_noise, check_number
from privtune.accounting.runs import RunLaw, run_law_from_dict
from privtune.errors import InvalidInputError

SCHEMA_VERSION = 1
_MAX_TOTAL = 10**18  # of one part, multiplied out
MAX_DEPTH = 64  # as text
_DEEPEST = MAX_DEPTH + 8  # with what is put around an event that was read


class Adjacency(StrEnum):
    """Which datasets are neighbours. A guarantee without its adjacency says nothing.

    `ADD_REMOVE`: one record is present or absent. `REPLACE_ONE`: one record is exchanged for
    another one; the number of records is public.
    """

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class Event(ABC):
    """Base of all events: frozen, hashable, JSON both ways.

    Fields hold numbers, laws of runs, events, or tuples of them; None stands for what is left out.

    Example:
        >>> from privtune.accounting import Gaussian, PoissonSampled, Repeated, event_from_json
        >>> training = Repeated(1000, PoissonSampled(0.01, Gaussian(1.1)))
        >>> training.children()[0].to_dict()
        {'type': 'poisson_sampled', 'rate': 0.01, 'event': {'type': 'gaussian', 'noise_multiplier': 1.1}}
        >>> training.parts() == ((training.event, 1000),), Gaussian(1.1).parts()
        (True, None)
        >>> training.rebuild([Gaussian(1.1)])  # the same number of releases, of all records
        Repeated(count=1000, event=Gaussian(noise_multiplier=1.1))
        >>> event_from_json(training.to_json()) == training, {training: "hashable"}[training]
        (True, 'hashable')
    """

    type: ClassVar[str]

    @cached_property
    def depth(self) -> int:
        """How many events stand inside each other below this one."""
        return max((1 + child.depth for child in self.children()), default=0)

    def children(self) -> tuple[Event, ...]:
        """Return the events that this one is made of, in the order of its fields."""
        return tuple(child for _, value in self._values() for child in _events_in(value))

    def rebuild(self, children: Sequence[Event]) -> Self:
        """Return the same event with other children.

        Args:
            children: As many as `children()` returns, in the same order.

        Returns:
            An event of the same type.

        Raises:
            InvalidInputError: Another number of children.
        """
        if len(children) != len(self.children()):
            raise InvalidInputError("children", children, "must be as many as the event has")
        rest = iter(children)
        values: dict[str, Any] = dict(self._values())
        for name, value in self._values():
            if isinstance(value, Event):
                values[name] = next(rest)
            elif _events_in(value):
                values[name] = tuple(next(rest) for _ in value)
        return type(self)(**values)

    def parts(self) -> tuple[tuple[Event, int], ...] | None:
        """Return what this event is the composition of, with counts; None if of itself alone."""
        return None

    def _values(self) -> Iterator[tuple[str, Any]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON-ready data, in the public format."""
        return {
            "type": self.type,
            **{name: _json(value) for name, value in self._values() if value is not None},
        }

    def to_json(self) -> str:
        """Return the canonical text: sorted keys, no spaces, exact floats, the schema version."""
        document = {"schema": SCHEMA_VERSION, **self.to_dict()}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _events_in(value: object) -> tuple[Event, ...]:
    """Return the events that one field holds."""
    if isinstance(value, Event):
        return (value,)
    return tuple(v for v in value if isinstance(v, Event)) if isinstance(value, tuple) else ()


def _json(value: object) -> object:
    if isinstance(value, Event | RunLaw):
        return value.to_dict()
    return [_json(part) for part in value] if isinstance(value, tuple) else value


def set_field(event: Event, name: str, value: object) -> None:
    """Set a field of a frozen event, in its constructor."""
    object.__setattr__(event, name, value)


def check_events(name: str, value: object, *, allow_empty: bool = False) -> tuple[Event, ...]:
    """Return a field that holds events, checked."""
    if isinstance(value, Event | str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidInputError(name, value, "must be a sequence of events")
    events = tuple(value)
    if not events and not allow_empty:
        raise InvalidInputError(name, value, "must hold at least one event")
    for event in events:
        check_event(name, event)
    return events


def check_event(name: str, value: object) -> Event:
    """Return a field that holds an event, checked."""
    if not isinstance(value, Event):
        raise InvalidInputError(name, value, "must be an event")
    if value.depth >= _DEEPEST:
        raise InvalidInputError(name, value.type, f"must be nested at most {_DEEPEST} deep")
    return value


def flatten(event: Event) -> dict[Event, int]:
    """Return the distinct parts that an event composes, each with its multiplicity."""
    # The only place where counts are multiplied. The Gaussians of a `Joint` become the one that they equal;
    # a `Joint` stays only where Laplace releases share a sample with others.
    parts: dict[Event, int] = {}
    stack: list[tuple[Event, int]] = [(event, 1)]
    while stack:
        part, count = stack.pop()
        if count > _MAX_TOTAL:
            raise InvalidInputError("count", count, "must be at most 10^18, multiplied out")
        inner = part.parts()
        if inner is None:
            parts[part] = parts.get(part, 0) + count
        else:
            stack.extend((child, count * number) for child, number in reversed(inner))
    return parts


_MAX_COUNT = 10**9


@dataclass(frozen=True)
class Gaussian(Event):
    """One release with Gaussian noise.

    Args:
        noise_multiplier: Standard deviation of the noise over the L2 sensitivity of the release
            under the adjacency of the question, from 1e-100 to 1e100.

    Example:
        >>> Gaussian(noise_multiplier=1.1).to_json()
        '{"noise_multiplier":1.1,"schema":1,"type":"gaussian"}'
    """

    type: ClassVar[str] = "gaussian"
    noise_multiplier: float

    def __post_init__(self) -> None:
        set_field(self, "noise_multiplier", check_noise("noise_multiplier", self.noise_multiplier))


@dataclass(frozen=True)
class Laplace(Event):
    """One release with Laplace noise.

    Args:
        noise_multiplier: Scale of the noise over the L1 sensitivity, from 1e-100 to 1e100.

    Example:
        >>> from privtune.accounting import epsilon
        >>> round(epsilon(Laplace(2.0), 1e-12).epsilon, 4)  # 1 / scale, with hardly any δ
        0.5
    """

    type: ClassVar[str] = "laplace"
    noise_multiplier: float

    def __post_init__(self) -> None:
        set_field(self, "noise_multiplier", check_noise("noise_multiplier", self.noise_multiplier))


@dataclass(frozen=True)
class Joint(Event):
    """Several Gaussian and Laplace releases about the same records.

    Inside `PoissonSampled` all of them see one sample. That is dearer than sampling anew for each.
    The Gaussian releases equal a single one with `1/s² = Σ 1/s_j²`.

    Args:
        events: The gaussian and laplace releases, at least one.

    Raises:
        InvalidInputError: A part is neither Gaussian nor Laplace, or a joint of these.

    Example:
        >>> joint = Joint([Gaussian(1.2), Gaussian(8.0)])  # a gradient and a loss of one sample
        >>> round(joint.noise_multiplier, 4)  # as private as one release with a little less noise
        1.1867
    """

    type: ClassVar[str] = "joint"
    events: tuple[Event, ...]

    def __init__(self, events: Sequence[Event]) -> None:
        set_field(self, "events", check_events("events", events))
        for event in self.events:
            if not isinstance(event, Gaussian | Laplace):
                raise InvalidInputError(
                    "events", event.type, "a joint event holds gaussian and laplace events only"
                )

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of the one Gaussian that the Gaussian releases equal; inf if none."""
        noises = [e.noise_multiplier for e in self.events if isinstance(e, Gaussian)]
        if len(noises) < 2:  # a single one is returned as it is, not rounded
            return noises[0] if noises else math.inf
        return 1.0 / math.sqrt(math.fsum((1.0 / noise) ** 2 for noise in noises))

    @property
    def laplace_multipliers(self) -> tuple[float, ...]:
        """The noise multipliers of the Laplace releases, ascending."""
        return tuple(sorted(e.noise_multiplier for e in self.events if isinstance(e, Laplace)))

    def parts(self) -> tuple[tuple[Event, int], ...]:
        """Return the one Gaussian that the Gaussians equal, and each Laplace release."""
        sigma = self.noise_multiplier
        gaussian = ((Gaussian(sigma), 1),) if math.isfinite(sigma) else ()
        return (*gaussian, *((Laplace(scale), 1) for scale in self.laplace_multipliers))


@dataclass(frozen=True)
class PoissonSampled(Event):
    """One release about a Poisson sample: each record is in it independently with a public rate.

    Args:
        rate: Sampling probability of each record, in (0, 1].
        event: A gaussian, laplace or joint event.

    Raises:
        InvalidInputError: The rate is not in (0, 1], or the event is not Gaussian, Laplace or
            joint.

    Example:
        >>> PoissonSampled(64 / 60_000, Gaussian(1.1)).event
        Gaussian(noise_multiplier=1.1)
    """

    type: ClassVar[str] = "poisson_sampled"
    rate: float
    event: Event

    def __post_init__(self) -> None:
        set_field(self, "rate", check_number("rate", self.rate, above=0.0, at_most=1.0))
        if not isinstance(check_event("event", self.event), Gaussian | Laplace | Joint):
            raise InvalidInputError(
                "event",
                self.event.type,
                "a poisson_sampled event holds a gaussian, laplace or joint event",
                "Repeat or compose the sampled event, not the event that is sampled.",
            )

    def parts(self) -> tuple[tuple[Event, int], ...] | None:
        """Return the same with its releases merged; all records are no sample."""
        inner = self.event.parts() or ((self.event, 1),)
        if self.rate == 1.0:
            return inner
        event = inner[0][0] if len(inner) == 1 else Joint([part for part, _ in inner])
        return None if event == self.event else ((PoissonSampled(self.rate, event), 1),)


@dataclass(frozen=True)
class Repeated(Event):
    """The same event, `count` times, each with fresh noise and a fresh sample.

    Args:
        count: Number of times, from 1 to 10^9.
        event: What is repeated.

    Example:
        >>> Repeated(3, Repeated(5, Gaussian(4.0))).parts()
        ((Repeated(count=5, event=Gaussian(noise_multiplier=4.0)), 3),)
    """

    type: ClassVar[str] = "repeated"
    count: int
    event: Event

    def __post_init__(self) -> None:
        set_field(self, "count", check_integer("count", self.count, at_least=1, at_most=_MAX_COUNT))
        check_event("event", self.event)

    def parts(self) -> tuple[tuple[Event, int], ...]:
        """Return the event, as often as it happens."""
        return ((self.event, self.count),)


@dataclass(frozen=True)
class Composed(Event):
    """Several events about the same data, all released. No event at all releases nothing.

    Args:
        events: The events, in any order; may be empty.

    Example:
        >>> from privtune.accounting import epsilon
        >>> study = Composed([Repeated(100, Gaussian(40.0)), Gaussian(8.0)])
        >>> epsilon(study, 1e-5).epsilon < sum(epsilon(part, 1e-5).epsilon for part in study.events)
        True
    """

    type: ClassVar[str] = "composed"
    events: tuple[Event, ...]

    def __init__(self, events: Sequence[Event]) -> None:
        set_field(self, "events", check_events("events", events, allow_empty=True))

    def parts(self) -> tuple[tuple[Event, int], ...]:
        """Return each event, once."""
        return tuple((event, 1) for event in self.events)


@dataclass(frozen=True)
class WorstOf(Event):
    """One of these events runs. Which one does not depend on the data.

    Args:
        events: The alternatives, at least one.
        weights: Without: nothing is known about the choice, and the pointwise maximum is charged.
            With: the alternative is drawn by this public law, and its name is part of the output;
            the mixture is charged. Positive, one for each event, summing to 1.

    Raises:
        InvalidInputError: The weights are not one for each event, or do not sum to 1.

    Example:
        >>> from privtune.accounting import epsilon
        >>> short, long = Repeated(100, Gaussian(40.0)), Repeated(900, Gaussian(40.0))
        >>> round(epsilon(WorstOf([short, long]), 1e-5).epsilon, 2)
        3.15
        >>> round(epsilon(WorstOf([short, long], [0.999, 0.001]), 1e-5).epsilon, 2)  # drawn, and shown
        1.58
    """

    type: ClassVar[str] = "worst_of"
    events: tuple[Event, ...]
    weights: tuple[float, ...] | None = None

    def __init__(self, events: Sequence[Event], weights: Sequence[float] | None = None) -> None:
        set_field(self, "events", check_events("events", events))
        set_field(self, "weights", None)
        if weights is None:
            return
        if isinstance(weights, str | bytes) or not isinstance(weights, Iterable):
            raise InvalidInputError("weights", weights, "must be a sequence of numbers")
        values = tuple(check_number("weights", w, above=0.0, at_most=1.0) for w in weights)
        if len(values) != len(self.events):
            raise InvalidInputError("weights", values, "must hold one number for each event")
        if abs(math.fsum(values) - 1.0) > 1e-9:
            raise InvalidInputError("weights", values, "must sum to 1")
        set_field(self, "weights", values)


@dataclass(frozen=True)
class Parallel(Event):
    """Events on disjoint parts of the data; a record's part does not depend on other records.

    Under add-remove a record is in one part, and the dearest event is charged. Under replace-one
    the new record may stand in another part than the old one: two parts change, one loses a record
    and one gains it, and the two dearest events are charged together. Each event must then hold
    for such a change of its own part, too.

    Args:
        events: The events, at least one; a record is touched by one of them.

    Example:
        >>> from privtune.accounting import epsilon
        >>> counts = Parallel([Gaussian(5.0)] * 10)  # of ten regions
        >>> round(epsilon(counts, 1e-5).epsilon, 3), round(epsilon(Gaussian(5.0), 1e-5).epsilon, 3)
        (0.726, 0.726)
    """

    type: ClassVar[str] = "parallel"
    events: tuple[Event, ...]

    def __init__(self, events: Sequence[Event]) -> None:
        set_field(self, "events", check_events("events", events))


@dataclass(frozen=True)
class ZCDP(Event):
    """A release of which only zero-concentrated DP is known: Rényi divergence `rho·α`.

    Args:
        rho: From 0 to 1e100.

    Example:
        >>> from privtune.accounting import epsilon
        >>> weaker = epsilon(ZCDP(0.5), 1e-5).epsilon  # what is left of Gaussian(1.0) as ρ = 1/2
        >>> round(weaker, 1), round(epsilon(Gaussian(1.0), 1e-5).epsilon, 1)
        (4.7, 4.4)
    """

    type: ClassVar[str] = "zcdp"
    rho: float

    def __post_init__(self) -> None:
        set_field(self, "rho", check_number("rho", self.rho, at_least=0.0, at_most=LARGEST))


@dataclass(frozen=True)
class ApproximateDP(Event):
    """A release of which only `(epsilon, delta)`-DP is known.

    Args:
        epsilon: From 0 to 1e100.
        delta: In [0, 1).

    Example:
        >>> from privtune.accounting import epsilon
        >>> published = Repeated(3, ApproximateDP(epsilon=0.5, delta=1e-7))
        >>> epsilon(published, 1e-5).epsilon <= 1.5
        True
    """

    type: ClassVar[str] = "approximate_dp"
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        set_field(
            self, "epsilon", check_number("epsilon", self.epsilon, at_least=0.0, at_most=LARGEST)
        )
        set_field(self, "delta", check_number("delta", self.delta, at_least=0.0, below=1.0))


@dataclass(frozen=True)
class NonPrivate(Event):
    """Data left without protection: epsilon is infinite, alone and in every composition.

    Example:
        >>> from privtune.accounting import epsilon
        >>> epsilon(Composed([Gaussian(8.0), NonPrivate()]), 1e-5).epsilon
        inf
    """

    type: ClassVar[str] = "non_private"


@dataclass(frozen=True)
class PrivateSelection(Event):
    """The best of K independent runs of one mechanism, K drawn from a public law and kept secret.

    Args:
        event: One run, its score included.
        runs: The law of K.

    Raises:
        InvalidInputError: `runs` is no law.

    Example:
        >>> from privtune.accounting import Gaussian, Geometric, PoissonSampled, Repeated, epsilon
        >>> run = Repeated(1000, PoissonSampled(0.01, Gaussian(2.0)))
        >>> best = PrivateSelection(run, Geometric(mean=10))
        >>> ratio = epsilon(best, 1e-5).epsilon / epsilon(run, 1e-5).epsilon
        >>> 1 < ratio < 3.5  # ten runs, all shown, would cost more
        True
    """

    type: ClassVar[str] = "private_selection"
    event: Event
    runs: RunLaw

    def __post_init__(self) -> None:
        check_event("event", self.event)
        if not isinstance(self.runs, RunLaw):
            raise InvalidInputError("runs", self.runs, "must be a law of the number of runs")


@dataclass(frozen=True)
class ThresholdSelection(Event):
    """Run one mechanism until a score reaches a known threshold; give up at random.

    After each run below the threshold the procedure stops with a public probability and releases a
    fixed symbol. Only the run that passed is released; how many runs there were stays secret.

    Args:
        event: One run, its score included.
        stop: Probability to give up after a run that did not pass, in (0, 1].

    References:
        Liu and Talwar, arXiv:1811.07971, Algorithm 1, without a limit on the number of runs.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> ThresholdSelection(Gaussian(8.0), stop=0.05).to_dict()["stop"]  # 20 runs at most, on average
        0.05
    """

    type: ClassVar[str] = "threshold_selection"
    event: Event
    stop: float

    def __post_init__(self) -> None:
        check_event("event", self.event)
        set_field(self, "stop", check_number("stop", self.stop, at_least=1e-6, at_most=1.0))


@dataclass(frozen=True)
class SubsampledTuning(Event):
    """Tuning on a Poisson subset of the data, then one final training.

    Args:
        variant: 1: the final training sees the rest of the data; 2: it sees all of it.
        rate: Probability that a record is in the subset, in (0, 1).
        tuning: What happens to the subset.
        training: The final training.

    Example:
        >>> from privtune.accounting import Gaussian, Geometric, PoissonSampled, Repeated
        >>> run = Repeated(100, PoissonSampled(0.1, Gaussian(2.0)))
        >>> tuning = PrivateSelection(run, Geometric(mean=10))
        >>> SubsampledTuning(variant=2, rate=0.1, tuning=tuning, training=run).rate
        0.1
    """

    type: ClassVar[str] = "subsampled_tuning"
    variant: int
    rate: float
    tuning: Event
    training: Event

    def __post_init__(self) -> None:
        set_field(self, "variant", check_integer("variant", self.variant, at_least=1, at_most=2))
        set_field(self, "rate", check_number("rate", self.rate, above=0.0, below=1.0))
        check_event("tuning", self.tuning)
        check_event("training", self.training)


_TYPES: dict[str, type[Event]] = {
    kind.type: kind
    for kind in (
        ZCDP,
        ApproximateDP,
        Composed,
        Gaussian,
        Joint,
        Laplace,
        NonPrivate,
        Parallel,
        PoissonSampled,
        Repeated,
        WorstOf,
        PrivateSelection,
        SubsampledTuning,
        ThresholdSelection,
    )
}


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event that `data` describes in the public format.

    Args:
        data: JSON data, as `Event.to_dict` writes it; `schema`, if present, must be 1.

    Returns:
        The event, checked.

    Raises:
        InvalidInputError: Unknown type or field, missing field, or a value out of its range.

    Example:
        >>> event_from_dict({"type": "gaussian", "noise_multiplier": 1.1})
        Gaussian(noise_multiplier=1.1)
        >>> event_from_dict({"type": "gaussian", "sigma": 1.1})
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: field = 'sigma': gaussian knows noise_multiplier.
    """
    if isinstance(data, Mapping) and "schema" in data:
        if data["schema"] != SCHEMA_VERSION or isinstance(data["schema"], bool):
            raise InvalidInputError(
                "schema", data["schema"], f"this version reads schema {SCHEMA_VERSION}"
            )
        data = {key: value for key, value in data.items() if key != "schema"}
    return _read(data, 0)


def _read(data: object, depth: int) -> Event:
    if depth > MAX_DEPTH:
        raise InvalidInputError("event", "...", f"must be nested at most {MAX_DEPTH} deep")
    if not isinstance(data, Mapping):
        raise InvalidInputError("event", data, "must be a JSON object with a type")
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise InvalidInputError("type", kind, f"must be one of {', '.join(_TYPES)}")
    cls = _TYPES[kind]
    names = [field.name for field in fields(cls)]
    for name in data:
        if name != "type" and name not in names:
            known = ", ".join(names) if names else "no fields"
            raise InvalidInputError("field", name, f"{kind} knows {known}")
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in data:
            values[field.name] = _field(field.name, field.type, data[field.name], depth + 1)
        elif field.default is MISSING:
            raise InvalidInputError("field", field.name, f"is required by {kind}")
    return cls(**values)


def _field(name: str, kind: object, value: Any, depth: int) -> object:
    """Return the value of a field, by what the field is declared to hold."""
    if kind == "Event":
        return _read(value, depth)
    if kind == "tuple[Event, ...]":
        if not isinstance(value, list | tuple):
            raise InvalidInputError(name, value, "must be a list of events")
        return tuple(_read(child, depth) for child in value)
    return run_law_from_dict(value) if kind == "RunLaw" else value


def event_from_json(text: str) -> Event:
    """Return the event that a JSON text describes; NaN, infinities and doubled keys are refused.

    Args:
        text: JSON, as `Event.to_json` writes it.

    Returns:
        The event, checked.

    Raises:
        InvalidInputError: It is not JSON, or not an event.

    Example:
        >>> event_from_json('{"type": "zcdp", "rho": 0.1}')
        ZCDP(rho=0.1)
    """
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise InvalidInputError("event", str(error), "must be valid JSON") from None
    return event_from_dict(data)


def _no_constant(text: str) -> NoReturn:
    raise InvalidInputError("event", text, "numbers must be finite")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise InvalidInputError("event", sorted(k for k, _ in pairs), "a key appears twice")
    return data
