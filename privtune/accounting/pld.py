"""Build the dominating pair of any event, and compose pairs on one lattice or in stages.

Each part of an event becomes a pair of lattice distributions, one for each direction (the record is
removed, the record is added), kept apart until the end; equal lattices compose by FFT. Parts that are
no single release (selections, subsampled tuning, maxima) carry a grid of their own; their profile is
then turned into a dominating pair on the lattice of the composition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.checks import LARGEST
from privtune.accounting.curves import rdp_epsilon
from privtune.accounting.events import ZCDP, Event, Gaussian, flatten
from privtune.accounting.pairs import Direction, Gains, Pair, cell_masses, loss_range
from privtune.accounting.pmf import GridError, LossPmf, compose, lattice_cells, nothing
from privtune.accounting.rdp import composed_curve
from privtune.accounting.registry import Pairs, Tuners, entry

Floats = NDArray[np.float64]
Step = tuple[float, float]
"""A sampled Gaussian release: its rate and its noise multiplier."""

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
_VERY_MANY = 2**32  # steps beyond which they are gathered
_TOO_MANY = 2**37  # gathered ones, whose rounding adds up
_TWICE = 1e-10  # of δ, given away where very many steps are gathered
_ULP = 4.0 * 2.0**-52
_MAX_CELLS = 2**22


def composed_in_stages(
    steps: Sequence[tuple[Step, int]],
    step: float,
    direction: Direction,
) -> list[LossPmf]:
    """Return lattice releases that together dominate repeated sampled Gaussian steps.

    Args:
        steps: Sampled Gaussians, and how often each is made.
        step: Step of the lattice of the result.
        direction: Whether the record is removed or added.
    """
    kinds = []
    lost = 0.0
    for kind, count in _dominated(sorted(steps)):
        fewer, more = _gather_very_many(kind, count)
        kinds.append(fewer)
        lost += more
    releases = []
    for block in _blocks(kinds):
        releases += _compose_block(block, step, direction)
    if lost:
        releases.append(LossPmf(step, 0, np.ones(1), lost))
    return releases


def _dominated(steps: list[tuple[Step, int]]) -> list[tuple[Step, int]]:
    """Replace steps by at most 1,024 different ones that dominate them: each the worst of a group."""
    alike = max(-(-len(steps) // _MOST_STEPS), 1)
    worst = []
    for start in range(0, len(steps), alike):
        group = steps[start : start + alike]
        rate = max(rate for (rate, _), _ in group)
        sigma = min(sigma for (_, sigma), _ in group)
        count = sum(count for _, count in group)
        worst.append(((rate, sigma), count))
    return worst


def release_count(steps: Sequence[tuple[Step, int]]) -> int:
    """Return about how many releases `composed_in_stages` returns for these steps."""
    blocks = _blocks(_dominated(sorted(steps)))
    return 2 * len(blocks)


def _blocks(steps: Sequence[tuple[Step, int]]) -> list[Sequence[tuple[Step, int]]]:
    """Return the steps in blocks that share a fine lattice: up to 32 each, or one frequent step."""
    blocks: list[Sequence[tuple[Step, int]]] = []
    few = []
    for kind, count in steps:
        if count > _WINDOW:
            blocks.append([(kind, count)])
        else:
            few.append((kind, count))
    for start in range(0, len(few), _BLOCK):
        blocks.append(few[start : start + _BLOCK])
    return blocks


def _gather_very_many(kind: Step, count: int) -> tuple[tuple[Step, int], float]:
    """Replace very many steps by at most 2^37 that dominate them, and return the δ that this adds."""
    if count <= _VERY_MANY:
        return (kind, count), 0.0
    rate, _ = kind
    within_delta = int(2.0 * _TWICE / (count * rate**2))
    enough = count // (_VERY_MANY // 4)
    times = max(min(within_delta, enough), 1)
    fewer, lost = gathered(kind, count, times)
    if fewer[1] > _TOO_MANY:
        raise GridError(f"{count} steps are too many")
    return fewer, lost


def gathered(
    kind: Step,
    count: int,
    times: int,
) -> tuple[tuple[Step, int], float]:
    """Return a step that replaces `times` steps at a larger rate, with its count, and the added δ.

    Args:
        kind: Rate and noise multiplier of a step.
        count: How many steps there are.
        times: How many of them become one.

    References:
        README, 1, *Very many steps*.
    """
    rate, sigma = kind
    fewer = -(-count // times)
    lost = 0.0
    if times > 1:
        # In m steps the record is drawn twice with a probability of at most (m·rate)²/2.
        lost = fewer * 0.5 * (times * rate) ** 2 * (1.0 + _ULP)
    larger = min(times * rate * (1.0 + _ULP), 1.0)
    return ((larger, sigma), fewer), lost


def _compose_block(
    steps: Sequence[tuple[Step, int]],
    step: float,
    direction: Direction,
) -> list[LossPmf]:
    """Compose a block of steps to two releases: one of its usual losses, if any, and one of its rare ones."""
    factor = _fine_factor(steps, step)
    usual = []
    rare = []
    for kind, count in steps:
        usual_release, rare_release = split_step(kind, step, factor, direction)
        if usual_release is not None:
            usual.append((usual_release, count))
        rare.append((rare_release, count))
    releases = [compose(rare, plain=_PLAIN)]
    if usual:
        releases.insert(0, _compose_far(usual, factor))
    return releases


def _fine_factor(steps: Sequence[tuple[Step, int]], step: float) -> int:
    """Return the factor, a power of two, by which the lattice of the usual losses is finer."""
    # A lattice of step h adds at most h²/4 to the variance of a loss, and h times its mean size.
    total = 0
    size = 0.0
    for (rate, sigma), count in steps:
        variation = math.erf(1.0 / (math.sqrt(8.0) * sigma))
        total += count
        size += count * 2.0 * rate * variation
    finer = min(math.sqrt(total), 4.0 * size / step)
    doublings = math.ceil(math.log2(max(finer, 1.0)))
    return int(2**doublings)


def _compose_far(parts: list[tuple[LossPmf, int]], factor: int) -> LossPmf:
    """Return the composition on a lattice `factor` times as coarse, built stage by stage.

    A lattice may be coarsened between two compositions, as the deviation of the sum grows; each pair that
    results dominates.
    """
    total = sum(count for _, count in parts)
    variance = sum(count * pmf.deviation**2 for pmf, count in parts)
    step = parts[0][0].step
    window = _WIDTH * math.sqrt(variance) / step
    fitting = 1.0
    if window > _WINDOW:
        fitting = (_WINDOW / window) ** 2
    share = min(fitting, _MOST / total)
    once = int(share * total)
    if share >= 1.0 or once < 4 or factor == 1:
        return compose(parts, plain=_PLAIN).coarsen(factor)
    doublings = math.floor(0.5 * math.log2(once))
    wider = min(2**doublings, factor)
    staged = []
    for pmf, count in parts:
        times, rest = divmod(count, once)
        if times:
            stage = compose([(pmf, once)])
            staged.append((stage.coarsen(wider), times))
        if rest:
            stage = compose([(pmf, rest)])
            staged.append((stage.coarsen(wider), 1))
    return _compose_far(staged, factor // wider)


def split_step(
    kind: Step,
    step: float,
    factor: int,
    direction: Direction,
) -> tuple[LossPmf | None, LossPmf]:
    """Return two releases that dominate one step: its usual losses, or None, and its rare losses.

    Args:
        kind: Rate and noise multiplier of the step.
        step: Step of the coarse lattice, of the rare losses.
        factor: How many times finer the lattice of the usual losses is.
        direction: Whether the record is removed or added.

    References:
        README, 1, *Stages*: the lemma, with U the outcomes of usual losses.
    """
    low, high = loss_range(*kind, direction)
    first = -lattice_cells(-low, step)
    last = lattice_cells(high, step)
    if max(last - first, 2 * _REACH[0] * factor) > _MAX_CELLS:
        raise GridError(f"one release needs {last - first} lattice cells")
    start, end = _usual_cells(
        kind,
        step,
        factor,
        direction,
        (first, last),
    )
    fine = step / factor
    edges = _points(start * factor, end * factor + 1, fine)
    p, q, _, _ = cell_masses(edges, *kind, direction)
    usual_p = float(p.sum())
    usual_q = float(q.sum())
    if usual_p < _LEAST_USUAL:
        edges = _points(first, last + 1, step)
        p, q, below, above = cell_masses(edges, *kind, direction)
        cells = _Cells(edges[:-1], edges[1:], p, q)
        return None, _spread(step, cells, below=below, above=above)
    cells = _Cells(edges[:-1], edges[1:], p / usual_p, q / usual_p)
    usual = _spread(fine, cells)
    # A rare loss stands beside a usual one, which may lower it by as much as this.
    log_ratio = math.log(usual_q / usual_p)
    shift = max(log_ratio, 0.0) + _ULP
    if shift > step:
        raise GridError("the usual losses of a step lack too much mass.")
    points_below = _points(first - 1, start, step)
    points_above = _points(end, last + 1, step)
    up = _points(end + 1, last + 2, step) - shift
    up = np.append(end * step, up)
    down = np.append(points_below - shift, start * step)
    p_up, q_up, _, above = cell_masses(up, *kind, direction)
    p_down, q_down, below, _ = cell_masses(down, *kind, direction)
    lower = np.append(points_below, points_above)
    upper = lower + step
    upper[start - first] += step  # the shift may lift the last one below beyond its cell
    cells = _Cells(
        lower,
        upper,
        np.append(p_down, p_up),
        np.append(q_down, q_up) * math.exp(-shift),
    )
    no_loss = usual_p * (1.0 - _ULP)
    return usual, _spread(
        step,
        cells,
        below=below,
        zero=no_loss,
        above=above,
    )


def _usual_cells(
    kind: Step,
    step: float,
    factor: int,
    direction: Direction,
    ends: tuple[int, int],
) -> tuple[int, int]:
    """Return the first and last coarse lattice point around 0 between which losses are usual.

    Args:
        kind: Rate and noise multiplier of the step.
        step: Step of the coarse lattice.
        factor: How many times finer the lattice of the usual losses is.
        direction: Whether the record is removed or added.
        ends: The first and the last lattice point with any mass.
    """
    first, last = ends
    for reach in _REACH:
        start = max(first, -reach)
        end = min(last, reach)
        edges = np.array([start * step, end * step])
        _, _, below, above = cell_masses(edges, *kind, direction)
        if below + above < _RARE or 4 * reach * factor > _STAGE_CELLS:
            break
    return start, end


def _points(
    first: int,
    end: int,
    step: float,
) -> Floats:
    """Return the lattice points with numbers from `first` up to, but without, `end`."""
    numbers = np.arange(first, end)
    return np.asarray(numbers * step, dtype=np.float64)


class _Cells(NamedTuple):
    """Cells of losses: the lower and upper ends, and the P- and Q-masses."""

    lower: Floats
    upper: Floats
    p: Floats
    q: Floats


def _spread(
    step: float,
    cells: _Cells,
    *,
    below: float = 0.0,
    zero: float = 0.0,
    above: float = 0.0,
) -> LossPmf:
    """Spread the mass of cells on the lattice points at their ends, keeping P- and Q-mass, rounded up.

    Args:
        step: The lattice step.
        cells: The cells; both ends of each are lattice points.
        below: P-mass of lower losses; it goes to the first point.
        zero: P-mass at no loss.
        above: P-mass of higher losses; it goes to infinity.
    """
    p = cells.p
    tilted = np.exp(cells.lower) * cells.q
    excess = p - tilted + _ULP * (p + tilted)
    widths = -np.expm1(cells.lower - cells.upper)
    raised = np.clip(excess / widths, 0.0, p)
    low = np.round(cells.lower / step)
    high = np.round(cells.upper / step)
    low = low.astype(np.int64)
    high = high.astype(np.int64)
    lowest = int(low.min())
    start = min(lowest, 0)
    size = max(int(high.max()), 0) - start + 1
    masses = np.zeros(size)
    masses += np.bincount(low - start, p - raised, size)
    masses += np.bincount(high - start, raised, size)
    masses[lowest - start] += below
    masses[-start] += zero + _ULP  # sums that should be 1 may fall short by as much
    return LossPmf(step, start, masses, above)


_COARSE = 0.1  # lattice step over the deviation of one loss; adds about 5e-4 to ε, halved on demand
_MANY = 64  # different parts beyond which only the Rényi account is computed; sampled Gaussians are
# composed in stages and do not count
_CELLS = 2**17  # of a lattice, on which the losses or their sum are composed at once
_DEVIATIONS = 24.0  # of a sum, that its lattice holds
_SHARE = 4e-3  # of ε, by which rounding may raise it on the coarsest lattice
_JOINT = 0.01  # the same for releases that share a sample, which are composed before it is drawn
_INNER_DELTA = 1e-6  # for which the lattice of an event inside another one is chosen


def no_pair(parts: Mapping[Event, int]) -> str:
    """Return the reason why the parts have no dominating pair; an empty text if they have one."""
    # All unsampled Gaussians are one, and so is all of which zero-concentrated DP is known.
    others = 0
    for part in parts:
        is_sampled = entry(part).sampled_gaussian(part) is not None
        if not _merges(part) and not is_sampled:
            others += 1
    if others > _MANY:
        return f"not computed: more than {_MANY} different parts"
    for part in parts:
        if not entry(part).private:
            return "nothing is guaranteed"
        for child in entry(part).shown(part):
            reason = no_pair(flatten(child))
            if reason:
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

    Args:
        parts: What is composed, by its count.
        delta: The δ of the question.
        fineness: By how much finer the lattice is to be.
        near: A guess of ε; by default half of the Rényi bound.
        gains: For searches, what the rearrangement gained at another noise.
    """
    # Spreading a loss on two points adds at most step²/8 to its mean and step²/4 to its variance, hence about
    # count·step²/8·(1 + 2 log(1/δ)/ε) to ε.
    merged = _merge_parts(parts)
    if not merged:
        return 1.0  # of nothing: any lattice will do
    guess = rdp_epsilon(composed_curve(parts), delta) if near is None else near
    count = sum(merged.values())
    steps = _staged_steps(tuple(merged.items()), gains)
    if steps:
        # Half of what may be added is for the lattices of the stages before.
        others = count - sum(number for _, number in steps)
        count = 2 * (others + release_count(steps))
    return (
        _step_of(
            merged,
            count,
            0.5 * guess,
            delta,
            gains,
        )
        / fineness
    )


