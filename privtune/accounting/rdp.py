"""Rényi DP: exact curves of every event, their composition, and the conversion to (ε, δ).

autodp carries the composition: each part enters as a custom mechanism with our exact curve, and the
composed curve is read back on our grid of orders. Its own curves and conversions are not used. This
is the only module that imports autodp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from autodp.autodp_core import Mechanism
from autodp.transformer_zoo import Composition
from numpy.typing import NDArray
from scipy import special

from privtune.accounting.events import (
    ZCDP,
    ApproximateDP,
    Event,
    Gaussian,
    Joint,
    Laplace,
    NonPrivate,
    Parallel,
    PoissonSampled,
    PrivateSelection,
    SubsampledTuning,
    ThresholdSelection,
    WorstOf,
    flatten,
)
from privtune.accounting.joint import joint_curve
from privtune.accounting.moments import sampled_gaussian_curve, sampled_gaussian_curves
from privtune.accounting.runs import Binomial, Geometric, NegativeBinomial, Poisson, RunLaw
from privtune.accounting.subsampled import amplified_curve, split_curve
from privtune.errors import PrivTuneError

__all__ = [
    "ORDERS",
    "rdp_curve",
    "rdp_delta",
    "rdp_epsilon",
    "selection_curve",
]

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]

ORDERS: Floats = np.unique(
    np.concatenate(
        [
            1.0 + np.geomspace(1e-3, 0.1, 15),
            np.arange(11.0, 110.0) / 10.0,
            np.arange(11.0, 64.0),
            np.round(np.geomspace(64.0, 4096.0, 49)),
        ]
    )
)
ORDERS.setflags(write=False)
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
    parts = flatten(event)
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
        part: (part.rate, part.event.noise_multiplier)
        for part in parts
        if isinstance(part, PoissonSampled) and isinstance(part.event, Gaussian)
    }
    if len(sampled) <= _MANY:
        return [_leaf_curve(part) for part in parts]
    rates, noises = np.array(list(sampled.values())).T
    rows = dict(zip(sampled, _checked(sampled_gaussian_curves(rates, noises, ORDERS)), strict=True))
    return [rows[part] if part in rows else _leaf_curve(part) for part in parts]


@lru_cache(maxsize=1024)
def _leaf_curve(event: Event) -> Floats:
    values = _checked(_compute_leaf(event))
    values.setflags(write=False)
    return values


def _compute_leaf(event: Event) -> Floats:
    if isinstance(event, NonPrivate):
        return np.full_like(ORDERS, np.inf)
    if isinstance(event, Gaussian):
        return ORDERS / (2.0 * event.noise_multiplier**2)
    if isinstance(event, Laplace):
        return _sampled_laplace(1.0, event.noise_multiplier, ORDERS)
    if isinstance(event, ZCDP):
        return event.rho * ORDERS
    if isinstance(event, PoissonSampled):
        inner = event.event
        if isinstance(inner, Laplace):
            return _sampled_laplace(event.rate, inner.noise_multiplier, ORDERS)
        if isinstance(inner, Gaussian):
            return sampled_gaussian_curve(event.rate, inner.noise_multiplier, ORDERS)
        if isinstance(inner, Joint):
            noise, scales = inner.noise_multiplier, inner.laplace_multipliers
            return joint_curve(event.rate, noise, scales, ORDERS)
    if isinstance(event, ApproximateDP):
        if event.delta > 0.0:
            return np.full_like(ORDERS, np.inf)
        return _pure_curve(event.epsilon)
    if isinstance(event, WorstOf | Parallel):
        curves = np.stack([rdp_curve(child) for child in event.events])
        if isinstance(event, WorstOf) and event.weights is not None:
            return _mixture_curve(curves, np.asarray(event.weights))
        return np.asarray(curves.max(axis=0))
    if isinstance(event, PrivateSelection):
        return selection_curve(rdp_curve(event.event), event.runs)
    if isinstance(event, ThresholdSelection):
        # The best of K with K geometric and the score "passed or not", then post-processing.
        return selection_curve(rdp_curve(event.event), Geometric(1.0 / event.stop))
    if isinstance(event, SubsampledTuning):
        tuning, training = rdp_curve(event.tuning), rdp_curve(event.training)
        if event.variant == 1:
            return split_curve(ORDERS, tuning, training, event.rate)
        return amplified_curve(ORDERS, tuning, event.rate) + training
    raise PrivTuneError(f"no Rényi curve is known for {event.type}.")


def _mixture_curve(curves: Floats, weights: Floats) -> Floats:
    """Return the divergence of a public mixture whose component is shown."""
    scaled = (ORDERS - 1.0) * curves + np.log(weights)[:, None]
    return np.asarray(special.logsumexp(scaled, axis=0) / (ORDERS - 1.0)).clip(min=0.0)


def _pure_curve(epsilon: float) -> Floats:
    """Return the exact curve of ε-DP (randomised response is the worst case).

    References:
        Bun and Steinke, arXiv:1605.02065, Proposition 3.3 and its proof.
    """
    log_p = -math.log1p(math.exp(-epsilon))
    log_q = log_p - epsilon
    first = ORDERS * log_p + (1.0 - ORDERS) * log_q
    second = ORDERS * log_q + (1.0 - ORDERS) * log_p
    return np.asarray(np.logaddexp(first, second) / (ORDERS - 1.0)).clip(0.0, epsilon)


def _log_sum(terms: Floats) -> float:
    top = float(terms.max())
    return top + math.log(float(np.exp(terms - top).sum()))


def _sampled_laplace(rate: float, scale: float, orders: Floats) -> Floats:
    """Return the Rényi divergence of the Poisson-sampled Laplace release.

    The outcome space splits into two half lines with constant loss and the unit interval, where
    Gauss-Legendre quadrature is used on pieces no wider than a decay length.
    """
    pieces = max(math.ceil(2.0 * float(min(orders.max(), 512.0)) / scale), 1)
    pieces = min(pieces, 4096)
    nodes, weights = np.polynomial.legendre.leggauss(12)
    edges = np.linspace(0.0, 1.0, pieces + 1)
    x = ((edges[1:] + edges[:-1]) / 2.0)[:, None] + nodes * 0.5 / pieces
    log_weight = np.log(weights * 0.5 / pieces)[None, :]
    log_in = math.log(rate)
    log_out = math.log1p(-rate) if rate < 1.0 else -math.inf

    def log_ratio(shift: Floats | float) -> Floats:
        return np.asarray(np.logaddexp(log_out, log_in + shift))

    inner = log_ratio((2.0 * x - 1.0) / scale)
    log_density = -x / scale - math.log(2.0 * scale) + log_weight
    values = np.empty_like(orders)
    for i, order in enumerate(orders):
        terms = np.concatenate(
            [
                np.atleast_1d(order * log_ratio(-1.0 / scale) + math.log(0.5)),
                np.atleast_1d(order * log_ratio(1.0 / scale) + math.log(0.5) - 1.0 / scale),
                (order * inner + log_density).ravel(),
            ]
        )
        values[i] = _log_sum(terms) / (order - 1.0)
    limit = float(log_ratio(1.0 / scale))
    return np.asarray(np.clip(values, 0.0, limit) + 4e-15 / (orders - 1.0))


def selection_curve(curve: Floats, runs: RunLaw, orders: Floats = ORDERS) -> Floats:
    """Return the Rényi curve of a private selection over a base with this curve.

    References:
        Papernot and Steinke, arXiv:2110.03620, Theorem 2 (truncated negative binomial) and
        Theorem 6 (Poisson). Other laws, and capped ones, have no such theorem: infinite.
    """
    infinite = np.full_like(orders, np.inf)
    if runs.cap is not None or isinstance(runs, Binomial):
        return infinite
    if isinstance(runs, Poisson):
        mean = runs.mean
        if mean < 1.0:
            return infinite
        deltas = np.array([rdp_delta(curve, math.log1p(1.0 / (a - 1.0)), orders) for a in orders])
        values = curve + mean * deltas + math.log(mean) / (orders - 1.0)
    elif isinstance(runs, NegativeBinomial):
        shape = runs.shape_parameter
        extra = (1.0 + shape) * float(
            np.min((1.0 - 1.0 / orders) * curve - runs.log_gamma / orders)
        )
        values = curve + extra + math.log(runs.expected_runs) / (orders - 1.0)
    else:
        return infinite
    # The true divergence grows with the order: a bound at a higher order holds at a lower one.
    return np.asarray(np.minimum.accumulate(values[::-1])[::-1])


def rdp_epsilon(curve: Floats, delta: float, orders: Floats = ORDERS) -> float:
    """Return the smallest ε that any order of the curve gives at this delta.

    References:
        Canonne, Kamath, Steinke, arXiv:2004.00010, Proposition 12; and for tiny curves
        δ <= sqrt(1 - exp(-KL)) (Bretagnolle and Huber).
    """
    with np.errstate(invalid="ignore"):
        if bool((np.sqrt(-np.expm1(-curve)) <= delta).any()):
            return 0.0
        values = curve + np.log1p(-1.0 / orders) - np.log(delta * orders) / (orders - 1.0)
    return max(float(values.min()), 0.0)


def rdp_delta(curve: Floats, epsilon: float, orders: Floats = ORDERS) -> float:
    """Return the smallest δ that any order of the curve gives at this epsilon."""
    with np.errstate(invalid="ignore", over="ignore"):
        log_delta = (orders - 1.0) * (curve - epsilon + np.log1p(-1.0 / orders)) - np.log(orders)
        kl = float(np.sqrt(-np.expm1(-curve)).min())
    return min(math.exp(min(float(log_delta.min()), 0.0)), kl, 1.0)
