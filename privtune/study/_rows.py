"""The row of a study; one insertion for every table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from privtune.errors import PrivTuneError
from privtune.files import OwnFolder
from privtune.ledger.schema import blobs, studies

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
