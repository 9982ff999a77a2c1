"""Epsilon and delta of an event: every bound that applies is computed, the smallest wins and is named."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np

from privtune.accounting._checks import check_delta, check_epsilon, json_number
from privtune.accounting.curves import rdp_delta, rdp_epsilon
from privtune.accounting.events import Adjacency, Event, PrivateSelection, Repeated, flatten
from privtune.accounting.instances import instance_epsilon
from privtune.accounting.pairs import Gains
from privtune.accounting.pld import default_step, event_pair, fine_pair, no_pair, tuners
from privtune.accounting.pmf import GridError
from privtune.accounting.rdp import (
    composed_curve,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    rdp_curve,
)
from privtune.accounting.rearrangement import Rearranged
from privtune.accounting.registry import Choice, entry, under
from privtune.accounting.runs import NegativeBinomial
from privtune.accounting.selection import Tuner, profile_shift
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.numbers import ceil_digits

_TOLERANCE = {"epsilon": 1e-3, "delta": 1e-2}
_MANY = 64  # different sampled Gaussians
_FEW_RUNS, _MOST_RUNS, _MOST_STEPS = 64, 10_000, 10**9  # of the composition of all runs
_MAX_FINENESS = 16.0
_FINE = 2.0  # fineness of the lattice of one bound among several
_ATOMS = 2048  # of the lattice on which the rearrangement is computed
# No smaller and no larger δ is asked for, but by the filter's tables, hundreds of times.
_SMALL_DELTA, _LARGE_DELTA = 1e-15, 1e-3
_MARGIN = 1e-9  # relative: sums of masses and of Rényi divergences are known to about 1e-12
_ENVELOPE = Gains(learns=False)


def choice_of(parts: dict[Event, int]) -> Choice | None:
    """Return the choice that an event consists of, a best of K say; None for anything composed."""
    if list(parts.values()) != [1]:
        return None
    single = next(iter(parts))
    return entry(single).choice(single)


class Bounds:
    """The bounds on ε or δ that could be computed, by name, and why the others could not."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, compute: Callable[[], float | None]) -> float:
        """Compute a bound and return it; infinity and a reason for what cannot be computed."""
        try:
            value = compute()
        except GridError as error:
            self.reasons[name] = f"beyond the lattice: {str(error).rstrip('.')}"
            return math.inf
        except ArithmeticError:
            self.reasons[name] = "beyond the lattice: its numbers leave their range"
            return math.inf
        if value is None:
            return math.inf
        if math.isnan(value):
            raise PrivTuneError(f"the bound {name} came out as no number; nothing is reported.")
        self.values[name] = value
        return value


def add_basic(bounds: Bounds, parts: dict[Event, int], wanted: str, target: float) -> None:
    """Add the bound Σ ε at Σ δ, where every part is (ε, δ)-DP (Dwork and Roth 2014, Theorem 3.16)."""
    spent, failing = 0.0, 0.0
    for part, count in parts.items():
        pure = entry(part).pure(part)
        if pure is None:
            return
        spent += count * pure[0]
        failing += count * pure[1]
    spent, failing = spent * (1.0 + 1e-12), failing * (1.0 + 1e-12)
    # Of a sum of ε no other δ is known, so it answers only where Σ δ, or Σ ε, is within what was asked.
    if wanted == "epsilon" and failing <= target:
        bounds.values["basic"] = spent
    elif wanted == "delta" and spent <= target:
        bounds.values["basic"] = min(failing, 1.0)


def add_numerical(bounds: Bounds, parts: dict[Event, int], wanted: str, target: float) -> None:
    """Add the bounds that are computed from dominating pairs: of compositions, of best of K."""
    reason = no_pair(parts)
    choice = choice_of(parts)
    if reason:
        bounds.reasons["pld"] = reason
    elif choice is None:
        bounds.add("pld", lambda: _composed(parts, wanted, target))
    elif choice.threshold:
        tuned = next(iter(parts))
        bounds.add("threshold", lambda: _stable(lambda f: _worse(tuners(tuned, f), wanted, target)))
        bounds.add("envelope", lambda: _envelope(choice.selection, wanted, target))
    else:
        _add_selection(bounds, choice.selection, wanted, target)


