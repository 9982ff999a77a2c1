"""A deletion takes what the study made and nothing else, and is completed after it was stopped."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import fsspec
import pytest

from privtune import PrivTuneError
from privtune.files import OwnFolder, UntrustedPathError
from privtune.ledger import Ledger, LedgerCorruptedError, verify
from privtune.ledger.doctor import check_artifacts
from privtune.ledger.places import artifact_root
from privtune.study import Study, delete_study, study_names
from privtune.study.facade import check_studies
from privtune.study.lifecycle import Life
from tests.ledger.campaigns import processes
from tests.study import driven
from tests.study.conftest import toy_spec
from tests.study.test_lifecycle import WARMED
from tests.tiers import PATIENCE, campaign

ARMS = toy_spec().model_dump(mode="json")["arms"][:2]


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, links not followed, but the ledger's own."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and not path.name.startswith("privtune.db")
    }


def ran(storage: str, **changes: object) -> Study:
    """Return a study of two arms that has run: files of a release, a lock, a log."""
    study = Study.create(toy_spec(arms=ARMS, epochs=1, **changes), storage)
    study.run()
    return study


def foreign(folder: Path) -> None:
    for name in ("file", "model.safetensors", "defaults/model.safetensors", "sealed/notes"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"somebody's {name}")


@pytest.mark.parametrize("case", ["set", "set later", "default"])
def test_a_folder_of_the_studys_name_stays(
    case: str, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = artifact_root(storage) if case == "default" else tmp_path / "shared"
    if case == "set":
        monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(root))
    foreign(root / "toy")
    before = contents(tmp_path)
    with closing(ran(storage)) as study:
        assert len(contents(tmp_path)) > len(before)
        if case == "set later":
            monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(root))
        assert study.delete() == []
    assert contents(tmp_path) == before
    assert not list(tmp_path.rglob("toy-*")), "nothing of the study's own is left"


def test_what_the_user_put_into_the_studys_own_folder_stays(storage: str, tmp_path: Path) -> None:
    with closing(ran(storage)) as study:
        own = set(contents(study.folder))
        folders = [path for path in (study.folder, *study.folder.rglob("*")) if path.is_dir()]
        for folder in folders:
            (folder / "notes.txt").write_text("the user's")
            (folder / "model.safetensors.staged-1").write_text("the user's, of a name like ours")
        assert study.delete() == [study.folder]
    left = contents(tmp_path / "privtune-artifacts")
    assert len(left) == 2 * len(folders)
    assert all(content.startswith(b"the user's") for content in left.values())
    assert not own & set(contents(study.folder))


@pytest.mark.parametrize("what", ["root", "study", "arm", "file"])
def test_links_lead_to_nobody_elses_files(what: str, storage: str, tmp_path: Path) -> None:
    """Where the root was moved and linked, what is ours there goes, too; no link below it is followed."""
    with closing(ran(storage)) as study:
        places = {
            "root": study.folder.parent,
            "study": study.folder,
            "arm": study.folder / "defaults",
        }
        place = places.get(what, study.folder / "defaults" / "model.safetensors")
        moved = tmp_path / "moved" / "place"
        moved.parent.mkdir()
        if what in ("root", "study"):
            place.rename(moved)
            foreign(moved.parent)
        else:
            place.rename(place.with_name("aside"))
            foreign(moved.parent)
            moved = moved.parent / ("defaults" if what == "arm" else "model.safetensors")
        place.symlink_to(moved)
        theirs = {
            n: c for n, c in contents(tmp_path / "moved").items() if c.startswith(b"somebody")
        }
        if what == "study":  # where a folder of ours belongs, a link is anybody's
            before = contents(tmp_path)
            with pytest.raises(UntrustedPathError, match="is a link, where a folder"):
                study.delete()
            assert contents(tmp_path) == before
            return
        study.delete()
    assert {n: c for n, c in contents(tmp_path / "moved").items() if b"somebody" in c} == theirs
    if what == "root":
        assert contents(tmp_path / "moved") == theirs


def test_every_place_is_cleared_that_the_study_had(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("first", "second", "third"):
        monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(tmp_path / place))
        with closing(ran(storage) if place == "first" else Study("toy", storage)) as study:
            assert study.model_path("defaults").is_relative_to(tmp_path / place)
    monkeypatch.delenv("PRIVTUNE_ARTIFACTS")
    delete_study("toy", storage)
    assert contents(tmp_path) == {}


def test_an_edited_list_deletes_nothing_outside_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("somebody's")
    folder = OwnFolder(tmp_path / "own", "id")
    folder.write("model", b"ours")
    lines = [
        f'["id", "{name}"]' for name in ("../victim", str(tmp_path / "victim"), "sub/../../victim")
    ]
    with (folder.path / folder.LIST).open("a") as file:
        file.write("\n".join([*lines, '["other", "model"]', "[1", '["id"', "{}", '["id", 3]']))
    OwnFolder(folder.path, "id").remove()
    assert contents(tmp_path) == {"victim": b"somebody's"}


@pytest.mark.parametrize("by", ["kill", pytest.param("stop", marks=campaign)])
@pytest.mark.parametrize(
    "point",
    [
        "StoredStudy.begin_deletion", "StudyTrials.delete", "StoredStudy.remove", "OwnFolder.remove",
        "ObjectStore.remove_all", "Path.unlink", "StoredStudy.writing",
    ],
)  # fmt: skip
def test_a_deletion_that_stops_anywhere_is_completed_by_the_next(
    point: str, by: str, storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before the named call and behind it; large models are files, objects hold them too."""
    monkeypatch.setattr("privtune.study.rows._LARGE", 100)
    for behind in (False, True):
        address = f"file://{tmp_path}/objects" if "Object" in point else None
        with closing(ran(storage, artifacts=address, budget=_budget(behind))) as study:
            uid = study._life.row.uid
        process = processes(WARMED).Process(
            target=driven.stop_deleting, args=(storage, point, behind, by)
        )
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == (-signal.SIGKILL if by == "kill" else 3)
        if "toy" in study_names(storage):
            delete_study("toy", storage)
        assert study_names(storage) == []
        assert contents(tmp_path) == {}, point
        assert not list(tmp_path.rglob(f"*{uid[:12]}*"))


