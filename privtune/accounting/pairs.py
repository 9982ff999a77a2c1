"""Dominating pairs on a lattice, in both directions, of releases, subsampled tuning, and selections."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.best_of_k import Table, Threshold, Tuner
from privtune.accounting.curves import rdp_delta
from privtune.accounting.events import Event
from privtune.accounting.pmf import (
    GridError,
    LossPmf,
    exp_capped,
    from_cells,
    from_profile,
    inner,
    lattice_cells,
    normal_masses,
    scale_of,
)
from privtune.accounting.rearrangement import Rearranged
from privtune.accounting.runs import NegativeBinomial

Floats = NDArray[np.float64]
_REACH = 11.0  # standard deviations; what lies beyond, 2e-28, is charged at infinity
_MAX_CELLS = 2**22


class Direction(Enum):
    """Which dataset plays P: the larger one (record removed) or the smaller one (record added)."""

    REMOVE = "remove"
    ADD = "add"


def loss_deviation(rate: float, noise_multiplier: float) -> float:
    """Return the size of one release's loss: sqrt of its chi-square divergence, capped."""
    exponent = noise_multiplier**-2
    unsampled = 1.0 / noise_multiplier
    if rate == 1.0 or exponent > 50.0:
        return unsampled
    chi_square = math.expm1(exponent)
    return min(rate * math.sqrt(chi_square), unsampled)


def _loss(
    x: Floats,
    rate: float,
    sigma: float,
) -> Floats:
    """Return the privacy loss of each outcome x of a sampled Gaussian, the record removed."""
    unsampled = (2.0 * x - 1.0) / (2.0 * sigma**2)
    if rate == 1.0:
        return np.asarray(unsampled)
    return _mixed_loss(unsampled, rate)


def _point(
    loss: Floats,
    rate: float,
    sigma: float,
) -> Floats:
    """Return the outcome x of a sampled Gaussian that has each loss; -inf below the infimum log(1-q).

    Args:
        loss: Losses of one sampled Gaussian, the record removed.
        rate: Sampling probability q.
        sigma: Noise multiplier.
    """
    if rate == 1.0:
        return np.asarray(sigma**2 * loss + 0.5)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        unsampled = np.log1p(np.expm1(loss) / rate)
    below_one = np.minimum(loss, 0.0)
    is_below = np.expm1(below_one) <= -rate
    unsampled = np.where(is_below, -np.inf, unsampled)
    # e^loss would overflow.
    unsampled = np.where(loss > 600.0, loss - math.log(rate), unsampled)
    return np.asarray(sigma**2 * unsampled + 0.5)


def loss_range(
    rate: float,
    noise_multiplier: float,
    direction: Direction,
) -> tuple[float, float]:
    """Return the lowest and highest loss of a sampled Gaussian, between which all but 2e-28 lies.

    Args:
        rate: Sampling probability q.
        noise_multiplier: σ.
        direction: Whether the record is removed or added.
    """
    reach = _REACH * noise_multiplier
    ends = np.array([-reach, 1.0 + reach])
    low, high = _loss(ends, rate, noise_multiplier).tolist()
    if direction is Direction.REMOVE:
        return low, high
    return -high, -low


def cell_masses(
    edges: Floats,
    rate: float,
    noise_multiplier: float,
    direction: Direction,
) -> tuple[Floats, Floats, float, float]:
    """Return P- and Q-masses of a sampled Gaussian's loss cells, and the P-mass below and above.

    Args:
        edges: Losses between which the cells lie, one more than there are cells.
        rate: Sampling probability q.
        noise_multiplier: σ; the outcome is N(1, σ²) with the record in the sample, else N(0, σ²).
        direction: Whether the mixture plays P (remove) or Q (add).
    """
    sigma = noise_multiplier
    if direction is Direction.REMOVE:
        x = _point(edges, rate, sigma)
        without = normal_masses((x - 0.0) / sigma)
        moved = normal_masses((x - 1.0) / sigma)
        mixed = _mix(rate, without, moved)
        below = _mix(
            rate,
            sp.special.ndtr(x[0] / sigma),
            sp.special.ndtr((x[0] - 1.0) / sigma),
        )
        above = _mix(
            rate,
            sp.special.ndtr(-x[-1] / sigma),
            sp.special.ndtr((1.0 - x[-1]) / sigma),
        )
        return mixed, without, float(below), float(above)
    # The loss falls in x: points descend where losses ascend.
    x = _point(-edges, rate, sigma)
    ascending = x[::-1]
    without = normal_masses((ascending - 0.0) / sigma)
    moved = normal_masses((ascending - 1.0) / sigma)
    without = without[::-1]
    mixed = _mix(rate, without, moved[::-1])
    below = sp.special.ndtr(-x[0] / sigma)
    above = sp.special.ndtr(x[-1] / sigma)
    return without, mixed, float(below), float(above)


