"""The suite's lending of processes that write to MLflow: what they write is what new ones write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from privtune.errors import PrivTuneError
from privtune.tracking.process import TrackingProcess
from privtune.tracking.store import local_uri
from privtune.tracking.writer import TrackingPlace
from tests.trackers import Lending, surroundings

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def place(folder: Path, name: str) -> TrackingPlace:
    (folder / name).mkdir(exist_ok=True)
    storage = f"sqlite:///{folder / name / 'privtune.db'}"
    return TrackingPlace(storage, local_uri(storage), study=name, tags={"privtune.study": name})


def opened(tracker: TrackingProcess, where: TrackingPlace) -> int:
    """Open a store, and return the number of the process that did it."""
    with tracker.opened(where) as store:
        assert store.published() == {}
        assert list(store.experiments()) == [where.study]
    assert tracker._process is not None
    return tracker._process.pid


def test_a_process_goes_on_to_other_stores_but_to_none_in_the_place_of_another(
    tmp_path: Path, trackers: Lending
) -> None:
    first, second = place(tmp_path, "first"), place(tmp_path, "second")
    with TrackingProcess() as tracker:
        process = opened(tracker, first)
        assert opened(tracker, first) == process
    starts = trackers.starts
    for where in (second, first):
        with TrackingProcess() as tracker:
            assert opened(tracker, where) == process
    assert trackers.starts == starts
    database = tmp_path / "first" / "privtune-artifacts" / "mlflow.db"
    shutil.move(shutil.copy(database, tmp_path), database)
    with TrackingProcess() as tracker:
        assert opened(tracker, first) != process
    assert trackers.starts == starts + 1


def test_after_an_error_there_is_a_new_process(tmp_path: Path, trackers: Lending) -> None:
    with pytest.raises(PrivTuneError, match="folder"), TrackingProcess() as tracker:
        opened(tracker, TrackingPlace("sqlite:////dev/null/none.db", "sqlite:////dev/null/none.db"))
    assert trackers.idle is None
    with TrackingProcess() as tracker:
        opened(tracker, place(tmp_path, "second"))
    assert trackers.idle is not None


def test_what_a_process_keeps_from_its_start_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with capfd.disabled():
        elsewhere = surroundings()
    here = surroundings()
    assert here != elsewhere, "standard error leads to another file"
    monkeypatch.setenv("PRIVTUNE_TRACKING_SECONDS", "9")
    assert surroundings() == here
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "9")
    assert surroundings() != here


@pytest.mark.usefixtures("new_trackers")
def test_a_test_can_have_processes_of_its_own(trackers: Lending) -> None:
    idle = trackers.idle
    with TrackingProcess() as tracker:
        tracker.start()
        process = tracker._process
        assert process is not None
        assert idle is None or process is not idle.process
    assert process.poll() is not None
    assert trackers.idle is idle
