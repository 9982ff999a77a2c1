"""The examples of the documentation run, small."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest

from privtune import opacus as selection
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
BUILDS = {"own_model": 40, "language_model": 60}  # below how many lines
DECLARED = sorted({path.stem for path in EXAMPLES.glob("*.py")} - {PEOPLE, *BUILDS})
LONGEST = 30
SELECTION = PapernotSteinke(mean_runs=2)


def lines_of(name: str) -> int:
    lines = [line.strip() for line in (EXAMPLES / f"{name}.py").read_text().splitlines()]
    return sum(1 for line in lines if line and not line.startswith(("#", '"""')))


@pytest.mark.parametrize("name", BUILDS)
def test_a_build_runs_and_is_short(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert lines_of(name) < BUILDS[name]
    storage = f"sqlite:///{tmp_path / 'privtune.db'}"
    study = load_file(EXAMPLES / f"{name}.py").main(storage=storage, epochs=0.5)
    (status,) = study.status()
    assert status.state == "settled"
    assert study.spent().epsilon <= study.spec.budget.epsilon
    (printed,) = capsys.readouterr().out.splitlines()[-1:]
    assert str(study.releases()[0].guarantee) in printed


@pytest.mark.filterwarnings("ignore")  # of Opacus' and lightning's, about themselves
@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_mechanism_runs_and_is_short(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.startswith("opendp"):
        pytest.importorskip("opendp")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(selection, "PapernotSteinke", lambda mean_runs: SELECTION)
    assert lines_of(name) < LONGEST
    release = runpy.run_path(str(EXAMPLES / f"{name}.py"))["release"]
    (printed,) = capsys.readouterr().out.splitlines()[-1:]
    assert str(release.guarantee) in printed
    if name == "opacus_mnist":  # a script that is run again gets what was released
        assert runpy.run_path(str(EXAMPLES / f"{name}.py"))["release"].params == release.params
    assert release.checked.startswith("checked: Opacus sampled") == ("opacus" in name)


def test_the_tutorial_has_five_added_lines() -> None:
    lines = (EXAMPLES / "opacus_mnist.py").read_text().splitlines()
    assert sum("# +" in line for line in lines) == 5
    assert sum("# ~" in line for line in lines) == 1


def test_people_and_rows_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    load_file(EXAMPLES / f"{PEOPLE}.py").main(people=100)
    _, record, person = capsys.readouterr().out.splitlines()[-3:]
    assert "up to 6" in record
    assert person.split()[:4] == ["person", "100", "1", "1"]
    assert list(tmp_path.iterdir()) == []
