"""Laws of a selection's number of runs, read from options or chosen for a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import privtune.accounting as acc
from privtune.accounting import epsilon as account
from privtune.accounting.calibration import searches_apart
from privtune.errors import InvalidInputError
from privtune.numbers import show_epsilon

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MeanRuns = float | Literal["auto"] | None

NOTHING = (
    "The random number of runs was 0, so nothing was trained and nothing is released. The law of the number "
    "of runs includes this case: to draw again would be another law, with another ε. The charge is spent."
)
"""The note of a release for which no run was drawn."""

MOST_SURE = 1.0 / 3.0
"""Largest allowed ratio of a selection's fewest number of runs to its mean number."""
_ROUNDING = 1e-9  # a third of 6 is 2

_TOP = 0.1  # a good candidate is one of the best tenth
_TOLERANCE = 5e-3
_BUCKET = 1.25  # targets within a factor of it share a choice, so that arms alike get the same law
_MOST_RUNS = 1000
_LARGEST_MEAN = 1e6  # that a law takes
_WIDE = 100.0  # the upper end over the lower of a wide interval on a logarithmic scale
_DIMENSIONS = 3  # of a wide space
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
    """Options of an arm that give the law of its number of runs.

    Args:
        law: ``geometric``, ``logarithmic``, ``truncated_negative_binomial`` (with ``shape``),
            ``poisson``, ``binomial`` (with ``n``), or ``auto``.
        mean_runs: Mean number of runs; 10 unless given; or ``auto``.
        training_epsilon: What each run costs alone, at the study's δ; only with ``mean_runs: auto``.
        shape: Shape of the truncated negative binomial law, above -1; only with that law.
        n: Number of trials of the binomial law; only with that law.
        power: Only with ``law: auto``.
        maximum: Hard cap on the number of runs; part of the law, and so of the price.
        min_runs: Fewest runs; part of the law, and so of the price. Unless given, :attr:`floor` where the
            law has room for it: see :func:`with_floor`. 1 takes the law as it is.
    """

    floor: ClassVar[int] = 2
    """Fewest number of runs of an arm without ``min_runs``."""
    most_sure: ClassVar[float] = MOST_SURE
    """Largest allowed ratio of :attr:`floor` to the mean, or to the cap, of the number of runs."""

    law: str = "geometric"
    mean_runs: MeanRuns = None
    training_epsilon: float | None = None
    shape: float | None = None
    n: int | None = None
    power: float | None = None
    maximum: int | None = None
    min_runs: int | None = None

    def run_law(self) -> acc.RunLaw:
        """Return the law of the number of runs that the options give.

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
        fields: dict[str, Any] = {
            "law": self.law,
            "mean": mean,
            "minimum": self.min_runs,
            "shape": self.shape,
            "n": self.n,
            "maximum": self.maximum,
        }
        law_fields: dict[str, Any] = {}
        for name, value in fields.items():
            if value is not None:
                law_fields[name] = value
        law = law_of_runs(law_fields)
        if self.min_runs is not None:
            return law
        return with_floor(law, self.floor, most_sure=self.most_sure)

    @property
    def _least_mean(self) -> float:
        """The smallest mean number of runs that the options allow, a multiple of 0.001.

        Poisson and binomial laws draw runs on top of the fewest, and none has a mean of 0.
        """
        if self.min_runs is None:
            return 1.0
        if self.law in ("poisson", "binomial"):
            return self.min_runs + 1 / _GRAIN
        return float(self.min_runs)


_OPTIONS = {"mean": "mean_runs", "minimum": "min_runs"}  # as an arm calls the fields of a law


def law_of_runs(fields: Mapping[str, object]) -> acc.RunLaw:
    """Return a law of the number of runs from its fields.

    Raises:
        InvalidInputError: If a field is out of its range. It is called as in the spec that the user wrote:
            ``mean_runs`` for a law's ``mean``.
    """
    try:
        return acc.run_law_from_dict(fields)
    except InvalidInputError as error:
        name = _OPTIONS.get(error.name, error.name)
        raise InvalidInputError(name, error.value, error.allowed, error.remedy) from None


def with_floor(law: acc.RunLaw, floor: int, *, most_sure: float = MOST_SURE) -> acc.RunLaw:
    """Return a law with a minimum number of runs, at most ``floor``, if its mean and cap leave room for it.

    With a geometric law of mean 10 one round in ten trains a single candidate, and one draw is often a
    bad one; there a floor of 2 costs a selection 1% more noise (docs/guide/selection.md). The more of
    the mean is sure, the more it costs: 9% at a mean of 4, 25% at one of 2. So the floor is lowered to
    a part of the mean and of the cap, and a law keeps none

    * of a mean or cap that leaves no room for a floor of 2;
    * that may draw no candidate at all (Poisson, binomial): with a floor it would be another family,
      whose release is never nothing;
    * with a cap above what a law with a floor can have.

    Args:
        law: The law as it was asked for.
        floor: Fewest runs, at least 1.
        most_sure: Largest part of the mean and of the cap that the floor may be, in (0, 1).

    Example:
        >>> [with_floor(acc.Geometric(mean), 3).minimum for mean in (5, 6, 10)]
        [None, 2, 3]
        >>> with_floor(acc.Poisson(10), 3).minimum, with_floor(acc.Geometric(10, maximum=7), 3).minimum
        (None, 2)
    """
    if law.can_be_zero:
        return law
    most = law.mean
    if law.cap is not None:
        most = min(most, law.cap)
    for fewest in range(floor, 1, -1):
        if fewest > most_sure * most * (1.0 + _ROUNDING):
            continue
        try:
            return replace(law, minimum=fewest)  # type: ignore[type-var]
        except InvalidInputError:  # a cap that no law with a floor has
            continue
    return law


def few_runs(law: acc.RunLaw) -> dict[str, float]:
    """Return how likely it is that a selection draws no candidate, one, and at most two."""
    return {
        "none": law.zero_probability,
        "one": float(law.pmf(1)),
        "at_most_two": law.at_most(2),
    }


def say_few_runs(law: acc.RunLaw) -> str:
    """Return :func:`few_runs` in words, percentages rounded up."""
    probabilities = few_runs(law)
    at_most_two = _percentage(probabilities["at_most_two"])
    if law.minimum is not None and law.minimum >= 2:
        words = f"at least {law.minimum} candidates"
        if law.minimum == 2:
            words += f", and exactly two with probability {at_most_two}"
        return words
    one = _percentage(probabilities["one"])
    words = f"one candidate with probability {one}, and at most two with probability {at_most_two}"
    if law.can_be_zero:
        none = _percentage(probabilities["none"])
        words = f"no candidate with probability {none}, {words}"
    return words


def _percentage(probability: float) -> str:
    """Return a probability in percent, rounded up to a tenth so that no risk is understated."""
    thousandths = math.ceil(1000 * probability - 1e-6)
    return f"{thousandths / 10:g}%"


@dataclass(frozen=True)
class Floor:
    """The minimum number of runs of a law, with its benefit, and its cost where that was asked for.

    Attributes:
        min_runs: Fewest runs of the law.
        few_without: How likely it would draw no candidate or a single one without it.
        epsilon_without: What the arm would then cost, with the same noise and mean; None where no account
            of it was asked for.
    """

    min_runs: int
    few_without: float
    epsilon_without: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the minimum number of runs, its benefit and a known cost as JSON-ready data."""
        document = asdict(self)
        if self.epsilon_without is None:
            del document["epsilon_without"]
        return document

    @property
    def words(self) -> str:
        """The minimum number of runs, its cost and its benefit, in one line."""
        few = f"train at most one candidate with probability {_percentage(self.few_without)}"
        without = f"{self.min_runs} (min_runs); without this minimum"
        if self.epsilon_without is None:
            return (
                f"{without} the selection would {few}; --prices adds what the same noise would cost"
            )
        cost = f"the same noise would cost ε = {show_epsilon(self.epsilon_without, 4)}"
        return f"{without} {cost}, but {few}"


