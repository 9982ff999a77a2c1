"""Six tasks that several studies share, and how each is trained in a short training.

A run trains hundreds of models on the same records, so each set is read, split and kept here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from privtune.tasks import Sizes, Task, TaskData, TaskDataError, get_task
from privtune.tasks._models import linear
from privtune.tasks.partition import places
from privtune.training.mechanism.data import TensorData
from studies.harness import cross_entropy
from studies.transfer.task import digits_5_to_9


@dataclass(frozen=True)
class Work:
    """A task and how it is trained.

    Attributes:
        task: As a spec names it.
        epochs: Passes over the records, in the mean.
        batch: Expected size of the samples.
    """

    task: Any
    epochs: int
    batch: int


HERE = "studies.two_factors.six"
FINE_TUNING = {"type": "fine-tuning", "task": f"{HERE}:transfer", "trainable": "all"}
SIX: dict[str, Work] = {
    "digits": Work("digits-mlp", 10, 64),
    "table": Work("synthetic-logistic", 5, 128),
    "minilm": Work(f"{HERE}:reuters", 5, 128),
    "mnist mlp": Work(f"{HERE}:mnist_mlp", 1, 256),
    "transfer": Work(FINE_TUNING, 2, 400),
    "mnist cnn": Work(f"{HERE}:mnist_cnn", 3, 100),
}

_PICTURES = Sizes(4_000, 1_000, 10_000)  # of MNIST, halved in height and width
_TEXTS = Sizes(2_984, 600, 1_024)
_SMALL = Sizes(400, 100, 100)  # made-up vectors in the place of texts
_WIDTH, _CLASSES = 384, 8  # of MiniLM's vectors, of the texts


def _once(task: Task, load: Callable[[], TaskData]) -> Task:
    """Return a task of public records that are read once a run."""
    return replace(task, load=load, check=lambda: None, benchmark=True)


@cache
def _mnist(name: str, data: str | None) -> TaskData:  # noqa: ARG001 (what it is known by)
    return get_task(name).load()


def mnist_mlp() -> Task:
    """Return MNIST with an MLP 784-64-10."""
    known = get_task("mnist-mlp" if "PRIVTUNE_DATA" in os.environ else "digits-mlp")
    return _once(known, lambda: _mnist(known.name, os.environ.get("PRIVTUNE_DATA")))


def small_cnn() -> nn.Module:
    """Return two convolutions of 8 and 16 channels on pictures of 14x14: 2,698 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(144, 10),
    )


def _halved() -> TaskData:
    whole = _mnist("mnist-mlp", os.environ["PRIVTUNE_DATA"])

    def pictures(part: TensorData, size: int) -> TensorData:
        x = F.avg_pool2d(part.x[:size].view(-1, 1, 28, 28), 2)
        return TensorData(x, part.y[:size])

    return TaskData(
        pictures(whole.train, _PICTURES.train),
        pictures(whole.validation, _PICTURES.validation),
        pictures(whole.test, _PICTURES.test),
    )


def mnist_cnn() -> Task:
    """Return 4,000 of MNIST's pictures, halved in height and width, with two convolutions."""
    if "PRIVTUNE_DATA" not in os.environ:
        return get_task("digits-cnn")
    task = replace(
        get_task("mnist-cnn"),
        name="mnist-cnn-halved",
        **_PICTURES.declared(),
        input_shape=(1, 14, 14),
        model=small_cnn,
    )
    return _once(task, cache(_halved))


def transfer() -> Task:
    """Return the digits 5 to 9, for a network that learnt 0 to 4."""
    task = digits_5_to_9()
    return _once(task, lambda: _digits(os.environ.get("PRIVTUNE_DATA")))


@cache
def _digits(data: str | None) -> TaskData:  # noqa: ARG001 (what it is known by)
    return digits_5_to_9().load()


def vectors() -> Path | None:
    """Return the file of the texts' vectors, beside MNIST's; None in a smoke run."""
    data = os.environ.get("PRIVTUNE_DATA")
    beside = Path(data or "mnist.npz").with_name("minilm.npz")
    if data and not beside.exists():
        raise TaskDataError(f"{beside} is missing: python -m studies.texts {beside}")
    return beside if data else None


@cache
def _texts(path: Path | None) -> TaskData:
    if path is None:  # a smoke run
        rng = np.random.default_rng(0)
        y = rng.integers(_CLASSES, size=600)
        x = rng.standard_normal((_CLASSES, _WIDTH))[y] + rng.standard_normal((600, _WIDTH))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        parts = np.split(np.arange(600), (_SMALL.train, _SMALL.train + _SMALL.validation))
        return TaskData(*(_tensors(x[rows], y[rows]) for rows in parts))
    with np.load(path) as file:
        x, y, x_test, y_test = (file[f"{a}_{b}"] for b in ("train", "test") for a in "xy")
    drawn = places(x, y, (_TEXTS.train, _TEXTS.validation))
    train, validation = (_tensors(x[drawn == n], y[drawn == n], True) for n in range(2))
    return TaskData(train, validation, _tensors(x_test, y_test))


def _tensors(x: object, y: object, sealed_size: bool = False) -> TensorData:
    inputs = torch.as_tensor(x, dtype=torch.float32)
    return TensorData(inputs, torch.as_tensor(y, dtype=torch.int64), sealed_size)


def reuters() -> Task:
    """Return Reuters' news of eight subjects, as vectors of a frozen MiniLM: a head is trained."""
    path = vectors()
    return Task(
        name="reuters-minilm",
        description="eight subjects of Reuters-21578, by a head on a frozen MiniLM",
        **(_TEXTS if path else _SMALL).declared(),
        input_shape=(_WIDTH,),
        classes=_CLASSES,
        load=lambda: _texts(path),
        model=lambda: linear(_WIDTH, _CLASSES),
        loss=cross_entropy,
        public_test=True,
        benchmark=True,
        partition="content",
    )
