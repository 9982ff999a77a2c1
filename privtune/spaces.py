"""Probability laws of hyperparameters: Optuna's distributions, public priors, and samplers.

A law is fixed in advance: it looks at no score and at no data.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.names import check_text, refuse_fields, refuse_name
from privtune.numbers import is_number
from privtune.public_priors import with_public_priors

if TYPE_CHECKING:
    from privtune.training.mechanism.streams import Streams

__all__ = [
    "DependentSamplerError",
    "IndependentSampler",
    "LogNormal",
    "Mixture",
    "Prior",
    "SearchSpace",
    "require_independent_sampler",
]

_LONGEST_NAME = 500  # characters: what Optuna's storage holds, and a prefix

_Fields = Mapping[str, Any]  # of a law, as a spec has them


@runtime_checkable
class Prior(Protocol):
    """A probability law of one hyperparameter, fixed in advance.

    Example:
        >>> class Halves:
        ...     distribution = CategoricalDistribution([0.5, 0.25, 0.125])
        ...     def draw(self, rng):
        ...         return 0.5 ** int(rng.integers(1, 4))
        >>> isinstance(Halves(), Prior), Halves().draw(np.random.default_rng(0))
        (True, 0.125)
    """

    @property
    def distribution(self) -> BaseDistribution:
        """Optuna's distribution with the same support: what the curator's storage records."""
        ...

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw one value of the hyperparameter.

        Args:
            rng: Source of randomness; the round's, so that a value can be drawn again.

        Returns:
            A value in the support of :attr:`distribution`.
        """
        ...


