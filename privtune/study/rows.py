"""The rows of studies: studies, arms, results. They lie beside the ledger's, in its transactions.

Whatever must happen together with a charge's next state takes the connection of that transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from privtune.strategies.plan import StagePlan
from privtune.study._objects import DamagedResultError, ObjectStore

AnyPlan = Plan | StagePlan
"""Of an arm, or of a stage before the arms: both live alike."""

_DELETING = (
    "deleting"  # the result that says that a deletion has begun: nothing else is written then
)
_PLACES = "places/"
_LARGE = 2**24  # bytes above which a result is a file in the study's folder, and its row says so
_ASKED = 500  # names that are asked for in one statement


class StudyExistsError(PrivTuneError):
    """A study of this name exists already.

    Args:
        name: The study's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"A study named {name!r} exists already in this storage. Choose another name, or "
            f"go on with it: privtune study run {name} (in Python: privtune.load_study)."
        )


class StudyNotFoundError(PrivTuneError):
    """There is no study of this name."""


@dataclass(frozen=True)
class StudyRow:
    """A study as it was created; ``uid`` tells it from another of its name."""

    name: str
    uid: str
    spec: Mapping[str, Any]
    root: Path

    @property
    def files(self) -> OwnFolder:
        """The study's own folder, named by its id, too: nobody else's bears that name."""
        return self.files_in(Path(os.environ.get("PRIVTUNE_ARTIFACTS") or self.root))

    def files_in(self, root: Path) -> OwnFolder:
        """Return the folder that the study has, or would have, below a root."""
        return OwnFolder(root.absolute() / f"{self.name}-{self.uid[:12]}", self.uid)


@dataclass(frozen=True)
class Arm:
    """The row of an arm or a stage; its secret is None once it is released, its release None before."""

    plan: AnyPlan
    digest: str
    secret: bytes | None
    release: Mapping[str, Any] | None = None
    announced: bool = False


class StudyStore:
    """The studies of a storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def check_new(self, name: str) -> None:
        """Refuse a name that is taken."""
        if name in self.uids():
            raise StudyExistsError(name)

    def create(self, row: StudyRow, planned: Sequence[Arm]) -> None:
        """Store a study with its arms and their secrets, in one transaction."""
        values = {"name": row.name, "uid": row.uid, "spec": json.dumps(row.spec)}
        with self._storage.write() as connection:
            if not insert_new(connection, studies, {**values, "root": str(row.root)}):
                raise StudyExistsError(row.name)
            for arm in planned:
                _add_arm(connection, row.name, arm)

    def study(self, name: str) -> StudyRow:
        """Return a study's row."""
        query = sa.select(studies).where(studies.c.name == check_text(name, "study"))
        with self._storage.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise StudyNotFoundError(
                f"There is no study named {name!r} in this storage; it holds: "
                f"{', '.join(self.uids()) or 'none'}."
            )
        return StudyRow(row.name, row.uid, json.loads(row.spec), Path(row.root))

    def uids(self) -> dict[str, str]:
        """Return the id of each study by its name, in order."""
        query = sa.select(studies.c.name, studies.c.uid).order_by(studies.c.name)
        with self._storage.read() as connection:
            return {row.name: row.uid for row in connection.execute(query)}

    def deleting(self) -> list[str]:
        """Return the names of the studies whose deletion has begun and is not complete."""
        query = sa.select(blobs.c.study).where(blobs.c.name == _DELETING).order_by(blobs.c.study)
        with self._storage.read() as connection:
            return list(connection.scalars(query))


def study_names(url: str | Path) -> list[str]:
    """Return the names of the studies in a database, ``url``: its URL, or the path of a SQLite file.

    Example:
        >>> study_names(study.storage)
        ['shown']
    """
    with Ledger(url) as ledger:
        return list(StudyStore(ledger.log.storage).uids())


