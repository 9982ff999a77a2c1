"""Laws of the number of runs: generating functions, means, caps, and what `sample` draws."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy import stats

from privtune.accounting import (
    Binomial,
    Geometric,
    Logarithmic,
    Poisson,
    TruncatedNegativeBinomial,
    run_law_from_dict,
)
from privtune.accounting import runs as run_laws
from privtune.errors import InvalidInputError, PrivTuneError

LAWS = [
    Geometric(1.0),
    Geometric(7.5),
    Geometric(1e4),
    Geometric(10, maximum=15),
    Logarithmic(1.3),
    Logarithmic(30.0),
    Logarithmic(10, maximum=3),
    TruncatedNegativeBinomial(0.5, 12.0),
    TruncatedNegativeBinomial(-0.5, 8.0),
    TruncatedNegativeBinomial(2.0, 20.0),
    TruncatedNegativeBinomial(1e-9, 20.0),
    TruncatedNegativeBinomial(50.0, 20.0),
    Poisson(0.5),
    Poisson(40.0),
    Poisson(5, maximum=6),
    Binomial(20, 5.0),
    Binomial(4, 4.0),
    Binomial(30, 10.0, maximum=12),
    Geometric(7.5, minimum=2),
    Geometric(10, maximum=30, minimum=5),
    Logarithmic(12.0, minimum=3),
    TruncatedNegativeBinomial(-0.5, 8.0, minimum=4),
    TruncatedNegativeBinomial(2.0, 20.0, maximum=40, minimum=3),
    Poisson(5.0, minimum=1),
    Poisson(40.0, minimum=10),
    Binomial(20, 8.0, minimum=3),
    Binomial(6, 6.0, minimum=2),
]


def support(law):
    top = law.cap if law.cap is not None else law.quantile(1 - 1e-14) * 3 + 50
    k = np.arange(top + 1)
    return k, law.pmf(k)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_generating_function_is_that_of_the_masses(law):
    k, pmf = support(law)
    assert pmf.sum() == pytest.approx(1.0, abs=1e-10)
    assert (k * pmf).sum() == pytest.approx(law.expected_runs, rel=1e-8)
    for x in (0.0, 0.3, 0.9, 1.0):
        powers = np.where((k == 0) & (x == 0.0), 1.0, x ** k.astype(float))
        assert float(law.pgf(x)) == pytest.approx((pmf * powers).sum(), rel=1e-8, abs=1e-12)
    for x in (0.3, 0.9):
        first = (k * pmf * x ** (k - 1.0)).sum()
        second = (k * (k - 1.0) * pmf * x ** (k - 2.0)).sum()
        assert float(law.pgf_derivative(x)) == pytest.approx(first, rel=1e-8)
        assert float(law.pgf_second_derivative(x)) == pytest.approx(second, rel=1e-7, abs=1e-12)
    assert law.zero_probability == pytest.approx(pmf[0], abs=1e-15)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_uncapped_laws_have_the_mean_that_was_asked_for(law):
    if law.cap is None:
        assert law.expected_runs == pytest.approx(law.mean, rel=1e-9)
        assert law.expected_runs >= law.mean * (1 - 1e-12)
    else:
        assert law.expected_runs < law.mean


@pytest.mark.parametrize(
    ("shape", "mean"),
    [
        (-0.9, 50.0),
        (-0.99, 5.0),
        (-0.5, 1e4),
        (-0.5, 1e6),
        (50.0, 20.0),
        (0.7, 1 + 1e-9),
        (50, 1e5),
    ],
)
def test_the_family_in_two_hundred_digits(shape, mean):
    """γ far below the spacing of doubles at 1, and γ nearly 1 (Papernot and Steinke, Def. 1)."""
    law = TruncatedNegativeBinomial(shape, mean)
    with localcontext() as context:
        context.prec = 200
        eta, gamma = Decimal(law.shape), Decimal(law.log_gamma).exp()
        one = Decimal(1)
        expected = eta * (one - gamma) / (gamma * (one - gamma**eta))
        assert float(expected) == pytest.approx(mean, rel=1e-12)
        assert law.expected_runs == pytest.approx(float(expected), rel=1e-12)
        for x in (0.0, 0.3, 0.99, 1 - 1e-9, 1 - 2.0**-52, 1.0):
            base = one - (one - gamma) * Decimal(x)
            whole = gamma**-eta - one
            value = (base**-eta - one) / whole
            first = eta * (one - gamma) * base ** (-eta - one) / whole
            second = first * (eta + one) * (one - gamma) / base
            assert float(law.pgf(x)) == pytest.approx(float(value), rel=1e-11, abs=1e-15)
            assert float(law.pgf_derivative(x)) == pytest.approx(float(first), rel=1e-11)
            assert float(law.pgf_second_derivative(x)) == pytest.approx(float(second), rel=1e-11)


def test_means_next_to_one():
    for shape in (-0.9, 0.0, 1.0, 50.0, 1000.0):
        for mean in (1.0, 1 + 2.0**-52, 1 + 1e-15, 1 + 1e-13):
            law = TruncatedNegativeBinomial(shape, mean)
            assert mean * (1 - 1e-15) <= law.expected_runs <= mean + 1e-11
            assert law.sample(np.random.default_rng(1)) == 1


def test_laws_too_heavy_to_compute_or_to_run_say_so(monkeypatch):
    monkeypatch.setattr(run_laws, "_MAX_DRAW", 10**6)
    with pytest.raises(InvalidInputError, match="close to -1"):
        TruncatedNegativeBinomial(-0.999999, 1.5)
    with pytest.raises(PrivTuneError, match="tail is too heavy"):
        TruncatedNegativeBinomial(-0.5, 1e6).quantile(1 - 1e-15)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_json_both_ways(law):
    assert run_law_from_dict(law.to_dict()) == law


def test_named_laws_are_members_of_the_family():
    x = np.linspace(0, 1, 7)
    np.testing.assert_allclose(
        Geometric(9).pgf(x), TruncatedNegativeBinomial(1, 9).pgf(x), rtol=1e-12
    )
    np.testing.assert_allclose(
        Logarithmic(9).pgf(x), TruncatedNegativeBinomial(0, 9).pgf(x), rtol=1e-12
    )
    near = TruncatedNegativeBinomial(1e-7, 9).pgf(x)
    np.testing.assert_allclose(near, Logarithmic(9).pgf(x), rtol=1e-5, atol=1e-9)
    # A truncated negative binomial law of large shape tends to the Poisson law without its 0.
    wide, poisson = TruncatedNegativeBinomial(1000, 5), Poisson(4.965)
    shifted = (poisson.pgf(x) - math.exp(-4.965)) / (1 - math.exp(-4.965))
    np.testing.assert_allclose(wide.pgf(x), shifted, atol=5e-3)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_quantiles_invert_the_distribution_function(law):
    for p in (0.0, 0.01, 0.5, 0.9, 0.999):
        k = law.quantile(p)
        cumulated = np.cumsum(law.pmf(np.arange(k + 1)))
        assert cumulated[-1] >= p - 1e-12
        assert k in (0, law.minimum or 1) or cumulated[-2] < p


@pytest.mark.statistical
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_sampling_has_the_law_and_would_notice_another(law):
    """Chi-square at level 1e-6; a law with a mean 40% off is rejected at the same level."""
    rng = np.random.default_rng(20240607)
    draws = np.array([law.sample(rng) for _ in range(3_000)])
    assert p_value(law, draws) > 1e-6
    if law.mean > 1.1 and law.cap is None and getattr(law, "n", 0) != 4:
        other = run_law_from_dict(
            {**law.to_dict(), "mean": max(law.mean * 0.6, 0.3 if law.can_be_zero else 1.0)}
            | (
                {}
                if law.minimum is None
                else {"mean": law.minimum + 0.6 * (law.mean - law.minimum)}
            )
        )
        assert p_value(other, draws) < 1e-6


def p_value(law, draws):
    edges = sorted({law.quantile(p) for p in np.linspace(0.05, 0.95, 12)})
    cumulated = np.array([law.pmf(np.arange(e + 1)).sum() for e in edges])
    expected = np.diff(np.concatenate([[0.0], cumulated, [1.0]])) * draws.size
    cells = np.searchsorted(edges, draws, side="left")
    observed = np.bincount(cells, minlength=expected.size)
    keep = expected > 1e-9
    if observed[~keep].any():
        return 0.0
    if keep.sum() == 1:
        return 1.0
    total = (((observed - expected) ** 2)[keep] / expected[keep]).sum()
    return stats.chi2.sf(total, keep.sum() - 1)


STRATIFIED = [
    Geometric(7.5),
    Logarithmic(12.0, minimum=3),
    TruncatedNegativeBinomial(-0.5, 8.0),
    Poisson(4.0),
    Binomial(20, 8.0, minimum=3),
]


@pytest.mark.statistical
@pytest.mark.parametrize("law", STRATIFIED, ids=str)
@pytest.mark.parametrize("count", [1, 4])
def test_each_of_stratified_numbers_has_the_law(law, count):
    """Chi-square at level 1e-6 in every place; strata without their permutation are rejected."""
    rng = np.random.default_rng(7)
    draws = np.array([law.sample_strata(count, rng) for _ in range(3_000)])
    assert draws.shape == (3_000, count)
    for place in range(count):
        assert p_value(law, draws[:, place]) > 1e-6
    if count > 1:
        ordered = np.sort(draws, axis=1)
        assert p_value(law, ordered[:, 0]) < 1e-6
        # Two places share no stratum, so that they lie on one side of the median less often.
        above = draws > law.quantile(0.5)
        assert np.corrcoef(above.T)[0, 1] < -5 / 3_000**0.5


class Rigged:
    """Stands for a generator whose common level and permutation are known."""

    def __init__(self, level):
        self.level = level

    def random(self):
        return self.level

    def permutation(self, count):
        return np.arange(count)[::-1]


@pytest.mark.parametrize("law", STRATIFIED, ids=str)
def test_stratified_numbers_are_one_quantile_a_stratum(law):
    """Bisection over all levels: strata of a fine grid of common levels fill up the whole law."""
    fine, count = 500, 5
    drawn = [law.sample_strata(count, Rigged((n + 0.5) / fine)) for n in range(fine)]
    cumulated = np.cumsum(law.pmf(np.arange(np.max(drawn) + 2)))
    for n, numbers in enumerate(drawn):
        levels = [(place + (n + 0.5) / fine) / count for place in range(count)][::-1]
        assert list(numbers) == list(np.searchsorted(cumulated, levels, side="right"))
    seen = np.bincount(np.ravel(drawn), minlength=cumulated.size) / (fine * count)
    assert abs(np.cumsum(seen) - cumulated).max() <= 1.0 / (fine * count)


@pytest.mark.parametrize("count", [2, 3, 10, 49])
def test_the_last_stratum_ends_where_a_single_draw_does(count):
    """(count - 1 + u) / count rounds to 1 at the largest u: no number of runs is at level 1."""
    law, largest = Geometric(10.0), 1.0 - 2.0**-53
    assert max(law.sample_strata(count, Rigged(largest))) == law.sample(Rigged(largest)) < 400


def test_the_mean_of_stratified_numbers_is_off_by_a_stratum_at_most():
    """A monotone function of K from a to b: the mean over N strata is within (b - a) / N of its own."""
    law, rng = Geometric(10.0), np.random.default_rng(3)
    exact = 1.0 - float(law.pgf(0.9))  # P(one of the best tenth is found)
    for count in (5, 10, 40):
        means = [np.mean(1.0 - 0.9 ** np.array(law.sample_strata(count, rng))) for _ in range(200)]
        assert max(abs(np.array(means) - exact)) <= 1.0 / count
        free = [np.mean([1.0 - 0.9 ** law.sample(rng) for _ in range(count)]) for _ in range(200)]
        assert np.std(means) < 0.6 * np.std(free)


def test_strata_of_no_number_are_refused():
    with pytest.raises(InvalidInputError, match="count"):
        Geometric(10.0).sample_strata(0, np.random.default_rng(0))


def test_sampling_from_the_operating_system_varies():
    draws = {Geometric(1000).sample() for _ in range(20)}
    assert len(draws) > 10
    assert min(draws) >= 1


@pytest.mark.parametrize(
    ("law", "sure", "drawn"),
    [
        (Geometric(7.5, minimum=3), 2, stats.geom(1 / 5.5)),
        (Poisson(9.0, minimum=4), 4, stats.poisson(5.0)),
        (Binomial(20, 8.0, minimum=3), 3, stats.binom(17, 5 / 17)),
        (Logarithmic(5.0, minimum=2), 1, None),
    ],
    ids=["geometric", "poisson", "binomial", "logarithmic"],
)
def test_a_minimum_adds_sure_runs_to_those_that_are_drawn(law, sure, drawn):
    """The masses are scipy's, moved: mean, cap and n are those of all runs together."""
    k = np.arange(60)
    if drawn is None:
        p = 1.0 - float(law.gamma)  # of a logarithmic number of mean 4
        assert -p / ((1 - p) * math.log1p(-p)) == pytest.approx(4.0, rel=1e-9)
        drawn = stats.logser(p)
    assert law.pmf(k) == pytest.approx(drawn.pmf(k - sure), rel=1e-9, abs=1e-15)
    assert law.pmf(law.minimum) > 0.0 == law.pmf(law.minimum - 1) == law.zero_probability
    assert law.at_most(law.minimum - 1) == 0.0
    assert law.at_most(3 + sure) == pytest.approx(drawn.cdf(3), rel=1e-9)


def test_a_minimum_of_one_is_a_law_that_starts_there():
    assert Geometric(5, minimum=1) == Geometric(5)
    assert run_law_from_dict({"law": "geometric", "mean": 5, "minimum": 1}).to_dict() == {
        "law": "geometric",
        "mean": 5.0,
    }
    assert not Poisson(5, minimum=1).can_be_zero


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"minimum": 0}, "minimum"),
        ({"minimum": 2.5}, "minimum"),
        ({"minimum": True}, "minimum"),
        ({"minimum": 1001}, "minimum"),
        ({"minimum": 11}, "mean"),
        ({"minimum": 8, "maximum": 8}, "minimum"),
        ({"minimum": 2, "maximum": 5000}, "maximum"),
        ({"law": "poisson", "minimum": 10}, "mean"),
        ({"law": "binomial", "n": 10, "minimum": 10}, "minimum"),
    ],
)
def test_a_minimum_that_no_law_has_is_refused(fields, named):
    with pytest.raises(InvalidInputError) as refused:
        run_law_from_dict({"law": "geometric", "mean": 10, **fields})
    assert refused.value.name == named
