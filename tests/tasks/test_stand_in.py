"""Stand-ins: the facts of a task, no record of it, and something that can be learnt."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from privtune.errors import InvalidInputError
from privtune.tasks import TaskData, get_task
from privtune.tasks.own import own_task
from privtune.tasks.stand_in import stand_in
from tests.tasks.test_own import build, loss
from tests.toy import LOADS, blobs

SIZES = {"train": 700, "validation": 100, "test": 200}
COLUMNS = {
    "age": [18, 90],
    "price": {"bounds": [0, 5000], "decimal": ","},
    "city": {"categories": ["Bern", "Basel", "Genf"]},
    "size": {"ordinal": ["S", "M", "L"]},
    "day": {"date": ["2019-01-01", "2021-01-01"], "parts": ["time", "month"]},
    "seen": {"date": ["2019-01-01", "2021-01-01"], "unit": "ms"},
}
TABLE = {"type": "tabular", "path": "not-there.csv", "target": "y", "columns": COLUMNS, **SIZES}
PICTURES = {
    "type": "images",
    "path": "not-there",
    "classes": ["cat", "dog", "hen"],
    "shape": [3, 9, 7],
}
DESCRIBED: dict[str, Any] = {
    "table": {**TABLE, "classes": ["no", "yes"]},
    "regression": {**TABLE, "target_range": [-5.0, 20.0]},
    "units": {**TABLE, "classes": [1, 2, 3], "group": "who", "max_per_group": 4},
    "pictures": {**PICTURES, **SIZES},
    "tokens": "tests.tasks.test_stand_in:reviews",
    "mnist": "mnist-logistic",
}


def reviews() -> Any:
    """A task of tokens, whose records must not be read."""
    words: Any = {"input_shape": (40,), "tokens": 500, "model": lambda: nn.EmbeddingBag(500, 3)}
    return replace(blobs(), name="reviews", load=_refused, **words)


def _refused() -> TaskData:
    raise AssertionError("a record of the user was read")


def _rows(data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of records: those of units one by one, without fillers."""
    x, y = data.x.numpy(), data.y.numpy()
    if y.ndim == 2:
        x, y = x[y >= 0], y[y >= 0]
    return x.reshape(len(x), -1).astype(float), y


def _fitted(task: Any, data: TaskData) -> tuple[np.ndarray, np.ndarray]:
    """Return what ridge regression says of the test rows, and their targets."""
    (x, y), (x_test, y_test) = _rows(data.train), _rows(data.test)
    if task.tokens is not None:
        x, x_test = (
            np.stack([np.bincount(r.astype(int) % 16, minlength=16) for r in p])
            for p in (x, x_test)
        )
    x, x_test = (np.column_stack([part, np.ones(len(part))]) for part in (x[:5000], x_test))
    goal = y[:5000] if task.classes is None else np.eye(task.classes)[y[:5000]]
    return x_test @ np.linalg.solve(x.T @ x + 0.1 * np.eye(x.shape[1]), x.T @ goal), y_test


@pytest.mark.parametrize("kind", DESCRIBED)
def test_a_stand_in_has_the_facts_and_can_be_learnt(kind: str) -> None:
    real = get_task(DESCRIBED[kind])
    task = get_task({"type": "stand-in", "of": DESCRIBED[kind]})
    assert task.facts == replace(real.facts, benchmark=True)
    assert task.check_header() == ""  # nothing is there, and nobody asks for it
    data = task.load_checked()
    for name in SIZES:
        split = getattr(data, name)
        assert len(split) == getattr(real, f"{name}_records")
        assert split.x.shape[1:] == real.input_shape
        assert split.sealed_size == (real.partition != "fixed")
    found, y = _fitted(task, data)
    if task.classes is None:
        low, high = task.target_range or (math.nan, math.nan)
        assert low <= y.min() < y.max() <= high
        assert 0.4 < np.corrcoef(found, y)[0, 1] < 0.97
    else:
        assert np.bincount(y).min() > 0.7 * len(y) / task.classes  # no class is rare
        accuracy = float((found.argmax(axis=1) == y).mean())
        assert 1.0 / task.classes + 0.15 < accuracy < 0.97
    if task.tokens is not None:
        assert 0 <= int(data.train.x.min()) < int(data.train.x.max()) < task.tokens
    else:
        assert data.train.x.abs().max() <= 1.0
    check = task.check_records(data)
    assert check.reason == ""


def test_a_stand_in_reads_no_record_and_is_the_same_everywhere() -> None:
    loads = len(LOADS)
    one, other = (stand_in(blobs()).load() for _ in range(2))
    assert len(LOADS) == loads
    for name in SIZES:
        assert torch.equal(getattr(one, name).x, getattr(other, name).x)
        assert torch.equal(getattr(one, name).y, getattr(other, name).y)
    assert not torch.equal(one.train.x[:60], one.test.x)


def test_own_data_keeps_its_shapes_and_types_and_a_language_model_is_refused() -> None:
    given = {"build": build, "loss": loss, "split": {"train": 200, "test": 40}, "classes": 4}
    own = own_task(
        data=(torch.ones(300, 2, 3, dtype=torch.float64), torch.ones(300).long()), **given
    )
    data = stand_in(own).load()
    assert (data.train.x.dtype, data.train.x.shape) == (torch.float64, (200, 2, 3))
    assert data.validation.unusable.tolist() == [True]
    tokens = torch.ones(300, 5).long()
    model = own_task(data={"input_ids": tokens, "labels": tokens}, **given | {"classes": None})
    with pytest.raises(InvalidInputError, match="has no stand-in: its inputs are whole numbers"):
        stand_in(model)


def test_more_than_memory_holds_is_made_smaller_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("privtune.tasks.stand_in._MOST", 600)
    task = stand_in(blobs())
    assert (task.train_records, task.validation_records, task.test_records) == (66, 16, 16)
    assert len(task.load_checked().train) == 66
