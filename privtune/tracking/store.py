"""MLflow stores: where they are, how they are opened, how a record gets into them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from privtune.errors import PrivTuneError
from privtune.files import (
    UntrustedPathError,
    UnwrittenFileError,
    cache_folder,
    check_own,
    forget_times,
    midnight,
    own_folder,
    private_folder,
    read_own,
    write_whole,
)
from privtune.imports import libraries
from privtune.ledger.places import artifact_root
from privtune.ledger.urls import masked, masked_url
from privtune.locks import FileLock
from privtune.views.arm import LEDGER_TABLE, ArmRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import RunInfo

_BATCH = 1_000  # MLflow's limit on metrics a call
_DIGEST = "privtune.plan_digest"
OWNER_TAG = "privtune.study"
"""The tag that says whose an experiment is: the id of a study in its store."""

_MILLIS = "get_current_time_millis"
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
    """Return the tracking URI: the given one, or that of ``MLFLOW_TRACKING_URI``, or the local store's."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or local_uri(storage)


@contextlib.contextmanager
def open_client(storage: str, uri: str) -> Iterator[MlflowClient]:
    """Yield an MLflow client on an initialised store, as its only writer.

    For the process that speaks to MLflow alone (``writer.py``), which has one thread for it.

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
    _check_files(folder, uri)
    with _environment(_QUICK_AND_QUIET), _lock(folder / "mlflow.lock"), _days_alone():
        try:
            with libraries():  # MLflow's stores among them
                begin_at_copy(uri)
                client = MlflowClient(tracking_uri=uri)
            yield client
            for path in (folder, folder / "mlflow", *folder.glob("mlflow.*")):
                forget_times(path)
        except (MlflowException, SQLAlchemyError, OSError, UnwrittenFileError) as error:
            raise TrackingUnavailableError(explain(uri, error)) from error


def _check_files(folder: Path, uri: str) -> None:
    """Refuse a folder of studies, or files of an MLflow store in it, that a stranger may have put there."""
    try:
        own_folder(folder)
        path = _file(uri)
        if path is not None and path.absolute().is_relative_to(folder):
            for file in _files_of(path):  # a pipe among them SQLite would wait for
                check_own(file)
        private_folder(folder / "mlflow", root=folder)
    except (UntrustedPathError, OSError) as error:
        raise TrackingUnavailableError(str(error)) from error


def experiment_id(
    client: MlflowClient,
    name: str,
    *,
    storage: str,
    tags: dict[str, str],
) -> str:
    """Return the id of a study's experiment; create it if it is not there.

    An experiment belongs to a study in its store, which its tag names. Where another study has one of
    this name (of another store, or one that was deleted), the name gets the beginning of that tag.
    """
    owner = tags[OWNER_TAG]
    for experiment_name in (name, f"{name}-{owner[:12]}"):
        experiment = client.get_experiment_by_name(experiment_name)
        if experiment is None:
            # A server keeps artifacts itself; beside a bare database they go into the study's folder.
            is_server = client.tracking_uri.startswith("http")
            folder = None if is_server else (artifact_root(storage) / "mlflow").as_uri()
            new_id = client.create_experiment(experiment_name, artifact_location=folder, tags=tags)
            return str(new_id)
        if experiment.tags.get(OWNER_TAG) == owner:
            return str(experiment.experiment_id)
    raise TrackingUnavailableError(
        f"MLflow at {masked_url(client.tracking_uri)} has experiments {name!r} and {experiment_name!r} of "
        "other studies: rename one of them there."
    )


def published(client: MlflowClient, experiment: str) -> dict[str, str]:
    """Return the run ids of arms that are logged completely, by the digest of their plan.

    Runs that broke off half way are deleted, with the trials below them: parameters cannot be
    written twice, so they are replaced rather than filled up.

    Args:
        client: An open client; whoever has it is alone in writing to the store.
        experiment: Id of the study's experiment. Runs of others in it, which have no digest, stay.
    """
    runs = _all_runs(client, experiment)
    finished = {str(run.info.run_id) for run in runs if run.info.status == "FINISHED"}
    complete = {}
    for run in runs:
        digest = run.data.tags.get(_DIGEST)
        if digest is None:
            continue  # somebody else's
        run_id = run.info.run_id
        parent_id = run.data.tags.get("mlflow.parentRunId", run_id)
        if {run_id, parent_id} <= finished:
            complete[digest] = str(run_id)
        else:
            client.delete_run(run_id)
    return complete


def _all_runs(client: MlflowClient, experiment: str) -> list[Any]:
    """Return all runs of an experiment, fetched a thousand at a time."""
    runs: list[Any] = []
    token: str | None = None
    while True:
        page = client.search_runs([experiment], max_results=1_000, page_token=token)
        runs += page
        token = page.token or None
        if token is None:
            return runs


def write_record(client: MlflowClient, experiment: str, record: ArmRecord) -> str:
    """Write one arm's run, with the runs of its paid-for trials below it, and return its id.

    The run begins at the day's 00:00 UTC, plus a second for each arm before it, so that a list by
    time is in the study's order; it ends at once. The moments at which a round began, ended and was
    logged are not in the store.

    Args:
        client: An open client.
        experiment: Id of the study's experiment.
        record: What an arm has released; nothing of it is sealed.
    """
    from mlflow.entities import Metric

    # One time, in milliseconds, begins and ends it: a run must not have a length.
    now = (midnight() + record.number) * 1000
    tables = json.dumps([{"path": LEDGER_TABLE, "type": "table"}])
    info = _create(client, experiment, record, now, {"mlflow.loggedArtifacts": tables})
    run = str(info.run_id)
    for child in record.children:
        child_info = _create(client, experiment, child, now, {"mlflow.parentRunId": run})
        _log(client, child_info.run_id, child, now)
        client.set_terminated(child_info.run_id, status="FINISHED", end_time=now)
    samples = []
    for step, (seconds, values) in enumerate(record.samples):
        sample_time = now + int(seconds * 1000)
        for name, value in values.items():
            samples.append(Metric(name, value, sample_time, step))
    _log(client, run, record, now, samples)
    client.log_inputs(run, [_dataset(record)])
    _put_artifacts(client, info, record)
    client.set_terminated(run, status="FINISHED", end_time=now)
    return run


def _put_artifacts(client: MlflowClient, info: RunInfo, record: ArmRecord) -> None:
    """Write a record's files into the run's folder on this machine, or upload them."""
    folder = _local_folder(info.artifact_uri)
    if folder is not None:
        # MLflow would look the run up again, and copy what we had to write somewhere else first.
        _fill(folder, record)
        forget_times(folder.parent, within=True)
        return
    with tempfile.TemporaryDirectory(prefix="privtune-") as name:
        _fill(Path(name), record)
        client.log_artifacts(str(info.run_id), name)


def _create(
    client: MlflowClient, experiment: str, record: ArmRecord, now: int, tags: Mapping[str, str]
) -> RunInfo:
    """Create a run with all its tags at once, which takes a single insert."""
    all_tags = {
        **record.tags,
        "mlflow.runName": record.arm,
        "mlflow.note.content": record.note,
        _DIGEST: record.digest,
        **tags,
    }
    run = client.create_run(experiment, start_time=now, tags=all_tags)
    info: RunInfo = run.info
    return info


def _log(
    client: MlflowClient, run: str, record: ArmRecord, now: int, samples: Sequence[Any] = ()
) -> None:
    """Log the hyperparameters and all metrics of a run, in as few calls as MLflow allows."""
    from mlflow.entities import Metric, Param

    metrics = [Metric(name, value, now, step) for name, value, step in record.points]
    metrics += samples
    params = [Param(name, value) for name, value in record.params.items()]
    client.log_batch(run, metrics[:_BATCH], params)
    for start in range(_BATCH, len(metrics), _BATCH):
        client.log_batch(run, metrics[start : start + _BATCH])


def _fill(folder: Path, record: ArmRecord) -> None:
    """Write a record's documents, its report and its model into a private folder."""
    private_folder(folder / "privacy")
    for path, text in record.documents.items():
        write_whole(folder / path, text)
    write_whole(folder / "privacy" / "report.html", record.report)
    if record.model is not None:
        private_folder(folder / "model")
        write_whole(folder / "model" / record.model.name, record.model.read_bytes())


