"""Nothing sealed reaches MLflow: not by our hand, not by the objective's, not by the clock."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import RunTag
from mlflow.utils.time import get_current_time_millis

from privtune.strategies import PapernotSteinke
from privtune.study import SealedError, Study
from privtune.study.failures import ArmStoppedError
from privtune.study.seal import sealed
from privtune.tracking.mlflow import MlflowObserver, sync_study
from privtune.tracking.store import local_uri, open_client
from tests import toy
from tests.study.conftest import toy_spec
from tests.toy import curated
from tests.tracked import ARMS, Tracked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def stored_bytes(folder: Path) -> bytes:
    """Every byte that MLflow stored below a folder: databases, journals, artifacts."""
    files = [
        path
        for path in (folder / "privtune-artifacts").rglob("*")
        if path.is_file() and (path.name.startswith("mlflow.db") or "mlflow" in path.parts)
    ]
    assert any(path.name == "mlflow.db" for path in files)
    return b"".join(path.read_bytes() for path in files)


def forms(value: float) -> list[bytes]:
    """The ways in which a number may be written: decimal texts and raw doubles."""
    texts = {repr(value)[:8], f"{value:.6g}", f"{value:.6f}"}
    return [t.encode() for t in texts if len(t.strip("0.-")) >= 5] + [
        struct.pack(">d", value),
        struct.pack("<d", value),
    ]


def test_the_scan_finds_what_is_there(tracked: Tracked) -> None:
    stored = stored_bytes(tracked.folder)
    winner = tracked.study.release("selection")
    for value in winner.params.values():
        assert any(form in stored for form in forms(value)[:-2])
    # SQLite keeps doubles big-endian: the scan must see numbers in the database too.
    assert struct.pack(">d", round(winner.score or 0.0, 4)) in stored


def test_no_byte_of_mlflow_holds_a_sealed_trial(tracked: Tracked) -> None:
    winner = tracked.study.release("selection").params
    trials = curated(tracked.study).sealed_trials("selection")
    losers = [trial for trial in trials if trial["params"] != winner]
    assert len(losers) >= 3, "the seed was chosen so that there is something to hide"
    stored = stored_bytes(tracked.folder)
    for trial in losers:
        for value in (*trial["params"].values(), trial["score"]):
            for form in forms(value):
                assert form not in stored
    for word in (b"trial-", b"privtune:secret", b"privtune:index", b"number_of_runs"):
        assert word not in stored


DAY = 86_400_000


def test_nothing_tells_when_the_round_was_or_how_long_it_took(tracked: Tracked) -> None:
    runs = tracked.runs
    assert [runs[name].info.start_time % DAY for name in runs_of(tracked)] == [0, 1_000, 2_000]
    assert runs["selection"].info.start_time == runs["selection"].info.end_time
    assert tracked.experiment.creation_time % DAY == 0
    assert tracked.experiment.last_update_time % DAY == 0


def runs_of(tracked: Tracked) -> list[str]:
    """The names of the runs, by the time at which they began."""
    found = tracked.client.search_runs(
        [tracked.experiment.experiment_id], order_by=["attributes.start_time ASC"]
    )
    return [str(run.info.run_name) for run in found]


def test_the_clock_of_mlflow_goes_on_afterwards(tracked: Tracked) -> None:
    uri = local_uri(tracked.study.storage)
    with open_client(tracked.study.storage, uri) as client:
        sealed_times = client.create_experiment("inside"), client.create_experiment("within")
    client = MlflowClient(tracking_uri=uri)
    outside = client.create_experiment("outside")
    try:
        for experiment in sealed_times:
            assert client.get_experiment(experiment).creation_time % DAY == 0
        assert abs(client.get_experiment(outside).creation_time - time.time() * 1000) < DAY / 24
        assert get_current_time_millis.__module__ == "mlflow.utils.time"
    finally:
        for experiment in (*sealed_times, outside):
            client.delete_experiment(experiment)


class Watcher(MlflowObserver):
    """Notes what MLflow holds whenever an arm is done."""

    seen: list[set[str]]

    def released(self, plan, release) -> None:
        super().released(plan, release)
        self.seen = [*getattr(self, "seen", []), self._there()]

    def _there(self) -> set[str]:
        client = MlflowClient(tracking_uri=self.uri)
        found = client.get_experiment_by_name(self._study.name)
        if found is None:
            return set()
        return {run.info.run_name for run in client.search_runs([found.experiment_id])}


def test_nothing_is_published_while_a_sealed_arm_is_to_come(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    arms = [ARMS[0], {**ARMS[1], "mean_runs": 2}, ARMS[2]]
    study = Study.create(toy_spec(arms=arms), storage)
    watcher = Watcher(study)
    study.run(watcher)
    assert watcher.seen == [set(), {"defaults", "selection"}, {"defaults", "selection", "hyfree"}]


def test_sync_keeps_to_the_same_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    study = Study.create(toy_spec(arms=ARMS[:2]), storage)

    def breaks(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PapernotSteinke, "run", breaks)
    with pytest.raises(KeyboardInterrupt):
        study.run(MlflowObserver(study))
    assert study.status()[0].release is not None
    assert sync_study(study) == ()
    assert not (tmp_path / "privtune-artifacts" / "mlflow.db").exists()


class Theirs:
    """A store that the objective's author opened before the round, with everything in caches."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder / 'theirs.db'}"
        self.client = MlflowClient(tracking_uri=self.uri)
        experiment = self.client.create_experiment("theirs", artifact_location=folder.as_uri())
        self.run = self.client.create_run(experiment).info.run_id
        self.client.log_text(self.run, "before", "open.txt")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    return Theirs(tmp_path_factory.mktemp("theirs"))


