"""Everything that depends on the type of an event: one entry for each type.

To add an event type, write its entry here; a method that is missing is an error at import. No other
module asks for the type of an event to decide how it is charged, scaled or shown.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from privtune.accounting import events as ev
from privtune.accounting import lower
from privtune.accounting import pairs as dominating
from privtune.accounting._checks import LARGEST
from privtune.accounting.curves import (
    ORDERS,
    amplified_curve,
    joint_curve,
    joint_deviation,
    mixture_curve,
    pure_curve,
    sampled_gaussian_curve,
    sampled_laplace_curve,
    selection_curve,
    split_curve,
)
from privtune.accounting.pmf import compose, mixture
from privtune.accounting.runs import Geometric
from privtune.accounting.selection import Threshold, Tuner
from privtune.errors import InvalidInputError, PrivTuneError

Floats = NDArray[np.float64]
E = TypeVar("E", bound=ev.Event)
CurveOf = Callable[[ev.Event], Floats]
TextOf = Callable[[ev.Event], str]
MassOf = Callable[[ev.Event], float]
TrainingOf = Callable[[ev.Event], tuple[int, float] | None]
Tuners = tuple[Tuner, Tuner] | tuple[Threshold, Threshold]
Atom = tuple[str, float]
"""One release: its kind (``"gaussian"`` or ``"laplace"``) and its noise multiplier."""

Look = tuple[float, tuple[Atom, ...]]
"""One sample: the rate it was drawn at (1.0 for all records), and the sorted releases about it."""

LooksOf = Callable[[ev.Event], Counter[Look]]


class UnknownEventError(PrivTuneError):
    """An event of a type without an entry; nothing is assumed about it."""


class Pairs(Protocol):
    """What an entry may ask about the events inside its own."""

    gains: dominating.Gains | None
    """What the rearrangement gained at another noise, for searches; None for an account."""

    def at(self, event: ev.Event, step: float) -> dominating.Pair:
        """Return the pair of an event on a lattice."""

    def fine(self, event: ev.Event, fineness: float) -> dominating.Pair:
        """Return the pair of an event on a lattice of its own choice."""

    def step(self, event: ev.Event, fineness: float) -> float:
        """Return the step of that lattice."""

    def unsampled(self, event: ev.Event, share: float) -> dominating.Pair:
        """Return the pair of the releases about one sample, before any sampling."""

    def own(self, event: ev.Event, fineness: float) -> dominating.Pair:
        """Return the pair of an event that carries a lattice of its own."""

    def tuners(self, event: ev.Event, fineness: float) -> Tuners:
        """Return the bounds of a choice among runs in both directions (remove, add)."""


@dataclass(frozen=True)
class Choice:
    """An event that runs something several times and releases one run."""

    selection: ev.PrivateSelection
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
    def scores(self) -> lower.Scores:
        """How they are scored."""

    def of(self, event: ev.Event) -> lower.Outcomes:
        """Return the outcomes of an instance of an event."""

    def dearest(self, events: Sequence[ev.Event]) -> lower.Outcomes:
        """Return the outcomes of that event, among several, which costs most."""

    def chosen(
        self, event: ev.Event, choose: Callable[[lower.Outcomes], lower.Outcomes]
    ) -> lower.Outcomes:
        """Return the outcomes of an event that follows a choice, scored for P over Q."""


class Edges(Protocol):
    """What an entry may ask about noise that ends somewhere: the mass that one release loses."""

    def gaussian(self, noise_multiplier: float) -> float:
        """Return the mass that one Gaussian release loses."""

    def laplace(self, noise_multiplier: float) -> float:
        """Return the mass that one Laplace release loses."""


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
    def pair(self, event: E, step: float, pairs: Pairs) -> dominating.Pair:
        """Return the dominating pair on the lattice of a composition."""

    @abstractmethod
    def instance(self, event: E, instances: Instances) -> lower.Outcomes:
        """Return the outcomes of a mechanism that fits the event and costs as much as is known."""

    @abstractmethod
    def scaled(self, event: E, factor: float) -> ev.Event:
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

    def shown(self, event: E) -> tuple[ev.Event, ...]:
        """Return the children that have an account of their own."""
        return event.children()

    def training(self, event: E, of: TrainingOf) -> tuple[int, float] | None:
        """Return (steps, rate) of the first training by DP-SGD in the event, None without one."""
        return next(filter(None, map(of, event.children())), None)

    def replaced(self, event: E) -> ev.Event:
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

    def own_pair(self, event: E, fineness: float, pairs: Pairs) -> dominating.Pair:
        """Return the pair on a lattice of the event's own."""
        raise UnknownEventError(f"a {event.type} event has no lattice of its own.")


