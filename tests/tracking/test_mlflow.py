"""What MLflow is told of releases."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from privtune.accounting import epsilon
from privtune.strategies import Plan, Release, Repetition
from privtune.study import Study, StudySpec, delete_study, seal, study_names
from privtune.tracking.mlflow import MlflowObserver, sync_study
from privtune.tracking.store import (
    OWNER_TAG,
    experiment_id,
    local_uri,
    open_client,
    write_record,
)
from privtune.views.record import SWITCH, arm_record, budget_view
from tests.study.conftest import toy_spec
from tests.toy import exact_score
from tests.tracked import ARMS, Tracked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_releases_are_logged_as_they_are(tracked: Tracked) -> None:
    for release in tracked.study.releases():
        run = tracked.runs[release.arm]
        metrics = run.data.metrics
        # Rounded up, never down: what is shown is an upper bound.
        assert 0 <= metrics["eps/arm"] - release.guarantee.epsilon < 1e-4
        assert 0 <= metrics["eps/budget"] - tracked.study.spent().epsilon < 1e-4
        assert "eps/total" not in metrics, "an arm's ε is not that of a choice among arms"
        assert metrics["acc/test"] == pytest.approx(release.utility["test_accuracy"], abs=5e-5)
        assert 0 <= tracked.study.remaining() - metrics["eps/left"] < 1e-4
        assert run.data.params["delta"] == "1e-05"
        for name, value in release.params.items():
            assert run.data.params[name] == str(value)
        assert run.data.tags["privtune.adjacency"] == "add-remove"
        assert run.data.tags["privtune.bound"] == release.guarantee.method
        assert "fixed seed" in run.data.tags["privtune.weakened"]


def test_repetitions_are_a_mean_its_error_and_a_step_each(tracked: Tracked) -> None:
    study, plan = tracked.study, tracked.study.plans[0]
    assert tracked.runs[plan.arm].data.tags["privtune.draws"] == "one draw"
    assert "repeats" not in tracked.runs[plan.arm].data.metrics
    runs = [
        Repetition(params={}, score=None, estimates={"test_accuracy": exact_score(v)})
        for v in (0.5, 0.7)
    ]
    nothing = Repetition(params={}, score=None, nothing=True)
    release = dataclasses.replace(study.release(plan.arm), repetitions=(runs[0], nothing, runs[1]))
    record = arm_record(study, plan, release, budget_view(study))
    points = {(name, step): value for name, value, step in record.points}
    assert (record.tags["privtune.draws"], points["repeats", 0]) == ("mean of 3", 3)
    assert points["acc/test_mean", 0] == pytest.approx(0.6)
    assert points["acc/test_se", 0] == pytest.approx(0.1)
    assert {step: v for (name, step), v in points.items() if name == "acc/test_each"} == {
        0: 0.5,
        2: 0.7,
    }


def test_the_epsilon_of_one_run_stands_beside_that_of_the_procedure(tracked: Tracked) -> None:
    plan = tracked.study.plans[1]
    metrics = tracked.runs["selection"].data.metrics
    alone = epsilon(plan.training.event, 1e-5).epsilon
    assert 0 <= metrics["eps/one_run"] - alone < 1e-4
    assert metrics["eps/one_run"] < metrics["eps/arm"]
    fixed = tracked.runs["defaults"].data.metrics
    assert fixed["eps/one_run"] == fixed["eps/arm"]


def test_trajectories_of_in_run_methods(tracked: Tracked) -> None:
    run = tracked.runs["hyfree"]
    curve = tracked.study.release("hyfree").curves["learning_rate"]
    history = tracked.client.get_metric_history(run.info.run_id, "lr")
    assert [p.value for p in sorted(history, key=lambda p: p.step)] == list(curve)
    assert "clip" in tracked.runs["defaults"].data.metrics


def test_a_sealed_arm_shows_expectations_and_no_machine(tracked: Tracked) -> None:
    run = tracked.runs["selection"]
    expected = tracked.study.plans[1].expected_gradient_evaluations
    assert run.data.metrics["cost/gradients"] == round(expected)
    assert run.data.metrics["cost/cpu_seconds"] == pytest.approx(
        tracked.study.release("selection").cost.cpu_seconds, rel=5e-3
    )
    assert not any(name.startswith("system/") for name in run.data.metrics)
    assert "off" in run.data.tags["privtune.system_metrics"]
    shown = [n for n in tracked.runs["defaults"].data.metrics if n.startswith("system/")]
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= set(
        shown
    )


def test_no_arm_shows_how_long_it_took(tracked: Tracked) -> None:
    """Both tell how many records there are: the machine is watched where that was asked for alone."""
    for run in tracked.runs.values():
        assert run.info.end_time == run.info.start_time


@pytest.mark.parametrize(("said", "watched"), [(None, False), ("false", False), ("true", True)])
def test_the_machine_is_watched_by_mlflow_s_own_switch(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch, said: str | None, watched: bool
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if said is not None:
        monkeypatch.setenv(SWITCH, said)
    monkeypatch.setattr(seal, "_ran", False)
    observer = MlflowObserver(tracked.study)
    observer.arm_started(tracked.study.plans[0])
    assert bool(observer._samplers) is watched
    for sampler in observer._samplers.values():
        sampler.stop()


def test_artifacts_of_an_arm(tracked: Tracked) -> None:
    run = tracked.runs["selection"]

    def read(path: str) -> str:
        return Path(tracked.client.download_artifacts(run.info.run_id, path)).read_text()

    table = json.loads(read("privacy/ledger.json"))
    assert [row[2] for row in table["data"]] == ["defaults", "selection", "hyfree"]
    assert all(len(row) == len(table["columns"]) for row in table["data"])
    logged = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert logged == [{"path": "privacy/ledger.json", "type": "table"}]

    from privtune.ledger import verify_certificate

    certificate = json.loads(read("certificate.json"))
    assert verify_certificate(certificate).charges == 3
    page = read("privacy/report.html")
    assert "<script" not in page
    assert "selection" in page


def test_the_dataset_is_a_name_and_nothing_else(tracked: Tracked) -> None:
    for run in tracked.runs.values():
        (used,) = run.inputs.dataset_inputs
        assert used.dataset.name == "blobs"
        assert used.dataset.digest == "redacted"
        assert used.dataset.profile is None
        assert used.dataset.schema is None


def test_infinity_is_a_tag_and_never_a_number(tracked: Tracked) -> None:
    from dataclasses import replace

    study = tracked.study
    release = study.release("defaults")
    endless = replace(release, guarantee=replace(release.guarantee, epsilon=math.inf))
    record = arm_record(study, study.plans[0], endless, budget_view(study))
    assert "eps/arm" not in {name for name, _, _ in record.points}
    assert "ε is infinite" in record.tags["privtune.not_private"]
    assert all(math.isfinite(value) for _, value, _ in record.points)


def test_what_is_logged_is_not_logged_twice(tracked: Tracked) -> None:
    before = {name: run.info.run_id for name, run in tracked.runs.items()}
    assert sync_study(tracked.study) == ()
    assert {name: run.info.run_id for name, run in tracked.runs.items()} == before


def test_a_run_that_broke_off_is_replaced(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    storage = f"sqlite:///{folder / 'privtune.db'}"
    study = Study.create(toy_spec(arms=ARMS[:1]), storage)

    with open_client(storage, local_uri(storage)):
        pass  # which makes the store
    store = folder / "privtune-artifacts" / "mlflow.db"
    with contextlib.closing(sqlite3.connect(store)) as database:
        full = "CREATE TRIGGER full BEFORE INSERT ON params BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        database.execute(full)
    monkeypatch.setattr(seal, "_ran", False)  # as in a process of its own
    observer = MlflowObserver(study, sampling_seconds=0.2)
    study.run(observer)
    assert "disk full" in str(observer.unavailable)
    with contextlib.closing(sqlite3.connect(store)) as database:
        assert database.execute("SELECT status FROM runs").fetchall() == [("RUNNING",)]
        database.execute("DROP TRIGGER full")

    assert sync_study(study) == ("defaults",)
    with open_client(storage, local_uri(storage)) as client:
        experiment = client.get_experiment_by_name("toy")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert any(name.startswith("system/") for name in run.data.metrics), "samples were kept"


class Counting:
    """Counts the calls to a client: each is a transaction, or a request to a server."""

    def __init__(self, client: object) -> None:
        self._client = client
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> object:
        self.calls.append(name)
        return getattr(self._client, name)


def test_an_arm_is_a_handful_of_calls_however_many_its_steps(tracked: Tracked) -> None:
    study = tracked.study
    record = arm_record(study, study.plans[0], study.release("defaults"), budget_view(study))
    steps = 1_500
    curves = tuple((name, 0.5, s) for s in range(steps) for name in ("lr", "clip"))
    once = tuple(point for point in record.points if point[0] not in ("lr", "clip"))

    with open_client(study.storage, local_uri(study.storage)) as client:
        experiment = experiment_id(
            client, "overhead", storage=study.storage, tags={OWNER_TAG: "somebody"}
        )
        calls = []
        for points in (once, once + curves):
            counting = Counting(client)
            long = dataclasses.replace(record, points=points)
            run = write_record(counting, experiment, long)  # type: ignore[arg-type]
            calls.append(counting.calls)
        kept = client.get_metric_history(run, "lr")
        artifacts = {a.path for a in client.list_artifacts(run)}
        client.delete_experiment(experiment)
    assert calls[0] == ["create_run", "log_batch", "log_inputs", "set_terminated"]
    # A thousand values fit one batch; there is no call by step.
    assert len(calls[1]) == len(calls[0]) + 3
    assert len(kept) == steps
    assert {"certificate.json", "model", "privacy"} <= artifacts


def test_studies_of_one_name_do_not_share_an_experiment(tmp_path: Path) -> None:
    """On a server for several teams, or after a deletion: a name says nothing about whose a run is."""
    uri = f"sqlite:///{tmp_path / 'shared.db'}"
    arms = toy_spec().model_dump(mode="json")["arms"][:1]
    for storage in ("one.db", "two.db", "two.db"):
        url = f"sqlite:///{tmp_path / storage}"
        if "toy" in study_names(url):
            delete_study("toy", url)
        budget = {"name": uuid.uuid4().hex, "epsilon": 6.0, "delta": 1e-5}
        with closing(Study.create(toy_spec(arms=arms, epochs=1, budget=budget), url)) as study:
            study.run()
            assert sync_study(study, uri=uri) == ("defaults",)
            assert sync_study(study, uri=uri) == ()
    client = MlflowClient(tracking_uri=uri)
    experiments = [one for one in client.search_experiments() if one.name != "Default"]
    assert len(experiments) == 3
    assert len({one.tags[OWNER_TAG] for one in experiments}) == 3
    for one in experiments:
        assert len(client.search_runs([one.experiment_id])) == 1


class _Counting(MlflowObserver):
    """Notes after each release how many runs the store holds."""

    def __init__(self, study: Study, fails_after: int = 0) -> None:
        super().__init__(study)
        self.runs: list[int] = []
        self.fails_after = fails_after

    def released(self, plan: Plan, release: Release) -> None:
        super().released(plan, release)
        if len(self.runs) + 1 == self.fails_after:
            self.arm_failed(plan)
        self.runs.append(self.count())

    def count(self) -> int:
        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name(self._study.name)
        assert experiment is not None
        return len(client.search_runs([experiment.experiment_id]))


def many_arms(number: int) -> StudySpec:
    arms = [
        {
            "name": f"a{i}",
            "strategy": "fixed",
            "parameters": {"learning_rate": 0.1 + i / 100, "max_grad_norm": 1.0},
        }
        for i in range(number)
    ]
    return toy_spec(arms=arms, epochs=1)


def test_of_many_arms_several_are_logged_at_once(tmp_path: Path) -> None:
    """Each of the first nine at once, then an eighth of what is there, and all of them in the end."""
    study = Study.create(many_arms(13), storage=f"sqlite:///{tmp_path / 'study.db'}")
    observer = _Counting(study)
    study.run(observer=observer)
    assert observer.runs == [*range(1, 10), 9, 11, 11, 13]


def test_what_waits_is_logged_when_an_arm_fails(tmp_path: Path) -> None:
    study = Study.create(many_arms(11), storage=f"sqlite:///{tmp_path / 'study.db'}")
    observer = _Counting(study, fails_after=10)
    study.run(observer=observer)
    assert observer.runs == list(range(1, 12))