class StoredStudy:
    """The rows of one study."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.name, self.storage = name, storage
        self.row = StudyStore(storage).study(name)
        self.files = self.row.files
        self.folder = self.files.path
        self.results = Results(storage, self.row)

    @contextlib.contextmanager
    def writing(self, *, deleting: bool = False) -> Iterator[Connection]:
        """Open a writing transaction of a study that is still there, and not another of its name."""
        with self.storage.write() as connection:
            check_there(connection, self.row, deleting=deleting)
            yield connection

    def arms(self) -> dict[str, Arm]:
        """Return the stages and the arms by name, in order."""
        query = sa.select(arms).where(arms.c.study == self.name).order_by(arms.c.number)
        with self.storage.read() as connection:
            return {row.name: _read_arm(row) for row in connection.execute(query).all()}

    def arm(self, name: str) -> Arm | None:
        """Return one stage or arm, None if there is none of this name."""
        with self.storage.read() as connection:
            row = connection.execute(sa.select(arms).where(*_arm(self.name, name))).one_or_none()
        return None if row is None else _read_arm(row)

    def set_release(
        self, arm: str, release: Mapping[str, Any], put: Callable[[Connection], None] | None = None
    ) -> bool:
        """Store an arm's release with its files; return whether it was the first, which stays."""
        first = sa.update(arms).where(*_arm(self.name, arm), arms.c.release.is_(None))
        with self.writing() as connection:
            moved = connection.execute(first.values(release=json.dumps(release))).rowcount == 1
            if moved and put is not None:
                put(connection)
            return moved

    def set_announced(self, arm: str) -> None:
        """Note that observers have heard of a release."""
        with self.writing() as connection:
            connection.execute(sa.update(arms).where(*_arm(self.name, arm)).values(announced=1))

    def add_arms(self, connection: Connection, asked: Sequence[Arm]) -> None:
        """Insert arms after those that are there; refuse another plan for one that is there."""
        check_there(connection, self.row)
        for arm in asked:
            _add_arm(connection, self.name, arm)
            query = sa.select(arms).where(*_arm(self.name, arm.plan.arm))
            self.check_same(arm.plan, _read_arm(connection.execute(query).one()).plan)

    def check_same(self, plan: AnyPlan, there: AnyPlan) -> None:
        """Refuse a plan for an arm that exists with another one."""
        if there.digest() != plan.digest():
            raise PrivTuneError(
                f"Arm {plan.arm!r} of study {self.name!r} exists with another plan, and what was "
                "planned does not change. Say arm='another-name' for a new arm."
            )

    def forget_sealed(self, connection: Connection, arm: str) -> bool:
        """Forget an arm's secret, with which its noise could be drawn again, and the models that lost."""
        check_there(connection, self.row)
        self.results.within(f"sealed/{arm}").forget(connection)
        connection.execute(sa.update(arms).where(*_arm(self.name, arm)).values(secret=""))
        return True

    def add_failure(self, arm: str, text: str) -> None:
        """Keep what stopped an arm."""
        values = {"id": uuid.uuid4().hex, "study": self.name, "arm": arm, "traceback": text}
        with self.writing() as connection:
            connection.execute(sa.insert(failures), {**values, "time": time.time()})

    def failures(self, arm: str) -> list[dict[str, Any]]:
        """Return what stopped an arm, the latest last: ``time`` and ``traceback``."""
        query = sa.select(failures.c.time, failures.c.traceback).order_by(failures.c.time)
        with self.storage.read() as connection:
            found = query.where(failures.c.study == self.name, failures.c.arm == arm)
            return [dict(row._mapping) for row in connection.execute(found)]

    def note_place(self) -> None:
        """Record the folder of files, unless the study was created with it: a deletion looks there, too."""
        if self.folder == self.row.files_in(self.row.root).path:
            return
        place = str(self.folder.parent)
        name = f"{_PLACES}{hashlib.sha256(place.encode()).hexdigest()[:16]}"
        self._note(name, place.encode())  # also of the lock that a deletion takes

    def begin_deletion(self) -> None:
        """Note that the study is being deleted: whoever still works for it writes no more to it."""
        self._note(_DELETING, b"")

    def _note(self, name: str, data: bytes) -> None:
        with self.writing(deleting=True) as connection:
            values = {"study": self.name, "name": name, "data": data, "place": None}
            insert_new(connection, blobs, values)

    def remove(self, *, leave_objects: bool = False) -> list[Path]:
        """Delete objects and files, and then the rows, which say what there is; return folders that stay."""
        here = blobs.c.study == self.name
        noted = blobs.c.name.startswith(_PLACES, autoescape=True)
        with self.storage.read() as connection:
            places = connection.scalars(sa.select(blobs.c.data).where(here, noted)).all()
            elsewhere = sa.select(blobs.c.name).where(here, blobs.c.place.is_not(None))
            objects = connection.execute(elsewhere.limit(1)).first() is not None
        roots = [self.row.root, *(Path(bytes(place).decode()) for place in places if place)]
        found = {files.path: files for files in (self.row.files, *map(self.row.files_in, roots))}
        address = self.row.spec.get("artifacts")
        if address is not None and not leave_objects:
            ObjectStore(address, self.row.uid).remove_all(expected=objects)
        self._remove_files(found.values())
        with self.writing(deleting=True) as connection:
            for table in (failures, blobs, arms):
                connection.execute(sa.delete(table).where(table.c.study == self.name))
            connection.execute(sa.delete(studies).where(studies.c.name == self.name))
        # Whoever asked for the study's lock meanwhile made its file anew.
        self._remove_files(found.values())
        return [path for path in found if path.exists()]

    def _remove_files(self, places: Any) -> None:
        try:
            for place in places:
                place.remove()
        except OSError as error:
            raise PrivTuneError(
                f"{error.filename} cannot be deleted ({error.strerror}), so study {self.name!r} is not "
                f"deleted completely. Mend that, and run again: privtune study delete {self.name}."
            ) from None