def _step_of(
    merged: Mapping[Event, int],
    count: int,
    rough: float,
    delta: float,
    gains: Gains | None,
) -> float:
    """Return the lattice step for `count` releases, from their deviation and a rough ε."""
    variance = _variance(merged, gains)
    step = _COARSE * math.sqrt(variance / count)
    if math.isfinite(rough):
        tilt = 1.0 + 2.0 * math.log(1.0 / delta) / max(rough, 1e-9)
        for_epsilon = math.sqrt(_SHARE * rough / (count * tilt))
        step = max(step, for_epsilon)
    return max(step, 1e-9)


@lru_cache(maxsize=64)
def _staged_steps(
    parts: tuple[tuple[Event, int], ...],
    gains: Gains | None,
) -> list[tuple[Step, int]]:
    """Return the sampled Gaussians to compose in stages, with counts; empty if one lattice does."""
    merged = dict(parts)
    steps = []
    for part, count in parts:
        kind = entry(part).sampled_gaussian(part)
        if kind is not None and kind[0] < 1.0:
            steps.append((kind, count))
    if not steps or len(parts) > _MANY:
        return steps
    rough = 0.5 * rdp_epsilon(composed_curve(merged), _INNER_DELTA)
    count = sum(merged.values())
    one_lattice = _step_of(
        merged,
        count,
        rough,
        _INNER_DELTA,
        gains,
    )
    if _reach(merged, gains) > _CELLS * one_lattice:
        return steps
    return []


