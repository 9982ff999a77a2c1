"""Built-in tasks hold what they declare; tables are scaled by public bounds alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from privtune.errors import InvalidInputError, PrivTuneError
from privtune.study import Study
from privtune.tasks import TASKS, TaskDataError, get_task
from privtune.tasks.tabular import tabular
from tests.study.conftest import toy_spec

BUNDLED = sorted(name for name in TASKS if not name.startswith("mnist"))


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_task_holds_what_it_declares(name: str) -> None:
    task = get_task(name)
    data = task.load_checked()
    assert data.train.x.shape[1:] == task.input_shape
    assert float(data.train.x.abs().max()) <= 1.0, "inside the public bounds"
    assert set(data.train.y.tolist()) <= set(range(task.classes))
    outputs = task.model()(data.train.x[:5])
    assert outputs.shape == (5, task.classes)
    assert task.loss(outputs, data.train.y[:5]).shape == (5,)


@pytest.mark.parametrize("name", BUNDLED)
def test_the_splits_are_disjoint_and_fixed(name: str) -> None:
    first, again = get_task(name).load(), get_task(name).load()
    assert torch.equal(first.train.x, again.train.x)
    parts = [first.train.x, first.validation.x, first.test.x]
    rows = [tuple(r) for p in parts for r in p.flatten(1)[:40].tolist()]
    assert len(set(rows)) > 0.9 * len(rows)


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "mnist.npz"
    np.savez(
        path,
        x_train=rng.integers(0, 256, (60_000, 28, 28), dtype=np.uint8),
        y_train=rng.integers(0, 10, 60_000),
        x_test=rng.integers(0, 256, (10_000, 28, 28), dtype=np.uint8),
        y_test=rng.integers(0, 10, 10_000),
    )
    monkeypatch.setenv("PRIVTUNE_DATA", str(path))
    return path


def test_mnist_is_read_from_a_file(mnist: Path) -> None:
    for name in ("mnist-mlp", "mnist-cnn", "mnist-logistic"):
        task = get_task(name)
        data = task.load_checked()
        assert task.model()(data.test.x[:2]).shape == (2, 10)
        assert float(data.train.x.max()) == 1.0


def test_a_wrong_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVTUNE_DATA", str(tmp_path / "none.npz"))
    with pytest.raises(TaskDataError, match="cannot be read as MNIST"):
        get_task("mnist-mlp").load()
    np.savez(tmp_path / "part.npz", x_train=np.zeros(3))
    monkeypatch.setenv("PRIVTUNE_DATA", str(tmp_path / "part.npz"))
    with pytest.raises(TaskDataError, match="lacks y_train, x_test, y_test"):
        get_task("mnist-mlp").load()


def test_without_a_file_and_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import sklearn.datasets

    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.delenv("PRIVTUNE_DATA", raising=False)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", offline)
    with pytest.raises(TaskDataError, match=r"--data mnist\.npz"):
        get_task("mnist-mlp").load()


def table(path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "type": "tabular",
        "path": str(path),
        "target": "ill",
        "classes": ["no", "yes"],
        "bounds": {"age": [0, 120], "pressure": [50, 250]},
        "train": 300,
        "validation": 60,
        "test": 40,
        **changes,
    }


def records() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    age, pressure = rng.uniform(0, 100, 400), rng.uniform(60, 200, 400)
    ill = np.where(age / 100 + (pressure - 60) / 140 > 1.0, "yes", "no")
    return pd.DataFrame({"age": age, "pressure": pressure, "ill": ill, "name": "somebody"})


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_is_scaled_by_its_public_bounds(tmp_path: Path, suffix: str) -> None:
    frame = records()
    frame.loc[0, "age"] = 500.0  # outside of the bounds: clipped
    frame.loc[1, "pressure"] = np.nan
    path = tmp_path / f"people.{suffix}"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    data = tabular(table(path)).load_checked()
    x = torch.cat([data.train.x, data.validation.x, data.test.x])
    assert x.shape == (400, 2)
    assert float(x.max()) == 1.0
    assert float(x.min()) >= -1.0
    # Changing one record changes one row: nothing is computed over the others.
    frame.loc[7, ["age", "pressure"]] = [1.0, 249.0]
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    data = tabular(table(path)).load_checked()
    other = torch.cat([data.train.x, data.validation.x, data.test.x])
    assert len({*map(tuple, x.tolist())} - {*map(tuple, other.tolist())}) == 1


def test_a_study_of_a_table(tmp_path: Path, storage_url: str) -> None:
    path = tmp_path / "people.csv"
    records().to_csv(path, index=False)
    arm = {"name": "a", "strategy": "papernot-steinke", "mean_runs": 2}
    spec = toy_spec(task=table(path, public_test=True), arms=[arm], seed=1)
    (release,) = Study.create(spec, storage_url).run()
    assert release.utility["test_accuracy"] > 0.4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bounds": "standard"}, "is a release about them that nothing charges"),
        ({"bounds": {"age": "minmax"}}, "is a release about them that nothing charges"),
        ({"bounds": {"age": [3, 3]}}, "low < high"),
        ({"bounds": {"age": 3}}, r"must be \[low, high\]"),
        ({"bounds": {}}, "each feature column"),
        ({"bounds": {"ill": [0, 1]}}, "is the target"),
        ({"scaler": "x"}, "a table takes"),
    ],
)
def test_scaling_by_the_data_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tabular(table(Path("people.csv"), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": ["no", "maybe"]}, "Declare every class"),
        ({"target": "cured"}, "lacks the declared columns cured"),
    ],
)
def test_a_table_that_is_not_as_declared(tmp_path: Path, changes: dict, message: str) -> None:
    path = tmp_path / "people.csv"
    records().to_csv(path, index=False)
    with pytest.raises(PrivTuneError, match=message):
        tabular(table(path, **changes)).load_checked()


def test_a_task_of_another_type() -> None:
    with pytest.raises(InvalidInputError, match="must be tabular"):
        get_task({"type": "audio"})