def _mix(
    rate: float,
    without: Floats,
    moved: Floats,
) -> Floats:
    """Mix the masses of a release without the record and with it, by the sampling rate."""
    return (1.0 - rate) * without + rate * moved


def sampled_gaussian(
    rate: float,
    noise_multiplier: float,
    step: float,
    direction: Direction,
) -> LossPmf:
    """Return one direction of a Poisson-sampled Gaussian's dominating pair, on a lattice.

    Args:
        rate: Sampling probability q, in (0, 1].
        noise_multiplier: σ.
        step: The lattice step.
        direction: Whether the record is removed or added.

    Raises:
        GridError: Its losses do not fit on the lattice.
    """
    low, high = loss_range(rate, noise_multiplier, direction)
    lowest = -lattice_cells(-low, step)
    highest = lattice_cells(high, step)
    if highest - lowest > _MAX_CELLS:
        raise GridError(f"one release needs {highest - lowest} lattice cells")
    edges = np.arange(float(lowest), float(highest + 1)) * step
    mass_p, mass_q, below, above = cell_masses(
        edges,
        rate,
        noise_multiplier,
        direction,
    )
    return from_cells(
        step,
        lowest,
        mass_p=mass_p,
        mass_q=mass_q,
        below=below,
        above=above,
    )


_TOP_DELTA = 1e-16
_MOST_TERMS = 3e7  # of a tabulated profile, over all its points: a few seconds
_AROUND = 1000  # terms that take as long as what is around them, at each point


def amplified(
    remove: LossPmf,
    add: LossPmf,
    rate: float,
    step: float,
) -> tuple[LossPmf, LossPmf]:
    """Return the pair (remove, add) of a mechanism on a Poisson subset, from its own pair.

    References:
        Zhu, Dong, Wang, arXiv:2106.08567, Theorem 11: (P, Q) becomes ((1-q) Q + q P, Q), and the
        reverse.

    Args:
        remove: The mechanism's pair, the record removed.
        add: The same, the record added.
        rate: Sampling probability q, in (0, 1).
        step: The lattice step of the result.
    """
    log_out = math.log1p(-rate)
    # Removed: the Q-mass where P has none gets the smallest loss, log(1-q).
    q_mass = np.exp(remove.log_masses - remove.losses)
    q_alone = max(1.0 - float(q_mass.sum()), 0.0)
    losses = np.append(_mixed_loss(remove.losses, rate), log_out)
    mixed = _mix(rate, q_mass, remove.masses)
    masses = np.append(mixed, (1.0 - rate) * q_alone)
    mixed_remove = _on_lattice(losses, masses, step, rate * remove.infinite)
    # Added: what had an infinite loss gets the largest, -log(1-q).
    added = -_mixed_loss(-add.losses, rate)
    losses = np.append(added, -log_out)
    masses = np.append(add.masses, max(add.infinite, 0.0))
    mixed_add = _on_lattice(losses, masses, step, 0.0)
    return mixed_remove, mixed_add


def _mixed_loss(losses: Floats, rate: float) -> Floats:
    """Return `log(1 - q + q e^l)`, the loss on a Poisson sample of rate q, for each loss l."""
    excess = np.expm1(np.minimum(losses, 600.0))
    mixed = np.log1p(rate * excess)
    # e^l would overflow, and 1 - q is nothing beside it.
    large = losses + math.log(rate)
    return np.asarray(np.where(losses > 600.0, large, mixed))


