"""One final score of every arm on the private test split: charged, noised, shown with its interval."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privtune.accounting import Adjacency, Composed, Gaussian, Parallel, calibrate, epsilon
from privtune.strategies import Plan, Reporting, ScorePlan, Scoring
from privtune.strategies.context import SHARES
from privtune.study import Study, plan_study
from privtune.study.stored_results import MODEL, unpack_result
from privtune.tasks import Task
from privtune.training.mechanism.data import TensorData
from privtune.training.mechanism.scoring import measure_each
from privtune.views.report import render_study
from privtune.views.text import NOT_MEASURED, explain_utility, utility_column
from tests.study.conftest import FIXED, toy_spec
from tests.toy import blobs

HERE = "tests.study.test_report_score"
ARMS = [
    FIXED,
    {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2},
]
REPORT = {"metric": "balanced_accuracy", "epsilon_share": 0.5}
PUBLIC_REPORT = {"metric": "balanced_accuracy"}


def sealed() -> Task:
    return replace(blobs(), public_test=False)


def spec(**changes: Any) -> Any:
    return toy_spec(
        **{"task": f"{HERE}:sealed", "arms": ARMS, "epochs": 1, "report": REPORT, **changes}
    )


def test_it_is_charged_in_parallel_and_leaves_the_training_its_noise() -> None:
    with_it, without = plan_study(spec()), plan_study(spec(report=None))
    assert with_it.total.epsilon <= 6.0
    for plan, bare in zip(with_it.plans, without.plans, strict=True):
        assert isinstance(plan.event, Parallel)
        assert plan.report is not None
        assert plan.event.events[1] == plan.report.event
        assert "balanced_accuracy on the test split" in " ".join(plan.released)
        # Test records meet this event alone: half of the arm's ε is dearer than nothing else.
        noise, other = plan.training.method.noise_multiplier, bare.training.method.noise_multiplier
        assert noise == pytest.approx(other, rel=0.02)
        assert bare.report is None
        assert bare.to_dict()["report"] is None
    report = with_it.plans[0].report
    assert report is not None
    assert report.event is not None
    share = epsilon(report.event, 1e-5, adjacency=Adjacency.ADD_REMOVE).epsilon
    assert share <= 0.5 * with_it.guarantees[0].epsilon * 1.01


@pytest.mark.parametrize("arms", [ARMS, ARMS[:1]])
def test_the_default_share_is_the_largest_that_costs_the_trainings_nothing(arms: Any) -> None:
    planned = plan_study(spec(arms=arms, report={"metric": "accuracy"}))
    bare = plan_study(spec(arms=arms, report=None))
    assert planned.total.epsilon <= 6.0
    (share,) = {plan.details["report_epsilon_share"] for plan in planned.plans}
    for plan, other in zip(planned.plans, bare.plans, strict=True):
        noise, alone = (p.training.method.noise_multiplier for p in (plan, other))
        assert noise == pytest.approx(alone, rel=4e-3)  # plans meet their target to a thousandth
    if len(arms) == 1:
        assert share >= 0.95, "no other charge: the dearer side counts, and both may be as dear"
        return
    # One step more on the grid, by hand: the study would exceed its ε.
    assert share < SHARES[0]
    more = SHARES[SHARES.index(share) - 1]
    events = []
    for plan, cost in zip(planned.plans, planned.guarantees, strict=True):
        training = plan.event.events[0]
        alone = epsilon(training, 1e-5).epsilon
        louder = calibrate(Gaussian(1.0), epsilon=more * alone, delta=1e-5).event
        events.append(Parallel((training, louder)))
        assert cost.epsilon == pytest.approx(alone, rel=1e-2)
        assert epsilon(plan.report.event, 1e-5).epsilon <= share * cost.epsilon * 1.01
    assert epsilon(Composed(events), 1e-5).epsilon > 6.0
    assert [Plan.from_dict(p.to_dict()) for p in planned.plans] == list(planned.plans)


def test_every_arm_is_measured_and_the_noise_is_the_charged_one(storage: str) -> None:
    study = Study.create(spec(seed=3), storage)
    releases = study.run()
    assert [list(r.utility) for r in releases] == [["test_balanced_accuracy"]] * 2
    public = {"name": "open", "task": "tests.toy:blobs", "report": PUBLIC_REPORT}
    exact = Study.create(spec(seed=3, **public), storage)
    assert all(plan.report is not None and plan.report.event is None for plan in exact.plans)
    for release in releases:
        (score,) = release.estimates.values()
        assert score.low <= score.value <= score.high
        assert 0.0 < score.width < 1.0
    title, values = utility_column(study.status())
    assert title == "test balanced accuracy"
    assert all("%" in text and "[" in text for text in values.values())
    assert "with noise, and was charged. The 95% interval" in explain_utility(study.status())
    assert "test balanced accuracy" in render_study(study)
    again = Study("toy", storage)
    assert [r.estimates for r in again.releases()] == [r.estimates for r in releases]


def test_without_it_nothing_is_measured_and_the_way_is_told(storage: str) -> None:
    study = Study.create(spec(report=None), storage)
    assert all(not release.utility for release in study.run())
    title, values = utility_column(study.status())
    assert title == "validation accuracy"
    assert values["defaults"] == NOT_MEASURED
    assert "report: {metric: ...}" in explain_utility(study.status())
    alone = Study.create(
        spec(name="alone", report=None, arms=ARMS[:1], epsilon=2.0, budget=OTHER), storage
    )
    alone.run()
    assert utility_column(alone.status()) == ("test accuracy", {"defaults": NOT_MEASURED})
    assert "was not measured" in explain_utility(alone.status())


OTHER = {"name": "other", "epsilon": 4.0, "delta": 1e-5}


def test_on_a_public_split_it_is_exact_and_free(storage: str) -> None:
    study = Study.create(spec(task="tests.toy:blobs", arms=ARMS[:1], report=PUBLIC_REPORT), storage)
    (plan,) = study.plans
    assert not isinstance(plan.event, Parallel)
    (release,) = study.run()
    data = blobs().load_checked().test
    model = blobs().model()
    model.load_state_dict(release.state_dict())
    from sklearn.metrics import balanced_accuracy_score

    predicted = model(data.x).argmax(dim=1)
    assert release.utility["test_balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(data.y, predicted)
    )


def moving() -> Task:
    return replace(sealed(), partition="content")


def test_the_noise_is_drawn_anew_by_every_arm_and_the_same_when_it_is_asked_again(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm that is stopped between its score and its release shows the same score afterwards."""
    from privtune.study import lifecycle

    study = Study.create(spec(arms=ARMS[:1]), storage)
    seen: list[Any] = []
    keep = lifecycle.Life.keep

    def stop(self: Any, plan: Any, document: Any, files: Any) -> None:
        seen.append(document["estimates"]["test_balanced_accuracy"]["value"])
        seen.append(unpack_result(files[MODEL]).weights)
        raise KeyboardInterrupt

    monkeypatch.setattr(lifecycle.Life, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    monkeypatch.setattr(lifecycle.Life, "keep", keep)
    (release,) = study.run()
    assert release.utility["test_balanced_accuracy"] == seen[0]
    assert torch.equal(release.weights, seen[1]), "a second output would be a second look"
    # Noised: no count of records, unless the noise led beyond the metric's range and was cut there.
    assert seen[0] in (0.0, 1.0) or not np.isclose(seen[0] * 60, round(seen[0] * 60))


METRICS_OF_ONE_RELEASE = ["auc", "accuracy", "loss"]


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_a_joint_release_costs_what_it_charges(mechanism: str, adjacency: Adjacency) -> None:
    """What each metric costs by its own noise adds up to the one event: 1/σ² for Gaussian noise, 1/b."""
    terms = {"metric": METRICS_OF_ONE_RELEASE, "mechanism": mechanism, "bound": 0.3, "bins": 4}
    plan = Reporting.from_dict(terms).plan(
        records=60, public=False, epsilon=1.0, delta=1e-5, adjacency=adjacency
    )
    assert plan.noise_multiplier is not None
    made = plan.make_metrics()
    assert [metric.name for metric in made] == METRICS_OF_ONE_RELEASE
    each = [m.sensitivity / n.scale for m, n in zip(made, plan.noises, strict=True)]
    together = sum(each) if mechanism == "laplace" else np.linalg.norm(each)
    assert together == pytest.approx(1.0 / plan.noise_multiplier, rel=1e-12)


@pytest.mark.parametrize("noised", [False, True])
def test_each_metric_of_a_joint_release_is_its_own(noised: bool) -> None:
    """Without noise the metrics themselves; with it, 300 have the deviation that is charged."""
    model = torch.nn.Linear(2, 2)
    data = TensorData(torch.randn(50, 2), torch.arange(50) % 2)
    report = Reporting.from_dict({"metric": ["accuracy", "loss"], "bound": 5.0})
    terms = {"records": 50, "epsilon": 1.0, "delta": 1e-5, "adjacency": Adjacency.ADD_REMOVE}
    plan = report.plan(public=not noised, **terms)
    plan = ScorePlan(**json.loads(json.dumps(plan.to_dict())))  # as it is stored
    rng = np.random.default_rng(0)
    if not noised:
        found = measure_each(plan, model, data, rng=rng)
        for name, options in (("accuracy", {}), ("loss", {"bound": 5.0})):
            one = Scoring(metric=name, **options).plan(public=True, **terms)
            (alone,) = measure_each(one, model, data, rng=rng).values()
            assert found[name].value == pytest.approx(alone.value)
            assert found[name].low <= found[name].value <= found[name].high
        return
    drawn = [measure_each(plan, model, data, rng=rng) for _ in range(300)]
    singles = [
        [measure_each(one, model, data, rng=rng) for _ in range(300)]
        for one in (
            Scoring(metric="accuracy").plan(public=False, **terms),
            Scoring(metric="loss", bound=5.0).plan(public=False, **terms),
        )
    ]
    for (name, span), alone in zip((("accuracy", 1.0), ("loss", 5.0)), singles, strict=True):
        together = np.std([each[name].value for each in drawn], ddof=1)
        single = np.std([each[name].value for each in alone], ddof=1)
        # 300 draws of each: within 30% of √2 with probability above 1 - 1e-5, and no more than is known.
        assert together == pytest.approx(math.sqrt(2.0) * single, rel=0.3)
        assert together < 1.5 * span * plan.noise_multiplier * math.sqrt(2.0) / 50


def test_several_metrics_are_one_charge_and_all_of_them_are_shown(tmp_path: Path) -> None:
    planned = plan_study(spec(report={**REPORT, "metric": ["balanced_accuracy", "loss"]}))
    one = plan_study(spec())
    assert [p.report.event for p in planned.plans] == [p.report.event for p in one.plans]
    both = spec(report={**REPORT, "metric": ["balanced_accuracy", "loss"]}, name="both")
    study = Study.create(both, f"sqlite:///{tmp_path}/both.db")
    study.run()
    for release in study.releases():
        assert list(release.utility) == ["test_balanced_accuracy", "test_loss"]
    title, shown = utility_column(study.status())
    assert title == "test balanced accuracy"
    assert all("; loss " in text for text in shown.values())
