"""The rows of studies: studies, arms, results. They lie beside the ledger's, in its transactions.

Whatever must happen together with a charge's next state takes the connection of that transaction.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from privtune.errors import PrivTuneError
from privtune.files import open_private, private_folder
from privtune.ledger import Ledger
from privtune.ledger.schema import arms, blobs, failures, studies
from privtune.ledger.storage import Storage
from privtune.names import check_text, is_reserved
from privtune.strategies import Plan
from privtune.study._objects import DamagedResultError, ObjectStore

__all__ = [
    "Arm",
    "Results",
    "Staged",
    "StudyExistsError",
    "StudyNotFoundError",
    "StudyRow",
    "StudyStore",
    "write_file",
]

_LARGE = 2**24
"""Bytes above which a result is a file in the study's folder, and its row says so."""


class StudyExistsError(PrivTuneError):
    """A study of this name exists already."""


class StudyNotFoundError(PrivTuneError):
    """There is no study of this name."""


@dataclass(frozen=True)
class StudyRow:
    """A study as it was created.

    Args:
        name: Its name.
        uid: Tells it from another of the same name, before or after it.
        spec: Its spec, JSON-ready.
        root: Absolute folder of files; the study's own is below it.
    """

    name: str
    uid: str
    spec: Mapping[str, Any]
    root: Path

    @property
    def folder(self) -> Path:
        """The study's own folder."""
        return Path(os.environ.get("PRIVTUNE_ARTIFACTS") or self.root).absolute() / self.name


@dataclass(frozen=True)
class Arm:
    """An arm as its row has it; how far its charge is, the ledger says.

    Args:
        plan: Its plan.
        digest: The digest under which its charge is found.
        secret: What everything random in it derives from; ``None`` once it is released.
        release: What is stored of its release beside the model; ``None`` until it is trained.
        announced: Whether observers have heard of the release.
    """

    plan: Plan
    digest: str
    secret: bytes | None
    release: Mapping[str, Any] | None = None
    announced: bool = False


class StudyStore:
    """The rows of the studies in a storage.

    Args:
        storage: The ledger's.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def check_new(self, name: str) -> None:
        """Refuse a name that is taken.

        Raises:
            StudyExistsError: If it is.
        """
        if name in self.names():
            raise _exists(name)

    def create(self, row: StudyRow, planned: Sequence[Arm]) -> None:
        """Store a study with its arms and their secrets, in one transaction.

        Raises:
            StudyExistsError: If the name is taken.
        """
        values = {"name": row.name, "uid": row.uid, "spec": json.dumps(row.spec)}
        with self._storage.write() as connection:
            if not _insert_new(connection, studies, {**values, "root": str(row.root)}):
                raise _exists(row.name)
            for arm in planned:
                self.add_arm(connection, row.name, arm)

    def study(self, name: str) -> StudyRow:
        """Return a study.

        Raises:
            StudyNotFoundError: If there is none of this name.
        """
        check_text(name, "study")
        with self._storage.read() as connection:
            query = sa.select(studies).where(studies.c.name == name)
            row = connection.execute(query).one_or_none()
        if row is None:
            raise StudyNotFoundError(
                f"There is no study named {name!r} in this storage; it holds: "
                f"{', '.join(self.names()) or 'none'}."
            )
        return StudyRow(row.name, row.uid, json.loads(row.spec), Path(row.root))

    def names(self) -> list[str]:
        """Return the names of all studies."""
        return list(self.uids())

    def uids(self) -> dict[str, str]:
        """Return what tells each study from another of its name, by name."""
        query = sa.select(studies.c.name, studies.c.uid).order_by(studies.c.name)
        with self._storage.read() as connection:
            return {row.name: row.uid for row in connection.execute(query)}

    def delete(self, row: StudyRow) -> None:
        """Delete a study's rows and files. Its charges are the ledger's and stay."""
        named = list(self.arms(row.name))
        with self._storage.write() as connection:
            for table in (failures, blobs, arms):
                connection.execute(sa.delete(table).where(table.c.study == row.name))
            connection.execute(sa.delete(studies).where(studies.c.name == row.name))
        if (address := row.spec.get("artifacts")) is not None:
            ObjectStore(address, row.uid).remove_all()
        # A study of an older version may share the folder of something else, or be named like one.
        parts = ("sealed", *named) if is_reserved(row.name) else (".",)
        for place in (Path(os.path.normpath(row.folder / part)) for part in parts):
            if row.folder.parent in place.parents:
                shutil.rmtree(place, ignore_errors=True)

    @staticmethod
    def add_arm(connection: Connection, study: str, arm: Arm) -> Arm:
        """Insert an arm after those that are there, and return it; one that is there stays."""
        count = sa.select(sa.func.count()).select_from(arms).where(arms.c.study == study)
        row = {
            "study": study,
            "name": arm.plan.arm,
            "number": connection.execute(count).scalar_one(),
            "plan": json.dumps(arm.plan.to_dict()),
            "digest": arm.digest,
            "secret": (arm.secret or b"").hex(),
            "announced": 0,
        }
        _insert_new(connection, arms, row)
        there = sa.select(arms).where(*_arm(study, arm.plan.arm))
        return _read_arm(connection.execute(there).one())

    def arms(self, study: str) -> dict[str, Arm]:
        """Return a study's arms by name, in order."""
        with self._storage.read() as connection:
            query = sa.select(arms).where(arms.c.study == study).order_by(arms.c.number)
            rows = connection.execute(query).all()
        return {row.name: _read_arm(row) for row in rows}

    def set_release(self, study: str, arm: str, release: Mapping[str, Any], keep: Any) -> bool:
        """Store an arm's release, with what ``keep`` stores in the transaction; the first one stays.

        Returns:
            Whether this was the first.
        """
        with self._storage.write() as connection:
            moved = connection.execute(
                sa.update(arms)
                .where(*_arm(study, arm), arms.c.release.is_(None))
                .values(release=json.dumps(release))
            )
            if moved.rowcount == 1:
                keep(connection)
            return moved.rowcount == 1

    def forget_secret(self, connection: Connection, study: str, arm: str) -> None:
        """Forget an arm's secret: with it, noise could be drawn again and subtracted."""
        connection.execute(sa.update(arms).where(*_arm(study, arm)).values(secret=""))

    def add_failure(self, study: str, arm: str, text: str) -> None:
        """Keep what stopped an arm."""
        row = {"id": uuid.uuid4().hex, "study": study, "arm": arm, "traceback": text}
        with self._storage.write() as connection:
            connection.execute(sa.insert(failures), {**row, "time": time.time()})

    def failures(self, study: str, arm: str) -> list[dict[str, Any]]:
        """Return what stopped an arm, the latest last."""
        query = sa.select(failures.c.time, failures.c.traceback).order_by(failures.c.time)
        with self._storage.read() as connection:
            found = query.where(failures.c.study == study, failures.c.arm == arm)
            return [dict(row._mapping) for row in connection.execute(found)]

    def set_announced(self, study: str, arm: str) -> None:
        """Note that observers have heard of a release."""
        with self._storage.write() as connection:
            connection.execute(sa.update(arms).where(*_arm(study, arm)).values(announced=1))


