"""Dominating pairs of single Gaussian releases, with and without Poisson sampling, on a lattice.

The pair of the sampled Gaussian is `((1-q) N(0,s²) + q N(1,s²), N(0,s²))` when the record is
removed and the swapped pair when it is added (Zhu, Dong, Wang, arXiv:2106.08567, Theorem 11). Cell
masses are differences of normal distribution functions, on the tail that keeps precision.
"""

from __future__ import annotations

import math
from enum import Enum

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.pmf import GridError, LossPmf, from_cells, lattice_cells

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
    if rate == 1.0:
        return np.asarray(shift)
    with np.errstate(over="ignore"):
        value = np.log1p(rate * np.expm1(shift))
    return np.asarray(np.where(shift > 600.0, shift + math.log(rate), value))


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


def _between(x: Floats, centre: float, sigma: float) -> Floats:
    """Return the normal mass of consecutive intervals, precise in both tails."""
    z = (x - centre) / sigma
    tail = sp.special.ndtr(-np.abs(z))
    left, right = z[:-1], z[1:]
    crossing = (left < 0.0) & (right > 0.0)
    same = np.abs(tail[1:] - tail[:-1])
    return np.asarray(np.where(crossing, 1.0 - tail[1:] - tail[:-1], same))


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
        base, moved = _between(x, 0.0, sigma), _between(x, 1.0, sigma)
        below = _mix(rate, sp.special.ndtr(x[0] / sigma), sp.special.ndtr((x[0] - 1.0) / sigma))
        above = _mix(rate, sp.special.ndtr(-x[-1] / sigma), sp.special.ndtr((1.0 - x[-1]) / sigma))
        return (1.0 - rate) * base + rate * moved, base, below, above
    x = _point(-edges, rate, sigma)
    base = _between(x[::-1], 0.0, sigma)[::-1]
    moved = _between(x[::-1], 1.0, sigma)[::-1]
    below, above = float(sp.special.ndtr(-x[0] / sigma)), float(sp.special.ndtr(x[-1] / sigma))
    return base, (1.0 - rate) * base + rate * moved, below, above


def sampled_gaussian(
    rate: float, noise_multiplier: float, step: float, direction: Direction
) -> LossPmf:
    """Return the pessimistic lattice pair of one Poisson-sampled Gaussian release.

    Args:
        rate: Sampling probability, in (0, 1]; 1 is the plain Gaussian.
        noise_multiplier: Noise over sensitivity, above 0.
        step: Lattice step.
        direction: Which dataset plays P.

    Raises:
        GridError: More than 2^22 cells would be needed.
    """
    low, high = loss_range(rate, noise_multiplier, direction)
    lowest, highest = -lattice_cells(-low, step), lattice_cells(high, step)
    if highest - lowest > _MAX_CELLS:
        raise GridError(f"one release needs {highest - lowest} lattice cells")
    edges = np.arange(float(lowest), float(highest + 1)) * step
    mass_p, mass_q, below, above = cell_masses(edges, rate, noise_multiplier, direction)
    return from_cells(step, lowest, mass_p=mass_p, mass_q=mass_q, below=below, above=above)


def _mix(rate: float, base: float, moved: float) -> float:
    return float((1.0 - rate) * base + rate * moved)
