"""What an entry of the registry has to say about its type of events, and what entries have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.algebra import Event
from privtune.accounting.choices import PrivateSelection
from privtune.accounting.lower import Outcomes, Scores
from privtune.accounting.pairs import Gains, Pair
from privtune.accounting.selection import Threshold, Tuner
from privtune.errors import PrivTuneError

Floats = NDArray[np.float64]
E = TypeVar("E", bound=Event)
CurveOf = Callable[[Event], Floats]
TextOf = Callable[[Event], str]
MassOf = Callable[[Event], float]
TrainingOf = Callable[[Event], tuple[int, float] | None]
Tuners = tuple[Tuner, Tuner] | tuple[Threshold, Threshold]
Atom = tuple[str, float]
"""One release: its kind (``"gaussian"`` or ``"laplace"``) and its noise multiplier."""

Look = tuple[float, tuple[Atom, ...]]
"""One sample: the rate it was drawn at (1.0 for all records), and the sorted releases about it."""

LooksOf = Callable[[Event], Counter[Look]]


class UnknownEventError(PrivTuneError):
    """An event of a type without an entry; nothing is assumed about it."""


class Pairs(Protocol):
    """What an entry may ask about the events inside its own."""

    gains: Gains | None
    """What the rearrangement gained at another noise, for searches; None for an account."""

    def at(self, event: Event, step: float) -> Pair:
        """Return the pair of an event on a lattice."""

    def fine(self, event: Event, fineness: float) -> Pair:
        """Return the pair of an event on a lattice of its own choice."""

    def step(self, event: Event, fineness: float) -> float:
        """Return the step of that lattice."""

    def unsampled(self, event: Event, share: float) -> Pair:
        """Return the pair of the releases about one sample, before any sampling."""

    def own(self, event: Event, fineness: float) -> Pair:
        """Return the pair of an event that carries a lattice of its own."""

    def tuners(self, event: Event, fineness: float) -> Tuners:
        """Return the bounds of a choice among runs in both directions (remove, add)."""


@dataclass(frozen=True)
class Choice:
    """An event that runs something several times and releases one run.

    Args:
        selection: The best of K that is at least as large a release.
        threshold: Whether it stops at a known threshold, which has a bound of its own.
    """

    selection: PrivateSelection
    threshold: bool


class Instances(Protocol):
    """What an entry may ask for the explicit instance of its event."""

    @property
    def asked(self) -> float:
        """The δ of the question."""

    @property
    def delta(self) -> float:
        """The δ at which runs are scored."""

    @property
    def scores(self) -> Scores:
        """How they are scored."""

    def of(self, event: Event) -> Outcomes:
        """Return the outcomes of an instance of an event."""

    def dearest(self, events: Sequence[Event]) -> Outcomes:
        """Return those of the event that costs most."""

    def chosen(self, event: Event, choose: Callable[[Outcomes], Outcomes]) -> Outcomes:
        """Return those of an event after a choice made for P over Q in the direction asked."""


class Edges(Protocol):
    """What an entry may ask about noise that ends somewhere: the mass that one release loses."""

    def gaussian(self, noise_multiplier: float) -> float:
        """Return that of a Gaussian release."""

    def laplace(self, noise_multiplier: float) -> float:
        """Return that of a Laplace release."""


class Entry(ABC, Generic[E]):
    """What is to be known about one type of events. Every method is a reader of the type."""

    private: ClassVar[bool] = True
    """Whether anything is guaranteed at all, and so a dominating pair can be built."""

    replace_one: ClassVar[bool] = True
    """Whether the account holds under the replace-one adjacency, too."""

    one_instance: ClassVar[bool] = True
    """Whether the instance, given those of the children, is the same for every question."""

    own_lattice: ClassVar[bool] = False
    """Whether its pair is built on a lattice of its own first, which takes as long as an answer."""

    paired_weight: ClassVar[bool] = False
    """Whether the pair may say more than the Rényi curve in a privacy filter."""

    @abstractmethod
    def curve(self, event: E, of: CurveOf) -> Floats:
        """Return an upper bound on the Rényi divergence at each of `ORDERS`."""

    @abstractmethod
    def deviation(self, event: E, pairs: Pairs) -> float:
        """Return a scale of the privacy loss, for the choice of a lattice."""

    @abstractmethod
    def pair(self, event: E, step: float, pairs: Pairs) -> Pair:
        """Return the dominating pair on the lattice of a composition."""

    @abstractmethod
    def instance(self, event: E, instances: Instances) -> Outcomes:
        """Return the outcomes of a mechanism that fits the event and costs as much as is known."""

    @abstractmethod
    def scaled(self, event: E, factor: float) -> Event:
        """Return the event with its own noise, not that of its children, multiplied."""

    @abstractmethod
    def text(self, event: E, of: TextOf) -> str:
        """Return what the event is, in words; of its children only what is not `shown`."""

    @abstractmethod
    def formula(self, event: E, of: TextOf) -> str:
        """Return the event with all its children as a formula that fits a table cell."""

    @abstractmethod
    def looks(self, event: E, of: LooksOf) -> Counter[Look] | None:
        """Count the looks at the data of a training; None for what is no part of a training."""

    @abstractmethod
    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        """Return a bound on the mass that noise of finite reach adds to δ."""

    def shown(self, event: E) -> tuple[Event, ...]:
        """Return the children that have an account of their own."""
        return event.children()

    def training(self, event: E, of: TrainingOf) -> tuple[int, float] | None:
        """Return (steps, rate) of the first training by DP-SGD in the event, None without one."""
        return next(filter(None, map(of, event.children())), None)

    def replaced(self, event: E) -> Event:
        """Return the event to account under replace-one, its children being such events already."""
        return event

    # What only some types have; who asks says what None means.

    def precision(self, event: E) -> float | None:
        """Return 1/σ² of a Gaussian release about all records."""
        return None

    def rho(self, event: E) -> float | None:
        """Return ρ of a release of which zero-concentrated DP is known, and nothing else."""
        return None

    def sampled_gaussian(self, event: E) -> tuple[float, float] | None:
        """Return (rate, noise multiplier) of a Poisson-sampled Gaussian release."""
        return None

    def pure(self, event: E) -> tuple[float, float] | None:
        """Return the (ε, δ) that the event has whatever δ is asked for."""
        return None

    def fails(self, event: E) -> bool:
        """Whether the δ of `pure` is a probability of failure beside the Rényi divergence."""
        return False

    def choice(self, event: E) -> Choice | None:
        """Return what is run and chosen from, if the event is such a choice."""
        return None

    def tuners(self, event: E, fineness: float, pairs: Pairs) -> Tuners:
        """Return the bounds of a choice among runs in both directions (remove, add)."""
        raise UnknownEventError(f"a {event.type} event is no choice among runs.")

    def own_pair(self, event: E, fineness: float, pairs: Pairs) -> Pair:
        """Return the pair on a lattice of the event's own."""
        raise UnknownEventError(f"a {event.type} event has no lattice of its own.")
