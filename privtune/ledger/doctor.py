"""Checks of what the ledger's guarantee rests on outside of the program: files, disks, settings."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.errors import PrivTuneError
from privtune.files import (
    create_private,
    folder_problem,
    is_private_group,
    open_append,
    shared_group,
    store_problem,
)
from privtune.ledger.backups import DRAFT
from privtune.ledger.identity import REMOTE, UNSURE, file_system
from privtune.ledger.places import STORE, checked_url, database_path
from privtune.ledger.schema import HEAD, arms, blobs, entries, failures, rounds, tasks
from privtune.ledger.storage import Storage, schema_version

_FORGOTTEN = ("tmpfs", "ramfs")  # by the next start of the machine

_SKEW = 5.0  # seconds: a third of a lease
_LITTLE = 1.0  # GiB; a full disk stops a study, and loses nothing
_CLOCK = "SELECT extract(epoch FROM clock_timestamp())"
_GRANTS = """
SELECT relname AS table_name, COALESCE(rolname, 'PUBLIC') AS grantee
FROM pg_class CROSS JOIN LATERAL aclexplode(relacl) AS grants
LEFT JOIN pg_roles ON pg_roles.oid = grants.grantee
WHERE relnamespace = current_schema()::regnamespace AND relname = ANY(:tables)
AND privilege_type = 'SELECT' AND grants.grantee <> relowner
ORDER BY relname
"""


@dataclass(frozen=True)
class Check:
    """The result of one check: its name, its state, and a sentence.

    Attributes:
        name: What it is, in a word.
        state: ``"ok"``, ``"warn"`` or ``"fail"``.
        says: A sentence, which ends with what to do where something is wrong.
    """

    name: str
    state: str
    says: str

    def to_dict(self) -> dict[str, str]:
        """Return the check as JSON-ready data."""
        return asdict(self)


def check_machine() -> Iterator[Check]:
    """Yield checks of the version of Python and of the variable ``PRIVTUNE_CURATOR``."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", "ok", f"Python {python}, SQLite {sqlite3.sqlite_version}.")
    if os.environ.get("PRIVTUNE_CURATOR", "") not in ("", "0"):
        says = "PRIVTUNE_CURATOR is set: sealed trials are shown to whoever sees this terminal."
        yield Check("curator", "warn", says)


def check_storage(url: str) -> Iterator[Check]:
    """Yield checks of a ledger's database, whose files are made private when it is opened.

    Args:
        url: The storage's URL, or the path of a SQLite file.

    Yields:
        What was looked at, up to the first thing without which nothing else can be.
    """
    try:
        path = database_path(checked_url(url))
        if path is not None:
            yield from _surroundings(path)
            if not path.exists():
                says = f"There is no {path} yet, so nothing was checked in it."
                yield Check("database", "warn", says)
                return
            yield _heads(path)
            for draft in sorted(path.parent.glob(f"{DRAFT}*")):
                says = f"{draft} is left from a backup. If no backup is running, remove it."
                yield Check("backup", "warn", says)
        with closing(Storage(url, patience=5)) as storage:
            yield from _database(storage)
            if path is not None:
                yield _permissions(path)
    except PrivTuneError as error:
        yield Check("database", "fail", str(error))


def _surroundings(path: Path) -> Iterator[Check]:
    """Yield checks of the folder and the disk of a SQLite file, which need not exist yet."""
    yield _file_system(path.parent)
    yield _writers(path)
    yield _durable(path.parent)
    free = shutil.disk_usage(path.parent).free / 2**30
    state = "ok" if free >= _LITTLE else "warn"
    yield Check("disk", state, f"{free:.1f} GiB are free in {path.parent}.")


def _heads(path: Path) -> Check:
    """Check that the hashes of the logs' last entries are noted beside a SQLite file."""
    heads = Path(f"{path}-heads")
    if heads.is_file():
        return Check("heads", "ok", f"{heads} holds the hash of each log's last entry.")
    says = f"There is no {heads}, so missing log entries cannot be noticed before the next charge."
    return Check("heads", "warn", says)


def _permissions(path: Path) -> Check:
    """Check that only its owner can read a SQLite file and the files beside it."""
    readable = []
    for end in STORE:
        file = Path(f"{path}{end}")
        if file.exists() and _open(file):
            readable.append(str(file))
    if readable:
        files = " ".join(readable)
        says = f"Other users can read secrets, losing scores and times. Run: chmod go= {files}"
        return Check("permissions", "fail", says)
    says = f"Only their owner can read {path} and the files beside it."
    return Check("permissions", "ok", says)


def check_artifacts(root: Path) -> Check:
    """Check that only its owner can enter the folder for models and sealed trials.

    Args:
        root: The folder, which need not exist yet.
    """
    if not root.is_dir():
        return Check("artifacts", "ok", f"{root} will be created at the first release.")
    problem = folder_problem(root)
    if problem is not None:
        return Check("artifacts", "fail", problem)
    group = shared_group(root)
    if group is not None:
        return Check("artifacts", "ok", f"{root} is shared with the group {group}, as declared.")
    folders = []
    for child in root.iterdir():
        if child.is_dir() and child.name != "mlflow":
            folders.append(child)
    for folder in folders:
        problem = folder_problem(folder)
        if problem is not None:
            return Check("artifacts", "fail", problem)
    open_folders = []
    if _open(root):  # in a closed folder it does not matter what those inside of it allow
        open_folders = [folder for folder in folders if _open(folder)]
    if open_folders:
        says = f"Other users can read secret trials in {open_folders[0]}. Run: chmod -R go= {root}"
        return Check("artifacts", "fail", says)
    says = f"Only their owner can enter the folders of studies in {root}."
    return Check("artifacts", "ok", says)


