"""Every refusal, with its text: one sentence, and the way out."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest

from privtune.errors import PrivTuneError
from privtune.strategies import InRun, PapernotSteinke, Scoring, make_strategy
from tests.strategies.world import BOTH, context

pytestmark = pytest.mark.quick

EPOCHS = {**BOTH, "epochs": {"type": "categorical", "choices": [1, 2]}}
LOOSE = {**BOTH, "epochs": {"type": "int", "low": 1, "high": 3}}
RUNGS = {**EPOCHS, "noise_multiplier": {"type": "categorical", "choices": [1.0, 1.5]}}

REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("papernot-steinke", {"sampler": "tpe"}, BOTH, "Use sampler: random .* or the strategy 'everything'"),
    ("liu-talwar", {"sampler": "grid"}, BOTH, "categorical choices, drawn with replacement"),
    ("subsampled-tuning", {"sampler": "qmc"}, BOTH, "not independent"),
    ("papernot-steinke", {"pruner": "median"}, BOTH, "Leave the pruner out"),
    ("everything", {"pruner": "median"}, BOTH, r"to study.optimize\(\.\.\., pruner="),
    ("papernot-steinke", {}, EPOCHS, "Say guarantee: common .* or guarantee: weighted"),
    ("papernot-steinke", {"guarantee": "none"}, EPOCHS, "must be one of common, weighted"),
    ("papernot-steinke", {"guarantee": "common"}, LOOSE, "on a finite grid with public weights"),
    ("papernot-steinke", {"guarantee": "common"}, RUNGS, "Take epochs off the grid"),
    ("papernot-steinke", {"law": "auto", "mean_runs": 3}, BOTH, "leave out mean_runs"),
    ("papernot-steinke", {"law": "auto", "power": 1.0}, BOTH, "between 0.1 and 0.99"),
    ("papernot-steinke", {"power": 0.5}, BOTH, "law: auto only"),
    ("papernot-steinke", {"law": "binomial"}, BOTH, "required by binomial"),
    ("liu-talwar", {"gamma": 1.5}, BOTH, r"must lie in \(0, 1\]"),
    ("subsampled-tuning", {"law": "auto"}, BOTH, "Give the law of the tuning"),
    ("linear-scaling", {}, BOTH, "extrapolates the learning rate alone"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "space", "message"), REFUSALS)
def test_a_refusal_says_why_and_the_way_out(
    name: str, options: dict, space: dict, message: str
) -> None:
    with pytest.raises(PrivTuneError, match=message) as caught:
        make_strategy(name, arm="a", options=options).plan(context(space), epsilon=2.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            "hyfreedp",
            {"interval": "5"},
            "interval of method 'hyfreedp' = '5': must be a whole number",
        ),
        ("dpsgd", {"momentum": [0.9]}, "momentum of method 'dpsgd' = .*: must be a number"),
        ("prodigy", {"average": 3}, "average of method 'prodigy' = 3: must be text"),
    ],
)
def test_options_of_a_method_that_python_gives_are_checked_as_those_of_a_spec(
    method: str, options: dict, message: str
) -> None:
    given = {"dpsgd": {"learning_rate": 0.5, "max_grad_norm": 1.0}}.get(method, {})
    arm = InRun(arm="a", method=method, parameters=given, options=options)
    with pytest.raises(PrivTuneError, match=message):
        arm.plan(context({}), epsilon=2.0)
    searched = PapernotSteinke(method=method, options=options)
    with pytest.raises(PrivTuneError, match=message):
        searched.plan(context(BOTH if given else {}), epsilon=2.0)


def test_numbers_of_numpy_are_numbers() -> None:
    arm = InRun(arm="a", method="hyfreedp", options={"interval": np.int64(5)})
    plan = arm.plan(context({}), epsilon=2.0)
    assert type(plan.to_dict()["training"]["method"]["interval"]) is int


def test_scores_that_are_neither_public_nor_noised_are_refused() -> None:
    with pytest.raises(PrivTuneError, match="declared public"):
        Scoring.from_dict({"mechanism": "none"})


def test_a_sampler_of_an_extra_that_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    strategy = make_strategy("everything", arm="a", options={"sampler": "cmaes"})
    said = (
        r"^sampler: cmaes needs cmaes, which is not installed: pip install 'privtune\[cmaes\]'\.$"
    )
    with pytest.raises(PrivTuneError, match=said):
        strategy.plan(context(), epsilon=2.0)


def test_refusals_do_not_depend_on_the_data() -> None:
    # Planning with a task whose loading fails: the same refusals, no data touched.
    def fail() -> None:
        raise AssertionError("data was touched")

    task = dataclasses.replace(context().task, load=fail)
    for name, options, space, message in REFUSALS[:3]:
        with pytest.raises(PrivTuneError, match=message):
            make_strategy(name, arm="a", options=options).plan(
                context(space, task=task), epsilon=2.0
            )