_OWN = 2.0  # fineness of a lattice of its own


class _NoLook(Entry[E]):
    """Events that are no release of a training and have no noise multiplier of their own."""

    def looks(self, event: E, of: LooksOf) -> Counter[Look] | None:
        return None

    def scaled(self, event: E, factor: float) -> ev.Event:
        return event


class _Composition(Entry[E]):
    """Events of which only the parts are ever charged, as `flatten` returns them."""

    def curve(self, event: E, of: CurveOf) -> Floats:
        return of(event)

    def deviation(self, event: E, pairs: Pairs) -> float:
        raise UnknownEventError(f"a {event.type} event is charged by its parts.")

    def pair(self, event: E, step: float, pairs: Pairs) -> dominating.Pair:
        return pairs.at(event, step)

    def instance(self, event: E, instances: Instances) -> lower.Outcomes:
        return instances.of(event)

    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        return math.fsum(map(of, event.children()))

    def scaled(self, event: E, factor: float) -> ev.Event:
        return event


class _Compound(_NoLook[E]):
    """Events that are accounted on a lattice of their own, such as selections, maxima, tuning on a subset."""

    own_lattice = True

    def deviation(self, event: E, pairs: Pairs) -> float:
        pair = pairs.own(event, _OWN)
        return max(pair.remove.deviation, pair.add.deviation, 1e-6)

    def pair(self, event: E, step: float, pairs: Pairs) -> dominating.Pair:
        return dominating.on_lattice(pairs.own(event, _OWN), step)

    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        return max(map(of, event.children()))

    @abstractmethod
    def own_pair(self, event: E, fineness: float, pairs: Pairs) -> dominating.Pair: ...


class _Known(_NoLook[E]):
    """A release of which only a guarantee is known."""

    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        return 0.0  # no noise of this library: whoever states the guarantee answers for it

    def text(self, event: E, of: TextOf) -> str:
        fields = ", ".join(f"{k} {v}" for k, v in event.to_dict().items() if k != "type")
        return f"{event.type.replace('_', ' ')}{' (' + fields + ')' if fields else ''}"

    def formula(self, event: E, of: TextOf) -> str:
        return event.type


class _Release(Entry[Any]):
    """One release with noise about all records."""

    name: ClassVar[str]

    def scaled(self, event: Any, factor: float) -> ev.Event:
        louder: ev.Event = replace(event, noise_multiplier=event.noise_multiplier * factor)
        return louder

    def text(self, event: Any, of: TextOf) -> str:
        return f"{event.type}, noise multiplier {event.noise_multiplier:.6g}"

    def formula(self, event: Any, of: TextOf) -> str:
        return f"{self.name}{event.noise_multiplier:.4g})"

    def looks(self, event: Any, of: LooksOf) -> Counter[Look]:
        return Counter({(1.0, ((event.type, event.noise_multiplier),)): 1})


class _Gaussian(_Release):
    name = "Gaussian(σ="

    def curve(self, event: ev.Gaussian, of: CurveOf) -> Floats:
        return ORDERS / (2.0 * event.noise_multiplier**2)

    def deviation(self, event: ev.Gaussian, pairs: Pairs) -> float:
        return 1.0 / event.noise_multiplier

    def pair(self, event: ev.Gaussian, step: float, pairs: Pairs) -> dominating.Pair:
        pmf = dominating.sampled_gaussian(
            1.0, event.noise_multiplier, step, dominating.Direction.REMOVE
        )
        return dominating.Pair(pmf, pmf)

    def instance(self, event: ev.Gaussian, instances: Instances) -> lower.Outcomes:
        return lower.gaussian_outcomes(event.noise_multiplier)

    def beyond(self, event: ev.Gaussian, edges: Edges, of: MassOf) -> float:
        return edges.gaussian(event.noise_multiplier)

    def precision(self, event: ev.Gaussian) -> float:
        return 1.0 / event.noise_multiplier**2


