"""Every sampler of `everything`, by name in a spec and as Optuna's object, and every pruner."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

import privtune
from privtune.accounting import Repeated, SubsampledTuning, epsilon
from privtune.ledger import Ledger
from privtune.strategies import Everything, Strategy, SubsetSearch
from privtune.strategies.everything import SAMPLERS
from privtune.study import Study
from privtune.study.arm_rounds import Batch, TrialFiles
from privtune.study.planning import plan_study
from tests.study.conftest import toy_spec
from tests.study.elsewhere import TRAIN, VALIDATION, loss

TRIALS = 5


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_by_name(storage: str, sampler: str) -> None:
    arm = {"name": "arm", "strategy": "everything", "sampler": sampler, "trials": TRIALS}
    study = Study.create(toy_spec(arms=[arm], epochs=1), storage)
    (release,) = study.run()
    drawn = [tuple(trial.params.values()) for trial in release.trials]
    assert len(set(drawn)) == TRIALS, "each trial is drawn afresh"
    for trial in release.trials:
        assert 0.05 <= trial.params["learning_rate"] <= 5.0
        assert 0.1 <= trial.params["max_grad_norm"] <= 10.0
    assert study.spent().epsilon <= 6.0


def test_cma_es_carries_its_state_from_trial_to_trial(storage: str) -> None:
    arm = {"name": "arm", "strategy": "everything", "sampler": "cmaes", "trials": 6}
    study = Study.create(toy_spec(arms=[arm], epochs=1), storage)
    study.run()
    curated = privtune.load_study("toy", storage=storage, curator=True)
    # Optuna notes the generation with each trial that CMA-ES itself has drawn: all but the first.
    notes = [any(key.startswith("cma") for key in t.system_attrs) for t in curated.trials]
    assert notes == [False, *[True] * 5]


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_what_is_drawn_blindly_is_trained_together(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """The same trials as one by one, in fewer passes; a stop in between repeats no finished one."""
    arm = {"name": "arm", "strategy": "everything", "sampler": sampler, "trials": 5}
    stacks: list[int] = []
    train = TrialFiles.train

    def count(self: TrialFiles, batch: Batch) -> object:
        stacks.append(len(batch.trials))
        if len(stacks) == 2:
            raise KeyboardInterrupt
        return train(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrialFiles, "at_once", 1)
        (alone,) = Study.create(toy_spec(arms=[arm], seed=4), storage).run()
    other = f"sqlite:///{tmp_path / 'together.db'}"
    study = Study.create(toy_spec(arms=[arm], seed=4), other)
    monkeypatch.setattr(TrialFiles, "train", count)
    monkeypatch.setattr(TrialFiles, "at_once", 3)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    (together,) = study.run()
    assert stacks == [3, 2, 2]
    assert together.guarantee == alone.guarantee
    for one, two in zip(alone.trials, together.trials, strict=True):
        assert one.params == two.params
        assert one.transcript_digest == two.transcript_digest
        # Sums of a stack round otherwise, which large learning rates magnify; other noise would
        # differ by whole units.
        assert torch.allclose(one.weights, two.weights, rtol=1e-3, atol=1e-2)


def test_a_batch_of_proposals_costs_what_they_cost_one_by_one(storage: str) -> None:
    arm = {"name": "arm", "strategy": "everything", "sampler": "tpe", "trials": 14}
    spec = toy_spec(arms=[{**arm, "batch": 7}], seed=4, epochs=0.2)
    (batched,) = plan_study(spec).plans
    (single,) = plan_study(toy_spec(arms=[arm], epochs=0.2)).plans
    assert batched.event == single.event
    assert batched.details["batch"] == 7
    study = Study.create(spec, storage)
    (release,) = study.run()
    assert len({tuple(trial.params.items()) for trial in release.trials}) == 14


SAMPLER_OBJECTS: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
    "tpe": lambda: optuna.samplers.TPESampler(seed=0, n_startup_trials=1),
    "gp": lambda: optuna.samplers.GPSampler(seed=0, n_startup_trials=1),
    "cmaes": lambda: optuna.samplers.CmaEsSampler(seed=0, n_startup_trials=1),
    "grid": lambda: optuna.samplers.GridSampler(
        {"rate": [0.001, 0.01, 0.5, 1.0, 2.0], "clip": [0.5, 1.0]}, seed=0
    ),
    "random": lambda: optuna.samplers.RandomSampler(seed=0),
}
PRUNER_OBJECTS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=1),
    "percentile": lambda: optuna.pruners.PercentilePruner(50.0, n_startup_trials=1),
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=10),
    "threshold": lambda: optuna.pruners.ThresholdPruner(lower=0.1),
}


def build(trial: privtune.Trial) -> privtune.Candidate:
    """Build a linear model, whose accuracy on a public split is reported as it is trained."""
    model = nn.Linear(6, 3)
    rate = trial.suggest_float("rate", 1e-3, 2.0, log=True)
    clip = trial.suggest_float("clip", 0.1, 2.0)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate), max_grad_norm=clip)


def optimize(
    storage: str, strategy: Strategy | None = None, **options: Any
) -> tuple[Study, privtune.strategies.Release]:
    study = privtune.create_study(
        "loop", budget=privtune.Budget(6.0, 1e-5, name="loop"), storage=storage, seed=2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        task = privtune.make_task(build, loss=loss, train=TRAIN, public={"validation": VALIDATION})
        release = study.optimize(
            task,
            strategy=strategy or Everything(trials=TRIALS),
            epochs=1,
            expected_batch_size=24,
            **{name: make() for name, make in options.items()},
        )
    return study, release


@pytest.mark.parametrize(
    ("sampler", "pruner"), list(zip(SAMPLER_OBJECTS, PRUNER_OBJECTS, strict=True))
)
def test_optuna_s_samplers_and_pruners(storage: str, sampler: str, pruner: str) -> None:
    study, release = optimize(
        storage, sampler=SAMPLER_OBJECTS[sampler], pruner=PRUNER_OBJECTS[pruner]
    )
    # The Gaussian process does not count pruned trials, and may come back to one.
    assert len({tuple(t.params.values()) for t in release.trials}) > 1
    assert not release.is_nothing
    curated = privtune.load_study("loop", storage=storage, curator=True)
    states = [t.state for t in curated.trials]
    pruned = [t.ended == "pruned" for t in release.trials]
    assert [state == TrialState.PRUNED for state in states] == pruned
    assert TrialState.COMPLETE in states
    for trial, kept in zip(curated.trials, release.trials, strict=True):
        assert trial.intermediate_values, "reports reach the pruner"
        if kept.ended == "pruned":
            assert kept.weights.numel() == 0
    assert study.spent().epsilon <= 6.0


def test_a_pruner_stops_what_it_would_stop_in_optuna(storage: str) -> None:
    _, release = optimize(
        storage,
        sampler=lambda: optuna.samplers.GridSampler(
            {"rate": [1e-3, 0.5, 1.0, 1.5, 2.0], "clip": [1.0]}, seed=0
        ),
        pruner=lambda: optuna.pruners.ThresholdPruner(lower=1.1),
    )
    assert all(trial.ended == "pruned" for trial in release.trials)
    assert release.is_nothing
    assert release.note == "Every candidate was pruned; there is no model."


class StopAtSecondReport(optuna.pruners.BasePruner):
    """Stops some trials when their second score has been reported."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number in self.numbers and len(trial.intermediate_values) >= 2


