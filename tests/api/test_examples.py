"""The examples of the documentation run, small."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PEOPLE = "people"  # compares two units, and has no study to give


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - {PEOPLE}))
def test_an_example_runs(
    name: str,
    storage_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    study = load_file(EXAMPLES / f"{name}.py").main(storage=storage_url, epochs=0.5)
    (status,) = study.status()
    assert status.state == "settled"
    assert study.spent().epsilon <= study.spec.budget.epsilon
    (printed,) = capsys.readouterr().out.splitlines()[-1:]
    assert str(study.releases()[0].guarantee) in printed


def test_people_and_rows_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    load_file(EXAMPLES / f"{PEOPLE}.py").main(people=100)
    _, record, person = capsys.readouterr().out.splitlines()[-3:]
    assert "up to 6" in record
    assert person.split()[:4] == ["person", "100", "1", "1"]
    assert list(tmp_path.iterdir()) == []
