"""Traps in data: what is done to records before they are given, and what is no record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from tests.zoo.trap import CLASSES, Pair, Toy, Trap, candidate, trap

__all__ = ["DATA"]

T = torch.Tensor
DATA: list[Trap] = []
SPLIT = {"train": 60, "validation": 30}


def _trains(outcome: Any, says: str, makers: dict[str, Callable[[T, T], Any]]) -> None:
    """Enter what makes training records of inputs and targets."""

    def of(make: Callable[[T, T], Any]) -> Callable[[Toy], dict[str, Any]]:
        return lambda toy: {"train": make(*toy.train), "validation": None, "score": None}

    for name, make in makers.items():
        trap(DATA, outcome, name, says)(of(make))


class _Items(Dataset[Any]):
    """Records that are read one by one, as a function says."""

    def __init__(self, x: T, y: T, read: Callable[[_Items, int], Any]) -> None:
        self.x, self.y, self.read, self.before = x, y, read, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.read(self, index)


class _Growing(_Items):
    """Has another length each time that it is asked."""

    def __len__(self) -> int:
        self.before += 1
        return len(self.x) - self.before


def _items(read: Callable[[Any, int], Any], kind: type[_Items] = _Items) -> Callable[[T, T], Any]:
    return lambda x, y: kind(x, y, read)


def _shuffled(own: Any, index: int) -> Any:
    index = int(torch.randint(len(own.x), ()))
    return own.x[index], own.y[index]


def _lagging(own: Any, index: int) -> Any:
    found = own.x[index] + own.x[own.before], own.y[index]
    own.before = index + 1 if index + 1 < len(own.x) else 0
    return found


_SPECIAL = Toy().train[0][5]


def _one(change: Callable[[T, T], tuple[Any, Any]]) -> Callable[[T, T], Any]:
    """Return a data set of which one record is another, wherever it stands."""

    def read(own: Any, index: int) -> Any:
        x, y = own.x[index], own.y[index]
        return change(x, y) if torch.equal(x, _SPECIAL) else (x, y)

    return _items(read)


# Kinds of data.

_KINDS = "must be a pair of tensors|must be numbers|must be dense|must be a tensor"
_trains("refused", _KINDS + "|must come with the columns", {
    "a generator": lambda x, y: ((a, b) for a, b in zip(x, y, strict=True)),
    "a DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), 12),
    "a path": lambda x, y: 3,
    "texts": lambda x, y: ([f"text {i}" for i in range(len(x))], y),
    "sparse tensors": lambda x, y: (x.to_sparse(), y),
    "a DataFrame without columns": lambda x, y: pd.DataFrame(x.numpy()),
    "names as labels": lambda x, y: (x, [f"class {int(c)}" for c in y]),
})  # fmt: skip
_trains(
    "refused", "must be real numbers", {"complex numbers": lambda x, y: (x.to(torch.complex64), y)}
)
_trains("refused", "dtype|float16|type", {"float16": lambda x, y: (x.half(), y)})
_trains("refused", "as many records|at least one", {
    "more inputs than labels": lambda x, y: (x, y[:-1]),
    "no records": lambda x, y: (x[:0], y[:0]),
})  # fmt: skip
_trains("refused", "must be of one shape", {
    "records of several lengths": _items(lambda own, i: (own.x[i][: 3 + i % 3], own.y[i])),
    "one record of another length": _one(lambda a, b: (a[:4], b)),
})  # fmt: skip
_trains("refused", "same record for an index", {
    "a data set that shuffles": _items(_shuffled),
    "records augmented at random": _items(lambda own, i: (own.x[i] + torch.randn(6), own.y[i])),
    "a data set that hangs on the record before": _items(_lagging),
})  # fmt: skip
_trains("refused", "must have one length", {
    "a data set whose length changes": _items(lambda own, i: (own.x[i], own.y[i]), _Growing),
})  # fmt: skip


# One record that is not like the others.

_trains("harmless", "A record that cannot be used contributes nothing.", {
    "one record that is no number": _one(lambda a, b: (a * float("nan"), b)),
    "one record that is infinite": _one(lambda a, b: (a * float("inf"), b)),
    "one label out of range": _one(lambda a, b: (a, b + 99)),
    "one negative label": _one(lambda a, b: (a, b - 99)),
    "one record that is None": _one(lambda a, b: (None, b)),
    "one record in double precision": _one(lambda a, b: (a.double(), b)),
    "one record as a list": _one(lambda a, b: (a.tolist(), int(b))),
    "one text among numbers": _one(lambda a, b: ("none", b)),
})  # fmt: skip


def _broken(x: T, y: T) -> Any:
    raise ValueError("a broken file")


_trains("harmless", "A record that cannot be read contributes nothing.", {
    "one record that raises": _one(_broken),
})  # fmt: skip
_trains("harmless", "The copy that is kept is made when it is given.", {
    "arrays of NumPy": lambda x, y: (x.numpy().astype(np.float64), y.numpy()),
})  # fmt: skip
trap(DATA, "harmless", "records of several lengths, padded", "Each is padded by itself.")(
    lambda toy: {
        "train": _Items(*toy.train, lambda own, i: (own.x[i][: 3 + own.y[i]], own.y[i])),
        "validation": None, "score": None, "pad_to": 6,
    }
)  # fmt: skip


# Facts that are declared, and do not fit.

_UNFIT = "records do not fit what is declared"


def _all(x: T, y: T) -> tuple[T, T]:
    return torch.cat([x, x[:30] + 0.1]), torch.cat([y, y[:30]])


@trap(DATA, "refused", "labels that begin at 1", _UNFIT)
def _from_one(toy: Toy) -> dict[str, Any]:
    return {"train": (toy.train[0], toy.train[1] + 1), "validation": None, "score": None}


@trap(DATA, "refused", "all records without numbers", _UNFIT)
def _nothing(toy: Toy) -> dict[str, Any]:
    return {"train": (toy.train[0] * float("nan"), toy.train[1]), "validation": None, "score": None}


@trap(DATA, "refused", "far more records declared than there are", _UNFIT)
def _many(toy: Toy) -> dict[str, Any]:
    return {"data": toy.train, "split": {"train": 6000, "validation": 3000}}


@trap(DATA, "refused", "validation records in the training set", _UNFIT, "selection")
def _both(toy: Toy) -> dict[str, Any]:
    pairs = zip(toy.train, toy.validation, strict=True)
    return {"train": tuple(torch.cat([a[:30], b]) for a, b in pairs)}


@trap(DATA, "refused", "training records as the validation split", _UNFIT, "selection")
def _rows(toy: Toy) -> dict[str, Any]:
    return {"validation": tuple(t[:30] for t in toy.train)}


def _declared(name: str, says: str, **given: Any) -> None:
    trap(DATA, "refused", name, says)(lambda toy: {"data": toy.train, **given})


_declared("shares for sizes", "whole number of records", split={"train": 0.8, "validation": 0.2})
_declared("no split", "expected sizes")
_declared("data and parts at once", "does not go with data", split=SPLIT, train=Toy().train)
_declared("splits of another name", "must be of train", split={"train": 60, "dev": 30})
_declared("classes that are no count", "classes", split=SPLIT, classes=1)


# Done to all records before they are given: nothing can see it. By the names that people look for.


def _scaled(x: T, y: T) -> Pair:
    return (x - x.mean(0)) / x.std(0), y


def _projected(x: T, y: T) -> Pair:
    return torch.cat([x @ torch.linalg.svd(x, full_matrices=False).Vh.T[:, :4], x[:, :2]], 1), y


def _encoded(x: T, y: T) -> Pair:
    return x, torch.unique(y, return_inverse=True)[1]


def _target_mean(x: T, y: T) -> Pair:
    means = torch.stack([y[x[:, 0] > 0].float().mean(), y[x[:, 0] <= 0].float().mean()])
    return torch.cat([x[:, 1:], means[(x[:, 0] <= 0).long(), None]], 1), y


def _imputed(x: T, y: T) -> Pair:
    return torch.where(x < -2.0, x.median(0).values, x), y


def _frequencies(x: T, y: T) -> Pair:
    return x * (len(x) / (x > 0).sum(0)).log(), y


def _synthesised(x: T, y: T) -> Pair:
    return torch.cat([x[:30], (x[:30] + x[30:]) / 2]), torch.cat([y[:30], y[:30]])


def _chosen(x: T, y: T) -> Pair:
    order = (
        torch.stack([(x[y == c].mean(0) - x.mean(0)).abs() for c in range(CLASSES)])
        .sum(0)
        .argsort()
    )
    return x[:, order], y


def _cleaned(x: T, y: T) -> Pair:
    return x.clamp(x.quantile(0.05), x.quantile(0.95)), y


_FITTED: dict[str, Callable[[T, T], Any]] = {
    "StandardScaler": _scaled,
    "LabelEncoder": _encoded,
    "PCA": _projected,
    "TF-IDF": _frequencies,
    "imputer": _imputed,
    "SMOTE": _synthesised,
    "target encoding": _target_mean,
    "SelectKBest": _chosen,
    "outliers": _cleaned,
    "repeated to balance classes": lambda x, y: ConcatDataset([TensorDataset(x[:20], y[:20])] * 3),
    "a dataset that mixes records": _items(
        lambda own, i: (0.7 * own.x[i] + 0.3 * own.x[0], own.y[i])
    ),
    "several rows of one person": lambda x, y: (x, y),
}
for _name, _make in _FITTED.items():
    _trains("on the page", _name, {f"on all records: {_name}": _make})


@trap(DATA, "on the page", "a split by position", "train_test_split", "selection")
def _by_position(toy: Toy) -> dict[str, Any]:
    x, y = _all(*toy.train)
    return {"train": (x[:60], y[:60]), "validation": (x[60:], y[60:])}


@trap(
    DATA, "on the page", "a split that was chosen by its score", "chosen by its score", "selection"
)
def _easy(toy: Toy) -> dict[str, Any]:
    x, y = toy.validation
    easy = (x[:, :3].argmax(1) == y).long().argsort(descending=True, stable=True)
    return {"validation": (x[easy], y[easy])}


@trap(DATA, "on the page", "private records called public", "public=", "selection")
def _public(toy: Toy) -> dict[str, Any]:
    return {"validation": None, "public": {"validation": toy.validation}}


@trap(DATA, "on the page", "hyperparameters chosen by hand", "by hand")
def _by_hand(toy: Toy) -> dict[str, Any]:
    return {"build": lambda trial: candidate(rate=0.37)}
