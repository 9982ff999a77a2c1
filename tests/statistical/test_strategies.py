"""Every strategy, from its plan to its release: audited at most what the plan reports.

Trainings are one Gaussian release of a canary, with the plan's noise; scores, on a public split, are
those of which the canary changes the release the most. All that is released is shown.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from privtune.accounting import SubsampledTuning as Subsampled
from privtune.accounting import epsilon
from privtune.audit.bounds import Claim, lower_bound
from privtune.strategies import (
    DPHyper,
    Everything,
    Fixed,
    InRun,
    LinearScaling,
    LiuTalwar,
    PapernotSteinke,
    Scoring,
    SubsampledTuning,
    SubsetSearch,
)
from tests.statistical import rounds
from tests.statistical.rounds import (
    DELTA,
    RATE,
    ToyRound,
    context,
    deviation,
    evidence,
    note,
    sides,
    three_tiers,
)
from tests.toy import blobs

pytestmark = pytest.mark.statistical

TARGET = 4.0
NORM = {"max_grad_norm": 1.0}
TIERS = Scoring(metric="value", bound=4000.0)
LOW, HIGH = -0.5, 2.25  # of the tiers, in deviations of the noise


def planned(strategy):
    space = {} if isinstance(strategy, InRun) else RATE
    # Of tiers of a thousand, which a threshold lies between.
    plan = strategy.plan(context(space, scoring=TIERS), epsilon=TARGET)
    return plan, epsilon(plan.event, DELTA).epsilon


def audited(strategy, shown, *, runs, composed=False, low=LOW, high=HIGH, count=None, of=None):
    """Audit a strategy: ``shown`` turns a plan and an outcome into the statistic."""
    plan, reported = planned(strategy)
    first = plan.training if plan.search is None else plan.search.trainings[0]
    if of is not None:
        reported = epsilon(of(plan), DELTA).epsilon
    preferred = three_tiers(low, high, deviation(first))

    def run(secret, canary):
        trials = ToyRound(plan, secret, canary=canary, score=preferred, runs=count)
        return shown(plan, trials.run(strategy, plan))

    def audit():
        claim = Claim(plan.event, DELTA) if composed else None
        return lower_bound(*sides(run, runs), delta=DELTA, claim=claim)

    return note(strategy.arm, audit, reported).epsilon, reported


def tier(_, outcome):
    """The second tier, then nothing, then the first: what the canary makes likelier or rarer."""
    if outcome.result is None:
        return 0.0
    best = {2: -1.0, 1: 2.0, 0: 1.0}[math.floor(outcome.result.score / 1000.0 + 0.5)]
    return best + float(outcome.result.weights[0]) / 1000.0


def every_release(plan, outcome):
    """The log-likelihood ratio of all trials and the final training together."""
    pairs = [(t, plan.search.trainings[0]) for t in outcome.trials]
    if plan.search is not None and len(plan.search.trainings) == 2:
        half = len(outcome.trials) // 2
        pairs = [(t, plan.search.trainings[n >= half]) for n, t in enumerate(outcome.trials)]
    if plan.final:
        pairs.append((outcome.result, plan.training))
    return sum(evidence(float(t.weights[0]), deviation(training)) for t, training in pairs)


@pytest.mark.parametrize(
    "strategy",
    [
        Fixed(parameters={**NORM, "learning_rate": 1.0}),
        InRun(arm="in-run", method="automatic-clipping", parameters={"learning_rate": 1.0}),
        Everything(parameters=NORM, trials=4, sampler="random"),
        LinearScaling(parameters=NORM, trials=2),
    ],
    ids=lambda strategy: strategy.arm,
)
def test_what_is_composed_is_no_more_than_reported(strategy):
    """2 x 400 arms that claim what one Gaussian does. Fails by chance at most at 5%."""
    found, reported = audited(strategy, every_release, runs=400, composed=True)
    assert 0.5 * reported < found <= reported


@pytest.mark.parametrize(
    "strategy",
    [
        PapernotSteinke(parameters=NORM, arm="geometric", mean_runs=4),
        PapernotSteinke(parameters=NORM, arm="logarithmic", law="logarithmic", mean_runs=4),
        PapernotSteinke(
            parameters=NORM,
            arm="negative binomial",
            law="truncated_negative_binomial",
            shape=0.5,
            mean_runs=4,
        ),
        PapernotSteinke(parameters=NORM, arm="poisson", law="poisson", mean_runs=4),
        PapernotSteinke(parameters=NORM, arm="binomial", law="binomial", n=8, mean_runs=4),
        PapernotSteinke(parameters=NORM, arm="geometric, capped", mean_runs=4, maximum=8),
        LiuTalwar(parameters=NORM, mean_runs=4),
        LiuTalwar(parameters=NORM, arm="liu-talwar, threshold", mean_runs=4, threshold=500.0),
        LiuTalwar(
            parameters=NORM,
            arm="liu-talwar, threshold and cap",
            mean_runs=4,
            threshold=500.0,
            maximum=8,
        ),
    ],
    ids=lambda strategy: strategy.arm,
)
def test_the_best_of_a_secret_number_is_no_more_than_reported(strategy):
    """2 x 600 rounds. Fails by chance with a probability of at most 5%."""
    found, reported = audited(strategy, tier, runs=600)
    assert 0.15 * reported < found <= reported


def rounded_evidence(plan, outcome):
    """What the final training and the winner's score say together, of a canary in either part."""
    if outcome.result is None:
        return 0.0
    tuned = plan.search.trainings[0]
    best = math.floor(outcome.result.score / 1000.0 + 0.5)
    x = outcome.result.score - 1000.0 * best
    # The first tier is rare with the canary, the second the rarer without it: about 2 to 1.
    chosen = {2: -1.0, 1: 2.0, 0: 1.0}[best] * abs(evidence(x, deviation(tuned)))
    final = evidence(float(outcome.result.weights[0]), deviation(plan.training))
    if plan.rate is None:
        return chosen + final
    inside = plan.rate * math.exp(chosen + (final if plan.training.part == "all" else 0.0))
    return math.log(inside + (1.0 - plan.rate) * math.exp(final))


