"""Events that describe how data was used, their JSON, and `flatten`, which multiplies out counts."""

from __future__ import annotations

import json
import math
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, NoReturn, Self

from privtune.accounting.checks import LARGEST, check_integer, check_noise, check_number
from privtune.accounting.runs import RunLaw, run_law_from_dict
from privtune.errors import InvalidInputError
from privtune.names import did_you_mean, refuse_fields, refuse_name

SCHEMA_VERSION = 1
_MAX_TOTAL = 10**18  # of one part, multiplied out
MAX_DEPTH = 64  # as text
_DEEPEST = MAX_DEPTH + 8  # with what is put around an event that was read


class Adjacency(StrEnum):
    """The relation that says which datasets are neighbours; each guarantee names one.

    `ADD_REMOVE`: one record is present or absent. `REPLACE_ONE`: one record is exchanged for
    another one; the number of records is public.
    """

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True)
class Event(ABC):
    """Base class of all events, which are frozen, hashable, and convertible to and from JSON.

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
        """The number of levels of events nested below this one."""
        return max((1 + child.depth for child in self.children()), default=0)

    def children(self) -> tuple[Event, ...]:
        """Return the events that this one is made of, in the order of its fields."""
        children: list[Event] = []
        for _, value in self._values():
            children += _events_in(value)
        return tuple(children)

    def rebuild(self, children: Sequence[Event]) -> Self:
        """Return the same event with its children replaced.

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
        """Return the events that this one composes, with counts; None if it composes none."""
        return None

    def _values(self) -> Iterator[tuple[str, Any]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON-ready data, in the public format."""
        data: dict[str, Any] = {"type": self.type}
        for name, value in self._values():
            if value is not None:
                data[name] = _json(value)
        return data

    def to_json(self) -> str:
        """Return canonical JSON text: sorted keys, no spaces, exact floats, the schema version."""
        document = {"schema": SCHEMA_VERSION, **self.to_dict()}
        return json.dumps(
            document,
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )


def _events_in(value: object) -> tuple[Event, ...]:
    """Return the events in one field's value: the value itself, or those of a tuple."""
    if isinstance(value, Event):
        return (value,)
    if not isinstance(value, tuple):
        return ()
    return tuple(part for part in value if isinstance(part, Event))


def _json(value: object) -> object:
    if isinstance(value, Event | RunLaw):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_json(part) for part in value]
    return value


def set_field(
    event: Event,
    name: str,
    value: object,
) -> None:
    """Set a field of a frozen event from inside its constructor."""
    object.__setattr__(event, name, value)


