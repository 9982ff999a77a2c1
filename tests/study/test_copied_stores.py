"""A copy of a store is read and no more; what was moved goes on; a restored copy has files of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import fsspec
import pytest
import sqlalchemy as sa

from privtune.accounting import Gaussian
from privtune.errors import PrivTuneError
from privtune.ledger import Budget, ChargeRequest, Ledger, StoreCopyError, backup, verify
from privtune.ledger.identity import Home
from privtune.study import Study, delete_study, study_names
from privtune.study.lifecycle import FilesMissingError, Life
from privtune.study.restore import restore_store
from tests.ledger.conftest import POSTGRES, PostgresSchemas
from tests.study.conftest import toy_spec

ARMS = toy_spec().model_dump(mode="json")["arms"][:2]
ASKED = ChargeRequest(Gaussian(100.0))


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def ran(storage: str, **changes: object) -> None:
    """Run a study of two arms, whose models are files, or objects."""
    with closing(
        Study.create(toy_spec(**{"arms": ARMS, "epochs": 1, "epsilon": 4.0, **changes}), storage)
    ) as study:
        study.run()


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder but the ledgers' own."""
    return {
        str(path): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".db" not in path.name
    }


@pytest.fixture(autouse=True)
def _models_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privtune.study.rows._LARGE", 100)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of a store with a study that has run."""
    folder = tmp_path / "home"
    folder.mkdir()
    ran(url_of(folder / "p.db"))
    return folder


def by_backup(home: Path, there: Path) -> None:
    with Ledger(home / "p.db") as ledger:
        backup(ledger.log.storage, there / "p.db")


def by_backup_at_home(home: Path, there: Path) -> None:
    """The original is gone, and its backup lies where it was."""
    by_backup(home, there)
    for path in home.glob("p.db*"):
        path.unlink()
    for path in there.glob("p.db*"):
        path.rename(home / path.name)
    there.rmdir()
    there.symlink_to(home)


def by_cp(home: Path, there: Path) -> None:
    there.rmdir()
    subprocess.run(["cp", "-r", str(home), str(there)], check=True)


def by_archive(home: Path, there: Path) -> None:
    archive = shutil.make_archive(str(there / "a"), "tar", home)
    shutil.unpack_archive(archive, there)
    Path(archive).unlink()


def by_reused_name(home: Path, there: Path) -> None:
    """The original was renamed, and a copy lies where it was."""
    by_cp(home, there)
    home.rename(home.with_name("renamed"))
    there.rename(home)
    there.symlink_to(home)


COPYING = [by_backup, by_backup_at_home, by_cp, by_archive, by_reused_name]


