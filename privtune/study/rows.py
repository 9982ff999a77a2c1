"""The rows of studies, arms and results, which share the ledger's database and transactions.

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
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.accounting import Composed, Event, epsilon
from privtune.errors import PrivTuneError, UnreachableFileError
from privtune.files import OwnFolder
from privtune.ledger import Ledger
from privtune.ledger.errors import Place, StudyCorruptedError
from privtune.ledger.identity import read_identity
from privtune.ledger.places import checked_url, is_missing
from privtune.ledger.reading import parsing, read_object, show_key
from privtune.ledger.schema import arms, blobs, budgets, failures, studies
from privtune.ledger.storage import Storage
from privtune.ledger.urls import masked_url
from privtune.ledger.values import ChargeState
from privtune.names import check_text, did_you_mean
from privtune.stages.stage_plan import StagePlan
from privtune.strategies import Plan
from privtune.study._objects import DamagedResultError, ObjectStore
from privtune.study.folders import NOTES, FolderOwner, StudyFolders, root_in_force

AnyPlan = Plan | StagePlan
"""Of an arm, or of a stage before the arms: both live alike."""

_StoredArm = sa.Row[Any]
"""A row of the table of arms."""

_DELETING = "deleting"
"""Name of the result that says that a deletion has begun: nothing else is written from then on."""

_LARGE = 2**24
"""Bytes above which a result is an object or a file, and its row says where."""

_NAMES_AT_ONCE = 500
"""Names in one statement; databases bound its parameters (SQLite at 999 before 3.32)."""


class StudyExistsError(PrivTuneError):
    """A study of this name exists already.

    Args:
        name: The study's name.
        of_program: Whether its task is in a program, which alone can go on with it.
    """

    def __init__(self, name: str, *, of_program: bool = False) -> None:
        go_on = "run its program again with create_study(..., load_if_exists=True)"
        if not of_program:
            go_on = f"privtune study run {name} (in Python: privtune.load_study)"
        super().__init__(
            f"A study named {name!r} exists already in this storage. Choose another name, or "
            f"go on with it: {go_on}."
        )


class StudyNotFoundError(PrivTuneError):
    """There is no study of this name."""


def _count_rows(table: sa.Table, condition: sa.ColumnElement[bool]) -> sa.Select[int]:
    """Return the query that counts the rows of a table under a condition."""
    return sa.select(sa.func.count()).select_from(table).where(condition)


@dataclass(frozen=True)
class StudyRow:
    """The row of a study.

    Attributes:
        name: The study's name; a study that was deleted may have had it before.
        uid: Tells the study from another of its name.
        spec: What the study declares, as it was stored.
        root: The folder below which its files go now: see ``folders.root_in_force``.
        store: The id of the database: a restored copy of one is another store.
    """

    name: str
    uid: str
    spec: Mapping[str, Any]
    root: Path
    store: str

    @cached_property
    def identity(self) -> str:
        """The study's id and the digest of its spec, as a text that goes into the digests of its arms."""
        # Through JSON once: keys become texts before they are sorted, as in the stored spec.
        spec = json.loads(json.dumps(self.spec))
        text = json.dumps(spec, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"{self.uid}\n{digest}"

    @property
    def owner(self) -> FolderOwner:
        """The study as the owner of its folders of files."""
        return FolderOwner(self.name, self.uid, self.store)

    @property
    def objects(self) -> ObjectStore | None:
        """The study's part of its object store; None if its spec names no store."""
        address = self.spec.get("artifacts")
        if address is None:
            return None
        return ObjectStore(address, self.uid, self.owner.id)


@dataclass(frozen=True)
class Arm:
    """The row of an arm or a stage.

    Attributes:
        plan: What the arm runs and costs.
        digest: Of the plan's text and the study's identity; the arm's charge is found by it.
        secret: 32 bytes from which everything random in the arm derives; None once it is released, for
            whoever has them could subtract the noise.
        release: What the arm released; None before.
        announced: Whether observers have heard of the release.
        release_digest: SHA-256 of the release as it is stored; empty before.
    """

    plan: AnyPlan
    digest: str
    secret: bytes | None
    release: Mapping[str, Any] | None = None
    announced: bool = False
    release_digest: str = ""


class StudyStore:
    """The studies of a storage: found by name, created together with their arms."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def check_new(self, name: str) -> None:
        """Refuse the name of a study that exists already."""
        if name in self.uids():
            spec = self.study(name).spec
            raise StudyExistsError(name, of_program=spec["task"] is None)

    def create(self, row: StudyRow, new_arms: Sequence[Arm]) -> None:
        """Store a study with its arms and their secrets, in one transaction."""
        values = {
            "name": row.name,
            "uid": row.uid,
            "spec": json.dumps(row.spec),
            "root": str(row.root),
        }
        with self._storage.write() as connection:
            if not insert_new(connection, studies, values):
                raise StudyExistsError(row.name, of_program=row.spec["task"] is None)
            for arm in new_arms:
                _add_arm(connection, row.name, arm)

    def study(self, name: str) -> StudyRow:
        """Return a study's row.

        Raises:
            StudyNotFoundError: If there is none; its words name those that there are.
            StudyCorruptedError: If its spec is no JSON object.
        """
        has_name = studies.c.name == check_text(name, "study")
        query = sa.select(studies).where(has_name)
        with self._storage.read() as connection:
            row = connection.execute(query).one_or_none()
            store = read_identity(connection).uid
        if row is None:
            raise self._not_found(name)
        root = root_in_force(self._storage) or Path(row.root)
        place = Place("privtune_studies", "spec", show_key({"name": name}))
        spec = read_object(row.spec, place)
        return StudyRow(row.name, row.uid, spec, root, store)

    def _not_found(self, name: str) -> StudyNotFoundError:
        """Return the error for a name that no study has, with a similar name or a budget of that name."""
        url = self._storage.safe_url
        names = list(self.uids())
        if not names:
            return _no_study(name, url)
        question = did_you_mean(name, names)
        if not question and self._has_budget(name):
            question = f"A budget has that name: privtune budget show {name}."
        return StudyNotFoundError(
            f"There is no study named {name!r} in {url}; it holds: {', '.join(names)}. "
            f"{question}".rstrip()
        )

    def _has_budget(self, name: str) -> bool:
        """Return whether a budget of this name exists."""
        query = _count_rows(budgets, budgets.c.name == name)
        with self._storage.read() as connection:
            return bool(connection.scalar(query))

    def uids(self) -> dict[str, str]:
        """Return the id of each study by its name, in order."""
        columns = sa.select(studies.c.name, studies.c.uid)
        query = columns.order_by(studies.c.name)
        with self._storage.read() as connection:
            rows = connection.execute(query).all()
        return {row.name: row.uid for row in rows}

    def deleting(self) -> list[str]:
        """Return the names of the studies whose deletion has begun and is not complete."""
        is_note = blobs.c.name == _DELETING
        notes = sa.select(blobs.c.study).where(is_note)
        query = notes.order_by(blobs.c.study)
        with self._storage.read() as connection:
            return list(connection.scalars(query))


def _no_study(name: str, url: str) -> StudyNotFoundError:
    """Return the error for a study that is asked of a storage without any."""
    return StudyNotFoundError(
        f"There is no study named {name!r} in {url}, and no other: privtune study create "
        "SPEC.yaml makes one; --storage (in Python storage=) names another database."
    )


def check_database(name: str, url: str) -> None:
    """Refuse a study of a SQLite database that does not exist: to open the database would create it.

    Args:
        name: The study's name.
        url: The URL of the database, or the path of a SQLite file.

    Raises:
        StudyNotFoundError: If there is no such file.
        InvalidInputError: If the URL names no database.
    """
    if is_missing(url):
        shown_url = masked_url(checked_url(url).render_as_string(hide_password=False))
        raise _no_study(check_text(name, "study"), shown_url)


def study_names(url: str | Path) -> list[str]:
    """Return the names of the studies in the database at ``url``, a URL or the path of a SQLite file.

    Example:
        >>> study_names(study.storage)
        ['shown']
    """
    with Ledger(url) as ledger:
        return list(StudyStore(ledger.log.storage).uids())


@dataclass(frozen=True)
class StudySummary:
    """The progress of a study: released arms, first charge and cost.

    Args:
        name: Its name.
        budget: The budget that it draws on.
        arms: How many arms and stages it has.
        released: How many of them are released.
        since: The day of its first charge, as ``2026-05-01``; None before it.
        epsilon: What its charges cost together, at its budget's δ, those given up left out.
    """

    name: str
    budget: str
    arms: int
    released: int
    since: str | None
    epsilon: float = 0.0


def list_studies(url: str | Path) -> list[StudySummary]:
    """Return a summary of the progress of each study in a database, by name.

    Example:
        >>> [(each.name, each.arms, each.released) for each in list_studies(study.storage)]
        [('shown', 2, 2)]
    """
    if is_missing(url):
        return []
    with Ledger(url) as ledger:
        store = StudyStore(ledger.log.storage)
        rows = [store.study(name) for name in store.uids()]
        counts = _count_arms(ledger.log.storage)
        first_days, costs = _charges_by_study(ledger)
    summaries = []
    for row in rows:
        budget = str(row.spec["budget"]["name"])
        count, released = counts.get(row.name, (0, 0))
        summary = StudySummary(
            name=row.name,
            budget=budget,
            arms=count,
            released=released,
            since=first_days.get(row.name),
            epsilon=costs.get((budget, row.name), 0.0),
        )
        summaries.append(summary)
    return summaries


def _count_arms(storage: Storage) -> dict[str, tuple[int, int]]:
    """Return the number of arms and stages, and of released ones among them, by study."""
    everything = sa.func.count()
    releases = sa.func.count(arms.c.release)  # counts what is not NULL
    columns = sa.select(arms.c.study, everything, releases)
    query = columns.group_by(arms.c.study)
    counts: dict[str, tuple[int, int]] = {}
    with storage.read() as connection:
        for study, count, released in connection.execute(query):
            counts[study] = (count, released)
    return counts


def _charges_by_study(ledger: Ledger) -> tuple[dict[str, str], dict[tuple[str, str], float]]:
    """Return the day of the first charge by study, and the ε of all charges by budget and study.

    A study may have charged several budgets: one of its name was deleted and made anew.
    """
    first_days: dict[str, str] = {}
    costs: dict[tuple[str, str], float] = {}
    for budget in ledger.budgets():
        events_by_study: dict[str, list[Event]] = {}
        for charge in ledger.charges(budget.name):
            day = f"{charge.created_at:%Y-%m-%d}"
            first_days.setdefault(charge.study, day)
            if charge.state is ChargeState.VOIDED:
                continue
            events = events_by_study.setdefault(charge.study, [])
            events.append(charge.event)
        for study, events in events_by_study.items():
            composed = Composed(events)
            cost = epsilon(composed, budget.delta, adjacency=budget.adjacency)
            key = (budget.name, study)
            costs[key] = cost.epsilon
    return first_days, costs


class StoredStudy:
    """The rows of one study, and the folders of its files.

    Every write takes the study's row first (``check_there``): what another process has deleted stays so.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = name
        self.storage = storage
        self.row = StudyStore(storage).study(name)
        owner = self.row.owner
        self.folders = StudyFolders(storage, owner, self.row.root)
        self.folder = self.folders.path
        # The folder is noted before the first file in it is written: a deletion must find it.
        self.files = OwnFolder(self.folder, owner.id, self._note_folder)
        self.results = Results(storage, self.row, self.files, self.folders)
        self._arms: dict[str, tuple[tuple[object, ...], Arm]] = {}  # read last, without secrets

    @contextlib.contextmanager
    def writing(self, *, deleting: bool = False) -> Iterator[Connection]:
        """Open a transaction to write to this study; refuse if it was deleted or made anew.

        Args:
            deleting: Whether the transaction belongs to the study's deletion, which others must not
                join: its row is locked against them.

        Yields:
            The connection; what is written by it is committed with the block, or not at all.
        """
        with self.storage.write() as connection:
            check_there(connection, self.row, deleting=deleting)
            yield connection

    def arms(self) -> dict[str, Arm]:
        """Return the stages and the arms by name, in order."""
        mine = sa.select(arms).where(arms.c.study == self.name)
        query = mine.order_by(arms.c.number)
        with self.storage.read() as connection:
            self._check_same(connection)
            rows = connection.execute(query).all()
        return {row.name: self._read_once(row) for row in rows}

    def _read_once(self, row: _StoredArm) -> Arm:
        """Return the arm of a row, and parse the row only where it has changed since the last reading.

        Its release is shared by all who read it: it is copied before anybody else may have it.
        """
        # A secret is kept nowhere but in the database: whoever has it could subtract the noise.
        content = (row.digest, row.plan, row.release, row.announced, bool(row.secret))
        last_content, arm = self._arms.get(row.name, (None, None))
        if arm is None or content != last_content:
            arm = replace(_read_arm(row, self.row), secret=None)
            self._arms[row.name] = (content, arm)
        return replace(arm, secret=bytes.fromhex(row.secret) or None)

    def _check_same(self, connection: Connection) -> None:
        """Refuse to read a study that was deleted and whose name another study now has."""
        uid = connection.execute(_uid_of(self.name)).scalar()
        if uid is not None and uid != self.row.uid:
            raise _deleted(self.name)

    def arm_names(self) -> list[str]:
        """Return the names of stages and arms in order, without reading the rest of their rows."""
        mine = sa.select(arms.c.name).where(arms.c.study == self.name)
        query = mine.order_by(arms.c.number)
        with self.storage.read() as connection:
            return list(connection.scalars(query))

    def arm(self, name: str) -> Arm | None:
        """Return one stage or arm, None if there is none of this name."""
        is_arm = _arm(self.name, name)
        query = sa.select(arms).where(*is_arm)
        with self.storage.read() as connection:
            self._check_same(connection)
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        return self._read_once(row)

    def set_release(
        self,
        arm: str,
        release: Mapping[str, object],
        put: Callable[[Connection], None] | None = None,
    ) -> bool:
        """Store an arm's release and files unless it has one; return whether they were stored.

        Args:
            arm: The arm's name.
            release: The release, ready for JSON.
            put: Stores the files in the same transaction: no release is ever seen without them.
        """
        is_arm = _arm(self.name, arm)
        is_first = arms.c.release.is_(None)
        update = sa.update(arms).where(*is_arm, is_first)
        statement = update.values(release=json.dumps(release))
        with self.writing() as connection:
            has_moved = connection.execute(statement).rowcount == 1
            if has_moved and put is not None:
                put(connection)
            return has_moved

    def set_announced(self, arm: str) -> None:
        """Note that observers have heard of a release."""
        update = sa.update(arms).where(*_arm(self.name, arm))
        statement = update.values(announced=1)
        with self.writing() as connection:
            connection.execute(statement)

    def add_arms(self, connection: Connection, new_arms: Sequence[Arm]) -> None:
        """Insert arms behind the existing ones; refuse an arm that exists with another plan."""
        check_there(connection, self.row)
        for arm in new_arms:
            _add_arm(connection, self.name, arm)
            is_arm = _arm(self.name, arm.plan.arm)
            query = sa.select(arms).where(*is_arm)
            row = connection.execute(query).one()
            # Another process may have been first with this name: its arm stands, and is compared.
            arm_of_row = _read_arm(row, self.row)
            self.check_same(arm.plan, arm_of_row.plan)
            if arm_of_row.digest != arm.digest:  # calibrated elsewhere: the last digits may differ
                raise PrivTuneError(
                    f"Another process has added arm {arm.plan.arm!r} to study {self.name!r} at this "
                    "moment. Nothing was charged here; run again to go on with that arm."
                )

    def check_same(self, plan: AnyPlan, present: AnyPlan) -> None:
        """Refuse a plan that differs from the stored plan of its arm."""
        if present.digest() != plan.digest():
            differences = ", ".join(_differences(plan, present))
            raise PrivTuneError(
                f"Arm {plan.arm!r} of study {self.name!r} exists with another plan "
                f"({differences}), and what was planned does not change. Say "
                "arm='another-name' for a new arm, or make a new study."
            )

    def forget_sealed(self, connection: Connection, arm: str) -> bool:
        """Delete an arm's secret and its sealed results within a transaction.

        Returns:
            True: the ledger moves a charge only where the work beside it says so.
        """
        check_there(connection, self.row)
        self.results.within(f"sealed/{arm}").forget(connection)
        update = sa.update(arms).where(*_arm(self.name, arm))
        connection.execute(update.values(secret=""))
        return True

    def add_failure(self, arm: str, text: str) -> None:
        """Store the traceback of an error that stopped an arm, for the curator alone."""
        with self.writing() as connection:
            values = {
                "id": uuid.uuid4().hex,
                "study": self.name,
                "arm": arm,
                "traceback": text,
                "time": time.time(),
            }
            connection.execute(sa.insert(failures), values)

    def failures(self, arm: str) -> list[dict[str, object]]:
        """Return the errors that stopped an arm, oldest first, each with ``time`` and ``traceback``."""
        columns = sa.select(failures.c.time, failures.c.traceback)
        is_mine = failures.c.study == self.name
        is_of_arm = failures.c.arm == arm
        query = columns.where(is_mine, is_of_arm).order_by(failures.c.time)
        with self.storage.read() as connection:
            rows = connection.execute(query).all()
        return [dict(row._mapping) for row in rows]

    def _note_folder(self, mark: str) -> None:
        """Store the path of the study's folder under its id, so that a deletion can find it."""
        if mark in self.folders.noted():
            return
        self._note(f"{NOTES}{mark}", os.fsencode(self.folder))

    def begin_deletion(self) -> None:
        """Mark the study as being deleted, which stops all other writes to it."""
        self._note(_DELETING, b"")

    def _note(self, name: str, data: bytes) -> None:
        """Store a small result, once, even while the study is being deleted."""
        values = {
            "study": self.name,
            "name": name,
            "data": data,
            "place": None,
            "digest": content_digest(data),
        }
        with self.writing(deleting=True) as connection:
            insert_new(connection, blobs, values)

    def remove(
        self, *, leave_objects: bool = False, leave_files: bool = False
    ) -> tuple[list[Path], list[Path]]:
        """Delete the study's objects, files and rows; return the folders that stay or were not found.

        Args:
            leave_objects: Whether objects stay, as where the store cannot be reached any more.
            leave_files: Whether the rows go even though folders were not found.

        Returns:
            The folders that stay, since they hold files of others; and those that were not found, with
            which the study's rows stay, too.
        """
        objects = self.row.objects
        has_objects = self._has_objects()
        if objects is not None and not leave_objects:
            objects.remove_all(expected=has_objects)
        missing = self.folders.missing()
        within_reach = self.folders.noted().keys() - missing.keys()
        with self.writing(deleting=True) as connection:
            self.folders.begin_removal(connection, within_reach)
        folders = list(self.folders.candidates())
        self._remove_files(folders)
        if missing and not leave_files:
            return [], list(missing.values())
        self._remove_rows()
        # Whoever asked for the study's lock meanwhile made its file anew.
        self._remove_files(folders)
        staying = [folder.path for folder in folders if folder.path.exists()]
        return staying, []

    def _has_objects(self) -> bool:
        """Return whether a result of the study is in its object store."""
        is_mine = blobs.c.study == self.name
        is_object = blobs.c.place.is_not(None)
        names = sa.select(blobs.c.name).where(is_mine, is_object)
        query = names.limit(1)
        with self.storage.read() as connection:
            row = connection.execute(query).first()
        return row is not None

    def _remove_rows(self) -> None:
        """Delete all rows of the study in one transaction."""
        with self.writing(deleting=True) as connection:
            for table in (failures, blobs, arms):
                is_mine = table.c.study == self.name
                connection.execute(sa.delete(table).where(is_mine))
            has_name = studies.c.name == self.name
            connection.execute(sa.delete(studies).where(has_name))

    def _remove_files(self, folders: Sequence[OwnFolder]) -> None:
        """Delete the study's files in its folders; name the file that cannot be deleted."""
        try:
            for folder in folders:
                folder.remove()
        except OSError as error:
            raise PrivTuneError(
                f"{error.filename} cannot be deleted ({error.strerror}), so study {self.name!r} is not "
                f"deleted completely. Mend that, and run again: privtune study delete {self.name}."
            ) from None


_WORDS = {
    "strategy": "the strategy",
    "event": "what it costs",
    "training": "its training: epochs, batch, method or noise",
    "params": "its hyperparameters",
    "runs": "the law of its runs",
    "score": "the score",
    "search": "its search",
    "final": "whether a model is trained after the search",
    "rate": "the share that is tuned on",
    "report": "the report",
    "repeats": "the repetitions",
}
"""The fields of a plan in words, in the order in which a difference is told."""


def _differences(plan: AnyPlan, present: AnyPlan) -> list[str]:
    """Return the differences between a new plan and the existing one in words, declared facts first."""
    facts = _differing_names(plan.public_facts, present.public_facts)
    columns = plan.dataset or {}
    present_columns = present.dataset or {}
    for name in ("columns", "source"):
        if columns.get(name) != present_columns.get(name):
            facts.append(name)
    # Through JSON: a tuple of a plan and the list that was stored of it are one.
    document = json.loads(plan_text(plan))
    present_document = json.loads(plan_text(present))
    fields = _differing_names(document, present_document)
    words = [phrase for name, phrase in _WORDS.items() if name in fields]
    sentences = [f"the declared {name}" for name in facts]
    return [*sentences, *words] or ["its details"]


def _differing_names(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or that one mapping lacks; those of ``one`` first."""
    names = {**one, **other}
    return [name for name in names if one.get(name) != other.get(name)]


def check_there(connection: Connection, row: StudyRow, *, deleting: bool = False) -> None:
    """Refuse to write to a study that was deleted, or whose deletion has begun."""
    # Rows are found by name, and another study of that name may have been made since: a worker that comes
    # back must not hand in on another's charge. The lock keeps the study until the transaction ends.
    lock = _uid_of(row.name).with_for_update(read=not deleting, key_share=not deleting)
    uid = connection.execute(lock).scalar()
    if uid != row.uid:
        folder = row.owner.folder(row.root)
        with contextlib.suppress(OSError):  # what was made here since, nobody else would delete
            OwnFolder(folder, row.owner.id).remove()
        raise _deleted(row.name)
    if deleting:
        return
    is_of_study = blobs.c.study == row.name
    is_note = blobs.c.name == _DELETING
    query = sa.select(blobs.c.name).where(is_of_study, is_note)
    if connection.execute(query).first() is not None:
        raise PrivTuneError(
            f"The deletion of study {row.name!r} has begun and is not complete; complete it with: "
            f"privtune study delete {row.name}. What was charged stays charged."
        )


def _uid_of(name: str) -> sa.Select[str]:
    """Return the query for the id of the study that now has this name."""
    has_name = studies.c.name == name
    return sa.select(studies.c.uid).where(has_name)


def _deleted(name: str) -> PrivTuneError:
    """Return the error for a study that another process has deleted meanwhile."""
    return PrivTuneError(
        f"Study {name!r} was deleted while this process worked for it: nothing of that is kept. "
        "What was charged stays charged."
    )


def _add_arm(connection: Connection, study: str, arm: Arm) -> None:
    """Insert an arm behind the others of its study, unless its name exists there."""
    count = _count_rows(arms, arms.c.study == study)
    row = {
        "study": study,
        "name": arm.plan.arm,
        "number": connection.execute(count).scalar_one(),
        "plan": plan_text(arm.plan),
        "digest": arm.digest,
        "secret": (arm.secret or b"").hex(),
        "announced": 0,
    }
    insert_new(connection, arms, row)


def insert_new(connection: Connection, table: sa.Table, row: Mapping[str, object]) -> bool:
    """Insert a row unless there is one of this key; return whether it was inserted."""
    statement = _insertion(connection.dialect.name, table, frozenset(row))
    result = connection.execute(statement, row)
    return result.rowcount == 1


@cache
def _insertion(dialect: str, table: sa.Table, columns: frozenset[str]) -> Any:
    """Return the statement that inserts a row of some columns unless its key is taken.

    Two processes may insert at once: to look first and insert then would fail for one of them.
    """
    insert: Any
    if dialect == "sqlite":
        from sqlalchemy.dialects.sqlite import insert
    else:
        from sqlalchemy.dialects.postgresql import insert
    values: dict[str, Any] = {}
    for name in sorted(columns):
        values[name] = sa.bindparam(name)
    insertion = insert(table).values(values)
    statement = insertion.on_conflict_do_nothing()
    return statement.execution_options(preserve_rowcount=True)


_OTHER = (
    "and the spec of its study do not have the digest that was stored with them: the plan, the spec, the "
    "study's id or a name is another now"
)
_PLAN = Place("privtune_arms", "plan")
_RELEASE = Place("privtune_arms", "release")


@lru_cache(maxsize=4096)  # a plan never changes, and every question about a study reads it
def _read_plan(text: str, digest: str, study: str) -> AnyPlan:
    """Return the plan read from its stored text; refuse a text that does not match its digest."""
    if _digest_of(study, text) != digest:
        raise _PLAN.error(_OTHER)
    document = read_object(text, _PLAN)
    with parsing(_PLAN):
        if "stage" in document:
            return StagePlan.from_dict(document)
        return Plan.from_dict(document)


def plan_text(plan: AnyPlan) -> str:
    """Return a plan as the JSON text that is stored and digested."""
    return json.dumps(plan.to_dict())


def arm_digest(study: StudyRow, plan: str) -> str:
    """Return the digest of an arm, over its plan's text and its study's id and spec.

    It is of the text, to the last digit: to make a plan of each text and digest that took as long as all
    else that is read of an arm.
    """
    return _digest_of(study.identity, plan)


def _digest_of(study: str, plan: str) -> str:
    """Return the digest of a study's identity and a plan's text, as 64 hexadecimal digits."""
    text = f"{study}\n{plan}"
    return hashlib.sha256(text.encode()).hexdigest()


def arm_place(study: str, arm: str, column: str) -> Place:
    """Return the database place of one column of an arm's row, for error messages."""
    return Place("privtune_arms", column, show_key({"study": study, "name": arm}))


def _read_arm(row: _StoredArm, study: StudyRow) -> Arm:
    """Return the arm of a row; refuse a damaged row with an error that names the arm."""
    try:
        return _arm_of(row, study)
    except StudyCorruptedError as error:
        column = _PLAN.column
        if error.place is not None:
            column = error.place.column
        place = arm_place(study.name, row.name, column)
        raise place.error(error.why) from None


def _arm_of(row: _StoredArm, study: StudyRow) -> Arm:
    """Return the arm of a row; refuse a damaged row with an error that names the column alone."""
    plan = _read_plan(row.plan, row.digest, study.identity)
    if plan.arm != row.name:
        raise _PLAN.error(_OTHER)
    release = None
    release_digest = ""
    if row.release is not None:
        release = read_object(row.release, _RELEASE)
        release_digest = content_digest(row.release.encode())
    elif row.announced or not row.secret:
        raise _RELEASE.error("holds nothing, though the arm is marked as released")
    return Arm(
        plan=plan,
        digest=row.digest,
        secret=bytes.fromhex(row.secret) or None,
        release=release,
        announced=bool(row.announced),
        release_digest=release_digest,
    )


def content_digest(content: bytes) -> str:
    """Return the SHA-256 of a stored result or document."""
    return hashlib.sha256(content).hexdigest()


def _arm(study: str, arm: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the SQL conditions that select the row of one arm of a study."""
    is_of_study = arms.c.study == study
    has_name = arms.c.name == arm
    return is_of_study, has_name


@dataclass(frozen=True)
class Staged:
    """A result prepared for its row: as content, as an object, or as a temporary file.

    Attributes:
        content: What the row itself will hold; None of a large result.
        place: The object's key in the study's object store.
        file: The file, under a name that no result has.
        digest: SHA-256 of the result.
    """

    content: bytes | None = None
    place: str | None = None
    file: Path | None = None
    digest: str = ""


class Results:
    """The results of a study's trainings, by the paths that they have or would have in its folder.

    Small results are in the database; large ones in the study's object store if it has one, else in its
    folder. The first result of a name stays.

    Args:
        storage: The database.
        row: The study's row.
        files: The folder that new files go to.
        folders: All folders that may hold files of the study.
        within: What the names of these results begin with: empty, or the path of a folder and a slash.
    """

    def __init__(
        self,
        storage: Storage,
        row: StudyRow,
        files: OwnFolder,
        folders: StudyFolders,
        within: str = "",
    ) -> None:
        self._storage = storage
        self._row = row
        self._files = files
        self._folders = folders
        self._within = within
        self._objects = row.objects
        self._checked: object = None  # the last transaction that found the study there
        # One folder of objects for each of results; a store need not know the names of arms.
        digest = hashlib.sha256(within.encode()).hexdigest()
        self._object_folder = digest[:16]

    def within(self, folder: str) -> Results:
        """Return the results in a folder of the study."""
        start = f"{folder}/"
        return Results(self._storage, self._row, self._files, self._folders, start)

    @property
    def folder(self) -> Path:
        """The path of the folder for files of these results."""
        return self._files.path / self._within

    def check(self) -> None:
        """Write, read and delete a test object in the object store, if the study has one."""
        if self._objects is not None:
            self._objects.check()

    def put(
        self, name: str, content: bytes, *, replace: bool = False, in_row: bool = False
    ) -> None:
        """Store a result; keep an existing one of the same name unless ``replace`` is True.

        Args:
            name: Its path in the study's folder.
            content: What is stored.
            replace: Whether it takes the place of one that is there.
            in_row: Whether it stays in the database, however long it is.
        """
        if in_row:
            staged = Staged(content, digest=content_digest(content))
        else:
            staged = self.stage(name, content)
        try:
            with self._storage.write() as connection:
                self.insert(name, staged, connection, replace=replace)
        except PrivTuneError:  # as of a study that was deleted
            self.discard(name, staged)
            raise

    def stage(self, name: str, content: bytes) -> Staged:
        """Write a large result to its object or temporary file, before the transaction of its row."""
        digest = content_digest(content)
        if len(content) <= _LARGE:
            return Staged(content, digest=digest)
        if self._objects is None:
            temporary_name = f"{self._within}{name}.staged-{uuid.uuid4().hex}"
            # On the disk before its row is committed.
            file = self._files.write(temporary_name, content)
            return Staged(file=file, digest=digest)
        identity = self._within + name
        place = self._objects.put(
            content,
            identity=identity,
            folder=self._object_folder,
        )
        return Staged(place=place, digest=digest)

    def insert(
        self, name: str, staged: Staged, connection: Connection, *, replace: bool = False
    ) -> None:
        """Insert the row of a staged result; if its name is taken, replace or discard as ``replace`` says.

        It may be called twice: by whoever does not know whether the first transaction was committed.

        Args:
            name: The result's name in this folder.
            staged: What ``stage`` returned.
            connection: Of the transaction that the result belongs to.
            replace: Whether it takes the place of one that is there.
        """
        transaction = connection.get_transaction()
        if transaction is None or transaction is not self._checked:
            # Once in a transaction: its lock keeps the study until it ends.
            check_there(connection, self._row)
            self._checked = transaction
        path = self._within + name
        values = {"data": staged.content, "place": staged.place, "digest": staged.digest}
        row = {"study": self._row.name, "name": path, **values}
        is_stored = insert_new(connection, blobs, row)
        if replace and not is_stored:
            query = sa.select(blobs.c.place).where(*self._mine(name))
            former_place = connection.execute(query).scalar_one()
            update = sa.update(blobs).where(*self._mine(name))
            connection.execute(update.values(values))
            self._drop(Staged(place=former_place))
            is_stored = True
        if not is_stored:
            self._drop(staged)
        elif staged.file is not None and staged.file.exists():
            final_file = self._files.file(path)
            staged.file.replace(final_file)

    def discard(self, name: str, staged: Staged) -> None:
        """Delete the object or file of a staged result unless its row has been stored."""
        with self._storage.read() as connection:
            place = self._place_of(name, connection)
        if staged.place is None or staged.place != place:
            self._drop(staged)

    def _place_of(self, name: str, connection: Connection) -> str | None:
        """Return the object-store place of a result; None if the result is stored elsewhere or is missing."""
        query = sa.select(blobs.c.place).where(*self._mine(name))
        return connection.execute(query).scalar_one_or_none()

    def _drop(self, staged: Staged) -> None:
        """Delete the object and the file of a result that no row names."""
        if staged.place is not None and self._objects is not None:
            self._objects.remove(staged.place)
        if staged.file is not None:
            staged.file.unlink(missing_ok=True)

    def get(self, name: str) -> bytes | None:
        """Return the content of a result; None if there is none.

        Raises:
            DamagedResultError: If it is not what was stored.
        """
        columns = sa.select(blobs.c.data, blobs.c.place, blobs.c.digest)
        query = columns.where(*self._mine(name))
        with self._storage.read() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        content = row.data
        if content is None:
            content = self._get_large(name, row.place)
        if content_digest(content) != row.digest:
            raise self.damaged(name)
        return bytes(content)

    def damaged(self, name: str) -> DamagedResultError:
        """Return the error of a result that is not what was stored under its name."""
        key = show_key({"study": self._row.name, "name": self._within + name})
        place = Place("privtune_blobs", "data", key)
        words = str(place.error("is not the result that was stored there"))
        error = DamagedResultError(words)
        error.place = place
        return error

    def _get_large(self, name: str, place: str | None) -> bytes:
        """Return the content of a result from its object, or from its file in the study's folder."""
        path = self._within + name
        if place is not None and self._objects is not None:
            return self._objects.get(place, identity=path)
        folder = self._folders.find(path)
        if folder is None:
            raise UnreachableFileError(
                f"A model of study {self._row.name!r} is too large for the database, and it is not in "
                f"{self.folder}. Work where that folder is, or say where its files are: "
                "PRIVTUNE_ARTIFACTS=FOLDER."
            )
        return folder.read(path)

    def get_small(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of those results that are stored in the database itself, by name."""
        contents: dict[str, bytes] = {}
        columns = sa.select(blobs.c.name, blobs.c.data, blobs.c.digest)
        is_in_row = blobs.c.data.is_not(None)
        is_of_study = blobs.c.study == self._row.name
        in_rows = columns.where(is_of_study, is_in_row)
        with self._storage.read() as connection:
            for first in range(0, len(names), _NAMES_AT_ONCE):
                some_names = names[first : first + _NAMES_AT_ONCE]
                paths = [self._within + name for name in some_names]
                has_path = blobs.c.name.in_(paths)
                query = in_rows.where(has_path)
                for row in connection.execute(query):
                    if content_digest(row.data) != row.digest:
                        continue  # whoever gets it by its name is told
                    name = row.name.removeprefix(self._within)
                    contents[name] = bytes(row.data)
        return contents

    def find(self, name: str) -> bytes | None:
        """Return the content of a result; None if there is none, or a damaged one, which is deleted."""
        try:
            return self.get(name)
        except DamagedResultError:
            with self._storage.write() as connection:
                self.lose(name, connection)
            return None

    def lose(self, name: str, connection: Connection) -> None:
        """Delete the row and the object of a damaged result."""
        place = self._place_of(name, connection)
        self._drop(Staged(place=place))
        statement = sa.delete(blobs).where(*self._mine(name))
        connection.execute(statement)

    def names(self) -> list[str]:
        """Return the names of the results in this folder, in order."""
        is_here = self._all()
        query = sa.select(blobs.c.name).where(*is_here)
        with self._storage.read() as connection:
            paths = connection.scalars(query).all()
        return sorted(path.removeprefix(self._within) for path in paths)

    def forget(self, connection: Connection) -> None:
        """Delete the results in this folder, with what workers that died left there."""
        statement = sa.delete(blobs).where(*self._all())
        connection.execute(statement)
        # What cannot be reached now goes with the study: its files are listed, its keys forgotten here.
        with contextlib.suppress(OSError):
            self._files.remove(self._within)
        if self._objects is not None:
            with contextlib.suppress(PrivTuneError):
                self._objects.remove_all(self._object_folder)

    def _mine(self, name: str) -> tuple[sa.ColumnElement[bool], ...]:
        """Return the SQL conditions that select the row of one result."""
        is_of_study = blobs.c.study == self._row.name
        has_name = blobs.c.name == self._within + name
        return is_of_study, has_name

    def _all(self) -> tuple[sa.ColumnElement[bool], ...]:
        """Return the SQL conditions that select the rows of all results in this folder."""
        is_of_study = blobs.c.study == self._row.name
        # Not LIKE, to which an underscore in a name is any letter.
        start = sa.func.substr(blobs.c.name, 1, len(self._within))
        return is_of_study, start == self._within
