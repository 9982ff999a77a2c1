"""What a user says is used or refused: no argument is silently without effect."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch
from torch import nn

import privtune
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import Ledger
from privtune.strategies import (
    DPHyper,
    Everything,
    Fixed,
    LiuTalwar,
    PapernotSteinke,
    SubsampledTuning,
)
from privtune.study import StudySpec, study_names
from tests.study.conftest import PARAMETERS
from tests.study.elsewhere import OWN, TERMS, VALIDATION, optimize_own, own_task

BUDGET = privtune.Budget(6.0, 1e-5, name="given")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scoring": {"metric": "auc"}}, "scoring is given, .* score="),
        (
            {"space": {"rate": {"type": "float", "low": 0.1, "high": 1.0}}},
            "and space cannot go without one.*study.optimize",
        ),
        ({"epochs": 3}, "and epochs cannot go without one.*study.optimize"),
        (
            {"expected_batch_size": 3},
            "and expected_batch_size cannot go without one.*study.optimize",
        ),
        ({"stages": [{"type": "histogram"}]}, "and stages cannot go without one.*study.optimize"),
        (
            {"arms": [{"name": "a", "strategy": "hyfreedp"}]},
            "and arms cannot go without one.*study.optimize",
        ),
        (
            {"scoring": {"metric": "nonsense"}},
            "'nonsense': must be one of accuracy, .*, or package",
        ),
        ({"report": {"metric": "nonsense"}}, "'nonsense': must be one of accuracy, .*, or package"),
        ({"report": {"metric": ["auc", "nonsense"]}}, "'nonsense'.*must be one of accuracy"),
        ({"scoring": {"metric": "accuracy", "bound": 2.0}}, "bound.*takes no options"),
    ],
)
def test_an_open_study_refuses_what_it_would_ignore(
    storage: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(PrivTuneError, match=said) as refused:
        privtune.create_study("given", budget=BUDGET, storage=storage, **given)
    assert "\n" not in str(refused.value)
    assert study_names(storage) == []


CHANGED: dict[str, Any] = {
    "scoring": {"metric": "macro_f1"},
    "report": {"metric": "macro_f1"},
    "epochs": 2,
    "seed": 4,
    "epsilon": 3.0,
    "budget": privtune.Budget(7.0, 1e-5, name="given"),
    "task": "tests.toy:public_blobs",
    "arms": [{"name": "other", "strategy": "hyfreedp"}],
}


def test_a_study_that_exists_is_what_is_given_or_refused(storage: str) -> None:
    whole: dict[str, Any] = {
        "budget": BUDGET,
        "task": "tests.toy:blobs",
        "arms": [
            {
                "name": "chosen",
                "strategy": "papernot-steinke",
                "mean_runs": 2,
                "parameters": {"max_grad_norm": 1.0},
            }
        ],
        "space": {"learning_rate": {"type": "float", "low": 0.1, "high": 1.0}},
        "epochs": 1,
        "expected_batch_size": 24,
        "scoring": {"metric": "accuracy"},
    }
    privtune.create_study("given", storage=storage, **whole).close()
    again: dict[str, Any] = {"storage": storage, "load_if_exists": True}
    privtune.create_study("given", **whole, **again).close()
    privtune.create_study("given", budget=BUDGET, **again).close()  # nothing else is said
    for name, value in CHANGED.items():
        with pytest.raises(PrivTuneError, match=f"created with other {name} than"):
            privtune.create_study("given", **{**whole, name: value}, **again)


def one(trial: privtune.Trial) -> privtune.Candidate:
    model = nn.Sequential(nn.Linear(6, 3))
    rate = trial.suggest_float("rate", 0.1, 1.0)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate))


TPE: Any = optuna.samplers.TPESampler()
PUBLIC = {
    **{n: v for n, v in OWN.items() if n != "validation"},
    "public": {"validation": VALIDATION},
}


@pytest.mark.parametrize(
    ("strategy", "given", "said"),
    [
        (Fixed(), {**OWN, "sampler": optuna.samplers.RandomSampler()}, "sampler = "),
        (Fixed(), {**OWN, "pruner": optuna.pruners.MedianPruner()}, "pruner = "),
        (PapernotSteinke(guarantee="common"), OWN, "guarantee = 'common': is for a space"),
        (Everything(guarantee="weighted", trials=2), OWN, "guarantee = 'weighted'"),
        (
            Everything(trials=2),
            {**OWN, "sampler": optuna.samplers.RandomSampler(), "n_jobs": 2},
            "n_jobs = 2: does not go with a sampler",
        ),
        (
            PapernotSteinke(),
            {**PUBLIC, "score": privtune.Score(mechanism="laplace")},
            "scoring.mechanism = 'laplace': goes without",
        ),
        (
            Everything(trials=2),
            {**OWN, "pruner": optuna.pruners.MedianPruner()},
            "pruner = 'MedianPruner': .* the validation split is private",
        ),
        (Everything(trials=2, sampler="qmc"), {**OWN, "sampler": TPE}, "Leave one of them out"),
        (Everything(trials=2), {**PUBLIC, "pruner": "median"}, "must be a pruner of Optuna's"),
        (Everything(trials=2), {**OWN, "sampler": "tpe"}, r"Everything\(sampler='tpe'\)"),
        (
            PapernotSteinke(),
            {**OWN, "sampler": optuna.samplers.RandomSampler},
            "does not declare that its draws",
        ),
        *(
            (strategy(sampler=TPE), OWN, r"given to study\.optimize\(\.\.\., sampler=\.\.\.\)")
            for strategy in (Everything, PapernotSteinke, LiuTalwar, SubsampledTuning, DPHyper)
        ),
        (
            Everything(pruner=optuna.pruners.MedianPruner()),  # type: ignore[arg-type]
            PUBLIC,
            r"to study\.optimize\(\.\.\., pruner=",
        ),
        (Everything(pruner="median"), PUBLIC, r"to study\.optimize\(\.\.\., pruner="),
    ],
)
def test_an_arm_refuses_what_it_has_no_use_for(
    storage: str, strategy: Any, given: Any, said: str
) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage)
    with pytest.raises(PrivTuneError, match=said):
        optimize_own(study, one, strategy=strategy, **{**TERMS, **given})
    with Ledger(storage) as ledger:
        assert not ledger.charges("given")


def of_its_method(trial: privtune.Trial) -> privtune.Candidate:
    """A model whose method takes what the arm fixes, without a suggestion."""
    return privtune.Candidate(nn.Sequential(nn.Linear(6, 3)))


def branching(trial: privtune.Trial) -> privtune.Candidate:
    kind = trial.suggest_categorical("kind", list("abcd"))
    rate = trial.suggest_float(f"rate of {kind}", 0.1, 1.0)
    model = nn.Sequential(nn.Linear(6, 3))
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate))


MISNAMED = {"learning_rate": 0.5}


@pytest.mark.parametrize(
    "strategy",
    [
        Fixed(parameters=MISNAMED),
        PapernotSteinke(mean_runs=2, parameters={**MISNAMED, "rate": 0.5}),
    ],
)
def test_a_value_for_a_name_that_nothing_asks_for_is_refused(storage: str, strategy: Any) -> None:
    """Else another value would be drawn under the right name, trained with and charged."""
    study = privtune.create_study("given", budget=BUDGET, storage=storage)
    said = r"= \['learning_rate'\]: were suggested in none of \d+ rehearsals, .* asked for rate\."
    with pytest.raises(InvalidInputError, match=said):
        study.optimize(privtune.make_task(one, **OWN), strategy=strategy, **TERMS)
    with Ledger(storage) as ledger:
        assert not ledger.charges("given")


def test_a_value_for_a_name_of_one_branch_is_taken(storage: str) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage, seed=3)
    strategy = Fixed(parameters={"rate of d": 0.5})
    assert (
        "kind"
        in study.optimize(privtune.make_task(branching, **OWN), strategy=strategy, **TERMS).params
    )


def test_a_value_that_the_method_takes_is_taken(storage: str) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage, seed=3)
    strategy = Fixed(parameters=PARAMETERS)
    assert not study.optimize(
        privtune.make_task(of_its_method, **OWN), strategy=strategy, **TERMS
    ).is_nothing


def test_the_arguments_of_create_study_are_all_accounted_for() -> None:
    """A field that an open study takes no notice of must be on the list that refuses it."""
    refused = {"scoring", "arms", "epochs", "expected_batch_size", "space", "stages", "task"}
    used = {"name", "budget", "epsilon", "stack", "noise", "executor", "artifacts", "seed"}
    used |= {"report", "device", "repeats", "compute"}
    assert refused | used == set(StudySpec.model_fields)
    assert not refused & used


def test_what_a_study_says_of_its_workers_goes_with_every_arm(storage: str) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage, executor="inline")
    task = own_task()
    terms: dict[str, Any] = {"strategy": PapernotSteinke(), "epochs": 1, "expected_batch_size": 24}
    with pytest.raises(InvalidInputError, match="n_jobs = 2: is not for executor inline"):
        study.optimize(task, n_jobs=2, **terms)
    other = privtune.create_study("other", budget=BUDGET, storage=storage, executor="processes")
    terms["strategy"] = Everything(trials=2)
    with pytest.raises(
        InvalidInputError, match="executor = 'processes': does not go with a sampler"
    ):
        other.optimize(task, sampler=TPE, **terms)
    again = privtune.create_study(
        "given", budget=BUDGET, storage=storage, executor="processes", load_if_exists=True
    )
    with pytest.raises(
        InvalidInputError, match="executor = 'processes': does not go with a sampler"
    ):
        again.optimize(task, sampler=TPE, **terms)
    with pytest.raises(PrivTuneError, match="created with other noise than"):
        privtune.create_study(
            "given", budget=BUDGET, storage=storage, noise="secure", load_if_exists=True
        )


def noisy(trial: Any) -> Any:
    return trial.result({"w": [0.5 * trial.plan.noise_multiplier]})


HOMES = {
    "loss": r"loss= belongs to privtune.make_task\(build, loss=\.\.\.\)",
    "precision": r"precision= belongs to privtune.make_task\(build, precision=\.\.\.\)",
    "executor": r"executor= belongs to privtune.create_study\(\.\.\., executor=\.\.\.\)",
    "noise": r"noise= belongs to privtune.create_study\(\.\.\., noise=\.\.\.\)",
    "mechanism": r"belongs to study.optimize_declared\(objective, mechanism=\.\.\.\)",
}


@pytest.mark.parametrize(("name", "said"), HOMES.items(), ids=HOMES)
def test_an_argument_of_another_function_is_sent_there(storage: str, name: str, said: str) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage)
    given: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=said):
        study.optimize(own_task(), strategy=Fixed(), **TERMS, **given)


@pytest.mark.parametrize("name", ["n_jobs", "epochs", "space", "report"])
def test_what_a_declared_mechanism_would_ignore_is_refused(storage: str, name: str) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage)
    mechanism = privtune.Mechanism(
        privtune.accounting.Gaussian(1.0), declared_by="the lab", records=200
    )
    given: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=rf"{name}= belongs to study.optimize\(task, {name}="):
        study.optimize_declared(noisy, strategy=Fixed(), mechanism=mechanism, **given)
    release = study.optimize_declared(noisy, strategy=Fixed(), mechanism=mechanism, epsilon=2.0)
    assert release.params == {}
