"""The identity of a store, which tells it from its copies: an id, and the place where it was made.

A copied database is sound in itself, and knows nothing of what the original is charged from then on: two
purses for one budget. So a store notes its *home*, and whoever opens it anywhere else has a copy, which
can be read, verified and exported, and nothing more before it is restored: with an id of its own.

What a home can tell, and what it cannot:

- A file that was renamed, or moved with its folder on one file system, keeps its number there (inode): it is
  the store itself. ``cp``, ``rsync``, an archive that is unpacked, and a move to another file system make
  another file: these are copies, also where nothing is left of the original.
- The number of a device may change when a machine starts; the file's number at the same path then decides.
- A file system that renumbers its files (FUSE, 9p, shared folders of virtual machines) leaves the path alone
  to go by: a moved file is a copy there.
- A machine without an id of its own (``/etc/machine-id``), as many containers, is not told from others, and
  neither are machines that share a network's file system.
- A database of PostgreSQL is told by the number of its cluster, of the database and of the table:
  ``pg_dump`` carries none of them. A whole cluster that is copied byte by byte is not told.
- A disk, or a machine, that is set back to an earlier state is the same store with a gap. The heads noted
  beside a SQLite file tell unless they were set back, too; a certificate kept by others always does.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.ledger.errors import SENSELESS, LedgerCorruptedError
from privtune.ledger.schema import stores

REMOTE = ("nfs", "cifs", "smb", "afs", "lustre", "gluster", "ceph", "fuse.sshfs", "fuse.s3")
"""File systems of a network: several machines see one file."""

UNSURE = ("9p", "fuse", "vboxsf", "drvfs", "virtiofs")
"""File systems of which it is not known whether locks hold and files keep their numbers."""

_MACHINE = Path("/etc/machine-id")
_POSTGRESQL = sa.text(
    "SELECT (SELECT system_identifier::text FROM pg_control_system()) AS cluster, "
    "(SELECT oid::bigint FROM pg_database WHERE datname = current_database()) AS database, "
    "'privtune_store'::regclass::oid::bigint AS number, current_database() AS name"
)


@dataclass(frozen=True)
class Home:
    """The place of a store: machine, device, file and path, or cluster and database.

    Attributes:
        machine: A digest of the machine's id, or a cluster's number; empty where it says nothing.
        device: The number of the file system, or of PostgreSQL's database.
        number: The file's number there (inode), or the table's; 0 where it says nothing.
        place: The file's path, or the database's name, for people; it decides where numbers do not.
        copied: Whether this is in a copy that was made as one: then it is the original's home.
    """

    machine: str
    device: int
    number: int
    place: str
    copied: bool = False

    def is_home_of(self, home_in_store: Home) -> bool:
        """Return whether this is the place that a store (a ledger's database) notes as its own."""
        is_same_machine = self.machine == home_in_store.machine
        is_same_number = self.number == home_in_store.number
        if home_in_store.copied:
            return False
        if not is_same_machine or not is_same_number:
            return False
        is_same_place = self.place == home_in_store.place
        if self.number == 0:
            return is_same_place
        return is_same_place or self.device == home_in_store.device

    def to_json(self) -> str:
        """Return a store's place as JSON text, in the form that the store itself notes."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Home:
        """Return the place that a JSON text of a store describes.

        Raises:
            ValueError: The text is none of a home.
        """
        document = json.loads(text)
        home = cls(**document)
        for field in fields(cls):
            value = getattr(home, field.name)
            if type(value).__name__ != field.type:
                raise ValueError(field.name)
        return home


@dataclass(frozen=True)
class Identity:
    """A store's id, the id of the store that it was restored from, and its home."""

    uid: str
    origin: str
    home: Home


def new_identity(home: Home) -> Identity:
    """Return the identity of a new store: a random id, and its home."""
    return Identity(uuid.uuid4().hex, "", home)


def restored_identity(before: Identity, home: Home) -> Identity:
    """Return the identity of a store that is restored from a copy.

    Args:
        before: What the copy says of itself, which is the original's identity.
        home: Where the copy is.

    A restoration that is stopped and begun again gives the same id, so that it finds the files that it has
    copied. Two copies are two files, so they get two ids.
    """
    words = [
        before.uid,
        before.home.to_json(),
        home.to_json(),
    ]
    uid = _short_digest(json.dumps(words), 32)
    return Identity(uid, before.uid, home)


def _short_digest(text: str, length: int) -> str:
    """Return the first hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def read_identity(connection: Connection) -> Identity:
    """Read a store's identity from its database.

    Raises:
        LedgerCorruptedError: It says nothing that makes sense.
    """
    rows = connection.execute(sa.select(stores)).all()
    try:
        [row] = rows
        home = Home.from_json(row.home)
        return Identity(str(row.uid), str(row.origin), home)
    except SENSELESS as error:
        raise LedgerCorruptedError(
            f"table {stores.name} is damaged: it must hold one row, the store's id and home. Restore "
            "the database from a copy."
        ) from error


def write_identity(connection: Connection, identity: Identity) -> None:
    """Replace a store's identity in its database."""
    values = {
        "uid": identity.uid,
        "origin": identity.origin,
        "home": identity.home.to_json(),
    }
    connection.execute(sa.delete(stores))
    connection.execute(sa.insert(stores).values(values))


def note_home(connection: Connection, home: Home) -> None:
    """Update the home that a store notes, after a move or a change of the device's number."""
    connection.execute(sa.update(stores).values(home=home.to_json()))


def home_of_file(path: Path, home_in_store: Home | None = None) -> Home:
    """Return the home of a SQLite file.

    Args:
        path: The file.
        home_in_store: The home that the store in it notes: what it says nothing of is left out, too, so
            that the two can be compared.
    """
    place = path.resolve()
    status = place.stat()
    if home_in_store is None:
        kind = file_system(place.parent)
        tells_machine = not kind.startswith(REMOTE)
        tells_number = not kind.startswith(UNSURE)
    else:
        tells_machine = home_in_store.machine != ""
        tells_number = home_in_store.number != 0
    machine = _machine() if tells_machine else ""
    number = status.st_ino if tells_number else 0
    return Home(machine, status.st_dev, number, str(place))


def home_of_database(connection: Connection) -> Home:
    """Return the home of PostgreSQL's database behind a connection."""
    row: Any = connection.execute(_POSTGRESQL).one()
    return Home(row.cluster, row.database, row.number, row.name)


def _machine() -> str:
    """Return a short digest of this machine's secret id, or an empty text if there is no id."""
    try:
        text = _MACHINE.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return _short_digest(f"privtune {text}", 16) if text else ""


def file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on, or an empty text if it is unknown."""
    import psutil

    here = folder.resolve()
    partitions = psutil.disk_partitions(all=True)
    kinds: dict[Path, str] = {
        Path(partition.mountpoint): partition.fstype for partition in partitions
    }
    for path in (here, *here.parents):
        if path in kinds:
            return kinds[path]
    return ""
