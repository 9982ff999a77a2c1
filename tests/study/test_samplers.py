"""Every sampler of `everything`, by name in a spec and as Optuna's object, and every pruner."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

import privtune
from privtune.strategies import Everything
from privtune.strategies.everything import SAMPLERS
from privtune.study import Study
from tests.study.conftest import toy_spec
from tests.toy import blobs

DATA = blobs().load()
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


def objective(trial: privtune.Trial) -> float:
    """Reports the accuracy on a public split after every step, and stops when told to."""
    model = nn.Linear(6, 3)
    rate = trial.suggest_float("rate", 1e-3, 2.0, log=True)
    clip = trial.suggest_float("clip", 0.1, 2.0)
    private = trial.make_private(
        model, torch.optim.SGD(model.parameters(), rate), DATA.train, max_grad_norm=clip
    )
    for step, (x, y) in enumerate(private.batches()):
        private.step(nn.functional.cross_entropy(private.model(x), y, reduction="none"))
        trial.report(trial.score(model, DATA.validation), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return trial.score(model, DATA.validation)


def optimize(storage: str, **options: Any) -> tuple[Study, privtune.strategies.Release]:
    study = privtune.create_study(
        "loop", budget=privtune.Budget(6.0, 1e-5, name="loop"), storage=storage, seed=2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        release = study.optimize(
            objective,
            strategy=Everything(trials=TRIALS),
            training=privtune.DPSGD(records=240, epochs=1, expected_batch_size=24),
            validation=privtune.Validation(records=60, public=True),
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
    pruned = [t.failed == "TrialPruned" for t in release.trials]
    assert [state == TrialState.PRUNED for state in states] == pruned
    assert TrialState.COMPLETE in states
    for trial, kept in zip(curated.trials, release.trials, strict=True):
        assert trial.intermediate_values, "reports reach the pruner"
        if kept.failed:
            assert kept.weights.numel() == 0
            assert len(trial.intermediate_values) < 11
    assert study.spent().epsilon <= 6.0


def test_a_pruner_stops_what_it_would_stop_in_optuna(storage: str) -> None:
    _, release = optimize(
        storage,
        sampler=lambda: optuna.samplers.GridSampler(
            {"rate": [1e-3, 0.5, 1.0, 1.5, 2.0], "clip": [1.0]}, seed=0
        ),
        pruner=lambda: optuna.pruners.ThresholdPruner(lower=1.1),
    )
    assert all(trial.failed == "TrialPruned" for trial in release.trials)
    assert release.is_nothing
    assert release.note == "Every candidate was pruned; there is no model."
