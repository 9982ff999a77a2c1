"""Epochs and batch that specs and programs leave to the rule: chosen once, and numbers from then on."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

import privtune
from privtune.errors import InvalidInputError, PrivTuneError
from privtune.rehearsal import rehearse_study
from privtune.strategies import Fixed, schedule_rule
from privtune.study import Study, StudySpec, plan_study
from privtune.study.schedules import (
    DETAIL,
    far_from_rule,
    read_compute,
    seconds_per_gradient,
    training_facts,
)
from tests.study.conftest import FIXED, toy_spec
from tests.toy import blobs

pytestmark = pytest.mark.quick

TIMES = ("-3 minutes", "..5 minutes", "0 minutes", "1e400 hours", "minutes", "")
AUTO: dict[str, Any] = {"epochs": "auto", "expected_batch_size": "auto", "arms": [FIXED]}


@pytest.mark.parametrize(
    ("value", "evaluations", "seconds"),
    [
        (2e6, 2e6, None),
        (1, 1.0, None),
        ("15 minutes", None, 900.0),
        ("1 minute", None, 60.0),
        ("1.5 hours", None, 5_400.0),
        (" 2e1 seconds ", None, 20.0),
    ],
)
def test_compute_is_gradients_or_a_time(
    value: object, evaluations: float | None, seconds: float | None
) -> None:
    spending = read_compute(value)
    if evaluations is not None:
        assert spending.evaluations == evaluations
    else:
        assert spending.seconds == seconds


@pytest.mark.parametrize(
    "value",
    [0, 0.5, -1, True, None, float("nan"), float("inf"), "x", "15", "15 days", *TIMES],
)
def test_any_other_compute_is_refused(value: object) -> None:
    with pytest.raises(InvalidInputError, match="gradient evaluations of at least 1, such as 2e6"):
        read_compute(value)


def test_a_minute_is_the_same_everywhere_and_two_are_twice_as_much() -> None:
    """By operations that are counted, not by a clock."""
    seconds = seconds_per_gradient(blobs())
    assert seconds == seconds_per_gradient(blobs())
    assert 5e-6 < seconds < 1e-4
    plans = [plan_study(toy_spec(**AUTO, compute=f"{ms / 1000} seconds")) for ms in (1, 2)]
    one, two = (plan.plans[0].training.schedule.expected_gradient_evaluations for plan in plans)
    assert 1.6 < two / one < 2.4
    assert one <= 0.001 / seconds


def test_all_arms_share_the_choice_and_spend_no_more(storage: str) -> None:
    spec = toy_spec(epochs="auto", expected_batch_size="auto", compute=3_000)
    plans = plan_study(spec).plans
    assert len({plan.training.schedule for plan in plans}) == 1
    schedule = plans[0].training.schedule
    assert schedule.expected_gradient_evaluations <= 3_000
    for plan in plans:
        detail = plan.details[DETAIL]
        assert detail["asked"] == {
            "epochs": "auto",
            "expected_batch_size": "auto",
            "compute": 3_000.0,
        }
        assert detail["expected_batch_size"] == round(schedule.expected_batch_size)
    # Three trainings share ε: one alone has less noise.
    alone = plan_study(toy_spec(**AUTO, compute=3_000)).plans[0]
    assert "σ = " in alone.details[DETAIL]["why"]
    assert alone.details[DETAIL]["why"] != plans[0].details[DETAIL]["why"]


def test_either_may_be_given() -> None:
    batch = plan_study(toy_spec(arms=[FIXED], epochs=4, expected_batch_size="auto")).plans[0]
    schedule = batch.training.schedule
    assert schedule.expected_gradient_evaluations == pytest.approx(4 * schedule.records, rel=0.1)
    fields: dict[str, Any] = {"epochs": "auto", "expected_batch_size": 30, "compute": 3_000}
    epochs = plan_study(toy_spec(arms=[FIXED], **fields)).plans[0].training.schedule
    assert round(epochs.expected_batch_size) == 30
    assert epochs.expected_gradient_evaluations <= 3_000


def _other_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the rule choose something else, as a later version may."""
    monkeypatch.setattr(schedule_rule, "NEEDED_STEPS_AT_GIVEN_RATES", 90.0)
    monkeypatch.setattr(schedule_rule, "NEEDED_WAY", 600.0)
    schedule_rule.choose_schedule.cache_clear()


