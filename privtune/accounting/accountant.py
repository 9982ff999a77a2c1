"""Compute ε or δ of an event by every bound that applies, and report the smallest with its name."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np

from privtune.accounting.best_of_k import Tuner, profile_shift
from privtune.accounting.checks import check_delta, check_epsilon, json_number
from privtune.accounting.curves import rdp_delta, rdp_epsilon
from privtune.accounting.events import Adjacency, Event, PrivateSelection, Repeated, flatten
from privtune.accounting.instances import instance_epsilon
from privtune.accounting.pairs import Gains, Pair
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
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.names import refuse_name
from privtune.numbers import ceil_digits

_TOLERANCE = {"epsilon": 1e-3, "delta": 1e-2}
_MANY = 64  # different sampled Gaussians
# The composition of all runs is computed up to so many runs, if there is another bound, and if there is none.
_FEW_RUNS = 64
_MOST_RUNS = 10_000
_MOST_STEPS = 10**9  # of one kind in such a composition
_MAX_FINENESS = 16.0
_FINE = 2.0  # fineness of the lattice of one bound among several
_ATOMS = 2048  # of the lattice on which the rearrangement is computed
# No smaller and no larger δ is asked for, but by the filter's tables, hundreds of times.
_SMALL_DELTA = 1e-15
_LARGE_DELTA = 1e-3
_MARGIN = 1e-9  # relative: sums of masses and of Rényi divergences are known to about 1e-12
_ENVELOPE = Gains(learns=False, is_rough=True)


class HasBounds(Protocol):
    """An object that bounds δ at an ε, and ε at a δ, in one direction of a pair."""

    def epsilon(self, delta: float, /) -> float:
        """Return an ε at which the bound on δ is at most `delta`."""

    def delta(self, epsilon: float, /) -> Any:
        """Return an upper bound on δ at `epsilon`."""


@dataclass(frozen=True)
class Question:
    """The quantity asked of the accountant: ε at a given δ, or δ at a given ε.

    Args:
        quantity: "epsilon" or "delta".
        target: The other one of the two numbers.
    """

    quantity: str
    target: float

    @property
    def is_epsilon(self) -> bool:
        """Whether the question is for ε at a given δ."""
        return self.quantity == "epsilon"

    def ask(self, bound: HasBounds) -> float:
        """Return the ε or δ that one bound gives at the target."""
        if self.is_epsilon:
            return float(bound.epsilon(self.target))
        return float(bound.delta(self.target))

    def ask_worse(self, directions: tuple[HasBounds, HasBounds]) -> float:
        """Return the larger of the ε or δ that the two directions give at the target."""
        return max(self.ask(direction) for direction in directions)

    def ask_pair(self, pair: Pair) -> float:
        """Return the ε or δ of a dominating pair at the target, in its worse direction."""
        return self.ask_worse((pair.remove, pair.add))


def choice_of(parts: dict[Event, int]) -> Choice | None:
    """Return the selection among runs, if a composition is one selection and nothing else, else None."""
    if list(parts.values()) != [1]:
        return None
    single = next(iter(parts))
    return entry(single).choice(single)


class Bounds:
    """The computed bounds on ε or δ by name, and by name the reasons why others failed."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, compute: Callable[[], float | None]) -> float:
        """Compute a bound, store it under its name, and return it; return infinity if that fails."""
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


def add_basic(
    bounds: Bounds,
    parts: dict[Event, int],
    question: Question,
) -> None:
    """Add the bound Σ ε at Σ δ if every part is (ε, δ)-DP (Dwork and Roth 2014, Theorem 3.16)."""
    epsilon = 0.0
    delta = 0.0
    for part, count in parts.items():
        pure = entry(part).pure(part)
        if pure is None:
            return
        part_epsilon, part_delta = pure
        epsilon += count * part_epsilon
        delta += count * part_delta
    epsilon *= 1.0 + 1e-12
    delta *= 1.0 + 1e-12
    # Of a sum of ε no other δ is known, so it answers only where Σ δ, or Σ ε, is within what was asked.
    if question.is_epsilon and delta <= question.target:
        bounds.values["basic"] = epsilon
    elif not question.is_epsilon and epsilon <= question.target:
        bounds.values["basic"] = min(delta, 1.0)


