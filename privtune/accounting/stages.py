"""Many or rare sampled Gaussians: what does not fit on one lattice is composed in stages.

Between two stages the lattice gets coarser as the deviation grows. Each step is first split in two
releases, its usual losses and its rare large ones, so that the usual ones alone need a fine lattice.
The lemma and its proof stand in `accounting/README.md`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.convolution import compose
from privtune.accounting.pmf import GridError, LossPmf, lattice_cells
from privtune.accounting.releases import Direction, cell_masses, loss_range

Floats = NDArray[np.float64]
Step = tuple[float, float]  # rate, noise multiplier
_REACH = (4, 8, 16, 32, 64)  # cells of the coarse lattice on each side of 0 with usual losses
_RARE = 2e-4  # mass beyond, at most: the variance grows by that share
_CELLS = 2**19  # of the usual losses of one step
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
    """Return releases on a lattice that together dominate all these steps, each so many times.

    Args:
        steps: Rate and noise multiplier of Poisson-sampled Gaussians, and how many of each.
        step: The lattice of the result. Each block adds about `step²/4` to the mean of the loss.
        direction: Which dataset plays P.

    Raises:
        GridError: More than 2^22 cells would be needed.
    """
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
    """Return fewer steps at a larger rate that dominate very many, and what they lack in δ.

    Raises:
        GridError: So many are left that the rounding of each would add up.
    """
    if count <= _VERY_MANY:
        return (kind, count), 0.0
    times = min(int(2.0 * _TWICE / (count * kind[0] ** 2)), count // (_VERY_MANY // 4))
    fewer, lost = gathered(kind, count, max(times, 1))
    if fewer[1] > _TOO_MANY:
        raise GridError(f"{count} steps are too many")
    return fewer, lost


def gathered(kind: Step, count: int, times: int) -> tuple[tuple[Step, int], float]:
    """Return one step for every so many, at a rate as much larger, and the δ that is added.

    In m steps the record is drawn twice with a probability of at most (m·rate)²/2.
    """
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
    """Return two releases that together dominate one step: its usual losses and its rare ones.

    Args:
        kind: Rate and noise multiplier.
        step: The coarse lattice, of the rare losses.
        factor: How many times finer that of the usual losses is.
        direction: Which dataset plays P.

    Returns:
        The usual losses on the fine lattice, None where most losses are rare; the rare ones.
    """
    fine = step / factor
    low, high = loss_range(*kind, direction)
    first, last = -lattice_cells(-low, step), lattice_cells(high, step)
    if max(last - first, 2 * _REACH[0] * factor) > _MAX_CELLS:
        raise GridError(f"one release needs {last - first} lattice cells")
    for reach in _REACH:
        inner = (max(first, -reach), min(last, reach))
        ends = np.array([inner[0] * step, inner[1] * step])
        _, _, below, above = cell_masses(ends, *kind, direction)
        if below + above < _RARE or 4 * reach * factor > _CELLS:
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
    """Put the mass of cells on lattice points at both ends, keeping P- and Q-mass, rounded up.

    The P-mass beside them is that below, which goes to the first end, at no loss, and at infinity.
    """
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
