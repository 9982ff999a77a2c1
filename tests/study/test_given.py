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
from tests.study.elsewhere import OWN, VALIDATION, own_task

BUDGET = privtune.Budget(6.0, 1e-5, name="given")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scoring": {"metric": "auc"}}, "scoring is given, .* score="),
        ({"space": {"rate": {"type": "float", "low": 0.1, "high": 1.0}}}, "but space is given"),
        ({"epochs": 3}, "but epochs is given"),
        ({"expected_batch_size": 3}, "but expected_batch_size is given"),
        ({"stages": [{"type": "histogram"}]}, "but stages is given"),
        ({"arms": [{"name": "a", "strategy": "hyfreedp"}]}, "but arms is given"),
        (
            {"scoring": {"metric": "nonsense"}},
            "'nonsense': must be one of accuracy, .*, or package",
        ),
        ({"report": {"metric": "nonsense"}}, "'nonsense': must be one of accuracy, .*, or package"),
        ({"report": {"metric": ["auc", "nonsense"]}}, "'nonsense'.*must be one of accuracy"),
        ({"scoring": {"metric": "accuracy", "bound": 2.0}}, "bound.*it takes none"),
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
        (PapernotSteinke(), {**OWN, "executor": "inline", "n_jobs": 2}, "n_jobs = 2: is not"),
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
        study.optimize(one, strategy=strategy, **given)
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
        study.optimize(one, strategy=strategy, **OWN)
    with Ledger(storage) as ledger:
        assert not ledger.charges("given")


def test_a_value_for_a_name_of_one_branch_is_taken(storage: str) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage, seed=3)
    strategy = Fixed(parameters={"rate of d": 0.5})
    assert "kind" in study.optimize(branching, strategy=strategy, **OWN).params


def test_a_value_that_the_method_takes_is_taken(storage: str) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage, seed=3)
    strategy = Fixed(parameters=PARAMETERS)
    assert not study.optimize(of_its_method, strategy=strategy, **OWN).is_nothing


def test_the_arguments_of_create_study_are_all_accounted_for() -> None:
    """A field that an open study takes no notice of must be on the list that refuses it."""
    refused = {"scoring", "arms", "epochs", "expected_batch_size", "space", "stages", "task"}
    used = {"name", "budget", "epsilon", "stack", "noise", "executor", "artifacts", "seed"}
    used |= {"report", "device", "repeats"}
    assert refused | used == set(StudySpec.model_fields)
    assert not refused & used


USUAL = [
    {"executor": "inline"},
    {"executor": {"type": "inline"}},
    {"noise": "plain"},
    {"noise": privtune.NoiseOptions()},
    {"noise": {"source": "fast", "floating_point": "plain"}},
    {"benchmark": False},
    {"n_jobs": 1},
    {"precision": "float32"},
    {"anyway": False},
    {"callbacks": ()},
    {"show_progress_bar": False},
]


def noisy(trial: Any) -> Any:
    return trial.result({"w": [0.5 * trial.plan.noise_multiplier]})


@pytest.mark.parametrize("given", USUAL, ids=str)
def test_what_would_be_so_anyway_is_no_demand(storage: str, given: dict[str, Any]) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage)
    mechanism = privtune.Mechanism(
        privtune.accounting.Gaussian(1.0), declared_by="the lab", records=200
    )
    declared = {"strategy": Fixed(), "mechanism": mechanism, "epsilon": 2.0}
    assert study.optimize(noisy, **declared, **given).params == {}
    task = own_task()
    known = {"strategy": Fixed(arm="task"), "epochs": 1, "expected_batch_size": 24, "epsilon": 1.0}
    assert study.optimize(task, **known, **given).arm == "task"


@pytest.mark.parametrize(
    "given",
    [
        {"executor": "processes"},
        {"executor": {"type": "processes"}},
        {"noise": "secure"},
        {"benchmark": True},
        {"n_jobs": 2},
        {"precision": "bfloat16"},
        {"epochs": 1},
        {"classes": 3},
        {"pad_to": 4},
        {"loss": "tests.study.elsewhere:loss"},
        {"space": {"epochs": {"type": "categorical", "choices": [1, 2]}}},
    ],
    ids=str,
)
def test_what_a_declared_mechanism_would_ignore_is_refused(
    storage: str, given: dict[str, Any]
) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage)
    mechanism = privtune.Mechanism(
        privtune.accounting.Gaussian(1.0), declared_by="the lab", records=200
    )
    with pytest.raises(InvalidInputError, match="goes with a build, and a mechanism is declared"):
        study.optimize(noisy, strategy=Fixed(), mechanism=mechanism, **given)


@pytest.mark.parametrize("given", [{"precision": "bfloat16"}, {"benchmark": True}], ids=str)
def test_what_a_task_says_otherwise_is_refused(storage: str, given: dict[str, Any]) -> None:
    study = privtune.create_study("given", budget=BUDGET, storage=storage)
    known = {"strategy": Fixed(), "epochs": 1, "expected_batch_size": 24}
    with pytest.raises(InvalidInputError, match="is the task's to say"):
        study.optimize(own_task(), **known, **given)
