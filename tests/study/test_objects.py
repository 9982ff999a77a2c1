"""Large results in an object store: encrypted, each under its own key, and never another's."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.registry import _registry

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.ledger import Ledger
from privtune.ledger.rounds import Rounds
from privtune.study import Study
from privtune.study._objects import DamagedResultError, ObjectStore, check_address
from privtune.study.lifecycle import Life
from privtune.study.rows import Results, StoredStudy, StudyRow, StudyStore
from tests.study.conftest import toy_spec

SENTINEL = b"sentinel-that-no-accident-writes-7c1f"
ARM = {"name": "arm", "strategy": "papernot-steinke", "mean_runs": 4}


@pytest.fixture(params=["file", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/objects"
        return
    request.getfixturevalue("s3")
    yield f"s3://bucket/{uuid.uuid4().hex}"


def files_at(address: str) -> Any:
    return fsspec.filesystem(address.partition(":")[0], use_listings_cache=False)


def objects(address: str) -> dict[str, bytes]:
    files = files_at(address)
    return {name: files.cat_file(name) for name in files.find(address)}


def write(address: str, name: str, content: bytes) -> None:
    files_at(address).pipe_file(name, content)


@pytest.fixture
def rows(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Results]:
    monkeypatch.setattr("privtune.study.rows._LARGE", 20)
    with Ledger(f"sqlite:///{tmp_path / 'rows.db'}") as ledger:
        storage = ledger.log.storage
        document = {"artifacts": address}
        row = StudyRow("toy", "uid", document, tmp_path / "files", storage.identity().uid)
        StudyStore(storage).create(row, [])
        yield StoredStudy(storage, "toy").results.within("sealed/arm")


@pytest.mark.quick
def test_what_is_stored_is_read_and_nobody_else_can(rows: Results, address: str) -> None:
    rows.put("small", b"in the row")
    assert objects(address) == {}
    for name in ("one", "two"):
        rows.put(name, SENTINEL)
    stored = objects(address)
    assert len(stored) == 2
    assert not any(SENTINEL in content for content in stored.values())
    assert not any("arm" in name.rpartition("objects")[2] for name in stored), "no names of arms"
    assert len({content[:16] for content in stored.values()}) == 2, "a key each"
    assert (rows.get("one"), rows.get("two"), rows.get("small")) == (
        SENTINEL,
        SENTINEL,
        b"in the row",
    )
    assert not rows.folder.exists()


def flipped(content: bytes) -> bytes:
    return content[:7] + bytes([content[7] ^ 1]) + content[8:]


@pytest.mark.quick
@pytest.mark.parametrize("damage", [flipped, lambda c: c[:-1], lambda c: b"", lambda c: c + b"x"])
def test_a_damaged_object_is_no_result(
    rows: Results, address: str, damage: Callable[[bytes], bytes]
) -> None:
    rows.put("one", SENTINEL)
    ((name, content),) = objects(address).items()
    write(address, name, damage(content))
    with pytest.raises(DamagedResultError, match=r"it is not used"):
        rows.get("one")
    assert rows.find("one") is None, "it is trained anew"
    rows.put("one", SENTINEL[::-1])
    assert rows.get("one") == SENTINEL[::-1]
    assert len(objects(address)) == 1


@pytest.mark.quick
def test_anothers_object_is_no_result(rows: Results, address: str) -> None:
    """Even with its key: what it is the result of is authenticated."""
    rows.put("one", SENTINEL)
    rows.put("two", SENTINEL[::-1])
    (first, one), (second, two) = objects(address).items()
    write(address, first, two)
    write(address, second, one)
    for name in ("one", "two"):
        with pytest.raises(DamagedResultError):
            rows.get(name)
    store = ObjectStore(address, "uid", "owner")
    place = store.put(SENTINEL, identity="sealed/arm/one", folder="f")
    for other, identity in (
        (store, "sealed/arm/two"),
        (ObjectStore(address, "other", "owner"), "x"),
    ):
        with pytest.raises(DamagedResultError):
            other.get(place, identity=identity)
    files_at(address).rm(address, recursive=True)
    with pytest.raises(DamagedResultError, match="missing"):
        store.get(place, identity="sealed/arm/one")


@pytest.mark.quick
def test_parts_of_a_long_result_stay_in_their_order(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privtune.study._objects._CHUNK", 10)
    store = ObjectStore(address, "uid", "owner")
    place = store.put(SENTINEL[:30], identity="i", folder="f")
    assert store.get(place, identity="i") == SENTINEL[:30]
    ((name, content),) = objects(address).items()
    parts = [content[n : n + 26] for n in range(0, len(content), 26)]
    assert len(parts) == 3
    for wrong in (parts[:2], parts[1:], [parts[1], parts[0], parts[2]], [*parts, parts[2]]):
        write(address, name, b"".join(wrong))
        with pytest.raises(DamagedResultError):
            store.get(place, identity="i")
    assert store.get(store.put(b"", identity="i", folder="f"), identity="i") == b""


@pytest.mark.quick
def test_the_first_result_stays_and_what_came_second_is_deleted(
    rows: Results, address: str
) -> None:
    rows.put("one", SENTINEL)
    rows.put("one", SENTINEL[::-1])
    assert (rows.get("one"), len(objects(address))) == (SENTINEL, 1)
    rows.put("one", SENTINEL[::-1], replace=True)
    assert (rows.get("one"), len(objects(address))) == (SENTINEL[::-1], 1)
    second = rows.stage("one", SENTINEL)
    assert len(objects(address)) == 2
    rows.discard("one", second)
    assert len(objects(address)) == 1
    first = rows.stage("three", SENTINEL)
    with rows._storage.write() as connection:
        rows.insert("three", first, connection)
    rows.discard("three", first)  # as a worker asks whose connection broke after it was heard
    assert rows.get("three") == SENTINEL
    rows.within("elsewhere").put("one", SENTINEL)
    rows.stage("left by a worker that died", SENTINEL)
    with rows._storage.write() as connection:
        rows.forget(connection)
    assert rows.names() == []
    assert len(objects(address)) == 1, "of another arm"


@pytest.mark.quick
@pytest.mark.parametrize(("url", "package"), [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs")])
def test_a_store_whose_package_is_missing_is_named_in_one_sentence(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    _registry.pop(url.partition(":")[0], None)
    with pytest.raises(InvalidInputError, match=f"not installed here.*{package}") as caught:
        check_address(url)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(PrivTuneError, match=f"not installed here.*{package}"):
        ObjectStore(
            url, "uid", "owner"
        ).check()  # a worker's machine, which did not create the study


def test_a_store_that_cannot_be_written_is_said_before_the_charge(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'p.db'}"
    (tmp_path / "file").touch()
    study = Study.create(toy_spec(artifacts=f"file://{tmp_path}/file/x"), url)
    with pytest.raises(PrivTuneError, match=r"cannot be written to from here \("):
        study.run()
    with Ledger(url) as ledger:
        assert not ledger.charges("toy")


class Refusing(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that raises what such stores raise."""

    protocol = "refusing"
    raises: ClassVar[Exception]

    def pipe_file(self, *_: Any, **__: Any) -> None:
        raise self.raises

    cat_file = pipe_file