def _reach(merged: Mapping[Event, int], gains: Gains | None) -> float:
    """Return the largest loss to provide for: that of one step, or 24 deviations of the summed loss."""
    widest = 0.0
    for part in merged:
        kind = entry(part).sampled_gaussian(part)
        if kind is not None:
            _, largest = loss_range(*kind, Direction.REMOVE)
            widest = max(widest, largest)
    return max(widest, _DEVIATIONS * math.sqrt(_variance(merged, gains)))


def _variance(parts: Mapping[Event, int], gains: Gains | None) -> float:
    """Return about the variance of the summed loss of all parts."""
    pairs = _Pairs(gains)
    total = 0.0
    for part, count in parts.items():
        deviation = entry(part).deviation(part, pairs)
        total += count * deviation**2
    return total


def _merges(part: Event) -> bool:
    """Return whether copies of the part merge into a single event, as Gaussians and zCDP do."""
    kind = entry(part)
    return kind.precision(part) is not None or kind.rho(part) is not None


def _merge_parts(parts: Mapping[Event, int]) -> dict[Event, int]:
    """Return the parts with all unsampled Gaussians merged into one, and all zCDP into one."""
    total_precision = 0.0
    total_rho = 0.0
    merged: dict[Event, int] = {}
    for part, count in parts.items():
        precision = entry(part).precision(part)
        rho = entry(part).rho(part)
        if precision is not None:
            total_precision += count * precision
        elif rho is not None:
            total_rho += count * rho
        else:
            merged[part] = count
    if total_precision > 0.0:
        noise = 1.0 / math.sqrt(total_precision)
        if noise * LARGEST < 1.0:
            raise GridError("the noise is too small.")
        merged[Gaussian(min(noise, LARGEST))] = 1
    if total_rho > LARGEST:
        raise GridError("the divergence is too large.")
    if total_rho > 0.0:
        merged[ZCDP(total_rho)] = 1
    return merged


