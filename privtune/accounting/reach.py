"""What a generator of noise cannot reach, and what that costs.

A Gaussian in floating point ends at some edge R. Let one record shift a released vector by g, in
standard deviations: ``|g| <= 1/σ``. Wherever both laws have mass, their densities stand to each
other as those of true Gaussians (cutting at R scales both alike, by less than ``1 + 2 d Q(R)``).
Outputs that only the dataset with the record can give have mass at most

    Σ_i h(|g_i|),   h(x) = P(R - x < Z <= R) = Q(R - x) - Q(R),

and that mass is added to δ: once for every release, times the rate where samples are drawn, summed
over what is composed. Of K runs in a selection any may have it; K is independent of the data, so
the mass is at most E[K] times that of one.

The worst g: ``h(x) = x φ(R) + r(x)``, and ``r(x)/x²`` grows for x <= R - 1, since ``h''(x) =
(R - x) φ(R - x)`` does. So with ``a = 1/σ`` and d coordinates ``Σ r(|g_i|) <= r(a)`` and
``Σ |g_i| <= √d a``: together at most ``h(a) + (√d - 1) a φ(R)``, the first from a gradient that
lies in one coordinate, the second from one spread over all. Laplace noise: h is convex and the
shift bounded in L1, so one coordinate is the worst.
"""

from __future__ import annotations

import math

from scipy import special

from privtune.accounting.events import (
    Composed,
    Event,
    Gaussian,
    Joint,
    Laplace,
    Parallel,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    SubsampledTuning,
    ThresholdSelection,
    WorstOf,
)

__all__ = ["GAUSSIAN_REACH", "LAPLACE_REACH", "mass_beyond_reach"]

GAUSSIAN_REACH = 34.0
"""Standard deviations that this library's Gaussian noise reaches, on every device."""

LAPLACE_REACH = 587.0
"""Scales that its Laplace noise reaches."""

_COORDINATES = 2**50  # more than any model has


def mass_beyond_reach(
    event: Event,
    *,
    gaussian: float = GAUSSIAN_REACH,
    laplace: float = LAPLACE_REACH,
    coordinates: int = _COORDINATES,
) -> float:
    """Return an upper bound on the mass that noise of finite reach adds to an event's δ.

    Args:
        event: What was released.
        gaussian: Standard deviations that Gaussian noise reaches.
        laplace: Scales that Laplace noise reaches.
        coordinates: Most numbers that one release holds.

    Returns:
        The mass, at most 1. Parts of which only a bound is known, or none at all, add nothing.

    Example:
        >>> mass_beyond_reach(Gaussian(1.0)) < 1e-200
        True
        >>> f"{mass_beyond_reach(Gaussian(0.5), gaussian=5.768, coordinates=1):.1e}"
        '8.2e-05'
    """

    def mass(part: Event) -> float:
        if isinstance(part, Gaussian):
            return _gaussian(1.0 / part.noise_multiplier, gaussian, coordinates)
        if isinstance(part, Laplace):
            shift = 1.0 / part.noise_multiplier
            return 0.5 * math.exp(shift - laplace) if shift < laplace else 1.0
        if isinstance(part, Joint | Composed):
            return math.fsum(map(mass, part.events))
        if isinstance(part, PoissonSampled):
            return part.rate * mass(part.event)
        if isinstance(part, Repeated):
            return part.count * mass(part.event)
        if isinstance(part, WorstOf | Parallel):
            return max(map(mass, part.events))
        if isinstance(part, PrivateSelection):
            return part.runs.expected_runs * mass(part.event)
        if isinstance(part, ThresholdSelection):
            return mass(part.event) / part.stop
        if isinstance(part, SubsampledTuning):
            return part.rate * mass(part.tuning) + mass(part.training)
        return 0.0

    return min(mass(event), 1.0)


def _gaussian(shift: float, reach: float, coordinates: int) -> float:
    """Return the bound for one release whose shift is at most ``shift`` standard deviations."""
    if shift > reach - 1.0:
        return 1.0
    density = math.exp(-0.5 * reach * reach) / math.sqrt(2.0 * math.pi)
    concentrated = float(special.ndtr(shift - reach) - special.ndtr(-reach))
    return concentrated + (math.sqrt(coordinates) - 1.0) * shift * density