def _budget(number: int) -> dict[str, object]:
    return {"name": f"b{int(number)}", "epsilon": 6.0, "delta": 1e-5}


def test_what_a_stopped_deletion_leaves_is_said_and_nobody_inherits_it(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(ran(storage)) as study:
        folder, model = study.folder, study.model_path("defaults").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(OwnFolder, "remove", _raises(OSError(5, "Input/output error", str(folder))))
        with pytest.raises(
            PrivTuneError, match=r"not deleted completely.*privtune study delete toy"
        ):
            delete_study("toy", storage)
    (said,) = [c for c in check_studies(storage) if c.state != "ok"]
    assert said.state == "warn"
    assert "privtune study delete toy" in said.says
    begun = pytest.raises(PrivTuneError, match=r"has begun and is not complete.*study delete toy")
    with closing(Study("toy", storage)) as study, begun:
        study._life.charge(study.plans)
    with pytest.raises(PrivTuneError, match="exists already"):
        Study.create(toy_spec(arms=ARMS), storage)
    delete_study("toy", storage)
    assert all(check.state == "ok" for check in check_studies(storage))
    with closing(ran(storage, budget=_budget(1))) as new:
        assert new.folder != folder
        assert new.model_path("defaults").read_bytes() != model


def test_what_no_study_has_any_more_is_said(storage: str) -> None:
    """As of a worker that was killed after its study was deleted."""
    with closing(ran(storage)) as study:
        study.delete()
        study._life.files.write("sealed/selection/late", b"of a worker")
        folder = study.folder
    (said,) = [check for check in check_studies(storage) if check.state != "ok"]
    assert str(folder) in said.says
    assert check_artifacts(folder.parent).state == "ok"


def _raises(error: Exception) -> Callable[..., None]:
    def call(*_args: object, **_options: object) -> None:
        raise error

    return call


def test_an_object_store_that_is_away_keeps_the_study_until_it_is_back(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privtune.study.rows._LARGE", 100)
    mount, away = tmp_path / "mount", tmp_path / "away"
    ran(storage, artifacts=f"file://{mount}").close()
    (mount / "mine").write_text("the user's")
    (uid,) = [path.name for path in mount.iterdir() if path.is_dir()]
    (mount / uid / "mine").write_text("the user's")
    mount.rename(away)
    for _ in range(2):
        with pytest.raises(PrivTuneError, match=r"cannot be cleared from here .*--leave-objects"):
            delete_study("toy", storage)
    assert study_names(storage) == ["toy"]
    away.rename(mount)
    delete_study("toy", storage)
    assert study_names(storage) == []
    assert set(contents(tmp_path)) == {"mount/mine", f"mount/{uid}/mine"}


def test_a_store_that_refuses_is_left_only_when_that_is_said(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privtune.study.rows._LARGE", 100)
    ran(storage, artifacts=f"file://{tmp_path}/objects").close()
    files = fsspec.get_filesystem_class("file")
    monkeypatch.setattr(files, "rm_file", _raises(PermissionError(13, "denied")))
    with pytest.raises(PrivTuneError, match="access is denied"):
        delete_study("toy", storage)
    delete_study("toy", storage, leave_objects=True)
    assert study_names(storage) == []
    assert contents(tmp_path)  # noise without its keys


def test_a_result_that_comes_after_the_deletion_leaves_no_file(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privtune.study.rows._LARGE", 100)
    Study.create(toy_spec(arms=ARMS), storage).close()
    with closing(Life("toy", storage)) as late:
        (plan, *_) = late.plans().values()
        delete_study("toy", storage)
        with pytest.raises(PrivTuneError, match="was deleted"):
            late.sealed(plan.arm).put("trial", b"x" * 200)
        assert not late.folder.exists()


def test_the_list_says_nothing_of_what_was_forgotten(tmp_path: Path) -> None:
    """Else it would tell how many trials a sealed round had; lines that others add meanwhile stay."""
    folder, other = (OwnFolder(tmp_path / "own", "id") for _ in range(2))
    for number in range(3):
        folder.write(f"sealed/arm/trial-{number}", b"sealed")
    other.write("arm/model", b"released")
    assert folder.remove("sealed/arm/") == []
    assert "trial" not in (folder.path / OwnFolder.LIST).read_text()
    assert (folder.path / OwnFolder.LIST).stat().st_mtime % 86_400 == 0
    other.write("sealed/arm/trial-9", b"late")
    folder.write("sealed/arm/trial-1", b"again")
    assert contents(tmp_path).keys() == {"own/.privtune", "own/arm/model", "own/sealed/arm/trial-9",
                                         "own/sealed/arm/trial-1"}  # fmt: skip
    folder.remove()
    assert contents(tmp_path) == {}


def test_what_is_kept_of_sealed_trials_is_a_digest(storage: str, tmp_path: Path) -> None:
    """How many trials a selection ran, their scores and times are as secret after a deletion as before."""
    with closing(ran(storage)) as study:
        study.delete()
    with Ledger(storage) as ledger:
        assert len(verify(ledger.log.storage, "toy").warnings) == 0
    database = sqlite3.connect(tmp_path / "privtune.db")
    with closing(database):
        assert database.execute("SELECT count(*) FROM privtune_tasks").fetchone() == (0,)
        ((trials, secret, digest),) = database.execute(
            "SELECT tasks, secret, digest FROM privtune_rounds"
        ).fetchall()
        assert (trials, secret, len(digest)) == (0, "", 64)
        database.execute("UPDATE privtune_rounds SET digest = ?", ("0" * 64,))
        database.commit()
    with Ledger(storage) as ledger, pytest.raises(LedgerCorruptedError, match="is not what it was"):
        verify(ledger.log.storage, "toy")
