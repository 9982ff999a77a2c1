"""Laws of the secret number of runs K of a private selection, which also draw K.

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

from privtune.accounting.checks import check_integer, check_number
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.names import refuse_fields, refuse_name

Floats = NDArray[np.float64]
_MAX_CAP = 100_000
_MAX_SURE = 1000  # runs that are sure to happen
_MAX_SURE_CAP = 2000  # with runs that are sure φ is asked for everywhere, a sum of so many terms
_LEAST_LOG_KEPT = -200.0  # log of the mass that a cap keeps; below this, its few masses are summed
_LARGEST_LEVEL = 1.0 - 2.0**-53  # that a draw inverts
_MAX_DRAW = 2**25  # a number of runs that nobody can make


class RunLaw(ABC):
    """A law of the number of runs K, with an optional cap that truncates and renormalises it.

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
        """Check the cap and the minimum, and drop a minimum of 1 if K is at least 1 anyway."""
        if self.maximum is not None:
            cap = check_integer(
                "maximum",
                self.maximum,
                at_least=self._least_cap,
                at_most=_MAX_CAP,
            )
            object.__setattr__(self, "maximum", cap)
        if self.minimum is None:
            return
        least = check_integer(
            "minimum",
            self.minimum,
            at_least=1,
            at_most=_MAX_SURE,
        )
        object.__setattr__(self, "minimum", least)
        if least == 1 and not self._from_zero:
            object.__setattr__(self, "minimum", None)  # the law as it is
            return
        self._check_minimum(least)
        self.drawn  # noqa: B018  its fields are checked

    def _check_minimum(self, least: int) -> None:
        """Refuse a minimum that reaches the most runs, or that does not fit the cap or the mean."""
        most = self.most
        if most is not None and least >= most:
            allowed = f"must be less than the most runs, {most}"
            remedy = "A fixed number is binomial, mean n."
            raise InvalidInputError(
                "minimum",
                least,
                allowed,
                remedy,
            )
        if self.maximum is not None and self.maximum > _MAX_SURE_CAP:
            allowed = f"must be at most {_MAX_SURE_CAP:,} where there is a minimum"
            raise InvalidInputError("maximum", self.maximum, allowed)
        if self.mean < least or (self._from_zero and self.mean == least):
            relation = "above" if self._from_zero else "at least"
            allowed = f"must be {relation} the minimum, {least} runs"
            raise InvalidInputError("mean", self.mean, allowed)

    def can_have_cap(self, cap: int) -> bool:
        """Return whether `cap` is within the law's limit for caps, which a minimum lowers.

        Example:
            >>> from privtune.accounting import Geometric
            >>> Geometric(mean=5).can_have_cap(5000), Geometric(mean=5, minimum=3).can_have_cap(5000)
            (True, False)
        """
        most = _MAX_CAP if self.minimum is None else _MAX_SURE_CAP
        return cap <= most

    @property
    def _from_zero(self) -> bool:
        """Whether the law without a minimum includes K = 0."""
        return False

    @property
    def sure_runs(self) -> int:
        """The number s of sure runs in `K = s + K'`, beside those that are drawn."""
        if self.minimum is None:
            return 0
        return self.minimum if self._from_zero else self.minimum - 1

    @cached_property
    def drawn(self) -> Self:
        """The law of K', the number of runs that are drawn beside the sure ones."""
        sure = self.sure_runs
        if not sure:
            return self
        less = {}
        for name in ("mean", "maximum", "n"):
            value = getattr(self, name, None)
            if value is not None:
                less[name] = value - sure
        return replace(self, minimum=None, **less)  # type: ignore[type-var]

    @property
    def _least_cap(self) -> int:
        """The smallest cap that the law may have."""
        return 1

    @property
    def cap(self) -> int | None:
        """The largest number of runs that the cap allows; None without a cap."""
        return self.maximum

    @abstractmethod
    def _log_pmf(self, k: Floats) -> Floats:
        """Return log P(K = k) of the uncapped law for whole numbers k."""

    @abstractmethod
    def _pgf(self, x: Floats) -> Floats:
        """Return the generating function φ(x) = E[x^K] of the uncapped law."""

    @abstractmethod
    def _pgf_derivative(self, x: Floats) -> Floats:
        """Return φ'(x), the first derivative of the uncapped law's generating function."""

    @abstractmethod
    def _pgf_second(self, x: Floats) -> Floats:
        """Return φ''(x), the second derivative of the uncapped law's generating function."""

    @abstractmethod
    def _below(
        self,
        x: Floats,
        most: int,
        order: int,
    ) -> Floats:
        """Return the part of a derivative of φ(x) = E[x^K] that comes from K <= most + order.

        For each law here that is a distribution function of its own family: a cap costs no sum.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the law as JSON-ready data."""
        data = {"law": self.law}
        for name in self.__match_args__:
            value = getattr(self, name)
            if value is not None:
                data[name] = value
        return data

    @property
    def can_be_zero(self) -> bool:
        """Whether K = 0 is possible, in which case a fixed symbol is released."""
        return False

    def pgf(self, x: ArrayLike) -> Floats:
        """Return `φ(x) = E[x^K]` for any array `x` of points in [0, 1]."""
        points = np.asarray(x, dtype=np.float64)
        if self.sure_runs:
            return self._with_sure_runs(points, 0)
        if self.cap is None:
            return self._pgf(points)
        return self._summed(points, 0)

    def pgf_derivative(self, x: ArrayLike) -> Floats:
        """Return `φ'(x) = E[K x^(K-1)]` for points `x` in [0, 1]."""
        return self._derived(self._pgf_derivative, x, 1)

    def pgf_second_derivative(self, x: ArrayLike) -> Floats:
        """Return `φ''(x) = E[K (K-1) x^(K-2)]` for points `x` in [0, 1]."""
        return self._derived(self._pgf_second, x, 2)

    def _derived(
        self,
        uncapped: Callable[[Floats], Floats],
        x: ArrayLike,
        order: int,
    ) -> Floats:
        """Return a derivative of φ(x) = E[x^K] for the law with cap and minimum, from the uncapped law's.

        Args:
            uncapped: The derivative of the law without a cap.
            x: Points in [0, 1].
            order: How often φ is differentiated, 1 or 2.
        """
        points = np.asarray(x, dtype=np.float64)
        if self.sure_runs:
            return self._with_sure_runs(points, order)
        if self.cap is None:
            return uncapped(points)
        return self._capped_derivative(uncapped, points, order)

    def _with_sure_runs(self, x: Floats, order: int) -> Floats:
        """Return the order-th derivative of `x^s ψ(x)`, with ψ the generating function of K'."""
        sure = self.sure_runs
        derivatives = (
            self.drawn.pgf,
            self.drawn.pgf_derivative,
            self.drawn.pgf_second_derivative,
        )
        total = np.zeros_like(x)
        for times in range(min(order, sure) + 1):  # how often x^s is differentiated
            factor = math.comb(order, times) * math.perm(sure, times)
            of_drawn = derivatives[order - times](x)
            of_power = factor * x ** (sure - times)
            total = total + of_power * of_drawn
        return total

    def _capped_derivative(
        self,
        uncapped: Callable[[Floats], Floats],
        x: Floats,
        order: int,
    ) -> Floats:
        """Return a derivative of φ(x) = E[x^K] for the law with its cap, from that of the uncapped law."""
        cap = self.cap if self.cap is not None else 0
        if cap < order:
            return np.zeros_like(x)
        if self._log_kept > _LEAST_LOG_KEPT:
            rescaling = math.exp(-self._log_kept)
            share = self._below(x, cap - order, order) * rescaling
            return np.asarray(uncapped(x) * share)
        return self._summed(x, order)

    def _summed(self, x: Floats, order: int) -> Floats:
        """Return a derivative of φ(x) = E[x^K] for the capped law, as a sum over the possible K."""
        first, masses = _capped_pmf(self)
        start = max(first, order)
        runs = np.arange(start, first + masses.size, dtype=np.float64)
        # k (k-1) ... of as many factors as derivatives are taken.
        falling = math.prod((runs - j for j in range(order)), start=1.0)
        terms = masses[start - first :] * falling
        # Far below the law's mean only the last runs before the cap have a mass that is no zero.
        series = np.polynomial.polynomial.polyval(x, terms)
        return np.asarray(series * x ** (start - order))

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
        """The log of the probability that the uncapped law draws a K of at most the cap."""
        return 0.0 if self.cap is None else _log_kept(self)

    @property
    def expected_runs(self) -> float:
        """The expectation of K, with cap and sure runs included."""
        return float(self.pgf_derivative(1.0))

    @property
    def most(self) -> int | None:
        """The largest possible number of runs; None if there is none."""
        return self.cap

    @property
    def zero_probability(self) -> float:
        """The probability that K = 0."""
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
        level = check_number(
            "p",
            p,
            at_least=0.0,
            below=1.0,
        )
        return self._invert(level, strict=False)

    def sample(self, rng: np.random.Generator | None = None) -> int:
        """Draw K from the generator `rng`, or with None from the operating system's entropy.

        Returns:
            The number of runs, by exact inversion of the distribution function.
        """
        if rng is not None:
            return self._invert(float(rng.random()), strict=True)
        level = secrets.randbits(53) / 2.0**53
        return self._invert(level, strict=True)

    def sample_strata(self, count: int, rng: np.random.Generator) -> tuple[int, ...]:
        """Draw the numbers of runs of `count` repetitions, one from each part of the law.

        Let F be the distribution function, N the count, u one uniform number in [0, 1) and π a uniform
        permutation of 0, ..., N - 1, both drawn from ``rng``, independently. Repetition r has
        ``K_r = F⁻¹((π(r) + u) / N)``.

        * Each K_r has the law. π(r) is uniform on 0, ..., N - 1 and independent of u, so that
          ``P((π(r) + u) / N < x) = (⌊Nx⌋ + (Nx - ⌊Nx⌋)) / N = x``: its level is uniform in [0, 1),
          which is what :meth:`sample` inverts.
        * The repetitions are exchangeable, for π is uniform.
        * The mean over the repetitions of a monotone function of K with values from a to b is within
          ``(b - a) / N`` of its expectation: in each stratum it lies between the values at both ends.

        The numbers depend on each other, as each tells where the strata lie. An account of N
        repetitions composes independent ones: these are for records that nobody has to protect.

        Args:
            count: Number of repetitions, from 1 to 100,000.
            rng: Where u and π are drawn from.

        Returns:
            ``count`` numbers of runs.

        Raises:
            InvalidInputError: If ``count`` is no whole number from 1 to 100,000.

        Example:
            >>> from privtune.accounting import Geometric
            >>> sorted(Geometric(mean=10).sample_strata(5, np.random.default_rng(0)))
            [2, 4, 8, 13, 25]
        """
        strata = check_integer(
            "count",
            count,
            at_least=1,
            at_most=_MAX_CAP,
        )
        common = float(rng.random())
        order = rng.permutation(strata)
        numbers = []
        for stratum in order:
            level = (float(stratum) + common) / strata
            # Rounding may give 1, a level that no number of runs has.
            level = min(level, _LARGEST_LEVEL)
            numbers.append(self._invert(level, strict=True))
        return tuple(numbers)

    def _invert(self, level: float, *, strict: bool) -> int:
        """Return the smallest k with P(K <= k) above `level` if `strict`, else at least `level`."""
        start = 1 if self.minimum is None else self.minimum
        if self.can_be_zero:
            start = 0
        total = 0.0
        size = 256
        while True:
            masses = self.pmf(np.arange(start, start + size))
            cumulated = total + np.cumsum(masses)
            hits = cumulated > level if strict else cumulated >= level
            if hits.any():
                return start + int(np.argmax(hits))
            new_total = float(cumulated[-1])
            # Rounding can leave the sum a few ulps short of 1: stop where nothing is added.
            if new_total - total <= 1e-17 and new_total > 0.5:
                happens = np.flatnonzero(masses > 0.0)
                return start + int(happens[-1]) if happens.size else start
            start += size
            total = new_total
            size *= 2
            if start > _MAX_DRAW:
                raise PrivTuneError(
                    f"the number of runs came out above {_MAX_DRAW:,}: the law's tail is too heavy "
                    "to run. Give the law a maximum, or a larger shape."
                )


