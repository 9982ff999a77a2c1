"""The notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import json
import os
import runpy
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from tests.ledger.campaigns import processes

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def run(script: Path, said: Path) -> None:
    """Run a script in its folder; what it says goes to a file."""
    os.chdir(script.parent)
    with said.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        runpy.run_path(str(script), run_name="__main__")


def test_there_are_four() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["1_", "2_", "3_", "4_"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_they_are_stored_without_outputs_and_thin(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    assert sum(source(cell).count("\n") + 1 for cell in code) < 110
    assert cells(path)[0]["cell_type"] == "markdown"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_they_run(path: Path, tmp_path: Path) -> None:
    """The code cells as one script, in a process and a folder of their own, as a kernel would."""
    script, said = tmp_path / "notebook.py", tmp_path / "said"
    parts = [source(c) for c in cells(path) if c["cell_type"] == "code"]
    script.write_text("\n\n".join(parts), encoding="utf-8")
    context = processes("privtune.study", "privtune.training.engine.train", "privtune.plots")
    process = context.Process(target=run, args=(script, said))
    process.start()
    process.join()
    assert process.exitcode == 0, said.read_text()[-2000:]
    assert "ε" in said.read_text()
