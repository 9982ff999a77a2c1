"""MLflow stores: where they are, how they are opened, how a record gets into them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import sqlite3
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from privtune.errors import PrivTuneError
from privtune.files import cache_folder, forget_times, midnight, open_private, private_folder
from privtune.imports import libraries
from privtune.ledger.places import artifact_root
from privtune.ledger.urls import masked, masked_url
from privtune.views.record import LEDGER_TABLE, ArmRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import RunInfo

_BATCH = 1_000  # MLflow's limit on metrics a call
_DIGEST = "privtune.plan_digest"
_MILLIS = "get_current_time_millis"
_turn = threading.Lock()  # one thread at a time changes MLflow's clock
_QUICK_AND_QUIET = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow would try seven times with growing pauses, minutes in all; a study must not wait for it.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class TrackingUnavailableError(PrivTuneError):
    """The tracking store cannot be reached or refuses; releases wait in the study's database."""


def local_uri(storage: str) -> str:
    """Return the URI of the MLflow store that lies beside a study's database."""
    return f"sqlite:///{artifact_root(storage) / 'mlflow.db'}"


def tracking_uri(storage: str, uri: str | None = None) -> str:
    """Return the tracking URI in force: given, or from ``MLFLOW_TRACKING_URI``, or the local one."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or local_uri(storage)


@contextlib.contextmanager
def open_client(storage: str, uri: str) -> Iterator[MlflowClient]:
    """Open an MLflow client on a store that is initialised, and alone in writing to it.

    Whatever it writes on this machine carries the day alone: rows that MLflow stamps by itself,
    and the times of files. A server stamps its experiments and models by its own clock.

    Args:
        storage: The study's storage URL: says where artifacts and the lock are.
        uri: Tracking URI.

    Raises:
        TrackingUnavailableError: If anything goes wrong inside that is MLflow's or the network's.
    """
    # Imported here: MLflow takes more than a second to import, and planning needs none of it.
    with libraries():
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

    for name in ("alembic", "mlflow.store.db.utils", "mlflow.system_metrics"):
        logging.getLogger(name).setLevel(logging.WARNING)
    folder = artifact_root(storage)
    private_folder(folder)
    with _environment(_QUICK_AND_QUIET), _lock(folder / "mlflow.lock"), _days_alone():
        try:
            with libraries():  # MLflow's stores among them
                begin_at_copy(uri)
                client = MlflowClient(tracking_uri=uri)
            yield client
            for path in (folder, folder / "mlflow", *folder.glob("mlflow.*")):
                forget_times(path)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            raise TrackingUnavailableError(_explain(uri, error)) from error


def experiment_id(client: MlflowClient, name: str, *, storage: str, tags: dict[str, str]) -> str:
    """Return the id of a study's experiment; creates it if it is not there."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    # A server keeps artifacts itself; beside a bare database they go into the study's folder.
    artifacts = (
        None
        if client.tracking_uri.startswith("http")
        else (artifact_root(storage) / "mlflow").as_uri()
    )
    return str(client.create_experiment(name, artifact_location=artifacts, tags=tags))


def published(client: MlflowClient, experiment: str) -> dict[str, str]:
    """Return the run ids of arms that are logged completely, by the digest of their plan.

    Runs that broke off half way are deleted, with the trials below them: parameters cannot be
    written twice, so they are replaced rather than filled up.
    """
    runs: list[Any] = []
    page: str | None = ""
    while page is not None:  # MLflow hands out a thousand at a time
        found = client.search_runs([experiment], max_results=1_000, page_token=page or None)
        runs += found
        page = found.token or None
    finished = {str(run.info.run_id) for run in runs if run.info.status == "FINISHED"}
    complete = {}
    for run in runs:
        if (digest := run.data.tags.get(_DIGEST)) is None:
            continue  # somebody else's
        if {run.info.run_id, run.data.tags.get("mlflow.parentRunId", run.info.run_id)} <= finished:
            complete[digest] = str(run.info.run_id)
        else:
            client.delete_run(run.info.run_id)
    return complete