def add_numerical(
    bounds: Bounds,
    parts: dict[Event, int],
    question: Question,
) -> None:
    """Add the bounds computed from dominating pairs, by the kind of event: composition or best of K."""
    reason = no_pair(parts)
    choice = choice_of(parts)
    if reason:
        bounds.reasons["pld"] = reason
    elif choice is None:
        bounds.add("pld", lambda: _composed(parts, question))
    elif choice.threshold:
        event = next(iter(parts))
        bounds.add("threshold", lambda: _threshold(event, question))
        bounds.add("envelope", lambda: _envelope(choice.selection, question))
    else:
        _add_selection(bounds, choice.selection, question)


def _threshold(event: Event, question: Question) -> float:
    """Return ε or δ of an event that runs until a known threshold is passed."""
    return _stable(lambda fineness: question.ask_worse(tuners(event, fineness)))


def _composed(
    parts: dict[Event, int],
    question: Question,
    gains: Gains | None = None,
) -> float:
    """Return ε or δ of a composition from its dominating pair; with `gains`, only an estimate.

    Args:
        parts: What is composed, by its count.
        question: What is asked for.
        gains: For searches, what the rearrangement gained at another noise.
    """
    level = question.target if question.is_epsilon else 1e-6

    def composed(fineness: float) -> float:
        step = default_step(parts, level, fineness, gains=gains)
        return question.ask_pair(event_pair(parts, step, gains=gains))

    sampled = [part for part in parts if entry(part).sampled_gaussian(part) is not None]
    if len(sampled) > _MANY:
        # One lattice is enough for what takes seconds.
        return composed(1.0) * (1.0 + _MARGIN)
    return _stable(composed, _TOLERANCE[question.quantity])


def _add_selection(
    bounds: Bounds,
    event: PrivateSelection,
    question: Question,
) -> None:
    """Add the bounds on a best of K, such as envelope, rearrangement and profile shift."""
    runs = event.runs
    envelope = bounds.add("envelope", lambda: _envelope(event, question))
    if envelope == 0.0:
        return
    level = question.target if question.is_epsilon else envelope

    def rearranged() -> float | None:
        if not _SMALL_DELTA < level <= _LARGE_DELTA:
            return None
        value = _rearranged(event, question)
        if value is None or value >= envelope:  # on a coarser lattice
            return None
        return value

    bounds.add("rearrangement", rearranged)
    if isinstance(runs, NegativeBinomial) and runs.cap is None and not runs.sure_runs:
        bounds.add("profile", lambda: _profile(event, runs, question))
        if runs.shape_parameter == 1.0 and question.is_epsilon:
            bounds.add("liu-talwar", lambda: _liu_talwar(event.event, runs.gamma, question.target))
    _add_all_runs(bounds, event, question)


def _add_all_runs(
    bounds: Bounds,
    event: PrivateSelection,
    question: Question,
) -> None:
    """Add the bound for releasing all runs of a selection, if their largest number is small."""
    most = event.runs.most
    has_bound = any(math.isfinite(value) for value in bounds.values.values())
    limit = _FEW_RUNS if has_bound else _MOST_RUNS
    if most is None or most > limit:
        return
    parts = flatten(Repeated(most, event.event))
    few = max(parts.values(), default=1) <= _MOST_STEPS
    if few and choice_of(parts) is None and not no_pair(parts):
        bounds.add("composition", lambda: _composed(parts, question))


