"""Traps in data: what is done to records before they are given, and what is no record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from tests.zoo.trap import CLASSES, T, Toy, Trap, candidate, entering

DATA: list[Trap] = []
_data = entering(DATA, "data")
SPLIT = {"train": 60, "validation": 30}
SPECIAL = Toy().train[0][5]


def trains(outcome: Any, says: str, makers: dict[str, Callable[[T, T], Any]]) -> None:
    """Enter what makes training records of inputs and targets."""
    others = {"validation": None, "score": None}
    made = {n: lambda toy, f=f: {"train": f(*toy.train), **others} for n, f in makers.items()}
    _data(outcome, says, made, made=True)


class Items(Dataset[Any]):
    """Records that are read one by one, as a function says."""

    def __init__(self, x: T, y: T, read: Callable[[Any, int], Any]) -> None:
        self.x, self.y, self.read, self.before = x, y, read, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.read(self, index)


class Shrinking(Items):
    """Has another length each time that it is asked."""

    def __len__(self) -> int:
        self.before += 1
        return len(self.x) - self.before


def items(read: Callable[[Any, int], Any], kind: type[Items] = Items) -> Callable[[T, T], Any]:
    return lambda x, y: kind(x, y, read)


def one(change: Callable[[T, T], Any]) -> Callable[[T, T], Any]:
    """Return a data set of which one record is another, wherever it stands."""

    def read(own: Any, index: int) -> Any:
        x, y = own.x[index], own.y[index]
        return change(x, y) if torch.equal(x, SPECIAL) else (x, y)

    return items(read)


def shuffled(own: Any, index: int) -> Any:
    index = int(torch.randint(len(own.x), ()))
    return own.x[index], own.y[index]


def lagging(own: Any, index: int) -> Any:
    found, own.before = (own.x[index] + own.x[own.before], own.y[index]), (index + 1) % len(own.x)
    return found


def broken(x: T, y: T) -> Any:
    raise ValueError("a broken file")


# Kinds of data.

trains("refused", "must be (a pair of tensors|numbers|dense|a tensor)|must come with the columns", {
    "a generator": lambda x, y: ((a, b) for a, b in zip(x, y, strict=True)),
    "a DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), 12),
    "texts": lambda x, y: ([f"text {i}" for i in range(len(x))], y),
    "sparse tensors": lambda x, y: (x.to_sparse(), y),
    "a DataFrame without columns": lambda x, y: pd.DataFrame(x.numpy()),
    "names as labels": lambda x, y: (x, [f"class {int(c)}" for c in y]),
})  # fmt: skip
trains(
    "refused", "must be real numbers", {"complex numbers": lambda x, y: (x.to(torch.complex64), y)}
)
trains("refused", "float16|dtype", {"half precision": lambda x, y: (x.half(), y)})
trains("refused", "as many records", {
    "more inputs than labels": lambda x, y: (x, y[:-1]), "no records": lambda x, y: (x[:0], y[:0]),
})  # fmt: skip
trains("refused", "must be of one shape", {
    "records of several lengths": items(lambda own, i: (own.x[i][: 3 + i % 3], own.y[i])),
    "one record of another length": one(lambda a, b: (a[:4], b)),
})  # fmt: skip
trains("refused", "same record for an index", {
    "a data set that shuffles": items(shuffled),
    "a data set that hangs on the record before": items(lagging),
})  # fmt: skip
trains("refused", "must have one length", {
    "a data set whose length changes": items(lambda own, i: (own.x[i], own.y[i]), Shrinking),
})  # fmt: skip


# One record that is not like the others.

trains("harmless", "It is read as the others are, or contributes nothing.", {
    "one record that is no number": one(lambda a, b: (a * float("nan"), b)),
    "one label out of range": one(lambda a, b: (a, b + 99)),
    "one record that is None": one(lambda a, b: (None, b)),
    "one record in double precision": one(lambda a, b: (a.double(), b)),
    "one text among numbers": one(lambda a, b: ("none", b)),
    "one record that raises": one(broken),
    "arrays of NumPy": lambda x, y: (x.numpy().astype(np.float64), y.numpy()),
})  # fmt: skip
_data("harmless", "Each is padded by itself.", {
    "records of several lengths, padded": lambda toy: {
        "train": Items(*toy.train, lambda own, i: (own.x[i][: 3 + own.y[i]], own.y[i])),
        "validation": None, "score": None, "pad_to": 6,
    },
}, made=True)  # fmt: skip


# Facts that are declared, and do not fit.

trains("refused", "records do not fit what is declared", {
    "labels that begin at 1": lambda x, y: (x, y + 1),
    "all records without numbers": lambda x, y: (x * float("nan"), y),
})  # fmt: skip
_data("refused", "records do not fit what is declared", {
    "far more records declared than there are": lambda toy: {
        "data": toy.train, "split": {"train": 6000, "validation": 3000}
    },
    "validation records in the training set": lambda toy: {
        "train": tuple(torch.cat([a[:30], b]) for a, b in zip(toy.train, toy.validation, strict=True))
    },
    "training records as the validation split": lambda toy: {"validation": tuple(t[:30] for t in toy.train)},
}, selects=True, made=True)  # fmt: skip
for _name, _says, _given in (
    ("shares for sizes", "whole number of records", {"split": {"train": 0.8, "validation": 0.2}}),
    ("no split", "expected sizes", {}),
    ("data and parts at once", "does not go with data", {"split": SPLIT, "train": Toy().train}),
    ("splits of another name", "must be of train", {"split": {"train": 60, "dev": 30}}),
    ("classes that are no count", "classes", {"split": SPLIT, "classes": 1}),
):
    _data("refused", _says, {_name: lambda toy, own=_given: {"data": toy.train, **own}}, made=True)


# Done to all records before they are given: nothing can see it. By the names that people look for.


def target_mean(x: T, y: T) -> Any:
    means = torch.stack([y[x[:, 0] > 0].float().mean(), y[x[:, 0] <= 0].float().mean()])
    return torch.cat([x[:, 1:], means[(x[:, 0] <= 0).long(), None]], 1), y


def selected(x: T, y: T) -> Any:
    apart = torch.stack([(x[y == c].mean(0) - x.mean(0)).abs() for c in range(CLASSES)])
    return x[:, apart.sum(0).argsort()], y


for _says, _fit in {
    "StandardScaler": lambda x, y: ((x - x.mean(0)) / x.std(0), y),
    "LabelEncoder": lambda x, y: (x, torch.unique(y, return_inverse=True)[1]),
    "PCA": lambda x, y: (x @ torch.linalg.svd(x, full_matrices=False).Vh.T, y),
    "TF-IDF": lambda x, y: (x * (len(x) / (x > 0).sum(0)).log(), y),
    "imputer": lambda x, y: (torch.where(x < -2.0, x.median(0).values, x), y),
    "SMOTE": lambda x, y: (torch.cat([x[:30], (x[:30] + x[30:]) / 2]), torch.cat([y[:30], y[:30]])),
    "target encoding": target_mean,
    "SelectKBest": selected,
    "outliers": lambda x, y: (x.clamp(x.quantile(0.05), x.quantile(0.95)), y),
    "repeated to balance classes": lambda x, y: ConcatDataset([TensorDataset(x[:20], y[:20])] * 3),
    "a dataset that mixes records": items(
        lambda own, i: (0.7 * own.x[i] + 0.3 * own.x[0], own.y[i])
    ),
    "several rows of one person": lambda x, y: (x, y),
}.items():
    trains("on the page", _says, {f"on all records: {_says}": _fit})


def easy_first(toy: Toy) -> dict[str, Any]:
    x, y = toy.validation
    order = (x[:, :3].argmax(1) == y).long().argsort(descending=True, stable=True)
    return {"validation": (x[order], y[order])}


for _says, _make in {
    "train_test_split": lambda toy: {
        "train": tuple(t[:40] for t in toy.train),
        "validation": tuple(t[40:] for t in toy.train),
    },
    "chosen by its score": easy_first,
    "public=": lambda toy: {"validation": None, "public": {"validation": toy.validation}},
    "by hand": lambda toy: {"build": lambda trial: candidate(rate=0.37)},
}.items():
    _data("on the page", _says, {f"around the study: {_says}": _make}, selects=True, made=True)