@dataclass(frozen=True)
class Staged:
    """A result on its way into its row: in the row itself, in an object, or for a file."""

    content: bytes
    place: str | None
    large: bool


class Results:
    """What a study's trainings produced, by the path that it has, or would have, in its folder.

    Small results are in the database, so that whoever reaches that reaches them; large ones in the
    study's object store if it has one, else in its folder, whose place is in the database. The first
    result of a name stays.

    Args:
        storage: The ledger's.
        row: The study.
        within: A folder of it, for names that are given without.
    """

    def __init__(self, storage: Storage, row: StudyRow, within: str = "") -> None:
        self._storage, self._row, self._within = storage, row, within
        address = row.spec.get("artifacts")
        self._objects = None if address is None else ObjectStore(address, row.uid)

    def within(self, folder: str) -> Results:
        """Return the results in a folder of the study."""
        return Results(self._storage, self._row, f"{folder}/")

    @property
    def folder(self) -> Path:
        """Where files of these results are, if there are any."""
        return self._row.folder / self._within

    def check(self) -> None:
        """Try the object store, if there is one.

        Raises:
            PrivTuneError: If it cannot be written, read and cleared from here.
        """
        if self._objects is not None:
            self._objects.check()

    def put(
        self,
        name: str,
        content: bytes,
        connection: Connection | None = None,
        *,
        replace: bool = False,
    ) -> None:
        """Store a result, unless there is one of this name that is not to be replaced."""
        staged = self.stage(name, content)
        if connection is not None:
            self.insert(name, staged, connection, replace=replace)
            return
        with self._storage.write() as own:
            self.insert(name, staged, own, replace=replace)

    def stage(self, name: str, content: bytes) -> Staged:
        """Bring a large result to its object, so that no transaction waits for that."""
        large = len(content) > _LARGE
        if not large or self._objects is None:
            return Staged(content, None, large)
        folder = self._object_folder
        return Staged(
            b"", self._objects.put(content, identity=self._within + name, folder=folder), large
        )

    def insert(
        self, name: str, staged: Staged, connection: Connection, *, replace: bool = False
    ) -> None:
        """Store what was staged; what it takes the place of, or what came second, is deleted."""
        row = {"study": self._row.name, "name": self._within + name}
        values = {"data": None if staged.large else staged.content, "place": staged.place}
        stored = _insert_new(connection, blobs, {**row, **values})
        if replace and not stored:
            before = sa.select(blobs.c.place).where(*self._mine(name))
            old = connection.execute(before).scalar_one()
            connection.execute(sa.update(blobs).where(*self._mine(name)).values(values))
            self._drop(old)
            stored = True
        if not stored:
            self._drop(staged.place)
        elif staged.large and staged.place is None:
            write_file(self.folder / name, staged.content)

    def discard(self, name: str, staged: Staged) -> None:
        """Delete what was staged and came second; not what came first after all, and was asked twice."""
        place = sa.select(blobs.c.place).where(*self._mine(name))
        with self._storage.read() as connection:
            stands = connection.execute(place).scalar_one_or_none()
        if staged.place != stands:
            self._drop(staged.place)

    def _drop(self, place: str | None) -> None:
        if place is not None and self._objects is not None:
            self._objects.remove(place)

    def get(self, name: str) -> bytes | None:
        """Return a result, ``None`` if there is none.

        Raises:
            DamagedResultError: If its object is not what was stored.
            PrivTuneError: If it is a large one, and its file or object is not to be reached from here.
        """
        query = sa.select(blobs.c.data, blobs.c.place).where(*self._mine(name))
        with self._storage.read() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        if row.data is not None:
            return bytes(row.data)
        if row.place is not None and self._objects is not None:
            return self._objects.get(row.place, identity=self._within + name)
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            raise PrivTuneError(
                f"A model of study {self._row.name!r} is too large for the database, and it is not in "
                f"{self.folder}. Work where that folder is, or say where its files are: "
                "PRIVTUNE_ARTIFACTS=FOLDER."
            ) from None

    def find(self, name: str) -> bytes | None:
        """Return a result, ``None`` if there is none, or if its object was lost: then there is none."""
        try:
            return self.get(name)
        except DamagedResultError:
            with self._storage.write() as connection:
                self.lose(name, connection)
            return None

    def lose(self, name: str, connection: Connection) -> None:
        """Forget a result whose object turned out to be damaged."""
        place = sa.select(blobs.c.place).where(*self._mine(name))
        self._drop(connection.execute(place).scalar_one_or_none())
        connection.execute(sa.delete(blobs).where(*self._mine(name)))

    def adopt(self, pattern: str) -> None:
        """Store what versions before kept in files beside the rows, as results of their names."""
        for path in self.folder.glob(pattern):
            self.put(path.name, path.read_bytes())
            path.unlink()

    def names(self) -> list[str]:
        """Return the names of the results in this folder, in order."""
        with self._storage.read() as connection:
            found = connection.scalars(sa.select(blobs.c.name).where(*self._all()))
            return sorted(name.removeprefix(self._within) for name in found)

    def forget(self, connection: Connection) -> None:
        """Delete the results in this folder, and the folder: whole, a worker may have left a part."""
        connection.execute(sa.delete(blobs).where(*self._all()))
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._objects is not None:
            self._objects.remove_all(self._object_folder)

    @property
    def _object_folder(self) -> str:
        """A folder of objects for each of results; a store need not know the names of arms."""
        return hashlib.sha256(self._within.encode()).hexdigest()[:16]

    def _mine(self, name: str) -> tuple[sa.ColumnElement[bool], ...]:
        return blobs.c.study == self._row.name, blobs.c.name == self._within + name

    def _all(self) -> tuple[sa.ColumnElement[bool], ...]:
        start = sa.func.substr(blobs.c.name, 1, len(self._within))
        return blobs.c.study == self._row.name, start == self._within


