"""Loops of a user's own, in both forms, with all weights shown: audited at most what is reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from privtune.accounting import Gaussian, Repeated, calibrate, epsilon
from privtune.audit.bounds import Claim, lower_bound
from privtune.audit.canaries import LONG
from privtune.training.mechanism import stack_oracle as releases
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods import FixedDPSGD
from privtune.training.own_loop.private_training import PrivateTraining
from tests.statistical.report import note

pytestmark = pytest.mark.statistical

DELTA = 1e-3
TARGET = 4.0
STEPS = 4  # of what is reported; a long training shows many times as many, one after the other
RUNS = 300


def loss_of(model, x, y):
    return model(x)[..., 0] + y


def sums(form, *, noise, canary):
    """Return a value a run: what STEPS releases say of the canary, read off the weights."""
    x = torch.zeros(2 if canary else 1, 2)
    x[1:, 0] = LONG
    model = nn.Linear(2, 1, bias=False)
    private = PrivateTraining(
        model,
        TensorData(x, torch.zeros(len(x)), sealed_size=True),
        schedule=Schedule(2, 1.0, STEPS * RUNS),
        method=FixedDPSGD(noise),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        clipping=Flat(1.0),
        secret=bytes([2 + canary]) * 32,
    )
    weights = []

    def keep(*_):
        weights.append(private.bare.weight[0, 0].item())

    keep()
    if form == "fit":
        private.fit(loss_of, on_step=keep)
    else:
        for batch in private.batches():
            private.step(loss_of(private.model, *batch))
            keep()
    private.close()
    return -np.diff(np.array(weights)).reshape(RUNS, STEPS).sum(axis=1)


def audited(form, of=""):
    unit = Repeated(STEPS, Gaussian(1.0))
    noise = calibrate(unit, epsilon=TARGET, delta=DELTA).scale
    reported = epsilon(Repeated(STEPS, Gaussian(noise)), DELTA).epsilon

    def audit():
        sides = [sums(form, noise=noise, canary=canary) for canary in (False, True)]
        return lower_bound(
            *sides, delta=DELTA, claim=Claim(Repeated(STEPS, Gaussian(noise)), DELTA)
        )

    return note(f"own loop, {form}{of}", audit, reported).epsilon, reported


@pytest.mark.parametrize("form", ["fit", "losses"])
def test_a_loop_releases_no_more_than_it_reports(form, monkeypatch):
    """2 x 300 times 4 steps of long trainings; half the noise is found. Fails by chance with a
    probability of at most 5%."""
    found, reported = audited(form)
    assert 0.4 * reported < found <= reported
    real = releases.noise_scale
    monkeypatch.setattr(releases, "noise_scale", lambda *args: real(*args) / 2.0)
    found, _ = audited(form, ", half the noise")
    assert found > reported
