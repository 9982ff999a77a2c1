"""Bound the δ that must be added because floating-point noise has a finite range.

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
from dataclasses import dataclass

from privtune.accounting.events import Event
from privtune.accounting.registry import Edges, entry

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
    """Return an upper bound on the δ that noise of finite range adds to an event."""
    edges = _Edges(gaussian, laplace, coordinates)

    def mass(part: Event) -> float:
        return entry(part).beyond(part, edges, mass)

    return min(mass(event), 1.0)


@dataclass(frozen=True)
class _Edges(Edges):
    """The finite ranges of Gaussian and Laplace noise, in scales, and the most numbers in one release."""

    reach: float
    laplace_reach: float
    coordinates: int

    def gaussian(self, noise_multiplier: float) -> float:
        """Return the δ added by the finite range R of Gaussian noise: h(a) + (√d - 1) a φ(R), a = 1/σ."""
        shift = 1.0 / noise_multiplier
        reach = self.reach
        if shift > reach - 1.0:
            return 1.0
        density = math.exp(-0.5 * reach * reach) / math.sqrt(2.0 * math.pi)
        # The tail of a Gaussian is half of erfc; scipy takes a third of a second to be imported for it.
        root = math.sqrt(2.0)
        concentrated = 0.5 * (math.erfc((reach - shift) / root) - math.erfc(reach / root))
        spread = (math.sqrt(self.coordinates) - 1.0) * shift * density
        return concentrated + spread

    def laplace(self, noise_multiplier: float) -> float:
        """Return the δ added by the finite range R of Laplace noise: half of e^(1/b - R)."""
        beyond = 1.0 / noise_multiplier - self.laplace_reach
        if beyond >= 0.0:
            return 1.0
        return 0.5 * math.exp(beyond)
