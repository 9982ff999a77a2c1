"""Copies of a SQLite ledger: whole ones, and ones without the write-ahead log."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from privtune.accounting import Gaussian
from privtune.errors import InvalidInputError
from privtune.ledger import (
    Budget,
    ChargeRequest,
    Ledger,
    LedgerCorruptedError,
    StoreCopyError,
    UnknownBudgetError,
    backup,
    verify,
)
from privtune.ledger.backups import DRAFT
from privtune.ledger.doctor import check_storage
from privtune.ledger.errors import LedgerConnectionError
from privtune.study.restore import restore_store

ASKED = ChargeRequest(Gaussian(20.0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    """A ledger with nine entries, the last eight in the write-ahead log, open all the while."""
    with Ledger(f"sqlite:///{path}") as opened:
        opened.create_budget(Budget(4.0, 1e-5, name="b"))
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        for _ in range(8):
            opened.reserve("b", [ASKED])
        yield opened


def copied(path: Path, tmp_path: Path, *endings: str) -> Ledger:
    """Copy the database and what lies beside it, as `cp` would."""
    there = tmp_path / "there"
    there.mkdir()
    for ending in ("", *endings):
        shutil.copy(f"{path}{ending}", f"{there / path.name}{ending}")
    return Ledger(f"sqlite:///{there / path.name}")


def test_a_copy_without_the_log_knows_what_is_missing(
    ledger: Ledger, path: Path, tmp_path: Path
) -> None:
    with copied(path, tmp_path, "-heads") as copy:
        for use in (
            lambda: verify(copy.log.storage, "b"),
            lambda: copy.remaining("b"),
            lambda: copy.spent("b"),
        ):
            with pytest.raises(LedgerCorruptedError, match=r"1 of 9 entries.*write-ahead log"):
                use()


def test_a_budget_that_is_missing_whole_is_not_made_again(tmp_path: Path) -> None:
    """The very first checkpoint may not have come: the copy then has no budget at all."""
    path = tmp_path / "ledger.db"
    with Ledger(f"sqlite:///{path}") as first:
        first.create_budget(Budget(4.0, 1e-5, name="b"))
        first.reserve("b", [ASKED])
        with copied(path, tmp_path, "-heads") as copy:
            for use in (
                lambda: verify(copy.log.storage, "b"),
                lambda: copy.charges("b"),
            ):
                with pytest.raises(LedgerCorruptedError, match="0 of 2 entries"):
                    use()
            with pytest.raises(UnknownBudgetError):
                copy.charges("c")


def test_a_copy_of_the_database_alone_says_what_cannot_be_told(
    ledger: Ledger, path: Path, tmp_path: Path
) -> None:
    with copied(path, tmp_path) as copy:
        found = verify(copy.log.storage, "b")
        assert found.charges == 0
        assert "not be noticed" in found.warnings[0]
    assert verify(ledger.log.storage, "b").warnings == ()


def test_an_old_copy_that_is_put_back_is_told(path: Path, ledger: Ledger, tmp_path: Path) -> None:
    old = backup(ledger.log.storage, tmp_path / "old.db")
    ledger.reserve("b", [ASKED])
    ledger.close()
    shutil.copy(old, path)
    with Ledger(f"sqlite:///{path}") as back, pytest.raises(LedgerCorruptedError, match="9 of 10"):
        back.spent("b")
    with pytest.raises(LedgerCorruptedError, match="9 of 10"):
        restore_store(path)
    Path(f"{path}-heads").unlink()  # as the message says, for who means it
    with Ledger(f"sqlite:///{path}") as back, pytest.raises(StoreCopyError):
        back.reserve("b", [ASKED])
    restore_store(path)
    with Ledger(f"sqlite:///{path}") as back:
        back.reserve("b", [ASKED])
        (warning,) = verify(back.log.storage, "b").warnings
        assert "restored from a copy" in warning


def test_a_log_that_went_another_way_is_told(path: Path, ledger: Ledger, tmp_path: Path) -> None:
    old = backup(ledger.log.storage, tmp_path / "old.db")
    restore_store(old)
    with Ledger(f"sqlite:///{old}") as other:
        other.reserve("b", [ASKED])
    ledger.reserve("b", [ASKED])
    ledger.close()
    shutil.copy(old, path)
    with (
        Ledger(f"sqlite:///{path}") as back,
        pytest.raises(LedgerCorruptedError, match="entry 10 is not the one"),
    ):
        back.spent("b")


def test_a_new_database_owes_nothing_to_one_that_is_gone(path: Path, ledger: Ledger) -> None:
    ledger.close()
    for ending in ("", "-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    with Ledger(f"sqlite:///{path}") as fresh:
        fresh.create_budget(Budget(4.0, 1e-5, name="b"))
        assert verify(fresh.log.storage, "b").warnings == ()


def test_heads_that_cannot_be_noted_stop_nobody(path: Path, tmp_path: Path) -> None:
    Path(f"{path}-heads").mkdir()
    with pytest.raises(LedgerConnectionError, match="-heads is a folder"):
        Ledger(f"sqlite:///{path}")
    Path(f"{path}-heads").rmdir()
    with Ledger(f"sqlite:///{path}") as ledger:
        Path(f"{path}-heads").mkdir()  # meanwhile
        ledger.create_budget(Budget(4.0, 1e-5, name="b"))
        ledger.reserve("b", [ASKED])
        assert "not be noticed" in verify(ledger.log.storage, "b").warnings[0]


def test_a_line_that_broke_off_says_nothing(path: Path, ledger: Ledger) -> None:
    with Path(f"{path}-heads").open("a") as file:
        file.write("b 99 abc")
    with Ledger(f"sqlite:///{path}") as again:
        assert len(again.charges("b")) == 8


def test_a_backup_is_whole_and_its_owners(ledger: Ledger, tmp_path: Path) -> None:
    file = backup(ledger.log.storage, tmp_path / "copy.db")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(f"{file}-heads").stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.tmp"))
    with Ledger(f"sqlite:///{file}") as copy:
        found = verify(copy.log.storage, "b", head=ledger.head("b"))
        assert found.charges == 8
        (warning,) = found.warnings
        assert f"This database is a copy of {ledger.log.storage.identity().home.place}" in warning
    with pytest.raises(InvalidInputError, match="must be a new file"):
        backup(ledger.log.storage, file)
    with pytest.raises(InvalidInputError, match="in a folder that exists"):
        backup(ledger.log.storage, tmp_path / "no" / "copy.db")


@pytest.mark.postgres
def test_postgres_has_its_own_tool(postgres_url: str, tmp_path: Path) -> None:
    with (
        Ledger(postgres_url) as ledger,
        pytest.raises(InvalidInputError, match="pg_dump") as caught,
    ):
        backup(ledger.log.storage, tmp_path / "copy.db")
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("end", ["-heads", "-WAL"])
def test_no_backup_onto_a_name_that_a_store_gives(ledger: Ledger, tmp_path: Path, end: str) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidInputError, match="must not end in -wal"):
        backup(ledger.log.storage, tmp_path / f"other.db{end}")
    assert sorted(tmp_path.iterdir()) == before


def test_a_backup_that_was_killed_leaves_a_draft_that_the_doctor_shows(
    ledger: Ledger, path: Path, tmp_path: Path
) -> None:
    code = (
        "import os, signal; from pathlib import Path\n"
        "from privtune.ledger import Ledger, backups\n"
        "def killed(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "copy = backups._copy\n"
        "backups._copy = lambda *a: (copy(*a), killed())\n"
        f"storage = Ledger('sqlite:///{path}').log.storage\n"
        f"backups.backup(storage, Path({str(tmp_path / 'copy.db')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(f"{DRAFT}*")
    assert not (tmp_path / "copy.db").exists()
    assert str(left) in str([check.says for check in check_storage(f"sqlite:///{path}")])
    left.unlink()
    for _ in range(2):  # heads of a copy that was removed are no obstacle
        copy = backup(ledger.log.storage, tmp_path / "copy.db")
        with Ledger(f"sqlite:///{copy}") as again:
            assert verify(again.log.storage, "b").charges == 8
        copy.unlink()
