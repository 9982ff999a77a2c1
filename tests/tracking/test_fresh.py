"""New MLflow databases are copies of an empty one that MLflow made: the same, and nobody's traces in it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import mlflow.store.db.utils
import pytest

from privtune.tracking.store import begin_at_copy, open_client

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "privtune"


def opened(folder: Path) -> list[str]:
    """Open a new store, use it, and return all that is in it, in any order, but for the folder's name."""
    folder.mkdir()
    storage = f"sqlite:///{folder / 'privtune.db'}"
    with open_client(storage, f"sqlite:///{folder / 'mlflow.db'}") as client:
        client.create_experiment("first", artifact_location="file:///somewhere")
    with sqlite3.connect(folder / "mlflow.db") as database:
        return sorted(line.replace(str(folder), "FOLDER") for line in database.iterdump())


def refuse(*_: object) -> None:
    raise AssertionError("migrations are run")


def test_a_new_store_is_a_copy_of_what_mlflow_made(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = opened(tmp_path / "first-of-them")
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert str(tmp_path).encode() not in kept.read_bytes()
    monkeypatch.setattr(mlflow.store.db.utils, "_initialize_tables", refuse)
    monkeypatch.setattr(mlflow.store.db.utils, "_upgrade_db", refuse)
    assert opened(tmp_path / "second-of-them") == first
    assert [path.name for path in cache.iterdir()] == [kept.name]
    assert not list((tmp_path / "second-of-them").glob("mlflow.db-*"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"experiments", b"experience_", 1)),
    ],
    ids=["cut", "changed"],
)
def test_a_damaged_copy_is_made_anew(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
) -> None:
    opened(tmp_path / "first")
    (kept,) = cache.iterdir()
    damage(kept)
    made = opened(tmp_path / "second")  # MLflow's own order of constraints varies
    monkeypatch.setattr(mlflow.store.db.utils, "_initialize_tables", refuse)
    assert opened(tmp_path / "third") == made
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_is_none_changes_nothing(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("no folder")
    assert any("experiments" in line for line in opened(tmp_path / "first"))


@pytest.mark.parametrize("end", ["-journal", "-wal", "-shm"])
def test_what_is_left_of_a_store_is_not_played_back_into_a_copy(
    tmp_path: Path, cache: Path, end: str
) -> None:
    opened(tmp_path / "first")
    path = tmp_path / "mlflow.db"
    path.with_name(path.name + end).write_bytes(b"left")
    begin_at_copy(f"sqlite:///{path}")
    assert not path.exists()


def test_what_others_could_have_written_is_not_copied(tmp_path: Path, cache: Path) -> None:
    opened(tmp_path / "first")
    (kept,) = cache.iterdir()
    kept.chmod(0o666)
    begin_at_copy(f"sqlite:///{tmp_path / 'second.db'}")
    (made,) = cache.iterdir()
    assert made.stat().st_mode & 0o777 == 0o600
    cache.chmod(0o777)
    begin_at_copy(f"sqlite:///{tmp_path / 'third.db'}")
    assert not (tmp_path / "third.db").exists()
