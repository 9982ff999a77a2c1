"""Real tracking servers, several processes at once, and servers that go away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from mlflow import MlflowClient
from psycopg import sql
from sqlalchemy.engine import make_url

from privtune.study import Study
from privtune.tracking.mlflow import MlflowObserver, sync_study
from privtune.tracking.store import TrackingUnavailableError, local_uri, tracking_uri
from tests.cli.conftest import Cli, cli
from tests.ledger.campaigns import processes
from tests.study.conftest import toy_spec
from tests.tiers import PATIENCE, campaign
from tests.toy import curated
from tests.tracked import ARMS, Tracked
from tests.tracking.servers import Server, behaving, free_port, hanging_after
from tests.tracking.test_sealed import forms

__all__ = ["cli"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("new_trackers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

POSTGRES = "PRIVTUNE_TEST_POSTGRES_URL"


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    url = os.environ.get(POSTGRES)
    if url is None:
        pytest.skip(f"{POSTGRES} is not set")
    parts = make_url(url)
    name = f"privtune_mlflow_{uuid.uuid4().hex[:12]}"
    admin = parts.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        yield parts.set(database=name, drivername="postgresql+psycopg").render_as_string(
            hide_password=False
        )
    finally:
        with psycopg.connect(admin, autocommit=True) as connection:
            drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
            connection.execute(drop)


@pytest.fixture(
    scope="module",
    params=["sqlite", pytest.param("postgres", marks=[pytest.mark.postgres, campaign])],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(f"server-{request.param}")
    backend = (
        f"sqlite:///{folder / 'served.db'}"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres")
    )
    running = Server.mlflow(folder, backend).start()
    yield running
    running.stop()


@pytest.fixture
def released(tracked: Tracked, tmp_path: Path) -> Study:
    """A study that is done and that no tracker knows."""
    with (
        contextlib.closing(sqlite3.connect(tracked.folder / "privtune.db")) as there,
        contextlib.closing(sqlite3.connect(tmp_path / "privtune.db")) as copy,
    ):
        there.backup(copy)
    shutil.copytree(
        tracked.folder / "privtune-artifacts",
        tmp_path / "privtune-artifacts",
        ignore=shutil.ignore_patterns("mlflow*"),
    )
    return Study("toy", f"sqlite:///{tmp_path / 'privtune.db'}")


def sync_in_a_process(storage: str, uri: str, queue: Any) -> None:
    study = Study("toy", storage)
    try:
        queue.put(sync_study(study, uri=uri))
    except Exception as error:
        queue.put(repr(error))


def sync_in_processes(storage: str, uri: str, count: int) -> list[Any]:
    context = processes(__name__)  # which has imported MLflow once
    queue = context.Queue()
    args = (storage, uri, queue)
    started = [context.Process(target=sync_in_a_process, args=args) for _ in range(count)]
    for process in started:
        process.start()
    answers = [queue.get(timeout=PATIENCE) for _ in started]
    for process in started:
        process.join()
    return answers


def test_processes_share_a_server(server: Server, released: Study) -> None:
    answers = sync_in_processes(released.storage, server.url, 2)
    assert sorted(answers, key=len) == [(), ("defaults", "selection", "hyfree")]
    client = MlflowClient(tracking_uri=server.url)
    experiment = client.get_experiment_by_name("toy")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["defaults", "hyfree", "selection"]
    for run in runs:
        paths = {a.path for a in client.list_artifacts(run.info.run_id)}
        assert {"certificate.json", "model", "privacy"} <= paths


def rows_of(backend: str) -> bytes:
    """Every row of every table of a PostgreSQL database, as text."""
    url = make_url(backend).set(drivername="postgresql").render_as_string(hide_password=False)
    stored = b""
    with psycopg.connect(url) as connection:
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall()
        for (table,) in tables:
            copy = sql.SQL("COPY {} TO STDOUT").format(sql.Identifier(table))
            with connection.cursor().copy(copy) as rows:
                stored += b"".join(bytes(row) for row in rows)
    return stored


def test_nothing_that_a_server_keeps_holds_a_sealed_trial(server: Server, released: Study) -> None:
    sync_study(released, uri=server.url)
    folder = server.log.parent
    stored = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    if server.backend.startswith("postgresql"):
        stored += rows_of(server.backend)
    assert b"GET /health" in server.log.read_bytes()
    assert b"certificate" in stored
    winner = released.release("selection").params
    # The scan sees what is there, the database's rows included.
    assert any(form in stored for form in forms(winner["learning_rate"]))
    assert b"privtune.strategy" in stored
    for trial in curated(released).sealed_trials("selection"):
        if trial["params"] != winner:
            for value in (*trial["params"].values(), trial["score"]):
                assert not any(form in stored for form in forms(value))


def test_processes_share_a_fresh_local_store(released: Study) -> None:
    # Eight processes on a fresh SQLite store race MLflow's migrations: all eight fail without a lock.
    answers = sync_in_processes(released.storage, local_uri(released.storage), 3)
    assert sorted(answers, key=len) == [(), (), ("defaults", "selection", "hyfree")]


def test_a_server_that_goes_away_does_not_stop_the_study(
    server: Server, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    second = {**ARMS[0], "name": "again"}
    study = Study.create(toy_spec(name="away", arms=[ARMS[0], second], epochs=1), storage)

    class LosesItsServer(MlflowObserver):
        def arm_started(self, plan):
            if plan.arm == "again":
                server.stop()
            super().arm_started(plan)

    observer = LosesItsServer(study, uri=server.url)
    try:
        assert len(study.run(observer)) == 2
        assert observer.unavailable is not None
        assert server.url in str(observer.unavailable)
        assert [s.state for s in study.status()] == ["settled", "settled"]

        down = cli("study", "sync", "away", "--storage", storage, "--tracking-uri", server.url)
        assert down.code == 1
        assert down.err.count("\n") == 1
    finally:
        server.stop()
        server.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    done = cli("study", "sync", "away", "--storage", storage, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"study": "away", "logged": ["again"], "models": {}}
    assert "Nothing to log" in cli("study", "sync", "away", "--storage", storage).out


def test_a_server_that_hangs_half_way_gets_every_release_once(
    server: Server, released: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written half is replaced: by nobody that hangs behind the next attempt."""
    before = MlflowClient(tracking_uri=server.url).get_experiment_by_name("toy")
    if before is not None:  # of another test
        MlflowClient(tracking_uri=server.url).rename_experiment(before.experiment_id, "toy, before")
    monkeypatch.setenv("PRIVTUNE_TRACKING_SECONDS", "10")
    # The first arm is written whole (experiment, runs, batches, artifacts), the second is not.
    with (
        behaving(hanging_after(server.url, 20)) as (url, _),
        pytest.raises(TrackingUnavailableError),
    ):
        sync_study(released, uri=url)
    client = MlflowClient(tracking_uri=server.url)
    experiment = client.get_experiment_by_name("toy")
    assert experiment is not None
    place = [experiment.experiment_id]
    half = client.search_runs(place)
    assert len(half) < 3 or any(run.info.status != "FINISHED" for run in half)
    assert half
    monkeypatch.delenv("PRIVTUNE_TRACKING_SECONDS")
    logged = sync_study(released, uri=server.url)
    whole = {run.info.run_id for run in half if run.info.status == "FINISHED"}
    assert len(logged) == 3 - len(whole)
    runs = client.search_runs(place)
    assert sorted(run.info.run_name for run in runs) == ["defaults", "hyfree", "selection"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert whole <= {run.info.run_id for run in runs}


def test_a_server_that_is_not_there_is_one_clear_sentence(released: Study) -> None:
    with pytest.raises(TrackingUnavailableError, match=r"MLflow at http://127\.0\.0\.1"):
        sync_study(released, uri=f"http://127.0.0.1:{free_port()}")


def test_the_tracking_uri_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracking_uri("sqlite:///a.db").endswith("a-artifacts/mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    assert tracking_uri("sqlite:///a.db") == "http://there"
    assert tracking_uri("sqlite:///a.db", "http://here") == "http://here"