def _profile(
    event: PrivateSelection,
    runs: NegativeBinomial,
    question: Question,
) -> float:
    """Bound a selection by one run's shifted privacy profile (Koskela, Redberg, Wang, arXiv:2402.06701)."""
    pair = fine_pair(event.event)
    mean = runs.expected_runs
    target = question.target
    values = []
    for forward, backward in ((pair.remove, pair.add), (pair.add, pair.remove)):
        shift = profile_shift(backward, runs)
        if question.is_epsilon:
            values.append(forward.epsilon(target / mean) + shift)
        else:
            delta = float(forward.delta(target - shift))
            values.append(min(mean * delta, 1.0))
    return max(values)


def _envelope(event: PrivateSelection, question: Question) -> float:
    """Return ε or δ of a best of K by the envelope bound (README, 5)."""

    def envelope(fineness: float) -> float:
        return question.ask_worse(tuners(event, fineness))

    return _stable(envelope, _TOLERANCE[question.quantity])


def _rearranged(event: PrivateSelection, question: Question) -> float | None:
    """Bound ε or δ of a best of K by rearrangement (README, 5); None where the envelope bound is as good."""
    target = question.target
    directions = []
    for bound in _rearranged_bounds(event):
        directions.append((question.ask(bound.tuner), bound))
    # The dearer direction first: of the other one it is often enough to know that it is cheaper.
    directions.sort(key=lambda direction: direction[0], reverse=True)
    worst = 0.0
    helps = False
    for envelope, bound in directions:
        epsilon = envelope if question.is_epsilon else target
        matters = math.isfinite(envelope) and bound.matters(epsilon)
        helps = helps or matters
        if envelope <= worst or not matters:
            worst = max(worst, envelope)
        elif question.is_epsilon:
            worst = max(worst, bound.epsilon(target, envelope, worst))
        else:
            worst = max(worst, bound.delta(target, worst))
    return worst * (1.0 + _MARGIN) if helps else None


@lru_cache(maxsize=16)
def _rearranged_bounds(event: PrivateSelection) -> tuple[Rearranged, ...]:
    """Return the rearrangement bounds of a best of K, one for each direction, on about 2,048 losses."""
    remove, add = cast("tuple[Tuner, Tuner]", tuners(event, _FINE))
    directions = (remove,) if add is remove else (remove, add)
    bounds = []
    for fine in directions:
        factor = math.ceil(fine.base.masses.size / _ATOMS)
        coarse = fine.base.coarsen(factor)
        tuner = fine if coarse is fine.base else Tuner(coarse, event.runs)
        bounds.append(Rearranged(tuner))
    return tuple(bounds)


def _liu_talwar(
    base: Event,
    gamma: float,
    delta: float,
) -> float:
    """Return Liu and Talwar's ε of random stopping over an (ε₁, δ₁)-DP run, as a baseline.

    Args:
        base: One run.
        gamma: γ, the probability to stop after a run.
        delta: The δ of the question.
    """
    # Liu, Talwar, arXiv:1811.07971, Section 3: `(3 ε₁ + 3 sqrt(2 δ₁), sqrt(2 δ₁) T + δ₂)`, T = log(1/δ₂)/γ.
    # With s = sqrt(2 δ₁)/γ the best δ₂ is s, and δ is s (1 + log(1/s)).
    good = -300.0  # log s
    bad = -1.0  # where δ is 2/e
    for _ in range(50):
        middle = 0.5 * (good + bad)
        if math.exp(middle) * (1.0 - middle) <= delta:
            good = middle
        else:
            bad = middle
    root = gamma * math.exp(good)
    base_delta = 0.5 * root * root
    base_epsilon = rdp_epsilon(rdp_curve(base), base_delta)
    return 3.0 * base_epsilon + 3.0 * root


