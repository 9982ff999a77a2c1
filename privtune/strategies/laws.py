"""Which law of the number of runs: as it was asked for, or chosen for the budget at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, cast

import privtune.accounting as acc
from privtune.accounting import epsilon as account
from privtune.errors import InvalidInputError

MeanRuns = float | Literal["auto"] | None

NOTHING = (
    "The law of the number of runs drew 0, so nothing was trained and the release is nothing. "
    "That is part of the law: drawing again until a run comes would be another law, of another "
    "price. The charge is spent."
)
"""What is said of a release of nothing."""

_TOP = 0.1  # a good candidate is one of the best tenth
_TOLERANCE = 5e-3
_BUCKET = 1.25
_MOST_RUNS = 1000
_LARGEST_MEAN = 1e6  # that a law takes
_WIDE, _DIMENSIONS = 100.0, 3  # of a space
_OFTEN = 0.1  # the probability of at most one candidate above which more are suggested
_SUGGESTED = (2, 3)
_GRAIN = 1000  # means are found in thousandths, so that a plan shows the number it charges

_FAMILIES: tuple[tuple[str, Callable[[float], acc.RunLaw]], ...] = (
    ("geometric", acc.Geometric),
    ("truncated negative binomial, shape 0.5", lambda m: acc.TruncatedNegativeBinomial(0.5, m)),
    ("truncated negative binomial, shape 2", lambda m: acc.TruncatedNegativeBinomial(2.0, m)),
    ("logarithmic", acc.Logarithmic),
    ("poisson", acc.Poisson),
)


@dataclass(frozen=True, kw_only=True)
class OptionsOfLaw:
    """The law of the number of runs as options of an arm.

    Args:
        law: ``geometric``, ``logarithmic``, ``truncated_negative_binomial`` (with ``shape``),
            ``poisson``, ``binomial`` (with ``n``), or ``auto``.
        mean_runs: Mean number of runs; 10 unless given; or ``auto``.
        training_epsilon: What each run costs alone, at the study's δ; only with ``mean_runs: auto``.
        shape: Shape of the truncated negative binomial law, above -1; only with that law.
        n: Number of trials of the binomial law; only with that law.
        power: Only with ``law: auto``.
        maximum: Hard cap on the number of runs; part of the law, and so of the price.
        min_runs: Fewest runs; part of the law, and so of the price.
    """

    law: str = "geometric"
    mean_runs: MeanRuns = None
    training_epsilon: float | None = None
    shape: float | None = None
    n: int | None = None
    power: float | None = None
    maximum: int | None = None
    min_runs: int | None = None

    def run_law(self) -> acc.RunLaw:
        """Return the law of the number of runs, where it is given.

        Raises:
            InvalidInputError: If the options are not those of a law.
        """
        if self.training_epsilon is not None:
            raise unused_price(self.training_epsilon)
        return self._law(10.0 if self.mean_runs is None else self.mean_runs)

    def _law(self, mean: float | str) -> acc.RunLaw:
        """Return the law with this mean number of runs."""
        if self.power is not None:
            raise InvalidInputError("power", self.power, "is taken with law: auto only")
        fields: dict[str, Any] = {"law": self.law, "mean": mean, "minimum": self.min_runs}
        for name in ("shape", "n", "maximum"):
            fields[name] = getattr(self, name)
        return law_of_runs({name: value for name, value in fields.items() if value is not None})

    @property
    def _least_mean(self) -> float:
        """The smallest mean number of runs that the options allow, in thousandths."""
        if self.min_runs is None:
            return 1.0
        return self.min_runs + (1 / _GRAIN if self.law in ("poisson", "binomial") else 0.0)


_OPTIONS = {"mean": "mean_runs", "minimum": "min_runs"}  # as an arm calls the fields of a law


def law_of_runs(fields: Mapping[str, Any]) -> acc.RunLaw:
    """Return a law of the number of runs; its fields are called as the arm's options are."""
    try:
        return acc.run_law_from_dict(fields)
    except InvalidInputError as error:
        name = _OPTIONS.get(error.name, error.name)
        raise InvalidInputError(name, error.value, error.allowed, error.remedy) from None


def few_runs(law: acc.RunLaw) -> dict[str, float]:
    """Return how likely it is that a selection draws no candidate, one, and at most two."""
    none, one = law.zero_probability, float(law.pmf(1))
    return {"none": none, "one": one, "at_most_two": law.at_most(2)}


def say_few_runs(law: acc.RunLaw) -> str:
    """Return :func:`few_runs` in words, percentages rounded up."""
    found = {name: f"{math.ceil(1000 * p - 1e-6) / 10:g}%" for name, p in few_runs(law).items()}
    none = f"no candidate with probability {found['none']}, " if law.can_be_zero else ""
    return f"{none}one candidate with probability {found['one']}, at most two with {found['at_most_two']}"


def is_wide(space: Mapping[str, Any]) -> bool:
    """Return whether few draws from a space are likely to miss what is good in it."""

    def spans(law: Any) -> bool:
        low, high = getattr(law, "low", None), getattr(law, "high", None)
        return bool(getattr(law, "log", False) and low and high and high / low >= _WIDE)

    return len(space) >= _DIMENSIONS or any(spans(law) for law in space.values())


