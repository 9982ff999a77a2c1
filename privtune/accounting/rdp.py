"""Rényi DP: the curve of every event, by composition of the curves of its parts: they add up.

Whatever a ledger charges is composed by autodp as well, from the same curves, and charged only where
the two agree (`confirm_composition`). Answers alone, of which a plan asks for dozens, do without:
importing autodp takes longer than most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from privtune.accounting.algebra import Adjacency, Event, flatten
from privtune.accounting.curves import ORDERS
from privtune.accounting.events import Composed, Repeated
from privtune.accounting.moments import sampled_gaussian_curves
from privtune.accounting.registry import entry, under
from privtune.errors import PrivTuneError

Floats = NDArray[np.float64]

_MANY = 64  # sampled Gaussians from which on their curves are computed together, and not kept


def rdp_curve(event: Event) -> Floats:
    """Return an upper bound on the Rényi divergence at each of `ORDERS`, both directions.

    Raises:
        PrivTuneError: A value came out NaN or negative; no number is reported then.
    """
    return composed_curve(flatten(event))


def composed_curve(parts: Mapping[Event, int]) -> Floats:
    """Return the same for what `flatten` returns.

    References:
        Mironov, arXiv:1702.07476, Proposition 1.
    """
    values = np.zeros_like(ORDERS)
    for curve, count in zip(_leaf_curves(list(parts)), parts.values(), strict=True):
        values += count * curve
    return _checked(values)


def composed_by_autodp(parts: Mapping[Event, int]) -> Floats:
    """Return the same, composed by autodp from the same curves of the parts."""
    from autodp.autodp_core import Mechanism
    from autodp.transformer_zoo import Composition

    if not parts:
        return np.zeros_like(ORDERS)

    def known(number: int, curve: Floats) -> Mechanism:
        """An autodp mechanism of which a Rényi curve is known, and nothing else."""
        mechanism = Mechanism()
        # autodp keys its bookkeeping by name; equal names would overwrite each other.
        mechanism.name = f"part{number}"
        mechanism.params = {"name": mechanism.name}
        mechanism.propagate_updates(_tabulated(curve), "RDP")
        return mechanism

    mechanisms = [known(number, curve) for number, curve in enumerate(_leaf_curves(list(parts)))]
    composed = Composition()(mechanisms, list(parts.values()))
    return _checked(np.asarray(composed.get_RDP(ORDERS), dtype=np.float64))


def _tabulated(values: Floats) -> Callable[[Floats], Floats]:
    return lambda orders: values[np.searchsorted(ORDERS, orders)]


@lru_cache(maxsize=256)
def confirm_composition(charged: frozenset[tuple[Event, int]], adjacency: Adjacency) -> None:
    """Refuse to charge where autodp's composition of what is charged is not ours.

    Args:
        charged: Every event of a ledger, with what is asked for, and how often it is charged.
        adjacency: The relation of neighbouring datasets.

    Raises:
        PrivTuneError: One of the two is wrong.
    """
    parts = flatten(
        under(Composed([Repeated(count, event) for event, count in charged]), adjacency)
    )
    if not np.allclose(composed_curve(parts), composed_by_autodp(parts), rtol=1e-9, atol=1e-12):
        raise PrivTuneError(
            "autodp composes what is charged to another Rényi curve than this package does: one of "
            "the two is wrong. Nothing is charged; please report it (SECURITY.md)."
        )


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
