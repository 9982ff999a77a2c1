"""The tails of noise: how far they reach, and that they are a Gaussian's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from privtune.accounting.reach import GAUSSIAN_REACH, LAPLACE_REACH
from privtune.errors import InvalidInputError
from privtune.training.mechanism import noise as noises
from privtune.training.mechanism.noise import NoiseSource
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.mechanism.streams import Streams
from tests.tiers import FULL

CPU = torch.device("cpu")
OPTIONS = [
    NoiseOptions(),
    NoiseOptions.of("secure"),
    NoiseOptions(floating_point="grid"),
    NoiseOptions(source="chacha20", floating_point="four-draws"),
]


@pytest.fixture(params=["looked at", "not looked at"])
def looks(request, monkeypatch):
    """On a device that a look would make wait for, tails are placed without one."""
    if request.param == "not looked at":
        monkeypatch.setattr(noises, "looks_freely", lambda device: False)


def zeros(size):
    return np.zeros(size)


def ones(size):
    return np.full(size, 1.0 - 2.0**-53)


@pytest.mark.quick
def test_the_reach_is_what_plans_count_on():
    assert noises.gaussian_tail(zeros, 1)[0] > GAUSSIAN_REACH
    assert abs(noises.exact_gaussian(zeros, 1)[0]) > GAUSSIAN_REACH
    assert abs(noises.exact_laplace(zeros, 1)[0]) > LAPLACE_REACH
    # The last step of the uniform numbers is far below the mass beyond the reach.
    assert stats.norm.logsf(GAUSSIAN_REACH) > math.log(2.0**-848) + stats.norm.logsf(4.5) + 10.0
    for draw in (noises.gaussian_tail, noises.exact_gaussian, noises.exact_laplace):
        assert np.isfinite(draw(ones, 3)).all()
        assert np.isfinite(draw(zeros, 3)).all()
    assert noises.gaussian_tail(ones, 1)[0] == pytest.approx(noises.EDGE)


@pytest.mark.statistical
def test_the_conditional_tail_is_a_gaussians():
    """Kolmogorov-Smirnov at 1e-3 in logarithms of the survival function; seen: 2% of a scale."""
    rng = np.random.default_rng(5)
    values = noises.gaussian_tail(rng.random, 40_000)
    level = stats.norm.sf(values) / stats.norm.sf(noises.EDGE)
    assert stats.kstest(level, "uniform").pvalue > 1e-3
    wrong = stats.norm.sf(1.02 * values) / stats.norm.sf(1.02 * noises.EDGE)
    assert stats.kstest(wrong, "uniform").pvalue < 1e-3


@pytest.mark.quick
@pytest.mark.parametrize("tail", [5.0, -5.0])
def test_a_tail_on_either_side_is_found(tail):
    values = np.linspace(-4.0, 4.0, 9, dtype=np.float32)
    assert noises.beyond(values).tolist() == []
    values[3] = tail
    assert noises.beyond(values).tolist() == [3]


@pytest.mark.statistical
def test_values_of_scores():
    rng = np.random.default_rng(6)
    for draw, law in ((noises.exact_gaussian, "norm"), (noises.exact_laplace, "laplace")):
        values = draw(rng.random, 20_000)
        assert stats.kstest(values, law).pvalue > 1e-3
        assert stats.kstest(values * 1.1, law).pvalue < 1e-3


def test_float32_noise_is_right_up_to_the_edge():
    """The words that give a value beyond t, counted at 4,096 angles, by bisection; any t up to 6."""
    angles = (np.arange(4096, dtype=np.uint64) * 2**20 + 2**19).astype(np.uint32)

    def beyond(words, t):
        values = np.empty(2 * len(angles), dtype=np.float32)
        noises._box_muller(np.concatenate([words.astype(np.uint32), angles]), values)
        assert np.isfinite(values).all()
        return np.abs(values[: len(angles)]) > t

    for t, right in ((0.5, 1e-6), (3.0, 1e-6), (noises.EDGE, 1e-5), (5.5, 1e-3), (6.0, 1e-2)):
        low, high = np.zeros(len(angles)), np.full(len(angles), 2.0**32)  # beyond below, not above
        while (high - low).max() > 1.0:
            middle = np.floor((low + high) / 2.0)
            found = beyond(middle, t)
            low, high = np.where(found, middle, low), np.where(found, high, middle)
        mass = float(high[beyond(np.zeros(len(angles)), t)].sum()) / len(angles) / 2.0**32
        assert mass == pytest.approx(2.0 * stats.norm.sf(t), rel=right, abs=0.0)


def test_no_word_gives_what_is_no_number():
    """The least words and the greatest: of u = 1 the radius is 0, and never the root of less."""
    for first in (0, 2**32 - 2**20):
        radius = np.arange(first, first + 2**20, dtype=np.uint64).astype(np.uint32)
        values = np.empty(2**21, dtype=np.float32)
        noises._box_muller(np.concatenate([radius, radius[::-1]]), values)
        assert np.isfinite(values).all()
        assert np.abs(values).max() < 6.8


@pytest.mark.statistical
def test_the_source_has_values_that_its_generator_cannot_give():
    """3e8 draws: 172 / 11.4 / 2.4 are to be expected; one of 24 bits alone gives 169 / 9.0 / 0.

    Each count is within the central 99.9% of its Poisson law, for this seed. By default a tenth, of which
    none may be beyond the last edge: that words give what lies there is tested above.
    """
    edges = (5.0, 5.5, 5.7681)
    counts, draws, size = np.zeros(3), 0, 2**22
    noise = NoiseSource([Streams(bytes([9]) * 32)], CPU)
    while draws < (3e8 if FULL else 3e7):
        values = noise.gaussian(size).numpy()[0]
        if max(values.max(), -values.min()) > edges[0]:
            beyond = np.abs(values[np.abs(values) > edges[0]])
            counts += [np.count_nonzero(beyond > edge) for edge in edges]
        draws += size
    for count, edge in zip(counts, edges, strict=True):
        mean = draws * 2.0 * stats.norm.sf(edge)
        low, high = stats.poisson.ppf([5e-4, 1.0 - 5e-4], mean)
        assert low <= count <= high, (edge, mean)
    assert counts[2] > 0 or not FULL


@pytest.mark.statistical
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.usefixtures("looks")
def test_what_is_drawn_again_has_the_right_law(options, monkeypatch):
    """With an edge at half a deviation most values are: their law, their signs, their place."""
    monkeypatch.setattr(noises, "EDGE", 0.5)
    noise = NoiseSource([Streams(bytes([k]) * 32) for k in range(2)], CPU, options=options)
    values = noise.gaussian(20_000).double()
    first, second = values.numpy()
    for row in (first, second):
        assert stats.kstest(row, "norm").pvalue > 1e-3
        assert stats.kstest(row * 1.05, "norm").pvalue < 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 4.5 / math.sqrt(len(first))
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 4.5 / math.sqrt(len(first))


@pytest.mark.quick
@pytest.mark.usefixtures("looks")
def test_tails_keep_signs_and_all_else(monkeypatch):
    plain = NoiseSource([Streams(bytes(32))], CPU).gaussian(30_000)
    monkeypatch.setattr(noises, "EDGE", 2.0)
    again = NoiseSource([Streams(bytes(32))], CPU).gaussian(30_000)
    inside = plain.abs() <= 2.0
    assert torch.equal(plain[inside], again[inside])
    assert not bool((plain[~inside] == again[~inside]).any())
    assert bool((again[~inside].abs() > 2.0).all())
    assert torch.equal(plain.sign(), again.sign())


@pytest.mark.quick
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("edge", [noises.EDGE, 1.5])
@pytest.mark.usefixtures("looks")
def test_noise_does_not_depend_on_the_stack(options, edge, monkeypatch):
    monkeypatch.setattr(noises, "EDGE", edge)

    def streams():
        return [Streams(bytes([k]) * 32) for k in range(5)]

    together = NoiseSource(streams(), CPU, options=options)
    alone = NoiseSource([streams()[3]], CPU, options=options)
    for size in (7, 7, 1, 5000, 40_000, 7):
        assert torch.equal(together.gaussian(size)[3], alone.gaussian(size)[0])


def test_more_tails_are_sent_than_are_ever_needed():
    """Against the exact binomial law, and without sending many times as many."""
    chance = 2.0 * stats.norm.sf(noises.EDGE)
    for size in (1, 7, 10**3, 2**14, 10**6, 10**8):
        many = noises.most_beyond(size)
        assert stats.binom.logsf(many, size, chance) <= -128.0 * math.log(2.0)
        assert many <= 20 + 2.5 * chance * size + 15.0 * math.sqrt(chance * size)


def test_options_say_what_they_know():
    assert NoiseOptions.of(None) == NoiseOptions.of("plain") == NoiseOptions()
    assert NoiseOptions.of("secure") == NoiseOptions(source="chacha20", floating_point="grid")
    assert NoiseOptions.of({"source": "chacha20"}) == NoiseOptions(source="chacha20")
    for wrong in ("safe", {"sources": "fast"}, {"source": "dice"}, {"floating_point": 3}):
        with pytest.raises(InvalidInputError, match="noise"):
            NoiseOptions.of(wrong)
