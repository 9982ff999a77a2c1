"""Odd values of every variable that commands read: an answer or one sentence, and no file by accident.

``make test`` tries some of the values for each variable; ``PRIVTUNE_CAMPAIGN=full`` all of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import privtune
from privtune.study import Study
from tests.cli.conftest import Cli
from tests.study.conftest import toy_spec
from tests.tiers import FULL

ODD = [
    "", " ", "0", "1", "-1", "true", "nan", "inf", "-inf", "1e309", "0x10", "1_0", "٣", "é", "💥",
    "a" * 5000, "/" * 300, "/dev/null", "/dev/null/x", "/proc/self/mem", "/proc/1/root",
    "/nonexistent/deep/er", "~", "~nobody/x", "~/../../x", "$HOME", "..", "../..", ".", "./", "a/b",
    "a//b", "a b", "a\tb", "a\nb", "'", "\"", "\\", "%s", "%00", "{0}", "*", "?", "|", ";rm",
    "file:///nonexistent/x", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:////dev/full",
    "postgresql://nowhere.invalid/x", "http://", "http://127.0.0.1:1", "s3://bucket", "memory://", "-",
    "--help", "False", "None",
]  # fmt: skip
READ = [
    "PRIVTUNE_STORAGE", "PRIVTUNE_STORAGE_FILE", "PRIVTUNE_ARTIFACTS", "PRIVTUNE_CURATOR",
    "PRIVTUNE_DATA", "PRIVTUNE_TRACKING_SECONDS", "MLFLOW_TRACKING_URI",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "XDG_CACHE_HOME", "XDG_DATA_HOME",
]  # fmt: skip
COMMANDS = [("study", "show", "toy")]
HANDED_ON = {"PRIVTUNE_UI_KEY"}
"""What a command sets for a process of its own, whatever it was before."""

SHARE = 1 if FULL else 7  # one in so many values is tried


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a planned study, which commands run in."""
    monkeypatch.chdir(tmp_path)
    Study.create(toy_spec(), f"sqlite:///{tmp_path / 'privtune.db'}").close()
    return tmp_path


def test_every_variable_that_is_read_is_tried() -> None:
    package = Path(privtune.__file__).parent
    sources = "\n".join(path.read_text() for path in package.rglob("*.py"))
    ours = set(re.findall(r"\"(PRIVTUNE_[A-Z_]+)\"", sources))
    assert ours - HANDED_ON == {name for name in READ if name.startswith("PRIVTUNE")}


@pytest.mark.parametrize("name", READ)
def test_odd_values_are_an_answer_or_one_sentence(
    name: str, place: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name for path in place.iterdir()}
    for value in ODD[READ.index(name) % SHARE :: SHARE]:
        monkeypatch.setenv(name, value)
        for command in COMMANDS:
            done = cli(*command)
            assert done.code in (0, 1, 2), (value, command)
            assert "Traceback" not in done.err, (value, command)
            if done.code == 1:
                assert done.err.strip().count("\n") == 0, (value, command, done.err)
                assert len(done.err) < 1500, (value, command)
        monkeypatch.delenv(name)
    made = {path.name for path in place.iterdir()} - before
    assert all(path.startswith("privtune.db-") for path in made), made
    assert os.getcwd() == str(place)