def check_events(
    name: str,
    value: object,
    *,
    allow_empty: bool = False,
) -> tuple[Event, ...]:
    """Return a sequence of events as a tuple, or refuse any other value."""
    if isinstance(value, Event | str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidInputError(name, value, "must be a sequence of events")
    events = tuple(value)
    if not events and not allow_empty:
        raise InvalidInputError(name, value, "must hold at least one event")
    for event in events:
        check_event(name, event)
    return events


def check_event(name: str, value: object) -> Event:
    """Return the value if it is an event that is not nested too deep, or refuse it."""
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


MAX_COUNT = 10**9
"""How often an event is repeated at most."""


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
        noise_multiplier = check_noise("noise_multiplier", self.noise_multiplier)
        set_field(self, "noise_multiplier", noise_multiplier)


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
        noise_multiplier = check_noise("noise_multiplier", self.noise_multiplier)
        set_field(self, "noise_multiplier", noise_multiplier)


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
        events = check_events("events", events)
        set_field(self, "events", events)
        for event in self.events:
            if not isinstance(event, Gaussian | Laplace):
                raise InvalidInputError(
                    "events", event.type, "a joint event holds gaussian and laplace events only"
                )

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of the one Gaussian equal to all Gaussian releases; inf if none."""
        noises = [event.noise_multiplier for event in self.events if isinstance(event, Gaussian)]
        if not noises:
            return math.inf
        if len(noises) == 1:  # returned as it is, not rounded
            return noises[0]
        precision = math.fsum((1.0 / noise) ** 2 for noise in noises)
        return 1.0 / math.sqrt(precision)

    @property
    def laplace_multipliers(self) -> tuple[float, ...]:
        """The noise multipliers of the Laplace releases, ascending."""
        scales = [event.noise_multiplier for event in self.events if isinstance(event, Laplace)]
        return tuple(sorted(scales))

    def parts(self) -> tuple[tuple[Event, int], ...]:
        """Return one Gaussian equal to all Gaussian releases, and each Laplace release, with counts."""
        sigma = self.noise_multiplier
        parts: list[tuple[Event, int]] = []
        if math.isfinite(sigma):
            parts.append((Gaussian(sigma), 1))
        for scale in self.laplace_multipliers:
            parts.append((Laplace(scale), 1))
        return tuple(parts)


@dataclass(frozen=True)
class PoissonSampled(Event):
    """One release about a Poisson sample: each record is in it independently at a public rate.

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
        rate = check_number(
            "rate",
            self.rate,
            above=0.0,
            at_most=1.0,
        )
        set_field(self, "rate", rate)
        if not isinstance(check_event("event", self.event), Gaussian | Laplace | Joint):
            raise InvalidInputError(
                "event",
                self.event.type,
                "a poisson_sampled event holds a gaussian, laplace or joint event",
                "Repeat or compose the sampled event, not the event that is sampled.",
            )

    def parts(self) -> tuple[tuple[Event, int], ...] | None:
        """Return the event with merged Gaussians, or unsampled parts at rate 1; None if unchanged."""
        inner = self.event.parts() or ((self.event, 1),)
        if self.rate == 1.0:
            return inner
        releases = [part for part, _ in inner]
        event = releases[0] if len(releases) == 1 else Joint(releases)
        if event == self.event:
            return None
        return ((PoissonSampled(self.rate, event), 1),)


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
        count = check_integer(
            "count",
            self.count,
            at_least=1,
            at_most=MAX_COUNT,
        )
        set_field(self, "count", count)
        check_event("event", self.event)

    def parts(self) -> tuple[tuple[Event, int], ...]:
        """Return the repeated event with its count."""
        return ((self.event, self.count),)


@dataclass(frozen=True)
class Composed(Event):
    """Several events about the same data, all of which are released; with no event, an empty release.

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
        events = check_events("events", events, allow_empty=True)
        set_field(self, "events", events)

    def parts(self) -> tuple[tuple[Event, int], ...]:
        """Return each event of the composition with the count 1."""
        return tuple((event, 1) for event in self.events)


@dataclass(frozen=True)
class WorstOf(Event):
    """One of several events, chosen independently of the data.

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
        events = check_events("events", events)
        set_field(self, "events", events)
        set_field(self, "weights", None)
        if weights is None:
            return
        if isinstance(weights, str | bytes) or not isinstance(weights, Iterable):
            raise InvalidInputError("weights", weights, "must be a sequence of numbers")
        values = tuple(
            check_number(
                "weights",
                w,
                above=0.0,
                at_most=1.0,
            )
            for w in weights
        )
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
        events = check_events("events", events)
        set_field(self, "events", events)


@dataclass(frozen=True)
class ZCDP(Event):
    """A release known only to be zero-concentrated DP: its Rényi divergence is at most `rho·α`.

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
        rho = check_number(
            "rho",
            self.rho,
            at_least=0.0,
            at_most=LARGEST,
        )
        set_field(self, "rho", rho)


@dataclass(frozen=True)
class ApproximateDP(Event):
    """A release known only to be `(epsilon, delta)`-DP.

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
        epsilon = check_number(
            "epsilon",
            self.epsilon,
            at_least=0.0,
            at_most=LARGEST,
        )
        set_field(self, "epsilon", epsilon)
        delta = check_number(
            "delta",
            self.delta,
            at_least=0.0,
            below=1.0,
        )
        set_field(self, "delta", delta)


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release without any protection: ε is infinite, alone and in every composition.

    Example:
        >>> from privtune.accounting import epsilon
        >>> epsilon(Composed([Gaussian(8.0), NonPrivate()]), 1e-5).epsilon
        inf
    """

    type: ClassVar[str] = "non_private"


@dataclass(frozen=True)
class PrivateSelection(Event):
    """The best of K independent runs of one mechanism, with a secret K from a public law.

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
    """Runs of one mechanism until a score reaches a known threshold or chance ends the search.

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
        stop = check_number(
            "stop",
            self.stop,
            at_least=1e-6,
            at_most=1.0,
        )
        set_field(self, "stop", stop)


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
        variant = check_integer(
            "variant",
            self.variant,
            at_least=1,
            at_most=2,
        )
        set_field(self, "variant", variant)
        rate = check_number(
            "rate",
            self.rate,
            above=0.0,
            below=1.0,
        )
        set_field(self, "rate", rate)
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


DP_ACCOUNTING: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ComposedDpEvent": ("composed", {"events": "events"}),
    "GaussianDpEvent": ("gaussian", {"noise_multiplier": "noise_multiplier"}),
    "LaplaceDpEvent": ("laplace", {"noise_multiplier": "noise_multiplier"}),
    "NonPrivateDpEvent": ("non_private", {}),
    "PoissonSampledDpEvent": (
        "poisson_sampled",
        {"sampling_probability": "rate", "event": "event"},
    ),
    "RepeatAndSelectDpEvent": (
        "private_selection",
        {"event": "event", "mean": "mean", "shape": "shape"},
    ),
    "SelfComposedDpEvent": ("repeated", {"event": "event", "count": "count"}),
    "ZCDpEvent": ("zcdp", {"rho": "rho"}),
}
"""dp-accounting's events that are read under their own names: the type that each is here, and its fields."""


def event_from_dict(data: Mapping[str, Any]) -> Event:
    """Return the event that `data` describes in the public format.

    Args:
        data: JSON data, as `Event.to_dict` writes it, or with dp-accounting's names of events and
            fields; `schema`, if present, must be 1.

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
        privtune.errors.InvalidInputError: field = 'sigma': gaussian takes noise_multiplier. Did you ...

        The names of dp-accounting's events are read, too, with the fields that they have there:

        >>> event_from_dict({"type": "GaussianDpEvent", "noise_multiplier": 1.1})
        Gaussian(noise_multiplier=1.1)
    """
    if isinstance(data, Mapping) and "schema" in data:
        if data["schema"] != SCHEMA_VERSION or isinstance(data["schema"], bool):
            version = data["schema"]
            value = version if isinstance(version, int) else type(version).__name__
            allowed = f"this version reads schema {SCHEMA_VERSION}"
            raise InvalidInputError("schema", value, allowed)
        data = {key: value for key, value in data.items() if key != "schema"}
    return _read(data, 0)


def _read(data: object, depth: int) -> Event:
    """Return the event that JSON data describes, or refuse data nested too deep."""
    if depth > MAX_DEPTH:
        raise InvalidInputError("event", "...", f"must be nested at most {MAX_DEPTH} deep")
    if not isinstance(data, Mapping):
        # What it is instead is not shown: it may be a record of a data file.
        raise InvalidInputError("event", type(data).__name__, "must be a JSON object with a type")
    if "type" not in data:
        raise InvalidInputError(
            "type",
            None,
            "must be given by every event",
            _ABOUT,
        )
    kind = data["type"]
    if isinstance(kind, str) and kind.endswith("DpEvent"):
        data = _translated(kind, data)
        kind = data["type"]
    if not isinstance(kind, str) or kind not in _TYPES:
        # A type that is near none is not shown: it may be a cell of a record.
        word = kind if did_you_mean(kind, _TYPES) else type(kind).__name__
        refuse_name(
            "type",
            word,
            _TYPES,
            also="or an event of dp-accounting",
            remedy=_ABOUT,
        )
    cls = _TYPES[kind]
    names = [field.name for field in fields(cls)]
    unknown = set(data) - {"type", *names}
    if unknown:
        refuse_fields(
            "field",
            unknown,
            names,
            kind,
        )
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name in data:
            values[field.name] = _field(
                field.name,
                field.type,
                data[field.name],
                depth + 1,
            )
        elif field.default is MISSING:
            raise InvalidInputError("field", field.name, f"is required by {kind}")
    return cls(**values)


_ABOUT = "The documentation's page on EVENT.json has an example of each."


def _translated(kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an event of dp-accounting, given as JSON data, in this package's format."""
    if kind == "NoOpDpEvent":
        return {"type": "composed", "events": []}
    if kind not in DP_ACCOUNTING:
        read = ", ".join([*DP_ACCOUNTING, "NoOpDpEvent"])
        allowed = f"has no exact counterpart here; of dp-accounting's events these are read: {read}"
        short = [name.removesuffix("DpEvent") for name in DP_ACCOUNTING]
        remedy = did_you_mean(kind.removesuffix("DpEvent"), short).replace("?", "DpEvent?")
        raise InvalidInputError(
            "type",
            kind,
            allowed,
            remedy,
        )
    name, theirs = DP_ACCOUNTING[kind]
    values = {field: value for field, value in data.items() if field != "type"}
    if kind == "ZCDpEvent" and values.pop("xi", 0) != 0:
        raise InvalidInputError("xi", data["xi"], "must be 0: zcdp has a rho alone")
    unknown = set(values) - set(theirs)
    if unknown:
        refuse_fields(
            "field",
            unknown,
            theirs,
            kind,
        )
    for field in theirs:
        if field not in values:
            raise InvalidInputError("field", field, f"is required by {kind}")
    if name == "private_selection":
        runs = _law_of_shape(values["mean"], values["shape"])
        return {"type": name, "event": values["event"], "runs": runs}
    return {"type": name, **{theirs[field]: value for field, value in values.items()}}


def _law_of_shape(mean: object, shape: object) -> dict[str, object]:
    """Return JSON data of the law of the number of runs that has dp-accounting's shape and mean."""
    # JSON has no infinity: the shape of a Poisson law is written as a text.
    if shape in ("inf", "infinity"):
        return {"law": "poisson", "mean": mean}
    if shape == 0:
        return {"law": "logarithmic", "mean": mean}
    if shape == 1:
        return {"law": "geometric", "mean": mean}
    return {"law": "truncated_negative_binomial", "shape": shape, "mean": mean}


def _field(
    name: str,
    kind: object,
    value: Any,
    depth: int,
) -> object:
    """Return a field's value read from JSON data by the field's declared type."""
    if kind == "Event":
        return _read(value, depth)
    if kind == "tuple[Event, ...]":
        if not isinstance(value, list | tuple):
            raise InvalidInputError(name, value, "must be a list of events")
        return tuple(_read(child, depth) for child in value)
    if kind == "RunLaw":
        return run_law_from_dict(value)
    return value


def event_from_json(text: str) -> Event:
    """Return the event that a JSON text describes; refuse NaN, infinities and doubled keys.

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
        raise InvalidInputError("event", "JSON", "a key appears twice in one object")
    return data
