"""Logging has one budget of time: no tracker that hangs, however it does, holds up a study or an exit."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from privtune.errors import InvalidInputError
from privtune.ledger import Ledger
from privtune.study import Study
from privtune.tracking.mlflow import MlflowObserver, log_model, sync_study
from privtune.tracking.process import (
    TrackingTimeoutError,
    seconds_for,
    tracking_seconds,
)
from privtune.tracking.store import TrackingUnavailableError
from privtune.views.arm import ArmRecord
from tests.cli.conftest import Cli, cli
from tests.study.conftest import FIXED, toy_spec
from tests.tiers import PATIENCE
from tests.tracked import Tracked
from tests.tracking.servers import BEHAVIOURS, behaving

__all__ = ["cli"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SECONDS = 2.0
SLACK = 60.0
"""Seconds that a loaded machine may add to a run of a second; a tracker that hangs adds no end."""
LATER = "The study goes on; log its releases later with: privtune study sync toy"


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVTUNE_TRACKING_SECONDS", str(SECONDS))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def storage(tmp_path: Path) -> str:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    Study.create(toy_spec(arms=[FIXED, {**FIXED, "name": "again"}], epochs=1), storage).close()
    return storage


def check_run_and_sync(
    storage: str,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    hold: contextlib.ExitStack,
) -> None:
    """Run the study while its tracker is held up; then let go, and log everything once."""
    begun = time.monotonic()
    done = cli("study", "run", "toy", "--storage", storage, "--json")
    assert time.monotonic() - begun < SECONDS + SLACK
    assert done.code == 0, done.err
    sentences = [record.message for record in caplog.records if LATER in record.message]
    assert len(sentences) == 1, sentences
    assert "Traceback" not in done.err
    assert [arm["state"] for arm in json.loads(done.out)["arms"]] == ["settled", "settled"]
    with Ledger(storage) as ledger:
        assert [charge.state for charge in ledger.charges("toy")] == ["settled", "settled"]

    begun = time.monotonic()
    down = cli("study", "sync", "toy", "--storage", storage)
    assert time.monotonic() - begun < SECONDS + SLACK
    assert down.code == 1
    assert down.err.count("\n") == 1, down.err

    hold.close()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("PRIVTUNE_TRACKING_SECONDS")
    logged = cli("study", "sync", "toy", "--storage", storage, "--json")
    assert json.loads(logged.out)["logged"] == ["defaults", "again"]
    with contextlib.closing(Study("toy", storage)) as study:
        runs = Tracked(study).client.search_runs([Tracked(study).experiment.experiment_id])
        assert sorted(run.info.run_name for run in runs) == ["again", "defaults"]


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_server_that_holds_up_who_asks(
    behaviour: str,
    storage: str,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with contextlib.ExitStack() as hold:
        url, came = hold.enter_context(behaving(BEHAVIOURS[behaviour]))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        check_run_and_sync(storage, cli, monkeypatch, caplog, hold=hold)
        assert came, "the tracker was asked"


def locked_database(folder: Path) -> contextlib.ExitStack:
    held = contextlib.ExitStack()
    folder.mkdir(exist_ok=True)
    database = held.enter_context(contextlib.closing(sqlite3.connect(folder / "mlflow.db")))
    database.execute("CREATE TABLE held (x)")
    database.commit()
    database.execute("BEGIN EXCLUSIVE")
    held.callback((folder / "mlflow.db").unlink)
    return held


def locked_lock(folder: Path) -> contextlib.ExitStack:
    import fcntl

    held = contextlib.ExitStack()
    folder.mkdir(exist_ok=True)
    file = held.enter_context((folder / "mlflow.lock").open("w"))
    fcntl.flock(file, fcntl.LOCK_EX)
    return held


@pytest.mark.slow
@pytest.mark.parametrize("lock", [locked_database, locked_lock])
def test_a_local_store_that_somebody_holds_for_ever(
    lock: object,
    storage: str,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with lock(tmp_path / "privtune-artifacts") as hold:  # type: ignore[operator]
        check_run_and_sync(storage, cli, monkeypatch, caplog, hold=hold)


def test_a_tracker_that_hangs_is_asked_once_in_a_run(
    storage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        behaving(BEHAVIOURS["body"]) as (url, came),
        contextlib.closing(Study("toy", storage)) as study,
        caplog.at_level(logging.WARNING),
    ):
        observer = MlflowObserver(study, uri=url)
        assert len(study.run(observer)) == 2
        assert isinstance(observer.unavailable, TrackingTimeoutError)
        assert "longer than 2 seconds (PRIVTUNE_TRACKING_SECONDS)" in str(observer.unavailable)
        assert len(came) == 1
    assert len([record for record in caplog.records if LATER in record.message]) == 1


SCRIPT = """
import sys
from privtune.study import Study
from privtune.tracking.mlflow import sync_study
print("begun", flush=True)
sync_study(Study("toy", sys.argv[1]), uri=sys.argv[2])
"""


@pytest.fixture
def released(storage: str) -> str:
    with contextlib.closing(Study("toy", storage)) as study:
        study.run()
    return storage


def run_script(folder: Path, *args: str) -> subprocess.Popen[bytes]:
    """Run a script as people write them: without a main guard, in a folder that holds other things."""
    (folder / "script.py").write_text(SCRIPT)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "script.py", *args], cwd=folder, **pipes)  # type: ignore[call-overload,no-any-return]


def test_a_script_that_logs_to_a_tracker_that_hangs_ends(released: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    with behaving(BEHAVIOURS["silent"]) as (url, _):
        script = run_script(folder, released, url)
        out, err = script.communicate(timeout=SECONDS + PATIENCE)
    assert script.returncode == 1
    assert out.count(b"begun") == 1, "no other process ran the script, too"
    assert err.splitlines()[-1].startswith(
        b"privtune.tracking.process.TrackingTimeoutError: MLflow at"
    )


@pytest.mark.usefixtures("new_trackers")
def test_what_logs_imports_nothing_from_the_working_folder(
    released: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "cython", "yaml", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIVTUNE_TRACKING_SECONDS")
    with contextlib.closing(Study("toy", released)) as study:
        assert sync_study(study) == ("defaults", "again")
    assert not (tmp_path / "ran").exists()


def children_of(process: int) -> set[int]:
    """The processes that this one has started and that live."""
    lines = Path(f"/proc/{process}/task/{process}/children").read_text()
    return {int(number) for number in lines.split()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_who_is_killed_leaves_nobody_who_goes_on_logging(
    released: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVTUNE_TRACKING_SECONDS", "600")
    with behaving(BEHAVIOURS["silent"]) as (url, came):
        script = run_script(tmp_path, released, url)
        end = time.monotonic() + PATIENCE
        while not came and time.monotonic() < end:
            time.sleep(0.05)
        (writer,) = children_of(script.pid)
        os.kill(script.pid, signal.SIGKILL)
        script.communicate()
        while is_alive(writer):
            assert time.monotonic() < end
            time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_a_model_is_logged_within_the_budget_too(released: str) -> None:
    with (
        behaving(BEHAVIOURS["headers"]) as (url, _),
        contextlib.closing(Study("toy", released)) as study,
        pytest.raises(TrackingTimeoutError),
    ):
        log_model(study, "defaults", uri=url)


def test_an_attempt_that_fails_at_once_is_made_again_with_the_next_release(
    storage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        behaving(BEHAVIOURS["500"]) as (url, came),
        contextlib.closing(Study("toy", storage)) as study,
    ):
        moments: list[int] = []

        class Counting(MlflowObserver):
            def released(self, plan, release) -> None:
                super().released(plan, release)
                moments.append(len(came))

        observer = Counting(study, uri=url)
        observer._process.seconds = 60.0
        study.run(observer)
        assert 0 < moments[0] < moments[1]
        assert type(observer.unavailable) is TrackingUnavailableError
    assert len([record for record in caplog.records if LATER in record.message]) == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "1e99"])
def test_a_budget_of_time_that_is_none_is_refused_before_anything_is_charged(
    text: str, storage: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVTUNE_TRACKING_SECONDS", text)
    with pytest.raises(InvalidInputError, match=r"above 0 .*Leave it out for 60 seconds"):
        tracking_seconds()
    done = cli("study", "run", "toy", "--storage", storage)
    assert (done.code, done.err.count("\n")) == (1, 1)
    with Ledger(storage) as ledger:
        assert ledger.charges("toy") == ()


def test_what_is_larger_may_take_longer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_bytes(bytes(3_000_000))
    point = ("acc", 0.5, 0)
    small = ArmRecord("a", "d", {}, {}, (), "")
    child = ArmRecord("a/0", "d/0", {}, {}, (point,) * 2_000, "")
    assert seconds_for(small) == 0.0
    assert seconds_for(ArmRecord("a", "d", {}, {}, (), "", model=model)) == 3.0
    assert seconds_for(ArmRecord("a", "d", {}, {}, (), "", children=(child, child))) == 6.0