ATTEMPTS: dict[str, Callable[[Theirs], object]] = {
    "fluent metric": lambda t: mlflow.log_metric("sealed", 0.1234567, run_id=t.run),
    "asynchronous": lambda t: mlflow.log_metric(
        "sealed", 0.1234567, run_id=t.run, synchronous=False
    ),
    "fluent parameter": lambda t: mlflow.log_param("sealed", "0.1234567"),
    "fluent run": lambda t: mlflow.start_run(nested=True),
    "fluent experiment": lambda t: mlflow.create_experiment("sealed"),
    "old client": lambda t: t.client.log_metric(t.run, "sealed", 0.1234567),
    "new client": lambda t: MlflowClient(tracking_uri=t.uri).set_tag(t.run, "sealed", "K=17"),
    "batch": lambda t: t.client.log_batch(t.run, tags=[RunTag("sealed", "K=17")]),
    "artifact": lambda t: t.client.log_text(t.run, "K=17", "sealed.txt"),
    "registry": lambda t: t.client.create_registered_model("sealed"),
    "another store": lambda t: MlflowClient(tracking_uri=t.uri + ".other.db"),
    "reading": lambda t: t.client.get_run(t.run),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_sealed_objective_cannot_log(attempt: str, theirs: Theirs, tmp_path: Path) -> None:
    mlflow.set_tracking_uri(theirs.uri)
    try:
        with (
            sealed(tmp_path / "log"),
            pytest.raises(SealedError, match="A sealed round is running"),
        ):
            ATTEMPTS[attempt](theirs)
    finally:
        mlflow.set_tracking_uri(None)
    data = theirs.client.get_run(theirs.run).data
    assert "sealed" not in {*data.metrics, *data.params, *data.tags}
    assert not theirs.client.search_experiments(filter_string="name = 'sealed'")
    assert not theirs.client.search_registered_models()
    assert [a.path for a in theirs.client.list_artifacts(theirs.run)] == ["open.txt"]


def test_a_thread_that_logs_in_a_round_is_refused_there_and_does_not_speak_after_it(
    theirs: Theirs, tmp_path: Path
) -> None:
    """What a trial leaves behind is not watched; what logs meanwhile has ended with an error."""
    refusals: list[SealedError] = []

    def log_losses() -> None:
        try:
            for step in itertools.count():
                theirs.client.log_metric(theirs.run, "loss", 0.5, step=step)
        except SealedError as error:
            refusals.append(error)

    with sealed(tmp_path / "log"):
        thread = threading.Thread(target=log_losses)
        thread.start()
        thread.join(60.0)
    assert len(refusals) == 1
    assert "loss" not in theirs.client.get_run(theirs.run).data.metrics


class Talkative(MlflowObserver):
    """Tells the objective when a sealed round begins."""

    def arm_started(self, plan) -> None:
        super().arm_started(plan)
        ROUND.append(plan.arm)


ROUND: list[str] = []


def test_an_objective_that_logs_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From inside a real round: the model's factory, called for every candidate, tries to log."""
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    uri = local_uri(storage)
    study = Study.create(toy_spec(arms=ARMS[1:2], seed=1), storage)
    honest, attempts = toy._model, []

    def talkative():
        if ROUND:
            attempts.append(1)
            MlflowClient(tracking_uri=uri).create_experiment(f"leak-{len(attempts)}")
        return honest()

    monkeypatch.setattr(toy, "_model", talkative)
    ROUND.clear()
    with pytest.raises(ArmStoppedError):
        study.run(Talkative(study))
    (failure,) = study._life.failures("selection")
    assert "SealedError: A sealed round is running" in failure["traceback"]
    assert attempts
    assert not study.releases(), "a program that logs is a mistake, and stops the arm"
    monkeypatch.setattr(toy, "_model", honest)
    study.run(MlflowObserver(study))
    stored = stored_bytes(tmp_path)
    assert b"leak-" not in stored
    client = MlflowClient(tracking_uri=uri)
    assert {e.name for e in client.search_experiments()} == {"Default", "toy"}


def test_a_model_that_logs_is_found_out_before_anything_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    study = Study.create(toy_spec(arms=ARMS[1:2]), storage)
    honest = toy._model

    def talkative():
        MlflowClient(tracking_uri=local_uri(storage)).create_experiment("leak")
        return honest()

    monkeypatch.setattr(toy, "_model", talkative)
    with pytest.raises(SealedError):
        study.run(MlflowObserver(study))
    assert [arm.state for arm in study.status()] == ["planned"]
