"""Search spaces on Optuna's distributions, and the samplers that a strategy may draw them with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler

from privtune.errors import InvalidInputError, PrivTuneError

if TYPE_CHECKING:
    from privtune.training.streams import Streams

__all__ = [
    "DependentSamplerError",
    "SearchSpace",
    "independent_sampler",
    "require_independent_sampler",
]

_KINDS: Mapping[str, tuple[type[BaseDistribution], frozenset[str]]] = {
    "float": (FloatDistribution, frozenset({"low", "high", "log", "step"})),
    "int": (IntDistribution, frozenset({"low", "high", "log", "step"})),
    "categorical": (CategoricalDistribution, frozenset({"choices"})),
}


class DependentSamplerError(PrivTuneError):
    """Private selection was asked to draw candidates that are not i.i.d."""


@dataclass(frozen=True)
class SearchSpace(Mapping[str, BaseDistribution]):
    """Names of hyperparameters and the Optuna distributions they are drawn from.

    Args:
        distributions: By the name of the hyperparameter.
    """

    distributions: Mapping[str, BaseDistribution]

    @classmethod
    def from_dict(cls, spec: Mapping[str, Mapping[str, Any]]) -> SearchSpace:
        """Read a space as it stands in a study spec.

        Args:
            spec: For each name, ``type`` (float, int or categorical) and the arguments of Optuna's
                distribution of that type: ``low``, ``high``, ``log``, ``step`` or ``choices``.

        Returns:
            The space.

        Raises:
            InvalidInputError: If a type or an argument is unknown, or Optuna refuses the values.
        """
        distributions: dict[str, BaseDistribution] = {}
        for name, fields in spec.items():
            arguments = dict(fields)
            kind = str(arguments.pop("type", "float"))
            if kind not in _KINDS:
                raise InvalidInputError(
                    f"space.{name}.type", kind, f"must be one of {', '.join(_KINDS)}"
                )
            distribution, allowed = _KINDS[kind]
            if unknown := sorted(set(arguments) - allowed):
                raise InvalidInputError(
                    f"space.{name}", unknown, f"a {kind} takes {', '.join(sorted(allowed))}"
                )
            try:
                distributions[name] = distribution(**arguments)
            except (TypeError, ValueError) as error:
                raise InvalidInputError(f"space.{name}", dict(fields), str(error)) from error
        return cls(distributions)

    def __getitem__(self, name: str) -> BaseDistribution:
        return self.distributions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.distributions)

    def __len__(self) -> int:
        return len(self.distributions)


def independent_sampler(streams: Streams, candidate: int) -> RandomSampler:
    """Return the sampler that draws candidate number ``candidate`` of a round.

    Each candidate has a sampler of its own, seeded from the round's secret and its index, so that
    a candidate that is drawn again after an interruption is the same one.
    """
    return RandomSampler(seed=streams.seed("search", candidate) % 2**32)


def require_independent_sampler(sampler: BaseSampler) -> None:
    """Refuse a sampler whose draws are not i.i.d. from a distribution fixed in advance.

    Args:
        sampler: An Optuna sampler.

    Raises:
        DependentSamplerError: For every sampler but ``RandomSampler``. Adaptive samplers (TPE, GP,
            CMA-ES) look at scores; grids and quasi-random sequences do not draw independently.

    References:
        Papernot and Steinke 2022, arXiv 2110.03620, Theorem 2: the K runs are i.i.d.
    """
    # An exact type: a subclass may do anything.
    if type(sampler) is not RandomSampler:
        raise DependentSamplerError(
            f"{type(sampler).__name__} does not draw candidates independently of each other and of "
            "their scores, which private selection needs. Use optuna.samplers.RandomSampler, or a "
            "strategy that pays for every trial."
        )
