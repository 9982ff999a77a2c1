"""The registry of event types: one entry for each type, with all that depends on the type.

To add an event type, write its entry here; a method that is missing is an error at import. No other
module asks for the type of an event to decide how it is charged, scaled or shown.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from privtune.accounting import lower
from privtune.accounting import pairs as dominating
from privtune.accounting.best_of_k import Threshold, Tuner
from privtune.accounting.checks import LARGEST
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
from privtune.accounting.events import (
    ZCDP,
    Adjacency,
    ApproximateDP,
    Composed,
    Event,
    Gaussian,
    Joint,
    Laplace,
    NonPrivate,
    Parallel,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    SubsampledTuning,
    ThresholdSelection,
    WorstOf,
)
from privtune.accounting.lower import Outcomes, Scores
from privtune.accounting.pairs import Direction, Gains, Pair
from privtune.accounting.pmf import compose, mixture
from privtune.accounting.runs import Geometric
from privtune.errors import InvalidInputError, PrivTuneError

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
    """The error that an event's type has no registry entry, or that its entry lacks an operation."""


class Pairs(Protocol):
    """The dominating pairs of inner events that a registry entry can ask for."""

    gains: Gains | None
    """What the rearrangement gained at another noise, for searches; None for an account."""

    def at(self, event: Event, step: float) -> Pair:
        """Return the dominating pair of an event on the lattice of this step."""

    def fine(self, event: Event, fineness: float) -> Pair:
        """Return the dominating pair of an event on a lattice that is chosen for it."""

    def step(self, event: Event, fineness: float) -> float:
        """Return the lattice step that `fine` chooses for an event."""

    def unsampled(self, event: Event, share: float) -> Pair:
        """Return the dominating pair of the releases about one sample, before any sampling."""

    def lattice_pair(self, event: Event, fineness: float) -> Pair:
        """Return the dominating pair of an event that chooses its lattice itself, such as a selection."""

    def tuners(self, event: Event, fineness: float) -> Tuners:
        """Return the bounds on a selection among runs, first if a record is removed, then if one is added."""


@dataclass(frozen=True)
class Choice:
    """A selection among runs, as a best of K, and whether a known threshold ends it."""

    selection: PrivateSelection
    threshold: bool


class Instances(Protocol):
    """The explicit mechanisms of inner events that a registry entry can ask for, with the question."""

    target: float
    """The δ at which a lower bound on ε is asked for."""

    delta: float
    """The δ at which runs of a selection are scored."""

    scores: Scores
    """The way in which runs of a selection are scored."""

    def of(self, event: Event) -> Outcomes:
        """Return the outcomes of an explicit mechanism that fits an event."""

    def dearest(self, events: Sequence[Event]) -> Outcomes:
        """Return the outcomes of that event, among several, whose explicit mechanism has the largest ε."""

    def selected(self, event: Event, select: Callable[[Outcomes], Outcomes]) -> Outcomes:
        """Return `select` applied to an event's outcomes, with runs scored for the asked direction."""


class Edges(Protocol):
    """The masses that single releases add to δ because noise has a finite range."""

    def gaussian(self, noise_multiplier: float) -> float:
        """Return the mass that one Gaussian release of finite range adds to δ."""

    def laplace(self, noise_multiplier: float) -> float:
        """Return the mass that one Laplace release of finite range adds to δ."""