def check_there(connection: Connection, row: StudyRow, *, deleting: bool = False) -> None:
    """Refuse to write to a study that was deleted, or whose deletion has begun."""
    # Rows are found by name, and another study of that name may have been made since: a worker that comes
    # back must not hand in on another's charge. The lock keeps the study until the transaction ends.
    asked = sa.select(studies.c.uid).where(studies.c.name == row.name)
    locked = asked.with_for_update(read=not deleting, key_share=not deleting)
    if connection.execute(locked).scalar() != row.uid:
        with contextlib.suppress(OSError):  # what was made here since, nobody else would delete
            row.files.remove()
        raise PrivTuneError(
            f"Study {row.name!r} was deleted while this process worked for it: nothing of that is kept. "
            "What was charged stays charged."
        )
    begun = sa.select(blobs.c.name).where(blobs.c.study == row.name, blobs.c.name == _DELETING)
    if not deleting and connection.execute(begun).first() is not None:
        raise PrivTuneError(
            f"The deletion of study {row.name!r} has begun and is not complete; complete it with: "
            f"privtune study delete {row.name}. What was charged stays charged."
        )


def _add_arm(connection: Connection, study: str, arm: Arm) -> None:
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


@lru_cache(maxsize=4096)  # a plan never changes, and every question about a study reads it
def _read_plan(text: str) -> AnyPlan:
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


def _arm(study: str, arm: str) -> tuple[sa.ColumnElement[bool], ...]:
    return arms.c.study == study, arms.c.name == arm


@dataclass(frozen=True)
class Staged:
    """A result on its way into its row: for the row itself, in an object, or in a file of another name."""

    content: bytes | None = None
    place: str | None = None
    file: Path | None = None


class Results:
    """What a study's trainings produced, by the path that it has, or would have, in its folder.

    Small results are in the database; large ones in the study's object store if it has one, else in its
    folder. The first result of a name stays.
    """

    def __init__(self, storage: Storage, row: StudyRow, within: str = "") -> None:
        self._storage, self._row, self._within = storage, row, within
        self._files = row.files
        address = row.spec.get("artifacts")
        self._objects = None if address is None else ObjectStore(address, row.uid)
        # One folder of objects for each of results; a store need not know the names of arms.
        self._object_folder = hashlib.sha256(within.encode()).hexdigest()[:16]

    def within(self, folder: str) -> Results:
        """Return the results in a folder of the study."""
        return Results(self._storage, self._row, f"{folder}/")

    @property
    def folder(self) -> Path:
        """Where files of these results are, if there are any."""
        return self._files.path / self._within

    def check(self) -> None:
        """Try to write, read and clear the object store, if there is one."""
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
        """Store what was staged, and delete what it replaces, or itself where it came second.

        It may be called twice: by whoever does not know whether the first transaction was committed.
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
        """Return a result, None if there is none.

        Raises:
            DamagedResultError: If its object is not what was stored.
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
        """Return a result, None if there is none, or if its object was lost: then there is none."""
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
        """Delete the results in this folder, with what workers that died left there."""
        connection.execute(sa.delete(blobs).where(*self._all()))
        # What cannot be reached now goes with the study: its files are listed, its keys forgotten here.
        with contextlib.suppress(OSError):
            self._files.remove(self._within)
        if self._objects is not None:
            with contextlib.suppress(PrivTuneError):
                self._objects.remove_all(self._object_folder)

    def _mine(self, name: str) -> tuple[sa.ColumnElement[bool], ...]:
        return blobs.c.study == self._row.name, blobs.c.name == self._within + name

    def _all(self) -> tuple[sa.ColumnElement[bool], ...]:
        start = sa.func.substr(blobs.c.name, 1, len(self._within))
        return blobs.c.study == self._row.name, start == self._within
