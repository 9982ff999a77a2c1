"""Subsampled tuning: tune on a Poisson subset, then train once (Koskela and Kulkarni 2023).

Exact profiles from the dominating pairs `(P₁, Q₁)` of the tuning and `(P₂, Q₂)` of the training,
and Rényi bounds as a cross-check. Proofs are in `accounting/README.md`.

References:
    Koskela and Kulkarni, arXiv:2301.11989; Zhu and Wang, "Poisson subsampled Rényi differential
    privacy", ICML 2019, Theorem 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting.pmf import GridError, LossPmf, inner, lattice_cells
from privtune.accounting.profiles import from_profile

Floats = NDArray[np.float64]
Curve = Callable[[Floats], Floats]
_TOP_DELTA = 1e-16
_MAX_ORDER = 256
_MAX_CELLS = 2**22
_MOST_TERMS = 3e7  # of a tabulated profile, over all its points: a few seconds
_AROUND = 1000  # terms that take as long as what is around them, at each point


def amplified(remove: LossPmf, add: LossPmf, rate: float, step: float) -> tuple[LossPmf, LossPmf]:
    """Return the pair (remove, add) of a mechanism on a Poisson subset, from its own pair.

    With the record removed `(P, Q)` becomes `((1-q) Q + q P, Q)`, a loss l becomes
    `log(1 - q + q e^l)`; with it added `(Q, P)` becomes `(Q, (1-q) Q + q P)`. Every atom is moved,
    and spread on two lattice points so that both of its masses are kept.

    Args:
        remove: Pair of the mechanism, the record removed.
        add: The same, the record added.
        rate: q, in (0, 1).
        step: Lattice step of the result.

    Raises:
        GridError: More than 2^22 lattice points would be needed.

    References:
        Zhu, Dong, Wang, arXiv:2106.08567, Theorem 11.
    """
    log_out = math.log1p(-rate)
    # Removed: the Q-mass where P has none gets the smallest loss, log(1-q).
    q_mass = np.exp(remove.log_masses - remove.losses)
    lost = max(1.0 - float(q_mass.sum()), 0.0)
    losses = np.append(_mixed_loss(remove.losses, rate), log_out)
    masses = np.append((1.0 - rate) * q_mass + rate * remove.masses, (1.0 - rate) * lost)
    removed = _on_lattice(losses, masses, step, rate * remove.infinite)
    # Added: what had an infinite loss gets the largest, -log(1-q).
    losses = np.append(-_mixed_loss(-add.losses, rate), -log_out)
    added = _on_lattice(losses, np.append(add.masses, max(add.infinite, 0.0)), step, 0.0)
    return removed, added


def _mixed_loss(losses: Floats, rate: float) -> Floats:
    """Return `log(1 - q + q e^l)`."""
    small = np.log1p(rate * np.expm1(np.minimum(losses, 600.0)))
    return np.asarray(np.where(losses > 600.0, losses + math.log(rate), small))


def _on_lattice(losses: Floats, masses: Floats, step: float, infinite: float) -> LossPmf:
    """Spread atoms on their lattice neighbours so that the P- and the Q-mass of each is kept."""
    place = np.floor(losses / step)
    first = float(place.min())
    size = int(place.max() - first) + 2
    if size > _MAX_CELLS:
        raise GridError(f"one release needs {size} lattice cells")
    rest = np.clip(losses - place * step, 0.0, step)
    raised = masses * (np.expm1(-rest) / math.expm1(-step))
    index = (place - first).astype(np.int64)
    spread = np.asarray(np.bincount(index, masses - raised, size), np.float64)
    spread += np.bincount(index + 1, raised, size)
    return LossPmf(step, int(first), spread, max(infinite, 0.0))


def split_delta(tuning: LossPmf, training: LossPmf, rate: float, epsilon: float) -> float:
    """Return `E[(q a + (1-q) b - e^ε)₊]`: the record is tuned on, or trained on, never both.

    Args:
        tuning: Pair of the tuning, the record removed: `a` is its likelihood ratio under Q₁.
        training: Pair of the training, the record removed: `b`.
        rate: q, the probability that the record is tuned on.
        epsilon: Any real number.
    """
    losses = tuning.losses
    q_mass = np.exp(np.minimum(tuning.log_masses - losses, 0.0))
    lost = max(1.0 - float(q_mass.sum()), 0.0)  # Q₁-mass at a = 0
    losses = np.append(losses, -np.inf)
    q_mass = np.append(q_mass, lost)
    # Everything over e^ε, so that nothing overflows: need = 1 - q a / e^ε.
    need = 1.0 - rate * np.exp(np.minimum(losses - epsilon, 700.0))
    wanted = need > 0.0
    value = rate * tuning.infinite
    point = epsilon + np.log(need[wanted]) - math.log1p(-rate)
    value += inner(q_mass[wanted], (1.0 - rate) * training.delta(point))
    # Where q a alone exceeds e^ε the positive part is not needed: E[q a + (1-q) b - e^ε].
    sure = ~wanted
    scaled = np.where(sure[:-1], tuning.masses, 0.0)
    value += float(scaled.sum()) * rate
    value += float(q_mass[sure].sum()) * ((1.0 - rate) - math.exp(min(epsilon, 700.0)))
    return min(max(value, 0.0), 1.0)


def split_reverse_delta(tuning: LossPmf, training: LossPmf, rate: float, epsilon: float) -> float:
    """Return `E[(1 - e^ε (q a + (1-q) b))₊]`, from the pairs with the record added."""
    weights = np.append(tuning.masses, tuning.infinite)
    ratio = np.append(np.exp(np.minimum(epsilon - tuning.losses, 700.0)), 0.0)
    rest = 1.0 - rate * ratio
    kept = rest > 0.0
    point = epsilon + math.log1p(-rate) - np.log(rest[kept])
    value = inner(weights[kept] * rest[kept], training.delta(point))
    return min(max(value, 0.0), 1.0)


def tabulate(
    tuning: tuple[LossPmf, LossPmf], training: tuple[LossPmf, LossPmf], rate: float, step: float
) -> tuple[LossPmf, LossPmf]:
    """Return the dominating pair (remove, add) of variant 1 on a lattice.

    Args:
        tuning: Pair of the tuning, (remove, add).
        training: Pair of the training, (remove, add).
        rate: Probability that a record is tuned on.
        step: Lattice step of the result; it gets wider, as is safe, where rare and large losses
            would make that a lattice of millions of points.
    """

    def top(first: LossPmf, second: LossPmf) -> float:
        found = max(first.epsilon(_TOP_DELTA), second.epsilon(_TOP_DELTA))
        if math.isfinite(found):
            return found
        return max(float(first.losses[-1]), float(second.losses[-1]))

    tops = [top(first, second) for first, second in zip(tuning, training, strict=True)]
    terms = [t / step * (pmf.masses.size + _AROUND) for t, pmf in zip(tops, tuning, strict=True)]
    step *= max(sum(terms) / _MOST_TERMS, 1.0)
    up, down = (np.arange(0.0, lattice_cells(t, step) + 2) * step for t in tops)
    high = np.array([split_delta(tuning[0], training[0], rate, float(e)) for e in up])
    low = np.array([split_reverse_delta(tuning[1], training[1], rate, float(e)) for e in down])
    return (
        from_profile(lambda _: high, lambda _: low, step, 1 - low.size, high.size - 1),
        from_profile(lambda _: low, lambda _: high, step, 1 - high.size, low.size - 1),
    )


def interpolated(orders: Floats, values: Floats) -> Curve:
    """Return the curve between known orders: `(α-1) D_α` is convex, so chords lie above it."""
    grid = np.concatenate([[1.0], orders])
    weighted = np.concatenate([[0.0], (orders - 1.0) * values])

    def curve(wanted: Floats) -> Floats:
        points = np.asarray(wanted, dtype=np.float64)
        finite = np.isfinite(weighted)
        last = float(grid[finite][-1])
        found = np.interp(points, grid[finite], weighted[finite])
        with np.errstate(invalid="ignore", divide="ignore"):
            value = np.where(points > 1.0, found / (points - 1.0), 0.0)
        return np.where(points > last, np.inf, value)

    return curve


def _whole_orders(orders: Floats, at_whole: Floats) -> Floats:
    """Return values at `orders` from those at 2, 3, ..., by the same chords; infinite beyond."""
    whole = np.arange(2.0, at_whole.size + 2.0)
    return interpolated(whole, at_whole)(orders)


def _log_choose(n: Floats, k: Floats) -> Floats:
    return np.asarray(
        sp.special.gammaln(n + 1.0) - sp.special.gammaln(k + 1.0) - sp.special.gammaln(n - k + 1.0)
    )


def amplified_curve(orders: Floats, values: Floats, rate: float) -> Floats:
    """Return the Rényi curve of any mechanism on a Poisson subset, both directions.

    References:
        Zhu and Wang 2019, Theorem 6, with its factor 3 (a tuner is no Gaussian).
    """
    top = int(min(orders[np.isfinite(values)].max(initial=1.0), _MAX_ORDER))
    if top < 2:
        return np.full_like(orders, np.inf)
    base = interpolated(orders, values)(np.arange(0.0, top + 1.0).clip(min=1.0))
    order, k = _binomial_terms(top)
    with np.errstate(invalid="ignore"):
        terms = _log_choose(order, k) + k * math.log(rate) + (order - k) * math.log1p(-rate)
        terms += (k - 1.0) * base + np.where(k > 2.0, math.log(3.0), 0.0)
    whole = order[:, 0]
    terms[:, 0] = (whole - 1.0) * math.log1p(-rate) + np.log1p((whole - 1.0) * rate)  # k of 0 and 1
    terms[:, 1] = -np.inf
    return _whole_orders(orders, _from_terms(order, k, terms))


def _binomial_terms(top: int) -> tuple[Floats, Floats]:
    """Return the orders 2, 3, ..., a column, and k = 0, 1, ..., a row."""
    return np.arange(2.0, top + 1.0)[:, None], np.arange(0.0, top + 1.0)[None, :]


def _from_terms(order: Floats, k: Floats, terms: Floats) -> Floats:
    """Return divergences from the logarithms of the terms of their sums, those of k up to the order."""
    sums = sp.special.logsumexp(np.where(k <= order, terms, -np.inf), axis=1)
    return np.asarray(np.maximum(sums / (order[:, 0] - 1.0), 0.0))


def split_curve(orders: Floats, tuning: Floats, training: Floats, rate: float) -> Floats:
    """Return the Rényi curve of variant 1: the larger of its two directions.

    References:
        Koskela and Kulkarni, arXiv:2301.11989, Theorem 3, for the removal direction; the other one
        follows from the inequality of the arithmetic and the geometric mean.
    """
    first, second = interpolated(orders, tuning), interpolated(orders, training)
    reverse = np.zeros_like(orders)
    for curve, share in ((first, rate), (second, 1.0 - rate)):
        reverse += share * curve(1.0 + share * (orders - 1.0))
    finite = np.isfinite(tuning) & np.isfinite(training)
    top = int(min(orders[finite].max(initial=1.0), _MAX_ORDER))
    if top < 2:
        return np.full_like(orders, np.inf)
    whole = np.arange(0.0, top + 1.0).clip(min=1.0)
    one, two = first(whole), second(whole)
    order, k = _binomial_terms(top)
    rest = np.maximum(order - k, 0.0)
    with np.errstate(invalid="ignore"):
        terms = _log_choose(order, k) + rest * math.log(rate) + k * math.log1p(-rate)
        terms += np.maximum(rest - 1.0, 0.0) * one[rest.astype(np.int64)]
        terms += np.maximum(k - 1.0, 0.0) * two
    return np.maximum(_whole_orders(orders, _from_terms(order, k, terms)), reverse)
