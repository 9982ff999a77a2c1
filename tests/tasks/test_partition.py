"""A record's split is its own: neighbours differ in one record, and no size of theirs is used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn.datasets

from privtune.accounting import Adjacency
from privtune.errors import InvalidInputError
from privtune.study import Study
from privtune.tasks import Sizes, TaskData, built_in, get_task, split
from privtune.tasks.partition import places
from privtune.tasks.tabular import tabular
from privtune.training.mechanism.data import TensorData
from tests.strategies.world import context
from tests.study.conftest import toy_spec
from tests.tasks.test_tasks import records, table

pytestmark = pytest.mark.quick

Edit = Callable[[np.ndarray], np.ndarray]
PARTS = ("train", "validation", "test")


def rows(data: TensorData) -> Counter[bytes]:
    return Counter(
        x.numpy().tobytes() + bytes([int(y)]) for x, y in zip(data.x, data.y, strict=True)
    )


def moved(before: TaskData, after: TaskData) -> list[tuple[str, int, int]]:
    """Return for every split that differs how many records left it and how many joined it."""
    found = []
    for part in PARTS:
        one, other = rows(getattr(before, part)), rows(getattr(after, part))
        if one != other:
            found.append((part, (one - other).total(), (other - one).total()))
    return found


def without(number: int) -> Edit:
    return lambda values: np.delete(values, number, axis=0)


def added(number: int, value: float) -> Edit:
    """Put a new record, the first one with another first number, at a place."""

    def edit(values: np.ndarray) -> np.ndarray:
        new = values[0].copy()
        if new.ndim:
            new.flat[0] = value
        return np.insert(values, number, new, axis=0)

    return edit


SOURCES = {
    "digits-mlp": "load_digits",
    "digits-cnn": "load_digits",
    "breast-cancer-logistic": "load_breast_cancer",
    "iris-logistic": "load_iris",
}


def loaded(name: str, edit: Edit, monkeypatch: pytest.MonkeyPatch, folder: Path) -> TaskData:
    """Load a task from a source that was edited."""
    with monkeypatch.context() as patch:
        if name.startswith("digits"):
            images, labels = built_in._digits()
            patch.setattr(built_in, "_digits", lambda: (edit(images), edit(labels)))
        elif name in SOURCES:
            source = getattr(sklearn.datasets, SOURCES[name])

            def edited(**options: Any) -> Any:
                return tuple(edit(part) for part in source(**options))

            patch.setattr(sklearn.datasets, SOURCES[name], edited)
        elif name == "synthetic-logistic":
            patch.setattr(built_in, "split", lambda x, y, sizes: split(edit(x), edit(y), sizes))
        else:
            rng = np.random.default_rng(0)
            x, y = rng.integers(0, 256, (700, 28, 28), dtype=np.uint8), rng.integers(0, 10, 700)
            np.savez(
                folder / "mnist.npz",
                x_train=edit(x[:600]),
                y_train=edit(y[:600]),
                x_test=x[600:],
                y_test=y[600:],
            )
            patch.setenv("PRIVTUNE_DATA", str(folder / "mnist.npz"))
        return get_task(name).load()


@pytest.mark.parametrize("name", [*SOURCES, "synthetic-logistic", "mnist-mlp", "mnist-cnn"])
def test_a_record_of_a_built_in_task_moves_no_other(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = loaded(name, lambda values: values, monkeypatch, tmp_path)
    for number in (0, 71, 149):
        fewer = moved(whole, loaded(name, without(number), monkeypatch, tmp_path))
        assert [(left, joined) for _, left, joined in fewer] == [(1, 0)]
    for number, value in ((0, 0.5), (88, 3.0)):
        more = moved(whole, loaded(name, added(number, value), monkeypatch, tmp_path))
        assert [(left, joined) for _, left, joined in more] == [(0, 1)]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("named", [False, True])
def test_a_record_of_a_table_moves_no_other(tmp_path: Path, suffix: str, named: bool) -> None:
    path = tmp_path / f"people.{suffix}"

    def of(frame: pd.DataFrame) -> TaskData:
        frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
        return tabular(table(path, **({"id": "person"} if named else {}))).load_checked()

    frame = records()
    frame["person"] = np.arange(len(frame)) + 1
    whole = of(frame)
    for number in (0, 200, 399):
        assert [m[1:] for m in moved(whole, of(frame.drop(index=number)))] == [(1, 0)]
        double = pd.concat([frame, frame.iloc[[number]]])
        assert [m[1:] for m in moved(whole, of(double))] == [(0, 1)], "equal records share a split"
    # A record that lacks its id, which makes pandas read the ids of Parquet's others as floats.
    lacking = pd.concat([frame, frame.iloc[[0]].assign(person=np.nan)])
    if suffix == "csv":
        lacking["person"] = lacking["person"].astype("Int64")
    assert [m[1:] for m in moved(whole, of(lacking))] == [(0, 1)]
    changed = frame.copy()
    changed.loc[7, "age"] = 1.0
    stays = moved(whole, of(changed))
    assert sum(left for _, left, _ in stays) == sum(joined for *_, joined in stays) == 1
    if named:
        assert len(stays) == 1, "what is known of a record does not move it; its id is what it is"


def test_types_of_arrays_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 200, (500, 7)), rng.integers(0, 3, 500)
    known = places(x, y, (3, 1, 1))
    for kind in (np.uint8, np.int32, np.float32, np.float64):
        assert (places(x.astype(kind), y.astype(np.int8), (3, 1, 1)) == known).all()
    assert (places(-0.0 * x, y, (3, 1)) == places(0.0 * x, y, (3, 1))).all()
    assert (places(x, y, (3, 1, 1), key="another") != known).any()


def test_a_place_never_changes() -> None:
    # Pinned: another hash would silently exchange training and public test records.
    x, y = np.arange(24.0).reshape(12, 2), np.arange(12) % 2
    assert places(x, y, (3, 1, 1)).tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    ids = [str(n) for n in range(12)]
    assert places(x, y, (3, 1, 1), ids=ids).tolist() == [0, 2, 0, 0, 0, 2, 2, 2, 0, 2, 0, 0]


def test_sizes_are_binomial() -> None:
    """Counts over 60,000 records, and the variance over 400 keys; each within 4.5 deviations."""
    shares = (1077, 360, 360)
    total = sum(shares)
    ids = [str(n) for n in range(60_000)]
    counts = np.bincount(places(ids, ids, shares, ids=ids), minlength=3)
    for count, share in zip(counts, shares, strict=True):
        p = share / total
        error = math.sqrt(len(ids) * p * (1 - p))
        assert abs(count - len(ids) * p) < 4.5 * error  # by chance 7e-6 for each of the three
        assert abs(count - len(ids) * 1.05 * p) > 4.5 * error, "a share that is 5% off is seen"
    # Records are independent of each other over the key: not a fixed number goes to each split.
    few = ids[:200]
    sizes = [int((places(few, few, (1, 1), ids=few, key=f"k{k}") == 0).sum()) for k in range(400)]
    ratio = np.var(sizes, ddof=1) / 50.0  # 200 records, 1/2 each
    assert abs(ratio - 1.0) < 4.5 * math.sqrt(2 / 399)
    assert abs(np.mean(sizes) - 100.0) < 4.5 * math.sqrt(50.0 / 400)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (12, {"train": 3_000_000, "validation": 1, "test": 1}),
        (12, {"train": 30, "validation": 3_000_000, "test": 1}),
    ],
    ids=["no validation", "no training"],
)
def test_an_empty_split_still_runs(
    tmp_path: Path, storage_url: str, count: int, sizes: dict[str, int]
) -> None:
    path = tmp_path / "people.csv"
    records().head(count).to_csv(path, index=False)
    arm = {"name": "a", "strategy": "papernot-steinke", "mean_runs": 2}
    batch = max(24, sizes["train"] // 50)
    spec = toy_spec(task=table(path, **sizes), arms=[arm], seed=1, expected_batch_size=batch)
    (release,) = Study.create(spec, storage_url, force=True).run(force=True)
    assert release.weights.isfinite().all()
    assert not release.note


def test_what_is_shown_knows_declared_numbers_alone(tmp_path: Path) -> None:
    """Studies of tables of 400 and 130 records differ in what was released alone."""
    shown = []
    for count in (400, 130):
        folder = tmp_path / str(count)
        folder.mkdir()
        path = tmp_path / "people.csv"
        records().head(count).to_csv(path, index=False)
        arms = [{"name": "a", "strategy": "papernot-steinke", "mean_runs": 2}]
        spec = toy_spec(task=table(path), arms=arms, seed=1)
        study = Study.create(spec, f"sqlite:///{folder / 'p.db'}")
        study.run(force=True)
        document = study.export()
        for arm in document["arms"]:
            arm["release"] = sorted(arm["release"]), sorted(arm["release"]["estimates"])
        costs = [s.release.cost.gradient_evaluations for s in study.status() if s.release]
        shown.append((document["spec"], document["arms"], costs, study.spent()))
        study.close()
    assert shown[0] == shown[1]


def test_sizes_and_partitions_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        Sizes(200, 0, 50)
    with pytest.raises(InvalidInputError, match="must be one of fixed, content, id"):
        replace(get_task("iris-logistic"), partition="by hand")


def test_replacing_a_record_must_not_move_it() -> None:
    path = Path("people.csv")
    replacing = context(task=tabular(table(path)), adjacency=Adjacency.REPLACE_ONE)
    with pytest.raises(InvalidInputError, match="may change its split and meet both charges"):
        replacing.plan_score(1.0)
    known = replace(replacing, task=tabular(table(path, id="person")))
    assert known.plan_score(1.0).event is not None
    public = replace(replacing.task, public_validation=True)
    assert replace(replacing, task=public).plan_score(1.0).event is None