def _on_lattice(
    losses: Floats,
    masses: Floats,
    step: float,
    infinite: float,
) -> LossPmf:
    """Spread masses on neighbouring lattice points so that each keeps its total under P and under Q.

    Args:
        losses: Losses of the atoms.
        masses: Their P-masses.
        step: The lattice step.
        infinite: P-mass at infinity.
    """
    place = np.floor(losses / step)
    first = float(place.min())
    size = int(place.max() - first) + 2
    if size > _MAX_CELLS:
        raise GridError(f"one release needs {size} lattice cells")
    rest = np.clip(losses - place * step, 0.0, step)
    share = np.expm1(-rest) / math.expm1(-step)
    raised = masses * share
    index = (place - first).astype(np.int64)
    lower = np.bincount(index, masses - raised, size)
    spread = np.asarray(lower, np.float64)
    spread += np.bincount(index + 1, raised, size)
    return LossPmf(step, int(first), spread, max(infinite, 0.0))


def split_delta(
    tuning: LossPmf,
    training: LossPmf,
    rate: float,
    epsilon: float,
) -> float:
    """Return δ(ε), the record removed, of tuning on a subset and training on the rest.

    Args:
        tuning: Pair of the tuning, the record removed; a is its likelihood ratio under Q₁.
        training: Pair of the training, the record removed; b is its likelihood ratio under Q₂.
        rate: Probability q that the record is tuned on.
        epsilon: ε, at least 0.
    """
    log_q = tuning.log_masses - tuning.losses
    q_mass = np.exp(np.minimum(log_q, 0.0))
    q_alone = max(1.0 - float(q_mass.sum()), 0.0)  # Q₁-mass at a = 0
    losses = np.append(tuning.losses, -np.inf)
    q_mass = np.append(q_mass, q_alone)
    # Everything over e^ε, so that nothing overflows: need = 1 - q a / e^ε.
    need = 1.0 - rate * exp_capped(losses - epsilon)
    in_need = need > 0.0
    value = rate * tuning.infinite
    log_out = math.log1p(-rate)
    point = epsilon + np.log(need[in_need]) - log_out
    of_training = (1.0 - rate) * training.delta(point)
    value += inner(q_mass[in_need], of_training)
    # Where q a alone exceeds e^ε the positive part is not needed: E[q a + (1-q) b - e^ε].
    is_sure = ~in_need
    scaled = np.where(is_sure[:-1], tuning.masses, 0.0)
    value += float(scaled.sum()) * rate
    rest = (1.0 - rate) - scale_of(epsilon)
    value += float(q_mass[is_sure].sum()) * rest
    return min(max(value, 0.0), 1.0)


def split_reverse_delta(
    tuning: LossPmf,
    training: LossPmf,
    rate: float,
    epsilon: float,
) -> float:
    """Return δ(ε), the record added, of tuning on a subset and training on the rest."""
    weights = np.append(tuning.masses, tuning.infinite)
    ratio = np.append(exp_capped(epsilon - tuning.losses), 0.0)
    rest = 1.0 - rate * ratio
    pays = rest > 0.0
    log_out = math.log1p(-rate)
    rest_of_paying = rest[pays]
    point = epsilon + log_out - np.log(rest_of_paying)
    masses = weights[pays] * rest_of_paying
    value = inner(masses, training.delta(point))
    return min(max(value, 0.0), 1.0)


