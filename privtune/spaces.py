"""Laws of hyperparameters: Optuna's distributions, public priors beside them, and samplers of them.

A law is fixed in advance: it looks at no score and at no data.
"""

from __future__ import annotations

import importlib.resources
import inspect
import json
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
    "require_independent_sampler",
]

_LONGEST_NAME = 500  # characters: what Optuna's storage holds, and a prefix


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
        """Draw one candidate.

        Args:
            rng: Source of randomness, of this candidate alone.

        Returns:
            A value for every hyperparameter of the space.
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
        low, high = self._ends
        if not 0 < low < high < math.inf:
            raise InvalidInputError("low", low, f"must lie between 0 and high, {high}")
        z_low, z_high = (math.log(end / self.median) / self.sigma for end in (low, high))
        kept = 0.5 * (math.erfc(-z_high / math.sqrt(2)) - math.erfc(-z_low / math.sqrt(2)))
        if kept < 1e-3:  # else a draw would take thousands of tries
            raise InvalidInputError(
                "low and high",
                (low, high),
                f"must hold at least a thousandth of the law; they hold {kept:.2g}",
            )

    @property
    def _ends(self) -> tuple[float, float]:
        low = self.median * math.exp(-6 * self.sigma) if self.low is None else self.low
        return low, self.median * math.exp(6 * self.sigma) if self.high is None else self.high

    @property
    def distribution(self) -> FloatDistribution:
        """The support."""
        return FloatDistribution(*self._ends, log=True)

    def draw(self, rng: np.random.Generator) -> float:
        """Draw one value."""
        low, high = self._ends
        while True:
            value = self.median * math.exp(self.sigma * float(rng.standard_normal()))
            if low <= value <= high:
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


def with_public_priors(space: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return a space of a spec with the shipped laws for ``{prior: public}``: see studies/priors."""
    found = dict(space)
    asked = {n: f for n, f in space.items() if isinstance(f, Mapping) and "prior" in f}
    if asked:
        file = importlib.resources.files("privtune") / "public-priors.json"
        known = json.loads(file.read_text("utf-8"))
        for name, fields in asked.items():
            if name not in known or dict(fields) != {"prior": "public"}:
                raise InvalidInputError(
                    f"space.{name}",
                    dict(fields),
                    "may be {prior: public}, and nothing beside it, for " + ", ".join(known),
                )
            found[name] = known[name]["law"]
    return found


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
    if value is None or type(value) in (bool, float) or (type(value) is int and is_number(value)):
        return value
    if type(value) is int:
        allowed = "must be a number that a float can hold, up to 1.8e308"
        raise InvalidInputError(name, value, allowed)
    kind = str(getattr(value, "__qualname__", None) or type(value).__qualname__)
    remedy = (
        "Suggest its name and look it up: trial.suggest_categorical('act', ['relu', 'tanh']), then "
        "{'relu': nn.ReLU, 'tanh': nn.Tanh}[act]."
    )
    if isinstance(value, list):
        remedy = "Write a tuple, such as (64, 32): it comes back as one."
    raise InvalidInputError(
        name, kind, "must be None, a boolean, a number, a text or a tuple of these", remedy
    )


def without_numpy(data: Any, done: dict[int, Any] | None = None) -> Any:
    """Return data of a spec with Python's numbers and lists for NumPy's."""
    # An object that stands in several places stays one: nested aliases of YAML would fill the memory.
    done = {} if done is None else done
    if id(data) in done:
        return done[id(data)]
    each = partial(without_numpy, done=done)
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
    """Return the name of a hyperparameter, which can be kept, released and shown."""
    text = check_text(name, "name of a hyperparameter")
    if not 0 < len(text) <= _LONGEST_NAME:
        allowed = f"must be a text of 1 to {_LONGEST_NAME} characters"
        raise InvalidInputError("name of a hyperparameter", text, allowed)
    return text


