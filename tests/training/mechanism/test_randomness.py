"""Streams, sampling and noise: right distributions, with power, and independence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.ciphers import Cipher
from scipy import stats

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.training.mechanism.noise import NoiseSource, add_noise, noise_scale
from privtune.training.mechanism.sampling import PoissonSampler, padded
from privtune.training.mechanism.schedule import NoiseOptions
from privtune.training.mechanism.streams import Streams, seed_global_generator

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")
OPTIONS = [
    NoiseOptions(),
    NoiseOptions(source="chacha20"),
    NoiseOptions(floating_point="grid"),
    NoiseOptions(source="chacha20", floating_point="four-draws"),
]


def streams(count):
    return [Streams(bytes([k]) * 32) for k in range(count)]


def test_streams_differ_by_name_candidate_and_secret():
    keys = {
        Streams(bytes([tag]) * 32).key(name, k)
        for tag in range(3)
        for name in ("noise", "sampling", "noise1")
        for k in (0, 1, 11)
    }
    assert len(keys) == 27
    assert "sealed" in repr(Streams())
    assert Streams().key("noise") != Streams().key("noise")
    with pytest.raises(InvalidInputError, match="32 bytes"):
        Streams(b"short")


def test_a_generator_holds_more_than_32_bits_of_the_key():
    """torch keeps 32 bits of a seed on CPU: seeds 1 and 1 + 2**32 are one stream."""
    same = [torch.Generator().manual_seed(seed) for seed in (1, 1 + 2**32)]
    assert torch.equal(*(torch.randn(8, generator=g) for g in same))
    words = Streams(bytes(32)).generator("noise").get_state()[24 : 24 + 8 * 624]
    assert len(torch.unique(words.view(624, 8), dim=0)) == 624
    a, b = (Streams(bytes(32)).generator("noise") for _ in range(2))
    assert torch.equal(torch.randn(2000, generator=a), torch.randn(2000, generator=b))


@pytest.mark.statistical
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gaussian_noise_is_standard_normal(options):
    """Kolmogorov-Smirnov at 1e-3; it sees a scale that is 4% off."""
    noise = NoiseSource(streams(2), CPU, options=options)
    values = torch.cat([noise.gaussian(1000) for _ in range(40)], dim=1).double().numpy()
    for row in values:
        assert stats.kstest(row, "norm").pvalue > 1e-3
        assert stats.kstest(row * 1.04, "norm").pvalue < 1e-3
        assert abs(row.std() - 1.0) < 4.5 / math.sqrt(2 * len(row))


@pytest.mark.statistical
@pytest.mark.parametrize("source", ["fast", "chacha20"])
def test_laplace_noise(source):
    noise = NoiseSource(streams(1), CPU, options=NoiseOptions(source=source))
    values = torch.cat([noise.laplace(1) for _ in range(20000)], dim=1)[0].double().numpy()
    assert stats.kstest(values, "laplace").pvalue > 1e-3
    assert stats.kstest(values * 1.1, "laplace").pvalue < 1e-3


@pytest.mark.statistical
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_candidates_and_steps_are_independent(options):
    """Correlations below 4.5 standard errors; a shared stream has correlation 1."""
    noise = NoiseSource(streams(4), CPU, options=options)
    first, second = noise.gaussian(5000).double(), noise.gaussian(5000).double()
    rows = torch.cat([first, second]).numpy()
    correlation = np.corrcoef(rows) - np.eye(8)
    assert np.abs(correlation).max() < 4.5 / math.sqrt(5000)
    # With power: a tenth of shared noise would be seen.
    mixed = rows[0] * math.sqrt(0.99) + rows[1] * 0.1
    assert abs(np.corrcoef(mixed, rows[1])[0, 1]) > 4.5 / math.sqrt(5000)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_noise_goes_on_where_it_was(options):
    """From a position within a block, and far beyond what was drawn ahead: to the bit."""
    first = NoiseSource(streams(2), CPU, options=options)
    for size in (7, 40_001, 7, 11_000):
        first.gaussian(size)
        first.laplace(3)
    second = NoiseSource(streams(2), CPU, options=options)
    second.go_to(first.position())
    for size in (11_000, 11_000, 40_001, 7, 11_000, 40_001, 11_000):
        assert torch.equal(first.gaussian(size), second.gaussian(size))
        assert torch.equal(first.laplace(3), second.laplace(3))


def test_without_the_cipher_one_sentence_says_so(monkeypatch):
    def none(self):
        raise UnsupportedAlgorithm("chacha20")

    monkeypatch.setattr(Cipher, "encryptor", none)
    with pytest.raises(PrivTuneError, match="OpenSSL has no ChaCha20 here"):
        NoiseSource(streams(1), CPU).gaussian(3)


def test_the_grid_hides_the_lowest_bits():
    options = NoiseOptions(floating_point="grid")
    noise = NoiseSource(streams(2), CPU, options=options)
    total, scale = torch.randn(2, 500) * 1e-7, torch.tensor([0.7, 0.0])
    out = add_noise(total, noise.gaussian(500), scale, options)
    steps = out[0].double() / 2.0**-20
    assert torch.equal(steps, steps.round())
    assert torch.equal(out[1], total[1])


def test_noise_scale_is_multiplier_times_sensitivity():
    scale = noise_scale((0.0, 2.0), torch.tensor([math.inf, 3.0]).double())
    assert scale.tolist() == [0.0, 6.0]
    with pytest.raises(InvalidInputError, match="finite where noise is added"):
        noise_scale(1.0, torch.tensor([math.inf]).double())
    with pytest.raises(InvalidInputError, match="at least 0"):
        noise_scale(-1.0, torch.tensor([1.0]).double())


def draw(records, rate, steps, seeds=1):
    sampler = PoissonSampler(
        records=records, rate=rate, rngs=[Streams(bytes([k]) * 32).numpy("s") for k in range(seeds)]
    )
    included = np.zeros((seeds, steps, records), dtype=bool)
    for t in range(steps):
        index, sizes = sampler()
        for k in range(seeds):
            own = index[k, : sizes[k]]
            assert len(np.unique(own)) == len(own)
            included[k, t, own] = True
    return included


@pytest.mark.statistical
@pytest.mark.parametrize(("records", "rate"), [(50, 0.3), (300, 0.02), (40, 0.9)])
def test_inclusions_are_independent_bernoulli(records, rate):
    """Frequencies, sizes and neighbours against their law, at 4.5 standard errors."""
    steps = 2000
    included = draw(records, rate, steps, seeds=2)
    error = math.sqrt(rate * (1 - rate) / steps)
    frequency = included[0].mean(axis=0)
    assert np.abs(frequency - rate).max() < 4.9 * error
    assert abs(frequency.mean() - rate) < 4.5 * error / math.sqrt(records)
    sizes = included[0].sum(axis=1)
    variance = records * rate * (1 - rate)
    assert abs(sizes.var() / variance - 1) < 4.5 * math.sqrt(2 / steps) + 0.02
    pairs = (included[0][:, 1:] & included[0][:, :-1]).mean()
    across = (included[0] & included[1]).mean()
    later = (included[0][1:] & included[0][:-1]).mean()
    spread = 4.5 * math.sqrt(rate**2 / (steps * records)) * 2
    for joint in (pairs, across, later):
        assert abs(joint - rate**2) < spread
    # With power: a rate that is 5% off would be seen.
    assert abs(1.05 * rate - frequency.mean()) > 4.5 * error / math.sqrt(records)


def test_sampling_at_the_edges():
    assert draw(7, 1.0, 20).all()
    assert not draw(7, 1e-12, 20).any()
    assert draw(1, 0.5, 400).mean() == pytest.approx(0.5, abs=0.12)


def test_samples_do_not_depend_on_the_stack():
    def make(tags):
        rngs = [Streams(bytes([k]) * 32).numpy("s") for k in tags]
        return PoissonSampler(records=500, rate=0.05, rngs=rngs)

    together, alone = make([0, 1, 2]), make([1])
    for _ in range(400):
        (a, na), (b, nb) = together(), alone()
        assert na[1] == nb[0]
        assert np.array_equal(a[1, : na[1]], b[0, : nb[0]])


def test_physical_sizes_are_few_and_close():
    sizes = [padded(n) for n in range(5000)]
    assert all(s >= n for n, s in enumerate(sizes))
    assert len(set(sizes)) < 120
    assert all(s - n <= max(8, n / 8) for n, s in enumerate(sizes))


def test_a_seed_leaves_no_note_for_accelerators_that_are_not_there():
    tracker = torch.cuda._lazy_seed_tracker
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = torch.rand(3)
        note = tracker.manual_seed_all_cb
        seed_global_generator(7)
        assert torch.equal(torch.rand(3), expected)
    if not torch.accelerator.is_available():
        assert note is not None
        assert tracker.manual_seed_all_cb is note
