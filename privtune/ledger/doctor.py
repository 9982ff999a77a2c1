"""Looks at what the ledger's guarantee rests on outside of the program: files, disks, settings."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.errors import PrivTuneError
from privtune.ledger.backups import DRAFT
from privtune.ledger.places import STORE, checked_url, database_path
from privtune.ledger.schema import HEAD, arms, blobs, entries, failures, rounds, tasks
from privtune.ledger.storage import Storage, schema_version

# SQLite's locks do not hold there, or nobody knows; and what the next start forgets.
_REMOTE = ("nfs", "cifs", "smb", "afs", "lustre", "gluster", "ceph", "fuse.sshfs", "fuse.s3")
_UNSURE = ("9p", "fuse", "vboxsf", "drvfs", "virtiofs")
_FORGOTTEN = ("tmpfs", "ramfs")

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
    """One thing that was looked at."""

    name: str
    state: str
    says: str

    def to_dict(self) -> dict[str, str]:
        """Return it ready for JSON."""
        return asdict(self)


def check_machine() -> Iterator[Check]:
    """Look at Python and the environment."""
    found = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", "ok", f"Python {found}, SQLite {sqlite3.sqlite_version}.")
    if os.environ.get("PRIVTUNE_CURATOR", "") not in ("", "0"):
        says = "PRIVTUNE_CURATOR is set: sealed trials are shown to whoever sees this terminal."
        yield Check("curator", "warn", says)


def check_storage(url: str) -> Iterator[Check]:
    """Look at a ledger's database; opening it sets its journal mode, and takes it away from others."""
    try:
        path = database_path(checked_url(url))
        if path is not None:
            yield _file_system(path.parent)
            yield _durable(path.parent)
            free = shutil.disk_usage(path.parent).free / 2**30
            state = "ok" if free >= _LITTLE else "warn"
            yield Check("disk", state, f"{free:.1f} GiB are free in {path.parent}.")
            if not path.exists():
                yield Check("database", "warn", f"There is no {path} yet: nothing to look at.")
                return
            if (heads := Path(f"{path}-heads")).is_file():
                yield Check("heads", "ok", f"Heads of the logs are noted in {heads}.")
            else:
                says = f"There is no {heads}: whether entries are missing cannot be told before the next"
                yield Check("heads", "warn", f"{says} charge.")
            for draft in sorted(path.parent.glob(f"{DRAFT}*")):
                says = f"{draft} is of a backup that runs or was killed: remove it if none runs."
                yield Check("backup", "warn", says)
        with closing(Storage(url, patience=5)) as storage:
            yield from _database(storage)
            if path is not None:
                files = [file for end in STORE if (file := Path(f"{path}{end}")).exists()]
                wrong = " ".join(str(file) for file in files if _open(file))
                says = f"{path} and what lies beside it are their owner's."
                if wrong:
                    says = f"Others may read secrets, losing scores and times: chmod go= {wrong}"
                yield Check("permissions", "fail" if wrong else "ok", says)
    except PrivTuneError as error:
        yield Check("database", "fail", str(error))


def check_artifacts(root: Path) -> Check:
    """Look at the folder for models and sealed trials: only its owner may enter it."""
    if not root.is_dir():
        return Check("artifacts", "ok", f"{root} is made when something is released.")
    inside = [child for child in root.iterdir() if child.is_dir() and child.name != "mlflow"]
    open_ones = [path for path in inside if _open(path)] if _open(root) else []
    if not open_ones:
        return Check("artifacts", "ok", f"Nobody else may enter the studies' folders in {root}.")
    says = f"Others may read sealed trials in {open_ones[0]}: chmod -R go= {root}"
    return Check("artifacts", "fail", says)


