"""Databases and folders of other users: read, and neither written to nor believed."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from privtune import imports
from privtune.accounting import Gaussian
from privtune.errors import PrivTuneError
from privtune.files import OwnFolder, folder_problem, own_folder
from privtune.ledger import Budget, ChargeRequest, Ledger, LedgerCorruptedError
from tests.users import error_as_user

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")

ME, OTHER, TEAM = 1234, 1235, 4321
REQUEST = ChargeRequest(Gaussian(50.0))


def as_user(uid: int, act: Callable[[], object]) -> str:
    """Do something as a member of the team; return what it raised in words, or nothing."""
    return error_as_user(uid, TEAM, act)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user reaches."""
    name = subprocess.run(["mktemp", "-d"], check=True, capture_output=True, text=True).stdout
    folder = Path(name.strip())
    folder.chmod(0o755)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def made_by(uid: int, folder: Path, mode: int) -> Path:
    """Make a folder with a database of a user, which everybody may read and write to."""
    folder.mkdir()
    path = folder / "p.db"
    with Ledger(path) as ledger:
        ledger.create_budget(Budget(2.0, 1e-5, name="b"))
    warm = folder / "warm.db"  # a child of another user may not be able to read the libraries
    with Ledger(warm) as ledger:
        ledger.create_budget(Budget(2.0, 1e-5, name="b"))
    charge(warm)
    read(warm, count=1)
    for file in folder.glob("warm*"):
        file.unlink()
    for file in (folder, *folder.iterdir()):
        os.chown(file, uid, TEAM)
    for file in folder.iterdir():
        file.chmod(0o666)
    folder.chmod(mode)
    return path


