"""Noised scores: audited at most what is reported of one."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from privtune.accounting import Adjacency, epsilon
from privtune.audit.bounds import Claim, lower_bound
from privtune.strategies import Scoring
from privtune.training.mechanism import metrics, scoring
from privtune.training.mechanism.data import TensorData
from tests.statistical.rounds import note

pytestmark = pytest.mark.statistical

DELTA = 1e-3
TARGET = 3.0


def validation(canary):
    """One record that counts as much as a record may, and a canary that does so, too."""
    count = 2 if canary else 1
    return TensorData(torch.full((count, 1), 50.0), torch.ones(count, dtype=torch.long), True)


EVERY = 20


@contextmanager
def repeated_sums():
    """Let the exact sums of equal calls be those of the first; of each twentieth call they are taken anew.

    They hold no noise, and take 20 times as long as to draw it. What differs between calls fails.
    """
    real, known, calls = scoring._sums, {}, Counter()

    def sums(metric, model, data, loss):
        key = (metric, len(data))
        calls[key] += 1
        if calls[key] % EVERY == 1:
            again = real(metric, model, data, loss)
            assert np.array_equal(known.setdefault(key, again), again)
        return known[key].copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_sums", sums)
        yield


def audited(metric, mechanism, *, runs, noise=1.0, of=""):
    bound = 2.0 if metric == "loss" else None  # an accuracy takes no bound: a record adds 0 or 1
    plan = Scoring(metric=metric, mechanism=mechanism, bound=bound).plan(
        records=10, public=False, epsilon=TARGET, delta=DELTA, adjacency=Adjacency.ADD_REMOVE
    )
    reported = epsilon(plan.event, DELTA).epsilon
    spent = replace(plan, noise_multiplier=plan.noise_multiplier * noise)
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(
            torch.tensor([[-1.0], [1.0]] if metric == "accuracy" else [[1.0], [-1.0]])
        )

    def sums(terms, canary, rng):
        (released,) = scoring.released_sums(terms, model, validation(canary), rng)
        return released

    exact = replace(plan, noise_multiplier=None)
    first = np.random.default_rng(0)
    added = sums(exact, True, first) - sums(exact, False, first)

    def scores(canary, tag):  # what is released, along what the canary adds
        rngs = (np.random.default_rng([tag, n, 1]) for n in range(runs))
        return np.array([sums(spent, canary, rng) @ added for rng in rngs])

    claim = Claim(plan.event, DELTA) if mechanism == "gaussian" else None

    def audit():
        return lower_bound(scores(False, 1), scores(True, 2), delta=DELTA, claim=claim)

    with repeated_sums():
        return note(f"score: {metric}, {mechanism}{of}", audit, reported).epsilon, reported


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_a_score_tells_no_more_than_reported(metric, mechanism):
    """2 x 500 scores; half the noise is found. Fails by chance with a probability of at most 5%."""
    found, reported = audited(metric, mechanism, runs=500)
    assert 0.3 * reported < found <= reported
    found, _ = audited(metric, mechanism, runs=500, noise=0.5, of=", half the noise")
    assert found > reported


def test_a_metric_that_does_not_clip_is_held_to_its_bound(monkeypatch):
    """2 x 300 scores. Fails by chance with a probability of at most 5%."""
    made = type(metrics.make_metric("loss"))
    monkeypatch.setattr(made, "parts", lambda self, x, y, loss: loss(x, y).double().unsqueeze(-1))
    found, reported = audited("loss", "laplace", runs=300, of=", no clamp")
    assert found <= reported