@lru_cache(maxsize=256)
def _log_kept(law: RunLaw) -> float:
    """Return the log of the mass that the uncapped law has up to its cap."""
    cap = law.cap if law.cap is not None else 0
    lowest = 0 if law.can_be_zero else 1
    runs = np.arange(lowest, cap + 1, dtype=np.float64)
    return float(sp.special.logsumexp(law._log_pmf(runs)))


@lru_cache(maxsize=64)
def _capped_pmf(law: RunLaw) -> tuple[int, Floats]:
    """Return the first number of runs of mass above 0, and the masses from there to the cap."""
    pmf = law.pmf(np.arange((law.cap or 0) + 1))
    first = int(np.flatnonzero(pmf)[0])
    masses = pmf[first:]
    masses.setflags(write=False)
    return first, masses


_MAX_MEAN = 1e6
_LEAST_LOG_GAMMA = -600.0


@lru_cache(maxsize=1024)
def _log_gamma(shape: float, mean: float) -> float:
    """Return log γ of the truncated negative binomial law with this shape and mean."""
    # Near shape -1 γ falls far below what 1 - γ can hold: the logarithm is what is kept.
    if mean == 1.0:
        return 0.0
    if shape == 1.0:
        return -math.log(mean)

    def excess(log_gamma: float) -> float:
        return _log_tnb_mean(shape, log_gamma) - math.log(mean)

    low = -1.0
    high = -1e-14
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

    root = float(
        optimize.brentq(
            excess,
            low,
            high,
            xtol=1e-15,
            rtol=8.9e-16,
            maxiter=200,
        )
    )
    # The safe side is the smaller γ: more runs than asked for, never fewer than charged.
    while excess(root) < 0.0:
        root = math.nextafter(root, -math.inf)
    return root


