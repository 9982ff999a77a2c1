"""The strategy that chooses: by public facts, and as what it chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.strategies import Auto, PlanningContext, make_strategy, plan_arm
from privtune.study import Study
from privtune.training.mechanism.schedule import Schedule
from privtune.training.methods.hyfreedp import HyFreeDP
from tests.study.conftest import toy_spec

pytestmark = pytest.mark.quick


def facts(records: int = 240, **changes: Any) -> PlanningContext:
    """A study's public facts: so many records."""
    context = toy_spec(**changes).planning_context()
    return replace(context, schedule=Schedule(records, 0.1, 20))


def test_it_chooses_by_weights_and_records() -> None:
    def chosen(context: PlanningContext, epsilon: float) -> Any:
        return Auto().plan(context, epsilon=epsilon).details["chosen"]

    few, enough = facts(records=499), facts(records=500)
    tuned = replace(few, task=replace(few.task, pretrained="weights.safetensors, SHA-256 00"))
    assert chosen(tuned, 1.0) == "hyfreedp"
    assert (chosen(few, 1.0), chosen(few, 1.01)) == ("fixed", "hyfreedp")
    assert (chosen(enough, 1.0), chosen(enough, 0.99)) == ("hyfreedp", "fixed")


@pytest.mark.parametrize(
    ("records", "chosen", "why"),
    [
        (249, "fixed", "249 records at ε = 2.00 are too few to adapt on"),
        (
            250,
            "hyfreedp",
            "250 records at ε = 2.00 are enough to adapt the learning rate in one training, "
            "within a factor of 25",
        ),
    ],
)
def test_its_plan_is_the_plan_of_what_it_chose(records: int, chosen: str, why: str) -> None:
    context = facts(records)
    strategy = Auto(arm="a")
    plan = plan_arm(strategy, context, epsilon=2.0)
    options: dict[str, dict[str, Any]] = {
        "fixed": {
            "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
            "options": {"schedule": {"type": "linear", "start": 0.7}},
        },
        "hyfreedp": {"spread": 25.0},
    }
    given = make_strategy(chosen, arm="a", options=options[chosen])
    same = plan_arm(given, context, epsilon=2.0)
    details = {**same.details, "chosen": chosen, "why": why}
    assert plan.to_dict() == replace(same, strategy=f"auto: {chosen}", details=details).to_dict()


def test_a_network_goes_the_farther_the_fewer_its_weights_and_steps() -> None:
    def spread(hidden: int, steps: int, *, zero: bool = False, **options: Any) -> float | None:
        def model() -> nn.Module:
            made = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, 2))
            for weights in made.parameters() if zero else ():
                nn.init.zeros_(weights)
            return made

        context = replace(facts(), schedule=Schedule(1000, 0.1, steps))
        context = replace(context, task=replace(context.task, model=model))
        method = Auto(**options).plan(context, epsilon=1.0).training.method
        assert isinstance(method, HyFreeDP)
        return method.spread

    assert spread(8, 20) == 25.0  # 106 weights
    assert spread(30, 300) == pytest.approx(14.58, abs=0.01)  # 392 weights, 117,600 with the steps
    assert spread(600, 300) == pytest.approx(3.27, abs=0.01)  # 7,802 weights
    assert spread(600, 400) == 3.0
    # Weights of smaller features have to go farther.
    assert spread(600, 400, feature_scale=0.1) == pytest.approx(14.15, abs=0.01)
    assert spread(8, 20, feature_scale=4.0) == pytest.approx(13.57, abs=0.01)
    assert spread(8, 20, zero=True) is None


def test_the_given_rate_of_a_linear_model_stays_as_it_is() -> None:
    def model() -> nn.Module:
        made = nn.Linear(10, 2)
        nn.init.zeros_(made.weight), nn.init.zeros_(made.bias)
        return made

    context = facts(100)
    network = Auto().plan(context, epsilon=1.0).training.method
    linear = replace(context, task=replace(context.task, model=model))
    assert network.schedule == {"type": "linear", "start": 0.7}
    assert Auto().plan(linear, epsilon=1.0).training.method.schedule == "constant"


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), "small"])
def test_a_scale_of_features_that_is_none_is_refused(scale: Any) -> None:
    with pytest.raises(InvalidInputError, match="feature_scale"):
        make_strategy("auto", arm="a", options={"feature_scale": scale})


@pytest.mark.parametrize("records", [100, 1000])
@pytest.mark.parametrize("given", [{"lr": 1.0}, {"learning_rate": -1.0}, {"trainable": "tail"}])
def test_wrong_parameters_are_refused_whatever_is_chosen(records: int, given: Any) -> None:
    with pytest.raises(InvalidInputError):
        Auto(parameters=given).plan(facts(records), epsilon=1.0)


def test_a_part_that_is_trained_and_a_schedule_reach_what_is_chosen() -> None:
    given = {"learning_rate": 0.1, "trainable": "head", "schedule": "cosine"}
    plan = Auto(parameters=given).plan(facts(1000), epsilon=1.0)
    method = plan.training.method
    assert isinstance(method, HyFreeDP)
    assert plan.params == {"trainable": "head", "schedule": "cosine"}
    assert method.spread == 100.0  # HyFreeDP's own of a head


def test_planning_leaves_the_random_numbers_of_others_alone() -> None:
    before = torch.random.get_rng_state()
    Auto().plan(facts(1000), epsilon=1.0)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
def test_a_study_runs_what_it_chose_and_says_so(tmp_path: Path) -> None:
    spec = toy_spec(arms=[{"name": "a", "strategy": "auto"}], epochs=20)
    study = Study.create(spec, f"sqlite:///{tmp_path / 'privtune.db'}")
    (release,) = study.run()
    (plan,) = study.plans
    assert (
        plan.strategy == release.strategy == f"auto: {plan.details['chosen']}" == "auto: hyfreedp"
    )
    assert release.weights.numel()