def _local_folder(artifact_uri: str) -> Path | None:
    """Return the folder of a run's artifacts, or None if it is not on this machine."""
    parts = urlsplit(artifact_uri)
    if parts.scheme != "file":
        return None
    return Path(url2pathname(parts.path))


def _dataset(record: ArmRecord) -> Any:
    """Return the dataset of a run for MLflow, identified by its name alone.

    MLflow's own digest is computed from the rows, and confirms a guess about them.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    name = record.tags["privtune.dataset"]
    dataset = Dataset(name, "redacted", "privtune", json.dumps({"name": name}))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "private training data")])


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a store's lock inside a ``with`` block: MLflow's first use of a fresh database is a race."""
    try:
        lock = FileLock(path)
    except (UntrustedPathError, OSError) as error:
        raise TrackingUnavailableError(str(error)) from error
    with lock:
        lock.wait()
        yield


@contextlib.contextmanager
def _days_alone() -> Iterator[None]:
    """Set MLflow's clock to today's 00:00 UTC inside a ``with`` block."""
    from mlflow.utils import time as clock

    def day() -> int:
        return midnight() * 1000

    exact = getattr(clock, _MILLIS)
    _exchange(exact, day)
    try:
        yield
    finally:
        _exchange(day, exact)


def _exchange(old: Callable[[], int], new: Callable[[], int]) -> None:
    """Replace one clock function by another in every imported module of MLflow.

    Every module has imported the function by name; some are first imported inside the block.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("mlflow.") and vars(module).get(_MILLIS) is old:
            setattr(module, _MILLIS, new)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside a ``with`` block, except those that the user has set."""
    additions = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(additions)
    try:
        yield
    finally:
        for name in additions:
            os.environ.pop(name, None)


