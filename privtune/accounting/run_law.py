"""What every law of the secret number of runs K of a private selection has, the cap included.

`φ(x) = E[x^K]` is the probability generating function. The bounds need φ and φ' only, and the
object that is charged is the object that draws K.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
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
        """Return whether the law can be given this cap: beside a minimum φ is a sum up to it.

        Args:
            cap: A most number of runs.

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
        """Return `φ(x) = E[x^K]` for x in [0, 1].

        Args:
            x: Points in [0, 1], of any shape.
        """
        points = np.asarray(x, dtype=np.float64)
        if self.sure_runs:
            return self._with_sure_runs(points, 0)
        return self._pgf(points) if self.cap is None else self._summed(points, 0)

    def pgf_derivative(self, x: ArrayLike) -> Floats:
        """Return `φ'(x) = E[K x^(K-1)]` for x in [0, 1]; `φ'(1)` is the expected number of runs.

        Args:
            x: Points in [0, 1], of any shape.
        """
        points = np.asarray(x, dtype=np.float64)
        if self.sure_runs:
            return self._with_sure_runs(points, 1)
        if self.cap is None:
            return self._pgf_derivative(points)
        return self._capped_derivative(self._pgf_derivative, points, 1)

    def pgf_second_derivative(self, x: ArrayLike) -> Floats:
        """Return `φ''(x) = E[K (K-1) x^(K-2)]` for x in [0, 1].

        Args:
            x: Points in [0, 1], of any shape.
        """
        points = np.asarray(x, dtype=np.float64)
        if self.sure_runs:
            return self._with_sure_runs(points, 2)
        if self.cap is None:
            return self._pgf_second(points)
        return self._capped_derivative(self._pgf_second, points, 2)

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
        """Return `P(K = k)` for whole numbers k.

        Args:
            k: Numbers of runs, of any shape.
        """
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
        """Return P(K <= k).

        Args:
            k: A number of runs, at least 0.

        Example:
            >>> from privtune.accounting import Geometric
            >>> round(Geometric(mean=5).at_most(1), 6), Geometric(mean=5, minimum=3).at_most(2)
            (0.2, 0.0)
        """
        return min(float(self.pmf(np.arange(k + 1)).sum()), 1.0)

    def quantile(self, p: float) -> int:
        """Return the smallest k with `P(K <= k) >= p`, for p in [0, 1).

        Args:
            p: A probability.
        """
        level = check_number("p", p, at_least=0.0, below=1.0)
        return self._invert(level, strict=False)

    def sample(self, rng: np.random.Generator | None = None) -> int:
        """Draw K.

        Args:
            rng: The stream to draw from; None draws from the entropy of the operating system.

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