@pytest.mark.quick
@pytest.mark.parametrize(
    ("raises", "says"),
    [
        (FileNotFoundError(f"bucket {SENTINEL!r}"), "there is no such bucket or folder"),
        (PermissionError(f"Forbidden {SENTINEL!r}"), "access is denied: its keys"),
        (ConnectionError(f"Could not connect {SENTINEL!r}"), "ConnectionError"),
    ],
)
def test_what_stores_raise_is_one_sentence_without_their_words(
    raises: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refusing, "raises", raises, raising=False)
    monkeypatch.setitem(_registry, "refusing", Refusing)
    store = ObjectStore("refusing://bucket", "uid", "owner")
    place = json.dumps({"name": "f/x", "key": "00" * 32})
    read = DamagedResultError if isinstance(raises, FileNotFoundError) else PrivTuneError
    with pytest.raises(PrivTuneError, match=f"cannot be written to from here .{says}") as caught:
        store.check()
    with pytest.raises(read) as other:
        store.get(place, identity="i")
    for error in (caught.value, other.value):
        assert SENTINEL.decode() not in str(error)
        assert "from from" not in str(error)
        assert len(str(error).splitlines()) == 1


@pytest.mark.quick
@pytest.mark.parametrize("replace", [False, True])
def test_a_large_file_is_written_before_its_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    """So that neither the file's lock nor a row's is held while a disk takes its time."""
    monkeypatch.setattr("privtune.study.rows._LARGE", 20)
    with Ledger(f"sqlite:///{tmp_path / 'rows.db'}") as ledger:
        storage = ledger.log.storage
        row = StudyRow("toy", "uid", {}, tmp_path / "files", storage.identity().uid)
        StudyStore(storage).create(row, [])
        results = StoredStudy(storage, "toy").results.within("sealed/arm")
        if replace:
            results.put("one", SENTINEL[::-1])
        staged = results.stage("one", SENTINEL)
        (written,) = [p for p in results.folder.iterdir() if p.name != "one"]
        assert written.read_bytes() == SENTINEL
        inode = written.stat().st_ino
        for _ in range(2):  # the second time as who does not know that the first was committed
            with ledger.log.storage.write() as connection:
                results.insert("one", staged, connection, replace=replace)
        results.discard("one", staged)
        assert (results.folder / "one").stat().st_ino == inode, "renamed, not written again"
        assert results.get("one") == SENTINEL
        results.put("one", SENTINEL[::-1])
        assert results.get("one") == SENTINEL, "the first stays"
        assert [path.name for path in results.folder.iterdir()] == ["one"]


