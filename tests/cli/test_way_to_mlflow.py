"""A study of Python is logged by the command that is named: each hint leads to the next one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from privtune.cli._common import program
from privtune.study import Study
from tests.study.conftest import FIXED, toy_spec

pytestmark = pytest.mark.slow

Cli = Callable[..., Any]


def command_in(text: str) -> list[str]:
    """Return the words of the last command of this program in a text."""
    found = re.findall(r"privtune ((?:study|ui)[^.\n]*)", text)
    return found[-1].split()


def test_each_hint_is_the_command_that_works(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with closing(Study.create(toy_spec(name="mine", arms=[FIXED]), "sqlite:///privtune.db")) as s:
        nothing = cli("ui")
        assert "Run a study first: privtune study run NAME" in nothing.err
        s.run()
    refused = cli("ui", "--study", "mine")
    assert refused.code == 1
    assert command_in(refused.err) == ["study", "sync", "mine"]
    compared = cli("study", "compare", "mine")
    assert command_in(compared.out) == ["study", "sync", "mine"]
    done = cli(*command_in(compared.out))
    assert (done.code, "defaults" in done.out) == (0, True), done.err
    again = cli("study", "compare", "mine")
    assert command_in(again.out) == ["ui", "--study", "mine"]
    budget = {"name": "another", "epsilon": 6.0, "delta": 1e-5}
    other = toy_spec(name="other", arms=[FIXED], budget=budget)
    with closing(Study.create(other, "sqlite:///privtune.db")) as s:
        s.run()
    refused = cli("ui", "--study", "other")
    assert refused.code == 1
    assert "these have: " in refused.err
    assert command_in(refused.err) == ["study", "sync", "other"]


def test_the_hint_names_a_program_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the Python of ``python -m privtune`` there may be no script."""
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "my bin" / "python"
    python.parent.mkdir()
    python.touch()
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "'my bin/python' -m privtune"
    python.chmod(0o700)
    monkeypatch.setenv("PATH", str(python.parent))
    assert program() == "python -m privtune"
    (python.parent / "privtune").touch()
    assert program() == "'my bin/privtune'"
    (python.parent / "privtune").chmod(0o700)
    assert program() == "privtune"


def test_the_hint_says_what_to_install_first_and_one_thing_is_said_of_what_was_logged(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with closing(Study.create(toy_spec(name="mine", arms=[FIXED]), "sqlite:///privtune.db")) as s:
        s.run()
    assert cli("study", "sync", "mine").out == "Logged defaults.\n"
    assert cli("study", "sync", "mine").out == "Nothing to log.\n"
    model = cli("study", "sync", "mine", "--model", "defaults", "--register", "toy").out
    assert model.startswith("Logged the model of defaults: ")
    assert model.count("\n") == 1
    assert "pip install" not in cli("study", "compare", "mine").out
    monkeypatch.setitem(sys.modules, "flask", None)
    hint = cli("study", "compare", "mine").out.splitlines()[-1]
    assert hint.startswith("Open it in MLflow (first: pip install 'privtune[ui]'): ")


def test_nothing_is_logged_before_a_sealed_arm_is_released(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    arm = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2}
    Study.create(toy_spec(name="mine", arms=[arm]), "sqlite:///privtune.db").close()
    said = "Nothing is logged before every sealed arm has been released: selection.\n"
    assert cli("study", "sync", "mine").out == said