class _Laplace(_Release):
    name = "Laplace(b="

    def curve(self, event: ev.Laplace, of: CurveOf) -> Floats:
        return sampled_laplace_curve(1.0, event.noise_multiplier, ORDERS)

    def deviation(self, event: ev.Laplace, pairs: Pairs) -> float:
        return min(1.0 / event.noise_multiplier, 1.0)

    def pair(self, event: ev.Laplace, step: float, pairs: Pairs) -> dominating.Pair:
        return dominating.laplace_pair(event.noise_multiplier, step)

    def instance(self, event: ev.Laplace, instances: Instances) -> lower.Outcomes:
        return lower.laplace_outcomes(event.noise_multiplier)

    def beyond(self, event: ev.Laplace, edges: Edges, of: MassOf) -> float:
        return edges.laplace(event.noise_multiplier)

    def pure(self, event: ev.Laplace) -> tuple[float, float]:
        return 1.0 / event.noise_multiplier, 0.0


class _Joint(_Composition[ev.Joint]):
    def text(self, event: ev.Joint, of: TextOf) -> str:
        sigma = event.noise_multiplier
        noises = [f"noise {sigma:.6g}"] if math.isfinite(sigma) else []
        noises += [f"Laplace {scale:.6g}" for scale in event.laplace_multipliers]
        return f"{len(event.events)} releases of one sample = {', '.join(noises)}"

    def formula(self, event: ev.Joint, of: TextOf) -> str:
        return f"joint[{', '.join(map(of, event.events))}]"

    def looks(self, event: ev.Joint, of: LooksOf) -> Counter[Look]:
        atoms = [atom for part in event.events for _, inner in of(part) for atom in inner]
        return Counter({(1.0, tuple(sorted(atoms))): 1})

    def shown(self, event: ev.Joint) -> tuple[ev.Event, ...]:
        return ()


class _PoissonSampled(Entry[ev.PoissonSampled]):
    """A release about a Poisson sample: one Gaussian in closed form, others by their unsampled pair."""

    replace_one = False
    paired_weight = True

    def _releases(self, event: ev.PoissonSampled) -> tuple[float, tuple[float, ...]]:
        """Return σ of the Gaussians together, infinite without one, and the scales of Laplace."""
        joint = ev.Joint([event.event]) if not isinstance(event.event, ev.Joint) else event.event
        return joint.noise_multiplier, joint.laplace_multipliers

    def sampled_gaussian(self, event: ev.PoissonSampled) -> tuple[float, float] | None:
        sigma, scales = self._releases(event)
        return None if scales else (event.rate, sigma)

    def curve(self, event: ev.PoissonSampled, of: CurveOf) -> Floats:
        sigma, scales = self._releases(event)
        if not scales:
            return sampled_gaussian_curve(event.rate, sigma, ORDERS)
        if len(scales) == 1 and math.isinf(sigma):
            return sampled_laplace_curve(event.rate, scales[0], ORDERS)
        return joint_curve(event.rate, sigma, scales, ORDERS)

    def deviation(self, event: ev.PoissonSampled, pairs: Pairs) -> float:
        sigma, scales = self._releases(event)
        if not scales:
            return dominating.loss_deviation(event.rate, sigma)
        if len(scales) == 1 and math.isinf(sigma):
            return min(event.rate * math.expm1(min(1.0 / scales[0], 1.0)), 1.0)
        return joint_deviation(event.rate, sigma, scales)

    def pair(self, event: ev.PoissonSampled, step: float, pairs: Pairs) -> dominating.Pair:
        sigma, scales = self._releases(event)
        if not scales:
            return dominating.Pair(
                dominating.sampled_gaussian(event.rate, sigma, step, dominating.Direction.REMOVE),
                dominating.sampled_gaussian(event.rate, sigma, step, dominating.Direction.ADD),
            )
        pair = pairs.unsampled(event.event, step / self.deviation(event, pairs))
        return dominating.Pair(*dominating.amplified(pair.remove, pair.add, event.rate, step))

    def instance(self, event: ev.PoissonSampled, instances: Instances) -> lower.Outcomes:
        return lower.sampled(instances.of(event.event), event.rate)

    def beyond(self, event: ev.PoissonSampled, edges: Edges, of: MassOf) -> float:
        return event.rate * of(event.event)

    def scaled(self, event: ev.PoissonSampled, factor: float) -> ev.Event:
        return event

    def text(self, event: ev.PoissonSampled, of: TextOf) -> str:
        return f"Poisson sample at rate {event.rate:.6g}: {of(event.event)}"

    def formula(self, event: ev.PoissonSampled, of: TextOf) -> str:
        return f"Poisson(q={event.rate:.4g}, {of(event.event)})"

    def looks(self, event: ev.PoissonSampled, of: LooksOf) -> Counter[Look]:
        return Counter({(event.rate, atoms): n for (_, atoms), n in of(event.event).items()})

    def shown(self, event: ev.PoissonSampled) -> tuple[ev.Event, ...]:
        return ()


