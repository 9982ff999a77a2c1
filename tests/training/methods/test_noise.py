"""What the engine's oracle adds and lets through, method by method: variances, clipping, poison."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from privtune.training.engine.train import choose_kernel
from privtune.training.mechanism.clipping import CoordinateTransform
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.kernel import LossOfOutputs
from privtune.training.mechanism.oracle import Oracle
from privtune.training.mechanism.schedule import Schedule
from privtune.training.mechanism.streams import Streams
from privtune.training.mechanism.transcript import looks_of
from privtune.training.methods import METHODS
from tests.training.methods.test_contract import candidate, options
from tests.training.simple import cross_entropy, secrets

PRIVATE = sorted(METHODS)
WIDTH = 40  # 10 classes: 400 coordinates of gradient noise a step
STEPS = 60


def model():
    return nn.Linear(WIDTH, 10, bias=False)


class Spy:
    """Passes everything on to the engine's oracle and keeps what it answered."""

    def __init__(self, oracle):
        self.inner, self.pace = oracle, 1.0
        self.gradients, self.losses_, self.counts = [], [], []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def gradient(self, sample, params, **kwargs):
        answer = self.inner.gradient(sample, params, **kwargs)
        self._keep(answer, **kwargs)
        return answer

    def _keep(self, answer, clipping, noise_multiplier):
        bound = clipping.sensitivity(self.candidates)[:, None]
        scale, center = 1.0, 0.0
        if isinstance(clipping, CoordinateTransform):
            scale, center = clipping.scale, clipping.center
        self.gradients.append((noise_multiplier, ((answer - center) / scale / bound).numpy()))

    def gradient_and_fraction(self, sample, params, **kwargs):
        gradient, fraction = self.inner.gradient_and_fraction(sample, params, **kwargs)
        self._keep(gradient, kwargs["clipping"], kwargs["noise_multiplier"])
        value = (fraction.numpy() - 0.5) / 0.5
        self.counts.append((kwargs["count_noise_multiplier"], value))
        return gradient, fraction

    def losses(self, sample, params, *, bound, noise_multiplier, mechanism="gaussian"):
        answer = self.inner.losses(
            sample, params, bound=bound, noise_multiplier=noise_multiplier, mechanism=mechanism
        )
        self.mechanism = mechanism
        self.losses_.append((noise_multiplier, (answer / bound).numpy()))
        return answer


def observe(name, *, x, y, rate, steps=STEPS, seeds=4, **more):
    """Run a method on the engine's oracle; return the spy and the event."""
    schedule = Schedule(len(x), rate, steps)
    plan = Schedule(len(x), max(rate, 0.1), steps)
    method = METHODS[name].for_budget(
        plan, epsilon=1e3 if name == "pur" else 4.0, delta=1e-5, **options(name, WIDTH * 10), **more
    )
    streams = [Streams(secret) for secret in secrets(seeds, tag=9)]
    data, cpu = TensorData(x, y), torch.device("cpu")
    kernel = choose_kernel(model(), LossOfOutputs(cross_entropy), data, cpu)
    usual = {"streams": streams, "device": cpu, "physical_rows": 4096}
    spy = Spy(Oracle(schedule, data=data, kernel=kernel, **usual))
    start = torch.zeros(seeds, WIDTH * 10)
    state = method.init(start, [candidate(method)] * seeds)
    for _ in range(steps):
        state = method.update(state, spy)
    return spy, looks_of(method.event(plan))


def rejects(values, claimed):
    """Two-sided chi-square test of the claimed standard deviation, at an error rate of 1e-4."""
    values = np.concatenate([np.ravel(v) for v in values]) / claimed
    p = stats.chi2.cdf(np.sum(values**2), len(values))
    return min(p, 1 - p) < 0.5e-4


def check_variance(pairs, batch):
    """The noise is what was asked for; 2/3 and 3/2 of it would be noticed."""
    standardised = [value * batch / multiplier for multiplier, value in pairs]
    assert sum(v.size for v in standardised) >= 100
    assert not rejects(standardised, 1.0)
    assert rejects(standardised, 2 / 3)
    assert rejects(standardised, 3 / 2)


