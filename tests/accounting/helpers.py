"""Shared by the accounting tests: short names, event strategies, a lattice pair from a finite one."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import scipy.fft
from hypothesis import strategies as st

import privtune.accounting as dp
from privtune.accounting.lower import Instance
from privtune.accounting.pmf import from_profile


def steps(rate, noise, count):
    """DP-SGD: `count` Poisson-sampled Gaussian releases."""
    return dp.Repeated(count, dp.PoissonSampled(rate, dp.Gaussian(noise)))


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
gaussians = st.builds(dp.Gaussian, positive)
laplaces = st.builds(dp.Laplace, positive)
singles = st.one_of(
    gaussians,
    laplaces,
    st.builds(dp.Joint, st.lists(gaussians, min_size=1, max_size=3)),
    st.builds(dp.Joint, st.lists(st.one_of(gaussians, laplaces), min_size=1, max_size=3)),
)
laws = st.one_of(
    st.builds(dp.Geometric, st.floats(1.0, 200.0)),
    st.builds(dp.Logarithmic, st.floats(1.0, 200.0)),
    st.builds(dp.Poisson, st.floats(0.1, 50.0)),
    st.builds(dp.TruncatedNegativeBinomial, st.floats(-0.9, 3.0), st.floats(1.0, 200.0)),
    st.builds(dp.Binomial, st.just(30), st.floats(0.5, 30.0)),
    st.builds(dp.Geometric, st.floats(1.0, 20.0), st.integers(1, 60)),
)
leaves = st.one_of(
    singles,
    st.builds(dp.PoissonSampled, rates, singles),
    st.builds(dp.ZCDP, st.floats(0.0, 2.0)),
    st.builds(dp.ApproximateDP, st.floats(0.0, 3.0), st.floats(0.0, 1e-4)),
    st.just(dp.NonPrivate()),
)
events = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(dp.Repeated, st.integers(1, 1000), inner),
        st.builds(dp.Composed, st.lists(inner, max_size=3)),
        st.builds(dp.WorstOf, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda e: dp.WorstOf([e, e], [0.25, 0.75]), inner),
        st.builds(dp.Parallel, st.lists(inner, min_size=1, max_size=3)),
        st.builds(dp.PrivateSelection, inner, laws),
        st.builds(dp.ThresholdSelection, inner, st.floats(0.01, 1.0)),
        st.builds(dp.SubsampledTuning, st.sampled_from([1, 2]), st.floats(0.01, 0.9), inner, inner),
    ),
    max_leaves=5,
)


def attained(instance: Instance, epsilon: float) -> float:
    """The largest δ at this ε among the orders of a selection's outcomes that are tried."""
    p, q = instance.tuned(instance.best_order(epsilon))
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())