class _ZCDP(_Known[ev.ZCDP]):
    def curve(self, event: ev.ZCDP, of: CurveOf) -> Floats:
        return event.rho * ORDERS

    def deviation(self, event: ev.ZCDP, pairs: Pairs) -> float:
        return math.sqrt(2.0 * max(event.rho, 1e-8))

    def pair(self, event: ev.ZCDP, step: float, pairs: Pairs) -> dominating.Pair:
        return dominating.zcdp_pair(event.rho, event.rho * ORDERS, step)

    def instance(self, event: ev.ZCDP, instances: Instances) -> lower.Outcomes:
        noise = 1.0 / math.sqrt(2.0 * max(event.rho, 1.0 / LARGEST))
        return lower.gaussian_outcomes(noise)

    def rho(self, event: ev.ZCDP) -> float:
        return event.rho


class _ApproximateDP(_Known[ev.ApproximateDP]):
    def curve(self, event: ev.ApproximateDP, of: CurveOf) -> Floats:
        return np.full_like(ORDERS, np.inf) if event.delta > 0.0 else pure_curve(event.epsilon)

    def deviation(self, event: ev.ApproximateDP, pairs: Pairs) -> float:
        return max(event.epsilon, 1e-3)

    def pair(self, event: ev.ApproximateDP, step: float, pairs: Pairs) -> dominating.Pair:
        return dominating.approximate_pair(event.epsilon, event.delta, step)

    def instance(self, event: ev.ApproximateDP, instances: Instances) -> lower.Outcomes:
        return lower.two_sided(event.epsilon, event.delta)

    def pure(self, event: ev.ApproximateDP) -> tuple[float, float]:
        return event.epsilon, event.delta

    def fails(self, event: ev.ApproximateDP) -> bool:
        return True


class _NonPrivate(_Known[ev.NonPrivate]):
    private = False

    def curve(self, event: ev.NonPrivate, of: CurveOf) -> Floats:
        return np.full_like(ORDERS, np.inf)

    def deviation(self, event: ev.NonPrivate, pairs: Pairs) -> float:
        return math.inf

    def instance(self, event: ev.NonPrivate, instances: Instances) -> lower.Outcomes:
        return lower.two_sided(0.0, 1.0)

    def pair(self, event: ev.NonPrivate, step: float, pairs: Pairs) -> dominating.Pair:
        raise UnknownEventError("data left without protection has no dominating pair.")


_RELEASES: dict[type[ev.Event], Entry[Any]] = {
    ev.Gaussian: _Gaussian(),
    ev.Laplace: _Laplace(),
    ev.Joint: _Joint(),
    ev.PoissonSampled: _PoissonSampled(),
    ev.ZCDP: _ZCDP(),
    ev.ApproximateDP: _ApproximateDP(),
    ev.NonPrivate: _NonPrivate(),
}


_MOST_PARTS = 6  # of which every two are composed; of more, the dearest twice


