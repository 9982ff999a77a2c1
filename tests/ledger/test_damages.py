"""Damaged and forged rows. CI runs some of them; all of them with PRIVTUNE_CAMPAIGN=full."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from privtune.errors import PrivTuneError, UnreachableFileError
from privtune.ledger import Ledger, LedgerCorruptedError
from privtune.ledger import schema as tables
from privtune.ledger.errors import OUT_OF_REACH, Place, StudyCorruptedError
from privtune.ledger.reading import parsing, read_object
from privtune.study import Study
from tests.ledger.damages import (
    DONE,
    URL,
    Bench,
    Damage,
    bench,
    cut_files,
    flipped_bytes,
    forged_values,
    wrong_values,
)
from tests.tiers import FULL

LOG = logging.getLogger("campaign")
TABLES = [*tables.metadata.sorted_tables, tables.version]
COLUMNS = [(table, column.name) for table in TABLES for column in table.columns]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A storage with a finished study and one half way, in the working folder."""
    with bench(tmp_path_factory.mktemp("damages")) as made:
        yield made


def chosen(made: Bench) -> list[Damage]:
    """All damages, or as many as ``PRIVTUNE_DAMAGES`` says; of the short version some of each kind."""
    forged, wrong = forged_values(), wrong_values(made.tables())
    if FULL:
        files = [*flipped_bytes(200, seed=1), *cut_files(50, seed=1)]
        damages = [*forged, *wrong, *files]
        count = int(os.environ.get("PRIVTUNE_DAMAGES", len(damages)))
        return random.Random(24).sample(damages, count)
    rng = random.Random(24)
    some = [*rng.sample(forged, 6), *rng.sample(wrong, 5)]
    return [*some, *flipped_bytes(1, seed=1), *cut_files(1, seed=1)]


@pytest.mark.slow
def test_damages_are_refused_in_a_sentence(store: Bench) -> None:
    each = int(os.environ.get("PRIVTUNE_DAMAGES_EACH", "0")) or None
    found = store.count(chosen(store), each=each, tell=LOG.info)
    LOG.info(found)
    assert found.cells > 0
    assert found.refused > found.cells / 10, "nothing was damaged"
    assert (found.tracebacks, found.hangs, found.wrong) == ({}, [], {})


def wrong_of(table: sa.Table, column: str) -> object:
    """Return a value that a column cannot hold."""
    return b"\x00\xff" if not isinstance(table.c[column].type.impl, sa.LargeBinary) else "text"


@pytest.mark.parametrize(("table", "column"), COLUMNS, ids=str)
def test_each_column_names_what_is_wrong_with_it(
    store: Bench, table: sa.Table, column: str
) -> None:
    """Whoever reads a value of another type is told table, column and row, and what to do."""
    store.restore()
    with closing(sqlite3.connect("privtune.db")) as connection:
        if connection.execute(f"SELECT count(*) FROM {table.name}").fetchone() == (0,):
            pytest.skip("holds no row in this storage")
        for verb in ("UPDATE", "DELETE"):
            connection.execute(f"DROP TRIGGER IF EXISTS privtune_entries_no_{verb}")
        connection.execute("PRAGMA ignore_check_constraints = ON")
        last = f"SELECT max(rowid) FROM {table.name}"
        statement = f"UPDATE {table.name} SET {column} = ? WHERE rowid = ({last})"
        connection.execute(statement, (wrong_of(table, column),))
        connection.commit()
    words = rf"table {table.name}, column {column}, row .* = .*\. .* put a copy in its place"
    with (
        pytest.raises((LedgerCorruptedError, StudyCorruptedError), match=words) as caught,
        Ledger(URL) as ledger,
        ledger.log.storage.read() as connection,
    ):
        connection.execute(sa.select(table)).all()
    assert len(str(caught.value)) < 700


FORGED = {
    "privtune_arms.plan: floats moved": "column plan, row study = 'done', name = 'quantiles' and the",
    "the scale of a stage": "column plan, row study = 'done', name = 'quantiles' and the spec",
    "the δ of a spec": "column plan, row study = 'done', name = 'quantiles' and the spec",
    "a metric of a release": "column release, row study = 'done', name = 'one' is not the release that",
    "a release taken away": "column release, row study = 'done', name = 'quantiles' holds nothing",
    "releases exchanged": "column release, row study = 'done', name = 'one' is not the release that",
    "models exchanged": "table privtune_blobs, column data, row .*'one/model.safetensors' is not",
    "a bit of a model's weights": "column data, row .*model.safetensors' is not the result",
    "trials' values moved": "table trials, .* other trials than those that were settled",
    "a bit of a sealed round": "column data, row .*'trials/many/round-000000.json' is not the result",
    "a sealed trial's score moved": "table privtune_blobs, .* other trials than those that were settled",
}


def show_all() -> None:
    """Show what a study released, and what its curator sees."""
    with closing(Study(DONE, URL, curator=True)) as study:
        study.export()
        study.sealed_trials("many")
        study.release("every").to_optuna()


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_value_is_told_by_what_binds_it(store: Bench, name: str) -> None:
    """Well-typed, so that only a digest can tell; whoever shows it refuses."""
    store.restore()
    [damage] = [each for each in forged_values() if each.name == name]
    damage.do(Path("privtune.db"))
    with pytest.raises(PrivTuneError, match=FORGED[name]):
        show_all()


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"a": 1}}', b"\xff"])
def test_a_text_that_is_no_object_is_refused(text: str | bytes) -> None:
    place = Place("privtune_arms", "plan", "name = 'one'")
    with pytest.raises(StudyCorruptedError, match="row name = 'one' holds no JSON object"):
        read_object(text, place)


@pytest.mark.parametrize("kind", [*OUT_OF_REACH, UnreachableFileError])
def test_what_is_out_of_reach_is_not_called_damaged(kind: type[Exception]) -> None:
    """A document names files, and the connection may be lost while one of them is read."""
    with pytest.raises(kind, match="the server went away"), parsing(Place("arms", "release")):
        raise kind("the server went away")


def test_an_error_of_a_sealed_row_tells_no_number(store: Bench) -> None:
    """How many tasks and results there are is sealed."""
    store.restore()
    with closing(sqlite3.connect("privtune.db")) as connection:
        connection.execute("UPDATE privtune_tasks SET worker = x'00'")
        connection.execute("UPDATE privtune_blobs SET data = 5 WHERE name LIKE 'sealed/%'")
        connection.commit()
    for table in (tables.tasks, tables.blobs):
        with (
            pytest.raises((LedgerCorruptedError, StudyCorruptedError)) as caught,
            Ledger(URL) as ledger,
            ledger.log.storage.read() as connection,
        ):
            connection.execute(sa.select(table)).all()
        assert "number" not in str(caught.value)
        assert "trial-" not in str(caught.value)