class EventEntry(ABC, Generic[E]):
    """The account, scaling, and texts of one type of events."""

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
        """Return about the standard deviation of the privacy loss, for the choice of a lattice."""

    @abstractmethod
    def pair(self, event: E, step: float, pairs: Pairs) -> Pair:
        """Return the event's dominating pair on the lattice of this step."""

    @abstractmethod
    def instance(self, event: E, instances: Instances) -> Outcomes:
        """Return the outcomes of a mechanism that fits the event and costs as much as is known."""

    @abstractmethod
    def scaled(self, event: E, factor: float) -> Event:
        """Return the event with its own noise multiplied by `factor`; children stay as they are."""

    @abstractmethod
    def text(self, event: E, of: TextOf) -> str:
        """Return a description of the event, which includes only the children that `shown` omits."""

    @abstractmethod
    def formula(self, event: E, of: TextOf) -> str:
        """Return the event with all its children as a formula that fits a table cell."""

    @abstractmethod
    def looks(self, event: E, of: LooksOf) -> Counter[Look] | None:
        """Count a training's looks (a sampling rate and its releases); None if this is no training."""

    @abstractmethod
    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        """Return an upper bound on the mass that noise of finite range adds to δ."""

    def shown(self, event: E) -> tuple[Event, ...]:
        """Return the children that an explanation lists with an ε of their own."""
        return event.children()

    def training(self, event: E, of: TrainingOf) -> tuple[int, float] | None:
        """Return (steps, rate) of the first DP-SGD training in the event; None without one."""
        return next(filter(None, map(of, event.children())), None)

    def replaced(self, event: E) -> Event:
        """Return the event to account under replace-one, given already converted children."""
        return event

    # What only some types have; who asks says what None means.

    def precision(self, event: E) -> float | None:
        """Return 1/σ² of a Gaussian release about all records; None for other events."""
        return None

    def rho(self, event: E) -> float | None:
        """Return ρ of a release known only to be zero-concentrated DP; None for other events."""
        return None

    def sampled_gaussian(self, event: E) -> tuple[float, float] | None:
        """Return (rate, noise multiplier) of a Poisson-sampled Gaussian; None for other events."""
        return None

    def pure(self, event: E) -> tuple[float, float] | None:
        """Return the fixed (ε, δ) of an event that has the same at every target δ, else None."""
        return None

    def fails(self, event: E) -> bool:
        """Return whether the δ of `pure` is a probability of failure, apart from the Rényi divergence."""
        return False

    def choice(self, event: E) -> Choice | None:
        """Return the event as a selection among runs; None if it is another kind of event."""
        return None

    def tuners(self, event: E, fineness: float, pairs: Pairs) -> Tuners:
        """Return the bounds on a selection among runs, first if a record is removed, then if one is added."""
        raise UnknownEventError(f"a {event.type} event is no choice among runs.")

    def own_pair(self, event: E, fineness: float, pairs: Pairs) -> Pair:
        """Return the dominating pair on a lattice that the event chooses itself."""
        raise UnknownEventError(f"a {event.type} event has no lattice of its own.")


_OWN = 2.0  # fineness of a lattice of its own


class _NotTraining(EventEntry[E]):
    """Entries of events outside of trainings, which have no noise multiplier."""

    def looks(self, event: E, of: LooksOf) -> Counter[Look] | None:
        return None

    def scaled(self, event: E, factor: float) -> Event:
        return event


class _Composition(EventEntry[E]):
    """Entries of events that are charged only by their parts, as `flatten` returns them."""

    def curve(self, event: E, of: CurveOf) -> Floats:
        return of(event)

    def deviation(self, event: E, pairs: Pairs) -> float:
        raise UnknownEventError(f"a {event.type} event is charged by its parts.")

    def pair(self, event: E, step: float, pairs: Pairs) -> Pair:
        return pairs.at(event, step)

    def instance(self, event: E, instances: Instances) -> Outcomes:
        return instances.of(event)

    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        """Return the sum of what the parts' noise of finite range adds to δ."""
        return math.fsum(map(of, event.children()))

    def scaled(self, event: E, factor: float) -> Event:
        return event


class _Compound(_NotTraining[E]):
    """Entries of events that choose their lattice, such as selections, maxima, subsampled tuning."""

    own_lattice = True

    def deviation(self, event: E, pairs: Pairs) -> float:
        """Return the larger deviation of the privacy loss in the two directions of the event's own pair."""
        pair = pairs.lattice_pair(event, _OWN)
        return max(pair.remove.deviation, pair.add.deviation, 1e-6)

    def pair(self, event: E, step: float, pairs: Pairs) -> Pair:
        return dominating.on_lattice(pairs.lattice_pair(event, _OWN), step)

    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        """Return the most that a child's noise of finite range adds to δ; only one child counts."""
        return max(map(of, event.children()))

    @abstractmethod
    def own_pair(self, event: E, fineness: float, pairs: Pairs) -> Pair: ...


class _StatedGuarantee(_NotTraining[E]):
    """Entries of releases of which only a stated guarantee is known."""

    def beyond(self, event: E, edges: Edges, of: MassOf) -> float:
        """Return 0, since a stated guarantee covers the finite range of its own noise."""
        return 0.0

    def text(self, event: E, of: TextOf) -> str:
        words = event.type.replace("_", " ")
        fields = _fields_as_text(event.to_dict(), without="type")
        return f"{words} ({fields})" if fields else words

    def formula(self, event: E, of: TextOf) -> str:
        return event.type


