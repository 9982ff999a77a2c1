"""A score that is a loss is shown as a loss: under its name, positive, the smallest first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from privtune.study import Study
from privtune.tracking.mlflow import _view
from privtune.views.comparison import comparison_document
from privtune.views.record import arm_record, budget_view
from privtune.views.report import render_study
from privtune.views.text import utility_column
from tests.study.conftest import toy_spec

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ARMS = [
    {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2},
    {"name": "all", "strategy": "everything", "trials": 2, "sampler": "random"},
]
LOSS = {"metric": "loss", "bound": 3.0}


def run(folder: Path, task: str, **spec: Any) -> tuple[Study, dict[str, dict[str, float]], dict]:
    """Run a study; return it, the metrics of each run that is logged of it, and its saved view."""
    fields = {"arms": ARMS, "scoring": LOSS, "epochs": 1, "seed": 1, **spec}
    study = Study.create(toy_spec(task=task, **fields), f"sqlite:///{folder / 'privtune.db'}")
    view, logged = budget_view(study), {}
    for plan, release in zip(study.plans, study.run(), strict=True):
        record = arm_record(study, plan, release, view)
        for each in (record, *record.children):
            logged[each.arm] = {name: value for name, value, _ in each.points}
    return study, logged, json.loads(json.loads(_view(study, study.status()))["state"])


def test_the_score_of_a_tuning_is_not_that_of_the_released_model(tmp_path: Path) -> None:
    """Trained after a tuning: the score is of the winner there, another model on fewer records."""
    arms = [
        {"name": "chosen", "strategy": "papernot-steinke", "mean_runs": 2},
        {"name": "tuned", "strategy": "subsampled-tuning", "mean_runs": 2, "rate": 0.5},
        {"name": "hyper", "strategy": "dp-hyper", "mean_runs": 2},
    ]
    study, runs, _ = run(tmp_path, "tests.toy:private_blobs", arms=arms, scoring={}, report=None)
    frame = study.compare()
    for arm, name, column in (
        ("chosen", "acc/val", "validation_accuracy"),
        ("tuned", "acc/tuning", "tuning_accuracy"),
        ("hyper", "acc/tuning", "tuning_accuracy"),
    ):
        shown = {n for n in runs[arm] if n.startswith("acc/")}
        assert shown == {name, f"{name}_low", f"{name}_high"}
        score = study.release(arm).score
        assert runs[arm][name] == round(score, 4)
        assert frame.loc[arm, column] == score
    assert frame["validation_accuracy"].notna().sum() == 1
    said = {arm["arm"]: arm["score_of"] for arm in comparison_document(study)["arms"]}
    assert said == {"chosen": "validation", "tuned": "tuning", "hyper": "tuning"}
    _, values = utility_column(study.status())
    assert values["tuned"] == values["hyper"] == "not measured" != values["chosen"]


def test_a_loss_is_logged_under_its_own_name(tmp_path: Path) -> None:
    study, runs, state = run(tmp_path, "tests.toy:blobs")
    for release in study.releases():
        metrics = runs[release.arm]
        assert release.score is not None
        assert metrics["loss/val"] == round(-release.score, 4)
        assert "acc/val" not in metrics
    for trial in study.release("all").trials:
        assert runs[f"all/{trial.index}"]["loss/val"] == round(-trial.score, 4)
    # A cross-entropy of three classes is positive; the noise of 60 records is far smaller.
    assert all(run["loss/val"] > 0 for run in runs.values())

    frame = study.compare()
    assert list(frame["validation_loss"]) == [-r.score for r in study.releases()]
    assert "validation_accuracy" not in frame
    assert {arm["score_metric"] for arm in comparison_document(study)["arms"]} == {"loss"}
    # The task declares its test split public: arms are compared by that.
    assert state["orderByKey"] == "metrics.`acc/test`"


def test_on_a_public_split_the_loss_stands_beside_the_accuracy_by_step(tmp_path: Path) -> None:
    study, runs, _ = run(tmp_path, "tests.toy:public_blobs")
    trial = study.release("all").trials[0]
    metrics = runs["all/0"]
    assert metrics["loss/val"] == round(-trial.score, 4)
    assert metrics["acc/val"] == pytest.approx(trial.curves["val_accuracy"][-1])


def test_without_a_public_test_split_arms_are_compared_by_the_loss(tmp_path: Path) -> None:
    study, runs, state = run(tmp_path, "tests.tracking.test_loss:sealed_test", report=None)
    assert not any("acc/test" in run for run in runs.values())
    assert state["orderByKey"] == "metrics.`loss/val`"
    assert state["orderByAsc"] is True
    assert state["selectedColumns"][0] == "metrics.`loss/val`"
    assert state["compareRunCharts"][0]["metricKey"] == "loss/val"
    title, values = utility_column(study.status())
    assert title == "validation loss"
    assert values == {r.arm: r.choice["validation_loss"].text for r in study.releases()}
    assert all(
        text.startswith(f"{-r.score:.4f} [") for r in study.releases() for text in [values[r.arm]]
    )
    page = render_study(study)
    assert "validation loss" in page
    assert all(value in page for value in values.values())
    assert "test accuracy</th>" not in page


def sealed_test():  # type: ignore[no-untyped-def]
    from dataclasses import replace

    from tests.toy import blobs

    return replace(blobs(), public_test=False)
