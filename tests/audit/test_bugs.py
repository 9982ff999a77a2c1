"""Mistakes, planted in the package one at a time: the audit finds each, and says where.

Without a mistake every row stays below what is reported and every law holds; the seeds are fixed, and
another seed fails with a probability of at most 5% a row and 1e-4 a law.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from privtune.accounting import Geometric
from privtune.audit import audit
from privtune.audit.machinery_laws import (
    LEVEL,
    check_noise,
    check_rounds,
    check_runs,
    check_sampler,
)
from privtune.ledger.rounds import OpenRound, Rounds
from privtune.strategies import Fixed, PapernotSteinke, Scoring, SubsetSearch, plan_arm
from privtune.strategies import selection as selecting
from privtune.training.mechanism import noise as noises
from privtune.training.mechanism import oracle, sampling
from privtune.training.mechanism.clipping import Flat
from privtune.training.mechanism.sampling import PoissonSampler
from privtune.training.mechanism.schedule import NoiseOptions, Schedule
from tests.statistical.rounds import DELTA, RATE, context
from tests.toy import blobs

pytestmark = pytest.mark.statistical

NORM = {"max_grad_norm": 1.0}
FIXED = Fixed(parameters={**NORM, "learning_rate": 1.0})
SELECTION = PapernotSteinke(parameters=NORM, mean_runs=5)
SAMPLED = Schedule(2000, 0.05, 4)


def plan_of(strategy, **more):
    space = {} if strategy is FIXED else RATE
    return strategy.plan(context(space, **more), epsilon=4.0)


def broken(checks):
    return [check.name for check in checks if not check.passed]


def rounds_broken():
    return broken(check_rounds(plan_of(SELECTION), SELECTION, seed=1))


def test_a_sound_package_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = audit(plan_of(SELECTION), strategy=SELECTION, delta=DELTA, runs=200, published=4.0)
    assert report.passed, report.to_dict()
    assert [row.name for row in report.rows] == ["one training", "the whole selection"]
    assert all(row.epsilon > 0.2 * row.reported for row in report.rows)
    assert all(row.lower <= row.reported <= report.published + 1e-9 for row in report.rows)
    assert len(report.checks) >= 8
    assert broken(check_sampler(SAMPLED, seed=1)) == []
    assert min(c.p_value for c in report.checks) >= LEVEL
    assert not list(tmp_path.iterdir()), "an audit leaves nothing behind, in no ledger of anybody's"


def test_1_a_trial_without_finite_weights_is_dropped(monkeypatch):
    real = Rounds.results
    monkeypatch.setattr(
        Rounds,
        "results",
        lambda self, charge: tuple(r for r in real(self, charge) if r.score > -math.inf),
    )
    assert rounds_broken() == ["rows of a round"]


def test_2_the_number_of_runs_is_fixed(monkeypatch):
    law = Geometric(5.0)
    assert broken(check_runs(law, seed=1)) == []
    monkeypatch.setattr(Geometric, "sample", lambda self, rng=None: 5)
    assert broken(check_runs(law, seed=1)) == ["law of the number of runs"]


def test_3_trials_share_a_seed(monkeypatch):
    monkeypatch.setattr(OpenRound, "seed", lambda self, number: self.secret)
    assert "seeds of rows" in rounds_broken()


def test_4_a_loser_is_shown(monkeypatch):
    monkeypatch.setattr(
        selecting, "best_of", lambda results, _: min(results, key=lambda r: r.score)
    )
    assert rounds_broken() == ["what is released"]


def test_5_noise_that_is_large_is_drawn_again(monkeypatch):
    real = noises.NoiseSource.gaussian

    def retried(self, size):
        values = real(self, size)
        return torch.where(values.abs() > 3.5, real(self, size), values)

    assert broken(check_noise(NoiseOptions(), seed=1)) == []
    monkeypatch.setattr(noises.NoiseSource, "gaussian", retried)
    assert "tails of the noise" in broken(check_noise(NoiseOptions(), seed=1))


def test_6_the_noise_is_half(monkeypatch):
    real = oracle.noise_scale
    monkeypatch.setattr(oracle, "noise_scale", lambda *args: real(*args) / 2.0)
    report = audit(plan_of(FIXED), delta=DELTA, runs=200)
    assert not report.rows[0].passed
    assert broken(report.checks) == ["noise of releases"]


def test_7_records_are_sampled_at_another_rate(monkeypatch):
    class Faster(PoissonSampler):
        def __init__(self, *, rate, **rest):
            super().__init__(rate=1.05 * rate, **rest)

    monkeypatch.setattr(sampling, "PoissonSampler", Faster)
    assert "sampling rate" in broken(check_sampler(SAMPLED, seed=1))


def test_8_batches_are_shuffled(monkeypatch):
    class Shuffled:
        def __init__(self, *, records, rate, rngs):
            self.rngs, self.records, self.size, self.left = rngs, records, round(rate * records), []

        def __call__(self):
            if len(self.left) < self.size:
                self.left = self.rngs[0].permutation(self.records).tolist()
            batch, self.left = self.left[: self.size], self.left[self.size :]
            return np.array([batch]), np.array([self.size])

    monkeypatch.setattr(sampling, "PoissonSampler", Shuffled)
    found = broken(check_sampler(SAMPLED, seed=1))
    assert found == ["sizes of samples", "records in two successive samples"]


def test_9_the_sensitivity_is_off_by_two(monkeypatch):
    real = Flat.sensitivity
    monkeypatch.setattr(Flat, "sensitivity", lambda self, count: real(self, count) / 2.0)
    monkeypatch.setattr(Flat, "limits", lambda self, norms: norms.new_ones(1, 1))
    report = audit(plan_of(FIXED), delta=DELTA, runs=200)
    assert not report.rows[0].passed


def test_10_a_score_has_no_noise(monkeypatch):
    scoring = Scoring()
    plan = plan_of(SELECTION, task=blobs(), scoring=scoring)
    plan = replace(plan, runs=None, search=None)  # its score alone
    assert [r.passed for r in audit(plan, delta=DELTA, runs=100).rows] == [True, True]
    monkeypatch.setattr(noises, "exact_gaussian", lambda uniform, count: np.zeros(count))
    rows = audit(plan, delta=DELTA, runs=100).rows
    assert [r.name for r in rows if not r.passed][-1] == "one score"


TURNS = Schedule(2000, 0.05, 8, bands=4)


def test_11_groups_are_not_drawn_uniformly(monkeypatch):
    assert broken(check_sampler(TURNS, seed=1)) == []
    real = sampling.assign_groups

    def skewed(streams, *, records, bands):
        groups = real(streams, records=records, bands=bands)
        groups[: records // 20] = 0
        return groups

    monkeypatch.setattr(sampling, "assign_groups", skewed)
    assert broken(check_sampler(TURNS, seed=1)) == ["groups of records"]


def test_12_records_are_sampled_in_every_turn(monkeypatch):
    monkeypatch.setattr(
        sampling.CyclicSampler, "_draw_places", sampling.PoissonSampler._draw_places
    )
    assert broken(check_sampler(TURNS, seed=1)) == ["sampling rate", "records sampled again"]


def test_13_correlated_noise_is_half(monkeypatch):
    options = NoiseOptions(correlation="banded", bands=4)
    public = replace(context({}), schedule=TURNS, noise=options)
    plan = plan_arm(FIXED, public, epsilon=4.0)
    report = audit(plan, delta=DELTA, runs=100)
    assert report.passed, report.to_dict()
    assert broken(report.checks) == []
    real = oracle.noise_scale
    monkeypatch.setattr(oracle, "noise_scale", lambda *args: real(*args) / 2.0)
    assert broken(audit(plan, delta=DELTA, runs=100).checks) == ["noise of releases"]


def failed_rows(plan, strategy):
    report = audit(plan, strategy=strategy, delta=DELTA, runs=200, seed=1)
    return [row.name for row in report.rows if not row.passed]


@pytest.mark.parametrize("variant", [1, 2])
def test_14_the_noise_of_shown_trials_is_half(variant, monkeypatch):
    strategy = SubsetSearch(parameters=NORM, variant=variant, rate=0.5, trials=4)
    plan = plan_of(strategy)
    assert failed_rows(plan, strategy) == []
    real = oracle.noise_scale
    monkeypatch.setattr(oracle, "noise_scale", lambda *args: real(*args) / 2.0)
    assert failed_rows(plan, strategy)[-1] == "the whole search"


def test_15_shown_trials_meet_all_records():
    strategy = SubsetSearch(parameters=NORM, rate=0.2, trials=8, trial_noise=0.7)
    plan = plan_of(strategy)
    assert failed_rows(plan, strategy) == []
    (trial,) = plan.search.trainings
    on_all = replace(plan.search, trainings=(replace(trial, part="all"),))
    assert failed_rows(replace(plan, search=on_all), strategy) == ["the whole search"]
