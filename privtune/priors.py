"""Public priors beyond Optuna's distributions, and samplers of the user's own.

A prior is fixed in advance: it looks at no score and at no data.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution

from privtune.errors import InvalidInputError

__all__ = ["IndependentSampler", "LogNormal", "Mixture", "Prior", "with_public_priors"]


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