def tabulate(
    tuning: tuple[LossPmf, LossPmf],
    training: tuple[LossPmf, LossPmf],
    rate: float,
    step: float,
) -> tuple[LossPmf, LossPmf]:
    """Return the dominating pair (remove, add) of subsampled tuning, variant 1, on a lattice.

    Args:
        tuning: Pair (remove, add) of what happens to the subset.
        training: Pair of what happens to the other records.
        rate: Probability q that a record is in the subset.
        step: Lattice step, at least. Where rare large losses would take millions of points it gets
            wider, as is safe.
    """
    tops = []
    terms = []
    for first, second in zip(tuning, training, strict=True):
        top = _largest_epsilon(first, second)
        tops.append(top)
        terms.append(top / step * (first.masses.size + _AROUND))
    step *= max(sum(terms) / _MOST_TERMS, 1.0)
    high = np.array(
        [split_delta(tuning[0], training[0], rate, point) for point in _points_up_to(tops[0], step)]
    )
    low = np.array(
        [
            split_reverse_delta(tuning[1], training[1], rate, point)
            for point in _points_up_to(tops[1], step)
        ]
    )
    return (
        from_profile(
            lambda _: high,
            lambda _: low,
            step,
            1 - low.size,
            high.size - 1,
        ),
        from_profile(
            lambda _: low,
            lambda _: high,
            step,
            1 - high.size,
            low.size - 1,
        ),
    )


def _points_up_to(top: float, step: float) -> list[float]:
    """Return the lattice points 0, step, ... up to a loss, and the point after it."""
    numbers = np.arange(0.0, lattice_cells(top, step) + 2)
    points: list[float] = (numbers * step).tolist()
    return points


def _largest_epsilon(first: LossPmf, second: LossPmf) -> float:
    """Return the ε beyond which both pairs have δ below 1e-16, or else the largest loss."""
    top = max(first.epsilon(_TOP_DELTA), second.epsilon(_TOP_DELTA))
    if math.isfinite(top):
        return top
    largest_loss = float(first.losses[-1])
    return max(largest_loss, float(second.losses[-1]))


Profile = Callable[[Floats], Floats]
THIN = 0.05  # lattice step over the deviation where a loss is rounded once only
_ATOMS = 1280  # of the lattice on which the rearrangement is computed for a composition
# Parts of the ε axis, and prices: where φ′ grows slowly, more of either move no answer by 1e-4.
_WIDE_PART = 0.45
_FEW_CHOICES = 2
_LOOKS = 16  # places at which is looked how far out it matters
_LEAST_DELTA = 1e-12  # down to which it is
_BETWEEN = 2  # points for each one at which it is made
_USUAL_DELTA = 1e-5  # at whose ε the profiles of a selection at two noises are laid over each other
_FAR = 0.02  # in log noise; beyond, what was learnt of the rearrangement is learnt anew
# Of a first search, and how far its gains reach.
_ROUGH_ATOMS = 512
_ROUGH_POINTS = 16
_FAR_ROUGH = 0.25
_NOISE = r'"noise_multiplier": '


