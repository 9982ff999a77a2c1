"""Dominating pairs of every event, and their composition, on one lattice or in stages.

Each part of an event becomes a pair of lattice distributions, one for each direction (the record is
removed, the record is added), kept apart until the end; equal lattices compose by FFT. Parts that are
no single release (selections, subsampled tuning, maxima) carry a grid of their own; their profile is
then turned into a dominating pair on the lattice of the composition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from privtune.accounting._checks import LARGEST
from privtune.accounting.curves import rdp_epsilon
from privtune.accounting.events import ZCDP, Event, Gaussian, flatten
from privtune.accounting.pairs import Direction, Gains, Pair, cell_masses, loss_range
from privtune.accounting.pmf import GridError, LossPmf, compose, lattice_cells, nothing
from privtune.accounting.rdp import composed_curve
from privtune.accounting.registry import Tuners, entry

Floats = NDArray[np.float64]
Step = tuple[float, float]  # rate, noise multiplier
_REACH = (4, 8, 16, 32, 64)  # cells of the coarse lattice on each side of 0 with usual losses
_RARE = 2e-4  # mass beyond, at most: the variance grows by that share
_STAGE_CELLS = 2**19  # of the usual losses of one step
_LEAST_USUAL = 0.5  # mass of usual losses, else all are rare
_WINDOW = 2**17  # lattice points of one stage
_WIDTH = 24.0  # deviations of a window
_MOST = 2**20  # releases of one stage; the rounding of its transform grows with them
_PLAIN = 2**14  # releases up to which double precision does
_MOST_STEPS = 1024  # different ones
_BLOCK = 32  # different steps that share a fine lattice
_VERY_MANY, _TOO_MANY = 2**32, 2**37
_TWICE = 1e-10  # of δ, given away where very many steps are gathered
_ULP = 4.0 * 2.0**-52
_MAX_CELLS = 2**22


def composed_in_stages(
    steps: Sequence[tuple[Step, int]], step: float, direction: Direction
) -> list[LossPmf]:
    """Return releases on a lattice that together dominate all these steps, each so many times."""
    gathered = [_gathered(kind, count) for kind, count in _dominated(sorted(steps))]
    lost = sum(more for _, more in gathered)
    twice = [LossPmf(step, 0, np.ones(1), lost)] if lost else []
    found = [_block(block, step, direction) for block in _blocks([pair for pair, _ in gathered])]
    return [*itertools.chain.from_iterable(found), *twice]


def _dominated(steps: list[tuple[Step, int]]) -> list[tuple[Step, int]]:
    """Return at most `_MOST_STEPS` different steps: of neighbours the worst stands for all."""
    alike = max(-(-len(steps) // _MOST_STEPS), 1)
    groups = [steps[i : i + alike] for i in range(0, len(steps), alike)]
    return [
        (
            (max(rate for (rate, _), _ in group), min(sigma for (_, sigma), _ in group)),
            sum(count for _, count in group),
        )
        for group in groups
    ]


def release_count(steps: Sequence[tuple[Step, int]]) -> int:
    """Return how many releases `composed_in_stages` returns, about."""
    return 2 * len(_blocks(_dominated(sorted(steps))))


def _blocks(steps: Sequence[tuple[Step, int]]) -> list[Sequence[tuple[Step, int]]]:
    """Return the steps in blocks that share a fine lattice: alike, and few."""
    few = [pair for pair in steps if pair[1] <= _WINDOW]
    blocks: list[Sequence[tuple[Step, int]]] = [[pair] for pair in steps if pair[1] > _WINDOW]
    return blocks + [few[i : i + _BLOCK] for i in range(0, len(few), _BLOCK)]


def _gathered(kind: Step, count: int) -> tuple[tuple[Step, int], float]:
    """Return fewer steps at a larger rate that dominate very many, and what they lack in δ."""
    if count <= _VERY_MANY:
        return (kind, count), 0.0
    times = min(int(2.0 * _TWICE / (count * kind[0] ** 2)), count // (_VERY_MANY // 4))
    fewer, lost = gathered(kind, count, max(times, 1))
    if fewer[1] > _TOO_MANY:
        raise GridError(f"{count} steps are too many")
    return fewer, lost


def gathered(kind: Step, count: int, times: int) -> tuple[tuple[Step, int], float]:
    """Return one step for every so many, at a rate as much larger, and the δ that is added."""
    # In m steps the record is drawn twice with a probability of at most (m·rate)²/2.
    rate, sigma = kind
    fewer = -(-count // times)
    lost = fewer * 0.5 * (times * rate) ** 2 * (1.0 + _ULP) if times > 1 else 0.0
    return ((min(times * rate * (1.0 + _ULP), 1.0), sigma), fewer), lost


def _block(steps: Sequence[tuple[Step, int]], step: float, direction: Direction) -> list[LossPmf]:
    # A lattice of step h adds at most h²/4 to the variance of a loss, and h times its mean size.
    total = sum(count for _, count in steps)
    size = sum(
        count * 2.0 * rate * math.erf(1.0 / (math.sqrt(8.0) * sigma))
        for (rate, sigma), count in steps
    )
    factor = 2 ** math.ceil(math.log2(max(min(math.sqrt(total), 4.0 * size / step), 1.0)))
    usual, rare = [], []
    for kind, count in steps:
        first, second = split_step(kind, step, factor, direction)
        if first is not None:
            usual.append((first, count))
        rare.append((second, count))
    together = [compose(rare, plain=_PLAIN)]
    return together if not usual else [_far(usual, factor), *together]


def _far(parts: list[tuple[LossPmf, int]], factor: int) -> LossPmf:
    """Compose, stage by stage, to a lattice `factor` times as coarse."""
    total = sum(count for _, count in parts)
    variance = sum(count * pmf.deviation**2 for pmf, count in parts)
    window = _WIDTH * math.sqrt(variance) / parts[0][0].step
    share = min((_WINDOW / window) ** 2 if window > _WINDOW else 1.0, _MOST / total)
    once = int(share * total)
    if share >= 1.0 or once < 4 or factor == 1:
        return compose(parts, plain=_PLAIN).coarsen(factor)
    wider = min(2 ** math.floor(0.5 * math.log2(once)), factor)
    staged = []
    for pmf, count in parts:
        if count >= once:
            staged.append((compose([(pmf, once)]).coarsen(wider), count // once))
        if count % once:
            staged.append((compose([(pmf, count % once)]).coarsen(wider), 1))
    return _far(staged, factor // wider)


def split_step(
    kind: Step, step: float, factor: int, direction: Direction
) -> tuple[LossPmf | None, LossPmf]:
    """Return two releases that together dominate one step: its usual losses, if any, and its rare ones."""
    fine = step / factor
    low, high = loss_range(*kind, direction)
    first, last = -lattice_cells(-low, step), lattice_cells(high, step)
    if max(last - first, 2 * _REACH[0] * factor) > _MAX_CELLS:
        raise GridError(f"one release needs {last - first} lattice cells")
    for reach in _REACH:
        inner = (max(first, -reach), min(last, reach))
        ends = np.array([inner[0] * step, inner[1] * step])
        _, _, below, above = cell_masses(ends, *kind, direction)
        if below + above < _RARE or 4 * reach * factor > _STAGE_CELLS:
            break
    edges = _points(inner[0] * factor, inner[1] * factor + 1, fine)
    p, q, below, above = cell_masses(edges, *kind, direction)
    kept, kept_q = float(p.sum()), float(q.sum())
    if kept < _LEAST_USUAL:
        edges = _points(first, last + 1, step)
        p, q, below, above = cell_masses(edges, *kind, direction)
        return None, _spread(step, (p, q), (edges[:-1], edges[1:]), (below, 0.0, above))
    places = (edges[:-1], edges[1:])
    usual = _spread(fine, (p / kept, q / kept), places, (0.0, 0.0, 0.0))
    # A rare loss stands beside a usual one, which may lower it by as much as this.
    shift = max(math.log(kept_q / kept), 0.0) + _ULP
    if shift > step:
        raise GridError("the usual losses of a step lack too much mass.")
    up = np.append(inner[1] * step, _points(inner[1] + 1, last + 2, step) - shift)
    down = np.append(_points(first - 1, inner[0], step) - shift, inner[0] * step)
    p_up, q_up, _, above = cell_masses(up, *kind, direction)
    p_down, q_down, below, _ = cell_masses(down, *kind, direction)
    lower = np.append(_points(first - 1, inner[0], step), _points(inner[1], last + 1, step))
    upper = lower + step
    upper[inner[0] - first] += step  # the shift may lift the last one below beyond its cell
    mass_p, mass_q = np.append(p_down, p_up), np.append(q_down, q_up) * math.exp(-shift)
    zero = kept * (1.0 - _ULP)
    return usual, _spread(step, (mass_p, mass_q), (lower, upper), (below, zero, above))


def _points(first: int, end: int, step: float) -> Floats:
    return np.asarray(np.arange(first, end) * step, dtype=np.float64)


def _spread(
    step: float,
    masses: tuple[Floats, Floats],
    ends: tuple[Floats, Floats],
    beside: tuple[float, float, float],
) -> LossPmf:
    """Put the mass of cells on lattice points at both ends, keeping P- and Q-mass, rounded up."""
    # Beside them: the P-mass below, which goes to the first end, that at no loss, and that at infinity.
    (p, q), (lower, upper), (below, zero, above) = masses, ends, beside
    tilted = np.exp(lower) * q
    raised = np.clip((p - tilted + _ULP * (p + tilted)) / -np.expm1(lower - upper), 0.0, p)
    low, high = (np.round(end / step).astype(np.int64) for end in (lower, upper))
    start = min(int(low.min()), 0)
    size = max(int(high.max()), 0) - start + 1
    out = np.bincount(low - start, p - raised, size) + np.bincount(high - start, raised, size)
    out[int(low.min()) - start] += below
    out[-start] += zero + _ULP  # sums that should be 1 may fall short by as much
    return LossPmf(step, start, np.asarray(out, dtype=np.float64), above)


_COARSE = 0.1  # lattice step over the deviation of one loss; adds about 5e-4 to ε, halved on demand
_MANY = 64  # different parts beyond which only the Rényi account is computed; sampled Gaussians are
# composed in stages and do not count
_CELLS = 2**17  # of a lattice, on which the losses or their sum are composed at once
_DEVIATIONS = 24.0  # of a sum, that its lattice holds
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
    """Return the lattice step at which discretisation adds less than about 1e-3 to ε."""
    # Spreading a loss on two points adds at most step²/8 to its mean and step²/4 to its variance, hence about
    # count·step²/8·(1 + 2 log(1/δ)/ε) to ε, of which `near` is a guess.
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
    """Return the dominating pair of the composition of `parts` on a lattice; with `gains`, an estimate."""
    merged = tuple(_merged(parts).items())
    if not any(entry(part).own_lattice for part, _ in merged):
        gains = None
    return _composed_pair(merged, step, gains) if merged else Pair(nothing(step), nothing(step))


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
    """Return the (product) pair of the releases about one sample, before any sampling."""
    # A tenth of the composition's step, so that what is read between its points adds little.
    parts = flatten(event)
    step = min(max(0.1 * share, _JOINT / 8.0), _JOINT) * math.sqrt(_variance(parts, None))
    return event_pair(parts, step)


@lru_cache(maxsize=32)
def _own(event: Event, fineness: float, gains: Gains | None) -> Pair:
    return entry(event).own_pair(event, fineness, _Pairs(gains))