def _fields_as_text(fields: Mapping[str, Any], *, without: str) -> str:
    """Return the names and values of fields as one text, except the field `without`."""
    words = []
    for name, value in fields.items():
        if name != without:
            words.append(f"{name} {value}")
    return ", ".join(words)


class _NoisyRelease(EventEntry[Any]):
    """Entries of single noisy releases about all records."""

    name: ClassVar[str]

    def scaled(self, event: Any, factor: float) -> Event:
        """Return the release with its noise multiplier multiplied by `factor`."""
        noise = event.noise_multiplier * factor
        louder: Event = replace(event, noise_multiplier=noise)
        return louder

    def text(self, event: Any, of: TextOf) -> str:
        return f"{event.type}, noise multiplier {event.noise_multiplier:.6g}"

    def formula(self, event: Any, of: TextOf) -> str:
        return f"{self.name}{event.noise_multiplier:.4g})"

    def looks(self, event: Any, of: LooksOf) -> Counter[Look]:
        """Count the release as one look at all records."""
        atom = (event.type, event.noise_multiplier)
        return Counter({(1.0, (atom,)): 1})


class _Gaussian(_NoisyRelease):
    """The entry of Gaussian releases about all records."""

    name = "Gaussian(σ="

    def curve(self, event: Gaussian, of: CurveOf) -> Floats:
        """Return the Rényi curve α/(2σ²) (Mironov, arXiv:1702.07476, Proposition 7)."""
        return ORDERS / (2.0 * event.noise_multiplier**2)

    def deviation(self, event: Gaussian, pairs: Pairs) -> float:
        return 1.0 / event.noise_multiplier

    def pair(self, event: Gaussian, step: float, pairs: Pairs) -> Pair:
        """Return the pair of N(1, σ²) and N(0, σ²), which is the same in both directions."""
        noise = event.noise_multiplier
        pmf = dominating.sampled_gaussian(1.0, noise, step, Direction.REMOVE)
        return Pair(pmf, pmf)

    def instance(self, event: Gaussian, instances: Instances) -> Outcomes:
        return lower.gaussian_outcomes(event.noise_multiplier)

    def beyond(self, event: Gaussian, edges: Edges, of: MassOf) -> float:
        return edges.gaussian(event.noise_multiplier)

    def precision(self, event: Gaussian) -> float:
        return 1.0 / event.noise_multiplier**2


class _Laplace(_NoisyRelease):
    """The entry of Laplace releases about all records, whose loss is at most 1/b."""

    name = "Laplace(b="

    def curve(self, event: Laplace, of: CurveOf) -> Floats:
        return sampled_laplace_curve(1.0, event.noise_multiplier, ORDERS)

    def deviation(self, event: Laplace, pairs: Pairs) -> float:
        return min(1.0 / event.noise_multiplier, 1.0)

    def pair(self, event: Laplace, step: float, pairs: Pairs) -> Pair:
        return dominating.laplace_pair(event.noise_multiplier, step)

    def instance(self, event: Laplace, instances: Instances) -> Outcomes:
        return lower.laplace_outcomes(event.noise_multiplier)

    def beyond(self, event: Laplace, edges: Edges, of: MassOf) -> float:
        return edges.laplace(event.noise_multiplier)

    def pure(self, event: Laplace) -> tuple[float, float]:
        """Return (1/b, 0), as a Laplace release has pure DP."""
        return 1.0 / event.noise_multiplier, 0.0


class _Joint(_Composition[Joint]):
    """The entry of several releases about the same records, split by `flatten` if nothing is sampled."""

    def text(self, event: Joint, of: TextOf) -> str:
        sigma = event.noise_multiplier
        noises = []
        if math.isfinite(sigma):
            noises.append(f"noise {sigma:.6g}")
        noises += [f"Laplace {scale:.6g}" for scale in event.laplace_multipliers]
        return f"{len(event.events)} releases of one sample = {', '.join(noises)}"

    def formula(self, event: Joint, of: TextOf) -> str:
        parts = ", ".join(map(of, event.events))
        return f"joint[{parts}]"

    def looks(self, event: Joint, of: LooksOf) -> Counter[Look]:
        """Count the releases of all parts as one look at all records."""
        atoms: list[Atom] = []
        for part in event.events:
            for _, part_atoms in of(part):
                atoms += part_atoms
        return Counter({(1.0, tuple(sorted(atoms))): 1})

    def shown(self, event: Joint) -> tuple[Event, ...]:
        """Return no children: releases that share a sample are accounted for together."""
        return ()


