"""What messages say: commands that exist, names that end, a user's module in one sentence, no formulas."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer.main

import privtune
from privtune import PrivTuneError
from privtune.cli._app import mount
from privtune.errors import InvalidInputError
from privtune.imports import find_function
from privtune.study import Study, StudySpec
from privtune.study.arm_row import ArmRow
from privtune.tasks import get_task
from privtune.views import comparison
from tests.cli.conftest import Cli
from tests.study.conftest import toy_spec
from tests.toy import exact_score

ROOT = Path(privtune.__file__).parents[1]
APP: Any = typer.main.get_command(mount())

# A command as it is written: in a message, a page, a block of code; it ends where its words do.
_COMMAND = re.compile(
    r"(?<![\w./-])privtune ((?:account|budget|study)(?: [a-z][a-z0-9-]*)?|[a-z][a-z-]*)"
)
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")
# Words that follow the program's name in prose, where it is no command.
_PROSE = frozenset({"is", "as", "of", "and", "has", "at", "in", "to", "on", "with", "for", "the"})


def messages() -> Iterator[tuple[str, str]]:
    """Yield where and what: the texts of the package (f-strings whole), and the lines of all pages."""
    for path in sorted((ROOT / "privtune").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "NAME" for p in node.values]
                yield where, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from ((where, line) for line in node.value.splitlines())
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "privtune").rglob("*.md")]
    for path in (*pages, *(ROOT / "studies").rglob("*.md")):
        if path.name == "CHANGELOG.md":
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def test_every_command_and_option_that_is_named_exists() -> None:
    wrong, seen = [], set()
    for where, text in messages():
        for found in _COMMAND.finditer(text):
            group, _, inner = found[1].partition(" ")
            if group in _PROSE or group not in APP.commands:
                if group not in _PROSE and ("`privtune " in text or "Run" in text):
                    wrong.append(f"{where}: privtune {group}")
                continue
            command = APP.commands[group]
            if hasattr(command, "commands") and inner:
                if inner not in command.commands:
                    wrong.append(f"{where}: privtune {group} {inner}")
                    continue
                command = command.commands[inner]
            seen.add(found[1])
            if hasattr(command, "commands"):
                continue
            known = {o for param in command.params for o in (*param.opts, *param.secondary_opts)}
            rest = re.split(r"[`;|]|privtune |\. |\), |: ", text[found.end() :])[0]
            wrong += [
                f"{where}: privtune {found[1]} {option}"
                for option in _OPTION.findall(rest)
                if option not in {*known, "--help", "--version"}
            ]
    assert len(seen) > 25, "the walk sees the commands"
    assert wrong == []


def test_the_walk_finds_what_does_not_exist() -> None:
    found = _COMMAND.search("Run: privtune study report NAME --never")
    assert found is not None
    assert found[1] == "study report"
    assert "report" not in APP.commands["study"].commands


MODULES = {
    "no such module": None,
    "a syntax error": "def task(:\n",
    "a null byte": "x = 1\0\n",
    "an import of its own": "import no_such_library_of_mine\n",
    "sys.exit(0)": "import sys\nsys.exit(0)\n",
    "GeneratorExit": "raise GeneratorExit\n",
    "an error of its own base": "class Stop(BaseException): pass\nraise Stop('now')\n",
    "an error": "raise ValueError('one\\ntwo\\nthree')\n",
    "a long error": "raise ValueError('x' * 100_000)\n",
    "recursion": "def f(): return f()\nf()\n",
    "no memory": "raise MemoryError\n",
    "a circular import": "import broken_b\ntask = broken_b.task\n",
    "no function": "task = 3\n",
    "a class that fails": "class task:\n def __init__(self): raise KeyError('x')\n",
    "a function that wants arguments": "def task(a, b): return a\n",
    "a function that exits": "import sys\ndef task(): sys.exit(1)\n",
    "a function that recurses": "def task(): return task()\n",
    "a function that returns nothing": "def task(): pass\n",
}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_b.py").write_text("import broken\ntask = broken.task\n")
    return tmp_path / "broken.py"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    for name in ("broken", "broken_b"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", list(MODULES))
def test_a_module_of_the_users_that_fails_is_one_sentence(
    kind: str, broken: Path, tmp_path: Path, cli: Cli
) -> None:
    source = MODULES[kind]
    if source is not None:
        broken.write_bytes(source if isinstance(source, bytes) else source.encode())
    spec = toy_spec().model_dump(mode="json") | {"task": "broken:task"}
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    done = cli("study", "create", "spec.yaml")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), (kind, done)
    assert len(done.err) < 1000
    assert "broken:task" in done.err
    with pytest.raises(InvalidInputError):
        get_task("broken:task")


def test_an_interrupt_while_a_module_is_imported_is_one(broken: Path) -> None:
    broken.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        find_function("task", "broken:task", allowed="", must="")


def test_what_a_module_prints_is_in_no_document(broken: Path, tmp_path: Path, cli: Cli) -> None:
    broken.write_text(
        "print('loud')\nfrom tests.toy import blobs\ndef task():\n print('louder')\n return blobs()\n"
    )
    spec = toy_spec().model_dump(mode="json") | {"task": "broken:task"}
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    done = cli("study", "plan", "spec.yaml", "--json")
    assert done.code == 0
    assert "loud" not in done.out
    assert json.loads(done.out)["study"] == "toy"


FORMULAS = ("=1+1", "+1", "-1+cmd|' /C calc'!A0", "@SUM(1)", "\t=1", "\r=1", " =1")


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_of_a_csv_is_a_formula(text: str) -> None:
    arm = ArmRow(
        {"arm": text},
        params={"choice": text, text: 1, "rate": -0.5},
        scores={text: exact_score(0.5)},
    )
    (head, row) = csv.reader(io.StringIO(comparison.write_csv([arm]), newline=""))
    for cell in (*head, *row):
        assert not cell.lstrip(" ").startswith(("=", "+", "@", "\t", "\r")), cell
        if cell.startswith("-"):
            assert float(cell) < 0, "a number is a number"
    assert "-0.5" in row
    assert f"'{text}".replace("\r", " ") in row


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'p.db'}"


def test_no_message_echoes_an_endless_name(storage: str, cli: Cli) -> None:
    name = "x'y" * 2000
    Study.create(toy_spec(), storage).close()
    at = ("--storage", storage)
    for words in (
        ["study", "show", name], ["study", "run", name], ["study", "delete", name, "--yes"], ["worker", name],
        ["study", "compare", name], ["budget", "show", name], ["budget", "verify", name],
        ["audit", "toy", "--arm", name], ["worker", "toy", "--device", name],
    ):  # fmt: skip
        done = cli(*words, *at)
        assert done.code == 1, (words[:2], done.err[:300])
        assert 0 < len(done.err) < 1500, words[:2]
    with closing(Study("toy", storage)) as study, pytest.raises(PrivTuneError) as caught:
        study.release(name)
    assert len(str(caught.value)) < 1000
    with pytest.raises(PrivTuneError) as caught:
        StudySpec.parse({**toy_spec().model_dump(mode="json"), name: 1})
    assert len(str(caught.value)) < 4000