def quick_epsilon(
    event: Event,
    delta: float,
    near: float,
    fineness: float,
    gains: Gains | None = None,
) -> float | None:
    """Estimate ε on one lattice, for searches; return None where no lattice gives it.

    It bounds nothing: a smooth multiple of the reported ε, in a fraction of the time.

    Args:
        event: What touched the data.
        delta: The δ of the question.
        near: A guess of ε.
        fineness: Of the lattice.
        gains: What the rearrangement gained at another noise.
    """
    parts = flatten(event)
    if not parts or gaussian_mu(parts) is not None or no_pair(parts):
        return None
    question = Question("epsilon", delta)
    try:
        if choice_of(parts) is not None:
            choice = next(iter(parts))
            return question.ask_worse(tuners(choice, fineness, gains=_ENVELOPE))
        if gains is not None and any(entry(part).own_lattice for part in parts):
            return _composed(parts, question, gains)
        step = default_step(
            parts,
            delta,
            fineness,
            near=near,
            gains=_ENVELOPE,
        )
        return question.ask_pair(event_pair(parts, step, gains=_ENVELOPE))
    except GridError:
        return None


def _stable(compute: Callable[[float], float], tolerance: float = 1e-3) -> float:
    """Return a bound from ever finer lattices, until refinement moves it by less than a tolerance."""
    fineness = 1.0
    value = compute(fineness)
    moved = True
    while moved and fineness < _MAX_FINENESS:
        fineness *= 2.0
        try:
            finer = compute(fineness)
        except GridError:
            break
        change = abs(finer - value)
        moved = math.isfinite(finer) and change > tolerance * finer
        value = min(value, finer)  # each lattice gives a bound: the smaller one holds
    return value * (1.0 + _MARGIN)


_METHODS = ("best", "rdp", "pld")


@dataclass(frozen=True)
class Guarantee:
    """An (ε, δ) guarantee with the name of the bound that gave it and the adjacency.

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
        """Refuse an ε or δ that is NaN or negative, and copy the mappings."""
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if math.isnan(value) or value < 0.0:
                raise PrivTuneError(f"{name} came out as {value}; no number is reported.")
        for name in ("bounds", "reasons"):
            object.__setattr__(self, name, dict(getattr(self, name)))

    def __str__(self) -> str:
        """Return the guarantee as one line of text, with ε and δ rounded up to four digits."""
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
        values = {name: json_number(value) for name, value in self.bounds.items()}
        return {
            "epsilon": json_number(self.epsilon),
            "delta": json_number(self.delta),
            "method": self.method,
            "adjacency": self.adjacency.value,
            "bounds": {**values, **self.reasons},
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
    return _answer(
        event,
        "epsilon",
        target,
        _adjacency(adjacency),
        _method(method),
    )


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
    return _answer(
        event,
        "delta",
        target,
        _adjacency(adjacency),
        _method(method),
    )


def _adjacency(value: str) -> Adjacency:
    """Return the adjacency with this name, or refuse an unknown name."""
    try:
        return Adjacency(value)
    except ValueError:
        allowed = "must be " + " or ".join(member.value for member in Adjacency)
        raise InvalidInputError("adjacency", value, allowed) from None


def _method(value: object) -> str:
    """Return the name of an accounting method, or refuse an unknown one."""
    if value not in _METHODS:
        refuse_name("method", value, _METHODS)
    return str(value)


@lru_cache(maxsize=4096)
def _answer(
    event: Event,
    quantity: str,
    target: float,
    adjacency: Adjacency,
    method: str,
) -> Guarantee:
    """Return the guarantee by the smallest bound; the last 4,096 answers are cached.

    Args:
        event: What touched the data.
        quantity: "epsilon" or "delta".
        target: The other of the two numbers.
        adjacency: The relation of neighbouring datasets.
        method: "best", "rdp" or "pld".
    """
    # Python allows a thousand calls inside each other, and a level of nesting takes some twenty.
    deep_enough = 1_000 + 50 * event.depth
    sys.setrecursionlimit(max(sys.getrecursionlimit(), deep_enough))
    parts = flatten(under(event, adjacency))
    question = Question(quantity, target)
    nothing = math.inf if question.is_epsilon else 1.0
    bounds = Bounds()
    if not parts:
        bounds.values["exact"] = 0.0
    elif not all(entry(part).private for part in parts):
        bounds.values["non_private"] = nothing
    else:
        with np.errstate(all="ignore"):  # what leaves its range is no bound, and no warning
            _add_bounds(bounds, parts, question, method)
        if not question.is_epsilon:
            # Exponentials underflow: a δ of zero is a claim that sums of ε alone can make.
            for name in bounds.values.keys() - {"basic"}:
                bounds.values[name] = max(bounds.values[name], sys.float_info.min)
    winner = min(bounds.values, key=lambda name: bounds.values[name], default="none")
    value = bounds.values.get(winner, nothing)
    return Guarantee(
        epsilon=value if question.is_epsilon else target,
        delta=target if question.is_epsilon else min(value, 1.0),
        method=winner,
        adjacency=adjacency,
        bounds=bounds.values,
        reasons=bounds.reasons,
    )


def _add_bounds(
    bounds: Bounds,
    parts: dict[Event, int],
    question: Question,
    method: str,
) -> None:
    """Add every bound of the method that applies; stop if the Rényi bound is 0."""
    target = question.target
    if method in ("best", "rdp"):
        curve = composed_curve(parts) * (1.0 + _MARGIN)
        convert = rdp_epsilon if question.is_epsilon else rdp_delta
        rdp = bounds.add("rdp", lambda: convert(curve, target) * (1.0 + _MARGIN))
        if rdp == 0.0 or method == "rdp":
            if method == "best" and not question.is_epsilon:
                add_basic(bounds, parts, question)
            return
    mu = gaussian_mu(parts)
    if mu is not None:
        answer = gaussian_epsilon if question.is_epsilon else gaussian_delta
        bounds.add("gdp", lambda: answer(mu, target))
        return
    if method == "best":
        add_basic(bounds, parts, question)
    add_numerical(bounds, parts, question)


def lower_bound(
    event: Event,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
) -> float:
    """Return a lower bound on ε: no valid guarantee for this event at `delta` has a smaller ε.

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