class _PoissonSampled(EventEntry[PoissonSampled]):
    """The entry of releases about a Poisson sample."""

    replace_one = False
    paired_weight = True

    def _releases(self, event: PoissonSampled) -> tuple[float, tuple[float, ...]]:
        """Return σ of all Gaussians together, infinite without one, and all Laplace scales."""
        joint = event.event
        if not isinstance(joint, Joint):
            joint = Joint([joint])
        return joint.noise_multiplier, joint.laplace_multipliers

    def sampled_gaussian(self, event: PoissonSampled) -> tuple[float, float] | None:
        sigma, scales = self._releases(event)
        return None if scales else (event.rate, sigma)

    def curve(self, event: PoissonSampled, of: CurveOf) -> Floats:
        """Return the sharpest known Rényi curve: of a Gaussian, a Laplace release, or a product."""
        sigma, scales = self._releases(event)
        if not scales:
            return sampled_gaussian_curve(event.rate, sigma, ORDERS)
        if len(scales) == 1 and math.isinf(sigma):
            return sampled_laplace_curve(event.rate, scales[0], ORDERS)
        return joint_curve(event.rate, sigma, scales, ORDERS)

    def deviation(self, event: PoissonSampled, pairs: Pairs) -> float:
        """Return about the root of the sampled release's chi-square divergence."""
        sigma, scales = self._releases(event)
        if not scales:
            return dominating.loss_deviation(event.rate, sigma)
        if len(scales) == 1 and math.isinf(sigma):
            largest = min(1.0 / scales[0], 1.0)
            return min(event.rate * math.expm1(largest), 1.0)
        return joint_deviation(event.rate, sigma, scales)

    def pair(self, event: PoissonSampled, step: float, pairs: Pairs) -> Pair:
        """Return the sampled Gaussian's pair, or the pair amplified from that without sampling."""
        sigma, scales = self._releases(event)
        rate = event.rate
        if not scales:
            return Pair(
                dominating.sampled_gaussian(rate, sigma, step, Direction.REMOVE),
                dominating.sampled_gaussian(rate, sigma, step, Direction.ADD),
            )
        share = step / self.deviation(event, pairs)
        pair = pairs.unsampled(event.event, share)
        remove, add = dominating.amplified(pair.remove, pair.add, rate, step)
        return Pair(remove, add)

    def instance(self, event: PoissonSampled, instances: Instances) -> Outcomes:
        return lower.sampled(instances.of(event.event), event.rate)

    def beyond(self, event: PoissonSampled, edges: Edges, of: MassOf) -> float:
        """Return the sampling rate times what the unsampled release's noise of finite range adds to δ."""
        return event.rate * of(event.event)

    def scaled(self, event: PoissonSampled, factor: float) -> Event:
        """Return the event unchanged, as all of its noise belongs to its child."""
        return event

    def text(self, event: PoissonSampled, of: TextOf) -> str:
        release = of(event.event)
        return f"Poisson sample at rate {event.rate:.6g}: {release}"

    def formula(self, event: PoissonSampled, of: TextOf) -> str:
        release = of(event.event)
        return f"Poisson(q={event.rate:.4g}, {release})"

    def looks(self, event: PoissonSampled, of: LooksOf) -> Counter[Look]:
        """Count the child's looks at all records as looks at a Poisson sample of this rate."""
        counts: Counter[Look] = Counter()
        for (_, atoms), count in of(event.event).items():
            counts[event.rate, atoms] = count
        return counts

    def shown(self, event: PoissonSampled) -> tuple[Event, ...]:
        return ()


class _ZCDP(_StatedGuarantee[ZCDP]):
    """The entry of zero-concentrated DP releases, with the Rényi curve ρ α."""

    def curve(self, event: ZCDP, of: CurveOf) -> Floats:
        return event.rho * ORDERS

    def deviation(self, event: ZCDP, pairs: Pairs) -> float:
        return math.sqrt(2.0 * max(event.rho, 1e-8))

    def pair(self, event: ZCDP, step: float, pairs: Pairs) -> Pair:
        return dominating.zcdp_pair(event.rho, event.rho * ORDERS, step)

    def instance(self, event: ZCDP, instances: Instances) -> Outcomes:
        # A Gaussian of the same ρ = 1/(2σ²).
        rho = max(event.rho, 1.0 / LARGEST)
        noise = 1.0 / math.sqrt(2.0 * rho)
        return lower.gaussian_outcomes(noise)

    def rho(self, event: ZCDP) -> float:
        return event.rho