def test_a_stored_study_has_numbers_that_another_rule_leaves(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = toy_spec(**AUTO, compute=5_000)
    with closing(Study.create(spec, storage)) as study:
        plan = study.plans[0]
        stored = study.spec
    assert isinstance(stored.epochs, float)
    assert isinstance(stored.expected_batch_size, int)
    assert stored.compute is None
    assert plan_study(stored).plans[0].training == plan.training
    _other_rule(monkeypatch)
    assert plan_study(spec).plans[0].training != plan.training  # so the rule is another one
    with closing(Study(spec.name, storage)) as again:
        assert again.plans[0] == plan
        assert again.plans[0].digest() == plan.digest()
        assert plan_study(again.spec).plans[0].training == plan.training
    terms: dict[str, Any] = {
        "budget": privtune.Budget(6.0, 1e-5, name="toy"),
        "task": spec.task,
        "storage": storage,
        "load_if_exists": True,
    }
    with closing(privtune.create_study("toy", **AUTO, compute=5_000, **terms)) as same:
        assert same.plans[0] == plan
    with pytest.raises(PrivTuneError, match="with other compute, epochs, expected_batch_size than"):
        privtune.create_study("toy", **AUTO, compute=6_000, **terms)


def test_a_program_that_runs_again_gets_its_release(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def build(trial: privtune.Trial) -> privtune.Candidate:
        model = torch.nn.Linear(2, 2)
        return privtune.Candidate(model, torch.optim.SGD(model.parameters(), lr=0.5))

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator)
    y = (x[:, 0] > 0).long()
    task = privtune.make_task(
        build,
        loss=lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y, reduction="none"),
        train=(x, y),
    )
    strategy = Fixed(arm="plain", parameters={"max_grad_norm": 1.0})
    terms: dict[str, Any] = {"strategy": strategy, "epochs": "auto", "expected_batch_size": "auto"}
    budget = privtune.Budget(6.0, 1e-5, name="own")
    own: dict[str, Any] = {"budget": budget, "storage": storage, "seed": 1, "compute": 2_000}
    with closing(privtune.create_study("own", **own)) as study:
        wrong: dict[str, Any] = {**terms, "expected_batch_size": "a"}
        with pytest.raises(InvalidInputError, match="must be a number above 0, or auto"):
            study.optimize(task, **wrong)
        first = study.optimize(task, **terms)
        schedule = study.plans[0].training.schedule
        assert schedule.expected_gradient_evaluations <= 2_000
        _other_rule(monkeypatch)
        again = study.optimize(task, **terms)
        assert torch.equal(first.weights, again.weights)
        assert study.plans[0].training.schedule == schedule


def test_a_rehearsal_has_the_numbers_of_the_study() -> None:
    spec = toy_spec(**AUTO, compute=500)
    rehearsal = rehearse_study(spec, repeats=1)
    assert rehearsal.arms[0].arm == "defaults"


@pytest.mark.parametrize(
    ("arms", "length"),
    [
        ([{}], 1.0),
        ([{"options": {"momentum": 0.9}}], 10.0),
        ([{}, {"parameters": {"learning_rate": 2.0, "max_grad_norm": 2.0}}], 2.0),
        ([{"options": {"schedule": "linear"}}], None),
        ([{"method": "dp-adam"}], None),
        ([{}, {"strategy": "hyfreedp", "parameters": {}}], None),
    ],
)
def test_a_constant_given_rate_says_how_far_a_step_leads(
    arms: list[dict[str, Any]], length: float | None
) -> None:
    given = {"strategy": "fixed", "parameters": {"learning_rate": 0.5, "max_grad_norm": 2.0}}
    named = [{"name": f"a{n}", **given, **arm} for n, arm in enumerate(arms)]
    spec = toy_spec(arms=named)
    facts = training_facts(spec, spec.load_task())
    assert facts.step_length == (None if length is None else pytest.approx(length))


def test_numbers_far_from_the_rule_s_get_a_sentence() -> None:
    def advice(**changes: Any) -> str:
        document = {
            "name": "m",
            "task": "mnist-cnn",
            "budget": {"name": "m", "epsilon": 3.0, "delta": 1e-6},
            "arms": [FIXED],
            **changes,
        }
        spec = StudySpec.parse(document)
        return far_from_rule(spec, spec.planning_context())

    sentence = advice(epochs=20, expected_batch_size=16)
    assert sentence.startswith("At equal work, ")
    assert "times less noise and missing steps than 20 epochs of 16" in sentence
    assert advice(epochs=20, expected_batch_size=1_024) == ""
    assert advice(epochs="auto", expected_batch_size="auto") == ""
    # Full batches have less noise than any, and take no steps.
    assert "times less noise and missing steps" in advice(epochs=5, expected_batch_size=55_000)