@pytest.mark.parametrize("address", ["file", "s3"], indirect=True)
def test_a_round_whose_objects_are_damaged_is_trained_anew_to_the_same_release(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Study.create(
        toy_spec(arms=[ARM], seed=4), f"sqlite:///{tmp_path / 'whole.db'}"
    ).run()
    monkeypatch.setattr("privtune.study.rows._LARGE", 100)
    url = f"sqlite:///{tmp_path / 'p.db'}"
    study = Study.create(toy_spec(arms=[ARM], seed=4, artifacts=address), url)
    assert json.loads(json.dumps(study.spec.model_dump(mode="json")))["artifacts"] == address
    seen: list[int] = []
    results = Rounds.results

    def damaging(self: Rounds, charge_id: str) -> object:
        there = objects(address)
        seen.append(len(there))
        if len(seen) == 1:
            first, *others = there.items()
            write(address, first[0], flipped(first[1]))
            if others:
                files_at(address).rm(others[0][0])
        return results(self, charge_id)

    monkeypatch.setattr(Rounds, "results", damaging)
    (release,) = study.run()
    assert len(seen) == 2
    assert seen[0] == seen[1] > 1
    assert release.params == expected[0].params
    assert torch.allclose(release.weights, expected[0].weights, atol=1e-5)
    with Ledger(url) as ledger:
        assert len(ledger.charges("toy")) == 1
    assert len(objects(address)) == 1, "the released model; what was sealed is gone"
    monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(tmp_path / "another directory"))
    life = Life("toy", url)
    assert torch.equal(life.release(next(iter(life.arms().values())).plan).weights, release.weights)
    life.delete()
    assert objects(address) == {}


def test_a_store_that_always_loses_is_said_and_nothing_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privtune.study.rows._LARGE", 100)
    address = f"file://{tmp_path}/objects"
    url = f"sqlite:///{tmp_path / 'p.db'}"
    study = Study.create(toy_spec(arms=[ARM], seed=4, artifacts=address), url)
    results = Rounds.results

    def losing(self: Rounds, charge_id: str) -> object:
        fsspec.filesystem("file").rm(address, recursive=True)
        return results(self, charge_id)

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "results", losing)
        with pytest.raises(PrivTuneError, match="trained anew"):
            study.run()
    assert study.releases() == ()
    (release,) = study.run()
    assert release.params
    with Ledger(url) as ledger:
        assert len(ledger.charges("toy")) == 1
