"""Wrong files and choices at the command line: one sentence, nothing is made, nothing is spent."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from privtune.ledger import Ledger
from privtune.study import Study
from tests.cli.conftest import Cli
from tests.study.conftest import toy_spec

SPEC: dict[str, Any] = toy_spec().model_dump(mode="json")


def dumped(**changes: Any) -> bytes:
    return json.dumps({**SPEC, **changes}).encode()


FILES: dict[str, bytes] = {
    "empty": b"",
    "two documents": dumped() + b"\n---\n" + dumped(),
    "an open bracket": b"name: [toy\n",
    "no UTF-8": b"name: \xff\xfe\n",
    "UTF-16 without a mark": "name: toy\n".encode("utf-16-le"),
    "an object of Python": b"name: !!python/object/apply:os.system ['true']\n",
    "an alias of itself": b"name: &a [*a]\n",
    "a bomb": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in b"bcdefgh"),
    "a deep nest": b"name: " + b"[" * 5000 + b"]" * 5000 + b"\n",
    "a long number": b"seed: " + b"9" * 10_000 + b"\n",
    "no date": b"a: 2026-13-45\n",
    "a NUL": b"\0",
    "HTML": b"<!DOCTYPE html><html><body>404</body></html>",
}
URLS = (
    "", " ", "folder", "text.txt", "sqlite:", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://p.db",
    "sqlite:///no/such/folder/p.db", "sqlite:///folder", "sqlite:///text.txt", "sqlite:///p.db?timeout=x",
    "sqlite:///p.db?mode=memory", "sqlite:///file:p.db?mode=ro&uri=true", "mysql://bob:hunter2@h/db", "://",
    "http://bob:hunter2@127.0.0.1/db", "postgresql://bob:hunter2@127.0.0.1:1/db", "postgresql://h:port/db",
    "postgresql://127.0.0.1:1/db?sslkey=hunter2&sslpassword=hunter2&password=hunter2", "sqlite:///a\0b",
    "postgresql://127.0.0.1:1/db?options=hunter2", "sqlite:///" + "x" * 5000,
    "sqlite+pysqlcipher://:hunter2@/p.db", "postgresql://bob:hunter2@127.0.0.1:1/db?nonsense=hunter2",
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(cli: Cli, folder: Path, *words: str, made: tuple[str, ...] = ()) -> str:
    """Give a command that cannot work: exit 1 or 2, one sentence, nothing made; return the sentence."""
    before = {path.name for path in folder.iterdir()}
    done = cli(*words)
    assert done.code in (1, 2), done
    assert words[0] == "worker" or done.out == ""  # a worker says at once that it works
    assert "Traceback" not in done.err
    assert "hunter2" not in done.err
    if done.code == 1:
        assert done.err.count("\n") == 1, done.err
    assert 10 < len(done.err) < 4500
    assert {path.name for path in folder.iterdir()} - before <= set(made)
    return done.err


def file(here: Path, content: bytes) -> str:
    (here / "spec.yaml").write_bytes(content)
    return "spec.yaml"


COMMANDS = (("study", "plan"), ("study", "create"), ("study", "run"))


@pytest.mark.parametrize("kind", list(FILES))
def test_a_file_that_is_no_spec(kind: str, here: Path, cli: Cli) -> None:
    name = file(here, FILES[kind])
    for command in COMMANDS:
        refused(cli, here, *command, name)


@pytest.mark.parametrize("url", URLS)
def test_a_storage_that_is_none(url: str, here: Path, cli: Cli) -> None:
    (here / "folder").mkdir()
    (here / "text.txt").write_text("no database\n" * 100)
    name = file(here, dumped())
    for words in (("study", "create", name), ("budget", "list"), ("worker", "toy")):
        refused(cli, here, *words, "--storage", url)
    assert (here / "text.txt").read_text().startswith("no database")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(path.name)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def nothing(path: Path) -> None:
    assert not path.exists()


@pytest.mark.parametrize("make", [a_folder, a_loop, a_dangling_link, a_socket, a_pipe, nothing])
def test_a_file_that_is_something_else(make: Callable[[Path], None], here: Path, cli: Cli) -> None:
    make(here / "spec.yaml")
    at = ("--storage", f"sqlite:///{here}/p.db")
    store = ("p.db", "p.db-turn", "p.db-wal", "p.db-shm")
    certificate = ("budget", "verify", "--certificate")
    sign = ("budget", "sign", "--key", "spec.yaml")
    for command in (COMMANDS[0], ("account", "epsilon", "--delta", "1e-5"), certificate, sign):
        refused(cli, here, *command, "spec.yaml")
    for command in COMMANDS[1:]:
        refused(cli, here, *command, "spec.yaml", *at, made=store)
    if make is not a_folder:
        refused(cli, here, "budget", "backup", "spec.yaml/copy.db", *at, made=store)


@pytest.mark.parametrize(
    "words",
    [
        ("study",), ("study", "report", "toy"), ("study", "run"), ("study", "run", "toy", "--jobs", "x"),
        ("study", "run", "toy", "--jobs", "0"), ("study", "run", "toy", "--jobs", "-2"),
        ("study", "run", "toy", "--stack", "many"), ("study", "run", "toy", "--stack", "0"),
        ("study", "run", "toy", "--device", "tpu"), ("study", "run", "toy", "--executor", "dask"),
        ("study", "run", "toy", "--data", "no/such/file", "--device", "tpu"),
        ("study", "compare", "toy", "--csv", "--md"), ("study", "compare", "toy", "--html", "no/such/x.html"),
        ("study", "compare", "toy", "--html", "folder"), ("study", "export", "toy", "--html", "x.html"),
        ("study", "export", "toy", "--registry", "--sp800-226"), ("study", "show", "joy"),
        ("study", "delete", "joy", "--yes"), ("worker", "joy"), ("worker", "toy", "--max-rows", "0"),
        ("worker", "toy", "--idle-exit", "-1"), ("worker", "toy", "--device", "tpu"),
        ("budget", "show", "joy"), ("budget", "create", "x", "--epsilon", "0", "--delta", "1e-5"),
        ("budget", "create", "x", "--epsilon", "nan", "--delta", "1e-5"),
        ("budget", "create", "x", "--epsilon", "1", "--delta", "2"), ("budget", "backup", "p.db"),
        ("budget", "backup", "p.db-wal"), ("budget", "backup", "other.db-shm"),
        ("budget", "backup", "folder"),
        ("budget", "backup", "no/such/x.db"), ("account", "epsilon", "folder", "--delta", "1e-5"),
        ("audit", "toy", "--arm", "nobody"), ("audit", "joy"), ("nothing",), ("--nothing",),
    ],
)  # fmt: skip
def test_a_choice_that_is_none(words: tuple[str, ...], here: Path, cli: Cli) -> None:
    (here / "folder").mkdir()
    url = f"sqlite:///{here}/p.db"
    Study.create(toy_spec(), url).close()
    os.environ["PRIVTUNE_STORAGE"] = url
    try:
        if words == ("study",):
            assert cli(*words).code in (0, 2)
        else:
            refused(cli, here, *words, made=("p.db-wal", "p.db-shm", "p.db-turn", "p-artifacts"))
    finally:
        del os.environ["PRIVTUNE_STORAGE"]
    with Ledger(url) as ledger:
        assert ledger.spent("toy").epsilon == 0.0
        assert ledger.charges("toy") == ()
