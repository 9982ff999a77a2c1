"""The results of a study: what its trainings produced, in rows, objects and files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.errors import PrivTuneError
from privtune.files import open_private
from privtune.ledger.schema import blobs
from privtune.ledger.storage import Storage
from privtune.study._objects import DamagedResultError, ObjectStore
from privtune.study._rows import StudyRow, check_there, insert_new

_LARGE = 2**24
"""Bytes above which a result is a file in the study's folder, and its row says so."""
_ASKED = 500  # names that are asked for in one statement


@dataclass(frozen=True)
class Staged:
    """A result on its way into its row: for the row itself, in an object, or in a file under another name."""

    content: bytes | None = None
    place: str | None = None
    file: Path | None = None


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
        self._files = row.files
        address = row.spec.get("artifacts")
        self._objects = None if address is None else ObjectStore(address, row.uid)

    def within(self, folder: str) -> Results:
        """Return the results in a folder of the study."""
        return Results(self._storage, self._row, f"{folder}/")

    @property
    def folder(self) -> Path:
        """Where files of these results are, if there are any."""
        return self._files.path / self._within

    def check(self) -> None:
        """Try the object store, if there is one.

        Raises:
            PrivTuneError: If it cannot be written, read and cleared from here.
        """
        if self._objects is not None:
            self._objects.check()

    def put(self, name: str, content: bytes, *, replace: bool = False) -> None:
        """Store a result, unless there is one of this name that is not to be replaced."""
        staged = self.stage(name, content)
        try:
            with self._storage.write() as connection:
                self.insert(name, staged, connection, replace=replace)
        except PrivTuneError:  # as of a study that was deleted
            self.discard(name, staged)
            raise

    def stage(self, name: str, content: bytes) -> Staged:
        """Bring a large result to its object or file, so that no transaction waits for that."""
        if len(content) <= _LARGE:
            return Staged(content)
        if self._objects is None:
            file = self._files.file(f"{self._within}{name}.staged-{uuid.uuid4().hex}")
            with open_private(file, "wb", None) as staged:
                staged.write(content)
                staged.flush()
                os.fsync(staged.fileno())  # its row will be on the disk when it is committed
            return Staged(file=file)
        folder, identity = self._object_folder, self._within + name
        return Staged(place=self._objects.put(content, identity=identity, folder=folder))

    def insert(
        self, name: str, staged: Staged, connection: Connection, *, replace: bool = False
    ) -> None:
        """Store what was staged; what it takes the place of, or what came second, is deleted.

        It may be asked twice: by whoever does not know whether the first transaction was committed.

        Raises:
            PrivTuneError: If the study was deleted.
        """
        check_there(connection, self._row)
        row = {"study": self._row.name, "name": self._within + name}
        values = {"data": staged.content, "place": staged.place}
        stored = insert_new(connection, blobs, {**row, **values})
        if replace and not stored:
            before = sa.select(blobs.c.place).where(*self._mine(name))
            old = connection.execute(before).scalar_one()
            connection.execute(sa.update(blobs).where(*self._mine(name)).values(values))
            self._drop(Staged(place=old))
            stored = True
        if not stored:
            self._drop(staged)
        elif staged.file is not None and staged.file.exists():
            staged.file.replace(self._files.file(self._within + name))

    def discard(self, name: str, staged: Staged) -> None:
        """Delete what was staged and came second; not what came first after all, and was asked twice."""
        place = sa.select(blobs.c.place).where(*self._mine(name))
        with self._storage.read() as connection:
            stands = connection.execute(place).scalar_one_or_none()
        if staged.place is None or staged.place != stands:
            self._drop(staged)

    def _drop(self, staged: Staged) -> None:
        if staged.place is not None and self._objects is not None:
            self._objects.remove(staged.place)
        if staged.file is not None:
            staged.file.unlink(missing_ok=True)

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

    def get_small(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return those of some results that are in the database itself: a question for many."""
        found: dict[str, bytes] = {}
        query = sa.select(blobs.c.name, blobs.c.data).where(blobs.c.study == self._row.name)
        with self._storage.read() as connection:
            for first in range(0, len(names), _ASKED):
                some = [self._within + name for name in names[first : first + _ASKED]]
                here = blobs.c.name.in_(some), blobs.c.data.is_not(None)
                for row in connection.execute(query.where(*here)):
                    found[row.name.removeprefix(self._within)] = bytes(row.data)
        return found

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
        self._drop(Staged(place=connection.execute(place).scalar_one_or_none()))
        connection.execute(sa.delete(blobs).where(*self._mine(name)))

    def names(self) -> list[str]:
        """Return the names of the results in this folder, in order."""
        with self._storage.read() as connection:
            found = connection.scalars(sa.select(blobs.c.name).where(*self._all()))
            return sorted(name.removeprefix(self._within) for name in found)

    def forget(self, connection: Connection) -> None:
        """Delete the results in this folder, with what workers left there that died.

        What cannot be reached now goes with the study: its files are listed, its keys forgotten here.
        """
        connection.execute(sa.delete(blobs).where(*self._all()))
        with contextlib.suppress(OSError):
            self._files.remove(self._within)
        if self._objects is not None:
            with contextlib.suppress(PrivTuneError):
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