@pytest.mark.parametrize("variant", [1, 2])
def test_subsampled_tuning_is_no_more_than_reported(variant):
    """2 x 400 arms. Fails by chance with a probability of at most 5%."""
    strategy = SubsampledTuning(
        parameters=NORM, arm=f"subsampled-tuning {variant}", variant=variant, rate=0.3, mean_runs=4
    )
    found, reported = audited(strategy, rounded_evidence, runs=400)
    assert 0.15 * reported < found <= reported


def shown_evidence(plan, outcome):
    """What all shown trials and the final training say together, of a canary in either part."""
    trial = deviation(plan.search.trainings[0])
    trials = sum(evidence(float(each.weights[0]), trial) for each in outcome.trials)
    final = evidence(float(outcome.result.weights[0]), deviation(plan.training))
    inside = plan.rate * math.exp(trials + (final if plan.training.part == "all" else 0.0))
    return math.log(inside + (1.0 - plan.rate) * math.exp(final))


@pytest.mark.parametrize("variant", [1, 2])
def test_a_search_on_a_subset_is_no_more_than_reported(variant):
    """2 x 400 arms that claim what one Gaussian does. Fails by chance at most at 5%."""
    arm = f"subset-search {variant}"
    strategy = SubsetSearch(parameters=NORM, arm=arm, variant=variant, rate=0.5, trials=4)
    found, reported = audited(strategy, shown_evidence, runs=400, composed=True)
    assert 0.5 * reported < found <= reported


@pytest.mark.parametrize("variant", [1, 2])
def test_shown_trials_that_are_charged_as_one_are_found(variant):
    """The price of a single trial on the part, where eight are shown."""
    arm = f"subset-search {variant}, charged as one"
    terms = {"rate": 0.9, "trials": 8, "trial_noise": 0.5}
    strategy = SubsetSearch(parameters=NORM, arm=arm, variant=variant, **terms)

    def one_trial(plan):
        trial = plan.search.trainings[0].event
        return Subsampled(variant, plan.rate, trial, plan.training.event)

    found, reported = audited(strategy, shown_evidence, runs=400, of=one_trial)
    assert found > reported


