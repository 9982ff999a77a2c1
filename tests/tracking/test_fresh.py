"""New MLflow databases are copies of an empty one that MLflow made: the same, and nobody's traces in it."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import mlflow.store.db.utils
import pytest

from privtune.files import private_folder
from privtune.tracking.store import begin_at_copy, open_client

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The copy that the first store of a cache leaves there, and what is in that store."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        content = opened(folder / "first-of-them")
    (kept,) = (folder / "cache" / "privtune").iterdir()
    assert str(folder).encode() not in kept.read_bytes()
    return kept, content


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: tuple[Path, list[str]]) -> Path:
    """The same in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = private_folder(tmp_path / "cache" / "privtune")
    return Path(shutil.copy2(first[0], folder))


def opened(folder: Path) -> list[str]:
    """Open a new store, use it, and return all that is in it, in any order, but for the folder's name."""
    folder.mkdir()
    storage = f"sqlite:///{folder / 'privtune.db'}"
    with open_client(storage, f"sqlite:///{folder / 'mlflow.db'}") as client:
        client.create_experiment("first", artifact_location="file:///somewhere")
    with sqlite3.connect(folder / "mlflow.db") as database:
        lines = sorted(database.iterdump())
    return [
        line.replace(str(folder), "FOLDER").replace(str(folder.parent), "HERE") for line in lines
    ]


def refuse(*_: object) -> None:
    raise AssertionError("migrations are run")


def test_a_new_store_is_a_copy_of_what_mlflow_made(
    tmp_path: Path, kept: Path, first: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kept.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(mlflow.store.db.utils, "_initialize_tables", refuse)
    monkeypatch.setattr(mlflow.store.db.utils, "_upgrade_db", refuse)
    assert opened(tmp_path / "second-of-them") == first[1]
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert not list((tmp_path / "second-of-them").glob("mlflow.db-*"))


def test_a_damaged_copy_is_made_anew(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.write_bytes(kept.read_bytes().replace(b"experiments", b"experience_", 1))
    made = opened(tmp_path / "second")  # MLflow's own order of constraints varies
    monkeypatch.setattr(mlflow.store.db.utils, "_initialize_tables", refuse)
    assert opened(tmp_path / "third") == made
    assert len(list(kept.parent.iterdir())) == 1


def test_a_cache_that_is_none_changes_nothing(tmp_path: Path, kept: Path) -> None:
    shutil.rmtree(kept.parent)
    kept.parent.write_text("no folder")
    assert any("experiments" in line for line in opened(tmp_path / "first"))


@pytest.mark.parametrize("end", ["-journal", "-wal", "-shm"])
def test_what_is_left_of_a_store_is_not_played_back_into_a_copy(
    tmp_path: Path, kept: Path, end: str
) -> None:
    path = tmp_path / "mlflow.db"
    path.with_name(path.name + end).write_bytes(b"left")
    begin_at_copy(f"sqlite:///{path}")
    assert not path.exists()


def test_what_others_could_have_written_is_not_copied(tmp_path: Path, kept: Path) -> None:
    cache = kept.parent
    kept.chmod(0o666)
    begin_at_copy(f"sqlite:///{tmp_path / 'second.db'}")
    (made,) = cache.iterdir()
    assert made.stat().st_mode & 0o777 == 0o600
    cache.chmod(0o777)
    begin_at_copy(f"sqlite:///{tmp_path / 'third.db'}")
    assert not (tmp_path / "third.db").exists()
