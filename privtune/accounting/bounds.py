"""The bounds behind an answer that need dominating pairs, or nothing but sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

from privtune.accounting.algebra import Event, flatten
from privtune.accounting.choices import PrivateSelection
from privtune.accounting.curves import rdp_epsilon
from privtune.accounting.events import Repeated
from privtune.accounting.gaussian import gaussian_mu
from privtune.accounting.mechanisms.entry import Choice
from privtune.accounting.pairs import Gains
from privtune.accounting.pld import default_step, event_pair, fine_pair, no_pair, tuners
from privtune.accounting.pmf import GridError
from privtune.accounting.rdp import rdp_curve
from privtune.accounting.rearrangement import Rearranged
from privtune.accounting.registry import entry
from privtune.accounting.runs import NegativeBinomial
from privtune.accounting.selection import Tuner, profile_shift
from privtune.errors import PrivTuneError

_TOLERANCE = {"epsilon": 1e-3, "delta": 1e-2}
_MANY = 64  # different sampled Gaussians
_FEW_RUNS, _MOST_RUNS, _MOST_STEPS = 64, 10_000, 10**9  # of the composition of all runs
_MAX_FINENESS = 16.0
_FINE = 2.0  # fineness of the lattice of one bound among several
_ATOMS = 2048  # of the lattice on which the rearrangement is computed
# No smaller and no larger δ is asked for, but by the filter's tables, hundreds of times.
_SMALL_DELTA, _LARGE_DELTA = 1e-15, 1e-3
_MARGIN = 1e-9  # sums of masses are known to about 1e-13
_ENVELOPE = Gains(learns=False)


def choice_of(parts: dict[Event, int]) -> Choice | None:
    """Return what is chosen from, of an event that composes nothing and is such a choice."""
    if list(parts.values()) != [1]:
        return None
    single = next(iter(parts))
    return entry(single).choice(single)


class Bounds:
    """The bounds that were found, by name, and why others were not."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, compute: Callable[[], float | None]) -> float:
        """Compute a bound; what cannot be computed leaves its reason. Return it, else infinity.

        Raises:
            PrivTuneError: It came out as no number. That is an error, not the lack of a bound.
        """
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
    """Add up ε and δ where every part has them: a few coarse releases need no lattice.

    References:
        Dwork and Roth 2014, Theorem 3.16.
    """
    spent, failing = 0.0, 0.0
    for part, count in parts.items():
        pure = entry(part).pure(part)
        if pure is None:
            return
        spent += count * pure[0]
        failing += count * pure[1]
    spent, failing = spent * (1.0 + 1e-12), failing * (1.0 + 1e-12)
    if wanted == "epsilon" and failing <= target:
        bounds.values["basic"] = spent
    elif wanted == "delta" and spent <= target:
        bounds.values["basic"] = min(failing, 1.0)


def add_numerical(bounds: Bounds, parts: dict[Event, int], wanted: str, target: float) -> None:
    """Add every bound that needs a dominating pair.

    Args:
        bounds: What was found so far.
        parts: What `flatten` returns, at least one part.
        wanted: "epsilon" or "delta".
        target: The other of the two.
    """
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
    if max(parts.values(), default=1) <= _MOST_STEPS and not no_pair(parts):
        bounds.add("composition", lambda: _every_run(parts, wanted, target))


def _every_run(parts: dict[Event, int], wanted: str, target: float) -> float | None:
    """Return the bound by the composition of all runs, if that is no choice itself."""
    return None if choice_of(parts) is not None else _composed(parts, wanted, target)


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
        lambda fineness: _worse(tuners(event, fineness), wanted, target),
        _TOLERANCE[wanted],
    )


def _rearranged(event: PrivateSelection, wanted: str, target: float) -> float | None:
    """Return the rearrangement bound in the worse direction, None where it is the envelope."""
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
    """Return the bound in both directions, or one for both, on a lattice of few atoms."""
    remove, add = cast("tuple[Tuner, Tuner]", tuners(event, _FINE))
    bounds = []
    for fine in (remove,) if add is remove else (remove, add):
        base = fine.base.coarsen(math.ceil(fine.base.masses.size / _ATOMS))
        bounds.append(Rearranged(fine if base is fine.base else Tuner(base, event.runs)))
    return tuple(bounds)


def _liu_talwar(base: Event, gamma: float, delta: float) -> float:
    """Return ε by the approximate-DP theorem for random stopping, a baseline that never wins.

    A base that is `(ε₁, δ₁)`-DP gives `(3 ε₁ + 3 sqrt(2 δ₁), sqrt(2 δ₁) T + δ₂)` for every
    `δ₂ > 0`, with `T = log(1/δ₂)/γ`. With `s = sqrt(2 δ₁)/γ` the best δ₂ is s, and δ is
    `s (1 + log(1/s))`. The constants are as the theorem is cited; that they are valid follows from
    the profile bound, as `accounting/README.md` shows.

    References:
        Liu, Talwar, arXiv:1811.07971, Section 3; Koskela, Redberg, Wang, arXiv:2402.06701.
    """
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
    """Return ε, about `near`, on one lattice, for searches alone; None where another bound counts.

    It is a smooth multiple of the reported value, at a fraction of the time. With the gains of a
    search, selections inside other events are accounted as in a report, on its lattices.
    """
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
    """Refine the lattice until the answer moves by less than the tolerance.

    Every lattice gives a valid bound; the smallest one is returned, with a margin for rounding.
    """
    return _refined(compute, tolerance) * (1.0 + _MARGIN)


def _refined(compute: Callable[[float], float], tolerance: float) -> float:
    fineness = 1.0
    value = compute(fineness)
    while fineness < _MAX_FINENESS:
        fineness *= 2.0
        try:
            finer = compute(fineness)
        except GridError:
            return value
        best = min(value, finer)
        if abs(finer - value) <= tolerance * finer or not math.isfinite(finer):
            return best
        value = best
    return value
