"""Tasks of the user's own data: every kind of it, its splits, its public facts, and what is refused."""

from __future__ import annotations

import json
import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

import privtune
from privtune.errors import InvalidInputError
from privtune.execution.trial_training import made_up_records
from privtune.facts import TaskChangedError
from privtune.strategies.score_plan import Scoring
from privtune.study.failures import UnusableRecordsError
from privtune.tasks import Score, Task, TensorData, get_task, unit_records
from privtune.tasks.own import own_task
from tests.strategies.world import context

N = 300
SPLIT = {"train": 200, "validation": 60, "test": 40}
_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(N, 3)).astype(np.float32)
Y = _RNG.integers(0, 4, N)
HERE = __name__


def build(trial: Any) -> Any:
    raise AssertionError("build needs a trial")


def loss(model: Any, x: Any, y: Any) -> Any:
    return cross_entropy(model(x), y, reduction="none")


def distance(model: Any, x: Any, y: Any) -> Any:
    return model(x)[:, 0] - y


def arrays() -> Any:
    return X, Y


def dicts() -> Any:
    return {"x": X, "label": Y}


def nothing(*_: Any) -> Any:
    return torch.zeros(1)


class Items(Dataset[Any]):
    """A map-style dataset of a list, of which an exception is raised."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        if isinstance(found := self.items[number], Exception):
            raise found
        return found


class Columns:
    """What a Hugging Face dataset is used by."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns_of = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns_of.values())))

    def __getitem__(self, name: str) -> Any:
        column = self.columns_of[name]
        return type("Column", (), {"__getitem__": lambda _, part: column[part]})()


class Moving(Items):
    def __getitem__(self, number: int) -> Any:
        return torch.rand(3), 0


def frame() -> pd.DataFrame:
    return pd.DataFrame(X.astype(float), columns=["a", "b", "c"]).assign(y=Y, name="of a person")


def make(data: Any = None, **fields: Any) -> Task:
    fields = {"loss": nothing, **({} if data is None else {"data": data, "split": SPLIT}), **fields}
    return own_task(fields.pop("build", build), **fields)