@pytest.fixture(params=COPYING, ids=lambda copying: copying.__name__)
def copy(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Path:
    """A copy of the store, however it was made."""
    there = tmp_path / "there"
    there.mkdir()
    request.param(home, there)
    return there / "p.db"


def writes(url: str) -> list[Callable[[], object]]:
    """Everything that changes a store or its files."""

    def charge() -> None:
        with Ledger(url) as ledger:
            ledger.reserve("toy", [ASKED])

    def record() -> None:
        with Ledger(url) as ledger:
            ledger.record("toy", ASKED)

    def create_budget() -> None:
        with Ledger(url) as ledger:
            ledger.create_budget(Budget(1.0, 1e-6, name="other"))

    def close() -> None:
        with Ledger(url) as ledger:
            ledger.close_budget("toy")

    def run() -> None:
        arms = [{**ARMS[0], "name": "more"}]
        ran(url, name="more", arms=arms)

    return [charge, record, create_budget, close, run, lambda: delete_study("toy", url)]


def test_a_copy_is_read_and_changes_nothing(copy: Path, tmp_path: Path) -> None:
    url = url_of(copy)
    before = contents(tmp_path)
    for write in writes(url):
        with pytest.raises(StoreCopyError, match="privtune budget restore"):
            write()
    assert contents(tmp_path) == before
    with Ledger(url) as ledger:
        assert len(ledger.charges("toy")) == 2
        (warning,) = (w for w in verify(ledger.log.storage, "toy").warnings if "is a copy" in w)
        assert "Charges that were made there after the copy" in warning
    with closing(Study("toy", url)) as study:
        assert [release.arm for release in study.releases()] == ["defaults", "selection"]
        assert study.certificate()["budget"]["terms"]["name"] == "toy"
        assert study.status()[0].state == "settled"
    assert contents(tmp_path) == before


def test_a_restored_copy_has_files_of_its_own(copy: Path, home: Path, tmp_path: Path) -> None:
    url = url_of(copy)
    with closing(Study("toy", url)) as study:
        weights = study.release("defaults").model.state_dict()
    done = restore_store(url)
    assert done.store != done.origin
    originals = contents(tmp_path)
    with closing(Study("toy", url)) as study:
        restored = study.release("defaults").model.state_dict()
        assert all(bool((restored[name] == weights[name]).all()) for name in weights)
    with Ledger(url) as ledger:
        ledger.reserve("toy", [ASKED])
        (warning,) = verify(ledger.log.storage, "toy").warnings
        assert "restored from a copy" in warning
    assert delete_study("toy", url) == []
    left = contents(tmp_path)
    assert left.items() <= originals.items()
    gone = originals.keys() - left.keys()
    assert gone
    owners = {json.loads(line)[0] for line in lists(left)}
    assert len(owners) == 1, "what is left is the original's alone"
    with pytest.raises(PrivTuneError, match="is no copy"):
        restore_store(url)


def lists(files: dict[str, bytes]) -> Iterator[str]:
    for name, content in files.items():
        if Path(name).name == ".privtune":
            yield from (line for line in content.decode().splitlines() if line.strip())


def test_the_original_goes_on_beside_its_copy(home: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    by_cp(home, tmp_path / "there")
    restore_store(tmp_path / "there" / "p.db")
    copied = contents(tmp_path / "there")
    assert delete_study("toy", url_of(home / "p.db")) == []
    assert contents(home) == {}
    assert contents(tmp_path / "there") == copied


@pytest.mark.parametrize("what", ["folder", "database"])
def test_a_store_that_was_moved_goes_on(what: str, home: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    if what == "folder":
        home.rename(there)
    else:
        there.mkdir()
        for path in home.glob("p.db*"):
            path.rename(there / path.name)
    url = url_of(there / "p.db")
    with Ledger(url) as ledger:
        ledger.reserve("toy", [ASKED])
        assert ledger.log.storage.identity().home.place == str(there / "p.db")
        assert verify(ledger.log.storage, "toy").warnings == ()
    with closing(Study("toy", url)) as study:
        assert study.release("defaults").model is not None
    assert delete_study("toy", url) == []
    assert contents(tmp_path) == {}


def test_files_that_are_not_found_are_said_and_wait(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(home / "p.db")
    (home / "p-artifacts").rename(tmp_path / "aside")
    before = contents(tmp_path / "aside")
    for _ in range(2):
        with pytest.raises(
            FilesMissingError, match="PRIVTUNE_ARTIFACTS=FOLDER privtune study delete"
        ):
            delete_study("toy", url)
    assert contents(tmp_path / "aside") == before
    assert study_names(url) == ["toy"]
    monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(tmp_path / "aside"))
    assert delete_study("toy", url) == []
    assert contents(tmp_path) == {}


def test_files_that_are_gone_for_good_are_forgotten_when_said(home: Path) -> None:
    url = url_of(home / "p.db")
    shutil.rmtree(home / "p-artifacts")
    with pytest.raises(FilesMissingError, match="--leave-files"):
        delete_study("toy", url)
    delete_study("toy", url, leave_files=True)
    assert study_names(url) == []


def test_a_copy_without_its_files_is_not_restored_silently(home: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    by_backup(home, there)
    shutil.rmtree(home)
    with pytest.raises(PrivTuneError, match=r"2 results of studies are not found.*--leave-files"):
        restore_store(there / "p.db")
    with Ledger(there / "p.db") as ledger, pytest.raises(StoreCopyError):
        ledger.reserve("toy", [ASKED])
    restore_store(there / "p.db", leave_files=True)
    with Ledger(there / "p.db") as ledger:
        ledger.reserve("toy", [ASKED])


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_objects_belong_to_a_study_in_its_store(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address = f"file://{tmp_path}/objects"
    if kind == "s3":
        request.getfixturevalue("s3")
        address = f"s3://bucket/{uuid.uuid4().hex}"
    store = fsspec.filesystem(kind, use_listings_cache=False)
    ran(url_of(tmp_path / "p.db"), artifacts=address)
    original = set(store.find(address))
    assert original
    with Ledger(tmp_path / "p.db") as ledger:
        backup(ledger.log.storage, tmp_path / "copy.db")
    copy = url_of(tmp_path / "copy.db")
    with pytest.raises(StoreCopyError):
        delete_study("toy", copy)
    restore_store(copy)
    assert len(store.find(address)) == 2 * len(original)
    delete_study("toy", copy)
    assert set(store.find(address)) == original
    with closing(Study("toy", url_of(tmp_path / "p.db"))) as study:
        assert study.release("defaults").model is not None


def test_what_a_home_tells() -> None:
    home = Home("m", 1, 7, "/a/p.db")
    same = {
        "itself": home,
        "renamed": Home("m", 1, 7, "/b/p.db"),
        "other device number after a start": Home("m", 2, 7, "/a/p.db"),
    }
    others = {
        "another file": Home("m", 1, 8, "/a/p.db"),
        "another machine": Home("n", 1, 7, "/a/p.db"),
        "a snapshot mounted elsewhere": Home("m", 2, 7, "/b/p.db"),
    }
    assert all(here.is_home_of(home) for here in same.values())
    assert not any(here.is_home_of(home) for here in others.values())
    by_path = Home("m", 1, 0, "/a/p.db")
    assert Home("m", 9, 0, "/a/p.db").is_home_of(by_path)
    assert not Home("m", 1, 0, "/b/p.db").is_home_of(by_path)
    copied = Home("m", 1, 7, "/a/p.db", copied=True)
    assert not home.is_home_of(copied)
    assert Home.from_json(home.to_json()) == home


@pytest.fixture
def postgres_url() -> Iterator[str]:
    if not POSTGRES:
        pytest.skip("PRIVTUNE_TEST_POSTGRES_URL is not set")
    with PostgresSchemas() as schemas:
        yield schemas.fresh()


@pytest.mark.postgres
def test_a_dumped_database_is_a_copy(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("pg_dump") is None:
        pytest.skip("needs pg_dump")
    monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(tmp_path / "files"))
    ran(postgres_url)
    url = sa.make_url(postgres_url)
    name = f"copy_{uuid.uuid4().hex[:12]}"
    url = sa.make_url(postgres_url)
    server = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    plain = url.set(drivername="postgresql", query={})
    with server.connect() as connection:
        schema = connection.execute(sa.text("SELECT current_schema()")).scalar_one()
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    try:
        target = plain.set(database=name)
        dump = ["pg_dump", "--schema", schema, plain.render_as_string(hide_password=False)]
        load = ["psql", "-q", "-v", "ON_ERROR_STOP=1", target.render_as_string(hide_password=False)]
        script = subprocess.run(dump, check=True, capture_output=True).stdout
        subprocess.run(load, input=script, check=True, capture_output=True)
        copy = url.set(database=name).render_as_string(hide_password=False)
        before = contents(tmp_path)
        for write in writes(copy):
            with pytest.raises(StoreCopyError, match="is a copy"):
                write()
        with Ledger(copy) as ledger:
            assert len(ledger.charges("toy")) == 2
        assert contents(tmp_path) == before
        restore_store(copy)
        delete_study("toy", copy)
        assert contents(tmp_path) == before
        delete_study("toy", postgres_url)
        assert contents(tmp_path) == {}
    finally:
        with server.connect() as connection:
            connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
        server.dispose()


def test_workers_of_a_copy_write_nothing(copy: Path) -> None:
    """A round that is open in the original is open in the copy, too."""
    with closing(Life("toy", url_of(copy))) as life:
        for use in (life.storage.lend, life.storage.quick, life.alone):
            with pytest.raises(StoreCopyError), use():
                os._exit(1)