def group_privacy(
    event: Event,
    delta: float,
    *,
    method: str = "best",
) -> Guarantee:
    """Return a replace-one guarantee derived from the add-remove guarantee of an event.

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
    best = _best_inner(event, level, _method(method))
    if best is None:
        return Guarantee(
            math.inf,
            level,
            "none",
            Adjacency.REPLACE_ONE,
            {},
        )
    value = 2.0 * best.epsilon
    name = f"group privacy of {best.method}"
    return Guarantee(
        value,
        level,
        name,
        Adjacency.REPLACE_ONE,
        {name: value},
    )


def _best_inner(
    event: Event,
    level: float,
    method: str,
) -> Guarantee | None:
    """Return the add-remove guarantee at the largest δ' with (1 + e^ε) δ' <= `level`, or None."""
    # P(S) <= e^ε Q(S) + δ' and Q(S) <= e^ε R(S) + δ' give P(S) <= e^2ε R(S) + (1 + e^ε) δ'. The largest δ'
    # with (1 + e^ε(δ')) δ' <= level gives the smallest ε; it is searched on a logarithmic scale.
    log_level = math.log(level)
    low = log_level - 700.0
    high = math.log(level / 2.0)
    best: Guarantee | None = None
    for _ in range(24):
        # The first try is the fixed point of ε -> ε(δ/(1 + e^ε)); then bisection.
        middle = 0.5 * (low + high)
        if best is None and low < log_level - 600.0:
            guess = epsilon(event, level / 2.0, method=method).epsilon
            if not math.isfinite(guess) or guess > 300.0:
                break
            middle = log_level - float(np.logaddexp(0.0, guess * 1.2 + 0.1))
        answer = epsilon(event, math.exp(middle), method=method)
        if middle + float(np.logaddexp(0.0, answer.epsilon)) <= log_level:
            best = answer
            low = middle
        else:
            high = middle
        if best is not None and high - low < 1e-3:
            break
    return best
