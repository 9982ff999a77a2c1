"""Releases and their compositions: what touched the data, as data.

An event is a frozen, validated, hashable value that says everything an accountant needs and
nothing else. How it is charged, and all that depends on its type, is decided in its entry of
`privtune.accounting.registry`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from privtune.accounting._checks import LARGEST, check_integer, check_noise, check_number
from privtune.accounting.algebra import Event, check_event, check_events, set_field
from privtune.errors import InvalidInputError

__all__ = [
    "ZCDP",
    "ApproximateDP",
    "Composed",
    "Gaussian",
    "Joint",
    "Laplace",
    "NonPrivate",
    "Parallel",
    "PoissonSampled",
    "Repeated",
    "WorstOf",
]

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
