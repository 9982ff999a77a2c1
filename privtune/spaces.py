"""Search spaces on Optuna's distributions, and the samplers that a strategy may draw them with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.priors import IndependentSampler, LogNormal, Mixture, Prior, with_public_priors

if TYPE_CHECKING:
    from privtune.training.mechanism.streams import Streams

__all__ = [
    "DependentSamplerError",
    "SearchSpace",
    "inside",
    "require_independent_sampler",
]

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
    """Say whether these are choices: Optuna only warns of what it cannot store."""
    kinds = bool | int | float | str | None
    return isinstance(value, list | tuple) and all(isinstance(v, kinds) for v in value)


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
        distributions: Optuna's distributions or :class:`~privtune.priors.Prior` objects, by the
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
        laws = with_public_priors(spec)
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
            return {name: _prior(law).draw(rng) for name, law in self.distributions.items()}
        drawn = dict(self.sampler.draw(rng))
        for name, distribution in self.items():
            if name not in drawn or not inside(distribution, drawn[name]):
                raise InvalidInputError(
                    "sampler", type(self.sampler).__name__, f"must draw {name} from {distribution}"
                )
        return {name: drawn[name] for name in self}


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
