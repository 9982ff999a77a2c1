"""Compositions without a lattice: sums of Rényi curves, and exact unsampled Gaussians."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.curves import ORDERS, sampled_gaussian_curves
from privtune.accounting.events import Adjacency, Composed, Event, Repeated, flatten
from privtune.accounting.registry import entry, under
from privtune.errors import PrivTuneError
from privtune.imports import postponed

Floats = NDArray[np.float64]

_MANY = 64  # sampled Gaussians from which on their curves are computed together, and not kept


def rdp_curve(event: Event) -> Floats:
    """Return an upper bound on the Rényi divergence at each of `ORDERS`, for both directions."""
    return composed_curve(flatten(event))


def composed_curve(parts: Mapping[Event, int]) -> Floats:
    """Return the Rényi curve of a composition: the sum of its parts' curves, by their counts."""
    values = np.zeros_like(ORDERS)
    curves = _leaf_curves(list(parts))
    for curve, count in zip(curves, parts.values(), strict=True):
        values += count * curve
    return _checked(values)


def composed_by_autodp(parts: Mapping[Event, int]) -> Floats:
    """Return the Rényi curve of a composition as autodp sums it from the same curves."""
    with postponed("scipy.stats", "scipy.integrate", "scipy.optimize"):
        from autodp.autodp_core import Mechanism
        from autodp.transformer_zoo import Composition

    if not parts:
        return np.zeros_like(ORDERS)

    def with_curve(number: int, curve: Floats) -> Mechanism:
        """Return an autodp mechanism that consists of this Rényi curve alone."""
        mechanism = Mechanism()
        # autodp keys its bookkeeping by name; equal names would overwrite each other.
        mechanism.name = f"part{number}"
        mechanism.params = {"name": mechanism.name}
        mechanism.propagate_updates(lambda at: curve[np.searchsorted(ORDERS, at)], "RDP")
        return mechanism

    curves = _leaf_curves(list(parts))
    mechanisms = [with_curve(number, curve) for number, curve in enumerate(curves)]
    composed = Composition()(mechanisms, list(parts.values()))
    return _checked(np.asarray(composed.get_RDP(ORDERS), dtype=np.float64))


@lru_cache(maxsize=256)
def confirm_composition(charged: frozenset[tuple[Event, int]], adjacency: Adjacency) -> None:
    """Refuse a charge if autodp composes its events to another Rényi curve than this package does."""
    event = Composed([Repeated(count, charge) for charge, count in charged])
    parts = flatten(under(event, adjacency))
    ours = composed_curve(parts)
    theirs = composed_by_autodp(parts)
    if not np.allclose(ours, theirs, rtol=1e-9, atol=1e-12):
        raise PrivTuneError(
            "autodp composes what is charged to another Rényi curve than this package does: one of "
            "the two is wrong. Nothing is charged; please report it (SECURITY.md)."
        )


def _checked(values: Floats) -> Floats:
    """Return a Rényi curve, or refuse one with a NaN or negative value."""
    if np.isnan(values).any() or (values < 0.0).any():
        raise PrivTuneError("a Rényi divergence came out NaN or negative; no number is reported.")
    return values


def _leaf_curves(parts: list[Event]) -> list[Floats]:
    """Return the Rényi curve of each part; many sampled Gaussians are computed together."""
    sampled = {}
    for part in parts:
        kind = entry(part).sampled_gaussian(part)
        if kind is not None:
            sampled[part] = kind
    if len(sampled) <= _MANY:
        return [_leaf_curve(part) for part in parts]
    kinds = np.array(list(sampled.values()))
    rates, noises = kinds.T
    curves = _checked(sampled_gaussian_curves(rates, noises, ORDERS))
    rows = dict(zip(sampled, curves, strict=True))
    values = []
    for part in parts:
        values.append(rows[part] if part in rows else _leaf_curve(part))
    return values


@lru_cache(maxsize=1024)
def _leaf_curve(event: Event) -> Floats:
    """Return the read-only Rényi curve of one part, from a cache."""
    values = _checked(entry(event).curve(event, rdp_curve))
    values.setflags(write=False)
    return values


_MARGIN = 1e-12  # relative; covers the rounding of the distribution function and of the root


def gaussian_mu(parts: Mapping[Event, int]) -> float | None:
    """Return μ = sqrt(Σ count/σ²) of unsampled Gaussians (arXiv:1905.02383, Corollary 3.3), else None."""
    total = 0.0
    for event, count in parts.items():
        precision = entry(event).precision(event)
        if precision is None:
            return None
        total += count * precision
    return math.sqrt(total)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), rounded up (arXiv:1805.06530, Theorem 8)."""
    if mu == 0.0:
        return 0.0
    shift = epsilon / mu
    first = float(sp.special.log_ndtr(mu / 2.0 - shift))
    log_q = float(sp.special.log_ndtr(-mu / 2.0 - shift))
    second = epsilon + log_q
    if second >= first:
        # Both terms agree to rounding: the first alone is an upper bound on their difference.
        return min(math.exp(first), 1.0)
    top = math.exp(first)
    value = -top * math.expm1(second - first)
    # Cancellation in the exponents, each known to a relative 1e-15, is charged.
    slack = top * 4e-15 * (1.0 + abs(first) + abs(second))
    return min(value * (1.0 + _MARGIN) + slack, 1.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε >= 0 at which a Gaussian of mean μ has δ(ε) <= delta, rounded up."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    # The tail bound of the loss, a normal variable of mean μ²/2 and deviation μ.
    deviations = math.sqrt(2.0 * math.log(1.0 / delta))
    high = mu * mu / 2.0 + mu * deviations + 1e-9
    while gaussian_delta(mu, high) > delta:
        high *= 1.01
    low = 0.0
    while high - low > 1e-14 + 4e-16 * high:
        middle = 0.5 * (low + high)
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high
