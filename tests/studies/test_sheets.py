"""Every study that is a sheet: it runs in smoke mode, and its README says what its results say."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from studies import evidence
from studies.sheet import Options, Sheet
from tests.studies.recorded import check_recorded

FOLDER = Path(__file__).parents[2] / "studies"
NAMES = sorted(
    path.parent.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("run.py")
    if "SHEET = Sheet(" in path.read_text("utf-8")
)


def sheet(name: str) -> Sheet:
    found = importlib.import_module(f"studies.{name.replace('/', '.')}.run").SHEET
    assert isinstance(found, Sheet)
    assert found.name == name
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_smoke(name, tmp_path, capsys, monkeypatch):
    if name == "fine_tuning_text":
        pytest.importorskip("transformers")
    monkeypatch.setenv("PRIVTUNE_DATA", "set back at the end")
    out = tmp_path / "results.csv"
    command = ["--smoke", "--out", str(out), "--charts", str(tmp_path)]
    assert sheet(name).main(command) == 0
    study = sheet(name)
    rows = study.read(out)
    assert {tuple(row[c] for c in study.key) for row in rows} == {
        tuple(str(cell[c]) for c in study.key) for cell in study.cells(Options(None, smoke=True))
    }
    assert study.again.stand_in == (study.folder / "stand-in.csv").exists()
    if study.again.stand_in:
        check_recorded(study, evidence.again_of(study, rows))
    before = out.read_bytes()
    assert study.main(command) == 0  # nothing is run twice
    assert out.read_bytes() == before
    assert any(tmp_path.glob("*.html"))
    assert "| --- |" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_the_readme_shows_what_was_measured(name):
    study = sheet(name)
    rows = study.read(study.folder / "results.csv")
    readme = (study.folder / "README.md").read_text("utf-8")
    assert study.summary(rows) in readme
    for part in ("**Question", "Result", f"python -m studies.{name.replace('/', '.')}.run"):
        assert part in readme, part
    for chart in re.findall(r"\]\((\w+\.png)\)", readme):
        assert (study.folder / chart).exists()
        assert chart.removesuffix(".png") in study.charts(rows)


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_recorded_results_are_as_expected_and_others_are_not(name):
    study = sheet(name)
    rows = study.read(study.folder / "results.csv")
    assert study.compare(rows) == []
    keys = json.loads((study.folder / "expected.json").read_text("utf-8"))
    assert len(study.compare([])) >= 0.5 * len(keys)  # what is not there deviates
    shifted = [{name: _moved(name, text, study) for name, text in row.items()} for row in rows]
    assert study.compare(shifted)


def _moved(column: str, text: str, study: Sheet) -> str:
    if column in study.key:
        return text
    try:
        return str(1.5 * float(text) + 3.0)
    except ValueError:
        return text