class _Repeated(_Composition[ev.Repeated]):
    def beyond(self, event: ev.Repeated, edges: Edges, of: MassOf) -> float:
        return event.count * of(event.event)

    def text(self, event: ev.Repeated, of: TextOf) -> str:
        return f"{event.count} times" if self.shown(event) else f"{event.count} × {of(event.event)}"

    def formula(self, event: ev.Repeated, of: TextOf) -> str:
        return f"{event.count} × {of(event.event)}"

    def looks(self, event: ev.Repeated, of: LooksOf) -> Counter[Look]:
        return Counter({look: n * event.count for look, n in of(event.event).items()})

    def shown(self, event: ev.Repeated) -> tuple[ev.Event, ...]:
        return () if isinstance(event.event, ev.PoissonSampled) else (event.event,)

    def training(self, event: ev.Repeated, of: TrainingOf) -> tuple[int, float] | None:
        step = event.event
        if isinstance(step, ev.PoissonSampled) and not isinstance(step.event, ev.Laplace):
            return event.count, step.rate
        return of(step)


class _Composed(_Composition[ev.Composed]):
    def text(self, event: ev.Composed, of: TextOf) -> str:
        return f"composition of {len(event.events)}"

    def formula(self, event: ev.Composed, of: TextOf) -> str:
        return " + ".join(map(of, event.events))

    def looks(self, event: ev.Composed, of: LooksOf) -> Counter[Look]:
        return sum(map(of, event.events), Counter())


class _WorstOf(_Compound[ev.WorstOf]):
    one_instance = False

    def curve(self, event: ev.WorstOf, of: CurveOf) -> Floats:
        curves = np.stack([of(child) for child in event.events])
        if event.weights is not None:
            return mixture_curve(curves, np.asarray(event.weights))
        return np.asarray(curves.max(axis=0))

    def own_pair(self, event: ev.WorstOf, fineness: float, pairs: Pairs) -> dominating.Pair:
        found = _together(event.events, fineness, pairs)
        if event.weights is None:
            return dominating.worst_pair(found)
        return dominating.Pair(
            mixture([pair.remove for pair in found], event.weights),
            mixture([pair.add for pair in found], event.weights),
        )

    def instance(self, event: ev.WorstOf, instances: Instances) -> lower.Outcomes:
        if event.weights is None:
            return instances.dearest(event.events)
        return lower.mixed([instances.of(child) for child in event.events], event.weights)

    def text(self, event: ev.WorstOf, of: TextOf) -> str:
        kind = "worst of" if event.weights is None else "public mixture of"
        return f"{kind} {len(event.events)}"

    def formula(self, event: ev.WorstOf, of: TextOf) -> str:
        return f"worst of [{', '.join(map(of, event.events))}]"


class _Parallel(_Compound[ev.Parallel]):
    one_instance = False

    def curve(self, event: ev.Parallel, of: CurveOf) -> Floats:
        return np.asarray(np.max([of(child) for child in event.events], axis=0))

    def own_pair(self, event: ev.Parallel, fineness: float, pairs: Pairs) -> dominating.Pair:
        return dominating.worst_pair(_together(event.events, fineness, pairs))

    def instance(self, event: ev.Parallel, instances: Instances) -> lower.Outcomes:
        return instances.dearest(event.events)

    def replaced(self, event: ev.Parallel) -> ev.Event:
        # The record that goes and the one that comes may stand in two parts: the composition of
        # the two dearest, whichever they are.
        counts = Counter(event.events)
        if len(event.events) == 1:
            return event.events[0]
        if len(counts) > _MOST_PARTS:
            return ev.Repeated(2, ev.WorstOf(tuple(counts)))
        both = [ev.Composed(pair) for pair in itertools.combinations(counts, 2)]
        both += [ev.Composed((part, part)) for part, count in counts.items() if count > 1]
        return both[0] if len(both) == 1 else ev.WorstOf(both)

    def text(self, event: ev.Parallel, of: TextOf) -> str:
        return f"{len(event.events)} disjoint parts of the data"

    def formula(self, event: ev.Parallel, of: TextOf) -> str:
        return " ∥ ".join(map(of, event.events))


def _together(events: Sequence[ev.Event], fineness: float, pairs: Pairs) -> list[dominating.Pair]:
    """Return the pairs of alternatives on one lattice, fine enough for each."""
    step = min(pairs.step(child, fineness) for child in events)
    return [pairs.at(child, step) for child in events]


_COMPOSITIONS: dict[type[ev.Event], Entry[Any]] = {
    ev.Repeated: _Repeated(),
    ev.Composed: _Composed(),
    ev.WorstOf: _WorstOf(),
    ev.Parallel: _Parallel(),
}


