"""Commands that only read what was released load no library that trains or logs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from privtune.study import Study
from tests.study.conftest import FIXED, toy_spec

pytestmark = pytest.mark.slow

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "mlflow", "opacus", "pandas"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
from privtune.cli import main
sys.exit(main())
"""

COMMANDS = [
    "study list",
    "study show toy",
    "study compare toy",
    "study compare toy --json",
    "study compare toy --csv",
    "study compare toy --md",
    "budget list",
    "budget show toy",
    "budget charges toy",
    "budget verify toy",
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('light') / 'privtune.db'}"
    selection = {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 4}
    with closing(Study.create(toy_spec(arms=[FIXED, selection]), url)) as study:
        study.run()
    return url


@pytest.mark.parametrize("command", COMMANDS)
def test_what_was_released_is_shown_without_torch(command: str, url: str, tmp_path: Path) -> None:
    words = [*command.split(), "--storage", url]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
