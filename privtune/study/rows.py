"""The rows of studies: studies, arms, results. They lie beside the ledger's, in its transactions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.errors import PrivTuneError
from privtune.files import OwnFolder, open_private
from privtune.ledger import Ledger
from privtune.ledger.schema import arms, blobs, failures, studies
from privtune.ledger.storage import Storage
from privtune.names import check_text
from privtune.strategies import Plan
from privtune.strategies.stage_plan import StagePlan
from privtune.study._objects import DamagedResultError, ObjectStore

DELETING = "deleting"
"""The result that says that a study's deletion has begun: from then on nothing else is written to it."""


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
        """The study's own folder, named by its id, too: nobody else's bears that name."""
        return self.folder_in(Path(os.environ.get("PRIVTUNE_ARTIFACTS") or self.root))

    @property
    def files(self) -> OwnFolder:
        """What the study has made in its folder."""
        return OwnFolder(self.folder, self.uid)

    def folder_in(self, root: Path) -> Path:
        """Return the folder that the study has, or would have, below a root."""
        return root.absolute() / f"{self.name}-{self.uid[:12]}"


def check_there(connection: Connection, row: StudyRow, *, deleting: bool = False) -> None:
    """Refuse to write to a study that is not the one that was opened, however long ago that was.

    Rows are found by the study's name, and another of that name may have been made since: a worker that
    comes back must not hand in what it trained on another's charge. Nobody deletes the study before the
    transaction ends; whoever does waits here for those who write, before it holds what they wait for.

    Raises:
        PrivTuneError: If it was deleted.
    """
    asked = sa.select(studies.c.uid).where(studies.c.name == row.name)
    locked = asked.with_for_update(read=not deleting, key_share=not deleting)
    found = connection.execute(locked).scalar()
    if found != row.uid:
        with suppress(OSError):  # what was made here since, nobody else would delete
            row.files.remove()
        raise PrivTuneError(
            f"Study {row.name!r} was deleted while this process worked for it: nothing of that is kept. "
            "What was charged stays charged."
        )
    begun = sa.select(blobs.c.name).where(blobs.c.study == row.name, blobs.c.name == DELETING)
    if not deleting and connection.execute(begun).first() is not None:
        raise PrivTuneError(
            f"The deletion of study {row.name!r} has begun and is not complete; complete it with: "
            f"privtune study delete {row.name}. What was charged stays charged."
        )


def insert_new(connection: Connection, table: sa.Table, row: Mapping[str, Any]) -> bool:
    """Insert a row unless there is one of this key; return whether it was inserted."""
    statement = _insertion(connection.dialect.name, table, frozenset(row))
    return connection.execute(statement, row).rowcount == 1


@cache
def _insertion(dialect: str, table: sa.Table, columns: frozenset[str]) -> Any:
    insert: Any
    if dialect == "sqlite":
        from sqlalchemy.dialects.sqlite import insert
    else:
        from sqlalchemy.dialects.postgresql import insert
    values: dict[str, Any] = {name: sa.bindparam(name) for name in sorted(columns)}
    statement = insert(table).values(values).on_conflict_do_nothing()
    return statement.execution_options(preserve_rowcount=True)


_PLACES = "places/"


class StudyExistsError(PrivTuneError):
    """A study of this name exists already."""


class StudyNotFoundError(PrivTuneError):
    """There is no study of this name."""


