"""Tables of patients: columns of every kind, regression, models, and what is refused."""

from __future__ import annotations

import datetime
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.study import Study, plan_study
from privtune.tasks import Task, TaskDataError
from privtune.tasks.tabular import tabular
from privtune.views.report import render_study
from privtune.views.text import utility_column
from tests.study.conftest import toy_spec

HERE = "tests.tasks.test_tables"
SUFFIXES = ("csv", "parquet", "arrow")


def patients(count: int = 400) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    age, sex = rng.uniform(20, 90, count), rng.choice(["f", "m"], count)
    level = rng.choice(["none", "school", "college"], count)
    seen = [
        datetime.date(2015, 1, 1) + datetime.timedelta(days=int(d))
        for d in rng.integers(0, 3000, count)
    ]
    visits = np.clip((age - 20) / 7 + 3 * (sex == "f") + rng.normal(0, 1, count), 0, None)
    return pd.DataFrame(
        {
            "age": age,
            "sex": sex,
            "education": level,
            "seen": [d.isoformat() for d in seen],
            "visits": visits,
            "often": np.where(visits > 6, "yes", "no"),
        }
    )


def save(frame: pd.DataFrame, folder: Path, suffix: str = "csv") -> Path:
    path = folder / f"patients.{suffix}"
    if suffix == "csv":
        frame.to_csv(path, index=False)
    elif suffix == "parquet":
        frame.to_parquet(path)
    else:
        import pyarrow as pa

        table = pa.Table.from_pandas(frame)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return path


COLUMNS = {
    "age": {"bounds": [20, 90], "missing": 50},
    "sex": {"categories": ["f", "m"]},
    "education": {"ordinal": ["none", "school", "college"], "missing": "school"},
    "seen": {"date": ["2015-01-01", "2025-01-01"], "parts": ["time", "month", "weekday"]},
}


def table(path: Path, **changes: Any) -> dict[str, Any]:
    spec = {
        "type": "tabular",
        "path": str(path),
        "target": "often",
        "classes": ["no", "yes"],
        "columns": COLUMNS,
        "train": 280,
        "validation": 60,
        "test": 60,
        **changes,
    }
    return {key: value for key, value in spec.items() if value is not None}


def regression(path: Path, **changes: Any) -> dict[str, Any]:
    terms = {"target": "visits", "classes": None, "target_range": [0, 20], **changes}
    return table(path, **terms)


def all_of(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    data = task.load_checked()
    parts = (data.train, data.validation, data.test)
    return torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_columns_of_every_kind(tmp_path: Path, suffix: str) -> None:
    frame = patients()
    frame.loc[0, ["age", "sex", "education", "seen"]] = [np.nan, "x", None, "2020-07-01"]
    task = tabular(table(save(frame, tmp_path, suffix)))
    task.check()
    x, y = all_of(task)
    assert x.shape == (400, 1 + 3 + 1 + 5)
    assert int((y < 0).sum()) == 0
    (row,) = x[(x[:, 3] == 1.0)].tolist()  # the one of another sex
    angle = 2 * math.pi * 6 / 12
    day = 2 * (datetime.date(2020, 7, 1) - datetime.date(2015, 1, 1)).days / 3653 - 1
    week = 2 * math.pi * 2 / 7
    assert row == pytest.approx(
        [
            (50 - 55) / 35,
            0,
            0,
            1,
            0.0,
            day,
            math.sin(angle),
            math.cos(angle),
            math.sin(week),
            math.cos(week),
        ],
        abs=1e-5,
    )
    assert float(x.abs().max()) <= 1.0
    facts = task.facts.to_dict()
    assert "sex: f, m, or another" in facts["values"]
    assert "none < school < college" in facts["values"]
    assert facts["bounds"] == "age [20, 90]"


@pytest.mark.parametrize(
    ("column", "bad"),
    [("age", "old"), ("education", "phd"), ("seen", "yesterday"), ("often", "perhaps")],
)
def test_a_record_that_is_not_as_declared_contributes_nothing(
    tmp_path: Path, column: str, bad: str
) -> None:
    frame = patients().astype(object)
    frame.loc[7, column] = bad
    x, y = all_of(tabular(table(save(frame, tmp_path))))
    assert int((y == -1).sum()) == 1
    assert x[y == -1].abs().max() == 0.0


def test_a_column_of_dates_in_parquet(tmp_path: Path) -> None:
    frame = patients()
    text = all_of(tabular(table(save(frame, tmp_path))))[0]
    frame["seen"] = pd.to_datetime(frame["seen"])
    assert torch.allclose(all_of(tabular(table(save(frame, tmp_path, "parquet"))))[0], text)


def test_targets_of_a_regression_are_held_to_their_range(tmp_path: Path) -> None:
    frame = patients().astype(object)
    frame.loc[0, "visits"] = 1e9
    frame.loc[1, "visits"] = "many"
    frame.loc[2, "visits"] = None
    task = tabular(regression(save(frame, tmp_path)))
    y = all_of(task)[1]
    assert y.dtype == torch.float32
    assert float(y.nan_to_num(0.0).max()) == 20.0
    assert int(y.isnan().sum()) == 2
    assert task.facts.to_dict()["target"] == "a number in [0, 20]"


def factory(features: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 3), nn.ReLU(), nn.Linear(3, outputs))