def floor_of(law: acc.RunLaw) -> Floor | None:
    """Return the benefit of a law's minimum number of runs, or None if it has none."""
    if law.minimum is None:
        return None
    return Floor(law.minimum, _without_minimum(law).at_most(1))


def priced_floor_of(
    event: acc.Event,
    law: acc.RunLaw,
    *,
    delta: float,
    adjacency: acc.Adjacency,
) -> Floor | None:
    """Return the cost and the benefit of a law's minimum number of runs, or None if it has none."""
    floor = floor_of(law)
    if floor is None:
        return None
    event_without = with_law(event, law, _without_minimum(law))
    guarantee = account(event_without, delta, adjacency=adjacency)
    return replace(floor, epsilon_without=guarantee.epsilon)


def _without_minimum(law: acc.RunLaw) -> acc.RunLaw:
    """Return a law without its minimum number of runs."""
    without: acc.RunLaw = replace(law, minimum=None)  # type: ignore[type-var]
    return without


def is_wide(space: Mapping[str, Any]) -> bool:
    """Return whether a space is so wide that few draws are likely to miss its good candidates.

    A space is wide with three hyperparameters, or with one that spans two orders of magnitude.
    """
    if len(space) >= _DIMENSIONS:
        return True
    return any(_spans_orders(distribution) for distribution in space.values())