def _composed(
    parts: dict[Event, int], wanted: str, target: float, gains: Gains | None = None
) -> float:
    level = target if wanted == "epsilon" else 1e-6

    def composed(fineness: float) -> float:
        pair = event_pair(parts, default_step(parts, level, fineness, gains=gains), gains=gains)
        return _worse((pair.remove, pair.add), wanted, target)

    if sum(entry(part).sampled_gaussian(part) is not None for part in parts) > _MANY:
        # One lattice is enough for what takes seconds.
        return composed(1.0) * (1.0 + _MARGIN)
    return _stable(composed, _TOLERANCE[wanted])


def _add_selection(bounds: Bounds, event: PrivateSelection, wanted: str, target: float) -> None:
    runs = event.runs
    envelope = bounds.add("envelope", lambda: _envelope(event, wanted, target))
    if envelope == 0.0:
        return
    level = target if wanted == "epsilon" else envelope

    def rearranged() -> float | None:
        if not _SMALL_DELTA < level <= _LARGE_DELTA:
            return None
        depth = _rearranged(event, wanted, target)
        return depth if depth is not None and depth < envelope else None  # a coarser lattice

    bounds.add("rearrangement", rearranged)
    if isinstance(runs, NegativeBinomial) and runs.cap is None and not runs.sure_runs:
        bounds.add("profile", lambda: _profile(event, runs, wanted, target))
        if runs.shape_parameter == 1.0 and wanted == "epsilon":
            bounds.add("liu-talwar", lambda: _liu_talwar(event.event, runs.gamma, target))
    most = runs.most
    found = any(math.isfinite(value) for value in bounds.values.values())
    if most is None or most > (_FEW_RUNS if found else _MOST_RUNS):
        return
    # Releasing every run is a larger release.
    parts = flatten(Repeated(most, event.event))
    few = max(parts.values(), default=1) <= _MOST_STEPS
    if few and choice_of(parts) is None and not no_pair(parts):
        bounds.add("composition", lambda: _composed(parts, wanted, target))


def _profile(event: PrivateSelection, runs: NegativeBinomial, wanted: str, target: float) -> float:
    pair = fine_pair(event.event)
    mean = runs.expected_runs
    values = []
    for forward, backward in ((pair.remove, pair.add), (pair.add, pair.remove)):
        shift = profile_shift(backward, runs)
        if wanted == "epsilon":
            values.append(forward.epsilon(target / mean) + shift)
        else:
            values.append(min(mean * float(forward.delta(target - shift)), 1.0))
    return max(values)


def _envelope(event: PrivateSelection, wanted: str, target: float) -> float:
    return _stable(
        lambda fineness: _worse(tuners(event, fineness), wanted, target), _TOLERANCE[wanted]
    )


def _rearranged(event: PrivateSelection, wanted: str, target: float) -> float | None:
    """Return the rearrangement bound on a best of K, worse direction; None where the envelope is as good."""
    found = [
        (bound.tuner.epsilon(target) if wanted == "epsilon" else bound.tuner.delta(target), bound)
        for bound in _rearranged_bounds(event)
    ]
    worst, helped = 0.0, False
    # The dearer direction first: of the other one it is often enough to know that it is cheaper.
    for start, bound in sorted(found, key=lambda one: one[0], reverse=True):
        matters = math.isfinite(start) and bound.matters(start if wanted == "epsilon" else target)
        helped = helped or matters
        if start <= worst or not matters:
            worst = max(worst, start)
        elif wanted == "epsilon":
            worst = max(worst, bound.epsilon(target, start, worst))
        else:
            worst = max(worst, bound.delta(target, worst))
    return worst * (1.0 + _MARGIN) if helped else None


@lru_cache(maxsize=16)
def _rearranged_bounds(event: PrivateSelection) -> tuple[Rearranged, ...]:
    """Return a best of K's rearrangement bounds, one a direction, on a lattice of 2,048 atoms at most."""
    remove, add = cast("tuple[Tuner, Tuner]", tuners(event, _FINE))
    bounds = []
    for fine in (remove,) if add is remove else (remove, add):
        base = fine.base.coarsen(math.ceil(fine.base.masses.size / _ATOMS))
        bounds.append(Rearranged(fine if base is fine.base else Tuner(base, event.runs)))
    return tuple(bounds)


