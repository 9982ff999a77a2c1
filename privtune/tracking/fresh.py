"""A new MLflow database, copied from an empty one that MLflow made for nobody.

MLflow makes its tables by running every migration it ever had, which takes longer than the training
of small models. They are run once a version, on a file of the user's cache folder that no study
ever opens: so nothing of a study can be in what the next one begins with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from privtune.files import cache_folder, open_private, private_folder

_OTHERS = {"alembic_version", "secrets", "spans", "workspaces"}  # tables that hold nothing of a run
_BESIDE = ("-journal", "-wal", "-shm")  # what SQLite would play back into a copy


def begin_at_copy(uri: str) -> None:
    """Where there is no store yet, put a copy of an empty one for MLflow to open.

    A kept copy that is damaged, or that others could have written, does not count; where none can be
    made or put into place, MLflow makes its tables itself. It compares the revision of what it finds
    with its own.

    Args:
        uri: The tracking URI; nothing is done but for a SQLite file that is not there.
    """
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
    """Return the cached empty database if its digest is right, and it holds no run and no trigger."""
    for kept in folder.glob(f"{prefix}*.db"):
        if _own(kept, stat.S_ISREG) and kept.name == _name(prefix, content := kept.read_bytes()):
            return content if _is_empty(content) else None
    return None


def _is_empty(content: bytes) -> bool:
    """Return whether a database holds no run, and no program that changes what is written of one.

    The digest in a file's name finds damage alone: whoever writes another file computes it, too.
    """
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(content)
        made = database.execute("SELECT type, tbl_name FROM sqlite_master").fetchall()
        odd = {table for kind, table in made if kind not in ("table", "index")}
        for table in {table for _, table in made} - odd:
            columns = database.execute("SELECT hidden FROM pragma_table_xinfo(?)", (table,))
            filled = f'SELECT 1 FROM "{table}" LIMIT 1'  # noqa: S608 (of a copy in memory)
            if any(hidden for (hidden,) in columns) or database.execute(filled).fetchone():
                odd.add(table)
    return odd <= _OTHERS


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
