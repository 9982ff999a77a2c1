"""The strategy that chooses: by public facts, as the studies' best, and as what it chose."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from torch import nn

from privtune.errors import InvalidInputError
from privtune.strategies import Auto, PlanningContext, make_strategy, plan_arm
from privtune.study import Study
from privtune.training.mechanism.schedule import Schedule
from tests.study.conftest import toy_spec
from tests.tiers import ROOT

pytestmark = pytest.mark.quick

STUDIES = ROOT / "studies"


def facts(
    parameters: int = 27, steps: int = 20, records: int = 240, **changes: Any
) -> PlanningContext:
    """A study's public facts: a model of so many parameters, trained for so many steps."""
    context = toy_spec(**changes).planning_context()
    task = replace(context.task, model=lambda: nn.Linear(parameters, 1, bias=False))
    return replace(context, task=task, schedule=Schedule(records, 0.1, steps))


def test_it_chooses_by_weights_size_space_and_limit() -> None:
    small = facts(parameters=9)
    tuned = replace(small, task=replace(small.task, pretrained="weights.safetensors, SHA-256 00"))
    spaceless = facts(parameters=9, space={})
    assert Auto()._choose(tuned, 2.0)[0] == "hyfreedp"
    assert Auto()._choose(facts(parameters=10), 2.0)[0] == "adadp"
    assert Auto()._choose(small, 2.0)[0] == "papernot-steinke"
    assert Auto(cost_limit=10)._choose(small, 2.0)[0] == "papernot-steinke"
    assert Auto(cost_limit=9.9)._choose(small, 2.0)[0] == "subsampled-tuning"
    assert Auto(cost_limit=1.9)._choose(small, 2.0)[0] == "fixed"
    assert Auto()._choose(spaceless, 2.0) == (
        "fixed",
        "d/2T = 0.23 is below 0.25, and the space has no learning_rate to select",
    )
    many = facts(records=25_000)
    assert Auto()._choose(many, 2.0) == (
        "subsampled-tuning",
        "a tenth of 25,000 records are enough to tune on at ε = 2.00",
    )
    assert Auto()._choose(many, 0.99)[0] == "adadp"
    assert Auto(cost_limit=1.9)._choose(many, 2.0)[0] == "adadp"
    assert Auto()._choose(facts(records=25_000, space={}), 2.0)[0] == "adadp"
    assert Auto()._choose(facts(records=24_999), 2.0)[0] == "adadp"
    fine = replace(many, task=tuned.task)
    assert Auto()._choose(fine, 1.0)[0] == "subsampled-tuning"
    assert Auto()._choose(fine, 1.01)[0] == "hyfreedp"
    head = replace(fine, task=replace(tuned.task, trainable="head"))
    assert Auto()._choose(head, 1.0)[0] == "hyfreedp"
    with pytest.raises(InvalidInputError, match="cost_limit = 0"):
        Auto(cost_limit=0)._choose(small, 2.0)


@pytest.mark.parametrize("parameters", [9, 10])
@pytest.mark.parametrize("limit", [None, 2.0, 1.0])
def test_its_plan_is_the_plan_of_what_it_chose(parameters: int, limit: float | None) -> None:
    context = facts(parameters=parameters)
    strategy = Auto(arm="a", cost_limit=limit)
    plan = plan_arm(strategy, context, epsilon=2.0)
    options: dict[str, dict[str, Any]] = {
        "adadp": {"parameters": {"max_grad_norm": 1.0}},
        "fixed": {"parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0}},
        "papernot-steinke": {"mean_runs": 10},
        "subsampled-tuning": {"mean_runs": 10, "variant": 1},
    }
    chosen, why = strategy._choose(context, 2.0)
    given = make_strategy(chosen, arm="a", options=options[chosen])
    same = plan_arm(given, context, epsilon=2.0)
    details = {**same.details, "chosen": chosen, "why": why}
    assert plan.to_dict() == replace(same, strategy=f"auto: {chosen}", details=details).to_dict()


CELLS = {  # parameters, steps and records as the READMEs have them, and whether weights are public
    "mnist": (50890, 323, 55_000, False),
    "transfer": (117637, 135, 27_000, True),
}
# Fine-tuned from 3 on: a search that ruins three trainings of ten at 3 and 8, and Prodigy, which ruins parts.
BEHIND = {("transfer", "8.0"): 0.01}


def accuracies() -> dict[tuple[str, str], dict[str, float]]:
    """Return the mean accuracy of every arm that is paid for, by task and ε."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for folder, task in (("mnist_strategies", "mnist"), ("transfer", "transfer")):
        with (STUDIES / folder / "results.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["arm"] != "un-paid grid" and row.get("trainable", "all") == "all":
                    accuracy = float(row.get("accuracy") or row["test_accuracy"])
                    found[task, row["epsilon"]][row["arm"]].append(accuracy)
    return {cell: {a: mean(v) for a, v in arms.items()} for cell, arms in found.items()}


def test_it_is_within_half_a_point_of_the_best_arm_of_the_studies() -> None:
    """In hindsight, on the runs that its rule was read off: a rule that is changed is held to them."""
    cells = accuracies()
    assert {task for task, _ in cells} == set(CELLS)
    for (task, epsilon), arms in cells.items():
        parameters, steps, records, tuned = CELLS[task]
        context = facts(parameters=parameters, steps=steps, records=records)
        if tuned:
            context = replace(context, task=replace(context.task, pretrained="public"))
        chosen, _ = Auto()._choose(context, float(epsilon))
        own = next(a for a in ("subsampled-1, SGD", "subsampled-1") if a in arms)
        got = arms[own if chosen == "subsampled-tuning" else chosen]
        assert got >= max(arms.values()) - BEHIND.get((task, epsilon), 0.005), (
            task,
            epsilon,
            chosen,
        )


@pytest.mark.slow
def test_a_study_runs_what_it_chose_and_says_so(tmp_path: Path) -> None:
    spec = toy_spec(arms=[{"name": "a", "strategy": "auto"}], epochs=20)
    study = Study.create(spec, f"sqlite:///{tmp_path / 'privtune.db'}")
    (release,) = study.run()
    (plan,) = study.plans
    assert plan.strategy == release.strategy == "auto: papernot-steinke"
    assert plan.details["chosen"] == "papernot-steinke"
    assert plan.is_sealed
    assert release.weights.numel() or release.is_nothing