@pytest.mark.parametrize("variant", [1, 2])
def test_half_the_noise_of_a_search_on_a_subset_is_found(variant, monkeypatch):
    """Its trials and the final training have half of what the plan says."""
    arm = f"subset-search {variant}, half the noise"
    strategy = SubsetSearch(parameters=NORM, arm=arm, variant=variant, rate=0.5, trials=4)
    monkeypatch.setattr(rounds, "deviation", lambda training: deviation(training) / 2.0)
    found, reported = audited(strategy, shown_evidence, runs=400, composed=True)
    assert found > reported


def test_dp_hyper_is_no_more_than_reported():
    """2 x 400 arms. Fails by chance with a probability of at most 5%."""
    strategy = DPHyper(parameters=NORM, arm="dp-hyper", share=0.3, mean_runs=4)
    found, reported = audited(strategy, rounded_evidence, runs=400)
    assert 0.15 * reported < found <= reported


def test_a_fixed_number_of_runs_that_is_charged_as_one_is_found():
    """The price of a single run, where the best of 20 is released."""
    strategy = PapernotSteinke(parameters=NORM, arm="best of 20, charged as one", mean_runs=10)

    def one_run(plan):
        return plan.search.trainings[0].event

    found, reported = audited(strategy, tier, runs=500, low=-0.9, high=2.0, count=20, of=one_run)
    assert found > reported


class ScoredRound(ToyRound):
    """Two kinds of candidates, and a validation record that one of them gets wrong."""

    noised_first = True

    def select(self, plan):
        results, rng = [], self.streams.numpy("score", 0)
        count = plan.runs.sample(self.streams.numpy("runs", 0))
        for number in range(count):
            params = self.space.draw(self.streams, number)
            kind = float(params["learning_rate"] > 1.0)
            exact = score_of(kind, self.canary)
            noised = exact + rng.normal() * plan.score.noise_multiplier / plan.score.records
            result = self.trial(number, plan.search.trainings[0], params, 0.0)
            weights = torch.tensor([kind, noised], dtype=torch.float64)
            results.append(
                replace(result, weights=weights, score=noised if self.noised_first else exact)
            )
        return results


@cache
def score_of(kind, canary):
    """The score of a kind without noise: minus the sum of clipped losses, over the two declared records."""
    # Record 0: 0.25 for the first kind, 0.75 for the second. The canary: 1 for the first, 0.
    loss = 0.25 + 0.5 * kind
    if canary:
        loss += 1.0 - kind
    return -loss / 2.0


def validation_audit(label, *, noised_first, monkeypatch):
    monkeypatch.setattr(ScoredRound, "noised_first", noised_first)
    strategy = PapernotSteinke(parameters=NORM, law="poisson", mean_runs=8)
    task = replace(blobs(), validation_records=2)
    scoring = Scoring(metric="loss", bound=1.0)
    plan = strategy.plan(context(RATE, task=task, scoring=scoring), epsilon=1.5)
    reported = epsilon(plan.event, DELTA).epsilon

    def run(secret, canary):
        trials = ScoredRound(plan, secret, canary=canary, score=lambda *_: 0.0)
        best = trials.run(strategy, plan).result
        return 0.0 if best is None else 10.0 * float(best.weights[0]) - float(best.weights[1]) / 100

    return note(label, lambda: lower_bound(*sides(run, 500), delta=DELTA), reported), reported


def test_a_validation_record_costs_no_more_than_reported(monkeypatch):
    """2 x 500 rounds chosen by noised scores. Fails by chance with a probability of at most 5%."""
    found, reported = validation_audit(
        "selection by noised score", noised_first=True, monkeypatch=monkeypatch
    )
    assert found.epsilon <= reported


def test_a_choice_by_the_score_before_its_noise_is_found(monkeypatch):
    found, reported = validation_audit(
        "selection by un-noised score", noised_first=False, monkeypatch=monkeypatch
    )
    assert found.epsilon > reported