IN = {"inputs": ["a", "b", "c"], "target": "y"}
KINDS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "arrays": lambda: ((X.astype(float), Y.astype(np.int16)), {}),
    "tensors": lambda: ((torch.tensor(X), torch.tensor(Y)), {}),
    "a list of lists": lambda: (([row.tolist() for row in X], Y.tolist()), {}),
    "tensor data": lambda: (TensorData(torch.tensor(X), torch.tensor(Y)), {}),
    "a tensor dataset": lambda: (TensorDataset(torch.tensor(X), torch.tensor(Y)), {}),
    "a dataset": lambda: (Items([(x, int(y)) for x, y in zip(X, Y, strict=True)]), {}),
    "a list of pairs": lambda: ([[torch.tensor(x), y] for x, y in zip(X, Y, strict=True)], {}),
    "a frame": lambda: (frame(), {"columns": IN}),
    "a frame of objects": lambda: (frame().astype(object), {"columns": IN}),
    "a path": lambda: (f"{HERE}:arrays", {}),
    "a dict": lambda: ({"x": X, "label": Y}, {}),
    "a tuple of three": lambda: ((X[:, :1], X[:, 1:], Y), {}),
    "a nested tuple": lambda: (({"a": X[:, :1], "b": (X[:, 1], X[:, 2])}, Y), {}),
    "a user's dict": lambda: (UserDict(labels=Y, x=X), {}),
    "a dataset of dicts": lambda: (
        Items(
            [
                dict(sorted({"x": x, "label": y}.items(), reverse=i % 2 == 0))
                for i, (x, y) in enumerate(zip(X, Y, strict=True))
            ]
        ),
        {},
    ),
    "columns": lambda: (Columns({"label": Y.tolist(), "x": X.tolist()}), {}),
    "some columns": lambda: (
        Columns({"x": X.tolist(), "text": ["a"] * N, "y": Y.tolist()}),
        {"columns": {"inputs": ["x"], "target": "y"}},
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_splits(kind: str) -> None:
    data, fields = KINDS[kind]()
    found, known = make(data, **fields).load_checked(), make((X, Y)).load()
    for name in SPLIT:
        part, like = getattr(found, name), getattr(known, name)
        assert torch.equal(part.x, like.x)
        assert torch.equal(part.y, like.y)
        assert part.y.dtype == torch.int64
        assert part.sealed_size
        assert part.unusable is None
    assert sum(len(getattr(found, name)) for name in SPLIT) == N


def _units() -> TensorData:
    rows = TensorData(torch.tensor(X), torch.tensor(Y))
    return unit_records(rows, torch.arange(N) // 3, most=3, unit="person")


_NAN = X.copy()
_NAN[::7, 0] = math.nan
MOVED: dict[str, Any] = {
    "floats": (X, Y),
    "NaN": (_NAN, Y),
    "whole numbers": (Y[:, None] * 1000 + np.arange(N)[:, None], Y),
    "bytes": (_RNG.integers(0, 256, (N, 5), dtype=np.uint8), Y > 1),
    "bfloat16": (torch.tensor(X).bfloat16(), torch.tensor(Y)),
    "a tree": {"tokens": np.arange(N * 2).reshape(N, 2), "mask": X > 0, "labels": Y},
    "token labels": (X, np.arange(N * 4).reshape(N, 4)),
    "pictures": (X.reshape(N, 1, 3), np.arange(N * 6).reshape(N, 2, 3)),
    "one tensor alone": X,
}


def _cut(data: Any, kept: Any) -> Any:
    if isinstance(data, dict):
        return {name: part[kept] for name, part in data.items()}
    return tuple(part[kept] for part in data) if isinstance(data, tuple) else data[kept]


@pytest.mark.parametrize("kind", [*MOVED, "units"])
def test_removing_a_record_moves_no_other(kind: str) -> None:
    removed = 0
    if kind == "units":
        data: Any = _units()
        kept = torch.arange(100) != removed
        fewer = replace(data, x=data.x[kept], y=data.y[kept], groups=data.groups[kept])
    else:
        data = MOVED[kind]
        fewer = _cut(data, np.arange(N) != removed)
    before, after = (make(each).load() for each in (data, fewer))
    gone = 0
    for name in SPLIT:
        one, other = getattr(before, name), getattr(after, name)
        if len(one) == len(other):
            assert torch.equal(one.x.nan_to_num(), other.x.nan_to_num())
            assert torch.equal(one.y, other.y)
        else:
            gone += 1
            rows = [tuple(row.tolist()) for row in one.x.double().nan_to_num().flatten(1)]
            left = [tuple(row.tolist()) for row in other.x.double().nan_to_num().flatten(1)]
            assert len(rows) == len(left) + 1
            assert [row for row in rows if row in left] == left  # in order, none has changed
    assert gone == 1


def test_units_go_by_their_number_and_lose_by_rows() -> None:
    units = _units()
    task = make(units, loss=distance, score=Score(distance, bound=1.0))
    assert (task.unit, task.partition, task.rows) == ("person", "id", 3)
    other = replace(units, x=units.x + 1)
    for name in SPLIT:
        assert torch.equal(
            getattr(task.load(), name).groups, getattr(make(other).load(), name).groups
        )
    model = torch.nn.Linear(3, 1)
    x, y = units.x[:1], torch.tensor([[2, 1, -1]])
    rows = model(x[0])[:2, 0] - y[0, :2]
    assert task.loss_of is not None
    assert task.score_of is not None
    torch.testing.assert_close(task.loss_of(model, x, y), rows.sum().reshape(1))
    torch.testing.assert_close(task.score_of(model, x, y), rows.mean().reshape(1))


@pytest.mark.parametrize(
    ("data", "function"),
    [
        ((X, Y), lambda m, x, y: m(x).sum(1) + y),
        ({"x": X, "label": Y}, lambda m, r: m(r["x"]).sum(1) + r["label"]),
        ({"label": Y, "x": {"deep": X}}, lambda m, r: m(r["x"]["deep"]).sum(1) + r["label"]),
        ((X[:, :1], X[:, 1:], Y), lambda m, a, b, y: m(torch.cat([a, b], 1)).sum(1) + y),
    ],
)
def test_the_loss_gets_records_as_they_were_given(data: Any, function: Any) -> None:
    task, model = make(data, loss=function, score=Score(function)), torch.nn.Linear(3, 2)
    train = task.load().train
    known = model(train.x[4:5].reshape(1, 3)).sum(1) + train.y[4]
    for of in (task.loss_of, task.score_of):
        assert of is not None
        torch.testing.assert_close(of(model, train.x[4:5], train.y[4:5]), known)


@pytest.mark.parametrize("data", [X, {"x": X}, (X,), Items(list(X)), frame()])
def test_records_without_a_target(data: Any) -> None:
    fields = {"columns": {"inputs": ["a", "b", "c"]}} if isinstance(data, pd.DataFrame) else {}
    named = isinstance(data, dict)
    task = make(data, loss=lambda m, r: m(r["x"] if named else r).sum(1), score="loss", **fields)
    assert task.loss_of is not None
    model, train = torch.nn.Linear(3, 2), task.load().train
    found = task.loss_of(model, train.x[:1], train.y[:1])
    torch.testing.assert_close(found, model(train.x[:1]).sum(1))


A_FRAME = frame()
PAIR = (X, Y)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "both ways": ({"data": PAIR, "train": PAIR}, "train.*does not go with data"),
    "no data": ({"data": None}, r"data = None: must be given, or train\. .*split="),
    "no split": ({"split": None}, "must give the expected sizes.*split="),
    "no training split": ({"split": {"test": 3}}, "at least of train"),
    "unknown split": ({"split": {"train": 3, "dev": 3}}, "dev.*must be of train, validation, test"),
    "size of 0": ({"split": {"train": 0}}, r"split\.train = 0: must be a whole number"),
    "a share": ({"split": {"train": 0.8}}, r"split\.train = 0\.8: .*Multiply a share"),
    "public training": ({"public": {"train": PAIR}}, "public.*validation, test, or both"),
    "public twice": ({"public": {"test": PAIR}}, "test.*is given as public records, too"),
    "ragged items": (
        {"data": Items([(torch.zeros(1 + i % 2), 0) for i in range(9)])},
        r"data\.0 = '\(1,\) and \(2,\)': must be of one shape.*pad_to=N",
    ),
    "ragged beyond": (
        {"data": Items([(torch.zeros(2, 1 + i % 2), 0) for i in range(9)]), "pad_to": 3},
        "also beyond the first axis",
    ),
    "several types": ({"data": ([1, 2.5], [0, 1])}, "must be of one type in every record"),
    "random records": ({"data": Moving(list(X))}, "the same record for an index every time"),
    "a loader": ({"data": DataLoader(TensorDataset(torch.tensor(X)))}, "Pass the dataset, not its"),
    "a number": ({"data": 3}, "must be a pair of tensors"),
    "texts": ({"data": (["a", "b"], [0, 1])}, "Encode texts"),
    "text columns": (
        {"data": Columns({"t": ["a"], "y": [1]})},
        r"data\.t.*leave them out with col",
    ),
    "unequal parts": ({"data": (X, Y[1:])}, "299, 300.*as many records in every part"),
    "a list for a pair": ({"data": [X, Y]}, r"Pass a tuple, \(x, y\)"),
    "no records": ({"data": []}, "at least one record"),
    "a frame alone": ({"data": A_FRAME}, r'columns=\{"inputs": \["age", \.\.\.\], "target"'),
    "no such column": (
        {"data": A_FRAME, "columns": {"inputs": ["z"]}},
        "must be of a, b, c, y, name",
    ),
    "column twice": ({"data": A_FRAME, "columns": {**IN, "target": "a"}}, "every column once"),
    "no columns": ({"data": A_FRAME, "columns": {"inputs": "a"}}, r'must be \{"inputs": \[names\]'),
    "columns of a pair": ({"columns": IN}, "go with a DataFrame, a dict or"),
    "mixed types": ({"data": {"a": X, "b": Y, "label": Y}}, "Convert a mask to the type"),
    "classes of floats": ({"data": (X, X[:, 0]), "classes": 3}, r"whole numbers.*y\.long\(\)"),
    "one class": ({"classes": 1}, "at least 2"),
    "classes and range": ({"classes": 3, "target_range": (0, 1)}, "does not go with classes"),
    "no padding": ({"pad_to": 0}, "at least 1"),
    "precision": ({"precision": "float16"}, "float32 or bfloat16"),
    "a score": ({"score": distance}, r"privtune\.Score\(function"),
    "no target to score": ({"data": {"a": X, "b": X}, "score": "accuracy"}, "needs one target"),
    "no function": ({"loss": "no.such:loss"}, "loss.*cannot be imported"),
    "build": ({"build": 3}, "must be a function, or its path"),
    "data that fails": ({"data": f"{HERE}:build"}, "called without arguments"),
    "unlike splits": (
        {"data": None, "split": None, "train": PAIR, "validation": (X[:, :2], Y)},
        "validation = .*must be like train",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_task_is_refused(case: str) -> None:
    fields, said = REFUSED[case]
    with pytest.raises(InvalidInputError, match=said):
        make(fields.get("data", PAIR), **{name: v for name, v in fields.items() if name != "data"})


def test_ragged_parts_are_padded_and_cut() -> None:
    ids = [[1, 2, 3], [4], [5, 6]]
    data = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids], "labels": ids}
    for kind in (data, Items([{name: part[i] for name, part in data.items()} for i in range(3)])):
        task = make(kind, pad_to=2, split={"train": 3})
        train = task.load().train
        order = train.x[:, 0].argsort()
        assert train.x[order].tolist() == [[1, 2, 1, 1], [4, 0, 1, 0], [5, 6, 1, 1]]
        assert train.y[order].tolist() == [[1, 2], [4, -100], [5, 6]]
        assert task.facts.to_dict()["parts of a record"] == (
            "input_ids 2 (int64), attention_mask 2 (int64), labels 2 (int64): padded or cut to 2, "
            "read from the first record, and public"
        )


def test_other_parts_than_the_ragged_ones_keep_their_length() -> None:
    items = [(torch.ones(1 + i % 3, 2), torch.ones(5), torch.tensor(0)) for i in range(9)]
    task = make(Items(items), pad_to=4, split={"train": 9})
    assert "0 4 x 2 (float32), 1 5 (float32), 2 a number (int64)" in task.parts
    floats = make(
        Items([(torch.ones(1 + i % 2), torch.ones(1 + i % 2)) for i in range(9)]), pad_to=2
    )
    assert floats.load().train.y.unique().tolist() == [0.0, 1.0]  # numbers are filled with 0


def test_a_split_that_is_not_there_is_not_scored_on() -> None:
    facts = replace(context(), task=make(PAIR, split={"train": 300}), report=Scoring())
    for plan, name in ((facts.plan_score, "validation"), (facts.plan_report, "test")):
        with pytest.raises(InvalidInputError, match=rf"split\.{name} = None: must be given"):
            plan(1.0)


def test_the_mapping_makes_the_same_task() -> None:
    score = Score(distance, bound=2.0)
    fields: dict[str, Any] = {"split": SPLIT, "classes": 4, "data": f"{HERE}:arrays"}
    task = own_task(build, loss=loss, score=score, **fields)
    assert task.code is not None
    assert task.code["build"] == f"{HERE}:build"
    assert task.code["score"]["metric"] == f"{HERE}:distance"
    again = get_task(json.loads(json.dumps(task.code)))
    by_hand = get_task(
        {
            "type": "own",
            "build": f"{HERE}:build",
            "loss": f"{HERE}:loss",
            "score": {"metric": f"{HERE}:distance", "bound": 2.0},
            **fields,
        }
    )
    for other in (again, by_hand):
        assert (other.build, other.loss_of, other.score_of) == (build, loss, distance)
        assert other.score is not None
        assert (other.score.name, other.score.bound) == ("cost", 2.0)
        assert other.facts == task.facts
        assert other.code == task.code
        assert torch.equal(other.load().train.x, task.load().train.x)
    spec = {**task.code, "sources": {HERE: "0" * 64}}
    with pytest.raises(TaskChangedError, match="Bring the same files to both"):
        get_task(spec)
    for wrong, said in (({"losses": 1}, "type own takes build"), ({"score": {"x": 1}}, "Score")):
        with pytest.raises(InvalidInputError, match=said):
            get_task({**task.code, **wrong})
    with pytest.raises(InvalidInputError, match="loss = None: is required"):
        get_task({"type": "own", "build": f"{HERE}:build"})


@pytest.mark.parametrize(
    "fields",
    [
        {"data": PAIR},
        {"loss": lambda model, x, y: x},
        {"loss": partial(loss)},
        {"score": Score(lambda model, x, y: x)},
        {"public": {"test": PAIR}, "split": {"train": 3}},
    ],
)
def test_other_processes_do_not_find_what_has_no_name(fields: dict[str, Any]) -> None:
    known = {"loss": loss, "data": f"{HERE}:arrays", "split": SPLIT}
    assert own_task(build, **known).code is not None
    assert own_task(build, **{**known, **fields}).code is None


def _checked(data: Any = None, model: Any = None, **fields: Any) -> str:
    return make(data, **fields).check_records(model=model).reason


def test_records_that_cannot_be_used_contribute_nothing_and_the_curator_is_told() -> None:
    items: list[Any] = [(torch.tensor(x), int(y)) for x, y in zip(X, Y, strict=True)]
    items[3], items[5], items[7] = ValueError("torn"), ("text", 1), (torch.full((3,), math.nan), 1)
    items[9] = {"x": torch.zeros(3), "label": 1}
    task = make(Items(items), classes=4)
    data = task.load()
    lost = [
        int(part.unusable.sum())
        for part in (data.train, data.validation, data.test)
        if part.unusable is not None
    ]
    assert sum(lost) == 4
    kept = {tuple(row) for i, row in enumerate(X.tolist()) if i not in (3, 5, 7, 9)}
    for part in (data.train, data.validation, data.test):
        x, _ = part.take(
            (~part.unusable).nonzero().flatten()
            if part.unusable is not None
            else torch.arange(len(part))
        )
        kept -= {tuple(row) for row in x.tolist()}
    assert not kept
    lines = "\n".join(task.check_records().lines())
    assert "marked as unusable, or not readable" in lines
    assert "inputs: 1 not a number" in lines
    assert not task.check_records().reason
    bad = Items([*items[:100], *[ValueError("torn")] * 200])
    assert "204 of 300 records cannot be used" in _checked(bad, classes=4)


@pytest.mark.parametrize(
    "first",
    [{"x": torch.zeros(3), "label": 1}, "no record", ("text", 1), (torch.ones(1), 1, 1), OSError()],
)
def test_no_first_record_makes_the_others_unusable(first: Any) -> None:
    pairs = list(zip(torch.tensor(X), Y.tolist(), strict=True))
    found, known = make(Items([first, *pairs])).load(), make(PAIR).load()
    for name in SPLIT:
        part, like = getattr(found, name), getattr(known, name)
        usable = torch.ones(len(part), dtype=torch.bool)
        assert torch.equal(part.x[usable if part.unusable is None else ~part.unusable], like.x)


def test_the_curator_is_told_of_sizes_and_labels_that_are_wrong() -> None:
    assert not _checked(PAIR, classes=4)
    assert "are declared" in _checked(PAIR, split={"train": 2000, "validation": 600, "test": 400})
    assert "are declared" in _checked(PAIR, split={"train": 100, "validation": 20, "test": 20})
    assert "with a label that is not declared" in _checked(PAIR, classes=2)
    tokens = np.arange(N * 4).reshape(N, 4) % 5
    tokens[:, 2:] = -100
    assert not _checked((X, tokens), classes=5)
    assert "cannot be used" in _checked((X, tokens), classes=3)


def test_model_and_loss_are_tried_on_real_records() -> None:
    assert not _checked(PAIR, torch.nn.Linear(3, 4), loss=loss, score=Score(loss))
    assert "RuntimeError" in _checked(PAIR, torch.nn.Linear(2, 4), loss=loss)
    mean = "the loss of 16 records is of shape (32,)"
    assert mean in _checked(PAIR, torch.nn.Linear(3, 2), loss=lambda m, x, y: m(x)[0])
    spread = "the score of 16 records is of shape (64,)"
    assert spread in _checked(
        PAIR, torch.nn.Linear(3, 4), loss=loss, score=Score(lambda m, x, y: m(x)[0])
    )


def test_records_out_of_the_models_classes_are_counted_for_the_curator() -> None:
    y = Y + 1  # 1 to 4, of a model with four outputs: class 4 is none of it
    check = make((X, y), loss=loss).check_records(model=torch.nn.Linear(3, 4))
    words = "with an index outside the model's embedding tables or classes"
    found = sum(f.count() for f in check.findings if f.why == words)
    assert found == int((y == 4).sum()) > 0
    assert not check.reason
    assert "cannot be used" in _checked((X, y + 4), torch.nn.Linear(3, 4), loss=loss)


def test_one_record_that_raises_stops_nothing() -> None:
    def picky(model: Any, x: Any, y: Any) -> Any:
        if float(x[0, 0]) < -1:
            raise ValueError("a negative one")
        return loss(model, x, y)

    assert 3 < (X[:, 0] < -1).sum() < 100
    assert not _checked(PAIR, torch.nn.Linear(3, 4), loss=picky)


def test_a_study_tries_its_model_on_real_records_before_the_charge(tmp_path: Path) -> None:
    def linear(trial: Any) -> Any:
        model = torch.nn.Linear(3, 4)
        rate = trial.suggest_float("rate", 0.1, 1.0)
        return privtune.Candidate(model, torch.optim.SGD(model.parameters(), rate))

    budget = privtune.Budget(4.0, 1e-5, name="b")
    study = privtune.create_study("own", budget=budget, storage=f"sqlite:///{tmp_path / 'p.db'}")
    records = {"loss": loss, "score": "loss", "split": SPLIT}
    strategy = privtune.strategies.PapernotSteinke(mean_runs=2)
    terms = {"strategy": strategy, "epochs": 1, "expected_batch_size": 20}
    with pytest.raises(UnusableRecordsError):
        study.optimize(privtune.make_task(linear, data=(X, Y + 4), **records), **terms)
    assert study.spent().epsilon == 0.0
    task = privtune.make_task(linear, data=(X, Y), **records)
    assert study.optimize(task, **terms).model is not None
    study.close()


def test_splits_that_share_records_stop_a_study() -> None:
    with_training = _checked(train=PAIR, validation=(X[250:], Y[250:]))
    assert (
        with_training == "50 records of split validation are training records, too; set them apart"
    )
    assert not _checked(train=(X[:200], Y[:200]), validation=(X[200:], Y[200:]))
    assert "split test" in _checked(
        PAIR, split={"train": 240, "validation": 60}, public={"test": (X[:30], Y[:30])}
    )
    few_values = Y[:, None] % 3, Y % 2
    assert not _checked(train=few_values, validation=few_values)
    units = _units()
    last = replace(units, x=units.x[99:], y=units.y[99:], groups=units.groups[99:])
    assert "1 persons of split validation" in _checked(train=units, validation=last)


@pytest.mark.parametrize("kind", [*MOVED, "units"])
def test_made_up_records_are_of_the_same_shapes_and_hold_no_data(kind: str) -> None:
    task = make(_units() if kind == "units" else MOVED[kind])
    made, again = made_up_records(task, 5), made_up_records(task, 5)
    for part, other, like in zip(
        (made.x, made.y), (again.x, again.y), task.like or (), strict=True
    ):
        assert part.shape == (5, *like.shape[1:])
        assert part.dtype == like.dtype
        assert torch.equal(part, other)
