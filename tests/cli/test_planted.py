"""Names that we use are taken by others, and disks are full: nothing outside changes, one sentence.

Whoever may write in a folder may plant a link, a pipe, a socket, a folder, a hard link or a file of theirs
under a name that a command uses.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from privtune.files import OwnFolder, UntrustedPathError, own_folder
from privtune.ledger import Budget, Ledger
from privtune.ledger.errors import LedgerConnectionError
from privtune.ledger.places import STORE
from privtune.locks import FileLock
from privtune.study import Study
from tests.cli.conftest import Cli, Done
from tests.study.conftest import toy_spec
from tests.tiers import some
from tests.tracked import Tracked, run_tracked
from tests.users import error_as_user

pytestmark = [
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

STRANGER = 1234
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
STORAGE = ("--storage", "privtune.db")

COMMANDS: dict[str, tuple[str, ...]] = {
    "certificate": ("budget", "export", "toy", "--output", "c.json", *STORAGE),
    "page": ("budget", "export", "toy", "--output", "c.json", "--html", "c.html", *STORAGE),
    "signature": ("budget", "sign", "given.json", "--key", "key.pem", "--output", "c.sig"),
    "backup": ("budget", "backup", "copy.db", *STORAGE),
    "report": ("study", "compare", "toy", "--html", "report.html", *STORAGE),
    "chart": ("study", "compare", "toy", "--plot", "chart.svg", *STORAGE),
    "officer": ("study", "export", "toy", "--sp800-226", "--html", "officer.html", *STORAGE),
    "draft": ("study", "draft", "table.csv", "--target", "left", "--to", "draft.yaml"),
    "sync": ("study", "sync", "toy", *STORAGE),
    "show": ("study", "show", "toy", *STORAGE),
    "charge": ("budget", "create", "other", "--epsilon", "1", "--delta", "1e-6", *STORAGE),
}
"""Every command that makes a file, or opens one of ours."""

OUTPUTS = {
    "certificate": "c.json",
    "page": "c.html",
    "signature": "c.sig",
    "backup": "copy.db",
    "report": "report.html",
    "chart": "chart.svg",
    "officer": "officer.html",
    "draft": "draft.yaml",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """A study that was run and logged; here commands may write beside it."""
    return run_tracked(tmp_path_factory.mktemp("planted"))


@pytest.fixture
def place(finished: Tracked, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = finished.folder
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PRIVTUNE_ARTIFACTS", raising=False)
    (folder / "table.csv").write_text("age,left\n1,2\n")
    key = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    if not (folder / "key.pem").exists():
        os.close(os.open(folder / "key.pem", os.O_CREAT | os.O_WRONLY, 0o600))
    (folder / "key.pem").write_bytes(key)
    if not (folder / "given.json").exists():
        assert cli("budget", "export", "toy", "--output", "given.json", *STORAGE).code == 0
    yield folder
    for name in (*OUTPUTS.values(), "copy.db-heads"):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def plant_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def plant_loose_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("new"))


def plant_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def plant_socket(path: Path, victim: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may be 100 letters long
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def plant_folder(path: Path, victim: Path) -> None:
    path.mkdir()
    (path / "theirs").write_text("theirs")


def plant_hard_link(path: Path, victim: Path) -> None:
    os.link(victim, path)


def plant_another_users_file(path: Path, victim: Path) -> None:
    path.write_text("theirs")
    os.chown(path, STRANGER, STRANGER)
    path.chmod(0o666)


Plant = Callable[[Path, Path], None]
KINDS: tuple[Plant, ...] = (
    plant_link,
    plant_loose_link,
    plant_pipe,
    plant_socket,
    plant_folder,
    plant_hard_link,
)


@contextmanager
def planted(path: Path, plant: Plant, victim: Path) -> Iterator[None]:
    """Put something in the place of a file for a while."""
    aside = path.with_name(f"{path.name[:20]}-aside")
    was_there = os.path.lexists(path)
    if was_there:
        path.rename(aside)
    plant(path, victim)
    try:
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if was_there:
            aside.rename(path)


def named(case: object) -> str:
    """Return what a case is called."""
    return getattr(case, "__name__", str(case))


def look(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_refused(done: Done) -> bool:
    return done.code == 1 and done.err.count("\n") == 1 and "Traceback" not in done.err


@pytest.mark.parametrize("plant", KINDS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("end", STORE[1:])
def test_what_is_planted_beside_a_database(
    end: str, plant: Plant, place: Path, cli: Cli, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    before = look(tmp_path)
    database = (place / "privtune.db").read_bytes()
    with planted(place / f"privtune.db{end}", plant, victim):
        done = cli("budget", "create", "new", "--epsilon", "1", "--delta", "1e-6", *STORAGE)
        assert look(tmp_path) == before
        assert is_refused(done), done
        assert f"privtune.db{end} is " in done.err
    assert (place / "privtune.db").read_bytes() == database


LOGGED = ("mlflow.lock", "mlflow.db", "mlflow.db-journal", "mlflow.db-wal")


@pytest.mark.parametrize(("name", "plant"), some(product(LOGGED, KINDS), 5), ids=named)
def test_what_is_planted_in_the_folder_of_studies(
    name: str, plant: Plant, place: Path, cli: Cli, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    before = look(tmp_path)
    with planted(place / "privtune-artifacts" / name, plant, victim):
        done = cli(*COMMANDS["sync"])
        assert look(tmp_path) == before
        assert is_refused(done), done
        assert f"{name} is " in done.err


@pytest.mark.parametrize(("command", "plant"), some(product(OUTPUTS, KINDS), 5), ids=named)
def test_what_is_planted_where_a_command_writes(
    command: str, plant: Plant, place: Path, cli: Cli, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    before = look(tmp_path)
    path = place / OUTPUTS[command]
    with planted(path, plant, victim):
        done = cli(*COMMANDS[command])
        assert look(tmp_path) == before
        # A file that has another name is replaced, and the other name's stays.
        is_replaced = plant is plant_hard_link and path.stat().st_ino != victim.stat().st_ino
        assert done.code == 0 if is_replaced else is_refused(done), done
    left = [p.name for p in place.iterdir() if "partial" in p.name or p.name.endswith(".tmp")]
    assert left == []


@pytest.mark.parametrize("plant", KINDS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", [OwnFolder.LIST, "sealed", "selection"])
def test_what_is_planted_in_a_studys_folder(name: str, plant: Plant, tmp_path: Path) -> None:
    victim = tmp_path / "outside" / "victim"
    victim.parent.mkdir()
    victim.write_text("precious")
    before = look(victim.parent)
    study = Study.create(toy_spec(), f"sqlite:///{tmp_path}/p.db")
    own_folder(study.folder.parent)
    study.folder.mkdir(0o700)
    target = victim if name == OwnFolder.LIST else victim.parent
    if plant is plant_hard_link and name != OwnFolder.LIST:
        pytest.skip("a folder has one name")
    if plant is plant_folder and name != OwnFolder.LIST:
        pytest.skip("a folder belongs there")
    if plant is plant_loose_link:
        target = victim.parent / "victim"
    plant(study.folder / name, target)
    with pytest.raises(UntrustedPathError, match=f"{name} is "):
        study._life.files.write(f"{name}/x" if name != OwnFolder.LIST else "arm/x", b"sealed")
    assert look(victim.parent) == before
    study.close()


@needs_root
def test_a_strangers_folder_of_studies_costs_no_ledger(place: Path, cli: Cli) -> None:
    """The finding: a lock that leads to the database, in a folder that a stranger made."""
    artifacts, aside = place / "privtune-artifacts", place / "aside"
    database = (place / "privtune.db").read_bytes()
    artifacts.rename(aside)
    artifacts.mkdir()
    (artifacts / "mlflow.lock").symlink_to(place / "privtune.db")
    os.chown(artifacts, STRANGER, STRANGER)
    try:
        done = cli(*COMMANDS["sync"])
        doctor = cli("doctor", *STORAGE)
    finally:
        shutil.rmtree(artifacts)
        aside.rename(artifacts)
    assert (place / "privtune.db").read_bytes() == database
    assert is_refused(done), done
    assert "belongs to another user" in done.err
    assert doctor.code == 1
    assert "belongs to another user" in " ".join(doctor.out.split())


@pytest.mark.parametrize(
    ("mode", "good"), [(0o700, True), (0o755, True), (0o775, False), (0o1777, False)]
)
def test_a_folder_of_studies_that_others_may_write(
    mode: int, good: bool, place: Path, cli: Cli
) -> None:
    artifacts = place / "privtune-artifacts"
    artifacts.chmod(mode)
    done = cli(*COMMANDS["show"])
    doctor = cli("doctor", *STORAGE)
    artifacts.chmod(0o700)
    if good:
        assert done.code == 0
        return
    assert is_refused(done), done
    assert f"chmod go-w {artifacts}" in done.err
    assert doctor.code == 1


@needs_root
@pytest.mark.parametrize("end", STORE[1:])
def test_a_strangers_file_beside_a_database(end: str, place: Path, cli: Cli) -> None:
    with planted(place / f"privtune.db{end}", plant_another_users_file, place):
        done = cli("budget", "show", "toy", *STORAGE)
    assert is_refused(done), done
    assert f"privtune.db{end} is a file of another user" in done.err


@needs_root
def test_a_link_to_a_database_is_followed_if_it_is_ones_own(tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path}/a.db") as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name="b"))
    (tmp_path / "other").mkdir()
    link = tmp_path / "other" / "b.db"
    link.symlink_to(tmp_path / "a.db")
    with Ledger(f"sqlite:///{link}") as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name="c"))
    assert [path.name for path in link.parent.iterdir()] == ["b.db"]
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(LedgerConnectionError, match="a link of another user"):
        Ledger(f"sqlite:///{link}")


def as_user(uid: int, group: int, act: Callable[[], object]) -> bool:
    """Do something as another user; return whether it raised nothing."""
    return error_as_user(uid, group, act) == ""


@needs_root
@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_a_folder_that_is_declared_as_a_groups(mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = 4321
    base = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    base.chmod(0o755)
    root = base / "shared"
    root.mkdir()
    os.chown(root, 1234, group)
    root.chmod(0o3770)
    monkeypatch.setenv("PRIVTUNE_ARTIFACTS", str(root))
    folder = OwnFolder(root / "toy", "id")
    before = os.umask(mask)
    try:
        assert as_user(1234, group, lambda: folder.write("arm/model", b"ours"))
        assert as_user(1235, group, lambda: OwnFolder(root / "toy", "id").write("arm/b", b"too"))
        assert as_user(1235, group, lambda: _expect(folder.read("arm/model"), b"ours"))
        assert not as_user(1236, 999, lambda: folder.read("arm/model"))
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_dir()}
    assert (modes, folders) == ({0o660}, {0o3770})
    shutil.rmtree(base)


def _expect(value: object, expected: object) -> None:
    assert value == expected


def test_a_lock_is_let_go_and_never_truncates(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("kept")
    with FileLock(path) as first, FileLock(path) as second:
        assert first.take()
        assert not second.wait(0.05)
    with FileLock(path) as third:
        assert third.wait(0.05)
    assert path.read_text() == "kept"


@pytest.mark.parametrize(("command", "mask"), some(product(COMMANDS, [0, 0o022, 0o077]), 4))
def test_what_a_command_makes_is_its_owners(command: str, mask: int, place: Path, cli: Cli) -> None:
    words = [f"b{mask}" if word == "other" else word for word in COMMANDS[command]]
    before = os.umask(mask)
    try:
        done = cli(*words)
    finally:
        os.umask(before)
    assert done.code == 0, done
    made = [place / OUTPUTS[command]] if command in OUTPUTS else []
    if command == "backup":
        made.append(place / "copy.db-heads")
    made += list((place / "privtune-artifacts").rglob("*"))
    made += list(place.glob("privtune.db*"))
    assert [oct(path.stat().st_mode) for path in made if path.stat().st_mode & 0o077] == []
    if command in ("certificate", "page", "signature", "report", "chart", "officer"):
        assert "To share it, run: chmod a+r" in " ".join((done.out + done.err).split())


@contextmanager
def full_disk(left: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes: the kernel's own refusal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("command", "left"), some(product(OUTPUTS, [0, 1, 40, 300]), 5))
def test_a_disk_is_full(command: str, left: int, place: Path, cli: Cli) -> None:
    before = {path.name for path in place.iterdir()}
    with full_disk(left):
        done = cli(*COMMANDS[command])
    if done.code == 0:  # it had room enough
        assert (place / OUTPUTS[command]).stat().st_size <= left
        return
    assert is_refused(done), done
    assert {path.name for path in place.iterdir()} - {
        "privtune.db-wal",
        "privtune.db-shm",
    } <= before
    assert "could not be written" in done.err
    assert "run the command again" in done.err
    assert str(OUTPUTS[command]) in done.err or command == "page"
    assert cli("budget", "verify", "toy", *STORAGE).code == 0
    assert cli(*COMMANDS[command]).code == 0