def _liu_talwar(base: Event, gamma: float, delta: float) -> float:
    """Return Liu and Talwar's ε for random stopping over an (ε₁, δ₁)-DP run, a baseline that never wins."""
    # Liu, Talwar, arXiv:1811.07971, Section 3: `(3 ε₁ + 3 sqrt(2 δ₁), sqrt(2 δ₁) T + δ₂)`, T = log(1/δ₂)/γ.
    # With s = sqrt(2 δ₁)/γ the best δ₂ is s, and δ is s (1 + log(1/s)).
    good, bad = -300.0, -1.0  # log s; at the end δ is 2/e
    for _ in range(50):
        middle = 0.5 * (good + bad)
        fits = math.exp(middle) * (1.0 - middle) <= delta
        good, bad = (middle, bad) if fits else (good, middle)
    root = gamma * math.exp(good)
    return 3.0 * rdp_epsilon(rdp_curve(base), 0.5 * root * root) + 3.0 * root


def quick_epsilon(
    event: Event, delta: float, near: float, fineness: float, gains: Gains | None = None
) -> float | None:
    """Estimate ε, about `near`, on one lattice, for searches; None where no lattice gives the answer."""
    # It bounds nothing: a smooth multiple of the reported ε, in a fraction of the time.
    parts = flatten(event)
    if not parts or gaussian_mu(parts) is not None or no_pair(parts):
        return None
    try:
        if choice_of(parts) is not None:
            return _worse(tuners(next(iter(parts)), fineness, gains=_ENVELOPE), "epsilon", delta)
        if gains is not None and any(entry(part).own_lattice for part in parts):
            return _composed(parts, "epsilon", delta, gains)
        step = default_step(parts, delta, fineness, near=near, gains=_ENVELOPE)
        pair = event_pair(parts, step, gains=_ENVELOPE)
        return _worse((pair.remove, pair.add), "epsilon", delta)
    except GridError:
        return None


def _worse(directions: tuple[Any, Any], wanted: str, target: float) -> float:
    """Return ε or δ in the worse of the two directions."""
    if wanted == "epsilon":
        return max(float(direction.epsilon(target)) for direction in directions)
    return max(float(direction.delta(target)) for direction in directions)


def _stable(compute: Callable[[float], float], tolerance: float = 1e-3) -> float:
    """Return a bound on a lattice so fine that halving its step moves it by less than a tolerance."""
    fineness, value, moved = 1.0, compute(1.0), True
    while moved and fineness < _MAX_FINENESS:
        fineness *= 2.0
        try:
            finer = compute(fineness)
        except GridError:
            break
        moved = math.isfinite(finer) and abs(finer - value) > tolerance * finer
        value = min(value, finer)  # each lattice gives a bound: the smaller one holds
    return value * (1.0 + _MARGIN)


_METHODS = ("best", "rdp", "pld")


