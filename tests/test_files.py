"""The curator's files are the curator's alone, whatever the umask."""

from __future__ import annotations

import ast
import inspect
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import privtune
from privtune.files import create_private, made_private, open_append, private_folder, write_whole
from privtune.ledger import Budget, Ledger
from privtune.ledger.storage import Storage
from privtune.study import Study
from privtune.study.trials import StudyTrials
from tests.study.conftest import toy_spec

pytestmark = pytest.mark.quick


@pytest.fixture(params=[0, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if mode(path) & 0o077]


def test_what_is_made_private(umask: int, tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "a" / "b" / "c")
    assert [mode(p) for p in (folder, *list(folder.parents)[:2])] == [0o700] * 3
    assert private_folder(folder) == folder
    write_whole(folder / "x", "é")
    assert mode(folder / "x") == 0o600
    with open_append(folder / "z") as file:
        file.write(b"line")
        assert mode(folder / "z") == 0o600
    assert create_private(folder / "y")
    assert not create_private(folder / "y")
    assert mode(folder / "y") == 0o600
    with pytest.raises(FileExistsError):
        private_folder(folder / "x" / "z")


def test_a_ledger_is_its_owners_while_it_is_open(umask: int, tmp_path: Path) -> None:
    with Ledger(f"sqlite:///{tmp_path}/a.db") as ledger:
        ledger.create_budget(Budget(4.0, 1e-5, name="b"))
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"a.db", "a.db-wal", "a.db-shm", "a.db-heads", "a.db-turn"}
        assert open_to_others(tmp_path) == []
    with Ledger(f"sqlite:///file:{tmp_path}/b.db?uri=true"):
        assert open_to_others(tmp_path) == []


def test_a_whole_study_is_its_owners(tmp_path: Path) -> None:
    """Models, certificates and MLflow's own files lie below folders that nobody else may enter."""
    before = os.umask(0)
    try:
        storage = f"sqlite:///{tmp_path}/privtune.db"
        everything = {"name": "shown", "strategy": "everything", "trials": 2}
        arms = [*toy_spec().model_dump(mode="json")["arms"][:2], everything]
        study = Study.create(toy_spec(arms=arms, budget={**BUDGET, "epsilon": 60.0}), storage)
        study.run()
        study.close()
    finally:
        os.umask(before)
    assert (study.folder / "certificate.json").exists()
    assert (study.folder / "shown" / "trials").is_dir()
    assert open_to_others(tmp_path) == []


BUDGET = {"name": "toy", "delta": 1e-5}


def test_nothing_is_made_private_after_the_fact() -> None:
    """A chmod leaves a moment in which anybody may open the file; one tightens what others made."""
    package = Path(privtune.__file__).parent
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    assert len(sources) > 100
    named = {str(path.relative_to(package)): text for path, text in sources.items()}
    found = {path: len(re.findall(r"\bf?chmod\(", text)) for path, text in named.items()}
    # Two open to its group what was made in a folder that was declared as the group's.
    assert {name: count for name, count in found.items() if count} == {"files.py": 3}
    assert "path.chmod(" in inspect.getsource(made_private)


MODULES = {
    "os": {"open", "link", "symlink", "rename", "replace", "mkfifo", "truncate"},
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move"},
    "tempfile": {"NamedTemporaryFile", "TemporaryFile", "mkstemp", "mktemp", "mkdtemp"},
    "fcntl": {"flock", "lockf"},
}
METHODS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "rename"}
ELSEWHERE = {
    ("study/seal.py", "os.open"): "the null device, which is no file of ours",
    ("tracking/writer.py", "os.open"): "the null device, which is no file of ours",
    ("tables/raw_rows.py", "write_text"): "into a temporary folder, from which the model is copied",
    (
        "serving/exported.py",
        "write_text",
    ): "into a temporary folder, from which the model is copied",
}
"""What opens files by itself, and why it may."""


def _openings(tree: ast.AST) -> Iterator[str]:
    """Name each call that makes, changes, copies or links a file without files.py."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = call.func
        modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
        modes += [k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)]
        writes = any(
            isinstance(m, str) and re.fullmatch(r"[rwaxbt+]*[wax+][rwaxbt+]*", m) for m in modes
        )
        if isinstance(function, ast.Name) and function.id == "open":
            yield "open"
        if not isinstance(function, ast.Attribute):
            continue
        home = function.value.id if isinstance(function.value, ast.Name) else ""
        if function.attr in MODULES.get(home, ()):
            yield f"{home}.{function.attr}"
        elif function.attr in METHODS and home not in MODULES:
            yield function.attr
        elif function.attr == "open" and writes:
            yield "Path.open"


def test_files_are_opened_in_one_way() -> None:
    """Whatever else opens, copies or links a file follows links, or truncates what it did not make."""
    package = Path(privtune.__file__).parent
    found = {
        (str(path.relative_to(package)), what)
        for path in package.rglob("*.py")
        if path.name != "files.py"
        for what in _openings(ast.parse(path.read_text()))
    }
    assert found == set(ELSEWHERE)
    wrong = ast.parse("open('x', 'w'); p.open('r+'); os.link(a, b); p.write_text('x')")
    assert set(_openings(wrong)) == {"open", "Path.open", "os.link", "write_text"}


@pytest.mark.parametrize("by", ["ledger", "studies"])
def test_what_is_deleted_is_overwritten(by: str, tmp_path: Path) -> None:
    """A secret that was deleted is in no page of the file; without the setting it is."""
    path = tmp_path / "a.db"
    secret = "c0ffee" * 50
    url = f"sqlite:///{path}"
    opened = Ledger(url) if by == "ledger" else StudyTrials(Storage(url), "toy", MagicMock())
    engine = opened.log.storage.engine if isinstance(opened, Ledger) else opened._database.engine
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE kept (text TEXT)")
        connection.exec_driver_sql(f"INSERT INTO kept VALUES ('{secret}')")
        connection.commit()
        connection.exec_driver_sql("DELETE FROM kept")
        connection.commit()
    opened.close()
    assert secret.encode() not in path.read_bytes()


def test_a_file_has_its_mode_from_the_first_byte(tmp_path: Path) -> None:
    """Seen at every call of ours that makes a file; SQLite's own files take the database's mode."""
    code = f"""
import os
os.umask(0)
real = os.open
def watched(path, flags, mode=0o777, **kwargs):
    if flags & os.O_CREAT and "a.db" in str(path):
        assert mode == 0o600, (path, oct(mode))
        print("made", os.path.basename(str(path)))
    return real(path, flags, mode, **kwargs)
os.open = watched
from privtune.ledger import Budget, Ledger
with Ledger("sqlite:///{tmp_path}/a.db") as ledger:
    ledger.create_budget(Budget(4.0, 1e-5, name="b"))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {"made", "a.db", "a.db-heads", "a.db-turn"}
