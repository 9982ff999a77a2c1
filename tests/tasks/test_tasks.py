"""Built-in tasks hold what they declare; tables are scaled by public bounds alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from privtune.study import Study
from privtune.tasks import TASKS, TaskDataError, get_task
from privtune.tasks.tabular import tabular
from tests.study.conftest import toy_spec

BUNDLED = sorted(name for name in TASKS if not name.startswith("mnist"))


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_task_holds_what_it_declares_in_disjoint_and_fixed_splits(name: str) -> None:
    task = get_task(name)
    data = task.load_checked()
    assert data.train.x.shape[1:] == task.input_shape
    assert float(data.train.x.abs().max()) <= 1.0, "inside the public bounds"
    assert set(data.train.y.tolist()) <= set(range(task.classes))
    outputs = task.model()(data.train.x[:5])
    assert outputs.shape == (5, task.classes)
    assert task.loss(outputs, data.train.y[:5]).shape == (5,)
    assert torch.equal(data.train.x, get_task(name).load().train.x)
    parts = [data.train.x, data.validation.x, data.test.x]
    rows = [tuple(r) for p in parts for r in p.flatten(1)[:40].tolist()]
    assert len(set(rows)) > 0.9 * len(rows)


def test_a_wrong_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _line(path: Path, number: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[number + 1] = text
    path.write_text("\n".join(lines))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (["0", "1"], [0, 1]),
        ([0, 1], ["0", "1"]),
        ([True, False], [True, False]),
        ([2.0, 3.0], [2, 3]),
    ],
)
def test_classes_are_read_as_they_are_declared(
    tmp_path: Path, suffix: str, values: list, classes: list
) -> None:
    path = tmp_path / f"people.{suffix}"
    frame = records()
    frame["ill"] = [values[i % 2] for i in range(400)]
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    data = tabular(table(path, classes=classes)).load_checked()
    assert sorted(torch.cat([data.train.y, data.validation.y, data.test.y]).tolist()) == (
        [0] * 200 + [1] * 200
    )


def test_a_table_with_a_bad_record_gives_the_release_without_it(
    tmp_path: Path, storage_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the same seeds, a word for a number and a class that is none give the same to the bit."""
    arm = {"name": "a", "strategy": "papernot-steinke", "mean_runs": 2}
    path = tmp_path / "people.csv"
    found = []
    for number, text in enumerate(("old,120,yes,somebody", "40,120,perhaps,somebody")):
        records().to_csv(path, index=False)
        _line(path, 7, text)
        storage = storage_url.replace("privtune", f"p{number}")
        spec = toy_spec(task=table(path, public_test=True), arms=[arm], seed=1, epochs=1)
        (release,) = Study.create(spec, storage).run()
        found.append((release.params, release.score, release.weights.tolist(), release.utility))
    assert found[0] == found[1]
    assert capfd.readouterr() == ("", "")


def test_the_digits_are_those_of_the_library(monkeypatch):
    from sklearn.datasets import load_digits

    from privtune.tasks import built_in

    for file in (built_in._digits_file(), None):
        monkeypatch.setattr(built_in, "_digits_file", lambda file=file: file)
        for found, known in zip(built_in._digits(), load_digits(return_X_y=True), strict=True):
            np.testing.assert_array_equal(found, known)
            assert found.dtype == known.dtype
