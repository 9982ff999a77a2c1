"""Laws of the secret number of runs K of a private selection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import scipy as sp
from numpy.typing import NDArray

from privtune.accounting._checks import check_integer, check_number
from privtune.accounting.run_law import RunLaw
from privtune.errors import InvalidInputError

__all__ = [
    "Binomial",
    "Geometric",
    "Logarithmic",
    "NegativeBinomial",
    "Poisson",
    "RunLaw",
    "TruncatedNegativeBinomial",
    "run_law_from_dict",
]

Floats = NDArray[np.float64]
_MAX_MEAN = 1e6
_LEAST_LOG_GAMMA = -600.0


@lru_cache(maxsize=1024)
def _log_gamma(shape: float, mean: float) -> float:
    """Return log γ of the truncated negative binomial law with this mean, by root finding.

    Near shape -1 γ falls far below what `1 - γ` can hold, so the logarithm is what is kept.
    """
    if mean == 1.0:
        return 0.0
    if shape == 1.0:
        return -math.log(mean)

    def excess(log_gamma: float) -> float:
        return _log_tnb_mean(shape, log_gamma) - math.log(mean)

    low, high = -1.0, -1e-14
    if excess(high) >= 0.0:
        return high
    while excess(low) < 0.0:
        low *= 2.0
        if low < _LEAST_LOG_GAMMA:
            raise InvalidInputError(
                "shape",
                shape,
                f"a shape this close to -1 has no mean of {mean:g} that can be computed",
                "Take a larger shape or a smaller mean.",
            )
    from scipy import optimize

    root = float(optimize.brentq(excess, low, high, xtol=1e-15, rtol=8.9e-16, maxiter=200))
    # The safe side is the smaller γ: more runs than asked for, never fewer than charged.
    while excess(root) < 0.0:
        root = math.nextafter(root, -math.inf)
    return root


def _log_tnb_mean(shape: float, log_gamma: float) -> float:
    """Return log E[K] = log( η (1-γ) / (γ (1 - γ^η)) )."""
    return _log_scale(shape, log_gamma) + _log_rest(log_gamma) - (shape + 1.0) * log_gamma


def _log_rest(log_gamma: float) -> float:
    """Return log(1 - γ), exact at both ends."""
    if log_gamma < -0.7:
        return math.log1p(-math.exp(log_gamma))
    return math.log(-math.expm1(log_gamma))


def _log_scale(shape: float, log_gamma: float) -> float:
    """Return log( η / (γ^(-η) - 1) ), continuous at η = 0."""
    exponent = -shape * log_gamma
    if abs(exponent) < 1e-12:
        return -math.log(-log_gamma) - exponent / 2.0
    if exponent > 700.0:
        return math.log(shape) - exponent
    return math.log(shape / math.expm1(exponent))


class NegativeBinomial(RunLaw):
    """The truncated negative binomial family, K >= 1 (Papernot and Steinke 2022, Definition 1)."""

    _shape: ClassVar[float]
    mean: float

    def __post_init__(self) -> None:
        mean = check_number("mean", self.mean, at_least=1.0, at_most=_MAX_MEAN)
        object.__setattr__(self, "mean", mean)
        super().__post_init__()

    @property
    def gamma(self) -> float:
        """The stopping parameter γ in (0, 1]."""
        return math.exp(self.log_gamma)

    @property
    def log_gamma(self) -> float:
        """The logarithm of γ, of the runs that are drawn where some are sure."""
        return _log_gamma(self.shape_parameter, self.drawn.mean)

    @property
    def shape_parameter(self) -> float:
        """The shape η, above -1."""
        return self._shape

    def _log_pmf(self, k: Floats) -> Floats:
        shape, log_gamma = self.shape_parameter, self.log_gamma
        if log_gamma == 0.0:
            return np.where(k == 1.0, 0.0, -np.inf)
        return np.asarray(
            _log_scale(shape, log_gamma)
            + k * _log_rest(log_gamma)
            + sp.special.gammaln(k + shape)
            - sp.special.gammaln(1.0 + shape)
            - sp.special.gammaln(k + 1.0)
        )

    def _reach(self, x: Floats) -> Floats:
        """Return `-log(1 - (1-γ) x)`, exact where γ is tiny and where it is nearly 1."""
        if self.log_gamma < -0.7:
            return np.asarray(-np.log(self._rest(x)))
        return np.asarray(-np.log1p(math.expm1(self.log_gamma) * x))

    def _rest(self, x: Floats) -> Floats:
        """Return `1 - (1-γ) x`, exact where γ is tiny, too."""
        return np.asarray((1.0 - x) + self.gamma * x)

    def _pgf(self, x: Floats) -> Floats:
        shape, whole = self.shape_parameter, -self.log_gamma
        if whole == 0.0:
            return x
        reach = self._reach(x)
        if abs(shape * whole) < 1e-12:
            return np.asarray(reach / whole)
        if shape * whole > 700.0:
            return np.asarray(np.exp(shape * (reach - whole)))
        return np.asarray(np.expm1(shape * reach) / math.expm1(shape * whole))

    def _pgf_derivative(self, x: Floats) -> Floats:
        shape, log_gamma = self.shape_parameter, self.log_gamma
        if log_gamma == 0.0:
            return np.ones_like(x)
        log_value = _log_scale(shape, log_gamma) + _log_rest(log_gamma)
        if shape in (0.0, 1.0):  # no logarithm of each point: this is asked for often
            return np.asarray(math.exp(log_value) * (1.0 / self._rest(x)) ** (shape + 1.0))
        return np.asarray(np.exp(log_value + (shape + 1.0) * self._reach(x)))

    def _below(self, x: Floats, most: int, order: int) -> Floats:
        # The terms of φ^(j) are those of (1 - s)^-(η+j) with s = (1-γ) x, and `_rest` is 1 - s.
        return np.asarray(
            sp.special.betainc(self.shape_parameter + order, most + 1.0, self._rest(x))
        )

    def _pgf_second(self, x: Floats) -> Floats:
        ratio = -(self.shape_parameter + 1.0) * math.expm1(self.log_gamma) / self._rest(x)
        return np.asarray(self._pgf_derivative(x) * ratio)


@dataclass(frozen=True)
class TruncatedNegativeBinomial(NegativeBinomial):
    """The truncated negative binomial law.

    Args:
        shape: η, from above -1 to 1000. 1 is the geometric, 0 the logarithmic law.
        mean: Expected number of runs before the cap, from 1 to 10^6.
        maximum: Hard cap on runs; the law is truncated and renormalised.
        minimum: Fewest runs, m: `K = m − 1 + K'` for a K' of this family from 1 on.

    References:
        Papernot and Steinke, arXiv:2110.03620, Definition 1.

    Example:
        >>> law = TruncatedNegativeBinomial(shape=0.5, mean=10)  # between logarithmic (0) and geometric (1)
        >>> round(float(law.pmf(1)), 3), law.quantile(0.9)
        (0.156, 24)
    """

    law: ClassVar[str] = "truncated_negative_binomial"
    shape: float
    mean: float
    maximum: int | None = None
    minimum: int | None = None

    def __post_init__(self) -> None:
        shape = check_number("shape", self.shape, above=-1.0, at_most=1000.0)
        object.__setattr__(self, "shape", shape)
        super().__post_init__()
        _log_gamma(self.shape, self.drawn.mean)

    @property
    def shape_parameter(self) -> float:
        """The shape η."""
        return self.shape


@dataclass(frozen=True)
class Geometric(NegativeBinomial):
    """The geometric law: stop after each run with probability `1/mean` (Liu and Talwar 2019).

    Args:
        mean: Expected number of runs before the cap, from 1 to 10^6.
        maximum: Hard cap on runs; the law is truncated and renormalised.
        minimum: Fewest runs, m: `K = m − 1 + K'` for a K' of this family from 1 on.

    Example:
        >>> law = Geometric(mean=10)
        >>> round(float(law.pmf(1)), 3), law.quantile(0.9)
        (0.1, 22)
    """

    law: ClassVar[str] = "geometric"
    _shape: ClassVar[float] = 1.0
    mean: float
    maximum: int | None = None
    minimum: int | None = None


@dataclass(frozen=True)
class Logarithmic(NegativeBinomial):
    """The logarithmic law: the truncated negative binomial law of shape 0.

    Args:
        mean: Expected number of runs before the cap, from 1 to 10^6.
        maximum: Hard cap on runs; the law is truncated and renormalised.
        minimum: Fewest runs, m: `K = m − 1 + K'` for a K' of this family from 1 on.

    Example:
        >>> law = Logarithmic(mean=10)  # one run is likelier than under the geometric law, the tail longer
        >>> round(float(law.pmf(1)), 3), law.quantile(0.9)
        (0.269, 26)
    """

    law: ClassVar[str] = "logarithmic"
    _shape: ClassVar[float] = 0.0
    mean: float
    maximum: int | None = None
    minimum: int | None = None


@dataclass(frozen=True)
class Poisson(RunLaw):
    """The Poisson law. K = 0 happens; then a fixed symbol is released, and no run is made up.

    Args:
        mean: Expected number of runs before the cap, above 0, at most 10^6.
        maximum: Hard cap on runs; the law is truncated and renormalised.
        minimum: Fewest runs, m: `K = m + K'` for a K' of this family.

    Example:
        >>> law = Poisson(mean=10)
        >>> law.quantile(0.9), law.zero_probability < 5e-5, Poisson(10, maximum=12).most
        (14, True, 12)
    """

    law: ClassVar[str] = "poisson"
    mean: float
    maximum: int | None = None
    minimum: int | None = None

    def __post_init__(self) -> None:
        mean = check_number("mean", self.mean, above=0.0, at_most=_MAX_MEAN)
        object.__setattr__(self, "mean", mean)
        super().__post_init__()

    @property
    def _from_zero(self) -> bool:
        return True

    @property
    def can_be_zero(self) -> bool:
        """Whether K = 0 is possible: not where there is a minimum."""
        return self.minimum is None

    def _log_pmf(self, k: Floats) -> Floats:
        return np.asarray(k * math.log(self.mean) - self.mean - sp.special.gammaln(k + 1.0))

    def _pgf(self, x: Floats) -> Floats:
        return np.asarray(np.exp(self.mean * (x - 1.0)))

    def _pgf_derivative(self, x: Floats) -> Floats:
        return np.asarray(self.mean * np.exp(self.mean * (x - 1.0)))

    def _below(self, x: Floats, most: int, order: int) -> Floats:
        return np.asarray(sp.special.gammaincc(most + 1.0, self.mean * x))

    def _pgf_second(self, x: Floats) -> Floats:
        return np.asarray(self.mean**2 * np.exp(self.mean * (x - 1.0)))


@dataclass(frozen=True)
class Binomial(RunLaw):
    """The binomial law; with `mean = n` the number of runs is fixed.

    Args:
        n: Number of trials, from 1 to 10^6.
        mean: Expected number of runs before the cap, above 0, at most n.
        maximum: Hard cap on runs; the law is truncated and renormalised.
        minimum: Fewest runs, m: `K = m + K'` for a K' of this family, with n − m trials.

    Example:
        >>> law = Binomial(n=20, mean=10)
        >>> law.most, law.quantile(0.9)
        (20, 13)
    """

    law: ClassVar[str] = "binomial"
    n: int
    mean: float
    maximum: int | None = None
    minimum: int | None = None

    def __post_init__(self) -> None:
        n = check_integer("n", self.n, at_least=1, at_most=int(_MAX_MEAN))
        mean = check_number("mean", self.mean, above=0.0, at_most=float(n))
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "mean", mean)
        super().__post_init__()

    @property
    def _least_cap(self) -> int:
        return 1 if self.mean < self.n else self.n

    @property
    def _from_zero(self) -> bool:
        return True

    @property
    def can_be_zero(self) -> bool:
        """Whether K = 0 is possible: not when the number of runs is fixed, or has a minimum."""
        return self.mean < self.n and self.minimum is None

    @property
    def most(self) -> int:
        """The largest possible number of runs."""
        return self.n if self.maximum is None else min(self.n, self.maximum)

    def _log_pmf(self, k: Floats) -> Floats:
        p = self.mean / self.n
        log_choose = (
            sp.special.gammaln(self.n + 1.0)
            - sp.special.gammaln(k + 1.0)
            - sp.special.gammaln(np.maximum(self.n - k, 0.0) + 1.0)
        )
        value = log_choose + sp.special.xlogy(k, p) + sp.special.xlog1py(self.n - k, -p)
        return np.where(k <= self.n, value, -np.inf)

    def _pgf(self, x: Floats) -> Floats:
        p = self.mean / self.n
        return np.asarray((1.0 - p + p * x) ** self.n)

    def _pgf_derivative(self, x: Floats) -> Floats:
        p = self.mean / self.n
        return np.asarray(self.mean * (1.0 - p + p * x) ** (self.n - 1))

    def _below(self, x: Floats, most: int, order: int) -> Floats:
        p = self.mean / self.n
        if most >= self.n - order:
            return np.ones_like(x)
        return np.asarray(sp.special.bdtr(most, self.n - order, p * x / (1.0 - p + p * x)))

    def _pgf_second(self, x: Floats) -> Floats:
        p = self.mean / self.n
        if self.n == 1:
            return np.zeros_like(x)
        return np.asarray(self.mean * (self.n - 1) * p * (1.0 - p + p * x) ** (self.n - 2))


_LAWS: dict[str, type[RunLaw]] = {
    kind.law: kind
    for kind in (TruncatedNegativeBinomial, Geometric, Logarithmic, Poisson, Binomial)
}


def run_law_from_dict(data: Mapping[str, Any]) -> RunLaw:
    """Return the law that `data` describes in the public format.

    Args:
        data: JSON data, as `RunLaw.to_dict` writes it.

    Returns:
        The law, checked.

    Raises:
        InvalidInputError: Unknown law or field, missing field, or a value out of its range.

    Example:
        >>> run_law_from_dict({"law": "geometric", "mean": 10, "maximum": 50}).expected_runs < 10
        True
    """
    if not isinstance(data, Mapping):
        raise InvalidInputError("runs", data, "must be a JSON object with a law")
    name = data.get("law")
    if not isinstance(name, str) or name not in _LAWS:
        raise InvalidInputError("law", name, f"must be one of {', '.join(_LAWS)}")
    names = _LAWS[name].__match_args__
    for field in data:
        if field not in ("law", *names):
            raise InvalidInputError("field", field, f"{name} knows {', '.join(names)}")
    for field in names:
        if field not in (*data, "maximum", "minimum"):
            raise InvalidInputError("field", field, f"is required by {name}")
    return _LAWS[name](**{field: value for field, value in data.items() if field != "law"})