def charge(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.reserve("b", [REQUEST])


def read(path: Path, count: int = 0) -> None:
    with Ledger(path) as ledger:
        assert [budget.name for budget in ledger.budgets()] == ["b"]
        assert len(ledger.charges("b")) == count


@needs_root
@pytest.mark.parametrize("mode", [0o775, 0o2775, 0o777, 0o707])
def test_where_others_may_rename_a_database_nothing_is_written(place: Path, mode: int) -> None:
    path = made_by(ME, place / "shared", mode)
    said = as_user(ME, lambda: charge(path))
    assert said.startswith("LedgerConnectionError")
    assert f"chmod go-w {path.parent}" in said
    assert as_user(ME, lambda: read(path)) == ""
    path.parent.chmod(0o755)
    assert as_user(ME, lambda: charge(path)) == ""


@needs_root
def test_no_database_is_made_where_others_may_rename_it(place: Path) -> None:
    (place / "shared").mkdir()
    os.chown(place / "shared", ME, TEAM)
    (place / "shared").chmod(0o770)
    said = as_user(ME, lambda: charge(place / "shared" / "new.db"))
    assert said.startswith("LedgerConnectionError")
    assert list((place / "shared").iterdir()) == []


@needs_root
def test_a_sticky_folder_and_a_group_of_ones_own_will_do(place: Path) -> None:
    path = made_by(ME, place / "sticky", 0o1777)
    assert as_user(ME, lambda: charge(path)) == ""
    mine = place / "mine"
    mine.mkdir(mode=0o775)
    mine.chmod(0o775)
    charge_url = mine / "p.db"
    with Ledger(charge_url) as ledger:  # root's own group has no other member
        ledger.create_budget(Budget(2.0, 1e-5, name="b"))


@needs_root
def test_a_database_of_another_user_is_read_and_no_more(place: Path) -> None:
    path = made_by(OTHER, place / "theirs", 0o777)
    said = as_user(ME, lambda: charge(path))
    assert "belongs to another user (uid 1235)" in said
    assert as_user(ME, lambda: read(path)) == ""


@needs_root
def test_a_database_in_a_folder_of_another_user(place: Path) -> None:
    path = made_by(ME, place / "theirs", 0o755)
    os.chown(path.parent, OTHER, OTHER)
    said = as_user(ME, lambda: charge(path))
    assert f"{path.parent} belongs to another user" in said
    assert as_user(ME, lambda: read(path)) == ""


@needs_root
def test_a_module_that_another_users_database_names_is_not_imported(place: Path) -> None:
    path = made_by(OTHER, place / "theirs", 0o755)
    (path.parent / "evil.py").write_text("raise SystemExit('imported')\n")

    def look() -> None:
        os.chdir(path.parent)
        imports.OWN_PROCESS.set()
        with Ledger(path):
            pass
        imports.find_function("task", "evil:task", allowed="", must="")

    said = as_user(ME, look)
    assert "module evil is not imported" in said
    assert said.startswith("PrivTuneError")


@pytest.mark.parametrize("table", ["privtune_studies", "privtune_schema", "privtune_store"])
def test_a_view_in_the_place_of_a_table_is_not_read(tmp_path: Path, table: str) -> None:
    """It might never end, and no signal would stop it."""
    path = tmp_path / "p.db"
    with Ledger(path):
        pass
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(f"ALTER TABLE {table} RENAME TO kept")
        connection.execute(f"CREATE VIEW {table} AS {endless}")
        connection.commit()
    with pytest.raises(LedgerCorruptedError, match=f"holds a view or a trigger, '{table}'"):
        Ledger(path)


def test_a_trigger_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    with Ledger(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        trigger = "CREATE TRIGGER t AFTER INSERT ON privtune_budgets BEGIN SELECT 1; END"
        connection.execute(trigger)
        connection.commit()
    with pytest.raises(LedgerCorruptedError, match="trigger, 't'"):
        Ledger(path)


def test_a_folder_that_is_exchanged_while_it_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is deleted lies in the folder that was looked at, whatever has its name by now."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis").write_text("precious")
    folder = OwnFolder(own_folder(tmp_path / "studies") / "toy", "id")
    folder.write("evil/dummy", b"")
    folder._append(["id", "evil/"])
    listdir = os.listdir

    def exchange(path: int | Path) -> list[str]:
        names = [*listdir(path), "thesis"]
        (folder.path / "evil").rename(folder.path / "aside")
        (folder.path / "evil").symlink_to(victim)
        return names

    monkeypatch.setattr("privtune.files.os.listdir", exchange)
    folder.remove()
    assert (victim / "thesis").read_text() == "precious"


@needs_root
def test_another_members_file_blocks_no_deletion(place: Path) -> None:
    root = place / "studies"
    root.mkdir()
    os.chown(root, ME, TEAM)
    root.chmod(0o3770)

    def write() -> None:
        os.environ["PRIVTUNE_ARTIFACTS"] = str(root)
        OwnFolder(root / "toy", "id").write("arm/model", b"ours")

    def plant() -> None:
        (root / "toy" / "evil").mkdir(mode=0o755)
        (root / "toy" / "evil" / "theirs").write_text("theirs")
        with (root / "toy" / OwnFolder.LIST).open("a") as file:
            file.write('\n["id", "evil/theirs"]\n')

    def delete() -> None:
        os.environ["PRIVTUNE_ARTIFACTS"] = str(root)
        left = OwnFolder(root / "toy", "id").remove()
        assert [path.name for path in left] == ["theirs"]

    assert as_user(ME, write) == ""
    assert as_user(OTHER, plant) == ""
    assert as_user(ME, delete) == ""
    assert [path.name for path in (root / "toy" / "evil").iterdir()] == ["theirs"]
    assert not (root / "toy" / "arm").exists()


@needs_root
def test_a_link_of_another_user_is_no_folder_of_studies(tmp_path: Path) -> None:
    target = tmp_path / "project"
    target.mkdir(mode=0o700)
    link = tmp_path / "privtune-artifacts"
    link.symlink_to(target)
    assert folder_problem(link) is None
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    assert "is a link of another user" in str(folder_problem(link))
    with pytest.raises(PrivTuneError, match="is a link of another user"):
        own_folder(link)
    assert stat.S_IMODE(target.stat().st_mode) == 0o700


def test_a_picture_takes_no_settings_from_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 77\n")
    code = (
        "from privtune import imports\n"
        "from privtune.plots.image import _away_from_settings\n"
        "imports.OWN_PROCESS.set()\n"
        "with _away_from_settings():\n"
        "    import matplotlib\n"
        "print(matplotlib.rcParams['font.size'])\n"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "10.0"