def write_record(client: MlflowClient, experiment: str, record: ArmRecord) -> str:
    """Write one arm's run, its paid-for trials below it, all at once; return the run's id.

    The run begins at the day's 00:00 UTC, plus a second for each arm before it, so that a list by
    time is in the study's order; it ends at once, or after the measured length for an arm that is
    not private. The moments at which a round began, ended and was logged are not in the store.
    """
    from mlflow.entities import Metric

    started = (midnight() + record.number) * 1000
    now = started + int(record.seconds * 1000)
    tables = json.dumps([{"path": LEDGER_TABLE, "type": "table"}])
    created = _create(client, experiment, record, started, {"mlflow.loggedArtifacts": tables})
    run = str(created.run_id)
    for child in record.children:
        below = _create(client, experiment, child, now, {"mlflow.parentRunId": run}).run_id
        _log(client, below, child, now)
        client.set_terminated(below, status="FINISHED", end_time=now)
    samples = [
        Metric(name, value, started + int(seconds * 1000), step)
        for step, (seconds, values) in enumerate(record.samples)
        for name, value in values.items()
    ]
    _log(client, run, record, now, samples)
    client.log_inputs(run, [_dataset(record)])
    if (place := _local_folder(created.artifact_uri)) is not None:
        # MLflow would look the run up again, and copy what we had to write somewhere else first.
        _fill(place, record)
        forget_times(place.parent, within=True)
    else:
        with tempfile.TemporaryDirectory(prefix="privtune-") as name:
            _fill(Path(name), record)
            client.log_artifacts(run, name)
    client.set_terminated(run, status="FINISHED", end_time=now)
    return run


def _create(
    client: MlflowClient, experiment: str, record: ArmRecord, started: int, tags: Mapping[str, str]
) -> RunInfo:
    # With its tags from the start: one insert, where later each would be looked up and merged.
    named = {
        "mlflow.runName": record.arm,
        "mlflow.note.content": record.note,
        _DIGEST: record.digest,
    }
    all_tags = {**record.tags, **named, **tags}
    info: RunInfo = client.create_run(experiment, start_time=started, tags=all_tags).info
    return info


def _log(
    client: MlflowClient, run: str, record: ArmRecord, now: int, more: Sequence[Any] = ()
) -> None:
    from mlflow.entities import Metric, Param

    metrics = [Metric(name, value, now, step) for name, value, step in record.points] + [*more]
    params = [Param(name, value) for name, value in record.params.items()]
    client.log_batch(run, metrics[:_BATCH], params)
    for start in range(_BATCH, len(metrics), _BATCH):
        client.log_batch(run, metrics[start : start + _BATCH])


def _fill(folder: Path, record: ArmRecord) -> None:
    (folder / "privacy").mkdir(parents=True, exist_ok=True)
    for path, document in record.documents.items():
        text = json.dumps(document, indent=1, ensure_ascii=False)
        (folder / path).write_text(text + "\n", encoding="utf-8")
    (folder / "privacy" / "report.html").write_text(record.report, encoding="utf-8")
    if record.model is not None:
        (folder / "model").mkdir()
        (folder / "model" / record.model.name).write_bytes(record.model.read_bytes())


def _local_folder(artifact_uri: str) -> Path | None:
    """Return the folder that a run's artifacts are kept in, if that is on this machine."""
    parts = urlsplit(artifact_uri)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else None


