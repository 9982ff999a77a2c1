"""Dominating pairs on a lattice of mechanisms of which bounds on both profiles are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.pmf import GridError, LossPmf

Floats = NDArray[np.float64]
_MAX_PROFILE = 2**19


def from_profile(
    profile: Callable[[Floats], Floats],
    reverse: Callable[[Floats], Floats],
    step: float,
    lowest: int,
    highest: int,
) -> LossPmf:
    """Return a pair that dominates a mechanism of which upper bounds on both profiles are known.

    For ε >= 0 the bound is `profile(ε)`; for ε < 0 it is `1 - e^ε + e^ε reverse(-ε)`. The points
    are made convex in `x = e^ε`, as the true profile is; slope jumps are Q-masses.

    Args:
        profile: δ(ε) of the direction that is wanted, vectorised, for ε >= 0.
        reverse: δ(ε) of the other direction, for ε >= 0.
        step: Distance of two lattice points.
        lowest: First lattice index, below 0.
        highest: Last lattice index, above 0; the bound there becomes the mass at infinity.

    Raises:
        GridError: More than 2^19 points, which would take seconds.
    """
    if highest - lowest > _MAX_PROFILE:
        raise GridError(f"a profile needs {highest - lowest} lattice points.")
    up = np.arange(0.0, highest + 1) * step
    down = np.arange(0.0, -lowest + 1) * step
    high = np.clip(profile(up), 0.0, 1.0)
    # For ε < 0 keep only what lies above the line 1 - e^ε: adding a line changes no slope jump.
    low = np.exp(-down) * np.clip(reverse(down), 0.0, 1.0)
    at_zero = min(float(high[0]), float(low[0]))
    high[0] = low[0] = at_zero
    values = np.concatenate([_convex(low[::-1], step)[:-1], _convex(high, step)])
    values = _convex_across(values, -lowest, step)
    drop = np.diff(values)
    # δ in terms of x = e^ε: mass_p(i) = x_i (slope_i - slope_(i-1)); the line -x on the left side
    # contributes slope -1 there and 0 on the right: a jump of 1 in Q-mass at ε = 0.
    masses = np.zeros(values.size)
    masses[:-1] += drop / math.expm1(step)
    masses[1:] += drop / math.expm1(-step)
    masses[-lowest] += 1.0
    # Left of the grid the profile is bounded by the chord to (x, δ) = (0, 1), which has slope
    # (low[0])/x_0 in the shifted picture: that much Q-mass is given up at loss -∞.
    masses[0] -= values[0]
    np.maximum(masses, 0.0, out=masses)
    return LossPmf(step, lowest, masses, float(values[-1]))


def _convex(values: Floats, step: float) -> Floats:
    """Return the lower convex hull, in x = e^ε, of values on consecutive lattice points."""
    bends = np.diff(values[1:]) - math.exp(min(step, 700.0)) * np.diff(values[:-1])
    if not (bends < -1e-13 * np.abs(values[1:-1])).any():
        return values
    size = values.size
    hull: list[int] = []
    heights = values.tolist()
    for i in range(size):
        while len(hull) >= 2:
            j, k = hull[-1], hull[-2]
            # Slopes on both sides of j, with x in units of x_j to stay in range.
            left = (heights[j] - heights[k]) / -math.expm1((k - j) * step)
            right = (heights[i] - heights[j]) / math.expm1(min((i - j) * step, 700.0))
            if left < right:
                break
            hull.pop()
        hull.append(i)
    vertices = np.asarray(hull)
    place = np.arange(size)
    edge = np.minimum(np.searchsorted(vertices, place, side="right") - 1, vertices.size - 2)
    start, end = vertices[edge], vertices[edge + 1]
    width = np.expm1((start - end) * step)
    # (x - x_start)/(x_end - x_start) in x = e^ε, without a number that is large.
    share = np.exp((place - end) * step) * np.expm1((start - place) * step) / width
    return np.asarray(values[start] + share * (values[end] - values[start]))


def _convex_across(values: Floats, zero: int, step: float) -> Floats:
    """Make the profile convex across ε = 0, where the two halves were joined.

    `values` is δ(ε) minus the profile (1 - e^ε)₊ of a pair without loss.
    """
    before = (values[zero] - values[zero - 1]) / -math.expm1(-step) - 1.0
    after = (values[zero + 1] - values[zero]) / math.expm1(step)
    if before <= after:
        return values
    # Only where δ is not tiny: adding the kink costs the digits below 1e-16 of what it reaches.
    large = np.flatnonzero(values > 1e-10 * -math.expm1(-zero * step))
    if not large.size:
        return values  # where a mass would be negative it is raised to 0
    first, last = int(large[0]), int(large[-1])
    kink = -np.expm1(np.minimum(np.arange(first, last + 1) - zero, 0) * step)
    values = values.copy()
    values[first : last + 1] = _convex(values[first : last + 1] + kink, step) - kink
    return np.maximum(values, 0.0)