_LONGEST = 300  # characters of an error of MLflow's


def explain(uri: str, error: Exception) -> str:
    """Return a sentence on why a store cannot be used, with the remedy if one is known.

    Passwords in addresses are masked: the sentence is logged, and shown to whoever waits.

    Args:
        uri: Address of the store.
        error: What MLflow, its database or the system raised.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if "Invalid Host header" in text:
        return (
            f"The MLflow server refuses this host name. Start it with --allowed-hosts naming the host "
            f"of {masked_url(uri)}, or use 127.0.0.1."
        )
    where = f"MLflow at {masked_url(uri)} cannot be used"
    again = "Releases stay in the study's storage, and privtune study sync NAME logs them later."
    if "Connection refused" in text or "NewConnectionError" in text or "Name or service" in text:
        return f"{where}: no server answers there. Start it, or correct the address. {again}"
    if "unsupported URI" in text or "Invalid tracking" in text:
        return (
            f"{where}: this is no address of a store. Write http://HOST:PORT of a server, or "
            f"sqlite:///mlflow.db of a file. {again}"
        )
    reason = masked(text)
    if len(reason) > _LONGEST:
        reason = f"{reason[:_LONGEST]}..."
    return f"{where}: {reason}"


_BESIDE = ("-journal", "-wal", "-shm")  # what SQLite would play back into a copy


def begin_at_copy(uri: str) -> None:
    """Put a copy of an empty database in the place of a SQLite store that does not exist yet.

    MLflow makes one by all of its migrations, one after the other. Where there can be no copy, it does that.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    path = _file(uri)
    folder = cache_folder()
    if path is None or folder is None:
        return
    if any(file.exists() for file in _files_of(path)):
        return
    with contextlib.suppress(OSError, sqlite3.Error, ImportError, MlflowException, SQLAlchemyError):
        if not _is_users_own(private_folder(folder), stat.S_ISDIR):
            return
        prefix = f"mlflow-{_version()}-"
        content = _read_empty(folder, prefix) or _make_empty(folder, prefix)
        write_whole(path, content, replace=False)


def _file(uri: str) -> Path | None:
    """Return the file of a SQLite URI, or None for another database or a URI with options."""
    scheme, _, path = uri.partition(":///")
    if scheme != "sqlite" or path in ("", ":memory:") or "?" in path:
        return None
    return Path(path)


def _files_of(database: Path) -> list[Path]:
    """Return the paths of a SQLite database and the files that SQLite puts beside it, existing or not."""
    return [database.with_name(database.name + end) for end in ("", *_BESIDE)]


def _is_users_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a path is of the given kind, this user's own, and writable by nobody else."""
    status = path.lstat()
    if not is_kind(status.st_mode) or status.st_uid != os.getuid():
        return False
    return not status.st_mode & 0o022


def _version() -> str:
    """Return a digest of MLflow's version and migrations; development copies of a version may differ."""
    import mlflow
    from mlflow.store import db_migrations

    folder = Path(next(iter(db_migrations.__path__))) / "versions"
    migrations = sorted(path.name for path in folder.glob("*.py"))
    text = "\n".join([mlflow.__version__, *migrations])
    return _short_digest(text.encode())


def _short_digest(content: bytes) -> str:
    """Return the first 64 bits of a SHA-256, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:16]


def _read_empty(folder: Path, prefix: str) -> bytes | None:
    """Return the cached empty database whose digest is the one in its name, or None."""
    for path in folder.glob(f"{prefix}*.db"):
        if not _is_users_own(path, stat.S_ISREG):
            continue
        content = read_own(path)
        if path.name == _name(prefix, content):
            return content
    return None


def _make_empty(folder: Path, prefix: str) -> bytes:
    """Make an empty MLflow database, cache it without its experiment, and return its content."""
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        path = Path(place) / "mlflow.db"
        MlflowClient(tracking_uri=f"sqlite:///{path}")
        with (
            contextlib.closing(sqlite3.connect(path)) as original,
            contextlib.closing(sqlite3.connect(":memory:")) as empty,
        ):
            original.backup(empty)
            with empty:
                empty.execute("DELETE FROM experiments")
            empty.execute("VACUUM")  # what was deleted stands in the file until then
            content = empty.serialize()
        for old in folder.glob(f"{prefix}*.db"):
            old.unlink()
    write_whole(folder / _name(prefix, content), content)
    return content


def _name(prefix: str, content: bytes) -> str:
    """Return the file name of a cached database, which holds the content's digest."""
    return f"{prefix}{_short_digest(content)}.db"
