"""Studies draw on the budget of their dataset: at the command line, in Python, and with scikit-learn."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import privtune
from privtune.ledger import Budget, DatasetMismatchError, Ledger
from privtune.strategies import Fixed
from privtune.study import Study, StudySpec
from privtune.study.lifecycle import Life
from privtune.tasks import get_task
from privtune.views.officer import evidence
from tests.cli.conftest import Cli
from tests.study.conftest import FIXED, toy_spec


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path / 'privtune.db'}"


TABLE = "a,b,label\n" + "".join(f"{n % 7},{n % 5},{'yes' if n % 2 else 'no'}\n" for n in range(400))


def table_spec(study: str, path: str, **budget: Any) -> dict[str, Any]:
    return {
        "name": study,
        "task": {
            "type": "tabular", "path": path, "target": "label", "classes": ["yes", "no"],
            "bounds": {"a": [0, 7], "b": [0, 5]}, "train": 300, "validation": 50, "test": 50,
        },
        "budget": {"name": "hospital", "epsilon": 8.0, "delta": 1e-4, **budget},
        "arms": [FIXED],
        "epsilon": 1.0,
        "epochs": 1,
        "expected_batch_size": 60,
    }  # fmt: skip


def write_spec(spec: Mapping[str, Any]) -> str:
    path = Path(f"{spec['name']}.yaml")
    path.write_text(json.dumps(spec))
    return str(path)


def test_a_study_of_another_file_is_refused_when_it_is_made(storage: str, cli: Cli) -> None:
    for name in ("patients.csv", "digits.csv"):
        Path(name).write_text(TABLE)
    first = write_spec(table_spec("first", "patients.csv"))
    other = write_spec(table_spec("other", "digits.csv"))
    assert cli("study", "run", first, "--no-mlflow", "--storage", storage).code == 0
    refused = cli("study", "create", other, "--storage", storage)
    assert refused.code == 1
    err = refused.err
    assert "Budget 'hospital' protects patients (patients.csv; columns a, b, label)" in err
    assert "this is digits (digits.csv" in err
    assert "--dataset 'patients'" in err
    assert cli("study", "plan", other, "--storage", storage).code == 1
    refused = cli("study", "create", other, "--dataset", "digits", "--storage", storage)
    assert refused.code == 1
    assert "declared to be dataset 'digits'" in refused.err
    declared = ["study", "run", other, "--dataset", "patients", "--no-mlflow"]
    assert cli(*declared, "--storage", storage).code == 0
    listed = cli("budget", "list", "--json", "--storage", storage).out
    assert json.loads(listed)[0]["dataset"] == "patients"
    shown = cli("budget", "show", "hospital", "--storage", storage)
    assert shown.code == 0
    out = shown.out
    assert "patients.csv" in out
    assert "digits.csv" in out  # declared to be the same, and there for all to see
    assert cli("budget", "verify", "hospital", "--storage", storage).code == 0


def test_a_study_goes_on_from_another_folder(storage: str, tmp_path: Path) -> None:
    """A path is how it was declared: a charge that is there is not asked again."""
    Path("patients.csv").write_text(TABLE)
    spec = StudySpec.parse(table_spec("first", "patients.csv"))
    with closing(Study.create(spec, storage)) as study:
        study._life.charge(study.plans)
    moved = tmp_path / "moved"
    moved.mkdir()
    Path("patients.csv").rename(moved / "patients.csv")
    os.chdir(moved)
    with closing(Study("first", storage)) as study:
        assert len(study.run()) == 1


def test_a_second_budget_over_one_file_is_said_once(
    storage: str, cli: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    Path("patients.csv").write_text(TABLE)
    first = write_spec(table_spec("first", "patients.csv"))
    assert cli("study", "run", first, "--no-mlflow", "--storage", storage).code == 0
    again = write_spec({**table_spec("again", "patients.csv", name="second")})
    with caplog.at_level(logging.WARNING):
        assert cli("study", "create", again, "--storage", storage).code == 0
    said = [each.getMessage() for each in caplog.records if "add up" in each.getMessage()]
    assert said == [
        "patients.csv is also charged to budget hospital: for the people in it, the ε of both add up."
    ]


def test_built_in_benchmarks_are_datasets_without_people(
    storage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for task, other in itertools.pairwise(("digits-mlp", "digits-cnn", "mnist-mlp")):
        one, two = get_task(task).dataset, get_task(other).dataset
        assert one is not None
        assert two is not None
        assert one.is_same(two) == (other == "digits-cnn")
    spec = toy_spec(task="digits-mlp", expected_batch_size=64, arms=[FIXED], epsilon=1.0)
    Study.create(spec, storage).close()
    with closing(Life("toy", storage)) as life:
        life.charge(list(life.plans().values()))
    budget = {**spec.budget.model_dump(), "name": "second"}
    with caplog.at_level(logging.WARNING):
        Study.create(
            spec.model_copy(update={"name": "toy2", "budget": type(spec.budget)(**budget)}),
            storage,
        ).close()
    assert "add up" not in caplog.text
    iris = toy_spec(name="iris", task="iris-logistic", expected_batch_size=30, arms=[FIXED])
    with pytest.raises(DatasetMismatchError, match="Budget 'toy' protects digits"):
        Study.create(iris, storage)


def frame(*columns: str) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({name: [float(n % 3) for n in range(300)] for name in columns}).assign(
        target=[n % 2 for n in range(300)]
    )


def test_frames_on_one_budget_are_told_by_their_columns(storage: str) -> None:
    import torch

    def build(trial: privtune.Trial) -> privtune.Candidate:
        model = torch.nn.Linear(2, 2)
        return privtune.Candidate(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), y, reduction="none")

    budget = Budget(8.0, 1e-4, name="clinic")
    terms: dict[str, Any] = {"epochs": 1, "expected_batch_size": 50, "epsilon": 1.0}
    study = privtune.create_study("s", budget=budget, storage=storage)

    def ask(arm: str, *columns: str, of: Study = study) -> Any:
        chosen = {"inputs": list(columns), "target": "target"}
        data = frame(*columns)
        task = privtune.make_task(build, loss=loss, split={"train": 250}, data=data, columns=chosen)
        return of.optimize(task, strategy=Fixed(arm=arm), **terms)

    ask("one", "age", "height")
    ask("two", "age", "weight")
    with pytest.raises(DatasetMismatchError, match="columns p0, p1, target"):
        ask("three", "p0", "p1")
    assert study.arms == ("one", "two")
    declared = Budget(8.0, 1e-4, name="clinic", dataset="clinic")
    other = privtune.create_study("t", budget=declared, storage=storage)
    assert ask("three", "p0", "p1", of=other).arm == "three"
    assert study.dataset == "clinic"
    assert "clinic" in str(evidence(study).dataset)


def test_budgets_named_by_python_and_spec_agree(storage: str) -> None:
    budget = Budget(8.0, 1e-4, name="clinic", dataset="register")
    privtune.create_study("s", budget=budget, storage=storage).close()
    with Ledger(storage) as ledger:
        assert ledger.dataset("clinic") == "register"
    with pytest.raises(DatasetMismatchError, match="protects register"):
        privtune.create_study(
            "t", budget=Budget(8.0, 1e-4, name="clinic", dataset="another"), storage=storage
        )


def test_an_event_of_another_dataset_is_no_charge(storage: str, cli: Cli) -> None:
    Path("event.json").write_text('{"type": "gaussian", "noise_multiplier": 30.0}')
    at = ("--storage", storage)
    terms = ("--epsilon", "4", "--delta", "1e-5", "--dataset", "patients")
    assert cli("budget", "create", "hospital", *terms, *at).code == 0
    charge = ("budget", "charge", "hospital", "event.json", "--note", "counts", *at)
    refused = cli(*charge, "--dataset", "digits")
    assert refused.code == 1
    assert "Budget 'hospital' protects patients" in refused.err
    assert cli(*charge, "--dataset", "patients").code == 0
    assert cli(*charge).code == 0
    assert cli("budget", "create", "second", *terms, *at).code == 0
    second = ("budget", "charge", "second", "event.json", "--note", "counts", *at)
    said = cli(*second, "--dataset", "patients")
    assert said.code == 0
    assert (
        "patients is also charged to budget hospital: for the people in it, the ε of both add"
        in said.err
    )
    assert len(json.loads(cli("budget", "charges", "hospital", "--json", *at).out)) == 2


def test_pages_and_the_tracker_name_the_budgets_dataset(storage: str) -> None:
    """What a study's own task is called is no title of the budget's certificate."""
    from privtune.views.record import arm_record, budget_view
    from privtune.views.report import render_study

    Path("patients.csv").write_text(TABLE)
    spec = table_spec("first", "patients.csv")
    spec["task"]["name"] = "a-model-of-mine"
    with closing(Study.create(StudySpec.parse(spec), storage)) as study:
        [release] = study.run()
        [plan] = study.plans
        record = arm_record(study, plan, release, budget_view(study))
        words = "patients (patients.csv; columns a, b, label)"
        assert record.tags["privtune.dataset"] == "patients"
        assert record.tags["privtune.dataset_read"] == words
        assert evidence(study).dataset == words
        assert study.dataset == "patients"
        assert words in render_study(study)


def test_a_dataset_is_declared_when_a_study_is_made(storage: str, cli: Cli) -> None:
    Path("patients.csv").write_text(TABLE)
    first = write_spec(table_spec("first", "patients.csv"))
    assert cli("study", "create", first, "--storage", storage).code == 0
    refused = cli("study", "run", "first", "--dataset", "patients", "--storage", storage)
    assert refused.code == 1
    assert "is declared when a study is made" in refused.err


def test_a_password_is_no_part_of_a_dataset() -> None:
    spec = {
        **table_spec("first", "patients.csv")["task"],
        "url": "postgresql://me:${PASSWORD}@db.clinic/records", "query": "SELECT a, b, label FROM visits",
    }  # fmt: skip
    del spec["path"]
    dataset = get_task(spec).dataset
    assert dataset is not None
    assert dataset.name == "visits"
    assert dataset.source == "postgresql://me:***@db.clinic/records, table visits"
