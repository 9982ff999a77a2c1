"""Entries of what is released once: with noise, about all records or a sample, or as it is known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from privtune.accounting._checks import LARGEST
from privtune.accounting.algebra import Event
from privtune.accounting.curves import ORDERS, pure_curve, sampled_laplace_curve
from privtune.accounting.events import (
    ZCDP,
    ApproximateDP,
    Gaussian,
    Joint,
    Laplace,
    NonPrivate,
    PoissonSampled,
)
from privtune.accounting.joint import joint_curve, joint_deviation
from privtune.accounting.lower import (
    Outcomes,
    gaussian_outcomes,
    laplace_outcomes,
    sampled,
    two_sided,
)
from privtune.accounting.mechanisms._kinds import Composition, NoLook
from privtune.accounting.mechanisms.entry import (
    CurveOf,
    E,
    Edges,
    Entry,
    Floats,
    Instances,
    Look,
    LooksOf,
    MassOf,
    Pairs,
    TextOf,
    UnknownEventError,
)
from privtune.accounting.moments import sampled_gaussian_curve
from privtune.accounting.pairs import Pair, approximate_pair, laplace_pair, zcdp_pair
from privtune.accounting.releases import Direction, loss_deviation, sampled_gaussian
from privtune.accounting.subsampled import amplified


class _Known(NoLook[E]):
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

    def scaled(self, event: Any, factor: float) -> Event:
        louder: Event = replace(event, noise_multiplier=event.noise_multiplier * factor)
        return louder

    def text(self, event: Any, of: TextOf) -> str:
        return f"{event.type}, noise multiplier {event.noise_multiplier:.6g}"

    def formula(self, event: Any, of: TextOf) -> str:
        return f"{self.name}{event.noise_multiplier:.4g})"

    def looks(self, event: Any, of: LooksOf) -> Counter[Look]:
        return Counter({(1.0, ((event.type, event.noise_multiplier),)): 1})


class _Gaussian(_Release):
    name = "Gaussian(σ="

    def curve(self, event: Gaussian, of: CurveOf) -> Floats:
        return ORDERS / (2.0 * event.noise_multiplier**2)

    def deviation(self, event: Gaussian, pairs: Pairs) -> float:
        return 1.0 / event.noise_multiplier

    def pair(self, event: Gaussian, step: float, pairs: Pairs) -> Pair:
        pmf = sampled_gaussian(1.0, event.noise_multiplier, step, Direction.REMOVE)
        return Pair(pmf, pmf)

    def instance(self, event: Gaussian, instances: Instances) -> Outcomes:
        return gaussian_outcomes(event.noise_multiplier)

    def beyond(self, event: Gaussian, edges: Edges, of: MassOf) -> float:
        return edges.gaussian(event.noise_multiplier)

    def precision(self, event: Gaussian) -> float:
        return 1.0 / event.noise_multiplier**2


class _Laplace(_Release):
    name = "Laplace(b="

    def curve(self, event: Laplace, of: CurveOf) -> Floats:
        return sampled_laplace_curve(1.0, event.noise_multiplier, ORDERS)

    def deviation(self, event: Laplace, pairs: Pairs) -> float:
        return min(1.0 / event.noise_multiplier, 1.0)

    def pair(self, event: Laplace, step: float, pairs: Pairs) -> Pair:
        return laplace_pair(event.noise_multiplier, step)

    def instance(self, event: Laplace, instances: Instances) -> Outcomes:
        return laplace_outcomes(event.noise_multiplier)

    def beyond(self, event: Laplace, edges: Edges, of: MassOf) -> float:
        return edges.laplace(event.noise_multiplier)

    def pure(self, event: Laplace) -> tuple[float, float]:
        return 1.0 / event.noise_multiplier, 0.0


class _Joint(Composition[Joint]):
    def text(self, event: Joint, of: TextOf) -> str:
        sigma = event.noise_multiplier
        noises = [f"noise {sigma:.6g}"] if math.isfinite(sigma) else []
        noises += [f"Laplace {scale:.6g}" for scale in event.laplace_multipliers]
        return f"{len(event.events)} releases of one sample = {', '.join(noises)}"

    def formula(self, event: Joint, of: TextOf) -> str:
        return f"joint[{', '.join(map(of, event.events))}]"

    def looks(self, event: Joint, of: LooksOf) -> Counter[Look]:
        atoms = [atom for part in event.events for _, inner in of(part) for atom in inner]
        return Counter({(1.0, tuple(sorted(atoms))): 1})

    def shown(self, event: Joint) -> tuple[Event, ...]:
        return ()


class _PoissonSampled(Entry[PoissonSampled]):
    """Its pair is that of the releases moved atom by atom; one Gaussian has a closed form."""

    replace_one = False
    paired_weight = True

    def _releases(self, event: PoissonSampled) -> tuple[float, tuple[float, ...]]:
        """Return σ of the Gaussians together, infinite without one, and the scales of Laplace."""
        joint = Joint([event.event]) if not isinstance(event.event, Joint) else event.event
        return joint.noise_multiplier, joint.laplace_multipliers

    def sampled_gaussian(self, event: PoissonSampled) -> tuple[float, float] | None:
        sigma, scales = self._releases(event)
        return None if scales else (event.rate, sigma)

    def curve(self, event: PoissonSampled, of: CurveOf) -> Floats:
        sigma, scales = self._releases(event)
        if not scales:
            return sampled_gaussian_curve(event.rate, sigma, ORDERS)
        if len(scales) == 1 and math.isinf(sigma):
            return sampled_laplace_curve(event.rate, scales[0], ORDERS)
        return joint_curve(event.rate, sigma, scales, ORDERS)

    def deviation(self, event: PoissonSampled, pairs: Pairs) -> float:
        sigma, scales = self._releases(event)
        if not scales:
            return loss_deviation(event.rate, sigma)
        if len(scales) == 1 and math.isinf(sigma):
            return min(event.rate * math.expm1(min(1.0 / scales[0], 1.0)), 1.0)
        return joint_deviation(event.rate, sigma, scales)

    def pair(self, event: PoissonSampled, step: float, pairs: Pairs) -> Pair:
        sigma, scales = self._releases(event)
        if not scales:
            return Pair(
                sampled_gaussian(event.rate, sigma, step, Direction.REMOVE),
                sampled_gaussian(event.rate, sigma, step, Direction.ADD),
            )
        pair = pairs.unsampled(event.event, step / self.deviation(event, pairs))
        return Pair(*amplified(pair.remove, pair.add, event.rate, step))

    def instance(self, event: PoissonSampled, instances: Instances) -> Outcomes:
        return sampled(instances.of(event.event), event.rate)

    def beyond(self, event: PoissonSampled, edges: Edges, of: MassOf) -> float:
        return event.rate * of(event.event)

    def scaled(self, event: PoissonSampled, factor: float) -> Event:
        return event

    def text(self, event: PoissonSampled, of: TextOf) -> str:
        return f"Poisson sample at rate {event.rate:.6g}: {of(event.event)}"

    def formula(self, event: PoissonSampled, of: TextOf) -> str:
        return f"Poisson(q={event.rate:.4g}, {of(event.event)})"

    def looks(self, event: PoissonSampled, of: LooksOf) -> Counter[Look]:
        return Counter({(event.rate, atoms): n for (_, atoms), n in of(event.event).items()})

    def shown(self, event: PoissonSampled) -> tuple[Event, ...]:
        return ()


class _ZCDP(_Known[ZCDP]):
    def curve(self, event: ZCDP, of: CurveOf) -> Floats:
        return event.rho * ORDERS

    def deviation(self, event: ZCDP, pairs: Pairs) -> float:
        return math.sqrt(2.0 * max(event.rho, 1e-8))

    def pair(self, event: ZCDP, step: float, pairs: Pairs) -> Pair:
        return zcdp_pair(event.rho, event.rho * ORDERS, step)

    def instance(self, event: ZCDP, instances: Instances) -> Outcomes:
        noise = 1.0 / math.sqrt(2.0 * max(event.rho, 1.0 / LARGEST))
        return gaussian_outcomes(noise)

    def rho(self, event: ZCDP) -> float:
        return event.rho


class _ApproximateDP(_Known[ApproximateDP]):
    def curve(self, event: ApproximateDP, of: CurveOf) -> Floats:
        return np.full_like(ORDERS, np.inf) if event.delta > 0.0 else pure_curve(event.epsilon)

    def deviation(self, event: ApproximateDP, pairs: Pairs) -> float:
        return max(event.epsilon, 1e-3)

    def pair(self, event: ApproximateDP, step: float, pairs: Pairs) -> Pair:
        return approximate_pair(event.epsilon, event.delta, step)

    def instance(self, event: ApproximateDP, instances: Instances) -> Outcomes:
        return two_sided(event.epsilon, event.delta)

    def pure(self, event: ApproximateDP) -> tuple[float, float]:
        return event.epsilon, event.delta

    def fails(self, event: ApproximateDP) -> bool:
        return True


class _NonPrivate(_Known[NonPrivate]):
    private = False

    def curve(self, event: NonPrivate, of: CurveOf) -> Floats:
        return np.full_like(ORDERS, np.inf)

    def deviation(self, event: NonPrivate, pairs: Pairs) -> float:
        return math.inf

    def instance(self, event: NonPrivate, instances: Instances) -> Outcomes:
        return two_sided(0.0, 1.0)

    def pair(self, event: NonPrivate, step: float, pairs: Pairs) -> Pair:
        raise UnknownEventError("data left without protection has no dominating pair.")


ENTRIES: dict[type[Event], Entry[Any]] = {
    Gaussian: _Gaussian(),
    Laplace: _Laplace(),
    Joint: _Joint(),
    PoissonSampled: _PoissonSampled(),
    ZCDP: _ZCDP(),
    ApproximateDP: _ApproximateDP(),
    NonPrivate: _NonPrivate(),
}
