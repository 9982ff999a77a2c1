"""``privtune predict`` and ``privtune model export``: what is written, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from privtune.study import Study, StudySpec
from tests.cli.conftest import Cli
from tests.study.conftest import PARAMETERS, toy_spec
from tests.tasks.test_rows import messy
from tests.tasks.test_tables import table


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A storage with a study of a table and one of arrays, both of which have run."""
    monkeypatch.chdir(tmp_path)
    storage = "sqlite:///privtune.db"
    arms = [{"name": "arm", "strategy": "fixed", "parameters": PARAMETERS}]
    frame, path = messy(), tmp_path / "patients.csv"
    frame.loc[4, "sex"] = "é"
    frame.to_csv(path, sep=";", encoding="cp1252", index=False)
    spec = {
        "name": "patients",
        "task": table(path, encoding="cp1252", train=40, validation=10, test=10),
        "budget": {"name": "patients", "epsilon": 50.0, "delta": 1e-4},
        "arms": arms,
        "epochs": 1,
        "expected_batch_size": 20,
    }
    for parsed in (StudySpec.parse(spec), toy_spec(arms=arms)):
        study = Study.create(parsed, storage)
        study.run(force=True)
        study.close()
    return storage


def test_predictions_stand_beside_their_rows(cli: Cli, storage: str, tmp_path: Path) -> None:
    lines = (tmp_path / "patients.csv").read_text("cp1252").splitlines()
    odd = ['50;f;college;2020-01-01;1;"no', "1;2;3;4;5;6;7", "", "50;f"]
    Path("asked.csv").write_text("\r\n".join([*lines, *odd]), "cp1252")
    done = cli("predict", "patients", "arm", "asked.csv", "--to", "out.csv")
    assert done.out == "Wrote out.csv, readable by you alone.\n"
    assert "No prediction for 1 of 63 rows" in done.err
    with open("out.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [*lines[0].split(";"), "prediction", "probability_no", "probability_yes"]
    assert [row[:6] for row in rows[:60]] == list(csv.reader(lines[1:], delimiter=";"))
    assert rows[4][1] == "é"
    release = Study("patients", storage).release("arm")
    wanted = release.predict([dict(zip(header, row, strict=False)) for row in rows[:60]])
    assert [row[6] for row in rows[:60]] == wanted["prediction"].tolist()
    assert [bool(row[6]) for row in rows[60:]] == [True, False, True], "no line swallows another"
    alone = cli("predict", "patients", "arm", "asked.csv", "--alone").out
    assert alone.splitlines() == [",".join(row[6:]) for row in (header, *rows)]
    document = json.loads(cli("predict", "patients", "arm", "asked.csv", "--json").out)
    assert document["arm"] == "arm"
    assert [one["prediction"] or "" for one in document["predictions"]] == [r[6] for r in rows]


def test_what_cannot_be_asked_is_said_in_a_sentence(cli: Cli, storage: str) -> None:
    Path("short.csv").write_text("age,sex\n1,f\n")
    Path("twice.csv").write_text("age,sex,sex,education,seen\n")
    Path("none.csv").write_text("age,sex,education,seen\n")
    Path("taken.csv").write_text("age,sex,education,seen,prediction\n")
    for words, said in {
        ("patients", "arm", "short.csv"): "have no column education, seen",
        ("patients", "arm", "twice.csv"): "twice.csv has two columns called sex.",
        ("patients", "arm", "taken.csv"): "a column called prediction already: give --alone",
        ("patients", "arm", "short.csv", "--to", "new.csv"): "have no column education, seen",
        ("patients", "arm", "absent.csv"): "absent.csv is not there.",
        ("patients", "arm", "none.csv", "--to", "none.csv"): "must be another file",
        ("patients", "other", "none.csv"): "has no arm 'other'",
        ("toy", "arm", "none.csv"): "holds 4 cells, and the model takes arrays float32 [n, 6]",
    }.items():
        done = cli("predict", *words)
        assert (done.code, done.out) == (1, "")
        assert said in done.err
        assert done.err.count("\n") == 1
    assert not Path("new.csv").exists()
    assert cli("predict", "patients", "arm", "none.csv", "--alone").out.startswith("prediction,")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's and torch.export's own
def test_a_model_is_exported_with_its_guarantee(cli: Cli, storage: str) -> None:
    done = cli("model", "export", "patients", "arm", "--to", "model", "--json")
    study = Study("patients", storage)
    assert json.loads(done.out)["privtune.certificate"] == study.certificate()["digest"]
    assert Path("model/MLmodel").exists()
    made = [Path("model"), *Path("model").rglob("*")]
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    again = cli("model", "export", "patients", "arm", "--to", "model")
    assert (again.code, again.out) == (1, "")
    assert "must be a new folder" in again.err
