"""Shared by the accounting tests: short names, event strategies, a lattice pair from a finite one."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import scipy.fft
from hypothesis import strategies as st

from privtune.accounting import (
    ZCDP,
    ApproximateDP,
    Binomial,
    Composed,
    Gaussian,
    Geometric,
    Joint,
    Laplace,
    Logarithmic,
    NonPrivate,
    Parallel,
    Poisson,
    PoissonSampled,
    PrivateSelection,
    Repeated,
    SubsampledTuning,
    ThresholdSelection,
    TruncatedNegativeBinomial,
    WorstOf,
)
from privtune.accounting.lower import Instance
from privtune.accounting.pmf import from_profile


def steps(rate, noise, count):
    """DP-SGD: `count` Poisson-sampled Gaussian releases."""
    return Repeated(count, PoissonSampled(rate, Gaussian(noise)))


def finite_pmf(p, q, step=2e-3):
    """Return the lattice pair of two laws on a finite set, through its exact profile."""
    p, q = np.asarray(p, float), np.asarray(q, float)

    def profile(first, second):
        return lambda points: np.array(
            [np.maximum(first - math.exp(e) * second, 0.0).sum() for e in points]
        )

    reach = math.ceil(np.abs(np.log(p / q)).max() / step) + 1
    return from_profile(profile(p, q), profile(q, p), step, -reach, reach)


class Work:
    """What the time of an answer is spent on, counted: the same on every machine, however busy."""

    transformed = 0
    """Points of Fourier transforms."""
    convolved = 0
    """Products of convolutions without transforms."""
    summed = 0
    """Terms of power series: points times coefficients."""


@contextmanager
def counted() -> Iterator[Work]:
    """Count the work of what is asked meanwhile. What was asked before may be known, and cost none."""
    work = Work()

    def spy(owner, name, kind, size):
        real = getattr(owner, name)

        def call(first, second=None, *rest, **options):
            setattr(work, kind, getattr(work, kind) + size(first, second))
            return real(first, second, *rest, **options)

        patch.setattr(owner, name, call)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rfft", "irfft"):
            spy(scipy.fft, name, "transformed", lambda x, n: len(x) if n is None else n)
        spy(np, "convolve", "convolved", lambda a, b: np.size(a) * np.size(b))
        polynomial = np.polynomial.polynomial
        spy(polynomial, "polyval", "summed", lambda x, c: np.size(x) * np.size(c))
        yield work


positive = st.floats(0.05, 50.0, allow_nan=False)
rates = st.floats(1e-4, 1.0)
gaussians = st.builds(Gaussian, positive)
laplaces = st.builds(Laplace, positive)
singles = st.one_of(
    gaussians,
    laplaces,
    st.builds(Joint, st.lists(gaussians, min_size=1, max_size=3)),
    st.builds(Joint, st.lists(st.one_of(gaussians, laplaces), min_size=1, max_size=3)),
)
laws = st.one_of(
    st.builds(Geometric, st.floats(1.0, 200.0)),
    st.builds(Logarithmic, st.floats(1.0, 200.0)),
    st.builds(Poisson, st.floats(0.1, 50.0)),
    st.builds(TruncatedNegativeBinomial, st.floats(-0.9, 3.0), st.floats(1.0, 200.0)),
    st.builds(Binomial, st.just(30), st.floats(0.5, 30.0)),
    st.builds(Geometric, st.floats(1.0, 20.0), st.integers(1, 60)),
)
leaves = st.one_of(
    singles,
    st.builds(PoissonSampled, rates, singles),
    st.builds(ZCDP, st.floats(0.0, 2.0)),
    st.builds(ApproximateDP, st.floats(0.0, 3.0), st.floats(0.0, 1e-4)),
    st.just(NonPrivate()),
)
events = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Repeated, st.integers(1, 1000), inner),
        st.builds(Composed, st.lists(inner, max_size=3)),
        st.builds(WorstOf, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda e: WorstOf([e, e], [0.25, 0.75]), inner),
        st.builds(Parallel, st.lists(inner, min_size=1, max_size=3)),
        st.builds(PrivateSelection, inner, laws),
        st.builds(ThresholdSelection, inner, st.floats(0.01, 1.0)),
        st.builds(SubsampledTuning, st.sampled_from([1, 2]), st.floats(0.01, 0.9), inner, inner),
    ),
    max_leaves=5,
)


def attained(instance: Instance, epsilon: float) -> float:
    """The largest δ at this ε among the orders of a selection's outcomes that are tried."""
    p, q = instance.tuned(instance.best_order(epsilon))
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())