def study_names(url: str) -> list[str]:
    """Return the names of the studies in a storage.

    Args:
        url: Database URL of studies and budgets.

    Example:
        >>> study_names(study.storage)
        ['shown']
    """
    with Ledger(url) as ledger:
        return StudyStore(ledger.log.storage).names()


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, and for its owner alone."""
    private_folder(path.parent)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    with open_private(partial, "wb", None) as file:
        file.write(content)
    partial.replace(path)


def _read_arm(row: sa.Row[Any]) -> Arm:
    return Arm(
        Plan.from_dict(json.loads(row.plan)),
        row.digest,
        bytes.fromhex(row.secret) or None,
        None if row.release is None else json.loads(row.release),
        bool(row.announced),
    )


def _insert_new(connection: Connection, table: sa.Table, row: Mapping[str, Any]) -> bool:
    """Insert a row unless there is one of this key; return whether it was inserted."""
    insert: Any = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = insert(table).values(row).on_conflict_do_nothing()
    done = connection.execute(statement, execution_options={"preserve_rowcount": True})
    return done.rowcount == 1


def _exists(name: str) -> StudyExistsError:
    return StudyExistsError(
        f"A study named {name!r} exists already in this storage. Choose another name, or "
        f"go on with it: privtune study run {name} (in Python: privtune.load_study)."
    )


def _arm(study: str, arm: str) -> tuple[sa.ColumnElement[bool], ...]:
    return arms.c.study == study, arms.c.name == arm