_PROFILE_SIZE = 4096  # lattice points on which the profile of a tuner is tabulated
_THRESHOLD_SIZE = 400


class _Chosen(_Compound[E]):
    """Choices: best of K, and the first run that passes a threshold."""

    one_instance = False
    paired_weight = True
    size: ClassVar[int]

    @abstractmethod
    def choice(self, event: E) -> Choice: ...

    def curve(self, event: E, of: CurveOf) -> Floats:
        selection = self.choice(event).selection
        return selection_curve(of(selection.event), selection.runs)

    def own_pair(self, event: E, fineness: float, pairs: Pairs) -> dominating.Pair:
        remove, add = pairs.tuners(event, fineness)
        if pairs.gains is not None:
            return pairs.gains.pair(event, remove, add, self.size)
        return dominating.tuner_pair(remove, add, self.size)


class _PrivateSelection(_Chosen[ev.PrivateSelection]):
    size = _PROFILE_SIZE

    def choice(self, event: ev.PrivateSelection) -> Choice:
        return Choice(event, threshold=False)

    def tuners(self, event: ev.PrivateSelection, fineness: float, pairs: Pairs) -> Tuners:
        pair = pairs.fine(event.event, fineness)
        remove = Tuner(pair.remove, event.runs)
        return remove, (remove if pair.add is pair.remove else Tuner(pair.add, event.runs))

    def instance(self, event: ev.PrivateSelection, instances: Instances) -> lower.Outcomes:
        delta, scores = instances.delta, instances.scores
        return instances.chosen(
            event.event, lambda base: lower.best_of_runs(base, event.runs, delta, scores=scores)
        )

    def beyond(self, event: ev.PrivateSelection, edges: Edges, of: MassOf) -> float:
        return event.runs.expected_runs * of(event.event)  # K is independent of the data

    def text(self, event: ev.PrivateSelection, of: TextOf) -> str:
        law = ", ".join(f"{k} {v}" for k, v in event.runs.to_dict().items() if k != "law")
        return f"best of K runs, K {event.runs.law.replace('_', ' ')} ({law})"

    def formula(self, event: ev.PrivateSelection, of: TextOf) -> str:
        law = event.runs.to_dict()
        least = "" if event.runs.minimum is None else f", at least {event.runs.minimum}"
        return f"best of K ~ {law['law']}(mean {law['mean']:g}{least}) of [{of(event.event)}]"


class _ThresholdSelection(_Chosen[ev.ThresholdSelection]):
    size = _THRESHOLD_SIZE

    def choice(self, event: ev.ThresholdSelection) -> Choice:
        # Given that some run passed, the first is distributed as the best under "passed or not".
        return Choice(ev.PrivateSelection(event.event, Geometric(1.0 / event.stop)), threshold=True)

    def tuners(self, event: ev.ThresholdSelection, fineness: float, pairs: Pairs) -> Tuners:
        pair = dominating.thinned(pairs.fine(event.event, fineness), fineness)
        return Threshold(pair.remove, event.stop), Threshold(pair.add, event.stop)

    def instance(self, event: ev.ThresholdSelection, instances: Instances) -> lower.Outcomes:
        delta = instances.delta
        return instances.chosen(
            event.event, lambda base: lower.first_to_pass(base, event.stop, delta)
        )

    def beyond(self, event: ev.ThresholdSelection, edges: Edges, of: MassOf) -> float:
        return of(event.event) / event.stop

    def text(self, event: ev.ThresholdSelection, of: TextOf) -> str:
        return f"first run above a threshold, giving up with probability {event.stop:.6g}"

    def formula(self, event: ev.ThresholdSelection, of: TextOf) -> str:
        return f"first past a threshold (γ = {event.stop:.4g}) of [{of(event.event)}]"


