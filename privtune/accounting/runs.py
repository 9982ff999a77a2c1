"""Laws of the secret number of runs K of a private selection; the object that is charged draws K.

`φ(x) = E[x^K]` is the probability generating function. The bounds need φ and its derivatives only.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import scipy as sp
from numpy.typing import ArrayLike, NDArray

from privtune.accounting._checks import check_integer, check_number
from privtune.errors import InvalidInputError, PrivTuneError

Floats = NDArray[np.float64]
_MAX_CAP = 100_000
_MAX_SURE = 1000  # runs that are sure to happen
_MAX_SURE_CAP = 2000  # with runs that are sure φ is asked for everywhere, a sum of so many terms
_LEAST_LOG_KEPT = -200.0  # log of the mass that a cap keeps; below this, its few masses are summed
_MAX_DRAW = 2**25  # a number of runs that nobody can make


class RunLaw(ABC):
    """A law of the number of runs, with an optional hard cap (truncated and renormalised).

    Subclasses are frozen dataclasses that give the uncapped law; the cap is applied here, once, to
    everything. With a ``minimum`` of m, `K = s + K'`: K' has the same family and cap m − s less, and
    `s` is such that the smallest K is m. `φ(x) = x^s E[x^K']`. Mean, cap and n are those of K.

    Raises:
        InvalidInputError: A cap or a minimum that the law cannot have.

    Example:
        >>> from privtune.accounting import Geometric, run_law_from_dict
        >>> law = Geometric(mean=10)
        >>> law.pmf([1, 2]), law.quantile(0.99), law.sample(np.random.default_rng(0))
        (array([0.1 , 0.09]), 44, 10)
        >>> float(law.pgf_derivative(1.0)) == law.expected_runs  # φ'(1) = E[K]
        True
        >>> round(float(law.pgf(0.5)), 4), round(float(law.pgf_second_derivative(1.0)), 1)  # E[K (K - 1)]
        (0.0909, 180.0)
        >>> run_law_from_dict(law.to_dict()) == law
        True
        >>> Geometric(mean=10, minimum=3).pmf([2, 3, 4])  # 2 + a geometric number of mean 8
        array([0.      , 0.125   , 0.109375])
    """

    law: ClassVar[str]
    __match_args__: ClassVar[tuple[str, ...]]  # of a dataclass, its fields
    mean: float
    maximum: int | None
    minimum: int | None

    def __post_init__(self) -> None:
        if self.maximum is not None:
            cap = check_integer("maximum", self.maximum, at_least=self._least_cap, at_most=_MAX_CAP)
            object.__setattr__(self, "maximum", cap)
        if self.minimum is None:
            return
        least = check_integer("minimum", self.minimum, at_least=1, at_most=_MAX_SURE)
        object.__setattr__(self, "minimum", least)
        if self.minimum == 1 and not self._from_zero:
            object.__setattr__(self, "minimum", None)  # the law as it is
            return
        most = self.most
        if most is not None and least >= most:
            allowed = f"must be less than the most runs, {most}"
            raise InvalidInputError(
                "minimum", least, allowed, "A fixed number is binomial, mean n."
            )
        if self.maximum is not None and self.maximum > _MAX_SURE_CAP:
            allowed = f"must be at most {_MAX_SURE_CAP:,} where there is a minimum"
            raise InvalidInputError("maximum", self.maximum, allowed)
        if self.mean < least or (self._from_zero and self.mean == least):
            allowed = (
                f"must be {'above' if self._from_zero else 'at least'} the minimum, {least} runs"
            )
            raise InvalidInputError("mean", self.mean, allowed)
        self.drawn  # noqa: B018  its fields are checked

    def can_have_cap(self, cap: int) -> bool:
        """Return whether the law can be given `cap` as most runs: beside a minimum φ is a sum up to it.

        Example:
            >>> from privtune.accounting import Geometric
            >>> Geometric(mean=5).can_have_cap(5000), Geometric(mean=5, minimum=3).can_have_cap(5000)
            (True, False)
        """
        return cap <= (_MAX_CAP if self.minimum is None else _MAX_SURE_CAP)

    @property
    def _from_zero(self) -> bool:
        """Whether the law without a minimum starts at K = 0."""
        return False

    @property
    def sure_runs(self) -> int:
        """How many runs happen beside those that are drawn: s of `K = s + K'`."""
        return 0 if self.minimum is None else self.minimum - (0 if self._from_zero else 1)

    @cached_property
    def drawn(self) -> Self:
        """The law of K', the number of runs beside the sure ones."""
        sure = self.sure_runs
        if not sure:
            return self
        less = {
            name: value - sure
            for name in ("mean", "maximum", "n")
            if (value := getattr(self, name, None)) is not None
        }
        return replace(self, minimum=None, **less)  # type: ignore[type-var]

    @property
    def _least_cap(self) -> int:
        return 1

    @property
    def cap(self) -> int | None:
        """The hard cap on runs, or None."""
        return self.maximum

    @abstractmethod
    def _log_pmf(self, k: Floats) -> Floats:
        """Return log P(K = k) of the uncapped law for whole k in its support range."""

    @abstractmethod
    def _pgf(self, x: Floats) -> Floats:
        """Return φ(x) of the uncapped law."""

    @abstractmethod
    def _pgf_derivative(self, x: Floats) -> Floats:
        """Return φ'(x) of the uncapped law."""

    @abstractmethod
    def _pgf_second(self, x: Floats) -> Floats:
        """Return φ''(x) of the uncapped law."""

    @abstractmethod
    def _below(self, x: Floats, most: int, order: int) -> Floats:
        """Return the share of the order-th derivative of φ at x that comes from K <= most + order.

        For each law here that is a distribution function of its own family: a cap costs no sum.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the law as JSON-ready data."""
        values = {name: getattr(self, name) for name in self.__match_args__}
        return {"law": self.law, **{k: value for k, value in values.items() if value is not None}}

    @property
    def can_be_zero(self) -> bool:
        """Whether K = 0 is possible; then a fixed symbol is released."""
        return False

    def pgf(self, x: ArrayLike) -> Floats:
        """Return `φ(x) = E[x^K]` for any array `x` of points in [0, 1]."""
        points = np.asarray(x, dtype=np.float64)
        if self.sure_runs:
            return self._with_sure_runs(points, 0)
        return self._pgf(points) if self.cap is None else self._summed(points, 0)

    def pgf_derivative(self, x: ArrayLike) -> Floats:
        """Return `φ'(x) = E[K x^(K-1)]` for points `x` in [0, 1]; `φ'(1)` is the expected number of runs."""
        return self._derived(self._pgf_derivative, x, 1)

    def pgf_second_derivative(self, x: ArrayLike) -> Floats:
        """Return `φ''(x) = E[K (K-1) x^(K-2)]` for points `x` in [0, 1]."""
        return self._derived(self._pgf_second, x, 2)

    def _derived(self, uncapped: Callable[[Floats], Floats], x: ArrayLike, order: int) -> Floats:
        """Return a derivative of the law as it is, from that of the law without a cap."""
        points = np.asarray(x, dtype=np.float64)
        if self.sure_runs:
            return self._with_sure_runs(points, order)
        if self.cap is None:
            return uncapped(points)
        return self._capped_derivative(uncapped, points, order)

    def _with_sure_runs(self, x: Floats, order: int) -> Floats:
        """Return the order-th derivative of `x^s ψ(x)`, ψ of the drawn law, by Leibniz's rule."""
        sure, drawn = self.sure_runs, self.drawn
        parts = (drawn.pgf, drawn.pgf_derivative, drawn.pgf_second_derivative)
        total = np.zeros_like(x)
        for taken in range(min(order, sure) + 1):  # how often x^s is differentiated
            factor = math.comb(order, taken) * math.perm(sure, taken)
            total = total + factor * x ** (sure - taken) * parts[order - taken](x)
        return total

    def _capped_derivative(
        self, uncapped: Callable[[Floats], Floats], x: Floats, order: int
    ) -> Floats:
        """Return the order-th derivative of φ with the cap, from the one without."""
        cap = self.cap if self.cap is not None else 0
        if cap < order:
            return np.zeros_like(x)
        if self._log_kept > _LEAST_LOG_KEPT:
            kept = self._below(x, cap - order, order) * math.exp(-self._log_kept)
            return np.asarray(uncapped(x) * kept)
        return self._summed(x, order)

    def _summed(self, x: Floats, order: int) -> Floats:
        """Return the order-th derivative of φ with the cap, as a sum over the numbers that happen."""
        first, masses = _capped_pmf(self)
        start = max(first, order)
        falling = np.arange(start, first + masses.size, dtype=np.float64)
        terms = masses[start - first :] * math.prod((falling - j for j in range(order)), start=1.0)
        # Far below the law's mean only the last runs before the cap have a mass that is no zero.
        return np.asarray(np.polynomial.polynomial.polyval(x, terms) * x ** (start - order))

    def pmf(self, k: ArrayLike) -> Floats:
        """Return `P(K = k)` for any array `k` of whole numbers."""
        values = np.asarray(k, dtype=np.float64)
        if self.sure_runs:
            return self.drawn.pmf(values - self.sure_runs)
        lowest = 0.0 if self.can_be_zero else 1.0
        inside = (values >= lowest) & (values == np.floor(values))
        if self.cap is not None:
            inside &= values <= self.cap
        safe = np.where(inside, values, 1.0)
        log_pmf = self._log_pmf(safe) - self._log_kept
        return np.where(inside, np.exp(log_pmf), 0.0)

    @property
    def _log_kept(self) -> float:
        """Log of the probability that the uncapped law respects the cap."""
        return 0.0 if self.cap is None else _log_kept(self)

    @property
    def expected_runs(self) -> float:
        """The expectation of K, cap included."""
        return float(self.pgf_derivative(1.0))

    @property
    def most(self) -> int | None:
        """The largest possible number of runs; None if there is no largest."""
        return self.cap

    @property
    def zero_probability(self) -> float:
        """P(K = 0)."""
        return float(self.pmf(0)) if self.can_be_zero else 0.0

    def at_most(self, k: int) -> float:
        """Return P(K <= k) for a whole number `k` of at least 0.

        Example:
            >>> from privtune.accounting import Geometric
            >>> round(Geometric(mean=5).at_most(1), 6), Geometric(mean=5, minimum=3).at_most(2)
            (0.2, 0.0)
        """
        return min(float(self.pmf(np.arange(k + 1)).sum()), 1.0)

    def quantile(self, p: float) -> int:
        """Return the smallest k with P(K <= k) >= p, for a probability `p` in [0, 1)."""
        level = check_number("p", p, at_least=0.0, below=1.0)
        return self._invert(level, strict=False)

    def sample(self, rng: np.random.Generator | None = None) -> int:
        """Draw K from the stream `rng`; of None, from the entropy of the operating system.

        Returns:
            The number of runs, by exact inversion of the distribution function.
        """
        level = secrets.randbits(53) / 2.0**53 if rng is None else float(rng.random())
        return self._invert(level, strict=True)

    def _invert(self, level: float, *, strict: bool) -> int:
        least = 1 if self.minimum is None else self.minimum
        start, total, size = (0 if self.can_be_zero else least), 0.0, 256
        while True:
            masses = self.pmf(np.arange(start, start + size))
            cumulated = total + np.cumsum(masses)
            hits = cumulated > level if strict else cumulated >= level
            if hits.any():
                return start + int(np.argmax(hits))
            new_total = float(cumulated[-1])
            # Rounding can leave the sum a few ulps short of 1: stop where nothing is added.
            if new_total - total <= 1e-17 and new_total > 0.5:
                return start + int(np.flatnonzero(masses > 0.0)[-1]) if masses.any() else start
            start, total, size = start + size, new_total, size * 2
            if start > _MAX_DRAW:
                raise PrivTuneError(
                    f"the number of runs came out above {_MAX_DRAW:,}: the law's tail is too heavy "
                    "to run. Give the law a maximum, or a larger shape."
                )


@lru_cache(maxsize=256)
def _log_kept(law: RunLaw) -> float:
    cap = law.cap if law.cap is not None else 0
    lowest = 0 if law.can_be_zero else 1
    return float(sp.special.logsumexp(law._log_pmf(np.arange(lowest, cap + 1, dtype=np.float64))))


@lru_cache(maxsize=64)
def _capped_pmf(law: RunLaw) -> tuple[int, Floats]:
    """Return the first number of runs whose mass is no zero, and the masses from there to the cap."""
    pmf = law.pmf(np.arange((law.cap or 0) + 1))
    first = int(np.flatnonzero(pmf)[0])
    masses = pmf[first:]
    masses.setflags(write=False)
    return first, masses


_MAX_MEAN = 1e6
_LEAST_LOG_GAMMA = -600.0


@lru_cache(maxsize=1024)
def _log_gamma(shape: float, mean: float) -> float:
    """Return log γ of the truncated negative binomial law with this mean, by root finding."""
    # Near shape -1 γ falls far below what 1 - γ can hold: the logarithm is what is kept.
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