def categorical(name: str, choices: object) -> CategoricalDistribution:
    """Return the uniform law on a list, tuple, range or array of choices, each as :func:`plain` has it."""
    if isinstance(choices, str | bytes) or not isinstance(choices, Sequence | np.ndarray):
        kind = type(choices).__qualname__
        raise InvalidInputError(name, kind, "must be a list, a tuple or an array of choices")
    if len(choices) == 0:
        raise InvalidInputError(name, [], "must hold at least one choice")
    law = CategoricalDistribution([None])
    # Optuna's constructor warns of tuples, which its storage alone cannot hold.
    law.choices = tuple(plain(name, choice) for choice in choices)
    return law


def with_tuples(value: Any) -> Any:
    """Return the value of a hyperparameter, which is no list, from JSON, which has no tuples."""
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


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
        else:
            drawn = dict(self.sampler.draw(rng))
            for name, distribution in self.items():
                if name not in drawn or not inside(distribution, drawn[name]):
                    allowed = f"must draw {name} from {distribution}"
                    raise InvalidInputError("sampler", type(self.sampler).__name__, allowed)
        return {name: plain(name, drawn[name]) for name in self}


_LAWS: Mapping[str, type[Any]] = {
    "float": FloatDistribution,
    "int": IntDistribution,
    "categorical": CategoricalDistribution,
    "log_normal": LogNormal,
    "mixture": Mixture,
}


def _law(where: str, fields: Mapping[str, Any]) -> BaseDistribution | Prior:
    """Read a law; Optuna's constructors alone would take texts and booleans for numbers."""
    if not isinstance(fields, Mapping):
        raise InvalidInputError(where, fields, "must be a mapping of names to values")
    arguments = dict(fields)
    kind = str(arguments.pop("type", "float"))
    if kind not in _LAWS:
        raise InvalidInputError(f"{where}.type", kind, f"must be one of {', '.join(_LAWS)}")
    takes = inspect.signature(_LAWS[kind]).parameters
    if unknown := sorted(map(str, set(arguments) - set(takes))):
        raise InvalidInputError(where, unknown, f"a {kind} takes {', '.join(sorted(takes))}")
    needs = [name for name, each in takes.items() if each.default is each.empty]
    if missing := [name for name in needs if name not in arguments]:
        raise InvalidInputError(where, dict(fields), f"a {kind} also needs {', '.join(missing)}")
    for name, value in arguments.items():
        if (value is None and takes[name].default is None) or _is_right(kind, name, value):
            continue
        says = _MUST.get(name, "a whole number" if kind == "int" else "a number")
        raise InvalidInputError(f"{where}.{name}", value, f"must be {says}")
    if kind == "mixture":
        parts = tuple(_prior(_law(where, part)) for part in arguments["components"])
        weights = arguments.get("weights")
        arguments = {"components": parts, "weights": weights and tuple(weights)}
    if kind == "categorical":
        choices = categorical(f"{where}.choices", arguments["choices"])
        if any(isinstance(c, float) and not math.isfinite(c) for c in choices.choices):
            raise InvalidInputError(f"{where}.choices", arguments["choices"], "must be finite")
        return choices
    try:
        made: BaseDistribution | Prior = _LAWS[kind](**arguments)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(where, dict(fields), str(error).rstrip(".")) from error
    if isinstance(made, FloatDistribution) and not math.isfinite(made.high - made.low):
        raise InvalidInputError(where, dict(fields), "must have a finite range")
    return made


_MUST: Mapping[str, str] = {
    "log": "true or false",
    "choices": "a list of words and numbers",
    "weights": "a list of numbers",
    "components": "a list of laws",
}


def _is_right(kind: str, name: str, value: object) -> bool:
    """Return whether an argument of a law has its kind: one of ``_MUST``, else a number."""
    if name == "log" or isinstance(value, bool):
        return name == "log" and isinstance(value, bool)
    if name == "components":
        return isinstance(value, list | tuple)
    if name in _MUST:
        kinds = bool | int | float | str | None
        return isinstance(value, list | tuple) and all(isinstance(v, kinds) for v in value)
    return isinstance(value, int if kind == "int" else int | float)


def _prior(law: BaseDistribution | Prior) -> Prior:
    return _Uniform(law) if isinstance(law, BaseDistribution) else law


def inside(distribution: BaseDistribution, value: Any) -> bool:
    """Return whether one of Optuna's distributions can draw a value of any type."""
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