def _spans_orders(distribution: BaseDistribution) -> bool:
    """Return whether a distribution of the space is a wide interval on a logarithmic scale."""
    low = getattr(distribution, "low", None)
    high = getattr(distribution, "high", None)
    if not getattr(distribution, "log", False) or not low or not high:
        return False
    return bool(high / low >= _WIDE)


def with_law(event: acc.Event, law: acc.RunLaw, other: acc.RunLaw) -> acc.Event:
    """Return an event with a law of the number of runs replaced by another, wherever it occurs."""
    if getattr(event, "runs", None) == law:
        selection: Any = event
        return cast("acc.Event", replace(selection, runs=other))
    parts = event.children()
    if not parts:
        return event
    changed_parts = [with_law(part, law, other) for part in parts]
    return event.rebuild(changed_parts)


def price_of_minimums(
    event: acc.Event,
    law: acc.RunLaw,
    space: Mapping[str, object],
    *,
    delta: float,
    adjacency: acc.Adjacency,
) -> dict[int, float]:
    """Return ε for larger minimum numbers of runs, where a selection often draws one candidate.

    Args:
        event: What the arm is charged.
        law: Its law of the number of runs.
        space: What candidates are drawn from; of a narrow one a single draw may do.
        delta: In (0, 1).
        adjacency: Which neighbours the noise hides.

    Returns:
        ε at the same noise, by the fewest number of runs; nothing where there is nothing to suggest.
    """
    prices: dict[int, float] = {}
    for fewest, alternative in other_minimums(event, law, space).items():
        guarantee = account(alternative, delta, adjacency=adjacency)
        prices[fewest] = guarantee.epsilon
    return prices


def other_minimums(
    event: acc.Event, law: acc.RunLaw, space: Mapping[str, object]
) -> dict[int, acc.Event]:
    """Return the events of larger minimum numbers of runs that a plan suggests, by that number.

    Args:
        event: What the arm is charged.
        law: Its law of the number of runs.
        space: What candidates are drawn from; of a narrow one a single draw may do.
    """
    events: dict[int, acc.Event] = {}
    if law.at_most(1) <= _OFTEN or not is_wide(space):
        return events
    for fewest in _SUGGESTED:
        try:
            other = replace(law, minimum=fewest)  # type: ignore[type-var]
        except InvalidInputError:  # a mean or a cap that leaves no room
            continue
        alternative = with_law(event, law, other)
        if alternative != event:  # else a known threshold, which stops by another law
            events[fewest] = alternative
    return events


def unused_price(value: float) -> InvalidInputError:
    """Return the error for a ``training_epsilon`` where the noise is fitted to a number of runs."""
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
    base: acc.Event,
    *,
    epsilon: float,
    delta: float,
    adjacency: acc.Adjacency,
    power: float,
) -> tuple[acc.RunLaw, list[dict[str, Any]]]:
    """Choose the law that finds a top-10% candidate with a given probability at the least noise.

    Args:
        base: What one run costs.
        epsilon: Target of the selection.
        delta: In (0, 1).
        adjacency: Which neighbours the noise hides.
        power: The probability of such a candidate, between 0.1 and 0.99.

    Returns:
        The law, and what each law would need: rows of its name, mean and factor on the noise.

    Raises:
        InvalidInputError: If ``power`` is outside its range.
    """
    if not 0.1 < power < 0.99:
        raise InvalidInputError("power", power, "must lie between 0.1 and 0.99")
    level = _BUCKET ** round(math.log(epsilon, _BUCKET))
    return _choose(base, level, delta, adjacency, power)


