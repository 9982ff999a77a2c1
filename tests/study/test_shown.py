"""Trials that are shown: in Optuna's storage once they are told, and drawn once whatever happens."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from privtune.study.rows import Results
from privtune.study.trials import ShownTrials

RATE = FloatDistribution(1e-3, 10.0, log=True)
KIND = CategoricalDistribution(("wide", "deep", None))


@pytest.fixture
def study(tmp_path: Path) -> optuna.Study:
    return optuna.create_study(
        storage=f"sqlite:///{tmp_path / 'optuna.db'}", study_name="toy/arm", direction="maximize"
    )


def unseeded() -> optuna.samplers.BaseSampler:
    """Return a sampler that draws something else each time."""
    return optuna.samplers.RandomSampler()


def test_a_told_trial_is_in_the_storage_as_optuna_keeps_it(
    study: optuna.Study, results: Results
) -> None:
    trials = ShownTrials(study, results)
    asked = trials.ask(0, sampler=unseeded())
    rate, kind = asked.suggest("rate", RATE), asked.suggest("kind", KIND)
    asked.report(0.25, step=3)
    assert study.get_trials() == [], "nothing is stored while it runs"
    trials.tell(0, score=0.5, pruned=False)
    trials.tell(0, score=0.9, pruned=False)
    (stored,) = study.get_trials()
    assert (stored.params, stored.value) == ({"rate": rate, "kind": kind}, 0.5)
    assert stored.distributions == {"rate": RATE, "kind": KIND}
    assert stored.intermediate_values == {3: 0.25}
    assert stored.state == TrialState.COMPLETE
    assert not results.folder.exists(), "no file is kept beside the rows"

    trials.ask(1, sampler=unseeded()).report(0.125, step=0)
    trials.tell(1, score=-math.inf, pruned=True)
    trials.ask(2, sampler=unseeded())
    trials.tell(2, score=math.nan, pruned=False)
    told = [(trial.state, trial.value) for trial in study.get_trials()[1:]]
    assert told == [(TrialState.PRUNED, 0.125), (TrialState.COMPLETE, -math.inf)]


def test_a_trial_whose_process_died_goes_on_with_its_candidate(
    study: optuna.Study, results: Results
) -> None:
    died = ShownTrials(study, results).ask(0, sampler=unseeded())
    rate, kind = died.suggest("rate", RATE), died.suggest("kind", KIND)
    trials = ShownTrials(study, results)
    again = trials.ask(0, sampler=unseeded())
    assert (again.suggest("kind", KIND), again.suggest("rate", RATE)) == (kind, rate)
    width = again.suggest("width", RATE)
    third = ShownTrials(study, results).ask(0, sampler=unseeded())
    assert third.suggest("width", RATE) == width


def test_a_trial_that_was_trained_before_its_process_died_is_told(
    study: optuna.Study, results: Results
) -> None:
    rate = ShownTrials(study, results).ask(0, sampler=unseeded()).suggest("rate", RATE)
    trials = ShownTrials(study, results)
    trials.ask(0, sampler=unseeded())
    trials.tell(0, score=0.5, pruned=False)
    (stored,) = study.get_trials()
    assert (stored.params, stored.value) == ({"rate": rate}, 0.5)
    later = ShownTrials(study, results)
    assert later.ask(0, sampler=unseeded()).suggest("rate", RATE) == rate
    later.tell(0, score=0.9, pruned=False)
    assert len(study.get_trials()) == 1


def test_a_sampler_sees_the_trials_that_were_told(study: optuna.Study, results: Results) -> None:
    seen = []

    class Watching(optuna.samplers.RandomSampler):
        def sample_independent(self, study, trial, param_name, param_distribution):  # type: ignore[no-untyped-def]
            seen.append([t.value for t in study.get_trials(states=(TrialState.COMPLETE,))])
            return super().sample_independent(study, trial, param_name, param_distribution)

    for number in range(3):  # as after two interruptions
        trials = ShownTrials(study, results)
        trials.ask(number, sampler=Watching()).suggest("rate", RATE)
        trials.tell(number, score=float(number), pruned=False)
    assert seen == [[], [0.0], [0.0, 1.0]]