def _log_tnb_mean(shape: float, log_gamma: float) -> float:
    """Return log E[K] = log( η (1-γ) / (γ (1 - γ^η)) ) of a truncated negative binomial law."""
    log_factor = _log_scale(shape, log_gamma) + _log_rest(log_gamma)
    return log_factor - (shape + 1.0) * log_gamma


def _log_rest(log_gamma: float) -> float:
    """Return log(1 - γ) from log γ, precise for γ near 0 and near 1."""
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
        mean = check_number(
            "mean",
            self.mean,
            at_least=1.0,
            at_most=_MAX_MEAN,
        )
        object.__setattr__(self, "mean", mean)
        super().__post_init__()

    @property
    def gamma(self) -> float:
        """The stopping parameter γ in (0, 1]."""
        return math.exp(self.log_gamma)

    @property
    def log_gamma(self) -> float:
        """The logarithm of γ of the drawn runs, without the sure ones."""
        return _log_gamma(self.shape_parameter, self.drawn.mean)

    @property
    def shape_parameter(self) -> float:
        """The shape η, above -1, of the family."""
        return self._shape

    def _log_pmf(self, k: Floats) -> Floats:
        """Return log P(K = k) = log( η (1-γ)^k Γ(k+η) / ((γ^-η - 1) Γ(1+η) k!) )."""
        shape = self.shape_parameter
        log_gamma = self.log_gamma
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
        """Return `-log(1 - (1-γ) x)`, the log of a factor of φ, precise for γ near 0 and near 1."""
        if self.log_gamma < -0.7:
            return np.asarray(-np.log(self._rest(x)))
        stop = math.expm1(self.log_gamma)
        return np.asarray(-np.log1p(stop * x))

    def _rest(self, x: Floats) -> Floats:
        """Return `1 - (1-γ) x`, a factor of the generating function φ, precise also for γ near 0."""
        return np.asarray((1.0 - x) + self.gamma * x)

    def _pgf(self, x: Floats) -> Floats:
        """Return `φ(x) = ((1 - (1-γ) x)^-η - 1) / (γ^-η - 1)`, continuous at η = 0."""
        shape = self.shape_parameter
        full_reach = -self.log_gamma  # at x = 1
        if full_reach == 0.0:
            return x
        if shape == 1.0:  # no logarithm of each point: this is asked for often
            return np.asarray(self.gamma * x / self._rest(x))
        reach = self._reach(x)
        if abs(shape * full_reach) < 1e-12:
            return np.asarray(reach / full_reach)
        if shape * full_reach > 700.0:
            return np.asarray(np.exp(shape * (reach - full_reach)))
        full = math.expm1(shape * full_reach)
        return np.asarray(np.expm1(shape * reach) / full)

    def _pgf_derivative(self, x: Floats) -> Floats:
        """Return `φ'(x) = η (1-γ) (1 - (1-γ) x)^(-η-1) / (γ^-η - 1)`."""
        shape = self.shape_parameter
        log_gamma = self.log_gamma
        if log_gamma == 0.0:
            return np.ones_like(x)
        log_value = _log_scale(shape, log_gamma) + _log_rest(log_gamma)
        if shape in (0.0, 1.0):  # no logarithm of each point: this is asked for often
            power = (1.0 / self._rest(x)) ** (shape + 1.0)
            return np.asarray(math.exp(log_value) * power)
        log_power = (shape + 1.0) * self._reach(x)
        return np.asarray(np.exp(log_value + log_power))

    def _with_sure_runs(self, x: Floats, order: int) -> Floats:
        if order != 1 or self.shape_parameter != 1.0 or self.cap is not None:
            return super()._with_sure_runs(x, order)
        # Of `x^s ψ(x)` with `ψ(x) = γ x / rest` and `ψ'(x) = γ / rest²`, at once: it is asked for often.
        sure = self.sure_runs
        per_rest = 1.0 / self._rest(x)
        return np.asarray(self.gamma * x**sure * per_rest * (sure + per_rest))

    def _below(
        self,
        x: Floats,
        most: int,
        order: int,
    ) -> Floats:
        # The terms of φ^(j) are those of (1 - s)^-(η+j) with s = (1-γ) x, and `_rest` is 1 - s.
        shape = self.shape_parameter + order
        rest = self._rest(x)
        return np.asarray(sp.special.betainc(shape, most + 1.0, rest))

    def _pgf_second(self, x: Floats) -> Floats:
        """Return `φ''(x)`, which is φ'(x) times `(η+1) (1-γ) / (1 - (1-γ) x)`."""
        stop = -(self.shape_parameter + 1.0) * math.expm1(self.log_gamma)
        ratio = stop / self._rest(x)
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
        shape = check_number(
            "shape",
            self.shape,
            above=-1.0,
            at_most=1000.0,
        )
        object.__setattr__(self, "shape", shape)
        super().__post_init__()
        _log_gamma(self.shape, self.drawn.mean)

    @property
    def shape_parameter(self) -> float:
        """The shape η that the law was given."""
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
    """The Poisson law, under which K = 0 is possible and releases a fixed symbol.

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
        mean = check_number(
            "mean",
            self.mean,
            above=0.0,
            at_most=_MAX_MEAN,
        )
        object.__setattr__(self, "mean", mean)
        super().__post_init__()

    @property
    def _from_zero(self) -> bool:
        return True

    @property
    def can_be_zero(self) -> bool:
        """Whether K = 0 is possible, which it is unless there is a minimum."""
        return self.minimum is None

    def _log_pmf(self, k: Floats) -> Floats:
        log_factorial = sp.special.gammaln(k + 1.0)
        return np.asarray(k * math.log(self.mean) - self.mean - log_factorial)

    def _pgf(self, x: Floats) -> Floats:
        """Return `φ(x) = e^(μ (x-1))`, with μ the mean."""
        exponent = self.mean * (x - 1.0)
        return np.asarray(np.exp(exponent))

    def _pgf_derivative(self, x: Floats) -> Floats:
        return np.asarray(self.mean * self._pgf(x))

    def _below(
        self,
        x: Floats,
        most: int,
        order: int,
    ) -> Floats:
        return np.asarray(sp.special.gammaincc(most + 1.0, self.mean * x))

    def _pgf_second(self, x: Floats) -> Floats:
        return np.asarray(self.mean**2 * self._pgf(x))


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
        n = check_integer(
            "n",
            self.n,
            at_least=1,
            at_most=int(_MAX_MEAN),
        )
        mean = check_number(
            "mean",
            self.mean,
            above=0.0,
            at_most=float(n),
        )
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
        """Whether K = 0 is possible, which it is unless K is fixed or has a minimum."""
        return self.mean < self.n and self.minimum is None

    @property
    def most(self) -> int:
        """The largest possible number of runs: n, or the cap if it is smaller."""
        if self.maximum is None:
            return self.n
        return min(self.n, self.maximum)

    def _log_pmf(self, k: Floats) -> Floats:
        rest = self.n - k
        log_choose = (
            sp.special.gammaln(self.n + 1.0)
            - sp.special.gammaln(k + 1.0)
            - sp.special.gammaln(np.maximum(rest, 0.0) + 1.0)
        )
        p = self._p
        log_in = sp.special.xlogy(k, p)
        log_out = sp.special.xlog1py(rest, -p)
        value = log_choose + log_in + log_out
        return np.where(k <= self.n, value, -np.inf)

    @property
    def _p(self) -> float:
        """The success probability p of each trial."""
        return self.mean / self.n

    def _trial(self, x: Floats) -> Floats:
        """Return `1 - p + p x`, the generating function of a trial that succeeds with probability p."""
        p = self._p
        return np.asarray(1.0 - p + p * x)

    def _pgf(self, x: Floats) -> Floats:
        """Return `φ(x) = (1 - p + p x)^n`."""
        return np.asarray(self._trial(x) ** self.n)

    def _pgf_derivative(self, x: Floats) -> Floats:
        power = self._trial(x) ** (self.n - 1)
        return np.asarray(self.mean * power)

    def _below(
        self,
        x: Floats,
        most: int,
        order: int,
    ) -> Floats:
        trials = self.n - order
        if most >= trials:
            return np.ones_like(x)
        tilted = self._p * x / self._trial(x)
        return np.asarray(sp.special.bdtr(most, trials, tilted))

    def _pgf_second(self, x: Floats) -> Floats:
        if self.n == 1:
            return np.zeros_like(x)
        power = self._trial(x) ** (self.n - 2)
        return np.asarray(self.mean * (self.n - 1) * self._p * power)


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
        raise InvalidInputError("runs", type(data).__name__, "must be a JSON object with a law")
    name = data.get("law")
    if not isinstance(name, str) or name not in _LAWS:
        refuse_name("law", name, _LAWS)
    law = _LAWS[name]
    names = law.__match_args__
    unknown = set(data) - {"law", *names}
    if unknown:
        refuse_fields(
            "field",
            unknown,
            names,
            name,
        )
    for field in names:
        if field not in (*data, "maximum", "minimum"):
            raise InvalidInputError("field", field, f"is required by {name}")
    values = dict(data)
    del values["law"]
    return law(**values)
