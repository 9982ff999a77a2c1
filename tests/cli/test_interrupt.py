"""Ctrl-C or SIGTERM, whenever it comes: one sentence with the command that goes on, no traceback."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from privtune.ledger import Ledger
from privtune.study import Study
from privtune.training.mechanism.oracle import Oracle
from tests.cli.conftest import Cli
from tests.study.conftest import toy_spec

# Raises Ctrl-C when the command line looks for a module, as the signal does between two instructions.
_DRIVER = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from privtune.cli import main
sys.argv = ["privtune", *{words!r}]
main()
"""

MODULES = ["typer", "privtune.accounting", "privtune.cli.study", "torch"]
PLACES = [
    "privtune.study.rehearsal.dry_run",
    "privtune.study.lifecycle.Life.charge",
    "privtune.study.lifecycle.Life.start",
    "privtune.study.arm_rounds.train_trials",
    "privtune.study.lifecycle.Life.settle",
    "privtune.study.lifecycle.Life.announce",
]


def made(tmp_path: Path, **changes: Any) -> tuple[str, tuple[str, ...]]:
    """Make a study; return its storage, and the command that runs it."""
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    arm = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2}
    Study.create(toy_spec(arms=[arm], **changes), storage).close()
    return storage, ("study", "run", "toy", "--storage", storage, "--no-mlflow")


def check(code: int, said: str, command: tuple[str, ...]) -> None:
    assert code == 130, said
    assert said.count("\n") == 1, said
    assert said.endswith(f"To continue, run: privtune {shlex.join(command)}\n")


def charges(storage: str) -> list[str]:
    with Ledger(storage) as ledger:
        return [str(charge.state) for charge in ledger.charges("toy")]


@pytest.mark.parametrize(
    "module", [*MODULES[:2], *(pytest.param(m, marks=pytest.mark.slow) for m in MODULES[2:])]
)
def test_an_import_that_is_interrupted_says_how_to_go_on(tmp_path: Path, module: str) -> None:
    storage, command = made(tmp_path)
    code = _DRIVER.format(module=module, words=command)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    check(done.returncode, done.stderr, command)
    assert charges(storage) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [None, RuntimeError("between two states"), OSError("half-way")])
def test_an_interrupted_command_says_how_to_go_on(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception | None
) -> None:
    """It may come while a library is between two states, whose way out fails then."""

    def stop(*args: Any, **options: Any) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            if error is not None:
                raise error

    storage, command = made(tmp_path)
    monkeypatch.setattr(place, stop)
    done = cli(*command)
    check(done.code, done.err, command)
    early = any(word in place for word in ("dry_run", "charge"))
    assert len(charges(storage)) == (0 if early else 1)


@pytest.mark.slow
def test_sigterm_is_ctrl_c_and_nothing_is_lost(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler's first signal, in the middle of a training; the same command goes on from there."""
    storage, command = made(tmp_path, seed=1)
    gradient, step = Oracle.gradient, itertools.count()

    def terminated(*args: Any, **options: Any) -> Any:
        answer = gradient(*args, **options)
        with Ledger(storage) as ledger:
            started = any(charge.state == "started" for charge in ledger.charges("toy"))
        if started and next(step) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    before = signal.getsignal(signal.SIGTERM)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Oracle, "gradient", terminated)
            stopped = cli(*command)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert next(step) == 4, "it was stopped after four releases"
    check(stopped.code, stopped.err, command)
    assert charges(storage) == ["started"]

    assert cli(*command).code == 0
    assert charges(storage) == ["settled"]
    with closing(Study("toy", storage)) as study:
        (release,) = study.releases()
    assert (release.arm, release.is_nothing) == ("selection", False)


@pytest.mark.parametrize(
    ("words", "place", "charges_told"),
    [
        (("study", "compare", "toy", "--html", "page.html"), "privtune.cli.study._load", False),
        (("budget", "show", "toy"), "privtune.ledger.Ledger", False),
        (("demo", "--folder", "here"), "privtune.cli.commands.private_folder", True),
    ],
)
def test_a_command_that_charges_nothing_says_nothing_of_charges(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    place: str,
    charges_told: bool,
) -> None:
    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, stop)
    done = cli(*words)
    check(done.code, done.err, words)
    assert ("charged" in done.err) == charges_told