def event_pair(
    parts: Mapping[Event, int],
    step: float,
    *,
    gains: Gains | None = None,
) -> Pair:
    """Return the dominating pair of composed parts on a lattice; with `gains`, only an estimate.

    Args:
        parts: What is composed, by its count.
        step: The lattice step.
        gains: For searches, what the rearrangement gained at another noise.
    """
    merged = tuple(_merge_parts(parts).items())
    if not merged:
        return Pair(nothing(step), nothing(step))
    # What has no lattice of its own is not estimated: one cache serves searches and accounts.
    if not any(entry(part).own_lattice for part, _ in merged):
        gains = None
    return _composed_pair(merged, step, gains)


@lru_cache(maxsize=16)
def _composed_pair(
    parts: tuple[tuple[Event, int], ...],
    step: float,
    gains: Gains | None,
) -> Pair:
    """Return the dominating pair of an event's merged parts, with sampled Gaussians composed in stages."""
    steps = _staged_steps(parts, gains)
    staged = {kind for kind, _ in steps}
    pairs = []
    for part, count in parts:
        if entry(part).sampled_gaussian(part) not in staged:
            pair = entry(part).pair(part, step, _Pairs(gains))
            pairs.append((pair, count))

    def composed(direction: Direction) -> LossPmf:
        releases = [(pmf, 1) for pmf in composed_in_stages(steps, step, direction)]
        releases += [(pair.get(direction), count) for pair, count in pairs]
        return compose(releases)

    remove = composed(Direction.REMOVE)
    if not steps and all(pair.remove is pair.add for pair, _ in pairs):
        return Pair(remove, remove)
    return Pair(remove, composed(Direction.ADD))


