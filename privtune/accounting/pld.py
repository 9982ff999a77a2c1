"""Dominating pairs of every event, and their composition.

Each part of an event becomes a pair of lattice distributions, one for each direction (the record is
removed, the record is added), kept apart until the end; equal lattices compose by FFT. Parts that
are no single release (selections, subsampled tuning, maxima) carry a grid of their own; their
profile is then turned into a dominating pair on the lattice of the composition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from privtune.accounting._checks import LARGEST
from privtune.accounting.algebra import Event, flatten
from privtune.accounting.convolution import compose
from privtune.accounting.curves import rdp_epsilon
from privtune.accounting.events import ZCDP, Gaussian
from privtune.accounting.mechanisms.entry import Tuners
from privtune.accounting.pairs import Gains, Pair
from privtune.accounting.pmf import GridError, LossPmf, nothing
from privtune.accounting.rdp import composed_curve
from privtune.accounting.registry import entry
from privtune.accounting.releases import Direction, loss_range
from privtune.accounting.stages import composed_in_stages, release_count

_COARSE = 0.1  # lattice step over the deviation of one loss; adds about 5e-4 to ε, halved on demand
_MANY = 64  # different parts beyond which only the Rényi account is computed; sampled Gaussians are
# composed in stages and do not count
_CELLS = 2**17  # of a lattice, on which the losses or their sum are composed at once
_DEVIATIONS = 24.0  # of a sum, that its lattice holds
_MOST_CELLS, _MOST_MASSES = 2**19, 2**24  # where all is on one lattice: of a sum, of all parts
_SHARE = 4e-3  # of ε, by which rounding may raise it on the coarsest lattice
_JOINT = 0.01  # the same for releases that share a sample, which are composed before it is drawn
_INNER_DELTA = 1e-6  # for which the lattice of an event inside another one is chosen


def no_pair(parts: Mapping[Event, int]) -> str:
    """Return why no dominating pair is built for all parts; nothing if it is."""
    sampled = sum(entry(part).sampled_gaussian(part) is not None for part in parts)
    # All unsampled Gaussians are one, and so is all of which zero-concentrated DP is known.
    others = sum(not _merges(part) for part in parts) - sampled
    if others > _MANY:
        return f"not computed: more than {_MANY} different parts"
    for part in parts:
        if not entry(part).private:
            return "nothing is guaranteed"
        for child in entry(part).shown(part):
            if reason := no_pair(flatten(child)):
                return reason
    return ""


def default_step(
    parts: Mapping[Event, int],
    delta: float,
    fineness: float = 1.0,
    *,
    near: float | None = None,
    gains: Gains | None = None,
) -> float:
    """Return the lattice step at which discretisation adds less than about 1e-3 to ε.

    Spreading a loss on two lattice points raises its mean by at most step²/8 and its variance by at
    most step²/4, hence ε by about `count·step²/8·(1 + 2 log(1/δ)/ε)`: the step follows from the
    deviation of the losses or, where rare large losses dominate it, from ε itself, of which `near`
    is a guess; without one the Rényi account is asked. `gains` as for `event_pair`.
    """
    merged = _merged(parts)
    if not merged:
        return 1.0  # of nothing: any lattice will do
    rough = 0.5 * (rdp_epsilon(composed_curve(parts), delta) if near is None else near)
    count = sum(merged.values())
    if steps := _staged_steps(tuple(merged.items()), gains):
        # Half of what may be added is for the lattices of the stages before.
        count = 2 * (count - sum(n for _, n in steps) + release_count(steps))
    return _step_of(merged, count, rough, delta, gains) / fineness


def _step_of(
    merged: Mapping[Event, int], count: int, rough: float, delta: float, gains: Gains | None
) -> float:
    variance = _variance(merged, gains)
    step = _COARSE * math.sqrt(variance / count)
    if math.isfinite(rough):
        tilt = 1.0 + 2.0 * math.log(1.0 / delta) / max(rough, 1e-9)
        step = max(step, math.sqrt(_SHARE * rough / (count * tilt)))
    return max(step, 1e-9)


@lru_cache(maxsize=64)
def _staged_steps(
    parts: tuple[tuple[Event, int], ...], gains: Gains | None
) -> list[tuple[tuple[float, float], int]]:
    """Return the sampled Gaussians, and how many, if they are to be composed in stages."""
    merged = dict(parts)
    steps = [
        (kind, count)
        for part, count in parts
        if (kind := entry(part).sampled_gaussian(part)) is not None and kind[0] < 1.0
    ]
    if not steps or len(parts) > _MANY:
        return steps
    rough = 0.5 * rdp_epsilon(composed_curve(merged), _INNER_DELTA)
    once = _step_of(merged, sum(merged.values()), rough, _INNER_DELTA, gains)
    return steps if _reach(merged, gains) > _CELLS * once else []


def _reach(merged: Mapping[Event, int], gains: Gains | None) -> float:
    """Return the largest loss of one step, or of the sum."""
    kinds = filter(None, (entry(part).sampled_gaussian(part) for part in merged))
    widest = max((loss_range(*kind, Direction.REMOVE)[1] for kind in kinds), default=0.0)
    return max(widest, _DEVIATIONS * math.sqrt(_variance(merged, gains)))


def _variance(parts: Mapping[Event, int], gains: Gains | None) -> float:
    return sum(n * entry(part).deviation(part, _Pairs(gains)) ** 2 for part, n in parts.items())


def _merges(part: Event) -> bool:
    return entry(part).precision(part) is not None or entry(part).rho(part) is not None


def _merged(parts: Mapping[Event, int]) -> dict[Event, int]:
    """Return the parts with all unsampled Gaussians, and all zCDP, merged into what they equal."""
    precision, rho = 0.0, 0.0
    merged: dict[Event, int] = {}
    for part, count in parts.items():
        known = entry(part)
        if (found := known.precision(part)) is not None:
            precision += count * found
        elif (found := known.rho(part)) is not None:
            rho += count * found
        else:
            merged[part] = count
    if precision > 0.0:
        noise = 1.0 / math.sqrt(precision)
        if noise * LARGEST < 1.0:
            raise GridError("the noise is too small.")
        merged[Gaussian(min(noise, LARGEST))] = 1
    if rho > LARGEST:
        raise GridError("the divergence is too large.")
    if rho > 0.0:
        merged[ZCDP(rho)] = 1
    return merged


def event_pair(parts: Mapping[Event, int], step: float, *, gains: Gains | None = None) -> Pair:
    """Return the dominating pair of the composition of `parts` on a lattice.

    Args:
        parts: What `flatten` returns, at least one part.
        step: Lattice step.
        gains: For searches alone: selections are charged by the envelope less what was gained at
            another noise, in a tenth of the time.

    Raises:
        GridError: The pair does not fit on a lattice of reasonable size.
    """
    merged = tuple(_merged(parts).items())
    if not any(entry(part).own_lattice for part, _ in merged):
        gains = None
    return _composed_pair(merged, step, gains) if merged else Pair(nothing(step), nothing(step))


def pairs_on_one_lattice(
    compositions: Sequence[Mapping[Event, int]], delta: float, near: float, fineness: float
) -> tuple[list[Pair], NDArray[np.int64]]:
    """Return the pairs of all parts, and how often each is in each composition, a row for each.

    Args:
        compositions: What `flatten` returns; the lattice is that of the first one.
        delta: For which the lattice is chosen.
        near: About ε of the first one.
        fineness: How many times finer the lattice is than it must be.

    Raises:
        GridError: The first one does not fit on one lattice.
    """
    merged = [_merged(composition) for composition in compositions]
    step = _step_of(merged[0], sum(merged[0].values()), near, delta, None)
    if _reach(merged[0], None) > _MOST_CELLS * step:
        raise GridError("the composition does not fit on one lattice")
    columns = list(dict.fromkeys(itertools.chain.from_iterable(merged)))
    counts = np.array([[parts.get(part, 0) for part in columns] for parts in merged])
    pairs, cells = [], 0
    for part in columns:
        pairs.append(entry(part).pair(part, step / fineness, _Pairs(None)))
        cells += pairs[-1].remove.masses.size + pairs[-1].add.masses.size
        if cells > _MOST_MASSES:
            raise GridError(f"{len(columns)} parts need more than {_MOST_MASSES} lattice points")
    return pairs, counts


@lru_cache(maxsize=16)
def _composed_pair(parts: tuple[tuple[Event, int], ...], step: float, gains: Gains | None) -> Pair:
    steps = _staged_steps(parts, gains)
    staged = {kind for kind, _ in steps}
    built = [
        (entry(part).pair(part, step, _Pairs(gains)), count)
        for part, count in parts
        if entry(part).sampled_gaussian(part) not in staged
    ]

    def composed(direction: Direction) -> LossPmf:
        first = [(pmf, 1) for pmf in composed_in_stages(steps, step, direction)]
        return compose([*first, *((pair.get(direction), count) for pair, count in built)])

    remove = composed(Direction.REMOVE)
    if not steps and all(pair.remove is pair.add for pair, _ in built):
        return Pair(remove, remove)
    return Pair(remove, composed(Direction.ADD))


def fine_pair(event: Event, fineness: float = 2.0, *, gains: Gains | None = None) -> Pair:
    """Return the pair of an event on a lattice of its own choice; `gains` as for `event_pair`."""
    parts = flatten(event)
    return event_pair(parts, default_step(parts, _INNER_DELTA, fineness, gains=gains), gains=gains)


@lru_cache(maxsize=32)
def tuners(event: Event, fineness: float, *, gains: Gains | None = None) -> Tuners:
    """Return the bounds of a choice among runs in both directions (remove, add)."""
    return entry(event).tuners(event, fineness, _Pairs(gains))


class _Pairs:
    """What the entries of the registry ask about the events inside their own."""

    def __init__(self, gains: Gains | None) -> None:
        self.gains = gains

    def at(self, event: Event, step: float) -> Pair:
        return event_pair(flatten(event), step, gains=self.gains)

    def fine(self, event: Event, fineness: float) -> Pair:
        return fine_pair(event, fineness, gains=self.gains)

    def step(self, event: Event, fineness: float) -> float:
        return default_step(flatten(event), _INNER_DELTA, fineness, gains=self.gains)

    def tuners(self, event: Event, fineness: float) -> Tuners:
        return tuners(event, fineness, gains=self.gains)

    def unsampled(self, event: Event, share: float) -> Pair:
        return _unsampled(event, share)

    def own(self, event: Event, fineness: float) -> Pair:
        return _own(event, fineness, self.gains)


@lru_cache(maxsize=16)
def _unsampled(event: Event, share: float) -> Pair:
    """Return the (product) pair of the releases about one sample, before any sampling.

    Args:
        event: The releases: laplace or joint.
        share: Step of the lattice of the composition over the deviation of the sampled loss; the
            lattice of the product is a tenth of that against its own deviation, so that what is
            read between its points adds little.
    """
    parts = flatten(event)
    step = min(max(0.1 * share, _JOINT / 8.0), _JOINT) * math.sqrt(_variance(parts, None))
    return event_pair(parts, step)


@lru_cache(maxsize=32)
def _own(event: Event, fineness: float, gains: Gains | None) -> Pair:
    return entry(event).own_pair(event, fineness, _Pairs(gains))