class _SubsampledTuning(_Compound[ev.SubsampledTuning]):
    replace_one = False
    paired_weight = True

    def curve(self, event: ev.SubsampledTuning, of: CurveOf) -> Floats:
        tuning, training = of(event.tuning), of(event.training)
        if event.variant == 1:
            return split_curve(ORDERS, tuning, training, event.rate)
        return amplified_curve(ORDERS, tuning, event.rate) + training

    def own_pair(
        self, event: ev.SubsampledTuning, fineness: float, pairs: Pairs
    ) -> dominating.Pair:
        tuning, last = pairs.fine(event.tuning, fineness), pairs.fine(event.training, fineness)
        if event.variant == 1:
            first = dominating.thinned(tuning, fineness)
            deviations = [pair.remove.deviation for pair in (first, last)]
            deviation = min((d for d in deviations if d > 0.0), default=1.0)
            step = 2.0 * dominating.THIN * max(deviation, 1e-4) / fineness
            both = (first.remove, first.add), (last.remove, last.add)
            return dominating.Pair(*dominating.tabulate(*both, event.rate, step))
        removed, added = dominating.amplified(
            tuning.remove, tuning.add, event.rate, last.remove.step
        )
        return dominating.Pair(
            compose([(removed, 1), (last.remove, 1)]), compose([(added, 1), (last.add, 1)])
        )

    def instance(self, event: ev.SubsampledTuning, instances: Instances) -> lower.Outcomes:
        tuning, last = instances.of(event.tuning), instances.of(event.training)
        if event.variant == 1:
            return lower.split(tuning, last, event.rate)
        return lower.composition(
            [(lower.sampled(tuning, event.rate), 1), (last, 1)], instances.asked
        )

    def beyond(self, event: ev.SubsampledTuning, edges: Edges, of: MassOf) -> float:
        return event.rate * of(event.tuning) + of(event.training)

    def text(self, event: ev.SubsampledTuning, of: TextOf) -> str:
        return f"tuning on a subset at rate {event.rate:.6g}, variant {event.variant}"

    def formula(self, event: ev.SubsampledTuning, of: TextOf) -> str:
        where = "the rest" if event.variant == 1 else "all"
        return (
            f"tune on a part of rate {event.rate:g} [{of(event.tuning)}], "
            f"train on {where} [{of(event.training)}]"
        )

    def training(self, event: ev.SubsampledTuning, of: TrainingOf) -> tuple[int, float] | None:
        return of(event.training)


_CHOICES: dict[type[ev.Event], Entry[Any]] = {
    ev.PrivateSelection: _PrivateSelection(),
    ev.ThresholdSelection: _ThresholdSelection(),
    ev.SubsampledTuning: _SubsampledTuning(),
}


ENTRIES: dict[type[ev.Event], Entry[Any]] = {**_RELEASES, **_COMPOSITIONS, **_CHOICES}


def entry(event: ev.Event) -> Entry[Any]:
    """Return the entry of an event's type; refuse a type that has none."""
    found = ENTRIES.get(type(event))
    if found is None:
        raise UnknownEventError(f"a {event.type} event has no entry in the registry of accounts.")
    return found


def under(event: ev.Event, adjacency: ev.Adjacency) -> ev.Event:
    """Return the event whose add-remove account holds for the event under an adjacency, or refuse."""
    if adjacency is ev.Adjacency.ADD_REMOVE:
        return event
    known = entry(event)
    if not known.replace_one:
        raise InvalidInputError(
            "adjacency",
            adjacency.value,
            f"a {event.type} event is accounted under add-remove only",
            "Convert its add-remove guarantee with group_privacy, which says what that costs.",
        )
    return known.replaced(event.rebuild([under(child, adjacency) for child in event.children()]))


def scaled(event: ev.Event, factor: float) -> ev.Event:
    """Return the event with every noise multiplier multiplied by a factor above 0."""
    children = [scaled(child, factor) for child in event.children()]
    return entry(event).scaled(event.rebuild(children), factor)


def text(event: ev.Event) -> str:
    """Return what an event is, in words, without its parts."""
    return entry(event).text(event, text)


def formula(event: ev.Event) -> str:
    """Return an event as a formula that fits a table cell."""
    return entry(event).formula(event, formula)


def training(event: ev.Event) -> tuple[int, float] | None:
    """Return (steps, rate) of the first training by DP-SGD in an event, None without one."""
    return entry(event).training(event, training)


def looks(event: ev.Event) -> Counter[Look]:
    """Count the looks at the data that the event of a training is made of; refuse what is no training."""
    found = entry(event).looks(event, looks)
    if found is None:
        raise UnknownEventError(f"a {event.type} event is not a release of a training.")
    return found
