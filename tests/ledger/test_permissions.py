"""A store is its owner's alone once it is opened, and who may only read it reads it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from privtune.accounting import Gaussian
from privtune.ledger import Budget, ChargeRequest, Ledger, LedgerBusyError
from privtune.ledger.places import STORE, artifact_root
from privtune.ledger.storage import Storage, _make_private
from privtune.study import Study
from privtune.study.restore import restore_store
from tests.study.conftest import toy_spec

_OBEYED = "-dac_override,-dac_read_search,-fowner"
_AS_OTHERS = [] if os.geteuid() else ["setpriv", f"--bounding-set={_OBEYED}"]
"""What makes the system hold a process to the modes of files, also one of the superuser."""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'p.db'}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_opening_a_store_takes_it_away_from_others(url: str, tmp_path: Path) -> None:
    """Database, log, locks, heads, the study's folder, made under the umask 022."""
    with closing(Study.create(toy_spec(arms=toy_spec().model_dump()["arms"][:1]), url)) as study:
        study.run()
        folder = study.folder
    writer = Ledger(url)  # so that SQLite's own files are there
    writer.create_budget(Budget(1.0, 1e-5, name="other"))
    for path in (*tmp_path.glob("p.db*"), folder, artifact_root(url)):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert {path.name for path in tmp_path.glob("p.db*")} >= {"p.db", "p.db-wal", "p.db-shm"}
    _make_private.cache_clear()  # as another process
    Study("toy", url).close()
    writer.close()
    assert all(mode(path) == 0o600 for path in tmp_path.glob("p.db*"))
    assert mode(folder) == 0o700
    assert mode(artifact_root(url)) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file to somebody else")
def test_a_store_of_somebody_else_is_reported_and_left(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Ledger(url).close()
    path = tmp_path / "p.db"
    path.chmod(0o644)
    os.chown(path, 65534, 65534)
    _make_private.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            Ledger(url).close()
    (said,) = caplog.messages
    assert f"chmod go= {path}" in said
    assert mode(path) == 0o644


def test_a_foreign_folder_keeps_its_mode(url: str) -> None:
    Study.create(toy_spec(), url).close()
    with closing(Study("toy", url)) as study:
        study.folder.mkdir(parents=True)
        study.folder.chmod(0o755)
        artifact_root(url).chmod(0o755)
    Study("toy", url).close()
    assert mode(artifact_root(url)) == mode(study.folder) == 0o755


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    spec = toy_spec(arms=toy_spec().model_dump()["arms"][:1], epochs=1)
    with closing(Study.create(spec, f"sqlite:///{folder / 'p.db'}")) as study:
        study.run()
    return folder


def restored(finished: Path, folder: Path) -> Path:
    """Make a store of its own, with a finished study, in a folder that is made; return its file."""
    shutil.copytree(finished, folder)
    path = folder / "p.db"
    restore_store(path)
    return path


@pytest.fixture(params=["file", "folder", "uri"])
def read_only(request: pytest.FixtureRequest, finished: Path, tmp_path: Path) -> Iterator[str]:
    if _AS_OTHERS and shutil.which(_AS_OTHERS[0]) is None:
        pytest.skip("needs setpriv: the superuser writes to everything")
    path = restored(finished, tmp_path / "a folder of 100%")
    folder = path.parent
    if request.param == "file":
        path.chmod(0o400)
    if request.param == "folder":
        folder.chmod(0o500)
    if request.param == "uri":
        quoted = str(path).replace("%", "%25")
        yield f"sqlite:///file:{quoted}?mode=ro&uri=true"
    else:
        yield f"sqlite:///{path}"
    folder.chmod(0o700)


_ASK = """
import contextlib, io, json, sys
from privtune.cli import main
for command in json.loads(sys.argv[1]):
    out, err, sys.argv = io.StringIO(), io.StringIO(), ["privtune", *command]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
READS = (
    "study list", "study show toy", "study compare toy", "budget list", "budget show toy",
    "budget charges toy", "budget verify toy",
)  # fmt: skip
WRITES = ("study delete toy --yes", "budget close toy")


def test_who_may_only_read_reads_and_leaves_nothing(read_only: str, tmp_path: Path) -> None:
    (folder,) = tmp_path.iterdir()
    before = {path.name: path.read_bytes() for path in folder.glob("p.db*")}
    commands = [[*command.split(), "--storage", read_only] for command in (*READS, *WRITES)]
    call = [*_AS_OTHERS, sys.executable, "-c", _ASK, json.dumps(commands)]
    done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=tmp_path)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for command, (code, out, err) in zip(READS, answers, strict=False):
        assert (code or 0, err) == (0, ""), command
        assert out.strip()
    for code, _, err in answers[len(READS) :]:
        assert (code, err.count("\n")) == (1, 1), err
        assert "read-only" in err
    assert len(answers) == len(commands)
    assert {path.name: path.read_bytes() for path in folder.glob("p.db*")} == before


def test_who_reads_beside_a_writer(finished: Path, tmp_path: Path) -> None:
    """With a write-ahead log that lies there, SQLite reads it; one that it cannot read is said."""
    path = restored(finished, tmp_path / "live")
    with Ledger(path) as writer:
        writer.create_budget(Budget(1.0, 1e-5, name="late"))
        assert path.with_name("p.db-wal").exists()
        with Ledger(f"sqlite:///file:{path}?mode=ro&uri=true") as reader:
            assert {budget.name for budget in reader.budgets()} == {"toy", "late"}


def test_what_changes_while_it_is_read_is_not_shown(finished: Path, tmp_path: Path) -> None:
    path = restored(finished, tmp_path / "live")
    url = f"sqlite:///file:{path}?mode=ro&uri=true"
    with Ledger(url) as reader:
        assert len(reader.charges("toy")) == 1
        with Ledger(f"sqlite:///{path}") as writer:
            writer.record("toy", ChargeRequest(Gaussian(50.0), note="meanwhile"))
        with pytest.raises(LedgerBusyError, match="try again"):
            reader.charges("toy")
    with Ledger(url) as reader:
        assert len(reader.charges("toy")) == 2


def test_no_ledger_is_made_where_one_may_only_be_read(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with (
        pytest.raises(Exception, match=r"cannot be opened"),
        closing(Storage(f"sqlite:///file:{path}?mode=ro&uri=true")) as storage,
        storage.read(),
    ):
        pass
    assert not any(Path(f"{path}{end}").exists() for end in STORE)
