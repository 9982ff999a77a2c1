"""A new MLflow database, copied from one that MLflow made before.

MLflow makes its tables by running every migration it ever had, which takes longer than the training
of small models. They are run once a version: what came out is kept, empty, in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from privtune.files import cache_folder, open_private, private_folder

__all__ = ["begun_at_copy"]


@contextlib.contextmanager
def begun_at_copy(uri: str) -> Iterator[None]:
    """Let MLflow open a store within: where there is none yet, it finds a copy of an empty one.

    The first of its version is made by MLflow itself, and kept for the next. A copy that is damaged
    does not count, and one that cannot be kept or put into place is none. MLflow compares the
    revision of what it finds with its own.

    Args:
        uri: The tracking URI; nothing is done but for a SQLite file that is not there.
    """
    path, folder = _file(uri), cache_folder()
    if path is None or folder is None or path.exists():
        yield
        return
    prefix = f"mlflow-{_version()}-"
    copied = _put(path, folder, prefix)
    yield
    if not copied:
        with contextlib.suppress(OSError, sqlite3.Error):
            _keep(path, folder, prefix)


def _file(uri: str) -> Path | None:
    """Return the file of a SQLite database without options."""
    start, _, path = uri.partition(":///")
    return None if start != "sqlite" or path in ("", ":memory:") or "?" in path else Path(path)


def _version() -> str:
    """Return a digest of MLflow's version and of its migrations: of two checkouts they may differ."""
    import mlflow
    from mlflow.store import db_migrations

    versions = Path(next(iter(db_migrations.__path__))) / "versions"
    names = sorted(path.name for path in versions.glob("*.py"))
    return hashlib.sha256("\n".join([mlflow.__version__, *names]).encode()).hexdigest()[:16]


def _put(path: Path, folder: Path, prefix: str) -> bool:
    """Copy a kept database that is what its name says to where one is missing."""
    beside = path.with_name(f"{path.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        for kept in folder.glob(f"{prefix}*.db"):
            content = kept.read_bytes()
            if kept.name != _name(prefix, content):
                continue
            try:
                beside.write_bytes(content)
                os.link(beside, path)  # whole or not at all, and never over one that is there
            finally:
                beside.unlink(missing_ok=True)
            return True
    return False


def _keep(path: Path, folder: Path, prefix: str) -> None:
    """Keep a new database without its experiment, which says where it lies."""
    with (
        contextlib.closing(sqlite3.connect(path)) as made,
        contextlib.closing(sqlite3.connect(":memory:")) as empty,
    ):
        made.backup(empty)
        with empty:
            empty.execute("DELETE FROM experiments")
        empty.execute("VACUUM")  # what was deleted stands in the file until then
        content = empty.serialize()
    private_folder(folder)
    for old in folder.glob(f"{prefix}*.db"):
        old.unlink()
    name = _name(prefix, content)
    beside = folder / f"{name}-{os.getpid()}"
    with open_private(beside, "wb", None) as file:
        file.write(content)
    beside.replace(folder / name)


def _name(prefix: str, content: bytes) -> str:
    return f"{prefix}{hashlib.sha256(content).hexdigest()[:16]}.db"