@pytest.mark.parametrize("variant", [1, 2])
def test_a_pruner_stops_a_shown_trial_of_a_part_and_all_trials_are_charged(
    storage: str, variant: int
) -> None:
    """The charge stands before a trial begins: what a pruner ends early is paid for in full."""
    terms = {"rate": 0.5, "variant": variant, "extrapolation": "keep"}
    strategy = SubsetSearch(trials=4, **terms)
    study, release = optimize(storage, strategy, pruner=lambda: StopAtSecondReport(1))
    (plan,) = study.plans
    assert plan.search is not None
    (trial,) = plan.search.trainings
    assert plan.event == SubsampledTuning(
        variant, 0.5, Repeated(4, trial.event), plan.training.event
    )
    with Ledger(storage) as ledger:
        (charge,) = ledger.charges("loop")
    assert charge.event == plan.event
    assert release.guarantee.epsilon == epsilon(plan.event, 1e-5).epsilon

    assert [each.ended for each in release.trials] == ["trained", "pruned", "trained", "trained"]
    stopped = release.trials[1]
    assert stopped.weights.numel() == 0
    shown = release.to_optuna().trials
    assert [each.state == TrialState.PRUNED for each in shown] == [False, True, False, False]
    curated = privtune.load_study("loop", storage=storage, curator=True)
    steps = [len(each.intermediate_values) for each in curated.trials]
    assert steps == [trial.schedule.steps, 2, trial.schedule.steps, trial.schedule.steps]
    best = max((release.trials[n] for n in (0, 2, 3)), key=lambda each: each.score)
    assert release.params == best.params
    assert not torch.equal(release.weights, best.weights), "the final training is one more"


def test_a_search_on_a_part_whose_trials_are_all_stopped_is_charged_and_trains_no_more(
    storage: str,
) -> None:
    strategy = SubsetSearch(trials=2, rate=0.5, extrapolation="keep")
    study, release = optimize(storage, strategy, pruner=lambda: StopAtSecondReport(0, 1))
    assert all(trial.ended == "pruned" for trial in release.trials)
    assert release.is_nothing
    assert release.note == "No candidate reached a finite score; nothing more was trained."
    (plan,) = study.plans
    assert study.spent().epsilon == pytest.approx(epsilon(plan.event, 1e-5).epsilon)