@dataclass(frozen=True)
class Guarantee:
    """An answer: `(epsilon, delta)`, which bound gave it, under which adjacency.

    Args:
        epsilon: At least 0; infinite when nothing is guaranteed.
        delta: In [0, 1].
        method: The bound that won.
        adjacency: The relation of neighbouring datasets.
        bounds: Every bound that was computed, by name, in the quantity that was asked for.
        reasons: Why a bound that may apply was not computed, by name.

    Raises:
        PrivTuneError: A number came out as NaN or negative: none is reported.

    Example:
        >>> print(Guarantee(1.93741, 1e-5, "pld", Adjacency.ADD_REMOVE))
        (ε = 1.938, δ = 1e-05) under add-remove, by pld
        >>> Guarantee(math.inf, 1e-5, "rdp", Adjacency.ADD_REMOVE).to_dict()["epsilon"]
        'inf'
    """

    epsilon: float
    delta: float
    method: str
    adjacency: Adjacency
    bounds: Mapping[str, float] = field(default_factory=dict, compare=False)
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if math.isnan(value) or value < 0.0:
                raise PrivTuneError(f"{name} came out as {value}; no number is reported.")
        for name in ("bounds", "reasons"):
            object.__setattr__(self, name, dict(getattr(self, name)))

    def __str__(self) -> str:
        """One line for people; both numbers are rounded up."""
        return (
            f"(ε = {ceil_digits(self.epsilon, 4):g}, δ = {ceil_digits(self.delta, 4):g}) "
            f"under {self.adjacency}, by {self.method}"
        )

    def __repr__(self) -> str:
        return (
            f"Guarantee(epsilon={self.epsilon!r}, delta={self.delta!r}, method={self.method!r}, "
            f"adjacency={self.adjacency.value!r}, bounds={self.bounds!r})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the guarantee as JSON-ready data; an infinite number becomes the text "inf".

        A bound that was not computed stands among the bounds with its reason.
        """
        return {
            "epsilon": json_number(self.epsilon),
            "delta": json_number(self.delta),
            "method": self.method,
            "adjacency": self.adjacency.value,
            "bounds": {**{k: json_number(v) for k, v in self.bounds.items()}, **self.reasons},
        }


def epsilon(
    event: Event, delta: float, *, adjacency: Adjacency = Adjacency.ADD_REMOVE, method: str = "best"
) -> Guarantee:
    """Return the smallest ε for which the event is known to be `(ε, delta)`-DP.

    Args:
        event: What touched the data.
        delta: In (0, 1).
        adjacency: The relation of neighbouring datasets.
        method: "rdp", "pld", or "best" for the smallest of all bounds that apply.

    Returns:
        The guarantee; `bounds` holds ε by every bound that was computed.

    Raises:
        InvalidInputError: A value out of its range, or an adjacency that the event does not know.

    Guarantee:
        Every number is an upper bound, or infinite.

    Example:
        >>> from privtune.accounting import Gaussian, PoissonSampled, Repeated
        >>> training = Repeated(1000, PoissonSampled(0.01, Gaussian(1.0)))
        >>> answer = epsilon(training, 1e-5)
        >>> print(round(answer.epsilon, 2), "by", answer.method, "under", answer.adjacency)
        1.83 by pld under add-remove
        >>> answer.epsilon < epsilon(training, 1e-5, method="rdp").epsilon
        True
    """
    target = check_delta(delta)
    return _answer(event, "epsilon", target, _adjacency(adjacency), _method(method))


def delta(
    event: Event,
    epsilon: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    method: str = "best",
) -> Guarantee:
    """Return the smallest δ for which the event is known to be `(epsilon, δ)`-DP.

    Args:
        event: What touched the data.
        epsilon: At least 0.
        adjacency: The relation of neighbouring datasets.
        method: "rdp", "pld", or "best" for the smallest of all bounds that apply.

    Returns:
        The guarantee; `bounds` holds δ by every bound that was computed.

    Raises:
        InvalidInputError: A value out of its range, or an adjacency that the event does not know.

    Guarantee:
        Every number is an upper bound; 1 says that nothing is known.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> f"{delta(Gaussian(4.0), 1.0).delta:.2e}"
        '2.92e-06'
    """
    target = check_epsilon(epsilon)
    return _answer(event, "delta", target, _adjacency(adjacency), _method(method))


def _adjacency(value: str) -> Adjacency:
    try:
        return Adjacency(value)
    except ValueError:
        allowed = "must be " + " or ".join(member.value for member in Adjacency)
        raise InvalidInputError("adjacency", value, allowed) from None


def _method(value: object) -> str:
    if value not in _METHODS:
        raise InvalidInputError("method", value, f"must be one of {', '.join(_METHODS)}")
    return str(value)


@lru_cache(maxsize=4096)
def _answer(
    event: Event, wanted: str, target: float, adjacency: Adjacency, method: str
) -> Guarantee:
    # Python allows a thousand calls inside each other, and a level of nesting takes some twenty.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1_000 + 50 * event.depth))
    parts = flatten(under(event, adjacency))
    nothing = math.inf if wanted == "epsilon" else 1.0
    bounds = Bounds()
    if not parts:
        bounds.values["exact"] = 0.0
    elif not all(entry(part).private for part in parts):
        bounds.values["non_private"] = nothing
    else:
        with np.errstate(all="ignore"):  # what leaves its range is no bound, and no warning
            _add_bounds(bounds, parts, wanted, target, method)
        if wanted == "delta":
            # Exponentials underflow: a δ of zero is a claim that sums of ε alone can make.
            for name in bounds.values.keys() - {"basic"}:
                bounds.values[name] = max(bounds.values[name], sys.float_info.min)
    winner = min(bounds.values, key=lambda name: bounds.values[name], default="none")
    value = bounds.values.get(winner, nothing)
    eps, dlt = (value, target) if wanted == "epsilon" else (target, min(value, 1.0))
    return Guarantee(eps, dlt, winner, adjacency, bounds.values, bounds.reasons)


def _add_bounds(
    bounds: Bounds, parts: dict[Event, int], wanted: str, target: float, method: str
) -> None:
    if method in ("best", "rdp"):
        curve = composed_curve(parts) * (1.0 + _MARGIN)
        convert = rdp_epsilon if wanted == "epsilon" else rdp_delta
        rdp = bounds.add("rdp", lambda: convert(curve, target) * (1.0 + _MARGIN))
        if rdp == 0.0 or method == "rdp":
            if method == "best" and wanted == "delta":
                add_basic(bounds, parts, wanted, target)
            return
    mu = gaussian_mu(parts)
    if mu is not None:
        answer = gaussian_epsilon if wanted == "epsilon" else gaussian_delta
        bounds.add("gdp", lambda: answer(mu, target))
        return
    if method == "best":
        add_basic(bounds, parts, wanted, target)
    add_numerical(bounds, parts, wanted, target)


def lower_bound(
    event: Event, delta: float, *, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> float:
    """Return an ε that no valid bound for this event can fall below.

    It is the cost of an explicit instance: mechanisms that fit the event, with finitely many
    outcomes of known masses, composed without transforms and rounded down.

    Args:
        event: What touched the data.
        delta: In (0, 1).
        adjacency: The relation of neighbouring datasets.

    Returns:
        The lower bound, 0 if nothing is known; infinite where nothing is guaranteed.

    Example:
        >>> from privtune.accounting import Gaussian, Geometric, PrivateSelection
        >>> best = PrivateSelection(Gaussian(4.0), Geometric(mean=10))
        >>> 0.8 < lower_bound(best, 1e-5) / epsilon(best, 1e-5).epsilon <= 1  # how tight the account is
        True
    """
    level = check_delta(delta)
    accounted = under(event, _adjacency(adjacency))
    if not all(entry(part).private for part in flatten(accounted)):
        return math.inf
    return instance_epsilon(accounted, level)


def group_privacy(event: Event, delta: float, *, method: str = "best") -> Guarantee:
    """Convert an add-remove guarantee to replace-one: a replacement is a removal and an addition.

    An event that is `(ε, δ)`-DP under add-remove is `(2ε, (1 + e^ε) δ)`-DP under replace-one. The
    split of ε and δ is chosen so that the result meets `delta`.

    Args:
        event: Any event with an add-remove account.
        delta: The δ under replace-one, in (0, 1).
        method: As in `epsilon`.

    Returns:
        The guarantee under replace-one; its method names the conversion.

    Example:
        >>> from privtune.accounting import Gaussian
        >>> event = Gaussian(4.0)
        >>> replaced = group_privacy(event, 1e-5).epsilon
        >>> replaced > epsilon(event, 1e-5, adjacency=Adjacency.REPLACE_ONE).epsilon  # exact, where known
        True
    """
    level = check_delta(delta)
    kind = _method(method)
    # P(S) <= e^ε Q(S) + δ' and Q(S) <= e^ε R(S) + δ' give P(S) <= e^2ε R(S) + (1 + e^ε) δ'. The largest δ'
    # with (1 + e^ε(δ')) δ' <= level gives the smallest ε; it is searched on a logarithmic scale.
    low, high = math.log(level) - 700.0, math.log(level / 2.0)
    best: Guarantee | None = None
    for _ in range(24):
        # The first try is the fixed point of ε -> ε(δ/(1 + e^ε)); then bisection.
        middle = 0.5 * (low + high)
        if best is None and low < math.log(level) - 600.0:
            guess = epsilon(event, level / 2.0, method=kind).epsilon
            if not math.isfinite(guess) or guess > 300.0:
                break
            middle = math.log(level) - float(np.logaddexp(0.0, guess * 1.2 + 0.1))
        answer = epsilon(event, math.exp(middle), method=kind)
        if middle + float(np.logaddexp(0.0, answer.epsilon)) <= math.log(level):
            best, low = answer, middle
        else:
            high = middle
        if best is not None and high - low < 1e-3:
            break
    if best is None:
        return Guarantee(math.inf, level, "none", Adjacency.REPLACE_ONE, {})
    value = 2.0 * best.epsilon
    name = f"group privacy of {best.method}"
    return Guarantee(value, level, name, Adjacency.REPLACE_ONE, {name: value})