@dataclass(frozen=True)
class Arm:
    """An arm, or a stage before the arms, as its row has it; how far its charge is, the ledger says.

    Args:
        plan: Its plan.
        digest: The digest under which its charge is found.
        secret: What everything random in it derives from; ``None`` once it is released.
        release: What is stored of its release beside the model; ``None`` until it is trained.
        announced: Whether observers have heard of the release.
    """

    plan: Plan | StagePlan
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
            if not insert_new(connection, studies, {**values, "root": str(row.root)}):
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

    def note_place(self, row: StudyRow) -> None:
        """Note where the study's files are from now on, if that is not where it was created."""
        if row.folder == row.folder_in(row.root):
            return
        place = str(row.folder.parent)
        name = f"{_PLACES}{hashlib.sha256(place.encode()).hexdigest()[:16]}"
        with self._changing(row, deleting=True) as connection:  # also of a lock that deletion takes
            values = {"study": row.name, "name": name, "data": place.encode(), "place": None}
            insert_new(connection, blobs, values)

    def places(self, row: StudyRow) -> list[OwnFolder]:
        """Return every folder that the study has had, as far as it can be reached from here."""
        here = blobs.c.study == row.name, blobs.c.name.startswith(_PLACES, autoescape=True)
        with self._storage.read() as connection:
            noted = connection.scalars(sa.select(blobs.c.data).where(*here)).all()
        roots = [row.root, *(Path(bytes(place).decode()) for place in noted if place)]
        folders = [row.folder, *map(row.folder_in, roots)]
        return [OwnFolder(folder, row.uid) for folder in dict.fromkeys(folders)]

    def deleting(self) -> list[str]:
        """Return the names of the studies whose deletion has begun and is not complete."""
        query = sa.select(blobs.c.study).where(blobs.c.name == DELETING).order_by(blobs.c.study)
        with self._storage.read() as connection:
            return list(connection.scalars(query))

    def begin_deletion(self, row: StudyRow) -> None:
        """Note that the study is being deleted: whoever still works for it writes no more to it."""
        with self._changing(row, deleting=True) as connection:
            values = {"study": row.name, "name": DELETING, "data": b"", "place": None}
            insert_new(connection, blobs, values)

    def delete(self, row: StudyRow, *, leave_objects: bool = False) -> list[Path]:
        """Delete a study's objects and files, and then its rows. Its charges are the ledger's and stay.

        The rows say what there is to delete, so they go last: stopped anywhere, it can be called again.

        Returns:
            The study's folders that stay, since they hold files of others.

        Raises:
            PrivTuneError: If a file or an object cannot be deleted now; the rows stay.
        """
        places = self.places(row)
        if (address := row.spec.get("artifacts")) is not None and not leave_objects:
            query = sa.select(blobs.c.name).where(
                blobs.c.study == row.name, blobs.c.place.is_not(None)
            )
            with self._storage.read() as connection:
                expected = connection.execute(query.limit(1)).first() is not None
            ObjectStore(address, row.uid).remove_all(expected=expected)
        _remove(places, row)
        with self._changing(row, deleting=True) as connection:
            for table in (failures, blobs, arms):
                connection.execute(sa.delete(table).where(table.c.study == row.name))
            connection.execute(sa.delete(studies).where(studies.c.name == row.name))
        # Whoever asked for the study's lock meanwhile made its file anew.
        _remove(places, row)
        return [place.path for place in places if place.path.exists()]

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
        insert_new(connection, arms, row)
        there = sa.select(arms).where(*_arm(study, arm.plan.arm))
        return _read_arm(connection.execute(there).one())

    def arms(self, study: str) -> dict[str, Arm]:
        """Return a study's stages and arms by name, in order."""
        with self._storage.read() as connection:
            query = sa.select(arms).where(arms.c.study == study).order_by(arms.c.number)
            rows = connection.execute(query).all()
        return {row.name: _read_arm(row) for row in rows}

    def arm(self, study: str, name: str) -> Arm | None:
        """Return one stage or arm of a study, None if there is none of this name."""
        with self._storage.read() as connection:
            query = sa.select(arms).where(*_arm(study, name))
            row = connection.execute(query).one_or_none()
        return None if row is None else _read_arm(row)

    def set_release(self, row: StudyRow, arm: str, release: Mapping[str, Any], keep: Any) -> bool:
        """Store an arm's release, with what ``keep`` stores in the transaction; the first one stays.

        Returns:
            Whether this was the first.
        """
        with self._changing(row) as connection:
            moved = connection.execute(
                sa.update(arms)
                .where(*_arm(row.name, arm), arms.c.release.is_(None))
                .values(release=json.dumps(release))
            )
            if moved.rowcount == 1:
                keep(connection)
            return moved.rowcount == 1

    def forget_secret(self, connection: Connection, study: str, arm: str) -> None:
        """Forget an arm's secret: with it, noise could be drawn again and subtracted."""
        connection.execute(sa.update(arms).where(*_arm(study, arm)).values(secret=""))

    def add_failure(self, row: StudyRow, arm: str, text: str) -> None:
        """Keep what stopped an arm."""
        values = {"id": uuid.uuid4().hex, "study": row.name, "arm": arm, "traceback": text}
        with self._changing(row) as connection:
            connection.execute(sa.insert(failures), {**values, "time": time.time()})

    def failures(self, study: str, arm: str) -> list[dict[str, Any]]:
        """Return what stopped an arm, the latest last."""
        query = sa.select(failures.c.time, failures.c.traceback).order_by(failures.c.time)
        with self._storage.read() as connection:
            found = query.where(failures.c.study == study, failures.c.arm == arm)
            return [dict(row._mapping) for row in connection.execute(found)]

    def set_announced(self, row: StudyRow, arm: str) -> None:
        """Note that observers have heard of a release."""
        with self._changing(row) as connection:
            connection.execute(sa.update(arms).where(*_arm(row.name, arm)).values(announced=1))

    @contextmanager
    def _changing(self, row: StudyRow, *, deleting: bool = False) -> Iterator[Connection]:
        """Give a writing transaction for a study that is there, and not another of its name."""
        with self._storage.write() as connection:
            check_there(connection, row, deleting=deleting)
            yield connection


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


def _remove(places: Sequence[OwnFolder], row: StudyRow) -> None:
    try:
        for place in places:
            place.remove()
    except OSError as error:
        raise PrivTuneError(
            f"{error.filename} cannot be deleted ({error.strerror}), so study {row.name!r} is not deleted "
            f"completely. Mend that, and run again: privtune study delete {row.name}."
        ) from None


@lru_cache(maxsize=4096)
def _read_plan(text: str) -> Plan | StagePlan:
    """Return a plan, which never changes, and which every question about a study reads."""
    plan = json.loads(text)
    return StagePlan.from_dict(plan) if "stage" in plan else Plan.from_dict(plan)


def _read_arm(row: sa.Row[Any]) -> Arm:
    return Arm(
        _read_plan(row.plan),
        row.digest,
        bytes.fromhex(row.secret) or None,
        None if row.release is None else json.loads(row.release),
        bool(row.announced),
    )


def _exists(name: str) -> StudyExistsError:
    return StudyExistsError(
        f"A study named {name!r} exists already in this storage. Choose another name, or "
        f"go on with it: privtune study run {name} (in Python: privtune.load_study)."
    )


def _arm(study: str, arm: str) -> tuple[sa.ColumnElement[bool], ...]:
    return arms.c.study == study, arms.c.name == arm


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
