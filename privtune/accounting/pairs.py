"""Dominating pairs on a lattice, in both directions: of releases, of tuning on a subset, of choices."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.curves import rdp_delta
from privtune.accounting.events import Event
from privtune.accounting.pmf import (
    GridError,
    LossPmf,
    from_cells,
    from_profile,
    inner,
    lattice_cells,
    normal_masses,
)
from privtune.accounting.rearrangement import Rearranged
from privtune.accounting.runs import NegativeBinomial
from privtune.accounting.selection import Table, Threshold, Tuner

Floats = NDArray[np.float64]
_REACH = 11.0  # standard deviations; what lies beyond, 2e-28, is charged at infinity
_MAX_CELLS = 2**22


class Direction(Enum):
    """Which dataset plays P: the larger one (the record is removed) or the smaller one."""

    REMOVE = "remove"
    ADD = "add"


def loss_deviation(rate: float, noise_multiplier: float) -> float:
    """Return a scale of the loss of one release: sqrt of its chi-square divergence, capped."""
    exponent = noise_multiplier**-2
    if rate == 1.0 or exponent > 50.0:
        return 1.0 / noise_multiplier
    return min(rate * math.sqrt(math.expm1(exponent)), 1.0 / noise_multiplier)


def _loss(x: Floats, rate: float, sigma: float) -> Floats:
    shift = (2.0 * x - 1.0) / (2.0 * sigma**2)
    return np.asarray(shift) if rate == 1.0 else _mixed_loss(shift, rate)


def _point(loss: Floats, rate: float, sigma: float) -> Floats:
    """Return the x at which the loss is reached; -inf below its infimum log(1-q)."""
    if rate == 1.0:
        shift = loss
    else:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            shift = np.log1p(np.expm1(loss) / rate)
        shift = np.where(np.expm1(np.minimum(loss, 0.0)) <= -rate, -np.inf, shift)
        shift = np.where(loss > 600.0, loss - math.log(rate), shift)
    return np.asarray(sigma**2 * shift + 0.5)


def loss_range(rate: float, noise_multiplier: float, direction: Direction) -> tuple[float, float]:
    """Return the losses between which all but a mass of 2e-28 lies."""
    ends = np.array([-_REACH * noise_multiplier, 1.0 + _REACH * noise_multiplier])
    low, high = (float(loss) for loss in _loss(ends, rate, noise_multiplier))
    return (low, high) if direction is Direction.REMOVE else (-high, -low)


def cell_masses(
    edges: Floats, rate: float, noise_multiplier: float, direction: Direction
) -> tuple[Floats, Floats, float, float]:
    """Return P- and Q-mass of the cells between ascending losses, and the P-mass below and above."""
    sigma = noise_multiplier
    if direction is Direction.REMOVE:
        x = _point(edges, rate, sigma)
        base, moved = normal_masses((x - 0.0) / sigma), normal_masses((x - 1.0) / sigma)
        below = _mix(rate, sp.special.ndtr(x[0] / sigma), sp.special.ndtr((x[0] - 1.0) / sigma))
        above = _mix(rate, sp.special.ndtr(-x[-1] / sigma), sp.special.ndtr((1.0 - x[-1]) / sigma))
        return (1.0 - rate) * base + rate * moved, base, below, above
    x = _point(-edges, rate, sigma)
    base = normal_masses((x[::-1] - 0.0) / sigma)[::-1]
    moved = normal_masses((x[::-1] - 1.0) / sigma)[::-1]
    below, above = float(sp.special.ndtr(-x[0] / sigma)), float(sp.special.ndtr(x[-1] / sigma))
    return base, (1.0 - rate) * base + rate * moved, below, above


def sampled_gaussian(
    rate: float, noise_multiplier: float, step: float, direction: Direction
) -> LossPmf:
    """Return the pessimistic lattice pair of one Poisson-sampled Gaussian release."""
    low, high = loss_range(rate, noise_multiplier, direction)
    lowest, highest = -lattice_cells(-low, step), lattice_cells(high, step)
    if highest - lowest > _MAX_CELLS:
        raise GridError(f"one release needs {highest - lowest} lattice cells")
    edges = np.arange(float(lowest), float(highest + 1)) * step
    mass_p, mass_q, below, above = cell_masses(edges, rate, noise_multiplier, direction)
    return from_cells(step, lowest, mass_p=mass_p, mass_q=mass_q, below=below, above=above)


def _mix(rate: float, base: float, moved: float) -> float:
    return float((1.0 - rate) * base + rate * moved)


_TOP_DELTA = 1e-16
_MOST_TERMS = 3e7  # of a tabulated profile, over all its points: a few seconds
_AROUND = 1000  # terms that take as long as what is around them, at each point


def amplified(remove: LossPmf, add: LossPmf, rate: float, step: float) -> tuple[LossPmf, LossPmf]:
    """Return the pair (remove, add) of a mechanism on a Poisson subset, from its own pair."""
    # Zhu, Dong, Wang, arXiv:2106.08567, Theorem 11: (P, Q) becomes ((1-q) Q + q P, Q), and the reverse.
    log_out = math.log1p(-rate)
    # Removed: the Q-mass where P has none gets the smallest loss, log(1-q).
    q_mass = np.exp(remove.log_masses - remove.losses)
    lost = max(1.0 - float(q_mass.sum()), 0.0)
    losses = np.append(_mixed_loss(remove.losses, rate), log_out)
    masses = np.append((1.0 - rate) * q_mass + rate * remove.masses, (1.0 - rate) * lost)
    removed = _on_lattice(losses, masses, step, rate * remove.infinite)
    # Added: what had an infinite loss gets the largest, -log(1-q).
    losses = np.append(-_mixed_loss(-add.losses, rate), -log_out)
    added = _on_lattice(losses, np.append(add.masses, max(add.infinite, 0.0)), step, 0.0)
    return removed, added


def _mixed_loss(losses: Floats, rate: float) -> Floats:
    """Return `log(1 - q + q e^l)`."""
    small = np.log1p(rate * np.expm1(np.minimum(losses, 600.0)))
    return np.asarray(np.where(losses > 600.0, losses + math.log(rate), small))


def _on_lattice(losses: Floats, masses: Floats, step: float, infinite: float) -> LossPmf:
    """Spread atoms on their lattice neighbours so that the P- and the Q-mass of each is kept."""
    place = np.floor(losses / step)
    first = float(place.min())
    size = int(place.max() - first) + 2
    if size > _MAX_CELLS:
        raise GridError(f"one release needs {size} lattice cells")
    rest = np.clip(losses - place * step, 0.0, step)
    raised = masses * (np.expm1(-rest) / math.expm1(-step))
    index = (place - first).astype(np.int64)
    spread = np.asarray(np.bincount(index, masses - raised, size), np.float64)
    spread += np.bincount(index + 1, raised, size)
    return LossPmf(step, int(first), spread, max(infinite, 0.0))


def split_delta(tuning: LossPmf, training: LossPmf, rate: float, epsilon: float) -> float:
    """Return `E[(q a + (1-q) b - e^ε)₊]`: the record is tuned on, or trained on, never both."""
    losses = tuning.losses
    q_mass = np.exp(np.minimum(tuning.log_masses - losses, 0.0))
    lost = max(1.0 - float(q_mass.sum()), 0.0)  # Q₁-mass at a = 0
    losses = np.append(losses, -np.inf)
    q_mass = np.append(q_mass, lost)
    # Everything over e^ε, so that nothing overflows: need = 1 - q a / e^ε.
    need = 1.0 - rate * np.exp(np.minimum(losses - epsilon, 700.0))
    wanted = need > 0.0
    value = rate * tuning.infinite
    point = epsilon + np.log(need[wanted]) - math.log1p(-rate)
    value += inner(q_mass[wanted], (1.0 - rate) * training.delta(point))
    # Where q a alone exceeds e^ε the positive part is not needed: E[q a + (1-q) b - e^ε].
    sure = ~wanted
    scaled = np.where(sure[:-1], tuning.masses, 0.0)
    value += float(scaled.sum()) * rate
    value += float(q_mass[sure].sum()) * ((1.0 - rate) - math.exp(min(epsilon, 700.0)))
    return min(max(value, 0.0), 1.0)


def split_reverse_delta(tuning: LossPmf, training: LossPmf, rate: float, epsilon: float) -> float:
    """Return `E[(1 - e^ε (q a + (1-q) b))₊]`, from the pairs with the record added."""
    weights = np.append(tuning.masses, tuning.infinite)
    ratio = np.append(np.exp(np.minimum(epsilon - tuning.losses, 700.0)), 0.0)
    rest = 1.0 - rate * ratio
    kept = rest > 0.0
    point = epsilon + math.log1p(-rate) - np.log(rest[kept])
    value = inner(weights[kept] * rest[kept], training.delta(point))
    return min(max(value, 0.0), 1.0)


def tabulate(
    tuning: tuple[LossPmf, LossPmf], training: tuple[LossPmf, LossPmf], rate: float, step: float
) -> tuple[LossPmf, LossPmf]:
    """Return the dominating pair (remove, add) of variant 1 on a lattice."""
    # Where rare large losses would take millions of points the step gets wider, as is safe.

    def top(first: LossPmf, second: LossPmf) -> float:
        found = max(first.epsilon(_TOP_DELTA), second.epsilon(_TOP_DELTA))
        if math.isfinite(found):
            return found
        return max(float(first.losses[-1]), float(second.losses[-1]))

    tops = [top(first, second) for first, second in zip(tuning, training, strict=True)]
    terms = [t / step * (pmf.masses.size + _AROUND) for t, pmf in zip(tops, tuning, strict=True)]
    step *= max(sum(terms) / _MOST_TERMS, 1.0)
    up, down = (np.arange(0.0, lattice_cells(t, step) + 2) * step for t in tops)
    high = np.array([split_delta(tuning[0], training[0], rate, float(e)) for e in up])
    low = np.array([split_reverse_delta(tuning[1], training[1], rate, float(e)) for e in down])
    return (
        from_profile(lambda _: high, lambda _: low, step, 1 - low.size, high.size - 1),
        from_profile(lambda _: low, lambda _: high, step, 1 - high.size, low.size - 1),
    )


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

    def profile(points: Floats) -> Floats:
        # Half of P has the loss 1/b; of the rest the loss falls to ε where the density is e^((ε-1/b)/2).
        return -np.expm1(0.5 * np.minimum(points - 1.0 / scale, 0.0))

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
    """Ratio of rearrangement to envelope of selections, learnt at one noise and used near it; no bound."""

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
    """Return the profile of a selection, at each ε the lower of envelope and rearrangement."""
    # The rearrangement is computed at some ε; a profile is convex in e^ε: chords lie above it.
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