class _ApproximateDP(_StatedGuarantee[ApproximateDP]):
    """The entry of (ε, δ)-DP releases."""

    def curve(self, event: ApproximateDP, of: CurveOf) -> Floats:
        """Return the Rényi curve of ε-DP; infinite if δ is above 0."""
        return np.full_like(ORDERS, np.inf) if event.delta > 0.0 else pure_curve(event.epsilon)

    def deviation(self, event: ApproximateDP, pairs: Pairs) -> float:
        return max(event.epsilon, 1e-3)

    def pair(self, event: ApproximateDP, step: float, pairs: Pairs) -> Pair:
        return dominating.approximate_pair(event.epsilon, event.delta, step)

    def instance(self, event: ApproximateDP, instances: Instances) -> Outcomes:
        return lower.two_sided(event.epsilon, event.delta)

    def pure(self, event: ApproximateDP) -> tuple[float, float]:
        return event.epsilon, event.delta

    def fails(self, event: ApproximateDP) -> bool:
        """Return True, as with probability δ the release may show anything."""
        return True


class _NonPrivate(_StatedGuarantee[NonPrivate]):
    """The entry of data used without protection, for which every bound is infinite."""

    private = False

    def curve(self, event: NonPrivate, of: CurveOf) -> Floats:
        return np.full_like(ORDERS, np.inf)

    def deviation(self, event: NonPrivate, pairs: Pairs) -> float:
        return math.inf

    def instance(self, event: NonPrivate, instances: Instances) -> Outcomes:
        return lower.two_sided(0.0, 1.0)

    def pair(self, event: NonPrivate, step: float, pairs: Pairs) -> Pair:
        raise UnknownEventError("data left without protection has no dominating pair.")


_RELEASES: dict[type[Event], EventEntry[Any]] = {
    Gaussian: _Gaussian(),
    Laplace: _Laplace(),
    Joint: _Joint(),
    PoissonSampled: _PoissonSampled(),
    ZCDP: _ZCDP(),
    ApproximateDP: _ApproximateDP(),
    NonPrivate: _NonPrivate(),
}


_MOST_PARTS = 6  # of which every two are composed; of more, the dearest twice


class _RepeatedEntry(_Composition[Repeated]):
    """The entry of repeated events, whose counts only `flatten` multiplies out."""

    def beyond(self, event: Repeated, edges: Edges, of: MassOf) -> float:
        """Return the number of copies times what noise of finite range adds to δ in one copy."""
        return event.count * of(event.event)

    def text(self, event: Repeated, of: TextOf) -> str:
        if self.shown(event):
            return f"{event.count} times"
        return self.formula(event, of)

    def formula(self, event: Repeated, of: TextOf) -> str:
        return f"{event.count} × {of(event.event)}"

    def looks(self, event: Repeated, of: LooksOf) -> Counter[Look]:
        """Count the looks of one copy, each times the number of copies."""
        counts: Counter[Look] = Counter()
        for look, count in of(event.event).items():
            counts[look] = count * event.count
        return counts

    def shown(self, event: Repeated) -> tuple[Event, ...]:
        """Return the repeated event, to list it with its ε, unless it is a sampled step."""
        if isinstance(event.event, PoissonSampled):
            return ()
        return (event.event,)

    def training(self, event: Repeated, of: TrainingOf) -> tuple[int, float] | None:
        """Return (count, rate) of repeated DP-SGD steps, else that of a training inside."""
        step = event.event
        if isinstance(step, PoissonSampled) and not isinstance(step.event, Laplace):
            return event.count, step.rate
        return of(step)


class _Composed(_Composition[Composed]):
    """The entry of compositions: several events about the same data."""

    def text(self, event: Composed, of: TextOf) -> str:
        return f"composition of {len(event.events)}"

    def formula(self, event: Composed, of: TextOf) -> str:
        return " + ".join(map(of, event.events))

    def looks(self, event: Composed, of: LooksOf) -> Counter[Look]:
        """Count the looks of all parts together."""
        return sum(map(of, event.events), Counter())