@lru_cache(maxsize=64)
def _choose(
    base: acc.Event,
    epsilon: float,
    delta: float,
    adjacency: acc.Adjacency,
    power: float,
) -> tuple[acc.RunLaw, list[dict[str, Any]]]:
    """Choose the law at one target ε, cached since planning asks for the same choice repeatedly."""

    def noise_for(event: acc.Event) -> float:
        calibration = acc.calibrate(
            event,
            epsilon=epsilon,
            delta=delta,
            adjacency=adjacency,
            tolerance=_TOLERANCE,
        )
        return calibration.scale

    laws, count = _laws_with_power(power)
    noise: dict[str, float] = {}
    with searches_apart():
        for name, law in laws.items():
            selection = acc.PrivateSelection(base, law)
            noise[name] = noise_for(selection)
        # Beside the laws, what the same number of trials costs where all of them are released.
        composition = noise_for(acc.Repeated(count, base))
    best = min(noise, key=lambda name: noise[name])
    rows: list[tuple[str, float, float]] = []
    for name, law in laws.items():
        mean_runs = round(law.expected_runs, 4)
        rows.append((name, mean_runs, noise[name]))
    rows.append(("everything released (composition)", count, composition))
    trade: list[dict[str, Any]] = []
    for name, mean, factor in rows:
        trade.append(
            {
                "law": name,
                "mean_runs": mean,
                "noise": round(factor, 4),
                "chosen": name == best,
            }
        )
    return laws[best], trade


def _laws_with_power(power: float) -> tuple[dict[str, acc.RunLaw], int]:
    """Return the laws that find a good candidate with probability ``power``, and a number of draws.

    A fixed number of draws n finds with probability 1 - (1 - 0.1)^n. Of laws with a largest number of runs
    there are two: one that draws half of its trials, and one that draws all of them.
    """
    count = math.ceil(math.log1p(-power) / math.log1p(-_TOP))

    def binomial(mean: float) -> acc.RunLaw:
        return acc.Binomial(2 * count, mean)

    families = (*_FAMILIES, ("binomial", binomial))
    laws: dict[str, acc.RunLaw] = {}
    for name, family in families:
        law = _with_power(family, power)
        if law is not None:
            laws[name] = law
    laws["fixed number of runs"] = acc.Binomial(count, count)
    return laws, count


def _with_power(family: Callable[[float], acc.RunLaw], power: float) -> acc.RunLaw | None:
    """Return a family's law of least mean that finds with probability ``power``, or None if none does."""
    from scipy.optimize import brentq

    def surplus(mean: float) -> float:
        return finding_probability(family(mean)) - power

    low = 1.0 + 1e-9
    high = 2.0
    if surplus(low) >= 0.0:
        return family(low)
    most = float(family(low).most or _LARGEST_MEAN)
    while surplus(high) < 0.0:
        if high >= most:
            return None  # however large its mean, it draws few runs too often
        high = min(2.0 * high, most)
    mean = float(brentq(surplus, low, high, xtol=1e-6))
    return family(mean)


def largest_mean(
    base: acc.Event,
    family: Callable[[float], acc.RunLaw],
    *,
    selection: Callable[[acc.Event, acc.RunLaw], acc.Event] = acc.PrivateSelection,
    least: float = 1.0,
    epsilon: float,
    delta: float,
    adjacency: acc.Adjacency,
) -> acc.RunLaw | None:
    """Return the law of the largest mean whose selection stays within a target, by bisection.

    Args:
        base: What one run costs.
        family: The law of a mean.
        selection: What a selection of such runs costs with a law.
        least: The smallest mean to try.
        epsilon: Target of the selection.
        delta: In (0, 1).
        adjacency: Which neighbours the noise hides.

    Returns:
        The law, whose mean is a whole number of thousandths, so that the plan shows what it charges; None
        where the smallest mean is beyond the target.
    """

    def fits(thousandths: int) -> bool:
        event = selection(base, family(thousandths / _GRAIN))
        return account(event, delta, adjacency=adjacency).epsilon <= epsilon

    cap = family(least).most or _MOST_RUNS
    top = min(_MOST_RUNS, cap) * _GRAIN
    low = round(least * _GRAIN)
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
        if fits(middle):
            low = middle
        else:
            high = middle
    return family(low / _GRAIN)