def with_law(event: acc.Event, law: acc.RunLaw, other: acc.RunLaw) -> acc.Event:
    """Return an event in which another law takes the place of a law of runs, wherever it stands."""
    if getattr(event, "runs", None) == law:
        changed: Any = event
        return cast("acc.Event", replace(changed, runs=other))
    parts = event.children()
    return event.rebuild([with_law(part, law, other) for part in parts]) if parts else event


def price_of_minimums(
    event: acc.Event,
    law: acc.RunLaw,
    space: Mapping[str, Any],
    *,
    delta: float,
    adjacency: acc.Adjacency,
) -> dict[int, float]:
    """Return what a fewest number of runs costs, for a selection that often draws one of a wide space."""
    found: dict[int, float] = {}
    if law.at_most(1) <= _OFTEN or not is_wide(space):
        return found
    for fewest in _SUGGESTED:
        try:
            other = replace(law, minimum=fewest)  # type: ignore[type-var]
        except InvalidInputError:  # a mean or a cap that leaves no room
            continue
        changed = with_law(event, law, other)
        if changed != event:  # a known threshold stops by another law
            found[fewest] = account(changed, delta, adjacency=adjacency).epsilon
    return found


def unused_price(value: float) -> InvalidInputError:
    """Return the refusal of a price of one run where the noise is fitted to the runs."""
    return InvalidInputError(
        "training_epsilon",
        value,
        "is taken with mean_runs: auto only",
        "With a given mean number of runs, the noise is fitted to the arm's target.",
    )


def finding_probability(law: acc.RunLaw) -> float:
    """Return the probability that a candidate of the best tenth is among the runs."""
    return 1.0 - float(law.pgf(1.0 - _TOP))


def choose_law(
    base: acc.Event, *, epsilon: float, delta: float, adjacency: acc.Adjacency, power: float
) -> tuple[acc.RunLaw, list[dict[str, Any]]]:
    """Choose the law that finds a top-10% candidate with a given probability at the least noise."""
    if not 0.1 < power < 0.99:
        raise InvalidInputError("power", power, "must lie between 0.1 and 0.99")
    level = _BUCKET ** round(math.log(epsilon, _BUCKET))
    return _choose(base, level, delta, adjacency, power)


@lru_cache(maxsize=64)
def _choose(
    base: acc.Event, epsilon: float, delta: float, adjacency: acc.Adjacency, power: float
) -> tuple[acc.RunLaw, list[dict[str, Any]]]:
    def factor(event: acc.Event) -> float:
        return acc.calibrate(
            event, epsilon=epsilon, delta=delta, adjacency=adjacency, tolerance=_TOLERANCE
        ).scale

    count = math.ceil(math.log1p(-power) / math.log1p(-_TOP))
    # Of laws with a largest number of runs: one that draws half of its trials, and all of them.
    families = (*_FAMILIES, ("binomial", lambda m: acc.Binomial(2 * count, m)))
    found = {name: _with_power(family, power) for name, family in families}
    laws = {name: law for name, law in found.items() if law is not None}
    laws["fixed number of runs"] = acc.Binomial(count, count)
    noise = {name: factor(acc.PrivateSelection(base, law)) for name, law in laws.items()}
    chosen = min(noise, key=lambda name: noise[name])
    rows = [(name, round(law.expected_runs, 4), noise[name]) for name, law in laws.items()]
    # Beside the laws, what the same number of trials costs where all of them are released.
    rows.append(("everything released (composition)", count, factor(acc.Repeated(count, base))))
    trade: list[dict[str, Any]] = [
        {"law": name, "mean_runs": mean, "noise": round(value, 4), "chosen": name == chosen}
        for name, mean, value in rows
    ]
    return laws[chosen], trade


def _with_power(family: Callable[[float], acc.RunLaw], power: float) -> acc.RunLaw | None:
    """Return the law of least mean that finds with this probability; None where none does."""
    from scipy.optimize import brentq

    def missing(mean: float) -> float:
        return finding_probability(family(mean)) - power

    low, high = 1.0 + 1e-9, 2.0
    if missing(low) >= 0.0:
        return family(low)
    most = float(family(low).most or _LARGEST_MEAN)
    while missing(high) < 0.0:
        if high >= most:
            return None  # however large its mean, it draws few runs too often
        high = min(2.0 * high, most)
    return family(float(brentq(missing, low, high, xtol=1e-6)))


def largest_mean(
    base: acc.Event,
    family: Callable[[float], acc.RunLaw],
    *,
    whole: Callable[[acc.Event, acc.RunLaw], acc.Event] = acc.PrivateSelection,
    least: float = 1.0,
    epsilon: float,
    delta: float,
    adjacency: acc.Adjacency,
) -> acc.RunLaw | None:
    """Return the law of the largest mean whose selection stays within a target; bisection."""

    def fits(thousandths: int) -> bool:
        event = whole(base, family(thousandths / _GRAIN))
        return account(event, delta, adjacency=adjacency).epsilon <= epsilon

    most = family(least).most
    low, top = round(least * _GRAIN), min(_MOST_RUNS, most or _MOST_RUNS) * _GRAIN
    if not fits(low):
        return None
    high = low
    while high < top:
        high = min(2 * high, top)
        if not fits(high):
            break
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return family(low / _GRAIN)
