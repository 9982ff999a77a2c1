"""Laws of hyperparameters: Optuna's distributions, public priors beside them, and samplers of them."""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from privtune.names import check_text
from privtune.numbers import is_number

if TYPE_CHECKING:
    from privtune.training.mechanism.streams import Streams

__all__ = [
    "DependentSamplerError",
    "IndependentSampler",
    "LogNormal",
    "Mixture",
    "Prior",
    "SearchSpace",
    "categorical",
    "check_hyperparameter",
    "inside",
    "plain",
    "require_independent_sampler",
    "with_public_priors",
    "with_tuples",
    "without_numpy",
]


@runtime_checkable
class Prior(Protocol):
    """A law of one hyperparameter that is fixed in advance.

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
        """Draw one value.

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
        """Draw one candidate: a value for every hyperparameter of the space.

        Args:
            rng: Source of randomness, of this candidate alone.

        Returns:
            Values by name.
        """
        ...


@dataclass(frozen=True)
class LogNormal:
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
        if not 0 < self._low < self._high < math.inf:
            raise InvalidInputError("low", self._low, f"must lie between 0 and high, {self._high}")
        kept = _normal_cdf(self._z(self._high)) - _normal_cdf(self._z(self._low))
        if kept < 1e-3:
            raise InvalidInputError(
                "low and high",
                (self._low, self._high),
                f"must hold at least a thousandth of the law; they hold {kept:.2g}",
            )

    @property
    def _low(self) -> float:
        return self.median * math.exp(-6 * self.sigma) if self.low is None else self.low

    @property
    def _high(self) -> float:
        return self.median * math.exp(6 * self.sigma) if self.high is None else self.high

    def _z(self, value: float) -> float:
        return (math.log(value) - math.log(self.median)) / self.sigma

    @property
    def distribution(self) -> FloatDistribution:
        """The support."""
        return FloatDistribution(self._low, self._high, log=True)

    def draw(self, rng: np.random.Generator) -> float:
        """Draw one value."""
        while True:
            value = self.median * math.exp(self.sigma * float(rng.standard_normal()))
            if self._low <= value <= self._high:
                return value


@dataclass(frozen=True)
class Mixture:
    """One of several laws, drawn with public weights.

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
        if self.weights is not None and (
            len(self.weights) != len(self.components) or not all(w > 0 for w in self.weights)
        ):
            raise InvalidInputError(
                "weights", self.weights, "must be one number above 0 for each component"
            )

    @property
    def distribution(self) -> BaseDistribution:
        """The support: the hull of the components'."""
        parts = [component.distribution for component in self.components]
        if all(isinstance(part, CategoricalDistribution) for part in parts):
            choices = [c for part in parts for c in getattr(part, "choices", ())]
            return CategoricalDistribution(list(dict.fromkeys(choices)))
        lows = [float(getattr(part, "low", math.nan)) for part in parts]
        highs = [float(getattr(part, "high", math.nan)) for part in parts]
        if any(map(math.isnan, lows)):
            raise InvalidInputError("components", parts, "must be all numbers or all choices")
        return FloatDistribution(min(lows), max(highs), log=min(lows) > 0)

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw the component, then the value."""
        weights: Sequence[float] = self.weights or (1.0,) * len(self.components)
        shares = np.asarray(weights, dtype=float) / sum(weights)
        index = int(np.searchsorted(np.cumsum(shares), rng.random(), side="right"))
        return self.components[min(index, len(self.components) - 1)].draw(rng)


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def with_public_priors(space: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return a space with the laws that ``{prior: public}`` stands for, by hyperparameter.

    They are shipped with the package, and made of what was best on public data: see ``studies/priors``.

    Args:
        space: As it stands in a spec: the arguments of a law for each name.

    Returns:
        The same without ``prior``; what is stored says the law, whatever later versions ship.

    Raises:
        InvalidInputError: If there is no public prior of a name, or something else beside it.

    Example:
        >>> law = with_public_priors({"learning_rate": {"prior": "public"}})["learning_rate"]
        >>> law["type"], sorted(law)
        ('log_normal', ['median', 'sigma', 'type'])
    """
    if not any(isinstance(fields, Mapping) and "prior" in fields for fields in space.values()):
        return dict(space)
    file = importlib.resources.files("privtune") / "public-priors.json"
    known = json.loads(file.read_text("utf-8"))
    found: dict[str, Mapping[str, Any]] = {}
    for name, fields in space.items():
        found[name] = fields
        if isinstance(fields, Mapping) and "prior" in fields:
            if name not in known or dict(fields) != {"prior": "public"}:
                raise InvalidInputError(
                    f"space.{name}",
                    dict(fields),
                    "may be {prior: public}, and nothing beside it, for " + ", ".join(known),
                )
            found[name] = known[name]["law"]
    return found