class _WorstOf(_Compound[WorstOf]):
    """The entry of one among several events: which one is unknown, or drawn publicly and shown."""

    one_instance = False

    def curve(self, event: WorstOf, of: CurveOf) -> Floats:
        """Return the pointwise maximum of the curves, or with weights the curve of the mixture."""
        curves = np.stack([of(child) for child in event.events])
        if event.weights is not None:
            return mixture_curve(curves, np.asarray(event.weights))
        return np.asarray(curves.max(axis=0))

    def own_pair(self, event: WorstOf, fineness: float, pairs: Pairs) -> Pair:
        """Return the dominating pair of the worst event at each ε, or with weights that of the mixture."""
        alternatives = _on_one_lattice(event.events, fineness, pairs)
        if event.weights is None:
            return dominating.worst_pair(alternatives)
        removes = [pair.remove for pair in alternatives]
        adds = [pair.add for pair in alternatives]
        return Pair(
            mixture(removes, event.weights),
            mixture(adds, event.weights),
        )

    def instance(self, event: WorstOf, instances: Instances) -> Outcomes:
        """Return the outcomes of the costliest alternative, or with weights those of the mixture."""
        if event.weights is None:
            return instances.dearest(event.events)
        outcomes = [instances.of(child) for child in event.events]
        return lower.mixed(outcomes, event.weights)

    def text(self, event: WorstOf, of: TextOf) -> str:
        kind = "worst of" if event.weights is None else "public mixture of"
        return f"{kind} {len(event.events)}"

    def formula(self, event: WorstOf, of: TextOf) -> str:
        alternatives = ", ".join(map(of, event.events))
        return f"worst of [{alternatives}]"


class _Parallel(_Compound[Parallel]):
    """The entry of events on disjoint parts of the data, of which a record touches one."""

    one_instance = False

    def curve(self, event: Parallel, of: CurveOf) -> Floats:
        return np.asarray(np.max([of(child) for child in event.events], axis=0))

    def own_pair(self, event: Parallel, fineness: float, pairs: Pairs) -> Pair:
        parts = _on_one_lattice(event.events, fineness, pairs)
        return dominating.worst_pair(parts)

    def instance(self, event: Parallel, instances: Instances) -> Outcomes:
        return instances.dearest(event.events)

    def replaced(self, event: Parallel) -> Event:
        """Return the worst composition of any two parts (README, 8).

        The record that goes and the one that comes may stand in two parts: the composition of the two dearest
        is charged, whichever they are. Of more than six different parts, the maximum twice, which is larger.
        """
        counts = Counter(event.events)
        if len(event.events) == 1:
            return event.events[0]
        if len(counts) > _MOST_PARTS:
            return Repeated(2, WorstOf(tuple(counts)))
        both = [Composed(pair) for pair in itertools.combinations(counts, 2)]
        for part, count in counts.items():
            if count > 1:
                both.append(Composed((part, part)))
        if len(both) == 1:
            return both[0]
        return WorstOf(both)

    def text(self, event: Parallel, of: TextOf) -> str:
        return f"{len(event.events)} disjoint parts of the data"

    def formula(self, event: Parallel, of: TextOf) -> str:
        return " ∥ ".join(map(of, event.events))


def _on_one_lattice(events: Sequence[Event], fineness: float, pairs: Pairs) -> list[Pair]:
    """Return the pairs of several events on one lattice, fine enough for each."""
    steps = [pairs.step(child, fineness) for child in events]
    step = min(steps)
    return [pairs.at(child, step) for child in events]


_COMPOSITIONS: dict[type[Event], EventEntry[Any]] = {
    Repeated: _RepeatedEntry(),
    Composed: _Composed(),
    WorstOf: _WorstOf(),
    Parallel: _Parallel(),
}


_PROFILE_SIZE = 4096  # lattice points on which the profile of a tuner is tabulated
_THRESHOLD_SIZE = 400


class _ChoiceEntry(_Compound[E]):
    """Entries of choices among runs: the best of K, and the first that passes a threshold."""

    one_instance = False
    paired_weight = True
    size: ClassVar[int]

    @abstractmethod
    def choice(self, event: E) -> Choice: ...

    def curve(self, event: E, of: CurveOf) -> Floats:
        selection = self.choice(event).selection
        return selection_curve(of(selection.event), selection.runs)

    def own_pair(self, event: E, fineness: float, pairs: Pairs) -> Pair:
        """Return the dominating pair of a selection among runs; for a search, an estimate of it."""
        remove, add = pairs.tuners(event, fineness)
        if pairs.gains is not None:
            return pairs.gains.pair(event, remove, add, self.size)
        return dominating.tuner_pair(remove, add, self.size)


