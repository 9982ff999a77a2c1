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
from privtune.strategies import Everything, Fixed, PapernotSteinke
from privtune.study import StudySpec, study_names
from tests.study.conftest import PARAMETERS
from tests.study.elsewhere import OWN, VALIDATION

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
