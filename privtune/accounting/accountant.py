"""Epsilon and delta of an event: every bound that applies, the smallest wins and is named."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from privtune.accounting._checks import check_delta, check_epsilon
from privtune.accounting.algebra import Adjacency, Event, flatten
from privtune.accounting.bounds import Bounds, add_basic, add_numerical
from privtune.accounting.curves import rdp_delta, rdp_epsilon
from privtune.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from privtune.accounting.instances import instance_epsilon
from privtune.accounting.rdp import composed_curve
from privtune.accounting.registry import entry, under
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.numbers import ceil_digits

_METHODS = ("best", "rdp", "pld")
_MARGIN = 1e-9  # of Rényi divergences; their sums and quadratures are known to about 1e-12


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
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[type[Guarantee], tuple[Any, ...]]:
        """Travel between processes: views of mappings do not."""
        named = (self.epsilon, self.delta, self.method, self.adjacency)
        return Guarantee, (*named, dict(self.bounds), dict(self.reasons))

    def __hash__(self) -> int:
        return hash((self.epsilon, self.delta, self.method, self.adjacency))

    def __str__(self) -> str:
        """One line for people; both numbers are rounded up."""
        return (
            f"(ε = {ceil_digits(self.epsilon, 4):g}, δ = {ceil_digits(self.delta, 4):g}) "
            f"under {self.adjacency}, by {self.method}"
        )

    def __repr__(self) -> str:
        return (
            f"Guarantee(epsilon={self.epsilon!r}, delta={self.delta!r}, method={self.method!r}, "
            f"adjacency={self.adjacency.value!r}, bounds={dict(self.bounds)!r})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the guarantee as JSON-ready data; an infinite number becomes the text "inf".

        A bound that was not computed stands among the bounds with its reason.
        """

        def number(value: float) -> float | str:
            return value if math.isfinite(value) else "inf"

        return {
            "epsilon": number(self.epsilon),
            "delta": number(self.delta),
            "method": self.method,
            "adjacency": self.adjacency.value,
            "bounds": {**{k: number(v) for k, v in self.bounds.items()}, **self.reasons},
        }


def epsilon(
    event: Event,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    method: str = "best",
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
