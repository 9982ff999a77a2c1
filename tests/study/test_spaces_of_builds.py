"""A space beside a build: each of its values is trained with, or refused before the charge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import privtune
from privtune.errors import PrivTuneError
from privtune.ledger import Ledger
from privtune.strategies import (
    DPHyper,
    Everything,
    Fixed,
    InRun,
    LinearScaling,
    LiuTalwar,
    PapernotSteinke,
    SubsampledTuning,
)
from privtune.study import Study, StudySpec
from tests.study.elsewhere import OWN, PATHS, TERMS
from tests.toy import curated

BUDGET = privtune.Budget(8.0, 1e-5, name="spaces")
BATCHES = {"expected_batch_size": {"type": "categorical", "choices": [12, 48]}}
EPOCHS = {"epochs": {"type": "categorical", "choices": [1, 2]}}
NOISES = {"noise_multiplier": {"type": "categorical", "choices": [1.0, 1.5]}}
RATES = {"learning_rate": {"type": "float", "low": 0.1, "high": 1.0, "log": True}}
STEPS: list[tuple[int, dict[str, Any]]] = []
"""Steps of each training that was built, and the values that its trial had."""


def build(trial: privtune.Trial) -> privtune.Candidate:
    rate = trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
    STEPS.append((trial.steps, trial.params))
    model = nn.Linear(6, 3)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate))


def stepped(trial: privtune.Trial) -> privtune.Candidate:
    """A model whose method takes the learning rate of the space, which nothing suggests."""
    return privtune.Candidate(nn.Linear(6, 3), max_grad_norm=1.0)


def study_of(storage: str) -> Study:
    return privtune.create_study("spaces", budget=BUDGET, storage=storage)


def charges_of(storage: str) -> int:
    with Ledger(storage) as ledger:
        return len(ledger.charges("spaces"))


SEARCHES = [
    PapernotSteinke(mean_runs=3, guarantee="common"),
    PapernotSteinke(mean_runs=3, guarantee="weighted"),
    LiuTalwar(mean_runs=3, guarantee="common"),
    SubsampledTuning(variant=1, rate=0.5, mean_runs=2, guarantee="common"),
    SubsampledTuning(variant=2, rate=0.5, mean_runs=2, guarantee="common"),
    Everything(trials=3, guarantee="common"),
    Everything(trials=3, guarantee="weighted", sampler="random"),
    Everything(trials=4, guarantee="common", batch=2),
]


@pytest.mark.parametrize("strategy", SEARCHES, ids=lambda s: f"{s.name}-{s.guarantee}")
@pytest.mark.parametrize("space", [BATCHES, EPOCHS, NOISES], ids=lambda s: next(iter(s)))
def test_what_changes_the_cost_is_drawn_trained_and_released(
    storage: str, strategy: Any, space: Any
) -> None:
    STEPS.clear()
    study = study_of(storage)
    release = study.optimize(
        privtune.make_task(build, **OWN), strategy=strategy, **TERMS, space=space
    )
    (name,) = space
    choices = space[name]["choices"]
    assert release.params[name] in choices
    assert 0.05 <= release.params["learning_rate"] <= 5.0
    (plan,) = study.plans
    # The first call asks for the method alone, before there is a plan.
    for steps, params in STEPS[1:]:
        each = plan.search.training_of(params)
        assert steps in (each.schedule.steps, plan.training_of(params).schedule.steps)
    # A second process makes the released model from what is stored.
    model = study.release(plan.arm).model
    assert model(torch.zeros(1, 6)).shape == (1, 3)


def test_every_value_of_a_space_is_drawn(storage: str) -> None:
    study = curated(privtune.create_study("spaces", budget=BUDGET, storage=storage, seed=5))
    study.optimize(
        privtune.make_task(build, **OWN),
        strategy=Everything(trials=12, guarantee="common", sampler="random"),
        **TERMS,
        space={**BATCHES, **EPOCHS},
    )
    drawn = [trial.params for trial in study.trials]
    assert {(p["expected_batch_size"], p["epochs"]) for p in drawn} == {
        (12, 1),
        (12, 2),
        (48, 1),
        (48, 2),
    }
    assert len({p["learning_rate"] for p in drawn}) == 12


@pytest.mark.parametrize("made_by", [build, stepped])
@pytest.mark.parametrize(
    "strategy",
    [PapernotSteinke(mean_runs=3), DPHyper(mean_runs=2), Everything(trials=3)],
    ids=lambda s: s.name,
)
def test_a_rate_of_the_space_is_trained_with(storage: str, made_by: Any, strategy: Any) -> None:
    study = curated(study_of(storage))
    release = study.optimize(
        privtune.make_task(made_by, **OWN), strategy=strategy, **TERMS, space=RATES
    )
    assert 0.1 <= release.params["learning_rate"] <= 1.0
    assert all(0.1 <= trial.params["learning_rate"] <= 1.0 for trial in study.trials)


def test_processes_draw_the_same(storage: str, tmp_path: Any) -> None:
    task = privtune.make_task("tests.study.elsewhere:linear", **PATHS)
    given = {**TERMS, "space": BATCHES, "strategy": Everything(trials=3, guarantee="common")}
    found = []
    for jobs in (1, 2):
        place = f"sqlite:///{tmp_path / f'{jobs}.db'}"
        study = privtune.create_study("spaces", budget=BUDGET, storage=place, seed=3)
        release = study.optimize(task, **given, n_jobs=jobs)
        found.append((release.params, [trial.params for trial in release.trials]))
    assert found[0] == found[1]


def test_a_spec_gives_the_same_as_python(storage: str, tmp_path: Any) -> None:
    arm = {"name": "papernot-steinke", "strategy": "papernot-steinke", "mean_runs": 3}
    spec = own_spec([{**arm, "guarantee": "common"}], BATCHES).model_copy(update={"seed": 3})
    (release,) = Study.create(spec, storage).run()
    place = f"sqlite:///{tmp_path / 'open.db'}"
    opened = privtune.create_study("spaces", budget=BUDGET, storage=place, seed=3)
    other = opened.optimize(
        privtune.make_task("tests.study.elsewhere:linear", **PATHS),
        strategy=PapernotSteinke(mean_runs=3, guarantee="common"),
        **TERMS,
        space=BATCHES,
    )
    assert release.params == other.params
    assert release.params["expected_batch_size"] in (12, 48)


OTHER = {"depth": {"type": "int", "low": 1, "high": 3}}
WIDE = {"learning_rate": {"type": "float", "low": 0.001, "high": 50.0}}


@pytest.mark.parametrize(
    ("strategy", "space", "said"),
    [
        (PapernotSteinke(), OTHER, r"space = \['depth'\]: were suggested in none"),
        (Everything(trials=2), OTHER, r"space = \['depth'\]: were suggested in none"),
        (PapernotSteinke(), WIDE, "space.learning_rate = .*must lie within what build suggests"),
        (PapernotSteinke(), BATCHES, "Say guarantee: common"),
        (PapernotSteinke(guarantee="common"), RATES, "guarantee = 'common': is for a space"),
        (DPHyper(), BATCHES, "searches expected_batch_size, which changes"),
        (Fixed(), BATCHES, "space = .*one training"),
        (InRun(arm="hyfreedp", method="hyfreedp"), RATES, "space = .*one training"),
        (
            PapernotSteinke(),
            {"trainable": {"type": "categorical", "choices": ["all"]}},
            "Suggest it",
        ),
        (PapernotSteinke(), {"learning_rate": [0.1, 1.0]}, "must be a mapping of names to values"),
        (PapernotSteinke(), {}, "must be a mapping of names to laws"),
        (PapernotSteinke(), ["learning_rate"], "must be a mapping of names to laws"),
        (
            PapernotSteinke(parameters={"learning_rate": 0.5}),
            RATES,
            "are searched by the space as well",
        ),
        (Everything(trials=2, sampler="grid"), RATES, "sampler = 'grid': walks through"),
        (Fixed(parameters={"epochs": 3}), None, r"\['epochs'\]: were suggested in none"),
    ],
)
def test_what_a_space_cannot_mean_is_refused_before_the_charge(
    storage: str, strategy: Any, space: Any, said: str
) -> None:
    with pytest.raises(PrivTuneError, match=said):
        study_of(storage).optimize(
            privtune.make_task(build, **OWN), strategy=strategy, **TERMS, space=space
        )
    assert charges_of(storage) == 0


class Together:
    independent = True

    def draw(self, rng: Any) -> dict[str, float]:
        return {"learning_rate": float(rng.choice([0.25, 0.5]))}


def clipped(trial: privtune.Trial) -> privtune.Candidate:
    trial.suggest_float("learning_rate", 0.05, 5.0, log=True)
    trial.suggest_float("max_grad_norm", 0.1, 10.0, log=True)
    return privtune.Candidate(nn.Linear(6, 3))


def test_a_sampler_draws_what_the_parameters_leave(storage: str) -> None:
    strategy = PapernotSteinke(mean_runs=2, parameters={"max_grad_norm": 1.0})
    release = study_of(storage).optimize(
        privtune.make_task(clipped, **OWN), strategy=strategy, **TERMS, sampler=Together()
    )
    assert release.params["learning_rate"] in (0.25, 0.5)
    assert release.params["max_grad_norm"] == 1.0


def test_a_sampler_and_a_space_are_one_too_many(storage: str) -> None:
    with pytest.raises(PrivTuneError, match="does not go with a sampler of your own"):
        study_of(storage).optimize(
            privtune.make_task(build, **OWN),
            strategy=PapernotSteinke(),
            **TERMS,
            space=RATES,
            sampler=Together(),
        )


SCALING = LinearScaling(trials=2, fractions=(0.2, 0.4))


@pytest.mark.parametrize("made_by", [build, stepped])
def test_linear_scaling_follows_the_rates_of_a_build(storage: str, made_by: Any) -> None:
    release = study_of(storage).optimize(
        privtune.make_task(made_by, **OWN), strategy=SCALING, **TERMS, space=RATES
    )
    assert 0.1 <= release.params["learning_rate"] <= 1.0
    assert len(release.trials) == 4
    assert len({trial.params["learning_rate"] for trial in release.trials}) == 4


def test_linear_scaling_of_a_spec_with_own_work(storage: str) -> None:
    (release,) = Study.create(own_spec([LINEAR], space=RATES), storage).run()
    assert 0.1 <= release.params["learning_rate"] <= 1.0


def test_linear_scaling_takes_no_build_that_suggests_more(storage: str) -> None:
    with pytest.raises(PrivTuneError, match="alone, but its candidates also have max_grad_norm"):
        study_of(storage).optimize(
            privtune.make_task(clipped, **OWN), strategy=SCALING, **TERMS, space=RATES
        )
    fixed = replace(SCALING, parameters={"max_grad_norm": 1.0})
    release = study_of_other(storage).optimize(
        privtune.make_task(clipped, **OWN), strategy=fixed, **TERMS, space=RATES
    )
    assert release.params["max_grad_norm"] == 1.0


def study_of_other(storage: str) -> Study:
    return privtune.create_study("other", budget=BUDGET, storage=storage)


LINEAR = {"name": "a", "strategy": "linear-scaling", "trials": 2}
SELECTION = {"name": "a", "strategy": "papernot-steinke", "mean_runs": 2}
FIXED = {"name": "a", "strategy": "fixed", "parameters": {"learning_rate": 0.5}}


def own_spec(arms: list[dict[str, Any]], space: dict[str, Any]) -> StudySpec:
    task = {"type": "own", "build": "tests.study.elsewhere:linear", **PATHS}
    budget = {"name": "spaces", "epsilon": 8.0, "delta": 1e-5}
    spec = {"name": "spaces", "task": task, "budget": budget, "arms": arms, "space": space}
    return StudySpec.parse({**spec, **TERMS})


@pytest.mark.parametrize(
    ("arms", "space", "said"),
    [
        ([{"name": "a", "strategy": "auto"}], RATES, "cannot call a build of yours"),
        ([{"name": "a", "strategy": "auto"}], {}, "cannot call a build of yours"),
        ([{"name": "a", "strategy": "non-private-grid"}], RATES, "cannot call a build of yours"),
        ([LINEAR], {}, "Write learning_rate alone into the space"),
        ([LINEAR], {**RATES, **BATCHES}, "Write learning_rate alone into the space"),
        ([FIXED], RATES, "space = .*no arm of the study searches"),
        ([FIXED], BATCHES, "space = .*no arm of the study searches"),
        ([{"name": "a", "strategy": "hyfreedp"}], EPOCHS, "no arm of the study searches"),
        ([SELECTION], BATCHES, "Say guarantee: common"),
        (
            [{**SELECTION, "candidates": [{"method": "dpsgd"}]}],
            RATES,
            "chooses among training methods, but a function of your own",
        ),
    ],
)
def test_a_spec_refuses_a_space_that_its_arms_cannot_use(
    storage: str, arms: Any, space: Any, said: str
) -> None:
    with pytest.raises(PrivTuneError, match=said):
        Study.create(own_spec(arms, space), storage)


def test_a_spec_refuses_names_that_no_build_asks_for(storage: str) -> None:
    study = Study.create(own_spec([SELECTION], OTHER), storage)
    with pytest.raises(PrivTuneError, match=r"space = \['depth'\]: were suggested in none"):
        study.run()
    assert charges_of(storage) == 0


def test_a_declared_mechanism_has_no_space(storage: str) -> None:
    mechanism = privtune.Mechanism(
        privtune.accounting.Gaussian(1.0), declared_by="the lab", records=200
    )
    with pytest.raises(PrivTuneError, match="draws from a declared space, and the objective"):
        study_of(storage).optimize_declared(
            lambda trial: None,
            strategy=SCALING,
            mechanism=mechanism,
            validation=OWN["validation"],
        )
    assert charges_of(storage) == 0
