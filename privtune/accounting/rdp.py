"""Rényi DP: the curve of every event, by composition of the curves of its parts.

autodp carries the composition: each part enters as a custom mechanism with our exact curve, and the
composed curve is read back on our grid of orders. Its own curves and conversions are not used;
`compare.py` alone asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
from autodp.autodp_core import Mechanism
from autodp.transformer_zoo import Composition
from numpy.typing import NDArray

from privtune.accounting.curves import ORDERS
from privtune.accounting.events import Event, flatten
from privtune.accounting.moments import sampled_gaussian_curves
from privtune.accounting.registry import entry
from privtune.errors import PrivTuneError

__all__ = ["composed_curve", "rdp_curve"]

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]

_MANY = 64  # sampled Gaussians from which on their curves are computed together, and not kept


class _CurveMechanism(Mechanism):  # type: ignore[misc]
    """An autodp mechanism of which an RDP curve is known, and nothing else."""

    def __init__(self, name: str, curve: Curve) -> None:
        Mechanism.__init__(self)
        self.name = name
        self.params = {"name": name}
        self.propagate_updates(curve, "RDP")


def _tabulated(values: Floats) -> Curve:
    def curve(orders: Floats) -> Floats:
        index = np.searchsorted(ORDERS, orders)
        return values[index]

    return curve


def rdp_curve(event: Event) -> Floats:
    """Return an upper bound on the Rényi divergence at each of `ORDERS`, both directions.

    Raises:
        PrivTuneError: A value came out NaN or negative; no number is reported then.
    """
    return composed_curve(flatten(event))


def composed_curve(parts: Mapping[Event, int]) -> Floats:
    """Return the same for what `flatten` returns."""
    if not parts:
        return np.zeros_like(ORDERS)
    mechanisms = [
        # autodp keys its bookkeeping by name; equal names would overwrite each other.
        _CurveMechanism(f"part{number}", _tabulated(curve))
        for number, curve in enumerate(_leaf_curves(list(parts)))
    ]
    composed = Composition()(mechanisms, list(parts.values()))
    values = np.asarray(composed.get_RDP(ORDERS), dtype=np.float64)
    return _checked(values)


def _checked(values: Floats) -> Floats:
    if np.isnan(values).any() or (values < 0.0).any():
        raise PrivTuneError("a Rényi divergence came out NaN or negative; no number is reported.")
    return values


def _leaf_curves(parts: list[Event]) -> list[Floats]:
    """Return the curve of each part; many sampled Gaussians are computed together."""
    sampled = {
        part: found for part in parts if (found := entry(part).sampled_gaussian(part)) is not None
    }
    if len(sampled) <= _MANY:
        return [_leaf_curve(part) for part in parts]
    rates, noises = np.array(list(sampled.values())).T
    rows = dict(zip(sampled, _checked(sampled_gaussian_curves(rates, noises, ORDERS)), strict=True))
    return [rows[part] if part in rows else _leaf_curve(part) for part in parts]


@lru_cache(maxsize=1024)
def _leaf_curve(event: Event) -> Floats:
    values = _checked(entry(event).curve(event, rdp_curve))
    values.setflags(write=False)
    return values