@pytest.mark.statistical
@pytest.mark.parametrize("name", PRIVATE)
def test_variance_of_every_release_matches_the_charge(name):
    """On samples without records (or with zero gradients) a release is its noise alone.

    The multipliers that scale it are those of the event, atom by atom.
    """
    full_batch = name.startswith("pur")
    x, y = torch.zeros(50, WIDTH), torch.zeros(50, dtype=torch.long)
    rate = 1.0 if full_batch else 1e-9  # zero features have zero gradients
    spy, looks = observe(name, x=x, y=y, rate=rate)
    check_variance(spy.gradients, rate * len(x))
    atoms = {atom for (_, atoms), _ in looks.items() for atom in atoms}
    used = {("gaussian", m) for m, _ in spy.gradients + spy.losses_ + spy.counts}
    assert used == atoms
    if name == "hyfreedp":
        assert len(spy.losses_) == 12
        check_variance(spy.losses_, rate * len(x))
    if name == "quantile-clipping":
        check_variance(spy.counts, rate * len(x))


@pytest.mark.statistical
@pytest.mark.parametrize("batch", ["same", "separate"])
def test_laplace_noise_on_losses_matches_the_charge(batch):
    """On empty samples. If X is Laplace of scale b, 2|X|/b is a chi-square variable of 2 degrees."""
    x, y = torch.zeros(50, WIDTH), torch.zeros(50, dtype=torch.long)
    more = {"loss_noise": "laplace", "loss_batch": batch, "interval": 1}
    spy, looks = observe("hyfreedp", x=x, y=y, rate=1e-9, seeds=12, **more)
    assert spy.mechanism == "laplace"
    check_variance(spy.gradients, 1e-9 * len(x))
    values = np.concatenate([np.ravel(v) * 1e-9 * len(x) / b for b, v in spy.losses_])
    assert values.size == STEPS * 3 * 12

    def rejected(claimed):
        p = stats.chi2.cdf(2 * np.abs(values / claimed).sum(), 2 * values.size)
        return min(p, 1 - p) < 0.5e-4

    assert not rejected(1.0)
    assert rejected(2 / 3)
    assert rejected(3 / 2)
    # And it is Laplace, not a Gaussian of the same size: Kolmogorov and Smirnov at 1e-4.
    assert stats.kstest(values, stats.laplace.cdf).pvalue > 1e-4
    assert stats.kstest(values, stats.norm(0, 2**0.5).cdf).pvalue < 1e-4
    atoms = {atom for (_, atoms), _ in looks.items() for atom in atoms}
    used = {("gaussian", m) for m, _ in spy.gradients} | {("laplace", m) for m, _ in spy.losses_}
    assert used == atoms


@pytest.mark.parametrize("name", PRIVATE)
def test_one_record_moves_no_sum_by_more_than_its_sensitivity(name):
    """With and without a record that has a huge gradient, from the same streams: the difference of
    the answers of the first look is the record's clipped contribution."""
    torch.manual_seed(0)
    x, y = torch.randn(50, WIDTH), torch.randint(10, (50,))
    answers = []
    for extra in (0.0, 1e4):
        touched = x.clone()
        touched[7] = extra  # zero features add nothing: the record is there and is not
        spy, _ = observe(name, x=touched, y=y, rate=1.0, steps=1, seeds=1)
        answers.append(spy)
    (_, one), (_, other) = answers[0].gradients[0], answers[1].gradients[0]
    moved = np.linalg.norm(other - one) * 50
    bound = 0.5 if name.startswith("pur") else 1.0  # their sensitivity is for a replaced record
    assert moved <= bound * (1 + 1e-3)
    assert moved > 0.9 * bound
    if name == "hyfreedp":
        (_, one), (_, other) = answers[0].losses_[0], answers[1].losses_[0]
        assert (np.abs(other - one) * 50 <= 1 + 1e-4).all()