def _database(storage: Storage) -> Iterator[Check]:
    sqlite = storage.dialect == "sqlite"
    wanted: dict[str, object] = {"fsync": "on", "full_page_writes": "on"}
    if sqlite:
        wanted = {"journal_mode": "wal", "synchronous": 2, "secure_delete": 1}
    with storage.read() as connection:
        version = schema_version(connection)
        if not sqlite:
            yield from _server(connection)
        query = "PRAGMA {}" if sqlite else "SHOW {}"
        asked = list(wanted) if sqlite else [*wanted, "synchronous_commit"]
        found = {key: connection.execute(sa.text(query.format(key))).scalar() for key in asked}
    if version is None:
        yield Check("schema", "warn", f"{storage.safe_url} holds no ledger yet.")
    elif version != HEAD:
        says = f"The ledger has schema {version}, and this program works on schema {HEAD} alone."
        yield Check("schema", "fail", says)
    else:
        yield Check("schema", "ok", f"{storage.safe_url} holds a ledger of schema {HEAD}.")
    shown = ", ".join(f"{key} = {value}" for key, value in found.items())
    wrong = [f"{key} must be {value}" for key, value in wanted.items() if found[key] != value]
    if found.get("synchronous_commit") == "off":
        wrong.append("synchronous_commit must not be off")
    if wrong:
        says = f"A power failure may forget what was spent ({shown}): {'; '.join(wrong)}."
        yield Check("settings", "fail", says)
    else:
        yield Check("settings", "ok", f"A commit is on the disk when it returns ({shown}).")


def _server(connection: Connection) -> Iterator[Check]:
    """Look at a PostgreSQL server: its version, its clock beside ours, and who else may read."""
    server = connection.execute(sa.text("SHOW server_version")).scalar()
    role = connection.execute(sa.text("SELECT current_user")).scalar()
    yield Check("database", "ok", f"PostgreSQL {server}, as role {role}.")
    before = time.time()
    there = float(connection.execute(sa.text(_CLOCK)).scalar_one())
    after = time.time()
    # What the answer's way may explain is not skew.
    skew = max(before - there, there - after, 0.0)
    says = f"The database's clock differs from this machine's by {skew:.1f} s"
    if skew > _SKEW:
        says += "; leases go by the database's, the days in certificates by this one's."
        yield Check("clock", "warn", says)
    else:
        yield Check("clock", "ok", f"{says} at most.")
    sealed = [table.name for table in (entries, rounds, tasks, arms, blobs, failures)]
    granted = connection.execute(sa.text(_GRANTS), {"tables": sealed}).all()
    readers = sorted({row.grantee for row in granted})
    if "PUBLIC" in readers:
        says = f"Every role may read seeds and losing scores: REVOKE ALL ON {granted[0].table_name} ..."
        yield Check("privileges", "fail", f"{says} FROM PUBLIC, and so on for {', '.join(sealed)}.")
    elif readers:
        says = f"Inside the trust boundary, since they may read sealed rows: {', '.join(readers)}."
        yield Check("privileges", "warn", says)
    else:
        yield Check("privileges", "ok", "Only their owner and superusers may read sealed rows.")


def _durable(folder: Path) -> Check:
    """Write a file through to the disk, as every commit does."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"privtune")
            file.flush()
            begin = time.perf_counter()
            os.fsync(file.fileno())
            took = time.perf_counter() - begin
    except OSError as error:
        return Check("fsync", "fail", f"{folder} cannot be written through: {error.strerror}.")
    return Check("fsync", "ok", f"Writing through to the disk takes {took * 1e3:.1f} ms.")


def _file_system(folder: Path) -> Check:
    kind = file_system(folder)
    state, says = "ok", "."
    if kind.startswith(_REMOTE):
        state, says = "fail", ", where SQLite's locks do not hold: use a local disk."
    elif kind in _FORGOTTEN:
        state, says = "fail", ": the next start of the machine forgets what was spent."
    elif kind.startswith(_UNSURE):
        state, says = "warn", ": make sure that locks of files hold there."
    on = f"{folder} is on {kind or 'a file system of its own kind'}"
    return Check("file system", state, f"{on}{says}")


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on; nothing where that is not known."""
    import psutil

    here = folder.resolve()
    mounts = {Path(p.mountpoint): p.fstype for p in psutil.disk_partitions(all=True)}
    return next((mounts[path] for path in (here, *here.parents) if path in mounts), "")


def _open(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)