class _PrivateSelection(_ChoiceEntry[PrivateSelection]):
    """The entry of the best of K runs, with K drawn from a public law."""

    size = _PROFILE_SIZE

    def choice(self, event: PrivateSelection) -> Choice:
        return Choice(event, threshold=False)

    def tuners(self, event: PrivateSelection, fineness: float, pairs: Pairs) -> Tuners:
        """Return the envelope bounds (remove, add); one object twice if both are alike."""
        pair = pairs.fine(event.event, fineness)
        remove = Tuner(pair.remove, event.runs)
        if pair.add is pair.remove:
            return remove, remove
        return remove, Tuner(pair.add, event.runs)

    def instance(self, event: PrivateSelection, instances: Instances) -> Outcomes:
        """Return the outcomes of the best of K runs, scored so that ε is large at the δ of `instances`."""
        best_of = partial(
            lower.best_of_runs,
            runs=event.runs,
            delta=instances.delta,
            scores=instances.scores,
        )
        return instances.selected(event.event, best_of)

    def beyond(self, event: PrivateSelection, edges: Edges, of: MassOf) -> float:
        """Return E[K] times what noise of finite range adds to δ in one run: K is independent of the data."""
        return event.runs.expected_runs * of(event.event)

    def text(self, event: PrivateSelection, of: TextOf) -> str:
        name = event.runs.law.replace("_", " ")
        fields = _fields_as_text(event.runs.to_dict(), without="law")
        return f"best of K runs, K {name} ({fields})"

    def formula(self, event: PrivateSelection, of: TextOf) -> str:
        runs = event.runs
        least = ""
        if runs.minimum is not None:
            least = f", at least {runs.minimum}"
        run = of(event.event)
        return f"best of K ~ {runs.law}(mean {runs.mean:g}{least}) of [{run}]"


class _ThresholdSelection(_ChoiceEntry[ThresholdSelection]):
    """The entry of the first run that passes a known threshold."""

    size = _THRESHOLD_SIZE

    def choice(self, event: ThresholdSelection) -> Choice:
        """Return the best of a geometric number of runs, scored by "passed or not".

        Given that some run passed, the first is distributed as the best under "passed or not".
        """
        return Choice(PrivateSelection(event.event, Geometric(1.0 / event.stop)), threshold=True)

    def tuners(self, event: ThresholdSelection, fineness: float, pairs: Pairs) -> Tuners:
        """Return the threshold bounds (remove, add) from a coarsened pair of one run."""
        fine = pairs.fine(event.event, fineness)
        pair = dominating.thinned(fine, fineness)
        remove = Threshold(pair.remove, event.stop)
        return remove, Threshold(pair.add, event.stop)

    def instance(self, event: ThresholdSelection, instances: Instances) -> Outcomes:
        first = partial(
            lower.first_to_pass,
            stop=event.stop,
            delta=instances.delta,
        )
        return instances.selected(event.event, first)

    def beyond(self, event: ThresholdSelection, edges: Edges, of: MassOf) -> float:
        """Return 1/γ, the most expected runs, times what noise of finite range adds to δ in one run."""
        return of(event.event) / event.stop

    def text(self, event: ThresholdSelection, of: TextOf) -> str:
        return f"first run above a threshold, giving up with probability {event.stop:.6g}"

    def formula(self, event: ThresholdSelection, of: TextOf) -> str:
        run = of(event.event)
        return f"first past a threshold (γ = {event.stop:.4g}) of [{run}]"


