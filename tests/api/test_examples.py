"""The examples of the documentation run, small."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest

from privtune.integrations import opacus as selection
from privtune.strategies import PapernotSteinke

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PEOPLE = "people"  # compares two units, and has no study to give
LONGEST = 30
SELECTION = PapernotSteinke(mean_runs=2)


@pytest.mark.filterwarnings("ignore")  # of Opacus' and lightning's, about themselves
@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - {PEOPLE}))
def test_an_example_runs_and_is_short(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name.startswith("opendp"):
        pytest.importorskip("opendp")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(selection, "PapernotSteinke", lambda mean_runs: SELECTION)
    path = EXAMPLES / f"{name}.py"
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert sum(1 for line in lines if line and not line.startswith(("#", '"""'))) < LONGEST
    release = runpy.run_path(str(path))["release"]
    (printed,) = capsys.readouterr().out.splitlines()[-1:]
    assert str(release.guarantee) in printed
    if name == "opacus_mnist":  # a script that is run again gets what was released
        assert runpy.run_path(str(path))["release"].params == release.params
    assert release.checked == ("checked against Opacus' accountant" if "opacus" in name else "")


def test_the_tutorial_has_five_added_lines() -> None:
    lines = (EXAMPLES / "opacus_mnist.py").read_text().splitlines()
    assert sum("# +" in line for line in lines) == 5


def test_people_and_rows_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    load_file(EXAMPLES / f"{PEOPLE}.py").main(people=100)
    _, record, person = capsys.readouterr().out.splitlines()[-3:]
    assert "up to 6" in record
    assert person.split()[:4] == ["person", "100", "1", "1"]
    assert list(tmp_path.iterdir()) == []
