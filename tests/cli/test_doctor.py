"""``privtune doctor``: what would break a guarantee is exit 1, and says what to do."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from privtune.execution import environment as engines
from privtune.ledger import Budget, Ledger, doctor
from privtune.ledger.places import artifact_root
from privtune.ledger.storage import Storage, _make_private
from privtune.training.engine import compute
from tests.cli.conftest import Cli
from tests.ledger.conftest import make_other, postgres_url

pytestmark = pytest.mark.quick

__all__ = ["postgres_url"]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(doctor, "file_system", lambda _: "ext4")
    url = f"sqlite:///{tmp_path}/p.db"
    monkeypatch.setenv("PRIVTUNE_STORAGE", url)
    with Ledger(url) as ledger:
        ledger.create_budget(Budget(3.0, 1e-5, name="b"))
    return url


def states(cli: Cli, code: int) -> dict[str, tuple[str, str]]:
    done = cli("doctor", "--json")
    document = json.loads(done.out)
    assert (done.code, done.err, document["healthy"]) == (code, "", code == 0)
    return {check["name"]: (check["state"], check["says"]) for check in document["checks"]}


def test_a_healthy_ledger(cli: Cli, url: str) -> None:
    found = states(cli, 0)
    assert {state for state, _ in found.values()} == {"ok"}
    assert set(found) == {
        "python", "torch", "cuda", "mlflow", "records", "ray", "slurm", "file system", "fsync", "disk",
        "folder", "permissions", "heads", "schema", "settings", "artifacts", "deletion",
    }  # fmt: skip
    assert "permissions" in cli("doctor").out


def test_it_makes_nothing(cli: Cli, url: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    done = cli("doctor", "--storage", f"sqlite:///{tmp_path}/none.db")
    assert (done.code, "nothing was checked" in " ".join(done.out.split())) == (0, True)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("ending", "mode"), [("", 0o644), ("-heads", 0o640), ("", 0o602)])
def test_a_file_that_others_may_open(
    cli: Cli, url: str, tmp_path: Path, ending: str, mode: int
) -> None:
    """One's own is closed by opening the store; what is somebody else's is said."""
    path = tmp_path / f"p.db{ending}"
    path.chmod(mode)
    _make_private.cache_clear()
    assert states(cli, 0)["permissions"][0] == "ok"
    assert path.stat().st_mode & 0o077 == 0
    if os.geteuid() == 0:
        path.chmod(mode)
        os.chown(path, 65534, 65534)
        # Who owns the database is trusted with what lies beside it; another user is not.
        state, says = states(cli, 1)["permissions" if ending == "" else "database"]
        assert state == "fail"
        assert (
            f"chmod go= {path}" if ending == "" else f"{path} is a file of another user"
        ) in says


def test_folders_that_others_may_enter(cli: Cli, url: str) -> None:
    root = artifact_root(url)
    (root / "toy" / "sealed").mkdir(parents=True)
    (root / "toy").chmod(0o755)
    root.chmod(0o700)
    assert states(cli, 0)["artifacts"][0] == "ok"
    root.chmod(0o755)
    assert "chmod -R go=" in states(cli, 1)["artifacts"][1]
    (root / "toy").chmod(0o700)
    assert states(cli, 0)["artifacts"][0] == "ok"


@pytest.mark.parametrize(
    ("kind", "state"),
    [("nfs4", "fail"), ("tmpfs", "fail"), ("9p", "warn"), ("", "ok")],
)
def test_file_systems(
    cli: Cli, url: str, monkeypatch: pytest.MonkeyPatch, kind: str, state: str
) -> None:
    monkeypatch.setattr(doctor, "file_system", lambda _: kind)
    assert states(cli, int(state == "fail"))["file system"][0] == state


def test_another_schema_a_missing_folder_and_no_heads(cli: Cli, url: str, tmp_path: Path) -> None:
    (tmp_path / "p.db-heads").unlink()
    assert states(cli, 0)["heads"][0] == "warn"
    make_other(f"sqlite:///{tmp_path}/other.db")
    done = cli("doctor", "--storage", f"sqlite:///{tmp_path}/other.db")
    assert (done.code, "has schema 0005" in done.out) == (1, True)
    done = cli("doctor", "--storage", "sqlite:////no/such/folder/x.db")
    assert (done.code, "does not exist" in done.out, done.err) == (1, True, "")


def test_settings_that_forget(cli: Cli, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(connection: sqlite3.Connection, *_: object, **_options: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA synchronous = OFF")

    monkeypatch.setattr("privtune.ledger.engines._on_sqlite_connect", hasty)
    state, says = states(cli, 1)["settings"]
    assert (state, "synchronous must be 2" in says) == ("fail", True)


@pytest.mark.postgres
def test_postgres(cli: Cli, url: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVTUNE_STORAGE", postgres_url)
    assert states(cli, 0)["schema"][0] == "warn"
    with Ledger(postgres_url):
        found = states(cli, 0)
    assert found["schema"][0] == "ok"
    assert "fsync = on" in found["settings"][1]
    assert "synchronous_commit = on" in found["settings"][1]
    assert found["database"][1].startswith("PostgreSQL ")
    assert (found["clock"][0], found["privileges"][0]) == ("ok", "ok")
    with closing(Storage(postgres_url)) as storage, storage.write() as connection:
        connection.execute(sa.text("GRANT SELECT ON privtune_rounds TO PUBLIC"))
    state, says = states(cli, 1)["privileges"]
    assert (state, "REVOKE ALL ON privtune_rounds" in says) == ("fail", True)
    monkeypatch.setattr(doctor, "_CLOCK", "SELECT extract(epoch FROM clock_timestamp()) - 60")
    state, says = states(cli, 1)["clock"]
    assert (state, "60.0 s" in says) == ("warn", True)


def test_a_full_disk_and_the_curators_mode_are_told(
    cli: Cli, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_LITTLE", math.inf)
    monkeypatch.setenv("PRIVTUNE_CURATOR", "1")
    found = states(cli, 0)
    assert (found["disk"][0], found["curator"][0]) == ("warn", "warn")


AT = {"RAY_ADDRESS": "10.0.0.1:6379"}
TOKEN = AT | {"RAY_AUTH_MODE": "token"}
REFUSED = "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken"


@pytest.mark.parametrize(
    ("environment", "told", "mode", "state", "says"),
    [
        ({}, None, 0o600, "ok", "nothing spills"),
        ({"RAY_AUTH_MODE": "disabled"}, "", 0o600, "fail", "RAY_AUTH_MODE=token"),
        (AT, "", 0o600, "fail", "is not set"),
        (TOKEN, REFUSED, 0o600, "warn", "spilling"),
        (TOKEN, "Failed to connect", 0o600, "warn", "nobody answers at 10.0.0.1:6379"),
        (TOKEN, None, 0o600, "fail", "answers without a token"),
        (TOKEN, REFUSED, 0o644, "fail", "can be read by others"),
        (
            TOKEN | {"RAY_automatic_object_spilling_enabled": "0"},
            REFUSED,
            0o600,
            "ok",
            "its token is asked for",
        ),
    ],
)
def test_ray(
    cli: Cli,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    told: str | None,
    mode: int,
    state: str,
    says: str,
) -> None:
    """What a cluster tells who has no token, ``None`` for an answer, was taken down from Ray 2.60."""
    monkeypatch.setattr(engines, "_version", lambda package: "2.60.0")
    monkeypatch.setattr(engines, "_answer_to_strangers", lambda address: told)
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_automatic_object_spilling_enabled"):
        monkeypatch.delenv(name, raising=False)
    (token := tmp_path / "token").touch(mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = states(cli, int(state == "fail"))["ray"]
    assert (found[0], says in found[1]) == (state, True)


def test_a_driver_without_a_device(cli: Cli, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(compute, "driver", lambda: "")
    assert states(cli, 0)["cuda"][0] == "ok"
    monkeypatch.setattr(compute, "driver", lambda: "570.1")
    state, says = states(cli, 0)["cuda"]
    assert (state, "Trainings run on the CPU" in says) == ("warn", True)


def test_every_command_finds_the_storage_in_a_file_for_its_owner(
    cli: Cli, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.delenv("PRIVTUNE_STORAGE")
    note = tmp_path / "storage"
    note.write_text(url)
    note.chmod(0o600)
    monkeypatch.setenv("PRIVTUNE_STORAGE_FILE", str(note))
    assert "b" in cli("budget", "list").out
    assert "permissions" in states(cli, 0)
    assert cli("worker", "--idle-exit", "0").code == 0
    note.chmod(0o644)
    for words in (["budget", "list"], ["doctor"], ["worker", "--idle-exit", "0"]):
        done = cli(*words)
        assert done.code == 1
        assert "must be readable by its owner alone" in done.err
    assert not list(empty.iterdir())
