"""Dominating pairs in both directions: of releases that are known by their profile, and their kin."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.algebra import Event
from privtune.accounting.curves import rdp_delta
from privtune.accounting.pmf import LossPmf, lattice_cells
from privtune.accounting.profiles import from_profile
from privtune.accounting.rearrangement import Rearranged
from privtune.accounting.releases import Direction
from privtune.accounting.runs import NegativeBinomial
from privtune.accounting.selection import Table, Threshold, Tuner

Floats = NDArray[np.float64]
Profile = Callable[[Floats], Floats]
THIN = 0.05  # lattice step over the deviation where a loss is rounded once only
_ATOMS = 1280  # of the lattice on which the rearrangement is computed for a composition
# Parts of the ε axis, and prices: where φ′ grows slowly, more of either move no answer by 1e-4.
_WIDE = math.log(1.35), 2
_LOOKS = 16  # places at which is looked how far out it matters
_LEAST_DELTA = 1e-12  # down to which it is
_USUAL_DELTA = 1e-5  # at whose ε the profiles of a selection at two noises are laid over each other
_FAR = 0.04  # in log noise; beyond, what was learnt of the rearrangement is learnt anew
_NOISE = r'"noise_multiplier": '


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


def _symmetric(profile: Profile, step: float, top: float) -> Pair:
    reach = max(lattice_cells(top, step) + 1, 2)
    pmf = from_profile(profile, profile, step, -reach, reach)
    return Pair(pmf, pmf)


def zcdp_pair(rho: float, curve: Floats, step: float) -> Pair:
    """Return the pair of a release of which zero-concentrated DP is known, from its Rényi curve."""
    top = rho + 2.0 * math.sqrt(60.0 * rho)
    return _symmetric(lambda e: np.array([rdp_delta(curve, float(x)) for x in e]), step, top)


def approximate_pair(epsilon: float, delta: float, step: float) -> Pair:
    """Return the pair of a release of which (ε, δ)-DP is known."""

    def profile(points: Floats) -> Floats:
        gap = -np.expm1(np.minimum(points - epsilon, 0.0))
        return delta + (1.0 - delta) * gap / (1.0 + math.exp(-epsilon))

    return _symmetric(profile, step, epsilon)


def laplace_pair(scale: float, step: float) -> Pair:
    """Return the pair of one Laplace release."""
    from dp_accounting.pld.privacy_loss_mechanism import LaplacePrivacyLoss

    loss = LaplacePrivacyLoss(scale)

    def profile(points: Floats) -> Floats:
        return np.asarray(loss.get_delta_for_epsilon(points))

    return _symmetric(profile, step, 1.0 / scale)


def on_lattice(pair: Pair, step: float) -> Pair:
    """Return a pair on the given lattice that dominates a pair on its own lattice."""

    def convert(pmf: LossPmf, other: LossPmf) -> LossPmf:
        highest = max(lattice_cells(float(pmf.losses[-1]), step) + 1, 1)
        lowest = min(-lattice_cells(float(other.losses[-1]), step) - 1, -1)
        return from_profile(pmf.delta, other.delta, step, lowest, highest)

    remove = convert(pair.remove, pair.add)
    return Pair(remove, remove if pair.add is pair.remove else convert(pair.add, pair.remove))


def worst_pair(pairs: Sequence[Pair]) -> Pair:
    """Return a pair that dominates every one of these, which lie on one lattice."""
    removed, added = [pair.remove for pair in pairs], [pair.add for pair in pairs]
    return Pair(_worst(removed, added), _worst(added, removed))


def _worst(forward: list[LossPmf], backward: list[LossPmf]) -> LossPmf:
    highest = max(pmf.lowest + pmf.masses.size for pmf in forward)
    lowest = -max(pmf.lowest + pmf.masses.size for pmf in backward)

    def largest(pmfs: list[LossPmf]) -> Profile:
        return lambda points: np.max([pmf.delta(points) for pmf in pmfs], axis=0)

    ends = min(lowest, -1), max(highest, 1)
    return from_profile(largest(forward), largest(backward), forward[0].step, *ends)


def thinned(pair: Pair, fineness: float) -> Pair:
    """Return a pair on a lattice that is as coarse as an account of one more release allows."""

    def thin(pmf: LossPmf) -> LossPmf:
        return pmf.coarsen(max(int(THIN * pmf.deviation / fineness / pmf.step), 1))

    return Pair(thin(pair.remove), thin(pair.add))


def tuner_pair(remove: Tuner | Threshold, add: Tuner | Threshold, size: int) -> Pair:
    """Return the dominating pair of a whole private selection."""
    first = _lowest(remove, size)
    return _tabulated(first, first if add is remove else _lowest(add, size))


def _tabulated(first: Table, second: Table) -> Pair:
    """Return the pair with these profiles, the record removed and the record added."""
    step = min(first.step, second.step)
    high = lattice_cells(first.size * first.step, step)
    low = high if second is first else lattice_cells(second.size * second.step, step)
    remove = from_profile(first.delta, second.delta, step, -low, high)
    if second is first:
        return Pair(remove, remove)
    return Pair(remove, from_profile(second.delta, first.delta, step, -high, low))


class Gains:
    """Ratio of rearrangement to envelope of selections, learnt at one noise and used near it.

    It is for searches, which try one noise after another, and gives no bound: the answer is off by
    some 1e-4 of ε where the noise is not the one at which it was learnt.

    Args:
        learns: Whether it is learnt; else the envelope alone is taken.
    """

    def __init__(self, *, learns: bool = True) -> None:
        self._learns = learns
        self._known: dict[tuple[str, Direction], dict[float, tuple[Floats, Floats]]] = {}

    def pair(
        self, event: Event, remove: Tuner | Threshold, add: Tuner | Threshold, size: int
    ) -> Pair:
        """Estimate the pair that `tuner_pair` returns for this event."""
        first = self._table(event, Direction.REMOVE, remove, size)
        if add is remove:
            return _tabulated(first, first)
        return _tabulated(first, self._table(event, Direction.ADD, add, size))

    def _table(
        self, event: Event, direction: Direction, tuner: Tuner | Threshold, size: int
    ) -> Table:
        table = tuner.profile(size)
        if not self._learns or isinstance(tuner, Threshold):
            return table
        kind, noise = shape(event)
        usual = max(int(np.searchsorted(-table.values, -_USUAL_DELTA)), 1)
        places = np.arange(table.values.size) / usual  # alike from one noise to another
        known = self._known.setdefault((kind, direction), {})
        near = min(known, key=lambda other: abs(math.log(noise / other)), default=0.0)
        if not near or abs(math.log(noise / near)) > _FAR:
            found = _lowest(tuner, size)
            with np.errstate(divide="ignore", invalid="ignore"):
                known[noise] = places, np.nan_to_num(found.values / table.values, nan=1.0)
            return found
        values = table.values * np.interp(places, *known[near])
        return Table(table.step, np.minimum.accumulate(values))


@lru_cache(maxsize=4096)
def shape(event: Event) -> tuple[str, float]:
    """Split an event into its JSON without noise multipliers and their geometric mean."""
    text = json.dumps(event.to_dict())
    noise = [math.log(float(found)) for found in re.findall(_NOISE + "([^,}]+)", text)]
    return re.sub(_NOISE + "[^,}]+", "", text), math.exp(math.fsum(noise) / max(len(noise), 1))


def _lowest(tuner: Tuner | Threshold, size: int) -> Table:
    """Return the profile of a selection, at each ε the lower of envelope and rearrangement.

    The rearrangement is computed at some ε, on a lattice of few atoms. A profile is convex in e^ε:
    between two of them it lies below their chord.
    """
    table = tuner.profile(size)
    if isinstance(tuner, Threshold):
        return table
    base = tuner.base
    few = base.coarsen(math.ceil(base.masses.size / _ATOMS))
    runs = tuner.runs
    bound = Rearranged(Tuner(few, runs), *(_WIDE if isinstance(runs, NegativeBinomial) else ()))
    last = min(int(np.searchsorted(-table.values, -_LEAST_DELTA)), table.size)
    looks = np.unique(np.linspace(0, last, _LOOKS + 1).astype(np.int64))
    matters = [look for look in looks if bound.matters(table.step * float(look))]
    if not matters or last == 0:
        return table
    # Beyond the last that matters the chord to the next look ends, and the envelope stays.
    end = looks[min(int(np.searchsorted(looks, matters[-1])) + 1, looks.size - 1)]
    points = bound.worth(table.step * float(end))
    places = np.unique(np.linspace(0, end, points).astype(np.int64))
    exact = bound.deltas(table.step * places.astype(np.float64))
    values = under_chords(table.values, places, np.minimum(exact, table.values[places]), table.step)
    return Table(table.step, np.minimum.accumulate(values))


def under_chords(values: Floats, places: NDArray[np.int64], lower: Floats, step: float) -> Floats:
    """Return values of a profile on a lattice, lowered to chords between bounds at some places."""
    inside = np.arange(places[0], places[-1] + 1)
    edge = np.minimum(np.searchsorted(places, inside, side="right") - 1, places.size - 2)
    start, end = places[edge], places[edge + 1]
    share = np.expm1((inside - start) * step) / np.expm1((end - start) * step)
    chords = lower[edge] + share * (lower[edge + 1] - lower[edge])
    found = values.copy()
    found[inside] = np.minimum(found[inside], chords)
    return found
