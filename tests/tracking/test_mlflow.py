"""What MLflow is told, and above all what it is not told."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from privtune.study import Study
from privtune.tracking.mlflow import MlflowObserver, experiment_url, tracking_uri
from tests.study.conftest import toy_spec

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, MlflowClient, Path]:
    folder = tmp_path_factory.mktemp("tracked")
    storage = f"sqlite:///{folder / 'privtune.db'}"
    arms = [
        {
            "name": "defaults",
            "strategy": "fixed",
            "parameters": {"learning_rate": 0.5, "max_grad_norm": 1.0},
        },
        {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 8},
    ]
    # The seed gives a round of several trials.
    study = Study.create(toy_spec(arms=arms, seed=1), storage)
    study.run(MlflowObserver(study, sampling_seconds=0.2))
    return study, MlflowClient(tracking_uri=tracking_uri(storage)), folder


def runs(tracked: tuple[Study, MlflowClient, Path]) -> dict:
    study, client, _ = tracked
    experiment = client.get_experiment_by_name(study.name)
    assert experiment is not None
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def test_one_run_an_arm(tracked: tuple[Study, MlflowClient, Path]) -> None:
    found = runs(tracked)
    assert set(found) == {"defaults", "selection"}
    assert all(run.info.status == "FINISHED" for run in found.values())


def test_releases_are_logged_as_they_are(tracked: tuple[Study, MlflowClient, Path]) -> None:
    study = tracked[0]
    for release in study.releases():
        run = runs(tracked)[release.arm]
        metrics = run.data.metrics
        assert metrics["privacy/epsilon"] == release.guarantee.epsilon
        assert metrics["privacy/delta"] == 1e-5
        assert metrics["utility/test_accuracy"] == release.utility["test_accuracy"]
        assert run.data.params["learning_rate"] == str(release.params["learning_rate"])
        assert run.data.tags["privtune.adjacency"] == "add-remove"
        assert run.data.tags["privtune.bound"] == release.guarantee.method
        assert "fixed seed" in run.data.tags["privtune.weakened"]


def test_the_epsilon_curve_ends_at_the_arm_s_epsilon(
    tracked: tuple[Study, MlflowClient, Path],
) -> None:
    study, client, _ = tracked
    run = runs(tracked)["defaults"]
    history = client.get_metric_history(run.info.run_id, "privacy/epsilon_spent")
    values = [point.value for point in sorted(history, key=lambda p: p.step)]
    assert values == sorted(values)
    assert values[-1] == study.release("defaults").guarantee.epsilon


def test_a_sealed_arm_shows_expectations_and_no_machine(
    tracked: tuple[Study, MlflowClient, Path],
) -> None:
    study = tracked[0]
    run = runs(tracked)["selection"]
    expected = study.plans[1].expected_gradient_evaluations
    assert run.data.metrics["cost/gradient_evaluations"] == expected
    assert run.data.tags["privtune.cost"] == "expected"
    assert not any(name.startswith("system/") for name in run.data.metrics)
    assert "off" in run.data.tags["privtune.system_metrics"]
    assert any(name.startswith("system/") for name in runs(tracked)["defaults"].data.metrics)


def test_the_sealed_run_is_created_at_its_release(
    tracked: tuple[Study, MlflowClient, Path],
) -> None:
    run = runs(tracked)["selection"]
    assert run.info.end_time - run.info.start_time < 2_000


def test_no_byte_of_mlflow_holds_a_sealed_trial(
    tracked: tuple[Study, MlflowClient, Path],
) -> None:
    study, _, folder = tracked
    winner = study.release("selection").params
    losers = [t for t in study.sealed_trials("selection") if t["params"] != winner]
    assert len(losers) >= 3, "the seed was chosen so that there is something to hide"

    artifacts = folder / "privtune-artifacts"
    stored = b"".join(
        path.read_bytes()
        for path in artifacts.rglob("*")
        if path.is_file() and (path.name.startswith("mlflow.db") or "mlflow" in path.parts)
    )
    released = repr(winner["learning_rate"])[:8].encode()
    assert released in stored, "the scan sees what is there"
    for trial in losers:
        for value in trial["params"].values():
            assert repr(value)[:8].encode() not in stored
        assert repr(trial["score"])[:8].encode() not in stored
    for sealed in (b"trial-", b"privtune:secret", b"privtune:index", b"number_of_runs"):
        assert sealed not in stored


def test_the_link_opens_model_training_mode() -> None:
    assert experiment_url("http://127.0.0.1:5000", "3").endswith(
        "/#/experiments/3/runs?workflowType=machine_learning"
    )