class _SubsampledTuning(_Compound[SubsampledTuning]):
    """The entry of tuning on a Poisson subset, then training on the rest or on all records."""

    replace_one = False
    paired_weight = True

    def curve(self, event: SubsampledTuning, of: CurveOf) -> Floats:
        """Return the Rényi curve: of split data (variant 1), or of amplified tuning plus training."""
        tuning = of(event.tuning)
        training = of(event.training)
        if event.variant == 1:
            return split_curve(ORDERS, tuning, training, event.rate)
        return amplified_curve(ORDERS, tuning, event.rate) + training

    def own_pair(self, event: SubsampledTuning, fineness: float, pairs: Pairs) -> Pair:
        """Return the dominating pair: of split data (variant 1), or of amplified tuning and training."""
        tuning = pairs.fine(event.tuning, fineness)
        training = pairs.fine(event.training, fineness)
        if event.variant == 1:
            return self._split_pair(tuning, training, event.rate, fineness)
        remove, add = dominating.amplified(
            tuning.remove,
            tuning.add,
            event.rate,
            training.remove.step,
        )
        return Pair(
            compose([(remove, 1), (training.remove, 1)]),
            compose([(add, 1), (training.add, 1)]),
        )

    def _split_pair(
        self,
        tuning: Pair,
        training: Pair,
        rate: float,
        fineness: float,
    ) -> Pair:
        """Return the dominating pair of variant 1, where a record is either tuned on or trained on."""
        thin = dominating.thinned(tuning, fineness)
        deviations = [thin.remove.deviation, training.remove.deviation]
        deviation = min((d for d in deviations if d > 0.0), default=1.0)
        step = 2.0 * dominating.THIN * max(deviation, 1e-4) / fineness
        remove, add = dominating.tabulate(
            (thin.remove, thin.add),
            (training.remove, training.add),
            rate,
            step,
        )
        return Pair(remove, add)

    def instance(self, event: SubsampledTuning, instances: Instances) -> Outcomes:
        tuning = instances.of(event.tuning)
        training = instances.of(event.training)
        if event.variant == 1:
            return lower.split(tuning, training, event.rate)
        on_subset = lower.sampled(tuning, event.rate)
        parts = [(on_subset, 1), (training, 1)]
        return lower.composition(parts, instances.target)

    def beyond(self, event: SubsampledTuning, edges: Edges, of: MassOf) -> float:
        """Return the rate times what finite noise adds to δ in tuning, plus what it adds in training."""
        return event.rate * of(event.tuning) + of(event.training)

    def text(self, event: SubsampledTuning, of: TextOf) -> str:
        return f"tuning on a subset at rate {event.rate:.6g}, variant {event.variant}"

    def formula(self, event: SubsampledTuning, of: TextOf) -> str:
        where = "the rest" if event.variant == 1 else "all"
        tuning = of(event.tuning)
        training = of(event.training)
        return f"tune on a part of rate {event.rate:g} [{tuning}], train on {where} [{training}]"

    def training(self, event: SubsampledTuning, of: TrainingOf) -> tuple[int, float] | None:
        """Return (steps, rate) of the final training."""
        return of(event.training)


_CHOICES: dict[type[Event], EventEntry[Any]] = {
    PrivateSelection: _PrivateSelection(),
    ThresholdSelection: _ThresholdSelection(),
    SubsampledTuning: _SubsampledTuning(),
}


ENTRIES: dict[type[Event], EventEntry[Any]] = {**_RELEASES, **_COMPOSITIONS, **_CHOICES}


def entry(event: Event) -> EventEntry[Any]:
    """Return the registry entry of an event's type, or refuse a type without one."""
    kind = ENTRIES.get(type(event))
    if kind is None:
        raise UnknownEventError(f"a {event.type} event has no entry in the registry of accounts.")
    return kind


def under(event: Event, adjacency: Adjacency) -> Event:
    """Return an event whose add-remove account holds for `event` under `adjacency`, or refuse."""
    if adjacency is Adjacency.ADD_REMOVE:
        return event
    kind = entry(event)
    if not kind.replace_one:
        raise InvalidInputError(
            "adjacency",
            adjacency.value,
            f"a {event.type} event is accounted under add-remove only: no bound here covers a sample of "
            "which one record is replaced",
            "Leave it out for add-remove. What is (ε, δ)-private under add-remove is (2ε, (1 + e^ε) δ)-"
            "private under replace-one: in Python, privtune.accounting.group_privacy(event, delta).",
        )
    children = [under(child, adjacency) for child in event.children()]
    return kind.replaced(event.rebuild(children))


def scaled(event: Event, factor: float) -> Event:
    """Return the event with every noise multiplier in it multiplied by `factor`."""
    children = [scaled(child, factor) for child in event.children()]
    return entry(event).scaled(event.rebuild(children), factor)


def text(event: Event) -> str:
    """Return a description of an event without its parts."""
    return entry(event).text(event, text)


def formula(event: Event) -> str:
    """Return an event as a formula that fits a table cell."""
    return entry(event).formula(event, formula)


def training(event: Event) -> tuple[int, float] | None:
    """Return (steps, rate) of the first DP-SGD training in an event; None without one."""
    return entry(event).training(event, training)


def looks(event: Event) -> Counter[Look]:
    """Return how often each look (a sampling rate and its releases) occurs in a training's event."""
    counts = entry(event).looks(event, looks)
    if counts is None:
        raise UnknownEventError(f"a {event.type} event is not a release of a training.")
    return counts
