"""The study of fine-tuning: its smoke mode, its recorded results, and that a wrong one is noticed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from studies.transfer import run
from studies.transfer.task import HIDDEN

FOLDER = Path(run.__file__).parent
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("trainable", ["head", "lora:4"])
def test_smoke(trainable, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(HIDDEN, "16")
    monkeypatch.delenv("PRIVTUNE_DATA", raising=False)
    out = tmp_path / "results.csv"
    arms = ["hyfreedp", "un-paid grid"]
    arguments = ["--smoke", "--out", str(out), "--trainable", trainable, "--arms", *arms]
    assert run.main([*arguments, "--check"]) == 0
    with out.open(encoding="utf-8") as file:
        assert [row["arm"] for row in csv.DictReader(file)] == arms
    assert f"{trainable}, ε = 3" in capsys.readouterr().out


@pytest.mark.quick
def test_recorded_results_pass_their_own_check_and_others_do_not(tmp_path):
    recorded = FOLDER / "results.csv"
    assert run.compare(recorded, EXPECTED) == []
    assert run.table(recorded) in (FOLDER / "README.md").read_text(encoding="utf-8")
    worse = tmp_path / "worse.csv"
    with recorded.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with worse.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, run.FIELDS)
        writer.writeheader()
        writer.writerows({**row, "accuracy": float(row["accuracy"]) - 0.3} for row in rows)
    assert len(run.compare(worse, EXPECTED)) == len(run.cells(recorded))
    with worse.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, run.FIELDS)
        writer.writeheader()
        writer.writerow({**rows[0], "spent": 99.0})
    assert "spent more" in run.compare(worse, EXPECTED)[0]