@dataclass(frozen=True, eq=False)
class Pair:
    """Both directions of a dominating pair, as loss distributions on a lattice."""

    remove: LossPmf
    add: LossPmf

    def get(self, direction: Direction) -> LossPmf:
        """Return the privacy losses of one direction."""
        return self.remove if direction is Direction.REMOVE else self.add

    def epsilon(self, delta: float) -> float:
        """Return ε at this δ in the worse of the two directions."""
        return max(self.remove.epsilon(delta), self.add.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """Return δ at this ε in the worse of the two directions."""
        removed = float(self.remove.delta(epsilon))
        added = float(self.add.delta(epsilon))
        return max(removed, added)


def _symmetric_pair(
    profile: Profile,
    step: float,
    top: float,
) -> Pair:
    """Return the pair of a release whose profile is the same in both directions.

    Args:
        profile: δ at each ε of at least 0.
        step: The lattice step.
        top: The largest loss, about.
    """
    reach = max(lattice_cells(top, step) + 1, 2)
    pmf = from_profile(
        profile,
        profile,
        step,
        -reach,
        reach,
    )
    return Pair(pmf, pmf)


def zcdp_pair(
    rho: float,
    curve: Floats,
    step: float,
) -> Pair:
    """Return the pair of a zero-concentrated DP release, from its Rényi curve."""

    def profile(points: Floats) -> Floats:
        return np.array([rdp_delta(curve, float(point)) for point in points])

    top = rho + 2.0 * math.sqrt(60.0 * rho)
    return _symmetric_pair(profile, step, top)


def approximate_pair(
    epsilon: float,
    delta: float,
    step: float,
) -> Pair:
    """Return the pair of the worst (ε, δ)-DP release on a lattice.

    References:
        Kairouz, Oh, Viswanath, arXiv:1311.0776, Theorem 3.4.
    """

    def profile(points: Floats) -> Floats:
        gap = -np.expm1(np.minimum(points - epsilon, 0.0))
        large = 1.0 + math.exp(-epsilon)
        return delta + (1.0 - delta) * gap / large

    return _symmetric_pair(profile, step, epsilon)


def laplace_pair(scale: float, step: float) -> Pair:
    """Return the pair of one Laplace release on a lattice."""
    largest_loss = 1.0 / scale

    def profile(points: Floats) -> Floats:
        # Half of P has the loss 1/b; of the rest the loss falls to ε where the density is e^((ε-1/b)/2).
        return -np.expm1(0.5 * np.minimum(points - largest_loss, 0.0))

    return _symmetric_pair(profile, step, largest_loss)


def on_lattice(pair: Pair, step: float) -> Pair:
    """Return a pair on the lattice of this step that dominates a pair on another lattice."""
    remove = _move_to_lattice(pair.remove, pair.add, step)
    if pair.add is pair.remove:
        return Pair(remove, remove)
    return Pair(remove, _move_to_lattice(pair.add, pair.remove, step))


def _move_to_lattice(
    pmf: LossPmf,
    reverse: LossPmf,
    step: float,
) -> LossPmf:
    """Return one direction of a pair moved to another lattice, from both profiles.

    Args:
        pmf: The direction.
        reverse: The other direction.
        step: Step of the lattice.
    """
    above = lattice_cells(float(pmf.losses[-1]), step) + 1
    below = lattice_cells(float(reverse.losses[-1]), step) + 1
    highest = max(above, 1)
    lowest = min(-below, -1)
    return from_profile(
        pmf.delta,
        reverse.delta,
        step,
        lowest,
        highest,
    )


def worst_pair(pairs: Sequence[Pair]) -> Pair:
    """Return a pair that dominates each of several pairs on one lattice."""
    removes = [pair.remove for pair in pairs]
    adds = [pair.add for pair in pairs]
    return Pair(_worst(removes, adds), _worst(adds, removes))


def _worst(forward: list[LossPmf], backward: list[LossPmf]) -> LossPmf:
    """Return one direction of a pair whose profiles are at least those of all given pairs."""
    highest = max(pmf.lowest + pmf.masses.size for pmf in forward)
    lowest = -max(pmf.lowest + pmf.masses.size for pmf in backward)
    return from_profile(
        partial(_largest_delta, forward),
        partial(_largest_delta, backward),
        forward[0].step,
        min(lowest, -1),
        max(highest, 1),
    )


def _largest_delta(pmfs: list[LossPmf], points: Floats) -> Floats:
    """Return the largest δ of several loss distributions at each ε."""
    profiles = [pmf.delta(points) for pmf in pmfs]
    return np.asarray(np.max(profiles, axis=0))


def thinned(pair: Pair, fineness: float) -> Pair:
    """Return a pair on a lattice coarsened to a twentieth of the loss's deviation, or finer."""
    return Pair(_thin(pair.remove, fineness), _thin(pair.add, fineness))


def _thin(pmf: LossPmf, fineness: float) -> LossPmf:
    """Return one direction on a lattice coarsened to a twentieth of its deviation, or finer."""
    factor = int(THIN * pmf.deviation / fineness / pmf.step)
    return pmf.coarsen(max(factor, 1))


def tuner_pair(
    remove: Tuner | Threshold,
    add: Tuner | Threshold,
    size: int,
) -> Pair:
    """Return the dominating pair of a whole selection, from the bounds on its two directions.

    Args:
        remove: Its bound with the record removed.
        add: Its bound with the record added; the same object where both are alike.
        size: Lattice points of the profile, about.
    """
    remove_profile = _lowest(remove, size)
    if add is remove:
        return _pair_of_tables(remove_profile, remove_profile)
    return _pair_of_tables(remove_profile, _lowest(add, size))


def _pair_of_tables(remove: Table, add: Table) -> Pair:
    """Return the pair that has these tabulated profiles in its two directions."""
    step = min(remove.step, add.step)
    high = lattice_cells(remove.size * remove.step, step)
    if add is remove:
        pmf = from_profile(
            remove.delta,
            remove.delta,
            step,
            -high,
            high,
        )
        return Pair(pmf, pmf)
    low = lattice_cells(add.size * add.step, step)
    return Pair(
        from_profile(
            remove.delta,
            add.delta,
            step,
            -low,
            high,
        ),
        from_profile(
            add.delta,
            remove.delta,
            step,
            -high,
            low,
        ),
    )


_Ratios = dict[float, tuple[Floats, Floats]]
"""By noise: places on the ε axis, and the ratio at each."""


class Gains:
    """Estimates of how far rearrangement lowers the envelope bounds of selections of similar noise.

    A ratio is a function of the place on the ε axis, in multiples of the ε at which δ is 1e-5: so it is
    alike from one noise to another (README, 6a).

    Args:
        learns: Whether the rearrangement counts at all.
        is_rough: Whether few losses of a run, few ε and a far noise will do, as better gains follow.
    """

    def __init__(
        self,
        *,
        learns: bool = True,
        is_rough: bool = False,
    ) -> None:
        self._learns = learns
        self.is_rough = is_rough
        self._ratios: dict[tuple[str, Direction], _Ratios] = {}

    def pair(
        self,
        event: Event,
        remove: Tuner | Threshold,
        add: Tuner | Threshold,
        size: int,
    ) -> Pair:
        """Estimate the pair that `tuner_pair` returns for this event.

        Args:
            event: The selection.
            remove: Its envelope with the record removed.
            add: Its envelope with the record added.
            size: Lattice points of the profile, about.
        """
        remove_profile = self._table(event, Direction.REMOVE, remove, size)
        if add is remove:
            return _pair_of_tables(remove_profile, remove_profile)
        add_profile = self._table(event, Direction.ADD, add, size)
        return _pair_of_tables(remove_profile, add_profile)

    def _table(
        self,
        event: Event,
        direction: Direction,
        tuner: Tuner | Threshold,
        size: int,
    ) -> Table:
        """Estimate a selection's profile in one direction, or compute it where no earlier noise is near."""
        if isinstance(tuner, Threshold):
            return tuner.profile(size)
        tuner = _coarsened(tuner, _ROUGH_ATOMS if self.is_rough else _ATOMS)
        table = tuner.profile(size)
        if not self._learns:
            return table
        kind, noise = shape(event)
        usual = max(table.place_of(_USUAL_DELTA), 1)
        places = np.arange(table.values.size) / usual  # alike from one noise to another
        ratios = self._ratios.setdefault((kind, direction), {})
        near = min(ratios, key=lambda other: abs(math.log(noise / other)), default=0.0)
        far = _FAR_ROUGH if self.is_rough else _FAR
        if not near or abs(math.log(noise / near)) > far:
            if self.is_rough:
                lowest = _rearranged_table(tuner, table, _ROUGH_POINTS)
            else:
                lowest = _lowest(tuner, size)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.nan_to_num(lowest.values / table.values, nan=1.0)
            ratios[noise] = (places, ratio)
            return lowest
        values = table.values * np.interp(places, *ratios[near])
        return Table(table.step, np.minimum.accumulate(values))


@lru_cache(maxsize=4096)
def shape(event: Event) -> tuple[str, float]:
    """Return an event's JSON without its noise multipliers, and the geometric mean of these multipliers."""
    text = json.dumps(event.to_dict())
    numbers = re.findall(_NOISE + "([^,}]+)", text)
    logs = [math.log(float(number)) for number in numbers]
    mean = math.fsum(logs) / max(len(logs), 1)
    return re.sub(_NOISE + "[^,}]+", "", text), math.exp(mean)


def _coarsened(tuner: Tuner, most: int) -> Tuner:
    """Return the envelope of a selection on a lattice of about so many atoms, or fewer."""
    factor = math.ceil(tuner.base.masses.size / most)
    if factor <= 1:
        return tuner
    return Tuner(tuner.base.coarsen(factor), tuner.runs)


def _lowest(tuner: Tuner | Threshold, size: int) -> Table:
    """Return the profile of a selection: the smaller of its envelope and rearrangement bounds at each ε."""
    table = tuner.profile(size)
    if isinstance(tuner, Threshold):
        return table
    return _rearranged_table(tuner, table)


def _rearranged_table(
    tuner: Tuner,
    table: Table,
    most: int | None = None,
) -> Table:
    """Return a selection's envelope profile, lowered to the rearrangement bound.

    Args:
        tuner: The selection's envelope in one direction.
        table: Its profile.
        most: At how many ε the rearrangement is made, at most; by default as many as it is worth.
    """
    # The rearrangement is computed at some ε; a profile is convex in e^ε: chords lie above it.
    bound = _rearranged(tuner)
    last = min(table.place_of(_LEAST_DELTA), table.size)
    looks = _even_places(last, _LOOKS + 1)
    matters = [look for look in looks if bound.matters(table.step * float(look))]
    if not matters or last == 0:
        return table
    # Beyond the last that matters the chord to the next look ends, and the envelope stays.
    after = int(np.searchsorted(looks, matters[-1])) + 1
    end = looks[min(after, looks.size - 1)]
    points = bound.worth(table.step * float(end))
    if most is not None:
        points = min(points, most)
    places = _even_places(int(end), points)
    # Where δ falls fast, chords between so few points lie above the envelope.
    falls = _even_falls(table.values[: int(end) + 1], _BETWEEN * points)
    between = np.setdiff1d(falls, places)
    at_places = bound.deltas(table.step * places.astype(np.float64))
    at_between = bound.deltas_between(table.step * between.astype(np.float64))
    exact = np.append(at_places, at_between)
    places = np.append(places, between)
    order = np.argsort(places)
    places = places[order]
    lower = np.minimum(exact[order], table.values[places])
    values = under_chords(table.values, places, lower, table.step)
    return Table(table.step, np.minimum.accumulate(values))


def _even_places(last: int, count: int) -> NDArray[np.int64]:
    """Return at most `count` whole numbers from 0 to `last`, evenly spread."""
    places = np.linspace(0, last, count)
    return np.unique(places.astype(np.int64))


def _even_falls(values: Floats, count: int) -> NDArray[np.int64]:
    """Return at most `count` indices between which falling values fall by about the same factor."""
    fall = -np.log(np.maximum(values, 1e-300))
    wanted = np.linspace(fall[0], fall[-1], count)
    return np.unique(np.searchsorted(fall, wanted[:-1]))


def _rearranged(tuner: Tuner) -> Rearranged:
    """Return the rearrangement bound of a tuner, on a lattice of about 1,280 atoms."""
    coarse = _coarsened(tuner, _ATOMS)
    if isinstance(tuner.runs, NegativeBinomial):
        return Rearranged(coarse, _WIDE_PART, _FEW_CHOICES)
    return Rearranged(coarse)


def under_chords(
    values: Floats,
    places: NDArray[np.int64],
    lower: Floats,
    step: float,
) -> Floats:
    """Lower a profile on a lattice to the chords between better bounds at some of its points.

    Args:
        values: The profile at ε = 0, step, 2·step, ...
        places: Numbers of lattice points, ascending.
        lower: Bounds there.
        step: The lattice step.
    """
    inside = np.arange(places[0], places[-1] + 1)
    edge = np.searchsorted(places, inside, side="right") - 1
    edge = np.minimum(edge, places.size - 2)
    start = places[edge]
    end = places[edge + 1]
    from_start = np.expm1((inside - start) * step)
    width = np.expm1((end - start) * step)
    rise = lower[edge + 1] - lower[edge]
    chords = lower[edge] + (from_start / width) * rise
    lowered = values.copy()
    lowered[inside] = np.minimum(lowered[inside], chords)
    return lowered