def fine_pair(
    event: Event,
    fineness: float = 2.0,
    *,
    gains: Gains | None = None,
) -> Pair:
    """Return the dominating pair of an event on a lattice chosen for δ = 1e-6 and a fineness."""
    parts = flatten(event)
    step = default_step(parts, _INNER_DELTA, fineness, gains=gains)
    return event_pair(parts, step, gains=gains)


@lru_cache(maxsize=32)
def tuners(
    event: Event,
    fineness: float,
    *,
    gains: Gains | None = None,
) -> Tuners:
    """Return the bounds on a selection among runs, first if a record is removed, then if one is added."""
    return entry(event).tuners(event, fineness, _Pairs(gains))


class _Pairs(Pairs):
    """The pairs of inner events that a registry entry can ask for, with `gains` passed on."""

    def __init__(self, gains: Gains | None) -> None:
        self.gains = gains

    def at(self, event: Event, step: float) -> Pair:
        """Return the dominating pair of an event on the lattice of this step."""
        return event_pair(flatten(event), step, gains=self.gains)

    def fine(self, event: Event, fineness: float) -> Pair:
        """Return the dominating pair of an event on a lattice that is chosen for it."""
        return fine_pair(event, fineness, gains=self.gains)

    def step(self, event: Event, fineness: float) -> float:
        """Return the lattice step that `fine` chooses for an event."""
        return default_step(flatten(event), _INNER_DELTA, fineness, gains=self.gains)

    def tuners(self, event: Event, fineness: float) -> Tuners:
        """Return the bounds on a selection among runs, first if a record is removed, then if one is added."""
        return tuners(event, fineness, gains=self.gains)

    def unsampled(self, event: Event, share: float) -> Pair:
        """Return the dominating pair of the releases about one sample, before any sampling."""
        return _unsampled(event, share)

    def lattice_pair(self, event: Event, fineness: float) -> Pair:
        """Return the dominating pair of an event that chooses its lattice itself, such as a selection."""
        return _own(event, fineness, self.gains)


@lru_cache(maxsize=16)
def _unsampled(event: Event, share: float) -> Pair:
    """Return the dominating pair of the releases about one sample, before any sampling."""
    # A tenth of the composition's step, so that what is read between its points adds little.
    parts = flatten(event)
    relative = min(max(0.1 * share, _JOINT / 8.0), _JOINT)
    step = relative * math.sqrt(_variance(parts, None))
    return event_pair(parts, step)


@lru_cache(maxsize=32)
def _own(
    event: Event,
    fineness: float,
    gains: Gains | None,
) -> Pair:
    """Return the dominating pair of an event that chooses its lattice itself, from a cache of 32."""
    return entry(event).own_pair(event, fineness, _Pairs(gains))