def _dataset(record: ArmRecord) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    # By name alone: MLflow's own digest is computed from the rows, and confirms a guess about them.
    name = record.tags["privtune.dataset"]
    dataset = Dataset(name, "redacted", "privtune", json.dumps({"name": name}))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "private training data")])


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time in: MLflow's first use of a fresh database is a race."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows; there processes have to take turns themselves
        yield
        return
    with open_private(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _days_alone() -> Iterator[None]:
    """Let MLflow's own clock, where it is imported, stand at the day's 00:00 UTC."""
    from mlflow.utils import time as clock

    def day() -> int:
        return midnight() * 1000

    with _turn:
        exact = getattr(clock, _MILLIS)
        _exchange(exact, day)
        try:
            yield
        finally:
            _exchange(day, exact)


def _exchange(old: Callable[[], int], new: Callable[[], int]) -> None:
    # Every module has imported the function by name; some are first imported inside the block.
    for name, module in list(sys.modules.items()):
        if name.startswith("mlflow.") and vars(module).get(_MILLIS) is old:
            setattr(module, _MILLIS, new)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _explain(uri: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "Invalid Host header" in text:
        return (
            f"The MLflow server refuses this host name. Start it with --allowed-hosts naming the host "
            f"of {masked_url(uri)}, or use 127.0.0.1."
        )
    return f"MLflow at {masked_url(uri)} cannot be used: {masked(text)[:300]}"


_BESIDE = ("-journal", "-wal", "-shm")  # what SQLite would play back into a copy


def begin_at_copy(uri: str) -> None:
    """Where there is no SQLite store yet, put a copy of an empty one for MLflow to open."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    path, folder = _file(uri), cache_folder()
    if path is None or folder is None:
        return
    if any(path.with_name(path.name + end).exists() for end in ("", *_BESIDE)):
        return
    with contextlib.suppress(OSError, sqlite3.Error, ImportError, MlflowException, SQLAlchemyError):
        if _own(private_folder(folder), stat.S_ISDIR):
            prefix = f"mlflow-{_version()}-"
            _put(path, _kept(folder, prefix) or _made(folder, prefix))


def _file(uri: str) -> Path | None:
    """Return the file of a SQLite database without options."""
    start, _, path = uri.partition(":///")
    return None if start != "sqlite" or path in ("", ":memory:") or "?" in path else Path(path)


def _own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether this is no link, the user's own, and nobody else's to write."""
    found = path.lstat()
    return is_kind(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _version() -> str:
    """Return a digest of MLflow's version and of its migrations: of two checkouts they may differ."""
    import mlflow
    from mlflow.store import db_migrations

    versions = Path(next(iter(db_migrations.__path__))) / "versions"
    names = sorted(path.name for path in versions.glob("*.py"))
    return hashlib.sha256("\n".join([mlflow.__version__, *names]).encode()).hexdigest()[:16]


def _kept(folder: Path, prefix: str) -> bytes | None:
    """Return the cached empty database if its digest is right: damage changes it."""
    for kept in folder.glob(f"{prefix}*.db"):
        if _own(kept, stat.S_ISREG) and kept.name == _name(prefix, content := kept.read_bytes()):
            return content
    return None


def _made(folder: Path, prefix: str) -> bytes:
    """Let MLflow make a database, and keep it without its experiment, which says where it lies."""
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        path = Path(place) / "mlflow.db"
        MlflowClient(tracking_uri=f"sqlite:///{path}")
        with (
            contextlib.closing(sqlite3.connect(path)) as made,
            contextlib.closing(sqlite3.connect(":memory:")) as empty,
        ):
            made.backup(empty)
            with empty:
                empty.execute("DELETE FROM experiments")
            empty.execute("VACUUM")  # what was deleted stands in the file until then
            content = empty.serialize()
        for old in folder.glob(f"{prefix}*.db"):
            old.unlink()
        beside = Path(place) / "kept"
        with open_private(beside, "wb", None) as file:
            file.write(content)
        beside.replace(folder / _name(prefix, content))
    return content


def _put(path: Path, content: bytes) -> None:
    """Write a new file: whole or not at all, and never over one that is there."""
    beside = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as file:
            file.write(content)
        os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _name(prefix: str, content: bytes) -> str:
    return f"{prefix}{hashlib.sha256(content).hexdigest()[:16]}.db"
