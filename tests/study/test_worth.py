"""What scores will be worth is said before the charge: a wide interval is a warning, none is a refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.strategies import Reporting
from privtune.study import Study, plan_study
from privtune.study.worth import (
    WorthlessScoreError,
    candidates_words,
    check_worth,
    expected_scores,
    words_of,
)
from privtune.tasks import Task
from privtune.training.mechanism.metrics import METRICS, REFERENCE
from tests.study.conftest import FIXED, toy_spec
from tests.toy import LOADS, blobs

HERE = "tests.study.test_worth"
TERMS: dict[str, Any] = {"delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE, "public": False}


def sealed() -> Task:
    return replace(blobs(), public_test=False)


def many() -> Task:
    return replace(sealed(), test_records=2000)


def rare() -> Task:
    return replace(many(), rarest_share=0.05)


def two() -> Task:
    return replace(many(), classes=2)


def rare_of_two() -> Task:
    return replace(two(), rarest_share=0.05)


def spec(**changes: Any) -> Any:
    terms = {
        "task": f"{HERE}:sealed",
        "arms": [FIXED],
        "epochs": 1,
        "report": {"metric": "accuracy"},
    }
    return toy_spec(**{**terms, **changes})


def plans_of(**changes: Any) -> Any:
    chosen = spec(**changes)
    return plan_study(chosen).plans, chosen.load_task()


@pytest.mark.parametrize("name", [n for n in METRICS if n not in ("cost", "value")])
@pytest.mark.parametrize("epsilon", [0.5, 5.0])
def test_the_width_that_is_expected_is_that_of_releases(name: str, epsilon: float) -> None:
    """Noise drawn 100 times around the sums of the same model: the mean width within a fifth."""
    numbers = METRICS[name].takes == "numbers"
    plan = Reporting(metric=name, target_range=(0.0, 1.0) if numbers else None).plan(
        records=2000, epsilon=epsilon, **TERMS
    )
    (metric,) = plan.make_metrics()
    (noise,) = plan.noises
    expected = plan.expected(classes=None if numbers else 2, rarest=0.2)
    sums = metric.expected(2000, 1 if numbers else 2, 0.2, noise)
    rng = np.random.default_rng(0)
    scale = metric._of_histograms(noise).scale if name == "auc" else noise.scale
    widths = [
        metric.estimate(sums + scale * rng.standard_normal(len(sums)), noise).width
        for _ in range(100)
    ]
    assert expected.width == pytest.approx(np.mean(widths), rel=0.2)
    if name in ("accuracy", "auc", "balanced_accuracy"):
        assert expected.value == pytest.approx(REFERENCE, abs=0.02)


def test_reports_and_scores_are_foretold_once_for_arms_that_are_scored_alike() -> None:
    selection = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2}
    plans, task = plans_of(arms=[FIXED, selection], report={"metric": "balanced_accuracy"})
    test, validation = expected_scores(plans, task)
    assert (test.split, test.arms, test.private) == ("test", ("defaults", "selection"), True)
    assert test.rarest == pytest.approx(1 / 9)  # a third of an equal share of three classes
    assert (validation.split, validation.arms) == ("validation", ("selection",))
    assert candidates_words(plans).endswith("arm selection trains at most one candidate.")
    with_floor, _ = plans_of(arms=[FIXED, {**selection, "mean_runs": 8}])
    assert candidates_words(with_floor) == "Arm selection trains at least 2 candidates."
    assert "(11.1% of them in the rarest class)" in words_of(plans, task)[0]


def test_a_declared_share_is_reckoned_with() -> None:
    report = {"metric": "balanced_accuracy"}
    (known,) = expected_scores(*plans_of(task=f"{HERE}:rare", report=report))
    (unknown,) = expected_scores(*plans_of(task=f"{HERE}:many", report=report))
    assert known.rarest == 0.05
    assert known.estimate.width > unknown.estimate.width
    facts = rare().facts.to_dict()
    assert facts["rarest class"] == "0.05 of the records"


def test_a_metric_that_cannot_beat_the_constant_answer_is_not_proposed() -> None:
    """Of two classes, one with 5% of the records, always the other one is right for 95%."""
    rare, auc = f"{HERE}:rare_of_two", {"metric": "auc"}
    (score,) = expected_scores(*plans_of(task=rare, report={"metric": "accuracy"}))
    assert "Always giving the same answer reaches 95.0%, which is more." in score.words
    (of_rare,) = expected_scores(*plans_of(task=rare, report=auc, epsilon=0.1))
    assert "metric: accuracy" not in of_rare.instead
    (of_any,) = expected_scores(*plans_of(task=f"{HERE}:two", report=auc, epsilon=0.1))
    assert of_any.instead


@pytest.mark.parametrize("share", [0.0, -0.1, 0.4, True, "few"])
def test_a_share_that_no_rarest_class_has_is_refused(share: Any) -> None:
    with pytest.raises(InvalidInputError, match="at most 1/3, an equal share of the 3 classes"):
        replace(blobs(), rarest_share=share)


def test_a_score_that_would_say_nothing_is_refused_before_the_charge(storage: str) -> None:
    poor = spec(epsilon=0.02, report={"metric": "balanced_accuracy"})
    study = Study.create(poor, storage)
    before = list(LOADS)
    with pytest.raises(WorthlessScoreError, match=r"no information.*Nothing was charged.*--force"):
        study.run()
    assert before == LOADS
    assert study.spent().epsilon == 0.0
    (release,) = study.run(force=True)
    (score,) = release.estimates.values()
    assert study.spent().epsilon > 0.0
    if not score.is_informative:
        assert score.text == "no information"
        assert release.utility == {}


def test_a_wide_interval_is_a_warning_with_what_would_narrow_it() -> None:
    plans, task = plans_of(epsilon=0.24, report={"metric": "accuracy"})
    (score,) = expected_scores(plans, task)
    assert score.is_wide
    assert not score.is_worthless
    for way in ("epsilon_share", "more records", "fewer arms"):
        assert way in score.words
    check_worth(plans, task)


def test_an_exact_score_is_foretold_and_never_refused() -> None:
    plans, task = plans_of(task="tests.toy:blobs", report=None)
    (score,) = expected_scores(plans, task)
    assert (score.split, score.private, score.is_worthless) == ("test", False, False)


def test_a_stand_in_has_the_declared_share_of_the_rarest_class() -> None:
    from privtune.tasks.stand_in import stand_in

    many = replace(rare(), train_records=20_000)
    declared = stand_in(many).load().train.y
    assert (declared == 2).double().mean() == pytest.approx(0.05, abs=0.005)
    assert (declared == 0).double().mean() == pytest.approx(0.475, abs=0.012)
    undeclared = stand_in(replace(many, rarest_share=None)).load().train.y
    assert (undeclared == 2).double().mean() == pytest.approx(1 / 3, abs=0.012)


def test_a_size_that_is_sealed_is_said_to_be_expected() -> None:
    plans, task = plans_of()
    assert ": accuracy on 60 test records" in words_of(plans, task)[0]
    by_content = replace(task, partition="content")
    assert ": accuracy on 60 expected test records" in words_of(plans, by_content)[0]
