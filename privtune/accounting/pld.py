"""Dominating pairs of every event, and their composition.

Each part of an event becomes a pair of lattice distributions, one for each direction (the record is
removed, the record is added), kept apart until the end; equal lattices compose by FFT. Parts that
are no single release (selections, subsampled tuning, maxima) carry a grid of their own; their
profile is then turned into a dominating pair on the lattice of the composition.

This is the only module that imports dp_accounting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting.pld import privacy_loss_mechanism
from numpy.typing import NDArray

from privtune.accounting.events import (
    ZCDP,
    ApproximateDP,
    Event,
    Gaussian,
    Joint,
    Laplace,
    Parallel,
    PoissonSampled,
    PrivateSelection,
    SubsampledTuning,
    ThresholdSelection,
    WorstOf,
    flatten,
)
from privtune.accounting.joint import joint_deviation
from privtune.accounting.pmf import LossPmf, compose, from_profile, mixture
from privtune.accounting.rdp import rdp_curve, rdp_delta, rdp_epsilon
from privtune.accounting.releases import Direction, loss_deviation, sampled_gaussian
from privtune.accounting.selection import Threshold, Tuner
from privtune.accounting.subsampled import amplified, tabulate

__all__ = [
    "Pair",
    "default_step",
    "event_pair",
    "fine_pair",
    "has_pair",
    "selection_tuners",
    "thinned",
    "threshold_bounds",
]

Floats = NDArray[np.float64]
Profile = Callable[[Floats], Floats]
_COARSE = 0.1  # lattice step over the deviation of one loss; adds about 5e-4 to ε, halved on demand
_MANY = 64  # different parts beyond which only the Rényi account is computed
_SHARE = 4e-3  # of ε, by which rounding may raise it on the coarsest lattice
_THIN = 0.05  # lattice step over the deviation where a loss is rounded once only
_JOINT = 0.01  # the same for releases that share a sample, which are composed before it is drawn
_PROFILE_SIZE = 4096  # lattice points on which the profile of a tuner is tabulated


@dataclass(frozen=True, eq=False)
class Pair:
    """Both directions of a dominating pair."""

    remove: LossPmf
    add: LossPmf

    def get(self, direction: Direction) -> LossPmf:
        """Return one direction."""
        return self.remove if direction is Direction.REMOVE else self.add

    def epsilon(self, delta: float) -> float:
        """Return ε at this δ, the worse of the two directions."""
        return max(self.remove.epsilon(delta), self.add.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """Return δ at this ε, the worse of the two directions."""
        return max(float(self.remove.delta(epsilon)), float(self.add.delta(epsilon)))


def has_pair(parts: Mapping[Event, int]) -> bool:
    """Whether a dominating pair can be built for all parts in reasonable time."""
    return len(parts) <= _MANY and all(_leaf_has_pair(part) for part in parts)


def _leaf_has_pair(part: Event) -> bool:
    if isinstance(part, WorstOf | Parallel):
        return all(has_pair(flatten(child)) for child in part.events)
    if isinstance(part, PrivateSelection | ThresholdSelection):
        return has_pair(flatten(part.event))
    if isinstance(part, SubsampledTuning):
        return has_pair(flatten(part.tuning)) and has_pair(flatten(part.training))
    return isinstance(part, Gaussian | Laplace | PoissonSampled | ZCDP | ApproximateDP)


def default_step(
    parts: Mapping[Event, int],
    delta: float,
    fineness: float = 1.0,
    *,
    near: float | None = None,
) -> float:
    """Return the lattice step at which discretisation adds less than about 1e-3 to ε.

    Spreading a loss on two lattice points raises its mean by at most step²/8 and its variance by at
    most step²/4, hence ε by about `count·step²/8·(1 + 2 log(1/δ)/ε)`: the step follows from the
    deviation of the losses or, where rare large losses dominate it, from ε itself, of which `near`
    is a guess; without one the Rényi account is asked.
    """
    merged = _merge_gaussians(parts)
    count = sum(merged.values())
    variance = sum(number * _deviation(part) ** 2 for part, number in merged.items())
    step = _COARSE * math.sqrt(variance / count)
    rough = 0.5 * (rdp_epsilon(rdp_curve(_as_event(parts)), delta) if near is None else near)
    if math.isfinite(rough):
        tilt = 1.0 + 2.0 * math.log(1.0 / delta) / max(rough, 1e-9)
        step = max(step, math.sqrt(_SHARE * rough / (count * tilt)))
    return max(step, 1e-9) / fineness


def _as_event(parts: Mapping[Event, int]) -> Event:
    from privtune.accounting.events import Composed, Repeated

    return Composed([Repeated(number, part) for part, number in parts.items()])


def _merge_gaussians(parts: Mapping[Event, int]) -> dict[Event, int]:
    """Return the parts with all unsampled Gaussians merged into the one they equal."""
    precision = 0.0
    merged: dict[Event, int] = {}
    for part, count in parts.items():
        if isinstance(part, Gaussian):
            precision += count / part.noise_multiplier**2
        else:
            merged[part] = count
    if precision > 0.0:
        gaussian = Gaussian(1.0 / math.sqrt(precision))
        merged[gaussian] = merged.get(gaussian, 0) + 1
    return merged


def _deviation(part: Event) -> float:
    if isinstance(part, Gaussian):
        return 1.0 / part.noise_multiplier
    if isinstance(part, PoissonSampled) and isinstance(part.event, Gaussian):
        return loss_deviation(part.rate, part.event.noise_multiplier)
    if isinstance(part, Laplace):
        return min(1.0 / part.noise_multiplier, 1.0)
    if isinstance(part, PoissonSampled) and isinstance(part.event, Laplace):
        return min(part.rate * math.expm1(min(1.0 / part.event.noise_multiplier, 1.0)), 1.0)
    if isinstance(part, PoissonSampled) and isinstance(part.event, Joint):
        joint = part.event
        return joint_deviation(part.rate, joint.noise_multiplier, joint.laplace_multipliers)
    if isinstance(part, ApproximateDP):
        return max(part.epsilon, 1e-3)
    if isinstance(part, ZCDP):
        return math.sqrt(2.0 * max(part.rho, 1e-8))
    pair = _complex_pair(part, 1.0)
    return max(pair.remove.deviation, pair.add.deviation, 1e-6)


def event_pair(parts: Mapping[Event, int], step: float) -> Pair:
    """Return the dominating pair of the composition of `parts` on a lattice.

    Args:
        parts: What `flatten` returns, at least one part.
        step: Lattice step.

    Raises:
        GridError: The pair does not fit on a lattice of reasonable size.
    """
    merged = tuple(_merge_gaussians(parts).items())
    return _composed_pair(merged, step)


@lru_cache(maxsize=16)
def _composed_pair(parts: tuple[tuple[Event, int], ...], step: float) -> Pair:
    built = [(_leaf_pair(part, step), count) for part, count in parts]
    remove = compose([(pair.remove, count) for pair, count in built])
    if all(pair.remove is pair.add for pair, _ in built):
        return Pair(remove, remove)
    return Pair(remove, compose([(pair.add, count) for pair, count in built]))


def _leaf_pair(part: Event, step: float) -> Pair:
    if isinstance(part, Gaussian):
        pmf = sampled_gaussian(1.0, part.noise_multiplier, step, Direction.REMOVE)
        return Pair(pmf, pmf)
    if isinstance(part, PoissonSampled) and isinstance(part.event, Gaussian):
        noise = part.event.noise_multiplier
        return Pair(
            sampled_gaussian(part.rate, noise, step, Direction.REMOVE),
            sampled_gaussian(part.rate, noise, step, Direction.ADD),
        )
    if isinstance(part, Laplace):
        return _laplace_pair(part.noise_multiplier, step)
    if isinstance(part, PoissonSampled):
        pair = _unsampled_pair(part.event, step / _deviation(part))
        return Pair(*amplified(pair.remove, pair.add, part.rate, step))
    if isinstance(part, ApproximateDP):
        return _approximate_pair(part.epsilon, part.delta, step)
    if isinstance(part, ZCDP):
        curve = rdp_curve(part)
        top = part.rho + 2.0 * math.sqrt(60.0 * part.rho)
        return _symmetric(lambda e: np.array([rdp_delta(curve, float(x)) for x in e]), step, top)
    return _on_lattice(_complex_pair(part, 2.0), step)


def _symmetric(profile: Profile, step: float, top: float) -> Pair:
    reach = max(math.ceil(top / step) + 1, 2)
    pmf = from_profile(profile, profile, step, -reach, reach)
    return Pair(pmf, pmf)


def _approximate_pair(epsilon: float, delta: float, step: float) -> Pair:
    def profile(points: Floats) -> Floats:
        gap = -np.expm1(np.minimum(points - epsilon, 0.0))
        return delta + (1.0 - delta) * gap / (1.0 + math.exp(-epsilon))

    return _symmetric(profile, step, epsilon)


def _laplace_pair(scale: float, step: float) -> Pair:
    loss = privacy_loss_mechanism.LaplacePrivacyLoss(scale)

    def profile(points: Floats) -> Floats:
        return np.asarray(loss.get_delta_for_epsilon(points))

    return _symmetric(profile, step, 1.0 / scale)


@lru_cache(maxsize=16)
def _unsampled_pair(event: Event, share: float) -> Pair:
    """Return the (product) pair of the releases about one sample, before any sampling.

    Args:
        event: The releases: laplace or joint.
        share: Step of the lattice of the composition over the deviation of the sampled loss; the
            lattice of the product is a tenth of that against its own deviation, so that what is
            read between its points adds little.
    """
    parts = flatten(event)
    deviation = math.sqrt(sum(count * _deviation(part) ** 2 for part, count in parts.items()))
    return event_pair(parts, min(max(0.1 * share, _JOINT / 8.0), _JOINT) * deviation)


def _on_lattice(pair: Pair, step: float) -> Pair:
    """Return a pair on the given lattice that dominates a pair on its own lattice."""

    def convert(pmf: LossPmf, other: LossPmf) -> LossPmf:
        highest = max(math.ceil(float(pmf.losses[-1]) / step) + 1, 1)
        lowest = min(-math.ceil(float(other.losses[-1]) / step) - 1, -1)
        return from_profile(pmf.delta, other.delta, step, lowest, highest)

    remove = convert(pair.remove, pair.add)
    return Pair(remove, remove if pair.add is pair.remove else convert(pair.add, pair.remove))


def fine_pair(event: Event, fineness: float = 2.0) -> Pair:
    """Return the pair of an event on a lattice of its own choice."""
    parts = flatten(event)
    return event_pair(parts, default_step(parts, 1e-6, fineness))


@lru_cache(maxsize=16)
def selection_tuners(event: PrivateSelection, fineness: float) -> tuple[Tuner, Tuner]:
    """Return the envelope bound of a selection in both directions (remove, add)."""
    pair = fine_pair(event.event, fineness)
    remove = Tuner(pair.remove, event.runs)
    return remove, (remove if pair.add is pair.remove else Tuner(pair.add, event.runs))


@lru_cache(maxsize=16)
def threshold_bounds(event: ThresholdSelection, fineness: float) -> tuple[Threshold, Threshold]:
    """Return the bound on a threshold selection in both directions (remove, add)."""
    pair = thinned(fine_pair(event.event, fineness), fineness)
    return Threshold(pair.remove, event.stop), Threshold(pair.add, event.stop)


@lru_cache(maxsize=32)
def _complex_pair(part: Event, fineness: float) -> Pair:
    """Return a dominating pair, on a lattice of its own, of a part that is no single release."""
    if isinstance(part, PrivateSelection):
        return _tuner_pair(*selection_tuners(part, fineness), _PROFILE_SIZE)
    if isinstance(part, ThresholdSelection):
        return _tuner_pair(*threshold_bounds(part, fineness), 400)
    if isinstance(part, WorstOf | Parallel):
        step = min(default_step(flatten(child), 1e-6, fineness) for child in part.events)
        pairs = [event_pair(flatten(child), step) for child in part.events]
        if isinstance(part, WorstOf) and part.weights is not None:
            return Pair(
                mixture([pair.remove for pair in pairs], part.weights),
                mixture([pair.add for pair in pairs], part.weights),
            )
        return Pair(
            _worst([p.remove for p in pairs], [p.add for p in pairs], step),
            _worst([p.add for p in pairs], [p.remove for p in pairs], step),
        )
    if isinstance(part, SubsampledTuning):
        return _subsampled_pair(part, fineness)
    raise TypeError(f"{part.type} has no dominating pair")


def _worst(forward: list[LossPmf], backward: list[LossPmf], step: float) -> LossPmf:
    highest = max(pmf.lowest + pmf.masses.size for pmf in forward)
    lowest = -max(pmf.lowest + pmf.masses.size for pmf in backward)

    def largest(pmfs: list[LossPmf]) -> Profile:
        return lambda points: np.max([pmf.delta(points) for pmf in pmfs], axis=0)

    return from_profile(largest(forward), largest(backward), step, min(lowest, -1), max(highest, 1))


def _subsampled_pair(part: SubsampledTuning, fineness: float) -> Pair:
    """Return the exact dominating pair of a subsampled tuning."""
    tuning, training = fine_pair(part.tuning, fineness), fine_pair(part.training, fineness)
    if part.variant == 1:
        first = thinned(tuning, fineness)
        second = training
        deviation = max(min(first.remove.deviation, second.remove.deviation), 1e-4)
        step = 2.0 * _THIN * deviation / fineness
        return Pair(
            *tabulate((first.remove, first.add), (second.remove, second.add), part.rate, step)
        )
    removed, added = amplified(tuning.remove, tuning.add, part.rate, training.remove.step)
    return Pair(
        compose([(removed, 1), (training.remove, 1)]), compose([(added, 1), (training.add, 1)])
    )


def thinned(pair: Pair, fineness: float) -> Pair:
    """Return a pair on a lattice that is as coarse as an account of one more release allows."""

    def thin(pmf: LossPmf) -> LossPmf:
        return pmf.coarsen(max(int(_THIN * pmf.deviation / fineness / pmf.step), 1))

    return Pair(thin(pair.remove), thin(pair.add))


def _tuner_pair(remove: Tuner | Threshold, add: Tuner | Threshold, size: int) -> Pair:
    """Return the dominating pair of a whole private selection."""
    first = remove.profile(size)
    if add is remove:
        pmf = from_profile(first.delta, first.delta, first.step, -first.size, first.size)
        return Pair(pmf, pmf)
    second = add.profile(size)
    step = min(first.step, second.step)
    high = math.ceil(first.size * first.step / step)
    low = math.ceil(second.size * second.step / step)
    return Pair(
        from_profile(first.delta, second.delta, step, -low, high),
        from_profile(second.delta, first.delta, step, -high, low),
    )