@runtime_checkable
class IndependentSampler(Protocol):
    """A sampler of the user's own, for whole candidates.

    ``independent`` is a declaration: every draw comes from one law that was fixed before the
    study, whatever was drawn or scored before. Private selection rests on it, so it must be said.

    Example:
        >>> class Together:
        ...     independent = True
        ...     def draw(self, rng):  # the rate falls with the batch
        ...         batch = int(rng.choice([64, 256]))
        ...         return {"expected_batch_size": batch, "learning_rate": 8.0 / batch}
        >>> isinstance(Together(), IndependentSampler), Together().draw(np.random.default_rng(0))
        (True, {'expected_batch_size': 256, 'learning_rate': 0.03125})
    """

    independent: bool

    def draw(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Draw one candidate: a value for each hyperparameter.

        Args:
            rng: Source of randomness, of this candidate alone.

        Returns:
            A value for every hyperparameter of the space.
        """
        ...


@dataclass(frozen=True)
class LogNormal(Prior):
    """The log-normal law, cut to an interval (drawn again until inside).

    Args:
        median: Median before the cut, above 0.
        sigma: Standard deviation of the natural logarithm, above 0.
        low: Least value; six standard deviations below the median unless given.
        high: Largest value; six standard deviations above the median unless given.

    Raises:
        InvalidInputError: If a value is out of its range, or the interval holds almost nothing.

    Example:
        >>> prior = LogNormal(median=0.1, sigma=1.0, low=1e-3)
        >>> round(prior.draw(np.random.default_rng(0)), 4), round(prior.distribution.high, 1)
        (0.1134, 40.3)
    """

    median: float
    sigma: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for name in ("median", "sigma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInputError(name, value, "must be a finite number above 0")
        low, high = self._ends
        if not 0 < low < high < math.inf:
            raise InvalidInputError("low", low, f"must lie between 0 and high, {high}")
        below_high = self._share_below(high)
        share = below_high - self._share_below(low)
        if share < 1e-3:  # else a draw would take thousands of tries
            raise InvalidInputError(
                "low and high",
                (low, high),
                f"must hold at least a thousandth of the law; they hold {share:.2g}",
            )

    def _share_below(self, value: float) -> float:
        """Return the probability that the law, before it is cut, is at most a value above 0."""
        z = math.log(value / self.median) / self.sigma
        return 0.5 * math.erfc(-z / math.sqrt(2))

    @property
    def _ends(self) -> tuple[float, float]:
        """The ends of the interval; an end that is not given lies six standard deviations from the median."""
        low = self.low
        high = self.high
        if low is None:
            low = self.median * math.exp(-6 * self.sigma)
        if high is None:
            high = self.median * math.exp(6 * self.sigma)
        return low, high

    @property
    def distribution(self) -> FloatDistribution:
        """The support, as Optuna's float distribution on a log scale."""
        return FloatDistribution(*self._ends, log=True)

    def draw(self, rng: np.random.Generator) -> float:
        """Draw one value between the ends, again and again until it lies inside."""
        low, high = self._ends
        while True:
            deviations = float(rng.standard_normal())
            value = self.median * math.exp(self.sigma * deviations)
            if low <= value <= high:
                return value


@dataclass(frozen=True)
class Mixture(Prior):
    """A mixture of laws: each draw chooses one of them by public weights.

    Args:
        components: At least one prior, all of numbers or all of choices.
        weights: Proportions, above 0; equal unless given.

    Raises:
        InvalidInputError: If there is no component, or a weight is missing or not above 0.

    Example:
        >>> usual, bold = LogNormal(0.01, 0.5), LogNormal(1.0, 1.0)
        >>> prior = Mixture((usual, bold), weights=(0.9, 0.1))
        >>> [round(prior.draw(np.random.default_rng(seed)), 3) for seed in range(4)]
        [0.009, 0.015, 0.008, 0.003]
    """

    components: tuple[Prior, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.components:
            raise InvalidInputError("components", (), "must hold at least one law")
        if self.weights is None:
            return
        is_complete = len(self.weights) == len(self.components)
        is_positive = all(weight > 0 for weight in self.weights)
        if not is_complete or not is_positive:
            allowed = "must be one number above 0 for each component"
            raise InvalidInputError("weights", self.weights, allowed)

    @property
    def distribution(self) -> BaseDistribution:
        """The support: the union of the components' choices, or the hull of their intervals."""
        parts = [component.distribution for component in self.components]
        if all(isinstance(part, CategoricalDistribution) for part in parts):
            choices: dict[Any, None] = {}  # each once, in the order of the components
            for part in parts:
                choices |= dict.fromkeys(getattr(part, "choices", ()))
            return CategoricalDistribution(list(choices))
        lows: list[float] = []
        highs: list[float] = []
        for part in parts:
            # Choices have no ends.
            lows.append(float(getattr(part, "low", math.nan)))
            highs.append(float(getattr(part, "high", math.nan)))
        if any(map(math.isnan, lows)):
            allowed = "must be all numbers or all choices"
            raise InvalidInputError("components", parts, allowed)
        low = min(lows)
        high = max(highs)
        return FloatDistribution(low, high, log=low > 0)

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw a component by its weight, then a value from it."""
        count = len(self.components)
        weights: Sequence[float] = self.weights or (1.0,) * count
        shares = np.asarray(weights, dtype=float) / sum(weights)
        ends = np.cumsum(shares)
        point = rng.random()
        index = int(np.searchsorted(ends, point, side="right"))
        index = min(index, count - 1)  # rounding may leave the last end below 1
        component = self.components[index]
        return component.draw(rng)


def plain(name: str, value: object) -> Any:
    """Check the value of a hyperparameter, and return it in Python's own types.

    Example:
        >>> plain("width", np.int64(4)), plain("widths", (64, np.float32(0.5))), plain("act", "relu")
        (4, (64, 0.5), 'relu')
    """
    # What a file cannot hold would be found when the first trial ends, after the charge.
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is tuple:
        return tuple(plain(name, part) for part in value)
    if type(value) is str:
        return check_text(value, name)
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is int:
        if is_number(value):
            return value
        allowed = "must be a number that a float can hold, up to 1.8e308"
        raise InvalidInputError(name, value, allowed)
    kind = getattr(value, "__qualname__", None) or type(value).__qualname__
    remedy = (
        "Suggest its name and look it up: trial.suggest_categorical('act', ['relu', 'tanh']), then "
        "{'relu': nn.ReLU, 'tanh': nn.Tanh}[act]."
    )
    if isinstance(value, list):
        remedy = "Write a tuple, such as (64, 32): it comes back as one."
    allowed = "must be None, a boolean, a number, a text or a tuple of these"
    raise InvalidInputError(name, str(kind), allowed, remedy)


def without_numpy(data: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a copy of a spec's data, with Python's numbers and lists in the place of NumPy's.

    Args:
        data: What a spec holds; it is left as it is.
        copies: The copies of mappings and lists that were met before, by the id of the original.
    """
    # An object that stands in several places stays one: nested aliases of YAML would fill the memory.
    copies = {} if copies is None else copies
    key = id(data)
    if key in copies:
        return copies[key]
    convert = partial(without_numpy, copies=copies)
    if isinstance(data, np.generic):
        return data.item()
    if isinstance(data, np.ndarray):
        return [convert(value) for value in data]
    if isinstance(data, Mapping):
        copies[key] = {convert(name): convert(value) for name, value in data.items()}
        return copies[key]
    kind = type(data)
    if kind in (list, tuple):
        copies[key] = kind(map(convert, data))
        return copies[key]
    return data


def check_hyperparameter(name: object) -> str:
    """Return the name of a hyperparameter if it is a text that can be stored, and not too long."""
    text = check_text(name, "name of a hyperparameter")
    if not 0 < len(text) <= _LONGEST_NAME:
        allowed = f"must be a text of 1 to {_LONGEST_NAME} characters"
        raise InvalidInputError("name of a hyperparameter", text, allowed)
    return text


def categorical(name: str, choices: object) -> CategoricalDistribution:
    """Return the uniform law on choices (a list, tuple, range or array), each converted by :func:`plain`."""
    is_text = isinstance(choices, str | bytes)
    if is_text or not isinstance(choices, Sequence | np.ndarray):
        kind = type(choices).__qualname__
        allowed = "must be a list, a tuple or an array of choices"
        raise InvalidInputError(name, kind, allowed)
    if len(choices) == 0:
        raise InvalidInputError(name, [], "must hold at least one choice")
    law = CategoricalDistribution([None])
    # Optuna's constructor warns of tuples, which its storage alone cannot hold.
    law.choices = tuple(plain(name, choice) for choice in choices)
    return law


def with_tuples(value: Any) -> Any:
    """Return the value of a hyperparameter from JSON, with tuples in the place of lists."""
    if not isinstance(value, list):
        return value
    return tuple(map(with_tuples, value))


class DependentSamplerError(PrivTuneError):
    """Private selection was asked to draw candidates that are not i.i.d."""


@dataclass(frozen=True)
class _Uniform:
    """One of Optuna's distributions as a prior: uniform, or log-uniform."""

    distribution: BaseDistribution

    def draw(self, rng: np.random.Generator) -> Any:
        seed = int(rng.integers(2**32))
        sampler = RandomSampler(seed=seed)
        # Optuna's random sampler looks at neither the study nor the trial.
        return sampler.sample_independent(None, None, "value", self.distribution)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SearchSpace(Mapping[str, BaseDistribution]):
    """Names of hyperparameters and the laws they are drawn from.

    Args:
        distributions: Optuna's distributions or :class:`Prior` objects, by name.
        sampler: A sampler of the user's own for whole candidates; it must declare that its draws
            are independent.

    Raises:
        DependentSamplerError: If the sampler does not declare independence.

    Example:
        >>> from privtune.training.mechanism.streams import Streams
        >>> space = SearchSpace.from_dict(
        ...     {"learning_rate": {"type": "float", "low": 0.01, "high": 10.0, "log": True}}
        ... )
        >>> streams = Streams(bytes(32))  # a secret of the operating system's, outside of an example
        >>> space.draw(streams, 3) == space.draw(streams, 3), space.draw(streams, 4)
        (True, {'learning_rate': 0.06051373467719626})
    """

    distributions: Mapping[str, BaseDistribution | Prior]
    sampler: IndependentSampler | None = None

    def __post_init__(self) -> None:
        if self.sampler is not None:
            require_independent_sampler(self.sampler)

    @classmethod
    def from_dict(cls, spec: Mapping[str, Mapping[str, Any]]) -> SearchSpace:
        """Return the space that a study spec describes.

        Args:
            spec: For each name, ``type`` (float, int, categorical, log_normal or mixture) and the
                arguments of that law: ``low``, ``high``, ``log``, ``step`` or ``choices`` for
                Optuna's distributions; ``median``, ``sigma``, ``low``, ``high``; ``components``
                and ``weights``. Or ``prior: public``: what was best on public data, for the
                ``method`` (``dpsgd``) and the ``schedule`` (``constant``) beside it.

        Returns:
            The space.

        Raises:
            InvalidInputError: If a type or an argument is unknown, or Optuna refuses the values.
        """
        laws: dict[str, BaseDistribution | Prior] = {}
        plain_spec = without_numpy(spec)
        all_fields = with_public_priors(plain_spec)
        for name, fields in all_fields.items():
            laws[name] = _law(f"space.{name}", fields)
        return cls(laws)

    def __getitem__(self, name: str) -> BaseDistribution:
        law = self.distributions[name]
        if isinstance(law, BaseDistribution):
            return law
        return law.distribution

    def __iter__(self) -> Iterator[str]:
        return iter(self.distributions)

    def __len__(self) -> int:
        return len(self.distributions)

    def draw(self, streams: Streams, candidate: int) -> dict[str, Any]:
        """Draw candidate number ``candidate``: a function of the streams and its number alone.

        Args:
            streams: The round's random streams.
            candidate: Its number, from 0.

        Returns:
            A value for every hyperparameter.

        Raises:
            InvalidInputError: If the user's sampler leaves a hyperparameter out, or its support.
        """
        rng = streams.numpy("search", candidate)
        if self.sampler is None:
            values: dict[str, Any] = {}
            for name, law in self.distributions.items():
                prior = _prior(law)
                values[name] = prior.draw(rng)
        else:
            values = dict(self.sampler.draw(rng))
            self._check_values(values)
        return {name: plain(name, values[name]) for name in self}

    def _check_values(self, values: Mapping[str, Any]) -> None:
        """Refuse a draw of the user's sampler that lies outside the declared distributions."""
        for name, distribution in self.items():
            if name in values and inside(distribution, values[name]):
                continue
            allowed = f"must draw {name} from {distribution}"
            sampler = type(self.sampler).__name__
            raise InvalidInputError("sampler", sampler, allowed)


_LAWS: Mapping[str, type[Any]] = {
    "float": FloatDistribution,
    "int": IntDistribution,
    "categorical": CategoricalDistribution,
    "log_normal": LogNormal,
    "mixture": Mixture,
}

_IN_WORDS = ("{type: float, log: true}", "{type: float, step: ...}")
"""Laws of Optuna's and other tools that are options of a type here."""


def _law(where: str, fields: _Fields) -> BaseDistribution | Prior:
    """Return the law that a spec's fields describe; check types, which Optuna's constructors do not."""
    if not isinstance(fields, Mapping):
        allowed = "must be a mapping of names to values"
        raise InvalidInputError(where, fields, allowed, f"{_EXAMPLE} is one.")
    arguments = dict(fields)
    kind = str(arguments.pop("type", "float"))
    if kind not in _LAWS:
        refuse_name(f"{where}.type", kind, _LAWS, free=_IN_WORDS)
    _check_arguments(where, kind, fields, arguments)
    match kind:
        case "float":
            _check_range(where, fields)
        case "int":
            _check_range(where, fields, is_integer=True)
        case "mixture":
            arguments = _mixture_arguments(where, arguments)
        case "categorical":
            return _finite_choices(f"{where}.choices", arguments["choices"])
    try:
        law: BaseDistribution | Prior = _LAWS[kind](**arguments)
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).rstrip(".")
        raise InvalidInputError(where, dict(fields), reason) from error
    if not isinstance(law, FloatDistribution):
        return law
    width = law.high - law.low
    if not math.isfinite(width):
        raise InvalidInputError(where, dict(fields), "must have a finite range")
    return law


def _mixture_arguments(where: str, arguments: _Fields) -> dict[str, Any]:
    """Return the arguments of :class:`Mixture` from a spec's fields, with components as priors."""
    components: list[Prior] = []
    for fields in arguments["components"]:
        law = _law(where, fields)
        components.append(_prior(law))
    weights = arguments.get("weights")
    return {
        "components": tuple(components),
        "weights": weights and tuple(weights),
    }


def _check_arguments(
    where: str,
    kind: str,
    fields: _Fields,
    arguments: _Fields,
) -> None:
    """Refuse a law's arguments that are unknown, missing, or of a wrong type.

    Args:
        where: What the law was given as.
        kind: Its kind, one of ``_LAWS``.
        fields: The law as it was given, for messages.
        arguments: Its fields without the type.
    """
    law = _LAWS[kind]
    parameters = inspect.signature(law).parameters
    unknown = set(arguments) - set(parameters)
    if unknown:
        remedy = f"{_EXAMPLE} is one." if kind == "float" else ""
        refuse_fields(where, unknown, sorted(parameters), f"type {kind}", remedy=remedy)
    missing: list[str] = []
    for name, parameter in parameters.items():
        is_needed = parameter.default is parameter.empty
        if is_needed and name not in arguments:
            missing.append(name)
    if missing:
        names = ", ".join(missing)
        raise InvalidInputError(where, dict(fields), f"a {kind} also needs {names}")
    for name, value in arguments.items():
        parameter = parameters[name]
        is_default = value is None and parameter.default is None
        if not is_default:
            _check_argument(where, kind, name, value)


def _check_argument(where: str, kind: str, name: str, value: object) -> None:
    """Refuse an argument of a law that has a wrong type, such as a text for a number."""
    if _is_right(kind, name, value):
        return
    number = "a whole number" if kind == "int" else "a number"
    type_in_words = _MUST.get(name, number)
    remedy = ""
    if type_in_words.startswith("a list"):
        remedy = "In YAML a list stands in brackets: [0.1, 0.5]."
    raise InvalidInputError(f"{where}.{name}", value, f"must be {type_in_words}", remedy)


def _finite_choices(name: str, choices: Any) -> CategoricalDistribution:
    """Return the law on a spec's choices; refuse ∞ and NaN, which JSON lacks."""
    law = categorical(name, choices)
    for choice in law.choices:
        if isinstance(choice, float) and not math.isfinite(choice):
            raise InvalidInputError(name, choices, "must be finite")
    return law


_EXAMPLE = "{type: float, low: 0.05, high: 5.0, log: true}"


def _check_range(
    where: str,
    fields: _Fields,
    *,
    is_integer: bool = False,
) -> None:
    """Refuse a range with exchanged ends, or with a step on a log scale."""
    low = fields["low"]
    high = fields["high"]
    step = fields.get("step")
    if low > high:
        problem = f"low, {low}, must be at most high, {high}"
        raise InvalidInputError(where, dict(fields), problem, "Exchange the two.")
    if step is None or not fields.get("log"):
        return
    is_usual_step = is_integer and step == 1
    if not is_usual_step:
        problem = "a log scale goes without a step"
        remedy = "Leave one of the two out."
        raise InvalidInputError(where, dict(fields), problem, remedy)


_MUST: Mapping[str, str] = {
    "log": "true or false",
    "choices": "a list of words and numbers",
    "weights": "a list of numbers",
    "components": "a list of laws",
}


def _is_right(kind: str, name: str, value: object) -> bool:
    """Return whether an argument of a law has the right type: that of ``_MUST``, else a number."""
    if name == "log" or isinstance(value, bool):
        return name == "log" and isinstance(value, bool)
    if name == "components":
        return isinstance(value, list | tuple)
    if name in _MUST:
        kinds = bool | int | float | str | None
        if not isinstance(value, list | tuple):
            return False
        return all(isinstance(entry, kinds) for entry in value)
    if kind == "int":
        return isinstance(value, int)
    return isinstance(value, int | float)


def _prior(law: BaseDistribution | Prior) -> Prior:
    """Return a law as a prior: one of Optuna's distributions gets a ``draw``."""
    return _Uniform(law) if isinstance(law, BaseDistribution) else law


def inside(distribution: BaseDistribution, value: Any) -> bool:
    """Return whether a value, of any type, is in the support of one of Optuna's distributions."""
    try:
        representation = distribution.to_internal_repr(value)
        return bool(distribution._contains(representation))
    except (TypeError, ValueError):
        return False


def require_independent_sampler(sampler: object) -> None:
    """Refuse a sampler whose draws are not i.i.d. from a distribution fixed in advance.

    Args:
        sampler: An Optuna sampler, or one of the user's own that declares ``independent = True``.

    Raises:
        DependentSamplerError: For every Optuna sampler but ``RandomSampler``. Adaptive samplers
            (TPE, GP, CMA-ES) look at scores; grids and quasi-random sequences do not draw
            independently.

    References:
        Papernot and Steinke 2022, arXiv 2110.03620, Theorem 2: the K runs are i.i.d.

    Example:
        >>> import optuna
        >>> require_independent_sampler(optuna.samplers.RandomSampler())
        >>> require_independent_sampler(optuna.samplers.TPESampler())
        Traceback (most recent call last):
            ...
        privtune.spaces.DependentSamplerError: TPESampler does not draw candidates ...
    """
    # An exact type: a subclass of RandomSampler may do anything.
    if type(sampler) is RandomSampler:
        return
    if isinstance(sampler, BaseSampler):
        says = "does not draw candidates independently of each other and of their scores"
        remedy = "Use optuna.samplers.RandomSampler"
    elif getattr(sampler, "independent", False) is not True:
        says = "does not declare that its draws are independent of each other and of their scores"
        remedy = "Set `independent = True` on it if that is so"
    else:
        return
    raise DependentSamplerError(
        f"{type(sampler).__name__} {says}, which private selection needs. {remedy}, or use the strategy "
        "'everything', which pays for every trial."
    )