def _database(storage: Storage) -> Iterator[Check]:
    """Yield checks of a database's schema, and of the settings that make a commit durable."""
    if storage.dialect == "sqlite":
        query = "PRAGMA {}"
        required: dict[str, object] = {
            "journal_mode": "wal",
            "synchronous": 2,
            "secure_delete": 1,
        }
        keys = list(required)
    else:
        query = "SHOW {}"
        required = {
            "fsync": "on",
            "full_page_writes": "on",
        }
        keys = [*required, "synchronous_commit"]
    settings: dict[str, object] = {}
    with storage.read() as connection:
        version = schema_version(connection)
        if storage.dialect != "sqlite":
            yield from _server(connection)
        for key in keys:
            question = sa.text(query.format(key))
            settings[key] = connection.execute(question).scalar()
    if version is None:
        yield Check("schema", "warn", f"{storage.safe_url} holds no ledger yet.")
    elif version != HEAD:
        says = f"The ledger has schema {version}, but this version of PrivTune needs schema {HEAD}."
        yield Check("schema", "fail", says)
    else:
        yield Check("schema", "ok", f"{storage.safe_url} holds a ledger of schema {HEAD}.")
    listing = ", ".join(f"{key} = {value}" for key, value in settings.items())
    wrong = []
    for key, value in required.items():
        if settings[key] != value:
            wrong.append(f"{key} must be {value}")
    if settings.get("synchronous_commit") == "off":
        wrong.append("synchronous_commit must not be off")
    if wrong:
        says = f"After a power failure spent ε may be lost ({listing}): {'; '.join(wrong)}."
        yield Check("settings", "fail", says)
    else:
        yield Check(
            "settings",
            "ok",
            f"Every commit is written to the disk before the program goes on ({listing}).",
        )


def _server(connection: Connection) -> Iterator[Check]:
    """Yield checks of a PostgreSQL server: its version, its clock, and who can read sealed tables."""
    server = connection.execute(sa.text("SHOW server_version")).scalar()
    role = connection.execute(sa.text("SELECT current_user")).scalar()
    yield Check("database", "ok", f"PostgreSQL {server}, as role {role}.")
    before = time.time()
    server_time = float(connection.execute(sa.text(_CLOCK)).scalar_one())
    after = time.time()
    # What the answer's way may explain is not skew.
    skew = max(before - server_time, server_time - after, 0.0)
    says = f"The database's clock differs from this machine's by {skew:.1f} s"
    if skew > _SKEW:
        says += ". Leases of workers use the database's clock; dates in certificates use this machine's."
        yield Check("clock", "warn", says)
    else:
        yield Check("clock", "ok", f"{says} at most.")
    tables = (entries, rounds, tasks, arms, blobs, failures)
    sealed = [table.name for table in tables]
    granted = connection.execute(sa.text(_GRANTS), {"tables": sealed}).all()
    readers = sorted({row.grantee for row in granted})
    if "PUBLIC" in readers:
        says = f"Every role can read seeds and losing scores: REVOKE ALL ON {granted[0].table_name} ..."
        yield Check("privileges", "fail", f"{says} FROM PUBLIC, and so on for {', '.join(sealed)}.")
    elif readers:
        roles = ", ".join(readers)
        says = (
            f"These roles can read secret trials, so they are inside the trust boundary: {roles}."
        )
        yield Check("privileges", "warn", says)
    else:
        yield Check("privileges", "ok", "Only their owner and superusers can read secret trials.")


def _writers(path: Path) -> Check:
    """Check that no other user can put files beside a database, where SQLite would read them."""
    folder = path.parent
    problem = store_problem(path)
    if problem is not None:
        return Check("folder", "fail", problem)
    mode = stat.S_IMODE(folder.stat().st_mode)
    is_writable = mode & 0o022
    if is_writable and not is_private_group(folder):
        who = "Other users" if mode & 0o002 else "The folder's group"
        says = f"{who} can put files beside the database. Use a folder of your own, or run: chmod go-w "
        return Check("folder", "warn", f"{says}{folder}")
    says = f"Only its owner can put files beside the database in {folder}."
    return Check("folder", "ok", says)


def _durable(folder: Path) -> Check:
    """Check that a file can be written through to the disk, and measure how long that takes."""
    try:
        path = folder / f".privtune-doctor-{secrets.token_hex(8)}"
        create_private(path)
        try:
            with open_append(path) as file:
                file.write(b"privtune")
                begin = time.perf_counter()
                os.fsync(file.fileno())
                took = time.perf_counter() - begin
        finally:
            path.unlink()
    except OSError as error:
        return Check("fsync", "fail", f"{folder} cannot be written through: {error.strerror}.")
    return Check("fsync", "ok", f"Writing a commit to the disk takes {took * 1e3:.1f} ms.")


def _file_system(folder: Path) -> Check:
    """Check that file locks work and files survive a restart on a folder's file system."""
    kind = file_system(folder)
    clause = f"{folder} is on {kind or 'a file system of its own kind'}"
    if kind.startswith(REMOTE):
        says = f"{clause}, where SQLite's file locks do not work. Use a local disk."
        return Check("file system", "fail", says)
    if kind in _FORGOTTEN:
        says = f"{clause}, which is emptied when the machine restarts: spent ε would be lost. Use a disk."
        return Check("file system", "fail", says)
    if kind.startswith(UNSURE):
        says = f"{clause}. Make sure that file locks work there."
        return Check("file system", "warn", says)
    return Check("file system", "ok", f"{clause}.")


def _open(path: Path) -> bool:
    """Return whether the group or other users have any permission on a path."""
    mode = stat.S_IMODE(path.stat().st_mode)
    return bool(mode & 0o077)
