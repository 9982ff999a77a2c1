"""Restoration of a copied store as an independent one, with its own id, files and objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from privtune.errors import PrivTuneError
from privtune.files import OwnFolder
from privtune.ledger import Ledger
from privtune.ledger.identity import Identity, restored_identity, write_identity
from privtune.ledger.schema import blobs, studies
from privtune.study.folders import NOTES, StudyFolders
from privtune.study.rows import StudyRow, StudyStore, content_digest

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection

    from privtune.ledger.storage import Storage

MEANING = (
    "From now on the restored copy and the original are independent. Both have the same budgets for the "
    "same records, and neither knows what is charged to the other, so together they can exceed a budget. "
    "Restore a copy only if the original is lost, or will never be charged again. Charges that the original "
    "got after the copy was made are missing from this log, but their privacy is spent."
)
"""What a restoration means, for whoever asks for it."""


@dataclass(frozen=True)
class Restoration:
    """The ids, budgets and folders that a restoration of a copied store concerned.

    Attributes:
        store: The id that the store has now.
        origin: The id that it had, which is the original's.
        original: Where the original is, or was.
        budgets: The budgets in whose logs the restoration is noted.
        folders: The original's folders of files: copied, and left as they are.
    """

    store: str
    origin: str
    original: str
    budgets: tuple[str, ...]
    folders: tuple[Path, ...]


def restore_store(url: str | Path, *, leave_files: bool = False) -> Restoration:
    """Give a copy of a store an id of its own, and copies of its studies' files and objects.

    Args:
        url: The copy: a database's URL, or the path of a SQLite file.
        leave_files: Go on without files and objects that are not found; models in them are lost.

    Returns:
        What was done.

    Raises:
        PrivTuneError: The database is no copy, or files of its studies are not found.
        LedgerCorruptedError: A log is damaged, or is not what was noted beside the database.

    **Guarantee**: nothing of the original's is changed. The restoration stands in the log of every budget,
    and so in their certificates. Stopped anywhere, the database is a copy as before; restored once more, it
    leaves no second copy of a file.

    Example:
        >>> from privtune.ledger import Budget, Ledger, backup
        >>> with Ledger() as ledger:
        ...     budget = ledger.create_budget(Budget(3.0, 1e-5, name="clinic"))
        ...     copy = backup(ledger.log.storage, Path("restored.db"))
        >>> restore_store("restored.db").budgets
        ('clinic',)
    """
    with closing(Ledger(url)) as ledger:
        storage = ledger.log.storage
        original = storage.original()
        if original is None:
            raise PrivTuneError(
                f"{storage.safe_url} is no copy: it is at home where it is, and there is nothing to restore."
            )
        before = storage.identity()
        with storage.read() as connection:
            home = storage.home(connection)
            after = restored_identity(before, home)
        store = StudyStore(storage)
        moves = [_FilesOfStudy(storage, store.study(name), after.uid) for name in store.uids()]
        if not leave_files:
            _check_files(moves)
        for move in moves:
            move.copy()
        budgets = ledger.log.restore(lambda connection: _write(connection, after, moves))
        folders = [path for move in moves for path in move.sources()]
    return Restoration(
        store=after.uid,
        origin=before.uid,
        original=original.place,
        budgets=budgets,
        folders=tuple(folders),
    )


def _check_files(moves: list[_FilesOfStudy]) -> None:
    """Refuse to restore a copy some of whose large results are not found."""
    missing = [path for move in moves for path in move.missing()]
    if missing:
        raise PrivTuneError(
            f"{len(missing)} results of studies are not found, the first as {missing[0]}: they are too large "
            "for the database. Copy their folder, too, and say where it is: PRIVTUNE_ARTIFACTS=FOLDER. "
            "To go on without them: --leave-files. Nothing was restored."
        )


def _write(
    connection: Connection, after: Identity, moves: list[_FilesOfStudy]
) -> dict[str, object]:
    """Write the restored identity and the copied files' places; return the body of the log entries."""
    write_identity(connection, after)
    for move in moves:
        move.write(connection)
    now = datetime.now(UTC)
    day = now.date().isoformat()
    return {"store": after.uid, "origin": after.origin, "day": day}


class _FilesOfStudy:
    """The files and objects of one study that a restoration copies to a new owner.

    Args:
        storage: The copy.
        row: The study, as the original owns it.
        store: The id that the copy will have, which is part of where its files lie.
    """

    def __init__(self, storage: Storage, row: StudyRow, store: str) -> None:
        self._storage = storage
        self._row = row
        self._new_row = replace(row, store=store)
        self._sources = StudyFolders(storage, row.owner, row.root)
        self._marks: list[str] = []
        owner = self._new_row.owner
        path = owner.folder(row.root)
        self._target = OwnFolder(path, owner.id, self._marks.append)

    def missing(self) -> list[str]:
        """Return the large results that cannot be found, as paths and object names."""
        names = self._names_of_files()
        paths = []
        for name in names:
            if self._sources.find(name) is None:
                paths.append(str(self._sources.path / name))
        store = self._row.objects
        if store is None:
            return paths
        for name, place in self._places().items():
            if not store.holds(place):
                paths.append(f"{store.address} ({name})")
        return paths

    def _names_of_files(self) -> list[str]:
        """Return the names of the study's results that are stored as files."""
        query = sa.select(blobs.c.name).where(
            blobs.c.study == self._row.name,
            blobs.c.data.is_(None),
            blobs.c.place.is_(None),
        )
        with self._storage.read() as connection:
            return list(connection.scalars(query))

    def _places(self) -> dict[str, str]:
        """Return the object-store places of the study's results, by result name."""
        query = sa.select(blobs.c.name, blobs.c.place).where(
            blobs.c.study == self._row.name,
            blobs.c.place.is_not(None),
        )
        with self._storage.read() as connection:
            rows = connection.execute(query)
            return {row.name: row.place for row in rows}

    def sources(self) -> Iterator[Path]:
        """Yield the original's folders that the files are copied from."""
        for folder in self._sources.candidates():
            if folder.mark() is not None:
                yield folder.path

    def copy(self) -> None:
        """Copy files and objects to where the restored store looks for them."""
        self._target.remove()  # what a restoration that was stopped has left
        for folder in self._sources.candidates():
            for name in folder.files():
                content = folder.read(name)
                self._target.write(name, content)
        source = self._row.objects
        target = self._new_row.objects
        if source is None or target is None:
            return
        for place in self._places().values():
            if source.holds(place):
                target.copy_from(source, place)

    def write(self, connection: Connection) -> None:
        """Write the new folders of the study's files to the database in place of the original's."""
        study = self._row.name
        notes = sa.delete(blobs).where(
            blobs.c.study == study,
            blobs.c.name.startswith(NOTES, autoescape=True),
        )
        connection.execute(notes)
        data = str(self._target.path).encode()
        for mark in self._marks:
            note = sa.insert(blobs).values(
                study=study,
                name=f"{NOTES}{mark}",
                data=data,
                place=None,
                digest=content_digest(data),
            )
            connection.execute(note)
        update = sa.update(studies).where(studies.c.name == study)
        connection.execute(update.values(root=str(self._row.root)))
