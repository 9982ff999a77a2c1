"""The folders of a study's files, found by their ids even after they were moved.

A path says where something was once. So a folder's list bears two marks: the owner, which is the study in its
store, and an id of the folder's own, which the store notes with the path. A folder that was moved is found by
its marks. A copy of a folder is the original's until the copied store is restored.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.files import OwnFolder
from privtune.ledger.places import artifact_root
from privtune.ledger.schema import blobs
from privtune.ledger.storage import Storage

NOTES = "places/"
"""How the rows begin that note folders: the folder's id follows, and their content is its path."""

LEAVING = "leaving/"
"""How they begin once a deletion has found the folder: it may be gone before its row is."""


@dataclass(frozen=True)
class FolderOwner:
    """The owner of a folder of files: one study in one database.

    Attributes:
        name: The study's name, by which people find its folder.
        uid: The study's id.
        store: The id of the database that the study is in.
    """

    name: str
    uid: str
    store: str

    @property
    def id(self) -> str:
        """The owner's id as the folder's list names it: 32 hexadecimal digits."""
        identity = f"{self.store}/{self.uid}"
        digest = hashlib.sha256(identity.encode()).hexdigest()
        return digest[:32]

    def folder(self, root: Path) -> Path:
        """Return the path of the study's folder below a root folder, with name and id in it."""
        name = f"{self.name}-{self.id[:12]}"
        return root.absolute() / name


class StudyFolders:
    """The folders of one study, as its database notes them.

    Args:
        storage: The database that notes them.
        owner: Whose they are.
        root: Below which new files go.
    """

    def __init__(self, storage: Storage, owner: FolderOwner, root: Path) -> None:
        self._storage = storage
        self._owner = owner
        self.path = owner.folder(root)

    def noted(self) -> dict[str, Path]:
        """Return the paths of all folders noted in the database, by the folders' ids."""
        return self._noted(NOTES)

    def _noted(self, start: str) -> dict[str, Path]:
        """Return the paths in rows whose names begin with ``start``, by the folder ids after it."""
        columns = sa.select(blobs.c.name, blobs.c.data)
        is_mine = blobs.c.study == self._owner.name
        is_note = blobs.c.name.startswith(start, autoescape=True)
        query = columns.where(is_mine, is_note).order_by(blobs.c.name)
        with self._storage.read() as connection:
            rows = connection.execute(query).all()
        folders: dict[str, Path] = {}
        for row in rows:
            mark = row.name.removeprefix(start)
            # A path is bytes that need be no text of any encoding.
            folders[mark] = Path(os.fsdecode(row.data))
        return folders

    def candidates(self) -> Iterator[OwnFolder]:
        """Yield the folders that may hold files of the study, each once."""
        folders = self.noted().values()
        leaving = self._noted(LEAVING).values()
        paths = [self.path, *folders, *leaving]
        for path in dict.fromkeys(paths):
            yield OwnFolder(path, self._owner.id)

    def find(self, name: str) -> OwnFolder | None:
        """Return the folder that lists and holds a file; None if no folder within reach does."""
        for folder in self.candidates():
            file = folder.path / name
            if name in folder.names() and file.is_file():
                return folder
        return None

    def missing(self) -> dict[str, Path]:
        """Return the folders that the database notes and the disk lacks, by their ids."""
        marks = {folder.mark() for folder in self.candidates()}
        missing: dict[str, Path] = {}
        for mark, path in self.noted().items():
            if mark not in marks:
                missing[mark] = path
        return missing

    def begin_removal(self, connection: Connection, marks: Collection[str]) -> None:
        """Note that the folders of these ids were found, before their files are deleted."""
        is_mine = blobs.c.study == self._owner.name
        for mark in marks:
            note = f"{NOTES}{mark}"
            removal = f"{LEAVING}{mark}"
            # A deletion that was stopped may have noted it before.
            is_removal = blobs.c.name == removal
            connection.execute(sa.delete(blobs).where(is_mine, is_removal))
            is_note = blobs.c.name == note
            update = sa.update(blobs).where(is_mine, is_note)
            connection.execute(update.values(name=removal))


def folders_with_results(storage: Storage) -> list[Path]:
    """Return the folders of studies that store large results in files."""
    not_in_row = blobs.c.data.is_(None)
    no_object = blobs.c.place.is_(None)
    studies = sa.select(blobs.c.study).where(not_in_row, no_object)
    is_note = blobs.c.name.startswith(NOTES, autoescape=True)
    has_files = blobs.c.study.in_(studies)
    paths = sa.select(blobs.c.data).where(is_note, has_files)
    query = paths.order_by(blobs.c.data)
    with storage.read() as connection:
        contents = connection.scalars(query).all()
    return [Path(os.fsdecode(content)) for content in contents]


def root_in_force(storage: Storage) -> Path | None:
    """Return the root folder of files, from the environment or beside a SQLite database; else None."""
    if storage.dialect == "sqlite" or os.environ.get("PRIVTUNE_ARTIFACTS"):
        return artifact_root(str(storage.url))
    return None