@pytest.mark.parametrize(
    ("options", "description", "params"),
    [
        ({}, "linear regression on patients.csv", 11),
        ({"model": "mlp", "hidden": [5]}, "MLP 10-5-1 on patients.csv", 61),
        ({"model": f"{HERE}:factory"}, f"{HERE}:factory on patients.csv", 37),
    ],
)
def test_models(tmp_path: Path, options: dict[str, Any], description: str, params: int) -> None:
    task = tabular(regression(save(patients(), tmp_path), **options))
    assert task.description == description
    model = task.model()
    assert sum(p.numel() for p in model.parameters()) == params
    # Outputs are in the units of the target; the loss in those of half its range.
    assert torch.allclose(
        task.loss(torch.tensor([[12.0]]), torch.tensor([2.0])), torch.tensor([1.0])
    )
    outputs = model(torch.zeros(2, 10))
    assert outputs.shape == (2, 1)
    if not options:
        assert outputs.tolist() == [[10.0], [10.0]]  # from zero weights: the middle of the range


def test_class_weights_weigh_the_loss(tmp_path: Path) -> None:
    """As parts of the largest: clipping would shorten again what a weight above 1 makes longer."""
    path = save(patients(), tmp_path)
    plain, heavy = tabular(table(path)), tabular(table(path, class_weights=[1, 5]))
    outputs, targets = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    assert torch.allclose(
        heavy.loss(outputs, targets), plain.loss(outputs, targets) * torch.tensor([0.2, 1, 1, 0.2])
    )


def test_a_plan_says_where_class_weights_change_nothing(tmp_path: Path) -> None:
    task = table(save(patients(), tmp_path), class_weights=[1, 5])
    arms = [*ARMS, {"name": "free", "strategy": "hyfreedp"}]
    advice = {
        plan.arm: str(plan.details.get("advice", ""))
        for plan in plan_study(toy_spec(task=task, arms=arms)).plans
    }
    assert [arm for arm, text in advice.items() if "class_weights change nothing" in text] == [
        "free"
    ]


ARMS = [
    {
        "name": "defaults",
        "strategy": "fixed",
        "parameters": {"learning_rate": 2.0, "max_grad_norm": 1.0},
    },
    {"name": "selection", "strategy": "papernot-steinke", "mean_runs": 2},
]


def test_a_regression_is_reported_as_one(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'p.db'}"
    task = regression(save(patients(), tmp_path, "parquet"))
    spec = toy_spec(task=task, arms=ARMS, report={"metric": "mae"}, seed=2, epochs=8)
    study = Study.create(spec, storage)
    assert study.plans[1].score is not None
    assert study.plans[1].score.make_metrics()[0].range == (0.0, 20.0)
    for release in study.run():
        assert list(release.utility) == ["test_mae"]
        assert 0.0 < release.utility["test_mae"] < 9.0
    title, values = utility_column(study.status())
    assert title == "test mae"
    page = re.sub(r"<script.*?</script>", "", render_study(study), flags=re.DOTALL)
    assert "ccuracy" not in page
    assert all(value in page for value in values.values())
    frame = study.compare()
    assert {"test_mae", "validation_mae"} <= set(frame.columns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"columns": {"sex": [0, 1]}},
            "sex should be numbers, and the file holds text there. Write decimal",
        ),
        ({"classes": None, "target_range": [0, 3]}, "often should be numbers.*or classes"),
    ],
)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_header_is_held_against_the_spec(
    tmp_path: Path, suffix: str, changes: dict[str, Any], message: str
) -> None:
    if suffix == "csv":  # its header declares no types
        tabular(table(save(patients(), tmp_path, suffix), **changes)).check()
        return
    with pytest.raises(TaskDataError, match=message):
        tabular(table(save(patients(), tmp_path, suffix), **changes)).check()


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = save(patients(), tmp_path)
    path.write_text(path.read_text().replace("age,sex", "age,age", 1))
    with pytest.raises(TaskDataError, match="two columns called age"):
        tabular(table(path, columns={"age": [0, 90]})).check()


def test_a_metric_of_classes_does_not_go_with_a_regression(tmp_path: Path) -> None:
    task = regression(save(patients(), tmp_path))
    with pytest.raises(InvalidInputError, match="must be of numbers in a declared range"):
        plan_study(toy_spec(task=task, arms=ARMS, scoring={"metric": "accuracy"}))


@pytest.mark.parametrize("first", ["{broken", "[1, 2]", '{"age": 50}'])
def test_no_record_by_itself_says_which_columns_a_file_of_json_lines_has(
    first: str, tmp_path: Path
) -> None:
    path = tmp_path / "patients.jsonl"
    patients().to_json(path, orient="records", lines=True)
    task = tabular(table(path))
    before = task.load()
    path.write_text(first + "\n" + path.read_text())
    task.check()
    after = task.load()
    known = [
        sum(int((part.y >= 0).sum()) for part in (data.train, data.validation, data.test) if part)
        for data in (before, after)
    ]
    assert known == [400, 400]