_LONGEST_NAME = 500  # characters: what Optuna's storage holds, and a prefix

_KINDS: Mapping[str, tuple[type[Any], frozenset[str]]] = {
    "float": (FloatDistribution, frozenset({"low", "high", "log", "step"})),
    "int": (IntDistribution, frozenset({"low", "high", "log", "step"})),
    "categorical": (CategoricalDistribution, frozenset({"choices"})),
    "log_normal": (LogNormal, frozenset({"median", "sigma", "low", "high"})),
    "mixture": (Mixture, frozenset({"components", "weights"})),
}

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "float": ("low", "high"),
    "int": ("low", "high"),
    "categorical": ("choices",),
    "log_normal": ("median", "sigma"),
    "mixture": ("components",),
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_listed(value: object) -> bool:
    kinds = bool | int | float | str | None
    return isinstance(value, list | tuple) and all(isinstance(v, kinds) for v in value)


def plain(name: str, value: object) -> Any:
    """Check the value of a hyperparameter, and return it in Python's own types.

    Args:
        name: The hyperparameter.
        value: None, a boolean, a number, a text, a scalar of NumPy's, or a tuple of such values.

    Returns:
        The same in Python's own types.

    Raises:
        InvalidInputError: If it is something else: a module, a function, a list, an enum, a dtype. What a
            file cannot hold would be found when the first trial ends, after the charge.

    Example:
        >>> plain("width", np.int64(4)), plain("widths", (64, np.float32(0.5))), plain("act", "relu")
        (4, (64, 0.5), 'relu')
        >>> plain("act", dict)
        Traceback (most recent call last):
            ...
        privtune.errors.InvalidInputError: act = 'dict': must be None, a boolean, a number, a text or ...
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is tuple:
        return tuple(plain(name, part) for part in value)
    if type(value) is str:
        return check_text(value, name)
    if value is None or type(value) in (bool, float) or (type(value) is int and is_number(value)):
        return value
    if type(value) is int:
        raise InvalidInputError(
            name, value, "must be a number that a float can hold, up to 1.8e308"
        )
    kind = str(getattr(value, "__qualname__", None) or type(value).__qualname__)
    if isinstance(value, list):
        remedy = "Write a tuple, such as (64, 32): it comes back as one."
    else:
        remedy = (
            "Suggest its name and look it up: trial.suggest_categorical('act', ['relu', 'tanh']), then "
            "{'relu': nn.ReLU, 'tanh': nn.Tanh}[act]."
        )
    raise InvalidInputError(
        name, kind, "must be None, a boolean, a number, a text or a tuple of these", remedy
    )


def without_numpy(data: Any) -> Any:
    """Return data of a spec with Python's numbers and lists for NumPy's.

    Args:
        data: What a program, or a file, says.

    Example:
        >>> without_numpy({"low": np.float64(0.5), "choices": np.arange(3)})
        {'low': 0.5, 'choices': [0, 1, 2]}
    """
    return _without_numpy(data, {})


def _without_numpy(data: Any, done: dict[int, Any]) -> Any:
    # What stands in several places, as an alias of YAML's, stays one object: a few nested lists of
    # aliases would else fill the memory.
    if id(data) in done:
        return done[id(data)]
    each = partial(_without_numpy, done=done)
    if isinstance(data, np.generic):
        return data.item()
    if isinstance(data, np.ndarray):
        return [each(value) for value in data]
    if isinstance(data, Mapping):
        done[id(data)] = found = {each(name): each(value) for name, value in data.items()}
        return found
    if type(data) in (list, tuple):
        done[id(data)] = listed = type(data)(map(each, data))
        return listed
    return data


def check_hyperparameter(name: object) -> str:
    """Return the name of a hyperparameter that can be kept, released and shown.

    Args:
        name: The name.

    Raises:
        InvalidInputError: If it is no text, or a very long one.

    Example:
        >>> check_hyperparameter("learning rate")
        'learning rate'
    """
    text = check_text(name, "name of a hyperparameter")
    if not 0 < len(text) <= _LONGEST_NAME:
        allowed = f"must be a text of 1 to {_LONGEST_NAME} characters"
        raise InvalidInputError("name of a hyperparameter", text, allowed)
    return text


def categorical(name: str, choices: object) -> CategoricalDistribution:
    """Return the uniform law on some choices, each of them as :func:`plain` has it.

    Args:
        name: The hyperparameter.
        choices: A list, a tuple, a range or an array of them.

    Raises:
        InvalidInputError: If they have no order, there are none, or one cannot be kept.

    Example:
        >>> categorical("width", np.arange(4, 7)).choices
        (4, 5, 6)
    """
    if isinstance(choices, str | bytes) or not isinstance(choices, Sequence | np.ndarray):
        kind = type(choices).__qualname__
        raise InvalidInputError(name, kind, "must be a list, a tuple or an array of choices")
    if len(choices) == 0:
        raise InvalidInputError(name, [], "must hold at least one choice")
    return _categorical([plain(name, choice) for choice in choices])


def _categorical(choices: Sequence[Any]) -> CategoricalDistribution:
    if not any(isinstance(choice, tuple) for choice in choices):
        return CategoricalDistribution(choices)
    law = CategoricalDistribution([None])
    law.choices = tuple(
        choices
    )  # its constructor warns of tuples, which only its storage cannot hold
    return law


def with_tuples(value: Any) -> Any:
    """Return the value of a hyperparameter with tuples in place of JSON's lists.

    No hyperparameter is a list: see :func:`plain`.

    Args:
        value: What JSON gave back.

    Example:
        >>> with_tuples([64, [32, "x"]])
        (64, (32, 'x'))
    """
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


_Rule = tuple[Callable[[object], bool], str]
_A_NUMBER: _Rule = (_is_number, "a number")
_A_WHOLE_NUMBER: _Rule = (_is_whole, "a whole number")
_NONE_OR_NUMBER: _Rule = (lambda value: value is None or _is_number(value), "a number")
_VALUES: Mapping[tuple[str, str], _Rule] = {
    **{("", name): _A_NUMBER for name in ("low", "high", "median", "sigma")},
    **{("int", name): _A_WHOLE_NUMBER for name in ("low", "high", "step")},
    ("log_normal", "low"): _NONE_OR_NUMBER,
    ("log_normal", "high"): _NONE_OR_NUMBER,
    ("", "step"): _NONE_OR_NUMBER,
    ("", "log"): (lambda value: isinstance(value, bool), "true or false"),
    ("", "choices"): (_is_listed, "a list of words and numbers"),
    ("", "components"): (lambda _: True, "a list of laws"),
    ("", "weights"): (lambda value: value is None or _is_listed(value), "a list of numbers"),
}
"""What an argument must be, of one law or of all."""


class DependentSamplerError(PrivTuneError):
    """Private selection was asked to draw candidates that are not i.i.d."""


@dataclass(frozen=True)
class _Uniform:
    """One of Optuna's distributions as a prior: uniform, or log-uniform."""

    distribution: BaseDistribution

    def draw(self, rng: np.random.Generator) -> Any:
        sampler = RandomSampler(seed=int(rng.integers(2**32)))
        # Optuna's random sampler looks at neither the study nor the trial.
        return sampler.sample_independent(None, None, "value", self.distribution)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SearchSpace(Mapping[str, BaseDistribution]):
    """Names of hyperparameters and the laws they are drawn from.

    Args:
        distributions: Optuna's distributions or :class:`~privtune.spaces.Prior` objects, by the
            name of the hyperparameter.
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
        """Read a space as it stands in a study spec.

        Args:
            spec: For each name, ``type`` (float, int, categorical, log_normal or mixture) and the
                arguments of that law: ``low``, ``high``, ``log``, ``step`` or ``choices`` for
                Optuna's distributions; ``median``, ``sigma``, ``low``, ``high``; ``components``
                and ``weights``. Or ``prior: public`` alone: what was best on public data.

        Returns:
            The space.

        Raises:
            InvalidInputError: If a type or an argument is unknown, or Optuna refuses the values.
        """
        laws = with_public_priors(without_numpy(spec))
        return cls({name: _law(f"space.{name}", fields) for name, fields in laws.items()})

    def __getitem__(self, name: str) -> BaseDistribution:
        law = self.distributions[name]
        return law if isinstance(law, BaseDistribution) else law.distribution

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
            drawn = {name: _prior(law).draw(rng) for name, law in self.distributions.items()}
            return {name: plain(name, value) for name, value in drawn.items()}
        drawn = dict(self.sampler.draw(rng))
        for name, distribution in self.items():
            if name not in drawn or not inside(distribution, drawn[name]):
                raise InvalidInputError(
                    "sampler", type(self.sampler).__name__, f"must draw {name} from {distribution}"
                )
        return {name: plain(name, drawn[name]) for name in self}


def _law(where: str, fields: Mapping[str, Any]) -> BaseDistribution | Prior:
    if not isinstance(fields, Mapping):
        raise InvalidInputError(where, fields, "must be a mapping of names to values")
    arguments = dict(fields)
    kind = str(arguments.pop("type", "float"))
    if kind not in _KINDS:
        raise InvalidInputError(f"{where}.type", kind, f"must be one of {', '.join(_KINDS)}")
    law, allowed = _KINDS[kind]
    if unknown := sorted(map(str, set(arguments) - allowed)):
        raise InvalidInputError(where, unknown, f"a {kind} takes {', '.join(sorted(allowed))}")
    if kind == "mixture":
        parts = arguments.get("components", ())
        if not isinstance(parts, list | tuple):
            raise InvalidInputError(f"{where}.components", parts, "must be a list of laws")
        arguments["components"] = tuple(_prior(_law(where, part)) for part in parts)
    if missing := [name for name in _NEEDED[kind] if name not in arguments]:
        raise InvalidInputError(where, dict(fields), f"a {kind} also needs {', '.join(missing)}")
    for name, value in arguments.items():
        right, allowed_value = _VALUES.get((kind, name)) or _VALUES["", name]
        if not right(value):
            raise InvalidInputError(f"{where}.{name}", value, f"must be {allowed_value}")
    if arguments.get("weights") is not None:
        arguments["weights"] = tuple(arguments["weights"])
    if kind == "categorical":
        choices = categorical(f"{where}.choices", arguments["choices"])
        if any(isinstance(c, float) and not math.isfinite(c) for c in choices.choices):
            raise InvalidInputError(f"{where}.choices", arguments["choices"], "must be finite")
        return choices
    try:
        made: BaseDistribution | Prior = law(**arguments)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(where, dict(fields), str(error).rstrip(".")) from error
    if isinstance(made, FloatDistribution) and not math.isfinite(made.high - made.low):
        raise InvalidInputError(where, dict(fields), "must have a finite range")
    return made


def _prior(law: BaseDistribution | Prior) -> Prior:
    return _Uniform(law) if isinstance(law, BaseDistribution) else law


def inside(distribution: BaseDistribution, value: Any) -> bool:
    """Return whether a distribution can draw a value.

    Args:
        distribution: One of Optuna's.
        value: A value of any type.

    Example:
        >>> from optuna.distributions import FloatDistribution
        >>> inside(FloatDistribution(0.1, 1.0), 0.5), inside(FloatDistribution(0.1, 1.0), "x")
        (True, False)
    """
    try:
        return bool(distribution._contains(distribution.to_internal_repr(value)))
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
    # An exact type: a subclass may do anything.
    if type(sampler) is RandomSampler:
        return
    if not isinstance(sampler, BaseSampler):
        if getattr(sampler, "independent", False) is True:
            return
        raise DependentSamplerError(
            f"{type(sampler).__name__} does not declare that its draws are independent of each "
            "other and of their scores, which private selection needs. Set `independent = True` on "
            "it if that is so, or use the strategy 'everything', which pays for every trial."
        )
    raise DependentSamplerError(
        f"{type(sampler).__name__} does not draw candidates independently of each other and of "
        "their scores, which private selection needs. Use optuna.samplers.RandomSampler, or the "
        "strategy 'everything', which pays for every trial."
    )
