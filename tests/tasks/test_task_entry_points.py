"""Tasks of installed packages: named in a spec like those built in, and refused in a sentence."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from contextlib import closing
from pathlib import Path

import pytest

from privtune.errors import InvalidInputError
from privtune.plugins import EntryPointError
from privtune.study import Study
from privtune.tasks import TASKS, get_task
from privtune.tasks.built_in import registered_tasks
from tests.cli.conftest import Cli, cli
from tests.strategies.test_entry_points import Install, install
from tests.study.conftest import FIXED, toy_spec
from tests.tiers import ROOT

__all__ = ["cli", "install"]

README = ROOT / "privtune" / "tasks" / "README.md"


def install_rings(install: Install) -> None:
    """Install the package of the README's example."""
    code, points = re.findall(r"```(?:python|toml)\n(.*?)```", README.read_text(), re.DOTALL)
    project = tomllib.loads(textwrap.dedent(points))["project"]
    entries = project["entry-points"]["privtune.tasks"]
    install("my-package", entries, group="privtune.tasks", my_package=code)


def test_the_readme_adds_a_task(install: Install, tmp_path: Path, cli: Cli) -> None:
    install_rings(install)
    (entry,) = registered_tasks()
    assert (entry.name, entry.source, entry.problem) == ("rings", "my-package 1.0", "")
    assert "rings" in TASKS
    assert "rings" not in list(TASKS)
    task = get_task("rings")
    assert (task.name, task.benchmark) == ("rings", False)
    spec = toy_spec(task="rings", arms=[FIXED])
    with closing(Study.create(spec, f"sqlite:///{tmp_path / 'p.db'}")) as study:
        (release,) = study.run()
    assert not release.is_nothing
    rows = {row["name"]: row for row in json.loads(cli("tasks", "--json").out)}
    assert (rows["rings"]["from"], rows["rings"]["lacks"]) == ("my-package 1.0", None)
    assert rows["digits-mlp"]["from"] == "privtune"
    assert "rings (from my-package 1.0)" in cli("tasks").out


TASK = """
from dataclasses import replace
from privtune.tasks import get_task
def make():
    return replace(get_task("iris-logistic"), name="mine")
"""


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("mine", "make = 3", "must be a function without arguments that returns a task"),
        ("mine", "", "AttributeError"),
        ("iris-logistic", TASK, "the name is built in"),
    ],
)
def test_an_entry_that_is_no_task_is_one_sentence(
    install: Install, name: str, module: str, message: str, cli: Cli
) -> None:
    install("bad", {name: "bad_task:make"}, group="privtune.tasks", bad_task=module)
    (entry,) = registered_tasks()
    assert entry.cls is None
    assert entry.problem.startswith(f"Task '{name}' of bad 1.0 ")
    assert message in entry.problem
    assert entry.problem in " ".join(cli("tasks").out.split())
    if name == "mine":
        with pytest.raises(EntryPointError, match=message):
            get_task("mine")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (TASK.replace('"mine"', '"other"'), "must return a task of its own name, not of 'other'"),
        ("def make(): return 3", "must return a privtune.tasks.Task, not int"),
        ("def make(): raise RuntimeError('no')", "its function failed"),
    ],
)
def test_a_task_that_cannot_be_made_is_one_sentence(
    install: Install, module: str, message: str, cli: Cli
) -> None:
    install("bad", {"mine": "bad_task:make"}, group="privtune.tasks", bad_task=module)
    with pytest.raises(InvalidInputError, match=message):
        get_task("mine")
    listed = cli("tasks")
    assert listed.code == 0
    assert message in " ".join(listed.out.split())


def test_a_task_is_loaded_when_a_study_names_it(install: Install) -> None:
    install("good", {"mine": "good_task:make"}, group="privtune.tasks", good_task=TASK)
    with pytest.raises(InvalidInputError, match=r"must be one of .*, mine, .*mnist"):
        get_task("nobodys")
    assert get_task("mine").name == "mine"
