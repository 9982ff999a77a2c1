"""The rows of studies: studies, arms, results. They lie beside the ledger's, in its transactions.

Whatever must happen together with a charge's next state takes the connection of that transaction.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.errors import PrivTuneError
from privtune.files import OwnFolder
from privtune.ledger import Ledger
from privtune.ledger.schema import arms, blobs, failures, studies
from privtune.ledger.storage import Storage
from privtune.names import check_text
from privtune.strategies import Plan
from privtune.strategies.plan import StagePlan
from privtune.study._objects import ObjectStore
from privtune.study._rows import DELETING, StudyRow, check_there, insert_new

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
