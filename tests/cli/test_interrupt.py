"""Ctrl-C, whenever it comes: one sentence with the command that goes on, and no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from privtune.ledger import Ledger
from privtune.study import Study
from tests.study.conftest import toy_spec

# Raises Ctrl-C when the command line reaches a place, as the signal does between two instructions.
_DRIVER = """
import sys, builtins
place = {place!r}
if place.startswith("import "):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == place.removeprefix("import "):
                raise KeyboardInterrupt
    sys.meta_path.insert(0, Finder())
from privtune.cli import main
if not place.startswith("import "):
    import importlib
    module, _, name = place.partition(":")
    owner, _, method = name.rpartition(".")
    found = importlib.import_module(module)
    found = getattr(found, owner) if owner else found
    def stop(*args, **options):
        raise KeyboardInterrupt
    setattr(found, method, stop)
sys.argv = ["privtune", "study", "run", "toy", "--storage", {storage!r}, "--no-mlflow"]
main()
"""

PLACES = [
    "import typer",
    "import privtune.accounting",
    "import privtune.cli.study",
    "import torch",
    "privtune.study._run:dry_run",
    "privtune.study.lifecycle:Life.charge",
    "privtune.study.lifecycle:Life.start",
    "privtune.study._round:train_trials",
    "privtune.study.lifecycle:Life.settle",
    "privtune.study.lifecycle:Life.announce",
]


@pytest.mark.parametrize(
    "place", [*PLACES[:2], *(pytest.param(p, marks=pytest.mark.slow) for p in PLACES[2:])]
)
def test_an_interrupted_command_says_how_to_go_on(tmp_path: Path, place: str) -> None:
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    arm = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2}
    Study.create(toy_spec(arms=[arm]), storage).close()
    code = _DRIVER.format(place=place, storage=storage)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(f"go on with: privtune study run toy --storage {storage} --no-mlflow")
    with Ledger(storage) as ledger:
        early = any(word in place for word in ("import", "dry_run", "charge"))
        assert len(ledger.charges("toy")) == (0 if early else 1)
