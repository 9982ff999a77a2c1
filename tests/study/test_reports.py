"""The report of a study that declares none: planning chooses it, where it is worth its charge."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import privtune
from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.rehearsal import rehearse_study
from privtune.rehearsal.study_rehearsal import _chance
from privtune.strategies import Fixed, InRun, PapernotSteinke, Scoring
from privtune.study import Study, plan_study
from privtune.study.reports import choose_report, report_choices
from privtune.study.worth import WorthlessScoreError, expected_scores, words_of
from privtune.tasks import Task
from privtune.tasks.stand_in import stand_in
from privtune.training.mechanism.metric_name import MetricName
from privtune.training.mechanism.scoring import measure_each
from tests.study.conftest import FIXED, toy_spec
from tests.toy import blobs

HERE = "tests.study.test_reports"
SELECTION = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 3}
HYFREE = {"name": "hyfree", "strategy": "hyfreedp"}


def sealed() -> Task:
    """Three blobs, the test split of 60 private."""
    return replace(blobs(), public_test=False)


def few() -> Task:
    return replace(sealed(), test_records=8)


def many() -> Task:
    return replace(sealed(), test_records=4_000)


def rare() -> Task:
    """Of 480 test records 37 are of the rarest of two classes."""
    two = partial(nn.Linear, 6, 2)
    return replace(sealed(), classes=2, test_records=480, rarest_share=0.077, model=two)


def by_content() -> Task:
    return replace(sealed(), partition="content")


def spec(**changes: Any) -> Any:
    terms = {"task": f"{HERE}:sealed", "arms": [FIXED, SELECTION, HYFREE], "epochs": 1}
    return toy_spec(**{**terms, **changes})


def test_every_arm_is_measured_though_no_report_is_declared(storage: str) -> None:
    with closing(Study.create(spec(seed=1), storage)) as study:
        releases = study.run()
    for release in releases:
        (score,) = release.estimates.values()
        assert list(release.estimates) == ["test_accuracy"]
        assert score.width < 0.5
        assert score.low <= score.value <= score.high


def test_it_costs_the_trainings_a_thousandth_of_the_budget_at_most() -> None:
    chosen = plan_study(spec(arms=[FIXED, SELECTION]))
    without = plan_study(spec(arms=[FIXED, SELECTION], report=None))
    assert chosen.total.epsilon <= 6.0
    for plan, bare in zip(chosen.plans, without.plans, strict=True):
        noise, other = plan.training.method.noise_multiplier, bare.training.method.noise_multiplier
        assert noise == pytest.approx(other, rel=4e-3)  # each is planned to a thousandth itself
        assert plan.report is not None
        assert "its noised accuracy on the test split" in plan.released


def test_what_a_user_declares_is_what_is_reported() -> None:
    arms = [FIXED]
    named = plan_study(spec(arms=arms, report="balanced_accuracy")).plans[0]
    assert named.report is not None
    assert named.report.metric == "balanced_accuracy"
    assert plan_study(spec(arms=arms, report=None)).plans[0].report is None
    scoring = {"metric": "macro_f1"}
    scored = plan_study(spec(task=f"{HERE}:many", arms=[SELECTION], scoring=scoring)).plans[0]
    assert scored.report is not None
    assert scored.report.metric == "macro_f1", "the metric that its trials are chosen by"
    with pytest.raises(privtune.PrivTuneError, match="report"):
        spec(report=3)


def test_a_split_of_which_nothing_could_be_told_is_not_charged() -> None:
    planned = plan_study(spec(task=f"{HERE}:few", arms=[FIXED]))
    assert planned.plans[0].report is None
    without = plan_study(spec(task=f"{HERE}:few", arms=[FIXED], report=None))
    assert planned.plans[0].event == without.plans[0].event
    (sentence, *_) = words_of(planned.plans, few())
    for words in ("No arm is measured", "8 records", "accuracy", "report: {metric: ...}"):
        assert words in sentence


@pytest.mark.parametrize(
    "task",
    [
        blobs(),
        replace(sealed(), benchmark=True),
        replace(sealed(), build=lambda trial: trial, test_records=0),
    ],
)
def test_a_free_score_and_an_absent_split_are_charged_nothing(task: Task) -> None:
    assert report_choices(task, Scoring(), Adjacency.ADD_REMOVE) == ()


def test_splits_that_a_replaced_record_may_change_have_none() -> None:
    assert report_choices(by_content(), Scoring(), Adjacency.ADD_REMOVE)
    assert report_choices(by_content(), Scoring(), Adjacency.REPLACE_ONE) == ()


@pytest.mark.parametrize(
    ("facts", "metric"),
    [
        ({"test_records": 20_000}, "auc"),
        ({"test_records": 2_000}, "auc"),  # balanced accuracy would have the narrower interval
        ({"test_records": 400}, "balanced_accuracy"),
        ({"test_records": 90}, "accuracy"),
        ({"rarest_share": None}, "accuracy"),
        ({"rarest_share": 0.3}, "accuracy"),
        ({"classes": 3, "rarest_share": 0.05, "test_records": 3_000}, "balanced_accuracy"),
        ({"classes": None, "rarest_share": None, "target_range": (0.0, 9.0)}, "mae"),
    ],
)
def test_the_metric_suits_the_target_at_a_width_that_is_worth_it(
    facts: dict[str, Any], metric: str
) -> None:
    (plan,) = plan_study(spec(arms=[FIXED])).plans
    assert plan.report is not None
    task = replace(rare(), **facts)
    report = replace(plan.report, noise_multiplier=3.7, records=task.test_records)
    plan = replace(plan, report=report)
    chosen = choose_report([plan], report_choices(task, Scoring(), Adjacency.ADD_REMOVE), task)
    assert chosen is not None
    assert chosen[0].report is not None
    assert chosen[0].report.metric == metric
    assert chosen[0].report.noise_multiplier == 3.7
    (score,) = (s for s in expected_scores(chosen, task) if s.split == "test")
    assert not score.is_wide
    assert not score.is_worthless


@pytest.mark.parametrize("share", [0.02, 0.077, 0.3])
@pytest.mark.parametrize("records", [300, 1_000, 10_000])
@pytest.mark.parametrize("noise", [1.0, 4.39, 12.0])
def test_a_report_that_cannot_be_told_from_a_constant_answer_is_said_to_tell_nothing(
    share: float, records: int, noise: float
) -> None:
    """By public facts alone; and the metric that is advised does tell something at the same noise."""
    task = replace(rare(), rarest_share=share, test_records=records)
    (plan,) = plan_study(spec(arms=[FIXED], report="accuracy")).plans
    terms = replace(Scoring(metric="auc").exact(records=records), noise_multiplier=noise)
    (score,) = expected_scores([replace(plan, report=terms)], task)
    assert score.is_worthless == (score.estimate.low <= 0.5)
    assert ("That tells nothing" in score.words) == (0.0 < score.estimate.low <= 0.5)
    if score.is_worthless and score.instead:
        assert "report: {metric: " in score.words
        name = score.instead.split("metric: ")[1].split("}")[0]
        other = replace(Scoring(metric=name).exact(records=records), noise_multiplier=noise)
        (better,) = expected_scores([replace(plan, report=other)], task)
        assert not better.is_wide


def test_such_a_report_is_refused_before_the_charge(storage: str) -> None:
    study = Study.create(
        spec(task=f"{HERE}:rare", arms=[FIXED], report={"metric": "auc", "epsilon_share": 0.1}),
        storage,
    )
    with pytest.raises(
        WorthlessScoreError, match=r"(tells nothing|no information).*balanced_accuracy"
    ):
        study.run()
    assert study.spent().epsilon == 0.0


def records(n: int = 1200) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 2, generator=generator)
    split = {"train": n // 2, "validation": n // 4, "test": n // 4}
    return {"data": (x, (x[:, 0] > 0).long()), "split": split}


def build(trial: privtune.Trial) -> privtune.Candidate:
    model = nn.Linear(2, 2)
    rate = trial.suggest_float("learning_rate", 0.1, 5.0)
    return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate), max_grad_norm=1.0)


def bare(trial: privtune.Trial) -> privtune.Candidate:
    """For a method that sets rate and norm itself."""
    return privtune.Candidate(nn.Linear(2, 2))


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), y, reduction="none")


TERMS: dict[str, Any] = {"epochs": 2, "expected_batch_size": 60}


def task_of(builds: Any) -> privtune.Task:
    return privtune.make_task(builds, loss=loss, **records())


@pytest.mark.parametrize(
    ("strategy", "builds"),
    [
        (Fixed(parameters={"learning_rate": 2.0}), build),
        (InRun(arm="adaptive", method="hyfreedp"), bare),
        (PapernotSteinke(mean_runs=3), build),
    ],
)
def test_an_arm_of_python_has_a_score_whatever_its_strategy(
    storage: str, strategy: Any, builds: Any
) -> None:
    budget = privtune.Budget(4.0, 1e-5, name="own")
    study = privtune.create_study("own", budget=budget, storage=storage, seed=2)
    release = study.optimize(task_of(builds), strategy=strategy, **TERMS)
    score = release.estimates["test_accuracy"]
    assert score.width < 0.25
    assert release.guarantee.epsilon <= 4.0
    assert study.spent().epsilon <= 4.0
    row = study.compare().iloc[0]
    assert row["test_accuracy_low"] == score.low
    study.close()


def test_python_says_why_there_is_no_score(storage: str, caplog: pytest.LogCaptureFixture) -> None:
    budget = privtune.Budget(4.0, 1e-5, name="own")
    study = privtune.create_study("own", budget=budget, storage=storage, seed=2)
    own = {**records(), "split": {"train": 1190, "test": 6}}
    few = privtune.make_task(build, loss=loss, **own)
    strategy = Fixed(parameters={"learning_rate": 2.0})
    with caplog.at_level(logging.WARNING, logger="privtune"):
        release = study.optimize(few, strategy=strategy, epsilon=1.0, **TERMS)
    assert "test_accuracy" not in release.estimates
    assert "No arm is measured on the test split. With 6 records" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="privtune"):
        silent = study.optimize(
            task_of(build), strategy=strategy, arm="b", epsilon=1.0, report=None, **TERMS
        )
    assert not silent.estimates
    assert "measured" not in caplog.text
    study.close()


def test_a_call_may_ask_for_another_metric_than_the_study(storage: str) -> None:
    budget = privtune.Budget(4.0, 1e-5, name="own")
    study = privtune.create_study("own", budget=budget, storage=storage, seed=2, report=None)
    strategy = Fixed(parameters={"learning_rate": 2.0})
    task = task_of(build)
    terms = {**TERMS, "strategy": strategy, "epsilon": 1.0}
    assert not study.optimize(task, arm="usual", **terms).estimates
    named = study.optimize(task, arm="named", report="balanced_accuracy", **terms)
    assert list(named.estimates) == ["test_balanced_accuracy"]
    with pytest.raises(InvalidInputError, match="report"):
        study.optimize(task, arm="wrong", report="accurate", **terms)
    study.close()


def test_a_rehearsal_reports_what_the_study_would_with_its_noise() -> None:
    study = spec(task=f"{HERE}:rare", arms=[FIXED, SELECTION])
    (report, _) = (plan.report for plan in plan_study(study).plans)
    assert report is not None
    assert report.metric == "auc"
    found = rehearse_study(study, repeats=2)
    assert found.metric == MetricName("test", "auc")
    values = [value for arm in found.arms for value in arm.values if value is not None]
    # Without noise, always the same answer would reach 50% exactly, as would most of these few steps.
    assert values
    assert all(value != 0.5 for value in values)


@pytest.mark.parametrize("metric", ["balanced_accuracy", "auc"])
def test_chance_of_a_noised_report_that_is_no_mean_varies_by_at_most_what_is_said(
    metric: str,
) -> None:
    """Of always the same answer, noise drawn 200 times: the error that is judged by covers it."""
    task = stand_in(replace(rare(), rarest_share=0.3))
    report = {"metric": metric, "epsilon_share": 0.2}
    (plan,) = plan_study(spec(task=f"{HERE}:rare", arms=[FIXED], report=report)).plans
    chance = _chance(task, plan, MetricName("test", metric))
    assert chance is not None
    assert plan.report is not None
    assert chance.value == 0.5
    model = nn.Linear(6, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([1.0, -1.0]))
    rng = np.random.default_rng(0)
    test = task.load().test
    draws = [measure_each(plan.report, model, test, rng=rng)[metric].value for _ in range(200)]
    assert np.std(draws) <= 1.1 * chance.error
    assert chance.error < 0.3
